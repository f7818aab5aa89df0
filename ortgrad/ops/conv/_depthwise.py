"""Depthwise convolutions for Numba: every filter reads one channel, so TILE channels are computed at once.

A task transposes some rows of TILE channels, so that a vector holds one position of them. Strides, edges and
short rows waste no part of a vector then. With s for the stride, and E for dY with zeros beside it,

    Y[p] = B + sum over taps t of W[t] X[s p + t]
    dW[t] = sum over p of E[p] X[s p + t]
    dX[p] = sum over t with the remainder of p / s of W[t] E[(p - t) / s]

The results are transposed back. Some products with padding, and with the zeros of E, are left out. They must
vanish, so the NumPy kernel takes over if W contains NaN or infinities, and if dW does because X or dY may.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ortgrad.compiled.functions import (
    SUMS,
    TILE,
    Line,
    Plane,
    Taps,
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
from ortgrad.operators.compiled import Integers, Plan
from ortgrad.ops._windows import windows
from ortgrad.ops.conv._depthwise_plan import (
    PRODUCT,
    ROW,
    STRIP,
    Division,
    Geometry,
    Planes,
    Product,
    Row,
    Strip,
    Tables,
    in_two_dimensions,
)
from ortgrad.ops.conv._memory import aligned

if TYPE_CHECKING:
    Sizes = tuple[int, ...]

# The memory of two squares of elements that are transposed.
_SQUARES = 2 * TILE * TILE + TILE
# The work of a task, if there are several planes in it: as much as another thread is started for.
_WORK = 1 << 15
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


def _divide(tables: Tables, x: Sizes, w: Sizes, work: int) -> tuple[Tables, int]:
    """Complete the tables, if a plane has so much work, and return them with the number of tasks."""
    geometry = tables.geometry
    samples, blocks = x[0], -(-x[1] // TILE)
    if geometry.pieces > 0:
        # Blocks of pieces belong to no sample.
        samples, blocks = 1, -(-geometry.planes * geometry.pieces // TILE)
        work //= geometry.pieces
    units = max(1, _WORK // max(1, work * TILE)) if geometry.strips == 1 else 1
    geometry = geometry._replace(
        samples=samples, channels=x[1], filters=w[0] // x[1], blocks=blocks, units=units
    )
    return tables._replace(geometry=geometry), -(-samples * blocks // units) * geometry.strips


def plan_grad(
    dy: Sizes, x: Sizes, w: Sizes, dx: Sizes | None, dw: Sizes | None, db: Sizes | None, **attributes: Any
) -> Plan | None:
    """Return the plan of the gradient; None for what is not depthwise, empty or three-dimensional."""
    division = _division(x, w, dy, attributes)
    if division is None:
        return None
    tables = division.backward(dx is not None, dw is not None, Planes(*x[:2]))
    taps, filters = tables.geometry.taps, w[0] // x[1]
    work = filters * tables.geometry.outputs * (taps + 4) // 4 + tables.geometry.size + 32
    tables, tasks = _divide(tables, x, w, work)
    wanted = (dx is not None) + 2 * (dw is not None) + 4 * (db is not None)
    geometry = tables.geometry._replace(wanted=wanted)
    sums = geometry.blocks * filters if wanted > 1 else 0
    adding = w[0] if geometry.pieces > 0 and sums else sums
    flat = [(math.prod(shape),) for shape in (dy, x, w)]
    return Plan(
        tasks=(tasks, adding),
        views=[*flat, flat[1] if dx else (0,), flat[2] if dw else (0,), db or (0,)],
        numbers=tables._replace(geometry=geometry).numbers,
        work=x[0] * x[1] * work,
        scratch=[(geometry.samples * geometry.strips, sums, (taps + 1) * TILE)],
    )


def plan(x: Sizes, w: Sizes, b: Sizes | None, y: Sizes, **attributes: Any) -> Plan | None:
    """Return the plan of the convolution; None as for the gradient."""
    division = _division(x, w, y, attributes)
    if division is None:
        return None
    tables = division.forward(Planes(*x[:2]))
    geometry = tables.geometry
    work = w[0] // x[1] * geometry.outputs * (geometry.taps + 8) // 8 + geometry.size + 32
    tables, tasks = _divide(tables, x, w, work)
    return Plan(
        tasks=tasks,
        views=[(math.prod(x),), (math.prod(w),), b or (0,), (math.prod(y),)],
        numbers=tables.numbers,
        work=x[0] * x[1] * work,
    )


def convolve_strip(
    task: int,
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray,
    y: np.ndarray,
    geometry: Geometry,
    strips: Integers,
    rows: Integers,
    x_places: Integers,
    tap_places: Integers,
    row_starts: Integers,
) -> bool:
    """Compute a strip of the outputs of up to TILE channels, or of some samples and blocks of channels."""
    strip: Strip = strips[task % geometry.strips * STRIP :]
    taps, filters, outputs = geometry.taps, geometry.filters, geometry.outputs
    sums = geometry.x_box
    weights = sums + geometry.sum_box + TILE * TILE
    biases = weights + filters * taps * TILE
    squares = biases + filters * TILE
    allocated = allocate(squares + _SQUARES + TILE)
    if len(allocated) == 0:
        return True
    memory, failed = aligned(allocated), False
    count = strip.x_count
    _clear_around(memory, 0, geometry.x_box, strip.x_place, count, geometry.x_width, geometry.x_line)
    begin, end = _units(task, geometry)
    # The weights of the next block are the same if whole samples of pieces are in a block.
    repeated = geometry.channels * geometry.pieces if geometry.pieces > 0 else TILE + 1
    for unit in range(begin, end):
        channel, sample = unit // geometry.samples * TILE, unit % geometry.samples
        lanes = min(TILE, geometry.channels - channel)
        if unit == begin or (sample == 0 and TILE % repeated != 0):
            _load_weights(memory, weights, tap_places, w, channel, lanes, squares, geometry)
            failed = failed or _is_not_finite(memory, weights, filters * taps * TILE)
            clear(memory, biases, filters * TILE)
            if geometry.pieces > 0 and len(b) > 0:
                _spread_biases(memory, biases, b, channel, geometry)
            for k in range(lanes * filters if len(b) > 0 and geometry.pieces == 0 else 0):
                memory[biases + k % filters * TILE + k // filters] = b[channel * filters + k]
        plane = sample * geometry.channels + channel
        _load(
            memory,
            strip.x_place,
            x_places,
            x,
            plane,
            geometry.size,
            1,
            0,
            strip.x_first,
            geometry.x_shift,
            count,
            lanes,
            squares,
            geometry,
        )
        for i in range(filters):
            for number in range(strip.row, strip.last_row):
                row: Row = rows[number * ROW :]
                convolve(
                    memory,
                    Line(sums + row.place, TILE),
                    Line(biases + i * TILE, 0),
                    Line(row.source, geometry.x_step),
                    weights + i * taps * TILE,
                    Taps(row_starts, row.tap, row.last_tap),
                    row.length,
                )
            _store(
                y,
                plane,
                outputs,
                filters,
                i,
                strip.y_first,
                geometry.y_shift,
                memory,
                sums,
                strip.y_count,
                lanes,
                squares,
                geometry,
            )
    release(allocated)
    return failed


def differentiate_strip(
    task: int,
    dy: np.ndarray,
    x: np.ndarray,
    w: np.ndarray,
    dx: np.ndarray,
    partial: np.ndarray,
    geometry: Geometry,
    strips: Integers,
    rows: Integers,
    products: Integers,
    x_places: Integers,
    dy_places: Integers,
    tap_places: Integers,
    starts: Integers,
    row_starts: Integers,
) -> bool:
    """Compute a strip of dX of up to TILE channels, and what the same rows of dY add to dW and dB.

    Where strips are whole planes, a task has some samples and blocks of channels.
    """
    strip: Strip = strips[task % geometry.strips * STRIP :]
    taps, filters, wanted = geometry.taps, geometry.filters, geometry.wanted
    embedded = geometry.x_box
    sums = embedded + geometry.dy_box
    weights = sums + geometry.sum_box + TILE * TILE
    totals = weights + filters * taps * TILE
    zeros = totals + (taps + 1) * TILE
    squares = zeros + TILE
    allocated = allocate(squares + _SQUARES + TILE)
    if len(allocated) == 0:
        return True
    memory, failed = aligned(allocated), False
    clear(memory, zeros, TILE)
    x_count, dy_count, dy_place = strip.x_count, strip.y_count, geometry.dy_place
    _clear_around(memory, 0, embedded, strip.x_place, x_count, geometry.x_width, geometry.x_line)
    width, pitch = geometry.dy_width, geometry.dy_line
    _clear_around(memory, embedded, geometry.dy_box, dy_place, dy_count, width, pitch)
    dy_place += embedded
    begin, end = _units(task, geometry)
    # The weights of the next block are the same if whole samples of pieces are in a block.
    repeated = geometry.channels * geometry.pieces if geometry.pieces > 0 else TILE + 1
    for unit in range(begin, end):
        block, sample = unit // geometry.samples, unit % geometry.samples
        channel = block * TILE
        lanes = min(TILE, geometry.channels - channel)
        plane = sample * geometry.channels + channel
        if wanted & 1 and (unit == begin or (sample == 0 and TILE % repeated != 0)):
            _load_weights(memory, weights, tap_places, w, channel, lanes, squares, geometry)
            failed = failed or _is_not_finite(memory, weights, filters * taps * TILE)
        if wanted & 2:
            _load(
                memory,
                strip.x_place,
                x_places,
                x,
                plane,
                geometry.size,
                1,
                0,
                strip.x_first,
                geometry.x_shift,
                x_count,
                lanes,
                squares,
                geometry,
            )
        for i in range(filters):
            _load(
                memory,
                dy_place,
                dy_places,
                dy,
                plane,
                geometry.outputs,
                filters,
                i,
                strip.y_first,
                geometry.y_shift,
                dy_count,
                lanes,
                squares,
                geometry,
            )
            for number in range(strip.row, strip.last_row):
                row: Row = rows[number * ROW :]
                place = sums + row.place
                convolve(
                    memory,
                    Line(place, geometry.dx_step),
                    Line(place if i > 0 else zeros, geometry.dx_step if i > 0 else 0),
                    Line(embedded + row.source, TILE),
                    weights + i * taps * TILE,
                    Taps(row_starts, row.tap, row.last_tap),
                    row.length,
                )
            if wanted == 1:
                continue
            clear(memory, totals, taps * TILE)
            for number in range(strip.product, strip.last_product):
                product: Product = products[number * PRODUCT :]
                correlate(
                    memory,
                    totals + product.tap * TILE,
                    Line(embedded + product.dy, pitch * TILE),
                    Plane(product.x, geometry.x_pitch, geometry.x_step),
                    Taps(starts, product.tap, product.last_tap),
                    product.rows,
                    product.length,
                )
            checked = taps
            if wanted & 4 or geometry.skips:
                place, last = embedded + strip.own_place, totals + taps * TILE
                add_up(memory, last, place, pitch * TILE, strip.own_rows, strip.own_length)
                # If dY is not finite, neither is its sum.
                checked += geometry.skips
            failed = failed or _is_not_finite(memory, totals, checked * TILE)
            into = partial[sample * geometry.strips + task % geometry.strips, block * filters + i]
            copy_elements(into, 0, memory, totals, (taps + 1) * TILE)
        if wanted & 1:
            _store(
                dx,
                plane,
                geometry.size,
                1,
                0,
                strip.dx_first,
                geometry.x_shift,
                memory,
                sums,
                strip.dx_count,
                lanes,
                squares,
                geometry,
            )
    release(allocated)
    return failed


def add_strips(task: int, dw: np.ndarray, db: np.ndarray, partial: np.ndarray, geometry: Geometry) -> bool:
    """Add what the strips of all samples contribute to dW and dB of some filters; or the pieces, to one."""
    if geometry.pieces > 0:
        _add_pieces(task, dw, db, partial, geometry)
        return False
    filters, taps, totals = geometry.filters, geometry.taps, doubles()
    channel, size = task // filters * TILE, (taps + 1) * TILE
    first, lanes = channel * filters + task % filters, min(TILE, geometry.channels - channel)
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
    if geometry.wanted & 2:
        _store_planes(dw, first * taps, filters * taps, memory, 0, taps, lanes, size + TILE * TILE)
    for lane in range(lanes if geometry.wanted & 4 else 0):
        db[first + lane * filters] = memory[taps * TILE + lane]
    release(memory)
    return False


def _add_pieces(task: int, dw: np.ndarray, db: np.ndarray, partial: np.ndarray, geometry: Geometry) -> None:
    """Add what all pieces contribute to dW and dB of a filter."""
    taps, filters, pieces = geometry.taps, geometry.filters, geometry.pieces
    channel, i = task // filters, task % filters
    for t in range(taps + 1):
        total = double(0.0)
        for sample in range(geometry.planes // geometry.channels):
            plane = sample * geometry.channels + channel
            for number in range(plane * pieces, (plane + 1) * pieces):
                part = partial[0, number // TILE * filters + i, t * TILE + number % TILE]
                total += double(part)
        if t < taps and geometry.wanted & 2:
            dw[task * taps + t] = total
        if t == taps and geometry.wanted & 4:
            db[task] = total


def _load(
    memory: np.ndarray,
    base: int,
    places: Integers,
    source: np.ndarray,
    plane: int,
    size: int,
    filters: int,
    i: int,
    first: int,
    shift: int,
    count: int,
    lanes: int,
    squares: int,
    geometry: Geometry,
) -> None:
    """Transpose consecutive elements of planes of a size, or of pieces of them.

    There are several planes for each one of X, the i-th of which is meant. If there are pieces, `plane` is
    the number of the first piece.
    """
    if geometry.pieces == 0:
        start, stride = (plane * filters + i) * size + first, filters * size
        _load_planes(memory, base, places, source, start, stride, count, lanes, squares)
        return
    pieces, begins = geometry.pieces, plane // geometry.pieces
    place = first + plane % pieces * shift
    behind, used = first + pieces * shift, min(TILE, geometry.planes * pieces - plane)
    for lane in range(used, TILE):
        clear(memory, squares + lane * TILE, TILE)
    for k in range(0, count, TILE):
        begin = min(k, count - TILE)
        # Where the piece begins in its plane, and where that is.
        start, low = place + begin, (begins * filters + i) * size
        for lane in range(used):
            into = squares + lane * TILE
            if start >= 0 and start + TILE <= size:
                copy_vector(memory, into, source, low + start)
            else:
                clear(memory, into, TILE)
                skipped = min(TILE, max(0, -start))
                there = max(0, min(TILE, size - start) - skipped)
                copy_elements(memory, into + skipped, source, low + start + skipped, there)
            start += shift
            if start == behind + begin:
                start, low = first + begin, low + filters * size
        spread(memory, base, places, begin, memory, squares, TILE)


def _store(
    into: np.ndarray,
    plane: int,
    size: int,
    filters: int,
    i: int,
    first: int,
    shift: int,
    memory: np.ndarray,
    sums: int,
    count: int,
    lanes: int,
    squares: int,
    geometry: Geometry,
) -> None:
    """Transpose consecutive vectors back, into planes or pieces of them."""
    if geometry.pieces == 0:
        start, stride = (plane * filters + i) * size + first, filters * size
        _store_planes(into, start, stride, memory, sums, count, lanes, squares)
        return
    pieces, begins = geometry.pieces, plane // geometry.pieces
    place = first + plane % pieces * shift
    behind, used = first + pieces * shift, min(TILE, geometry.planes * pieces - plane)
    for k in range(0, count, TILE):
        begin = min(k, count - TILE)
        transpose(memory, squares, TILE, memory, sums + begin * TILE, TILE)
        start, low = place + begin, (begins * filters + i) * size
        for lane in range(used):
            of = squares + lane * TILE
            if start >= 0 and start + TILE <= size:
                copy_vector(into, low + start, memory, of)
            else:
                skipped = min(TILE, max(0, -start))
                there = max(0, min(TILE, size - start) - skipped)
                copy_elements(into, low + start + skipped, memory, of + skipped, there)
            start += shift
            if start == behind + begin:
                start, low = first + begin, low + filters * size


def _spread_biases(memory: np.ndarray, biases: int, b: np.ndarray, first: int, geometry: Geometry) -> None:
    """Write the biases of pieces."""
    filters = geometry.filters
    for lane in range(TILE):
        channel = (first + lane) // geometry.pieces % geometry.channels
        for i in range(filters):
            memory[biases + i * TILE + lane] = b[channel * filters + i]


def _units(task: int, geometry: Geometry) -> tuple[int, int]:
    """Return the first and last unit of a task: a sample and a block of channels."""
    first = task // geometry.strips * geometry.units
    return first, min(first + geometry.units, geometry.samples * geometry.blocks)


def _load_weights(
    memory: np.ndarray,
    place: int,
    tap_places: Integers,
    w: np.ndarray,
    channel: int,
    lanes: int,
    squares: int,
    geometry: Geometry,
) -> None:
    """Transpose the weights of all filters of some channels."""
    taps, filters = geometry.taps, geometry.filters
    for lane in range(TILE if geometry.pieces > 0 else 0):
        of = (channel + lane) // geometry.pieces % geometry.channels * filters * taps
        for i in range(filters):
            for t in range(taps):
                memory[place + i * taps * TILE + tap_places[t] + lane] = w[of + i * taps + t]
    for i in range(filters if geometry.pieces == 0 else 0):
        start, into = (channel * filters + i) * taps, place + i * taps * TILE
        _load_planes(memory, into, tap_places, w, start, filters * taps, taps, lanes, squares)


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
    places: Integers,
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
