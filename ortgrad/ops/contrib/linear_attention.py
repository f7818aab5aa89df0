"""Linear attention: a recurrence in place of a softmax."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ortgrad.autodiff.definitions import definition
from ortgrad.autodiff.node_view import NodeView
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.declaration import DOMAIN
from ortgrad.ops._flow import Results, scan
from ortgrad.ops._types import narrowed, widened

_RULES = ("linear", "gated", "delta", "gated_delta")
# From [batch, length, head, ...] to [length, batch, head, ...], which Scan reads.
_LENGTH_FIRST = [1, 0, 2, 3, 4]


@definition("LinearAttention", domain=DOMAIN)
def linear_attention(op: Recorder, node: NodeView) -> Sequence[ir.Value]:
    """S = exp(decay) S + K' (beta (V - K exp(decay) S)) for every token, and scale Q S"""
    rule = node.attribute("update_rule", "gated_delta")
    if rule not in _RULES:
        raise node.unsupported(f"its update_rule {rule!r} is not known")
    if node.attribute("state_window", 0):
        raise node.unsupported("state_window is set, for which onnxruntime has no CPU kernel")
    query, shared = node.attribute("q_num_heads"), node.attribute("kv_num_heads")
    q, k, v = (widened(op, node.input(i)) for i in range(3))
    width = op.Shape(op.Reshape(q, [0, 0, query, -1]), start=3, end=4)
    q = op.Reshape(q, [0, 0, query, -1])
    if query < shared:
        # Several heads of K and V read the same query.
        q = op.Gather(q, np.arange(shared) * query // shared, axis=2)
        query = shared
    q = op.Reshape(q, op.Concat([0], [0], [shared], [query // shared], width, axis=0))
    k = op.Reshape(k, op.Concat([0], [0], [-1], width, axis=0))
    own = op.constant(np.arange(shared)) * op.Shape(k, start=2, end=3) / op.constant(np.array([shared]))
    k = op.Unsqueeze(op.Gather(k, own, axis=2), [3])
    v = op.Unsqueeze(op.Reshape(v, [0, 0, shared, -1]), [3])
    gates = []
    if "gated" in rule:
        decay = op.Exp(op.Reshape(widened(op, node.input(4)), [0, 0, shared, -1]))
        gates.append(op.Unsqueeze(decay, [4]))
    if "delta" in rule:
        gates.append(op.Unsqueeze(widened(op, node.input(5)), [3, 4]))
    sequences = [op.Transpose(value, perm=_LENGTH_FIRST) for value in (q, k, v, *gates)]
    past = node.optional(3)
    if past is None:
        sizes = op.Concat(op.Shape(q, end=1), [shared], width, op.Shape(v, start=4), axis=0)
        state = op.Expand(op.number(0.0, v), sizes)
    else:
        state = widened(op, past)

    def step(
        op: Recorder, states: Sequence[ir.Value], q: ir.Value, k: ir.Value, v: ir.Value, *gates: ir.Value
    ) -> Results:
        state = states[0] * gates[0] if "gated" in rule else states[0]
        if "delta" in rule:
            v = gates[-1] * (v - op.MatMul(k, state))
        state = state + op.MatMul(op.Transpose(k, perm=[0, 1, 3, 2]), v)
        return [state], [op.MatMul(q, state)]

    (final,), (made,) = scan(op, [state], sequences, step, rank=4)
    scale = node.attribute("scale", 0.0)
    factor = op.number(scale, v) if scale else op.Reciprocal(op.Sqrt(op.CastLike(width, v)))
    y = op.Reshape(op.Transpose(made, perm=_LENGTH_FIRST) * factor, [0, 0, -1])
    return narrowed(op, y, node.input(0)), narrowed(op, final, node.input(0) if past is None else past)
