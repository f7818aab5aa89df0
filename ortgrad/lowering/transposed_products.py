"""Replaces products with a transposed matrix by an operator with a compiled kernel."""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.graph.names import Names
from ortgrad.graph.traversal import is_operator
from ortgrad.lowering.constants import computed_nodes
from ortgrad.lowering.internal_operators import KERNEL_TYPES, become
from ortgrad.ops.transposed_product import FEWEST_TERMS, transposed_product

# With smaller results, Gemm copies hardly more than the transposition does.
_LARGER, _SMALLER = 192, 48


def use_transposed_products(model: ir.Model) -> ir.Model:
    """Replace large nodes of Gemm that only multiply, with their first input transposed."""
    names = Names.later(model)
    for node in computed_nodes(model):
        if is_operator(node, "Gemm") and _is_supported(node):
            node.attributes.clear()
            node.resize_inputs(2)
            become(model, node, transposed_product, names)
    return model


def _is_supported(node: ir.Node) -> bool:
    a, b = node.inputs[:2]
    integers, floats = node.attributes.get_int, node.attributes.get_float
    if a is None or b is None or a.dtype not in KERNEL_TYPES or a.shape is None or b.shape is None:
        return False
    (terms, rows), columns = a.shape, b.shape[1]
    return (
        integers("transA", 0) == 1
        and integers("transB", 0) == 0
        and floats("alpha", 1.0) == 1.0
        and (len(node.inputs) < 3 or node.inputs[2] is None)
        and isinstance(rows, int)
        and isinstance(columns, int)
        and max(rows, columns) >= _LARGER
        and min(rows, columns) >= _SMALLER
        and not (isinstance(terms, int) and terms < FEWEST_TERMS)
    )
