"""Operators of ONNX on quantized tensors: the integers that stand for numbers, and the node on floats."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import onnx
import onnx_ir as ir

from ortgrad.autodiff.rules import find_rule
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import is_integer


def quantized_outputs(node: ir.Node, active: Collection[ir.Value]) -> list[ir.Value]:
    """Return the integer outputs that are computed from active integers, taken as numbers.

    Operands that are indices or shapes do not count. An operator without a rule may compute anything.
    """
    given = [i for i, v in enumerate(node.inputs) if v is not None and v in active and is_integer(v)]
    if not given:
        return []
    if node.op_type in ("Cast", "CastLike") or find_rule(node.op_type, node.domain) is None:
        return [value for value in node.outputs if is_integer(value)]
    inputs, outputs = _number_types(node)
    types = {inputs[i] for i in given} - {None}
    return [v for v, type_ in zip(node.outputs, outputs, strict=True) if type_ in types and is_integer(v)]


def float_copy(op: Recorder, node: ir.Node) -> tuple[list[ir.Value | None], Sequence[ir.Value]]:
    """Record the node with floats in the place of integers that are numbers; returns inputs and outputs."""
    inputs, outputs = _number_types(node)
    operands = list(node.inputs)
    for i, (value, type_) in enumerate(zip(node.inputs, inputs, strict=True)):
        if value is not None and type_ is not None and is_integer(value):
            operands[i] = cast = op.Cast(value, to=ir.DataType.FLOAT)
            cast.shape = value.shape
    results = op.add(node.op_type, operands, node.attributes, outputs=len(node.outputs), domain=node.domain)
    for value, result, type_ in zip(node.outputs, results, outputs, strict=True):
        number = type_ is not None and is_integer(value)
        result.type = ir.TensorType(ir.DataType.FLOAT) if number else value.type
        result.shape = value.shape
    return operands, results


def _number_types(node: ir.Node) -> tuple[list[str | None], list[str | None]]:
    """Return the type parameters of a node's inputs and outputs; None for those that cannot be float."""
    inputs, outputs = _schema_types(node.op_type, node.domain)
    return _repeated(inputs, len(node.inputs)), _repeated(outputs, len(node.outputs))


def _repeated(types: Sequence[str | None], count: int) -> list[str | None]:
    """Return the types of `count` parameters, the last of which may be variadic."""
    return [*types, *[types[-1] if types else None] * (count - len(types))][:count]


@functools.cache
def _schema_types(op_type: str, domain: str) -> tuple[Sequence[str | None], Sequence[str | None]]:
    domain = "" if domain == "ai.onnx" else domain
    if not onnx.defs.has(op_type, domain):
        return (), ()
    schema = onnx.defs.get_schema(op_type, domain=domain)
    numbers = {
        constraint.type_param_str
        for constraint in schema.type_constraints
        if "tensor(float)" in constraint.allowed_type_strs
    }
    inputs, outputs = (
        [p.type_str if p.type_str in numbers else None for p in parameters]
        for parameters in (schema.inputs, schema.outputs)
    )
    return inputs, outputs
