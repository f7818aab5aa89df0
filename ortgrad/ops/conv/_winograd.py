"""Winograd's convolutions with kernels of 3x3, for Numba: 16 products instead of 36 for four results.

A tile is a square of 2x2 results. The square of 4x4 values that its windows see is transformed, as are the
weights; the products of the two are added up over the channels, and the sums transformed into results. So a
convolution is 16 products of matrices, one for each number of the transforms, whose rows are tiles, and which
`add_products` computes in registers. Up to rounding, a result depends only on what its window sees.

Tensors are first copied into boxes, with their padding and with the channels last, so that vectors hold
channels.

If a value is NaN or infinite, the result of the transforms is not finite either, but it differs from a sum of
products: then the NumPy kernel takes over.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ortgrad.compiled.functions import (
    OF_THREE,
    OF_VALUES,
    TILE,
    TO_TWO,
    Columns,
    Rows,
    Square,
    allocate,
    allocate_integers,
    clear,
    copy_elements,
    release,
    spread,
    transform,
    transpose,
)
from ortgrad.ops._rows import add_to
from ortgrad.ops._windows import Plane
from ortgrad.ops.conv._forward_geometry import Result, finish
from ortgrad.ops.conv._geometry import COLUMNS, TERMS
from ortgrad.ops.conv._memory import add_tiles, aligned, are_finite, return_memory, take_memory

if TYPE_CHECKING:
    from ortgrad.ops._windows import Windows

# The number of points at which transforms are multiplied. In memory, points are a matrix and TILE elements
# apart: at a distance of a multiple of 4096 bytes they would compete for the same place in the cache.
POINTS = 16
# About how many positions a task copies into a box.
_POSITIONS = 1024
# About how many tiles a task has. Their results fill squares that are transposed at once, and their
# transforms should stay in the cache, but weights should be loaded for as many tiles as possible.
_TILES, _FEWEST_TILES, _MOST_TILES, _CACHED = 8, 48, 96, 1 << 13
# Enough tasks for several threads.
_TASKS = 8
TAPS = 9
# If the transformed weights do not fit into the cache and few tasks use them, every task transforms the
# weights itself, some channels at a time.
_LARGE, _FEW_UNITS, _CHANNELS_OF_LARGE = 1 << 14, 4, 64
# The number of channels whose weights a task transforms for the others.
_CHANNELS = 32


def up(number: int, unit: int) -> int:
    """Return the number, rounded up to a multiple of a unit."""
    return -(-number // unit) * unit


class Points(NamedTuple):
    """Matrices of numbers, one for each point, and how far apart they are."""

    values: np.ndarray
    pitch: int


class Tiles(NamedTuple):
    """Consecutive tiles of all samples, and how many there may be at most."""

    first: int
    number: int
    most: int


class Box(NamedTuple):
    """A tensor with zeros around it and its channels last."""

    samples: int
    channels: int
    size: Plane  # of the tensor
    sizes: Plane  # of the box
    origin: Plane  # of the tensor in it

    @property
    def elements(self) -> int:
        return self.samples * math.prod(self.sizes) * up(self.channels, TILE) + TILE


class Convolution(NamedTuple):
    """A convolution of what is in a box."""

    output: Plane
    channels: int
    filters: int
    turned: bool  # whether filters are the channels of the weights, and kernels are turned
    tiles: int  # of a task
    units: int  # tasks for all tiles
    blocks: int  # of columns, of a task
    own_weights: bool  # whether a task transforms the weights itself

    @classmethod
    def of(cls, box: Box, output: Plane, filters: int, *, turned: bool = False) -> Convolution:
        """Return a convolution that is divided into tasks."""
        tiles, blocks = tiles_of(box.samples, output), -(-filters // COLUMNS)
        numbers = up(box.channels, TILE) + min(COLUMNS, up(filters, TILE))
        wanted = max(_FEWEST_TILES, min(_MOST_TILES, _CACHED // numbers))
        of_task = up(-(-tiles // max(1, round(tiles / wanted))), _TILES)
        units = -(-tiles // of_task)
        # A task computes all blocks of columns, unless there are few tasks.
        blocks = -(-blocks // min(blocks, -(-_TASKS // units)))
        own_weights = box.channels * filters >= _LARGE and units <= _FEW_UNITS
        return cls(output, box.channels, filters, turned, of_task, units, blocks, own_weights)

    @property
    def tasks(self) -> int:
        return self.units * -(-self.filters // (COLUMNS * self.blocks))

    @property
    def weights(self) -> int:
        """The elements of the transformed weights that tasks share."""
        blocks = -(-self.filters // COLUMNS)
        elements = POINTS * (self.channels * up(self.filters, TILE) + blocks * TILE) + TILE
        return 0 if self.own_weights else elements

    @property
    def weight_tasks(self) -> int:
        """How many tasks transform these."""
        return 0 if self.own_weights else -(-self.filters // COLUMNS) * -(-self.channels // _CHANNELS)


def tiles_of(samples: int, output: Plane) -> int:
    """Return the number of tiles of all samples."""
    return samples * ((output.height + 1) // 2) * ((output.width + 1) // 2)


def box_tasks(box: Box) -> int:
    """Return how many tasks fill a box."""
    rows = _rows_of_task(box)
    return box.samples * ((box.sizes.height + rows - 1) // rows)


def _rows_of_task(box: Box) -> int:
    return max(1, min(box.sizes.height, _POSITIONS // box.sizes.width))


def fits(win: Windows, channels: int, filters: int) -> bool:
    """Return whether these kernels support the windows and tensors."""
    return (
        win.kernel == (3, 3)
        and max(*win.strides, *win.dilations) == 1
        and max(*win.heads, *win.tails) <= 2
        and min(channels, filters) >= TILE
    )


def fill_box(task: int, source: np.ndarray, memory: np.ndarray, box: Box) -> bool:
    """Copy some rows of a sample into its box."""
    channels, height, width = box.channels, box.size.height, box.size.width
    rows, pitch, top, left = box.sizes.height, box.sizes.width, box.origin.height, box.origin.width
    padded, plane = (channels + TILE - 1) // TILE * TILE, height * width
    most, tasks = _rows_of_task(box), box_tasks(box) // box.samples
    sample, first = task // tasks, task % tasks * most
    last = min(first + most, rows)
    places = allocate_integers(TILE)
    if len(places) == 0:
        return True
    into = aligned(memory)
    for row in range(first, last):
        start = (sample * rows + row) * pitch * padded
        if row < top or row >= top + height:
            clear(into, start, pitch * padded)
        else:
            clear(into, start, left * padded)
            clear(into, start + (left + width) * padded, (pitch - left - width) * padded)
    base, end = sample * rows * pitch * padded, max(0, min(last - top, height)) * width
    p = max(0, min(first - top, height)) * width
    while p < end and plane >= TILE:
        # The last square may overlap with the positions of another task, which copies the same numbers.
        p = max(0, min(p, end - TILE))
        y, x = p // width, p % width
        for i in range(TILE):
            places[i] = ((y + top) * pitch + x + left) * padded
            x += 1
            if x == width:
                x, y = 0, y + 1
        c = 0
        while c < channels:
            c = min(c, channels - TILE)
            spread(into, base + c, places, 0, source, (sample * channels + c) * plane + p, plane)
            c += TILE
        p += TILE
    for q in range(p, end):
        place = base + ((q // width + top) * pitch + q % width + left) * padded
        for c in range(channels):
            into[place + c] = source[(sample * channels + c) * plane + q]
    release(places)
    return False


def transform_weights(task: int, w: np.ndarray, memory: np.ndarray, convolution: Convolution) -> bool:
    """Transform the weights of some channels for a block of columns, for the tasks that share them."""
    channels, filters = convolution.channels, convolution.filters
    whole = (filters + TILE - 1) // TILE * TILE
    chunks = (channels + _CHANNELS - 1) // _CHANNELS
    block, first = task // chunks * COLUMNS, task % chunks * _CHANNELS
    columns, count = min(COLUMNS, whole - block), min(_CHANNELS, channels - first)
    place = _weights_of_block(block, channels) + first * columns
    into = Points(aligned(memory)[place:], channels * columns + TILE)
    return _transform_block(w, into, block, columns, first, count, convolution)


def _weights_of_block(first: int, channels: int) -> int:
    """Return the place of the transformed weights of a block of columns."""
    return POINTS * (first * channels + first // COLUMNS * TILE)


def _transform_block(
    w: np.ndarray,
    into: Points,
    block: int,
    columns: int,
    first: int,
    count: int,
    convolution: Convolution,
) -> bool:
    """Transform the weights of a block of columns for some channels; return whether there is no memory."""
    allocated = allocate(TILE * TILE + 2 * TILE)
    if len(allocated) == 0:
        return True
    square = aligned(allocated)
    clear(square, 0, TILE * TILE + TILE)
    turned, channels, filters = convolution.turned, convolution.channels, convolution.filters
    # From a filter to the next, and from a channel to the next.
    stride, step = TAPS if turned else channels * TAPS, filters * TAPS if turned else TAPS
    start, tap = (TAPS - 1) * TILE if turned else 0, -TILE if turned else TILE
    for m in range(0, columns, TILE):
        # The last filters are transposed together with filters before them. Columns without a filter contain
        # weights of other filters, and their sums are not used.
        others = max(0, block + m + TILE - filters)
        for c in range(count):
            source = (block + m - others) * stride + (first + c) * step
            if source + (TILE - 1) * stride + TILE <= len(w):
                # The taps of a kernel are followed by those of another one, which are not used.
                transpose(square, 0, TILE, w, source, stride)
            else:
                for i in range(TILE):
                    for k in range(TAPS):
                        square[k * TILE + i] = w[source + i * stride + k]
            at, pitch = c * columns + m, into.pitch
            given = Square(square, start + others, 3 * tap, tap)
            transform(OF_THREE, Square(into.values, at, 4 * pitch, pitch), given, 1)
    release(allocated)
    return False


def convolve_tiles(
    task: int,
    boxes: np.ndarray,
    w: np.ndarray,
    weights: np.ndarray,
    result: Result,
    box: Box,
    convolution: Convolution,
) -> bool:
    """Compute some filters for some tiles; return whether there is no memory, or a result is not finite."""
    channels, filters = box.channels, convolution.filters
    padded, whole = (channels + TILE - 1) // TILE * TILE, (filters + TILE - 1) // TILE * TILE
    tiles = _tiles_of(task % convolution.units, box.samples, convolution)
    most, count = tiles.most, tiles.number
    # Behind the matrices of tiles and of sums are the results of a block, and the weights of a task.
    results, own = POINTS * (most * (padded + COLUMNS) + 2 * TILE), convolution.own_weights
    together = min(channels, _CHANNELS_OF_LARGE if own else TERMS)
    transformed = results + (8 * COLUMNS + 2) * most + TILE
    size = transformed + (POINTS * (together * COLUMNS + TILE) if own else 0) + TILE
    memory = take_memory(size, 2 * TERMS + most + 2 + 4 * most)
    if len(memory.numbers) == 0:
        return True
    numbers, lists = aligned(memory.numbers), memory.integers[2 * TERMS :]
    values = Points(numbers, most * padded + TILE)
    sums, finished = numbers[POINTS * values.pitch :], numbers[results:]
    steps, places = memory.integers[:TERMS], memory.integers[TERMS : 2 * TERMS]
    starts, shifts, bases = lists[:most], lists[most : most + 1], lists[most + 1 : most + 2]
    for k in range(TERMS):
        steps[k] = k
    for t in range(count):
        starts[t] = t * padded
    transform_tiles(values, tiles, aligned(boxes), 0, padded, box, convolution.output)
    number = _list_runs(lists[most + 2 :], tiles, convolution)
    runs = lists[most + 2 : most + 2 + 4 * number]
    turned, wrong = numbers[transformed:] if own else aligned(weights), False
    begin = task // convolution.units * convolution.blocks * COLUMNS
    for block in range(begin, min(whole, begin + convolution.blocks * COLUMNS), COLUMNS):
        # The number of columns is a multiple of TILE, though there may be fewer filters.
        columns = min(COLUMNS, whole - block)
        into = Points(sums, most * columns + TILE)
        for k in range(TERMS):
            places[k] = k * columns
        for c in range(0, channels, together):
            used = min(together, channels - c)
            place = 0 if own else _weights_of_block(block, channels) + c * columns
            factors = Points(turned[place:], (together if own else channels) * columns + TILE)
            if own:
                wrong = wrong or _transform_block(w, factors, block, columns, c, used, convolution)
            left = Rows(values.values[c:], starts, shifts, steps[:used])
            right = Columns(factors.values, bases, places[:used])
            add_points(into, left, values.pitch, count, right, factors.pitch, columns, c == 0)
        wrong = _transform_back(finished, into, tiles, columns) or wrong
        _finish_block(result, finished[4 * most * COLUMNS :], runs, tiles, block, convolution)
    return_memory(memory)
    return wrong


def _tiles_of(unit: int, samples: int, convolution: Convolution) -> Tiles:
    """Return the tiles of a unit."""
    first, most = unit * convolution.tiles, convolution.tiles
    return Tiles(first, min(most, tiles_of(samples, convolution.output) - first), most)


def add_points(
    sums: Points, left: Rows, step: int, rows: int, right: Columns, pitch: int, columns: int, fresh: bool
) -> None:
    """Add products at all points, which are `step` apart in the left factors and `pitch` in the others."""
    for point in range(POINTS):
        left.shifts[0], right.bases[0] = point * step, point * pitch
        add_tiles(sums.values[point * sums.pitch :], left, rows, right, columns, fresh)


def _transform_back(finished: np.ndarray, sums: Points, tiles: Tiles, columns: int) -> bool:
    """Transform sums into the upper row of the results of all tiles, and the lower row, and transpose these.

    Return whether some are not finite. There is room for the transposed ones behind all others.
    """
    rows, into, wrong = 2 * tiles.most, 4 * tiles.most * COLUMNS, False
    for t in range(tiles.number):
        place, start, pitch = 2 * t * columns, t * columns, sums.pitch
        vectors = columns // TILE
        given = Square(sums.values, start, 4 * pitch, pitch)
        transform(TO_TWO, Square(finished, place, rows * columns, columns), given, vectors)
    for half in range(2):
        head = half * rows * columns
        wrong = wrong or not are_finite(finished[head : head + 2 * tiles.number * columns])
        for i in range(0, 2 * tiles.number, TILE):
            for k in range(0, columns, TILE):
                place = into + head + k * rows + i
                transpose(finished, place, rows, finished, head + i * columns + k, columns)
    return wrong


def transform_tiles(
    into: Points,
    tiles: Tiles,
    boxes: np.ndarray,
    channel: int,
    channels: int,
    box: Box,
    output: Plane,
) -> None:
    """Transform what some tiles see of some channels, a multiple of TILE."""
    padded = (box.channels + TILE - 1) // TILE * TILE
    rows, pitch, vectors = box.sizes.height, box.sizes.width, channels // TILE
    across, down = (output.width + 1) // 2, (output.height + 1) // 2
    for t in range(tiles.number):
        line, k = (tiles.first + t) // across, (tiles.first + t) % across
        sample, i = line // down, line % down
        at, start = t * channels, ((sample * rows + 2 * i) * pitch + 2 * k) * padded + channel
        step = into.pitch
        given = Square(boxes, start, pitch * padded, padded)
        transform(OF_VALUES, Square(into.values, at, 4 * step, step), given, vectors)


def _list_runs(runs: np.ndarray, tiles: Tiles, convolution: Convolution) -> int:
    """Write the runs of adjacent tiles, and return their number. For each, write the first tile, its place in
    the result of the first filter, and the length of the result and its number of rows."""
    first, count = tiles.first, tiles.number
    height, width = convolution.output.height, convolution.output.width
    across = (width + 1) // 2
    of_sample = (height + 1) // 2 * across
    at = number = 0
    while at < count:
        sample, tile = (first + at) // of_sample, (first + at) % of_sample
        i, k = tile // across, tile % across
        n = min(count - at, across - k)
        runs[4 * number] = at
        runs[4 * number + 1] = (sample * convolution.filters * height + 2 * i) * width + 2 * k
        runs[4 * number + 2] = min(2 * n, width - 2 * k)
        runs[4 * number + 3] = min(2, height - 2 * i)
        at += n
        number += 1
    return number


def _finish_block(
    result: Result,
    sums: np.ndarray,
    runs: np.ndarray,
    tiles: Tiles,
    block: int,
    convolution: Convolution,
) -> None:
    """Write the results of a block of filters, after what is applied to them."""
    filters, height, width = convolution.filters, convolution.output.height, convolution.output.width
    rows, b, z, y = 2 * tiles.most, result.b, result.z, result.y
    columns = min(COLUMNS, (filters + TILE - 1) // TILE * TILE - block)
    other = sums[2 * columns * rows : (2 * columns + 1) * rows]
    for k in range(min(columns, filters - block)):
        bias = b[block + k] if len(b) > 0 else 0.0
        for half in range(2):
            line = sums[(half * columns + k) * rows : (half * columns + k + 1) * rows]
            place = ((block + k) * height + half) * width
            for run in range(0, len(runs) if len(z) > 0 else 0, 4):
                at, n = place + runs[run + 1], runs[run + 2]
                if half < runs[run + 3]:
                    add_to(line[2 * runs[run] : 2 * runs[run] + n], z[at : at + n])
            if len(b) > 0 or result.activation != 0:
                finish(other, line, bias, result.activation, result.low, result.high)
                line = other
            for run in range(0, len(runs), 4):
                if half < runs[run + 3]:
                    copy_elements(y, place + runs[run + 1], line, 2 * runs[run], runs[run + 2])
