"""Where ortgrad meets onnxruntime-extensions. Nothing else in the package knows about it.

An exception in a Python operator aborts the process, an output of the wrong type or size
corrupts memory, and the library's own invoker copies element by element. So ortgrad installs
an invoker of its own: it serves ortgrad's operators, hands all others to whoever was there
before, returns exactly what was declared, and lets nothing out.
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from onnxruntime_extensions import PyCustomOpDef, get_library_path, onnx_op

try:
    from onnxruntime_extensions import _ocos
except ImportError as error:  # pragma: no cover - depends on the installed wheel
    raise ImportError("this build of onnxruntime-extensions has no Python operators") from error

from ortgrad.call import Call, parse_call
from ortgrad.errors import RegistrationError
from ortgrad.evaluate import declared_shapes, describe, evaluate, kernel_error
from ortgrad.registry import CALL_ATTRIBUTE, Operator, Variant, all_operators

logger = logging.getLogger("ortgrad")

# A failed kernel's stand-in output is not worth more memory than this many elements.
_LARGEST_STAND_IN = 1 << 26
_INTERRUPT_DELAY = 0.05
# The most that glibc lets its threshold grow to, less its own header.
_REUSED_BYTES = (1 << 25) - (1 << 16)
_DTYPES = {
    "float32": PyCustomOpDef.dt_float,
    "float64": PyCustomOpDef.dt_double,
    "int32": PyCustomOpDef.dt_int32,
    "int64": PyCustomOpDef.dt_int64,
    "bool": PyCustomOpDef.dt_bool,
}

Invoker = Callable[[int, list[np.ndarray], dict[str, str]], tuple[Any, ...]]


class Monitor(Protocol):
    """A session that wants to know of its failing kernels, and keeps what must live as long as itself."""

    kept: list[object]

    def kernel_failed(self, error: BaseException) -> None: ...


_lock = threading.RLock()
_kernels: dict[int, _PythonOperator] = {}
_declared: set[Operator] = set()
_domains_in_use: set[str] = set()
_monitors: weakref.WeakValueDictionary[int, Monitor] = weakref.WeakValueDictionary()
_install_hooker = PyCustomOpDef.install_hooker
_previous: Invoker | None = None


def library_path() -> str:
    """The op library for `SessionOptions.register_custom_ops_library`, all operators declared."""
    with _lock:
        _declare_operators()
        _domains_in_use.update(operator.domain for operator in _declared)
    return str(get_library_path())


def add_monitor(monitor: Monitor) -> int:
    """Have `monitor` told of failures of nodes that carry the returned number."""
    with _lock:
        number = id(monitor)
        _monitors[number] = monitor
    return number


def find_monitor(number: int | None) -> Monitor | None:
    """The monitor with that number, if its session still lives."""
    return None if number is None else _monitors.get(number)


def report(error: BaseException, monitor: Monitor | None) -> None:
    """Tell the session of a failure, or the log if there is none to tell."""
    if monitor is not None:
        monitor.kernel_failed(error)
        return
    logger.error("%s", error, exc_info=error.__cause__ or error)
    if isinstance(error, KeyboardInterrupt):
        # Raised in a kernel it would abort the process, so it comes back a little later.
        threading.Timer(_INTERRUPT_DELAY, _thread.interrupt_main).start()


def add_native_operator(address: int) -> None:
    """Have every library registration from now on bring along the OrtCustomOp at that address."""
    if not _library().AddExternalCustomOp(address):
        raise RegistrationError("onnxruntime-extensions did not take the operator")


def takes_native_operators() -> bool:
    """Whether this build of onnxruntime-extensions has a way in for operators from outside."""
    try:
        return hasattr(_library(), "AddExternalCustomOp")
    except OSError:
        # The library is there, or its Python operators would not be; this platform opens it only its own way.
        return False


@functools.cache
def _library() -> ctypes.PyDLL:
    library = ctypes.PyDLL(get_library_path())
    if hasattr(library, "AddExternalCustomOp"):
        library.AddExternalCustomOp.argtypes = [ctypes.c_void_p]
        library.AddExternalCustomOp.restype = ctypes.c_bool
    return library


def install() -> None:
    """Put ortgrad's invoker in place. Doing it again changes nothing."""
    with _lock:
        if PyCustomOpDef.install_hooker is not _keep_in_place:
            # There is no way to ask the library for its invoker, so later ones are noticed here.
            PyCustomOpDef.install_hooker = staticmethod(_keep_in_place)
            _install_hooker(_invoke)


def _keep_in_place(invoker: Invoker) -> None:
    global _previous
    with _lock:
        _previous = invoker if invoker is not _invoke else _previous


def _invoke(op_id: int, feed: list[np.ndarray], attributes: dict[str, str]) -> tuple[Any, ...]:
    kernel = _kernels.get(op_id)
    if kernel is None:
        previous = _previous or _ocos._on_pyop_invocation
        return previous(op_id, feed, attributes)
    return op_id, *(part for output in kernel(*feed, **attributes) for part in (output.shape, output))


def _declare_operators() -> None:
    install()
    if not _declared:
        _keep_freed_memory()
    for operator in all_operators():
        if operator in _declared:
            continue
        if operator.domain in _domains_in_use:
            # The library keeps a domain's operators in a vector; growing it moves them under
            # the sessions that run on them.
            raise RegistrationError(
                f"operator {operator.domain}::{operator.name} was declared after a session had been made "
                f"with the operators of {operator.domain!r}; declare operators before the first session, "
                "or in a domain of their own"
            )
        _declared.add(operator)
        for variant in operator.variants():
            kernel = _PythonOperator(operator, variant)
            declaration = onnx_op(
                op_type=f"{operator.domain}::{operator.name}",
                inputs=[_DTYPES[t] for t in variant.inputs],
                outputs=[_DTYPES[t] for t in variant.outputs],
                attrs={CALL_ATTRIBUTE: PyCustomOpDef.dt_string},
            )(kernel)
            _kernels[id(declaration)] = kernel


def _keep_freed_memory() -> None:
    """Have the C library reuse the memory of arrays up to this size instead of handing it back.

    glibc learns from what is freed what is worth keeping. Before it has learned that, every run pays
    for new pages: three times as long for a million elements.
    """
    np.empty(_REUSED_BYTES, np.uint8)


class _PythonOperator:
    """One operator for one combination of element types; calling it never raises."""

    def __init__(self, operator: Operator, variant: Variant) -> None:
        self._operator = operator
        self._dtypes = [np.dtype(t) for t in variant.outputs]

    def __call__(self, *feed: np.ndarray, **attributes: str) -> tuple[np.ndarray, ...]:
        call: Call | None = None
        shapes: Sequence[Any] = [None] * len(self._dtypes)
        # An exception that leaves this function aborts the process, so everything is caught,
        # KeyboardInterrupt too; each is raised again where Python can handle it.
        try:
            call = parse_call(self._operator, attributes[CALL_ATTRIBUTE])
            shapes = declared_shapes(call, feed)
            outputs = evaluate(call, feed, self._dtypes, shapes, self._empty)
            return tuple(
                np.zeros(0, dtype) if value is None else np.ascontiguousarray(value).reshape(value.shape)
                for value, dtype in zip(outputs, self._dtypes, strict=True)
            )
        except BaseException as error:
            node = call.node if call else "(unknown)"
            report(
                kernel_error(self._operator, node, describe(self._operator, feed), error),
                find_monitor(call.session) if call else None,
            )
            return tuple(
                _stand_in(dtype, shape, call is None or call.wanted[i])
                for i, (dtype, shape) in enumerate(zip(self._dtypes, shapes, strict=True))
            )

    def _empty(self, i: int, shape: Sequence[int]) -> np.ndarray:
        return np.empty(shape, self._dtypes[i])


def _stand_in(dtype: np.dtype, shape: Sequence[Any] | None, wanted: bool) -> np.ndarray:
    """NaN of the best-known shape: what a failed kernel puts into the graph."""
    if not wanted:
        return np.zeros(0, dtype)
    known = [d if isinstance(d, int) and d >= 0 else 1 for d in (shape or (1,))]
    size = 1
    for dim in known:
        size *= dim
    if size > _LARGEST_STAND_IN:
        known = [1] * len(known)
    fill = np.nan if dtype.kind == "f" else 0 if dtype.kind == "b" else np.iinfo(dtype).min
    return np.full(known, fill, dtype)
