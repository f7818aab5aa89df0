"""Replaces If nodes with a constant condition by the branch that is taken.

Exporters write them for decisions that were made at export time. onnxruntime inlines the branch too, but may
lose its results in the body of a Loop.
"""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.graph.names import Names
from ortgrad.graph.traversal import all_graphs, all_nodes, constant_tensor, is_operator, release_captured


def fold_ifs(model: ir.Model) -> ir.Model:
    """Replace every If with a constant condition by the branch that is taken, also in subgraphs."""
    if not any(_branch_taken(node) for node in all_nodes(model.graph)):
        return model
    # This makes all names unique in the model and its subgraphs, so that nodes can move between graphs.
    names = Names.of(model)
    for graph in list(all_graphs(model.graph)):
        waiting = list(graph)
        while waiting:
            node = waiting.pop()
            branch = _branch_taken(node)
            if branch is not None:
                waiting += _put_in_place(node, branch, graph, names)
    return model


def _branch_taken(node: ir.Node) -> ir.Graph | None:
    if not is_operator(node, "If"):
        return None
    tensor = constant_tensor(node.inputs[0])
    if tensor is None or tensor.size != 1:
        return None
    taken = "then_branch" if tensor.numpy().item() else "else_branch"
    return node.attributes[taken].as_graph()


def _put_in_place(node: ir.Node, branch: ir.Graph, graph: ir.Graph, names: Names) -> list[ir.Node]:
    results, nodes = list(branch.outputs), list(branch)
    branch.outputs.clear()
    branch.remove(nodes)
    for name in list(branch.initializers):
        graph.register_initializer(branch.initializers.pop(name))
    made = {value for inner in nodes for value in inner.outputs}
    values = []
    for old, new in zip(node.outputs, results, strict=True):
        if new not in made or new in values:
            # It comes from outside the branch, or is another output as well.
            copy = ir.node("Identity", [new], name=names.fresh(f"{old.name}/Identity"))
            nodes.append(copy)
            new = copy.outputs[0]
        values.append(new)
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, node.outputs, values)
    release_captured(node)  # what the other branch reads
    return nodes
