"""Lets onnxruntime compute gradients of convolutions whose inputs have a single channel.

In the tiles of the compiled kernel for dX, rows are channels: with one row, a tile has too few sums to keep
the processor busy. The body is a product of matrices with a row for each tap. Spectrograms, which exporters
write as convolutions of hundreds of taps with large strides, are such convolutions. In the tiles for dW,
lanes of vectors are filters: if these are few as well, the kernel is not worth its copies of X and dY.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from ortgrad.compiled.functions import TILE
from ortgrad.graph.bodies import record_body
from ortgrad.graph.gradient_nodes import call_of, gradient_nodes, put_in_place
from ortgrad.graph.names import Names
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import sizes_of
from ortgrad.operators.call import Call
from ortgrad.operators.declaration import CALL_ATTRIBUTE
from ortgrad.ops.conv._compiled import is_fastest
from ortgrad.ops.conv.conv import conv_grad


def expand_single_channels(model: ir.Model) -> ir.Model:
    """Compute dX of such nodes of ConvGrad by the body; dW and dB remain, unless filters are few."""
    names = Names.later(model)
    for node, operator in gradient_nodes(model):
        if operator is conv_grad and _has_one_channel(node):
            _expand(node, model.opset_imports[""], names)
    return model


def _has_one_channel(node: ir.Node) -> bool:
    """Return whether W has one channel, and the compiled kernel would compute the node."""
    dy, x, w = node.inputs[:3]
    # onnxruntime has no kernel for convolutions in double precision.
    if dy is None or x is None or w is None or w.dtype != ir.DataType.FLOAT:
        return False
    shape, attributes = sizes_of(w), call_of(node, conv_grad).attributes
    if shape is None or shape[1] != 1 or attributes["group"] != 1:
        return False
    return is_fastest(sizes_of(dy), sizes_of(x), shape, **attributes)


def _expand(node: ir.Node, opset: int, names: Names) -> None:
    call, w = call_of(node, conv_grad), node.inputs[2]
    filters = None if w is None or w.shape is None else w.shape[0]
    if not isinstance(filters, int) or filters >= TILE:
        if not call.wanted[0]:
            return
        if any(call.wanted[1:]):
            _separate(node, call, names)
        call = replace(call, wanted=(True, False, False))
    op = Recorder(opset, names, node.name or f"{node.outputs[0].name}")
    put_in_place(node, [], op, record_body(op, call, node.inputs, f"{call.node} {conv_grad.name}"))


def _separate(node: ir.Node, call: Call, names: Names) -> None:
    """Compute dW and dB of a node by another one."""
    dx, graph = node.outputs[0], node.graph
    assert graph is not None
    rest = replace(call, wanted=(False, *call.wanted[1:]))
    attributes = [a for a in node.attributes.values() if a.name != CALL_ATTRIBUTE]
    attributes.append(ir.AttrString(CALL_ATTRIBUTE, rest.to_json()))
    new = ir.Node(node.domain, node.op_type, node.inputs, attributes, num_outputs=3, name=node.name)
    graph.insert_after(node, new)
    for old, value in zip(node.outputs, new.outputs, strict=True):
        value.name, value.type, value.shape = names.fresh(f"{old.name}"), old.type, old.shape
        if old is not dx:
            value.name, old.name = old.name, None
            ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
    # The kernel returns an empty tensor.
    new.outputs[0].shape = None if dx.type is None else ir.Shape([0])
