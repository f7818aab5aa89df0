"""Unbroadcasting: sums the gradient of a broadcast operand to the operand's own shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ortgrad.errors import NodeError

if TYPE_CHECKING:
    import onnx_ir as ir

    from ortgrad.graph.recorder import Recorder


def unbroadcast(op: Recorder, grad: ir.Value, value: ir.Value, output: ir.Value) -> ir.Value:
    """Sum a gradient of the shape of `output` over the axes along which `value` was broadcast."""
    source, target = value.shape, output.shape
    if source is None or target is None:
        return _unbroadcast_at_run_time(op, grad, value)
    lead = len(target) - len(source)
    if lead < 0:
        raise NodeError(
            f"its output {output.name!r} of shape {target} has fewer axes than its input {value.name!r} of "
            f"shape {source}; the shapes that the model declares contradict each other"
        )
    axes = list(range(lead))
    single: list[int] = []
    for i, dim in enumerate(source):
        other = target[lead + i]
        if isinstance(dim, int) and dim == 1:
            # If the output's size is unknown it may be 1 too; the sum is then over one element.
            (single if isinstance(other, int) and other == 1 else axes).append(lead + i)
        elif not isinstance(dim, int) and (dim.value is None or dim != other):
            # The size may be 1 at run time.
            return _unbroadcast_at_run_time(op, grad, value)
    if not axes:
        return grad
    if axes == list(range(lead)):
        return op.ReduceSum(grad, axes, keepdims=0)
    # onnxruntime sums along consecutive axes at once, and along the last ones fastest.
    summed = op.ReduceSum(grad, sorted([*axes, *single]), keepdims=1)
    return op.Squeeze(summed, list(range(lead))) if lead else summed


def _unbroadcast_at_run_time(op: Recorder, grad: ir.Value, value: ir.Value) -> ir.Value:
    shape, full = op.shape_of(value), op.Shape(grad)
    # The value's shape, extended with leading ones to the rank of the gradient.
    missing = op.Sub(op.Shape(full), op.Shape(shape))
    aligned = op.Concat(op.Expand(np.array([1], np.int64), missing), shape, axis=0)
    axes = op.Squeeze(op.NonZero(op.And(op.Equal(aligned, [1]), op.Not(op.Equal(full, [1])))), [0])
    return op.Reshape(op.ReduceSum(grad, axes, keepdims=1, noop_with_empty_axes=1), shape, allowzero=1)
