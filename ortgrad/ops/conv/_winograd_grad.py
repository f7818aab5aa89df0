"""ConvGrad for kernels of 3x3, by Winograd's method (see _winograd).

dX is a convolution of dY with the turned weights. dW is one of X whose kernels are tiles of 2x2 of dY, with
3x3 results: the products of the transforms of X and of dY are added up over the tiles.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ortgrad.compiled.functions import (
    OF_TWO,
    TILE,
    TO_THREE,
    Columns,
    Rows,
    Square,
    allocate,
    release,
    transform,
    transpose,
)
from ortgrad.operators.compiled import Plan
from ortgrad.operators.records import numbers_of
from ortgrad.ops._windows import Plane
from ortgrad.ops.conv._compiled_dw import sum_of_filter
from ortgrad.ops.conv._dense import Sizes, views_of, windows_of
from ortgrad.ops.conv._forward_geometry import Result
from ortgrad.ops.conv._geometry import COLUMNS
from ortgrad.ops.conv._memory import Gradients, aligned, are_finite, return_memory, take_memory
from ortgrad.ops.conv._winograd import (
    POINTS,
    TAPS,
    Box,
    Convolution,
    Points,
    Tiles,
    add_points,
    box_tasks,
    convolve_tiles,
    fill_box,
    fits,
    tiles_of,
    transform_tiles,
    transform_weights,
    up,
)

# Tiles whose products are added up at once.
_TOGETHER = 64
# Channels of a task, at most.
_MOST_CHANNELS = 96
# There are enough tasks for several threads, provided that each has enough tiles.
_TASKS, _FEWEST_TILES = 8, 128


class Geometry(NamedTuple):
    """The numbers that all tasks read."""

    dy: Box
    x: Box
    of_dx: Convolution
    channels: int  # of a task for dW
    parts: int  # into which tiles are divided for dW
    part: int  # tiles of a part
    dy_boxes: int  # tasks of each kind
    x_boxes: int
    dx_tasks: int
    dw_tasks: int


def plan(
    dy: Sizes, x: Sizes, w: Sizes, dx: Sizes | None, dw: Sizes | None, db: Sizes | None, **attributes: Any
) -> Plan | None:
    """Return the plan; None for tensors without elements, and for what the kernel does not support."""
    win, group = windows_of(x, w, attributes)
    if dy[2:] != win.outputs or group > 1 or not math.prod(x) or not fits(win, w[1], w[0]):
        return None
    tiles = [2 * -(-n // 2) for n in win.outputs]
    x_box = Box(x[0], x[1], Plane(*x[2:]), Plane(tiles[0] + 2, tiles[1] + 2), Plane(*win.heads))
    before = [2 - head for head in win.heads]
    # The windows of dX extend over two more rows, and those of dW over whole tiles.
    sizes = [
        max(2 * -(-n // 2) + 2, start + count)
        for n, start, count in zip(win.sizes, before, tiles, strict=True)
    ]
    dy_box = Box(dy[0], dy[1], Plane(*dy[2:]), Plane(*sizes), Plane(*before))
    of_dx, number = Convolution.of(dy_box, x_box.size, w[1], turned=True), tiles_of(dy[0], dy_box.size)
    blocks, filters = -(-w[1] // _MOST_CHANNELS), -(-w[0] // COLUMNS)
    channels = up(-(-w[1] // blocks), TILE)
    blocks = -(-w[1] // channels)
    parts = max(1, min(-(-_TASKS // (blocks * filters)), number // _FEWEST_TILES))
    part = up(-(-number // parts), _TOGETHER)
    parts = -(-number // part)
    shared = dw is not None and parts > 1
    dx_tasks = of_dx.tasks if dx else 0
    dw_tasks = blocks * filters * parts if dw else 0
    boxes = box_tasks(dy_box) if dx or dw else 0, box_tasks(x_box) if dw else 0
    geometry = Geometry(
        dy=dy_box,
        x=x_box,
        of_dx=of_dx,
        channels=channels,
        parts=parts,
        part=part,
        dy_boxes=boxes[0],
        x_boxes=boxes[1],
        dx_tasks=dx_tasks,
        dw_tasks=dw_tasks,
    )
    return Plan(
        tasks=(
            sum(boxes) + (of_dx.weight_tasks if dx else 0),
            dx_tasks + dw_tasks + (w[0] if db else 0),
            -(-w[0] // TILE) * -(-w[1] // TILE) if shared else 0,
        ),
        views=views_of(dy, x, w, dx, dw, db),
        numbers={"geometry": numbers_of(geometry)},
        work=math.prod(dy) * w[1] * 2,
        scratch=[
            (dy_box.elements if dx or dw else 0,),
            (x_box.elements if dw else 0,),
            (of_dx.weights if dx else 0,),
            (parts * POINTS * (up(w[1], TILE) * up(w[0], TILE) + blocks * filters * TILE) if shared else 0,),
        ],
    )


def prepare(
    task: int,
    dy: np.ndarray,
    x: np.ndarray,
    w: np.ndarray,
    dy_boxes: np.ndarray,
    x_boxes: np.ndarray,
    weights: np.ndarray,
    geometry: Geometry,
) -> bool:
    """Copy rows of dY or X into a box, or transform the weights of a filter."""
    if task < geometry.dy_boxes:
        return fill_box(task, dy, dy_boxes, geometry.dy)
    task -= geometry.dy_boxes
    if task < geometry.x_boxes:
        return fill_box(task, x, x_boxes, geometry.x)
    task -= geometry.x_boxes
    return transform_weights(task, w, weights, geometry.of_dx)


class Boxes(NamedTuple):
    """dY and X in boxes."""

    dy_boxes: np.ndarray
    x_boxes: np.ndarray


class Sums(NamedTuple):
    """Sums at all points for some channels and a block of filters, which are to be added over all parts."""

    values: np.ndarray
    start: int
    pitch: int  # from a point to the next
    columns: int
    parts: int
    step: int  # from a part to the next


def differentiate(
    task: int,
    dy: np.ndarray,
    w: np.ndarray,
    gradients: Gradients,
    boxes: Boxes,
    weights: np.ndarray,
    sums: np.ndarray,
    geometry: Geometry,
) -> bool:
    """Compute dX of some channels for some tiles, sums for dW over some tiles, or dB of a filter."""
    if task < geometry.dx_tasks:
        nothing = gradients.dx[:0]
        into = Result(nothing, nothing, gradients.dx, 0, 0.0, 0.0)
        return convolve_tiles(task, boxes.dy_boxes, w, weights, into, geometry.dy, geometry.of_dx)
    task -= geometry.dx_tasks
    if task < geometry.dw_tasks:
        return _add_tiles(task, boxes, gradients.dw, sums, geometry)
    task -= geometry.dw_tasks
    gradients.db[task] = sum_of_filter(task, dy, geometry.dy.samples, geometry.dy.channels)
    return False


def _add_tiles(task: int, boxes: Boxes, dw: np.ndarray, shared: np.ndarray, geometry: Geometry) -> bool:
    """Add up products of some channels and filters over a part of the tiles; for all tiles, compute dW."""
    dy_box: Box = geometry.dy
    channels, filters = geometry.x.channels, dy_box.channels
    padded, whole = (channels + TILE - 1) // TILE * TILE, (filters + TILE - 1) // TILE * TILE
    most, parts, length = geometry.channels, geometry.parts, geometry.part
    blocks = (whole + COLUMNS - 1) // COLUMNS
    part, block, first = task % parts, task // parts % blocks * COLUMNS, task // parts // blocks * most
    columns, count = min(COLUMNS, whole - block), min(most, padded - first)
    rows = min(count, channels - first)
    end = min((part + 1) * length, tiles_of(dy_box.samples, dy_box.size))
    factors, own = POINTS * (_TOGETHER * (count + columns) + 2 * TILE), POINTS * (count * columns + TILE)
    memory = take_memory(factors + (own if parts == 1 else 0) + TILE, 2 * _TOGETHER + rows + 2)
    if len(memory.numbers) == 0:
        return True
    numbers, steps, lists = aligned(memory.numbers), memory.integers, memory.integers[2 * _TOGETHER :]
    values = Points(numbers, _TOGETHER * count + TILE)
    grads = Points(numbers[POINTS * values.pitch :], _TOGETHER * columns + TILE)
    starts, shifts, bases = lists[:rows], lists[rows : rows + 1], lists[rows + 1 :]
    for k in range(_TOGETHER):
        steps[k], steps[_TOGETHER + k] = k * count, k * columns
    for i in range(rows):
        starts[i] = i
    place = _sums_of(part, block, first, columns, padded, whole, most)
    sums = numbers[factors:] if parts == 1 else shared[place:]
    into = Points(sums, count * columns + TILE)
    for tile in range(part * length, end, _TOGETHER):
        tiles = Tiles(tile, min(_TOGETHER, end - tile), _TOGETHER)
        transform_tiles(values, tiles, aligned(boxes.x_boxes), first, count, geometry.x, dy_box.size)
        _transform_gradients(grads, tiles, aligned(boxes.dy_boxes), block, columns, dy_box)
        left = Rows(values.values, starts, shifts, steps[: tiles.number])
        right = Columns(grads.values, bases, steps[_TOGETHER : _TOGETHER + tiles.number])
        fresh = tile == part * length
        add_points(into, left, values.pitch, rows, right, grads.pitch, columns, fresh)
    wrong = False
    for c in range(0, rows if parts == 1 else 0, TILE):
        for m in range(0, min(columns, filters - block), TILE):
            found = Sums(sums, c * columns + m, into.pitch, columns, 1, 0)
            wrong = wrong or _finish(dw, found, first + c, block + m, channels, filters)
    return_memory(memory)
    return wrong


def _transform_gradients(
    into: Points, tiles: Tiles, boxes: np.ndarray, block: int, columns: int, box: Box
) -> None:
    """Transform dY of some tiles for a block of filters."""
    down, across = (box.size.height + 1) // 2, (box.size.width + 1) // 2
    whole, step, vectors = (box.channels + TILE - 1) // TILE * TILE, into.pitch, columns // TILE
    for t in range(tiles.number):
        line, k = (tiles.first + t) // across, (tiles.first + t) % across
        row = line // down * box.sizes.height + box.origin.height + line % down * 2
        place = (row * box.sizes.width + box.origin.width + 2 * k) * whole + block
        pitch = box.sizes.width * whole
        given = Square(boxes, place, pitch, whole)
        transform(OF_TWO, Square(into.values, t * columns, 4 * step, step), given, vectors)


def _sums_of(part: int, block: int, first: int, columns: int, padded: int, whole: int, most: int) -> int:
    """Return the place of the sums of a block of filters and some channels, for a part of the tiles."""
    blocks, pieces = (whole + COLUMNS - 1) // COLUMNS, (padded + most - 1) // most
    number = (part * blocks + block // COLUMNS) * pieces + first // most
    return POINTS * (part * padded * whole + block * padded + first * columns + number * TILE)


def finish_weights(task: int, dw: np.ndarray, sums: np.ndarray, geometry: Geometry) -> bool:
    """Compute dW of up to TILE filters for up to TILE channels from the sums of all parts."""
    channels, filters = geometry.x.channels, geometry.dy.channels
    padded, whole = (channels + TILE - 1) // TILE * TILE, (filters + TILE - 1) // TILE * TILE
    most, parts = geometry.channels, geometry.parts
    m, c = task % (whole // TILE) * TILE, task // (whole // TILE) * TILE
    block, first = m // COLUMNS * COLUMNS, c // most * most
    columns, count = min(COLUMNS, whole - block), min(most, padded - first)
    start = _sums_of(0, block, first, columns, padded, whole, most) + (c - first) * columns + m - block
    step = _sums_of(1, 0, 0, columns, padded, whole, most)
    return _finish(
        dw, Sums(sums, start, count * columns + TILE, columns, parts, step), c, m, channels, filters
    )


def _finish(dw: np.ndarray, sums: Sums, c: int, m: int, channels: int, filters: int) -> bool:
    """Compute dW of up to TILE filters for up to TILE channels; return whether some are not finite."""
    used = min(TILE, channels - c)
    memory = allocate(TILE * (POINTS + TAPS * TILE) + TILE)
    if len(memory) == 0:
        return True
    total, results = aligned(memory), aligned(memory)[POINTS * TILE :]
    for i in range(used):
        for point in range(POINTS):
            place = sums.start + point * sums.pitch + i * sums.columns
            here = total[point * TILE : (point + 1) * TILE]
            values = sums.values[place : place + TILE]
            for k in range(TILE):
                here[k] = values[k]
            for part in range(1, sums.parts):
                at = place + part * sums.step
                values = sums.values[at : at + TILE]
                for k in range(TILE):
                    here[k] += values[k]
        given = Square(total, 0, 4 * TILE, TILE)
        transform(TO_THREE, Square(results, i * TAPS * TILE, 3 * TILE, TILE), given, 1)
    known = min(TILE, filters - m)
    pairs, to = channels * TAPS, (m * channels + c) * TAPS
    k = 0
    while known == TILE and k + TILE <= used * TAPS:
        transpose(dw, to + k, pairs, results, k * TILE, TILE)
        k += TILE
    for i in range(k, used * TAPS):
        for j in range(known):
            dw[to + j * pairs + i] = results[i * TILE + j]
    wrong = False
    for j in range(known):
        wrong = wrong or not are_finite(dw[to + j * pairs : to + j * pairs + used * TAPS])
    release(memory)
    return wrong
