"""Winograd's convolutions with kernels of 3x3, for Numba: 16 products instead of 36 for four results.

A tile is a square of 2x2 results. The square of 4x4 values that its windows see is transformed, as are the
weights; the products of the two are added up over the channels, and the sums transformed into results. So a
convolution is 16 products of matrices, one for each number of the transforms, whose rows are tiles, and which
`add_products` computes in registers. A result is computed only from what its window sees, up to rounding.

Tensors are copied into boxes first, with their padding and the channels last, so that vectors hold channels.

Where a value is NaN or infinite, so is the result of the transforms, but not the same as that of a sum of
products: the NumPy kernel takes over then.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ortgrad.compiled.functions import (
    OF_THREE,
    OF_VALUES,
    TILE,
    TILE_ROWS,
    TO_TWO,
    Columns,
    Rows,
    Square,
    add_products,
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
from ortgrad.ops.conv._forward_rows import finish
from ortgrad.ops.conv._geometry import COLUMNS, TERMS
from ortgrad.ops.conv._memory import aligned

if TYPE_CHECKING:
    from ortgrad.ops._windows import Windows

    Pair = tuple[int, int]

# Numbers at which transforms are multiplied. Those of one vector are apart by a matrix and TILE elements: at
# a distance of a multiple of 4096 bytes they would be in each other's place in the cache.
POINTS = 16
# Positions that a task copies into a box, about.
_POSITIONS = 1024
# Tiles of a task, about: their results fill squares that are transposed at once, their transforms should
# remain in the cache, and the weights be loaded for as many of them as possible.
_TILES, _FEWEST_TILES, _MOST_TILES, _CACHED = 8, 48, 96, 1 << 13
# As many tasks as keep several threads busy.
_TASKS = 8
TAPS = 9
# Weights that do not fit into the cache, once transformed, are transformed by every task that uses them, if
# these are few; and how many channels at a time.
_LARGE, _FEW_UNITS, _CHANNELS_OF_LARGE = 1 << 14, 4, 64
# How many channels a task transforms the weights of.
_CHANNELS = 32


def up(number: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-number // unit) * unit


class BoxGeometry(NamedTuple):
    """The numbers of a box that kernels read."""

    samples: int
    channels: int
    size: Plane  # of the tensor
    height: int
    width: int
    top: int  # where the tensor begins in the box
    left: int
    rows: int  # of the box of a sample that a task fills
    tasks: int  # for a sample


class ConvolutionGeometry(NamedTuple):
    """The numbers of a convolution that kernels read."""

    output: Plane
    filters: int
    tiles: int  # of a task
    units: int  # tasks for all tiles
    blocks: int  # of columns, of a task
    own_weights: bool  # whether a task transforms the weights itself
    together: int  # channels that it transforms at once
    filter_stride: int  # how far apart the kernels of filters and of channels are
    channel_stride: int
    turned: bool  # whether kernels are turned


class Box(NamedTuple):
    """A tensor with zeros around it, and its channels last."""

    samples: int
    channels: int
    size: Pair
    sizes: Pair  # of the box
    origin: Pair  # of the tensor in it

    @property
    def elements(self) -> int:
        return self.samples * math.prod(self.sizes) * up(self.channels, TILE) + TILE

    @property
    def tasks(self) -> int:
        """How many tasks fill it."""
        return self.samples * self._pieces

    @property
    def _pieces(self) -> int:
        return -(-self.sizes[0] // self._rows)

    @property
    def _rows(self) -> int:
        return max(1, min(self.sizes[0], _POSITIONS // self.sizes[1]))

    @property
    def geometry(self) -> BoxGeometry:
        """The numbers that kernels read."""
        size, top, left = Plane(*self.size), *self.origin
        return BoxGeometry(
            self.samples, self.channels, size, *self.sizes, top, left, self._rows, self._pieces
        )


class Convolution(NamedTuple):
    """A convolution of what is in a box."""

    box: Box
    outputs: Pair
    filters: int
    turned: bool = False  # whether filters are the channels of the weights, and kernels are turned

    @property
    def tiles(self) -> int:
        return self.box.samples * math.prod(-(-n // 2) for n in self.outputs)

    @property
    def tiles_of_task(self) -> int:
        numbers = up(self.box.channels, TILE) + min(COLUMNS, up(self.filters, TILE))
        wanted = max(_FEWEST_TILES, min(_MOST_TILES, _CACHED // numbers))
        return up(-(-self.tiles // max(1, round(self.tiles / wanted))), _TILES)

    @property
    def units(self) -> int:
        return -(-self.tiles // self.tiles_of_task)

    @property
    def blocks_of_task(self) -> int:
        """How many blocks of columns a task computes: all, unless there are few tasks."""
        blocks = -(-self.filters // COLUMNS)
        return -(-blocks // min(blocks, -(-_TASKS // self.units)))

    @property
    def tasks(self) -> int:
        return self.units * -(-self.filters // (COLUMNS * self.blocks_of_task))

    @property
    def _own_weights(self) -> bool:
        return self.box.channels * self.filters >= _LARGE and self.units <= _FEW_UNITS

    @property
    def weights(self) -> int:
        """The elements of the transformed weights that tasks share."""
        blocks = -(-self.filters // COLUMNS)
        elements = POINTS * (self.box.channels * up(self.filters, TILE) + blocks * TILE) + TILE
        return 0 if self._own_weights else elements

    @property
    def weight_tasks(self) -> int:
        """How many tasks transform these."""
        blocks = -(-self.filters // COLUMNS)
        return 0 if self._own_weights else blocks * -(-self.box.channels // _CHANNELS)

    @property
    def geometry(self) -> ConvolutionGeometry:
        """The numbers that kernels read."""
        own, channels = self._own_weights, self.box.channels
        return ConvolutionGeometry(
            output=Plane(*self.outputs),
            filters=self.filters,
            tiles=self.tiles_of_task,
            units=self.units,
            blocks=self.blocks_of_task,
            own_weights=own,
            together=min(channels, _CHANNELS_OF_LARGE if own else TERMS),
            filter_stride=1 if self.turned else channels,
            channel_stride=self.filters if self.turned else 1,
            turned=self.turned,
        )


def fits(win: Windows, channels: int, filters: int) -> bool:
    """Return whether these kernels support the windows and tensors."""
    return (
        win.kernel == (3, 3)
        and max(*win.strides, *win.dilations) == 1
        and max(*win.heads, *win.tails) <= 2
        and min(channels, filters) >= TILE
    )


def fill_box(task: int, source: np.ndarray, memory: np.ndarray, box: BoxGeometry) -> bool:
    """Copy some rows of a sample into its box."""
    channels, height, width = box.channels, box.size.height, box.size.width
    rows, pitch, top, left = box.height, box.width, box.top, box.left
    padded, plane = (channels + TILE - 1) // TILE * TILE, height * width
    sample, first = task // box.tasks, task % box.tasks * box.rows
    last = min(first + box.rows, rows)
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
        # The last square may have positions of another task, which copies the same numbers there.
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


def transform_weights(
    task: int, w: np.ndarray, memory: np.ndarray, channels: int, convolution: ConvolutionGeometry
) -> bool:
    """Transform the weights of some channels for a block of columns, for the tasks that share them."""
    filters = convolution.filters
    whole = (filters + TILE - 1) // TILE * TILE
    chunks = (channels + _CHANNELS - 1) // _CHANNELS
    block, first = task // chunks * COLUMNS, task % chunks * _CHANNELS
    columns, count = min(COLUMNS, whole - block), min(_CHANNELS, channels - first)
    place = _weights_of_block(block, channels) + first * columns
    return _transform_block(
        w, aligned(memory), place, channels * columns + TILE, block, columns, first, count, convolution
    )


def _weights_of_block(first: int, channels: int) -> int:
    """The place of the transformed weights of a block of columns."""
    return POINTS * (first * channels + first // COLUMNS * TILE)


def _transform_block(
    w: np.ndarray,
    into: np.ndarray,
    place: int,
    pitch: int,
    block: int,
    columns: int,
    first: int,
    count: int,
    convolution: ConvolutionGeometry,
) -> bool:
    """Transform the weights of a block of columns for some channels."""
    allocated = allocate(TILE * TILE + 2 * TILE)
    if len(allocated) == 0:
        return True
    square = aligned(allocated)
    clear(square, 0, TILE * TILE + TILE)
    stride, step = convolution.filter_stride * TAPS, convolution.channel_stride * TAPS
    turned = convolution.turned
    start, tap = (TAPS - 1) * TILE if turned else 0, -TILE if turned else TILE
    for m in range(0, columns, TILE):
        # The last filters are transposed with those before them. Columns that are for no filter get numbers
        # of others, and their sums are not used.
        others = max(0, block + m + TILE - convolution.filters)
        for c in range(count):
            source = (block + m - others) * stride + (first + c) * step
            if source + (TILE - 1) * stride + TILE <= len(w):
                # Behind the taps of a kernel are those of another one, which are not used.
                transpose(square, 0, TILE, w, source, stride)
            else:
                for i in range(TILE):
                    for k in range(TAPS):
                        square[k * TILE + i] = w[source + i * stride + k]
            at = place + c * columns + m
            transform(
                OF_THREE, Square(into, at, 4 * pitch, pitch), Square(square, start + others, 3 * tap, tap), 1
            )
    release(allocated)
    return False


def convolve_tiles(
    task: int,
    boxes: np.ndarray,
    w: np.ndarray,
    weights: np.ndarray,
    b: np.ndarray,
    z: np.ndarray,
    y: np.ndarray,
    box: BoxGeometry,
    convolution: ConvolutionGeometry,
    activation: int,
    low: float,
    high: float,
) -> bool:
    """Compute some filters for some tiles; return whether there is no memory, or a result is not finite."""
    channels, filters, most = box.channels, convolution.filters, convolution.tiles
    padded = (channels + TILE - 1) // TILE * TILE
    of_sample = (convolution.output.height + 1) // 2 * ((convolution.output.width + 1) // 2)
    first = task % convolution.units * most
    count = min(most, box.samples * of_sample - first)
    rows, results = 2 * most, POINTS * (most * (padded + COLUMNS) + 2 * TILE)
    memory = allocate(results + (4 * COLUMNS + 1) * rows + TILE)
    integers = allocate_integers(2 * TERMS + most + 2 + 4 * most)
    own, together = convolution.own_weights, convolution.together
    transformed = allocate((POINTS * (together * COLUMNS + TILE) if own else 0) + TILE)
    if len(memory) == 0 or len(integers) == 0 or len(transformed) == 0:
        release(memory)
        release(integers)
        release(transformed)
        return True
    values, sums = aligned(memory), aligned(memory)[POINTS * (most * padded + TILE) :]
    finished = aligned(memory)[results:]
    steps, places = integers[:TERMS], integers[TERMS : 2 * TERMS]
    starts, shifts = integers[2 * TERMS : 2 * TERMS + most], integers[2 * TERMS + most :]
    bases, runs = shifts[1:], shifts[2:]
    for k in range(TERMS):
        steps[k] = k
    for t in range(count):
        starts[t] = t * padded
    transform_tiles(values, first, count, most, aligned(boxes), 0, padded, box, convolution)
    number = _list_runs(runs, first, count, convolution)
    # Columns that are for no filter have a multiple of TILE as well.
    whole = (filters + TILE - 1) // TILE * TILE
    right, wrong = aligned(transformed if own else weights), False
    begin = task // convolution.units * convolution.blocks * COLUMNS
    for block in range(begin, min(whole, begin + convolution.blocks * COLUMNS), COLUMNS):
        columns = min(COLUMNS, whole - block)
        for k in range(TERMS):
            places[k] = k * columns
        pitch = most * columns + TILE
        c = 0
        while c < channels:
            used = min(together, channels - c)
            base, step = _weights_of_block(block, channels) + c * columns, channels * columns + TILE
            if own:
                base, step = 0, together * columns + TILE
                wrong = wrong or _transform_block(w, right, 0, step, block, columns, c, used, convolution)
            for point in range(POINTS):
                shifts[0], bases[0] = point * (most * padded + TILE) + c, base + point * step
                for i in range(0, count, TILE_ROWS):
                    add_products(
                        sums[point * pitch + i * columns :],
                        columns,
                        Rows(values, starts[i:], shifts[:1], steps[:used]),
                        min(TILE_ROWS, count - i),
                        Columns(right, bases, places[:used]),
                        columns,
                        c == 0,
                    )
            c += together
        # The upper row of the results of all tiles, and the lower row.
        for t in range(count):
            place = 2 * t * columns
            transform(
                TO_TWO,
                Square(finished, place, rows * columns, columns),
                Square(sums, t * columns, 4 * pitch, pitch),
                columns // TILE,
            )
        into = 2 * rows * COLUMNS
        for half in range(2):
            head = half * rows * columns
            wrong = wrong or not are_finite(finished[head : head + 2 * count * columns])
            for i in range(0, 2 * count, TILE):
                for k in range(0, columns, TILE):
                    place = into + head + k * rows + i
                    transpose(finished, place, rows, finished, head + i * columns + k, columns)
        _finish_block(
            y,
            b,
            z,
            finished[into:],
            runs[: 4 * number],
            block,
            rows,
            min(columns, filters - block),
            convolution,
            activation,
            low,
            high,
        )
    release(memory)
    release(integers)
    release(transformed)
    return wrong


def transform_tiles(
    values: np.ndarray,
    first: int,
    count: int,
    most: int,
    boxes: np.ndarray,
    channel: int,
    channels: int,
    box: BoxGeometry,
    convolution: ConvolutionGeometry,
) -> None:
    """Transform what some tiles see of some channels, a multiple of TILE."""
    padded = (box.channels + TILE - 1) // TILE * TILE
    rows, pitch = box.height, box.width
    across = (convolution.output.width + 1) // 2
    down = (convolution.output.height + 1) // 2
    for t in range(count):
        line, k = (first + t) // across, (first + t) % across
        sample, i = line // down, line % down
        place = (sample * rows + 2 * i) * pitch + 2 * k
        transform(
            OF_VALUES,
            Square(values, t * channels, 4 * (most * channels + TILE), most * channels + TILE),
            Square(boxes, place * padded + channel, pitch * padded, padded),
            channels // TILE,
        )


def _list_runs(
    runs: np.ndarray,
    first: int,
    count: int,
    convolution: ConvolutionGeometry,
) -> int:
    """Write the runs of tiles beside each other: the first one, its place in the result of the first filter,
    the length of the result, and how many rows it has. Return their number."""
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
    y: np.ndarray,
    b: np.ndarray,
    z: np.ndarray,
    sums: np.ndarray,
    runs: np.ndarray,
    block: int,
    rows: int,
    count: int,
    convolution: ConvolutionGeometry,
    activation: int,
    low: float,
    high: float,
) -> None:
    """Write the results of some filters, after what is applied to them."""
    filters, height, width = convolution.filters, convolution.output.height, convolution.output.width
    columns = min(COLUMNS, (filters + TILE - 1) // TILE * TILE - block)
    other = sums[2 * columns * rows : (2 * columns + 1) * rows]
    for k in range(count):
        bias = b[block + k] if len(b) > 0 else 0.0
        for half in range(2):
            line = sums[(half * columns + k) * rows : (half * columns + k + 1) * rows]
            place = ((block + k) * height + half) * width
            for run in range(0, len(runs) if len(z) > 0 else 0, 4):
                at, n = place + runs[run + 1], runs[run + 2]
                if half < runs[run + 3]:
                    add_to(line[2 * runs[run] : 2 * runs[run] + n], z[at : at + n])
            if len(b) > 0 or activation != 0:
                finish(other, line, bias, activation, low, high)
                line = other
            for run in range(0, len(runs), 4):
                if half < runs[run + 3]:
                    copy_elements(y, place + runs[run + 1], line, 2 * runs[run], runs[run + 2])


def are_finite(values: np.ndarray) -> bool:
    total = 0.0
    for k in range(len(values)):
        total += values[k] * 0.0
    return total == 0.0
