"""Replace gradient nodes by their bodies in standard ONNX operators."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from ortgrad.bodies import Ops, record_body
from ortgrad.passes.nodes import call_of, gradient_nodes
from ortgrad.registry import Operator


def expand(model: ir.Model, choose: Callable[[ir.Node, Operator], bool]) -> None:
    """Replace every complete gradient node for which `choose` says so, in place."""
    for node, operator in gradient_nodes(model):
        if not choose(node, operator):
            continue
        graph = node.graph
        assert graph is not None
        call = call_of(node, operator)
        op = Ops(model.opset_imports[""], prefix=f"{node.outputs[0].name}/")
        results = record_body(op, call, node.inputs)
        pairs = [
            # A graph output keeps its name, so it needs a node of its own.
            (old, op.copy(new) if old.is_graph_output() or new.producer() is None else new)
            for old, new in zip(node.outputs, results, strict=True)
            if new is not None
        ]
        for i, made in enumerate(op.nodes):
            made.name = f"{call.node}/{made.op_type}_{i}"
        ir.convenience.replace_nodes_and_values(
            graph, node, [node], op.nodes, [old for old, _ in pairs], [new for _, new in pairs]
        )
