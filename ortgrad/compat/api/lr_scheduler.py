"""LinearLRScheduler: a learning rate that rises, then falls."""

from __future__ import annotations

import numpy as np

from ortgrad.compat.api.optimizer import Optimizer
from ortgrad.keywords import checked

__all__ = ["LinearLRScheduler"]


@checked
class LinearLRScheduler:
    """A learning rate that rises linearly in the first steps, and then falls linearly.

    It rises from 0 to `initial_lr` in `warmup_step_count` steps of the optimizer, and is 0 again after
    `total_step_count`. The constructor sets the learning rate of the optimizer, and `step` updates it.

    >>> from ortgrad.compat.api.lr_scheduler import linear_factor
    >>> [linear_factor(step, warmup=2, total=6) for step in range(7)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    def __init__(
        self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float
    ) -> None:
        self._optimizer = optimizer
        self._warmup, self._total = int(warmup_step_count), int(total_step_count)
        optimizer._group.initial_rate = float(np.float32(initial_lr))
        self.step()

    def step(self) -> None:
        """Set the learning rate for the optimizer's next step."""
        group = self._optimizer._group
        self._optimizer.set_learning_rate(
            group.initial_rate * linear_factor(group.step, self._warmup, self._total)
        )


def linear_factor(step: int, warmup: int, total: int) -> float:
    """Return the factor of the learning rate after `step` steps."""
    if step < warmup:
        return step / warmup
    return max(0.0, (total - step) / max(1, total - warmup))
