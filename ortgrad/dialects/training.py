"""Translations of onnxruntime-training's operators that ortgrad does not declare to standard ONNX.

Some are standard operators under another name (ReduceSumTraining), some are combinations of a few standard
operators (Scale, BroadcastGradientArgs), and some are gradients for which ortgrad has a rule but no operator
(DivGrad, ResizeGrad).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ortgrad.errors import NodeError
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.declaration import DOMAIN

if TYPE_CHECKING:
    from ortgrad.dialects.translate import ForeignNode

Translation: TypeAlias = "Callable[[Recorder, ForeignNode], ir.Value | Sequence[ir.Value | None]]"
_translations: dict[str, Translation] = {}
# The operator that adds gradients to those of earlier batches.
ACCUMULATOR = "InPlaceAccumulatorV2"
# onnxruntime-training has these in the default domain, where onnx does not define them.
IN_DEFAULT_DOMAIN = ("SparseSoftmaxCrossEntropy", "SparseSoftmaxCrossEntropyGrad")


def is_training_operator(op_type: str, domain: str) -> bool:
    """Return whether `translate_training_operators` translates the operator."""
    if domain in ("", "ai.onnx"):
        return op_type in IN_DEFAULT_DOMAIN
    return domain == DOMAIN and op_type in _translations


def training_operators() -> list[str]:
    """Return the names of all operators that `translate_training_operators` translates."""
    return sorted(_translations)


def find_translation(op_type: str, domain: str) -> Translation | None:
    """Return the translation of an operator, or None."""
    return _translations.get(op_type) if is_training_operator(op_type, domain) else None


def _translation(name: str) -> Callable[[Translation], Translation]:
    def declare(function: Translation) -> Translation:
        _translations[name] = function
        return function

    return declare


@_translation("ReduceSumTraining")
def _reduce_sum_training(op: Recorder, node: ForeignNode) -> ir.Value:
    return op.ReduceSum(node.input(0), node.input(1), **node.attributes)


@_translation("SplitTraining")
def _split_training(op: Recorder, node: ForeignNode) -> ir.Value | Sequence[ir.Value]:
    return op.Split(node.input(0), node.input(1), **node.attributes, _outputs=len(node.node.outputs))


@_translation("ConcatTraining")
def _concat_training(op: Recorder, node: ForeignNode) -> Sequence[ir.Value]:
    values, axis = [node.input(i) for i in range(len(node.node.inputs))], node.attribute("axis")
    # With axis -1 the end would be 0, the start of the shape; None stands for its end.
    lengths = [op.Shape(value, start=axis, end=axis + 1 or None) for value in values]
    return op.Concat(*values, axis=axis), op.Concat(*lengths, axis=0)


@_translation("Scale")
def _scale(op: Recorder, node: ForeignNode) -> ir.Value:
    x = node.input(0)
    # The scale may be a vector of one element, which must not change the rank of a scalar X.
    scale = op.CastLike(op.Reshape(node.input(1), np.zeros(0, np.int64)), x)
    return x / scale if node.attribute("scale_down", 0) else x * scale


@_translation("ScaledSum")
def _scaled_sum(op: Recorder, node: ForeignNode) -> ir.Value:
    count = sum(node.optional(i) is not None for i in range(3))
    return op.Sum(*(node.input(i) * node.attribute(f"scale_{i}") for i in range(count)))


@_translation("BatchScale")
def _batch_scale(op: Recorder, node: ForeignNode) -> Sequence[ir.Value]:
    count = len(node.node.outputs)
    return [node.input(0) * node.attribute(f"scale_{i}") for i in range(count)]


@_translation("BroadcastGradientArgs")
def _broadcast_gradient_args(op: Recorder, node: ForeignNode) -> Sequence[ir.Value]:
    """The axes, from the last to the first, over which the gradients of two broadcast tensors are summed."""
    shapes = [node.input(0), node.input(1)]
    ranks = [op.Shape(shape) for shape in shapes]
    rank = op.Max(*ranks)
    # A missing leading axis is always broadcast.
    missing = np.array([-1], np.int64)
    a, b = (
        op.Concat(op.Expand(missing, rank - own), shape, axis=0)
        for shape, own in zip(shapes, ranks, strict=True)
    )

    def stretched(own: ir.Value, other: ir.Value) -> ir.Value:
        same = op.Or(op.Equal(other, [1]), op.Equal(other, missing))
        one = op.And(op.Equal(own, [1]), op.Not(same))
        axes = op.Squeeze(op.NonZero(op.Or(op.Equal(own, missing), one)), [0])
        return op.Slice(axes, [-1], [np.iinfo(np.int64).min], [0], [-1])

    return stretched(a, b), stretched(b, a)


@_translation("ZeroGradient")
def _zero_gradient(op: Recorder, node: ForeignNode) -> ir.Value:
    return op.full_like(node.input(0), 0.0)


@_translation("InPlaceAccumulator")
def _in_place_accumulator(op: Recorder, node: ForeignNode) -> ir.Value:
    old, update = node.input(0), node.optional(2)
    total = old + op.CastLike(node.input(1), old)
    return total if update is None else op.Where(update, total, old)


@_translation("PassThrough")
def _pass_through(op: Recorder, node: ForeignNode) -> Sequence[ir.Value]:
    return [op.copy(node.input(i)) for i in range(len(node.node.outputs))]


@_translation("BiasFastGeluGrad_dX")
def _bias_fast_gelu_grad_d_x(op: Recorder, node: ForeignNode) -> ir.Value:
    return op.FastGeluGrad(node.input(0), node.input(1) + node.input(2))


@_translation("DivGrad")
def _div_grad(op: Recorder, node: ForeignNode) -> Sequence[ir.Value | None]:
    return node.gradients(op, "Div", [1, 2])


@_translation("ResizeGrad")
def _resize_grad(op: Recorder, node: ForeignNode) -> Sequence[ir.Value | None]:
    return node.gradients(op, "Resize", [1, 2, 3])[:1]


@_translation("ConvTransposeGrad")
def _conv_transpose_grad(op: Recorder, node: ForeignNode) -> Sequence[ir.Value | None]:
    dx, dw = node.gradients(op, "ConvTranspose", [1, 2])
    dy = node.input(0)
    others = [axis for axis in range(op.rank(dy)) if axis != 1] if node.has_output(2) else []
    return dx, dw, op.ReduceSum(dy, others, keepdims=0) if others else None


@_translation("SoftmaxCrossEntropyLossInternal")
def _softmax_cross_entropy_loss_internal(op: Recorder, node: ForeignNode) -> Sequence[ir.Value]:
    loss, log_prob = op.SoftmaxCrossEntropyLoss(
        *(node.input(0), node.input(1), node.optional(2)),
        reduction=node.attribute("reduction", "mean"),
        ignore_index=_ignored(node, 3),
        _outputs=2,
    )
    return _in_output_type(op, node, loss), _in_output_type(op, node, log_prob)


@_translation("SoftmaxCrossEntropyLossInternalGrad")
def _softmax_cross_entropy_loss_internal_grad(op: Recorder, node: ForeignNode) -> ir.Value:
    d_logits = op.SoftmaxCrossEntropyLossGrad(
        *(node.input(0), node.input(1), node.input(2), node.optional(3)),
        reduction=node.attribute("reduction", "mean"),
        ignore_index=_ignored(node, 4),
    )
    d_logits, bias = _in_output_type(op, node, d_logits), node.optional(5)
    return d_logits if bias is None else d_logits + bias


def _ignored(node: ForeignNode, i: int) -> int | None:
    value = node.optional(i)
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or value.is_graph_input():
        raise NodeError("ignore_index is computed in the graph; only a constant one is supported")
    return int(tensor.numpy().reshape(-1)[0])


def _in_output_type(op: Recorder, node: ForeignNode, value: ir.Value) -> ir.Value:
    wanted = node.node.attributes.get("output_type")
    return value if wanted is None else op.Cast(value, to=wanted.as_int())


@_translation("SoftmaxCrossEntropy")
def _softmax_cross_entropy(op: Recorder, node: ForeignNode) -> Sequence[ir.Value]:
    """The loss for labels that are distributions over the classes along the last axis."""
    log_prob = op.LogSoftmax(node.input(0), axis=-1)
    total = -op.ReduceSum(node.input(1) * log_prob, keepdims=0)
    return total / _rows(op, node, log_prob), log_prob


@_translation("SoftmaxCrossEntropyGrad")
def _softmax_cross_entropy_grad(op: Recorder, node: ForeignNode) -> ir.Value:
    log_prob = node.input(1)
    factor = op.Reshape(node.input(0), np.zeros(0, np.int64)) / _rows(op, node, log_prob)
    return (op.Exp(log_prob) - node.input(2)) * factor


@_translation("SparseSoftmaxCrossEntropy")
def _sparse_softmax_cross_entropy(op: Recorder, node: ForeignNode) -> Sequence[ir.Value]:
    """The loss for labels that are indices of classes along the last axis, with a weight per sample."""
    log_prob, label, weight = op.LogSoftmax(node.input(0), axis=-1), node.input(1), node.optional(2)
    chosen = op.GatherElements(log_prob, op.Unsqueeze(label, [-1]), axis=-1)
    losses = -op.Squeeze(chosen, [-1])
    total = op.ReduceSum(losses if weight is None else losses * weight, keepdims=0)
    return total / _rows(op, node, log_prob, weight), log_prob


@_translation("SparseSoftmaxCrossEntropyGrad")
def _sparse_softmax_cross_entropy_grad(op: Recorder, node: ForeignNode) -> ir.Value:
    log_prob, label, weight = node.input(1), node.input(2), node.optional(3)
    factor = op.Reshape(node.input(0), np.zeros(0, np.int64)) / _rows(op, node, log_prob, weight)
    if weight is not None:
        factor = op.Unsqueeze(weight, [-1]) * factor
    p, index = op.Exp(log_prob), op.Unsqueeze(label, [-1])
    one_less = op.GatherElements(p, index, axis=-1) - 1.0
    return op.ScatterElements(p, index, one_less, axis=-1) * factor


def _rows(op: Recorder, node: ForeignNode, log_prob: ir.Value, weight: ir.Value | None = None) -> ir.Value:
    """The divisor of the sum of the losses."""
    reduction = node.attribute("reduction", "mean")
    if reduction not in ("mean", "sum"):
        raise NodeError(f"reduction is {reduction!r}; it must be mean or sum")
    if reduction == "sum":
        return op.number(1.0, log_prob)
    if weight is not None:
        return op.ReduceSum(weight, keepdims=0)
    rows = op.ReduceProd(op.Shape(log_prob, end=-1), keepdims=0)
    return op.CastLike(rows, log_prob)
