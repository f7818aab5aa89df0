"""Gradients of element-wise activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ortgrad.kernels import elementwise, require_same_shape
from ortgrad.registry import operator

if TYPE_CHECKING:
    import onnx_ir as ir

    from ortgrad.bodies import Ops


@operator("ReluGrad", inputs=["dY", "X"], outputs=["dX"], shapes="X")
def relu_grad(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """dX = dY where X > 0, else 0"""
    require_same_shape(dY=dy, X=x)
    elementwise(_relu_grad, dy, x)
    return dy


def _relu_grad(dy: np.ndarray, x: np.ndarray) -> None:
    # Not a product: 0 * inf would make a NaN where the gradient is cut off.
    np.copyto(dy, 0, where=~(x > 0))


@relu_grad.onnx
def _(op: Ops, dy: ir.Value, x: ir.Value) -> ir.Value:
    return op.Where(op.Greater(x, 0.0), dy, 0.0)
