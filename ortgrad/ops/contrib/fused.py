"""Products, convolutions and activations that onnxruntime's optimizer fuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ortgrad.autodiff.definitions import definition
from ortgrad.autodiff.node_view import NodeView
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.declaration import DOMAIN

_CONV = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
# The parameters of fused activations, in the order of FusedConv's activation_params.
_ACTIVATIONS = {
    "Clip": ("min", "max"),
    "Elu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "HardSwish": (),
    "LeakyRelu": ("alpha",),
    "Relu": (),
    "Selu": ("alpha", "gamma"),
    "Sigmoid": (),
    "Softplus": (),
    "Softsign": (),
    "Tanh": (),
    "ThresholdedRelu": ("alpha",),
}


def _activated(op: Recorder, node: NodeView, value: ir.Value, parameters: dict[str, Any]) -> ir.Value:
    """The value after the activation that the node's attribute names."""
    name = node.attribute("activation", "")
    if not name:
        return value
    if name not in _ACTIVATIONS:
        raise node.unsupported(f"its activation {name!r} is not known")
    if name == "Clip":
        return op.Clip(value, parameters["min"], parameters["max"])
    activated: ir.Value = getattr(op, name)(value, **parameters)
    return activated


@definition("FusedConv", domain=DOMAIN)
def fused_conv(op: Recorder, node: NodeView) -> ir.Value:
    """activation(Conv(X, W, B) + Z)"""
    attributes = {name: node.attribute(name) for name in _CONV}
    y = op.Conv(node.input(0), node.input(1), node.optional(2), **attributes)
    z = node.optional(3)
    given = node.attribute("activation_params", [])
    names = _ACTIVATIONS.get(node.attribute("activation", ""), ())
    return _activated(op, node, y if z is None else y + z, dict(zip(names, given, strict=False)))


@definition("NhwcConv", domain=DOMAIN)
def nhwc_conv(op: Recorder, node: NodeView) -> ir.Value:
    """Conv with the channels of X, W and Y on the last axis"""
    rank = node.rank(1)
    x, w = (op.Transpose(node.input(i), perm=[0, rank - 1, *range(1, rank - 1)]) for i in (0, 1))
    y = op.Conv(x, w, node.optional(2), **{name: node.attribute(name) for name in _CONV})
    return op.Transpose(y, perm=[0, *range(2, rank), 1])


@definition("ConvTransposeWithDynamicPads", domain=DOMAIN)
def conv_transpose_with_dynamic_pads(op: Recorder, node: NodeView) -> ir.Value:
    """ConvTranspose with pads as an input: without pads, and cut off at the borders"""
    if node.attribute("auto_pad", "NOTSET") != "NOTSET":
        raise node.unsupported(f"its auto_pad is {node.attribute('auto_pad')!r}")
    names = ("dilations", "group", "kernel_shape", "output_padding", "strides")
    attributes = {name: node.attribute(name) for name in names}
    y = op.ConvTranspose(node.input(0), node.input(1), node.optional(3), **attributes)
    pads, axes = node.optional(2), list(range(2, node.rank(1)))
    if pads is None:
        return y
    begin, end = op.Split(pads, axis=0, num_outputs=2, _outputs=2)
    return op.Slice(y, begin, op.Shape(y, start=2) - end, axes)


@definition("CausalConvWithState", domain=DOMAIN)
def causal_conv_with_state(op: Recorder, node: NodeView) -> Sequence[ir.Value]:
    """activation of the convolution of every channel with its past; the state is the end of what it read"""
    if node.attribute("ndim", 1) != 1 or node.attribute("state_window", 0):
        raise node.unsupported("it has several spatial axes, or several states")
    x, w, past, dilation = node.input(0), node.input(1), node.optional(3), node.attribute("dilation", 1)
    channels, kernel = (None, None) if w.shape is None else (w.shape[0], w.shape[2])
    if not (isinstance(channels, int) and isinstance(kernel, int)):
        raise node.unsupported("the shape of its weight is not known")
    last = bool(node.attribute("channels_last", 0))
    state = (kernel - 1) * dilation
    rows = _channels_first(op, x) if last else x
    if past is None:
        everything = op.Pad(rows, [0, 0, state, 0, 0, 0])
    else:
        everything = op.Concat(_channels_first(op, past) if last else past, rows, axis=2)
    y = op.Conv(everything, w, node.optional(2), group=channels, dilations=[dilation], kernel_shape=[kernel])
    if node.attribute("activation", "none") != "none":
        y = y * op.Sigmoid(y)
    length = op.Shape(everything, start=2, end=3)
    present = op.Slice(everything, length - state, length, [2])
    if last:
        y = op.Reshape(op.Transpose(y, perm=[0, 2, 1]), op.Shape(x))
        shape = op.Concat(op.Shape(x, end=1), [state], op.Shape(x, start=2), axis=0)
        present = op.Reshape(op.Transpose(present, perm=[0, 2, 1]), shape)
    return y, present


def _channels_first(op: Recorder, value: ir.Value) -> ir.Value:
    """[batch, channel, length] from [batch, length, ...], where all further axes are channels"""
    return op.Transpose(op.Reshape(value, [0, 0, -1]), perm=[0, 2, 1])


@definition("FusedGemm", domain=DOMAIN)
def fused_gemm(op: Recorder, node: NodeView) -> ir.Value:
    """activation(alpha op(A) op(B) + beta C)"""
    attributes = {name: node.attribute(name) for name in ("alpha", "beta", "transA", "transB")}
    y = op.Gemm(node.input(0), node.input(1), node.optional(2), **attributes)
    return _activated(op, node, y, _prefixed(node))


def _prefixed(node: NodeView) -> dict[str, Any]:
    """The parameters of an activation from the attributes activation_alpha, activation_beta, ..."""
    names = _ACTIVATIONS.get(node.attribute("activation", ""), ())
    return {name: node.attribute(f"activation_{name}") for name in names}


@definition("FusedMatMul", "TransposeMatMul", domain=DOMAIN)
def fused_mat_mul(op: Recorder, node: NodeView) -> ir.Value:
    """alpha op(A) op(B), op a transpose or the identity"""
    y = op.MatMul(*(_turned(op, node, i, side) for i, side in enumerate("AB")))
    alpha = node.attribute("alpha", 1.0)
    return y if alpha == 1 else y * alpha


def _turned(op: Recorder, node: NodeView, i: int, side: str) -> ir.Value:
    swap, batch = (node.attribute(f"{name}{side}", 0) for name in ("trans", "transBatch"))
    if not (swap or batch):
        return node.input(i)
    rank = node.rank(i)
    order = list(range(rank))
    if batch:
        # The first axis is that of the rows (or columns); the batch axes are between it and the last.
        order = [*order[1:-1], 0, rank - 1]
    if swap and rank > 1:
        # A vector is never transposed.
        order[-2:] = order[:-3:-1]
    return op.Transpose(node.input(i), perm=order)


@definition("FusedMatMulActivation", domain=DOMAIN)
def fused_mat_mul_activation(op: Recorder, node: NodeView) -> ir.Value:
    """activation(FusedMatMul(A, B))"""
    y = fused_mat_mul(op, node)
    if node.attribute("activation") == "Softmax":
        return op.Softmax(y, axis=node.attribute("activation_axis", -1))
    return _activated(op, node, y, _prefixed(node))


@definition("GemmFastGelu", domain=DOMAIN)
def gemm_fast_gelu(op: Recorder, node: NodeView) -> ir.Value:
    """FastGelu(X W + bias)"""
    y, bias = op.MatMul(node.input(0), node.input(1)), node.optional(2)
    return fast_gelu_of(op, y if bias is None else y + bias)


@definition("Gelu", domain=DOMAIN)
def gelu(op: Recorder, node: NodeView) -> ir.Value:
    """X Phi(X), Phi the normal distribution"""
    return _gelu(op, node.input(0))


@definition("BiasGelu", domain=DOMAIN)
def bias_gelu(op: Recorder, node: NodeView) -> ir.Value:
    """Gelu(A + B)"""
    return _gelu(op, node.input(0) + node.input(1))


@definition("BiasSplitGelu", domain=DOMAIN)
def bias_split_gelu(op: Recorder, node: NodeView) -> ir.Value:
    """L Gelu(R), L and R the halves of X + bias along the last axis"""
    left, right = op.Split(node.input(0) + node.input(1), axis=-1, num_outputs=2, _outputs=2)
    return left * _gelu(op, right)


@definition("FastGelu", domain=DOMAIN)
def fast_gelu(op: Recorder, node: NodeView) -> ir.Value:
    """Gelu(X + bias), approximated with tanh"""
    x, bias = node.input(0), node.optional(1)
    return fast_gelu_of(op, x if bias is None else x + bias)


@definition("QuickGelu", domain=DOMAIN)
def quick_gelu(op: Recorder, node: NodeView) -> ir.Value:
    """X sigmoid(alpha X)"""
    x = node.input(0)
    return x * op.Sigmoid(x * node.attribute("alpha", 1.702))


@definition("ScaledSiLU", domain=DOMAIN)
def scaled_silu(op: Recorder, node: NodeView) -> ir.Value:
    """Z sigmoid(Z) with Z = scale X"""
    x, scale = node.input(0), node.optional(1)
    z = x * (node.attribute("alpha", 1.0) if scale is None else scale)
    return z * op.Sigmoid(z)


@definition("BiasAdd", domain=DOMAIN)
def bias_add(op: Recorder, node: NodeView) -> ir.Value:
    """X + bias + skip"""
    return node.input(0) + node.input(1) + node.input(2)


@definition("GatedAdd", domain=DOMAIN)
def gated_add(op: Recorder, node: NodeView) -> ir.Value:
    """X + gate Y"""
    return node.input(0) + node.input(1) * node.input(2)


def _gelu(op: Recorder, x: ir.Value) -> ir.Value:
    return x * (op.Erf(x * math.sqrt(0.5)) + 1.0) * 0.5


def fast_gelu_of(op: Recorder, x: ir.Value) -> ir.Value:
    return x * (op.Tanh(x * (x * x * 0.035677408136300125 + 0.7978845608028654)) + 1.0) * 0.5
