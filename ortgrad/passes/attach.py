"""Attach the body of every gradient node as a model-local function."""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.bodies import make_function
from ortgrad.passes.nodes import call_of, gradient_nodes
from ortgrad.registry import find_operator


def attach(model: ir.Model) -> None:
    """Give complete gradient nodes their functions; nodes with equal bodies share one."""
    detach(model)
    nodes = list(gradient_nodes(model))
    for node, operator in nodes:
        if operator.body is None:
            continue
        function = make_function(call_of(node, operator), node.inputs, model.opset_imports[""])
        model.functions.setdefault(function.identifier(), function)
        node.overload = function.overload
    # Overloads came with IR version 10.
    if nodes:
        model.ir_version = max(model.ir_version, 10)


def detach(model: ir.Model) -> None:
    """Take the bodies away that were attached at an earlier time."""
    ours = {node for node, _ in gradient_nodes(model)}
    others = {n.op_identifier() for n in model.graph.all_nodes() if n not in ours}
    for key, function in list(model.functions.items()):
        if is_body(function) and key not in others:
            del model.functions[key]
    for node in ours:
        node.overload = ""


def is_body(function: ir.Function) -> bool:
    """Whether the function looks like one that `attach` made."""
    return bool(find_operator(function.name, function.domain) and function.overload)
