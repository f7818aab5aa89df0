"""Gradients of Dropout."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

from ortgrad.autodiff.rules import ForwardNode, gradient
from ortgrad.compiled.functions import double
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.compiled import Plan
from ortgrad.operators.declaration import FLOATS, Empty, operator
from ortgrad.ops._kernels import keep_where, piecewise

_CONTRACT: dict[str, Any] = {
    "inputs": ["dY", "mask?: bool", "ratio?: T1", "training_mode?: bool"],
    "outputs": ["dX"],
    "shapes": "dY",
    "dims": {"dY": "*S", "mask": "*S", "ratio": "1^any", "training_mode": "1^any"},
    "forward_attributes": ["seed"],
    "types": {"T": FLOATS, "T1": FLOATS},
}
_DEFAULT_RATIO = 0.5
_Shape: TypeAlias = "tuple[int, ...] | None"


@operator("DropoutGrad", **_CONTRACT)
def dropout_grad(
    dy: np.ndarray,
    mask: np.ndarray | None,
    ratio: np.ndarray | None,
    training_mode: np.ndarray | None,
    *,
    empty: Empty,
) -> np.ndarray:
    """dX = dY / (1 - ratio) where mask, else 0; dY without a mask or outside of training mode"""
    rate = _DEFAULT_RATIO if ratio is None else float(ratio.reshape(()))
    if not 0 <= rate < 1:
        raise ValueError(f"ratio must be in [0, 1), it is {rate}")
    training = training_mode is None or bool(training_mode.reshape(()))
    if mask is None or not training:
        return dy
    scale = 1 / (1 - rate)

    def grad(dx: np.ndarray, dy: np.ndarray, mask: np.ndarray) -> None:
        keep_where(mask, dy, out=dx)
        np.multiply(dx, scale, out=dx)

    return piecewise(grad, empty(0, dy.shape), dy, mask)


@operator("TrainableDropoutGrad", **_CONTRACT)
def trainable_dropout_grad(*arrays: np.ndarray | None, empty: Empty) -> np.ndarray:
    """DropoutGrad under the name of the former TrainableDropout"""
    result: np.ndarray = dropout_grad.kernel(*arrays, empty=empty)
    return result


_CHUNK = 8192


def _plan(dy: _Shape, mask: _Shape, ratio: _Shape, training_mode: _Shape, dx: _Shape) -> Plan:
    assert dy is not None
    size = math.prod(dy)
    views = [(0 if shape is None else math.prod(shape),) for shape in (dy, mask, ratio, training_mode, dx)]
    return Plan(-(-size // _CHUNK), views, {"has_mask": mask is not None})


@dropout_grad.compiled(views=[1] * 5, plan=_plan)
@trainable_dropout_grad.compiled(views=[1] * 5, plan=_plan)
def dropout_grad_chunk(
    task: int,
    dy: np.ndarray,
    mask: np.ndarray,
    ratio: np.ndarray,
    training_mode: np.ndarray,
    dx: np.ndarray,
    has_mask: int,
) -> bool:
    rate = ratio[0] if len(ratio) > 0 else ratio.dtype.type(_DEFAULT_RATIO)
    if not (rate >= 0.0 and rate < 1.0):
        return True
    start = task * _CHUNK
    count = min(_CHUNK, len(dy) - start)
    into, source, kept = dx[start : start + count], dy[start : start + count], mask[start : start + count]
    if not has_mask or (len(training_mode) > 0 and not training_mode[0]):
        for k in range(count):
            into[k] = source[k]
        return False
    scale = dy.dtype.type(double(1.0) / (double(1.0) - double(rate)))
    for k in range(count):
        into[k] = source[k] * scale if kept[k] else 0.0
    return False


@dropout_grad.onnx
@trainable_dropout_grad.onnx
def dropout_grad_body(
    op: Recorder, dy: ir.Value, mask: ir.Value | None, ratio: ir.Value | None, training_mode: ir.Value | None
) -> ir.Value:
    if mask is None:
        return op.Identity(dy)
    if ratio is None:
        scaled = dy * (1 / (1 - _DEFAULT_RATIO))
    else:
        # The ratio may be a vector of one element, which must not change the rank of a scalar dY.
        ratio = op.Reshape(ratio, np.zeros(0, np.int64))
        if dy.dtype is not None and ratio.dtype is not None and dy.dtype.itemsize > ratio.dtype.itemsize:
            ratio = op.CastLike(ratio, dy)
        valid = op.And(op.GreaterOrEqual(ratio, 0.0), op.Less(ratio, 1.0))
        if op.checked:
            dy = op.require(dy, [op.Unsqueeze(op.Not(valid), [0])], "a ratio in [0, 1)")
        scale = op.Where(valid, op.Reciprocal(1.0 - ratio), float("nan"))
        scaled = dy * op.CastLike(scale, dy)
    dropped = op.Where(mask, scaled, 0.0)
    if training_mode is None:
        return dropped
    return op.Where(op.Reshape(training_mode, np.zeros(0, np.int64)), dropped, dy)


@gradient("Dropout")
def dropout_gradient(node: ForwardNode) -> ir.Value:
    dy, training = node.grad(0), node.optional(2)
    known = node.constant(2)
    if training is None or (known is not None and not known.any()):
        return dy
    return node.op.DropoutGrad(dy, node.add_output(1), node.optional(1), training if known is None else None)
