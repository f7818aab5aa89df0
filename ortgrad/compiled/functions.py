"""Functions for compiled kernels, written so that loops over them can be vectorized."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


def rint(x: float) -> float:
    """Return the nearest integer; of two equally near ones, the even one."""
    return float(round(x))


def power_of_two(n: float) -> float:
    """Return 2**n for an integral n in the range of the exponents of normal numbers."""
    return math.ldexp(1.0, int(n))


def times_power(x: float, t: float) -> float:
    """Return x * 2**n, a normal number, for the integer n in the lowest bits of t."""
    return math.ldexp(x, int(t - 1.5 * 2.0**52))


def exponent(x: float) -> float:
    """Return the n for which x / 2**n is in [1, 2), for a positive normal number."""
    return math.frexp(x)[1] - 1.0


def fraction(x: float) -> float:
    """Return x / 2**exponent(x), for a positive normal number."""
    return 2 * math.frexp(x)[0]


def sqrt(x: float) -> float:
    """Return the square root, NaN for a negative number."""
    return math.sqrt(x) if x >= 0 else math.nan


def fetch(array: np.ndarray, k: int) -> Any:
    """Return an element of an input, which the compiler may assume to be disjoint from all outputs."""
    return array[k]


def put(array: np.ndarray, k: int, value: Any) -> None:
    """Set an element of an output, which the compiler may assume to be disjoint from all inputs."""
    array[k] = value


def use_short_vectors() -> None:
    """Let the compiler prefer vectors of 256 bits for the loops of this function to longer ones.

    Where both exist, loops that wait for memory are faster with them, and loops that compute much are slower.
    """


def double(x: float) -> float:
    """Return a number in double precision, for sums."""
    return float(x)


def accumulate(total: float, x: float) -> float:
    """Return total + x. The compiler may add the terms of a sum in another order, to use vectors."""
    return total + x


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


class Rows(NamedTuple):
    """The left factor of `add_products`: values[starts[i] + shifts[g] + steps[k]]."""

    values: np.ndarray
    starts: np.ndarray
    shifts: np.ndarray
    steps: np.ndarray


class Columns(NamedTuple):
    """The right factor of `add_products`: values[bases[g] + places[k] + j]."""

    values: np.ndarray
    bases: np.ndarray
    places: np.ndarray


def add_products(
    sums: np.ndarray, pitch: int, left: Rows, rows: int, right: Columns, columns: int, fresh: bool
) -> None:
    """Compute a tile of sums of products in registers, and add it to `sums`, or, if `fresh`, write it there.

    sums[i * pitch + j] = sum over g and k of
        left.values[left.starts[i] + left.shifts[g] + left.steps[k]]
        * right.values[right.bases[g] + right.places[k] + j]

    for i < rows <= TILE_ROWS, and j < columns, a multiple of TILE.
    """
    for i in range(rows):
        for j in range(columns):
            total = left.values[0] * 0
            for g in range(len(left.shifts)):
                for k in range(len(left.steps)):
                    factor = left.values[left.starts[i] + left.shifts[g] + left.steps[k]]
                    total += factor * right.values[right.bases[g] + right.places[k] + j]
            if not fresh:
                total += sums[i * pitch + j]
            sums[i * pitch + j] = total


def transpose(into: np.ndarray, place: int, pitch: int, source: np.ndarray, start: int, stride: int) -> None:
    """into[place + i * pitch + k] = source[start + k * stride + i] for i and k < TILE"""
    for i in range(TILE):
        for k in range(TILE):
            into[place + i * pitch + k] = source[start + k * stride + i]


def clear(array: np.ndarray, place: int, count: int) -> None:
    """Set elements to zero."""
    for k in range(count):
        array[place + k] = 0


def copy_elements(into: np.ndarray, place: int, source: np.ndarray, start: int, count: int) -> None:
    """Copy elements from one place to another."""
    for k in range(count):
        into[place + k] = source[start + k]


def copy_vector(into: np.ndarray, place: int, source: np.ndarray, start: int) -> None:
    """Copy TILE elements."""
    for k in range(TILE):
        into[place + k] = source[start + k]


def prefetch(array: np.ndarray, place: int) -> None:
    """Begin to load an element, and those beside it, into the cache. It need not exist."""


class Factor(NamedTuple):
    """The left factor of `multiply_panel`: values[i * stride + t * step] in row i and column t."""

    values: np.ndarray
    stride: int
    step: int


def multiply_panel(
    sums: np.ndarray, stride: int, left: Factor, panel: np.ndarray, terms: int, rows: int, add: int
) -> None:
    """Multiply rows with a panel, a matrix with PANEL columns, in registers.

    sums[i * stride + k] = sum over t of left.values[i * left.stride + t * left.step] * panel[t * PANEL + k]

    If `add` is not 0, this is added to what is there.
    """
    for i in range(rows):
        for k in range(PANEL):
            total = panel.dtype.type(0)
            for t in range(terms):
                total += left.values[i * left.stride + t * left.step] * panel[t * PANEL + k]
            if add:
                total += sums[i * stride + k]
            sums[i * stride + k] = total


def add_row(sums: np.ndarray, rows: np.ndarray, starts: np.ndarray, weights: np.ndarray, count: int) -> None:
    """Compute a weighted sum of rows in registers: sums[k] = sum over t of weights[t] * rows[starts[t] + k].

    Up to SLACK elements more are read of every row, and written after the sum.
    """
    for k in range(count):
        total = weights[0] * 0
        for t in range(len(starts)):
            total += weights[t] * rows[starts[t] + k]
        sums[k] = total


def spread(
    into: np.ndarray, base: int, places: np.ndarray, first: int, source: np.ndarray, start: int, stride: int
) -> None:
    """into[base + places[first + i] + k] = source[start + k * stride + i] for i and k < TILE"""
    for i in range(TILE):
        for k in range(TILE):
            into[base + places[first + i] + k] = source[start + k * stride + i]


class Line(NamedTuple):
    """Vectors in memory: where the first one is, and the distance from one to the next."""

    place: int
    step: int


class Plane(NamedTuple):
    """Rows of vectors in memory: where the first vector is, and the distances of rows and of vectors."""

    place: int
    pitch: int
    step: int


class Taps(NamedTuple):
    """Taps of a kernel, from first to last, and how far from the source they see."""

    starts: np.ndarray
    first: int
    last: int


def convolve(
    memory: np.ndarray, sums: Line, initial: Line, source: Line, weights: int, taps: Taps, count: int
) -> None:
    """Compute weighted sums of vectors of TILE numbers in registers, for consecutive positions.

    For k < count, vector k of `sums` becomes that of `initial` plus the sum, over the taps t, of products of
    the vector at weights + t * TILE and the one that is taps.starts[t] behind vector k of `source`.
    """
    for k in range(count):
        for i in range(TILE):
            total = memory[initial.place + k * initial.step + i]
            for t in range(taps.first, taps.last):
                value = memory[source.place + taps.starts[t] + k * source.step + i]
                total += memory[weights + t * TILE + i] * value
            memory[sums.place + k * sums.step + i] = total


def correlate(
    memory: np.ndarray, sums: int, values: Line, source: Plane, taps: Taps, rows: int, count: int
) -> None:
    """Compute sums of products of vectors of TILE numbers in registers, and add them to what is there.

    For each tap t, the sum over row < rows and k < count of products is added to the vector at
    sums + (t - taps.first) * TILE. The factors are the vector at values.place + row * values.step + k * TILE,
    and the one that is taps.starts[t] behind vector k of the row of `source`.
    """
    for t in range(taps.first, taps.last):
        for i in range(TILE):
            total = memory[values.place] * 0
            for row in range(rows):
                for k in range(count):
                    place = source.place + row * source.pitch + k * source.step
                    factor = memory[place + taps.starts[t] + i]
                    total += memory[values.place + row * values.step + k * TILE + i] * factor
            memory[sums + (t - taps.first) * TILE + i] += total


def add_up(memory: np.ndarray, sums: int, values: int, pitch: int, rows: int, count: int) -> None:
    """Add up vectors of TILE numbers in double precision.

    The vector at sums is the sum, over row < rows and k < count, of those at values + row * pitch + k * TILE.
    """
    for i in range(TILE):
        total = 0.0
        for row in range(rows):
            for k in range(count):
                total += memory[values + row * pitch + k * TILE + i]
        memory[sums + i] = total


class Square(NamedTuple):
    """A square of vectors: the one in row i and column k begins at place + i * row + k * column."""

    values: np.ndarray
    place: int
    row: int
    column: int


def transform(kind: int, into: Square, source: Square, count: int) -> None:
    """Multiply a square of vectors with a matrix of TRANSFORMS from the left, its transpose from the right.

    The vectors have `count` times TILE numbers.
    """
    results, given = TRANSFORM_SIZES[kind]
    for lane in range(count * TILE):
        for i in range(results):
            for k in range(results):
                total = source.values[source.place] * 0
                for a in range(given):
                    for b in range(given):
                        factor = TRANSFORMS[kind][i][a] * TRANSFORMS[kind][k][b]
                        if factor != 0:
                            at = source.place + a * source.row + b * source.column
                            total += factor * source.values[at + lane]
                into.values[into.place + i * into.row + k * into.column + lane] = total


def subrecord(record: np.ndarray, start: int, size: int) -> np.ndarray:
    """Return consecutive integers of a record (see ortgrad.operators.records)."""
    return record[start : start + size]


class Pooled(NamedTuple):
    """The results of `pool_squares`, and where they begin."""

    largest: np.ndarray
    indices: np.ndarray
    place: int


def pool_squares(
    values: np.ndarray, above: int, below: int, into: Pooled, count: int, origin: int, width: int
) -> None:
    """Write the largest of two by two elements of two rows, and where it is.

    The first rows of the squares begin at above, and the second ones at below. The indices are those of
    elements in rows of `width` elements, of which the first one has the index origin. Of equal elements the
    first one counts, and NaN is never the larger one.
    """
    for k in range(count):
        best, index = values[above + 2 * k], 0
        if values[above + 2 * k + 1] > best:
            best, index = values[above + 2 * k + 1], 1
        if values[below + 2 * k] > best:
            best, index = values[below + 2 * k], width
        if values[below + 2 * k + 1] > best:
            best, index = values[below + 2 * k + 1], width + 1
        into.largest[into.place + k] = best
        into.indices[into.place + k] = origin + 2 * k + index


def copy_row(into: np.ndarray, source: np.ndarray) -> None:
    """Copy contiguous elements, as many as the shorter array has. Fast for short arrays, unlike a loop."""
    for k in range(min(len(into), len(source))):
        into[k] = source[k]


def copy_listed(
    into: np.ndarray, place: int, source: np.ndarray, start: int, places: np.ndarray, first: int, last: int
) -> None:
    """into[place + k] = source[start + places[k]] for k from first to last"""
    for k in range(first, last):
        into[place + k] = source[start + places[k]]


def add_listed(
    into: np.ndarray, place: int, places: np.ndarray, first: int, last: int, source: np.ndarray, start: int
) -> None:
    """into[place + places[k]] += source[start + k] for k from first to last, if all places are different"""
    for k in range(first, last):
        into[place + places[k]] += source[start + k]


SUMS = 256
SLACK = 64
# The most rows of add_products; its columns are a multiple of TILE.
TILE_ROWS, TILE = 6, 16
PANEL = 32
# Winograd's transforms for kernels of three taps: the matrices of F(2, 3) and F(3, 2), which share the points
# 0, 1, -1 and infinity. They transform four values, a kernel of three values, a kernel of two values, and the
# sums at the points to two and to three results. The sizes count the results and the operands; the rest of a
# matrix is zero.
OF_VALUES, OF_THREE, OF_TWO, TO_TWO, TO_THREE = range(5)
TRANSFORM_SIZES = ((4, 4), (4, 3), (4, 2), (2, 4), (3, 4))
TRANSFORMS = (
    ((1.0, 0.0, -1.0, 0.0), (0.0, 1.0, 1.0, 0.0), (0.0, -1.0, 1.0, 0.0), (0.0, 1.0, 0.0, -1.0)),
    ((1.0, 0.0, 0.0, 0.0), (0.5, 0.5, 0.5, 0.0), (0.5, -0.5, 0.5, 0.0), (0.0, 0.0, 1.0, 0.0)),
    ((1.0, 0.0, 0.0, 0.0), (0.5, 0.5, 0.0, 0.0), (0.5, -0.5, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0)),
    ((1.0, 1.0, 1.0, 0.0), (0.0, 1.0, -1.0, -1.0), (0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)),
    ((1.0, 1.0, 1.0, 0.0), (0.0, 1.0, -1.0, 0.0), (0.0, 1.0, 1.0, -1.0), (0.0, 0.0, 0.0, 0.0)),
)
# The compiler has instructions for these.
PRIMITIVES: dict[str, Callable[..., Any]] = {
    "rint": rint,
    "power_of_two": power_of_two,
    "times_power": times_power,
    "exponent": exponent,
    "fraction": fraction,
    "sqrt": sqrt,
    "fetch": fetch,
    "put": put,
    "use_short_vectors": use_short_vectors,
    "double": double,
    "accumulate": accumulate,
    "doubles": doubles,
    "allocate": allocate,
    "allocate_integers": allocate_integers,
    "release": release,
    "add_products": add_products,
    "transpose": transpose,
    "clear": clear,
    "copy_elements": copy_elements,
    "copy_vector": copy_vector,
    "prefetch": prefetch,
    "multiply_panel": multiply_panel,
    "add_row": add_row,
    "copy_row": copy_row,
    "copy_listed": copy_listed,
    "add_listed": add_listed,
    "spread": spread,
    "convolve": convolve,
    "correlate": correlate,
    "add_up": add_up,
    "transform": transform,
    "pool_squares": pool_squares,
    "subrecord": subrecord,
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


def _exp_of_rest_single(a: float, n: float) -> float:
    """exp(a - n log(2)) for the integer n that is nearest to a / log(2)"""
    # log(2) is in two parts.
    r = a - n * 0.693359375
    r = r + n * 2.12194440e-4
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    return p * (r * r) + r + 1.0


def _exp_of_rest_double(a: float, n: float) -> float:
    r = a - n * 6.93145751953125e-1
    r = r - n * 1.42860682030941723212e-6
    # A rational function, as in Cephes: exp(r) = 1 + 2 r P(r^2) / (Q(r^2) - r P(r^2)).
    s = r * r
    p = ((1.26177193074810590878e-4 * s + 3.02994407707441961300e-2) * s + 9.99999999999999999910e-1) * r
    q = (
        (3.00198505138664455042e-6 * s + 2.52448340349684104192e-3) * s + 2.27265548208155028766e-1
    ) * s + 2.00000000000000000009e0
    return 1.0 + 2.0 * (p / (q - p))


_exp_of_rest: Any = ByType(_exp_of_rest_single, _exp_of_rest_double)
# Adding it rounds to the nearest integer, which is then in the lowest bits of the sum.
_ROUNDING: Any = ByType(1.5 * 2.0**23, 1.5 * 2.0**52)
# The logarithms of the smallest normal number and of the largest number.
_LOWEST: Any = ByType(-87.33654475055310, -708.39641853226410)
_HIGHEST: Any = ByType(88.72283905206835, 709.78271289338397)
_INFINITY = math.inf


def exp_of_small(x: float) -> float:
    """Return the exponential function if the result is a normal number."""
    t = x * _LOG2E + _ROUNDING
    return times_power(_exp_of_rest(x, t - _ROUNDING), t)


def exp(x: float) -> float:
    """Return the exponential function; 0 if the result is smaller than all normal numbers."""
    y = exp_of_small(x)
    y = 0.0 if x < _LOWEST else y
    return y if x <= _HIGHEST else x * _INFINITY


def blend(a: float, weight_a: float, b: float, weight_b: float) -> float:
    """Return a * weight_a + b * weight_b, which is infinite if one product is."""
    return a * weight_a + b * weight_b
