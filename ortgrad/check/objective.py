"""The function that is checked, a randomly weighted sum of the outputs, and its gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from ortgrad.check.differences import central, rounding_of
from ortgrad.check.numeric_forward import Forward, size_of
from ortgrad.check.running import Backward, CannotRunError, Run
from ortgrad.errors import ModelError
from ortgrad.graph.feeds import Arrays

NOISE_RUNS = 3


@dataclass(frozen=True)
class Point:
    """A point, with the terms of the sum there and the gradients of every backward pass.

    `rounding` is the relative difference between the forward pass in the model's own types and `base`.
    `perturbed` has, by the number of a pass, its gradients for values that are rounded differently.
    """

    feeds: Arrays
    base: np.ndarray
    rounding: float
    gradients: list[Arrays]
    perturbed: dict[int, list[Arrays | None]] = field(default_factory=dict)


class Objective:
    """A forward pass and its backward passes at several points; `first` is the given one.

    `seeds` are the inputs of the backward passes for the gradients of `outputs`; empty for a scalar.
    """

    def __init__(
        self,
        forward: Forward,
        passes: Sequence[Backward],
        outputs: Sequence[str],
        seeds: Sequence[str],
        generator: np.random.Generator,
    ) -> None:
        self.forward = forward
        self.passes = passes
        self._generator = generator
        started = time.perf_counter()
        base = forward.run(forward.feeds)
        self.seconds = time.perf_counter() - started  # that one forward pass takes
        self.finite = all(np.isfinite(base[name]).all() for name in outputs)
        self._weights = {
            # No differences can be computed for outputs that are not finite.
            name: np.where(np.isfinite(base[name]), generator.standard_normal(base[name].shape), 0.0)
            if seeds
            else np.ones(())
            for name in outputs
        }
        self._seeds = dict(zip(seeds, self._weights.values(), strict=bool(seeds)))
        self.first = self._point(forward.feeds, self._weighted(base))
        self._beside: dict[int, Point | None] = {}

    def point(self, number: int) -> Point | None:
        """Return the given point for 0, else one beside it, where equal values differ and zeros are nonzero.

        Returns None if the model does not run there.
        """
        if number == 0:
            return self.first
        if number not in self._beside:
            self._beside[number] = self._moved(upwards=number % 2 == 1)
        return self._beside[number]

    def along(
        self, point: Point, directions: Arrays, run: Run | None = None
    ) -> Callable[[float], np.ndarray]:
        """Return the terms of the sum as a function of the distance that targets move in directions.

        They are computed by `forward.run`, or by `run`. Where the model does not run, they are NaN.
        """
        feeds = {name: self.forward.handles[name].feed for name in directions}
        values = {name: point.feeds[feed].astype(np.float64) for name, feed in feeds.items()}

        @cache
        def function(t: float) -> np.ndarray:
            if not t and run is None:
                return point.base
            moved = {feeds[name]: values[name] + t * directions[name] for name in directions}
            try:
                return self._weighted((run or self.forward.run)({**point.feeds, **moved}))
            except CannotRunError:
                return np.full(1, np.nan)

        return function

    def own_slope(self, point: Point, directions: Arrays, step: float) -> float:
        """Return the central difference of the forward pass in the model's own types."""
        return central(self.along(point, directions, self.forward.own), step)

    def noise(self, point: Point, number: int, directions: Arrays) -> float:
        """Return how much the slope of a backward pass changes if all values are rounded differently."""
        right = point.gradients[number]
        moves = [
            np.inf if other is None else abs(_slope_between(other, right, directions))
            for other in self._perturbed_gradients(point, number)
        ]
        return float(np.max(np.nan_to_num(moves, nan=np.inf)))

    def spread(self, point: Point, number: int, name: str) -> float:
        """Return how far a gradient is from itself if all values are rounded differently."""
        right = point.gradients[number][name].astype(np.float64)
        others = self._perturbed_gradients(point, number)
        return max(np.inf if other is None else distance(other[name], right) for other in others)

    def _perturbed_gradients(self, point: Point, number: int) -> list[Arrays | None]:
        """Return the gradients of a backward pass for other roundings; None if it does not run there.

        Rounding may decide how many elements a Range has.
        """
        if number not in point.perturbed:
            runs: list[Arrays | None] = []
            for _ in range(NOISE_RUNS):
                other = {k: _perturbed(array, self._generator) for k, array in point.feeds.items()}
                try:
                    runs.append(self.passes[number].run({**other, **self._seeds}))
                except ModelError:
                    runs.append(None)
            point.perturbed[number] = runs
        return point.perturbed[number]

    def _point(self, feeds: Arrays, base: np.ndarray) -> Point:
        own = self._weighted(self.forward.own(feeds))
        size = float(np.linalg.norm(base))
        rounding = float(np.linalg.norm(own - base)) / size if size > 0 and own.shape == base.shape else 0.0
        return Point(feeds, base, rounding, [p.run({**feeds, **self._seeds}) for p in self.passes])

    def _moved(self, upwards: bool) -> Point | None:
        added = {handle.feed for handle in self.forward.handles.values() if handle.inner}
        moved = {}
        for name, array in self.first.feeds.items():
            if not _is_floating(array) or name in added:
                moved[name] = array
                continue
            shift = self._generator.uniform(0.01, 0.04, array.shape)
            # Upwards first, because many functions are not defined below 0.
            sign = 1.0 if upwards else self._generator.choice([-1.0, 1.0], array.shape)
            moved[name] = np.asarray(array.astype(np.float64) + size_of(array) * shift * sign, array.dtype)
        try:
            point = self._point(moved, self._weighted(self.forward.run(moved)))
        except (CannotRunError, ModelError):
            return None
        return point if point.base.shape == self.first.base.shape and np.isfinite(point.base).all() else None

    def _weighted(self, results: Arrays) -> np.ndarray:
        parts = []
        for name, weight in self._weights.items():
            result = results[name].astype(np.float64)
            if weight.shape not in ((), result.shape):
                return np.full(1, np.nan)
            with np.errstate(invalid="ignore"):
                parts.append(np.where(weight == 0, 0.0, weight * result).ravel())
        return np.concatenate(parts)


def distance(gradient: np.ndarray, double: np.ndarray) -> float:
    """Return the relative difference from the gradient in double, by norm or by the largest element."""
    if gradient.shape != double.shape:
        return np.inf
    with np.errstate(invalid="ignore", over="ignore"):
        moved = gradient.astype(np.float64) - double
        norm, largest = float(np.linalg.norm(double)), float(np.max(np.abs(double), initial=0.0))
        if not norm:
            return 0.0 if not moved.any() else np.inf
        parts = float(np.linalg.norm(moved)) / norm, float(np.max(np.abs(moved), initial=0.0)) / largest
    return max(parts) if np.isfinite(parts).all() else np.inf


def _slope_between(other: Arrays, right: Arrays, directions: Arrays) -> float:
    total = 0.0
    for name, direction in directions.items():
        if other[name].shape != right[name].shape:
            return np.inf
        with np.errstate(invalid="ignore"):
            total += float(np.sum((other[name].astype(np.float64) - right[name]) * direction))
    return total


def _is_floating(array: np.ndarray) -> bool:
    return array.dtype.kind in "fV"  # V: bfloat16


def _perturbed(array: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return the array with random relative errors of about one rounding, at least that of float32."""
    if not _is_floating(array):
        return array
    eps = rounding_of(array.dtype.name, single=True)
    with np.errstate(invalid="ignore"):
        moved = array.astype(np.float64) * (1 + eps * generator.standard_normal(array.shape))
        return np.asarray(moved, array.dtype)
