"""The state of a training: steps on batches, its progress, and its checkpoints."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict

import numpy as np

from ortgrad.errors import TrainingError
from ortgrad.threads import call_elsewhere
from ortgrad.training import checkpoint as checkpoints
from ortgrad.training.data import Batch, Inputs, samples
from ortgrad.training.engine import Engine
from ortgrad.training.objective import Objective
from ortgrad.training.resuming import GROUP, PROPERTY, VERSION, Place, matched, read_place
from ortgrad.training.schedules import Pace
from ortgrad.training.state import TrainingState
from ortgrad.training.updates import UNCHANGED, Updates


class Stepper:
    """Computes gradients of batches, and makes steps with them."""

    def __init__(
        self, engine: Engine, inputs: Inputs, objective: Objective, updates: Updates, pace: Pace, seed: int
    ) -> None:
        self.engine, self.inputs, self.objective = engine, inputs, objective
        self.updates, self.pace = updates, pace
        self.place = Place()
        self._seed = seed
        engine.seed(seed, 0)

    @property
    def state(self) -> TrainingState:
        """Parameters and optimizer state, which a step changes in place."""
        return self.engine.state

    @property
    def steps(self) -> int:
        """The number of steps made so far."""
        return self.updates.steps

    # Batches

    def target(self, batch: Batch) -> np.ndarray | None:
        """Return the target of a batch, if it has one."""
        name = self.objective.target
        return None if name is None else batch[self.inputs.names.index(name)]

    def count(self, batch: Batch) -> int:
        """Return the number of samples of a batch."""
        name = self.objective.target
        return samples(batch, None if name is None else self.inputs.names.index(name))

    def weight(self, batch: Batch) -> float:
        """Return how much the loss of a batch counts in a mean."""
        return self.objective.weight(self.target(batch), self.count(batch))

    def check_samples(self, count: int, where: str) -> None:
        """Raise TrainingError for a batch of a single sample, if the model needs more."""
        name = self.engine.needs_samples
        if count == 1 and name:
            raise TrainingError(
                f"{where} has one sample, and the batch normalization of {name!r} computes the mean and the "
                "variance of a batch: choose a batch_size that leaves none over, or statistics='none'"
            )

    # Steps

    def gradients(self, batch: Batch, *, add: bool, where: str) -> float:
        """Compute the gradients of a batch, or add them to the present ones, and return the loss."""
        self.check_samples(self.count(batch), where)
        try:
            loss = self.engine.gradients(batch, add=add)
        except TrainingError as error:
            raise type(error)(f"{where}: {error}") from error
        if not math.isfinite(loss):
            if not self.weight(batch):
                raise TrainingError(f"{where}: no label of the batch counts, so that it has no mean loss")
            raise TrainingError(f"the loss is {loss} in step {self.steps + 1} ({where}); {UNCHANGED}")
        return loss

    def update(self, count: int, total: int | None, note: Callable[[], None] | None = None) -> None:
        """Make a step with the present gradients, which are the sum over `count` batches, and note it.

        `total` is the number of all steps, for the schedule.
        """
        factor = self.pace.factor(self.steps, self.place.start, total)
        self.updates.check()

        def apply() -> None:
            self.updates.apply(count, factor)
            if note is not None:
                note()

        # On a thread that handles no signals: done as a whole or not at all.
        call_elsewhere(apply)

    # Checkpoints

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint, which replaces the file as a whole."""
        contents = self.state.checkpoint()
        place = {"version": VERSION, "optimizer": self._optimizer, "seed": self._seed}
        contents.properties[PROPERTY] = json.dumps({**place, "place": asdict(self.place)})
        checkpoints.save(contents, path)
        # The random numbers of Dropout follow from the seed and the step of the last checkpoint.
        self.engine.seed(self._seed, self.steps)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue from a checkpoint; if it does not fit, nothing is changed."""
        found = checkpoints.load(path)
        place = read_place(found, path, self._optimizer, self._seed)
        copies = list(matched(self.state, found, path, self.updates.optimizer.momentums))

        def copy() -> None:
            for target, source in copies:
                target[...] = source
            self.updates.steps, self.place = found.optimizer[GROUP].step, place

        call_elsewhere(copy)
        self.engine.seed(self._seed, self.steps)

    @property
    def _optimizer(self) -> str:
        return type(self.updates.optimizer).__name__
