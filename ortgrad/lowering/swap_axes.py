"""Replaces transpositions that swap two axes by an operator with a compiled kernel."""

from __future__ import annotations

import math

import onnx_ir as ir

from ortgrad.compiled.functions import TILE
from ortgrad.graph.names import Names
from ortgrad.graph.traversal import is_operator
from ortgrad.lowering.constants import computed_nodes
from ortgrad.lowering.internal_operators import KERNEL_TYPES, become
from ortgrad.ops.swap_axes import swap_axes, swapped


def use_swap_axes(model: ir.Model) -> ir.Model:
    """Replace nodes of Transpose that swap two neighbouring axes and leave runs of elements together."""
    names = Names.later(model)
    for node in computed_nodes(model):
        axis = _axis(node) if is_operator(node, "Transpose") else None
        if axis is not None:
            node.attributes.clear()
            node.attributes.add(ir.AttrInt64("axis", axis))
            become(model, node, swap_axes, names)
    return model


def _axis(node: ir.Node) -> int | None:
    """Return the first of the two axes that change places, if the node is supported."""
    x, order = node.inputs[0], list(node.attributes.get_ints("perm", ()))
    if x is None or x.dtype not in KERNEL_TYPES or x.shape is None or len(order) < 3:
        return None
    axis = next((i for i, k in enumerate(order[:-2]) if k != i), None)
    if axis is None or order != swapped(len(order), axis):
        return None
    sizes = [size for size in list(x.shape)[axis + 2 :] if isinstance(size, int)]
    run = math.prod(sizes)
    known = len(sizes) == len(order) - axis - 2
    return axis if known and run > 0 and run % TILE == 0 else None
