"""Depthwise convolutions for Numba: every filter reads one channel, so TILE channels are computed at once.

A task transposes some rows of TILE channels, so that a vector holds one position of them. Strides, edges and
short rows then waste no part of a vector. With the stride s, and E for dY with zeros around it,

    Y[p] = B + sum over taps t of W[t] X[s p + t]
    dW[t] = sum over p of E[p] X[s p + t]
    dX[p] = sum over t with the same remainder modulo s as p of W[t] E[(p - t) / s]

The results are transposed back. Some products with padding, and with the zeros of E, are left out. They must
be zero, so the NumPy kernel takes over if W contains NaN or infinities, or if dW does, as then X or dY may.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

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
from ortgrad.ops.conv._dense import Sizes, views_of, windows_of
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

# The memory of two squares of elements that are transposed.
_SQUARES = 2 * TILE * TILE + TILE
# The work of a task that consists of several planes: enough for another thread to be started.
_WORK = 1 << 15
# Line of a box that are cleared at once.
_SMALL = 128


def _division(x: Sizes, w: Sizes, y: Sizes, attributes: dict[str, Any]) -> Division | None:
    win, group = windows_of(x, w, attributes)
    fits = y[2:] == win.outputs and x[1] == group and w[1] == 1
    if not fits or len(x) > 4 or not math.prod(x) * math.prod(w):
        return None
    return Division(in_two_dimensions(win))


def _divide(tables: Tables, x: Sizes, w: Sizes, work: int) -> tuple[Tables, int]:
    """Return the completed tables and the number of tasks, given the work of a plane."""
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
    """Return the plan of the gradient; None for other convolutions, empty tensors and three dimensions."""
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
    return Plan(
        tasks=(tasks, adding),
        views=views_of(dy, x, w, dx, dw, db),
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
        views=views_of(x, w, b, y),
        numbers=tables.numbers,
        work=x[0] * x[1] * work,
    )


class RowLists(NamedTuple):
    """Tables of a plan (see _depthwise_plan.Tables): those of rows of sums."""

    rows: Integers
    row_starts: Integers


class Lists(NamedTuple):
    """Tables of a plan."""

    strips: Integers
    x_places: Integers
    tap_places: Integers
    of_rows: RowLists


class ProductLists(NamedTuple):
    """Tables of a plan: those of dW."""

    products: Integers
    starts: Integers


class GradLists(NamedTuple):
    """Tables of a plan of the gradient."""

    lists: Lists
    dy_places: Integers
    of_products: ProductLists


class Room(NamedTuple):
    """The memory of a task: boxes, and behind them what begins at these places."""

    memory: np.ndarray
    sums: int
    weights: int
    further: int  # biases, or sums for dW
    squares: int  # that are transposed


class Lanes(NamedTuple):
    """Consecutive elements of planes or of pieces of planes, one for each lane of vectors."""

    array: np.ndarray
    size: int  # of a plane
    filters: int  # planes per plane of X
    first: int  # element of a plane, or of its first piece
    shift: int  # from a piece to the next one
    length: int


class Stack(NamedTuple):
    """Elements of up to TILE planes, which begin a stride apart, and how many planes there are."""

    array: np.ndarray
    start: int
    stride: int
    planes: int


def convolve_strip(
    task: int, x: np.ndarray, w: np.ndarray, b: np.ndarray, y: np.ndarray, geometry: Geometry, lists: Lists
) -> bool:
    """Compute a strip of the outputs of up to TILE channels, or of some samples and blocks of channels."""
    strip: Strip = lists.strips[task % geometry.strips * STRIP :]
    filters, size = geometry.filters, geometry.taps * TILE
    allocated = allocate(_room_size(geometry, filters * TILE))
    if len(allocated) == 0:
        return True
    room, failed = _room(allocated, geometry, filters * TILE), False
    count = strip.x_count
    _clear_around(room.memory, 0, geometry.x_box, strip.x_place, count, geometry.x_width, geometry.x_line)
    source = Lanes(x, geometry.size, 1, strip.x_first, geometry.x_shift, count)
    into = Lanes(y, geometry.outputs, filters, strip.y_first, geometry.y_shift, strip.y_count)
    begin, end = _units(task, geometry)
    for unit in range(begin, end):
        channel, sample = unit // geometry.samples * TILE, unit % geometry.samples
        plane, lanes = sample * geometry.channels + channel, min(TILE, geometry.channels - channel)
        if unit == begin or _has_other_weights(sample, geometry):
            failed = _load_weights(room, w, channel, lists.tap_places, geometry) or failed
            _load_biases(room, b, channel, geometry)
        _load(room, strip.x_place, lists.x_places, source, 0, plane, lanes, geometry)
        for i in range(filters):
            sums, values = Line(room.sums, TILE), Line(0, geometry.x_step)
            weights = room.weights + i * size
            biases = room.further + i * TILE
            _convolve_rows(room.memory, sums, biases, values, weights, strip, lists.of_rows)
            _store(into, i, plane, lanes, room, geometry)
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
    tables: GradLists,
) -> bool:
    """Compute a strip of dX of up to TILE channels, and what the same rows of dY add to dW and dB.

    Where strips are whole planes, a task has some samples and blocks of channels.
    """
    lists: Lists = tables.lists
    strip: Strip = lists.strips[task % geometry.strips * STRIP :]
    filters, size, wanted = geometry.filters, geometry.taps * TILE, geometry.wanted
    # The sums for dW and dB, and zeros.
    further = size + 2 * TILE
    allocated = allocate(_room_size(geometry, further))
    if len(allocated) == 0:
        return True
    room, failed = _room(allocated, geometry, further), False
    memory, dy_box, zeros = room.memory, geometry.x_box, room.further + size + TILE
    clear(memory, zeros, TILE)
    x_count, dy_count, dy_place = strip.x_count, strip.y_count, geometry.dy_place
    _clear_around(memory, 0, dy_box, strip.x_place, x_count, geometry.x_width, geometry.x_line)
    width, pitch = geometry.dy_width, geometry.dy_line
    _clear_around(memory, dy_box, geometry.dy_box, dy_place, dy_count, width, pitch)
    values = Lanes(x, geometry.size, 1, strip.x_first, geometry.x_shift, x_count)
    grads = Lanes(dy, geometry.outputs, filters, strip.y_first, geometry.y_shift, dy_count)
    into = Lanes(dx, geometry.size, 1, strip.dx_first, geometry.x_shift, strip.dx_count)
    begin, end = _units(task, geometry)
    for unit in range(begin, end):
        block, sample = unit // geometry.samples, unit % geometry.samples
        channel = block * TILE
        plane, lanes = sample * geometry.channels + channel, min(TILE, geometry.channels - channel)
        if wanted & 1 and (unit == begin or _has_other_weights(sample, geometry)):
            failed = _load_weights(room, w, channel, lists.tap_places, geometry) or failed
        if wanted & 2:
            _load(room, strip.x_place, lists.x_places, values, 0, plane, lanes, geometry)
        for i in range(filters):
            _load(room, dy_box + dy_place, tables.dy_places, grads, i, plane, lanes, geometry)
            sums, source = Line(room.sums, geometry.dx_step), Line(dy_box, TILE)
            weights = room.weights + i * size
            _convolve_rows(memory, sums, zeros if i == 0 else -1, source, weights, strip, lists.of_rows)
            if wanted != 1:
                failed = _add_products(room, strip, tables.of_products, geometry) or failed
                part = partial[sample * geometry.strips + task % geometry.strips, block * filters + i]
                copy_elements(part, 0, memory, room.further, size + TILE)
        if wanted & 1:
            _store(into, 0, plane, lanes, room, geometry)
    release(allocated)
    return failed


def _room_size(geometry: Geometry, further: int) -> int:
    weights = geometry.filters * geometry.taps * TILE
    boxes = geometry.x_box + geometry.dy_box + geometry.sum_box + TILE * TILE
    return boxes + weights + further + _SQUARES + TILE


def _room(allocated: np.ndarray, geometry: Geometry, further: int) -> Room:
    """Divide the memory of a task; `further` elements are for biases, or for sums for dW."""
    sums = geometry.x_box + geometry.dy_box
    weights = sums + geometry.sum_box + TILE * TILE
    begin = weights + geometry.filters * geometry.taps * TILE
    return Room(aligned(allocated), sums, weights, begin, begin + further)


def _has_other_weights(sample: int, geometry: Geometry) -> bool:
    """Return whether the next block has other weights: not if blocks of pieces consist of whole samples."""
    return sample == 0 and (geometry.pieces == 0 or TILE % (geometry.channels * geometry.pieces) != 0)


def _convolve_rows(
    memory: np.ndarray,
    sums: Line,
    initial: int,
    source: Line,
    weights: int,
    strip: Strip,
    lists: RowLists,
) -> None:
    """Compute the rows of sums of a strip, from the vector at `initial` on; if that is -1, add to them."""
    for number in range(strip.row, strip.last_row):
        row: Row = lists.rows[number * ROW :]
        place = sums.place + row.place
        convolve(
            memory,
            Line(place, sums.step),
            Line(place if initial < 0 else initial, sums.step if initial < 0 else 0),
            Line(source.place + row.source, source.step),
            weights,
            Taps(lists.row_starts, row.tap, row.last_tap),
            row.length,
        )


def _add_products(room: Room, strip: Strip, lists: ProductLists, geometry: Geometry) -> bool:
    """Compute what a strip adds to dW and dB of a filter; return whether some of it is not finite."""
    memory, totals, taps, pitch = room.memory, room.further, geometry.taps, geometry.dy_line * TILE
    clear(memory, totals, taps * TILE)
    for number in range(strip.product, strip.last_product):
        product: Product = lists.products[number * PRODUCT :]
        correlate(
            memory,
            totals + product.tap * TILE,
            Line(geometry.x_box + product.dy, pitch),
            Plane(product.x, geometry.x_pitch, geometry.x_step),
            Taps(lists.starts, product.tap, product.last_tap),
            product.rows,
            product.length,
        )
    checked = taps
    if geometry.wanted & 4 or geometry.skips:
        place = geometry.x_box + strip.own_place
        add_up(memory, totals + taps * TILE, place, pitch, strip.own_rows, strip.own_length)
        # If dY is not finite, neither is its sum.
        checked += geometry.skips
    return _is_not_finite(memory, totals, checked * TILE)


def add_strips(task: int, dw: np.ndarray, db: np.ndarray, partial: np.ndarray, geometry: Geometry) -> bool:
    """Add what the strips of all samples contribute to dW and dB of some filters, or all pieces to one."""
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
        into = Stack(dw, first * taps, filters * taps, lanes)
        _store_rows(into, memory, 0, taps, size + TILE * TILE)
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
    room: Room, base: int, places: Integers, source: Lanes, i: int, plane: int, lanes: int, geometry: Geometry
) -> None:
    """Transpose elements of the i-th plane per plane of X. `plane` is that of the first lane, or its piece.

    The vector of element k is written to base + places[k].
    """
    size, shift, count = source.size, source.shift, source.length
    if geometry.pieces == 0:
        start = (plane * source.filters + i) * size + source.first
        _load_rows(room, base, places, Stack(source.array, start, source.filters * size, lanes), count)
        return
    memory, squares = room.memory, room.squares
    pieces, begins = geometry.pieces, plane // geometry.pieces
    place = source.first + plane % pieces * shift
    behind, used = source.first + pieces * shift, min(TILE, geometry.planes * pieces - plane)
    for lane in range(used, TILE):
        clear(memory, squares + lane * TILE, TILE)
    for k in range(0, count, TILE):
        begin = min(k, count - TILE)
        # Where the piece begins in its plane, and where the plane begins.
        start, low = place + begin, (begins * source.filters + i) * size
        for lane in range(used):
            into = squares + lane * TILE
            if start >= 0 and start + TILE <= size:
                copy_vector(memory, into, source.array, low + start)
            else:
                clear(memory, into, TILE)
                skipped, inside = _inside(start, size)
                copy_elements(memory, into + skipped, source.array, low + start + skipped, inside)
            start += shift
            if start == behind + begin:
                start, low = source.first + begin, low + source.filters * size
        spread(memory, base, places, begin, memory, squares, TILE)


def _store(into: Lanes, i: int, plane: int, lanes: int, room: Room, geometry: Geometry) -> None:
    """Transpose the sums back into such planes or pieces."""
    size, shift, count = into.size, into.shift, into.length
    memory, sums, squares = room.memory, room.sums, room.squares
    if geometry.pieces == 0:
        start = (plane * into.filters + i) * size + into.first
        _store_rows(Stack(into.array, start, into.filters * size, lanes), memory, sums, count, squares)
        return
    pieces, begins = geometry.pieces, plane // geometry.pieces
    place = into.first + plane % pieces * shift
    behind, used = into.first + pieces * shift, min(TILE, geometry.planes * pieces - plane)
    for k in range(0, count, TILE):
        begin = min(k, count - TILE)
        transpose(memory, squares, TILE, memory, sums + begin * TILE, TILE)
        start, low = place + begin, (begins * into.filters + i) * size
        for lane in range(used):
            of = squares + lane * TILE
            if start >= 0 and start + TILE <= size:
                copy_vector(into.array, low + start, memory, of)
            else:
                skipped, inside = _inside(start, size)
                copy_elements(into.array, low + start + skipped, memory, of + skipped, inside)
            start += shift
            if start == behind + begin:
                start, low = into.first + begin, low + into.filters * size


def _inside(start: int, size: int) -> tuple[int, int]:
    """Return how many of the TILE elements from `start` on are before a plane, and how many are in it."""
    skipped = min(TILE, max(0, -start))
    return skipped, max(0, min(TILE, size - start) - skipped)


def _units(task: int, geometry: Geometry) -> tuple[int, int]:
    """Return the first and last unit of a task: a sample and a block of channels."""
    first = task // geometry.strips * geometry.units
    return first, min(first + geometry.units, geometry.samples * geometry.blocks)


def _load_biases(room: Room, b: np.ndarray, channel: int, geometry: Geometry) -> None:
    """Write the biases of all filters of some channels, or of those of pieces; zeros if there are none."""
    filters, pieces = geometry.filters, max(1, geometry.pieces)
    clear(room.memory, room.further, filters * TILE)
    lanes = TILE if geometry.pieces > 0 else min(TILE, geometry.channels - channel)
    for lane in range(lanes if len(b) > 0 else 0):
        of = (channel + lane) // pieces % geometry.channels * filters
        for i in range(filters):
            room.memory[room.further + i * TILE + lane] = b[of + i]


def _load_weights(room: Room, w: np.ndarray, channel: int, tap_places: Integers, geometry: Geometry) -> bool:
    """Transpose the weights of all filters of some channels; return whether some are not finite."""
    taps, filters, memory = geometry.taps, geometry.filters, room.memory
    for lane in range(TILE if geometry.pieces > 0 else 0):
        of = (channel + lane) // geometry.pieces % geometry.channels * filters * taps
        for i in range(filters):
            for t in range(taps):
                memory[room.weights + i * taps * TILE + tap_places[t] + lane] = w[of + i * taps + t]
    for i in range(filters if geometry.pieces == 0 else 0):
        start, lanes = (channel * filters + i) * taps, min(TILE, geometry.channels - channel)
        into = room.weights + i * taps * TILE
        _load_rows(room, into, tap_places, Stack(w, start, filters * taps, lanes), taps)
    return _is_not_finite(memory, room.weights, filters * taps * TILE)


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


def _load_rows(room: Room, base: int, places: Integers, source: Stack, count: int) -> None:
    """Transpose elements of planes. The vector of element k is written to base + places[k].

    Lanes without a plane are 0.
    """
    memory, squares, lanes = room.memory, room.squares, source.planes
    if lanes < TILE:
        clear(memory, squares, _SQUARES)
    if count < TILE:
        if source.stride == count:
            copy_elements(memory, squares, source.array, source.start, lanes * count)
        for lane in range(lanes if source.stride != count else 0):
            start = source.start + lane * source.stride
            copy_elements(memory, squares + lane * count, source.array, start, count)
        turned = squares + TILE * TILE + TILE
        transpose(memory, turned, TILE, memory, squares, count)
        for k in range(count):
            copy_vector(memory, base + places[k], memory, turned + k * TILE)
        return
    for k in range(0, count, TILE):
        # The last square overlaps the one before.
        first = min(k, count - TILE)
        if lanes == TILE:
            spread(memory, base, places, first, source.array, source.start + first, source.stride)
        else:
            for lane in range(lanes):
                start = source.start + lane * source.stride + first
                copy_vector(memory, squares + lane * TILE, source.array, start)
            spread(memory, base, places, first, memory, squares, TILE)


def _store_rows(into: Stack, memory: np.ndarray, sums: int, count: int, squares: int) -> None:
    """Transpose consecutive vectors back, into planes."""
    lanes, stride = into.planes, into.stride
    if count < TILE:
        # The square has longer rows than the planes: each row overwrites the end of the previous one.
        transpose(memory, squares, count, memory, sums, TILE)
        if stride == count:
            copy_elements(into.array, into.start, memory, squares, lanes * count)
        for lane in range(lanes if stride != count else 0):
            copy_elements(into.array, into.start + lane * stride, memory, squares + lane * count, count)
        return
    for k in range(0, count, TILE):
        first = min(k, count - TILE)
        if lanes == TILE:
            transpose(into.array, into.start + first, stride, memory, sums + first * TILE, TILE)
        else:
            transpose(memory, squares, TILE, memory, sums + first * TILE, TILE)
            for lane in range(lanes):
                copy_vector(into.array, into.start + lane * stride + first, memory, squares + lane * TILE)


def _is_not_finite(memory: np.ndarray, place: int, count: int) -> bool:
    total, values = 0.0, memory[place : place + count]
    for k in range(count):
        total += values[k] * 0.0
    return total != 0.0
