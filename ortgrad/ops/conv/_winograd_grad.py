"""ConvGrad for kernels of 3x3, by Winograd's method (see _winograd).

dX is a convolution of dY with the turned weights. dW is one of X whose kernels are tiles of 2x2 of dY, with
3x3 results: the products of the transforms of X and of dY are added up over the tiles.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ortgrad.compiled.functions import (
    OF_TWO,
    TILE,
    TILE_ROWS,
    TO_THREE,
    Columns,
    Rows,
    Square,
    add_products,
    allocate,
    allocate_integers,
    release,
    transform,
    transpose,
)
from ortgrad.operators.compiled import Plan
from ortgrad.operators.records import numbers_of
from ortgrad.ops._windows import windows
from ortgrad.ops.conv._compiled_dw import sum_of_filter
from ortgrad.ops.conv._geometry import COLUMNS
from ortgrad.ops.conv._memory import aligned
from ortgrad.ops.conv._winograd import (
    POINTS,
    TAPS,
    Box,
    BoxGeometry,
    Convolution,
    ConvolutionGeometry,
    are_finite,
    convolve_tiles,
    fill_box,
    fits,
    transform_tiles,
    transform_weights,
    up,
)

if TYPE_CHECKING:
    Sizes = tuple[int, ...]

# Tiles whose products are added up at once.
_TOGETHER = 64
# Channels of a task, at most.
_MOST_CHANNELS = 96
# As many tasks as keep several threads busy, if each has enough tiles.
_TASKS, _FEWEST_TILES = 8, 128


class Geometry(NamedTuple):
    """The numbers that all tasks read."""

    dy: BoxGeometry
    x: BoxGeometry
    of_dx: ConvolutionGeometry
    of_dw: ConvolutionGeometry
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
    group = attributes.pop("group")
    attributes.pop("kernel_shape")
    win = windows(x[2:], w[2:], **attributes)
    if dy[2:] != win.outputs or group > 1 or not math.prod(x) or not fits(win, w[1], w[0]):
        return None
    tiles = [2 * -(-n // 2) for n in win.outputs]
    x_box = Box(x[0], x[1], (x[2], x[3]), (tiles[0] + 2, tiles[1] + 2), (win.heads[0], win.heads[1]))
    before = [2 - head for head in win.heads]
    # dX sees two rows more than it has, and dW whole tiles.
    sizes = [
        max(2 * -(-n // 2) + 2, start + count)
        for n, start, count in zip(win.sizes, before, tiles, strict=True)
    ]
    dy_box = Box(dy[0], dy[1], (dy[2], dy[3]), (sizes[0], sizes[1]), (before[0], before[1]))
    of_dx = Convolution(dy_box, (x[2], x[3]), w[1], turned=True)
    of_dw = Convolution(x_box, (dy[2], dy[3]), w[0])
    blocks, filters = -(-w[1] // _MOST_CHANNELS), -(-w[0] // COLUMNS)
    channels = up(-(-w[1] // blocks), TILE)
    blocks = -(-w[1] // channels)
    parts = max(1, min(-(-_TASKS // (blocks * filters)), of_dw.tiles // _FEWEST_TILES))
    part = up(-(-of_dw.tiles // parts), _TOGETHER)
    parts = -(-of_dw.tiles // part)
    shared = dw is not None and parts > 1
    dx_tasks = of_dx.tasks if dx else 0
    dw_tasks = blocks * filters * parts if dw else 0
    boxes = dy_box.tasks if dx or dw else 0, x_box.tasks if dw else 0
    geometry = Geometry(
        dy=dy_box.geometry,
        x=x_box.geometry,
        of_dx=of_dx.geometry,
        of_dw=of_dw.geometry,
        channels=channels,
        parts=parts,
        part=part,
        dy_boxes=boxes[0],
        x_boxes=boxes[1],
        dx_tasks=dx_tasks,
        dw_tasks=dw_tasks,
    )
    flat = [(math.prod(shape),) for shape in (dy, x, w)]
    return Plan(
        tasks=(
            sum(boxes) + (of_dx.weight_tasks if dx else 0),
            dx_tasks + dw_tasks + (w[0] if db else 0),
            -(-w[0] // TILE) * -(-w[1] // TILE) if shared else 0,
        ),
        views=[*flat, flat[1] if dx else (0,), flat[2] if dw else (0,), db or (0,)],
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
    return transform_weights(task, w, weights, geometry.dy.channels, geometry.of_dx)


def differentiate(
    task: int,
    dy: np.ndarray,
    w: np.ndarray,
    dx: np.ndarray,
    dw: np.ndarray,
    db: np.ndarray,
    dy_boxes: np.ndarray,
    x_boxes: np.ndarray,
    weights: np.ndarray,
    sums: np.ndarray,
    geometry: Geometry,
) -> bool:
    """Compute dX of some channels for some tiles, sums for dW over some tiles, or dB of a filter."""
    if task < geometry.dx_tasks:
        nothing = dx[:0]
        return convolve_tiles(
            task, dy_boxes, w, weights, nothing, nothing, dx, geometry.dy, geometry.of_dx, 0, 0.0, 0.0
        )
    task -= geometry.dx_tasks
    if task < geometry.dw_tasks:
        return _add_tiles(task, dy_boxes, x_boxes, dw, sums, geometry)
    task -= geometry.dw_tasks
    db[task] = sum_of_filter(task, dy, geometry.dy.samples, geometry.dy.channels)
    return False


def _add_tiles(
    task: int,
    dy_boxes: np.ndarray,
    x_boxes: np.ndarray,
    dw: np.ndarray,
    shared: np.ndarray,
    geometry: Geometry,
) -> bool:
    """Add up products of some channels and filters over a part of the tiles; for all tiles, compute dW."""
    dy_box: BoxGeometry = geometry.dy
    x_box: BoxGeometry = geometry.x
    channels, filters = x_box.channels, dy_box.channels
    padded, whole = (channels + TILE - 1) // TILE * TILE, (filters + TILE - 1) // TILE * TILE
    most, parts, length = geometry.channels, geometry.parts, geometry.part
    blocks = (whole + COLUMNS - 1) // COLUMNS
    part, block, first = task % parts, task // parts % blocks * COLUMNS, task // parts // blocks * most
    columns, count = min(COLUMNS, whole - block), min(most, padded - first)
    rows = min(count, channels - first)
    height, width = dy_box.size.height, dy_box.size.width
    down, across = (height + 1) // 2, (width + 1) // 2
    tile, end = part * length, min((part + 1) * length, dy_box.samples * down * across)
    memory = allocate(POINTS * (_TOGETHER * (count + columns) + 2 * TILE) + TILE)
    integers = allocate_integers(2 * _TOGETHER + rows + 2)
    own = allocate((POINTS * (count * columns + TILE) if parts == 1 else 0) + TILE)
    if len(memory) == 0 or len(integers) == 0 or len(own) == 0:
        release(memory)
        release(integers)
        release(own)
        return True
    left, right = aligned(memory), aligned(memory)[POINTS * (_TOGETHER * count + TILE) :]
    steps, places = integers[:_TOGETHER], integers[_TOGETHER : 2 * _TOGETHER]
    starts, shifts = integers[2 * _TOGETHER : 2 * _TOGETHER + rows], integers[2 * _TOGETHER + rows :]
    bases = shifts[1:]
    for k in range(_TOGETHER):
        steps[k], places[k] = k * count, k * columns
    for i in range(rows):
        starts[i] = i
    gradients, values = aligned(dy_boxes), aligned(x_boxes)
    pitch = dy_box.width * whole
    into = 0 if parts == 1 else _sums_of(part, block, first, columns, padded, whole, most)
    sums = aligned(own) if parts == 1 else shared
    fresh = True
    while tile < end:
        used = min(_TOGETHER, end - tile)
        transform_tiles(left, tile, used, _TOGETHER, values, first, count, x_box, geometry.of_dw)
        for t in range(used):
            line, k = (tile + t) // across, (tile + t) % across
            row = line // down * dy_box.height + dy_box.top + line % down * 2
            place = (row * dy_box.width + dy_box.left + 2 * k) * whole + block
            step = _TOGETHER * columns + TILE
            vectors = columns // TILE
            transform(
                OF_TWO,
                Square(right, t * columns, 4 * step, step),
                Square(gradients, place, pitch, whole),
                vectors,
            )
        for point in range(POINTS):
            shifts[0], bases[0] = point * (_TOGETHER * count + TILE), point * (_TOGETHER * columns + TILE)
            for i in range(0, rows, TILE_ROWS):
                add_products(
                    sums[into + point * (count * columns + TILE) + i * columns :],
                    columns,
                    Rows(left, starts[i:], shifts[:1], steps[:used]),
                    min(TILE_ROWS, rows - i),
                    Columns(right, bases, places[:used]),
                    columns,
                    fresh,
                )
        fresh = False
        tile += used
    wrong = False
    for c in range(0, rows if parts == 1 else 0, TILE):
        for m in range(0, min(columns, filters - block), TILE):
            at = c * columns + m
            wrong = wrong or _finish(
                dw, sums, at, count, columns, 1, 0, first + c, block + m, channels, filters
            )
    release(memory)
    release(integers)
    release(own)
    return wrong


def _sums_of(part: int, block: int, first: int, columns: int, padded: int, whole: int, most: int) -> int:
    """The place of the sums of a block of filters and some channels, for a part of the tiles."""
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
    return _finish(dw, sums, start, count, columns, parts, step, c, m, channels, filters)


def _finish(
    dw: np.ndarray,
    sums: np.ndarray,
    start: int,
    count: int,
    columns: int,
    parts: int,
    step: int,
    c: int,
    m: int,
    channels: int,
    filters: int,
) -> bool:
    """Compute dW of up to TILE filters for up to TILE channels; return whether some are not finite."""
    used = min(TILE, channels - c)
    memory = allocate(TILE * (POINTS + TAPS * TILE) + TILE)
    if len(memory) == 0:
        return True
    total, results = aligned(memory), aligned(memory)[POINTS * TILE :]
    for i in range(used):
        for point in range(POINTS):
            place = start + point * (count * columns + TILE) + i * columns
            here = total[point * TILE : (point + 1) * TILE]
            values = sums[place : place + TILE]
            for k in range(TILE):
                here[k] = values[k]
            for part in range(1, parts):
                at = place + part * step
                values = sums[at : at + TILE]
                for k in range(TILE):
                    here[k] += values[k]
        transform(
            TO_THREE, Square(results, i * TAPS * TILE, 3 * TILE, TILE), Square(total, 0, 4 * TILE, TILE), 1
        )
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
