"""Verdicts on gradients, from differences at several points and along several random directions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ortgrad.check.differences import Derivative, Differences, rounding_of
from ortgrad.check.objective import Objective, Point
from ortgrad.check.result import Row

# The allowed relative error of a gradient by its element type. A larger error is compared with measured
# rounding.
TOLERANCES = {"float64": 1e-6, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
COARSE_TOLERANCE = 1e-3  # if the forward pass is in single precision
# A gradient is not judged if rounding could hide a relative error of this size.
LARGEST_NOISE = 0.1
SAFETY = 5.0  # the allowed multiple of measured rounding
POINTS = 4  # tried until the function is smooth: the given one, and others beside it
MORE_DIRECTIONS = 3  # tried where a direction crosses a kink, or where only one disagrees
PATIENCE = 10.0  # seconds for all directions; if they would take longer, one is tried per gradient


class Comparison:
    """Compares the gradients of an objective with its differences, one target at a time."""

    def __init__(
        self, objective: Objective, tolerance: float | None, directions: int, generator: np.random.Generator
    ) -> None:
        self._objective = objective
        self._tolerance = tolerance
        self._generator = generator
        started = time.perf_counter()
        objective.forward.run(objective.first.feeds)
        seconds = 2 * (time.perf_counter() - started) * directions * len(objective.forward.handles)
        self._directions = directions if seconds < PATIENCE else 1

    def row(self, name: str) -> Row:
        """Return the verdict on the gradient with respect to a target."""
        first = ""
        for number in range(POINTS):
            point = self._objective.point(number)
            if point is None:
                continue
            verdict, note = self._at(point, name)
            if not verdict.reason:
                beside = f"beside the given point: there, {first}" if first else ""
                return Row(name, verdict.error, verdict.allowed, "; ".join(filter(None, (note, beside))))
            first = first or verdict.reason
        return Row(name, np.nan, np.nan, first, judged=False)

    def _at(self, point: Point, name: str) -> tuple[_Verdict, str]:
        """Return the verdict at a point from several directions, and a note on it."""
        found: list[list[_Verdict]] = [[] for _ in self._objective.passes]
        for tried in range(self._directions + MORE_DIRECTIONS):
            if tried >= self._directions and not any(_undecided(each, self._directions) for each in found):
                break
            direction = self._generator.standard_normal(point.gradients[0][name].shape)
            for verdicts, verdict in zip(found, self._along(point, name, direction), strict=True):
                verdicts.append(verdict)
        own, double = _worst(found[0]), _worst(found[-1])
        if double.wrong and not own.wrong:
            return double, "in double"
        if own.reason and not double.reason:
            return double, f"in double only: {own.reason}"
        return own, ""

    def _along(self, point: Point, name: str, direction: np.ndarray) -> list[_Verdict]:
        """Return the verdicts on all backward passes from one direction."""
        objective, forward = self._objective, self._objective.forward
        single, size = forward.single, forward.handles[name].size
        rounding = 4 * rounding_of("float64", single=single) * float(np.linalg.norm(point.base))
        differences = Differences(objective.along(point, name, direction), forward.steps, size, rounding)
        verdicts = []
        for number, gradients in enumerate(point.gradients):
            gradient = gradients[name]
            tolerance = self._tolerance
            if tolerance is None:
                tolerance = max(TOLERANCES[gradient.dtype.name], COARSE_TOLERANCE if single else 0.0)

            def noise(scale: float, number: int = number) -> float:
                moved = objective.noise(point, number, name, direction)
                return SAFETY * (moved + point.rounding * scale)

            slope = _slope_of(gradient, direction, point.base, size, single)
            verdicts.append(_judge(slope, differences, tolerance, noise))
        return verdicts


class _Slope(NamedTuple):
    """The directional derivative that a gradient gives.

    `norm` is that of the gradient. `unit` is the slope of a function that changes by its own size over the
    size of the target; up to `zero` units may be rounding in the gradient's element type.
    """

    value: float
    norm: float
    unit: float
    zero: float


class _Verdict(NamedTuple):
    """The relative error of a slope and the allowed one, or the reason why the slope is not judged."""

    error: float
    allowed: float
    reason: str = ""

    @property
    def wrong(self) -> bool:
        """Whether the slope is wrong."""
        return not self.reason and not self.error <= self.allowed


def _slope_of(
    gradient: np.ndarray, direction: np.ndarray, terms: np.ndarray, size: float, single: bool
) -> _Slope:
    """Return the slope of a gradient, for a sum of `terms` and a target of the given size."""
    wide = gradient.astype(np.float64)
    with np.errstate(invalid="ignore"):
        value = float(np.sum(wide * direction))
    unit = float(np.sum(np.abs(terms))) / size
    zero = 10 * rounding_of(gradient.dtype.name, single=single)
    return _Slope(value, float(np.linalg.norm(wide)), unit, zero)


def _judge(
    slope: _Slope, differences: Differences, tolerance: float, noise: Callable[[float], float]
) -> _Verdict:
    """Return the verdict on a slope. Expensive measurements are made only if cheaper ones do not decide.

    `noise(scale)` is the effect of rounding on a slope of this scale.
    """
    scale = max(slope.norm if np.isfinite(slope.norm) else 0.0, abs(differences.quick), 1e-30)
    error = abs(slope.value - differences.quick)
    if error <= tolerance * scale:
        return _Verdict(error / scale, tolerance)
    rounding = noise(scale)
    if rounding <= LARGEST_NOISE * scale and error <= tolerance * scale + rounding:
        return _Verdict(error / scale, tolerance + rounding / scale)
    measured = differences.measure(0.01 * error)
    if not np.isfinite(measured.error):
        return _not_judged("the differences are not finite or do not converge")
    if not np.isfinite(slope.value):
        smooth = not measured.jump and measured.error <= LARGEST_NOISE * abs(measured.value)
        reason = "" if smooth else "the gradient is not finite, and the differences do not converge"
        return _Verdict(np.inf, tolerance, reason)
    return _judge_measured(slope, measured, tolerance, rounding)


def _judge_measured(slope: _Slope, measured: Derivative, tolerance: float, rounding: float) -> _Verdict:
    size = max(slope.norm, abs(measured.value))
    error = abs(slope.value - measured.value)
    if size + measured.error <= slope.zero * slope.unit:
        return _Verdict(error / slope.unit, slope.zero)
    scale = max(size, 1e-30)
    noise = measured.error + (rounding if error > tolerance * scale + measured.error else 0.0)
    verdict = _Verdict(error / scale, tolerance + noise / scale)
    if verdict.wrong and measured.jump >= error / 10:
        return _not_judged("it is on a kink")
    if not verdict.wrong and noise > LARGEST_NOISE * scale:
        return _not_judged(f"rounding hides errors below {noise / scale:.0%}")
    return verdict


def _not_judged(reason: str) -> _Verdict:
    return _Verdict(np.nan, np.nan, reason)


def _worst(verdicts: Sequence[_Verdict]) -> _Verdict:
    """Return the worst verdict of several directions, ignoring a single disagreement among three or more."""
    judged = sorted((v for v in verdicts if not v.reason), key=lambda v: v.error / v.allowed)
    if not judged:
        return verdicts[0]
    alone = len(judged) > 2 and judged[-1].wrong and not judged[-2].wrong
    return judged[-2] if alone else judged[-1]


def _undecided(verdicts: Sequence[_Verdict], directions: int) -> bool:
    """Return whether more directions are needed: only one disagrees, or too few could be judged."""
    return sum(v.wrong for v in verdicts) == 1 or sum(not v.reason for v in verdicts) < directions
