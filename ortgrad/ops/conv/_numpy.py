"""ConvGrad in NumPy: for each tap of the kernel, one matrix product per gradient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ortgrad.ops._windows import windows


def conv_grad(
    dy: np.ndarray,
    x: np.ndarray,
    w: np.ndarray,
    *,
    group: int,
    kernel_shape: list[int] | None,
    wanted: tuple[bool, bool, bool],
    **attributes: Any,
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """dX = W turned, convolved with dY; dW = X correlated with dY; dB = sum of dY"""
    win = windows(x.shape[2:], w.shape[2:], **attributes)
    samples, (filters, channels) = len(x), w.shape[:2]
    if dy.shape != (samples, filters, *win.outputs):
        raise ValueError(
            f"dY has shape {list(dy.shape)}, but Conv of X {list(x.shape)} and W {list(w.shape)} "
            f"gives {[samples, filters, *win.outputs]}"
        )
    every, positions = (slice(None), slice(None)), math.prod(win.outputs)
    grads = dy.reshape(samples, group, filters // group, positions)
    padded = np.pad(x, [(0, 0), (0, 0), *zip(win.heads, win.tails, strict=True)])
    padded_dx, dw = np.zeros_like(padded), np.zeros_like(w)
    for tap in np.ndindex(win.kernel) if wanted[0] or wanted[1] else ():
        # What this tap of all windows reads of the padded X.
        starts = [k * d for k, d in zip(tap, win.dilations, strict=True)]
        steps = zip(starts, win.outputs, win.strides, strict=True)
        read = (*every, *(slice(start, start + count * stride, stride) for start, count, stride in steps))
        if wanted[0]:
            weights = w[(..., *tap)].reshape(group, filters // group, channels).swapaxes(1, 2)
            # matmul is slow where there is one product to each sum, as in a depthwise convolution.
            products = weights * grads if filters == group else weights @ grads
            place = padded_dx[read]
            place += products.reshape(place.shape)
        if wanted[1]:
            values = padded[read].reshape(samples, group, channels, positions)
            products = grads @ values.swapaxes(2, 3)
            dw[(..., *tap)] = products.sum(axis=0).reshape(filters, channels)
    inside = (slice(h, h + n) for h, n in zip(win.heads, win.sizes, strict=True))
    dx = padded_dx[(*every, *inside)]
    db = dy.sum(axis=(0, *range(2, dy.ndim))) if wanted[2] else None
    return dx if wanted[0] else None, dw if wanted[1] else None, db
