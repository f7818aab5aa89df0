"""The function that is checked, a randomly weighted sum of the outputs, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from ortgrad.check.differences import rounding_of
from ortgrad.check.forward import Forward, size_of
from ortgrad.check.sessions import Backward, CannotRunError
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
    perturbed: dict[int, list[Arrays]] = field(default_factory=dict)


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
        base = forward.run(forward.feeds)
        self._weights = {
            # No differences can be computed for outputs that are not finite.
            name: np.where(np.isfinite(base[name]), generator.standard_normal(base[name].shape), 0.0)
            if seeds
            else np.ones(())
            for name in outputs
        }
        self._seeds = dict(zip(seeds, self._weights.values(), strict=bool(seeds)))
        self.first = self._point(forward.feeds)
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

    def along(self, point: Point, name: str, direction: np.ndarray) -> Callable[[float], np.ndarray]:
        """Return the terms of the sum as a function of the distance that a target moves in a direction."""
        feed = self.forward.handles[name].feed
        value = point.feeds[feed].astype(np.float64)

        @cache
        def function(t: float) -> np.ndarray:
            try:
                return self._terms({**point.feeds, feed: value + t * direction}) if t else point.base
            except CannotRunError:
                return np.full(1, np.nan)

        return function

    def noise(self, point: Point, number: int, name: str, direction: np.ndarray) -> float:
        """Return how much the slope of a backward pass changes if all values are rounded differently."""
        if number not in point.perturbed:
            runs = point.perturbed[number] = []
            for _ in range(NOISE_RUNS):
                other = {k: _perturbed(array, self._generator) for k, array in point.feeds.items()}
                runs.append(self.passes[number].run({**other, **self._seeds}))
        right = point.gradients[number][name].astype(np.float64)
        with np.errstate(invalid="ignore"):
            moves = [
                abs(float(np.sum((other[name].astype(np.float64) - right) * direction)))
                if other[name].shape == right.shape
                else np.inf
                for other in point.perturbed[number]
            ]
        return float(np.max(np.nan_to_num(moves, nan=np.inf)))

    def _point(self, feeds: Arrays) -> Point:
        base = self._terms(feeds)
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
            point = self._point(moved)
        except (CannotRunError, ModelError):
            return None
        return point if point.base.shape == self.first.base.shape and np.isfinite(point.base).all() else None

    def _terms(self, feeds: Arrays) -> np.ndarray:
        return self._weighted(self.forward.run(feeds))

    def _weighted(self, results: Arrays) -> np.ndarray:
        parts = []
        for name, weight in self._weights.items():
            result = results[name].astype(np.float64)
            if weight.shape not in ((), result.shape):
                return np.full(1, np.nan)
            with np.errstate(invalid="ignore"):
                parts.append(np.where(weight == 0, 0.0, weight * result).ravel())
        return np.concatenate(parts)


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
