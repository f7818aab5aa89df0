"""Convolutions with kernels of 3x3 and their gradient, by Winograd's method, for compiled sessions.

There they replace nodes of Conv whose weights are not constant, and those of ConvGrad.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ortgrad.compiled.functions import TILE
from ortgrad.operators.compiled import vectors
from ortgrad.operators.declaration import operator
from ortgrad.ops.conv import _body, _numpy, _winograd_forward, _winograd_grad, conv, costs, forward
from ortgrad.ops.conv._dense import Known


def is_fastest(x: Known, w: Known, attributes: Mapping[str, Any]) -> bool:
    """Return whether these kernels support a convolution and are expected to be faster than the others."""
    if w is None or len(w) != 4 or w[2:] != (3, 3) or w[0] is None or w[1] is None:
        return False
    steps = [*(attributes.get("strides") or ()), *(attributes.get("dilations") or ())]
    if attributes.get("group", 1) != 1 or any(step != 1 for step in steps) or min(w[0], w[1]) < TILE:
        return False
    explicit = attributes.get("auto_pad", "NOTSET") == "NOTSET"
    if explicit and not all(0 <= pad <= 2 for pad in attributes.get("pads") or ()):
        return False
    # Each tile saves products and costs transforms; the weights are transformed once. Unknown sizes of X are
    # assumed to be large.
    cost = costs.current().winograd
    gain = 1 - cost.transforms * (1 / w[0] + 1 / w[1])
    known = [] if x is None else [size for size in x[2:] if size is not None]
    if len(known) < 2:
        return gain > 0
    batch = x[0] or 1 if x is not None else 1
    return batch * math.prod(-(-size // 2) for size in known) * gain > cost.tiles


@operator("WinogradConv", **forward.DECLARATION)
def winograd_conv(*arrays: np.ndarray | None, **attributes: Any) -> np.ndarray:
    """Y = activation(Conv(X, W, B) + Z) for a kernel of 3x3"""
    return forward.dense_conv.kernel(*arrays, **attributes)


winograd_conv.onnx(forward.dense_conv_body)
winograd_conv.compiled(
    views=vectors("x w b z y"),
    scratch=vectors("boxes weights"),
    plan=_winograd_forward.plan,
    first=_winograd_forward.prepare,
)(_winograd_forward.convolve)


@operator("WinogradConvGrad", **conv.DECLARATION)
def winograd_conv_grad(*arrays: np.ndarray, **attributes: Any) -> tuple[np.ndarray | None, ...]:
    """ConvGrad for a kernel of 3x3"""
    return _numpy.conv_grad(*arrays, **attributes)


winograd_conv_grad.onnx(_body.conv_grad_body)
winograd_conv_grad.compiled(
    views=vectors("dy x w dx dw db"),
    scratch=vectors("dy_boxes x_boxes weights sums"),
    plan=_winograd_grad.plan,
    first=_winograd_grad.prepare,
    last=_winograd_grad.finish_weights,
)(_winograd_grad.differentiate)
