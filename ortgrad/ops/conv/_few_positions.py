"""The compiled ConvGrad for few positions, in which vectors hold pairs of channel and tap.

What the windows see of X is copied into a matrix with a row for each position of all samples and a column for
each pair. A row of dW is a sum of such rows. The products of dY and W form a matrix of the same shape, whose
elements are added to dX where the windows are. W and dW are used in their own layout.

The products are the same as in the NumPy kernel, including those with padding, so NaN and infinities have the
same effects.
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
from ortgrad.ops.conv._geometry import TERMS, Convolution, Spatial, volume
from ortgrad.ops.conv._memory import aligned, embed, fetch_rows


class Few(NamedTuple):
    """How dX and dW are computed in this way."""

    dx: bool  # whether dX is computed in this way
    dw: bool
    dw_start: int  # where the scratch memory for dW begins
    dx_channels: int  # of a task for dX: its channels, those of a block, and its scratch memory
    dx_block: int
    dx_memory: int
    dw_columns: int  # the same of a task for dW
    dw_block: int
    dw_memory: int


class FewTask(NamedTuple):
    """What tasks for dX and dW share: scratch memory, numbers of the plan, and where taps are in boxes."""

    scratch: np.ndarray
    conv: Convolution
    few: Few
    offsets: Integers


class Matrix(NamedTuple):
    """A matrix with a row for each position of all samples, and a column for each pair of channel and tap."""

    values: np.ndarray  # behind the matrix there are boxes
    pitch: int
    columns: int
    # The columns that fill tiles. A matrix of products may have the last TILE columns behind them.
    whole: int


# The number of filters whose weights are used for all positions before the next filters follow.
TOGETHER = 64


def few_channels_task(task: int, dy: np.ndarray, w: np.ndarray, dx: np.ndarray, given: FewTask) -> bool:
    """Compute dX of some channels."""
    conv: Convolution = given.conv
    few: Few = given.few
    filters, taps, positions = conv.filters, conv.taps, volume(conv.output)
    rows, most, step = conv.samples * positions, few.dx_channels, few.dx_block
    splits = (conv.channels + most - 1) // most
    group, first = task // splits, task % splits * most
    last, width = min(first + most, conv.channels), step * taps
    integers = allocate_integers(rows + 2 * TOGETHER + width + TILE_ROWS + 2)
    if len(integers) == 0:
        return True
    places, lists = integers[:rows], integers[rows:]
    seen, further = lists[2 * TOGETHER : 2 * TOGETHER + width], lists[2 * TOGETHER + width :]
    starts, shifts, bases = further[:TILE_ROWS], further[TILE_ROWS : TILE_ROWS + 1], further[TILE_ROWS + 1 :]
    left, right = Rows(dy, starts, shifts, lists[:TOGETHER]), Columns(w, bases, lists[TOGETHER:])
    _list_rows(places, positions, conv.groups * filters)
    for k in range(TOGETHER):
        left.steps[k], right.places[k] = k * positions, k * conv.channels * taps
    _list_pairs(seen, 0, conv, given.offsets)
    products = aligned(given.scratch[task * few.dx_memory : (task + 1) * few.dx_memory])
    while first < last:
        count = min(step, last - first)
        matrix = Matrix(products, width // TILE * TILE + TILE, count * taps, count * taps // TILE * TILE)
        for m in range(0, filters, TOGETHER):
            _multiply(matrix, m, left, right, places, group, first, conv)
        if taps == 1 and conv.x_in_place and _is_dense(conv):
            _turn(matrix, group * conv.channels + first, dx, True, conv)
        else:
            _add_up(matrix, group * conv.channels + first, count, dx, seen, conv)
        first += count
    release(integers)
    return False


def _multiply(
    matrix: Matrix,
    m: int,
    left: Rows,
    right: Columns,
    places: np.ndarray,
    group: int,
    first: int,
    conv: Convolution,
) -> None:
    """Add the products of dY and W for some filters, beginning with m, and channels, beginning with first."""
    filters, columns, whole, rows = conv.filters, matrix.columns, matrix.whole, len(places)
    pairs, used = conv.channels * conv.taps, min(TOGETHER, filters - m)
    begin = (group * filters + m) * pairs + first * conv.taps
    # Needed next: other filters, or the first filters for the next block.
    following = m + TOGETHER if m + TOGETHER < filters else 0
    ahead = begin + (following - m) * pairs + (columns if following == 0 else 0)
    fetch_rows(right.values, ahead, min(TOGETHER, filters - following), pairs, columns)
    grads = Rows(left.values, left.starts, left.shifts, left.steps[:used])
    weights = Columns(right.values, right.bases, right.places[:used])
    left.shifts[0] = (group * filters + m) * volume(conv.output)
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    tile = (rows + tiles - 1) // tiles
    for row in range(0, rows, tile):
        size = min(tile, rows - row)
        for i in range(size):
            left.starts[i] = places[row + i]
        into = matrix.values[row * matrix.pitch :]
        if whole > 0:
            right.bases[0] = begin
            add_products(into, matrix.pitch, grads, size, weights, whole, m == 0)
        if columns > whole:
            right.bases[0] = begin + columns - TILE
            add_products(into[whole:], matrix.pitch, grads, size, weights, TILE, m == 0)


def _is_dense(conv: Convolution) -> bool:
    """Return whether every element of X is seen once, by a kernel with one tap."""
    output: Spatial = conv.output
    size: Spatial = conv.x.size
    stride: Spatial = conv.stride
    same = output.depth == size.depth and output.height == size.height and output.width == size.width
    return same and stride.depth == 1 and stride.height == 1 and stride.width == 1


def _list_rows(places: np.ndarray, positions: int, filters: int) -> None:
    """Write where the rows of the matrix are in dY, for the first filter."""
    for sample in range(len(places) // positions):
        for k in range(positions):
            places[sample * positions + k] = sample * filters * positions + k


def _list_pairs(seen: np.ndarray, first: int, conv: Convolution, offsets: Integers) -> None:
    """Write where pairs of channel and tap are, relative to the box of the first pair's channel."""
    plane = volume(conv.x.box)
    tap, begin = first % conv.taps, 0
    for k in range(len(seen)):
        seen[k] = begin + offsets[tap]
        tap += 1
        if tap == conv.taps:
            tap = 0
            begin += plane


def _turn(matrix: Matrix, channel: int, tensor: np.ndarray, back: bool, conv: Convolution) -> None:
    """Transpose channels of X into the matrix, or with `back` a matrix of products into channels of dX."""
    values, pitch, count, whole = matrix.values, matrix.pitch, matrix.columns, matrix.whole
    size, further = volume(conv.x.size), whole + TILE - count if back else 0
    full = size // TILE * TILE
    for sample in range(conv.samples):
        begin, place = sample * size * pitch, (sample * conv.groups * conv.channels + channel) * size
        for k in range(0, full, TILE):
            for c in range(0, whole, TILE):
                if back:
                    transpose(tensor, place + c * size + k, size, values, begin + k * pitch + c, pitch)
                else:
                    transpose(values, begin + k * pitch + c, pitch, tensor, place + c * size + k, size)
        for k in range(size):
            for c in range(whole if k < full else 0, count):
                of, at = place + c * size + k, begin + k * pitch + c
                if back:
                    tensor[of] = values[at if c < whole else at + further]
                else:
                    values[at] = tensor[of]


def _place_of(p: int, conv: Convolution) -> int:
    """Return where the window of a position begins in a box."""
    height, width = conv.output.height, conv.output.width
    z, y, x = p // width // height, p // width % height, p % width
    row = z * conv.stride.depth * conv.x.box.height + y * conv.stride.height
    return row * conv.x.box.width + x * conv.stride.width


def _add_up(
    matrix: Matrix, channel: int, count: int, dx: np.ndarray, seen: np.ndarray, conv: Convolution
) -> None:
    """Add the products to `count` channels of dX, beginning with one, where the windows are."""
    samples, positions, whole, columns = conv.samples, volume(conv.output), matrix.whole, matrix.columns
    plane, in_place, channels = volume(conv.x.box), conv.x_in_place, conv.groups * conv.channels
    boxes = dx if in_place else matrix.values[samples * positions * matrix.pitch :]
    begin, distance = channel * plane if in_place else 0, channels * plane if in_place else count * plane
    for sample in range(samples):
        clear(boxes, begin + sample * distance, count * plane)
        for p in range(positions):
            place, row = (
                begin + sample * distance + _place_of(p, conv),
                (sample * positions + p) * matrix.pitch,
            )
            add_listed(boxes, place, seen, 0, whole, matrix.values, row)
            add_listed(boxes, place, seen, whole, columns, matrix.values, row + whole + TILE - columns)
    if not in_place:
        for sample in range(samples):
            for c in range(count):
                _crop(boxes, (sample * count + c) * plane, dx, sample * channels + channel + c, conv)


def _crop(boxes: np.ndarray, start: int, dx: np.ndarray, channel: int, conv: Convolution) -> None:
    """Copy a channel of dX from its box, which may be smaller."""
    depth, height, width = conv.x.size.depth, conv.x.size.height, conv.x.size.width
    planes, rows, line = conv.x.box.depth, conv.x.box.height, conv.x.box.width
    count = max(0, min(width, line - conv.x.head.width))
    for z in range(depth):
        a = z + conv.x.head.depth
        for y in range(height):
            b = y + conv.x.head.height
            to = ((channel * depth + z) * height + y) * width
            n = count if a < planes and b < rows else 0
            copy_elements(dx, to, boxes, start + (a * rows + b) * line + conv.x.head.width, n)
            if n < width:
                clear(dx, to + n, width - n)


def few_weights_task(task: int, dy: np.ndarray, x: np.ndarray, dw: np.ndarray, given: FewTask) -> bool:
    """Compute dW for some pairs of channel and tap."""
    conv: Convolution = given.conv
    few: Few = given.few
    positions, pairs, most, step = (
        volume(conv.output),
        conv.channels * conv.taps,
        few.dw_columns,
        few.dw_block,
    )
    rows, splits, pitch = conv.samples * positions, max(1, pairs // most), step + TILE
    group, split = task // splits, task % splits
    first, last = split * most, pairs if split == splits - 1 else (split + 1) * most
    integers = allocate_integers(2 * rows + pitch + TILE_ROWS + 2)
    if len(integers) == 0:
        return True
    seen, lists = integers[2 * rows : 2 * rows + pitch], integers[2 * rows + pitch :]
    shifts, bases = lists[TILE_ROWS : TILE_ROWS + 1], lists[TILE_ROWS + 1 :]
    start = few.dw_start + task * few.dw_memory
    values = aligned(given.scratch[start : start + few.dw_memory])
    left = Rows(dy, lists[:TILE_ROWS], shifts, integers[:rows])
    right = Columns(values, bases, integers[rows : 2 * rows])
    _list_rows(left.steps, positions, conv.groups * conv.filters)
    for k in range(rows):
        right.places[k] = k * pitch
    shifts[0] = 0
    # Behind the matrix are the sums that do not fill a tile, and then the boxes.
    rest, boxes = values[rows * pitch :], values[rows * pitch + TILE_ROWS * TILE :]
    while first < last:
        # The last block contains the columns that do not fill a tile.
        columns = step if last - first >= step + TILE else last - first
        matrix = Matrix(values, pitch, columns, columns // TILE * TILE)
        if conv.taps == 1 and conv.x_in_place and _is_dense(conv):
            _turn(matrix, group * conv.channels + first, x, False, conv)
        else:
            _list_pairs(seen[:columns], first, conv, given.offsets)
            _copy_seen(matrix, group, first, x, boxes, seen, conv)
        _correlate(dw, matrix, rest, left, right, group, first, conv)
        first += columns
    release(integers)
    return False


def _correlate(
    dw: np.ndarray,
    matrix: Matrix,
    rest: np.ndarray,
    left: Rows,
    right: Columns,
    group: int,
    first: int,
    conv: Convolution,
) -> None:
    """Compute dW of all filters of a group for the pairs of the matrix, which begin with `first`."""
    filters, pairs, columns, whole = conv.filters, conv.channels * conv.taps, matrix.columns, matrix.whole
    for m in range(0, filters, TILE_ROWS):
        size = min(TILE_ROWS, filters - m)
        for i in range(size):
            left.starts[i] = (group * filters + m + i) * volume(conv.output)
        to = (group * filters + m) * pairs + first
        fetch_rows(dw, to + TILE_ROWS * pairs, min(TILE_ROWS, filters - m - size), pairs, columns)
        for row in range(0, len(left.steps), TERMS):
            grads = Rows(left.values, left.starts, left.shifts, left.steps[row : row + TERMS])
            seen = Columns(right.values, right.bases, right.places[row : row + TERMS])
            if whole > 0:
                right.bases[0] = 0
                add_products(dw[to:], pairs, grads, size, seen, whole, row == 0)
            if columns > whole:
                right.bases[0] = whole
                add_products(rest, TILE, grads, size, seen, TILE, row == 0)
        for i in range(size):
            for k in range(whole, columns):
                dw[to + i * pairs + k] = rest[i * TILE + k - whole]


def _copy_seen(
    matrix: Matrix,
    group: int,
    first: int,
    x: np.ndarray,
    boxes: np.ndarray,
    seen: np.ndarray,
    conv: Convolution,
) -> None:
    """Copy what windows see of X for the pairs of the matrix, which begin with `first`."""
    taps, columns, positions = conv.taps, matrix.columns, volume(conv.output)
    plane, in_place, channels = volume(conv.x.box), conv.x_in_place, conv.groups * conv.channels
    channel = group * conv.channels + first // taps
    count = (first + columns - 1) // taps - first // taps + 1
    source = x if in_place else boxes
    begin, distance = channel * plane if in_place else 0, channels * plane if in_place else count * plane
    for sample in range(conv.samples):
        for c in range(0 if in_place else count):
            embed(sample * channels + channel + c, x, boxes, (sample * count + c) * plane, conv.x)
        for p in range(positions):
            place, row = (
                begin + sample * distance + _place_of(p, conv),
                (sample * positions + p) * matrix.pitch,
            )
            copy_listed(matrix.values, row, source, place, seen, 0, columns)
