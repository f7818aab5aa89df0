"""Kernels on onnxruntime's own memory: ortgrad's operators as native custom operators.

A Python operator of onnxruntime-extensions works on copies, and copying is most of what a small kernel
costs: 0.9 ms of ReluGrad's 1.6 for a million elements. But the library also takes native custom operators
from outside, and the struct of function pointers that makes one can be filled from Python. Kernels then
see the memory of onnxruntime itself, write their results to where they belong, and fail with a status.

ortgrad's own session runs its kernels this way. Models that are handed out keep the portable form.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ortgrad import dispatch
from ortgrad.call import Call, parse_call
from ortgrad.evaluate import declared_shapes, describe, evaluate, kernel_error
from ortgrad.ort_api import ELEMENT_TYPES, VERSION, Api, CustomOp, callback
from ortgrad.registry import CALL_ATTRIBUTE, Operator, Variant

# Where onnxruntime-extensions puts operators from outside.
DOMAIN = "ai.onnx.contrib"
_PATIENCE = 20  # milliseconds for another thread to let go of an array

_lock = threading.Lock()
_declared: dict[Operator, int] = {}
_operators: dict[int, _NativeOperator] = {}
_kernels: weakref.WeakValueDictionary[int, _Kernel] = weakref.WeakValueDictionary()
_orphans: list[_Kernel] = []  # of sessions that are not ours
_apis: dict[int, Api] = {}
_numbers = itertools.count(1)


def op_type(operator: Operator) -> str:
    """The operator's name in DOMAIN."""
    return f"{operator.domain}.{operator.name}"


def declare(operators: Iterable[Operator]) -> int:
    """Have library registrations from now on bring these operators; returns how many there are by now.

    None are declared where the library has no way in for them.
    """
    with _lock:
        for operator in operators if dispatch.takes_native_operators() else ():
            if operator not in _declared:
                _declared[operator] = len(_declared)
                for variant in operator.variants():
                    dispatch.add_native_operator(_NativeOperator(operator, variant).address)
        return len(_declared)


def is_declared(operator: Operator, count: int) -> bool:
    """Whether it was among the first `count` operators to be declared."""
    return _declared.get(operator, count) < count


class _NativeOperator:
    """One operator for one combination of element types. Lives for ever: sessions refer to its struct."""

    def __init__(self, operator: Operator, variant: Variant) -> None:
        self.operator = operator
        self.name = ctypes.create_string_buffer(op_type(operator).encode())
        self.inputs = [np.dtype(t) for t in variant.inputs]
        self.outputs = [np.dtype(t) for t in variant.outputs]
        self._struct = CustomOp(VERSION, **_callbacks())
        self.address = ctypes.addressof(self._struct)
        _operators[self.address] = self


@functools.cache
def _callbacks() -> dict[str, int]:
    """The addresses of all operators' callbacks by name."""
    functions: dict[str, Callable[..., Any]] = {
        "GetName": lambda op: ctypes.addressof(_operators[op].name),
        "GetExecutionProviderType": lambda op: None,
        "GetInputType": lambda op, i: ELEMENT_TYPES[_operators[op].inputs[i].name],
        "GetInputTypeCount": lambda op: len(_operators[op].inputs),
        "GetOutputType": lambda op, i: ELEMENT_TYPES[_operators[op].outputs[i].name],
        "GetOutputTypeCount": lambda op: len(_operators[op].outputs),
        "GetInputCharacteristic": lambda op, i: 0,
        "GetOutputCharacteristic": lambda op, i: 0,
        "GetInputMemoryType": lambda op, i: 0,
        "GetStartVersion": lambda op: 1,
        "GetEndVersion": lambda op: 1,
        "CreateKernelV2": _create_kernel,
        "KernelComputeV2": _compute,
    }
    thunks = {name: callback(name, function) for name, function in functions.items()}
    # Sessions may outlive this module when the interpreter ends, so nothing here is ever freed.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object((thunks, _operators)))
    addresses = {name: ctypes.cast(thunk, ctypes.c_void_p).value for name, thunk in thunks.items()}
    # And that is why the end of a kernel calls no Python, but a C function that does nothing.
    addresses["KernelDestroy"] = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value
    return {name: address for name, address in addresses.items() if address is not None}


def _create_kernel(op: int, api_address: int, info: int, kernel_out: Any) -> int | None:
    api = _apis.get(api_address) or _apis.setdefault(api_address, Api(api_address))
    try:
        native = _operators[op]
        kernel = _Kernel(api, native, parse_call(native.operator, api.attribute(info, CALL_ATTRIBUTE)))
    except Exception as error:
        return api.failure(str(error))
    monitor = dispatch.find_monitor(kernel.call.session)
    (_orphans if monitor is None else monitor.kept).append(kernel)
    number = next(_numbers)
    _kernels[number] = kernel
    kernel_out[0] = number
    return None


def _compute(number: int, context: int) -> int | None:
    try:
        return _kernels[number].run(context)
    except BaseException as error:
        # Nobody would see it, and the run would go on with whatever is in the outputs' memory.
        api = next(iter(_apis.values()))
        return api.failure(f"{type(error).__name__} around a kernel of ortgrad: {error}")


class _Kernel:
    """What runs one node of one session."""

    def __init__(self, api: Api, native: _NativeOperator, call: Call) -> None:
        self.call = call
        self._api = api
        self._native = native

    def run(self, context: int) -> int | None:
        """Fill the node's outputs; a failure is reported, and returned as a status."""
        try:
            self._run(context)
        except BaseException as error:
            reason = error
        else:
            return None
        # Frames hold arrays, and the memory of these ends with this call.
        _forget_frames(reason)
        feed = [np.array(array) for array in self._inputs(context)]
        if isinstance(reason, Exception):
            reason = self._fail_again(feed) or reason
        operator = self._native.operator
        shown = kernel_error(operator, self.call.node, describe(operator, feed), reason)
        dispatch.report(shown, dispatch.find_monitor(self.call.session))
        return self._api.failure(str(shown))

    def _run(self, context: int) -> None:
        inputs = self._inputs(context)
        outputs: dict[int, np.ndarray] = {}

        def empty(i: int, shape: Sequence[int]) -> np.ndarray:
            outputs[i] = self._api.output(context, i, shape, self._native.outputs[i])
            return outputs[i]

        shapes = declared_shapes(self.call, inputs)
        values = evaluate(self.call, inputs, self._native.outputs, shapes, empty)
        for i, value in enumerate(values):
            if value is None:
                empty(i, (0,))
            elif value is not outputs.get(i):
                np.copyto(empty(i, value.shape), value)
        value = None
        values.clear()
        inputs += outputs.values()
        outputs.clear()
        _require_sole_reference(inputs)

    def _inputs(self, context: int) -> list[np.ndarray]:
        return self._api.inputs(context, self._native.inputs)

    def _fail_again(self, feed: list[np.ndarray]) -> Exception | None:
        """The same failure on copies, which a debugger can look at for as long as it likes."""
        dtypes = self._native.outputs
        try:
            shapes = declared_shapes(self.call, feed)
            evaluate(self.call, feed, dtypes, shapes, lambda i, shape: np.empty(shape, dtypes[i]))
        except Exception as error:
            return error
        return None


def _forget_frames(error: BaseException) -> None:
    chain = [error]
    for link in chain:
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        chain += [e for e in (link.__cause__, link.__context__) if e is not None and e not in chain]


def _is_shared(arrays: list[np.ndarray]) -> bool:
    """Whether anybody but this list refers to one of the arrays."""
    for array in arrays:  # noqa: SIM110 - a generator would cost as much as a small kernel
        if sys.getrefcount(array) > _SOLE:
            return True
    return False


def _sole_reference_count() -> int:
    for array in [np.empty(0)]:
        count = sys.getrefcount(array)
    return count


_SOLE = _sole_reference_count()


def _require_sole_reference(arrays: list[np.ndarray]) -> None:
    """Raise if somebody else still holds one of the arrays: it is about to lose its memory."""
    for _ in range(_PATIENCE):
        if not _is_shared(arrays):
            return
        time.sleep(1e-3)
    gc.collect()
    if _is_shared(arrays):
        raise TypeError(
            "the kernel kept an array that it was given, or a view of one; "
            "its memory ends with the call, so keep a copy"
        )
