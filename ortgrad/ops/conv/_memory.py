"""What kernels of convolutions share: bundles of tensors, memory and the cache, boxes, and tiles of sums."""

from __future__ import annotations

from typing import NamedTuple

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
    prefetch,
    release,
)
from ortgrad.ops.conv._geometry import Frame, volume

# Clearing a whole box is faster than clearing the ends of its rows, unless the rows are longer than this.
_LONG_ROW = 256


class Given(NamedTuple):
    """The inputs of ConvGrad."""

    dy: np.ndarray
    x: np.ndarray
    w: np.ndarray


class Gradients(NamedTuple):
    """The outputs of ConvGrad."""

    dx: np.ndarray
    dw: np.ndarray
    db: np.ndarray


class Memory(NamedTuple):
    """The memory of a task."""

    numbers: np.ndarray
    integers: np.ndarray


def take_memory(numbers: int, integers: int) -> Memory:
    """Allocate memory for a task; both arrays are empty if there is none."""
    memory = Memory(allocate(numbers), allocate_integers(integers))
    if len(memory.numbers) == 0 or len(memory.integers) == 0:
        return_memory(memory)
        return Memory(memory.numbers[:0], memory.integers[:0])
    return memory


def return_memory(memory: Memory) -> None:
    """Release the memory of a task."""
    release(memory.numbers)
    release(memory.integers)


def aligned(array: np.ndarray) -> np.ndarray:
    """Return the array without its first elements, up to one at the beginning of a cache line."""
    return array[(TILE - array.ctypes.data // array.itemsize % TILE) % TILE :]


def fetch_rows(array: np.ndarray, begin: int, rows: int, stride: int, length: int) -> None:
    """Fetch rows into the cache that are too far from each other for the processor to predict."""
    for i in range(rows):
        for k in range(0, length, TILE):
            prefetch(array, begin + i * stride + k)


def embed(channel: int, source: np.ndarray, boxes: np.ndarray, place: int, frame: Frame) -> None:
    """Copy a channel into its box, which begins at a place."""
    depth, height, width = frame.size.depth, frame.size.height, frame.size.width
    pitch = frame.box.width
    before = min(frame.head.width, pitch)
    count = min(width, pitch - before)
    is_cleared = pitch <= _LONG_ROW
    if is_cleared:
        clear(boxes, place, volume(frame.box))
    start = place
    for a in range(frame.box.depth):
        z = a - frame.head.depth
        for b in range(frame.box.height):
            y = b - frame.head.height
            inside = z >= 0 and z < depth and y >= 0 and y < height
            if not is_cleared:
                clear(boxes, start, before if inside else pitch)
                clear(boxes, start + before + count, pitch - before - count)
            if inside:
                from_row = ((channel * depth + z) * height + y) * width
                copy_elements(boxes, start + before, source, from_row, count)
            start += pitch


def are_finite(values: np.ndarray) -> bool:
    """Return whether there are neither NaN nor infinities."""
    total = 0.0
    for k in range(len(values)):
        total += values[k] * 0.0
    return total == 0.0


def add_tiles(sums: np.ndarray, left: Rows, rows: int, right: Columns, columns: int, fresh: bool) -> None:
    """Add products to any number of consecutive rows."""
    for i in range(0, rows, TILE_ROWS):
        tile = Rows(left.values, left.starts[i:], left.shifts, left.steps)
        add_products(sums[i * columns :], columns, tile, min(TILE_ROWS, rows - i), right, columns, fresh)
