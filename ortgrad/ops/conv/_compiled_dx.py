"""The part of the compiled ConvGrad that computes dX."""

from __future__ import annotations

import numpy as np

from ortgrad.compiled.functions import (
    TILE,
    TILE_ROWS,
    add_products,
    allocate,
    allocate_integers,
    clear,
    copy_elements,
    copy_vector,
    prefetch,
    release,
)
from ortgrad.ops.conv._compiled_dw import aligned
from ortgrad.ops.conv._geometry import (
    CHANNELS,
    COLUMNS,
    DX_BLOCKS,
    DX_CHANNELS,
    DX_MEMBERS,
    DY_BOX,
    DY_HEAD,
    DY_IN_PLACE,
    FILTERS,
    GROUPS,
    HEAD,
    PANELS,
    PART_COUNT,
    PART_FIELDS,
    PART_FIRST,
    PART_PLACE,
    PART_TAP,
    PART_TAPS,
    PART_TASK,
    PART_UNITS,
    SAMPLES,
    SIZE,
    STRIDE,
    TAPS,
    TERMS,
)


def channels_task(
    task: int,
    dy: np.ndarray,
    w: np.ndarray,
    dx: np.ndarray,
    boxes: np.ndarray,
    geometry: np.ndarray,
    taps: np.ndarray,
    offsets: np.ndarray,
    parts: np.ndarray,
) -> bool:
    """Compute dX of some channels at some positions; of all the parts that share rows of dX."""
    members = geometry[DX_MEMBERS]
    at, step = 0, members * PART_FIELDS
    while at + step < len(parts) and task >= parts[at + step + PART_TASK]:
        at += step
    own = parts[at : at + step]
    channels, most = geometry[CHANNELS], geometry[DX_CHANNELS]
    splits = (channels + most - 1) // most
    task -= own[PART_TASK]
    unit, group, first = (
        task // (geometry[GROUPS] * splits),
        task // splits % geometry[GROUPS],
        task % splits * most,
    )
    count, room = min(most, channels - first), geometry[DX_BLOCKS] * COLUMNS
    line, start = unit // own[PART_UNITS], unit % own[PART_UNITS] * room
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
            dy if geometry[DY_IN_PLACE] != 0 else boxes,
            w,
            line,
            start,
            length,
            group,
            first,
            count,
            own[member * PART_FIELDS : (member + 1) * PART_FIELDS],
            geometry,
            taps,
            offsets,
            columns[:runs],
            sources,
        )
    area = geometry[SIZE] * geometry[SIZE + 1] * geometry[SIZE + 2]
    pitch = geometry[DY_BOX + 2]
    for c in range(count):
        for run in range(runs):
            n, place, column = lengths[run], targets[run] + (first + c) * area, c * room + columns[run]
            if geometry[STRIDE + 2] == 1:
                copy_elements(dx, place, sums, column, n)
            elif members == 2 and geometry[STRIDE + 2] == 2:
                pairs = min(n, own[PART_FIELDS + PART_COUNT + 2] - (start + columns[run]) % pitch)
                _write_both(dx[place:], sums[column:], sums[count * room + column :], pairs)
                if pairs < n:
                    dx[place + 2 * pairs] = sums[column + pairs]
            else:
                for member in range(members):
                    part = own[member * PART_FIELDS : (member + 1) * PART_FIELDS]
                    seen = (
                        n if members == 1 else min(n, part[PART_COUNT + 2] - (start + columns[run]) % pitch)
                    )
                    to = place + _place_in_row(part, geometry) - _place_in_row(own, geometry)
                    for k in range(seen):
                        dx[to + k * geometry[STRIDE + 2]] = sums[member * count * room + column + k]
    release(sums)
    release(integers)
    return failed


def _place_in_row(part: np.ndarray, geometry: np.ndarray) -> int:
    """The place of the first element of a part in a row of dX."""
    return part[PART_FIRST + 2] * geometry[STRIDE + 2] + part[PART_PLACE + 2] - geometry[HEAD + 2]


def _write_both(into: np.ndarray, even: np.ndarray, odd: np.ndarray, count: int) -> None:
    """Write elements of two rows in turns."""
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
    part: np.ndarray,
    geometry: np.ndarray,
    taps: np.ndarray,
    offsets: np.ndarray,
    columns: np.ndarray,
    sources: np.ndarray,
) -> bool:
    """Compute the sums of a part for some channels; return whether there is no memory."""
    channels, filters = geometry[CHANNELS], geometry[FILTERS]
    panels, own, room = geometry[PANELS] != 0, part[PART_TAPS], geometry[DX_BLOCKS] * COLUMNS
    if own == 0:
        clear(sums, 0, count * room)
        return False
    # The filters whose products are added up at once.
    together = min(filters, max(1, TERMS // own))
    terms = together * own
    # What is copied into a panel too much may lie behind it.
    size = terms * COLUMNS + TILE
    integers = allocate_integers(2 * terms + TILE_ROWS + 2)
    panel = allocate((geometry[DX_BLOCKS] * size if panels else 0) + TILE)
    if len(integers) == 0 or len(panel) == 0:
        release(integers)
        release(panel)
        return True
    steps, places, starts = integers[:terms], integers[terms : 2 * terms], integers[2 * terms :]
    shifts, bases = starts[TILE_ROWS : TILE_ROWS + 1], starts[TILE_ROWS + 1 : TILE_ROWS + 2]
    plane = geometry[DY_BOX] * geometry[DY_BOX + 1] * geometry[DY_BOX + 2]
    base = _source(line, start, group, plane, part, geometry)
    for i in range(together):
        for k in range(own):
            tap, term = part[PART_TAP] + k, i * own + k
            steps[term] = i * channels * geometry[TAPS] + taps[tap]
            places[term] = term * COLUMNS if panels else i * plane - offsets[tap]
    right = aligned(panel) if panels else source
    blocks = (length + COLUMNS - 1) // COLUMNS
    m = 0
    while m < filters:
        used = min(together, filters - m)
        if panels:
            own_offsets = offsets[part[PART_TAP] : part[PART_TAP] + own]
            _pack(right, source, columns, sources, m * plane, plane, used, own_offsets, size)
        for c in range(0, count, TILE_ROWS):
            rows = min(TILE_ROWS, count - c)
            for i in range(rows):
                starts[i] = (first + c + i) * geometry[TAPS]
            shifts[0] = (group * filters + m) * channels * geometry[TAPS]
            if c + rows < count:
                begin = shifts[0] + starts[0] + rows * geometry[TAPS]
                _fetch(w, begin, used, channels * geometry[TAPS], TILE_ROWS * geometry[TAPS])
            if c == 0 and not panels:
                # What comes next: dY of other filters, or of the first ones for the next task.
                last = m + together >= filters
                begin = base + (length if last else (m + together) * plane)
                _fetch(
                    source, begin, min(together, filters if last else filters - m - together), plane, length
                )
            for block in range(blocks):
                width = min(COLUMNS, (length - block * COLUMNS + TILE - 1) // TILE * TILE)
                bases[0] = block * size if panels else base + m * plane + block * COLUMNS
                add_products(
                    sums[c * room + block * COLUMNS :],
                    room,
                    w,
                    starts,
                    rows,
                    shifts,
                    steps[: used * own],
                    right,
                    bases,
                    places[: used * own],
                    width,
                    m == 0,
                )
        m += together
    release(integers)
    release(panel)
    return False


def _fetch(array: np.ndarray, begin: int, rows: int, stride: int, length: int) -> None:
    """Fetch rows into the cache: they are so far from each other that the processor does not foresee them."""
    for i in range(rows):
        for k in range(0, length, TILE):
            prefetch(array, begin + i * stride + k)


def _source(line: int, start: int, group: int, plane: int, part: np.ndarray, geometry: np.ndarray) -> int:
    """The place in the boxes of dY of a position in a line, for the first filter of a group."""
    samples = part[PART_COUNT]
    channel = (line // samples * geometry[GROUPS] + group) * geometry[FILTERS]
    a = part[PART_FIRST] + line % samples + geometry[DY_HEAD]
    b = part[PART_FIRST + 1] + geometry[DY_HEAD + 1]
    row = (a * geometry[DY_BOX + 1] + b) * geometry[DY_BOX + 2]
    return channel * plane + row + part[PART_FIRST + 2] + geometry[DY_HEAD + 2] + start


def _runs(
    line: int,
    start: int,
    group: int,
    part: np.ndarray,
    geometry: np.ndarray,
    columns: np.ndarray,
    lengths: np.ndarray,
    sources: np.ndarray,
    targets: np.ndarray,
) -> tuple[int, int]:
    """Write the runs of consecutive positions of a task: the column where each begins, its length, and its
    place in dY and in dX. Return the number of runs and of columns."""
    depth, height, width = part[PART_COUNT], part[PART_COUNT + 1], part[PART_COUNT + 2]
    panels, plane = geometry[PANELS] != 0, geometry[DY_BOX] * geometry[DY_BOX + 1] * geometry[DY_BOX + 2]
    pitch = width if panels else geometry[DY_BOX + 2]
    end = geometry[SAMPLES] * depth * height * width if panels else (height - 1) * pitch + width
    end = min(end, start + geometry[DX_BLOCKS] * COLUMNS)
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
        shift = y * geometry[DY_BOX + 2] + k
        sources[runs] = _source(sample * depth + z, shift, group, plane, part, geometry)
        a = (part[PART_FIRST] + z) * geometry[STRIDE] + part[PART_PLACE] - geometry[HEAD]
        b = (part[PART_FIRST + 1] + y) * geometry[STRIDE + 1] + part[PART_PLACE + 1] - geometry[HEAD + 1]
        c = (part[PART_FIRST + 2] + k) * geometry[STRIDE + 2] + part[PART_PLACE + 2] - geometry[HEAD + 2]
        channel = (sample * geometry[GROUPS] + group) * geometry[CHANNELS]
        targets[runs] = ((channel * geometry[SIZE] + a) * geometry[SIZE + 1] + b) * geometry[SIZE + 2] + c
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
    offsets: np.ndarray,
    size: int,
) -> None:
    """Copy the columns of some filters together, for all taps: what is copied too much is overwritten."""
    for i in range(filters):
        for k in range(len(offsets)):
            begin, row = shift + i * plane - offsets[k], (i * len(offsets) + k) * COLUMNS
            for run in range(len(columns)):
                place = columns[run] // COLUMNS * size + columns[run] % COLUMNS
                copy_vector(panels, row + place, source, begin + sources[run])
