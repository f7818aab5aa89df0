"""The onnx schema of an operator, so that onnx.checker and shape inference understand it."""

from __future__ import annotations

import atexit
import functools
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ortgrad.call import Call, parse_call
from ortgrad.errors import NodeError, RegistrationError
from ortgrad.registry import BODY_ATTRIBUTE, CALL_ATTRIBUTE, Attribute, Operand, Operator, Shape, Slot

_ELEMENT_TYPES = {
    "float32": "tensor(float)",
    "float64": "tensor(double)",
    "float16": "tensor(float16)",
    "bfloat16": "tensor(bfloat16)",
    "int32": "tensor(int32)",
    "int64": "tensor(int64)",
    "bool": "tensor(bool)",
}
_ATTRIBUTE_TYPES = {
    (int, False): onnx.defs.OpSchema.AttrType.INT,
    (float, False): onnx.defs.OpSchema.AttrType.FLOAT,
    (str, False): onnx.defs.OpSchema.AttrType.STRING,
    (int, True): onnx.defs.OpSchema.AttrType.INTS,
    (float, True): onnx.defs.OpSchema.AttrType.FLOATS,
    (str, True): onnx.defs.OpSchema.AttrType.STRINGS,
}


def register_schema(operator: Operator) -> None:
    """Make the operator known to `onnx.defs`."""
    if onnx.defs.has(operator.name, operator.domain):
        raise RegistrationError(
            f"onnx knows a schema {operator.domain}::{operator.name} already, from elsewhere"
        )
    schema = onnx.defs.OpSchema(
        operator.name,
        operator.domain,
        1,
        doc=operator.doc,
        inputs=[_parameter(slot) for slot in operator.inputs],
        outputs=[_parameter(slot) for slot in operator.outputs],
        type_constraints=[
            (name, [_ELEMENT_TYPES[t] for t in types], "") for name, types in operator.types.items()
        ],
        attributes=[
            *(_attribute(attribute) for attribute in operator.attributes.values()),
            onnx.defs.OpSchema.Attribute(
                CALL_ATTRIBUTE,
                onnx.defs.OpSchema.AttrType.STRING,
                "what the Python kernel needs, as JSON",
                required=False,
            ),
            onnx.defs.OpSchema.Attribute(
                BODY_ATTRIBUTE,
                onnx.defs.OpSchema.AttrType.INTS,
                "as many zeros as tell the node's function from others of the same name",
                required=False,
            ),
        ],
    )
    schema.set_type_and_shape_inference_function(functools.partial(_infer, operator))
    onnx.defs.register_schema(schema)
    # Older releases of onnx let go of the Python function when Python is gone already, and wait for ever.
    atexit.register(onnx.defs.deregister_schema, operator.name, 1, operator.domain)


def _parameter(slot: Slot) -> onnx.defs.OpSchema.FormalParameter:
    options = onnx.defs.OpSchema.FormalParameterOption
    return onnx.defs.OpSchema.FormalParameter(
        slot.name,
        _ELEMENT_TYPES.get(slot.type, slot.type),
        param_option=options.Optional if slot.optional else options.Single,
    )


def _attribute(attribute: Attribute) -> onnx.defs.OpSchema.Attribute:
    if attribute.default is not None:
        return onnx.defs.OpSchema.Attribute(
            attribute.name, helper.make_attribute(attribute.name, attribute.default)
        )
    return onnx.defs.OpSchema.Attribute(
        attribute.name, _ATTRIBUTE_TYPES[attribute.type, attribute.is_list], required=False
    )


def _infer(operator: Operator, context: onnx.shape_inference.InferenceContext) -> None:
    try:
        call = _call_of(operator, context)
    except NodeError as error:
        raise onnx.shape_inference.InferenceError(f"{operator.name}: {error}") from error
    types: dict[str, int] = {}
    operands: list[Operand | None] = []
    for i, slot in enumerate(operator.inputs):
        if i >= context.get_num_inputs() or not context.has_input(i):
            operands.append(None)
            continue
        given = context.get_input_type(i)
        if given is not None and given.tensor_type.elem_type:
            types.setdefault(slot.type, given.tensor_type.elem_type)
        operands.append(Operand(_shape_of(given), _value_of(context, i)) if call.present[i] else None)
    shapes = operator.shapes(*operands, **call.attributes)
    for i in range(context.get_num_outputs()):
        slot = operator.outputs[i]
        element = types.get(slot.type)
        if element is None and slot.type in _ELEMENT_TYPES:
            element = helper.np_dtype_to_tensor_dtype(np.dtype(slot.type))
        if element is not None and context.has_output(i):
            shape = shapes[i] if call.wanted[i] else (0,)
            context.set_output_type(i, helper.make_tensor_type_proto(element, shape))


def _call_of(operator: Operator, context: onnx.shape_inference.InferenceContext) -> Call:
    text = context.get_attribute(CALL_ATTRIBUTE)
    if text is not None and text.s:
        return parse_call(operator, text.s.decode())
    given: dict[str, Any] = {}
    for name in operator.attributes:
        attribute = context.get_attribute(name)
        if attribute is not None:
            given[name] = helper.get_attribute_value(attribute)
    present = (True,) * len(operator.inputs)
    return Call(operator, "", operator.complete(given), present, (True,) * len(operator.outputs))


def _shape_of(given: onnx.TypeProto | None) -> Shape | None:
    if given is None or not given.tensor_type.HasField("shape"):
        return None
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
        for dim in given.tensor_type.shape.dim
    )


def _value_of(context: onnx.shape_inference.InferenceContext, i: int) -> np.ndarray | None:
    data = context.get_input_data(i)
    if data is None or data.data_type != onnx.TensorProto.INT64:
        return None
    return numpy_helper.to_array(data)
