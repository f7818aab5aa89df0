"""Replaces the gradients of pointwise convolutions by an operator with a compiled kernel of its own."""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.graph.gradient_nodes import call_of, gradient_nodes
from ortgrad.operators.declaration import INTERNAL_DOMAIN
from ortgrad.ops.conv.conv import conv_grad
from ortgrad.ops.pointwise import is_pointwise, pointwise_conv_grad

_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def use_pointwise(model: ir.Model) -> ir.Model:
    """Replace complete nodes of ConvGrad that are known to be pointwise."""
    for node, operator in gradient_nodes(model):
        w = node.inputs[2] if operator is conv_grad else None
        if w is None or w.shape is None or w.dtype not in _TYPES:
            continue
        sizes = [size if isinstance(size, int) else None for size in w.shape]
        if is_pointwise(sizes, call_of(node, operator).attributes):
            # The call is the same.
            node.op_type, node.domain = pointwise_conv_grad.name, INTERNAL_DOMAIN
            model.opset_imports.setdefault(INTERNAL_DOMAIN, 1)
    return model
