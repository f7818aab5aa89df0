"""Rewrites Pad nodes with `axes` to pads for all axes.

onnxruntime moves a Transpose past a Pad without adapting its `axes`. With the nodes of the gradient, a Pad
may be between two transposes where it was not before.
"""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.graph.gradient_nodes import put_in_place
from ortgrad.graph.names import Names
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import all_nodes, is_standard
from ortgrad.shapes.inference import infer_types


def pad_all_axes(model: ir.Model) -> ir.Model:
    """Replace every Pad and CenterCropPad with `axes`.

    Values keep their names.
    """
    chosen = [node for node in all_nodes(model.graph) if _has_axes(node)]
    if not chosen:
        return model
    names = Names.of(model)
    for node in chosen:
        op = Recorder(model.opset_imports[""], names, node.name or f"{node.outputs[0].name}")
        put_in_place(node, [], op, [_padded(op, node) if node.op_type == "Pad" else _centred(op, node)])
    infer_types(model)
    return model


def _has_axes(node: ir.Node) -> bool:
    if not is_standard(node):
        return False
    if node.op_type == "Pad":
        return len(node.inputs) > 3 and node.inputs[3] is not None
    return node.op_type == "CenterCropPad" and "axes" in node.attributes


def _padded(op: Recorder, node: ir.Node) -> ir.Value:
    x, pads, constant, axes = node.inputs
    assert x is not None
    mode = node.attributes.get_string("mode")
    return op.Pad(x, pads, constant, axes, mode=mode)


def _centred(op: Recorder, node: ir.Node) -> ir.Value:
    """Return what CenterCropPad computes, as a single Pad; negative pads crop."""
    x, shape = node.inputs
    assert x is not None
    axes = list(node.attributes["axes"].as_ints())
    more = op.Sub(op.Cast(shape, to=ir.DataType.INT64), op.Gather(op.shape_of(x), axes))
    # Integer division rounds towards 0, which is what both cropping and padding need.
    before = op.Div(more, 2)
    return op.Pad(x, op.Concat(before, op.Sub(more, before), axis=0), None, axes)
