"""Decides by the results on held-out data which epoch is the best, and when to stop."""

from __future__ import annotations

import math

from ortgrad.errors import TrainingError
from ortgrad.training.metrics import Metric, check_metric
from ortgrad.training.results import Epoch


class Judge:
    """Compares epochs by their metric or, without one, by their loss."""

    def __init__(
        self, metric: Metric | None, patience: int | None, maximize: bool | None, *, has_data: bool
    ) -> None:
        # The name of the metric.
        self.name = None if metric is None else check_metric(metric)
        if (metric is not None or patience is not None) and not has_data:
            raise TrainingError("a metric and patience need held-out data: evaluate=")
        rises = maximize if callable(metric) else metric == "accuracy"
        if rises is None and patience is not None:
            raise TrainingError(
                f"patience needs to know whether {self.name} is to rise or to fall: maximize="
            )
        if maximize is not None and not callable(metric):
            raise TrainingError("maximize is for a metric that is a function")
        self._patience, self._sign = patience, -1 if rises else 1

    def stops(self, waited: int) -> bool:
        """Return whether to stop after `waited` epochs without an improvement."""
        return self._patience is not None and waited >= self._patience

    def check(self, record: Epoch, epoch: int) -> None:
        """Raise TrainingError for an epoch by which patience cannot decide."""
        if self._patience is not None and not math.isfinite(_compared(record)):
            raise TrainingError(
                f"epoch {epoch}: patience cannot decide by a held-out loss of {record.eval_loss} and a "
                f"metric of {record.metric}"
            )

    def compare(self, record: Epoch, best: float | None, waited: int) -> tuple[float | None, int]:
        """Return the best value so far, less being better, and the number of epochs since then."""
        if record.eval_loss is None:
            return best, waited
        value = self._sign * _compared(record)
        return (value, 0) if best is None or value < best else (best, waited + 1)


def _compared(record: Epoch) -> float:
    """Return the metric of held-out data, or else the loss."""
    value = record.metric if record.metric is not None else record.eval_loss
    assert value is not None
    return value
