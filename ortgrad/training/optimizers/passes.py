"""A pass over flat arrays of equal length, in chunks that are distributed to threads.

A kernel is a function of the number of a chunk, the arrays and some numbers. It is written twice: as a loop
over elements, which Numba compiles, and in NumPy, for machines without Numba. Chunks are independent of each
other and depend on the length of the arrays only, so results do not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ortgrad.compiled import layout, machine_code
from ortgrad.operators.compiled import CompiledKernel
from ortgrad.threads import lazy, make_lock

# The number of elements of a chunk: with its share of four arrays it fits into a processor's own cache.
CHUNK = 1 << 15
# Fewer elements than this are not worth another thread.
_FEWEST_PER_THREAD = 1 << 16
_PARTS_PER_THREAD = 8


@dataclass(frozen=True, eq=False)
class Pass:
    """A kernel over flat arrays.

    `loop` performs one chunk for Numba. `numpy` performs it in NumPy: it takes the slices of the arrays, then
    `scratch` temporary arrays as long as they are, then the numbers as keywords. The arrays in `partial` have
    one element per chunk instead, and double precision: they receive sums.
    """

    loop: Callable[..., None]
    numpy: Callable[..., None]
    arrays: int
    scratch: int = 0
    partial: int = 0

    @lazy
    def kernel(self) -> CompiledKernel:
        count = self.arrays + self.partial
        return CompiledKernel(self.loop, count, views=(1,) * count)

    def types(self, dtype: np.dtype) -> list[str]:
        """Return the element types of all arrays."""
        return [dtype.name] * self.arrays + ["float64"] * self.partial

    @functools.cache  # noqa: B019 (passes live as long as the process)
    def machine_code(self, dtype: np.dtype) -> Callable[[int, int], None]:
        """Return the compiled function; it takes the address of a call and the number of a part."""
        block: Callable[[int, int], None] = _BLOCK(machine_code.block(self.kernel, self.types(dtype)))
        return block

    def __call__(
        self, *arrays: np.ndarray, threads: int = 1, compiled: bool = True, **numbers: float
    ) -> None:
        """Run the kernel over all elements."""
        size, dtype = self._check(arrays, numbers)
        chunks = -(-size // CHUNK)
        if chunks == 0:
            return
        threads = max(1, min(threads, chunks, size // _FEWEST_PER_THREAD))
        parts = 1 if threads == 1 else min(chunks, threads * _PARTS_PER_THREAD)
        if compiled and is_compiled():
            work = self._compiled(arrays, chunks, parts, dtype, numbers)
        else:
            work = self._in_numpy(arrays, chunks, parts, dtype, numbers)
        distribute(work, parts, threads)

    def _check(self, arrays: Sequence[np.ndarray], numbers: Mapping[str, float]) -> tuple[int, np.dtype]:
        """Compiled code trusts the arrays, so they are checked here."""
        if len(arrays) != self.arrays + self.partial or set(numbers) != set(self.kernel.numbers):
            count = self.arrays + self.partial
            raise TypeError(f"{self.loop.__name__} takes {count} arrays and {list(self.kernel.numbers)}")
        size, dtype = arrays[0].size, arrays[0].dtype
        for i, array in enumerate(arrays):
            length, kind = (size, dtype) if i < self.arrays else (-(-size // CHUNK), np.dtype(np.float64))
            good = array.shape == (length,) and array.dtype == kind and array.flags.c_contiguous
            if not good or not array.flags.writeable or not array.flags.aligned:
                raise ValueError(f"array {i} of {self.loop.__name__} has another length or type")
        if dtype not in (np.float32, np.float64):
            raise ValueError(f"{self.loop.__name__} has no kernel for {dtype}")
        return size, dtype

    def _compiled(
        self,
        arrays: Sequence[np.ndarray],
        chunks: int,
        parts: int,
        dtype: np.dtype,
        numbers: Mapping[str, float],
    ) -> Callable[[int], None]:
        """Return a function that performs one of several parts of the chunks."""
        block = self.machine_code(dtype)
        lengths = [array.size for array in arrays]
        bits = [_bits(numbers[name]) for name in self.kernel.numbers]
        # One phase, without scratch memory and products.
        header = [0] * layout.PHASE_FIELDS
        header[layout.PHASES] = 1
        plan = np.array([*header, chunks, parts, *lengths, *bits], np.int64)
        fields = [0] * layout.TENSORS
        fields[layout.CALL_PLAN] = plan.ctypes.data
        call = np.array([*fields, *(array.ctypes.data for array in arrays)], np.int64)
        address = call.ctypes.data

        def perform(part: int, _alive: object = (plan, call, arrays)) -> None:
            block(address, part)

        return perform

    def _in_numpy(
        self,
        arrays: Sequence[np.ndarray],
        chunks: int,
        parts: int,
        dtype: np.dtype,
        numbers: Mapping[str, float],
    ) -> Callable[[int], None]:
        typed = {name: dtype.type(value) for name, value in numbers.items()}

        def perform(part: int) -> None:
            memory = [np.empty(CHUNK, dtype) for _ in range(self.scratch)]
            with np.errstate(all="ignore"):
                for i in range(chunks * part // parts, chunks * (part + 1) // parts):
                    slices = [array[i * CHUNK : (i + 1) * CHUNK] for array in arrays[: self.arrays]]
                    sums = [array[i : i + 1] for array in arrays[self.arrays :]]
                    self.numpy(*slices, *sums, *(m[: len(slices[0])] for m in memory), **typed)

        return perform


_BLOCK = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)


def _bits(number: float) -> int:
    (bits,) = struct.unpack("q", struct.pack("d", number))
    return int(bits)


# Threads


def thread_count(wanted: int = 0) -> int:
    """Return the number of threads to use: as many as there are processors, unless another is wanted."""
    if wanted > 0:
        return wanted
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def distribute(work: Callable[[int], None], parts: int, threads: int) -> None:
    """Call work(part) for every part, on this thread and others."""
    if threads <= 1 or parts <= 1:
        for part in range(parts):
            work(part)
        return
    remaining, lock = iter(range(parts)), make_lock()

    def take() -> None:
        while True:
            with lock:
                part = next(remaining, None)
            if part is None:
                return
            work(part)

    others = [_pool().submit(take) for _ in range(threads - 1)]
    try:
        take()
    finally:
        for other in others:
            other.result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_count(), "ortgrad-optimizer")


if hasattr(os, "register_at_fork"):
    # A forked child has the pool but none of its threads.
    os.register_at_fork(after_in_child=_pool.cache_clear)


def is_compiled() -> bool:
    """Return whether kernels are compiled here."""
    return machine_code.entry() is not None


def warm_up(kernel: Pass, dtype: np.dtype) -> None:
    """Compile a kernel, so that the first step does not have to."""
    if is_compiled():
        kernel.machine_code(dtype)
