"""Bring the nodes of model-local functions to the surface."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx.inliner
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from ortgrad.errors import ModelError
from ortgrad.graph.serialization import from_proto, to_proto
from ortgrad.operators.schema import with_schemas
from ortgrad.passes.schema_functions import unchanged


def inline(model: ir.Model, criteria: Callable[[ir.Function], bool]) -> ir.Model:
    """The model without the functions that `criteria` picks, also those written for another opset."""
    chosen = [function for function in model.functions.values() if criteria(function)]
    if not chosen:
        return model
    # A model may consist of calls alone.
    newest = max(function.opset_imports.get("", 1) for function in chosen)
    version = model.opset_imports.setdefault("", newest)
    try:
        for function in chosen:
            own = function.opset_imports.get("", version)
            if unchanged(function.graph, own, version):
                function.opset_imports[""] = version
            else:
                return _converted(model)
        InlinePass(criteria=criteria)(model)
    except (ValueError, RuntimeError, ir.passes.PreconditionError) as error:
        raise ModelError(f"a function of the model cannot be inlined: {error}") from error
    return model


def _converted(model: ir.Model) -> ir.Model:
    """All functions inlined by onnx, which converts them to the model's opset on the way."""
    typed = with_schemas(onnx.shape_inference.infer_shapes, to_proto(model))
    inlined = with_schemas(onnx.inliner.inline_local_functions, typed, convert_version=True)
    # For the inference that knows how large pools are.
    del inlined.graph.value_info[:]
    return from_proto(inlined)
