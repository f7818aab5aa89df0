"""The passes that optimizers consist of. Each formula is both the compiled kernel and its form in NumPy."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ortgrad.compiled.functions import double
from ortgrad.training.optimizers.passes import CHUNK, Sums, update

_CLIP_EPSILON = 1e-6


class AdamWNumbers(NamedTuple):
    beta1: float
    rest1: float
    beta2: float
    rest2: float
    epsilon: float
    root: float
    rate: float
    before: float
    after: float


@update("w", "m", "v")
def adamw(w: float, g: float, m: float, v: float, /, by: AdamWNumbers) -> tuple[float, float, float]:
    """w = (w before - rate m / (root sqrt(v) + epsilon)) after

    where m = beta1 m + rest1 g and v = beta2 v + rest2 g^2
    """
    m = by.beta1 * m + by.rest1 * g
    v = by.beta2 * v + by.rest2 * (g * g)
    return (w * by.before - by.rate * m / (np.sqrt(v) * by.root + by.epsilon)) * by.after, m, v


@update("w")
def sgd(w: float, g: float, /, rate: float) -> float:
    """w = w - rate g"""
    return w - rate * g


@update("w")
def decayed_sgd(w: float, g: float, /, rate: float, decay: float) -> float:
    """w = w - rate (g + decay w)"""
    return w - rate * (g + decay * w)


class MomentumNumbers(NamedTuple):
    rate: float
    decay: float
    momentum: float
    rest: float
    direct: float
    through: float


@update("w", "m")
def momentum_sgd(w: float, g: float, m: float, /, by: MomentumNumbers) -> tuple[float, float]:
    """w = w - rate (direct d + through m) where d = g + decay w and m = momentum m + rest d"""
    d = g + by.decay * w
    m = by.momentum * m + by.rest * d
    return w - by.rate * (by.direct * d + by.through * m), m


@update("w", "v")
def rmsprop(
    w: float, g: float, v: float, /, rate: float, decay: float, alpha: float, rest: float, epsilon: float
) -> tuple[float, float]:
    """w = w - rate d / (sqrt(v) + epsilon) where d = g + decay w and v = alpha v + rest d^2"""
    d = g + decay * w
    v = alpha * v + rest * (d * d)
    return w - rate * (d / (np.sqrt(v) + epsilon)), v


class RMSpropNumbers(NamedTuple):
    rate: float
    decay: float
    alpha: float
    rest: float
    epsilon: float
    momentum: float
    centered: float


@update("w", "v", "c", "m")
def centered_rmsprop(
    w: float, g: float, v: float, c: float, m: float, /, by: RMSpropNumbers
) -> tuple[float, float, float, float]:
    """w = w - rate m where m = momentum m + d / (sqrt(v - centered c^2) + epsilon)

    with d = g + decay w, v = alpha v + rest d^2 and c = alpha c + rest d
    """
    d = g + by.decay * w
    v = by.alpha * v + by.rest * (d * d)
    c = c + by.rest * (d - c)
    m = by.momentum * m + d / (np.sqrt(v - by.centered * (c * c)) + by.epsilon)
    return w - by.rate * m, v, c, m


@update("w", "v")
def adagrad(
    w: float, g: float, v: float, /, rate: float, decay: float, epsilon: float
) -> tuple[float, float]:
    """w = w - rate d / (sqrt(v) + epsilon) where d = g + decay w and v = v + d^2"""
    d = g + decay * w
    v = v + d * d
    return w - rate * (d / (np.sqrt(v) + epsilon)), v


@update("g")
def add_decay(w: float, g: float, /, decay: float) -> float:
    """g = g + decay w"""
    return g + decay * w


@update("g")
def scale(g: float, /, factor: float) -> float:
    """g = g factor"""
    return g * factor


def _clamp_in_numpy(g: np.ndarray, bound: np.floating) -> None:
    np.clip(g, -bound, bound, out=g)


@update("g", in_numpy=_clamp_in_numpy)
def clamp(g: float, /, bound: float) -> float:
    """g = min(max(g, -bound), bound)"""
    # Written so that NaN stays NaN.
    g = bound if g > bound else g
    return -bound if g < -bound else g


def _squares_loop(chunk: int, g: np.ndarray, sums: np.ndarray) -> None:
    """sums[chunk] = sum of g^2"""
    first = chunk * CHUNK
    gs = g[first : min(first + CHUNK, len(g))]
    total = double(0.0)
    for k in range(len(gs)):
        total += double(gs[k]) * double(gs[k])
    sums[chunk] = total


def _squares(g: np.ndarray) -> float:
    values = g.astype(np.float64)
    return float(np.dot(values, values))


squares = Sums(_squares_loop, _squares)


def norm(arrays: list[np.ndarray], *, threads: int = 1, compiled: bool = True) -> float:
    """Return the square root of the sum of the squares of all elements."""
    total = 0.0
    for array in arrays:
        sums = np.zeros(-(-array.size // CHUNK))
        squares(array, sums, threads=threads, compiled=compiled)
        total += float(sums.sum())
    return math.sqrt(total) if total >= 0 else math.nan


def clip(gradients: list[np.ndarray], largest: float, threads: int) -> None:
    """Scale the gradients in place so that their norm is at most `largest`."""
    factor = largest / (norm(gradients, threads=threads) + _CLIP_EPSILON)
    # Not `factor < 1`: if the norm is NaN, so are all gradients.
    if not factor >= 1:
        for flat in gradients:
            scale(flat, threads=threads, factor=factor)
