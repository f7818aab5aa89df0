"""Replaces depthwise convolutions and their gradients by operators with a compiled kernel of their own."""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.graph.names import Names
from ortgrad.graph.traversal import all_nodes, is_operator, sizes_of
from ortgrad.lowering.constants import constant_values, is_dequantized
from ortgrad.lowering.internal_operators import KERNEL_TYPES, become, take_over
from ortgrad.ops.conv.conv import conv_grad, is_depthwise
from ortgrad.ops.conv.depthwise import depthwise_conv, depthwise_conv_grad


def use_depthwise(model: ir.Model) -> ir.Model:
    """Replace nodes of ConvGrad, and nodes of Conv whose weights are not constant."""
    names = Names.later(model)
    constant = constant_values(model)
    for node in list(all_nodes(model.graph)):
        is_gradient = (node.domain, node.op_type) == (conv_grad.domain, conv_grad.name)
        is_forward = is_operator(node, "Conv")
        if not (is_gradient or is_forward) or not _is_depthwise(node, node.inputs[2 if is_gradient else 1]):
            continue
        if is_gradient:
            take_over(model, node, depthwise_conv_grad)
        elif node.inputs[1] not in constant and not is_dequantized(node.inputs[1]):
            become(model, node, depthwise_conv, names)
    return model


def _is_depthwise(node: ir.Node, w: ir.Value | None) -> bool:
    sizes = sizes_of(w)
    if w is None or sizes is None or w.dtype not in KERNEL_TYPES:
        return False
    return is_depthwise(sizes, node.attributes.get_int("group", 1))
