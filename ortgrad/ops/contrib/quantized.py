"""Quantized operators that are fused, or are standard operators in another layout or element type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto

from ortgrad.autodiff.definitions import definition
from ortgrad.autodiff.node_view import NodeView
from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.declaration import DOMAIN
from ortgrad.ops._quantized import dequantized, unpacked
from ortgrad.ops.contrib.normalization import normalized_embedding


@definition("NhwcMaxPool", domain=DOMAIN)
def nhwc_max_pool(op: Recorder, node: NodeView) -> ir.Value:
    """MaxPool with the channels last"""
    rank = node.rank()
    turned = op.Transpose(node.input(0), perm=[0, rank - 1, *range(1, rank - 1)])
    y = op.MaxPool(turned, **node.attributes)
    return op.Transpose(y, perm=[0, *range(2, rank), 1])


@definition("MatMulInteger16", domain=DOMAIN)
def mat_mul_integer_16(op: Recorder, node: NodeView) -> ir.Value:
    """A B in 32 bits"""
    return op.MatMul(*(op.Cast(node.input(i), to=TensorProto.INT32) for i in (0, 1)))


@definition("GatherBlockQuantized", domain=DOMAIN)
def gather_block_quantized(op: Recorder, node: NodeView) -> ir.Value:
    """Gather of (data - zero_points) scales, with a scale and a zero point for every block"""
    data, indices, scales, zeros = node.input(0), node.input(1), node.input(2), node.optional(3)
    rank, size, bits = node.rank(), node.attribute("block_size", 128), node.attribute("bits", 4)
    axis, blocked = node.attribute("gather_axis", 0) % rank, node.attribute("quantize_axis", 1) % rank
    name = "" if data.dtype is None else data.dtype.name
    if name not in ("UINT8", "INT4", "UINT4"):
        raise node.unsupported(f"its data is of type {name.lower()}, for which onnxruntime has no CPU kernel")
    packed = name == "UINT8"
    if not packed:
        if op.opset < 21:
            raise node.unsupported("its data has 4 bits, which need opset 21 or newer; convert the model")
        # onnxruntime does not gather 4-bit elements.
        data = op.Cast(data, to=TensorProto.INT8)
        zeros = None if zeros is None else op.Cast(zeros, to=TensorProto.INT8)
    if axis == blocked:
        # The block of each index.
        length = op.Shape(data, start=axis, end=axis + 1)
        at = op.Cast(indices, to=TensorProto.INT64)
        block, along = op.Where(op.Less(at, 0), at + length, at) / op.constant(np.array(size)), axis
        q = op.Gather(data, indices, axis=axis)
    else:
        q, scales = (op.Gather(value, indices, axis=axis) for value in (data, scales))
        zeros = None if zeros is None else op.Gather(zeros, indices, axis=axis)
        if packed:
            q = unpacked(op, node, q, bits)
            # The last byte of the zero points may have unused bits, which no block reads.
            zeros = None if zeros is None else unpacked(op, node, zeros, bits)
        along = blocked + (node.rank(1) - 1 if blocked > axis else 0)
        length = op.Squeeze(op.Shape(q, start=along, end=along + 1), [0])
        block = op.Range(0, length, 1) / op.constant(np.array(size))
    scales = op.Gather(scales, block, axis=along)
    if zeros is not None:
        zeros = op.Gather(zeros, block, axis=along)
    elif packed:
        zeros = op.constant(np.array(2 ** (bits - 1)))
    return dequantized(op, q, scales, zeros, like=scales)


@definition("QEmbedLayerNormalization", domain=DOMAIN)
def q_embed_layer_normalization(op: Recorder, node: NodeView) -> Sequence[ir.Value]:
    """LayerNormalization of the sum of quantized embeddings of words, positions and segments"""

    def table(i: int, ids: ir.Value | None = None) -> ir.Value:
        # The scales follow the tensors and the mask, and the zero points follow the scales.
        q, scale, zero = node.input(i), node.input(i + 6), node.input(i + 11)
        return dequantized(op, q if ids is None else op.Gather(q, ids), scale, zero, like=scale)

    y, counts, _ = normalized_embedding(op, node, table)
    return y, counts


@definition("DynamicQuantizeLSTM", domain=DOMAIN)
def dynamic_quantize_lstm(op: Recorder, node: NodeView) -> Sequence[ir.Value]:
    """LSTM whose W and R are quantized and transposed; X and the states are not rounded here"""
    x = node.input(0)
    weights = [_recurrent_weight(op, node, i, scale) for i, scale in ((1, 8), (2, 10))]
    rest = (node.optional(i) for i in range(3, 8))
    names = ("activation_alpha", "activation_beta", "activations", "clip", "direction", "hidden_size")
    settings: dict[str, Any] = {name: node.attribute(name) for name in (*names, "input_forget")}
    results: Sequence[ir.Value] = op.LSTM(x, *weights, *rest, **settings, _outputs=3)
    for value, output in zip(results, node.outputs, strict=False):
        value.type, value.shape = x.type, output.shape
    return results


def _recurrent_weight(op: Recorder, node: NodeView, i: int, scale: int) -> ir.Value:
    """[direction, 4 * hidden, inputs] from integers of [direction, inputs, 4 * hidden]"""
    # One number, or one for each column, of every direction.
    spread, zero = (op.Reshape(node.input(j), [0, 1, -1]) for j in (scale, scale + 1))
    weight = dequantized(op, node.input(i), spread, zero, like=node.input(scale))
    turned: ir.Value = op.Transpose(weight, perm=[0, 2, 1])
    return turned


@gradient("DynamicQuantizeLSTM", domain=DOMAIN, scales={1: 8, 2: 10}, straight_through=True)
def dynamic_quantize_lstm_gradient(node: ForwardNode) -> Gradients:
    """The gradient of the LSTM of floats, because the rounded X and states of its steps are not outputs."""
    from ortgrad.autodiff.backward import differentiate  # imports onnx-ir, which takes a while

    return differentiate(node, dynamic_quantize_lstm(node.op, node))
