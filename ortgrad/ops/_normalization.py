"""What the rules of normalizations share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ortgrad.graph.protos import DOUBLE, FLOAT

if TYPE_CHECKING:
    import onnx_ir as ir

    from ortgrad.graph.recorder import Recorder


def cast_like(op: Recorder, value: ir.Value, like: ir.Value) -> ir.Value:
    """The value in the element type of `like`."""
    same = value.dtype is not None and value.dtype == like.dtype
    return value if same else op.CastLike(value, like)


def count_along(op: Recorder, x: ir.Value, axes: Sequence[int]) -> ir.Value:
    """How many elements of X are along the axes, in its element type (half precision: float)."""
    wide = x.dtype is not None and x.dtype.itemsize == 8
    dims = None if x.shape is None else [x.shape[a] for a in axes]
    if dims is not None and all(isinstance(d, int) for d in dims):
        count = math.prod(d for d in dims if isinstance(d, int))
        return op.constant(np.array(count, np.float64 if wide else np.float32))
    lengths = op.Gather(op.Shape(x), list(axes))
    return op.Cast(op.ReduceProd(lengths, keepdims=0), to=DOUBLE if wide else FLOAT)


def widened(op: Recorder, value: ir.Value) -> ir.Value:
    """Half precision as float, for sums and squares."""
    half = value.dtype is not None and value.dtype.itemsize == 2
    return op.Cast(value, to=FLOAT) if half else value


def statistics(op: Recorder, x: ir.Value, axes: list[int], epsilon: float) -> tuple[ir.Value, ir.Value]:
    """The mean and the inverse standard deviation along axes, which stay with length 1."""
    mean = op.ReduceMean(x, axes)
    centred = op.Sub(x, mean)
    variance = op.ReduceMean(op.Mul(centred, centred), axes)
    return mean, op.Reciprocal(op.Sqrt(op.Add(variance, epsilon)))


def sum_of(op: Recorder, parts: Sequence[ir.Value]) -> ir.Value:
    return parts[0] if len(parts) == 1 else op.Sum(*parts)
