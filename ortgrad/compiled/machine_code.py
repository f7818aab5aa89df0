"""Machine code by source: compiled by Numba, or loaded from the cache without Numba being imported."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ortgrad.compiled import cache
from ortgrad.compiled.progress import Progress
from ortgrad.compiled.source import Source, source_of
from ortgrad.operators.compiled import CompiledKernel

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
    "transforms.py",
)

_lock = threading.RLock()
_loaded: dict[str, int] = {}
_progress = Progress()


class Entry(NamedTuple):
    """The addresses of the functions in ortgrad.compiled.entry."""

    compute: int
    perform: int


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
        return Entry(*(_address(name, functools.partial(_compile_entry, name)) for name in Entry._fields))
    except (ImportError, AttributeError, TypeError) as error:
        # Numba refuses to be imported beside releases of NumPy that it does not know, and a new release of it
        # may lack what ortgrad.compiled.libraries uses of its compiler.
        warnings.warn(f"kernels are not compiled: {error}", RuntimeWarning, stacklevel=2)
        return None


def block(kernel: CompiledKernel, dtypes: Sequence[str]) -> int:
    """Return the address of a kernel's block for inputs and outputs of these element types.

    Raises RegistrationError if Numba cannot compile the kernel.
    """
    return _block(kernel, tuple(dtypes))


@functools.lru_cache(maxsize=1024)
def _block(kernel: CompiledKernel, dtypes: tuple[str, ...]) -> int:
    source = source_of(kernel, dtypes)
    return _address(f"{kernel.function.__name__} {source}", lambda: _compile_block(source))


def _address(text: str, compile_code: Callable[[], bytes]) -> int:
    from ortgrad.compiled import processor  # llvmlite is imported only if a session needs it

    key = _key(text)
    with _lock:
        if key not in _loaded:
            code = cache.read(key)
            if code is None:
                with _progress.compiling(text.partition(" ")[0]):
                    code = compile_code()
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
    return (*versions, *processor.description(), *parts)


def _compile_entry(name: str) -> bytes:
    from ortgrad.compiled import compiler  # Numba is slow to import

    return compiler.compile_entry(name)


def _compile_block(source: Source) -> bytes:
    from ortgrad.compiled import compiler

    return compiler.compile_block(source)
