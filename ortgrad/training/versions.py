"""Opset and IR version of the models that training writes."""

from __future__ import annotations

import onnx

from ortgrad.graph.protos import all_nodes

# The newest that onnxruntime-training 1.19.2 reads; onnx's may be too new for every onnxruntime.
NEWEST_OPSET, NEWEST_IR_VERSION = 21, 10


def limit_versions(model: onnx.ModelProto) -> None:
    """Lower opset and IR version to those that 1.19.2 reads, if the model means the same with them."""
    parts = [(model, model.graph.node), *((function, function.node) for function in model.functions)]
    imports = [o for part, _ in parts for o in part.opset_import if o.domain in ("", "ai.onnx")]
    newer = [opset for opset in imports if opset.version > NEWEST_OPSET]
    if newer:
        newest = max(opset.version for opset in newer)
        types = {node.op_type for _, nodes in parts for node in all_nodes(nodes) if not node.domain}
        if any(_first_version(name, newest) != _first_version(name, NEWEST_OPSET) for name in types):
            return
        for opset in newer:
            opset.version = NEWEST_OPSET
    model.ir_version = min(model.ir_version, NEWEST_IR_VERSION)


def _first_version(op_type: str, opset: int) -> int | None:
    """Return the first opset with the definition of an operator that holds in the given one, or None."""
    if not onnx.defs.has(op_type, opset):
        return None
    return int(onnx.defs.get_schema(op_type, opset).since_version)
