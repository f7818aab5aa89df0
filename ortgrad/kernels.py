"""What NumPy kernels share."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

# Below this many elements per thread, starting the threads costs more than they bring.
_ELEMENTS_PER_THREAD = 1 << 17
_CHUNK = 1 << 16


def require_same_shape(**arrays: np.ndarray) -> None:
    """Raise unless all arrays have one shape."""
    if len({a.shape for a in arrays.values()}) > 1:
        shapes = ", ".join(f"{name} has {list(a.shape)}" for name, a in arrays.items())
        raise ValueError(f"the shapes must be equal: {shapes}")


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_count(), thread_name_prefix="ortgrad")


@cache
def thread_count() -> int:
    """How many threads a kernel may use: the cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parallel(function: Callable[[int], Any], count: int) -> None:
    """Call function(0) ... function(count - 1) on all threads; NumPy lets go of the GIL meanwhile."""
    if count < 2 or thread_count() < 2:
        for i in range(count):
            function(i)
        return
    for _ in _pool().map(function, range(count)):
        pass


def elementwise(function: Callable[..., None], *arrays: np.ndarray) -> None:
    """Run an in-place element-wise function over pieces that fit the cache, on all threads."""
    flat = [a.reshape(-1) for a in arrays]
    size = flat[0].size
    threads = min(thread_count(), max(1, size // _ELEMENTS_PER_THREAD))
    per_thread = -(-size // threads) if size else 0

    def run(thread: int) -> None:
        for start in range(thread * per_thread, min(size, (thread + 1) * per_thread), _CHUNK):
            stop = min(start + _CHUNK, (thread + 1) * per_thread)
            function(*(a[start:stop] for a in flat))

    parallel(run, threads)
