"""What a checkpoint holds, independent of its format."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import ml_dtypes
import numpy as np

from ortgrad.errors import CheckpointError

Property: TypeAlias = "int | float | str"

# The element types of parameters, by their number in ONNX.
ELEMENT_TYPES: dict[int, np.dtype] = {
    1: np.dtype(np.float32),
    2: np.dtype(np.uint8),
    3: np.dtype(np.int8),
    4: np.dtype(np.uint16),
    5: np.dtype(np.int16),
    6: np.dtype(np.int32),
    7: np.dtype(np.int64),
    9: np.dtype(np.bool_),
    10: np.dtype(np.float16),
    11: np.dtype(np.float64),
    12: np.dtype(np.uint32),
    13: np.dtype(np.uint64),
    16: np.dtype(ml_dtypes.bfloat16),
}
# NumPy 1 has arrays of at most 32 dimensions.
MOST_DIMENSIONS = 32
_INT64 = 1 << 63


@dataclass
class OptimizerGroup:
    """The state of the optimizer of a group of parameters."""

    step: int = 0
    initial_learning_rate: float = 0.001
    # By parameter: {"momentum0": ..., "momentum1": ...}
    momentums: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)


@dataclass
class Checkpoint:
    """Parameters by name, optimizer state by group, and properties by name.

    A nominal checkpoint has the names and element types of the parameters, but no values: its arrays are
    empty.
    """

    trainable: dict[str, np.ndarray] = field(default_factory=dict)
    frozen: dict[str, np.ndarray] = field(default_factory=dict)
    optimizer: dict[str, OptimizerGroup] = field(default_factory=dict)
    properties: dict[str, Property] = field(default_factory=dict)
    nominal: bool = False

    def sorted(self) -> Checkpoint:
        """Return the same checkpoint with everything in the order of the names."""
        groups = {
            name: OptimizerGroup(
                group.step,
                group.initial_learning_rate,
                {key: dict(sorted(value.items())) for key, value in sorted(group.momentums.items())},
            )
            for name, group in sorted(self.optimizer.items())
        }
        return Checkpoint(
            dict(sorted(self.trainable.items())),
            dict(sorted(self.frozen.items())),
            groups,
            dict(sorted(self.properties.items())),
            self.nominal,
        )

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield every array with a description for error messages."""
        for name, array in (*self.trainable.items(), *self.frozen.items()):
            yield f"parameter {name!r}", array
        for group in self.optimizer.values():
            for parameter, momentums in group.momentums.items():
                for name, array in momentums.items():
                    yield f"{name} of parameter {parameter!r}", array


def check(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a checkpoint cannot be written."""
    both = checkpoint.trainable.keys() & checkpoint.frozen.keys()
    if both:
        raise CheckpointError(f"parameter {min(both)!r} is both trainable and frozen")
    known = set(ELEMENT_TYPES.values())
    for what, array in checkpoint.arrays():
        if not isinstance(array, np.ndarray) or array.dtype.newbyteorder("=") not in known:
            kind = getattr(array, "dtype", type(array).__name__)
            raise CheckpointError(f"{what} has the type {kind}, which checkpoints cannot hold")
        if array.ndim > MOST_DIMENSIONS:
            raise CheckpointError(
                f"{what} has {array.ndim} dimensions; at most {MOST_DIMENSIONS} are possible"
            )
    for name, value in checkpoint.properties.items():
        if not isinstance(value, (int, float, str)):
            raise CheckpointError(f"property {name!r} is a {type(value).__name__}, not an int, float or str")
        if isinstance(value, int) and not -_INT64 <= value < _INT64:
            raise CheckpointError(f"property {name!r} is {value}, which has more than 64 bits")
    for name, group in checkpoint.optimizer.items():
        if not -_INT64 <= group.step < _INT64:
            raise CheckpointError(f"the step of optimizer group {name!r} has more than 64 bits")


def element_type(array: np.ndarray) -> int:
    """Return ONNX's number of an array's element type."""
    native = array.dtype.newbyteorder("=")
    return next(number for number, dtype in ELEMENT_TYPES.items() if dtype == native)


def as_bytes(array: np.ndarray) -> memoryview:
    """Return the elements as bytes in little-endian order, without a copy where possible."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8).data


def size_in_bytes(shape: Sequence[int], dtype: np.dtype) -> int | None:
    """Return the size of an array; None if there can be no such array."""
    if len(shape) > MOST_DIMENSIONS or min(shape, default=0) < 0:
        return None
    # NumPy multiplies the lengths that are not 0 even if there is one that is.
    if math.prod(max(length, 1) for length in shape) * dtype.itemsize >= _INT64:
        return None
    return math.prod(shape) * dtype.itemsize
