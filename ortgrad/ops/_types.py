"""Element types in rules and bodies."""

from __future__ import annotations

from onnx import TensorProto

from ortgrad.graph.lazy import Recorder, ir


def is_half(value: ir.Value) -> bool:
    """Whether the elements are known to be float16 or bfloat16."""
    return value.dtype is not None and value.dtype.itemsize == 2


def is_double(value: ir.Value) -> bool:
    """Whether the elements are known to be float64."""
    return value.dtype is not None and value.dtype.itemsize == 8


def cast_like(op: Recorder, value: ir.Value, like: ir.Value) -> ir.Value:
    """The value in the element type of `like`; unchanged if they are known to be equal."""
    same = value.dtype is not None and value.dtype == like.dtype
    return value if same else op.CastLike(value, like)


def narrowed(op: Recorder, value: ir.Value, like: ir.Value) -> ir.Value:
    """The result of a computation with `widened` values in the element type of `like`."""
    return op.CastLike(value, like) if is_half(like) else value


def widened(op: Recorder, value: ir.Value) -> ir.Value:
    """Half precision as float, for sums and squares."""
    return op.Cast(value, to=TensorProto.FLOAT) if is_half(value) else value
