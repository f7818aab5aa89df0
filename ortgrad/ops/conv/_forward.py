"""Convolutions for Numba: sums of products that `add_products` computes in registers.

A tile has a row for each of some positions and columns for filters, so that strides and the edges of a
picture waste no part of a vector. The weights are transposed first, and X is copied into boxes with its
padding, if it has any. Tiles are then transposed, and the bias, another tensor and an activation applied.
If many columns would be for no filter, filters are the rows instead (`_forward_rows`).

Products with padding are computed, so that those with NaN and infinities are NaN.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

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
    transpose,
)
from ortgrad.operators.compiled import Integers, Plan
from ortgrad.operators.records import numbers_of
from ortgrad.ops._rows import add_to
from ortgrad.ops._windows import windows
from ortgrad.ops.conv import costs
from ortgrad.ops.conv._compiled import _in_three_dimensions, _place, _reaches
from ortgrad.ops.conv._forward_geometry import (
    Geometry,
    activation_numbers,
)
from ortgrad.ops.conv._forward_rows import convolve_rows, finish
from ortgrad.ops.conv._geometry import COLUMNS, TERMS, Spatial, volume
from ortgrad.ops.conv._memory import aligned

if TYPE_CHECKING:
    Sizes = tuple[int, ...]

# Positions fill tiles, and squares that are transposed at once.
_POSITIONS = 48
# As many tasks as keep several threads busy, if each has enough products. Its sums remain in the cache.
_TASKS, _PRODUCTS, _SUMS = 16, 1 << 20, 8192
_LONG_ROW = 256
# Columns of a task whose rows are filters.
_ROOM = 4 * COLUMNS


def plan(
    x: Sizes,
    w: Sizes,
    b: Sizes | None,
    z: Sizes | None,
    y: Sizes,
    *,
    group: int,
    kernel_shape: list[int] | None,
    activation: str,
    alpha: float,
    beta: float,
    **attributes: Any,
) -> Plan | None:
    """Return the plan; None for tensors without elements, and for more than three spatial dimensions."""
    win = windows(x[2:], w[2:], **attributes)
    fits = y[2:] == win.outputs and z in (None, y)
    if not fits or win.rank > 3 or not math.prod(x) * math.prod(w):
        return None
    win = _in_three_dimensions(win)
    filters, channels, taps = w[0] // group, w[1], math.prod(w[2:])
    together = min(channels, max(1, TERMS // taps))
    slices, positions = -(-filters // TILE), x[0] * math.prod(win.outputs)
    wanted = min(_TASKS, max(1, positions * math.prod(w) // _PRODUCTS))
    by_rows = max(win.strides) == 1 and costs.takes(
        "rows", filters * win.reach[2], slices * TILE * win.outputs[2]
    )
    in_place = not any(win.heads) and all(r <= n for r, n in zip(win.reach, win.sizes, strict=True))
    boxes = 0 if in_place and not by_rows else x[0] * x[1]
    box = win.reach if boxes else win.sizes
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
        turned = group * slices * TILE * channels * taps + TILE
    geometry = Geometry(
        output=Spatial(*win.outputs),
        size=Spatial(*win.sizes),
        stride=Spatial(*win.strides),
        head=Spatial(*win.heads),
        box=Spatial(*box),
        samples=x[0],
        groups=group,
        filters=filters,
        channels=channels,
        taps=taps,
        plane=math.prod(box),
        boxes=boxes,
        width=width,
        room=room,
        together=together,
    )
    offsets = [_place(reach, box) for reach in _reaches(win)]
    flat = [(0,) if shape is None else (math.prod(shape),) for shape in (x, w, b, z, y)]
    return Plan(
        tasks=tasks,
        views=flat,
        numbers={
            "geometry": numbers_of(geometry),
            "steps": [c * math.prod(box) + offset for c in range(together) for offset in offsets],
            **activation_numbers(activation, alpha, beta),
        },
        work=positions * math.prod(w) // 8,
        # Columns are read up to a multiple of TILE.
        scratch=[(boxes * math.prod(box) + TILE if boxes else 0,), (turned,)],
    )


def prepare(
    task: int, x: np.ndarray, w: np.ndarray, boxes: np.ndarray, turned: np.ndarray, geometry: Geometry
) -> bool:
    """Copy a channel of X into its box, or transpose the weights of up to TILE filters."""
    if task < geometry.boxes:
        _embed(task, x, boxes, geometry)
        return False
    task -= geometry.boxes
    filters, terms, width = geometry.filters, geometry.channels * geometry.taps, geometry.width
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
        # The last filters are transposed with those before them. Columns that are for no filter get numbers
        # of others, and their sums are not used.
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


def _embed(channel: int, x: np.ndarray, boxes: np.ndarray, geometry: Geometry) -> None:
    """Copy a channel into its box."""
    depth, height, width = geometry.size.depth, geometry.size.height, geometry.size.width
    rows, pitch, plane = geometry.box.height, geometry.box.width, geometry.plane
    # Windows may see padding only, and the box ends where they do.
    before = min(geometry.head.width, pitch)
    count = min(width, pitch - before)
    # To clear a whole box takes less time than to clear the ends of its rows, unless these are long.
    small = pitch <= _LONG_ROW
    if small:
        clear(boxes, channel * plane, plane)
    for i in range(geometry.box.depth * rows):
        z, y = i // rows - geometry.head.depth, i % rows - geometry.head.height
        start = channel * plane + i * pitch
        inside = z >= 0 and z < depth and y >= 0 and y < height
        if not small:
            clear(boxes, start, before if inside else pitch)
            clear(boxes, start + before + count, pitch - before - count)
        if inside:
            copy_elements(boxes, start + before, x, ((channel * depth + z) * height + y) * width, count)


def convolve_positions(
    task: int,
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray,
    z: np.ndarray,
    y: np.ndarray,
    boxes: np.ndarray,
    turned: np.ndarray,
    geometry: Geometry,
    steps: Integers,
    activation: int,
    low: float,
    high: float,
) -> bool:
    """Compute some filters at some positions."""
    if len(turned) == 0:
        return convolve_rows(task, w, b, z, y, boxes, geometry, steps, activation, low, high)
    filters, channels, taps = geometry.filters, geometry.channels, geometry.taps
    plane, width, room = geometry.plane, geometry.width, geometry.room
    outputs = volume(geometry.output)
    positions, padded = geometry.samples * outputs, (filters + TILE - 1) // TILE * TILE
    units, blocks = (positions + room - 1) // room, (padded + width - 1) // width
    first, block, group = task % units * room, task // units % blocks, task // units // blocks
    count, columns = min(room, positions - first), min(width, padded - block * width)
    together = geometry.together
    terms, rows = together * taps, (count + TILE - 1) // TILE * TILE
    memory = allocate(2 * rows * columns + TILE)
    integers = allocate_integers(terms + rows + 2)
    if len(memory) == 0 or len(integers) == 0:
        release(memory)
        release(integers)
        return True
    sums, results = aligned(memory), rows * columns
    places, starts = integers[:terms], integers[terms + 2 :]
    shifts, bases = integers[terms:], integers[terms + 1 :]
    for k in range(terms):
        places[k] = k * columns
    _list_starts(starts, first, count, group, geometry)
    source = x if geometry.boxes == 0 else boxes
    right, base = aligned(turned), (group * padded + block * width) * channels * taps
    c = 0
    while c < channels:
        used = min(together, channels - c) * taps
        shifts[0], bases[0] = c * plane, base + c * taps * columns
        for i in range(0, count, TILE_ROWS):
            add_products(
                sums[i * columns :],
                columns,
                Rows(source, starts[i:], shifts[:1], steps[:used]),
                min(TILE_ROWS, count - i),
                Columns(right, bases, places[:used]),
                columns,
                c == 0,
            )
        c += together
    for i in range(0, rows, TILE):
        for k in range(0, columns, TILE):
            transpose(sums, results + k * rows + i, rows, sums, i * columns + k, columns)
    for k in range(min(columns, filters - block * width)):
        m = group * filters + block * width + k
        at, bias = 0, b[m] if len(b) > 0 else 0.0
        while at < count:
            sample, p = (first + at) // outputs, (first + at) % outputs
            n = min(count - at, outputs - p)
            place, here = (sample * geometry.groups * filters + m) * outputs + p, results + k * rows + at
            values = sums[here : here + n]
            if len(z) > 0:
                add_to(values, z[place : place + n])
            finish(y[place : place + n], values, bias, activation, low, high)
            at += n
    release(memory)
    release(integers)
    return False


def _list_starts(starts: np.ndarray, first: int, count: int, group: int, geometry: Geometry) -> None:
    """Write where the windows of consecutive positions begin."""
    height, width = geometry.output.height, geometry.output.width
    channels, plane = geometry.channels, geometry.plane
    at = 0
    while at < count:
        line, column = (first + at) // width, (first + at) % width
        n = min(count - at, width - column)
        a, row = line // height, line % height
        sample, a = a // geometry.output.depth, a % geometry.output.depth
        row = a * geometry.stride.depth * geometry.box.height + row * geometry.stride.height
        start = row * geometry.box.width
        start += (sample * geometry.groups + group) * channels * plane + column * geometry.stride.width
        for k in range(n):
            starts[at + k] = start + k * geometry.stride.width
        at += n
