"""CheckpointState: the state of a training run, which can be loaded and saved."""

from __future__ import annotations

import os

from ortgrad.compat.api.parameters import Parameter, Parameters, Properties
from ortgrad.errors import ArgumentTypeError
from ortgrad.keywords import checked
from ortgrad.training import checkpoint
from ortgrad.training.state import TrainingState

__all__ = ["CheckpointState", "Parameter"]


@checked
class CheckpointState:
    """Parameters, gradients, optimizer state and properties of a training run.

    `load_checkpoint` reads one from a file. A Module and an Optimizer change it in place.

    >>> import numpy as np, os, tempfile
    >>> from ortgrad.training import checkpoint
    >>> from ortgrad.training.api import CheckpointState
    >>> path = os.path.join(tempfile.mkdtemp(), "checkpoint")
    >>> checkpoint.save(checkpoint.Checkpoint(trainable={"w": np.zeros(2, np.float32)}), path)
    >>> state = CheckpointState.load_checkpoint(path)
    >>> state.parameters["w"].data[:] = 1
    >>> state.properties["epoch"] = 3
    >>> CheckpointState.save_checkpoint(state, path)
    >>> CheckpointState.load_checkpoint(path)
    CheckpointState(1 trainable and 0 frozen parameters, properties={'epoch': 3})
    """

    def __init__(self, state: TrainingState) -> None:
        if not isinstance(state, TrainingState):
            raise ArgumentTypeError(f"Invalid argument for CheckpointState received {type(state)}")
        self._state = state
        self._parameters = Parameters(state)
        self._properties = Properties(state)

    @classmethod
    def load_checkpoint(cls, checkpoint_uri: str | os.PathLike[str]) -> CheckpointState:
        """Return the state in a file: a complete or a nominal checkpoint, or one in safetensors."""
        return cls(TrainingState(checkpoint.load(os.fspath(checkpoint_uri))))

    @classmethod
    def save_checkpoint(
        cls,
        state: CheckpointState,
        checkpoint_uri: str | os.PathLike[str],
        include_optimizer_state: bool = False,
    ) -> None:
        """Write the state to a file, which keeps its old contents until the new ones are complete."""
        if not isinstance(state, CheckpointState):
            raise ArgumentTypeError(f"save_checkpoint takes a CheckpointState, not {type(state)}")
        contents = state.state.checkpoint(optimizer=include_optimizer_state)
        checkpoint.save(contents, os.fspath(checkpoint_uri), sort=True)

    @property
    def state(self) -> TrainingState:
        """The state as the native training has it."""
        return self._state

    @property
    def parameters(self) -> Parameters:
        """The parameters by name."""
        return self._parameters

    @property
    def properties(self) -> Properties:
        """The properties by name: int, float or str."""
        return self._properties

    def __repr__(self) -> str:
        trainable, frozen = len(self._state.trainable.arrays), len(self._state.frozen.arrays)
        properties = dict(self._properties)
        kind = "nominal, " if self._state.nominal else ""
        return f"CheckpointState({kind}{trainable} trainable and {frozen} frozen parameters, {properties=})"
