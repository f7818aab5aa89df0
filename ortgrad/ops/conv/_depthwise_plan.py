"""How depthwise convolutions are divided into strips, and the places of all vectors there.

A strip is some rows of a plane. It has boxes in the memory of a task: for the padded X, for dY with zeros
beside it, and for the sums, which are Y or dX. They consist of vectors, which hold one position of TILE
channels. Places in them are computed here, so that kernels only read tables.

Where this leaves lanes of the vectors empty, because there are few channels, a lane has a piece instead: some
rows of a plane, of any channel and sample. All pieces have the same tables, which are those of a strip in the
middle of a high plane: rows beyond the edges are zeros, and results beyond them are not stored.

In one dimension, every element is a row, so that strips are some of them. Rows with the same taps are then
computed together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ortgrad.compiled.functions import TILE
from ortgrad.ops._windows import Windows

# Vectors in the boxes of a strip, which stay in the second cache.
_STRIP = 4096
# In vectors: what a block of lanes takes beside its own, one of pieces with its edges, and each tap of it.
_BLOCK, _EDGES, _TAP = 32, 224, 8
# How much longer a vector of pieces takes.
_SLOWER = 1.4
# Products that are added up before they are added to the sums: as many as keep the rounding errors small.
_TERMS = 256

# Places in `geometry`.
SAMPLES, CHANNELS, FILTERS, BLOCKS = range(4)  # filters of a channel, blocks of TILE channels
STRIPS, UNITS = 4, 5  # strips of a plane; units of a task, which are pairs of a sample and a block
TAPS, SIZE, OUTPUTS = 6, 7, 8  # of a window, a plane of X and one of Y
X_BOX, DY_BOX, SUM_BOX = 9, 10, 11  # sizes
X_WIDTH, X_LINE, DY_WIDTH, DY_LINE = range(12, 16)  # elements of a row, and vectors of one of the box
DY_PLACE = 16  # where dY begins in its box
X_STEP, X_PITCH, DX_STEP = 17, 18, 19  # from a position, or row, of Y to the next in X; likewise of dY in dX
WANTED = 20
SKIPS = 21  # whether products of dY with padding are left out
PIECES = 22  # of a plane; 0 where lanes are channels
PLANES = 23  # all channels of all samples, if there are pieces
X_SHIFT, Y_SHIFT = 24, 25  # from a piece to the next, in elements of X and of Y
_FIELDS = 26

# Numbers of a strip: the elements of X, of dY or Y, and of dX; where X begins in its box, and where the rows
# of dY do that belong to the strip, their number and length; the first and last row of sums, and product.
X_FIRST, X_COUNT, Y_FIRST, Y_COUNT, DX_FIRST, DX_COUNT = range(6)
X_PLACE, OWN_PLACE, OWN_ROWS, OWN_LENGTH, ROW, LAST_ROW, PRODUCT, LAST_PRODUCT, STRIP_FIELDS = range(6, 15)
# Numbers of a row of sums: its place, that of what it depends on, its length, its first and last tap.
ROW_PLACE, ROW_SOURCE, ROW_LENGTH, ROW_TAP, ROW_LAST_TAP, ROW_FIELDS = range(6)
# Numbers of some products of dW: the first and last tap, the places in dY and X, the rows and their length.
PRODUCT_TAP, PRODUCT_LAST_TAP, PRODUCT_DY, PRODUCT_X, PRODUCT_ROWS, PRODUCT_LENGTH, PRODUCT_FIELDS = range(7)


class Planes(NamedTuple):
    """How many planes there are."""

    samples: int
    channels: int


class Tables(NamedTuple):
    geometry: list[int]
    strips: list[int]
    rows: list[int]
    products: list[int]
    x_places: list[int]  # of consecutive elements
    dy_places: list[int]
    tap_places: list[int]  # where the weights of each tap are, in the order in which rows use them
    starts: list[int]  # where each tap begins in the box of X
    row_starts: list[int]  # where each tap of a row begins


def in_two_dimensions(win: Windows) -> Windows:
    """The same windows with rows and columns; if there is a single row, its elements become the rows."""
    fields = (win.sizes, win.outputs, win.kernel, win.strides, win.dilations, win.heads, win.tails)
    single = [
        n == o == k == 1 and h == 0
        for n, o, k, h in zip(win.sizes, win.outputs, win.kernel, win.heads, strict=True)
    ]
    if win.rank == 2 and not any(single):
        return win
    axis = 1 if single[0] and win.rank == 2 else 0
    return Windows(*((values[axis], int(i < 5)) for i, values in enumerate(fields)))


@dataclass(frozen=True)
class Division:
    """The strips of a convolution whose windows are in two dimensions."""

    win: Windows

    @property
    def _is_line(self) -> bool:
        """Whether rows are single elements."""
        return self.win.sizes[1] == self.win.outputs[1] == self.win.kernel[1] == 1 and self.win.heads[1] == 0

    @property
    def _x_pitch(self) -> int:
        return max(self.win.heads[1] + self.win.sizes[1], self.win.reach[1])

    @property
    def _dy_columns(self) -> tuple[int, int]:
        """Return the number of zeros before a row of dY, and the pitch of the rows."""
        head, stride = self.win.heads[1], self.win.strides[1]
        before = max(0, (self.win.extents[1] - 1) // stride - head // stride)
        return before, before + max(self.win.outputs[1], (self.win.sizes[1] - 1 + head) // stride + 1)

    @property
    def _starts(self) -> list[int]:
        rows, columns = (
            [k * d for k in range(n)] for n, d in zip(self.win.kernel, self.win.dilations, strict=True)
        )
        return [(row * self._x_pitch + column) * TILE for row in rows for column in columns]

    def _x_rows(self, top: int, bottom: int) -> tuple[int, int]:
        """Return the rows of X that the windows of some rows of the output see."""
        first = top * self.win.strides[0] - self.win.heads[0]
        last = first + (bottom - top - 1) * self.win.strides[0] + self.win.extents[0]
        low = min(max(0, first), self.win.sizes[0])
        return low, max(low, min(last, self.win.sizes[0])) if bottom > top else low

    def _tables(self, strips: list[list[int]], rows: list[int], products: list[int]) -> Tables:
        geometry = [0] * _FIELDS
        geometry[STRIPS], geometry[TAPS] = len(strips), math.prod(self.win.kernel)
        geometry[SIZE], geometry[OUTPUTS] = math.prod(self.win.sizes), math.prod(self.win.outputs)
        geometry[X_WIDTH], geometry[X_LINE] = self.win.sizes[1], self._x_pitch
        geometry[DY_WIDTH], geometry[DY_LINE] = self.win.outputs[1], self._dy_columns[1]
        geometry[DY_PLACE] = self._dy_columns[0] * TILE
        geometry[X_PITCH] = self.win.strides[0] * self._x_pitch * TILE
        geometry[X_STEP] = geometry[X_PITCH] if self._is_line else self.win.strides[1] * TILE
        geometry[DX_STEP] = self.win.strides[0 if self._is_line else 1] * TILE

        def most(field: int) -> int:
            return max(strip[field] for strip in strips)

        flat = [number for strip in strips for number in strip]
        x_places = _places(most(X_COUNT), self.win.sizes[1], self._x_pitch)
        dy_places = _places(most(Y_COUNT), self.win.outputs[1], self._dy_columns[1])
        taps = [t * TILE for t in range(geometry[TAPS])]
        return Tables(geometry, flat, rows, products, x_places, dy_places, taps, self._starts, self._starts)

    def _in_pieces(self, rows: int, size: int, planes: Planes, tables: Callable[..., Tables]) -> Tables:
        """Return the tables of pieces of so many rows of dY, or of X divided by the stride."""
        win = self.win
        top = win.heads[0] + win.extents[0]
        high = (top + size + 1) * win.strides[0] + top, top + size
        tall = Windows(
            (high[0], win.sizes[1]), (high[1], win.outputs[1]), *(getattr(win, name) for name in _KEPT)
        )
        made = tables(Division(tall), [(top, top + size)])
        geometry, strip = made.geometry, made.strips
        geometry[SIZE], geometry[OUTPUTS] = math.prod(win.sizes), math.prod(win.outputs)
        geometry[PIECES], geometry[PLANES] = -(-rows // size), math.prod(planes)
        row, output = win.strides[0] * win.sizes[1], win.outputs[1]
        geometry[X_SHIFT], geometry[Y_SHIFT] = size * row, size * output
        # The places of the first piece.
        strip[X_FIRST] -= top * row
        strip[DX_FIRST] -= top * row
        strip[Y_FIRST] -= top * output
        return made

    def forward(self, planes: Planes) -> Tables:
        """Return the tables of the convolution: its strips are rows of Y."""
        win, pitch = self.win, self._x_pitch
        height, width = win.outputs
        each, fixed = win.strides[0] * pitch + width, (win.extents[0] - 1) * pitch
        least = -(-TILE // min(win.sizes[1], width))
        size = _piece(height, each, fixed, least, math.prod(win.kernel), planes)
        if size:
            return self._in_pieces(height, size, planes, Division._forward)
        return self._forward(_strips(height, each, fixed, 1))

    def _forward(self, bounds: list[tuple[int, int]]) -> Tables:
        win, pitch = self.win, self._x_pitch
        height, width = win.outputs
        strips: list[list[int]] = []
        rows: list[tuple[int, ...]] = []
        places = np.arange(height) * win.strides[0] - win.heads[0]
        # The rows of the kernel that see no padding.
        gap = win.dilations[0]
        low = np.clip(-(places // gap), 0, win.kernel[0])
        high = np.clip((win.sizes[0] - 1 - places) // gap + 1, low, win.kernel[0])
        for top, bottom in bounds:
            first, last = self._x_rows(top, bottom)
            begin = len(rows)
            for row, count in _runs(low[top:bottom], high[top:bottom], self._is_line):
                taps = [int(each[top + row]) * win.kernel[1] for each in (low, high)]
                source = row * win.strides[0] * pitch * TILE
                rows.append((row * width * TILE, source, count if self._is_line else width, *taps))
            padding = first + win.heads[0] - top * win.strides[0]
            strip = [0] * STRIP_FIELDS
            strip[X_FIRST], strip[X_COUNT] = first * win.sizes[1], (last - first) * win.sizes[1]
            strip[Y_FIRST], strip[Y_COUNT] = top * width, (bottom - top) * width
            strip[X_PLACE] = (padding * pitch + win.heads[1]) * TILE
            strip[ROW], strip[LAST_ROW] = begin, len(rows)
            strips.append(strip)
        tables = self._tables(strips, [number for row in rows for number in row], [])
        most = max(bottom - top for top, bottom in bounds)
        tables.geometry[X_BOX] = ((most - 1) * win.strides[0] + win.extents[0]) * pitch * TILE
        tables.geometry[SUM_BOX] = most * width * TILE
        return tables

    def backward(self, dx: bool, dw: bool, planes: Planes) -> Tables:
        """Return the tables of the gradient.

        Its strips are rows of the padded X, divided by the stride, and the rows of dY whose windows begin
        there. dX also depends on rows of dY before them, and dW on rows of X behind them.
        """
        win, pitch = self.win, self._x_pitch
        stride, head, dy_pitch = win.strides[0], win.heads[0], self._dy_columns[1]
        reach = (win.extents[0] - 1) // stride
        fixed = (win.extents[0] - stride) * pitch * dw + reach * dy_pitch
        each = stride * (pitch * dw + win.sizes[1] * dx) + dy_pitch
        units = max(win.outputs[0], -(-(win.sizes[0] + head) // stride)) if dx else win.outputs[0]
        least = -(-TILE // min(win.sizes[1], win.outputs[1]))
        size = _piece(units, each, fixed, least, math.prod(win.kernel), planes)
        if size:
            return self._in_pieces(units, size, planes, lambda tall, bounds: tall._backward(bounds, dx, dw))
        return self._backward(_strips(units, each, fixed, 2 * reach), dx, dw)

    def _backward(self, bounds: list[tuple[int, int]], dx: bool, dw: bool) -> Tables:
        win, pitch = self.win, self._x_pitch
        stride, head, (height, width) = win.strides[0], win.heads[0], win.outputs
        before, dy_pitch = self._dy_columns
        reach = (win.extents[0] - 1) // stride
        groups = self._groups()
        strips: list[list[int]] = []
        rows: list[tuple[int, ...]] = []
        products: list[tuple[int, ...]] = []
        classes = _Classes.of(win, dy_pitch)
        for top, bottom in bounds:
            # The end of the rows of dY whose windows begin in the strip.
            own = max(top, min(bottom, height))
            dy_first = min(own, max(0, top - reach) if dx else top)
            x_first, x_last = self._x_rows(top, own)
            dx_first, dx_last = (min(max(0, edge * stride - head), win.sizes[0]) for edge in (top, bottom))
            strip = [0] * STRIP_FIELDS
            strip[X_FIRST], strip[X_COUNT] = x_first * win.sizes[1], (x_last - x_first) * win.sizes[1]
            strip[X_PLACE] = ((x_first + head - top * stride) * pitch + win.heads[1]) * TILE
            strip[Y_FIRST], strip[Y_COUNT] = dy_first * width, (own - dy_first) * width
            strip[OWN_PLACE] = ((top - dy_first) * dy_pitch + before) * TILE
            strip[OWN_ROWS], strip[OWN_LENGTH] = (1, own - top) if self._is_line else (own - top, width)
            strip[ROW], strip[PRODUCT] = len(rows), len(products)
            if dx:
                strip[DX_FIRST] = dx_first * win.sizes[1]
                strip[DX_COUNT] = (dx_last - dx_first) * win.sizes[1]
                rows += self._rows_of_dx(classes, dx_first, dx_last, dy_first)
            for first, last, low, high in groups if dw else ():
                for row, column, count, length in self._pieces(max(top, low), min(own, high)):
                    dy_place = (row - dy_first) * dy_pitch + before + column
                    x_place = (row - top) * stride * pitch + column * win.strides[1]
                    products.append((first, last, dy_place * TILE, x_place * TILE, count, length))
            strip[LAST_ROW], strip[LAST_PRODUCT] = len(rows), len(products)
            strips.append(strip)
        flat = ([number for each in table for number in each] for table in (rows, products))
        tables = self._tables(strips, *flat)
        most = max(bottom - top for top, bottom in bounds)
        if dw:
            tables.geometry[X_BOX] = ((most - 1) * stride + win.extents[0]) * pitch * TILE
        tables.geometry[DY_BOX] = (most + reach) * dy_pitch * TILE
        tables.geometry[SUM_BOX] = most * stride * win.sizes[1] * TILE if dx else 0
        tables.geometry[SKIPS] = int(dw and any(last - first < height for _, _, first, last in groups))
        return tables._replace(tap_places=classes.tap_places, row_starts=classes.starts)

    def _rows_of_dx(
        self, classes: _Classes, first: int, last: int, dy_first: int
    ) -> Iterator[tuple[int, ...]]:
        """Return the numbers of the rows of dX from the first to the last; with strides, in several parts."""
        win, (before, dy_pitch) = self.win, self._dy_columns
        for remainder in range(win.strides[0]):
            own = np.arange(first + (remainder - win.heads[0] - first) % win.strides[0], last, win.strides[0])
            if not len(own):
                continue
            places = (own + win.heads[0]) // win.strides[0]
            # The rows of the kernel for which there is a row of dY.
            shifts = classes.shifts[remainder]
            low = np.searchsorted(shifts, places - win.outputs[0], "right")
            high = np.maximum(low, np.searchsorted(shifts, places, "right"))
            for i, count in _runs(low, high, self._is_line):
                for column in range(min(win.strides[1], win.sizes[1])):
                    place = column + win.heads[1]
                    begin, taps = classes.taps[remainder, place % win.strides[1]]
                    length = count if self._is_line else (win.sizes[1] - 1 - column) // win.strides[1] + 1
                    source = (int(places[i]) - dy_first) * dy_pitch + place // win.strides[1] + before
                    yield (
                        (int(own[i] - first) * win.sizes[1] + column) * TILE,
                        source * TILE,
                        length,
                        *(begin + int(each[i]) * taps for each in (low, high)),
                    )

    def _groups(self) -> list[tuple[int, int, int, int]]:
        """Return ranges of taps, with the rows of the output whose products are added up for dW.

        Where much of what windows see is padding, as in small planes, there is a group for each row of the
        kernel, without the rows of the output for which that sees padding.
        """
        win, (height, kernel) = self.win, (self.win.outputs[0], self.win.kernel)
        groups = []
        for k in range(kernel[0]):
            shift = win.heads[0] - k * win.dilations[0]
            low = min(max(0, -(-shift // win.strides[0])), height)
            high = max(low, min(height, (win.sizes[0] - 1 + shift) // win.strides[0] + 1))
            groups.append((k * kernel[1], (k + 1) * kernel[1], low, high))
        # Vectors that are read, if the sums of 9 taps are in registers.
        taps = math.prod(kernel)
        together = height * (taps + -(-taps // 9))
        single = sum((high - low) * (kernel[1] + -(-kernel[1] // 9)) for _, _, low, high in groups)
        return groups if single < together else [(0, taps, 0, height)]

    def _pieces(self, top: int, bottom: int) -> Iterator[tuple[int, int, int, int]]:
        """Divide rows of the output into pieces of up to _TERMS: the first row and column, rows, columns."""
        width = self.win.outputs[1]
        if self._is_line:
            for row in range(top, bottom, _TERMS):
                yield row, 0, 1, min(_TERMS, bottom - row)
            return
        count = max(1, _TERMS // width)
        for row, column in itertools.product(range(top, bottom, count), range(0, width, _TERMS)):
            yield row, column, min(count, bottom - row), min(_TERMS, width - column)


class _Classes(NamedTuple):
    """The taps by the remainders of their places in a window, divided by the strides.

    An element of dX depends on dY by the taps with the remainder of its own place in the padded X.
    """

    taps: dict[tuple[int, int], tuple[int, int]]  # the first of each class, and their number in a row
    shifts: list[list[int]]  # the rows of each remainder, divided by the stride
    starts: list[int]  # where each tap begins in the box of dY
    tap_places: list[int]

    @classmethod
    def of(cls, win: Windows, pitch: int) -> _Classes:
        found: list[list[list[tuple[int, int]]]] = []
        for n, d, s in zip(win.kernel, win.dilations, win.strides, strict=True):
            of_axis: list[list[tuple[int, int]]] = [[] for _ in range(s)]
            for k in range(n):
                of_axis[k * d % s].append((k, k * d // s))
            found.append(of_axis)
        shifts = [[shift for _, shift in each] for each in found[0]]
        classes = cls({}, shifts, [], [0] * math.prod(win.kernel))
        for (i, rows), (j, columns) in itertools.product(*map(enumerate, found)):
            classes.taps[i, j] = len(classes.starts), len(columns)
            for (row, down), (column, right) in itertools.product(rows, columns):
                classes.tap_places[row * win.kernel[1] + column] = len(classes.starts) * TILE
                classes.starts.append(-(down * pitch + right) * TILE)
        return classes


_KEPT = ("kernel", "strides", "dilations", "heads", "tails")


def _piece(rows: int, each: int, fixed: int, least: int, taps: int, planes: Planes) -> int:
    """Return how many of the rows a piece has that fills a lane; 0 if lanes are channels.

    A row takes so many vectors, and a piece the others. The work is that of all vectors.
    """
    if planes.channels % TILE == 0:
        return 0
    blocks = planes.samples * -(-planes.channels // TILE)
    strips = _strips(rows, each, fixed, 1)
    best: float = blocks * (rows * each + len(strips) * (fixed + _BLOCK))
    found = 0
    for size in range(least, rows + 1):
        if size > least and size * each + fixed > _STRIP:
            break
        pieces = planes.channels * -(-rows // size)
        count = -(-planes.samples * pieces // TILE)
        # Other blocks have the same weights if whole samples are in a block.
        loads = min(count, 2) if TILE % pieces == 0 else count
        work = count * (_SLOWER * (size * each + fixed) + _EDGES) + loads * _TAP * taps
        if work < best:
            best, found = work, size
    return found


def _strips(rows: int, each: int, fixed: int, least: int) -> list[tuple[int, int]]:
    """Divide rows into strips, with so many vectors for each row and, beside them, for a strip."""
    count = -(-rows // max(1, least, (_STRIP - fixed) // each))
    size = -(-rows // count)
    return [(first, min(first + size, rows)) for first in range(0, rows, size)]


def _runs(low: np.ndarray, high: np.ndarray, join: bool) -> Iterator[tuple[int, int]]:
    """Return every row by itself, or, to join them, the first and the number of those with the same taps."""
    if not join:
        yield from ((row, 1) for row in range(len(low)))
        return
    changes = np.flatnonzero((low[1:] != low[:-1]) | (high[1:] != high[:-1])) + 1
    bounds: Sequence[int] = [0, *changes.tolist(), len(low)]
    yield from ((first, last - first) for first, last in itertools.pairwise(bounds))


def _places(count: int, width: int, pitch: int) -> list[int]:
    """Return the places of consecutive elements in a box."""
    rows, columns = np.divmod(np.arange(count), width)
    return ((rows * pitch + columns) * TILE).tolist()
