"""Gradient rules of attention and rotary embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient
from ortgrad.autodiff.unbroadcast import unbroadcast
from ortgrad.graph.lazy import ir
from ortgrad.ops._heads import HEADS_FIRST, merge_heads, pairs, regrouped, split_heads
from ortgrad.ops._types import is_half
from ortgrad.ops.linalg import zero_if_empty
from ortgrad.ops.softmax import without_nan

_SWAPPED = [0, 1, 3, 2]
_END = np.iinfo(np.int64).max
# The values of qk_matmul_output_mode: the last output is Q K' after scaling, softcap, mask or softmax.
_SCALED, _CAPPED, _BIASED, _PROBABILITIES = range(4)


@gradient("Attention")
def attention_gradient(node: ForwardNode) -> Gradients:
    return _Attention(node).gradients()


class _Attention:
    """Y = P V with P = softmax(cap(scale Q K') + mask), and its gradients.

    P is an output of the forward node, so masks need no special treatment here: masked elements have P = 0,
    and the gradient of a softmax is 0 there. Query heads that share a key are rows of one matrix, so that the
    products below add up their gradients.
    """

    def __init__(self, node: ForwardNode) -> None:
        self.node, self.op = node, node.op
        self.flat = node.rank() == 3
        self.past = node.optional(4) is not None
        self.mode = node.attribute("qk_matmul_output_mode")
        self.heads, self.kv_heads = (
            node.attribute(name) if self.flat else _dim(node.input(i), 1)
            for i, name in enumerate(("q_num_heads", "kv_num_heads"))
        )
        forward = self._forward()
        self.q = self._split(node.input(0), self.heads)
        self.k = forward[1] if self.past else self._split(node.input(1), self.kv_heads)
        self.v = forward[2] if self.past else self._split(node.input(2), self.kv_heads)
        self.p = self._group_scores(without_nan(node, forward[3], 0.0))

    def gradients(self) -> Gradients:
        node, op = self.node, self.op
        d_qk = None if node.optional_grad(3) is None else self._group_scores(node.grad(3))
        dv = ds = d_mask = None
        if node.optional_grad(0) is not None:
            dy = self._group(self._split(node.grad(0), self.heads))
            dv = self._over_queries(op.MatMul(op.Transpose(self.p, perm=_SWAPPED), dy))
            ds = op.MatMul(dy, op.Transpose(self.v, perm=_SWAPPED))
            ds = zero_if_empty(op, ds, node.input(2), -1)
        ds = self._with(ds, d_qk, _PROBABILITIES)
        if ds is not None:
            ds = op.SoftmaxGrad_13(ds, self.p, axis=-1)
        if d_qk is not None and self.mode == _BIASED:
            # Masked scores are -inf or the lowest number, and do not depend on Q and K.
            lowest = -3e4 if is_half(d_qk) else -1e30
            d_qk = op.Where(op.Less(self._group_scores(node.output(3)), lowest), 0.0, d_qk)
        ds = self._with(ds, d_qk, _BIASED)
        mask = node.optional(3)
        if ds is not None and mask is not None and node.wants(3):
            d_mask = self._mask_grad(ds, mask)
        ds = self._with(ds, d_qk, _CAPPED)
        cap = node.attribute("softcap")
        if ds is not None and cap:
            scores = op.MatMul(self._group(self.q), op.Transpose(self.k, perm=_SWAPPED))
            t = op.Tanh(scores * (self._scale() / cap))
            ds = ds * (1.0 - t * t)
        ds = self._with(ds, d_qk, _SCALED)
        dq = dk = None
        if ds is not None:
            dq = zero_if_empty(op, op.MatMul(ds, self.k), self.k, -2)
            dq = dq * self._scale()
            dk = self._over_queries(op.MatMul(op.Transpose(ds, perm=_SWAPPED), self._group(self.q)))
            dk = dk * self._scale()
            dq = self._merge(self._ungroup(dq))
        dk, d_past_key = self._parts(self._plus(dk, node.optional_grad(1)), 4)
        dv, d_past_value = self._parts(self._plus(dv, node.optional_grad(2)), 5)
        return dq, dk, dv, d_mask, d_past_key, d_past_value

    def _over_queries(self, product: ir.Value) -> ir.Value:
        return zero_if_empty(self.op, product, self.node.input(0), 1 if self.flat else 2)

    def _forward(self) -> Sequence[ir.Value]:
        """The outputs of the forward node, or of a copy of it, with P as the last output."""
        node, forward = self.node, self.node.forward
        taken = len(forward.outputs) > 3 and bool(forward.outputs[3].name)
        if taken and self.mode != _PROBABILITIES:
            attributes = {**node.attributes, "qk_matmul_output_mode": _PROBABILITIES}
            outputs: Sequence[ir.Value] = self.op.Attention(*node.inputs, _outputs=4, **attributes)
        else:
            forward.attributes.add(ir.AttrInt64("qk_matmul_output_mode", _PROBABILITIES))
            node.add_output(3)
            outputs = [node.add_output(i) if self.past else value for i, value in enumerate(forward.outputs)]
        for value in outputs:
            value.type = node.input(0).type
        return outputs

    def _scale(self) -> ir.Value:
        op, q, scale = self.op, self.node.input(0), self.node.attribute("scale")
        width = _dim(q, -1)
        if scale is None and width is not None:
            scale = 1 / math.sqrt(width / (self.heads if self.flat and self.heads else 1))
        if scale is not None:
            return op.number(scale, q)
        return op.Reciprocal(op.Sqrt(op.CastLike(op.Shape(self.q, start=3), q)))

    def _with(self, grad: ir.Value | None, d_qk: ir.Value | None, mode: int) -> ir.Value | None:
        """The gradient at a stage, including that of the last output if it is the value at this stage."""
        return self._plus(grad, d_qk) if self.mode == mode else grad

    def _plus(self, grad: ir.Value | None, other: ir.Value | None) -> ir.Value | None:
        if grad is None or other is None:
            return other if grad is None else grad
        return grad + other

    def _split(self, value: ir.Value, heads: int | None) -> ir.Value:
        return split_heads(self.op, value, heads) if self.flat else value

    def _merge(self, value: ir.Value) -> ir.Value:
        return merge_heads(self.op, value) if self.flat else value

    def _group(self, value: ir.Value) -> ir.Value:
        """The value with query heads that share a key stacked as rows."""
        if self.heads is not None and self.heads == self.kv_heads:
            return value
        return self._with_heads(value, self.kv_heads, self.node.input(1))

    def _group_scores(self, scores: ir.Value) -> ir.Value:
        op, length = self.op, 1 if self.flat else 2
        known = all(_dim(v, length) is not None for v in self.node.inputs[1:3] if v is not None)
        if known and not self.past:
            return self._group(scores)
        # onnx infers 0 for a symbolic number of keys here, so the shape is taken from the keys.
        rows = op.constant(np.array([-1]))
        shape = op.Concat(op.Shape(self.k, end=2), rows, op.Shape(self.k, start=2, end=3), axis=0)
        return op.Reshape(scores, shape)

    def _ungroup(self, value: ir.Value) -> ir.Value:
        if self.heads is not None and self.heads == self.kv_heads:
            return value
        return self._with_heads(value, self.heads, self.node.input(0))

    def _with_heads(self, value: ir.Value, heads: int | None, like: ir.Value) -> ir.Value:
        op = self.op
        if heads is not None:
            return regrouped(op, value, heads)
        count = op.Shape(like, start=1, end=2)
        return op.Reshape(
            value, op.Concat(op.constant(np.array([0])), count, op.constant(np.array([-1, 0])), axis=0)
        )

    def _mask_grad(self, ds: ir.Value, mask: ir.Value) -> ir.Value:
        op = self.op
        ds = self._ungroup(ds)
        # A mask may be shorter than the keys.
        ds = op.Slice(ds, [0], op.Shape(mask, start=-1), [3])
        return unbroadcast(op, ds, mask, ds)

    def _parts(self, grad: ir.Value | None, past: int) -> tuple[ir.Value | None, ir.Value | None]:
        """The gradients of new and of past keys or values, from that of their concatenation."""
        if grad is None or not self.past:
            return None if grad is None else self._merge(grad), None
        op, length = self.op, self.op.Shape(self.node.input(past), start=2, end=3)
        new = op.Slice(grad, length, [_END], [2])
        return self._merge(new), op.Slice(grad, [0], length, [2])


def _dim(value: ir.Value, axis: int) -> int | None:
    dim = None if value.shape is None else value.shape[axis]
    return dim if isinstance(dim, int) else None


@gradient("RotaryEmbedding")
def rotary_embedding_gradient(node: ForwardNode) -> ir.Value | Gradients:
    # The inverse of a rotation is the rotation by the opposite angle.
    op, dy, positions = node.op, node.grad(0), node.optional(3)
    dx = op.RotaryEmbedding(dy, node.input(1), -node.input(2), positions, **node.attributes)
    if not (node.wants(1) or node.wants(2)):
        return dx
    (x1, x2), (d1, d2) = _rotated_pairs(node, node.input(0)), _rotated_pairs(node, dy)
    d_cos = op.ReduceSum(d1 * x1 + d2 * x2, [2], keepdims=0)
    d_sin = op.ReduceSum(d2 * x1 - d1 * x2, [2], keepdims=0)
    if positions is None:
        return dx, d_cos, d_sin
    shape = op.shape_of(node.input(1))
    return dx, *(op.GatherGrad(shape, positions, d, axis=0) for d in (d_cos, d_sin))


def _rotated_pairs(node: ForwardNode, value: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The two components that are rotated together, each as [batch, length, head, pair]."""
    op, width = node.op, node.attribute("rotary_embedding_dim")
    if node.rank() == 3:
        value = op.Reshape(value, [0, 0, node.attribute("num_heads"), -1])
    else:
        value = op.Transpose(value, perm=HEADS_FIRST)
    if width:
        value = op.Slice(value, [0], [width], [3])
    return pairs(op, value, bool(node.attribute("interleaved")))
