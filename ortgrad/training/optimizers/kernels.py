"""The passes of which optimizers consist."""

from __future__ import annotations

import math

import numpy as np

from ortgrad.compiled.functions import double, sqrt
from ortgrad.training.optimizers.passes import CHUNK, Pass


def adamw_loop(
    chunk: int,
    w: np.ndarray,
    g: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    beta1: float,
    rest1: float,
    beta2: float,
    rest2: float,
    epsilon: float,
    root: float,
    rate: float,
    before: float,
    after: float,
) -> None:
    """w = (w before - rate m / (root sqrt(v) + epsilon)) after

    where m = beta1 m + rest1 g and v = beta2 v + rest2 g^2
    """
    first = chunk * CHUNK
    last = min(first + CHUNK, len(w))
    ws, gs, ms, vs = w[first:last], g[first:last], m[first:last], v[first:last]
    for k in range(last - first):
        mean = beta1 * ms[k] + rest1 * gs[k]
        square = beta2 * vs[k] + rest2 * (gs[k] * gs[k])
        ms[k] = mean
        vs[k] = square
        ws[k] = (ws[k] * before - rate * mean / (sqrt(square) * root + epsilon)) * after


def adamw_numpy(
    w: np.ndarray,
    g: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    *,
    beta1: float,
    rest1: float,
    beta2: float,
    rest2: float,
    epsilon: float,
    root: float,
    rate: float,
    before: float,
    after: float,
) -> None:
    np.multiply(m, beta1, out=m)
    np.multiply(g, rest1, out=a)
    np.add(m, a, out=m)
    np.multiply(v, beta2, out=v)
    np.multiply(g, g, out=a)
    np.multiply(a, rest2, out=a)
    np.add(v, a, out=v)
    np.sqrt(v, out=a)
    np.multiply(a, root, out=a)
    np.add(a, epsilon, out=a)
    np.multiply(m, rate, out=b)
    np.divide(b, a, out=b)
    if before != 1:
        np.multiply(w, before, out=w)
    np.subtract(w, b, out=w)
    if after != 1:
        np.multiply(w, after, out=w)


def sgd_loop(chunk: int, w: np.ndarray, g: np.ndarray, rate: float) -> None:
    """w = w - rate g"""
    first = chunk * CHUNK
    last = min(first + CHUNK, len(w))
    ws, gs = w[first:last], g[first:last]
    for k in range(last - first):
        ws[k] = ws[k] - rate * gs[k]


def sgd_numpy(w: np.ndarray, g: np.ndarray, a: np.ndarray, *, rate: float) -> None:
    np.multiply(g, rate, out=a)
    np.subtract(w, a, out=w)


def scale_loop(chunk: int, g: np.ndarray, factor: float) -> None:
    """g = g factor"""
    first = chunk * CHUNK
    last = min(first + CHUNK, len(g))
    gs = g[first:last]
    for k in range(last - first):
        gs[k] = gs[k] * factor


def scale_numpy(g: np.ndarray, *, factor: float) -> None:
    np.multiply(g, factor, out=g)


def squares_loop(chunk: int, g: np.ndarray, sums: np.ndarray) -> None:
    """sums[chunk] = sum of g^2"""
    first = chunk * CHUNK
    last = min(first + CHUNK, len(g))
    gs = g[first:last]
    total = double(0.0)
    for k in range(last - first):
        total += double(gs[k]) * double(gs[k])
    sums[chunk] = total


def squares_numpy(g: np.ndarray, sums: np.ndarray) -> None:
    values = g.astype(np.float64)
    sums[0] = np.dot(values, values)


adamw = Pass(adamw_loop, adamw_numpy, arrays=4, scratch=2)
sgd = Pass(sgd_loop, sgd_numpy, arrays=2, scratch=1)
scale = Pass(scale_loop, scale_numpy, arrays=1)
squares = Pass(squares_loop, squares_numpy, arrays=1, partial=1)


def norm(arrays: list[np.ndarray], *, threads: int = 1, compiled: bool = True) -> float:
    """Return the square root of the sum of the squares of all elements."""
    total = 0.0
    for array in arrays:
        sums = np.zeros(-(-array.size // CHUNK))
        squares(array, sums, threads=threads, compiled=compiled)
        total += float(sums.sum())
    return math.sqrt(total) if total >= 0 else math.nan
