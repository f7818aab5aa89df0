"""Depthwise convolutions and their gradient, for sessions that run compiled kernels.

There they replace the nodes of Conv whose weights are not constant, for which onnxruntime has no fast kernel,
and those of ConvGrad.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.compiled import vectors
from ortgrad.operators.declaration import INTERNAL_DOMAIN, Operand, Shape, operator
from ortgrad.ops._windows import spatial, windows
from ortgrad.ops.conv import _body, _depthwise, _numpy
from ortgrad.ops.conv.conv import ATTRIBUTES, DECLARATION


@operator("DepthwiseConvGrad", **DECLARATION)
def depthwise_conv_grad(*arrays: np.ndarray, **attributes: Any) -> tuple[np.ndarray | None, ...]:
    """ConvGrad for one channel per group"""
    return _numpy.conv_grad(*arrays, **attributes)


depthwise_conv_grad.onnx(_body.conv_grad_body)
depthwise_conv_grad.compiled(
    views=vectors("dy x w dx dw db"),
    scratch={"partial": 3},
    plan=_depthwise.plan_grad,
    first=_depthwise.differentiate_strip,
)(_depthwise.add_strips)


def _shapes(x: Operand, w: Operand, b: Operand | None, **attributes: Any) -> Sequence[Shape | None]:
    if x.shape is None or w.shape is None:
        return [None]
    sizes, kernel = x.shape[2:], w.shape[2:]
    known = [n for n in (*sizes, *kernel) if isinstance(n, int)]
    if len(known) < len(sizes) + len(kernel):
        return [(x.shape[0], w.shape[0], *[None] * len(sizes))]
    geometry = {name: attributes[name] for name in ("auto_pad", "dilations", "pads", "strides")}
    win = windows(known[: len(sizes)], known[len(sizes) :], **geometry)
    return [(x.shape[0], w.shape[0], *win.outputs)]


def _dims(*, group: int, kernel_shape: list[int] | None, **_: Any) -> dict[str, str]:
    if group < 1:
        raise ValueError(f"group is {group}; it must be positive")
    x, kernel = spatial(kernel_shape)[1:] if kernel_shape else ("S0 *S", "K0 *K:S")
    return {"X": f"N {group} {x}", "W": f"{group}*M 1 {kernel}", "B": f"{group}*M"}


@operator(
    "DepthwiseConv",
    domain=INTERNAL_DOMAIN,
    inputs=["X", "W", "B?"],
    outputs=["Y"],
    shapes=_shapes,
    dims=_dims,
    attributes=ATTRIBUTES,
)
def depthwise_conv(x: np.ndarray, w: np.ndarray, b: np.ndarray | None, **attributes: Any) -> np.ndarray:
    """Y = Conv(X, W, B) for one channel per group"""
    return _numpy.conv(x, w, b, **attributes)


@depthwise_conv.onnx
def depthwise_conv_body(
    op: Recorder, x: ir.Value, w: ir.Value, b: ir.Value | None, **attributes: Any
) -> ir.Value:
    return op.Conv(x, w, b, **attributes)


depthwise_conv.compiled(views=vectors("x w b y"), plan=_depthwise.plan)(_depthwise.convolve_strip)
