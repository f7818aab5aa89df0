"""Callbacks from native code into Python that never lose an exception of a signal handler.

A signal that arrives in native code is handled at the first bytecode of the next Python function, before
any `try` of that function. ctypes would drop the handler's exception (usually KeyboardInterrupt) and return
0, which onnxruntime takes for success. A generator that is suspended at a `yield` inside a `try` has no such
gap: an exception raised when it resumes is raised inside the `try`. A callback is therefore a chain of C
functions, one of which resumes such a generator; no bytecode runs before. Each generator serves one call.
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import operator
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

# Several threads may call before the first one has made a new entrance.
_SPARE = 8

_set_async_exception = ctypes.PYFUNCTYPE(None, ctypes.c_ulong, ctypes.py_object)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)


class Entrances(deque):
    """C functions for one call each. `entrances(...)` and `entrances[x]` remove one and call it.

    Properties are looked up and called in C, so neither form runs any bytecode.
    """

    __call__ = property(operator.methodcaller("pop"))
    __getitem__ = property(operator.methodcaller("pop"))

    def refill(self, make: Callable[[], Callable[..., Any]]) -> None:
        """Add functions until there are enough for concurrent calls."""
        while len(self) < _SPARE:
            self.append(make())


class _Step:
    """An operand for which `value + step` calls the function with the value."""

    __slots__ = ("function",)
    __radd__ = property(operator.attrgetter("function"))

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function


def compose(*functions: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a C function that applies the functions in order, each to the result of the previous one."""
    return functools.partial(functools.reduce, operator.add, tuple(map(_Step, functions)))


call = operator.methodcaller("__call__")


def resume(waiting: Generator[Any, Any, None]) -> Callable[[Any], Any]:
    """Run the generator up to its first `yield` and return its `send`."""
    next(waiting)
    return waiting.send


def serve(
    arguments: list[int],
    refill: Callable[[], None],
    run: Callable[[BaseException | None], Callable[[], Any]],
    give_up: Callable[[BaseException], Callable[[], Any]],
    spares: list[Callable[[], Any]],
) -> Generator[Any, None, None]:
    """Serve one call. Yields a C function that is called last and returns the status.

    `arguments` are those of the call, once it has begun. `run` gets the exception that a signal handler
    raised when the call began, or None. `give_up` reports an exception of `run` or around it. Where even that
    fails, one of `spares` is taken, which were made in advance.
    """
    interruption: BaseException | None = None
    try:
        try:
            yield None
        except BaseException as error:
            if not arguments:
                # Raised before the call began: the entrance is being made or discarded.
                raise
            interruption = error
        refill()
        yield run(interruption)
    except GeneratorExit:
        return
    except BaseException as error:
        if not arguments:
            raise
        try:
            refill()
            last = give_up(interruption or error)
        except BaseException:
            # This close to the recursion limit, no function can be called any more.
            last = spares[-1]
            del spares[-1]
        yield last


def raise_after_return(error: BaseException) -> Callable[[], None]:
    """Return a C function that makes this thread raise the exception at the next bytecode that it runs.

    It is called last before control returns to native code, so that code's caller gets the exception.
    """
    if isinstance(error, KeyboardInterrupt):
        return _thread.interrupt_main
    # Python instantiates the class that it is given; this one returns the exception itself.
    again = type(type(error).__name__, (type(error),), {"__new__": lambda _: error})
    return functools.partial(_set_async_exception, threading.get_ident(), again)


def is_interruption(error: BaseException) -> bool:
    """Return whether a signal handler raised the exception, rather than the interrupted code."""
    if not isinstance(error, Exception):
        return True
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(handler, "__code__", None) for handler in handlers} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False
