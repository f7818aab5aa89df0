"""How native code enters Python where nothing may be raised.

A signal that arrives in native code is handled at the first bytecode of the next Python function, before
any `try` of that function. ctypes would drop what the handler raises (KeyboardInterrupt, usually) and
return 0, which onnxruntime takes for success. A generator that waits at a `yield` inside its `try` has no
such gap: what is raised when it is resumed is raised inside the `try`. So a callback here is a chain of C
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

# Calls on several threads may begin before the first has made the next entrance.
_SPARE = 8

_set_async_exception = ctypes.PYFUNCTYPE(None, ctypes.c_ulong, ctypes.py_object)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)


class Entrances(deque):
    """C functions for one call each. `entrances(...)` and `entrances[x]` take one and call it.

    Properties are looked up and called in C, so these two do not run any bytecode either.
    """

    __call__ = property(operator.methodcaller("pop"))
    __getitem__ = property(operator.methodcaller("pop"))

    def refill(self, make: Callable[[], Callable[..., Any]]) -> None:
        """Have as many functions at hand as may be needed at once."""
        while len(self) < _SPARE:
            self.append(make())


class _Step:
    """Something to add to a value from the right: the function is applied to the value."""

    __slots__ = ("function",)
    __radd__ = property(operator.attrgetter("function"))

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function


def compose(*functions: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The functions one after the other, each on the result of the one before, as a C function."""
    return functools.partial(functools.reduce, operator.add, tuple(map(_Step, functions)))


call = operator.methodcaller("__call__")


def resume(waiting: Generator[Any, Any, None]) -> Callable[[Any], Any]:
    """The generator's `send`, after it has been run up to its first `yield`."""
    next(waiting)
    return waiting.send


def raise_after_return(error: BaseException) -> Callable[[], None]:
    """A C function after which the exception is raised in this thread, at the next bytecode that runs.

    Called by C as the last thing before native code goes on, it hands the exception to whoever called that.
    """
    if isinstance(error, KeyboardInterrupt):
        return _thread.interrupt_main
    # Python makes an instance of the class that it is given: here it gets the exception itself.
    again = type(type(error).__name__, (type(error),), {"__new__": lambda _: error})
    return functools.partial(_set_async_exception, threading.get_ident(), again)


def is_interruption(error: BaseException) -> bool:
    """Whether an exception is no failure of the code that it came out of: a signal handler raised it."""
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
