"""Runs of a session: which of them a failing kernel stops, and what a signal does meanwhile.

Python handles signals on the main thread, between two bytecodes, so Ctrl-C would wait for the end of a long
run. Such runs take place on another thread, while the main thread waits: there a signal handler runs at
once, and if it raises, the run is stopped.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

import onnxruntime

Result = TypeVar("Result")

# A run that took no longer than this many seconds may delay a signal.
_SHORT = 0.02
# How many runs may be under way inside each other's kernels.
_MOST_NESTED = 50
# How many calls deep Python needs to go to run a kernel and to report its failure.
_HEADROOM = 120
# Fewer frames than this are far from the recursion limit, unless somebody has lowered that.
_SHALLOW, _USUAL_LIMIT = 300, 1000

# How many are under way where this code runs. Threads that run something for others are given their context.
_depth: ContextVar[int] = ContextVar("depth", default=0)
_nothing: AbstractContextManager[Any] = nullcontext()


class Monitor:
    """Knows which run of a session a failing kernel belongs to: a run and its kernels share a thread.

    In parallel execution mode they do not, so there one run waits for the other, and a failure
    counts against every asynchronous run that is under way.
    """

    def __init__(self, *, parallel: bool = False, steady: bool = True) -> None:
        """`steady` says that runs on inputs of one size take about the same time."""
        self.kernels: list[object] = []
        self._parallel = parallel
        self._steady = steady
        self._one_at_a_time = threading.Lock()
        self._runs: dict[int, _Run] = {}
        self._async_runs: set[_Run] = set()
        self._stray: dict[int, BaseException] = {}
        # What is known to take no longer than _SHORT: runs on inputs of at most so many bytes.
        self._quick_size = -1

    def run(
        self,
        function: Callable[[onnxruntime.RunOptions], Result],
        given: onnxruntime.RunOptions | None,
        size: int | None = None,
    ) -> Result:
        """Call a function that runs the session; raise what its kernels, or signal handlers, raise.

        `size` is the number of bytes that are fed.
        """
        run = _Run(given)
        if threading.get_ident() != threading.main_thread().ident:
            _require_headroom()
            return self._watch(run, function)
        if size is not None and size <= self._quick_size:
            _require_headroom()
            return self._watch(run, function, size)
        return call_elsewhere(lambda: self._watch(run, function, size), run.stop)

    def _watch(
        self, run: _Run, function: Callable[[onnxruntime.RunOptions], Result], size: int | None = None
    ) -> Result:
        """Run on this thread, on inputs of a size that is to be remembered as quick or slow."""
        key = 0 if self._parallel else threading.get_ident()
        with self._one_at_a_time if self._parallel else _nothing:
            outer, self._runs[key] = self._runs.get(key), run
            depth = _depth.get() + 1
            _depth.set(depth)
            start = time.perf_counter()
            try:
                if depth > _MOST_NESTED:
                    raise RecursionError(f"kernels run sessions inside each other, {depth} deep")
                return run.watch(function)
            finally:
                if size is not None and self._steady:
                    quick = time.perf_counter() - start <= _SHORT
                    self._quick_size = max(size, self._quick_size) if quick else -1
                _depth.set(depth - 1)
                if outer is None:
                    del self._runs[key]
                else:
                    self._runs[key] = outer

    def raise_stray(self) -> None:
        """Raise what came out of a kernel on this thread while no run was under way."""
        error = self._stray.pop(threading.get_ident(), None)
        if error is not None:
            raise error

    def start_async(self) -> _Run:
        """An asynchronous run begins."""
        run = _Run(onnxruntime.RunOptions())
        self._async_runs.add(run)
        return run

    def finish_async(self, run: _Run) -> BaseException | None:
        """The error of a run that has ended; onnxruntime calls back on the thread of its kernels."""
        self._async_runs.discard(run)
        return self._stray.pop(threading.get_ident(), None) or run.error

    def kernel_failed(self, error: BaseException) -> None:
        """A kernel of the session has failed, on this thread."""
        thread = threading.get_ident()
        run = self._runs.get(0 if self._parallel else thread)
        if run is not None:
            run.fail(error)
        elif not self._parallel:
            self._stray[thread] = error
        if self._parallel:
            for async_run in list(self._async_runs):
                async_run.fail(error)


class _Run:
    """One run, with the options through which it can be stopped."""

    def __init__(self, given: onnxruntime.RunOptions | None) -> None:
        self._options = onnxruntime.RunOptions() if given is None else given
        self._is_given = given is not None
        self.error: BaseException | None = None

    def watch(self, function: Callable[[onnxruntime.RunOptions], Result]) -> Result:
        """Call the function; what a kernel raised comes instead of onnxruntime's echo of it."""
        try:
            result = function(self._options)
        except Exception:
            if self.error is None:
                raise
        if self.error is not None:
            raise self.error
        return result

    def fail(self, error: BaseException) -> None:
        """A kernel has failed; those after the first only see what it left behind."""
        self.error = self.error or error

    @contextmanager
    def stop(self) -> Iterator[None]:
        """Have the run end at its next node. Options of the caller's are afterwards as they were."""
        before = self._options.terminate
        self._options.terminate = True
        try:
            yield
        finally:
            if self._is_given:
                self._options.terminate = before


def _require_headroom() -> None:
    """Raise RecursionError so near to Python's limit that a kernel could not even report a failure."""
    try:
        if sys.getrecursionlimit() >= _USUAL_LIMIT:
            sys._getframe(_SHALLOW)
    except ValueError:
        return
    _descend(_HEADROOM)


def _descend(calls: int) -> None:
    if calls:
        _descend(calls - 1)


class _Job:
    """A call for another thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._context = copy_context()
        self._function = function
        self._claim = threading.Lock()
        self._end = threading.Lock()
        self._end.acquire()
        self.finished = False
        self.result: Any = None
        self.error: BaseException | None = None

    def claim(self) -> bool:
        """True for the first who asks: the thread that runs it, or the caller who gives it up before."""
        return self._claim.acquire(blocking=False)

    def run(self) -> None:
        if self.claim():
            try:
                self.result = self._context.run(self._function)
            except BaseException as error:
                self.error = error
        # Before the lock: a waiting thread may be interrupted between the lock and what comes next.
        self.finished = True
        self._end.release()

    def wait(self) -> None:
        if not self.finished:
            self._end.acquire()


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


def call_elsewhere(function: Callable[[], Result], stop: Callable[[], Any]) -> Result:
    """Call a function on another thread and wait for its end.

    If a signal handler raises meanwhile, the end is awaited in the context `stop()`, and then the handler's
    exception is raised.
    """
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
                    except BaseException:  # the run must end before its memory does
                        continue
        raise interruption
    failure, job.error = job.error, None
    if failure is not None:
        raise failure
    return job.result


if hasattr(os, "register_at_fork"):
    # A child process has only the thread that forked.
    os.register_at_fork(after_in_child=_idle.clear)
