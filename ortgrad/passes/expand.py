"""Replaces gradient nodes by their bodies in standard ONNX operators."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from ortgrad.graph.bodies import record_body
from ortgrad.graph.gradient_nodes import call_of, gradient_nodes, put_in_place
from ortgrad.graph.names import Names
from ortgrad.graph.outputs import remove_nodes
from ortgrad.graph.recorder import Recorder
from ortgrad.operators.declaration import Operator
from ortgrad.passes.complete import remove_empty_tensors


def expand(model: ir.Model, choose: Callable[[ir.Node, Operator], bool]) -> ir.Model:
    """Replace every complete gradient node for which `choose` returns True."""
    names = Names.of(model)
    gone: list[ir.Node] = []
    for node, operator in gradient_nodes(model):
        if not choose(node, operator):
            continue
        call = call_of(node, operator)
        op = Recorder(model.opset_imports[""], names, node.name or f"{node.outputs[0].name}")
        results = record_body(op, call, node.inputs, f"{call.node} {operator.name}")
        put_in_place(node, [], op, results, gone)
    remove_nodes(gone)
    remove_empty_tensors(model)
    return model
