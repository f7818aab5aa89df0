"""Derivatives of a function of one variable by central differences, with a measured error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RATIO = 4.0  # of one step to the next
SAFETY = 5.0  # how many times the spread between steps a derivative may be off


@dataclass(frozen=True)
class Derivative:
    """A derivative, how far it may be off, and how far the derivatives on the two sides are apart.

    `error` is infinite where the function is not finite. `jump` is 0 unless it is well above its own error.
    """

    value: float
    error: float
    jump: float


def derivative(
    function: Callable[[float], np.ndarray],
    steps: Sequence[float],
    rounding: float,
    *,
    plateaus: bool = False,
) -> Derivative:
    """The derivative of `sum(function(t))` at 0, from the step whose neighbours confirm it best.

    The steps, four at least, decrease by `RATIO`. Truncation and kinks near 0 show in the large ones,
    rounding in the small ones. `rounding` is the rounding error of a sum that is expected at least. With
    `plateaus`, steps that change nothing at all are rounding too, and say nothing.
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
    # What remains of the step's power, 2 for central differences, 1 for the jump, is extrapolated away.
    value, error = _most_confirmed(_extrapolated(central, RATIO**2), floors)
    jump, uncertainty = _most_confirmed(_extrapolated(jumps, RATIO), floors)
    return Derivative(value, SAFETY * error, abs(jump) if abs(jump) > 2 * SAFETY * uncertainty else 0.0)


def central_difference(function: Callable[[float], np.ndarray], step: float) -> float:
    """The slope of `sum(function(t))` between -step and step."""
    return _total(function(step), function(-step)) / (2 * step)


def _total(ahead: np.ndarray, behind: np.ndarray) -> float:
    if ahead.shape != behind.shape:
        return np.nan
    with np.errstate(invalid="ignore"):
        # Subtracted one by one, so that what does not change leaves no rounding.
        return float(np.sum(ahead - behind))


def _extrapolated(values: Sequence[float], factor: float) -> np.ndarray:
    array = np.asarray(values)
    with np.errstate(invalid="ignore"):
        return array[1:] + (array[1:] - array[:-1]) / (factor - 1)


def _most_confirmed(values: np.ndarray, floors: np.ndarray) -> tuple[float, float]:
    """The value that is nearest to those of the steps before and after it, and how near that is."""
    with np.errstate(invalid="ignore"):
        gaps = np.abs(np.diff(values))
        errors = np.maximum(gaps[:-1], gaps[1:]) + floors[2:-1]
    if np.isnan(errors).all():
        return np.nan, np.inf
    best = int(np.nanargmin(errors))
    return float(values[best + 1]), float(errors[best])
