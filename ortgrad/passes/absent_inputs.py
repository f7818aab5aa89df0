"""Leave out inputs of Resize that are there in name only.

Exporters write an empty constant for the one of roi, scales and sizes that does not count. As soon as
such a constant can be fed, for being an input of the built model, it counts as given.
"""

from __future__ import annotations

import onnx_ir as ir


def drop_empty_inputs(model: ir.Model) -> ir.Model:
    """Take empty constants away from Resize nodes; the model must have a current opset."""
    for node in model.graph.all_nodes():
        if node.op_type != "Resize" or node.domain != "":
            continue
        for i, value in enumerate(node.inputs[1:], 1):
            tensor = None if value is None else ir.convenience.get_const_tensor(value)
            if tensor is not None and tensor.size == 0:
                node.replace_input_with(i, None)
    return model
