"""The onnx schemas of the operators, which onnx's shape inference needs.

onnx has one table of schemas per process, from which other packages generate classes. The schemas of ortgrad
are therefore registered only while ortgrad calls a function of onnx.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ortgrad.errors import NodeError, RegistrationError
from ortgrad.operators.call import Call, parse_call
from ortgrad.operators.declaration import (
    BODY_ATTRIBUTE,
    CALL_ATTRIBUTE,
    DOMAIN,
    Attribute,
    Operand,
    Operator,
    Parameter,
    Shape,
    all_operators,
)
from ortgrad.threads import call_elsewhere, forks_wait, make_lock

Result = TypeVar("Result")

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


_lock = make_lock()
_users = 0
_registered: list[Operator] = []
_forward: list[onnx.defs.OpSchema] = []
_registered_forward: list[onnx.defs.OpSchema] = []


def check_schema(operator: Operator) -> None:
    """Raise an error if onnx already has a schema of that name, or if the declaration makes no valid one."""
    with _lock:
        known = operator not in _registered and onnx.defs.has(operator.name, operator.domain)
    if known:
        raise RegistrationError(
            f"onnx already has a schema {operator.domain}::{operator.name} from elsewhere"
        )
    make_schema(operator)


def add_forward_inference(
    name: str, infer: Callable[[onnx.shape_inference.InferenceContext], None], domain: str = DOMAIN
) -> None:
    """Let onnx infer the output of a forward operator that onnxruntime has and onnx does not know."""
    # Identity accepts all types.
    types = onnx.defs.get_schema("Identity").type_constraints[0].allowed_type_strs
    several = onnx.defs.OpSchema.FormalParameterOption.Variadic
    schema = onnx.defs.OpSchema(
        name,
        domain,
        1,
        inputs=[
            onnx.defs.OpSchema.FormalParameter("inputs", "T", param_option=several, is_homogeneous=False)
        ],
        outputs=[onnx.defs.OpSchema.FormalParameter("output", "T")],
        type_constraints=[("T", types, "")],
    )
    schema.set_type_and_shape_inference_function(infer)
    _forward.append(schema)


@contextmanager
def schemas_known() -> Iterator[None]:
    """Register the schemas of all declared operators in `onnx.defs`. Reentrant and shared between threads."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            for operator in all_operators(internal=True):
                # A schema that another package has registered in the meantime is left in place.
                if not onnx.defs.has(operator.name, operator.domain):
                    onnx.defs.register_schema(make_schema(operator))
                    _registered.append(operator)
            for schema in _forward:
                if not onnx.defs.has(schema.name, schema.domain):
                    onnx.defs.register_schema(schema)
                    _registered_forward.append(schema)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                while _registered:
                    operator = _registered.pop()
                    onnx.defs.deregister_schema(operator.name, 1, operator.domain)
                while _registered_forward:
                    schema = _registered_forward.pop()
                    onnx.defs.deregister_schema(schema.name, 1, schema.domain)


def with_schemas(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call a function of onnx while the schemas of ortgrad are registered, if its arguments can need them.

    onnx calls `_infer` back. Its Python binding would turn a KeyboardInterrupt raised there into a TypeError,
    so the function is called on another thread.
    """

    def call() -> Result:
        # Registration takes half a millisecond, as long as onnx takes for a small model.
        with forks_wait(), nullcontext() if _imports_no_domain_of_ours(*args) else schemas_known():
            return function(*args, **kwargs)

    return call_elsewhere(call)


def _imports_no_domain_of_ours(first: Any, *_: Any) -> bool:
    """Return whether the first argument is a model in which no node can have a schema of ortgrad."""
    if not isinstance(first, onnx.ModelProto):
        return False
    domains = {operator.domain for operator in all_operators(internal=True)}
    domains.update(schema.domain for schema in _forward)
    parts = (first, *first.functions)
    return not any(opset.domain in domains for part in parts for opset in part.opset_import)


@functools.cache
def make_schema(operator: Operator) -> onnx.defs.OpSchema:
    """Return the schema that follows from the operator's declaration."""
    schema = onnx.defs.OpSchema(
        operator.name,
        operator.domain,
        1,
        doc=operator.doc,
        inputs=[_parameter(parameter) for parameter in operator.inputs],
        outputs=[_parameter(parameter) for parameter in operator.outputs],
        type_constraints=[
            (name, [_ELEMENT_TYPES[t] for t in types], "") for name, types in operator.types.items()
        ],
        attributes=[
            *(_attribute(attribute) for attribute in operator.attributes.values()),
            onnx.defs.OpSchema.Attribute(
                CALL_ATTRIBUTE,
                onnx.defs.OpSchema.AttrType.STRING,
                "data for the Python kernel, as JSON",
                required=False,
            ),
            onnx.defs.OpSchema.Attribute(
                BODY_ATTRIBUTE,
                onnx.defs.OpSchema.AttrType.INTS,
                "zeros; their number selects the node's function among the functions of the same name",
                required=False,
            ),
        ],
    )
    schema.set_type_and_shape_inference_function(functools.partial(_infer, operator))
    return schema


def _parameter(parameter: Parameter) -> onnx.defs.OpSchema.FormalParameter:
    options = onnx.defs.OpSchema.FormalParameterOption
    return onnx.defs.OpSchema.FormalParameter(
        parameter.name,
        _ELEMENT_TYPES.get(parameter.type, parameter.type),
        param_option=options.Optional if parameter.optional else options.Single,
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
    for i, parameter in enumerate(operator.inputs):
        if i >= context.get_num_inputs() or not context.has_input(i):
            operands.append(None)
            continue
        given = context.get_input_type(i)
        if given is not None and given.tensor_type.elem_type:
            types.setdefault(parameter.type, given.tensor_type.elem_type)
        operands.append(Operand(_shape_of(given), _value_of(context, i)) if call.present[i] else None)
    shapes = operator.shapes(*operands, **call.attributes)
    for i in range(context.get_num_outputs()):
        parameter = operator.outputs[i]
        element = types.get(parameter.type)
        if element is None and parameter.type in _ELEMENT_TYPES:
            element = helper.np_dtype_to_tensor_dtype(np.dtype(parameter.type))
        if element is not None and context.has_output(i):
            shape = shapes[i] if call.wanted[i] else (0,)
            context.set_output_type(i, helper.make_tensor_type_proto(element, shape))


def _call_of(operator: Operator, context: onnx.shape_inference.InferenceContext) -> Call:
    text = context.get_attribute(CALL_ATTRIBUTE)
    if text is not None and text.s:
        return parse_call(operator, text.s)
    given: dict[str, Any] = {}
    for name in operator.attributes:
        attribute = context.get_attribute(name)
        if attribute is not None:
            given[name] = helper.get_attribute_value(attribute)
    present = (True,) * len(operator.inputs)
    return Call(operator, "", operator.with_defaults(given), present, (True,) * len(operator.outputs))


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
