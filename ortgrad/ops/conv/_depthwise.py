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
    DY_LINE,
    DY_PLACE,
    DY_WIDTH,
    FILTERS,
    LAST_PRODUCT,
    LAST_ROW,
    OUTPUTS,
    OWN_LENGTH,
    OWN_PLACE,
    OWN_ROWS,
    PIECES,
    PLANES,
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
    SAMPLES,
    SIZE,
    SKIPS,
    STRIP_FIELDS,
    STRIPS,
    SUM_BOX,
    TAPS,
    UNITS,
    WANTED,
    X_BOX,
    X_COUNT,
    X_FIRST,
    X_LINE,
    X_PITCH,
    X_PLACE,
    X_SHIFT,
    X_STEP,
    X_WIDTH,
    Y_COUNT,
    Y_FIRST,
    Y_SHIFT,
    Division,
    Planes,
    Tables,
    in_two_dimensions,
)

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


def _divide(tables: Tables, x: Sizes, w: Sizes, work: int) -> int:
    """Complete the tables, if a plane has so much work, and return the number of tasks."""
    geometry = tables.geometry
    geometry[SAMPLES], geometry[CHANNELS], geometry[FILTERS] = *x[:2], w[0] // x[1]
    geometry[BLOCKS] = -(-x[1] // TILE)
    if geometry[PIECES] > 0:
        # Blocks of pieces belong to no sample.
        geometry[SAMPLES], geometry[BLOCKS] = 1, -(-geometry[PLANES] * geometry[PIECES] // TILE)
        work //= geometry[PIECES]
    geometry[UNITS] = max(1, _WORK // max(1, work * TILE)) if geometry[STRIPS] == 1 else 1
    return -(-geometry[SAMPLES] * geometry[BLOCKS] // geometry[UNITS]) * geometry[STRIPS]


def plan_grad(
    dy: Sizes, x: Sizes, w: Sizes, dx: Sizes | None, dw: Sizes | None, db: Sizes | None, **attributes: Any
) -> Plan | None:
    """Return the plan of the gradient; None for what is not depthwise, empty or three-dimensional."""
    division = _division(x, w, dy, attributes)
    if division is None:
        return None
    tables = division.backward(dx is not None, dw is not None, Planes(*x[:2]))
    geometry = tables.geometry
    taps, filters = geometry[TAPS], w[0] // x[1]
    work = filters * geometry[OUTPUTS] * (taps + 4) // 4 + geometry[SIZE] + 32
    tasks = _divide(tables, x, w, work)
    geometry[WANTED] = (dx is not None) + 2 * (dw is not None) + 4 * (db is not None)
    sums = geometry[BLOCKS] * filters if geometry[WANTED] > 1 else 0
    adding = w[0] if geometry[PIECES] > 0 and sums else sums
    flat = [(math.prod(shape),) for shape in (dy, x, w)]
    return Plan(
        tasks=(tasks, adding),
        views=[*flat, flat[1] if dx else (0,), flat[2] if dw else (0,), db or (0,)],
        numbers=tables._asdict(),
        work=x[0] * x[1] * work,
        scratch=[(geometry[SAMPLES] * geometry[STRIPS], sums, (taps + 1) * TILE)],
    )


def plan(x: Sizes, w: Sizes, b: Sizes | None, y: Sizes, **attributes: Any) -> Plan | None:
    """Return the plan of the convolution; None as for the gradient."""
    division = _division(x, w, y, attributes)
    if division is None:
        return None
    tables = division.forward(Planes(*x[:2]))
    positions, taps = tables.geometry[OUTPUTS], tables.geometry[TAPS]
    work = w[0] // x[1] * positions * (taps + 8) // 8 + tables.geometry[SIZE] + 32
    return Plan(
        tasks=_divide(tables, x, w, work),
        views=[(math.prod(x),), (math.prod(w),), b or (0,), (math.prod(y),)],
        numbers=tables._asdict(),
        work=x[0] * x[1] * work,
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
    """Compute a strip of the outputs of up to TILE channels, or of some samples and blocks of channels."""
    strip = strips[task % geometry[STRIPS] * STRIP_FIELDS :]
    taps, filters, outputs = geometry[TAPS], geometry[FILTERS], geometry[OUTPUTS]
    sums = geometry[X_BOX]
    weights = sums + geometry[SUM_BOX] + TILE * TILE
    biases = weights + filters * taps * TILE
    squares = biases + filters * TILE
    allocated = allocate(squares + _SQUARES + TILE)
    if len(allocated) == 0:
        return True
    memory, failed = aligned(allocated), False
    count = strip[X_COUNT]
    _clear_around(memory, 0, geometry[X_BOX], strip[X_PLACE], count, geometry[X_WIDTH], geometry[X_LINE])
    begin, end = _units(task, geometry)
    # The weights of the next block are the same if whole samples of pieces are in a block.
    repeated = geometry[CHANNELS] * geometry[PIECES] if geometry[PIECES] > 0 else TILE + 1
    for unit in range(begin, end):
        channel, sample = unit // geometry[SAMPLES] * TILE, unit % geometry[SAMPLES]
        lanes = min(TILE, geometry[CHANNELS] - channel)
        if unit == begin or (sample == 0 and TILE % repeated != 0):
            _load_weights(memory, weights, tap_places, w, channel, lanes, squares, geometry)
            failed = failed or _is_not_finite(memory, weights, filters * taps * TILE)
            clear(memory, biases, filters * TILE)
            if geometry[PIECES] > 0 and len(b) > 0:
                _spread_biases(memory, biases, b, channel, geometry)
            for k in range(lanes * filters if len(b) > 0 and geometry[PIECES] == 0 else 0):
                memory[biases + k % filters * TILE + k // filters] = b[channel * filters + k]
        plane = sample * geometry[CHANNELS] + channel
        _load(
            memory,
            strip[X_PLACE],
            x_places,
            x,
            plane,
            geometry[SIZE],
            1,
            0,
            strip[X_FIRST],
            geometry[X_SHIFT],
            count,
            lanes,
            squares,
            geometry,
        )
        for i in range(filters):
            for number in range(strip[ROW], strip[LAST_ROW]):
                row = rows[number * ROW_FIELDS :]
                convolve(
                    memory,
                    sums + row[ROW_PLACE],
                    TILE,
                    biases + i * TILE,
                    0,
                    row[ROW_SOURCE],
                    geometry[X_STEP],
                    weights + i * taps * TILE,
                    row_starts,
                    row[ROW_TAP],
                    row[ROW_LAST_TAP],
                    row[ROW_LENGTH],
                )
            _store(
                y,
                plane,
                outputs,
                filters,
                i,
                strip[Y_FIRST],
                geometry[Y_SHIFT],
                memory,
                sums,
                strip[Y_COUNT],
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
    """Compute a strip of dX of up to TILE channels, and what the same rows of dY add to dW and dB.

    Where strips are whole planes, a task has some samples and blocks of channels.
    """
    strip = strips[task % geometry[STRIPS] * STRIP_FIELDS :]
    taps, filters, wanted = geometry[TAPS], geometry[FILTERS], geometry[WANTED]
    embedded = geometry[X_BOX]
    sums = embedded + geometry[DY_BOX]
    weights = sums + geometry[SUM_BOX] + TILE * TILE
    totals = weights + filters * taps * TILE
    zeros = totals + (taps + 1) * TILE
    squares = zeros + TILE
    allocated = allocate(squares + _SQUARES + TILE)
    if len(allocated) == 0:
        return True
    memory, failed = aligned(allocated), False
    clear(memory, zeros, TILE)
    x_count, dy_count, dy_place = strip[X_COUNT], strip[Y_COUNT], geometry[DY_PLACE]
    _clear_around(memory, 0, embedded, strip[X_PLACE], x_count, geometry[X_WIDTH], geometry[X_LINE])
    width, pitch = geometry[DY_WIDTH], geometry[DY_LINE]
    _clear_around(memory, embedded, geometry[DY_BOX], dy_place, dy_count, width, pitch)
    dy_place += embedded
    begin, end = _units(task, geometry)
    # The weights of the next block are the same if whole samples of pieces are in a block.
    repeated = geometry[CHANNELS] * geometry[PIECES] if geometry[PIECES] > 0 else TILE + 1
    for unit in range(begin, end):
        block, sample = unit // geometry[SAMPLES], unit % geometry[SAMPLES]
        channel = block * TILE
        lanes = min(TILE, geometry[CHANNELS] - channel)
        plane = sample * geometry[CHANNELS] + channel
        if wanted & 1 and (unit == begin or (sample == 0 and TILE % repeated != 0)):
            _load_weights(memory, weights, tap_places, w, channel, lanes, squares, geometry)
            failed = failed or _is_not_finite(memory, weights, filters * taps * TILE)
        if wanted & 2:
            _load(
                memory,
                strip[X_PLACE],
                x_places,
                x,
                plane,
                geometry[SIZE],
                1,
                0,
                strip[X_FIRST],
                geometry[X_SHIFT],
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
                geometry[OUTPUTS],
                filters,
                i,
                strip[Y_FIRST],
                geometry[Y_SHIFT],
                dy_count,
                lanes,
                squares,
                geometry,
            )
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
                    weights + i * taps * TILE,
                    row_starts,
                    row[ROW_TAP],
                    row[ROW_LAST_TAP],
                    row[ROW_LENGTH],
                )
            if wanted == 1:
                continue
            clear(memory, totals, taps * TILE)
            for number in range(strip[PRODUCT], strip[LAST_PRODUCT]):
                product = products[number * PRODUCT_FIELDS :]
                correlate(
                    memory,
                    totals + product[PRODUCT_TAP] * TILE,
                    embedded + product[PRODUCT_DY],
                    pitch * TILE,
                    product[PRODUCT_X],
                    geometry[X_PITCH],
                    geometry[X_STEP],
                    starts,
                    product[PRODUCT_TAP],
                    product[PRODUCT_LAST_TAP],
                    product[PRODUCT_ROWS],
                    product[PRODUCT_LENGTH],
                )
            checked = taps
            if wanted & 4 or geometry[SKIPS] != 0:
                place, last = embedded + strip[OWN_PLACE], totals + taps * TILE
                add_up(memory, last, place, pitch * TILE, strip[OWN_ROWS], strip[OWN_LENGTH])
                # If dY is not finite, neither is its sum.
                checked += geometry[SKIPS]
            failed = failed or _is_not_finite(memory, totals, checked * TILE)
            into = partial[sample * geometry[STRIPS] + task % geometry[STRIPS], block * filters + i]
            copy_elements(into, 0, memory, totals, (taps + 1) * TILE)
        if wanted & 1:
            _store(
                dx,
                plane,
                geometry[SIZE],
                1,
                0,
                strip[DX_FIRST],
                geometry[X_SHIFT],
                memory,
                sums,
                strip[DX_COUNT],
                lanes,
                squares,
                geometry,
            )
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
    """Add what the strips of all samples contribute to dW and dB of some filters; or the pieces, to one."""
    if geometry[PIECES] > 0:
        _add_pieces(task, dw, db, partial, geometry)
        return False
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


def _add_pieces(task: int, dw: np.ndarray, db: np.ndarray, partial: np.ndarray, geometry: np.ndarray) -> None:
    """Add what all pieces contribute to dW and dB of a filter."""
    taps, filters, pieces = geometry[TAPS], geometry[FILTERS], geometry[PIECES]
    channel, i = task // filters, task % filters
    for t in range(taps + 1):
        total = double(0.0)
        for sample in range(geometry[PLANES] // geometry[CHANNELS]):
            plane = sample * geometry[CHANNELS] + channel
            for number in range(plane * pieces, (plane + 1) * pieces):
                part = partial[0, number // TILE * filters + i, t * TILE + number % TILE]
                total += double(part)
        if t < taps and geometry[WANTED] & 2:
            dw[task * taps + t] = total
        if t == taps and geometry[WANTED] & 4:
            db[task] = total


def _load(
    memory: np.ndarray,
    base: int,
    places: np.ndarray,
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
    geometry: np.ndarray,
) -> None:
    """Transpose consecutive elements of planes of a size, or of pieces of them.

    There are several planes for each one of X, the i-th of which is meant. If there are pieces, `plane` is
    the number of the first piece.
    """
    if geometry[PIECES] == 0:
        start, stride = (plane * filters + i) * size + first, filters * size
        _load_planes(memory, base, places, source, start, stride, count, lanes, squares)
        return
    pieces, begins = geometry[PIECES], plane // geometry[PIECES]
    place = first + plane % pieces * shift
    behind, used = first + pieces * shift, min(TILE, geometry[PLANES] * pieces - plane)
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
    geometry: np.ndarray,
) -> None:
    """Transpose consecutive vectors back, into planes or pieces of them."""
    if geometry[PIECES] == 0:
        start, stride = (plane * filters + i) * size + first, filters * size
        _store_planes(into, start, stride, memory, sums, count, lanes, squares)
        return
    pieces, begins = geometry[PIECES], plane // geometry[PIECES]
    place = first + plane % pieces * shift
    behind, used = first + pieces * shift, min(TILE, geometry[PLANES] * pieces - plane)
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


def _spread_biases(memory: np.ndarray, biases: int, b: np.ndarray, first: int, geometry: np.ndarray) -> None:
    """Write the biases of pieces."""
    filters = geometry[FILTERS]
    for lane in range(TILE):
        channel = (first + lane) // geometry[PIECES] % geometry[CHANNELS]
        for i in range(filters):
            memory[biases + i * TILE + lane] = b[channel * filters + i]


def _units(task: int, geometry: np.ndarray) -> tuple[int, int]:
    """Return the first and last unit of a task: a sample and a block of channels."""
    first = task // geometry[STRIPS] * geometry[UNITS]
    return first, min(first + geometry[UNITS], geometry[SAMPLES] * geometry[BLOCKS])


def _load_weights(
    memory: np.ndarray,
    place: int,
    tap_places: np.ndarray,
    w: np.ndarray,
    channel: int,
    lanes: int,
    squares: int,
    geometry: np.ndarray,
) -> None:
    """Transpose the weights of all filters of some channels."""
    taps, filters = geometry[TAPS], geometry[FILTERS]
    for lane in range(TILE if geometry[PIECES] > 0 else 0):
        of = (channel + lane) // geometry[PIECES] % geometry[CHANNELS] * filters * taps
        for i in range(filters):
            for t in range(taps):
                memory[place + i * taps * TILE + tap_places[t] + lane] = w[of + i * taps + t]
    for i in range(filters if geometry[PIECES] == 0 else 0):
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
