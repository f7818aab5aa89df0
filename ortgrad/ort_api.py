"""onnxruntime's C interface for custom operators, as far as ortgrad needs it.

A custom operator is a struct of function pointers that the caller fills (OrtCustomOp), and what it may
call is a table of function pointers (OrtApi). Both only ever grow at the end, which onnxruntime's own build
checks, so places in them are constants. The callbacks here speak version 17 of the interface.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_ssize_t, c_uint32, c_void_p
from typing import Any

import numpy as np

VERSION = 17
# ONNXTensorElementDataType
ELEMENT_TYPES = {"float32": 1, "int32": 6, "int64": 7, "bool": 9, "float64": 11}
_FAIL = 1
_MOST_DIMENSIONS = 64  # of a NumPy array
_READ, _WRITE = 0x100, 0x200  # of PyMemoryView_FromMemory

_memory_view = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_ssize_t, c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)

# The function pointers of OrtCustomOp in order, each with its result and arguments. None is left empty.
_CALLBACKS: dict[str, tuple[Any, ...] | None] = {
    "CreateKernel": None,
    "GetName": (c_void_p, c_void_p),
    "GetExecutionProviderType": (c_void_p, c_void_p),
    "GetInputType": (c_int, c_void_p, c_size_t),
    "GetInputTypeCount": (c_size_t, c_void_p),
    "GetOutputType": (c_int, c_void_p, c_size_t),
    "GetOutputTypeCount": (c_size_t, c_void_p),
    "KernelCompute": None,
    "KernelDestroy": (None, c_void_p),
    "GetInputCharacteristic": (c_int, c_void_p, c_size_t),
    "GetOutputCharacteristic": (c_int, c_void_p, c_size_t),
    "GetInputMemoryType": (c_int, c_void_p, c_size_t),
    "GetVariadicInputMinArity": None,
    "GetVariadicInputHomogeneity": None,
    "GetVariadicOutputMinArity": None,
    "GetVariadicOutputHomogeneity": None,
    "CreateKernelV2": (c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_void_p)),
    "KernelComputeV2": (c_void_p, c_void_p, c_void_p),
    "InferOutputShapeFn": None,
    "GetStartVersion": (c_int, c_void_p),
    "GetEndVersion": (c_int, c_void_p),
    # From version 18 on; here so that a reader of the struct finds zeros.
    "GetMayInplace": None,
    "ReleaseMayInplace": None,
    "GetAliasMap": None,
    "ReleaseAliasMap": None,
}


class CustomOp(ctypes.Structure):
    """OrtCustomOp: what onnxruntime asks an operator."""

    _fields_ = [("version", c_uint32), *((name, c_void_p) for name in _CALLBACKS)]


def callback(name: str, function: Callable[..., Any]) -> Any:
    """The function as a C function pointer for that place of CustomOp."""
    signature = _CALLBACKS[name]
    assert signature is not None
    return ctypes.CFUNCTYPE(*signature)(function)


class _Answers(ctypes.Structure):
    """Where functions of OrtApi write what they find."""

    _fields_ = [
        ("value", c_void_p),
        ("info", c_void_p),
        ("rank", c_size_t),
        ("dimensions", c_int64 * _MOST_DIMENSIONS),
        ("data", c_void_p),
    ]


_VALUE, _INFO, _RANK, _DIMENSIONS, _DATA = (
    getattr(_Answers, name).offset for name in ("value", "info", "rank", "dimensions", "data")
)


class Api:
    """OrtApi: what an operator asks onnxruntime."""

    def __init__(self, address: int) -> None:
        table = ctypes.cast(address, POINTER(c_void_p))

        def function(place: int, result: Any, *arguments: Any) -> Any:
            # These are short, so they keep the GIL.
            return ctypes.PYFUNCTYPE(result, *arguments)(table[place])

        self._create_status = function(0, c_void_p, c_int, c_char_p)
        self._error_message = function(2, c_char_p, c_void_p)
        self._data = function(51, c_void_p, c_void_p, c_void_p)
        self._rank = function(61, c_void_p, c_void_p, c_void_p)
        self._dimensions = function(62, c_void_p, c_void_p, c_void_p, c_size_t)
        self._type_and_shape = function(65, c_void_p, c_void_p, c_void_p)
        self._string = function(87, c_void_p, c_void_p, c_char_p, c_char_p, POINTER(c_size_t))
        self._input = function(90, c_void_p, c_void_p, c_size_t, c_void_p)
        self._output = function(91, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p)
        self._release_status = function(93, None, c_void_p)
        self._release_type_and_shape = function(99, None, c_void_p)

    def failure(self, text: str) -> int:
        """A status for onnxruntime that stops the run."""
        status: int = self._create_status(_FAIL, text.encode(errors="replace"))
        return status

    def attribute(self, info: int, name: str) -> str:
        """A string attribute of the node that a kernel is made for."""
        size = c_size_t()
        self._check(self._string(info, name.encode(), None, byref(size)))
        text = ctypes.create_string_buffer(size.value)
        self._check(self._string(info, name.encode(), text, byref(size)))
        return text.value.decode()

    def inputs(self, context: int, dtypes: Sequence[np.dtype]) -> list[np.ndarray]:
        """The inputs in onnxruntime's own memory, to be read while the kernel runs."""
        # For small tensors the calls below are most of the work: hence one place for all answers, and so few
        # objects of ctypes.
        answers = _Answers()
        place = ctypes.addressof(answers)
        arrays = []
        for index, dtype in enumerate(dtypes):
            self._check(self._input(context, index, place + _VALUE))
            self._check(self._type_and_shape(answers.value, place + _INFO))
            status = self._rank(answers.info, place + _RANK)
            rank = answers.rank
            if not status and rank <= _MOST_DIMENSIONS:
                status = self._dimensions(answers.info, place + _DIMENSIONS, rank)
            self._release_type_and_shape(answers.info)
            self._check(status)
            if rank > _MOST_DIMENSIONS:
                raise ValueError(f"an input has {rank} dimensions; kernels take up to {_MOST_DIMENSIONS}")
            arrays.append(self._array(answers, place, tuple(answers.dimensions[:rank]), dtype, _READ))
        return arrays

    def output(self, context: int, index: int, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """The memory of an output, for as long as the kernel runs; its values are undefined."""
        rank = len(shape)
        if rank > _MOST_DIMENSIONS:
            raise ValueError(f"a kernel asks for {rank} dimensions; there can be up to {_MOST_DIMENSIONS}")
        answers = _Answers()
        place = ctypes.addressof(answers)
        answers.dimensions[:rank] = shape
        self._check(self._output(context, index, place + _DIMENSIONS, rank, place + _VALUE))
        return self._array(answers, place, tuple(shape), dtype, _WRITE)

    def _array(
        self, answers: _Answers, place: int, shape: tuple[int, ...], dtype: np.dtype, access: int
    ) -> np.ndarray:
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return np.empty(shape, dtype)
        self._check(self._data(answers.value, place + _DATA))
        return np.ndarray(shape, dtype, _memory_view(answers.data, size, access))

    def _check(self, status: int | None) -> None:
        if status:
            text = self._error_message(status).decode(errors="replace")
            self._release_status(status)
            raise RuntimeError(text)
