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


def make_schedule(schedule: str | Schedule, warmup: float) -> Schedule:
    """Return the factor of the learning rate as a function of step and number of steps.

    The learning rate rises linearly in the first `warmup` steps (a fraction of all if it is less than 1).
    After them, it stays, or falls to 0 linearly or as half a cosine.
    """
    if not 0 <= warmup < math.inf:
        raise TrainingError(f"warmup is {warmup}; it must be a number of steps, or a fraction of them")
    if callable(schedule):
        after: Schedule = schedule
    elif schedule in SCHEDULES:
        shape = SCHEDULES[schedule]

        def after(step: int, total: int) -> float:
            first = _steps(warmup, total)
            return shape(min(1.0, (step - first) / max(1, total - first)))
    else:
        raise TrainingError(f"schedule is {schedule!r}; it must be one of {', '.join(SCHEDULES)}")

    def factor(step: int, total: int) -> float:
        first = _steps(warmup, total)
        return (step + 1) / (first + 1) if step < first else float(after(step, total))

    return factor


def needs_total(schedule: str | Schedule, warmup: float) -> bool:
    """Return whether the factor of a step depends on the number of all steps."""
    return callable(schedule) or schedule != "constant" or 0 < warmup < 1


def _steps(warmup: float, total: int) -> int:
    return math.ceil(warmup * total) if warmup < 1 else int(warmup)


class Pace:
    """The learning rate of a training from step to step, as a factor."""

    def __init__(self, schedule: str | Schedule, warmup: float) -> None:
        self._schedule = make_schedule(schedule, warmup)
        self.needs_total = needs_total(schedule, warmup)
        # As the user has said it.
        self.described = f"schedule={schedule!r}" if schedule != "constant" else f"warmup={warmup}"

    def factor(self, step: int, start: int, total: int | None) -> float:
        """Return the factor after `step` steps of `total`, with which a training has begun at `start`."""
        # A schedule that depends on the number of steps is refused where that is not known.
        factor = self._schedule(step - start, total or 0)
        if not isinstance(factor, numbers.Real) or not 0 <= factor < math.inf:
            raise TrainingError(
                f"the schedule returned {factor} for step {step + 1}; it must return a factor of the "
                "learning rate, a number that is not negative"
            )
        return factor
