"""Gradients of losses."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from onnx import TensorProto

from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient
from ortgrad.compiled.functions import SUMS, double, doubles, exp
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.compiled import Plan
from ortgrad.operators.declaration import FLOATS, INTEGERS, Choice, Empty, operator
from ortgrad.operators.records import numbers_of
from ortgrad.ops._kernels import blockwise
from ortgrad.ops._sums import CHUNK, groups_of
from ortgrad.ops._types import is_double, is_half


def _dims(*, reduction: str, **_: Any) -> dict[str, str]:
    dy = "N *D" if reduction == "none" else "1^any"
    return {"log_prob": "N C *D", "label": "N *D", "dY": dy, "weight": "C"}


@operator(
    "SoftmaxCrossEntropyLossGrad",
    inputs=["dY", "log_prob", "label: Tind", "weight?"],
    outputs=["d_logits"],
    shapes="log_prob",
    dims=_dims,
    attributes={"reduction": Choice("mean", "sum", "none"), "ignore_index": int},
    types={"T": FLOATS, "Tind": INTEGERS},
)
def softmax_cross_entropy_loss_grad(
    dy: np.ndarray,
    log_prob: np.ndarray,
    label: np.ndarray,
    weight: np.ndarray | None,
    *,
    reduction: str,
    ignore_index: int | None,
    empty: Empty,
) -> np.ndarray:
    """d_logits = dY * w * (exp(log_prob) - onehot(label)), w the weight of the label over the sum of all

    The sum is there for "mean" only. log_prob has the shape [N, C, d1, ...], label [N, d1, ...].
    A sample of weight 0 (every ignored one) gets the gradient 0, even if all are.
    """
    classes = log_prob.shape[1]
    ignored = label == ignore_index if ignore_index is not None else np.zeros(label.shape, np.bool_)
    wrong = ~ignored & ((label < 0) | (label >= classes))
    if wrong.any():
        raise ValueError(f"label {label[wrong][0]} is out of range for {classes} classes")
    label = np.where(ignored, 0, label)

    samples = np.ones(label.shape, log_prob.dtype) if weight is None else weight[label]
    samples[ignored] = 0
    scale = dy / samples.sum(dtype=np.float64) if reduction == "mean" else dy
    factor = (samples * scale.reshape(label.shape if reduction == "none" else ())).astype(log_prob.dtype)

    def grad(
        p: np.ndarray, log_prob: np.ndarray, label: np.ndarray, samples: np.ndarray, factor: np.ndarray
    ) -> None:
        np.exp(log_prob, out=p)
        p[np.arange(len(p))[:, None], label, np.arange(p.shape[2])] -= 1
        p *= factor[:, None]
        if not samples.all():
            np.moveaxis(p, 1, 2)[samples == 0] = 0

    d_logits = empty(0, log_prob.shape)
    n, positions = label.shape[0], math.prod(label.shape[1:])
    per_class = [a.reshape(n, classes, positions) for a in (d_logits, log_prob)]
    per_sample = [a.reshape(n, positions) for a in (label, samples, factor)]
    blockwise(grad, *per_class, *per_sample)
    return d_logits


@softmax_cross_entropy_loss_grad.onnx
def softmax_cross_entropy_loss_grad_body(
    op: Recorder,
    dy: ir.Value,
    log_prob: ir.Value,
    label: ir.Value,
    weight: ir.Value | None,
    *,
    reduction: str,
    ignore_index: int | None,
) -> ir.Value:
    ignored = None if ignore_index is None else op.Equal(label, op.number(ignore_index, label))
    if ignored is not None:
        label = op.Where(ignored, op.number(0, label), label)
    samples = None
    if weight is not None:
        samples = op.Gather(weight, label)
        samples = samples if ignored is None else op.Where(ignored, 0.0, samples)
    elif ignored is not None:
        samples = op.CastLike(op.Not(ignored), log_prob)

    factor = op.Unsqueeze(dy, [1]) if reduction == "none" else op.Reshape(dy, np.zeros(0, np.int64))
    if reduction == "mean":
        # float16 ends at 65504.
        wide = np.zeros(0, np.float64 if is_double(log_prob) else np.float32)
        total = op.Size(label) if samples is None else op.ReduceSum(op.CastLike(samples, wide), keepdims=0)
        if samples is not None:
            # If all samples weigh 0, there is no gradient; dividing by 0 would make its gradient NaN.
            total = op.Where(op.Equal(total, 0.0), 1.0, total)
        factor = op.CastLike(op.CastLike(factor, wide) / op.CastLike(total, wide), log_prob)
    if samples is not None:
        factor = factor * op.Unsqueeze(samples, [1])

    # A negative index would count from the end; it is replaced by C, which onnxruntime refuses.
    classes = op.CastLike(op.Shape(log_prob, start=1, end=2), label)
    index = op.Unsqueeze(op.Where(op.Less(label, op.number(0, label)), classes, label), [1])
    p = op.Exp(log_prob)
    p = op.ScatterElements(p, index, op.GatherElements(p, index, axis=1) - 1.0, axis=1)
    result = p * factor
    if samples is None:
        return result
    return op.Where(op.Unsqueeze(op.Equal(samples, 0.0), [1]), 0.0, result)


# The number of labels whose weights a task adds up: few enough to be counted exactly in the element type.
_LABELS = 1 << 14


class Numbers(NamedTuple):
    """The numbers that all tasks read."""

    mean: bool
    per_sample: bool  # whether dY has an element for each label
    ignores: bool  # whether there is an index that is ignored
    ignored: int
    classes: int
    groups: int  # of positions


def _plan(
    dy: tuple[int, ...],
    log_prob: tuple[int, ...],
    label: tuple[int, ...],
    weight: tuple[int, ...] | None,
    d_logits: tuple[int, ...],
    *,
    reduction: str,
    ignore_index: int | None,
) -> Plan:
    """The tensors with the axes sample, class and position; a task is for one sample, or SUMS positions."""
    samples, classes, positions = log_prob[0], log_prob[1], math.prod(log_prob[2:])
    blocks = -(-samples * positions // _LABELS)
    numbers = Numbers(
        mean=reduction == "mean",
        per_sample=reduction == "none",
        ignores=ignore_index is not None,
        ignored=ignore_index or 0,
        classes=classes,
        groups=groups_of(positions),
    )
    # With one position per sample, the classes are the last axis, along which a kernel is fast.
    shape = (samples, 1, classes) if positions == 1 else (samples, classes, positions)
    views = [(math.prod(dy),), shape, (samples * positions,), weight or (0,), shape]
    # An exponential takes some time.
    work = 8 * math.prod(shape)
    return Plan(
        (blocks, samples * groups_of(positions)),
        views,
        {"numbers": numbers_of(numbers)},
        work,
        scratch=[(blocks,)],
    )


def loss_grad_labels(
    task: int, label: np.ndarray, weight: np.ndarray, sums: np.ndarray, numbers: Numbers
) -> bool:
    """Check some labels, and add up their weights."""
    ignores, ignored, classes = numbers.ignores, numbers.ignored, numbers.classes
    total = double(0.0)
    for first in range(task * _LABELS, min((task + 1) * _LABELS, len(label)), CHUNK):
        part = double(0.0)
        for k in range(first, min(first + CHUNK, len(label))):
            if not ignores or label[k] != ignored:
                if label[k] < 0 or label[k] >= classes:
                    return True
                part += double(weight[label[k]]) if len(weight) > 0 else double(1.0)
        total += part
    sums[task] = total
    return False


@softmax_cross_entropy_loss_grad.compiled(
    views={"dy": 1, "log_prob": 3, "label": 1, "weight": 1, "d_logits": 3},
    scratch={"sums": 1},
    plan=_plan,
    first=loss_grad_labels,
)
def loss_grad_samples(
    task: int,
    dy: np.ndarray,
    log_prob: np.ndarray,
    label: np.ndarray,
    weight: np.ndarray,
    d_logits: np.ndarray,
    sums: np.ndarray,
    numbers: Numbers,
) -> None:
    mean, per_sample, classes = numbers.mean, numbers.per_sample, numbers.classes
    ignores, ignored, groups = numbers.ignores, numbers.ignored, numbers.groups
    positions = len(label) // log_prob.shape[0]
    i, first = task // groups, task % groups * SUMS
    width = min(SUMS, positions - first)
    total = double(1.0)
    if mean:
        total = double(0.0)
        for k in range(len(sums)):
            total += double(sums[k])
    if positions == 1:
        kept = not ignores or label[i] != ignored
        sample = (weight[label[i]] if len(weight) > 0 else 1.0) if kept else 0.0
        factor = double(sample) * (double(dy[i if per_sample else 0]) / total)
        _write_row(log_prob[i, 0], label[i], sample, log_prob.dtype.type(factor), d_logits[i, 0])
        return
    labels = label[i * positions + first : i * positions + first + width]
    samples, factors = doubles(), doubles()
    for k in range(width):
        samples[k] = 0.0
        if not ignores or labels[k] != ignored:
            samples[k] = weight[labels[k]] if len(weight) > 0 else 1.0
        scale = double(dy[i * positions + first + k] if per_sample else dy[0])
        factors[k] = samples[k] * (scale / total)
    for c in range(classes):
        row, into = log_prob[i, c, first : first + width], d_logits[i, c, first : first + width]
        for k in range(width):
            into[k] = exp(row[k]) * log_prob.dtype.type(factors[k])
    for k in range(width):
        if samples[k] == 0.0:
            for c in range(classes):
                d_logits[i, c, first + k] = 0.0
        else:
            c = labels[k]
            d_logits[i, c, first + k] = (exp(log_prob[i, c, first + k]) - 1.0) * log_prob.dtype.type(
                factors[k]
            )


def _write_row(log_prob: np.ndarray, label: int, sample: float, factor: float, d_logits: np.ndarray) -> None:
    if sample == 0.0:
        for c in range(len(d_logits)):
            d_logits[c] = 0.0
        return
    for c in range(len(d_logits)):
        d_logits[c] = exp(log_prob[c]) * factor
    d_logits[label] = (exp(log_prob[label]) - 1.0) * factor


@gradient("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss_gradient(node: ForwardNode) -> Gradients:
    op, log_prob = node.op, node.add_output(1)
    d_loss, d_log_prob = node.optional_grad(0), node.optional_grad(1)
    parts, d_weight = [], None
    if d_loss is not None:
        operands = d_loss, log_prob, node.input(1), node.optional(2)
        parts.append(op.SoftmaxCrossEntropyLossGrad(*operands, **node.attributes))
        d_weight = _weight_grad(node, log_prob) if node.wants(2) else None
    if d_log_prob is not None:
        parts.append(op.LogSoftmaxGrad_13(d_log_prob, log_prob, axis=1))
    return op.Add(*parts) if len(parts) == 2 else parts[0], None, d_weight


@gradient("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss_gradient(node: ForwardNode) -> Gradients:
    op, log_prob = node.op, node.input(0)
    label, weights = _samples(node)
    share = _share(node, label, weights)
    if weights is None:
        share = op.Expand(share, op.Shape(label))
    else:
        # A sample of weight 0 has no gradient, even if all weights are 0.
        share = op.Where(op.Equal(weights, 0.0), 0.0, share * weights)
    # Every position has one label, so nothing is written twice.
    at, updates = op.Unsqueeze(label, [1]), op.Unsqueeze(-share, [1])
    dx = _checking(node, op.ScatterElements(op.full_like(log_prob, 0.0), at, updates, axis=1))
    return dx, None, _weight_grad(node, log_prob) if node.wants(2) else None


def _weight_grad(node: ForwardNode, log_prob: ir.Value) -> ir.Value:
    """The sum of dY * loss over each class's samples; for "mean", of dY * (loss - mean) / sum(weights)"""
    op, vector = node.op, [-1]
    label, weights = _samples(node)
    picked = _checking(node, op.GatherElements(log_prob, op.Unsqueeze(label, [1]), axis=1))
    picked = op.Squeeze(picked, [1])
    loss = -(picked + node.output(0) if node.attribute("reduction") == "mean" else picked)
    updates = loss * _share(node, label, weights)
    ignored = node.attribute("ignore_index")
    if ignored is not None:
        updates = op.Where(op.Equal(_int64(node, node.input(1)), ignored), 0.0, updates)
    if is_half(node.input(2)):
        # onnxruntime's ScatterElements does not add half-precision numbers.
        updates = op.Cast(updates, to=TensorProto.FLOAT)
    zeros = op.Expand(op.number(0.0, updates), op.shape_of(node.input(2)))
    return op.ScatterElements(
        zeros, op.Reshape(label, vector), op.Reshape(updates, vector), axis=0, reduction="add"
    )


def _samples(node: ForwardNode) -> tuple[ir.Value, ir.Value | None]:
    """Each sample's label (0 if it is ignored) and weight (None if all are 1).

    A negative label would count from the end. It is replaced by the number of classes, which onnxruntime
    refuses as an index.
    """
    op, weight, ignored = node.op, node.optional(2), node.attribute("ignore_index")
    label = _int64(node, node.input(1))
    out = None if ignored is None else op.Equal(label, ignored)
    label = op.Where(op.Less(label, 0), op.Shape(node.input(0), start=1, end=2), label)
    if out is None:
        return label, None if weight is None else _checking(node, op.Gather(weight, label))
    label = op.Where(out, 0, label)
    if weight is None:
        return label, op.CastLike(op.Not(out), node.input(0))
    return label, op.Where(out, 0.0, _checking(node, op.Gather(weight, label)))


def _checking(node: ForwardNode, value: ir.Value) -> ir.Value:
    """The value, whose node fails if a label is out of range; its name says so in the error."""
    with node.op.checking(f"{node.node.name} {node.op_type}"):
        return node.op.saying(value, "labels from 0 to the number of classes - 1, or ignore_index")


def _share(node: ForwardNode, label: ir.Value, weights: ir.Value | None) -> ir.Value:
    """dY, divided by the sum of the samples' weights if the loss is their mean."""
    op, dy = node.op, node.grad(0)
    if node.attribute("reduction") != "mean":
        return dy
    if weights is None:
        return dy / op.CastLike(op.Size(label), dy)
    total = op.ReduceSum(weights, keepdims=0)
    # If all samples weigh 0, there is no gradient; dividing by 0 would make its gradient NaN.
    return dy / op.Where(op.Equal(total, 0.0), 1.0, total)


def _int64(node: ForwardNode, label: ir.Value) -> ir.Value:
    known = label.dtype is not None and label.dtype.name == "INT64"
    return label if known else node.op.Cast(label, to=TensorProto.INT64)
