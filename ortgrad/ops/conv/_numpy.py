"""Conv and ConvGrad in NumPy: for each tap of the kernel, one matrix product per result."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ortgrad.ops._windows import Windows, windows


def conv(
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray | None,
    *,
    group: int,
    kernel_shape: list[int] | None,
    **attributes: Any,
) -> np.ndarray:
    """Y = Conv(X, W, B)"""
    win = windows(x.shape[2:], w.shape[2:], **attributes)
    channels, positions, padded = w.shape[1], math.prod(win.outputs), _padded(x, win)
    y = np.zeros((len(x), group, len(w) // group, positions), x.dtype)
    for tap, read in _reads(win):
        weights = w[tap].reshape(group, len(w) // group, channels)
        values = padded[read].reshape(len(x), group, channels, positions)
        # matmul is slow where a sum has one product.
        y += weights * values if channels == 1 else weights @ values
    y = y.reshape(len(x), len(w), *win.outputs)
    if b is not None:
        y += b.reshape(-1, *[1] * win.rank)
    return y


def _padded(x: np.ndarray, win: Windows) -> np.ndarray:
    return np.pad(x, [(0, 0), (0, 0), *zip(win.heads, win.tails, strict=True)])


def _reads(win: Windows) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Return, for each tap of the kernel, indices of its weights and of what windows read of the padded X."""
    for tap in np.ndindex(win.kernel):
        starts = [k * d for k, d in zip(tap, win.dilations, strict=True)]
        steps = zip(starts, win.outputs, win.strides, strict=True)
        read = (slice(start, start + (count - 1) * stride + 1, stride) for start, count, stride in steps)
        yield (..., *tap), (slice(None), slice(None), *read)


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
    positions = math.prod(win.outputs)
    grads = dy.reshape(samples, group, filters // group, positions)
    padded = _padded(x, win)
    padded_dx, dw = np.zeros_like(padded), np.zeros_like(w)
    for tap, read in _reads(win) if wanted[0] or wanted[1] else iter(()):
        if wanted[0]:
            weights = w[tap].reshape(group, filters // group, channels).swapaxes(1, 2)
            products = weights * grads if filters == group else weights @ grads
            place = padded_dx[read]
            place += products.reshape(place.shape)
        if wanted[1]:
            values = padded[read].reshape(samples, group, channels, positions)
            products = grads @ values.swapaxes(2, 3)
            dw[tap] = products.sum(axis=0).reshape(filters, channels)
    inside = (slice(h, h + n) for h, n in zip(win.heads, win.sizes, strict=True))
    dx = padded_dx[(slice(None), slice(None), *inside)]
    db = dy.sum(axis=(0, *range(2, dy.ndim))) if wanted[2] else None
    return dx if wanted[0] else None, dw if wanted[1] else None, db
