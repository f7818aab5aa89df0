"""Operators that ONNX has removed or changed, and onnxruntime still runs in models of opset 9 and older.

They are replaced by their definitions when a model is converted to a newer opset (`passes/opset`), in which
onnxruntime does not know them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ortgrad.autodiff.definitions import RETIRED, definition
from ortgrad.autodiff.node_view import NodeView
from ortgrad.graph.lazy import Recorder, ir

_END = np.iinfo(np.int64).max


@definition("Affine", domain=RETIRED)
def affine(op: Recorder, node: NodeView) -> ir.Value:
    """alpha X + beta"""
    return node.input(0) * node.attribute("alpha", 1.0) + node.attribute("beta", 0.0)


@definition("Scale", domain=RETIRED)
def scale(op: Recorder, node: NodeView) -> ir.Value:
    """scale X"""
    return node.input(0) * node.attribute("scale", 1.0)


@definition("ScaledTanh", "ParametricSoftplus", domain=RETIRED)
def scaled_activation(op: Recorder, node: NodeView) -> ir.Value:
    """alpha tanh(beta X), or alpha log(exp(beta X) + 1)"""
    activation = op.Tanh if node.op_type == "ScaledTanh" else op.Softplus
    activated: ir.Value = activation(node.input(0) * _required(node, "beta"))
    return activated * _required(node, "alpha")


@definition("ImageScaler", domain=RETIRED)
def image_scaler(op: Recorder, node: NodeView) -> ir.Value:
    """scale X + bias, with a bias per channel"""
    bias = np.array(_required(node, "bias"), np.float32).reshape(-1, 1, 1)
    scaled: ir.Value = op.Add(node.input(0) * node.attribute("scale", 1.0), bias)
    return scaled


@definition("Crop", domain=RETIRED)
def crop(op: Recorder, node: NodeView) -> ir.Value:
    """The images without their borders, or a part of a given size"""
    border, size = _required(node, "border"), node.attribute("scale")
    if len(border) != 4 or len(size or (0, 0)) != 2:
        raise node.unsupported("its border must have four elements, and its scale two")
    left, top, right, bottom = border
    ends = [-bottom or _END, -right or _END] if size is None else [top + size[0], left + size[1]]
    cropped: ir.Value = op.Slice(node.input(0), [top, left], ends, [2, 3])
    return cropped


@definition("DynamicSlice", domain=RETIRED)
def dynamic_slice(op: Recorder, node: NodeView) -> ir.Value:
    """Slice, with bounds that are inputs"""
    inputs = [node.input(i) for i in range(3)]
    axes = node.optional(3)
    sliced: ir.Value = op.Slice(*inputs, *([] if axes is None else [axes]))
    return sliced


@definition("MeanVarianceNormalization", domain=RETIRED)
def mean_variance_normalization(op: Recorder, node: NodeView) -> ir.Value:
    """(X - E[X]) / sqrt(Var[X]) of images, over channels as well or not"""
    axes = [0, 1, 2, 3] if node.attribute("across_channels", 0) else [0, 2, 3]
    x = node.input(0)
    if not node.attribute("normalize_variance", 1):
        return x - op.ReduceMean(x, axes)
    normalized: ir.Value = op.MeanVarianceNormalization(x, axes=axes)
    return normalized


@definition("MemcpyFromHost", "MemcpyToHost")
def memcpy(op: Recorder, node: NodeView) -> ir.Value:
    """X; onnxruntime adds them to models that it saves"""
    return node.input(0)


def _required(node: NodeView, name: str) -> Any:
    value = node.attribute(name)
    if value is None:
        raise node.unsupported(f"it has no attribute {name!r}")
    return value
