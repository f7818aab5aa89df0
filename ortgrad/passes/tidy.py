"""Topological sorting, and removal of unused nodes and opset imports."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from ortgrad.errors import ModelError
from ortgrad.graph.traversal import all_nodes, release_captured, subgraphs


def sort(model: ir.Model) -> ir.Model:
    """Sort the nodes in topological order; raises ModelError if they form a cycle."""
    try:
        model.graph.sort()
    except ValueError as error:
        raise ModelError("the nodes of the model form a cycle") from error
    return model


def remove_unused(model: ir.Model) -> ir.Model:
    """Remove nodes and opset imports that no output depends on."""
    waiting = True
    while waiting:
        before = [node for node in all_nodes(model.graph) if subgraphs(node)]
        _remove_at_once(model.graph)
        RemoveUnusedNodesPass()(model)
        removed = [node for node in before if node.graph is None]
        for node in removed:
            release_captured(node)
        # What only their subgraphs read is not needed any more either.
        waiting = bool(removed)
    for node in all_nodes(model.graph):
        # The pass removes trailing absent inputs, but Loop must have two inputs.
        if node.op_type == "Loop" and len(node.inputs) < 2:
            node.resize_inputs(2)
    RemoveUnusedOpsetsPass()(model)
    return model


def _remove_at_once(graph: ir.Graph) -> None:
    """Remove unused nodes together: onnx-ir looks at all outputs of the graph for each that it removes."""
    unused: set[ir.Node] = set()
    for node in reversed(graph):
        if not any(v.is_graph_output() or any(u.node not in unused for u in v.uses()) for v in node.outputs):
            unused.add(node)
    graph.remove(unused, safe=True)
