"""Convert models that are older than what the bodies and rules are written for."""

from __future__ import annotations

import onnx_ir as ir
from onnx import version_converter
from onnx_ir.passes.common import InlinePass

from ortgrad.bodies import MINIMUM_OPSET
from ortgrad.errors import ModelError
from ortgrad.passes.complete import infer_types


def at_minimum_opset(model: ir.Model) -> ir.Model:
    """The model, converted with onnx's own converter if its opset is too old."""
    version = model.opset_imports.setdefault("", MINIMUM_OPSET)
    if version >= MINIMUM_OPSET:
        return model
    # The converter would drop them.
    InlinePass()(model)
    try:
        converted = version_converter.convert_version(ir.to_proto(model), MINIMUM_OPSET)
    except RuntimeError as error:
        raise ModelError(
            f"the model has opset {version}, ortgrad needs {MINIMUM_OPSET}, and onnx's converter "
            f"cannot convert it: {error}"
        ) from error
    model = ir.from_proto(converted)
    infer_types(model)
    return model
