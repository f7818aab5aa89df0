"""What changes in training: parameters, gradients, optimizer state and properties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ortgrad.errors import NameNotFoundError, TrainingError, TrainingModelError
from ortgrad.graph.matching import nearest
from ortgrad.training.buffers import Arena
from ortgrad.training.checkpoint import Checkpoint, OptimizerGroup
from ortgrad.training.checkpoint.state import Property

DEFAULT_RATE = 0.001


class Group:
    """The state of the optimizer of a group of parameters."""

    def __init__(self, loaded: OptimizerGroup | None = None) -> None:
        self.step = 0 if loaded is None else loaded.step
        self.initial_rate = DEFAULT_RATE if loaded is None else loaded.initial_learning_rate
        # Not part of a checkpoint.
        self.rate = DEFAULT_RATE
        # By the name of the momentum: arrays by the name of the parameter.
        self.momentums: dict[str, Arena] = {}
        # What was loaded, until there is an optimizer that knows which momentums it needs.
        self.loaded = {} if loaded is None else loaded.momentums


class TrainingState:
    """The state of a training, made of a checkpoint.

    A nominal state knows the names of the parameters only. `allocate` gives it memory, and it is complete
    once `nominal` is False.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.nominal = checkpoint.nominal
        self.properties: dict[str, Property] = dict(checkpoint.properties)
        self.groups = {name: Group(group) for name, group in checkpoint.optimizer.items()}
        self.trainable = Arena.of(checkpoint.trainable)
        self.frozen = Arena.of(checkpoint.frozen)
        self.gradients: Arena | None = None
        # Whether a failed step has left gradients that belong to no batch.
        self.gradients_are_torn = False

    @property
    def names(self) -> list[str]:
        """The names of all parameters, sorted."""
        return sorted([*self.trainable.arrays, *self.frozen.arrays])

    def __contains__(self, name: object) -> bool:
        return name in self.trainable.arrays or name in self.frozen.arrays

    def parameter(self, name: str) -> np.ndarray:
        """Return the array of a parameter."""
        if name not in self:
            raise NameNotFoundError(f"there is no parameter {name!r}{nearest(name, self.names)}")
        return self.trainable[name] if name in self.trainable else self.frozen[name]

    def allocate(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Give a nominal state memory for parameters of these shapes."""
        for kind in ("trainable", "frozen"):
            old: Arena = getattr(self, kind)
            layout = {name: (shapes.get(name, (0,)), array.dtype) for name, array in old.arrays.items()}
            setattr(self, kind, Arena(layout))

    def allocate_gradients(self) -> Arena:
        """Return the gradients of the trainable parameters; they are 0 at first."""
        if self.gradients is None:
            self.gradients = self.trainable.like()
        return self.gradients

    def group(self, name: str, momentums: Sequence[str]) -> Group:
        """Return the optimizer state of a group, with momentums for all trainable parameters."""
        group = self.groups.setdefault(name, Group())
        for momentum in momentums:
            if momentum not in group.momentums:
                group.momentums[momentum] = self._momentum(group, momentum)
        if momentums:
            group.loaded = {}
        return group

    def _momentum(self, group: Group, momentum: str) -> Arena:
        arena = self.trainable.like()
        for name, array in arena.arrays.items():
            if not group.loaded:
                continue
            if name not in group.loaded or momentum not in group.loaded[name]:
                what = f"no {momentum} of" if name in group.loaded else "nothing about"
                raise TrainingError(f"the optimizer state of the checkpoint has {what} parameter {name!r}")
            found = group.loaded[name][momentum]
            if found.shape != array.shape or found.dtype != array.dtype:
                raise TrainingModelError(
                    f"{momentum} of parameter {name!r} is {describe(found)}, the parameter {describe(array)}"
                )
            array[...] = found
        return arena

    def checkpoint(self, *, optimizer: bool = True) -> Checkpoint:
        """Return a checkpoint of the state; its arrays are those of the state itself."""
        groups: dict[str, OptimizerGroup] = {}
        for name, group in self.groups.items() if optimizer else ():
            momentums = {key: dict(value) for key, value in group.loaded.items()}
            for momentum, arena in group.momentums.items():
                for parameter, array in arena.arrays.items():
                    momentums.setdefault(parameter, {})[momentum] = array
            groups[name] = OptimizerGroup(group.step, group.initial_rate, momentums)
        return Checkpoint(
            dict(self.trainable.arrays),
            dict(self.frozen.arrays),
            groups,
            dict(self.properties),
            self.nominal,
        )


def describe(array: np.ndarray) -> str:
    """Return type and shape, for messages."""
    return f"{array.dtype}{list(array.shape)}"
