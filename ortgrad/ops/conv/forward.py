"""Dense convolutions, for sessions that run compiled kernels.

There they replace nodes of Conv whose weights are not constant, which onnxruntime's fastest kernels need.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ortgrad.compiled.functions import TILE
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.compiled import vectors
from ortgrad.operators.declaration import INTERNAL_DOMAIN, Choice, Operand, Shape, operator
from ortgrad.ops._windows import spatial
from ortgrad.ops.conv import _forward, _numpy
from ortgrad.ops.conv._dense import Known
from ortgrad.ops.conv.conv import ATTRIBUTES
from ortgrad.ops.conv.costs import AGAINST_CONV, AGAINST_CONV_OF_FEW_TERMS
from ortgrad.ops.conv.depthwise import depthwise_conv

# What may be applied to the result while it is in the cache.
ACTIVATIONS = ("Relu", "LeakyRelu", "Clip")
# The most elements of X if strides are used: copies that do not fit into the cache take too long then.
_MOST_COPIED = 1 << 21


def is_fastest(x: Known, w: Known, group: int, strides: Sequence[int] | None) -> bool:
    """Return whether the compiled kernel was measured to be faster than onnxruntime's.

    onnxruntime copies X for every tap of the kernel, and then multiplies matrices. The more filters there
    are, the smaller is the share of the copies. Unknown sizes of X are assumed to be large.
    """
    sizes = [] if w is None else [size for size in w if size is not None]
    if w is None or len(sizes) < len(w) or not 3 <= len(w) <= 5:
        return False
    steps = strides or [1] * len(w[2:])
    if group < 1 or min(steps) < 1:
        return False
    filters, terms = sizes[0] // group, math.prod(sizes[1:])
    if math.prod(sizes[2:]) == 1:
        return False
    positions: float = math.inf
    known = [] if x is None else [size for size in x[1:] if size is not None]
    if len(known) == len(w) - 1:
        batch = x[0] or 1 if x is not None else 1
        positions = batch * math.prod(-(-n // s) for n, s in zip(known[1:], steps, strict=False))
        if max(steps) > 1 and batch * math.prod(known) > _MOST_COPIED:
            return False
    limit = next(limit for limit in AGAINST_CONV if filters <= limit.filters)
    if terms < AGAINST_CONV[0].terms:
        limit = AGAINST_CONV_OF_FEW_TERMS
    enough = positions >= (limit.partial if filters % TILE else limit.positions)
    return filters <= limit.filters and terms >= limit.terms and enough


def _shapes(
    x: Operand, w: Operand, b: Operand | None, z: Operand | None, **attributes: Any
) -> Sequence[Shape | None]:
    return depthwise_conv.shapes(x, w, b, **attributes)


def _dims(*, group: int, kernel_shape: list[int] | None, **_: Any) -> dict[str, str]:
    if group < 1:
        raise ValueError(f"group is {group}; it must be positive")
    x, kernel = spatial(kernel_shape)[1:] if kernel_shape else ("S0 *S", "K0 *K:S")
    return {
        "X": f"N {group}*C {x}",
        "W": f"{group}*M C {kernel}",
        "B": f"{group}*M",
        "Z": f"N {group}*M Z0 *Z:S",
    }


DECLARATION: Mapping[str, Any] = {
    "domain": INTERNAL_DOMAIN,
    "inputs": ["X", "W", "B?", "Z?"],
    "outputs": ["Y"],
    "shapes": _shapes,
    "dims": _dims,
    "attributes": {**ATTRIBUTES, "activation": Choice("", *ACTIVATIONS), "alpha": 0.0, "beta": 0.0},
}


@operator("DenseConv", **DECLARATION)
def dense_conv(
    x: np.ndarray, w: np.ndarray, b: np.ndarray | None, z: np.ndarray | None, **attributes: Any
) -> np.ndarray:
    """Y = activation(Conv(X, W, B) + Z)"""
    activation, alpha, beta = (attributes.pop(name) for name in ("activation", "alpha", "beta"))
    y = _numpy.conv(x, w, b, **attributes)
    if z is not None and z.shape != y.shape:
        raise ValueError(
            f"Z has shape {list(z.shape)}, but the result of the convolution has {list(y.shape)}"
        )
    if z is not None:
        y += z
    if activation == "Relu":
        np.maximum(y, 0, out=y)
    elif activation == "LeakyRelu":
        y = np.where(y >= 0, y, y * y.dtype.type(alpha))
    elif activation == "Clip":
        np.clip(y, y.dtype.type(alpha), y.dtype.type(beta), out=y)
    return y


@dense_conv.onnx
def dense_conv_body(
    op: Recorder,
    x: ir.Value,
    w: ir.Value,
    b: ir.Value | None,
    z: ir.Value | None,
    *,
    activation: str,
    alpha: float,
    beta: float,
    **attributes: Any,
) -> ir.Value:
    y = op.Conv(x, w, b, **attributes)
    if z is not None:
        y = op.Add(y, z)
    if activation == "Relu":
        return op.Relu(y)
    if activation == "LeakyRelu":
        return op.LeakyRelu(y, alpha=alpha)
    return op.Clip(y, op.number(alpha, y), op.number(beta, y)) if activation == "Clip" else y


dense_conv.compiled(
    views=vectors("x w b z y"),
    scratch=vectors("boxes turned"),
    plan=_forward.plan,
    first=_forward.prepare,
)(_forward.convolve_positions)
