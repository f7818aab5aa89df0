"""Python kernels that onnxruntime calls on its own memory, and that report failures as a status.

An operator's struct of function pointers is filled from Python (`fill`). CreateKernelV2 creates a kernel per
node, KernelComputeV2 runs it. Both are called as `ortgrad.runtime.entrance` describes, so that a signal is
never lost or taken for success. In a session of ortgrad, a failing kernel passes its exception to the
session; in any other session, onnxruntime raises its own exception with the same text.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import operator
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from ortgrad.compiled import layout, machine_code
from ortgrad.errors import ModelError, NodeError, OrtgradError, RegistrationError
from ortgrad.lowering.fusion.kernel import fused_call, unread_operator
from ortgrad.operators.call import Call, parse_call
from ortgrad.operators.compiled import CompiledKernel
from ortgrad.operators.declaration import CALL_ATTRIBUTE, INTERNAL_DOMAIN, Operator, Variant
from ortgrad.runtime import entrance, subnormals
from ortgrad.runtime.c_api import (
    COMPUTE,
    CREATE_KERNEL,
    ELEMENT_TYPES,
    GET_MEMORY_TYPE,
    VERSION,
    Api,
    CustomOp,
    Memory,
    Products,
    address_of,
    constant_function,
    element_name,
)
from ortgrad.runtime.entrance import Entrances, is_interruption, raise_after_return
from ortgrad.runtime.evaluate import declared_shapes, describe, evaluate, kernel_error
from ortgrad.runtime.plans import State
from ortgrad.threads import call_elsewhere

_NO_ROOM = "RecursionError around a kernel of ortgrad: there is no room left to report more"
_SPARES = 16
# Seconds between looks at whether another thread has let go of an array. On a busy machine it may have to
# wait for a processor.
_PAUSES = (*[1e-3] * 20, *[2e-2] * 50)

_apis: dict[int, Api] = {}
_operators: dict[int, NativeOperator] = {}
_others: list[_Kernel] = []  # kernels of plain sessions, whose end is not known
# Statuses made in advance, for when no function can be called any more.
_spares: list[Callable[[], int | None]] = []
_local = threading.local()
# Whether a failed kernel is being run again. Kernels of sessions inside it are then not run again.
_failing_again: ContextVar[bool] = ContextVar("failing again", default=False)


class Owner(Protocol):
    """A session that keeps its kernels alive and receives their failures."""

    kernels: list[object]
    compiles: bool
    flushes: bool

    def kernel_failed(self, error: BaseException) -> None: ...


class NativeOperator:
    """An operator for one combination of element types."""

    def __init__(self, operator: Operator, variant: Variant) -> None:
        self.operator = operator
        self.inputs = [np.dtype(t) for t in variant.inputs]
        self.outputs = [np.dtype(t) for t in variant.outputs]

    def read(self, text: bytes) -> tuple[NativeOperator, Call]:
        """Return the call of a node, and the operator that computes it."""
        return self, parse_call(self.operator, text)


class FusedOperator(NativeOperator):
    """The operator of fused nodes, each of which has its own inputs, outputs and program."""

    def __init__(self, element: str) -> None:
        super().__init__(unread_operator(element), Variant((), ()))
        self._element = element

    def read(self, text: bytes) -> tuple[NativeOperator, Call]:
        call = fused_call(text, self._element)
        inputs, outputs = (
            tuple(parameter.type for parameter in parameters)
            for parameters in (call.operator.inputs, call.operator.outputs)
        )
        return NativeOperator(call.operator, Variant(inputs, outputs)), call


def fill(struct: CustomOp, native: NativeOperator) -> None:
    """Make onnxruntime call the operator's kernel. The name and types in the struct are not changed."""
    _operators[ctypes.addressof(struct)] = native
    struct.version = VERSION
    callbacks = _callbacks()
    if isinstance(native, FusedOperator):
        callbacks = callbacks | _variadic_callbacks()
    for name, address in callbacks.items():
        setattr(struct, name, address)


@contextmanager
def owned_by(owner: Owner) -> Iterator[None]:
    """Within this context, kernels that onnxruntime creates on this thread belong to the owner."""
    before = getattr(_local, "owner", None)
    _local.owner = owner
    try:
        yield
    finally:
        _local.owner = before


def compile_kernels(owner: Owner) -> None:
    """Compile what the owner's kernels need, all together, after onnxruntime has created them."""
    kernels = [kernel for kernel in owner.kernels if isinstance(kernel, _Kernel) and kernel.to_compile]
    if not kernels:
        return
    machine_code.compile_all([kernel.to_compile for kernel in kernels if kernel.to_compile])

    def load() -> None:
        for kernel in kernels:
            kernel.compile()

    # LLVM and Numba are not to be interrupted by signals.
    call_elsewhere(load)


@functools.cache
def _callbacks() -> dict[str, int]:
    """Return the addresses of the functions in a struct."""
    entrances = Entrances()
    entrances.refill(functools.partial(_creation_entrance, entrances))
    functions = {
        "CreateKernelV2": CREATE_KERNEL(entrances),
        "KernelComputeV2": _python_compute(),
        # Returns 0, which stands for CPU memory.
        "GetInputMemoryType": GET_MEMORY_TYPE(operator.is_),
        # Sessions may be destroyed after Python is finalized, so this is a C function without effect.
        "KernelDestroy": ctypes.pythonapi.Py_IsInitialized,
    }
    # For the same reason, these objects are never freed.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object((functions, entrances, _operators)))
    addresses = {name: address_of(function) for name, function in functions.items()}
    entry = machine_code.entry()
    if entry is not None:
        addresses["KernelComputeV2"] = entry.compute
    return addresses


@functools.cache
def _variadic_callbacks() -> dict[str, int]:
    """Return the functions of an operator with any number of inputs, of any types, and of outputs."""
    undefined, one, variadic = (constant_function(number) for number in (0, 1, 2))
    functions = {
        "GetInputCharacteristic": variadic,
        "GetInputType": undefined,
        "GetVariadicInputMinArity": one,
        "GetVariadicInputHomogeneity": undefined,
        "GetOutputCharacteristic": variadic,
        "GetVariadicOutputMinArity": one,
        "GetVariadicOutputHomogeneity": one,
    }
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(functions))
    return {name: address_of(function) for name, function in functions.items()}


@functools.cache
def _python_compute() -> Any:
    return COMPUTE(operator.getitem)


def _creation_entrance(entrances: Entrances) -> Callable[..., Any]:
    """Return a C function for CreateKernelV2: it puts the four arguments into a list and resumes a generator.

    ctypes calls `from_param` with every argument of a foreign function, then the function, which has no
    effect here, and then `restype` with its result. What that returns is the result of the call.
    """
    arguments: list[int] = []

    def create(interruption: BaseException | None) -> Callable[[], Any]:
        _make_kernel(*arguments)
        return _succeeded if interruption is None else _interrupted_creation(interruption)

    refill = functools.partial(entrances.refill, functools.partial(_creation_entrance, entrances))
    failed = functools.partial(_failed_creation, arguments)
    waiting = entrance.serve(arguments, refill, create, failed, _spares)
    function = ctypes.PYFUNCTYPE(ctypes.c_int)(("Py_IsInitialized", ctypes.pythonapi))
    function.argtypes = [SimpleNamespace(from_param=arguments.append)] * 4  # type: ignore[list-item]
    function.restype = entrance.compose(entrance.resume(waiting), entrance.call)
    return function


def _interrupted_creation(error: BaseException) -> Callable[[], Any]:
    """Arrange for the exception to be raised when the session has been created."""
    owner: Owner | None = getattr(_local, "owner", None)
    if owner is None:
        return raise_after_return(error)
    owner.kernel_failed(error)
    return _succeeded


def _failed_creation(arguments: list[int], error: BaseException) -> Callable[[], int | None]:
    """Return the status for an exception that ended the creation of a kernel.

    After an exception of a signal handler, the kernel is created all the same: a plain session that fails
    would raise its own exception.
    """
    if is_interruption(error):
        try:
            _make_kernel(*arguments)
            return _interrupted_creation(error)
        except Exception as another:
            error = another
    _, api_address, info, _ = arguments
    api = _api(api_address)
    text = str(error) if isinstance(error, OrtgradError) else f"{type(error).__name__}: {error}"
    node = api.node_name(info)
    owner: Owner | None = getattr(_local, "owner", None)
    reason = ModelError(f"node {node!r} of {_operators[arguments[0]].operator.name}: {text}")
    reason.__cause__ = error
    if owner is not None:
        owner.kernel_failed(reason)
    return _status(api, str(reason))


def _api(address: int) -> Api:
    return _apis.get(address) or _apis.setdefault(address, Api(address))


def _fill_spares(api: Api) -> None:
    while len(_spares) < _SPARES:
        _spares.append(_status(api, _NO_ROOM))


def _make_kernel(op: int, api_address: int, info: int, place: int) -> None:
    """Create the kernel of a node and write its address to `place`.

    If the node's call cannot be read, the kernel fails with the reason when it runs. Raises NodeError if the
    node has other inputs and outputs than the kernel is made for.
    """
    api = _api(api_address)
    _fill_spares(api)
    native = _operators[op]
    owner: Owner | None = getattr(_local, "owner", None)
    if owner is None and native.operator.domain == INTERNAL_DOMAIN:
        raise NodeError(
            f"operators of the domain {INTERNAL_DOMAIN!r} exist only in sessions of ortgrad, "
            "which make such nodes themselves"
        )
    call: Call | Exception
    try:
        native, call = native.read(api.attribute(info, CALL_ATTRIBUTE))
    except (ModelError, RuntimeError) as error:
        call = error
    else:
        _check_node(api, info, native)
    kernel = _Kernel(api, native, call, owner, info)
    (_others if owner is None else owner.kernels).append(kernel)
    ctypes.c_void_p.from_address(place).value = kernel.address


def _check_node(api: Api, info: int, native: NativeOperator) -> None:
    """Raise NodeError unless onnxruntime passes to the kernel what it is made for.

    onnxruntime itself has checked the types of all values of a model by then, and allocates outputs by them.
    """
    for what, dtypes, parameters, given in (
        ("inputs", native.inputs, native.operator.inputs, api.input_types(info)),
        ("outputs", native.outputs, native.operator.outputs, api.output_types(info)),
    ):
        if len(given) != len(dtypes):
            raise NodeError(f"it has {len(given)} {what}; its kernel has {len(dtypes)}")
        for parameter, dtype, element in zip(parameters, dtypes, given, strict=True):
            if element != ELEMENT_TYPES[dtype.name]:
                raise NodeError(
                    f"{parameter.name}, one of its {what}, is {element_name(element)}; its kernel takes "
                    f"a tensor of {dtype}"
                )


class _Kernel(Entrances):
    """The kernel of one node in one session. `kernel[context]` runs it and returns a status."""

    def __init__(
        self, api: Api, native: NativeOperator, call: Call | Exception, owner: Owner | None, info: int
    ) -> None:
        super().__init__()
        self._api = api
        self._native = native
        self._call = call  # or why there is none
        self._owner = None if owner is None else weakref.ref(owner)
        self._state: State | None = None
        # What is to be compiled, with its element types and its products.
        self._waiting: tuple[CompiledKernel, list[str], Products | None] | None = None
        compiled = machine_code.entry()
        # Runs of ortgrad's sessions do it themselves, and so does the compiled function.
        self._flushes = compiled is None and owner is None
        if compiled is not None:
            guarded = compiled.guarded if owner is None or owner.flushes else 0
            self._state = State(api.address, address_of(_python_compute()), self, guarded=guarded)
            if owner is None or owner.compiles:
                self._waiting = self._find_compiled(info)
            if owner is None:
                self.compile()
        self.refill(self._entrance)

    @property
    def address(self) -> int:
        """What onnxruntime passes to KernelComputeV2: the state if that is compiled, else this object."""
        return id(self) if self._state is None else self._state.address

    @property
    def to_compile(self) -> tuple[CompiledKernel, list[str]] | None:
        """The compiled kernel that the node waits for, and the types of its elements."""
        return None if self._waiting is None else self._waiting[:2]

    def _find_compiled(self, info: int) -> tuple[CompiledKernel, list[str], Products | None] | None:
        compiled = self._native.operator.compiled_kernel
        if compiled is None or not isinstance(self._call, Call):
            return None
        dtypes = [dtype.name for dtype in (*self._native.inputs, *self._native.outputs)]
        if len(compiled.names) > layout.MOST_TENSORS:
            raise NodeError(
                f"its compiled kernel has {len(compiled.names)} inputs, outputs and scratch tensors; "
                f"there can be up to {layout.MOST_TENSORS}"
            )
        if any(dtypes[row.parameter] != "int64" for row in self._call.contract.rows if row.contents):
            # Compiled code reads shapes, which belong to the key of a plan, as int64.
            return None
        return compiled, dtypes, self._products(compiled, dtypes, info)

    def compile(self) -> None:
        """Compile what the node waits for."""
        if self._waiting is None:
            return
        (compiled, dtypes, products), self._waiting = self._waiting, None
        assert self._state is not None and isinstance(self._call, Call)
        try:
            block = machine_code.block(compiled, dtypes)
        except Exception as error:
            # No exception may reach native code. The node fails with this reason when it runs.
            kind = "" if isinstance(error, RegistrationError) else f"{type(error).__name__}: "
            self._call = NodeError(f"{self._call.node}: {kind}{error}")
        else:
            types = [ELEMENT_TYPES[dtype.name] for dtype in self._native.inputs]
            self._state.use(compiled, self._call, block, self._api.memory, products, types)

    def _products(self, compiled: CompiledKernel, dtypes: Sequence[str], info: int) -> Products | None:
        if not compiled.products:
            return None
        element = next(dtype for dtype in dtypes if dtype.startswith("float"))
        return self._api.products(info, element)

    def _entrance(self) -> Callable[[int], int | None]:
        """Return a C function that stores the context in a list, resumes a generator and calls its result."""
        arguments: list[int] = []
        waiting = entrance.serve(
            arguments,
            lambda: self.refill(self._entrance),
            lambda interruption: self._run(arguments[0], interruption),
            lambda error: self._give_up(arguments[0], error),
            _spares,
        )
        return entrance.compose(arguments.append, entrance.resume(waiting), entrance.call)

    def _run(self, context: int, interruption: BaseException | None) -> Callable[[], int | None]:
        reason = interruption
        if reason is None:
            floats = subnormals.saved() if self._flushes else None
            try:
                subnormals.flush(floats)
                self._compute(context)
                return _succeeded
            except BaseException as error:
                reason = error
            finally:
                if floats is not None:
                    subnormals.restore(floats)
            # Frames refer to arrays whose memory is only valid during this call.
            _forget_frames(reason)
        if reason is interruption or is_interruption(reason):
            return self._interrupted(context, reason)
        feed = [np.array(array) for array in self._inputs(context)]
        reason = self._fail_again(feed) or reason
        declaration = self._native.operator
        node = self._call.node if isinstance(self._call, Call) else "(unknown)"
        return self._failed(kernel_error(declaration, node, describe(declaration, feed), reason))

    def _compute(self, context: int) -> None:
        _fill_spares(self._api)
        self.compile()  # onnxruntime may run nodes with constant inputs while it makes the session
        if isinstance(self._call, Exception):
            raise self._call
        inputs = self._inputs(context)
        if self._state is not None and self._state.run(context, self._call, inputs):
            return
        outputs: dict[int, np.ndarray] = {}

        def empty(i: int, shape: Sequence[int]) -> np.ndarray:
            outputs[i] = self._api.output(context, i, shape, self._native.outputs[i])
            return outputs[i]

        values = evaluate(self._call, inputs, self._native.outputs, empty)
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

    def _interrupted(self, context: int, error: BaseException) -> Callable[[], int | None]:
        """Stop the run of an ortgrad session. A plain session continues: it would raise its own exception."""
        if self._owner is not None:
            return self._failed(error)
        # The exception is raised as soon as the run returns, so the values of the outputs do not matter.
        call, dtypes = self._call, self._native.outputs
        shapes: Sequence[Any] = [None] * len(dtypes)
        if isinstance(call, Call):
            known = declared_shapes(call, self._inputs(context))
            shapes = [shape if wanted else None for shape, wanted in zip(known, call.wanted, strict=True)]
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            sizes = [0] if shape is None else [size if isinstance(size, int) else 1 for size in shape]
            self._api.output(context, i, sizes, dtype)
        return raise_after_return(error)

    def _failed(self, error: BaseException) -> Callable[[], int | None]:
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            owner.kernel_failed(error)
        return _status(self._api, str(error))

    def _give_up(self, context: int, error: BaseException) -> Callable[[], int | None]:
        """Return a status for an exception outside of the kernel, or while its failure was reported."""
        try:
            if is_interruption(error):
                return self._interrupted(context, error)
        except Exception as another:
            error = another
        return _status(self._api, f"{type(error).__name__} around a kernel of ortgrad")

    def _fail_again(self, feed: list[np.ndarray]) -> Exception | None:
        """Run the failed kernel again on copies of its inputs, which remain valid for a debugger."""
        dtypes = self._native.outputs
        if isinstance(self._call, Exception) or _failing_again.get():
            return None
        before = _failing_again.set(True)
        try:
            evaluate(self._call, feed, dtypes, lambda i, shape: np.empty(shape, dtypes[i]))
        except Exception as error:
            return error
        finally:
            _failing_again.reset(before)
        return None


# A C function, as must be everything that runs after the generator.
_succeeded: Callable[[], None] = itertools.repeat(None).__next__


def _status(api: Api, text: str) -> Callable[[], int | None]:
    return itertools.repeat(api.failure(text)).__next__


def _forget_frames(error: BaseException) -> None:
    chain = [error]
    for link in chain:
        traceback.clear_frames(link.__traceback__)
        chain += [e for e in (link.__cause__, link.__context__) if e is not None and e not in chain]


def _is_shared(arrays: list[np.ndarray]) -> bool:
    """Return whether there are references to one of the arrays besides this list."""
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
    """Raise TypeError if there are other references to one of the arrays, whose memory becomes invalid."""
    for base in [array.base for array in arrays]:
        if isinstance(base, Memory):
            base.forget()
    for i, pause in enumerate(_PAUSES):
        if not _is_shared(arrays):
            return
        if i == 20:
            gc.collect()
        time.sleep(pause)
    if _is_shared(arrays):
        raise TypeError(
            "the kernel kept an array that it was given, or a view of one; "
            "its memory is valid only during the call, so keep a copy"
        )
