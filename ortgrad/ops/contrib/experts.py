"""Mixtures of experts.

The definitions compute all experts for all tokens and add up the results that the router chose. onnxruntime
computes the chosen experts only, so the gradient of a mixture of many experts takes longer than its forward
pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ortgrad.autodiff.definitions import definition
from ortgrad.autodiff.node_view import NodeView
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.declaration import DOMAIN
from ortgrad.ops._heads import pairs
from ortgrad.ops._quantized import unpacked
from ortgrad.ops._types import cast_like
from ortgrad.ops.contrib.fused import fast_gelu_of


@dataclass(frozen=True)
class _Layer:
    """A linear layer of every expert."""

    weight: ir.Value  # [expert, output, input]
    bias: ir.Value | None  # [expert, output]

    def apply(self, op: Recorder, x: ir.Value) -> ir.Value:
        """[expert, token, output] from [token, input] or [expert, token, input]"""
        y: ir.Value = op.MatMul(x, op.Transpose(self.weight, perm=[0, 2, 1]))
        return y if self.bias is None else y + op.Unsqueeze(self.bias, [1])


@definition("MoE", domain=DOMAIN)
def mixture_of_experts(op: Recorder, node: NodeView) -> ir.Value:
    """The sum over the best k experts of their share of softmax(router_probs) times their result"""
    _refuse(node, 6, 7)
    best, chosen = op.TopK(op.Softmax(node.input(1), axis=1), [node.attribute("k", 1)], axis=1, _outputs=2)
    if node.attribute("normalize_routing_weights", 0):
        best = best / op.ReduceSum(best, [1])
    first, second = _Layer(node.input(2), node.optional(3)), _Layer(node.input(4), node.optional(5))
    return _mixture(op, node, first, second, best, chosen)


@definition("QMoE", domain=DOMAIN)
def quantized_mixture_of_experts(op: Recorder, node: NodeView) -> ir.Value:
    """MoE with weights of a few bits, and the softmax of the best k of router_probs, or router_weights"""
    _refuse(node, 8, 9, 10, 13)
    if node.attribute("quant_type", "int") != "int" or node.attribute("weights_prepacked", 0) > 0:
        raise node.unsupported("its weights are not plain integers; onnxruntime has no CPU kernel for others")
    best, chosen = op.TopK(node.input(1), [node.attribute("k", 1)], axis=1, _outputs=2)
    weights = node.optional(14)
    if weights is None:
        best = op.Softmax(best, axis=1)
    else:
        best = op.GatherElements(weights, chosen, axis=1)
        if node.attribute("normalize_routing_weights", 0):
            best = best / op.ReduceSum(best, [1])
    first = _Layer(_dequantized_rows(op, node, 2, 11, "fc1_expert_weight_bits"), node.optional(4))
    second = _Layer(_dequantized_rows(op, node, 5, 12, "fc2_expert_weight_bits"), node.optional(7))
    return _mixture(op, node, first, second, best, chosen)


def _refuse(node: NodeView, *gates: int) -> None:
    if any(node.optional(i) is not None for i in gates):
        raise node.unsupported("it has a third layer, for which onnxruntime has no CPU kernel")
    if node.attribute("use_sparse_mixer", 0):
        raise node.unsupported("use_sparse_mixer is set, for which onnxruntime has no CPU kernel")


def _dequantized_rows(
    op: Recorder, node: NodeView, i: int, zero_points: int, bits_attribute: str
) -> ir.Value:
    """[expert, output, input] from integers, with a scale for every row or every block of one."""
    like, scales, zeros = node.input(0), node.input(i + 1), node.optional(zero_points)
    bits = node.attribute(bits_attribute) or node.attribute("expert_weight_bits", 4)
    weight = cast_like(op, unpacked(op, node, node.input(i), bits), like)
    whole = node.rank(i + 1) == 2
    if zeros is not None:
        # Packed along the rows, or along the blocks of a row; the last byte may have unused bits.
        axis = 1 if whole else 2
        count = op.Shape(scales, start=axis, end=axis + 1)
        zeros = cast_like(op, op.Slice(unpacked(op, node, zeros, bits), [0], count, [axis]), like)
    zero = op.number(2.0 ** (bits - 1), like) if zeros is None else op.Unsqueeze(zeros, [-1])
    if whole:
        return (weight - zero) * op.Unsqueeze(scales, [2])
    size = node.attribute("block_size")
    blocks = op.Reshape(weight, op.Concat([0], [0], [-1], [size], axis=0))
    return op.Reshape((blocks - zero) * op.Unsqueeze(scales, [3]), [0, 0, -1])


def _mixture(
    op: Recorder, node: NodeView, first: _Layer, second: _Layer, best: ir.Value, chosen: ir.Value
) -> ir.Value:
    x, router = node.input(0), node.input(1)
    tokens = x if node.rank() == 2 else op.Reshape(x, op.Concat([-1], op.Shape(x, start=-1), axis=0))
    made = second.apply(op, _activated(op, node, first.apply(op, tokens)))
    # [token, expert], zero except for the best.
    shares = op.ScatterElements(op.full_like(router, 0.0), chosen, best, axis=1)
    weighted = made * op.Unsqueeze(op.Transpose(shares, perm=[1, 0]), [2])
    y: ir.Value = op.ReduceSum(weighted, [0], keepdims=0)
    return y if node.rank() == 2 else op.Reshape(y, op.Shape(x))


def _activated(op: Recorder, node: NodeView, x: ir.Value) -> ir.Value:
    name = node.attribute("activation_type", "relu")
    if name == "relu":
        return op.Relu(x)
    if name == "gelu":
        return fast_gelu_of(op, x)
    if name == "silu":
        return x * op.Sigmoid(x)
    if name == "identity":
        return x
    if name != "swiglu" or node.attribute("swiglu_fusion", 0) != 1:
        raise node.unsupported(f"onnxruntime has no CPU kernel for its activation {name!r}")
    gate, value = pairs(op, x, interleaved=True)
    limit = node.attribute("swiglu_limit", np.inf)
    if np.isfinite(limit):
        gate = op.Clip(gate, None, op.number(limit, x))
        value = op.Clip(value, op.number(-limit, x), op.number(limit, x))
    opened = op.Sigmoid(gate * node.attribute("activation_alpha", 1.0))
    return gate * opened * (value + node.attribute("activation_beta", 0.0))
