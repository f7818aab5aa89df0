"""Operators that onnxruntime has in float only, written with operators that it also has in double.

They are slower and need more memory, but they run a model and its gradients in double on onnxruntime.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortgrad.autodiff.defined_nodes import replace_by
from ortgrad.autodiff.node_view import NodeView
from ortgrad.errors import NodeError
from ortgrad.graph.names import Names
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.serialization import read, write
from ortgrad.passes.opset import at_minimum_opset
from ortgrad.shapes.inference import infer_types

LARGEST_KERNEL = 16  # elements; up to this size there is a product for each, which is faster than columns
SERIES, FRACTION = 40, 60  # terms of the error function, below and above 2
END = np.iinfo(np.int64).max

Form = Callable[[Recorder, NodeView], ir.Value]


def with_double_forms(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its nodes in double replaced by double forms, where there are any."""
    if not any(node.op_type in FORMS for node in model.graph.node):
        return model
    changed = at_minimum_opset(read(model))
    infer_types(changed)
    names, opset = Names.of(changed), changed.opset_imports[""]
    for node in list(changed.graph.all_nodes()):
        form = FORMS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        first = node.inputs[0] if node.inputs else None
        if form is None or first is None or first.dtype != ir.DataType.DOUBLE:
            continue
        # A node that its form does not cover stays as it is, and onnxruntime refuses the model.
        with suppress(NodeError):
            replace_by(node, form, opset, names)
    return write(changed, model)


def _conv(op: Recorder, node: NodeView) -> ir.Value:
    """The sum over the elements k of the kernel of W[..., k] @ the part of X that it meets."""
    x, w, b = node.input(0), node.input(1), node.optional(2)
    dims = [] if w.shape is None else [dim for dim in w.shape if isinstance(dim, int)]
    if w.shape is None or len(dims) < len(w.shape):
        raise node.unsupported("the shape of its kernel is not known")
    outputs, channels, size = dims[0], dims[1], dims[2:]
    groups = node.attribute("group", 1)
    if math.prod(size) > LARGEST_KERNEL:
        columns, places = _columns(op, node, x, size)
        # X as (batch, groups, channels * elements, places).
        columns = op.Reshape(columns, _ints(op, [0, groups, channels * math.prod(size), -1]))
        product = op.MatMul(op.Reshape(w, _ints(op, [groups, outputs // groups, -1])), columns)
    else:
        parts = _parts(op, node, x, size)
        places = op.Shape(parts[0], start=2)
        # Kernels as (elements, groups, outputs, channels), X as (batch, groups, channels, places).
        kernels = op.Reshape(
            op.Transpose(w, perm=[*range(2, len(dims)), 0, 1]),
            _ints(op, [-1, groups, outputs // groups, channels]),
        )
        product = op.sum(
            [
                op.MatMul(
                    op.Gather(kernels, np.int64(i), axis=0),
                    op.Reshape(part, _ints(op, [0, groups, channels, -1])),
                )
                for i, part in enumerate(parts)
            ]
        )
    y = op.Reshape(product, op.Concat(_ints(op, [0, outputs]), places, axis=0))
    return y if b is None else y + op.Reshape(b, _ints(op, [-1, *[1] * len(size)]))


def _average_pool(op: Recorder, node: NodeView) -> ir.Value:
    size = node.attribute("kernel_shape")
    if node.attribute("ceil_mode"):
        raise node.unsupported("its size is rounded up")
    total = op.sum(_parts(op, node, node.input(0), size))
    if node.attribute("count_include_pad"):
        return total / float(math.prod(size))
    return total / op.sum(_parts(op, node, op.full_like(node.input(0), 1.0), size))


def _parts(op: Recorder, node: NodeView, x: ir.Value, size: Sequence[int]) -> list[ir.Value]:
    """Return for every element of the kernel the part of X that it meets."""
    if math.prod(size) > LARGEST_KERNEL:
        raise node.unsupported("its kernel is large")
    x, strides, gaps = _padded(op, node, x, len(size))
    axes = list(range(2, 2 + len(size)))
    found = []
    for element in itertools.product(*(range(k) for k in size)):
        starts = [i * gap for i, gap in zip(element, gaps, strict=True)]
        left = [(k - 1 - i) * gap for i, k, gap in zip(element, size, gaps, strict=True)]
        ends = [-n if n else END for n in left]
        found.append(op.Slice(x, *(_ints(op, each) for each in (starts, ends, axes, strides))))
    return found


def _columns(op: Recorder, node: NodeView, x: ir.Value, size: Sequence[int]) -> tuple[ir.Value, ir.Value]:
    """Return X as (batch, channels, elements of the kernel, places), and the shape of the places."""
    x, strides, gaps = _padded(op, node, x, len(size))
    lengths = []
    for i, (k, step, gap) in enumerate(zip(size, strides, gaps, strict=True)):
        axis = 2 + 2 * i  # each axis before this one has become two
        length = op.Gather(op.Shape(x), np.int64(axis), axis=0)
        starts = op.Range(np.int64(0), length - np.int64((k - 1) * gap), np.int64(step))
        lengths.append(op.Shape(starts))
        offsets = op.constant(gap * np.arange(k, dtype=np.int64).reshape(-1, 1))
        x = op.Gather(x, offsets + starts, axis=axis)
    order = [0, 1, *range(2, 2 + 2 * len(size), 2), *range(3, 3 + 2 * len(size), 2)]
    return op.Transpose(x, perm=order), op.Concat(*lengths, axis=0)


def _padded(
    op: Recorder, node: NodeView, x: ir.Value, axes: int
) -> tuple[ir.Value, Sequence[int], Sequence[int]]:
    """Return X with its pads, the strides and the dilations."""
    if node.attribute("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise node.unsupported("its pads depend on the shape of X")
    pads = node.attribute("pads") or [0] * (2 * axes)
    if any(pads):
        x = op.Pad(x, _ints(op, [0, 0, *pads[:axes], 0, 0, *pads[axes:]]), 0.0)
    return x, node.attribute("strides") or [1] * axes, node.attribute("dilations") or [1] * axes


def _global_pool(reduce: str) -> Form:
    def form(op: Recorder, node: NodeView) -> ir.Value:
        axes = _ints(op, list(range(2, node.rank())))
        pooled: ir.Value = getattr(op, reduce)(node.input(0), axes, keepdims=1)
        return pooled

    return form


def _instance_normalization(op: Recorder, node: NodeView) -> ir.Value:
    x, rank = node.input(0), node.rank()
    axes, wide = _ints(op, list(range(2, rank))), _ints(op, [-1, *[1] * (rank - 2)])
    centered = x - op.ReduceMean(x, axes, keepdims=1)
    variance = op.ReduceMean(centered * centered, axes, keepdims=1)
    scale, bias = (op.Reshape(node.input(i), wide) for i in (1, 2))
    return centered / op.Sqrt(variance + node.attribute("epsilon")) * scale + bias


def _resize(op: Recorder, node: NodeView) -> ir.Value:
    """Elements are copied: X is split into three numbers in float, which add up to it exactly."""
    if node.attribute("mode") != "nearest":
        raise node.unsupported("it interpolates")
    rest, total = node.input(0), None
    for _ in range(3):
        part = op.Cast(rest, to=int(ir.DataType.FLOAT))
        rest = rest - op.Cast(part, to=int(ir.DataType.DOUBLE))
        others = [node.optional(i) for i in range(1, len(node.inputs))]
        resized = op.Cast(op.Resize(part, *others, **node.attributes), to=int(ir.DataType.DOUBLE))
        total = resized if total is None else total + resized
    assert total is not None
    return total


def _erf(op: Recorder, x: ir.Value) -> ir.Value:
    """A series of positive terms up to 2, a continued fraction above."""
    size = op.Abs(x)
    low, high = op.Min(size, 2.0), op.Max(size, 2.0)
    double = 2.0 * (low * low)
    series = op.full_like(x, 1.0)
    for n in range(SERIES, 0, -1):
        series = double * series / (2.0 * n + 1) + 1.0
    inside = low * op.Exp(-(low * low)) * series * (2 / math.sqrt(math.pi))
    fraction = high
    for n in range(FRACTION, 0, -1):
        fraction = (n / 2) / fraction + high
    outside = 1.0 - op.Exp(-(high * high)) / fraction / math.sqrt(math.pi)
    return op.Sign(x) * op.Where(op.Less(size, 2.0), inside, outside)


def _gelu(op: Recorder, node: NodeView) -> ir.Value:
    x = node.input(0)
    if node.attribute("approximate") == "tanh":
        return 0.5 * x * (1.0 + op.Tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))))
    return 0.5 * x * (1.0 + _erf(op, x / math.sqrt(2)))


def _hinge(below: Callable[[Recorder, ir.Value, NodeView], ir.Value], scale: str = "") -> Form:
    """Return the form of an activation that is the identity above 0, and `below(x)` below."""

    def form(op: Recorder, node: NodeView) -> ir.Value:
        x = node.input(0)
        y = op.Where(op.Less(x, 0.0), below(op, op.Min(x, 0.0), node), x)
        return y * node.attribute(scale) if scale else y

    return form


def _elementwise(function: Callable[[Recorder, ir.Value, dict[str, Any]], ir.Value]) -> Form:
    return lambda op, node: function(op, node.input(0), dict(node.attributes))


def _ints(op: Recorder, values: Sequence[int]) -> ir.Value:
    return op.constant(np.array(values, np.int64))


FORMS: dict[str, Form] = {
    "Conv": _conv,
    "AveragePool": _average_pool,
    "GlobalAveragePool": _global_pool("ReduceMean"),
    "GlobalMaxPool": _global_pool("ReduceMax"),
    "InstanceNormalization": _instance_normalization,
    "Resize": _resize,
    "Gelu": _gelu,
    "Erf": _elementwise(lambda op, x, a: _erf(op, x)),
    "HardSigmoid": _elementwise(lambda op, x, a: op.Clip(x * a["alpha"] + a["beta"], 0.0, 1.0)),
    "Softplus": _elementwise(lambda op, x, a: op.Max(x, 0.0) + op.Log(1.0 + op.Exp(-op.Abs(x)))),
    "Softsign": _elementwise(lambda op, x, a: x / (1.0 + op.Abs(x))),
    "ThresholdedRelu": _elementwise(
        lambda op, x, a: op.Where(op.Greater(x, a["alpha"]), x, op.full_like(x, 0.0))
    ),
    "LeakyRelu": _hinge(lambda op, x, node: x * node.attribute("alpha")),
    "PRelu": _hinge(lambda op, x, node: x * node.input(1)),
    "Elu": _hinge(lambda op, x, node: (op.Exp(x) - 1.0) * node.attribute("alpha")),
    "Selu": _hinge(lambda op, x, node: (op.Exp(x) - 1.0) * node.attribute("alpha"), "gamma"),
}
