"""Functions for compiled kernels, written so that loops over them can be vectorized."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np


def rint(x: float) -> float:
    """Return the nearest integer, the even one of two."""
    return float(round(x))


def power_of_two(n: float) -> float:
    """Return 2**n for an integral n in the range of the exponents of normal numbers."""
    return math.ldexp(1.0, int(n))


def sqrt(x: float) -> float:
    """Return the square root, NaN for a negative number."""
    return math.sqrt(x) if x >= 0 else math.nan


def double(x: float) -> float:
    """Return a number in double precision, for sums."""
    return float(x)


def doubles() -> np.ndarray:
    """Return SUMS numbers in double precision, whose values are undefined; valid until the task ends."""
    return np.empty(SUMS)


def allocate(count: int) -> np.ndarray:
    """Return an array of the element type, whose values are undefined; empty if there is no memory.

    A task must release it.
    """
    return np.empty(count)


def allocate_integers(count: int) -> np.ndarray:
    """Return an array of integers, as `allocate`."""
    return np.empty(count, np.int64)


def release(array: np.ndarray) -> None:
    """Release an array that was allocated."""


def add_rows(
    sums: np.ndarray, stride: int, rows: np.ndarray, starts: np.ndarray, weights: np.ndarray, count: int
) -> None:
    """Compute four weighted sums of rows, each with `count` elements, in registers.

    sums[i * stride + k] = sum over t of weights[4 * t + i] * rows[starts[t] + k]

    Up to SLACK elements more are read of every row, and written after every sum.
    """
    for i in range(4):
        parts = [w * rows[s : s + count] for s, w in zip(starts, weights[i::4], strict=True)]
        sums[i * stride : i * stride + count] = np.sum(parts, axis=0) if parts else 0


def add_row(sums: np.ndarray, rows: np.ndarray, starts: np.ndarray, weights: np.ndarray, count: int) -> None:
    """Compute a weighted sum of rows in registers: sums[k] = sum over t of weights[t] * rows[starts[t] + k].

    Up to SLACK elements more are read of every row, and written.
    """
    for k in range(count):
        total = weights[0] * 0
        for t in range(len(starts)):
            total += weights[t] * rows[starts[t] + k]
        sums[k] = total


def copy_row(into: np.ndarray, source: np.ndarray) -> None:
    """Copy contiguous elements, as many as the shorter array has. Fast for short arrays, unlike a loop."""
    for k in range(min(len(into), len(source))):
        into[k] = source[k]


SUMS = 256
SLACK = 64
# The compiler has instructions for these.
PRIMITIVES: dict[str, Callable[..., Any]] = {
    "rint": rint,
    "power_of_two": power_of_two,
    "sqrt": sqrt,
    "double": double,
    "doubles": doubles,
    "allocate": allocate,
    "allocate_integers": allocate_integers,
    "release": release,
    "add_rows": add_rows,
    "add_row": add_row,
    "copy_row": copy_row,
}


class ByType:
    """A number, a tuple of numbers or a function that depends on the element type of the tensors.

    A kernel uses it as if it were the one for its own element type.
    """

    def __init__(self, float32: Any, float64: Any) -> None:
        self._values = {"float32": float32, "float64": float64}

    def __getitem__(self, element: str) -> Any:
        return self._values[element]

    def __call__(self, *arguments: Any) -> Any:
        return self._values["float64"](*arguments)


_LOG2E = 1.4426950408889634


def _exp_single(x: float) -> float:
    # Beyond these limits the result is 0 or infinite. A NaN passes the comparisons as a limit.
    a = x if x > -105.0 else -105.0
    a = a if a < 90.0 else 90.0
    n = rint(a * _LOG2E)
    # r = a - n log(2), with log(2) in two parts
    r = a - n * 0.693359375
    r = r + n * 2.12194440e-4
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = p * (r * r) + r + 1.0
    half = rint(n * 0.5)
    p = p * power_of_two(half) * power_of_two(n - half)
    return p if x == x else x


def _exp_double(x: float) -> float:
    a = x if x > -750.0 else -750.0
    a = a if a < 715.0 else 715.0
    n = rint(a * _LOG2E)
    r = a - n * 6.93145751953125e-1
    r = r - n * 1.42860682030941723212e-6
    # A rational function, as in Cephes: exp(r) = 1 + 2 r P(r^2) / (Q(r^2) - r P(r^2)).
    s = r * r
    p = ((1.26177193074810590878e-4 * s + 3.02994407707441961300e-2) * s + 9.99999999999999999910e-1) * r
    q = (
        (3.00198505138664455042e-6 * s + 2.52448340349684104192e-3) * s + 2.27265548208155028766e-1
    ) * s + 2.00000000000000000009e0
    y = 1.0 + 2.0 * (p / (q - p))
    half = rint(n * 0.5)
    y = y * power_of_two(half) * power_of_two(n - half)
    return y if x == x else x


exp: Callable[[float], float] = ByType(_exp_single, _exp_double)


def blend(a: float, weight_a: float, b: float, weight_b: float) -> float:
    """Return a * weight_a + b * weight_b, which is infinite if one product is."""
    return a * weight_a + b * weight_b
