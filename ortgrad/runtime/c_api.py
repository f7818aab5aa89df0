"""The parts of onnxruntime's C API for custom operators that ortgrad needs.

A custom operator is a struct of function pointers (OrtCustomOp); it calls onnxruntime through a table of
function pointers (OrtApi). Both grow only at the end, which onnxruntime's own build checks, so the indices
are constants. The callbacks implement version 16 of the API, the first in which kernels can fail.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime

from ortgrad.compiled.layout import PRODUCT_KINDS
from ortgrad.threads import lazy

VERSION = 16
# ONNXTensorElementDataType
ELEMENT_TYPES = {"float32": 1, "int32": 6, "int64": 7, "string": 8, "bool": 9, "float64": 11}
_UNDEFINED = 0  # what is no tensor, and what a node leaves out
_FAIL = 1
_DEVICE, _DEFAULT_MEMORY = 0, 0  # OrtAllocatorType, OrtMemType
_INT, _FLOAT = 1, 3  # OrtOpAttrType
_OPERATOR_VERSION = 13
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
# The kernel is a Python object whose address CreateKernelV2 returned to onnxruntime.
COMPUTE = ctypes.CFUNCTYPE(c_void_p, ctypes.py_object, c_void_p)
GET_MEMORY_TYPE = ctypes.CFUNCTYPE(c_int, c_void_p, c_size_t)


class CustomOp(ctypes.Structure):
    """OrtCustomOp: the functions of an operator that onnxruntime calls."""

    _fields_ = [("version", c_uint32), *((name, c_void_p) for name in _CALLBACKS)]


def address_of(function: Any) -> int:
    """Return the address of a C function, for a field of CustomOp or OrtApi."""
    address = ctypes.cast(function, c_void_p).value
    assert address is not None
    return address


def element_name(element: int) -> str:
    """Return the name of an element type of onnxruntime, for error messages."""
    names = {number: f"a tensor of {name}" for name, number in ELEMENT_TYPES.items()}
    return names.get(element, f"a tensor of type {element}" if element else "no tensor")


def constant_function(number: int) -> Any:
    """Return a C function that returns a number, whatever its arguments are. No bytecode runs in it."""
    return ctypes.CFUNCTYPE(c_int64)(itertools.repeat(number).__next__)


def list_operators(library: ctypes.PyDLL) -> list[tuple[str, int]]:
    """Return the domain and the address of the struct of every operator that a library registers.

    The library's RegisterCustomOps is called with a table whose functions collect the operators. The library
    must have been registered with onnxruntime before, because it keeps the first table that it is given.
    """
    found: list[tuple[str, int]] = []
    domains: list[str] = []

    def create_domain(name: bytes, handle: Any) -> None:
        domains.append(name.decode())
        handle[0] = len(domains)

    def add(handle: int, operator: int) -> None:
        found.append((domains[handle - 1], operator))

    # The library may release a domain when the process ends, after Python has been finalized.
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
    """Memory for the results of OrtApi functions."""

    _fields_ = [
        ("value", c_void_p),
        ("info", c_void_p),
        ("element", c_int),
        ("rank", c_size_t),
        ("dimensions", c_int64 * _MOST_DIMENSIONS),
        ("data", c_void_p),
    ]


_VALUE, _INFO, _ELEMENT, _RANK, _DIMENSIONS, _DATA = (
    getattr(_Answers, name).offset for name in ("value", "info", "element", "rank", "dimensions", "data")
)


class Memory:
    """Memory of onnxruntime, valid while a kernel runs; the `base` of the arrays that view it."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, shape: tuple[int, ...], dtype: np.dtype, read_only: bool) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str,
            "data": (address, read_only),
        }

    def forget(self) -> None:
        """Prevent further arrays from being made of the memory."""
        self.__array_interface__ = {}


@dataclass(eq=False)
class Products:
    """onnxruntime's operators for compiled code, one for each of PRODUCT_KINDS; released with this object."""

    element: int
    operators: list[int] = field(default_factory=list)


def _release_all(release: Callable[[int], None], operators: list[int]) -> None:
    for operator in operators:
        release(operator)


class Api:
    """OrtApi: the functions of onnxruntime that an operator calls."""

    def __init__(self, address: int) -> None:
        self.address = address
        table = ctypes.cast(address, POINTER(c_void_p))

        def function(place: int, result: Any, *arguments: Any) -> Any:
            # PYFUNCTYPE keeps the GIL: the functions are short.
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
        self._cpu_memory = function(69, c_void_p, c_int, c_int, c_void_p)
        self._create_attribute = function(211, c_void_p, c_char_p, c_void_p, c_int, c_int, c_void_p)
        self._release_attribute = function(212, None, c_void_p)
        self._create_operator = function(
            *(213, c_void_p, c_void_p, c_char_p, c_char_p, c_int, POINTER(c_char_p), POINTER(c_int), c_int),
            *(POINTER(c_void_p), c_int, c_int, c_int, c_void_p),
        )
        self._release_operator = function(215, None, c_void_p)
        self._as_tensor = function(55, c_void_p, c_void_p, c_void_p)
        self._element_type = function(60, c_void_p, c_void_p, c_void_p)
        self._release_type = function(98, None, c_void_p)
        self._input_count = function(230, c_void_p, c_void_p, c_void_p)
        self._output_count = function(231, c_void_p, c_void_p, c_void_p)
        self._input_type = function(234, c_void_p, c_void_p, c_size_t, c_void_p)
        self._output_type = function(235, c_void_p, c_void_p, c_size_t, c_void_p)
        self._node_name = function(244, c_void_p, c_void_p, c_char_p, POINTER(c_size_t))

    def failure(self, text: str) -> int:
        """Return a new status with which a kernel makes onnxruntime stop the run."""
        status: int = self._create_status(_FAIL, text.encode(errors="replace"))
        return status

    def attribute(self, info: int, name: str) -> bytes:
        """Return a string attribute of the node for which a kernel is being created."""
        size = c_size_t()
        self._check(self._string(info, name.encode(), None, byref(size)))
        text = ctypes.create_string_buffer(size.value)
        self._check(self._string(info, name.encode(), text, byref(size)))
        return text.raw[: size.value - 1]

    def node_name(self, info: int) -> str:
        """Return the name of the node for which a kernel is being created."""
        size = c_size_t()
        self._check(self._node_name(info, None, byref(size)))
        text = ctypes.create_string_buffer(size.value)
        self._check(self._node_name(info, text, byref(size)))
        return text.raw[: max(size.value - 1, 0)].decode(errors="replace")

    def input_types(self, info: int) -> list[int]:
        """Return the element types of the inputs of the node for which a kernel is being created.

        The type is 0 where the input is no tensor, or is left out.
        """
        return self._types(info, self._input_count, self._input_type)

    def output_types(self, info: int) -> list[int]:
        """Return the element types of the outputs, like those of the inputs."""
        return self._types(info, self._output_count, self._output_type)

    def _types(self, info: int, count: Any, type_of: Any) -> list[int]:
        number = c_size_t()
        self._check(count(info, byref(number)))
        return [self._declared_type(info, i, type_of) for i in range(number.value)]

    def _declared_type(self, info: int, index: int, type_of: Any) -> int:
        type_, tensor, element = c_void_p(), c_void_p(), c_int(_UNDEFINED)
        try:
            self._check(type_of(info, index, byref(type_)))
        except RuntimeError:
            return _UNDEFINED  # left out: a value without a name has no type
        try:
            # Owned by the type. There is none for what is no tensor.
            self._check(self._as_tensor(type_, byref(tensor)))
            if tensor.value is not None:
                self._check(self._element_type(tensor, byref(element)))
        finally:
            self._release_type(type_)
        return element.value

    @lazy
    def memory(self) -> int:
        """The address of the OrtMemoryInfo of ordinary memory."""
        memory = c_void_p()
        self._check(self._cpu_memory(_DEVICE, _DEFAULT_MEMORY, byref(memory)))
        assert memory.value is not None
        return memory.value

    def products(self, info: int, element: str) -> Products:
        """Return onnxruntime's products for the node for which a kernel is being created."""
        products = Products(ELEMENT_TYPES[element])
        weakref.finalize(products, _release_all, self._release_operator, products.operators).atexit = False
        for kind in PRODUCT_KINDS:
            if kind == "turn":
                operator = self._operator(info, "Transpose", products.element, 1, {})
            else:
                operator = self._gemm(info, products.element, kind)
            products.operators.append(operator)
        return products

    def _gemm(self, info: int, element: int, transposed: str) -> int:
        """Return a new Gemm of two matrices."""
        integers = {b"transA": transposed in ("left", "both"), b"transB": transposed in ("right", "both")}
        numbers: dict[bytes, tuple[int, Any]] = {n: (_INT, c_int64(v)) for n, v in integers.items()}
        numbers |= {name: (_FLOAT, c_float(1)) for name in (b"alpha", b"beta")}
        return self._operator(info, "Gemm", element, 2, numbers)

    def _operator(
        self, info: int, name: str, element: int, inputs: int, numbers: dict[bytes, tuple[int, Any]]
    ) -> int:
        """Return a new operator of onnxruntime with one output."""
        attributes = (c_void_p * len(numbers))()
        operator = c_void_p()
        try:
            for i, (key, (type_, value)) in enumerate(numbers.items()):
                place = ctypes.addressof(attributes) + i * ctypes.sizeof(c_void_p)
                self._check(self._create_attribute(key, byref(value), 1, type_, place))
            names, types = (c_char_p * 1)(b"T"), (c_int * 1)(element)
            self._check(
                self._create_operator(
                    *(info, name.encode(), b"", _OPERATOR_VERSION, names, types, 1),
                    *(attributes, len(attributes), inputs, 1, byref(operator)),
                )
            )
        finally:
            for attribute in filter(None, attributes):
                self._release_attribute(attribute)
        assert operator.value is not None
        return operator.value

    def inputs(self, context: int, dtypes: Sequence[np.dtype]) -> list[np.ndarray]:
        """Return read-only views of the inputs in onnxruntime's own memory, valid while the kernel runs."""
        # For small tensors these calls dominate the run time, so all results share one struct and few ctypes
        # objects are created.
        answers = _Answers()
        place = ctypes.addressof(answers)
        arrays = []
        for index, dtype in enumerate(dtypes):
            self._check(self._input(context, index, place + _VALUE))
            if not answers.value:
                raise ValueError(f"input {index} is missing")
            self._check(self._type_and_shape(answers.value, place + _INFO))
            status = self._element_type(answers.info, place + _ELEMENT)
            status = status or self._rank(answers.info, place + _RANK)
            rank = answers.rank
            if not status and rank <= _MOST_DIMENSIONS:
                status = self._dimensions(answers.info, place + _DIMENSIONS, rank)
            self._release_type_and_shape(answers.info)
            self._check(status)
            if answers.element != ELEMENT_TYPES[dtype.name]:
                raise TypeError(f"input {index} is {element_name(answers.element)}, not of {dtype}")
            if rank > _MOST_DIMENSIONS:
                raise ValueError(f"an input has {rank} dimensions; kernels take up to {_MOST_DIMENSIONS}")
            arrays.append(self._array(answers, place, tuple(answers.dimensions[:rank]), dtype, True))
        return arrays

    def output(self, context: int, index: int, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """Return an uninitialized array in the memory of an output, valid while the kernel runs."""
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
