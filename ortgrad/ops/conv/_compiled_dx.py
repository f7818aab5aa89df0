"""The part of the compiled ConvGrad that computes dX."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ortgrad.compiled.functions import (
    TILE,
    TILE_ROWS,
    Columns,
    Rows,
    add_products,
    clear,
    copy_elements,
    copy_vector,
)
from ortgrad.operators.compiled import Integers
from ortgrad.ops.conv._geometry import COLUMNS, PART, TERMS, Convolution, Geometry, Part, volume
from ortgrad.ops.conv._memory import aligned, fetch_rows, return_memory, take_memory


class DxTables(NamedTuple):
    """Lists of the plan: the taps of all parts, where they are shifted to in dY, and the parts."""

    taps: Integers
    shifts: Integers
    parts: Integers


class Block(NamedTuple):
    """Some channels of a group, at consecutive positions of a line."""

    group: int
    first: int  # channel
    channels: int
    line: int
    start: int  # position
    length: int


class Runs(NamedTuple):
    """Runs of consecutive positions: the columns where they begin, lengths, and places in dY and dX."""

    columns: np.ndarray
    lengths: np.ndarray
    sources: np.ndarray
    targets: np.ndarray


class Terms(NamedTuple):
    """Filters whose products are added up at once, the taps of each, and where dY is for the first filter."""

    together: int
    taps: int
    base: int
    panel: int  # the size of a panel, to which columns of dY are copied


def channels_task(
    task: int, source: np.ndarray, w: np.ndarray, dx: np.ndarray, geometry: Geometry, tables: DxTables
) -> bool:
    """Compute dX of some channels at some positions, for all parts that share rows of dX."""
    members, parts = geometry.dx_members, tables.parts
    at, step = 0, members * PART
    while at + step < len(parts) and task >= parts[at + step]:  # its first task
        at += step
    own: Part = parts[at : at + PART]
    block = _block(task - own.task, own, geometry)
    count, room = block.channels, geometry.dx_blocks * COLUMNS
    memory = take_memory(members * count * room + COLUMNS, 4 * room)
    if len(memory.numbers) == 0:
        return True
    sums, lists = memory.numbers, memory.integers
    columns, lengths = lists[:room], lists[room : 2 * room]
    sources, targets = lists[2 * room : 3 * room], lists[3 * room :]
    number = _list_runs(Runs(columns, lengths, sources, targets), block, own, geometry)
    runs = Runs(columns[:number], lengths[:number], sources[:number], targets[:number])
    failed = False
    for member in range(members):
        part = parts[at + member * PART : at + (member + 1) * PART]
        into = sums[member * count * room :]
        failed = failed or _add_up(into, source, w, block, part, geometry, tables, runs)
    _write(dx, sums, runs, block, parts[at : at + step], geometry)
    return_memory(memory)
    return failed


def _block(task: int, part: Part, geometry: Geometry) -> Block:
    """Return what a task of a part computes."""
    conv: Convolution = geometry.conv
    most, room = geometry.dx_channels, geometry.dx_blocks * COLUMNS
    splits = (conv.channels + most - 1) // most
    unit, group, first = task // (conv.groups * splits), task // splits % conv.groups, task % splits * most
    line, start = unit // part.units, unit % part.units * room
    # A line is a plane of dY; with panels there is a single line, of all samples.
    if geometry.panels:
        end = conv.samples * volume(part.counts)
    else:
        end = (part.counts.height - 1) * geometry.dy.box.width + part.counts.width
    return Block(group, first, min(most, conv.channels - first), line, start, min(end - start, room))


def _write(
    dx: np.ndarray, sums: np.ndarray, runs: Runs, block: Block, parts: Integers, geometry: Geometry
) -> None:
    """Write the sums of all parts that share rows to dX."""
    conv: Convolution = geometry.conv
    own: Part = parts
    area, step, pitch = volume(conv.x.size), conv.stride.width, geometry.dy.box.width
    room, members = geometry.dx_blocks * COLUMNS, geometry.dx_members
    size = block.channels * room
    for c in range(block.channels):
        for run in range(len(runs.columns)):
            n, place = runs.lengths[run], runs.targets[run] + (block.first + c) * area
            column = c * room + runs.columns[run]
            if step == 1:
                copy_elements(dx, place, sums, column, n)
                continue
            begin = (block.start + runs.columns[run]) % pitch
            if members == 2 and step == 2:
                second: Part = parts[PART:]
                pairs = min(n, second.counts.width - begin)
                _write_both(dx[place:], sums[column:], sums[size + column :], pairs)
                if pairs < n:
                    dx[place + 2 * pairs] = sums[column + pairs]
            else:
                for member in range(members):
                    part: Part = parts[member * PART : (member + 1) * PART]
                    seen = n if members == 1 else min(n, part.counts.width - begin)
                    to = place + _place_in_row(part, conv) - _place_in_row(own, conv)
                    for k in range(seen):
                        dx[to + k * step] = sums[member * size + column + k]


def _place_in_row(part: Part, conv: Convolution) -> int:
    """Return the place of the first element of a part in a row of dX."""
    return part.first.width * conv.stride.width + part.place.width - conv.x.head.width


def _write_both(into: np.ndarray, even: np.ndarray, odd: np.ndarray, count: int) -> None:
    """Interleave the elements of two rows."""
    for k in range(count):
        into[2 * k] = even[k]
        into[2 * k + 1] = odd[k]


def _add_up(
    sums: np.ndarray,
    source: np.ndarray,
    w: np.ndarray,
    block: Block,
    part: Part,
    geometry: Geometry,
    tables: DxTables,
    runs: Runs,
) -> bool:
    """Compute the sums of a part for some channels; return whether there is no memory."""
    filters, taps, panels = geometry.conv.filters, part.taps, geometry.panels
    if taps == 0:
        clear(sums, 0, block.channels * geometry.dx_blocks * COLUMNS)
        return False
    together = min(filters, max(1, TERMS // taps))
    number, plane = together * taps, volume(geometry.dy.box)
    # Copies of whole vectors may extend beyond a panel.
    size = number * COLUMNS + TILE
    memory = take_memory((geometry.dx_blocks * size if panels else 0) + TILE, 2 * number + TILE_ROWS + 2)
    if len(memory.numbers) == 0:
        return True
    further = memory.integers[2 * number :]
    left = Rows(w, further[:TILE_ROWS], further[TILE_ROWS : TILE_ROWS + 1], memory.integers[:number])
    values = aligned(memory.numbers) if panels else source
    right = Columns(values, further[TILE_ROWS + 1 :], memory.integers[number : 2 * number])
    terms = Terms(together, taps, _source(block.line, block.start, block.group, part, geometry), size)
    shifts = tables.shifts[part.tap : part.tap + taps]
    for i in range(together):
        for k in range(taps):
            term = i * taps + k
            left.steps[term] = i * geometry.conv.channels * geometry.conv.taps + tables.taps[part.tap + k]
            right.places[term] = term * COLUMNS if panels else i * plane - shifts[k]
    for m in range(0, filters, together):
        if panels:
            _pack(right.values, source, runs, m * plane, plane, min(together, filters - m), shifts, size)
        _add_filters(sums, m, left, right, terms, block, geometry)
    return_memory(memory)
    return False


def _add_filters(
    sums: np.ndarray, m: int, left: Rows, right: Columns, terms: Terms, block: Block, geometry: Geometry
) -> None:
    """Add the products of some filters, from m on."""
    conv: Convolution = geometry.conv
    taps, filters, together, length = conv.taps, conv.filters, terms.together, block.length
    used, plane, room = min(together, filters - m), volume(geometry.dy.box), geometry.dx_blocks * COLUMNS
    weights = Rows(left.values, left.starts, left.shifts, left.steps[: used * terms.taps])
    grads = Columns(right.values, right.bases, right.places[: used * terms.taps])
    left.shifts[0] = (block.group * filters + m) * conv.channels * taps
    for c in range(0, block.channels, TILE_ROWS):
        rows = min(TILE_ROWS, block.channels - c)
        for i in range(rows):
            left.starts[i] = (block.first + c + i) * taps
        if c + rows < block.channels:
            begin = left.shifts[0] + left.starts[0] + rows * taps
            fetch_rows(left.values, begin, used, conv.channels * taps, TILE_ROWS * taps)
        if c == 0 and not geometry.panels:
            # Needed next: dY of other filters, or of the first filters for the next task.
            last = m + together >= filters
            begin = terms.base + (length if last else (m + together) * plane)
            following = min(together, filters if last else filters - m - together)
            fetch_rows(right.values, begin, following, plane, length)
        for k in range(0, length, COLUMNS):
            width = min(COLUMNS, (length - k + TILE - 1) // TILE * TILE)
            right.bases[0] = k // COLUMNS * terms.panel if geometry.panels else terms.base + m * plane + k
            add_products(sums[c * room + k :], room, weights, rows, grads, width, m == 0)


def _source(line: int, start: int, group: int, part: Part, geometry: Geometry) -> int:
    """Return the place in the boxes of dY of a position in a line, for the first filter of a group."""
    conv: Convolution = geometry.conv
    channel = (line // part.counts.depth * conv.groups + group) * conv.filters
    a = part.first.depth + line % part.counts.depth + geometry.dy.head.depth
    b = part.first.height + geometry.dy.head.height
    row = (a * geometry.dy.box.height + b) * geometry.dy.box.width
    return channel * volume(geometry.dy.box) + row + part.first.width + geometry.dy.head.width + start


def _list_runs(runs: Runs, block: Block, part: Part, geometry: Geometry) -> int:
    """Write the runs of consecutive positions of a task; return their number."""
    conv: Convolution = geometry.conv
    depth, height, width = part.counts.depth, part.counts.height, part.counts.width
    pitch = width if geometry.panels else geometry.dy.box.width
    number, at, end = 0, block.start, block.start + block.length
    while at < end:
        k = at % pitch
        if k >= width:
            at += pitch - k
            continue
        row = at // pitch if geometry.panels else block.line * height + at // pitch
        y, z, sample = row % height, row // height % depth, row // height // depth
        n = min(width - k, end - at)
        if geometry.panels:
            n = min(n, TILE, COLUMNS - (at - block.start) % COLUMNS)
        shift = y * geometry.dy.box.width + k
        a = (part.first.depth + z) * conv.stride.depth + part.place.depth - conv.x.head.depth
        b = (part.first.height + y) * conv.stride.height + part.place.height - conv.x.head.height
        c = (part.first.width + k) * conv.stride.width + part.place.width - conv.x.head.width
        channel = (sample * conv.groups + block.group) * conv.channels
        row = (channel * conv.x.size.depth + a) * conv.x.size.height + b
        runs.columns[number], runs.lengths[number] = at - block.start, n
        runs.sources[number] = _source(sample * depth + z, shift, block.group, part, geometry)
        runs.targets[number] = row * conv.x.size.width + c
        number += 1
        at += n
    return number


def _pack(
    panels: np.ndarray,
    source: np.ndarray,
    runs: Runs,
    shift: int,
    plane: int,
    filters: int,
    shifts: Integers,
    size: int,
) -> None:
    """Pack the columns of some filters for all taps. The surplus of whole vectors is overwritten."""
    for i in range(filters):
        for k in range(len(shifts)):
            begin, row = shift + i * plane - shifts[k], (i * len(shifts) + k) * COLUMNS
            for run in range(len(runs.columns)):
                place = runs.columns[run] // COLUMNS * size + runs.columns[run] % COLUMNS
                copy_vector(panels, row + place, source, begin + runs.sources[run])
