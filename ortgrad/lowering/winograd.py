"""Replaces gradients of convolutions with kernels of 3x3 by an operator with a compiled kernel of its own."""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.graph.gradient_nodes import call_of, gradient_nodes
from ortgrad.lowering.forward_convolutions import sizes_of
from ortgrad.operators.declaration import INTERNAL_DOMAIN
from ortgrad.ops.conv.conv import conv_grad
from ortgrad.ops.conv.winograd import is_fastest, winograd_conv_grad

_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def use_winograd(model: ir.Model) -> ir.Model:
    """Replace complete nodes of ConvGrad for which Winograd's method was measured to be faster."""
    for node, operator in gradient_nodes(model):
        if operator is not conv_grad:
            continue
        x, w = node.inputs[1], node.inputs[2]
        if x is None or w is None or w.dtype not in _TYPES:
            continue
        if is_fastest(sizes_of(x), sizes_of(w), call_of(node, operator).attributes):
            # The call is the same.
            node.op_type, node.domain = winograd_conv_grad.name, INTERNAL_DOMAIN
            model.opset_imports.setdefault(INTERNAL_DOMAIN, 1)
    return model
