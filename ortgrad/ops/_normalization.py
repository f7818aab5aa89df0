"""Values that the rules of several normalizations compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from onnx import TensorProto

from ortgrad.graph.lazy import Recorder, ir
from ortgrad.ops._types import is_double

Axes: TypeAlias = "list[int] | ir.Value"


def axes_from(op: Recorder, x: ir.Value, axis: int) -> Axes:
    """The axes of X from `axis` on; computed at run time if the rank is not known."""
    if x.shape is not None:
        return list(range(axis % len(x.shape), len(x.shape)))
    return list(range(axis, 0)) if axis < 0 else op.Range(axis, op.Size(op.Shape(x)), 1)


def count_along(op: Recorder, x: ir.Value, axes: Axes) -> ir.Value:
    """The number of elements of X along the axes, in its element type (half precision: float)."""
    wide = is_double(x)
    dims = [x.shape[a] for a in axes] if x.shape is not None and isinstance(axes, list) else None
    if dims is not None and all(isinstance(d, int) for d in dims):
        count = math.prod(d for d in dims if isinstance(d, int))
        return op.constant(np.array(count, np.float64 if wide else np.float32))
    lengths = op.Gather(op.Shape(x), axes)
    return op.Cast(op.ReduceProd(lengths, keepdims=0), to=TensorProto.DOUBLE if wide else TensorProto.FLOAT)


def statistics(op: Recorder, x: ir.Value, axes: Axes, epsilon: float) -> tuple[ir.Value, ir.Value]:
    """The mean and the inverse standard deviation along axes, which keep length 1."""
    mean = op.ReduceMean(x, axes)
    centred = x - mean
    variance = op.ReduceMean(centred * centred, axes)
    return mean, inverse_root(op, variance + epsilon)


def inverse_root(op: Recorder, value: ir.Value) -> ir.Value:
    """1 / sqrt(value)"""
    return op.Reciprocal(op.Sqrt(value))


def sum_of(op: Recorder, parts: Sequence[ir.Value]) -> ir.Value:
    """The sum of one or more values."""
    return parts[0] if len(parts) == 1 else op.Sum(*parts)
