"""Replaces gradient nodes by their bodies, and convolutions that can share the work of these bodies.

The gradient towards the weights of a small convolution is a product with columns of its input, or of the
gradient of its output. The convolution itself is then a product with the columns of its input, too. On
several threads that is faster than onnxruntime's Conv, which copies the columns of one sample after the other
on one thread if there are more filters than positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir

from ortgrad.graph.attributes import attributes_of
from ortgrad.graph.gradient_nodes import call_of, gradient_nodes, put_in_place
from ortgrad.graph.names import Names
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import is_operator
from ortgrad.operators.declaration import Operator
from ortgrad.ops.conv._body import conv_of_columns
from ortgrad.ops.conv.conv import ATTRIBUTES, conv_grad
from ortgrad.passes.deduplicate import deduplicate
from ortgrad.passes.expand import expand


def expand_with_columns(model: ir.Model, choose: Callable[[ir.Node, Operator], bool]) -> ir.Model:
    """Replace every complete gradient node for which `choose` returns True, and convolutions of these."""
    names = Names.later(model)
    found = False
    for node, operator in list(gradient_nodes(model)):
        if operator is conv_grad and node.graph is model.graph and choose(node, operator):
            found = _replace_convolution(node, model.opset_imports[""], names) or found
    model = expand(model, choose)
    return deduplicate(model) if found else model


def _replace_convolution(gradient: ir.Node, opset: int, names: Names) -> bool:
    """Replace the Conv of a node of ConvGrad if both can use the same columns; returns whether they can."""
    call, (dy, x, w) = call_of(gradient, conv_grad), gradient.inputs
    node = _convolution(x, w, call.attributes, opset)
    if node is None or dy is None or x is None or w is None or not call.wanted[1]:
        return False
    y, bias = node.outputs[0], node.inputs[2] if len(node.inputs) > 2 else None
    op = Recorder(opset, names, node.name or f"{y.name}")
    product = conv_of_columns(op, dy, x, w, bias, **call.attributes)
    if product is None:
        return False
    product.type, product.shape = y.type, y.shape
    put_in_place(node, [], op, [product])
    return True


def _convolution(
    x: ir.Value | None, w: ir.Value | None, attributes: Mapping[str, Any], opset: int
) -> ir.Node | None:
    """Return the node of Conv with these inputs and attributes."""
    if x is None or x.dtype != ir.DataType.FLOAT:
        return None
    for node in (use.node for use in x.uses()):
        if is_operator(node, "Conv") and list(node.inputs[:2]) == [x, w]:
            own = attributes_of(node, opset)
            if all(own.get(name) == attributes[name] for name in ATTRIBUTES):
                return node
    return None
