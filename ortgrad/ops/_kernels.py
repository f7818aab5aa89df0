"""What NumPy kernels share."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import numpy as np

# A handful of arrays of this size fit a core's cache.
_CACHED_BYTES = 1 << 18
_BITS: dict[int, type[np.signedinteger]] = {4: np.int32, 8: np.int64}


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_count() - 1, thread_name_prefix="ortgrad")


if hasattr(os, "register_at_fork"):
    # A forked child has the pool but none of its threads.
    os.register_at_fork(after_in_child=_pool.cache_clear)


@cache
def thread_count() -> int:
    """The number of threads a kernel may use: one per core that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parallel(function: Callable[[int], Any], count: int) -> None:
    """Call function(0) ... function(count - 1) on all threads; NumPy releases the GIL meanwhile."""
    indices = iter(range(count))

    def work() -> None:
        # NumPy's error state belongs to a thread.
        with np.errstate(all="ignore"):
            for i in indices:
                function(i)

    helpers = [_pool().submit(work) for _ in range(min(count, thread_count()) - 1)]
    try:
        work()
    finally:
        # A helper that has not begun by now has nothing left to do. Not waiting for it also keeps
        # a nested parallel() from waiting for itself.
        wait(begun := [helper for helper in helpers if not helper.cancel()])
    for helper in begun:
        helper.result()


def piecewise(function: Callable[..., None], out: np.ndarray, *arrays: np.ndarray) -> np.ndarray:
    """Fill out with an element-wise function(out, ...), piece by piece to stay in the cache; returns out."""
    blockwise(function, *(a.reshape(-1) for a in (out, *arrays)))
    return out


def blockwise(function: Callable[..., None], out: np.ndarray, *arrays: np.ndarray) -> None:
    """Fill out with function(out, ...), over pieces along the first axis that fit the cache.

    This runs on one thread: for operations this short, switching the GIL costs what a second one gains.
    """
    rows, size = len(out), out.nbytes
    step = max(1, _CACHED_BYTES * rows // size) if size else 1
    for start in range(0, rows if size else 0, step):
        function(*(a[start : start + step] for a in (out, *arrays)))


def keep_where(mask: np.ndarray, values: np.ndarray, out: np.ndarray) -> None:
    """The values where the mask is true, else 0. Unlike a product with 0, this cuts off inf and NaN too."""
    bits = _BITS[values.itemsize]
    np.multiply(values.view(bits), mask.view(np.int8), out=out.view(bits))
