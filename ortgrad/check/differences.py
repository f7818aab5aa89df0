"""Derivatives of a function of one variable by central differences, with an error estimate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

RATIO = 4.0  # between consecutive steps
SAFETY = 5.0  # the error estimate is this many times the spread between steps
SINGLE_EPS = float(np.finfo(np.float32).eps)


class Steps(NamedTuple):
    """Step sizes for differences, relative to the size of a value.

    `quick` is tried first, then the steps in `few`, then all.
    """

    every: tuple[float, ...]
    quick: float
    few: tuple[float, ...]


_DOUBLE = tuple(1e-2 / RATIO**k for k in range(10))
_SINGLE = tuple(1e-1 / RATIO**k for k in range(6))
DOUBLE_STEPS = Steps(_DOUBLE, _DOUBLE[5], _DOUBLE[3:7])
# Large steps, because a forward pass in single precision has large rounding errors.
SINGLE_STEPS = Steps(_SINGLE, _SINGLE[2], ())


class Derivative(NamedTuple):
    """A derivative, its error estimate, and the difference between the one-sided derivatives.

    `error` is infinite where the function is not finite. `jump` is 0 unless it is well above its own error.
    """

    value: float
    error: float
    jump: float


class Differences:
    """The derivative of `sum(function(t))` at 0, computed as precisely as needed.

    `rounding` is a lower bound of the rounding error of a sum.
    """

    def __init__(
        self, function: Callable[[float], np.ndarray], steps: Steps, size: float, rounding: float
    ) -> None:
        self._function = function
        self._steps = steps
        self._size = size
        self._rounding = rounding
        self._measured: Derivative | None = None
        step = steps.quick * size
        self.quick = _total(function(step), function(-step)) / (2 * step)

    def measure(self, enough: float) -> Derivative:
        """Return the derivative from the steps `few`, or from all if its error exceeds `enough`; cached."""
        if self._measured is None:
            self._measured = self._derivative(self._steps.few) if self._steps.few else None
            if self._measured is None or not self._measured.error <= enough:
                self._measured = self._derivative(self._steps.every)
        return self._measured

    def _derivative(self, steps: Sequence[float]) -> Derivative:
        scaled = [step * self._size for step in steps]
        return derivative(self._function, scaled, self._rounding, plateaus=self._steps is SINGLE_STEPS)


def derivative(
    function: Callable[[float], np.ndarray],
    steps: Sequence[float],
    rounding: float,
    *,
    plateaus: bool = False,
) -> Derivative:
    """Return the derivative of `sum(function(t))` at 0, from the step that agrees best with its neighbours.

    There must be at least four steps, which decrease by `RATIO`. Large steps suffer from truncation and from
    kinks near 0, small steps from rounding. `rounding` is a lower bound of the rounding error of a sum. With
    `plateaus`, steps that do not change the sum at all are attributed to rounding and ignored.
    """
    middle = function(0.0)
    central, jumps = [], []
    for step in steps:
        ahead, behind = function(step), function(-step)
        central.append(_total(ahead, behind) / (2 * step))
        jumps.append((_total(ahead, middle) - _total(middle, behind)) / step)
    if plateaus:
        central = [value or np.nan for value in central]
    floors = rounding / np.asarray(steps)
    # The truncation error is of order 2 in the step for central differences, of order 1 for the jump.
    value, error = _most_confirmed(_extrapolated(central, RATIO**2), floors)
    jump, uncertainty = _most_confirmed(_extrapolated(jumps, RATIO), floors)
    return Derivative(value, SAFETY * error, abs(jump) if abs(jump) > 2 * SAFETY * uncertainty else 0.0)


def rounding_of(precision: str, *, single: bool) -> float:
    """Return the machine epsilon of an element type; with `single`, at least that of float32."""
    eps = 2.0**-7 if precision == "bfloat16" else float(np.finfo(precision).eps)
    return max(eps, SINGLE_EPS) if single else eps


def _total(ahead: np.ndarray, behind: np.ndarray) -> float:
    if ahead.shape != behind.shape:
        return np.nan
    with np.errstate(invalid="ignore"):
        # Subtracted elementwise before the sum, so that elements that do not change add no rounding.
        return float(np.sum(ahead - behind))


def _extrapolated(values: Sequence[float], factor: float) -> np.ndarray:
    """Return the Richardson extrapolation of each value and its predecessor."""
    array = np.asarray(values)
    with np.errstate(invalid="ignore"):
        return array[1:] + (array[1:] - array[:-1]) / (factor - 1)


def _most_confirmed(values: np.ndarray, floors: np.ndarray) -> tuple[float, float]:
    """Return the value that is closest to those of the neighbouring steps, and its distance from them."""
    with np.errstate(invalid="ignore"):
        gaps = np.abs(np.diff(values))
        errors = np.maximum(gaps[:-1], gaps[1:]) + floors[2:-1]
    if np.isnan(errors).all():
        return np.nan, np.inf
    best = int(np.nanargmin(errors))
    return float(values[best + 1]), float(errors[best])
