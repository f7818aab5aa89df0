"""Attaches the bodies of gradient nodes to the model as model-local functions."""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.graph.bodies import is_body, make_function
from ortgrad.graph.gradient_nodes import call_of, gradient_nodes
from ortgrad.graph.traversal import all_nodes
from ortgrad.operators.call import Call
from ortgrad.operators.declaration import BODY_ATTRIBUTE, Operator

_REFUSAL = "this onnxruntime confuses function overloads: take 1.27 or newer, or prepare with kernels='onnx'"


def attach(model: ir.Model) -> ir.Model:
    """Add a function to the model for every complete gradient node; nodes with equal bodies share one."""
    model = detach(model)
    nodes = list(gradient_nodes(model))
    bodies: dict[Operator, dict[str, ir.Function]] = {}
    made: dict[object, ir.Function] = {}
    for node, operator in nodes:
        if operator.body is None:
            continue
        call = call_of(node, operator)
        key = _recorded_from(call, node)
        if key not in made:
            made[key] = make_function(call, node.inputs, model.opset_imports[""])
        function = made[key]
        model.functions.setdefault(function.identifier(), function)
        bodies.setdefault(operator, {}).setdefault(function.overload, function)
        node.overload = function.overload
    for node, operator in nodes:
        if len(bodies.get(operator, ())) > 1:
            number = list(bodies[operator]).index(node.overload)
            node.attributes.add(ir.AttrInt64s(BODY_ATTRIBUTE, [0] * (number + 2)))
    for functions in bodies.values():
        if len(functions) > 1:
            for number, function in enumerate(functions.values()):
                _refuse_other_nodes(function, number + 2)
    # IR version 10 introduced overloads.
    if nodes:
        model.ir_version = max(model.ir_version, 10)
    return model


def _recorded_from(call: Call, node: ir.Node) -> object:
    """Return all that the body of a node is recorded from; recording it takes long."""
    inputs = tuple(
        (repr(value.type), repr(value.shape)) if value is not None else None for value in node.inputs
    )
    return call.operator, repr(call.attributes), call.present, call.wanted, call.built, inputs


def _refuse_other_nodes(function: ir.Function, count: int) -> None:
    """Make the function valid only for nodes whose BODY_ATTRIBUTE has `count` elements.

    onnxruntime before 1.27 ignores overloads: it would compute the gradients of one node with the body of
    another. With this check the shapes do not match, and it refuses to load the model.
    """
    given = ir.Node("", "Constant", [], [ir.RefAttr("value_ints", BODY_ATTRIBUTE, ir.AttributeType.INTS)])
    expected = ir.Node("", "Constant", [], [ir.AttrInt64s("value_ints", [0] * count)])
    both = ir.Node("", "Add", [given.outputs[0], expected.outputs[0]], name=_REFUSAL)
    for node, name in ((given, "given"), (expected, "expected"), (both, "same")):
        node.outputs[0].name = f"{BODY_ATTRIBUTE}/{name}"
        node.name = node.name or f"{BODY_ATTRIBUTE}/{name}"
    function.insert_before(function[0], [given, expected, both])
    function.attributes.add(ir.Attr(BODY_ATTRIBUTE, ir.AttributeType.INTS, None))


def detach(model: ir.Model) -> ir.Model:
    """Remove the bodies that `attach` added earlier."""
    ours = {node for node, _ in gradient_nodes(model)}
    others = {n.op_identifier() for n in all_nodes(model.graph) if n not in ours}
    for key, function in list(model.functions.items()):
        if is_body(function) and key not in others:
            del model.functions[key]
    for node in ours:
        node.overload = ""
        node.attributes.pop(BODY_ATTRIBUTE, None)
    return model
