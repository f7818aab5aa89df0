"""The steps of an optimizer on the parameters of a training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ortgrad.errors import TrainingError, TrainingModelError
from ortgrad.training.optimizers import kernels
from ortgrad.training.optimizers.passes import warm_up
from ortgrad.training.optimizers.rules import AnyOptimizer, Step
from ortgrad.training.resuming import GROUP
from ortgrad.training.state import TrainingState
from ortgrad.training.subject import Setting

# What is said after an error in a step.
UNCHANGED = "the parameters are as they were before this step"


@dataclass(frozen=True)
class Clipping:
    """The limits of gradients: of their values, and then of their norm."""

    value: float | None
    norm: float | None

    def __post_init__(self) -> None:
        for name, value in (("clip_norm", self.norm), ("clip_value", self.value)):
            if value is not None and not value > 0:
                raise TrainingError(f"{name} is {value}; it must be positive")

    def apply(self, gradients: list[np.ndarray], threads: int) -> None:
        """Clip gradients in place."""
        if self.value is not None:
            for flat in gradients:
                kernels.clamp(flat, threads=threads, bound=self.value)
        if self.norm is not None:
            kernels.clip(gradients, self.norm, threads)


@dataclass(frozen=True)
class _Block:
    """Parameters with the same settings, which are adjacent in memory."""

    dtype: np.dtype
    part: slice
    learning_rate: float
    weight_decay: float


class Updates:
    """Changes the parameters of a state by their gradients, in place."""

    def __init__(
        self,
        state: TrainingState,
        optimizer: AnyOptimizer,
        settings: Mapping[str, Setting],
        clipping: Clipping,
        threads: int,
    ) -> None:
        self.optimizer = optimizer
        self._state, self._clipping, self._threads = state, clipping, threads
        self._blocks = _blocks(state, settings)
        self._group = state.group(GROUP, optimizer.momentums)
        for arena in self._group.momentums.values() if optimizer.initial else ():
            for array in arena.arrays.values():
                array[...] = optimizer.initial
        self._group.initial_rate = optimizer.learning_rate
        self._warm_up()

    def _warm_up(self) -> None:
        for dtype in self._state.trainable.flats:
            if dtype not in (np.float32, np.float64):
                raise TrainingModelError(f"parameters of the type {dtype} cannot be trained")
            for each in (*self.optimizer.passes(), kernels.squares, kernels.scale, kernels.clamp):
                warm_up(each, dtype)

    @property
    def steps(self) -> int:
        """The number of steps made so far."""
        return self._group.step

    @steps.setter
    def steps(self, steps: int) -> None:
        self._group.step = steps

    def check(self) -> None:
        """Raise TrainingError if a gradient is not finite: of Sqrt at 0, for example."""
        gradients = self._state.allocate_gradients()
        if math.isfinite(kernels.norm(list(gradients.flats.values()), threads=self._threads)):
            return
        # The square of a large number in double precision may be infinite.
        wrong = [name for name, array in gradients.arrays.items() if not np.isfinite(array).all()]
        if wrong:
            raise TrainingError(
                f"the gradient of {wrong[0]!r} is not finite in step {self.steps + 1}, though the loss is; "
                f"{UNCHANGED}"
            )

    def apply(self, count: int, factor: float) -> None:
        """Make a step with the sum of the gradients of `count` batches, and a factor of learning rates."""
        state, threads = self._state, self._threads
        gradients = state.allocate_gradients()
        flats = list(gradients.flats.values())
        if count > 1:
            for flat in flats:
                kernels.scale(flat, threads=threads, factor=1 / count)
        self._clipping.apply(flats, threads)
        momentums = [self._group.momentums[name] for name in self.optimizer.momentums]
        for block in self._blocks:
            arrays = [a.flats[block.dtype][block.part] for a in (state.trainable, gradients, *momentums)]
            step = Step(self.steps + 1, factor * block.learning_rate, block.weight_decay, threads)
            self.optimizer.update(arrays, step)
        self._group.step += 1


def _blocks(state: TrainingState, settings: Mapping[str, Setting]) -> list[_Block]:
    found: dict[tuple[np.dtype, Setting], list[int]] = {}
    for name, span in state.trainable.spans.items():
        found.setdefault((span.dtype, settings[name]), []).extend([span.start, span.stop])
    return [_Block(dtype, slice(min(ends), max(ends)), *setting) for (dtype, setting), ends in found.items()]
