"""Removes empty constants from the inputs of Resize.

Exporters write an empty constant for an unused roi, scales or sizes. If such a constant became an input of
the built model, which can be fed, onnxruntime would treat it as given.
"""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.graph.traversal import all_nodes, is_operator


def drop_empty_inputs(model: ir.Model) -> ir.Model:
    """Make inputs of Resize that are empty constants absent; the model must have the minimum opset."""
    for node in all_nodes(model.graph):
        if not is_operator(node, "Resize"):
            continue
        for i, value in enumerate(node.inputs[1:], 1):
            tensor = None if value is None else ir.convenience.get_const_tensor(value)
            if tensor is not None and tensor.size == 0:
                node.replace_input_with(i, None)
    return model
