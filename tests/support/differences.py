"""Differences of the forward model, in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def differences(loss: Callable[[np.ndarray], float], x: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Central differences in float64."""
    grad = np.zeros(x.shape)
    for i in np.ndindex(*x.shape):
        moved = np.zeros(x.shape)
        moved[i] = step
        grad[i] = (loss(x + moved) - loss(x - moved)) / (2 * step)
    return grad
