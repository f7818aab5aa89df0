"""Runs of a session: which of them a failing kernel stops, and what a signal does meanwhile.

Python handles signals on the main thread, between two bytecodes, so Ctrl-C would wait for the end of a long
run. Such runs take place on another thread, while the main thread waits: there a signal handler runs at
once, and if it raises, the run is stopped.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import onnxruntime

from ortgrad.operators.assertions import explain
from ortgrad.threads import Result, call_elsewhere

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
        except Exception as error:
            malformed = explain(str(error)) if self.error is None else None
            if malformed is not None:
                raise malformed from error
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
