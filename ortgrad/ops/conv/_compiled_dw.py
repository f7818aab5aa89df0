"""The part of the compiled ConvGrad that computes dW."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ortgrad.compiled.functions import TILE, TILE_ROWS, Columns, Rows, add_products, double, transpose
from ortgrad.operators.compiled import Integers
from ortgrad.ops.conv._geometry import COLUMNS, RANGE, TERMS, Convolution, Geometry, Range, volume
from ortgrad.ops.conv._memory import aligned, return_memory, take_memory


class DwTables(NamedTuple):
    """Lists of the plan: where taps are in boxes of X, and which windows see no padding at them."""

    offsets: Integers
    ranges: Integers


class Share(NamedTuple):
    """What a task computes: dW of some pairs of channel and tap of a group, and of a block of filters."""

    group: int
    block: int  # its first filter
    first: int  # pair
    pairs: int
    columns: int  # of the sums: filters, up to a multiple of TILE


class Pieces(NamedTuple):
    """How the positions are divided: products of a piece of several lines are added up at once."""

    lines: int
    length: int  # of a line
    piece: int
    together: int
    planes: bool  # whether lines are planes, and not rows


def sum_of_filter(m: int, dy: np.ndarray, samples: int, filters: int) -> float:
    """Return dB of a filter, in double precision."""
    positions = len(dy) // (samples * filters)
    total = double(0.0)
    for sample in range(samples):
        place = (sample * filters + m) * positions
        values = dy[place : place + positions]
        for k in range(positions):
            total += double(values[k])
    return total


def weights_task(
    task: int, values: np.ndarray, turned: np.ndarray, dw: np.ndarray, geometry: Geometry, tables: DwTables
) -> bool:
    """Compute dW of some filters for some pairs of channel and tap."""
    conv: Convolution = geometry.conv
    share, pieces, skips = _share(task, geometry), _pieces(conv), geometry.dw_skips != 0
    # There is a list of positions for each column of the kernel, if padding is skipped.
    room = volume(conv.output) * geometry.kernel_columns if skips else pieces.piece
    together = pieces.together
    memory = take_memory(share.pairs * share.columns, 2 * room + 2 * together + TILE_ROWS)
    if len(memory.numbers) == 0:
        return True
    sums, lists = memory.numbers, memory.integers[2 * room :]
    shifts, bases = lists[:together], lists[together : 2 * together]
    left = Rows(values, lists[2 * together :], shifts, memory.integers[:room])
    right = Columns(aligned(turned), bases, memory.integers[room : 2 * room])
    if skips:
        _list_seen(left.steps, right.places, share.columns, geometry, tables.ranges)
    else:
        _list_positions(left.steps, right.places, share.columns, conv)
    for line in range(0, pieces.lines, together):
        used = min(together, pieces.lines - line)
        for begin in range(0, pieces.length, pieces.piece):
            _list_lines(shifts, bases, line, begin, pieces, share, conv)
            own_left = Rows(values, left.starts, shifts[:used], left.steps)
            own_right = Columns(right.values, bases[:used], right.places)
            fresh = line == 0 and begin == 0
            if skips:
                _add_by_tap(sums, own_left, own_right, share, geometry, tables, fresh)
            else:
                end = min(pieces.piece, pieces.length - begin)
                _add_by_pair(sums, own_left, own_right, end, share, conv, tables.offsets, fresh)
    _write(dw, sums, share, conv)
    return_memory(memory)
    return False


def _share(task: int, geometry: Geometry) -> Share:
    """Return what a task computes."""
    conv: Convolution = geometry.conv
    pairs, most = conv.channels * conv.taps, geometry.dw_rows
    splits, blocks = (pairs + most - 1) // most, (conv.filters + COLUMNS - 1) // COLUMNS
    group, block, first = task // (splits * blocks), task // splits % blocks * COLUMNS, task % splits * most
    columns = min(COLUMNS, (conv.filters + TILE - 1) // TILE * TILE - block)
    return Share(group, block, first, min(most, pairs - first), columns)


def _pieces(conv: Convolution) -> Pieces:
    """Divide the positions into planes, or if these are large into rows, or parts of long rows."""
    positions = volume(conv.output)
    planes = positions <= 2 * TERMS
    length = positions if planes else conv.output.width
    lines = conv.samples if planes else conv.samples * conv.output.depth * conv.output.height
    return Pieces(lines, length, min(length, 2 * TERMS), max(1, TERMS // length), planes)


def _list_positions(steps: np.ndarray, places: np.ndarray, columns: int, conv: Convolution) -> None:
    """Write where the positions of a piece are in X and in dY."""
    height, width = conv.output.height, conv.output.width
    for k in range(len(steps)):
        z, y = k // width // height * conv.stride.depth, k // width % height * conv.stride.height
        row = z * conv.x.box.height + y
        steps[k] = row * conv.x.box.width + k % width * conv.stride.width
        places[k] = k * columns


def _list_seen(
    steps: np.ndarray, places: np.ndarray, columns: int, geometry: Geometry, ranges: Integers
) -> None:
    """Write, for each column of the kernel, where positions that see no padding there are in X and dY."""
    conv: Convolution = geometry.conv
    height, width = conv.output.height, conv.output.width
    for column in range(geometry.kernel_columns):
        at = column * height * width
        own: Range = ranges[column * RANGE : (column + 1) * RANGE]
        for y in range(height):
            for x in range(own.left, own.right):
                steps[at] = y * conv.stride.height * conv.x.box.width + x * conv.stride.width
                places[at] = (y * width + x) * columns
                at += 1


def _list_lines(
    shifts: np.ndarray,
    bases: np.ndarray,
    line: int,
    begin: int,
    pieces: Pieces,
    share: Share,
    conv: Convolution,
) -> None:
    """Write where some lines are in X and in dY; `begin` is the first element of their pieces."""
    height, depth = conv.output.height, conv.output.depth
    positions, plane = volume(conv.output), volume(conv.x.box)
    padded = (conv.filters + TILE - 1) // TILE * TILE
    base = (share.group * padded + share.block) * conv.samples * positions
    for i in range(min(pieces.together, pieces.lines - line)):
        row = line + i
        sample, z, y = row, 0, 0
        if not pieces.planes:
            sample, z, y = row // height // depth, row // height % depth, row % height
        z, y = z * conv.stride.depth, y * conv.stride.height
        channel = (sample * conv.groups + share.group) * conv.channels
        place = (z * conv.x.box.height + y) * conv.x.box.width + begin * conv.stride.width
        shifts[i] = channel * plane + place
        bases[i] = base + (row * pieces.length + begin) * share.columns


def _add_by_tap(
    sums: np.ndarray,
    left: Rows,
    right: Columns,
    share: Share,
    geometry: Geometry,
    tables: DwTables,
    fresh: bool,
) -> None:
    """Add products in tiles of several channels and one tap, so that all rows see the same padding."""
    taps, columns, channels = geometry.conv.taps, share.columns, share.pairs // geometry.conv.taps
    plane, positions = volume(geometry.conv.x.box), volume(geometry.conv.output)
    for c in range(0, channels, TILE_ROWS):
        rows = min(TILE_ROWS, channels - c)
        for tap in range(taps):
            own: Range = tables.ranges[tap * RANGE : (tap + 1) * RANGE]
            head, seen = tap % geometry.kernel_columns * positions, own.right - own.left
            least, last = head + own.top * seen, head + own.bottom * seen
            for i in range(rows):
                left.starts[i] = (share.first // taps + c + i) * plane + tables.offsets[tap]
            values = Rows(left.values, left.starts, left.shifts, left.steps[least:last])
            grads = Columns(right.values, right.bases, right.places[least:last])
            add_products(
                sums[(c * taps + tap) * columns :], taps * columns, values, rows, grads, columns, fresh
            )


def _add_by_pair(
    sums: np.ndarray,
    left: Rows,
    right: Columns,
    end: int,
    share: Share,
    conv: Convolution,
    offsets: Integers,
    fresh: bool,
) -> None:
    """Add products in tiles of pairs of channel and tap."""
    plane, columns = volume(conv.x.box), share.columns
    values = Rows(left.values, left.starts, left.shifts, left.steps[:end])
    grads = Columns(right.values, right.bases, right.places[:end])
    for pair in range(0, share.pairs, TILE_ROWS):
        rows = min(TILE_ROWS, share.pairs - pair)
        for i in range(rows):
            at = share.first + pair + i
            left.starts[i] = at // conv.taps * plane + offsets[at % conv.taps]
        add_products(sums[pair * columns :], columns, values, rows, grads, columns, fresh)


def _write(dw: np.ndarray, sums: np.ndarray, share: Share, conv: Convolution) -> None:
    """Transpose the sums into dW."""
    pairs, count, columns = conv.channels * conv.taps, share.pairs, share.columns
    to, filters = (share.group * conv.filters + share.block) * pairs + share.first, conv.filters - share.block
    for m in range(0, min(columns, filters), TILE):
        last = min(m + TILE, filters)
        pair = 0
        while last - m == TILE and pair + TILE <= count:
            transpose(dw, to + m * pairs + pair, pairs, sums, pair * columns + m, columns)
            pair += TILE
        for i in range(pair, count):
            for k in range(m, last):
                dw[to + k * pairs + i] = sums[i * columns + k]
