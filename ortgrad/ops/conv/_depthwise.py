"""Depthwise convolutions for Numba: every filter reads one channel, so TILE channels are computed at once.

A task transposes some rows of TILE channels, so that a vector holds one position of them: neither strides nor
short rows nor edges waste any part of a vector then. With E for dY, with zeros beside it, and s for the stride,

    Y[p] = B + sum over taps t of W[t] X[s p + t]
    dW[t] = sum over p of E[p] X[s p + t]
    dX[p] = sum over t with the remainder of p / s of W[t] E[(p - t) / s]

The results are transposed back. Products with padding, and with the zeros of E, are left out in part. They must
vanish, so the NumPy kernel takes over if W contains NaN or infinities, and for dW if X or dY may.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ortgrad.compiled.functions import (
    SUMS,
    TILE,
    add_up,
    allocate,
    clear,
    convolve,
    copy_elements,
    copy_vector,
    correlate,
    double,
    doubles,
    release,
    spread,
    transpose,
)
from ortgrad.operators.compiled import Plan
from ortgrad.ops._windows import windows
from ortgrad.ops.conv._compiled_dw import aligned
from ortgrad.ops.conv._depthwise_plan import (
    BLOCKS,
    CHANNELS,
    DX_COUNT,
    DX_FIRST,
    DX_STEP,
    DY_BOX,
    DY_PITCH,
    DY_PLACE,
    DY_WIDTH,
    FILTERS,
    LAST_PRODUCT,
    LAST_ROW,
    OUTPUTS,
    OWN_LENGTH,
    OWN_PLACE,
    OWN_ROWS,
    PRODUCT,
    PRODUCT_DY,
    PRODUCT_FIELDS,
    PRODUCT_LAST_TAP,
    PRODUCT_LENGTH,
    PRODUCT_ROWS,
    PRODUCT_TAP,
    PRODUCT_X,
    ROW,
    ROW_FIELDS,
    ROW_LAST_TAP,
    ROW_LENGTH,
    ROW_PLACE,
    ROW_SOURCE,
    ROW_TAP,
    SIZE,
    SKIPS,
    STRIP_FIELDS,
    STRIPS,
    SUM_BOX,
    TAPS,
    WANTED,
    X_BOX,
    X_COUNT,
    X_FIRST,
    X_LINE,
    X_PITCH,
    X_PLACE,
    X_STEP,
    X_WIDTH,
    Y_COUNT,
    Y_FIRST,
    Division,
    Tables,
    in_two_dimensions,
)

if TYPE_CHECKING:
    Sizes = tuple[int, ...]

# The memory of two squares of elements that are transposed.
_SQUARES = 2 * TILE * TILE + TILE
# Vectors of a box that are cleared at once.
_SMALL = 128


def _division(x: Sizes, w: Sizes, y: Sizes, attributes: dict[str, Any]) -> Division | None:
    group = attributes.pop("group")
    attributes.pop("kernel_shape")
    win = windows(x[2:], w[2:], **attributes)
    fits = y[2:] == win.outputs and x[1] == group and w[1] == 1
    if not fits or len(x) > 4 or not math.prod(x) * math.prod(w):
        return None
    return Division(in_two_dimensions(win))


def _numbers(tables: Tables, x: Sizes, w: Sizes) -> tuple[dict[str, list[int]], int]:
    """Return the numbers of a plan, and the number of its tasks."""
    geometry = tables.geometry
    geometry[CHANNELS], geometry[FILTERS], geometry[BLOCKS] = x[1], w[0] // x[1], -(-x[1] // TILE)
    return tables._asdict(), x[0] * geometry[BLOCKS] * geometry[STRIPS]


def plan_grad(
    dy: Sizes, x: Sizes, w: Sizes, dx: Sizes | None, dw: Sizes | None, db: Sizes | None, **attributes: Any
) -> Plan | None:
    """Return the plan of the gradient; None for what is not depthwise, empty or three-dimensional."""
    division = _division(x, w, dy, attributes)
    if division is None:
        return None
    tables = division.backward(dx is not None, dw is not None)
    numbers, tasks = _numbers(tables, x, w)
    geometry = tables.geometry
    geometry[WANTED] = (dx is not None) + 2 * (dw is not None) + 4 * (db is not None)
    taps, blocks = geometry[TAPS], geometry[BLOCKS] * geometry[FILTERS]
    sums = blocks if geometry[WANTED] > 1 else 0
    flat = [(math.prod(shape),) for shape in (dy, x, w)]
    return Plan(
        tasks=(tasks, sums),
        views=[*flat, flat[1] if dx else (0,), flat[2] if dw else (0,), db or (0,)],
        numbers=numbers,
        work=x[0] * w[0] * (geometry[OUTPUTS] * taps // 8 + geometry[SIZE] + 32),
        scratch=[(x[0] * geometry[STRIPS], blocks, (taps + 1) * TILE) if sums else (0, 0, 0)],
    )


def plan(x: Sizes, w: Sizes, b: Sizes | None, y: Sizes, **attributes: Any) -> Plan | None:
    """Return the plan of the convolution; None as for the gradient."""
    division = _division(x, w, y, attributes)
    if division is None:
        return None
    tables = division.forward()
    numbers, tasks = _numbers(tables, x, w)
    return Plan(
        tasks=tasks,
        views=[(math.prod(x),), (math.prod(w),), b or (0,), (math.prod(y),)],
        numbers=numbers,
        work=x[0] * w[0] * (tables.geometry[OUTPUTS] * tables.geometry[TAPS] // 16 + 32),
    )


def convolve_strip(
    task: int,
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray,
    y: np.ndarray,
    geometry: np.ndarray,
    strips: np.ndarray,
    rows: np.ndarray,
    x_places: np.ndarray,
    tap_places: np.ndarray,
    row_starts: np.ndarray,
) -> bool:
    """Compute a strip of the outputs of up to TILE channels."""
    strip = strips[task % geometry[STRIPS] * STRIP_FIELDS :]
    task //= geometry[STRIPS]
    sample, channel = task // geometry[BLOCKS], task % geometry[BLOCKS] * TILE
    lanes = min(TILE, geometry[CHANNELS] - channel)
    taps, filters, outputs = geometry[TAPS], geometry[FILTERS], geometry[OUTPUTS]
    plane = sample * geometry[CHANNELS] + channel
    sums = geometry[X_BOX]
    weights = sums + geometry[SUM_BOX] + TILE * TILE
    bias = weights + taps * TILE
    squares = bias + TILE
    allocated = allocate(squares + _SQUARES + TILE)
    if len(allocated) == 0:
        return True
    memory, failed = aligned(allocated), False
    start, count = plane * geometry[SIZE] + strip[X_FIRST], strip[X_COUNT]
    _clear_around(memory, 0, geometry[X_BOX], strip[X_PLACE], count, geometry[X_WIDTH], geometry[X_LINE])
    _load_planes(memory, strip[X_PLACE], x_places, x, start, geometry[SIZE], count, lanes, squares)
    for i in range(filters):
        first = channel * filters + i
        _load_planes(memory, weights, tap_places, w, first * taps, filters * taps, taps, lanes, squares)
        failed = failed or _is_not_finite(memory, weights, taps * TILE)
        for lane in range(TILE):
            memory[bias + lane] = b[first + lane * filters] if len(b) > 0 and lane < lanes else 0.0
        for number in range(strip[ROW], strip[LAST_ROW]):
            row = rows[number * ROW_FIELDS :]
            convolve(
                memory,
                sums + row[ROW_PLACE],
                TILE,
                bias,
                0,
                row[ROW_SOURCE],
                geometry[X_STEP],
                weights,
                row_starts,
                row[ROW_TAP],
                row[ROW_LAST_TAP],
                row[ROW_LENGTH],
            )
        start = (plane * filters + i) * outputs + strip[Y_FIRST]
        _store_planes(y, start, filters * outputs, memory, sums, strip[Y_COUNT], lanes, squares)
    release(allocated)
    return failed


def differentiate_strip(
    task: int,
    dy: np.ndarray,
    x: np.ndarray,
    w: np.ndarray,
    dx: np.ndarray,
    dw: np.ndarray,
    db: np.ndarray,
    partial: np.ndarray,
    geometry: np.ndarray,
    strips: np.ndarray,
    rows: np.ndarray,
    products: np.ndarray,
    x_places: np.ndarray,
    dy_places: np.ndarray,
    tap_places: np.ndarray,
    starts: np.ndarray,
    row_starts: np.ndarray,
) -> bool:
    """Compute a strip of dX of up to TILE channels, and what the same rows of dY add to dW and dB."""
    strip = strips[task % geometry[STRIPS] * STRIP_FIELDS :]
    sample = task // geometry[STRIPS] // geometry[BLOCKS]
    block = task // geometry[STRIPS] % geometry[BLOCKS]
    channel = block * TILE
    lanes = min(TILE, geometry[CHANNELS] - channel)
    taps, filters, wanted = geometry[TAPS], geometry[FILTERS], geometry[WANTED]
    plane = sample * geometry[CHANNELS] + channel
    embedded = geometry[X_BOX]
    sums = embedded + geometry[DY_BOX]
    weights = sums + geometry[SUM_BOX] + TILE * TILE
    totals = weights + taps * TILE
    zeros = totals + (taps + 1) * TILE
    squares = zeros + TILE
    allocated = allocate(squares + _SQUARES + TILE)
    if len(allocated) == 0:
        return True
    memory, failed = aligned(allocated), False
    clear(memory, zeros, TILE)
    if wanted & 2:
        start, count = plane * geometry[SIZE] + strip[X_FIRST], strip[X_COUNT]
        _clear_around(memory, 0, embedded, strip[X_PLACE], count, geometry[X_WIDTH], geometry[X_LINE])
        _load_planes(memory, strip[X_PLACE], x_places, x, start, geometry[SIZE], count, lanes, squares)
    stride = filters * geometry[OUTPUTS]
    dy_place, count = embedded + geometry[DY_PLACE], strip[Y_COUNT]
    width, pitch = geometry[DY_WIDTH], geometry[DY_PITCH] // TILE
    _clear_around(memory, embedded, geometry[DY_BOX], geometry[DY_PLACE], count, width, pitch)
    for i in range(filters):
        start = (plane * filters + i) * geometry[OUTPUTS] + strip[Y_FIRST]
        _load_planes(memory, dy_place, dy_places, dy, start, stride, count, lanes, squares)
        if wanted & 1:
            first = (channel * filters + i) * taps
            _load_planes(memory, weights, tap_places, w, first, filters * taps, taps, lanes, squares)
            failed = failed or _is_not_finite(memory, weights, taps * TILE)
            for number in range(strip[ROW], strip[LAST_ROW]):
                row = rows[number * ROW_FIELDS :]
                place = sums + row[ROW_PLACE]
                convolve(
                    memory,
                    place,
                    geometry[DX_STEP],
                    place if i > 0 else zeros,
                    geometry[DX_STEP] if i > 0 else 0,
                    embedded + row[ROW_SOURCE],
                    TILE,
                    weights,
                    row_starts,
                    row[ROW_TAP],
                    row[ROW_LAST_TAP],
                    row[ROW_LENGTH],
                )
        if wanted > 1:
            clear(memory, totals, taps * TILE)
            for number in range(strip[PRODUCT], strip[LAST_PRODUCT]):
                product = products[number * PRODUCT_FIELDS :]
                correlate(
                    memory,
                    totals + product[PRODUCT_TAP] * TILE,
                    embedded + product[PRODUCT_DY],
                    geometry[DY_PITCH],
                    product[PRODUCT_X],
                    geometry[X_PITCH],
                    geometry[X_STEP],
                    starts,
                    product[PRODUCT_TAP],
                    product[PRODUCT_LAST_TAP],
                    product[PRODUCT_ROWS],
                    product[PRODUCT_LENGTH],
                )
            if wanted & 4 or geometry[SKIPS] != 0:
                place = embedded + strip[OWN_PLACE]
                last = totals + taps * TILE
                add_up(memory, last, place, geometry[DY_PITCH], strip[OWN_ROWS], strip[OWN_LENGTH])
            # If dY is not finite, its sum is not.
            checked = taps + 1 if geometry[SKIPS] != 0 else taps
            failed = failed or _is_not_finite(memory, totals, checked * TILE)
            into = partial[sample * geometry[STRIPS] + task % geometry[STRIPS], block * filters + i]
            copy_elements(into, 0, memory, totals, (taps + 1) * TILE)
    if wanted & 1:
        start, count = plane * geometry[SIZE] + strip[DX_FIRST], strip[DX_COUNT]
        _store_planes(dx, start, geometry[SIZE], memory, sums, count, lanes, squares)
    release(allocated)
    return failed


def add_strips(
    task: int,
    dy: np.ndarray,
    x: np.ndarray,
    w: np.ndarray,
    dx: np.ndarray,
    dw: np.ndarray,
    db: np.ndarray,
    partial: np.ndarray,
    geometry: np.ndarray,
    strips: np.ndarray,
    rows: np.ndarray,
    products: np.ndarray,
    x_places: np.ndarray,
    dy_places: np.ndarray,
    tap_places: np.ndarray,
    starts: np.ndarray,
    row_starts: np.ndarray,
) -> bool:
    """Add what the strips of all samples contribute to dW and dB of some filters."""
    filters, taps, totals = geometry[FILTERS], geometry[TAPS], doubles()
    channel, size = task // filters * TILE, (taps + 1) * TILE
    first, lanes = channel * filters + task % filters, min(TILE, geometry[CHANNELS] - channel)
    memory = allocate(size + TILE * TILE + _SQUARES)
    if len(memory) == 0:
        return True
    for begin in range(0, size, SUMS):
        values = memory[begin : min(begin + SUMS, size)]
        for k in range(len(values)):
            totals[k] = 0
        for number in range(partial.shape[0]):
            part = partial[number, task, begin : begin + len(values)]
            for k in range(len(values)):
                totals[k] += double(part[k])
        for k in range(len(values)):
            values[k] = totals[k]
    if geometry[WANTED] & 2:
        _store_planes(dw, first * taps, filters * taps, memory, 0, taps, lanes, size + TILE * TILE)
    for lane in range(lanes if geometry[WANTED] & 4 else 0):
        db[first + lane * filters] = memory[taps * TILE + lane]
    release(memory)
    return False


def _clear_around(
    memory: np.ndarray, box: int, size: int, place: int, count: int, width: int, pitch: int
) -> None:
    """Clear a box, except where rows with `count` elements in all will be."""
    if size < _SMALL * TILE or count == 0:
        clear(memory, box, size)
        return
    clear(memory, box, place)
    if pitch == width:
        place += count * TILE
    for _ in range(count // width if pitch > width else 0):
        # The next row.
        end = min(place + pitch * TILE, size)
        clear(memory, box + place + width * TILE, end - place - width * TILE)
        place = end
    clear(memory, box + place, size - place)


def _load_planes(
    memory: np.ndarray,
    base: int,
    places: np.ndarray,
    source: np.ndarray,
    start: int,
    stride: int,
    count: int,
    lanes: int,
    squares: int,
) -> None:
    """Transpose consecutive elements of up to TILE planes; `stride` is from one plane to the next.

    The vector of element k is written to base + places[k]. Lanes without a plane are 0.
    """
    if count < TILE:
        if lanes < TILE:
            clear(memory, squares, _SQUARES)
        if stride == count:
            copy_elements(memory, squares, source, start, lanes * count)
        for lane in range(lanes if stride != count else 0):
            copy_elements(memory, squares + lane * count, source, start + lane * stride, count)
        turned = squares + TILE * TILE + TILE
        transpose(memory, turned, TILE, memory, squares, count)
        for k in range(count):
            copy_vector(memory, base + places[k], memory, turned + k * TILE)
        return
    if lanes < TILE:
        clear(memory, squares, _SQUARES)
    for k in range(0, count, TILE):
        # The last square overlaps the one before.
        first = min(k, count - TILE)
        if lanes == TILE:
            spread(memory, base, places, first, source, start + first, stride)
        else:
            for lane in range(lanes):
                copy_vector(memory, squares + lane * TILE, source, start + lane * stride + first)
            spread(memory, base, places, first, memory, squares, TILE)


def _store_planes(
    into: np.ndarray,
    start: int,
    stride: int,
    memory: np.ndarray,
    sums: int,
    count: int,
    lanes: int,
    squares: int,
) -> None:
    """Transpose consecutive vectors back, into up to TILE planes."""
    if count < TILE:
        # Rows of a square are longer than those of the planes. Each overwrites the end of the one before.
        transpose(memory, squares, count, memory, sums, TILE)
        if stride == count:
            copy_elements(into, start, memory, squares, lanes * count)
        for lane in range(lanes if stride != count else 0):
            copy_elements(into, start + lane * stride, memory, squares + lane * count, count)
        return
    for k in range(0, count, TILE):
        first = min(k, count - TILE)
        if lanes == TILE:
            transpose(into, start + first, stride, memory, sums + first * TILE, TILE)
        else:
            transpose(memory, squares, TILE, memory, sums + first * TILE, TILE)
            for lane in range(lanes):
                copy_vector(into, start + lane * stride + first, memory, squares + lane * TILE)


def _is_not_finite(memory: np.ndarray, place: int, count: int) -> bool:
    total, values = 0.0, memory[place : place + count]
    for k in range(count):
        total += values[k] * 0.0
    return total != 0.0
