"""Completes gradient nodes: names all inputs and outputs and adds the attribute for the Python kernel.

Nodes that are complete already are not changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ortgrad.errors import NodeError
from ortgrad.graph.contract_checks import check_values
from ortgrad.graph.gradient_nodes import call_of, gradient_nodes
from ortgrad.graph.names import Names
from ortgrad.operators.call import EMPTY_PREFIX, Call, make_call
from ortgrad.operators.declaration import CALL_ATTRIBUTE, DOMAIN, Operator
from ortgrad.shapes.inference import infer_types, is_inferred


def complete(model: ir.Model, *, built: bool = False) -> ir.Model:
    """Complete all gradient nodes of the model.

    `built` says that incomplete nodes come from gradient rules: their shapes need no check at run time.
    """
    nodes = list(gradient_nodes(model))
    if not nodes:
        return model
    model.opset_imports.setdefault(DOMAIN, 1)
    names = Names.of(model)
    for node, operator in nodes:
        if CALL_ATTRIBUTE not in node.attributes:
            try:
                _describe(node, operator, names, built)
            except NodeError as error:
                raise NodeError(f"{node.op_type} node {node.name!r}: {error}") from error
    if not is_inferred(model):
        infer_types(model)
    for node, operator in nodes:
        call = call_of(node, operator)
        _check_operands(node, call)
        _check_types(node, call)
        _fill_inputs(model, node, operator)
        _check_shapes(node, call)
    return model


def complete_node(model: ir.Model, node: ir.Node, operator: Operator, names: Names) -> None:
    """Complete a node that a pass has made; the types of its inputs must be known."""
    _describe(node, operator, names, built=True)
    _fill_inputs(model, node, operator)


def _check_operands(node: ir.Node, call: Call) -> None:
    """Raise NodeError if the node has other inputs and outputs than its call says.

    The node may have been changed after it was completed, and a file may say anything.
    """
    for what, parameters, values, flags in (
        ("inputs", call.operator.inputs, node.inputs, call.present),
        ("outputs", call.operator.outputs, node.outputs, call.wanted),
    ):
        problem = ""
        if len(values) != len(parameters):
            problem = f"it has {len(values)} {what}; the operator has {len(parameters)}"
        for parameter, value, flag in zip(parameters, values, flags, strict=False):
            named = value if value is not None and value.name else None
            if flag and named is None:
                problem = f"{parameter.name}, one of its {what}, is left out"
            elif what == "outputs" and not flag and named is not None and _is_read(named):
                problem = f"{parameter.name} is used, and its kernel does not compute it"
        if problem:
            raise NodeError(
                f"{node.op_type} node {node.name!r}: {problem}. Its attribute {CALL_ATTRIBUTE!r} says "
                "otherwise; delete that, and run the model through ortgrad.prepare again"
            )


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def _check_types(node: ir.Node, call: Call) -> None:
    """Raise NodeError if an input has an element type that the operator does not take.

    onnxruntime checks this for kernels, but bodies may be able to compute with other types.
    """
    bound: dict[str, tuple[str, str]] = {}
    for parameter, value, real in zip(call.operator.inputs, node.inputs, call.present, strict=True):
        if not real or value is None or value.dtype is None:
            continue
        found, allowed = _type_name(value.dtype), call.operator.types.get(parameter.type, (parameter.type,))
        first, expected = bound.setdefault(parameter.type, (parameter.name, found))
        if found not in allowed:
            problem = f"{parameter.name} is {found}; it must be {' or '.join(allowed)}"
        elif found != expected:
            problem = f"{parameter.name} is {found} and {first} is {expected}; they must have the same type"
        else:
            continue
        raise NodeError(f"{node.op_type} node {node.name!r}: {problem}; add a Cast before the node")


def _type_name(dtype: ir.DataType) -> str:
    # NumPy has no names for some types, such as strings.
    return {"FLOAT": "float32", "DOUBLE": "float64"}.get(dtype.name, dtype.name.lower())


def _check_shapes(node: ir.Node, call: Call) -> None:
    """Raise NodeError if the known part of the inputs' shapes contradicts the contract."""
    present = [value if real else None for value, real in zip(node.inputs, call.present, strict=True)]
    try:
        check_values(call.contract, present)
    except ValueError as error:
        raise NodeError(f"{node.op_type} node {node.name!r}: {error}") from error


def _describe(node: ir.Node, operator: Operator, names: Names, built: bool) -> None:
    """Add the call to the node, including which inputs and outputs are absent, and name all outputs."""
    present = [value is not None for value in node.inputs]
    wanted = [
        bool(value.name and (value.uses() or value.is_graph_output() or not parameter.optional))
        for parameter, value in zip(operator.outputs, node.outputs, strict=False)
    ]
    wanted += [True] * (len(node.outputs) - len(wanted))
    for name in operator.forward_attributes:
        node.attributes.pop(name, None)
    attributes = {attribute.name: _plain(attribute) for attribute in node.attributes.values()}
    first = next((value.name for value in node.outputs if value.name), "")
    name = node.name or names.fresh(f"{operator.name}_{first}")
    call = make_call(operator, name, attributes, present, wanted, built=built)
    node.name = name
    node.resize_inputs(len(operator.inputs))
    node.resize_outputs(len(operator.outputs))
    for parameter, value, want in zip(operator.outputs, node.outputs, call.wanted, strict=True):
        value.name = value.name or names.fresh(f"{node.name}.unused.{parameter.name}")
        if not want:
            # The kernel returns an empty tensor. With another shape, onnxruntime would reuse memory it lacks.
            value.shape = None if value.type is None else ir.Shape([0])
    node.attributes.add(ir.AttrString(CALL_ATTRIBUTE, call.to_json()))


def _plain(attribute: ir.Attr) -> Any:
    """Return the value as plain Python data (Attribute.convert decodes bytes)."""
    if attribute.is_ref():
        raise NodeError(
            f"attribute {attribute.name!r} refers to a function's parameter; inline the function first"
        )
    return attribute.value if not isinstance(attribute.value, tuple) else list(attribute.value)


def _fill_inputs(model: ir.Model, node: ir.Node, operator: Operator) -> None:
    """Replace absent optional inputs by empty tensors of the right type."""
    call = call_of(node, operator)
    bound: dict[str, str] = {}
    for parameter, value, real in zip(operator.inputs, node.inputs, call.present, strict=True):
        if real and value is not None and value.dtype is not None:
            bound.setdefault(parameter.type, value.dtype.numpy().name)
    for i, (parameter, real) in enumerate(zip(operator.inputs, call.present, strict=True)):
        if real:
            continue
        default = operator.types.get(parameter.type, (parameter.type,))[0]
        node.replace_input_with(i, _empty(model, bound.get(parameter.type, default)))


def _empty(model: ir.Model, type_: str) -> ir.Value:
    name = EMPTY_PREFIX + type_
    if name not in model.graph.initializers:
        dtype = ir.DataType[{"float32": "FLOAT", "float64": "DOUBLE"}.get(type_, type_.upper())]
        tensor = ir.tensor(np.zeros(0, dtype.numpy()), dtype=dtype, name=name)
        model.graph.register_initializer(
            ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape([0]), const_value=tensor)
        )
    return model.graph.initializers[name]


def remove_empty_tensors(model: ir.Model) -> None:
    """Remove the tensors that stand for absent inputs, if no node reads them any more."""
    for name, value in list(model.graph.initializers.items()):
        if name.startswith(EMPTY_PREFIX) and not value.uses():
            del model.graph.initializers[name]
