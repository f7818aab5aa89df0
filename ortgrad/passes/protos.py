"""From a ModelProto to onnx-ir, where the passes work, and back."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from ortgrad.passes.inference import to_proto
from ortgrad.registry import DOMAIN

# Function overloads came with this version; the oldest onnxruntime that is supported reads it.
IR_VERSION = 10
# Before this version every initializer is an input too, and onnxruntime takes no values for it.
FIRST_WITH_CONSTANTS = 4


def read(source: onnx.ModelProto) -> ir.Model:
    """The model in onnx-ir, in a current IR version. Weights are not copied."""
    model = ir.from_proto(source)
    if model.ir_version < FIRST_WITH_CONSTANTS:
        for value in [value for value in model.graph.inputs if value.is_initializer()]:
            model.graph.inputs.remove(value)
    model.ir_version = max(model.ir_version, IR_VERSION)
    _own_constants(model)
    return model


def _own_constants(model: ir.Model) -> None:
    # onnx-ir names the tensor of a Constant when it is read, in the caller's proto.
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for node in graph.all_nodes():
            attribute = node.attributes.get("value")
            if node.op_type != "Constant" or attribute is None or attribute.is_ref():
                continue
            tensor = attribute.as_tensor()
            if tensor.dtype != ir.DataType.STRING:
                own = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)
                node.attributes["value"] = ir.AttrTensor("value", own)


def write(model: ir.Model) -> onnx.ModelProto:
    """The model as a ModelProto that loads with the op library registered as well as without it."""
    # See imports_domain in ortgrad.models.
    model.opset_imports.setdefault(DOMAIN, 1)
    return to_proto(model)
