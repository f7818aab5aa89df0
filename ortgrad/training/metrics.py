"""Metrics: how good the outputs of a model are on held-out data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ortgrad.errors import ArgumentTypeError, TrainingError

METRICS = ("accuracy", "mse")
# A name, or a function of outputs and targets.
Metric = str | Callable[[np.ndarray, np.ndarray], float]


def check_metric(metric: object) -> str:
    """Return the name of a metric; raises an error if there is none."""
    if isinstance(metric, str):
        if metric not in METRICS:
            raise TrainingError(
                f"metric is {metric!r}; it must be one of {', '.join(METRICS)}, or a function"
            )
        return metric
    if not callable(metric):
        raise ArgumentTypeError(f"metric is a {type(metric).__name__}, not a name or a function")
    return str(getattr(metric, "__name__", "metric"))


class Measurement:
    """Adds up a metric over batches; a function gets all outputs and targets at once."""

    # `several` says that every column of the output is a class of its own.
    def __init__(
        self,
        metric: Metric,
        axis: int | None,
        ignored: int | None,
        *,
        threshold: float = 0.0,
        several: bool = False,
    ) -> None:
        self._several = several
        self._metric, self._axis, self._ignored, self._threshold = metric, axis, ignored, threshold
        self._sum, self._count = 0.0, 0
        self._pairs: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, output: np.ndarray, target: np.ndarray) -> None:
        """Count a batch."""
        if self._metric == "accuracy":
            right, counted = self._right(output, target)
            self._sum += float(np.count_nonzero(right & counted))
            self._count += int(np.count_nonzero(counted))
        elif self._metric == "mse":
            if output.shape != target.shape:
                raise TrainingError(
                    f"the metric mse needs outputs and targets of one shape: {list(output.shape)} and "
                    f"{list(target.shape)}"
                )
            difference = output.astype(np.float64) - target
            self._sum += float(np.square(difference).sum())
            self._count += difference.size
        else:
            self._pairs.append((output, target))

    def _right(self, output: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if target.dtype.kind not in "iu":
            # Two classes, of which the output has the logits or the probabilities.
            several = output.ndim > 1 and output.shape[1] > 1 and not self._several
            if not np.isin(target, (0, 1)).all() or output.shape != target.shape or several:
                raise TrainingError(
                    "accuracy needs labels, or zeros and ones for one column (with bce, for each one): "
                    f"{list(output.shape)} and {list(target.shape)}"
                )
            return (output > self._threshold) == (target == 1), np.ones(output.shape, np.bool_)
        axis = self._axis if self._axis is not None else 1 if output.ndim == target.ndim + 1 else None
        if axis is None or np.delete(output.shape, axis).tolist() != list(target.shape):
            raise TrainingError(
                f"accuracy needs scores with one dimension more than the labels: {list(output.shape)} "
                f"and {list(target.shape)}"
            )
        counted = np.ones(target.shape, np.bool_) if self._ignored is None else target != self._ignored
        return output.argmax(axis) == target, counted

    def value(self) -> float:
        """Return the metric of all batches."""
        if callable(self._metric):
            outputs, targets = (np.concatenate(arrays) for arrays in zip(*self._pairs, strict=True))
            return float(self._metric(outputs, targets))
        return self._sum / max(1, self._count)
