"""The passes of which optimizers consist."""

from __future__ import annotations

import math

import numpy as np

from ortgrad.compiled.functions import double, sqrt
from ortgrad.training.optimizers.passes import CHUNK, Pass

_CLIP_EPSILON = 1e-6


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


def clamp_loop(chunk: int, g: np.ndarray, bound: float) -> None:
    """g = min(max(g, -bound), bound)"""
    first = chunk * CHUNK
    last = min(first + CHUNK, len(g))
    gs = g[first:last]
    for k in range(last - first):
        value = gs[k]
        # Written so that NaN stays NaN.
        if value > bound:
            value = bound
        if value < -bound:
            value = -bound
        gs[k] = value


def clamp_numpy(g: np.ndarray, *, bound: float) -> None:
    np.clip(g, -bound, bound, out=g)


def add_decay_loop(chunk: int, w: np.ndarray, g: np.ndarray, decay: float) -> None:
    """g = g + decay w"""
    first = chunk * CHUNK
    last = min(first + CHUNK, len(w))
    ws, gs = w[first:last], g[first:last]
    for k in range(last - first):
        gs[k] = gs[k] + decay * ws[k]


def add_decay_numpy(w: np.ndarray, g: np.ndarray, a: np.ndarray, *, decay: float) -> None:
    np.multiply(w, decay, out=a)
    np.add(g, a, out=g)


def decayed_sgd_loop(chunk: int, w: np.ndarray, g: np.ndarray, rate: float, decay: float) -> None:
    """w = w - rate (g + decay w)"""
    first = chunk * CHUNK
    last = min(first + CHUNK, len(w))
    ws, gs = w[first:last], g[first:last]
    for k in range(last - first):
        ws[k] = ws[k] - rate * (gs[k] + decay * ws[k])


def decayed_sgd_numpy(w: np.ndarray, g: np.ndarray, a: np.ndarray, *, rate: float, decay: float) -> None:
    np.multiply(w, decay, out=a)
    np.add(g, a, out=a)
    np.multiply(a, rate, out=a)
    np.subtract(w, a, out=w)


def momentum_loop(
    chunk: int,
    w: np.ndarray,
    g: np.ndarray,
    m: np.ndarray,
    rate: float,
    decay: float,
    momentum: float,
    rest: float,
    direct: float,
    through: float,
) -> None:
    """w = w - rate (direct d + through m) where d = g + decay w and m = momentum m + rest d"""
    first = chunk * CHUNK
    last = min(first + CHUNK, len(w))
    ws, gs, ms = w[first:last], g[first:last], m[first:last]
    for k in range(last - first):
        d = gs[k] + decay * ws[k]
        mean = momentum * ms[k] + rest * d
        ms[k] = mean
        ws[k] = ws[k] - rate * (direct * d + through * mean)


def momentum_numpy(
    w: np.ndarray,
    g: np.ndarray,
    m: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    *,
    rate: float,
    decay: float,
    momentum: float,
    rest: float,
    direct: float,
    through: float,
) -> None:
    np.multiply(w, decay, out=a)
    np.add(g, a, out=a)
    np.multiply(m, momentum, out=m)
    np.multiply(a, rest, out=b)
    np.add(m, b, out=m)
    np.multiply(a, direct, out=a)
    np.multiply(m, through, out=b)
    np.add(a, b, out=a)
    np.multiply(a, rate, out=a)
    np.subtract(w, a, out=w)


def rmsprop_loop(
    chunk: int,
    w: np.ndarray,
    g: np.ndarray,
    v: np.ndarray,
    rate: float,
    decay: float,
    alpha: float,
    rest: float,
    epsilon: float,
) -> None:
    """w = w - rate d / (sqrt(v) + epsilon) where d = g + decay w and v = alpha v + rest d^2"""
    first = chunk * CHUNK
    last = min(first + CHUNK, len(w))
    ws, gs, vs = w[first:last], g[first:last], v[first:last]
    for k in range(last - first):
        d = gs[k] + decay * ws[k]
        square = alpha * vs[k] + rest * (d * d)
        vs[k] = square
        ws[k] = ws[k] - rate * (d / (sqrt(square) + epsilon))


def rmsprop_numpy(
    w: np.ndarray,
    g: np.ndarray,
    v: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    *,
    rate: float,
    decay: float,
    alpha: float,
    rest: float,
    epsilon: float,
) -> None:
    np.multiply(w, decay, out=a)
    np.add(g, a, out=a)
    np.multiply(a, a, out=b)
    np.multiply(b, rest, out=b)
    np.multiply(v, alpha, out=v)
    np.add(v, b, out=v)
    np.sqrt(v, out=b)
    np.add(b, epsilon, out=b)
    np.divide(a, b, out=a)
    np.multiply(a, rate, out=a)
    np.subtract(w, a, out=w)


def centered_rmsprop_loop(
    chunk: int,
    w: np.ndarray,
    g: np.ndarray,
    v: np.ndarray,
    c: np.ndarray,
    m: np.ndarray,
    rate: float,
    decay: float,
    alpha: float,
    rest: float,
    epsilon: float,
    momentum: float,
    centered: float,
) -> None:
    """w = w - rate m where m = momentum m + d / (sqrt(v - centered c^2) + epsilon)

    with d = g + decay w, v = alpha v + rest d^2 and c = alpha c + rest d
    """
    first = chunk * CHUNK
    last = min(first + CHUNK, len(w))
    ws, gs, vs, cs, ms = w[first:last], g[first:last], v[first:last], c[first:last], m[first:last]
    for k in range(last - first):
        d = gs[k] + decay * ws[k]
        square = alpha * vs[k] + rest * (d * d)
        center = cs[k] + rest * (d - cs[k])
        vs[k] = square
        cs[k] = center
        mean = momentum * ms[k] + d / (sqrt(square - centered * (center * center)) + epsilon)
        ms[k] = mean
        ws[k] = ws[k] - rate * mean


def centered_rmsprop_numpy(
    w: np.ndarray,
    g: np.ndarray,
    v: np.ndarray,
    c: np.ndarray,
    m: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    *,
    rate: float,
    decay: float,
    alpha: float,
    rest: float,
    epsilon: float,
    momentum: float,
    centered: float,
) -> None:
    np.multiply(w, decay, out=a)
    np.add(g, a, out=a)
    np.multiply(a, a, out=b)
    np.multiply(b, rest, out=b)
    np.multiply(v, alpha, out=v)
    np.add(v, b, out=v)
    np.subtract(a, c, out=b)
    np.multiply(b, rest, out=b)
    np.add(c, b, out=c)
    np.multiply(c, c, out=b)
    np.multiply(b, centered, out=b)
    np.subtract(v, b, out=b)
    np.sqrt(b, out=b)
    np.add(b, epsilon, out=b)
    np.divide(a, b, out=a)
    np.multiply(m, momentum, out=m)
    np.add(m, a, out=m)
    np.multiply(m, rate, out=a)
    np.subtract(w, a, out=w)


def adagrad_loop(
    chunk: int, w: np.ndarray, g: np.ndarray, v: np.ndarray, rate: float, decay: float, epsilon: float
) -> None:
    """w = w - rate d / (sqrt(v) + epsilon) where d = g + decay w and v = v + d^2"""
    first = chunk * CHUNK
    last = min(first + CHUNK, len(w))
    ws, gs, vs = w[first:last], g[first:last], v[first:last]
    for k in range(last - first):
        d = gs[k] + decay * ws[k]
        square = vs[k] + d * d
        vs[k] = square
        ws[k] = ws[k] - rate * (d / (sqrt(square) + epsilon))


def adagrad_numpy(
    w: np.ndarray,
    g: np.ndarray,
    v: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    *,
    rate: float,
    decay: float,
    epsilon: float,
) -> None:
    np.multiply(w, decay, out=a)
    np.add(g, a, out=a)
    np.multiply(a, a, out=b)
    np.add(v, b, out=v)
    np.sqrt(v, out=b)
    np.add(b, epsilon, out=b)
    np.divide(a, b, out=a)
    np.multiply(a, rate, out=a)
    np.subtract(w, a, out=w)


adamw = Pass(adamw_loop, adamw_numpy, arrays=4, scratch=2)
sgd = Pass(sgd_loop, sgd_numpy, arrays=2, scratch=1)
scale = Pass(scale_loop, scale_numpy, arrays=1)
squares = Pass(squares_loop, squares_numpy, arrays=1, partial=1)
clamp = Pass(clamp_loop, clamp_numpy, arrays=1)
add_decay = Pass(add_decay_loop, add_decay_numpy, arrays=2, scratch=1)
decayed_sgd = Pass(decayed_sgd_loop, decayed_sgd_numpy, arrays=2, scratch=1)
momentum_sgd = Pass(momentum_loop, momentum_numpy, arrays=3, scratch=2)
rmsprop = Pass(rmsprop_loop, rmsprop_numpy, arrays=3, scratch=2)
centered_rmsprop = Pass(centered_rmsprop_loop, centered_rmsprop_numpy, arrays=5, scratch=2)
adagrad = Pass(adagrad_loop, adagrad_numpy, arrays=3, scratch=2)


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
