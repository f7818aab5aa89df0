"""Parameters and properties of a CheckpointState."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime

from ortgrad.errors import ArgumentTypeError, ParameterNotFoundError, TrainingError
from ortgrad.keywords import checked
from ortgrad.training.checkpoint.state import Property
from ortgrad.training.state import TrainingState, describe

_INT64 = 1 << 63


@checked
class Parameter:
    """A parameter of the model: views of its value and its gradient.

    Obtained from `CheckpointState.parameters`.

    >>> import numpy as np
    >>> from ortgrad.training.api import CheckpointState
    >>> from ortgrad.training.checkpoint import Checkpoint
    >>> from ortgrad.training.state import TrainingState
    >>> state = CheckpointState(TrainingState(Checkpoint(trainable={"w": np.zeros(2, np.float32)})))
    >>> parameter = state.parameters["w"]
    >>> parameter.data = np.float32([1, 2])
    >>> parameter.data, parameter.requires_grad, parameter.grad
    (array([1., 2.], dtype=float32), True, None)
    """

    def __init__(self, name: str, state: TrainingState) -> None:
        self._name, self._state = name, state

    @property
    def name(self) -> str:
        """The name of the parameter."""
        return self._name

    @property
    def data(self) -> np.ndarray:
        """The value. Writing to the array, or setting this property, changes the parameter."""
        return self._state.parameter(self._name)

    @data.setter
    def data(self, value: np.ndarray) -> None:
        copy_to_parameter(self._state, self._name, value)

    @property
    def grad(self) -> np.ndarray | None:
        """The gradient; None if the parameter is frozen, or if there is no Module yet."""
        gradients = self._state.gradients
        return gradients[self._name] if gradients is not None and self._name in gradients else None

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained."""
        return self._name in self._state.trainable

    def __repr__(self) -> str:
        return f"Parameter(name={self.name}, requires_grad={self.requires_grad})"


def copy_to_parameter(state: TrainingState, name: str, value: Any) -> None:
    """Copy an array or an OrtValue to a parameter of the same type and shape."""
    if isinstance(value, onnxruntime.OrtValue):
        value = value.numpy()
    if not isinstance(value, np.ndarray):
        raise ArgumentTypeError(
            f"parameter {name!r} is set to a {type(value).__name__}, not to a NumPy array or an OrtValue"
        )
    array = state.parameter(name)
    if value.shape != array.shape or value.dtype != array.dtype:
        raise TrainingError(f"parameter {name!r} is {describe(array)}, the new value {describe(value)}")
    array[...] = value


class Parameters:
    """The parameters by name, in the order of their names; iteration yields pairs of name and Parameter."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Parameter:
        self._require(name)
        if self._state.nominal:
            raise TrainingError(
                f"parameter {name!r} of a nominal checkpoint has no value. "
                "Please load the parameter states first"
            )
        return Parameter(name, self._state)

    def __setitem__(self, name: str, value: np.ndarray) -> None:
        self._require(name)
        if self._state.nominal:
            raise TrainingError(
                f"parameter {name!r} of a nominal checkpoint cannot be set alone. "
                "Please load all the parameter states first"
            )
        copy_to_parameter(self._state, name, value)

    def _require(self, name: str) -> None:
        if name not in self:
            raise ParameterNotFoundError(f"Parameter {name} not found.")

    def __contains__(self, name: object) -> bool:
        return name in self._state

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        for name in self._state.names:
            yield name, self[name]

    def __len__(self) -> int:
        return len(self._state.names)

    def __repr__(self) -> str:
        return f"Parameters({self._state.names})"


class Properties:
    """The properties by name, in the order of their names; iteration yields pairs of name and value.

    Values are integers of 64 bits, strings, and floats, which are rounded to single precision.
    """

    def __init__(self, state: TrainingState) -> None:
        self._values = state.properties

    def __getitem__(self, name: str) -> Property:
        if name not in self._values:
            raise ParameterNotFoundError(f"Property {name} not found.")
        return self._values[name]

    def __setitem__(self, name: str, value: Property) -> None:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"the name of a property is a {type(name).__name__}, not a str")
        self._values[name] = _property(name, value)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[tuple[str, Property]]:
        return iter(sorted(self._values.items()))

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Properties({dict(sorted(self._values.items()))})"


def _property(name: str, value: Any) -> Property:
    if isinstance(value, str):
        return value
    if isinstance(value, (int, np.integer, np.bool_)) and -_INT64 <= int(value) < _INT64:
        return int(value)
    if isinstance(value, (float, np.floating)):
        with np.errstate(over="ignore"):
            return float(np.float32(value))
    raise ArgumentTypeError(
        f"property {name!r} is {value!r}; it must be an int of at most 64 bits, a float or a str"
    )
