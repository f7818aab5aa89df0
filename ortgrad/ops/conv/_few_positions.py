"""The compiled ConvGrad for few positions, in which vectors hold pairs of channel and tap.

What the windows see of X is copied into a matrix with a row for each position of all samples, and a column
for each pair. A row of dW is a sum of such rows. The products of dY and W are a matrix of the same form,
whose elements are added up where the windows have them in dX. W and dW are used as they are.

All products are those of the NumPy kernel, also with padding, so NaN and infinities go where they go in it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ortgrad.compiled.functions import (
    TILE,
    TILE_ROWS,
    Columns,
    Rows,
    add_listed,
    add_products,
    allocate_integers,
    clear,
    copy_elements,
    copy_listed,
    release,
    transpose,
)
from ortgrad.operators.compiled import Integers
from ortgrad.ops.conv._geometry import (
    TERMS,
    Geometry,
    Spatial,
    volume,
)
from ortgrad.ops.conv._memory import aligned, fetch_rows


class Few(NamedTuple):
    """How dX and dW are computed in this way."""

    dx: bool  # whether they are
    dw: bool
    dw_start: int  # where the scratch memory for dW begins
    dx_channels: int  # of a task for dX: its channels, those of a block, and its scratch memory
    dx_block: int
    dx_memory: int
    dw_columns: int  # the same of a task for dW
    dw_block: int
    dw_memory: int


# Filters whose weights are used for all positions before those of other filters.
TOGETHER = 64


def few_channels_task(
    task: int,
    dy: np.ndarray,
    w: np.ndarray,
    dx: np.ndarray,
    scratch: np.ndarray,
    geometry: Geometry,
    few: Few,
    offsets: Integers,
) -> bool:
    """Compute dX of some channels."""
    groups, filters, channels, taps = geometry.groups, geometry.filters, geometry.channels, geometry.taps
    positions = volume(geometry.output)
    rows, pairs, most, step = geometry.samples * positions, channels * taps, few.dx_channels, few.dx_block
    splits = (channels + most - 1) // most
    group, first = task // splits, task % splits * most
    last = min(first + most, channels)
    # The columns that are no multiple of 16 are in another 16.
    width = step * taps
    pitch = width // TILE * TILE + TILE
    integers = allocate_integers(rows + 2 * TOGETHER + width + TILE_ROWS + 2)
    if len(integers) == 0:
        return True
    places, steps = integers[:rows], integers[rows : rows + TOGETHER]
    rights = integers[rows + TOGETHER : rows + 2 * TOGETHER]
    seen = integers[rows + 2 * TOGETHER : rows + 2 * TOGETHER + width]
    starts = integers[rows + 2 * TOGETHER + width :]
    shifts, bases = starts[TILE_ROWS : TILE_ROWS + 1], starts[TILE_ROWS + 1 :]
    _list_rows(places, positions, groups * filters)
    for k in range(TOGETHER):
        steps[k], rights[k] = k * positions, k * pairs
    _list_pairs(seen, 0, geometry, offsets)
    memory = aligned(scratch[task * few.dx_memory : (task + 1) * few.dx_memory])
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    tile = (rows + tiles - 1) // tiles
    while first < last:
        count = min(step, last - first)
        columns = count * taps
        whole = columns // TILE * TILE
        for m in range(0, filters, TOGETHER):
            used = min(TOGETHER, filters - m)
            shifts[0] = (group * filters + m) * positions
            begin = (group * filters + m) * pairs + first * taps
            # What comes next: other filters, or the first ones for the next block.
            following = m + TOGETHER if m + TOGETHER < filters else 0
            ahead = begin + (following - m) * pairs + (columns if following == 0 else 0)
            fetch_rows(w, ahead, min(TOGETHER, filters - following), pairs, columns)
            row = 0
            while row < rows:
                size = min(tile, rows - row)
                for i in range(size):
                    starts[i] = places[row + i]
                if whole > 0:
                    bases[0] = begin
                    add_products(
                        memory[row * pitch :],
                        pitch,
                        Rows(dy, starts, shifts, steps[:used]),
                        size,
                        Columns(w, bases, rights[:used]),
                        whole,
                        m == 0,
                    )
                if columns > whole:
                    bases[0] = begin + columns - TILE
                    add_products(
                        memory[row * pitch + whole :],
                        pitch,
                        Rows(dy, starts, shifts, steps[:used]),
                        size,
                        Columns(w, bases, rights[:used]),
                        TILE,
                        m == 0,
                    )
                row += tile
        if taps == 1 and geometry.x_in_place and _is_dense(geometry):
            _turn_back(memory, pitch, count, whole, group * channels + first, dx, geometry)
        else:
            _add_up(memory, pitch, columns, whole, group * channels + first, count, dx, seen, geometry)
        first += count
    release(integers)
    return False


def _is_dense(geometry: Geometry) -> bool:
    """Return whether every element of X is seen once, by a kernel with one tap."""
    output: Spatial = geometry.output
    size: Spatial = geometry.size
    stride: Spatial = geometry.stride
    same = output.depth == size.depth and output.height == size.height and output.width == size.width
    return same and stride.depth == 1 and stride.height == 1 and stride.width == 1


def _list_rows(places: np.ndarray, positions: int, filters: int) -> None:
    """Write where the rows are in dY, for the first filter."""
    for sample in range(len(places) // positions):
        for k in range(positions):
            places[sample * positions + k] = sample * filters * positions + k


def _list_pairs(seen: np.ndarray, first: int, geometry: Geometry, offsets: Integers) -> None:
    """Write where pairs of channel and tap are in boxes, from the channel of the first pair on."""
    plane = volume(geometry.x_box)
    tap, begin = first % geometry.taps, 0
    for k in range(len(seen)):
        seen[k] = begin + offsets[tap]
        tap += 1
        if tap == geometry.taps:
            tap = 0
            begin += plane


def _turn_back(
    memory: np.ndarray,
    pitch: int,
    count: int,
    whole: int,
    channel: int,
    dx: np.ndarray,
    geometry: Geometry,
) -> None:
    """Transpose the matrix of products into dX."""
    size = volume(geometry.size)
    for sample in range(geometry.samples):
        place = (sample * geometry.groups * geometry.channels + channel) * size
        start, done = sample * size * pitch, 0
        while done + TILE <= size:
            for c in range(0, whole, TILE):
                transpose(dx, place + c * size + done, size, memory, start + done * pitch + c, pitch)
            for c in range(whole, count):
                for k in range(done, done + TILE):
                    dx[place + c * size + k] = memory[start + k * pitch + whole + TILE + c - count]
            done += TILE
        for k in range(done, size):
            for c in range(whole):
                dx[place + c * size + k] = memory[start + k * pitch + c]
            for c in range(whole, count):
                dx[place + c * size + k] = memory[start + k * pitch + whole + TILE + c - count]


def _add_up(
    memory: np.ndarray,
    pitch: int,
    columns: int,
    whole: int,
    channel: int,
    count: int,
    dx: np.ndarray,
    seen: np.ndarray,
    geometry: Geometry,
) -> None:
    """Add up the products where the windows have them in dX."""
    samples, height, width = geometry.samples, geometry.output.height, geometry.output.width
    rows, line = geometry.x_box.height, geometry.x_box.width
    plane, in_place = geometry.x_box.depth * rows * line, geometry.x_in_place
    positions = geometry.output.depth * height * width
    boxes, begin = (
        dx if in_place else memory[samples * positions * pitch :],
        channel * plane if in_place else 0,
    )
    distance = geometry.groups * geometry.channels * plane if in_place else count * plane
    for sample in range(samples):
        clear(boxes, begin + sample * distance, count * plane)
        for p in range(positions):
            z, y, x = p // width // height, p // width % height, p % width
            z, y, x = z * geometry.stride.depth, y * geometry.stride.height, x * geometry.stride.width
            place = begin + sample * distance + (z * rows + y) * line + x
            row = (sample * positions + p) * pitch
            add_listed(boxes, place, seen, 0, whole, memory, row)
            add_listed(boxes, place, seen, whole, columns, memory, row + whole + TILE - columns)
    if not in_place:
        for sample in range(samples):
            for c in range(count):
                to = sample * geometry.groups * geometry.channels + channel + c
                _crop(boxes, (sample * count + c) * plane, dx, to, geometry)


def _crop(boxes: np.ndarray, start: int, dx: np.ndarray, channel: int, geometry: Geometry) -> None:
    """Copy a channel of dX from its box, which may end before it."""
    depth, height, width = geometry.size.depth, geometry.size.height, geometry.size.width
    planes, rows, line = geometry.x_box.depth, geometry.x_box.height, geometry.x_box.width
    count = max(0, min(width, line - geometry.head.width))
    for z in range(depth):
        a = z + geometry.head.depth
        for y in range(height):
            b = y + geometry.head.height
            to = ((channel * depth + z) * height + y) * width
            n = count if a < planes and b < rows else 0
            source = start + (a * rows + b) * line + geometry.head.width
            copy_elements(dx, to, boxes, source, n)
            if n < width:
                clear(dx, to + n, width - n)


def few_weights_task(
    task: int,
    dy: np.ndarray,
    x: np.ndarray,
    dw: np.ndarray,
    scratch: np.ndarray,
    geometry: Geometry,
    few: Few,
    offsets: Integers,
) -> bool:
    """Compute dW for some pairs of channel and tap."""
    groups, filters, channels, taps = geometry.groups, geometry.filters, geometry.channels, geometry.taps
    positions = volume(geometry.output)
    rows, pairs, most, step = geometry.samples * positions, channels * taps, few.dw_columns, few.dw_block
    splits = max(1, pairs // most)
    group, split = task // splits, task % splits
    first, last = split * most, pairs if split == splits - 1 else (split + 1) * most
    pitch = step + TILE
    integers = allocate_integers(2 * rows + pitch + TILE_ROWS + 2)
    if len(integers) == 0:
        return True
    places, rights, seen = integers[:rows], integers[rows : 2 * rows], integers[2 * rows : 2 * rows + pitch]
    starts = integers[2 * rows + pitch :]
    shifts, bases = starts[TILE_ROWS : TILE_ROWS + 1], starts[TILE_ROWS + 1 :]
    _list_rows(places, positions, groups * filters)
    for k in range(rows):
        rights[k] = k * pitch
    start = few.dw_start + task * few.dw_memory
    memory = aligned(scratch[start : start + few.dw_memory])
    rest, boxes = memory[rows * pitch :], memory[rows * pitch + TILE_ROWS * TILE :]
    shifts[0] = 0
    while first < last:
        # The last block has the rest that does not fill a tile.
        columns = step if last - first >= step + TILE else last - first
        whole = columns // TILE * TILE
        if taps == 1 and geometry.x_in_place and _is_dense(geometry):
            _turn(memory, pitch, columns, whole, group * channels + first, x, geometry)
        else:
            _list_pairs(seen[:columns], first, geometry, offsets)
            _copy_seen(memory, pitch, group, first, columns, x, boxes, seen, geometry)
        for m in range(0, filters, TILE_ROWS):
            size = min(TILE_ROWS, filters - m)
            for i in range(size):
                starts[i] = (group * filters + m + i) * positions
            to = (group * filters + m) * pairs + first
            fetch_rows(dw, to + TILE_ROWS * pairs, min(TILE_ROWS, filters - m - size), pairs, columns)
            for row in range(0, rows, TERMS):
                end = min(rows, row + TERMS)
                if whole > 0:
                    bases[0] = 0
                    add_products(
                        dw[to:],
                        pairs,
                        Rows(dy, starts, shifts, places[row:end]),
                        size,
                        Columns(memory, bases, rights[row:end]),
                        whole,
                        row == 0,
                    )
                if columns > whole:
                    bases[0] = whole
                    add_products(
                        rest,
                        TILE,
                        Rows(dy, starts, shifts, places[row:end]),
                        size,
                        Columns(memory, bases, rights[row:end]),
                        TILE,
                        row == 0,
                    )
            for i in range(size):
                for k in range(whole, columns):
                    dw[to + i * pairs + k] = rest[i * TILE + k - whole]
        first += columns
    release(integers)
    return False


def _turn(
    memory: np.ndarray,
    pitch: int,
    count: int,
    whole: int,
    channel: int,
    x: np.ndarray,
    geometry: Geometry,
) -> None:
    """Transpose X of some channels."""
    size = volume(geometry.size)
    for sample in range(geometry.samples):
        start = (sample * geometry.groups * geometry.channels + channel) * size
        place, done = sample * size * pitch, 0
        while done + TILE <= size:
            for c in range(0, whole, TILE):
                transpose(memory, place + done * pitch + c, pitch, x, start + c * size + done, size)
            for c in range(whole, count):
                for k in range(done, done + TILE):
                    memory[place + k * pitch + c] = x[start + c * size + k]
            done += TILE
        for k in range(done, size):
            for c in range(count):
                memory[place + k * pitch + c] = x[start + c * size + k]


def _copy_seen(
    memory: np.ndarray,
    pitch: int,
    group: int,
    first: int,
    columns: int,
    x: np.ndarray,
    boxes: np.ndarray,
    seen: np.ndarray,
    geometry: Geometry,
) -> None:
    """Copy what windows see of X, for some pairs of channel and tap."""
    samples, height, width = geometry.samples, geometry.output.height, geometry.output.width
    rows, line, taps = geometry.x_box.height, geometry.x_box.width, geometry.taps
    plane, in_place = geometry.x_box.depth * rows * line, geometry.x_in_place
    positions, channel = geometry.output.depth * height * width, group * geometry.channels + first // taps
    count = (first + columns - 1) // taps - first // taps + 1
    source, begin = x if in_place else boxes, channel * plane if in_place else 0
    distance = geometry.groups * geometry.channels * plane if in_place else count * plane
    if not in_place:
        clear(boxes, 0, samples * count * plane)
        for sample in range(samples):
            for c in range(count):
                start = sample * geometry.groups * geometry.channels + channel + c
                _embed(x, start, boxes, (sample * count + c) * plane, geometry)
    for sample in range(samples):
        for p in range(positions):
            z, y, u = p // width // height, p // width % height, p % width
            z, y, u = z * geometry.stride.depth, y * geometry.stride.height, u * geometry.stride.width
            place = begin + sample * distance + (z * rows + y) * line + u
            row = (sample * positions + p) * pitch
            copy_listed(memory, row, source, place, seen, 0, columns)


def _embed(x: np.ndarray, channel: int, boxes: np.ndarray, place: int, geometry: Geometry) -> None:
    """Copy a channel of X into its box, which may end before it."""
    depth, height, width = geometry.size.depth, geometry.size.height, geometry.size.width
    planes, rows, line = geometry.x_box.depth, geometry.x_box.height, geometry.x_box.width
    count = max(0, min(width, line - geometry.head.width))
    for z in range(min(depth, planes - geometry.head.depth)):
        for y in range(min(height, rows - geometry.head.height)):
            start = ((channel * depth + z) * height + y) * width
            to = (
                place
                + ((z + geometry.head.depth) * rows + y + geometry.head.height) * line
                + geometry.head.width
            )
            copy_elements(boxes, to, x, start, count)
