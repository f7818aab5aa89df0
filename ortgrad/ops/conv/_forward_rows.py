"""Convolutions for Numba whose tiles have a row for each filter, and columns for consecutive positions.

Nothing is transposed, and a tap is a shift of the columns; the columns behind a row of the output are of no
use. X must be in boxes, as columns are read up to a multiple of TILE.
"""

from __future__ import annotations

import numpy as np

from ortgrad.compiled.functions import (
    TILE,
    TILE_ROWS,
    Columns,
    Rows,
    add_products,
    allocate,
    allocate_integers,
    release,
)
from ortgrad.operators.compiled import Integers
from ortgrad.ops._rows import add_to
from ortgrad.ops.conv._forward_geometry import (
    CLIP,
    Geometry,
)
from ortgrad.ops.conv._geometry import COLUMNS


def convolve_rows(
    task: int,
    w: np.ndarray,
    b: np.ndarray,
    z: np.ndarray,
    y: np.ndarray,
    boxes: np.ndarray,
    geometry: Geometry,
    steps: Integers,
    activation: int,
    low: float,
    high: float,
) -> bool:
    """Compute all filters of a group at consecutive positions."""
    filters, channels, taps = geometry.filters, geometry.channels, geometry.taps
    plane, room, pitch = geometry.plane, geometry.room, geometry.box.width
    depth, height, width = geometry.output.depth, geometry.output.height, geometry.output.width
    line = (height - 1) * pitch + width
    units = (line + room - 1) // room
    first, at = task % units * room, task // units
    z_place, group, sample = at % depth, at // depth % geometry.groups, at // depth // geometry.groups
    length = min(room, line - first)
    together = geometry.together
    terms = together * taps
    sums = allocate(filters * room + TILE)
    integers = allocate_integers(terms + TILE_ROWS + 2)
    if len(sums) == 0 or len(integers) == 0:
        release(sums)
        release(integers)
        return True
    weights, starts = integers[:terms], integers[terms + 2 :]
    shifts, bases = integers[terms:], integers[terms + 1 :]
    for k in range(terms):
        weights[k] = k
    block = sample * geometry.groups + group
    base = block * channels * plane + z_place * geometry.box.height * pitch + first
    outputs = depth * height * width
    c = 0
    while c < channels:
        used = min(together, channels - c) * taps
        for m in range(0, filters, TILE_ROWS):
            rows = min(TILE_ROWS, filters - m)
            for i in range(rows):
                starts[i] = (group * filters + m + i) * channels * taps
            shifts[0] = c * taps
            for k in range(0, length, COLUMNS):
                bases[0] = base + c * plane + k
                add_products(
                    sums[m * room + k :],
                    room,
                    Rows(w, starts, shifts[:1], weights[:used]),
                    rows,
                    Columns(boxes, bases, steps[:used]),
                    min(COLUMNS, (length - k + TILE - 1) // TILE * TILE),
                    c == 0,
                )
        c += together
    for m in range(filters):
        bias = b[group * filters + m] if len(b) > 0 else 0.0
        result, p = (block * filters + m) * outputs + z_place * height * width, first
        while p < first + length:
            row, column = p // pitch, p % pitch
            if column >= width:
                p += pitch - column
                continue
            n = min(width - column, first + length - p)
            place, at = result + row * width + column, m * room + p - first
            values = sums[at : at + n]
            if len(z) > 0:
                add_to(values, z[place : place + n])
            finish(y[place : place + n], values, bias, activation, low, high)
            p += n
    release(sums)
    release(integers)
    return False


def finish(y: np.ndarray, sums: np.ndarray, bias: float, activation: int, low: float, high: float) -> None:
    """Add a bias and apply an activation, which keeps NaN."""
    if activation == 0:
        for k in range(len(y)):
            y[k] = sums[k] + bias
    elif activation == CLIP:
        for k in range(len(y)):
            value = sums[k] + bias
            value = low if value < low else value
            y[k] = high if value > high else value
    else:
        for k in range(len(y)):
            value = sums[k] + bias
            y[k] = value if value >= 0.0 else value * low
