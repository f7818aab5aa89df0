"""Passes over flat arrays of equal length, distributed to threads.

Most passes are a formula of one element, from which both ways to run it are made: Numba compiles a loop over
it, and without Numba its operations are performed on chunks of the arrays by NumPy. Elements, and the chunks
that are summed, are independent of each other, so results do not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortgrad.compiled import layout, machine_code
from ortgrad.operators.compiled import Argument, Bundled, CompiledKernel
from ortgrad.threads import lazy, make_lock
from ortgrad.training.optimizers.formulas import Program, record

# The number of elements of a chunk: with its share of four arrays it fits into a processor's own cache.
CHUNK = 1 << 15
# Fewer elements than this are not worth another thread.
_FEWEST_PER_THREAD = 1 << 16
_PARTS_PER_THREAD = 8


@dataclass(frozen=True, eq=False)
class Pass(ABC):
    """A function over flat arrays, compiled or in NumPy."""

    function: Callable[..., Any]

    @property
    @abstractmethod
    def kernel(self) -> CompiledKernel:
        """The function for Numba."""

    @property
    def arrays(self) -> int:
        """The number of arrays of equal length. Further ones have one sum per chunk, in double precision."""
        return self.kernel.tensors

    @property
    def scratch(self) -> int:
        """The number of temporary arrays that NumPy needs for a chunk."""
        return 0

    @abstractmethod
    def _evaluate(
        self, arrays: Sequence[np.ndarray], numbers: Sequence[np.generic], scratch: Sequence[np.ndarray]
    ) -> None:
        """Perform the pass on one chunk in NumPy."""

    def types(self, dtype: np.dtype) -> list[str]:
        """Return the element types of all arrays."""
        return [dtype.name] * self.arrays + ["float64"] * (self.kernel.tensors - self.arrays)

    @functools.cache  # noqa: B019 (passes live as long as the process)
    def machine_code(self, dtype: np.dtype) -> Callable[[int, int], None]:
        """Return the compiled function; it takes the address of a call and the number of a part."""
        block: Callable[[int, int], None] = _BLOCK(machine_code.block(self.kernel, self.types(dtype)))
        return block

    def __call__(
        self, *arrays: np.ndarray, threads: int = 1, compiled: bool = True, **numbers: float
    ) -> None:
        """Run the kernel over all elements."""
        size = self._check(arrays, numbers)
        chunks = -(-size // CHUNK)
        if chunks == 0:
            return
        threads = max(1, min(threads, chunks, size // _FEWEST_PER_THREAD))
        parts = 1 if threads == 1 else min(chunks, threads * _PARTS_PER_THREAD)
        ordered = [numbers[name] for name in self.kernel.numbers]
        if compiled and is_compiled():
            work = self._compiled(arrays, chunks, parts, ordered)
        else:
            work = self._in_numpy(arrays, chunks, parts, ordered)
        distribute(work, parts, threads)

    def _check(self, arrays: Sequence[np.ndarray], numbers: Mapping[str, float]) -> int:
        """Return the length of the arrays, which are checked here: compiled code trusts them."""
        count, name = self.kernel.tensors, self.function.__name__
        if len(arrays) != count or set(numbers) != set(self.kernel.numbers):
            raise TypeError(f"{name} takes {count} arrays and {list(self.kernel.numbers)}")
        size, dtype = arrays[0].size, arrays[0].dtype
        for i, array in enumerate(arrays):
            length, kind = (size, dtype) if i < self.arrays else (-(-size // CHUNK), np.dtype(np.float64))
            good = array.shape == (length,) and array.dtype == kind and array.flags.c_contiguous
            if not good or not array.flags.writeable or not array.flags.aligned:
                raise ValueError(f"array {i} of {name} has another length or type")
        if dtype not in (np.float32, np.float64):
            raise ValueError(f"{name} has no kernel for {dtype}")
        return size

    def _compiled(
        self, arrays: Sequence[np.ndarray], chunks: int, parts: int, numbers: Sequence[float]
    ) -> Callable[[int], None]:
        """Return a function that performs one of several parts of the elements."""
        block = self.machine_code(arrays[0].dtype)
        lengths = [array.size for array in arrays]
        # The tasks, and the sizes of the views that a kernel of tasks has.
        tasks, views = (lengths[0], []) if self.kernel.elementwise else (chunks, lengths)
        # One phase, without scratch memory and products.
        header = [0] * layout.PHASE_FIELDS
        header[layout.PHASES] = 1
        plan = np.array([*header, tasks, parts, *views, *map(_bits, numbers)], np.int64)
        fields = [0] * layout.TENSORS
        fields[layout.CALL_PLAN] = plan.ctypes.data
        call = np.array([*fields, *(array.ctypes.data for array in arrays)], np.int64)
        address = call.ctypes.data

        def perform(part: int, _alive: object = (plan, call, arrays)) -> None:
            block(address, part)

        return perform

    def _in_numpy(
        self, arrays: Sequence[np.ndarray], chunks: int, parts: int, numbers: Sequence[float]
    ) -> Callable[[int], None]:
        dtype = arrays[0].dtype
        typed = [dtype.type(number) for number in numbers]

        def perform(part: int) -> None:
            memory = [np.empty(CHUNK, dtype) for _ in range(self.scratch)]
            with np.errstate(all="ignore"):
                for i in range(chunks * part // parts, chunks * (part + 1) // parts):
                    slices = [array[i * CHUNK : (i + 1) * CHUNK] for array in arrays[: self.arrays]]
                    sums = [array[i : i + 1] for array in arrays[self.arrays :]]
                    self._evaluate([*slices, *sums], typed, [m[: len(slices[0])] for m in memory])

        return perform


@dataclass(frozen=True, eq=False)
class Update(Pass):
    """A formula of one element of every array, which returns the new elements of some of them."""

    # The places of these arrays.
    updated: tuple[int, ...]
    # The same for NumPy, in place, if the formula has branches.
    in_numpy: Callable[..., None] | None

    @lazy
    def kernel(self) -> CompiledKernel:
        parameters = inspect.signature(self.function).parameters
        arrays = [each for each in parameters.values() if each.kind is each.POSITIONAL_ONLY]
        return CompiledKernel(self.function, len(arrays), updated=self.updated)

    @lazy
    def program(self) -> Program:
        """The formula for NumPy."""
        kernel = self.kernel

        @functools.wraps(self.function)
        def of_terms(*terms: Any) -> Any:
            numbers = dict(zip(kernel.numbers, terms[kernel.tensors :], strict=True))

            def value_of(argument: Argument) -> Any:
                if not isinstance(argument, Bundled):
                    return numbers[argument]
                return argument.kind(*map(value_of, argument.fields))

            return self.function(*terms[: kernel.tensors], *map(value_of, kernel.arguments))

        return record(of_terms, kernel.tensors, len(kernel.numbers), self.updated)

    @property
    def scratch(self) -> int:
        return self.program.scratch if self.in_numpy is None else 0

    def _evaluate(
        self, arrays: Sequence[np.ndarray], numbers: Sequence[np.generic], scratch: Sequence[np.ndarray]
    ) -> None:
        if self.in_numpy is None:
            self.program.run(arrays, numbers, scratch)
        else:
            self.in_numpy(*arrays, *numbers)


def update(*names: str, in_numpy: Callable[..., Any] | None = None) -> Callable[[Callable[..., Any]], Update]:
    """Return a decorator that makes a pass of a formula, which returns the new elements of these arrays.

    Its parameters before the slash are elements of arrays. The others are numbers, or bundles of them.
    `in_numpy` does the same to arrays in place, for a formula with branches.
    """

    def declare(function: Callable[..., Any]) -> Update:
        places = {name: i for i, name in enumerate(inspect.signature(function).parameters)}
        return Update(function, tuple(places[name] for name in names), in_numpy)

    return declare


@dataclass(frozen=True, eq=False)
class Sums(Pass):
    """A sum over the elements of each chunk, in double precision: a loop for Numba, and the same in NumPy.

    It is called with the array, and one that receives the sums.
    """

    in_numpy: Callable[[np.ndarray], float]

    @lazy
    def kernel(self) -> CompiledKernel:
        return CompiledKernel(self.function, 2, views=(1, 1))

    @property
    def arrays(self) -> int:
        return 1

    def _evaluate(
        self, arrays: Sequence[np.ndarray], numbers: Sequence[np.generic], scratch: Sequence[np.ndarray]
    ) -> None:
        array, sums = arrays
        sums[0] = self.in_numpy(array)


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
