"""Functions of the kernels of convolutions for memory and the cache."""

from __future__ import annotations

import numpy as np

from ortgrad.compiled.functions import TILE, prefetch


def aligned(array: np.ndarray) -> np.ndarray:
    """The array without its first elements, up to one at the beginning of a cache line."""
    return array[(TILE - array.ctypes.data // array.itemsize % TILE) % TILE :]


def fetch_rows(array: np.ndarray, begin: int, rows: int, stride: int, length: int) -> None:
    """Fetch rows into the cache: they are so far from each other that the processor does not foresee them."""
    for i in range(rows):
        for k in range(0, length, TILE):
            prefetch(array, begin + i * stride + k)
