"""The heads of attention, and the pairs of elements that rotary embeddings rotate."""

from __future__ import annotations

import numpy as np

from ortgrad.graph.lazy import Recorder, ir

# From [batch, length, head, width] to [batch, head, length, width], and back.
HEADS_FIRST = [0, 2, 1, 3]
_END = np.iinfo(np.int64).max


def split_heads(op: Recorder, value: ir.Value, heads: int | None) -> ir.Value:
    """[batch, head, length, width] from [batch, length, head * width]"""
    return op.Transpose(op.Reshape(value, [0, 0, heads, -1]), perm=HEADS_FIRST)


def merge_heads(op: Recorder, value: ir.Value) -> ir.Value:
    """[batch, length, head * width] from [batch, head, length, width]"""
    return op.Reshape(op.Transpose(value, perm=HEADS_FIRST), [0, 0, -1])


def regrouped(op: Recorder, value: ir.Value, heads: int) -> ir.Value:
    """The value with another number of heads: those that share a key become rows of one, or separate."""
    return op.Reshape(value, [0, heads, -1, 0])


def pairs(op: Recorder, value: ir.Value, interleaved: bool) -> tuple[ir.Value, ir.Value]:
    """The first and the second elements of all pairs along the last axis: neighbours, or its two halves."""
    if interleaved:
        return op.Slice(value, [0], [_END], [-1], [2]), op.Slice(value, [1], [_END], [-1], [2])
    first, second = op.Split(value, axis=-1, num_outputs=2, _outputs=2)
    return first, second
