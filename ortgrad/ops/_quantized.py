"""Quantized tensors and weights of a few bits, in definitions."""

from __future__ import annotations

import numpy as np

from ortgrad.autodiff.node_view import NodeView
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.ops._types import cast_like


def dequantized(
    op: Recorder, q: ir.Value, scale: ir.Value, zero: ir.Value | None, like: ir.Value
) -> ir.Value:
    """(q - zero) scale, in the element type of `like`; scales and zero points broadcast to q."""
    # Not DequantizeLinear: before a MatMul, onnxruntime would take it as a request to round dY to 8 bits.
    x = cast_like(op, q, like)
    x.shape = q.shape
    if zero is not None:
        shift = cast_like(op, zero, like)
        shift.shape = zero.shape
        x = x - shift
        x.shape = q.shape
    x = x * scale
    x.type, x.shape = like.type, q.shape
    return x


def unpacked(op: Recorder, node: NodeView, packed: ir.Value, bits: int) -> ir.Value:
    """The integers of a few bits along the last axis, the lowest bits of a byte first."""
    if bits not in (2, 4, 8):
        raise node.unsupported(f"its weights have {bits} bits")
    if bits == 8:
        return packed
    mask = np.array(2**bits - 1, np.uint8)
    parts = [
        op.Unsqueeze(
            op.BitwiseAnd(op.BitShift(packed, np.array(shift, np.uint8), direction="RIGHT"), mask), [-1]
        )
        for shift in range(0, 8, bits)
    ]
    return op.Reshape(op.Concat(*parts, axis=-1), op.Concat(op.Shape(packed, end=-1), [-1], axis=0))
