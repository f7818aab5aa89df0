"""How depthwise convolutions are divided into strips, and the places of all vectors there.

A strip is some rows of a plane. It has boxes in the memory of a task: for the padded X, for dY with zeros
beside it, and for the sums, which are Y or dX. They consist of vectors, which hold one position of TILE
channels. Places in them are computed here, so that kernels only read tables.

If lanes of the vectors would be empty because there are few channels, a lane holds a piece instead: some rows
of a plane, of any channel and sample. All pieces use the same tables, which are made for a strip in the
middle of a high plane: rows beyond the edges are zeros, and results beyond the edges are not stored.

In one dimension, every element is a row. Rows with the same taps are then computed together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ortgrad.compiled.functions import TILE
from ortgrad.operators.records import numbers_of, size_of
from ortgrad.ops._windows import Windows
from ortgrad.ops.conv import costs
from ortgrad.ops.conv.costs import Depthwise

# Vectors in the boxes of a strip, which should stay in the second-level cache.
_STRIP = 4096
# How many products are added up before they are added to the sums, which keeps rounding errors small.
_TERMS = 256


class Geometry(NamedTuple):
    """The numbers that all tasks read."""

    samples: int = 0
    channels: int = 0
    filters: int = 0  # of a channel
    blocks: int = 0  # of TILE channels
    strips: int = 0  # of a plane
    units: int = 0  # pairs of a sample and a block, of a task
    taps: int = 0
    size: int = 0  # of a plane of X
    outputs: int = 0  # of a plane of Y
    x_box: int = 0  # sizes of the boxes
    dy_box: int = 0
    sum_box: int = 0
    x_width: int = 0  # elements of a row, and vectors of a row of the box
    x_line: int = 0
    dy_width: int = 0
    dy_line: int = 0
    dy_place: int = 0  # where dY begins in its box
    x_step: int = 0  # from a position of Y to the next in X
    x_pitch: int = 0  # from a row of Y to the next in X
    dx_step: int = 0  # from a position of dY to the next in dX
    wanted: int = 0  # the sum of 1 for dX, 2 for dW and 4 for dB
    skips: bool = False  # whether products of dY with padding are left out
    pieces: int = 0  # of a plane; 0 where lanes are channels
    planes: int = 0  # all channels of all samples, if there are pieces
    x_shift: int = 0  # from a piece to the next, in elements of X and of Y
    y_shift: int = 0


class Strip(NamedTuple):
    x_first: int = 0  # the elements of X, of dY or Y, and of dX
    x_count: int = 0
    y_first: int = 0
    y_count: int = 0
    dx_first: int = 0
    dx_count: int = 0
    x_place: int = 0  # where X begins in its box
    own_place: int = 0  # where the rows of dY that belong to the strip begin, their number and length
    own_rows: int = 0
    own_length: int = 0
    row: int = 0  # the first and last row of sums
    last_row: int = 0
    product: int = 0  # the first and last product
    last_product: int = 0


class Row(NamedTuple):
    """A row of sums."""

    place: int
    source: int  # the place of the values that it depends on
    length: int
    tap: int  # the first and last tap
    last_tap: int


class Product(NamedTuple):
    """Some products of dW."""

    tap: int  # the first and last tap
    last_tap: int
    dy: int  # the places in dY and X
    x: int
    rows: int
    length: int


STRIP, ROW, PRODUCT = size_of(Strip), size_of(Row), size_of(Product)


class Planes(NamedTuple):
    """How many planes there are."""

    samples: int
    channels: int


class Tables(NamedTuple):
    geometry: Geometry
    strips: list[Strip]
    rows: list[Row]
    products: list[Product]
    x_places: list[int]  # of consecutive elements
    dy_places: list[int]
    tap_places: list[int]  # where the weights of each tap are, in the order in which rows use them
    starts: list[int]  # where each tap begins in the box of X
    row_starts: list[int]  # where each tap of a row begins

    @property
    def numbers(self) -> dict[str, list[int]]:
        """The tables of the plan."""
        return {name: numbers_of(table) for name, table in self._asdict().items()}


def in_two_dimensions(win: Windows) -> Windows:
    """Return the same windows with rows and columns; the elements of a single row become rows."""
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

    def _tables(self, strips: list[Strip], rows: list[Row], products: list[Product]) -> Tables:
        win, line = self.win, self._x_pitch
        before, dy_line = self._dy_columns
        x_pitch = win.strides[0] * line * TILE
        geometry = Geometry(
            strips=len(strips),
            taps=math.prod(win.kernel),
            size=math.prod(win.sizes),
            outputs=math.prod(win.outputs),
            x_width=win.sizes[1],
            x_line=line,
            dy_width=win.outputs[1],
            dy_line=dy_line,
            dy_place=before * TILE,
            x_step=x_pitch if self._is_line else win.strides[1] * TILE,
            x_pitch=x_pitch,
            dx_step=win.strides[0 if self._is_line else 1] * TILE,
        )
        x_places = _places(max(strip.x_count for strip in strips), win.sizes[1], line)
        dy_places = _places(max(strip.y_count for strip in strips), win.outputs[1], dy_line)
        taps = [t * TILE for t in range(geometry.taps)]
        return Tables(geometry, strips, rows, products, x_places, dy_places, taps, self._starts, self._starts)

    def _in_pieces(self, rows: int, size: int, planes: Planes, tables: Callable[..., Tables]) -> Tables:
        """Return the tables of pieces of `size` rows of dY, or of X divided by the stride."""
        win = self.win
        top = win.heads[0] + win.extents[0]
        high = (top + size + 1) * win.strides[0] + top, top + size
        tall = Windows(
            (high[0], win.sizes[1]), (high[1], win.outputs[1]), *(getattr(win, name) for name in _KEPT)
        )
        made = tables(Division(tall), [(top, top + size)])
        row, output = win.strides[0] * win.sizes[1], win.outputs[1]
        (strip,) = made.strips
        first = strip._replace(
            x_first=strip.x_first - top * row,
            dx_first=strip.dx_first - top * row,
            y_first=strip.y_first - top * output,
        )
        geometry = made.geometry._replace(
            size=math.prod(win.sizes),
            outputs=math.prod(win.outputs),
            pieces=-(-rows // size),
            planes=math.prod(planes),
            x_shift=size * row,
            y_shift=size * output,
        )
        return made._replace(geometry=geometry, strips=[first])

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
        strips: list[Strip] = []
        rows: list[Row] = []
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
                rows.append(Row(row * width * TILE, source, count if self._is_line else width, *taps))
            padding = first + win.heads[0] - top * win.strides[0]
            strip = Strip(
                x_first=first * win.sizes[1],
                x_count=(last - first) * win.sizes[1],
                y_first=top * width,
                y_count=(bottom - top) * width,
                x_place=(padding * pitch + win.heads[1]) * TILE,
                row=begin,
                last_row=len(rows),
            )
            strips.append(strip)
        tables = self._tables(strips, rows, [])
        most = max(bottom - top for top, bottom in bounds)
        geometry = tables.geometry._replace(
            x_box=((most - 1) * win.strides[0] + win.extents[0]) * pitch * TILE,
            sum_box=most * width * TILE,
        )
        return tables._replace(geometry=geometry)

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
        strips: list[Strip] = []
        rows: list[Row] = []
        products: list[Product] = []
        classes = _Classes.of(win, dy_pitch)
        for top, bottom in bounds:
            # The windows of the rows of dY before this one begin in the strip, or before it.
            own = max(top, min(bottom, height))
            dy_first = min(own, max(0, top - reach) if dx else top)
            x_first, x_last = self._x_rows(top, own)
            dx_first, dx_last = (min(max(0, edge * stride - head), win.sizes[0]) for edge in (top, bottom))
            own_rows, own_length = (1, own - top) if self._is_line else (own - top, width)
            strip = Strip(
                x_first=x_first * win.sizes[1],
                x_count=(x_last - x_first) * win.sizes[1],
                y_first=dy_first * width,
                y_count=(own - dy_first) * width,
                dx_first=dx_first * win.sizes[1] if dx else 0,
                dx_count=(dx_last - dx_first) * win.sizes[1] if dx else 0,
                x_place=((x_first + head - top * stride) * pitch + win.heads[1]) * TILE,
                own_place=((top - dy_first) * dy_pitch + before) * TILE,
                own_rows=own_rows,
                own_length=own_length,
                row=len(rows),
                product=len(products),
            )
            if dx:
                rows += self._rows_of_dx(classes, dx_first, dx_last, dy_first)
            for first, last, low, high in groups if dw else ():
                for row, column, count, length in self._pieces(max(top, low), min(own, high)):
                    dy_place = (row - dy_first) * dy_pitch + before + column
                    x_place = (row - top) * stride * pitch + column * win.strides[1]
                    products.append(Product(first, last, dy_place * TILE, x_place * TILE, count, length))
            strips.append(strip._replace(last_row=len(rows), last_product=len(products)))
        tables = self._tables(strips, rows, products)
        most = max(bottom - top for top, bottom in bounds)
        geometry = tables.geometry._replace(
            x_box=((most - 1) * stride + win.extents[0]) * pitch * TILE if dw else 0,
            dy_box=(most + reach) * dy_pitch * TILE,
            sum_box=most * stride * win.sizes[1] * TILE if dx else 0,
            skips=dw and any(last - first < height for _, _, first, last in groups),
        )
        return tables._replace(geometry=geometry, tap_places=classes.tap_places, row_starts=classes.starts)

    def _rows_of_dx(self, classes: _Classes, first: int, last: int, dy_first: int) -> Iterator[Row]:
        """Return the rows of dX from the first to the last; with strides, in several parts."""
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
                    yield Row(
                        (int(own[i] - first) * win.sizes[1] + column) * TILE,
                        source * TILE,
                        length,
                        *(begin + int(each[i]) * taps for each in (low, high)),
                    )

    def _groups(self) -> list[tuple[int, int, int, int]]:
        """Return ranges of taps, with the rows of the output whose products are added up for dW.

        If much of what windows see is padding, as in small planes, there is a group for each row of the
        kernel, without the rows of the output for which it sees padding.
        """
        win, (height, kernel) = self.win, (self.win.outputs[0], self.win.kernel)
        groups = []
        for k in range(kernel[0]):
            shift = win.heads[0] - k * win.dilations[0]
            low = min(max(0, -(-shift // win.strides[0])), height)
            high = max(low, min(height, (win.sizes[0] - 1 + shift) // win.strides[0] + 1))
            groups.append((k * kernel[1], (k + 1) * kernel[1], low, high))
        # The number of vectors that are read if the sums of 9 taps are in registers.
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
    """The taps, grouped by the remainders of their places in a window when divided by the strides.

    An element of dX depends on dY through the taps with the same remainder as its place in the padded X.
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

    A row takes `each` vectors, and a piece `fixed` more.
    """
    if planes.channels % TILE == 0:
        return 0
    best = costs.time_of(_channel_counts(rows, each, fixed, planes))
    found = 0
    for size in range(least, rows + 1):
        if size > least and size * each + fixed > _STRIP:
            break
        pieces = planes.channels * -(-rows // size)
        work = costs.time_of(_piece_counts(pieces, size * each + fixed, taps, planes.samples))
        if work < best:
            best, found = work, size
    return found


def _channel_counts(rows: int, each: int, fixed: int, planes: Planes) -> Depthwise:
    """Return how often each cost occurs if lanes are channels; a strip takes `fixed` more vectors."""
    blocks, strips = planes.samples * -(-planes.channels // TILE), len(_strips(rows, each, fixed, 1))
    return Depthwise(blocks * (rows * each + strips * fixed), blocks * strips, 0, 0, 0)


def _piece_counts(pieces: int, vectors: int, taps: int, samples: int) -> Depthwise:
    """Return how often each cost occurs if lanes are pieces, of which a sample has `pieces`."""
    count = -(-samples * pieces // TILE)
    # Other blocks have the same weights if whole samples are in a block.
    loads = min(count, 2) if TILE % pieces == 0 else count
    return Depthwise(0, 0, count * vectors, count, loads * taps)


def _strips(rows: int, each: int, fixed: int, least: int) -> list[tuple[int, int]]:
    """Divide rows into strips; a row takes `each` vectors, and a strip `fixed` more."""
    count = -(-rows // max(1, least, (_STRIP - fixed) // each))
    size = -(-rows // count)
    return [(first, min(first + size, rows)) for first in range(0, rows, size)]


def _runs(low: np.ndarray, high: np.ndarray, join: bool) -> Iterator[tuple[int, int]]:
    """Return the first row and the length of each run of rows with the same taps; unless joined, each row."""
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
