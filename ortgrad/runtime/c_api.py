"""onnxruntime's C interface for custom operators, as far as ortgrad needs it.

A custom operator is a struct of function pointers (OrtCustomOp), and what it may call is a table of function
pointers (OrtApi). Both only ever grow at the end, which onnxruntime's own build checks, so places in them are
constants. The callbacks here speak version 16 of the interface, the first in which kernels can fail.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any

import numpy as np
import onnxruntime

VERSION = 16
# ONNXTensorElementDataType
ELEMENT_TYPES = {"float32": 1, "int32": 6, "int64": 7, "string": 8, "bool": 9, "float64": 11}
_FAIL = 1
_MOST_DIMENSIONS = 64  # of a NumPy array
_TABLE_SIZE = 512  # more functions than OrtApi has

# The function pointers of OrtCustomOp in order.
_CALLBACKS = (
    "CreateKernel",
    "GetName",
    "GetExecutionProviderType",
    "GetInputType",
    "GetInputTypeCount",
    "GetOutputType",
    "GetOutputTypeCount",
    "KernelCompute",
    "KernelDestroy",
    "GetInputCharacteristic",
    "GetOutputCharacteristic",
    "GetInputMemoryType",
    "GetVariadicInputMinArity",
    "GetVariadicInputHomogeneity",
    "GetVariadicOutputMinArity",
    "GetVariadicOutputHomogeneity",
    "CreateKernelV2",
    "KernelComputeV2",
    "InferOutputShapeFn",
    "GetStartVersion",
    "GetEndVersion",
    "GetMayInplace",
    "ReleaseMayInplace",
    "GetAliasMap",
    "ReleaseAliasMap",
)
CREATE_KERNEL = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)
# The kernel is a Python object, whose address CreateKernelV2 gave to onnxruntime.
COMPUTE = ctypes.CFUNCTYPE(c_void_p, ctypes.py_object, c_void_p)
GET_MEMORY_TYPE = ctypes.CFUNCTYPE(c_int, c_void_p, c_size_t)


class CustomOp(ctypes.Structure):
    """OrtCustomOp: what onnxruntime asks an operator."""

    _fields_ = [("version", c_uint32), *((name, c_void_p) for name in _CALLBACKS)]


def address_of(function: Any) -> int:
    """The address of a C function, for a place in CustomOp or OrtApi."""
    address = ctypes.cast(function, c_void_p).value
    assert address is not None
    return address


def list_operators(library: ctypes.PyDLL) -> list[tuple[str, int]]:
    """The domains of the operators that a library registers, and the addresses of their structs.

    They are asked for as onnxruntime asks for them: with a table of functions that take them. The library
    must have been registered with onnxruntime itself before, whose table it keeps for later use.
    """
    found: list[tuple[str, int]] = []
    domains: list[str] = []

    def create_domain(name: bytes, handle: Any) -> None:
        domains.append(name.decode())
        handle[0] = len(domains)

    def add(handle: int, operator: int) -> None:
        found.append((domains[handle - 1], operator))

    # It may be asked to release a domain when the process ends, by when Python is gone.
    harmless = address_of(ctypes.pythonapi.Py_IsInitialized)
    functions = {
        26: ctypes.CFUNCTYPE(c_void_p, c_char_p, POINTER(c_void_p))(create_domain),
        27: ctypes.CFUNCTYPE(c_void_p, c_void_p, c_void_p)(add),
        28: ctypes.CFUNCTYPE(c_void_p, c_void_p, c_void_p)(lambda options, domain: None),
    }
    table = (c_void_p * _TABLE_SIZE)(*[harmless] * _TABLE_SIZE)
    for place, function in functions.items():
        table[place] = address_of(function)
    version = ctypes.create_string_buffer(onnxruntime.__version__.encode())
    get_table = ctypes.CFUNCTYPE(c_void_p, c_uint32)(lambda _: ctypes.addressof(table))
    get_version = ctypes.CFUNCTYPE(c_void_p)(lambda: ctypes.addressof(version))
    base = (c_void_p * 2)(address_of(get_table), address_of(get_version))
    register = library.RegisterCustomOps
    register.argtypes, register.restype = [c_void_p, c_void_p], c_void_p
    if register(None, ctypes.addressof(base)):
        raise OSError("the library does not list its operators")
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(table))
    return found


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


class Memory:
    """Memory of onnxruntime's as NumPy sees it, while a kernel runs. Arrays refer to it as their base."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, shape: tuple[int, ...], dtype: np.dtype, read_only: bool) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str,
            "data": (address, read_only),
        }

    def forget(self) -> None:
        """Make no more arrays of it."""
        self.__array_interface__ = {}


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

    def attribute(self, info: int, name: str) -> bytes:
        """A string attribute of the node that a kernel is made for."""
        size = c_size_t()
        self._check(self._string(info, name.encode(), None, byref(size)))
        text = ctypes.create_string_buffer(size.value)
        self._check(self._string(info, name.encode(), text, byref(size)))
        return text.raw[: size.value - 1]

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
            arrays.append(self._array(answers, place, tuple(answers.dimensions[:rank]), dtype, True))
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
        return self._array(answers, place, tuple(shape), dtype, False)

    def _array(
        self, answers: _Answers, place: int, shape: tuple[int, ...], dtype: np.dtype, read_only: bool
    ) -> np.ndarray:
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return np.empty(shape, dtype)
        self._check(self._data(answers.value, place + _DATA))
        return np.asarray(Memory(answers.data, shape, dtype, read_only))

    def _check(self, status: int | None) -> None:
        if status:
            text = self._error_message(status).decode(errors="replace")
            self._release_status(status)
            raise RuntimeError(text)
