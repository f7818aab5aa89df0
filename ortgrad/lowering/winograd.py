"""Replaces gradients of convolutions with 3x3 kernels by an operator with a compiled kernel of its own."""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.graph.gradient_nodes import call_of, gradient_nodes
from ortgrad.graph.traversal import sizes_of
from ortgrad.lowering.internal_operators import KERNEL_TYPES, take_over
from ortgrad.ops.conv.conv import conv_grad
from ortgrad.ops.conv.winograd import is_fastest, winograd_conv_grad


def use_winograd(model: ir.Model) -> ir.Model:
    """Replace complete nodes of ConvGrad for which Winograd's method was measured to be faster."""
    for node, operator in gradient_nodes(model):
        if operator is not conv_grad:
            continue
        x, w = node.inputs[1], node.inputs[2]
        if x is None or w is None or w.dtype not in KERNEL_TYPES:
            continue
        if is_fastest(sizes_of(x), sizes_of(w), call_of(node, operator).attributes):
            take_over(model, node, winograd_conv_grad)
    return model
