"""Removes slices that take everything, which exporters write for `x[:, 0:]`."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from ortgrad.graph.traversal import all_nodes, constant_array, is_operator

# The end that exporters write for "up to the last element": no axis is that long.
_END = 2**31 - 1


def drop_whole_slices(model: ir.Model, kept: Collection[str]) -> ir.Model:
    """Remove slices that take everything, except for those whose results have the names `kept`."""
    for node in list(all_nodes(model.graph)):
        x, y = (node.inputs[0], node.outputs[0]) if _takes_everything(node) else (None, None)
        if x is not None and y is not None and not y.is_graph_output() and y.name not in kept:
            assert node.graph is not None
            y.replace_all_uses_with(x)
            node.graph.remove(node, safe=True)
    return model


def _takes_everything(node: ir.Node) -> bool:
    if not is_operator(node, "Slice") or len(node.inputs) < 3:
        return False
    starts, ends = (constant_array(value) for value in node.inputs[1:3])
    steps = node.inputs[4] if len(node.inputs) > 4 else None
    if starts is None or ends is None or (starts != 0).any() or (ends < _END).any():
        return False
    known = constant_array(steps)
    return steps is None or (known is not None and bool((known == 1).all()))
