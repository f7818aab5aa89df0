"""The part of the compiled ConvGrad that computes dX."""

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
    clear,
    copy_elements,
    copy_vector,
    release,
)
from ortgrad.operators.compiled import Integers
from ortgrad.ops.conv._geometry import (
    COLUMNS,
    PART,
    TERMS,
    Geometry,
    Part,
    volume,
)
from ortgrad.ops.conv._memory import aligned, fetch_rows


def channels_task(
    task: int,
    dy: np.ndarray,
    w: np.ndarray,
    dx: np.ndarray,
    boxes: np.ndarray,
    geometry: Geometry,
    taps: Integers,
    offsets: Integers,
    parts: Integers,
) -> bool:
    """Compute dX of some channels at some positions; of all the parts that share rows of dX."""
    members = geometry.dx_members
    at, step = 0, members * PART
    while at + step < len(parts) and task >= parts[at + step]:  # its first task
        at += step
    own: Part = parts[at : at + PART]
    channels, most = geometry.channels, geometry.dx_channels
    splits = (channels + most - 1) // most
    task -= own.task
    unit, group, first = (
        task // (geometry.groups * splits),
        task // splits % geometry.groups,
        task % splits * most,
    )
    count, room = min(most, channels - first), geometry.dx_blocks * COLUMNS
    line, start = unit // own.units, unit % own.units * room
    sums, integers = allocate(members * count * room + COLUMNS), allocate_integers(4 * room)
    if len(sums) == 0 or len(integers) == 0:
        release(sums)
        release(integers)
        return True
    columns, lengths = integers[:room], integers[room : 2 * room]
    sources, targets = integers[2 * room : 3 * room], integers[3 * room :]
    runs, length = _runs(line, start, group, own, geometry, columns, lengths, sources, targets)
    failed = False
    for member in range(members):
        failed = failed or _add_up(
            sums[member * count * room :],
            dy if geometry.dy_in_place else boxes,
            w,
            line,
            start,
            length,
            group,
            first,
            count,
            parts[at + member * PART : at + (member + 1) * PART],
            geometry,
            taps,
            offsets,
            columns[:runs],
            sources,
        )
    area = volume(geometry.size)
    pitch = geometry.dy_box.width
    for c in range(count):
        for run in range(runs):
            n, place, column = lengths[run], targets[run] + (first + c) * area, c * room + columns[run]
            if geometry.stride.width == 1:
                copy_elements(dx, place, sums, column, n)
            elif members == 2 and geometry.stride.width == 2:
                second: Part = parts[at + PART : at + step]
                pairs = min(n, second.counts.width - (start + columns[run]) % pitch)
                _write_both(dx[place:], sums[column:], sums[count * room + column :], pairs)
                if pairs < n:
                    dx[place + 2 * pairs] = sums[column + pairs]
            else:
                for member in range(members):
                    part: Part = parts[at + member * PART : at + (member + 1) * PART]
                    seen = n if members == 1 else min(n, part.counts.width - (start + columns[run]) % pitch)
                    to = place + _place_in_row(part, geometry) - _place_in_row(own, geometry)
                    for k in range(seen):
                        dx[to + k * geometry.stride.width] = sums[member * count * room + column + k]
    release(sums)
    release(integers)
    return failed


def _place_in_row(part: Part, geometry: Geometry) -> int:
    """The place of the first element of a part in a row of dX."""
    return part.first.width * geometry.stride.width + part.place.width - geometry.head.width


def _write_both(into: np.ndarray, even: np.ndarray, odd: np.ndarray, count: int) -> None:
    """Interleave the elements of two rows."""
    for k in range(count):
        into[2 * k] = even[k]
        into[2 * k + 1] = odd[k]


def _add_up(
    sums: np.ndarray,
    source: np.ndarray,
    w: np.ndarray,
    line: int,
    start: int,
    length: int,
    group: int,
    first: int,
    count: int,
    part: Part,
    geometry: Geometry,
    taps: Integers,
    offsets: Integers,
    columns: np.ndarray,
    sources: np.ndarray,
) -> bool:
    """Compute the sums of a part for some channels; return whether there is no memory."""
    channels, filters = geometry.channels, geometry.filters
    panels, own, room = geometry.panels, part.taps, geometry.dx_blocks * COLUMNS
    if own == 0:
        clear(sums, 0, count * room)
        return False
    # The filters whose products are added up at once.
    together = min(filters, max(1, TERMS // own))
    terms = together * own
    # What is copied into a panel too much may lie behind it.
    size = terms * COLUMNS + TILE
    integers = allocate_integers(2 * terms + TILE_ROWS + 2)
    panel = allocate((geometry.dx_blocks * size if panels else 0) + TILE)
    if len(integers) == 0 or len(panel) == 0:
        release(integers)
        release(panel)
        return True
    steps, places, starts = integers[:terms], integers[terms : 2 * terms], integers[2 * terms :]
    shifts, bases = starts[TILE_ROWS : TILE_ROWS + 1], starts[TILE_ROWS + 1 : TILE_ROWS + 2]
    plane = volume(geometry.dy_box)
    base = _source(line, start, group, plane, part, geometry)
    for i in range(together):
        for k in range(own):
            tap, term = part.tap + k, i * own + k
            steps[term] = i * channels * geometry.taps + taps[tap]
            places[term] = term * COLUMNS if panels else i * plane - offsets[tap]
    right = aligned(panel) if panels else source
    blocks = (length + COLUMNS - 1) // COLUMNS
    m = 0
    while m < filters:
        used = min(together, filters - m)
        if panels:
            own_offsets = offsets[part.tap : part.tap + own]
            _pack(right, source, columns, sources, m * plane, plane, used, own_offsets, size)
        for c in range(0, count, TILE_ROWS):
            rows = min(TILE_ROWS, count - c)
            for i in range(rows):
                starts[i] = (first + c + i) * geometry.taps
            shifts[0] = (group * filters + m) * channels * geometry.taps
            if c + rows < count:
                begin = shifts[0] + starts[0] + rows * geometry.taps
                fetch_rows(w, begin, used, channels * geometry.taps, TILE_ROWS * geometry.taps)
            if c == 0 and not panels:
                # What comes next: dY of other filters, or of the first ones for the next task.
                last = m + together >= filters
                begin = base + (length if last else (m + together) * plane)
                fetch_rows(
                    source, begin, min(together, filters if last else filters - m - together), plane, length
                )
            for block in range(blocks):
                width = min(COLUMNS, (length - block * COLUMNS + TILE - 1) // TILE * TILE)
                bases[0] = block * size if panels else base + m * plane + block * COLUMNS
                add_products(
                    sums[c * room + block * COLUMNS :],
                    room,
                    Rows(w, starts, shifts, steps[: used * own]),
                    rows,
                    Columns(right, bases, places[: used * own]),
                    width,
                    m == 0,
                )
        m += together
    release(integers)
    release(panel)
    return False


def _source(line: int, start: int, group: int, plane: int, part: Part, geometry: Geometry) -> int:
    """The place in the boxes of dY of a position in a line, for the first filter of a group."""
    samples = part.counts.depth
    channel = (line // samples * geometry.groups + group) * geometry.filters
    a = part.first.depth + line % samples + geometry.dy_head.depth
    b = part.first.height + geometry.dy_head.height
    row = (a * geometry.dy_box.height + b) * geometry.dy_box.width
    return channel * plane + row + part.first.width + geometry.dy_head.width + start


def _runs(
    line: int,
    start: int,
    group: int,
    part: Part,
    geometry: Geometry,
    columns: np.ndarray,
    lengths: np.ndarray,
    sources: np.ndarray,
    targets: np.ndarray,
) -> tuple[int, int]:
    """Write the runs of consecutive positions of a task: the column where each begins, its length, and its
    place in dY and in dX. Return the number of runs and of columns."""
    depth, height, width = part.counts.depth, part.counts.height, part.counts.width
    panels, plane = geometry.panels, volume(geometry.dy_box)
    pitch = width if panels else geometry.dy_box.width
    end = geometry.samples * depth * height * width if panels else (height - 1) * pitch + width
    end = min(end, start + geometry.dx_blocks * COLUMNS)
    runs, at = 0, start
    while at < end:
        k = at % pitch
        if k >= width:
            at += pitch - k
            continue
        # A line is a row of rows; with panels there is one line, of all samples.
        row = at // pitch if panels else line * height + at // pitch
        y, z, sample = row % height, row // height % depth, row // height // depth
        n = min(width - k, end - at)
        if panels:
            n = min(n, TILE, COLUMNS - (at - start) % COLUMNS)
        columns[runs], lengths[runs] = at - start, n
        shift = y * geometry.dy_box.width + k
        sources[runs] = _source(sample * depth + z, shift, group, plane, part, geometry)
        a = (part.first.depth + z) * geometry.stride.depth + part.place.depth - geometry.head.depth
        b = (part.first.height + y) * geometry.stride.height + part.place.height - geometry.head.height
        c = (part.first.width + k) * geometry.stride.width + part.place.width - geometry.head.width
        channel = (sample * geometry.groups + group) * geometry.channels
        row = (channel * geometry.size.depth + a) * geometry.size.height + b
        targets[runs] = row * geometry.size.width + c
        runs += 1
        at += n
    return runs, end - start


def _pack(
    panels: np.ndarray,
    source: np.ndarray,
    columns: np.ndarray,
    sources: np.ndarray,
    shift: int,
    plane: int,
    filters: int,
    offsets: Integers,
    size: int,
) -> None:
    """Copy the columns of some filters together, for all taps: what is copied too much is overwritten."""
    for i in range(filters):
        for k in range(len(offsets)):
            begin, row = shift + i * plane - offsets[k], (i * len(offsets) + k) * COLUMNS
            for run in range(len(columns)):
                place = columns[run] // COLUMNS * size + columns[run] % COLUMNS
                copy_vector(panels, row + place, source, begin + sources[run])
