"""Differences of the forward model, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime

import ortgrad


def differences(loss: Callable[[np.ndarray], float], x: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Central differences in float64."""
    grad = np.zeros(x.shape)
    for i in np.ndindex(*x.shape):
        moved = np.zeros(x.shape)
        moved[i] = step
        grad[i] = (loss(x + moved) - loss(x - moved)) / (2 * step)
    return grad


def session(model: onnx.ModelProto, way: str) -> Any:
    """A session that runs the model in one of the five ways."""
    if way not in ("plain", "registered"):
        return ortgrad.InferenceSession(model, kernels=way)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if way == "registered":
        ortgrad.register(options)
    return onnxruntime.InferenceSession(model.SerializeToString(), options)
