"""Schedules: the factor of the learning rate from step to step."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable

from ortgrad.errors import TrainingError

# A function of the number of the step, from 0 on, and of the number of all steps.
Schedule = Callable[[int, int], float]


def _constant(done: float) -> float:
    return 1.0


def _linear(done: float) -> float:
    return 1 - done


def _cosine(done: float) -> float:
    return (1 + math.cos(math.pi * done)) / 2


SCHEDULES: dict[str, Callable[[float], float]] = {"constant": _constant, "linear": _linear, "cosine": _cosine}


class Pace:
    """The learning rate of a training from step to step, as a factor.

    It rises linearly in the first `warmup` steps (a fraction of all if it is less than 1). After them, it
    stays, falls to 0 linearly or as half a cosine, or is what a function returns.
    """

    def __init__(self, schedule: str | Schedule, warmup: float) -> None:
        if not 0 <= warmup < math.inf:
            raise TrainingError(f"warmup is {warmup}; it must be a number of steps, or a fraction of them")
        if not callable(schedule) and schedule not in SCHEDULES:
            raise TrainingError(f"schedule is {schedule!r}; it must be one of {', '.join(SCHEDULES)}")
        self._schedule, self._warmup = schedule, warmup
        # Whether the factor of a step depends on the number of all steps.
        self.needs_total = schedule != "constant" or 0 < warmup < 1
        # As the user has said it.
        self.described = f"schedule={schedule!r}" if schedule != "constant" else f"warmup={warmup}"

    def factor(self, step: int, start: int, total: int | None) -> float:
        """Return the factor after `step` steps of `total`, with which a training has begun at `start`."""
        # A schedule that depends on the number of steps is refused where that is not known.
        factor = self._factor(step - start, total or 0)
        if not isinstance(factor, numbers.Real) or not 0 <= factor < math.inf:
            raise TrainingError(
                f"the schedule returned {factor} for step {step + 1}; it must return a factor of the "
                "learning rate, a number that is not negative"
            )
        return factor

    def _factor(self, step: int, total: int) -> float:
        first = math.ceil(self._warmup * total) if self._warmup < 1 else int(self._warmup)
        if step < first:
            return (step + 1) / (first + 1)
        if callable(self._schedule):
            return float(self._schedule(step, total))
        return SCHEDULES[self._schedule](min(1.0, (step - first) / max(1, total - first)))
