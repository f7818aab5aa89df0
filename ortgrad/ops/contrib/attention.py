"""Attention and rotary embeddings as onnxruntime fuses them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from ortgrad.autodiff.definitions import definition
from ortgrad.autodiff.node_view import NodeView
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.declaration import DOMAIN
from ortgrad.ops._heads import HEADS_FIRST, merge_heads, pairs, regrouped, split_heads
from ortgrad.ops._quantized import dequantized
from ortgrad.ops._types import cast_like

_END = np.iinfo(np.int64).max


@definition("Attention", domain=DOMAIN)
def attention(op: Recorder, node: NodeView) -> Sequence[ir.Value | None]:
    """softmax(scale Q K' + mask) V, where Q, K and V are parts of X W + bias"""
    _refuse_buffers(node, 6)
    projected, bias = op.MatMul(node.input(0), node.input(1)), node.optional(2)
    if bias is not None:
        projected = projected + bias
    return _self_attention(op, node, projected, mask=3, past=4, bias=5)


@definition("QAttention", domain=DOMAIN)
def q_attention(op: Recorder, node: NodeView) -> Sequence[ir.Value | None]:
    """Attention of X and W that are quantized, W with a scale for all elements or for each column"""
    _refuse_buffers(node)
    x, w = (
        dequantized(op, node.input(i), node.input(i + 3), node.optional(i + 6), like=node.input(2))
        for i in (0, 1)
    )
    return _self_attention(op, node, op.MatMul(x, w) + node.input(2), mask=5, past=8)


def _self_attention(
    op: Recorder, node: NodeView, projected: ir.Value, *, mask: int, past: int, bias: int | None = None
) -> Sequence[ir.Value | None]:
    """The result and the keys and values; `mask`, `past` and `bias` are positions of inputs."""
    if node.attribute("do_rotary", 0):
        raise node.unsupported("do_rotary is set, for which onnxruntime has no CPU kernel")
    heads, before = node.attribute("num_heads"), node.optional(past)
    sizes = node.attribute("qkv_hidden_sizes")
    if sizes:
        parts = op.Split(projected, sizes, axis=2, _outputs=3)
    else:
        parts = op.Split(projected, axis=2, num_outputs=3, _outputs=3)
    q, k, v = (split_heads(op, part, heads) for part in parts)
    if before is not None:
        past_key, past_value = (op.Gather(before, np.array(i), axis=0) for i in (0, 1))
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    causal = bool(node.attribute("unidirectional", 0))
    y, _ = _attend(op, node, q, k, v, mask=mask, bias=bias, causal=causal)
    present = None
    if node.has_output(1):
        present = op.Concat(op.Unsqueeze(k, [0]), op.Unsqueeze(v, [0]), axis=0)
    return merge_heads(op, y), present


@definition("MultiHeadAttention", domain=DOMAIN)
def multi_head_attention(op: Recorder, node: NodeView) -> Sequence[ir.Value | None]:
    """softmax(scale Q K' + mask) V, with a bias that is added to Q, K and V"""
    _refuse_buffers(node, 8, 9)
    heads, bias = node.attribute("num_heads"), node.optional(3)
    q, k, v = _query_key_value(op, node, heads, bias)
    past_key, past_value = node.optional(6), node.optional(7)
    if past_key is not None:
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    y, scores = _attend(op, node, q, k, v, mask=4, bias=5, causal=bool(node.attribute("unidirectional", 0)))
    return merge_heads(op, y), k, v, scores


def _query_key_value(
    op: Recorder, node: NodeView, heads: int, bias: ir.Value | None
) -> tuple[ir.Value, ir.Value, ir.Value]:
    query, key, value = node.input(0), node.optional(1), node.optional(2)
    if node.rank() == 5:
        # Q, K and V in one: [batch, length, head, 3, width]
        if bias is not None:
            query = query + op.Transpose(op.Reshape(bias, [3, heads, -1]), perm=[1, 0, 2])
        q, k, v = (_part(op, query, i) for i in range(3))
        return q, k, v
    width = op.Shape(query, start=2, end=3)
    if bias is not None:
        query = query + op.Slice(bias, [0], width, [0])
    q = split_heads(op, query, heads)
    if key is None:
        raise node.unsupported("it has neither keys nor a packed query")
    if node.rank(1) == 5:
        if bias is not None:
            rest = op.Slice(bias, width, [_END], [0])
            key = key + op.Transpose(op.Reshape(rest, [2, heads, -1]), perm=[1, 0, 2])
        return q, _part(op, key, 0), _part(op, key, 1)
    if value is None:
        raise node.unsupported("it has no values")
    if node.rank(1) == 4:
        # Keys and values of cross attention, with their bias: [batch, head, length, width]
        return q, key, value
    if bias is not None:
        middle = width + op.Shape(key, start=2, end=3)
        key = key + op.Slice(bias, width, middle, [0])
        value = value + op.Slice(bias, middle, [_END], [0])
    return q, split_heads(op, key, heads), split_heads(op, value, heads)


def _part(op: Recorder, packed: ir.Value, i: int) -> ir.Value:
    return op.Transpose(op.Gather(packed, np.array(i), axis=3), perm=HEADS_FIRST)


def _refuse_buffers(node: NodeView, *inputs: int) -> None:
    if node.attribute("past_present_share_buffer", 0) or any(node.optional(i) is not None for i in inputs):
        raise node.unsupported("its past and present share a buffer")


def _attend(
    op: Recorder,
    node: NodeView,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    *,
    mask: int,
    bias: int | None,
    causal: bool,
) -> tuple[ir.Value, ir.Value]:
    """The result and the scores; `mask` and `bias` are positions of inputs."""
    scores = op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2])) * _scale(op, node, q)
    if node.optional(mask) is not None:
        allowed = _allowed(op, node, mask, q, k)
        scores = scores + op.Where(allowed, 0.0, op.number(node.attribute("mask_filter_value", -1e4), q))
    if causal:
        keys = _positions(op, k)
        last = op.Unsqueeze(
            _positions(op, q) + (op.Shape(k, start=2, end=3) - op.Shape(q, start=2, end=3)), [1]
        )
        scores = op.Where(op.Greater(keys, last), _lowest(op, q), scores)
    extra = None if bias is None else node.optional(bias)
    if extra is not None:
        scores = scores + extra
    p = op.Softmax(scores, axis=-1)
    return op.MatMul(p, v), scores


def _scale(op: Recorder, node: NodeView, q: ir.Value) -> ir.Value:
    scale = node.attribute("scale", 0.0)
    if scale:
        return op.number(scale, q)
    return op.Reciprocal(op.Sqrt(op.CastLike(op.Shape(q, start=-1), q)))


def _lowest(op: Recorder, like: ir.Value) -> ir.Value:
    assert like.dtype is not None
    return op.number(float(np.finfo(like.dtype.numpy()).min), like)


def _positions(op: Recorder, value: ir.Value) -> ir.Value:
    """0, 1, ... up to the length of [batch, head, length, width]"""
    return op.Range(0, op.Squeeze(op.Shape(value, start=2, end=3), [0]), 1)


def _allowed(op: Recorder, node: NodeView, i: int, q: ir.Value, k: ir.Value) -> ir.Value:
    """Which queries may see which keys, to be broadcast to [batch, head, query, key]"""
    mask, rank = node.input(i), node.rank(i)
    if rank > 3:
        raise node.unsupported("its mask has four dimensions, for which onnxruntime has no CPU kernel")
    if rank > 1:
        return op.Unsqueeze(op.Greater(mask, op.CastLike(0, mask)), [1, 2] if rank == 2 else [1])
    # The exclusive ends of all sequences, which may be followed by their inclusive starts.
    batch = op.Shape(q, start=0, end=1)
    ends = op.Cast(mask, to=TensorProto.INT64)
    starts = op.Slice(
        op.Concat(ends, op.Expand(0, batch), axis=0), batch, batch * op.constant(np.array([2])), [0]
    )
    ends, starts = (op.Unsqueeze(part, [1, 2, 3]) for part in (op.Slice(ends, [0], batch, [0]), starts))
    keys = _positions(op, k)
    return op.And(op.Less(keys, ends), op.GreaterOrEqual(keys, starts))


@definition("RotaryEmbedding", domain=DOMAIN)
def rotary_embedding(op: Recorder, node: NodeView) -> ir.Value:
    """X with pairs of elements rotated by angles that depend on their positions"""
    if node.attribute("is_packed_batching", 0):
        raise node.unsupported("its batch is packed")
    positions, cos, sin = node.input(1), node.input(2), node.input(3)
    if node.rank(1) == 1:
        # The position of the first token.
        axis = 2 if node.rank() == 4 else 1
        length = op.Squeeze(op.Shape(node.input(0), start=axis, end=axis + 1), [0])
        positions = op.Unsqueeze(op.Range(0, length, 1) + positions, [0])
    angles = [op.Unsqueeze(op.Gather(cache, positions), [2]) for cache in (cos, sin)]
    return _rotary(op, node, angles)


@definition("MRotaryEmbedding", domain=DOMAIN)
def m_rotary_embedding(op: Recorder, node: NodeView) -> ir.Value:
    """RotaryEmbedding with three positions per token, each for some of the angles"""
    if node.attribute("is_packed_batching", 0):
        raise node.unsupported("its batch is packed")
    sections = node.attribute("mrope_section")
    width = sum(sections)
    source = np.zeros(width, np.int64)
    if node.attribute("mrope_layout", 0):
        for i in (1, 2):
            source[i : 3 * sections[i] : 3] = i
    else:
        source = np.repeat(np.arange(3), sections)
    chosen = np.stack([source == i for i in range(3)]).reshape(3, 1, 1, width)
    angles = []
    for i in (2, 3):
        # [3, batch, length, angle]
        gathered = op.Gather(node.input(i), node.input(1))
        parts = op.Where(chosen, gathered, 0.0)
        angles.append(op.Unsqueeze(op.ReduceSum(parts, [0], keepdims=0), [2]))
    return _rotary(op, node, angles)


def _rotary(op: Recorder, node: NodeView, angles: Sequence[ir.Value]) -> ir.Value:
    x, width = node.input(0), node.attribute("rotary_embedding_dim", 0)
    if node.rank() == 4:
        tokens = op.Transpose(x, perm=HEADS_FIRST)
    elif width or node.op_type == "MRotaryEmbedding":
        tokens = op.Reshape(x, [0, 0, node.attribute("num_heads"), -1])
    else:
        half = op.Shape(node.input(2), start=1, end=2)
        tokens = op.Reshape(x, op.Concat([0], [0], [-1], half + half, axis=0))
    y = _rotated(op, tokens, *angles, interleaved=bool(node.attribute("interleaved", 0)), width=width)
    if node.rank() == 4:
        return op.Transpose(y, perm=HEADS_FIRST)
    return op.Reshape(y, op.Shape(x))


def _rotated(
    op: Recorder, x: ir.Value, cos: ir.Value, sin: ir.Value, *, interleaved: bool, width: int = 0
) -> ir.Value:
    """[batch, length, head, width], rotated by angles of [batch, length, 1, pair]"""
    rest = None
    if width:
        x, rest = op.Slice(x, [0], [width], [3]), op.Slice(x, [width], [_END], [3])
    a, b = pairs(op, x, interleaved)
    first, second = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        y = op.Reshape(op.Concat(op.Unsqueeze(first, [4]), op.Unsqueeze(second, [4]), axis=4), op.Shape(x))
    else:
        y = op.Concat(first, second, axis=3)
    return y if rest is None else op.Concat(y, rest, axis=3)


@definition("GroupQueryAttention", domain=DOMAIN)
def group_query_attention(op: Recorder, node: NodeView) -> Sequence[ir.Value | None]:
    """Causal attention in which several query heads share a key, with a cache of keys and values"""
    if node.attribute("sliding_window_cache", 0):
        raise node.unsupported("its cache contains a window only")
    if node.attribute("k_quant_type", "NONE") != "NONE" or node.attribute("v_quant_type", "NONE") != "NONE":
        raise node.unsupported("its cache is quantized")
    if node.optional(14) is not None:
        raise node.unsupported("it normalizes queries, for which onnxruntime has no CPU kernel")
    heads, shared = node.attribute("num_heads"), node.attribute("kv_num_heads")
    query, key, value = node.input(0), node.optional(1), node.optional(2)
    if key is None:
        # Q, K and V in one along the last axis.
        all_heads = op.Reshape(query, [0, 0, heads + 2 * shared, -1])
        q, k, v = op.Split(all_heads, [heads, shared, shared], axis=2, _outputs=3)
    else:
        q = op.Reshape(query, [0, 0, heads, -1])
        k, v = (op.Reshape(part, [0, 0, shared, -1]) for part in (key, value))
    length = op.Shape(q, start=1, end=2)
    ends = op.Cast(node.input(5), to=TensorProto.INT64) + op.constant(np.array(1))
    ends = op.Reshape(ends, [-1, 1])
    total = op.Reshape(op.Cast(node.input(6), to=TensorProto.INT64), [1])
    # How many tokens of each sequence the cache holds; a prompt begins with none.
    held = op.Where(op.Equal(total, length), 0, ends - length)
    offsets = op.Range(0, op.Squeeze(length, [0]), 1)
    if node.attribute("do_rotary", 0):
        positions = node.optional(9)
        positions = held + offsets if positions is None else positions
        cos, sin = (op.Unsqueeze(op.Gather(node.input(i), positions), [2]) for i in (7, 8))
        interleaved = bool(node.attribute("rotary_interleaved", 0))
        width = _rotary_width(node)
        q, k = (_rotated(op, x, cos, sin, interleaved=interleaved, width=width) for x in (q, k))
    q, k, v = (op.Transpose(x, perm=HEADS_FIRST) for x in (q, k, v))
    keys, values = (_with_past(op, node, i, new, held, total) for i, new in ((3, k), (4, v)))
    y, scores = _grouped(op, node, q, keys, values, held, ends, offsets)
    return merge_heads(op, y), keys, values, scores


def _rotary_width(node: NodeView) -> int:
    """The number of elements of a head that are rotated; 0 if all of them are."""
    cos, query = node.input(7).shape, node.input(0).shape
    heads = node.attribute("num_heads")
    if node.optional(1) is None:
        heads += 2 * node.attribute("kv_num_heads")
    half, hidden = None if cos is None else cos[1], None if query is None else query[2]
    if not (isinstance(half, int) and isinstance(hidden, int)):
        raise node.unsupported("the widths of its heads and of its rotary cache are not known")
    return 0 if 2 * half == hidden // heads else 2 * half


def _with_past(
    op: Recorder, node: NodeView, i: int, new: ir.Value, held: ir.Value, total: ir.Value
) -> ir.Value:
    """The cached tokens of each sequence, followed by the new ones and zeros."""
    past = node.optional(i)
    if past is None:
        return new
    capacity = op.Shape(past, start=2, end=3)
    length = op.Shape(new, start=2, end=3)
    places = op.Range(0, op.Squeeze(op.Max(capacity, total), [0]), 1)
    # In the concatenation of past and new.
    behind = places - held
    index = op.Where(op.Less(behind, 0), places, op.Min(behind, length - 1) + capacity)
    both = op.Concat(past, new, axis=2)
    index = op.Unsqueeze(index, [1, 3])
    shape = op.Concat(op.Shape(both, end=2), op.Shape(places), op.Shape(both, start=3), axis=0)
    gathered = op.GatherElements(both, op.Expand(index, shape), axis=2)
    return op.Where(op.Unsqueeze(op.Less(behind, length), [1, 3]), gathered, 0.0)


def _grouped(
    op: Recorder,
    node: NodeView,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    held: ir.Value,
    ends: ir.Value,
    offsets: ir.Value,
) -> tuple[ir.Value, ir.Value]:
    heads, shared = node.attribute("num_heads"), node.attribute("kv_num_heads")
    rows = q if heads == shared else regrouped(op, q, shared)
    scores = op.MatMul(rows, op.Transpose(k, perm=[0, 1, 3, 2])) * _scale(op, node, q)
    scores = scores if heads == shared else regrouped(op, scores, heads)
    cap = node.attribute("softcap", 0.0)
    if cap:
        scores = op.Tanh(scores * (1 / cap)) * cap
    bias = node.optional(10)
    columns = op.Range(0, op.Squeeze(op.Shape(scores, start=3, end=4), [0]), 1)
    if bias is not None:
        # It covers total_sequence_length keys; the cache may be longer.
        missing = op.Shape(scores, start=3, end=4) - op.Shape(bias, start=3, end=4)
        zeros = op.constant(np.zeros(7, np.int64))
        scores = scores + op.Pad(bias, op.Concat(zeros, missing, axis=0))
    last = op.Unsqueeze(held + offsets, [1, 3])
    if node.attribute("causal", 1):
        allowed = op.LessOrEqual(columns, last)
    else:
        allowed = op.Less(columns, op.Unsqueeze(ends, [1, 3]))
    window = node.attribute("local_window_size", -1)
    if window > 0:
        allowed = op.And(allowed, op.Greater(columns, last - window))
    before = scores
    scores = op.Where(allowed, scores, _lowest(op, q))
    sink = node.optional(11)
    if sink is not None or node.attribute("smooth_softmax", 0) == 1:
        # One more column, which takes part in the softmax and has no value.
        like = op.Slice(scores, [0], [1], [3])
        extra = (
            op.full_like(like, 0.0)
            if sink is None
            else op.Expand(op.Reshape(sink, [1, -1, 1, 1]), op.Shape(like))
        )
        p = op.Softmax(op.Concat(scores, extra, axis=3), axis=-1)
        p = op.Slice(p, [0], [-1], [3])
    else:
        p = op.Softmax(scores, axis=-1)
    y = op.MatMul(p if heads == shared else regrouped(op, p, shared), v)
    return y if heads == shared else regrouped(op, y, heads), before if node.attribute(
        "qk_output", 0
    ) == 1 else p


@definition("GatedRelativePositionBias", domain=DOMAIN)
def gated_relative_position_bias(op: Recorder, node: NodeView) -> ir.Value:
    """rel_pos (u (r eco_a - 1) + 2), with the gates u and r of every query"""
    if node.optional(6) is not None:
        raise node.unsupported("its tokens are packed")
    query, bias, positions, weight, weight_bias, eco = (node.input(i) for i in range(6))
    q = split_heads(op, query + bias, node.attribute("num_heads"))
    gates = op.Reshape(op.MatMul(q, weight) + weight_bias, [0, 0, 0, 2, -1])
    u, r = op.Split(op.Sigmoid(op.ReduceSum(gates, [-1], keepdims=0)), axis=-1, num_outputs=2, _outputs=2)
    return (u * (r * eco - 1.0) + 2.0) * positions


@definition("RelativePositionBias", domain=DOMAIN)
def relative_position_bias(op: Recorder, node: NodeView) -> ir.Value:
    """The bias of every pair of positions, by the bucket of their distance, as in T5"""
    table = node.input(0)
    rows, columns = (
        op.Range(0, op.Reshape(op.Cast(node.input(i), to=TensorProto.INT64), np.zeros(0, np.int64)), 1)
        for i in (1, 2)
    )
    buckets = None if table.shape is None else table.shape[0]
    if not isinstance(buckets, int):
        raise node.unsupported("the number of its buckets is not known")
    # The position of the key relative to the query.
    distance = op.Unsqueeze(columns, [0]) - op.Unsqueeze(rows, [1])
    first = op.constant(np.array(0))
    if node.attribute("is_bidirectional", 0):
        buckets //= 2
        first = op.Where(op.Greater(distance, 0), buckets, 0)
        distance = op.Abs(distance)
    else:
        distance = op.Max(-distance, op.constant(np.array(0)))
    exact = buckets // 2
    ratio = op.Cast(op.Max(distance, op.constant(np.array(1))), to=TensorProto.FLOAT) * (1 / exact)
    slope = (buckets - exact) / math.log(node.attribute("max_distance") / exact)
    large = op.Cast(op.Log(ratio) * slope, to=TensorProto.INT64) + exact
    bucket = op.Where(op.Less(distance, exact), distance, op.Min(large, op.constant(np.array(buckets - 1))))
    found = op.Gather(table, bucket + first)
    return cast_like(op, op.Unsqueeze(op.Transpose(found, perm=[2, 0, 1]), [0]), table)
