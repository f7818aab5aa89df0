"""Convolutions for Numba: sums of products that `add_products` computes in registers.

The rows of a tile are positions and its columns are filters, so that no part of a vector is wasted by strides
and at the edges of pictures. First the weights are transposed, and X is copied into boxes if it has padding.
Finished tiles are transposed, and the bias, another tensor and an activation are applied. If many columns
would be unused because there are few filters, the filters are the rows instead (`_forward_rows`).

Products with padding are computed, so that products with NaN and infinities are NaN.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ortgrad.compiled.functions import TILE, Columns, Rows, allocate, clear, copy_vector, release, transpose
from ortgrad.operators.compiled import Integers, Plan
from ortgrad.operators.records import numbers_of
from ortgrad.ops.conv import costs
from ortgrad.ops.conv._dense import Dense, Sizes, in_three_dimensions, place_in, reaches, views_of, windows_of
from ortgrad.ops.conv._forward_geometry import Geometry, Result, activation_numbers, write
from ortgrad.ops.conv._forward_rows import convolve_rows
from ortgrad.ops.conv._geometry import COLUMNS, TERMS, Convolution, Frame, Spatial, volume
from ortgrad.ops.conv._memory import add_tiles, aligned, embed, return_memory, take_memory

# A number of positions that fills both tiles and the squares that are transposed at once.
_POSITIONS = 48
# There are enough tasks for several threads, provided that each has enough products. Its sums stay in the
# cache.
_TASKS, _PRODUCTS, _SUMS = 16, 1 << 20, 8192
# Columns of a task whose rows are filters.
_ROOM = 4 * COLUMNS


def plan(x: Sizes, w: Sizes, b: Sizes | None, z: Sizes | None, y: Sizes, **attributes: Any) -> Plan | None:
    """Return the plan; None for tensors without elements, and for more than three spatial dimensions."""
    activation = activation_numbers(attributes)
    win, group = windows_of(x, w, attributes)
    fits = y[2:] == win.outputs and z in (None, y)
    if not fits or win.rank > 3 or not math.prod(x) * math.prod(w):
        return None
    win = in_three_dimensions(win)
    filters, channels = w[0] // group, w[1]
    dense = Dense(win, x[0], group, filters, channels)
    together = min(channels, max(1, TERMS // dense.taps))
    slices, positions = -(-filters // TILE), dense.rows
    wanted = min(_TASKS, max(1, positions * math.prod(w) // _PRODUCTS))
    by_rows = max(win.strides) == 1 and costs.takes(
        "rows", filters * win.reach[2], slices * TILE * win.outputs[2]
    )
    in_place = dense.in_place and not by_rows
    boxes, box = (0, win.sizes) if in_place else (x[0] * x[1], win.reach)
    if by_rows:
        width, room = filters, _ROOM
        lines, length = x[0] * group * win.outputs[0], (win.outputs[1] - 1) * box[2] + win.outputs[2]
        while room > COLUMNS and lines * -(-length // room) < wanted:
            room //= 2
        tasks = boxes, lines * -(-length // room)
        turned = 0
    else:
        width = -(-slices // -(-slices * TILE // COLUMNS)) * TILE
        blocks = group * -(-slices * TILE // width)
        room = max(1, min(_SUMS // width, -(-positions * blocks // wanted)) // _POSITIONS) * _POSITIONS
        tasks = boxes + group * slices, blocks * -(-positions // room)
        turned = group * slices * TILE * channels * dense.taps + TILE
    frame = Frame(Spatial(*win.sizes), Spatial(*box), Spatial(*win.heads))
    conv = dense.convolution._replace(x=frame, x_in_place=in_place)
    offsets = [place_in(reach, box) for reach in reaches(win)]
    return Plan(
        tasks=tasks,
        views=views_of(x, w, b, z, y),
        numbers={
            "geometry": numbers_of(Geometry(conv, boxes, width, room, together)),
            "steps": [c * math.prod(box) + offset for c in range(together) for offset in offsets],
            **activation,
        },
        work=positions * math.prod(w) // 8,
        # Columns are read up to a multiple of TILE.
        scratch=[(boxes * math.prod(box) + TILE if boxes else 0,), (turned,)],
    )


def prepare(
    task: int, x: np.ndarray, w: np.ndarray, boxes: np.ndarray, turned: np.ndarray, geometry: Geometry
) -> bool:
    """Copy a channel of X into its box, or transpose the weights of up to TILE filters."""
    conv: Convolution = geometry.conv
    if task < geometry.boxes:
        embed(task, x, boxes, task * volume(conv.x.box), conv.x)
        return False
    task -= geometry.boxes
    filters, terms, width = conv.filters, conv.channels * conv.taps, geometry.width
    slices = (filters + TILE - 1) // TILE
    group, first = task // slices, task % slices * TILE
    block = first // width * width
    columns, count = min(width, slices * TILE - block), min(TILE, filters - first)
    into, source = aligned(turned), (group * filters + first) * terms
    place = (group * slices * TILE + block) * terms + first - block
    k = 0
    if count == TILE:
        while k + TILE <= terms:
            transpose(into, place + k * columns, columns, w, source + k, terms)
            k += TILE
    elif filters > TILE:
        # The last filters are transposed together with filters before them. Columns without a filter contain
        # weights of other filters, and their sums are not used.
        allocated = allocate(TILE * TILE + 2 * TILE)
        if len(allocated) == 0:
            return True
        square, others = aligned(allocated), TILE - count
        clear(square, TILE * TILE, TILE)
        while k + TILE <= terms:
            transpose(square, 0, TILE, w, source - others * terms + k, terms)
            for i in range(TILE):
                copy_vector(into, place + (k + i) * columns, square, i * TILE + others)
            k += TILE
        release(allocated)
    for t in range(k, terms):
        for i in range(TILE):
            into[place + t * columns + i] = w[source + i * terms + t] if i < count else 0.0
    return False


def convolve_positions(
    task: int,
    x: np.ndarray,
    w: np.ndarray,
    boxes: np.ndarray,
    turned: np.ndarray,
    result: Result,
    geometry: Geometry,
    steps: Integers,
) -> bool:
    """Compute some filters at some positions."""
    if len(turned) == 0:
        return convolve_rows(task, w, boxes, result, geometry, steps)
    conv: Convolution = geometry.conv
    filters, channels, taps = conv.filters, conv.channels, conv.taps
    outputs, plane, together = volume(conv.output), volume(conv.x.box), geometry.together
    width, room = geometry.width, geometry.room
    positions, padded = conv.samples * outputs, (filters + TILE - 1) // TILE * TILE
    units, blocks = (positions + room - 1) // room, (padded + width - 1) // width
    first, block, group = task % units * room, task // units % blocks, task // units // blocks
    count, columns = min(room, positions - first), min(width, padded - block * width)
    terms, rows = together * taps, (count + TILE - 1) // TILE * TILE
    memory = take_memory(2 * rows * columns + TILE, terms + rows + 2)
    if len(memory.numbers) == 0:
        return True
    sums, results = aligned(memory.numbers), rows * columns
    lists = memory.integers[terms:]
    shifts, bases, starts = lists[:1], lists[1:2], lists[2:]
    for k in range(terms):
        memory.integers[k] = k * columns
    _list_starts(starts, first, count, group, conv)
    source, values = x if geometry.boxes == 0 else boxes, aligned(turned)
    base = (group * padded + block * width) * channels * taps
    for c in range(0, channels, together):
        used = min(together, channels - c) * taps
        shifts[0], bases[0] = c * plane, base + c * taps * columns
        left = Rows(source, starts, shifts, steps[:used])
        add_tiles(sums, left, count, Columns(values, bases, memory.integers[:used]), columns, c == 0)
    for i in range(0, rows, TILE):
        for k in range(0, columns, TILE):
            transpose(sums, results + k * rows + i, rows, sums, i * columns + k, columns)
    for k in range(min(columns, filters - block * width)):
        m, at = group * filters + block * width + k, 0
        while at < count:
            sample, p = (first + at) // outputs, (first + at) % outputs
            n, here = min(count - at, outputs - p), results + k * rows + at
            place = (sample * conv.groups * filters + m) * outputs + p
            write(result, m, place, sums[here : here + n])
            at += n
    return_memory(memory)
    return False


def _list_starts(starts: np.ndarray, first: int, count: int, group: int, conv: Convolution) -> None:
    """Write where the windows of consecutive positions begin."""
    height, width = conv.output.height, conv.output.width
    at = 0
    while at < count:
        line, column = (first + at) // width, (first + at) % width
        n = min(count - at, width - column)
        a, row = line // height, line % height
        sample, a = a // conv.output.depth, a % conv.output.depth
        row = a * conv.stride.depth * conv.x.box.height + row * conv.stride.height
        start = row * conv.x.box.width + column * conv.stride.width
        start += (sample * conv.groups + group) * conv.channels * volume(conv.x.box)
        for k in range(n):
            starts[at + k] = start + k * conv.stride.width
        at += n
