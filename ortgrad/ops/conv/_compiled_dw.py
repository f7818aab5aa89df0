"""The part of the compiled ConvGrad that computes dW."""

from __future__ import annotations

import numpy as np

from ortgrad.compiled.functions import (
    TILE,
    TILE_ROWS,
    Columns,
    Rows,
    add_products,
    allocate,
    allocate_integers,
    double,
    release,
    transpose,
)
from ortgrad.operators.compiled import Integers
from ortgrad.ops.conv._geometry import (
    COLUMNS,
    RANGE,
    TERMS,
    Geometry,
    Range,
)
from ortgrad.ops.conv._memory import aligned


def sum_of_filter(m: int, dy: np.ndarray, samples: int, filters: int) -> float:
    """dB of a filter, in double precision."""
    positions = len(dy) // (samples * filters)
    total = double(0.0)
    for sample in range(samples):
        place = (sample * filters + m) * positions
        values = dy[place : place + positions]
        for k in range(positions):
            total += double(values[k])
    return total


def weights_task(
    task: int,
    x: np.ndarray,
    dw: np.ndarray,
    boxes: np.ndarray,
    turned: np.ndarray,
    geometry: Geometry,
    offsets: Integers,
    ranges: Integers,
) -> bool:
    """Compute dW of some filters for some pairs of channel and tap."""
    channels, filters, taps = geometry.channels, geometry.filters, geometry.taps
    samples, pairs, most = geometry.samples, channels * taps, geometry.dw_rows
    splits, blocks = (pairs + most - 1) // most, (filters + COLUMNS - 1) // COLUMNS
    group, block, first = task // (splits * blocks), task // splits % blocks, task % splits * most
    count, padded = min(most, pairs - first), (filters + TILE - 1) // TILE * TILE
    columns = min(COLUMNS, padded - block * COLUMNS)
    height, width = geometry.output.height, geometry.output.width
    positions = geometry.output.depth * height * width
    # A row of outputs is added up at once, or the whole plane of a sample, or a part of a long row.
    planes = positions <= 2 * TERMS
    length = positions if planes else width
    lines, piece = samples if planes else samples * geometry.output.depth * height, min(length, 2 * TERMS)
    together = max(1, TERMS // length)
    skips = geometry.dw_skips != 0
    # There is a list of positions for each column of the kernel, if padding is skipped.
    room = positions * geometry.kernel_columns if skips else piece
    sums = allocate(count * columns)
    integers = allocate_integers(2 * room + 2 * together + TILE_ROWS)
    if len(sums) == 0 or len(integers) == 0:
        release(sums)
        release(integers)
        return True
    steps, places = integers[:room], integers[room : 2 * room]
    shifts = integers[2 * room : 2 * room + together]
    bases = integers[2 * room + together : 2 * room + 2 * together]
    starts = integers[2 * room + 2 * together :]
    rows, pitch = geometry.x_box.height, geometry.x_box.width
    plane = geometry.x_box.depth * rows * pitch
    if skips:
        _list_positions(columns, pitch, geometry, ranges, steps, places)
    for k in range(0 if skips else piece):
        z, y = k // width // height * geometry.stride.depth, k // width % height * geometry.stride.height
        steps[k] = (z * rows + y) * pitch + k % width * geometry.stride.width
        places[k] = k * columns
    values, right = x if geometry.x_in_place else boxes, aligned(turned)
    base = (group * padded + block * COLUMNS) * samples * positions
    line = 0
    while line < lines:
        used = min(together, lines - line)
        begin = 0
        while begin < length:
            for i in range(used):
                row = line + i
                sample, z, y = row, 0, 0
                if not planes:
                    sample, z, y = (
                        row // height // geometry.output.depth,
                        row // height % geometry.output.depth,
                        row % height,
                    )
                z, y = z * geometry.stride.depth, y * geometry.stride.height
                channel = (sample * geometry.groups + group) * channels
                shifts[i] = channel * plane + (z * rows + y) * pitch + begin * geometry.stride.width
                bases[i] = base + (row * length + begin) * columns
            end = min(piece, length - begin)
            # A tile has one tap of several channels, for only then its rows have the same padding.
            for c in range(0, count // taps if skips else 0, TILE_ROWS):
                tile = min(TILE_ROWS, count // taps - c)
                for tap in range(taps):
                    own: Range = ranges[tap * RANGE : (tap + 1) * RANGE]
                    head = tap % geometry.kernel_columns * positions
                    seen = own.right - own.left
                    least, last = head + own.top * seen, head + own.bottom * seen
                    for i in range(tile):
                        starts[i] = (first // taps + c + i) * plane + offsets[tap]
                    add_products(
                        sums[(c * taps + tap) * columns :],
                        taps * columns,
                        Rows(values, starts, shifts[:used], steps[least:last]),
                        tile,
                        Columns(right, bases[:used], places[least:last]),
                        columns,
                        line == 0,
                    )
            for pair in range(0, 0 if skips else count, TILE_ROWS):
                tile = min(TILE_ROWS, count - pair)
                for i in range(tile):
                    at = first + pair + i
                    starts[i] = at // taps * plane + offsets[at % taps]
                add_products(
                    sums[pair * columns :],
                    columns,
                    Rows(values, starts, shifts[:used], steps[:end]),
                    tile,
                    Columns(right, bases[:used], places[:end]),
                    columns,
                    line == 0 and begin == 0,
                )
            begin += piece
        line += together
    to = (group * filters + block * COLUMNS) * pairs + first
    for m in range(0, min(columns, filters - block * COLUMNS), TILE):
        last = min(m + TILE, filters - block * COLUMNS)
        pair = 0
        while last - m == TILE and pair + TILE <= count:
            transpose(dw, to + m * pairs + pair, pairs, sums, pair * columns + m, columns)
            pair += TILE
        for i in range(pair, count):
            for k in range(m, last):
                dw[to + k * pairs + i] = sums[i * columns + k]
    release(sums)
    release(integers)
    return False


def _list_positions(
    columns: int,
    pitch: int,
    geometry: Geometry,
    ranges: Integers,
    steps: np.ndarray,
    places: np.ndarray,
) -> None:
    """Write, for each column of the kernel, where positions that see no padding there are in X and dY."""
    height, width = geometry.output.height, geometry.output.width
    for column in range(geometry.kernel_columns):
        at = column * height * width
        own: Range = ranges[column * RANGE : (column + 1) * RANGE]
        for y in range(height):
            for x in range(own.left, own.right):
                steps[at] = y * geometry.stride.height * pitch + x * geometry.stride.width
                places[at] = (y * width + x) * columns
                at += 1
