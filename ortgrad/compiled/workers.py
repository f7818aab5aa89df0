"""Compilation by several processes at once.

Most of the time, compilation runs Python code, in which threads would wait for each other. A worker is a new
process of the same interpreter, which does not run the user's program: it gets the texts of kernels, compiles
them and writes them into the cache. This process compiles nothing meanwhile, so that it can be interrupted at
any time. Whatever is then missing in the cache is compiled here.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from ortgrad.compiled.source import Function, Source, functions_of
from ortgrad.compiled.variables import Array, Reference

# Starting a process takes most of a second.
_LEAST_SECONDS = 4.0
_MOST_PROCESSES = 4
# What compilation takes, as measured: per kernel, and per character of its functions. Python code translates
# each function once in a process; LLVM optimizes it in each kernel.
_SECONDS, _OPTIMIZATION, _TRANSLATION = 0.1, 1.0e-4, 1.8e-4
_PATIENCE = 10  # how many times as long as expected, or as half a minute, workers may take

# The package is not imported as a whole, which would take as long as Numba.
_PROGRAM = """
import sys
sys.path[:] = {path!r}
import types
package = sys.modules["ortgrad"] = types.ModuleType("ortgrad")
package.__path__ = [{folder!r}]
from ortgrad.compiled import workers
workers.work({parent})
"""
# What the texts of sources consist of.
_NAMES = {kind.__name__: kind for kind in (Source, Function, Array, Reference)} | {
    "inf": math.inf,
    "nan": math.nan,
}
_SIGKILL, _PR_SET_PDEATHSIG = 9, 1
_INTERVAL = 0.2  # seconds between two looks whether the other process exists


def distribute(sources: Sequence[Source]) -> list[list[int]]:
    """Return which sources each of several workers should compile; nothing if there should be none."""
    count = min(_allowed_processes(), len(sources))
    if count < 2 or expected_seconds(sources) < _LEAST_SECONDS:
        return []
    longest_first = sorted(range(len(sources)), key=lambda i: -expected_seconds([sources[i]]))
    shares: list[list[int]] = [[] for _ in range(count)]
    for i in longest_first:
        # Kernels with functions in common come together, unless another worker is done much earlier.
        best = min(shares, key=lambda share: expected_seconds([sources[k] for k in (*share, i)]))
        best.append(i)
    return [share for share in shares if share]


def expected_seconds(sources: Sequence[Source]) -> float:
    """Return how long it takes to compile the sources in one process."""
    seconds, translated = 0.0, set()
    for source in sources:
        functions = set(functions_of(source.phases))
        seconds += _SECONDS + _OPTIMIZATION * sum(len(function.text) for function in functions)
        translated |= {(function, source.element, source.reorders) for function in functions}
    return seconds + _TRANSLATION * sum(len(function.text) for function, *_ in translated)


def _allowed_processes() -> int:
    """Return how many processes may compile at once; 1 if no others can be started."""
    if getattr(sys, "frozen", False) or not Path(sys.executable or "").stem.lower().startswith("python"):
        # The executable may be a program with Python in it, which would do anything but run a worker.
        return 1
    with suppress(ValueError):
        return int(os.environ.get("ORTGRAD_COMPILE_PROCESSES", ""))
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    return min(os.cpu_count() or 1, _MOST_PROCESSES)


def run(shares: Sequence[Sequence[str]], seconds: float, stopped: threading.Event) -> None:
    """Let each of several workers compile its share, until all are done or `stopped` is set.

    A share consists of texts that begin with the kernel's name, followed by its source. `seconds` is the
    expected time.
    """
    end = time.monotonic() + _PATIENCE * max(seconds, 30)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with suppress(OSError, ValueError):
            for share in shares:
                processes.append(_start(share))
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            if stopped.wait(0.01):
                break
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()


def _start(share: Sequence[str]) -> subprocess.Popen[bytes]:
    path = [entry for entry in sys.path if isinstance(entry, str)]
    program = _PROGRAM.format(path=path, folder=str(Path(__file__).parents[1]), parent=os.getpid())
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
    )
    assert process.stdin is not None
    # On another thread, because the pipe may not hold all of it.
    line = json.dumps(share).encode() + b"\n"
    threading.Thread(target=_send, args=(process.stdin, line), daemon=True).start()
    return process


def _send(pipe: IO[bytes], line: bytes) -> None:
    with suppress(OSError, ValueError):
        pipe.write(line)
        pipe.flush()


def work(parent: int) -> None:
    """Compile kernels as a worker: the texts are a line of stdin, which ends only with the other process."""
    import gc
    import signal

    _end_with(parent)
    share = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_exit_at_end_of_input, daemon=True).start()
    from ortgrad.compiled import compiler, machine_code  # noqa: F401  (imports Numba)

    gc.freeze()  # it would look through all of Numba again and again
    # The other process decides what Ctrl-C means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for text in share:
        # The other process finds the same error when it misses the kernel.
        with suppress(Exception):
            machine_code.compile_into_cache(text, eval(text.partition(" ")[2], _NAMES))


def _end_with(parent: int) -> None:
    """End this process when the one that started it ends, in whatever way, and whatever this one is doing.

    That stdin ends does not suffice: other processes that the parent has forked may hold the pipe open.
    """
    if sys.platform == "win32":
        return  # it has no fork
    if sys.platform.startswith("linux"):
        # Sent when the thread ends that has started this process: it waits for the worker in `run`.
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_exit_without, args=(parent,), daemon=True).start()


def _exit_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_INTERVAL)
    os._exit(1)


def _exit_at_end_of_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
