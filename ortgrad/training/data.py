"""Batches: from arrays, shuffled by a seed, or from an iterable."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from ortgrad.errors import ArgumentTypeError, TrainingError
from ortgrad.graph.feeds import native_order
from ortgrad.graph.matching import nearest
from ortgrad.training.arguments import check_count

Batch = list[np.ndarray]


def is_array(value: Any) -> bool:
    """Return whether a value is an array of some library: NumPy's, PyTorch's, JAX's, a column of pandas."""
    return not isinstance(value, type) and (hasattr(value, "__array__") or hasattr(value, "__dlpack__"))


def as_array(value: Any, what: str) -> np.ndarray:
    """Return a value as an array, without a copy where its library allows that."""
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentTypeError(
            f"{what} is a masked array: choose what stands for the masked elements, .filled()"
        )
    if isinstance(value, np.ndarray):
        return native_order(value)
    if getattr(value, "requires_grad", False):
        raise ArgumentTypeError(f"{what} is a tensor that requires a gradient: give its .detach()")
    try:
        if hasattr(value, "__dlpack_device__") and int(value.__dlpack_device__()[0]) not in _HOST:
            raise ValueError("it is not in main memory; copy it there, in PyTorch by .cpu()")
        if hasattr(value, "__array__"):
            return native_order(np.asarray(value))
        if hasattr(value, "__dlpack__"):
            return np.from_dlpack(value)
        if isinstance(value, (list, tuple)) and value and all(map(is_array, value)):
            return np.stack([as_array(each, what) for each in value])
        return native_order(np.asarray(value))
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise ArgumentTypeError(
            f"{what}, a {type(value).__name__}, cannot be read as an array: {error}"
        ) from error


# The kinds of devices of DLPack that are main memory: CPU, and memory pinned for CUDA or ROCm.
_HOST = (1, 3, 11)


# The label that is ignored, among numbers of classes.
NO_CLASS = -100


@dataclass(frozen=True)
class Inputs:
    """The inputs of a model that the user feeds."""

    names: Sequence[str]
    # The element types; None for one that NumPy does not have.
    types: Mapping[str, np.dtype | None]
    # The inputs of two dimensions with one column.
    columns: Collection[str] = ()
    target: str = ""
    # The labels of the classes, if they are not their numbers, and the label that is to be ignored.
    classes: np.ndarray | None = None
    ignored: Any = None

    def fitted(self, name: str, value: Any) -> np.ndarray:
        """Return a value as an array.

        Integers of another size are converted to the type of the input, and so is float16 for a model that
        is trained in float32. A target may have integers or bools in the place of floating-point numbers,
        labels of classes in the place of their numbers, and may be a vector in the place of a column.
        """
        array, wanted = as_array(value, f"the array of {name!r}"), self.types[name]
        if name == self.target:
            if self.classes is not None:
                array = _numbers_of(array, self.classes, self.ignored, name)
            if name in self.columns and array.ndim == 1:
                array = array[:, np.newaxis]
        if wanted is None or wanted == array.dtype:
            return array
        if wanted == np.float32 and array.dtype.name in ("float16", "bfloat16"):
            return array.astype(wanted)
        allowed = "iuf" if name == self.target else "iu"
        given = "iub" if name == self.target else "iu"
        if wanted.kind in allowed and array.dtype.kind in given:
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
                near = nearest(unknown[0], self.names) if unknown and not missing else ""
                if unknown and missing:
                    problem += f", but {unknown[0]!r}"
                raise TrainingError(f"{what} {problem}; the model takes {', '.join(self.names)}{near}")
            return [self.fitted(name, batch[name]) for name in self.names]
        if not isinstance(batch, (tuple, list)):
            raise ArgumentTypeError(f"{what} is a {type(batch).__name__}, not a tuple or dict of arrays")
        if len(batch) != len(self.names):
            raise TrainingError(
                f"{what} has {len(batch)} arrays; the model takes {len(self.names)}: {', '.join(self.names)}"
            )
        return [self.fitted(name, value) for name, value in zip(self.names, batch, strict=True)]


def _numbers_of(labels: np.ndarray, classes: np.ndarray, ignored: Any, name: str) -> np.ndarray:
    """Return the numbers of the classes with these labels."""
    if labels.dtype.kind in "OST":
        labels = labels.astype(np.str_)
    order = np.argsort(classes)
    comparable = (labels.dtype.kind == "U") == (classes.dtype.kind == "U")
    places = np.searchsorted(classes[order], labels) if comparable else np.zeros(labels.shape, np.int64)
    numbers = order[np.minimum(places, len(classes) - 1)]
    wrong = classes[numbers] != labels if comparable else np.ones(labels.shape, np.bool_)
    if ignored is not None:
        numbers = np.where(labels == ignored, NO_CLASS, numbers)
        wrong &= labels != ignored
    if wrong.any():
        raise TrainingError(
            f"{name!r} has the label {labels[wrong].reshape(-1)[0].item()!r}, but the classes of the model "
            f"are {', '.join(repr(label) for label in classes.tolist()[:20])}"
        )
    return numbers.astype(np.int64)


@dataclass(frozen=True)
class Source:
    """Batches: their number, if known, and a function that yields those of an epoch from a given one on."""

    count: int | None
    begin: Callable[[int, int], Iterator[Batch]]
    # The number of samples of the smallest batch, if that is known, and what batches depend on.
    smallest: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def source_of(data: Any, inputs: Inputs, batch_size: int, seed: int | None, what: str = "the data") -> Source:
    """Return the batches of a tuple or dict of arrays, or of an iterable; without a seed, in order."""
    check_count("batch_size", batch_size, 1)
    # A batch is a tuple, a list or a dict, so that data with an array in it consists of arrays.
    columns = isinstance(data, (tuple, list)) and any(map(is_array, data))
    if isinstance(data, Mapping) or (columns and (isinstance(data, tuple) or len(data) == len(inputs.names))):
        return _from_arrays(inputs.ordered(data, what), inputs, batch_size, seed, what)
    if is_array(data) or not isinstance(data, Iterable):
        raise ArgumentTypeError(
            f"{what} is a {type(data).__name__}; it must be a tuple or a dict of arrays, or batches"
        )
    if isinstance(data, tuple) and len(data) == len(inputs.names) and all(map(_has_numbers, data)):
        raise ArgumentTypeError(f"{what} is a tuple of lists; make arrays of them, numpy.asarray(...)")
    return _from_batches(data, inputs, what)


def _has_numbers(value: Any) -> bool:
    """Return whether a value is a list of numbers, or of lists of numbers."""
    is_list = isinstance(value, list)
    while isinstance(value, list) and value:
        value = value[0]
    return is_list and isinstance(value, (int, float))


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

    settings = {"batch_size": int(batch_size), "shuffle": seed is not None, "samples": size}
    return Source(math.ceil(size / batch_size), begin, size % batch_size or batch_size, settings)


def _from_batches(data: Iterable[Any], inputs: Inputs, what: str) -> Source:
    count = _length(data)

    def begin(epoch: int, first: int) -> Iterator[Batch]:
        number = -1
        for number, batch in enumerate(data):
            if number == count:
                raise TrainingError(f"{what} said that there are {count} batches, and there are more")
            if number >= first:
                yield inputs.ordered(batch, f"batch {number} of {what}")
        if count is not None and number + 1 != count:
            raise TrainingError(f"{what} said that there are {count} batches, and there were {number + 1}")
        if number < 0:
            more = "; an iterator can be used once, a list or a DataLoader again" if epoch else ""
            raise TrainingError(f"there are no batches in {what}{more}")

    return Source(count, begin)


def _length(data: Any) -> int | None:
    """Return the number of batches, or None if the data does not know it."""
    if not hasattr(type(data), "__len__"):
        return None
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        # A DataLoader over an IterableDataset.
        return None


def limited(source: Source, batches: int, data: Any, inputs: Inputs, what: str = "the data") -> Source:
    """Return a source with this many batches in every epoch.

    Data without a length continues in the next epoch where it stopped, and starts again when it has ended.
    """
    if source.count is not None:
        settings = {**source.settings, "batches": batches}
        begin = source.begin
        # The last batches may be left out, and the smallest is among them.
        return Source(batches, lambda *place: islice(begin(*place), batches - place[1]), None, settings)
    stream = _Stream(data, inputs, what)
    return Source(batches, lambda epoch, first: stream.part(epoch * batches + first, batches - first))


class _Stream:
    """Batches without a known end, read across epochs."""

    def __init__(self, data: Iterable[Any], inputs: Inputs, what: str) -> None:
        self._data, self._inputs, self._what = data, inputs, what
        self._iterator = iter(data)
        self._once = self._iterator is data
        # The number of batches that were read, in all and since the data last started.
        self._read = self._of_this = 0

    def part(self, start: int, count: int) -> Iterator[Batch]:
        """Yield `count` batches from the one with the number `start` on."""
        while self._read < start:
            self._next()
        for _ in range(count):
            number = self._read
            yield self._inputs.ordered(self._next(), f"batch {number} of {self._what}")

    def _next(self) -> Any:
        found = next(self._iterator, self)
        if found is self:
            if self._once or not self._of_this:
                raise TrainingError(
                    f"{self._what} ended after {self._read} batches, before the epochs of steps_per_epoch did"
                )
            self._iterator, self._of_this = iter(self._data), 0
            return self._next()
        self._read, self._of_this = self._read + 1, self._of_this + 1
        return found


def samples(batch: Batch, target: int | None) -> int:
    """Return the number of samples of a batch: that of the target, or of the first input with any."""
    arrays = batch if target is None else [batch[target]]
    return next((len(array) for array in arrays if array.ndim), 1)
