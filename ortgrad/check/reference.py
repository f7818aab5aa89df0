"""Running models on onnx's reference implementation, with fast versions of its slowest operators.

The reference has every operator in double precision, which onnxruntime does not. Its operators on images loop
over elements in Python, which would take minutes in models of ordinary size.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_average_pool import AveragePool_19
from onnx.reference.ops.op_max_pool import MaxPool as ReferenceMaxPool
from onnx.reference.ops.op_resize import Resize as ReferenceResize

from ortgrad.check.running import CannotRunError, Run
from ortgrad.graph.feeds import Arrays, typed
from ortgrad.graph.serialization import read, write
from ortgrad.passes.opset import at_minimum_opset
from ortgrad.pipelines.prepare import prepare_loaded


def on_reference(model: onnx.ModelProto) -> Run:
    """Return a function that runs the model and returns its outputs by name, or raises CannotRunError.

    Raises CannotRunError if the reference does not know an operator.
    """
    # Gradient operators of training models are replaced by standard ones; this may add outputs. The opset is
    # raised because the reference runs a BatchNormalization of an old opset in training mode.
    prepared = _at_minimum_opset(prepare_loaded(model, "onnx"))
    names = [output.name for output in prepared.graph.output]
    operators: list[type[OpRun]] = [LRN, GlobalMaxPool, Erf, Conv, MaxPool, AveragePool, Resize]

    def run(feeds: Arrays) -> Arrays:
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                results = evaluator.run(None, typed(prepared, feeds))
        except Exception as error:  # operators in NumPy, which may raise anything
            raise CannotRunError(str(error)) from error
        return {name: np.asarray(result) for name, result in zip(names, results, strict=True)}

    try:
        evaluator = ReferenceEvaluator(prepared, new_ops=operators)
    except Exception as error:
        raise CannotRunError(str(error)) from error
    return run


def _at_minimum_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    return write(at_minimum_opset(read(model)), model)


class LRN(OpRun):
    """Replaces the LRN of onnx 1.23, which normalizes only the first channels, one per row of the batch."""

    def _run(self, x: np.ndarray, alpha: float, beta: float, bias: float, size: int) -> tuple[np.ndarray]:
        before, after = (size - 1) // 2, size // 2
        channels = range(x.shape[1])
        sums = [np.sum(x[:, max(0, c - before) : c + after + 1] ** 2, axis=1) for c in channels]
        return (x / (bias + alpha / size * np.stack(sums, axis=1)) ** beta,)


class GlobalMaxPool(OpRun):
    """Replaces the GlobalMaxPool of onnx 1.23, which reduces one axis twice."""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


class Erf(OpRun):
    """The error function of the standard library, element by element."""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        values = np.fromiter(map(math.erf, x.ravel().tolist()), np.float64, x.size)
        return (values.reshape(x.shape).astype(x.dtype),)


class Conv(OpRun):
    """One product of matrices per group, on a view of the windows."""

    def _run(
        self, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, **attributes: Any
    ) -> tuple[np.ndarray]:
        windows = _windows(x, w.shape[2:], attributes, 0.0)
        groups, axes = attributes.get("group") or 1, len(w.shape) - 2
        batch, places = x.shape[0], windows.shape[2 : 2 + axes]
        windows = windows.reshape(batch, groups, -1, *windows.shape[2:])
        filters = w.reshape(groups, -1, w.shape[1], *w.shape[2:])
        kernel = range(3 + axes, 3 + 2 * axes)
        parts = [
            np.tensordot(windows[:, g], filters[g], ([1, *(k - 1 for k in kernel)], range(1, 2 + axes)))
            for g in range(groups)
        ]
        y = np.moveaxis(np.stack(parts, axis=1), -1, 2).reshape(batch, w.shape[0], *places)
        return (y if b is None else y + b.reshape(-1, *[1] * axes),)


class MaxPool(ReferenceMaxPool):
    """The maximum over a view of the windows, unless indices or a rounded-up size are wanted."""

    def _run(self, *inputs: Any, **attributes: Any) -> Any:
        slow: Any = super()._run
        if attributes.get("ceil_mode") or len(self.onnx_node.output) > 1:
            return slow(*inputs, **attributes)
        axes = tuple(-1 - i for i in range(len(attributes["kernel_shape"])))
        return (_windows(inputs[0], attributes["kernel_shape"], attributes, -np.inf).max(axis=axes),)


class AveragePool(AveragePool_19):
    """The mean over a view of the windows, unless a rounded-up size is wanted."""

    def _run(self, *inputs: Any, **attributes: Any) -> Any:
        slow: Any = super()._run
        if attributes.get("ceil_mode"):
            return slow(*inputs, **attributes)
        (x,) = inputs
        size = attributes["kernel_shape"]
        axes = tuple(-1 - i for i in range(len(size)))
        total = _windows(x, size, attributes, 0.0).sum(axis=axes)
        if attributes.get("count_include_pad"):
            return (total / math.prod(size),)
        return (total / _windows(np.ones_like(x), size, attributes, 0.0).sum(axis=axes),)


class Resize(ReferenceResize):
    """One product with a matrix per axis: the reference's own result for the rows of the identity."""

    def _run(self, *inputs: Any, **attributes: Any) -> Any:
        slow: Any = super()._run
        x, _, scales, sizes = [*inputs, *[None] * 3][:4]
        plain = attributes.get("coordinate_transformation_mode") != "tf_crop_and_resize"
        if not plain or attributes.get("keep_aspect_ratio_policy") not in (None, "stretch"):
            return slow(*inputs, **attributes)
        by_scale = scales is not None and len(scales) > 0
        axes = attributes.pop("axes", None)
        y = x
        for axis, wanted in zip(axes or range(x.ndim), scales if by_scale else sizes, strict=True):
            length = x.shape[axis]
            given = [np.array([1.0, wanted]), None] if by_scale else [None, np.array([length, wanted])]
            (matrix,) = slow(np.eye(length, dtype=x.dtype), None, *given, axes=None, **attributes)
            y = np.moveaxis(np.tensordot(y, matrix, (axis, 0)), -1, axis)
        return (y,)


def _windows(x: np.ndarray, size: Sequence[int], attributes: Mapping[str, Any], fill: float) -> np.ndarray:
    """Return a view of the padded array, with the axes of the windows' elements at the end."""
    axes = len(size)
    steps, gaps = (attributes.get(name) or [1] * axes for name in ("strides", "dilations"))
    pads, auto_pad = attributes.get("pads") or [0] * (2 * axes), attributes.get("auto_pad")
    extents = [(k - 1) * gap + 1 for k, gap in zip(size, gaps, strict=True)]
    borders: list[tuple[int, int]] = list(zip(pads[:axes], pads[axes:], strict=True))
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        borders = []
        for length, step, extent in zip(x.shape[2:], steps, extents, strict=True):
            total = max(0, (math.ceil(length / step) - 1) * step + extent - length)
            less, more = total // 2, total - total // 2
            borders.append((less, more) if auto_pad == "SAME_UPPER" else (more, less))
    padded = np.pad(x, [(0, 0), (0, 0), *borders], constant_values=fill)
    views = np.lib.stride_tricks.sliding_window_view(padded, extents, tuple(range(2, 2 + axes)))
    places = tuple(slice(None, None, step) for step in steps)
    elements = tuple(slice(None, None, gap) for gap in gaps)
    return views[(slice(None), slice(None), *places, *elements)]
