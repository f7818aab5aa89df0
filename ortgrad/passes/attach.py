"""Attach the body of every gradient node as a model-local function."""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.bodies import make_function
from ortgrad.passes.nodes import call_of, gradient_nodes
from ortgrad.registry import find_operator


def attach(model: ir.Model) -> None:
    """Give complete gradient nodes their functions; nodes with equal bodies share one."""
    nodes = list(gradient_nodes(model))
    own = [key for key, f in model.functions.items() if find_operator(f.name, f.domain) and f.overload]
    called = {node.op_identifier() for node, _ in nodes}
    for key in own:
        if key in called:
            del model.functions[key]
    for node, operator in nodes:
        function = make_function(call_of(node, operator), node.inputs, model.opset_imports[""])
        model.functions.setdefault(function.identifier(), function)
        node.overload = function.overload
    # Overloads came with IR version 10.
    if nodes:
        model.ir_version = max(model.ir_version, 10)
