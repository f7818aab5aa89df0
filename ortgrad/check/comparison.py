"""Comparison of all gradients with differences, at several points, one by one or in groups, in limited time.

Where one forward pass takes long, the targets of a group move together: their slopes add up. If the sum is
right in two directions, all of them are; otherwise the group is halved, until the wrong ones are alone.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from ortgrad.check.differences import Differences, rounding_of
from ortgrad.check.objective import Objective, Point, distance
from ortgrad.check.result import Row, unjudged
from ortgrad.check.verdicts import (
    ACCURACY,
    COARSE_TOLERANCE,
    SAFETY,
    TIME_OUT,
    TOLERANCES,
    Evidence,
    Line,
    Verdict,
    judge,
    not_judged,
    slope_of,
    undecided,
    worst,
)

POINTS = 4  # tried until the function is smooth: the given one, and others beside it
MORE_DIRECTIONS = 3  # tried where a direction crosses a kink, or where only one disagrees
PATIENCE = 10.0  # seconds for all directions of all gradients; if they would take longer, they are grouped
GROUP_DIRECTIONS = 2
# A group is judged only if it would show an error of this size in one of its gradients.
VISIBLE = 0.01
# A gradient that may be wrong because its element type is imprecise must be this many times further off.
DOUBT = 50.0


class Clock:
    """The time that is left of a number of seconds; None is without a limit."""

    def __init__(self, seconds: float | None) -> None:
        self._end = np.inf if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float:
        """The seconds left; negative if time has run out."""
        return float(self._end - time.monotonic())


class Comparison:
    """Compares the gradients of an objective with its differences."""

    def __init__(
        self,
        objective: Objective,
        tolerance: float | None,
        directions: int,
        generator: np.random.Generator,
        clock: Clock,
    ) -> None:
        self._objective = objective
        self._tolerance = tolerance
        self._directions = directions
        self._generator = generator
        self._clock = clock
        self._drift = cache(lambda: objective.forward.drift(objective.first.feeds))

    def compare(self, names: Sequence[str], add: Callable[[Row], None]) -> None:
        """Call `add` with the verdict on the gradient with respect to each of the targets, in any order."""
        waiting = self._groups(names)
        # The halves of a group wait until all other groups have been compared.
        while waiting:
            group = waiting.popleft()
            if len(group) == 1:
                add(self._row(group[0]))
                continue
            verdict = self._group(group)
            if verdict is None:
                half = len(group) // 2
                waiting.extend([group[:half], group[half:]])
                continue
            note = verdict.reason or f"together with {len(group) - 1} more"
            for name in group:
                add(Row(name, verdict.error, verdict.allowed, note, judged=not verdict.reason))

    def _groups(self, names: Sequence[str]) -> deque[Sequence[str]]:
        """Return the targets in groups of equal size; each is a group of its own if there is time."""
        cost = 2 * self._objective.seconds * len(names)
        limit = min(PATIENCE, self._clock.left / 4)
        size = 1
        if self._directions * cost > limit:
            size = min(max(2, math.ceil(GROUP_DIRECTIONS * cost / max(limit, 1e-3))), len(names))
        return deque(names[i : i + size] for i in range(0, len(names), size))

    def _group(self, names: Sequence[str]) -> Verdict | None:
        """Return the verdict on a group that is right, or if time has run out; None for other groups."""
        if self._clock.left <= 0:
            return not_judged(TIME_OUT)
        first, passes = self._objective.first, len(self._objective.passes)
        # If the gradients in double are right, gradients that are close to them are right as well.
        close = passes > 1 and all(self._close(first, name) for name in names)
        found = []
        for _ in range(GROUP_DIRECTIONS):
            verdicts = self._along(first, self._draw(first, names), quick=True)
            found += verdicts[-1:] if close else verdicts
            if any(v.reason or v.allowed > VISIBLE / math.sqrt(len(names)) for v in found):
                return None
        return max(found, key=lambda v: v.error)

    def _row(self, name: str) -> Row:
        """Return the verdict on the gradient with respect to a target."""
        first = ""
        for number in range(POINTS):
            if self._clock.left <= 0:
                first = first or TIME_OUT
                break
            point = self._objective.point(number)
            if point is None:
                continue
            verdict, note = self._at(point, name)
            finite = self._objective.finite and np.isfinite(point.rounding)
            if np.isinf(verdict.error) and not finite:
                verdict = not_judged("the gradient is not finite, and neither are the results")
            if not verdict.reason:
                beside = f"beside the given point: there, {first}" if first else ""
                if not np.isfinite(verdict.error):
                    note = "it is not finite, though the function is smooth"
                notes = "; ".join(filter(None, (note, beside)))
                return Row(name, verdict.error, verdict.allowed, notes)
            first = first or verdict.reason
        return unjudged(name, first)

    def _at(self, point: Point, name: str) -> tuple[Verdict, str]:
        """Return the verdict at a point from several directions, and a note on it."""
        found: list[list[Verdict]] = [[] for _ in self._objective.passes]
        for tried in range(self._directions + MORE_DIRECTIONS):
            # Where the gradient in double is right, the other one is compared with it.
            if tried >= self._directions and not undecided(found[-1], self._directions):
                break
            if tried and self._clock.left <= 0:
                break
            for verdicts, verdict in zip(found, self._along(point, self._draw(point, [name])), strict=True):
                verdicts.append(verdict)
        own, double = worst(found[0]), worst(found[-1])
        if len(found) == 1:
            return self._without_doubt(own, point.gradients[0][name].dtype.name, 0.0), ""
        if double.reason:
            return double, ""
        if double.wrong:
            if not (own.wrong or own.reason) and double.error <= ACCURACY["float64"]:
                return own, f"in double {double.error:.0e} off"
            return (own, "") if own.wrong else (double, "in double")
        if not any(verdict.reason or verdict.wrong for verdict in found[0]):
            return own, ""
        return self._against_double(double, point, name)

    def _against_double(self, right: Verdict, point: Point, name: str) -> tuple[Verdict, str]:
        """Return the verdict on a gradient whose counterpart in double is right, from all its elements."""
        gradient, double = point.gradients[0][name], point.gradients[-1][name]
        kind = gradient.dtype.name
        error = distance(gradient, double)
        verdict = Verdict(error, max(ACCURACY[kind], self._tolerance or 0.0))
        note = f"compared with the gradient in double, which is {right.error:.0e} off"
        if not verdict.wrong:
            return verdict, note
        if not np.isfinite(gradient.astype(np.float64)).all():
            # `rounding` is the distance of the results from those in double.
            finite = np.isfinite(point.rounding)
            return (verdict, note) if finite else (right, f"in double only: {kind} results are not finite")
        imprecision = self._objective.spread(point, 0, name)
        verdict = self._without_doubt(verdict, kind, imprecision)
        return (right, f"in double only: {verdict.reason}") if verdict.reason else (verdict, note)

    def _without_doubt(self, verdict: Verdict, kind: str, imprecision: float) -> Verdict:
        """Return the verdict on a gradient that is wrong, unless the model is too imprecise in its own types.

        `imprecision` is the part of that imprecision that is known already.
        """
        unrelated = self._objective.forward.single or kind == "float64" or not np.isfinite(verdict.error)
        if not verdict.wrong or unrelated:
            return verdict
        if verdict.error > verdict.allowed + DOUBT * imprecision:
            imprecision += self._drift()
        if verdict.error > verdict.allowed + DOUBT * imprecision:
            return verdict
        return not_judged(f"{kind} is imprecise here: {verdict.error:.0e} off")

    def _close(self, point: Point, name: str) -> bool:
        """Return whether the gradient in the model's own types agrees with that in double."""
        gradient, double = point.gradients[0][name], point.gradients[-1][name]
        return distance(gradient, double) <= ACCURACY[gradient.dtype.name]

    def _draw(self, point: Point, names: Sequence[str]) -> Line:
        """Return random directions for targets, in units of their sizes, with similar slopes."""
        handles, gradients = self._objective.forward.handles, point.gradients[-1]
        slopes = {k: handles[k].size * float(np.linalg.norm(gradients[k].astype(np.float64))) for k in names}
        middle = float(np.median(list(slopes.values())))
        line = Line({}, {})
        for name in names:
            factor = min(1.0, middle / slopes[name]) if slopes[name] > 0 and middle > 0 else 1.0
            line.scales[name] = factor * handles[name].size
            drawn = self._generator.standard_normal(gradients[name].shape)
            line.directions[name] = line.scales[name] * drawn
        return line

    def _along(self, point: Point, line: Line, *, quick: bool = False) -> list[Verdict]:
        """Return the verdicts on all backward passes from one direction; with `quick`, from one step."""
        directions = line.directions
        objective, forward = self._objective, self._objective.forward
        single = forward.single
        rounding = 4 * rounding_of("float64", single=single) * float(np.linalg.norm(point.base))
        function = objective.along(point, directions)
        differences = Differences(function, forward.steps, rounding)
        verdicts: list[Verdict] = []
        # Backwards, because the other gradients need few measurements if those in double are right.
        for number in range(len(point.gradients) - 1, -1, -1):
            gradients, tolerance = point.gradients[number], self._tolerance
            if tolerance is None:
                kinds = {gradients[name].dtype.name for name in directions}
                tolerance = max(*(TOLERANCES[k] for k in kinds), COARSE_TOLERANCE if single else 0.0)

            def noise(scale: float, number: int = number) -> float:
                moved = objective.noise(point, number, directions)
                return SAFETY * (moved + point.rounding * scale)

            def own(step: float) -> float:
                return objective.own_slope(point, directions, step)

            evidence = Evidence(differences, noise, own, single, lambda: self._clock.left <= 0)
            slope = slope_of(gradients, line, point.base, single)
            enough = quick or (bool(verdicts) and not (verdicts[0].wrong or verdicts[0].reason))
            verdicts.insert(0, judge(slope, evidence, tolerance, quick=enough))
        return verdicts
