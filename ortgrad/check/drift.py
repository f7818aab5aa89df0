"""How far a model in its own element types is from its copy in double, at every intermediate value."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx

from ortgrad.check.double_precision import low_values
from ortgrad.check.running import CannotRunError, Run, on_onnxruntime, with_outputs
from ortgrad.errors import OrtgradError
from ortgrad.graph.feeds import Arrays

AT_ONCE = 64  # values that are kept in memory


def drift_between(
    own: onnx.ModelProto,
    double: onnx.ModelProto,
    make: Callable[[onnx.ModelProto], Run],
    feeds: Arrays,
) -> float:
    """Return the largest relative difference of a value in two models that have the same names.

    It is infinite if a value is not finite, has another shape in one of them, or cannot be computed.
    """
    shared = {name for node in double.graph.node for name in node.output}
    known = low_values(own)
    names = [k for node in own.graph.node for k in node.output if k in shared and k in known]
    worst = 0.0
    for start in range(0, len(names), AT_ONCE):
        chosen = names[start : start + AT_ONCE]
        try:
            left = on_onnxruntime(with_outputs(own, chosen))(feeds)
            right = make(with_outputs(double, chosen))(feeds)
        except (CannotRunError, OrtgradError):
            return np.inf
        worst = max(worst, *(_distance(left[name], right[name]) for name in chosen))
    return worst


def _distance(left: np.ndarray, right: np.ndarray) -> float:
    if left.shape != right.shape:
        return np.inf
    left, right = left.astype(np.float64), right.astype(np.float64)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore"):
        distance = float(np.linalg.norm(np.where(same, 0.0, left - right)))
        size = float(np.linalg.norm(np.where(np.isfinite(right), right, 0.0)))
    if np.isnan(distance):
        return np.inf
    return distance / size if size > 0 else (np.inf if distance else 0.0)
