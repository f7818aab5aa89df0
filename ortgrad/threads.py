"""Calls on another thread while the calling thread waits, and locks and forks beside other threads.

Python runs signal handlers on the main thread, between two bytecodes. They must not interrupt a callback from
a native library: the library may mistake the handler's exception for another error, or lose it.

A forked child has a copy of all memory, but only the thread that forked: a lock that another thread held
stays locked, and what that thread was changing stays half changed, also inside of Python's import system,
Numba, onnx and onnxruntime. A fork therefore waits for what must not be cut in half (`forks_wait`), and all
locks of the package are made here, so that they are free in the child in any case.
"""

from __future__ import annotations

# These two hold a lock of theirs during a fork, for which a thread inside of `forks_wait` may wait. What is
# registered last is called first, so they have to be imported before.
import concurrent.futures.thread  # noqa: F401
import logging  # noqa: F401
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")

# Seconds that a fork waits. In the end it takes place: the other thread may be waiting for the forking one.
_PATIENCE = 30.0

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
# Whether a fork waits for this thread, or for the one on whose behalf it runs a function.
_awaited: ContextVar[bool] = ContextVar("awaited", default=False)


class _Job:
    """A function to be called on another thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function: Callable[[], Any] = partial(copy_context().run, function)
        self._claim = threading.Lock()
        self._end = threading.Lock()
        self._end.acquire()
        self.finished = False
        self.result: Any = None
        self.error: BaseException | None = None

    def claim(self) -> bool:
        """Return True on the first call only: in the thread that runs the job, or in one that cancels it."""
        return self._claim.acquire(blocking=False)

    def run(self) -> None:
        if self.claim():
            try:
                self.result = self._function()
            except BaseException as error:
                self.error = error
        # This thread still refers to the job when the waiting one goes on, which may then drop its last
        # reference to an object of the function, such as a session.
        self._function = _nothing
        # Set before the lock is released: the waiting thread may be interrupted right after it acquires it.
        self.finished = True
        self._end.release()

    def wait(self) -> None:
        if not self.finished:
            self._end.acquire()


def _nothing() -> None:
    """Take the place of a function that has been called."""


class _Worker:
    """A thread that runs one job after the other."""

    def __init__(self) -> None:
        self._job: _Job | None = None
        self._wake = threading.Lock()
        self._wake.acquire()
        threading.Thread(target=self._work, name="ortgrad", daemon=True).start()

    def start(self, job: _Job) -> None:
        self._job = job
        self._wake.release()

    def _work(self) -> None:
        while True:
            self._wake.acquire()
            job, self._job = self._job, None
            if job is not None:
                job.run()
            del job
            _idle.append(self)


_idle: list[_Worker] = []


def call_elsewhere(function: Callable[[], Result], stop: Callable[[], Any] = nullcontext) -> Result:
    """Call a function on a thread that handles no signals, wait until it returns, and return its result.

    If a signal handler raises an exception in the meantime, the context `stop()` is entered, the function is
    still awaited, and then the handler's exception is raised.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    job = _Job(function)
    interruption: BaseException | None = None
    try:
        try:
            worker = _idle.pop()
        except IndexError:
            worker = _Worker()
        worker.start(job)
        job.wait()
    except BaseException as error:
        interruption = error
    if interruption is not None:
        if not job.claim():
            with stop():
                while not job.finished:
                    try:
                        job.wait()
                    except BaseException:  # the caller's data must outlive the function
                        continue
        raise interruption
    # The other thread may refer to the job for longer than the caller to the result.
    failure, job.error = job.error, None
    result, job.result = job.result, None
    if failure is not None:
        raise failure
    return result


def make_lock() -> Any:
    """Return a lock that is free in a forked child."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def make_reentrant_lock() -> Any:
    """Return a reentrant lock that is free in a forked child."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


class lazy(Generic[Result]):  # noqa: N801 - a decorator, as functools.cached_property
    """functools.cached_property without its lock, which Python before 3.12 keeps for each property."""

    def __init__(self, function: Callable[[Any], Result]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Result:
        # The value in the instance's own dictionary takes precedence from now on.
        return instance.__dict__.setdefault(self._name, self._function(instance))


class _Gate:
    """Counts the threads that a fork waits for, and keeps others out while it takes place."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # its lock is reentrant: a signal handler may fork
        self._inside: dict[int, int] = {}
        self._forking: int | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        thread, before = threading.get_ident(), _awaited.get()
        with self._changed:
            while self._forking not in (None, thread) and not before:
                self._changed.wait()
            self._inside[thread] = self._inside.get(thread, 0) + 1
        try:
            _awaited.set(True)
            yield
        finally:
            _awaited.set(before)
            with self._changed:
                self._inside[thread] -= 1
                if not self._inside[thread]:
                    del self._inside[thread]
                    self._changed.notify_all()

    def close(self) -> None:
        """Wait for other threads. What they have begun on behalf of this one they finish without it."""
        thread, end = threading.get_ident(), time.monotonic() + _PATIENCE
        with self._changed:
            while self._forking not in (None, thread) and time.monotonic() < end:
                self._changed.wait(end - time.monotonic())
            self._forking = thread
            while any(other != thread for other in self._inside) and time.monotonic() < end:
                self._changed.wait(end - time.monotonic())

    def open(self) -> None:
        with self._changed:
            self._forking = None
            self._changed.notify_all()

    def renew(self) -> None:
        """Forget other threads, which do not exist in the child."""
        thread = threading.get_ident()
        self._changed = threading.Condition()
        self._inside = {thread: self._inside[thread]} if thread in self._inside else {}
        self._forking = None


_gate = _Gate()


def forks_wait() -> AbstractContextManager[None]:
    """Within this context, a fork in another thread waits, up to half a minute.

    It is for what a child could not use if it were cut in half.
    """
    return _gate.entered()


def _free_all() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_gate.close, after_in_parent=_gate.open, after_in_child=_gate.renew)
    os.register_at_fork(after_in_child=_free_all)
    # In a forked child process only the forking thread exists.
    os.register_at_fork(after_in_child=_idle.clear)
