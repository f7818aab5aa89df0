"""Monitoring of a session's runs: failures of kernels, and signals during a run.

Python runs signal handlers on the main thread, between two bytecodes, so Ctrl-C would take effect only at the
end of a long run. Long runs therefore take place on another thread while the main thread waits. A signal
handler then runs at once, and if it raises an exception, the run is stopped.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import onnxruntime

from ortgrad.operators.assertions import failed_check
from ortgrad.runtime import subnormals
from ortgrad.threads import Result, call_elsewhere, make_lock

# Runs up to this many seconds stay on the main thread, where they delay signals.
_SHORT = 0.02
# The limit of runs nested inside each other's kernels.
_MOST_NESTED = 50
# The recursion depth that is needed to run a kernel and to report its failure.
_HEADROOM = 120
# Below _SHALLOW frames the recursion limit is far away, unless it is lower than usual.
_SHALLOW, _USUAL_LIMIT = 300, 1000

# Stands for the threads of a run in parallel execution mode.
_EVERY_THREAD = 0

# The number of nested runs. A thread that runs a function for another one inherits its context.
_depth: ContextVar[int] = ContextVar("depth", default=0)


class Monitor:
    """Assigns failing kernels to the runs of a session: a run and its kernels share a thread.

    In parallel execution mode they do not. There, runs are executed one at a time, and a failure is assigned
    to every asynchronous run in progress.
    """

    def __init__(
        self, *, parallel: bool = False, steady: bool = True, compiles: bool = False, flushes: bool = False
    ) -> None:
        """`steady` says that runs on inputs of the same size take about the same time.

        `compiles` says whether the session's nodes run compiled kernels where there are any, `flushes`
        whether subnormal numbers are flushed to zero.
        """
        self.kernels: list[object] = []
        self.compiles, self.flushes = compiles, flushes
        self._parallel = parallel
        self._steady = steady
        self._one_at_a_time = make_lock()
        self._runs: dict[int, _Run] = {}
        self._async_runs: set[_Run] = set()
        self._stray: dict[int, BaseException] = {}
        # Runs on inputs of at most this many bytes are known to take no longer than _SHORT.
        self._quick_size = -1

    def run(
        self,
        function: Callable[..., Result],
        arguments: tuple[Any, ...],
        given: onnxruntime.RunOptions | None,
        size: int | None = None,
    ) -> Result:
        """Call a function that runs the session; raises exceptions of its kernels and of signal handlers.

        Its last argument is the options of the run. `size` is the number of bytes that are fed.
        """
        thread = threading.get_ident()
        if thread != threading.main_thread().ident:
            size = None
        elif size is None or size > self._quick_size:
            return self._run_elsewhere(function, arguments, given, size)
        _require_headroom()
        return self._watch(thread, _Run(given), function, arguments, size)

    def _run_elsewhere(
        self,
        function: Callable[..., Result],
        arguments: tuple[Any, ...],
        given: onnxruntime.RunOptions | None,
        size: int | None,
    ) -> Result:
        # Only here can a run be stopped, for which it needs options.
        run = _Run(onnxruntime.RunOptions() if given is None else given, is_given=given is not None)
        return call_elsewhere(
            lambda: self._watch(threading.get_ident(), run, function, arguments, size), run.stop
        )

    def _watch(
        self,
        thread: int,
        run: _Run,
        function: Callable[..., Result],
        arguments: tuple[Any, ...],
        size: int | None,
    ) -> Result:
        """Run on this thread, and remember whether inputs of this size are quick."""
        if self._parallel and thread:
            with self._one_at_a_time:
                return self._watch(_EVERY_THREAD, run, function, arguments, size)
        runs = self._runs
        outer, depth, start = runs.get(thread), _depth.get() + 1, time.perf_counter()
        floats = subnormals.saved() if self.flushes else None
        try:
            subnormals.flush(floats)
            runs[thread] = run
            _depth.set(depth)
            if depth > _MOST_NESTED:
                raise RecursionError(f"kernels run sessions inside each other, {depth} deep")
            result = function(*arguments, run.options)
        except Exception as error:
            malformed = failed_check(str(error)) if run.error is None else None
            if malformed is not None:
                raise malformed from error
            if run.error is None:
                raise
        finally:
            # First of all: a signal handler may end this function at any later place.
            if floats is not None:
                subnormals.restore(floats)
            if size is not None and self._steady:
                if time.perf_counter() - start > _SHORT:
                    self._quick_size = -1
                elif size > self._quick_size:
                    self._quick_size = size
            _depth.set(depth - 1)
            if outer is None:
                runs.pop(thread, None)
            else:
                runs[thread] = outer
        if run.error is not None:
            # The exception of a kernel, in place of onnxruntime's.
            raise run.error
        return result

    def raise_stray(self) -> None:
        """Raise the exception of a kernel that was called on this thread outside of any run."""
        error = self._stray.pop(threading.get_ident(), None)
        if error is not None:
            raise error

    def start_async(self) -> _Run:
        """Register an asynchronous run."""
        run = _Run(None)
        self._async_runs.add(run)
        return run

    def finish_async(self, run: _Run) -> BaseException | None:
        """Return the error of a finished run; must be called on the thread of its kernels."""
        self._async_runs.discard(run)
        return self._stray.pop(threading.get_ident(), None) or run.error

    def kernel_failed(self, error: BaseException) -> None:
        """Record the exception of a kernel that failed on this thread."""
        thread = threading.get_ident()
        run = self._runs.get(_EVERY_THREAD if self._parallel else thread)
        if run is not None:
            run.fail(error)
        elif not self._parallel:
            self._stray[thread] = error
        if self._parallel:
            for async_run in list(self._async_runs):
                async_run.fail(error)


class _Run:
    """A run, with the options through which it can be stopped; without options it cannot."""

    __slots__ = ("_is_given", "error", "options")

    def __init__(self, options: onnxruntime.RunOptions | None, *, is_given: bool = True) -> None:
        self.options = options
        self._is_given = is_given
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Record the failure of a kernel. Only the first counts: later ones may be its consequence."""
        self.error = self.error or error

    @contextmanager
    def stop(self) -> Iterator[None]:
        """Make the run end at its next node. The caller's options are restored afterwards."""
        assert self.options is not None
        before = self.options.terminate
        self.options.terminate = True
        try:
            yield
        finally:
            if self._is_given:
                self.options.terminate = before


def _require_headroom() -> None:
    """Raise RecursionError if a kernel could not report a failure within Python's recursion limit."""
    try:
        if sys.getrecursionlimit() >= _USUAL_LIMIT:
            sys._getframe(_SHALLOW)
    except ValueError:
        return
    _descend(_HEADROOM)


def _descend(calls: int) -> None:
    if calls:
        _descend(calls - 1)
