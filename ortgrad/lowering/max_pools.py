"""Replaces MaxPool with indices by an operator with a compiled kernel."""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.graph.names import Names
from ortgrad.graph.traversal import is_operator
from ortgrad.lowering.constants import computed_nodes
from ortgrad.lowering.internal_operators import KERNEL_TYPES, become
from ortgrad.ops.max_pool import max_pool_with_indices


def use_max_pool(model: ir.Model) -> ir.Model:
    """Replace nodes of MaxPool whose indices are used, unless they have dilations or count by columns."""
    names = Names.later(model)
    for node in computed_nodes(model):
        if is_operator(node, "MaxPool") and _is_supported(node):
            for name in ("dilations", "storage_order"):
                node.attributes.pop(name, None)
            become(model, node, max_pool_with_indices, names)
    return model


def _is_supported(node: ir.Node) -> bool:
    indices = node.outputs[1] if len(node.outputs) > 1 else None
    if indices is None or not (indices.uses() or indices.is_graph_output()):
        return False
    x, kernel = node.inputs[0], list(node.attributes.get_ints("kernel_shape", ()))
    strides = list(node.attributes.get_ints("strides", ())) or [1] * len(kernel)
    dilations, pads = node.attributes.get_ints("dilations", ()), node.attributes.get_ints("pads", ())
    auto_pad = node.attributes.get_string("auto_pad", "NOTSET")
    return (
        x is not None
        and x.dtype in KERNEL_TYPES
        and 1 <= len(kernel) <= 3
        and all(d == 1 for d in dilations)
        and node.attributes.get_int("storage_order", 0) == 0
        # onnxruntime refuses padding that fills a window, and crops X for strides beyond the kernel.
        and all(p < k for p, k in zip(pads, kernel * 2, strict=False))
        and not (auto_pad.startswith("SAME") and any(s > k for s, k in zip(strides, kernel, strict=False)))
    )
