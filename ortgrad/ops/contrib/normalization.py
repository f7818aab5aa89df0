"""Normalizations fused with additions, embeddings and gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ortgrad.autodiff.definitions import definition
from ortgrad.autodiff.node_view import NodeView
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.declaration import DOMAIN
from ortgrad.ops._normalization import axes_from, inverse_root
from ortgrad.ops._types import narrowed, widened


@definition("SkipLayerNormalization", domain=DOMAIN)
def skip_layer_normalization(op: Recorder, node: NodeView) -> Sequence[ir.Value | None]:
    """LayerNormalization(input + skip + bias); the sum is the last output"""
    total, gamma, beta = _sum(node, 0, 1, 4), node.input(2), node.optional(3)
    if beta is None:
        # onnxruntime's optimizer ends the process when it fuses an addition and a normalization without beta.
        beta = op.full_like(gamma, 0.0)
    y, mean, inv = _layer(op, total, gamma, beta, node.attribute("epsilon", 1e-12))
    return y, mean, inv, total


@definition("SkipSimplifiedLayerNormalization", domain=DOMAIN)
def skip_simplified_layer_normalization(op: Recorder, node: NodeView) -> Sequence[ir.Value | None]:
    """RMSNormalization(input + skip + bias); the sum is the last output"""
    total = _sum(node, 0, 1, 3)
    (y,) = op.add(
        "SimplifiedLayerNormalization",
        [total, node.input(2)],
        {"axis": -1, "epsilon": node.attribute("epsilon", 1e-12)},
    )
    y.type = total.type
    return y, None, None, total


@definition("SimplifiedLayerNormalization")
def simplified_layer_normalization(op: Recorder, node: NodeView) -> Sequence[ir.Value]:
    """scale X / sqrt(mean(X^2) + epsilon), the mean over all axes from `axis` on"""
    axis, wide = node.attribute("axis", -1), widened(op, node.input(0))
    axes = axes_from(op, node.input(0), axis)
    inv = inverse_root(op, op.ReduceMean(wide * wide, axes) + node.attribute("epsilon", 1e-5))
    return narrowed(op, wide * inv, node.input(0)) * node.input(1), inv


@definition("EmbedLayerNormalization", domain=DOMAIN)
def embed_layer_normalization(op: Recorder, node: NodeView) -> Sequence[ir.Value | None]:
    """LayerNormalization of the sum of the embeddings of words, positions and segments"""

    def table(i: int, ids: ir.Value | None = None) -> ir.Value:
        return node.input(i) if ids is None else op.Gather(node.input(i), ids)

    return normalized_embedding(op, node, table, node.optional(8))


def normalized_embedding(
    op: Recorder, node: NodeView, table: Callable[..., ir.Value], positions: ir.Value | None = None
) -> Sequence[ir.Value]:
    """The normalized sum of embeddings, the number of words of each sequence, and the sum.

    `table(i)` is the i-th input, `table(i, ids)` some rows of it.
    """
    ids, segments, mask = node.input(0), node.optional(1), node.optional(7)
    if positions is None:
        positions = op.Range(0, op.Squeeze(op.Shape(ids, start=1, end=2), [0]), 1)
    total = table(2, ids) + table(3, positions)
    if segments is not None:
        total = total + table(4, segments)
    y, _, _ = _layer(op, total, table(5), table(6), node.attribute("epsilon", 1e-12))
    counted = op.Mul(ids, op.CastLike(0, ids)) if mask is None else mask
    return y, op.ReduceSum(counted, [1], keepdims=0), total


@definition("GatedRMSNorm", domain=DOMAIN)
def gated_rms_norm(op: Recorder, node: NodeView) -> ir.Value:
    """RMSNorm(X) scale activation(gate), over groups of the length of scale"""
    x, scale, gate = (widened(op, node.input(i)) for i in range(3))
    name = node.attribute("activation", "silu")
    grouped = op.Reshape(x, op.Concat(op.Shape(x, end=-1), [-1], op.Shape(scale), axis=0))
    y = op.Reshape(_rms(op, grouped, node.attribute("epsilon", 1e-5)) * scale, op.Shape(x))
    opened = op.Sigmoid(gate)
    return narrowed(op, y * (opened if name == "sigmoid" else gate * opened), node.input(0))


@definition("BranchwiseRMSNorm", domain=DOMAIN)
def branchwise_rms_norm(op: Recorder, node: NodeView) -> ir.Value:
    """RMSNorm along the last axis, per branch"""
    x, scale, branches = widened(op, node.input(0)), node.optional(1), node.attribute("num_branches", 0)
    y = _branches(op, x, branches)
    shape = op.Shape(y, start=-2)
    y = _rms(op, y, node.attribute("epsilon", 1e-5))
    if scale is not None:
        wide = widened(op, scale)
        y = y * (
            op.Reshape(wide, shape) if node.rank(1) == 1 and not _is_row(scale, node, branches) else wide
        )
    return narrowed(op, op.Reshape(y, op.Shape(x)), node.input(0))


def _is_row(scale: ir.Value, node: NodeView, branches: int) -> bool:
    """Whether a vector scales all branches alike: it has the length of one branch, not of all together."""
    shape = node.input(0).shape
    count, width = (None, None) if scale.shape is None or shape is None else (scale.shape[0], shape[-1])
    if not (isinstance(count, int) and isinstance(width, int)):
        raise node.unsupported("the lengths of its scale and of a branch are not known")
    return count == (width // branches if branches else width)


@definition("EngramGate", domain=DOMAIN)
def engram_gate(op: Recorder, node: NodeView) -> Sequence[ir.Value | None]:
    """sigmoid(sign(s) sqrt(max(|s|, 1e-6))) value, s the scaled product of normalized key and query"""
    key, query, value, key_scale, query_scale = (widened(op, node.input(i)) for i in range(5))
    epsilon, last = node.attribute("epsilon", 1e-5), node.optional(5)
    product = _rms(op, key, epsilon) * key_scale * (_rms(op, query, epsilon) * query_scale)
    width = op.CastLike(op.Shape(key, start=3), key)
    score = op.ReduceSum(product, [-1]) / op.Sqrt(width)
    root = op.Sqrt(op.Max(op.Abs(score), 1e-6))
    y = op.Sigmoid(op.Sign(score) * root) * op.Unsqueeze(value, [2])
    normed = None
    if last is not None:
        normed = narrowed(op, _rms(op, y, epsilon) * widened(op, last), node.input(0))
    return narrowed(op, y, node.input(0)), normed


@definition("HyperConnectionPreMix", domain=DOMAIN)
def hyper_connection_pre_mix(op: Recorder, node: NodeView) -> ir.Value:
    """reduction_scale sum(streams pre_mix) over the branches"""
    branches, mix = node.attribute("num_branches", 0), node.input(1)
    x = _branches(op, node.input(0), branches)
    if branches and node.rank(1) == node.rank(0) and mix.shape == node.input(0).shape:
        mix = _branches(op, mix, branches)
    elif node.rank(1) == node.rank(0) + (1 if branches else 0) - 1:
        mix = op.Unsqueeze(mix, [-1])
    return op.ReduceSum(x * mix, [-2], keepdims=0) * node.attribute("reduction_scale", 1.0)


@definition("HyperConnectionPostMix", domain=DOMAIN)
def hyper_connection_post_mix(op: Recorder, node: NodeView) -> ir.Value:
    """stream_mix' streams + post_mix block_output"""
    x, branches, mix = node.input(0), node.attribute("num_branches", 0), node.input(2)
    streams, across = _branches(op, x, branches), node.optional(3)
    if across is not None:
        rank = node.rank(3)
        streams = op.MatMul(op.Transpose(across, perm=[*range(rank - 2), rank - 1, rank - 2]), streams)
    if node.rank(2) == node.rank(1):
        mix = op.Unsqueeze(mix, [-1])
    y = streams + mix * op.Unsqueeze(node.input(1), [-2])
    return op.Reshape(y, op.Shape(x))


@definition("LinearAttentionGate", domain=DOMAIN)
def linear_attention_gate(op: Recorder, node: NodeView) -> Sequence[ir.Value | None]:
    """decay_scale softplus(a + dt_bias), and sigmoid(b)"""
    a, b = node.input(0), node.optional(3)
    decay = node.input(2) * op.Softplus(widened(op, a) + node.input(1))
    return narrowed(op, decay, a), None if b is None else op.Sigmoid(b)


def _sum(node: NodeView, first: int, *others: int) -> ir.Value:
    total = node.input(first)
    for i in others:
        value = node.optional(i)
        total = total if value is None else total + value
    return total


def _layer(op: Recorder, x: ir.Value, scale: ir.Value, bias: ir.Value, epsilon: float) -> Sequence[ir.Value]:
    found: Sequence[ir.Value] = op.LayerNormalization(x, scale, bias, axis=-1, epsilon=epsilon, _outputs=3)
    return found


def _rms(op: Recorder, x: ir.Value, epsilon: float) -> ir.Value:
    return x * inverse_root(op, op.ReduceMean(x * x, [-1]) + epsilon)


def _branches(op: Recorder, x: ir.Value, branches: int) -> ir.Value:
    """The value as [..., branch, feature]"""
    if not branches:
        return x
    return op.Reshape(x, op.Concat(op.Shape(x, end=-1), [branches, -1], axis=0))
