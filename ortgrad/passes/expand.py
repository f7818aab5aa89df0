"""Replace gradient nodes by their bodies in standard ONNX operators."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from ortgrad.bodies import Ops, record_body
from ortgrad.call import EMPTY_PREFIX
from ortgrad.names import name_nodes, taken_names
from ortgrad.passes.nodes import call_of, gradient_nodes
from ortgrad.registry import Operator


def expand(model: ir.Model, choose: Callable[[ir.Node, Operator], bool]) -> None:
    """Replace every complete gradient node for which `choose` says so, in place."""
    taken = taken_names(model.graph)
    for node, operator in gradient_nodes(model):
        if not choose(node, operator):
            continue
        graph = node.graph
        assert graph is not None
        call = call_of(node, operator)
        op = Ops(model.opset_imports[""], prefix=f"{node.outputs[0].name}/")
        results = record_body(op, call, node.inputs)
        recorded = {value for made in op.nodes for value in made.outputs}
        pairs = [
            # A graph output keeps its name, and so does what was there before.
            (old, op.copy(new) if old.is_graph_output() or new not in recorded else new)
            for old, new in zip(node.outputs, results, strict=True)
            if new is not None
        ]
        # What a node's rule recorded beside it may have the same prefix.
        name_nodes(op.nodes, taken)
        for i, made in enumerate(op.nodes):
            made.name = f"{call.node}/{made.op_type}_{i}"
        ir.convenience.replace_nodes_and_values(
            graph, node, [node], op.nodes, [old for old, _ in pairs], [new for _, new in pairs]
        )
    for name, value in list(model.graph.initializers.items()):
        if name.startswith(EMPTY_PREFIX) and not value.uses():
            del model.graph.initializers[name]
