"""Run a function on another thread while the calling thread waits.

Python runs signal handlers on the main thread, between two bytecodes. They must not interrupt a callback from
a native library: the library may mistake the handler's exception for another error, or lose it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")


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


if hasattr(os, "register_at_fork"):
    # In a forked child process only the forking thread exists.
    os.register_at_fork(after_in_child=_idle.clear)
