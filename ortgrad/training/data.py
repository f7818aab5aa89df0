"""Batches: from arrays, with a shuffling that depends on a seed, or from an iterable."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortgrad.errors import ArgumentTypeError, TrainingError

Batch = list[np.ndarray]


@dataclass(frozen=True)
class Inputs:
    """The inputs of a model that the user feeds."""

    names: Sequence[str]
    # The element types as NumPy has them; None if it has none for it.
    types: Mapping[str, np.dtype | None]

    def fitted(self, name: str, value: Any) -> np.ndarray:
        """Return a value as an array; integers of another size get the type of the input."""
        array = np.asarray(value)
        wanted = self.types[name]
        if wanted is not None and wanted != array.dtype and wanted.kind in "iu" and array.dtype.kind in "iu":
            # A value that does not fit stays as it is, and is refused.
            converted = array.astype(wanted)
            return converted if np.array_equal(converted, array) else array
        return array

    def ordered(self, batch: Any, what: str) -> Batch:
        """Return the arrays of a batch, a mapping or a sequence, in the order of the inputs."""
        if isinstance(batch, Mapping):
            missing = [name for name in self.names if name not in batch]
            unknown = [name for name in batch if name not in self.names]
            if missing or unknown:
                problem = f"has no {missing[0]!r}" if missing else f"has {unknown[0]!r}"
                raise TrainingError(f"{what} {problem}; the model takes {', '.join(self.names)}")
            return [self.fitted(name, batch[name]) for name in self.names]
        if not isinstance(batch, (tuple, list)):
            raise ArgumentTypeError(f"{what} is a {type(batch).__name__}, not a tuple or dict of arrays")
        if len(batch) != len(self.names):
            raise TrainingError(
                f"{what} has {len(batch)} arrays; the model takes {len(self.names)}: {', '.join(self.names)}"
            )
        return [self.fitted(name, value) for name, value in zip(self.names, batch, strict=True)]


@dataclass(frozen=True)
class Source:
    """Batches: their number if it is known, and a function that yields those of an epoch from one on."""

    count: int | None
    begin: Callable[[int, int], Iterator[Batch]]


def source_of(data: Any, inputs: Inputs, batch_size: int, seed: int | None, what: str = "the data") -> Source:
    """Return the batches of a tuple or dict of arrays, or of an iterable; without a seed, in their order."""
    if batch_size < 1:
        raise TrainingError(f"batch_size is {batch_size}; it must be at least 1")
    if isinstance(data, Mapping) or (
        isinstance(data, tuple) and all(isinstance(a, np.ndarray) for a in data)
    ):
        return _from_arrays(inputs.ordered(data, what), inputs, batch_size, seed, what)
    if isinstance(data, np.ndarray) or not isinstance(data, Iterable):
        raise ArgumentTypeError(
            f"{what} is a {type(data).__name__}; it must be a tuple or a dict of arrays, or batches"
        )
    return _from_batches(data, inputs, what)


def _from_arrays(arrays: Batch, inputs: Inputs, batch_size: int, seed: int | None, what: str) -> Source:
    for name, array in zip(inputs.names, arrays, strict=True):
        if array.ndim == 0 or len(array) != len(arrays[0]):
            raise TrainingError(
                f"the arrays of {what} have different lengths: {inputs.names[0]!r} has the shape "
                f"{list(arrays[0].shape)}, {name!r} {list(array.shape)}"
            )
    size = len(arrays[0]) if arrays else 0
    if size == 0:
        raise TrainingError(f"there are no samples in {what}")

    def begin(epoch: int, first: int) -> Iterator[Batch]:
        order = None if seed is None else np.random.default_rng([seed, epoch]).permutation(size)
        for start in range(first * batch_size, size, batch_size):
            chosen: Any = slice(start, start + batch_size)
            yield [array[chosen if order is None else order[chosen]] for array in arrays]

    return Source(math.ceil(size / batch_size), begin)


def _from_batches(data: Iterable[Any], inputs: Inputs, what: str) -> Source:
    def begin(epoch: int, first: int) -> Iterator[Batch]:
        number = -1
        for number, batch in enumerate(data):
            if number >= first:
                yield inputs.ordered(batch, f"batch {number} of {what}")
        if number < 0:
            more = "; an iterator can be used once, a list or a DataLoader again" if epoch else ""
            raise TrainingError(f"there are no batches in {what}{more}")

    return Source(len(data) if isinstance(data, Sized) else None, begin)


def samples(batch: Batch) -> int:
    """Return the number of samples of a batch: the length of the target, which is the last of the inputs."""
    return len(batch[-1]) if batch and batch[-1].ndim else 1
