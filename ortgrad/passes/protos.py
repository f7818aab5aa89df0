"""From a ModelProto to onnx-ir, where the passes work, and back."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from ortgrad.errors import ModelError
from ortgrad.models import one_line, with_dense_initializers
from ortgrad.passes.inference import from_proto, is_known, to_proto
from ortgrad.registry import DOMAIN

# Function overloads came with this version; the oldest onnxruntime that is supported reads it.
IR_VERSION = 10
# Before this version every initializer is an input too, and onnxruntime takes no values for it.
FIRST_WITH_CONSTANTS = 4


def read(source: onnx.ModelProto) -> ir.Model:
    """The model in onnx-ir, in a current IR version. Weights are not copied."""
    try:
        model = from_proto(with_dense_initializers(source))
    except ir.serde.SerdeError as error:
        raise ModelError(f"the model cannot be read: {_reason(error)}") from error
    if model.ir_version < FIRST_WITH_CONSTANTS:
        for value in [value for value in model.graph.inputs if value.is_initializer()]:
            model.graph.inputs.remove(value)
    model.ir_version = max(model.ir_version, IR_VERSION)
    return model


def write(model: ir.Model, source: onnx.ModelProto) -> onnx.ModelProto:
    """The model as a ModelProto that loads with the op library registered as well as without it.

    `source` is what was read; types that onnx-ir knows nothing of are taken from there.
    """
    # See imports_domain in ortgrad.models.
    model.opset_imports.setdefault(DOMAIN, 1)
    written = to_proto(model)
    foreign = {v.name: v.type for v in (*source.graph.input, *source.graph.output) if not is_known(v.type)}
    for value in (*written.graph.input, *written.graph.output):
        if value.name in foreign:
            value.type.CopyFrom(foreign[value.name])
    return written


def _reason(error: BaseException) -> str:
    """What is behind an error of onnx-ir's, which itself shows the whole model."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(error)
