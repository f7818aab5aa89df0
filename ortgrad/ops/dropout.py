"""Gradients of Dropout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ortgrad.autodiff.rules import ForwardNode, gradient
from ortgrad.operators.declaration import FLOATS, Empty, operator
from ortgrad.ops._kernels import keep_where, piecewise

if TYPE_CHECKING:
    import onnx_ir as ir

    from ortgrad.graph.recorder import Recorder

_CONTRACT: dict[str, Any] = {
    "inputs": ["dY", "mask?: bool", "ratio?: T1", "training_mode?: bool"],
    "outputs": ["dX"],
    "shapes": "dY",
    "dims": {"dY": "*S", "mask": "*S", "ratio": "1^any", "training_mode": "1^any"},
    "forward_attributes": ["seed"],
    "types": {"T": FLOATS, "T1": FLOATS},
}
_DEFAULT_RATIO = 0.5


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
def trainable_dropout_grad(
    dy: np.ndarray,
    mask: np.ndarray | None,
    ratio: np.ndarray | None,
    training_mode: np.ndarray | None,
    *,
    empty: Empty,
) -> np.ndarray:
    """DropoutGrad under the name of the former TrainableDropout"""
    result: np.ndarray = dropout_grad.kernel(dy, mask, ratio, training_mode, empty=empty)
    return result


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
