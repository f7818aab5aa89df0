"""Machine code by source: compiled by Numba, or loaded from the cache without Numba being imported."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ortgrad.compiled import cache, workers
from ortgrad.compiled.progress import Progress
from ortgrad.compiled.source import Source, source_of
from ortgrad.operators.compiled import CompiledKernel
from ortgrad.threads import call_elsewhere, forks_wait, make_lock, make_reentrant_lock

# What the compiler itself consists of, and so determines its results.
_PARTS = (
    "channels.py",
    "compiler.py",
    "entry.py",
    "functions.py",
    "instructions.py",
    "layout.py",
    "libraries.py",
    "panels.py",
    "processor.py",
    "products.py",
    "rows.py",
    "squares.py",
    "transforms.py",
    "variables.py",
)

_MOST_NAMES = 4  # of kernels that are compiled at once, on the terminal

_lock = make_reentrant_lock()
# Held while workers run: threads that need the same kernels at the same time share them.
_workers_lock = make_lock()
_loaded: dict[str, int] = {}
_progress = Progress()


class Entry(NamedTuple):
    """The addresses of the functions in ortgrad.compiled.entry."""

    compute: int
    perform: int
    guarded: int


@functools.cache
def is_installed() -> bool:
    """Return whether kernels can be compiled: Numba is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("numba", "llvmlite"))


@functools.cache
def entry() -> Entry | None:
    """Return the functions that all compiled kernels share; None without a Numba that works."""
    if not is_installed():
        return None
    try:
        return Entry(*map(_entry_address, Entry._fields))
    except (ImportError, AttributeError, TypeError) as error:
        # Numba refuses to be imported beside releases of NumPy that it does not know, and a new release of it
        # may lack what ortgrad.compiled.libraries uses of its compiler.
        warnings.warn(f"kernels are not compiled: {error}", RuntimeWarning, stacklevel=2)
        return None


def _entry_address(name: str) -> int:
    return _address(name, _key(name), lambda: _compile_entry(name))


def block(kernel: CompiledKernel, dtypes: Sequence[str]) -> int:
    """Return the address of a kernel's block for inputs and outputs of these element types.

    Raises RegistrationError if Numba cannot compile the kernel.
    """
    return _block(kernel, tuple(dtypes))


@functools.lru_cache(maxsize=1024)
def _block(kernel: CompiledKernel, dtypes: tuple[str, ...]) -> int:
    text, key, source = _job(kernel, dtypes)
    return _address(text, key, lambda: _compile_block(source), cached=source.is_text)


def compile_all(kernels: Iterable[tuple[CompiledKernel, Sequence[str]]]) -> None:
    """Let several processes compile the kernels that are not in the cache, if that takes long.

    Nothing is loaded, and kernels that it leaves out are compiled by `block`. An exception of a signal
    handler ends it at once.
    """
    stopped = threading.Event()

    @contextmanager
    def stop() -> Iterator[None]:
        stopped.set()
        yield

    wanted = dict.fromkeys((kernel, tuple(dtypes)) for kernel, dtypes in kernels)
    call_elsewhere(lambda: _compile_all(wanted, stopped), stop)


def _compile_all(kernels: Iterable[tuple[CompiledKernel, tuple[str, ...]]], stopped: threading.Event) -> None:
    while not _workers_lock.acquire(timeout=0.1):
        if stopped.is_set():
            return
    try:
        jobs = _missing(kernels)
        shares = [[jobs[i] for i in share] for share in workers.distribute([job.source for job in jobs])]
        if not shares or not cache.is_writable():
            return
        seconds = max(workers.expected_seconds([job.source for job in share]) for share in shares)
        with _progress.compiling(_names(job.text for share in shares for job in share), seconds):
            workers.run([[job.text for job in share] for share in shares], seconds, stopped)
    finally:
        _workers_lock.release()


def _missing(kernels: Iterable[tuple[CompiledKernel, tuple[str, ...]]]) -> list[_Job]:
    """Return what there is to compile."""
    jobs: dict[str, _Job] = {}
    for kernel, dtypes in kernels:
        try:
            job = _job(kernel, dtypes)
        except Exception:
            continue  # `block` raises it
        if job.key not in _loaded and job.source.is_text and not cache.has(job.key):
            jobs[job.key] = job
    return list(jobs.values())


def _names(texts: Iterable[str]) -> str:
    names = list(dict.fromkeys(map(_name, texts)))
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def compile_into_cache(text: str, source: Source) -> None:
    """Compile a kernel for another process. The text is its name, followed by its source."""
    cache.write(_key(text), _compile_block(source))


class _Job(NamedTuple):
    """A kernel to be compiled."""

    # The name of its function, and its source.
    text: str
    key: str
    source: Source


@functools.lru_cache(maxsize=1024)
def _job(kernel: CompiledKernel, dtypes: tuple[str, ...]) -> _Job:
    source = source_of(kernel, dtypes)
    text = f"{kernel.function.__name__} {source}"
    return _Job(text, _key(text), source)


def _name(text: str) -> str:
    return text.partition(" ")[0]


def _address(text: str, key: str, compile_code: Callable[[], bytes], *, cached: bool = True) -> int:
    from ortgrad.compiled import processor  # llvmlite is imported only if a session needs it

    with forks_wait(), _lock:
        if key not in _loaded:
            code = cache.read(key) if cached else None
            if code is None:
                with _progress.compiling(_name(text)):
                    code = compile_code()
                if cached:
                    cache.write(key, code)
            _loaded[key] = processor.load(code)
        return _loaded[key]


def _key(text: str) -> str:
    return repr((*_surroundings(), text))


@functools.cache
def _surroundings() -> tuple[object, ...]:
    from ortgrad.compiled import processor

    versions = [importlib.metadata.version(name) for name in ("numba", "llvmlite")]
    parts = [Path(__file__).with_name(name).read_text(encoding="utf-8") for name in _PARTS]
    return (*versions, *processor.description(), *sorted(processor.SYMBOLS), *parts)


def _compile_entry(name: str) -> bytes:
    from ortgrad.compiled import compiler  # Numba is slow to import

    return compiler.compile_entry(name)


def _compile_block(source: Source) -> bytes:
    from ortgrad.compiled import compiler

    return compiler.compile_block(source)
