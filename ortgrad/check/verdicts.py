"""Verdicts on slopes: what a gradient says compared with what differences say.

The function F(t) is a randomly weighted sum of the outputs, on a random line through the point: every target
that is judged moves along a random direction d, in units of its own size. The gradient g claims the slope
s = <g, d>, and differences measure it.

1. D(h) = (F(h) - F(-h)) / 2h at one step. If s and D(h) agree to the tolerance, the direction is *ok*.
2. n, how much s changes if all inputs are rounded differently, is measured by running the backward pass
   again. If s and D(h) agree to the tolerance and n, it is ok as well.
3. D and its error e, from steps that decrease by 4: values of D(h) are extrapolated (Richardson), those of
   three neighbouring pairs of steps are compared, the best confirmed one is D, and e is 5 times its distance
   from its neighbours plus the rounding error of F over the step. |s - D| <= tolerance + e + n is ok; but if
   e + n is more than a tenth of the gradient, it would hide any error, and the direction is *not judged*.
4. Otherwise s and D disagree. The direction is *not judged* if there may be another reason than a wrong
   gradient:
   - F has a kink here: its one-sided slopes differ by a good part of |s - D|;
   - the differences do not converge: e is more than a tenth of |s - D|. Noise counts in e, as measured from
     high-order differences of F at steps of 1e-6: a function that computes in float32 inside is a
     staircase, and its smallest differences agree perfectly;
   - differences of the model in its own types agree with s, not with D: the copy in double is another
     function;
   - F could only be computed in single precision, and |s - D| is less than half of the gradient.
   It is *wrong* only if none of these applies.

A gradient is wrong only if at least two directions, and most of those that could be judged, are wrong. A
float32 gradient may be off because the operators of onnxruntime are imprecise in float32 (an STFT by 2e-4).
If the gradient in double is right, the two are compared, element by element, and may differ by ACCURACY.
Beyond that, and without a gradient in double, it is wrong only if the error is 50 times the imprecision of
float32: how far the forward pass drifts from the one in double, over all its intermediate values, and how
much the gradient changes if the inputs are rounded differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ortgrad.check.differences import Derivative, Differences, rounding_of
from ortgrad.graph.feeds import Arrays

# The allowed relative error of a gradient by its element type. A larger error is compared with measured
# rounding.
TOLERANCES = {"float64": 1e-6, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
COARSE_TOLERANCE = 1e-3  # if the forward pass is in single precision
# The worst relative error of onnxruntime's operators, by element type.
ACCURACY = {"float64": 1e-4, "float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}
# A gradient is not judged if rounding could hide a relative error of this size.
LARGEST_NOISE = 0.1
CONVERGED = 0.1  # the largest part of a disagreement that may be the error of the differences
GROSS = 0.5  # the smallest relative disagreement that counts in single precision
SAFETY = 5.0  # the allowed multiple of measured rounding
TIME_OUT = "time ran out; give it more seconds"
OWN_STEPS = (1e-2, 2.5e-3)  # for differences in the model's own types


class Slope(NamedTuple):
    """The directional derivative that a gradient gives.

    `norm` is the norm of the gradient, in units of the sizes of the targets. `unit` is the slope of a
    function that changes by its own size over the size of the target; up to `zero` units may be rounding in
    the gradient's element type.
    """

    value: float
    norm: float
    unit: float
    zero: float


class Verdict(NamedTuple):
    """The relative error of a slope and the allowed error, or the reason why the slope is not judged."""

    error: float
    allowed: float
    reason: str = ""

    @property
    def wrong(self) -> bool:
        """Whether the slope is wrong."""
        return not self.reason and not self.error <= self.allowed


class Evidence(NamedTuple):
    """What can be measured for a slope, each only where it is needed.

    `noise(scale)` is the effect of rounding on a slope of this scale, `own(step)` the central difference of
    the forward pass in its own types. `hurry` says whether time ran out.
    """

    differences: Differences
    noise: Callable[[float], float]
    own: Callable[[float], float]
    single: bool
    hurry: Callable[[], bool]


class Line(NamedTuple):
    """A line through a point: the directions of targets, standard normal times a scale for each."""

    directions: Arrays
    scales: dict[str, float]


def slope_of(gradients: Arrays, line: Line, terms: np.ndarray, single: bool) -> Slope:
    """Return the slope of gradients along a line, for a sum of `terms`."""
    value, square, zero = 0.0, 0.0, 0.0
    for name, direction in line.directions.items():
        wide = gradients[name].astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            value += float(np.sum(wide * direction))
            square += (line.scales[name] * float(np.linalg.norm(wide))) ** 2
        zero = max(zero, 10 * rounding_of(gradients[name].dtype.name, single=single))
    return Slope(value, float(np.sqrt(square)), float(np.sum(np.abs(terms))), zero)


def judge(slope: Slope, evidence: Evidence, tolerance: float, *, quick: bool = False) -> Verdict:
    """Return the verdict on a slope. Expensive measurements are made only if cheaper ones do not decide.

    With `quick`, there are no measurements beyond one difference and rounding, and nothing is wrong.
    """
    differences = evidence.differences
    scale = max(slope.norm if np.isfinite(slope.norm) else 0.0, abs(differences.quick), 1e-30)
    error = abs(slope.value - differences.quick)
    if error <= tolerance * scale:
        return Verdict(error / scale, tolerance)
    rounding = evidence.noise(scale)
    if rounding <= LARGEST_NOISE * scale and error <= tolerance * scale + rounding:
        return Verdict(error / scale, tolerance + rounding / scale)
    if quick:
        return not_judged("one difference does not decide")
    if evidence.hurry():
        return not_judged(TIME_OUT)
    verdict = _judge_measured(slope, differences.measure(0.01 * error), tolerance, rounding)
    if verdict.wrong:
        verdict = _judge_measured(slope, differences.measure_with_noise(), tolerance, rounding)
    return _doubt(slope, evidence, verdict) if verdict.wrong else verdict


def _judge_measured(slope: Slope, measured: Derivative, tolerance: float, rounding: float) -> Verdict:
    if not np.isfinite(measured.error):
        return not_judged("the differences are not finite or do not converge")
    if not np.isfinite(slope.value):
        smooth = not measured.jump and measured.error <= LARGEST_NOISE * abs(measured.value)
        reason = "" if smooth else "the gradient is not finite, and the differences do not converge"
        return Verdict(np.inf, tolerance, reason)
    size = max(slope.norm, abs(measured.value))
    error = abs(slope.value - measured.value)
    if size + measured.error <= slope.zero * slope.unit:
        return Verdict(error / slope.unit, slope.zero)
    scale = max(size, 1e-30)
    noise = measured.error + (rounding if error > tolerance * scale + measured.error else 0.0)
    verdict = Verdict(error / scale, tolerance + noise / scale)
    if not verdict.wrong:
        return (
            not_judged(f"rounding hides errors below {noise / scale:.0%}")
            if noise > LARGEST_NOISE * scale
            else verdict
        )
    if measured.jump >= error / 10:
        return not_judged("it is on a kink")
    if measured.error > CONVERGED * error:
        return not_judged("the differences do not converge")
    return verdict


def _doubt(slope: Slope, evidence: Evidence, verdict: Verdict) -> Verdict:
    """Return the verdict on a slope that seems wrong, unless the model in its own types contradicts."""
    if not np.isfinite(slope.value):
        return verdict
    if evidence.single:
        return verdict if verdict.error >= GROSS else not_judged("the forward pass has single precision only")
    measured = evidence.differences.measure(0.0)
    for step in OWN_STEPS:
        own = evidence.own(step)
        if abs(own - slope.value) < abs(own - measured.value) / 3:
            return not_judged(
                "the model in its own types agrees with the gradient, its copy in double does not"
            )
    return verdict


def not_judged(reason: str) -> Verdict:
    """Return the verdict that nothing is known, with the reason."""
    return Verdict(np.nan, np.nan, reason)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of several directions together."""
    judged = sorted((v for v in verdicts if not v.reason), key=lambda v: v.error / v.allowed)
    if not judged:
        return verdicts[0]
    wrong = sum(v.wrong for v in judged)
    if wrong and (wrong < 2 or 2 * wrong <= len(judged)):
        # A single direction that disagrees crosses a kink that was not detected.
        if wrong == 1 and len(judged) > 2:
            return judged[-2]
        return not_judged(f"the differences agree in {len(judged) - wrong} of {len(judged)} directions only")
    return judged[-1]


def undecided(verdicts: Sequence[Verdict], directions: int) -> bool:
    """Return whether more directions are needed: only one disagrees, or too few could be judged."""
    return sum(v.wrong for v in verdicts) == 1 or sum(not v.reason for v in verdicts) < directions
