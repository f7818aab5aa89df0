"""Memory for arrays that stay where they are: parameters, gradients and optimizer state.

Sessions are bound to the addresses of these arrays once, and optimizers pass over all arrays of one element
type as over a single one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnxruntime

from ortgrad.training.checkpoint.state import ELEMENT_TYPES

_ALIGNMENT = 64


class Span(NamedTuple):
    """The place of an array in the memory of its element type, in elements."""

    dtype: np.dtype
    start: int
    stop: int


class Arena:
    """Arrays by name, in one block of memory for each element type; all elements are 0 at first.

    Each array begins at a multiple of 64 bytes. The elements between two arrays are never used.

    >>> arena = Arena({"w": ((2, 3), np.dtype(np.float32)), "b": ((3,), np.dtype(np.float32))})
    >>> arena["w"][:] = 1
    >>> arena.flats[np.dtype(np.float32)].sum()
    np.float32(6.0)
    """

    def __init__(self, layout: Mapping[str, tuple[Sequence[int], np.dtype]]) -> None:
        ends: dict[np.dtype, int] = {}
        self.spans: dict[str, Span] = {}
        for name, (shape, dtype) in layout.items():
            start, size = ends.get(dtype, 0), math.prod(shape)
            self.spans[name] = Span(dtype, start, start + size)
            step = _ALIGNMENT // dtype.itemsize
            ends[dtype] = start + -(-size // step) * step
        self._layout = {name: (tuple(shape), dtype) for name, (shape, dtype) in layout.items()}
        self.flats = {dtype: _aligned_zeros(size, dtype) for dtype, size in ends.items()}
        self.arrays = {
            name: self.flats[span.dtype][span.start : span.stop].reshape(self._layout[name][0])
            for name, span in self.spans.items()
        }

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Arena:
        """Return an arena with copies of these arrays."""
        arena = cls({name: (array.shape, array.dtype) for name, array in arrays.items()})
        for name, array in arrays.items():
            arena.arrays[name][...] = array
        return arena

    def like(self) -> Arena:
        """Return an arena for arrays of the same shapes and types."""
        return Arena(self._layout)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arrays


def _aligned_zeros(count: int, dtype: np.dtype) -> np.ndarray:
    size = count * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype)


def as_ort_value(array: np.ndarray) -> onnxruntime.OrtValue:
    """Return an OrtValue on the memory of an array; an array without elements is copied."""
    number = next((number for number, dtype in ELEMENT_TYPES.items() if dtype == array.dtype), None)
    if array.dtype.kind == "V" and number is not None:  # an element type that NumPy itself does not have
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), number)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)
