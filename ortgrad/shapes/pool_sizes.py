"""Corrects the inferred output sizes of pools with ceil_mode.

Up to opset 21, onnx's shape inference counts a last window that starts behind the input and its head padding
and covers only padding. onnxruntime skips it when it runs the pool, but makes the same mistake when it loads
a model.
"""

from __future__ import annotations

from typing import Any

import onnx

from ortgrad.graph.protos import all_nodes

POOLS = ("MaxPool", "AveragePool", "LpPool")


def round_sizes_down(graph: onnx.GraphProto) -> None:
    """Replace ceil_mode by pads that give the same output sizes, in place, for shape inference only."""
    for node in all_nodes(graph.node):
        if node.op_type in POOLS and node.domain in ("", "ai.onnx"):
            _round_down(node)


def _round_down(node: onnx.NodeProto) -> None:
    given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if not a.ref_attr_name}
    if not given.get("ceil_mode"):
        return
    auto_pad = given.get("auto_pad", b"NOTSET")
    if auto_pad in (b"SAME_UPPER", b"SAME_LOWER"):
        # SAME determines the output size, whatever ceil_mode is.
        _replace(node, ceil_mode=0)
        return
    kernel = given.get("kernel_shape", [])
    rank = len(kernel)
    strides, dilations = (given.get(name) or [1] * rank for name in ("strides", "dilations"))
    pads = (given.get("pads") if auto_pad == b"NOTSET" else None) or [0] * 2 * rank
    if not rank or len(strides) != rank or len(dilations) != rank or len(pads) != 2 * rank:
        return  # invalid; onnx reports it
    # Windows start in the input or its head padding, at most one stride after the last window that fits. The
    # tail padding is extended by what that window needs.
    needed = [(k - 1) * dilation for k, dilation in zip(kernel, dilations, strict=True)]
    tails = [tail + stride - 1 for tail, stride in zip(pads[rank:], strides, strict=True)]
    if all(tail <= need for tail, need in zip(tails, needed, strict=True)):
        return  # onnx infers the right size, also for an input that is too small
    tails = [min(*pair) for pair in zip(tails, needed, strict=True)]
    _replace(node, ceil_mode=0, auto_pad="NOTSET", pads=[*pads[:rank], *tails])


def _replace(node: onnx.NodeProto, **attributes: Any) -> None:
    kept = [a for a in node.attribute if a.name not in attributes]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.attribute.extend(onnx.helper.make_attribute(*item) for item in attributes.items())
