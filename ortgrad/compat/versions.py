"""Opset and IR version of the models that training writes."""

from __future__ import annotations

import onnx

from ortgrad.graph.versions import lower_opsets

# The newest that onnxruntime-training 1.19.2 reads; onnx's may be too new for every onnxruntime.
NEWEST_OPSET, NEWEST_IR_VERSION = 21, 10


def limit_versions(model: onnx.ModelProto) -> None:
    """Lower opset and IR version to those that 1.19.2 reads, if the model means the same with them."""
    if lower_opsets(model, "", NEWEST_OPSET):
        model.ir_version = min(model.ir_version, NEWEST_IR_VERSION)
