"""Bindings that know how many bytes they feed, by which a session tells quick runs from long ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnxruntime

from ortgrad.graph.feeds import native_order

# For element types that NumPy does not know; no type is larger, but for complex numbers.
_LARGEST = 8


class Binding(onnxruntime.IOBinding):  # type: ignore[misc]
    """An onnxruntime.IOBinding; `fed_bytes` is the size of the bound inputs, None if it is not known."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        super().__init__(session)
        self._bytes: dict[str, int | None] = {}
        self.fed_bytes: int | None = 0

    def bind_cpu_input(self, name: str, arr_on_cpu: Any) -> None:
        arr_on_cpu = native_order(arr_on_cpu)
        super().bind_cpu_input(name, arr_on_cpu)
        self._add(name, getattr(arr_on_cpu, "nbytes", None))

    def bind_input(
        self,
        name: str,
        device_type: str,
        device_id: int,
        element_type: Any,
        shape: Sequence[int],
        buffer_ptr: int,
    ) -> None:
        super().bind_input(name, device_type, device_id, element_type, shape, buffer_ptr)
        size = _LARGEST if isinstance(element_type, int) else np.dtype(element_type).itemsize
        self._add(name, math.prod(shape) * size)

    def bind_ortvalue_input(self, name: str, ortvalue: onnxruntime.OrtValue) -> None:
        super().bind_ortvalue_input(name, ortvalue)
        self._add(name, size_of([ortvalue]))

    def clear_binding_inputs(self) -> None:
        super().clear_binding_inputs()
        self._bytes.clear()
        self.fed_bytes = 0

    def _add(self, name: str, size: int | None) -> None:
        if name in self._bytes and self._bytes[name] == size:
            return
        self._bytes[name] = size
        known = [found for found in self._bytes.values() if found is not None]
        self.fed_bytes = sum(known) if len(known) == len(self._bytes) else None


def size_of(values: Iterable[onnxruntime.OrtValue]) -> int | None:
    """Return the number of bytes of tensors; None if one of the values is not a tensor."""
    total = 0
    for value in values:
        if not value.is_tensor():
            return None
        total += value.tensor_size_in_bytes()
    return total
