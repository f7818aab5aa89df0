"""Order, and nothing that nobody reads."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from ortgrad.errors import ModelError


def sort(model: ir.Model) -> ir.Model:
    """Have every node stand behind those whose results it reads."""
    try:
        model.graph.sort()
    except ValueError as error:
        raise ModelError("the nodes of the model form a cycle") from error
    return model


def remove_unused(model: ir.Model) -> ir.Model:
    """Take nodes and opset imports away that nothing depends on."""
    RemoveUnusedNodesPass()(model)
    for node in model.graph.all_nodes():
        # The pass takes away empty inputs at the end, of which Loop needs two.
        if node.op_type == "Loop" and len(node.inputs) < 2:
            node.resize_inputs(2)
    RemoveUnusedOpsetsPass()(model)
    return model
