"""Convolutions for Numba whose tiles have a row for each filter, and columns for consecutive positions.

Nothing is transposed, and a tap is a shift of the columns. The columns between rows of the output are not
used. X must be in boxes, since columns are read up to a multiple of TILE.
"""

from __future__ import annotations

import numpy as np

from ortgrad.compiled.functions import TILE, TILE_ROWS, Columns, Rows, add_products
from ortgrad.operators.compiled import Integers
from ortgrad.ops.conv._forward_geometry import Geometry, Result, write
from ortgrad.ops.conv._geometry import COLUMNS, Convolution, volume
from ortgrad.ops.conv._memory import return_memory, take_memory


def convolve_rows(
    task: int, w: np.ndarray, boxes: np.ndarray, result: Result, geometry: Geometry, steps: Integers
) -> bool:
    """Compute all filters of a group at consecutive positions."""
    conv: Convolution = geometry.conv
    filters, channels, taps, room = conv.filters, conv.channels, conv.taps, geometry.room
    height, width, pitch = conv.output.height, conv.output.width, conv.x.box.width
    line = (height - 1) * pitch + width
    units = (line + room - 1) // room
    first, at = task % units * room, task // units
    z, block = at % conv.output.depth, at // conv.output.depth
    m = block % conv.groups * filters
    length, terms = min(room, line - first), geometry.together * taps
    memory = take_memory(filters * room + TILE, terms + TILE_ROWS + 2)
    if len(memory.numbers) == 0:
        return True
    sums, weights = memory.numbers, memory.integers[:terms]
    shifts, bases, starts = (
        memory.integers[terms : terms + 1],
        memory.integers[terms + 1 : terms + 2],
        memory.integers[terms + 2 :],
    )
    for k in range(terms):
        weights[k] = k
    plane = volume(conv.x.box)
    base = block * channels * plane + z * conv.x.box.height * pitch + first
    for c in range(0, channels, geometry.together):
        used = min(geometry.together, channels - c) * taps
        left, right = Rows(w, starts, shifts, weights[:used]), Columns(boxes, bases, steps[:used])
        shifts[0] = c * taps
        for i in range(0, filters, TILE_ROWS):
            rows = min(TILE_ROWS, filters - i)
            for k in range(rows):
                starts[k] = (m + i + k) * channels * taps
            for k in range(0, length, COLUMNS):
                bases[0] = base + c * plane + k
                columns = min(COLUMNS, (length - k + TILE - 1) // TILE * TILE)
                add_products(sums[i * room + k :], room, left, rows, right, columns, c == 0)
    for i in range(filters):
        place, p = (block * filters + i) * volume(conv.output) + z * height * width, first
        while p < first + length:
            row, column = p // pitch, p % pitch
            if column >= width:
                p += pitch - column
                continue
            n, begin = min(width - column, first + length - p), i * room + p - first
            write(result, m + i, place + row * width + column, sums[begin : begin + n])
            p += n
    return_memory(memory)
    return False
