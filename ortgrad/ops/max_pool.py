"""MaxPool with the places of the maxima, for sessions that run compiled kernels.

onnxruntime's own takes several times as long with its output Indices, which the gradient needs, as without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.compiled import Plan
from ortgrad.operators.declaration import INTERNAL_DOMAIN, Choice, Operand, Shape, operator
from ortgrad.ops import _pools
from ortgrad.ops._windows import AUTO_PADS, Windows, spatial, windows


def _shapes(x: Operand, **attributes: Any) -> Sequence[Shape | None]:
    if x.shape is None:
        return [None, None]
    sizes = [n for n in x.shape[2:] if isinstance(n, int)]
    outputs: Shape = (None,) * (len(x.shape) - 2)
    if len(sizes) == len(outputs):
        outputs = _windows(sizes, **attributes).outputs
    return [(*x.shape[:2], *outputs)] * 2


def _windows(
    sizes: Sequence[int],
    *,
    kernel_shape: list[int] | None,
    ceil_mode: int,
    pads: list[int] | None = None,
    auto_pad: str = "NOTSET",
    **attributes: Any,
) -> Windows:
    if not kernel_shape:
        raise ValueError("kernel_shape is missing")
    if auto_pad == "NOTSET" and any(p >= k for p, k in zip(pads or (), kernel_shape * 2, strict=False)):
        raise ValueError(
            f"the pads {pads} are as large as the windows {kernel_shape}: some would hold nothing of X"
        )
    given = {"pads": pads, "auto_pad": auto_pad, **attributes}
    return windows(sizes, kernel_shape, ceil_mode=bool(ceil_mode), pool=True, **given)


def _dims(*, kernel_shape: list[int] | None, **_: Any) -> dict[str, str]:
    return {"X": f"N C {spatial(kernel_shape)[1]}" if kernel_shape else "N C S0 *S"}


@operator(
    "MaxPoolWithIndices",
    domain=INTERNAL_DOMAIN,
    inputs=["X"],
    outputs=["Y", "Indices: int64"],
    shapes=_shapes,
    dims=_dims,
    attributes={
        "auto_pad": Choice(*AUTO_PADS),
        "ceil_mode": 0,
        "kernel_shape": list[int],
        "pads": list[int],
        "strides": list[int],
    },
)
def max_pool_with_indices(x: np.ndarray, **attributes: Any) -> tuple[np.ndarray, np.ndarray]:
    """Y = MaxPool(X); Indices = where the first maximum of each window is in X"""
    win = _windows(x.shape[2:], **attributes)
    # Windows may reach behind the padding.
    ends = [max(r - h - n, 0) for r, h, n in zip(win.reach, win.heads, win.sizes, strict=True)]
    around = [(0, 0), (0, 0), *zip(win.heads, ends, strict=True)]
    padded = np.pad(x, around, constant_values=-np.inf)
    numbers = np.pad(np.arange(x.size).reshape(x.shape), around)
    starts = [
        np.maximum(np.arange(count) * stride - head, 0)
        for count, stride, head in zip(win.outputs, win.strides, win.heads, strict=True)
    ]
    first: tuple[Any, ...] = (slice(None), slice(None), *np.ix_(*starts))
    best, places = x[first], np.arange(x.size).reshape(x.shape)[first]
    for tap in np.ndindex(win.kernel):
        steps = zip(tap, win.outputs, win.strides, strict=True)
        read = (slice(k, k + (count - 1) * stride + 1, stride) for k, count, stride in steps)
        here = (slice(None), slice(None), *read)
        better = padded[here] > best
        best = np.where(better, padded[here], best)
        places = np.where(better, numbers[here], places)
    return best, places


@max_pool_with_indices.onnx
def max_pool_with_indices_body(op: Recorder, x: ir.Value, **attributes: Any) -> Sequence[ir.Value]:
    results: Sequence[ir.Value] = op.MaxPool(x, **attributes, _outputs=2)
    return results


def _plan(x: tuple[int, ...], y: tuple[int, ...], indices: tuple[int, ...], **attributes: Any) -> Plan | None:
    return _pools.plan_max_pool(x, y, _windows(x[2:], **attributes))


max_pool_with_indices.compiled(views={"x": 3, "y": 2, "indices": 2}, plan=_plan)(_pools.max_pool_strip)
