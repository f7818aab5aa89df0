"""Replaces the gradients of pointwise convolutions by an operator with a compiled kernel of its own."""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.graph.gradient_nodes import call_of, gradient_nodes
from ortgrad.graph.traversal import sizes_of
from ortgrad.lowering.internal_operators import KERNEL_TYPES, take_over
from ortgrad.ops.conv.conv import conv_grad
from ortgrad.ops.pointwise import is_pointwise, pointwise_conv_grad


def use_pointwise(model: ir.Model) -> ir.Model:
    """Replace complete nodes of ConvGrad that are known to be pointwise."""
    for node, operator in gradient_nodes(model):
        w = node.inputs[2] if operator is conv_grad else None
        sizes = sizes_of(w)
        if w is None or sizes is None or w.dtype not in KERNEL_TYPES:
            continue
        if is_pointwise(sizes, call_of(node, operator).attributes):
            take_over(model, node, pointwise_conv_grad)
    return model
