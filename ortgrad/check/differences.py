"""Derivatives of a function of one variable by central differences, with an error estimate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

RATIO = 4.0  # between consecutive steps
SAFETY = 5.0  # the error estimate is this many times the spread between steps
SINGLE_EPS = float(np.finfo(np.float32).eps)


class Steps(NamedTuple):
    """Step sizes for differences, relative to the size of a value.

    `quick` is tried first, then the steps in `few`, then all. `single` says that they are for a function in
    single precision.
    """

    every: tuple[float, ...]
    quick: float
    few: tuple[float, ...]
    single: bool


_DOUBLE = tuple(1e-1 / RATIO**k for k in range(12))
DOUBLE_STEPS = Steps(_DOUBLE, _DOUBLE[7], _DOUBLE[4:8], single=False)
# Large steps, because a forward pass in single precision has large rounding errors.
SINGLE_STEPS = Steps(_DOUBLE[:7], _DOUBLE[2], (), single=True)
NOISE_STEP = 1e-6  # between the points at which noise is measured; float32 rounds at 1e-7
NOISE_POINTS = 7


class Derivative(NamedTuple):
    """A derivative, its error estimate, and the difference between the one-sided derivatives.

    `error` is infinite where the function is not finite. `jump` is 0 unless it is well above its own error.
    """

    value: float
    error: float
    jump: float = 0.0


class Differences:
    """The derivative of `sum(function(t))` at 0, computed as precisely as needed.

    `rounding` is a lower bound of the rounding error of a sum.
    """

    def __init__(self, function: Callable[[float], np.ndarray], steps: Steps, rounding: float) -> None:
        self._function = function
        self._steps = steps
        self._rounding = rounding
        self._measured: Derivative | None = None
        self.quick = central(function, steps.quick)

    def measure(self, enough: float) -> Derivative:
        """Return the derivative from the steps `few`, or from all if its error exceeds `enough`; cached."""
        if self._measured is None:
            self._measured = self._derivative(self._steps.few) if self._steps.few else None
            if self._measured is None or not self._measured.error <= enough:
                self._measured = self._derivative(self._steps.every)
        return self._measured

    def measure_with_noise(self) -> Derivative:
        """Return the derivative from all steps, with an error estimate that includes measured noise.

        Without it, a function that computes in float32 inside is a staircase in double, whose smallest
        differences agree perfectly: they are all zero.
        """
        self._rounding = max(self._rounding, noise_of(self._function))
        self._measured = self._derivative(self._steps.every)
        return self._measured

    def _derivative(self, steps: Sequence[float]) -> Derivative:
        return derivative(self._function, steps, self._rounding, plateaus=self._steps.single)


def noise_of(function: Callable[[float], np.ndarray]) -> float:
    """Return the standard deviation of the noise of `sum(function(t))` near 0.

    Differences of order k of a smooth function vanish with the k-th power of the step. Those of noise with
    standard deviation s have the variance s^2 (2k)! / (k!)^2 (More and Wild, Estimating computational noise).
    """
    middle = function(0.0)
    half = NOISE_POINTS // 2
    table = np.array([_total(function(i * NOISE_STEP), middle) for i in range(-half, half + 1)])
    found = []
    for k in range(1, NOISE_POINTS - 1):
        table = np.diff(table)
        found.append(float(np.sqrt(np.mean(table**2) / math.comb(2 * k, k))))
    # The first orders still contain the slope and the curvature.
    return max(found[2:])


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
    slopes, jumps = [], []
    for step in steps:
        ahead, behind = function(step), function(-step)
        slopes.append(_total(ahead, behind) / (2 * step))
        jumps.append((_total(ahead, middle) - _total(middle, behind)) / step)
    if plateaus:
        slopes = [value or np.nan for value in slopes]
    floors = rounding / np.asarray(steps)
    # The truncation error is of order 2 in the step for central differences, of order 1 for the jump.
    value, error = _most_confirmed(_extrapolated(slopes, RATIO**2), floors)
    jump, uncertainty = _most_confirmed(_extrapolated(jumps, RATIO), floors)
    return Derivative(value, SAFETY * error, abs(jump) if abs(jump) > 2 * SAFETY * uncertainty else 0.0)


def central(function: Callable[[float], np.ndarray], step: float) -> float:
    """Return the central difference of `sum(function(t))` at 0; NaN if the function changes its shape."""
    return _total(function(step), function(-step)) / (2 * step)


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
    """Return the value that is closest to the values of its neighbouring steps, and the distance."""
    with np.errstate(invalid="ignore"):
        gaps = np.abs(np.diff(values))
        errors = np.maximum(gaps[:-1], gaps[1:]) + floors[2:-1]
    if np.isnan(errors).all():
        return np.nan, np.inf
    best = int(np.nanargmin(errors))
    return float(values[best + 1]), float(errors[best])
