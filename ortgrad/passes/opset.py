"""Convert models that are older than what the bodies and rules are written for."""

from __future__ import annotations

import onnx
from onnx import version_converter

from ortgrad.bodies import MINIMUM_OPSET
from ortgrad.errors import ModelError
from ortgrad.passes.complete import POOL_GRADIENTS
from ortgrad.registry import DOMAIN


def at_minimum_opset(source: onnx.ModelProto) -> onnx.ModelProto:
    """The model, converted with onnx's own converter if its opset is too old."""
    version = next((o.version for o in source.opset_import if o.domain in ("", "ai.onnx")), None)
    if version is not None and version >= MINIMUM_OPSET:
        return source
    model = onnx.ModelProto()
    model.CopyFrom(source)
    if version is None:
        model.opset_import.append(onnx.helper.make_opsetid("", MINIMUM_OPSET))
        return model
    # The converter takes MaxPoolGrad in the default domain for an operator that it should know.
    for node in model.graph.node:
        if node.op_type in POOL_GRADIENTS and node.domain in ("", "ai.onnx"):
            node.domain = DOMAIN
    try:
        return version_converter.convert_version(model, MINIMUM_OPSET)
    except RuntimeError as error:
        raise ModelError(
            f"the model has opset {version}, ortgrad needs {MINIMUM_OPSET}, and onnx's converter "
            f"cannot convert it: {error}"
        ) from error
