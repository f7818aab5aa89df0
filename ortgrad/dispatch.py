"""Where ortgrad meets onnxruntime-extensions. Nothing else in the package knows about it.

An exception in a Python operator aborts the process, an output of the wrong type or size
corrupts memory, and the library's own invoker copies element by element. So ortgrad installs
an invoker of its own: it serves ortgrad's operators, hands all others to whoever was there
before, returns exactly what was declared, and lets nothing out.
"""

from __future__ import annotations

import _thread
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
from ortgrad.errors import KernelError, RegistrationError
from ortgrad.registry import CALL_ATTRIBUTE, Operand, Operator, Variant, all_operators

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
    """A session that wants to know of its failing kernels."""

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
        described = _describe(self._operator, feed)
        shapes: Sequence[Any] = [None] * len(self._dtypes)
        # An exception that leaves this function aborts the process, so everything is caught,
        # KeyboardInterrupt too; each is raised again where Python can handle it.
        try:
            call = parse_call(self._operator, attributes[CALL_ATTRIBUTE])
            arrays = [a if real else None for a, real in zip(feed, call.present, strict=True)]
            operands = [None if a is None else Operand(a.shape, _small_value(a)) for a in arrays]
            shapes = self._operator.shapes(*operands, **call.attributes)
            with np.errstate(all="ignore"):
                result = self._operator.compute(arrays, call.attributes, call.wanted)
            return self._checked(result, call, shapes)
        except BaseException as error:
            self._report(error, call, described)
            return tuple(
                _stand_in(dtype, shape, call is None or call.wanted[i])
                for i, (dtype, shape) in enumerate(zip(self._dtypes, shapes, strict=True))
            )

    def _checked(self, result: Any, call: Call, shapes: Sequence[Any]) -> tuple[np.ndarray, ...]:
        """The outputs as the library needs them: declared dtype, declared shape, contiguous."""
        values = result if isinstance(result, tuple) else (result,)
        if len(values) != len(self._dtypes):
            raise TypeError(f"the kernel returned {len(values)} outputs, not {len(self._dtypes)}")
        outputs = []
        for value, dtype, shape, wanted in zip(values, self._dtypes, shapes, call.wanted, strict=True):
            if not wanted:
                outputs.append(np.zeros(0, dtype))
                continue
            if not isinstance(value, np.ndarray) or value.dtype != dtype:
                got = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
                raise TypeError(f"the kernel returned {got} where {dtype} is declared")
            if shape is not None and not _agree(value.shape, shape):
                raise TypeError(f"the kernel returned shape {value.shape} where {shape} is declared")
            outputs.append(value if value.flags.c_contiguous else np.ascontiguousarray(value))
        return tuple(outputs)

    def _report(self, reason: BaseException, call: Call | None, described: str) -> None:
        node = call.node if call else "(unknown)"
        text = f"{type(reason).__name__}: {reason}" if not isinstance(reason, ValueError) else str(reason)
        error: BaseException = KernelError(node, self._operator.name, described, text)
        error.__cause__ = reason
        monitor = _monitors.get(call.session) if call and call.session is not None else None
        if not isinstance(reason, Exception):
            error = reason
        if monitor is not None:
            monitor.kernel_failed(error)
            return
        logger.error("%s", error, exc_info=reason)
        if isinstance(reason, KeyboardInterrupt):
            # Raised right here it would abort the process, so it comes back a little later.
            threading.Timer(_INTERRUPT_DELAY, _thread.interrupt_main).start()


def _describe(operator: Operator, feed: Sequence[np.ndarray]) -> str:
    return ", ".join(
        f"{slot.name}: {array.dtype}{list(array.shape)}"
        for slot, array in zip(operator.inputs, feed, strict=False)
    )


def _small_value(array: np.ndarray) -> np.ndarray | None:
    return array if array.dtype == np.int64 and array.ndim == 1 and array.size <= 16 else None


def _agree(actual: tuple[int, ...], declared: Sequence[Any]) -> bool:
    return len(actual) == len(declared) and all(
        not isinstance(d, int) or a == d for a, d in zip(actual, declared, strict=True)
    )


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
