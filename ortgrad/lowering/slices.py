"""Simplifies the gradients of slices.

The gradient of several slices that together cover an axis, such as the gates of a recurrent layer, is a sum
of padded tensors: their concatenation.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortgrad.graph.outputs import remove_nodes, replace_node
from ortgrad.graph.patterns import Pattern
from ortgrad.graph.traversal import all_nodes, constant_array, dimensions, only_reader

_PADDED = Pattern(lambda op, x, pads, axes: op.Pad(x, pads, None, op.either(axes, None)))


def join_slices(model: ir.Model) -> ir.Model:
    """Replace sums of padded tensors that do not overlap and leave no gap by a Concat."""
    for node in list(all_nodes(model.graph)):
        if node.domain == "" and node.op_type in ("Sum", "Add") and len(node.inputs) > 1:
            parts = _parts(node)
            if parts is not None:
                _replace(node, *parts)
    return model


def _parts(node: ir.Node) -> tuple[int, list[ir.Value]] | None:
    """Return the axis along which the terms of a sum follow one another, and the terms without padding."""
    found: list[tuple[int, int, int, ir.Value]] = []
    # The axis, and the sizes of the others: a sum could broadcast them.
    kinds: set[tuple[int, tuple[object, ...]]] = set()
    for term in node.inputs:
        part = _padded(term, node)
        if part is None:
            return None
        axis, before, after, value = part
        assert value.shape is not None
        length = value.shape[axis]
        if not isinstance(length, int) or length == 0:
            return None
        others = [dim for i, dim in enumerate(dimensions(value) or ()) if i != axis]
        if None in others:
            return None
        kinds.add((axis, tuple(others)))
        found.append((before, before + length, before + length + after, value))
    found.sort(key=lambda part: part[0])
    ends = [0, *(end for _, end, _, _ in found)]
    follow = all(begin == end for (begin, *_), end in zip(found, ends, strict=False))
    if len(kinds) > 1 or not follow or any(size != ends[-1] for _, _, size, _ in found):
        return None
    return kinds.pop()[0], [value for *_, value in found]


def _padded(term: ir.Value | None, user: ir.Node) -> tuple[int, int, int, ir.Value] | None:
    """Return the axis along which a term is padded with zeros, the number before and after, and of what."""
    pad = next(_PADDED.match(term), None)
    if term is None or pad is None or pad.root.graph is not user.graph or only_reader(term) is None:
        return None
    x, amounts, axes = pad.values["x"], constant_array(pad.values["pads"]), pad.values.get("axes")
    if x.shape is None or amounts is None or "mode" in pad.root.attributes:
        return None
    chosen = np.arange(len(x.shape)) if axes is None else constant_array(axes)
    if chosen is None or chosen.ndim != 1 or amounts.shape != (2 * chosen.size,):
        return None
    sides = amounts.reshape(2, -1)
    places = np.flatnonzero(sides.any(axis=0))
    if places.size != 1 or (sides < 0).any():
        return None
    (place,) = places
    return int(chosen[place]) % len(x.shape), int(sides[0, place]), int(sides[1, place]), x


def _replace(node: ir.Node, axis: int, values: list[ir.Value]) -> None:
    pads = [value.producer() for value in node.inputs if value is not None]
    joined = ir.node("Concat", values, {"axis": axis}, name=node.name)
    replace_node(node, [joined], [(node.outputs[0], joined.outputs[0])])
    remove_nodes(pad for pad in pads if pad is not None)
