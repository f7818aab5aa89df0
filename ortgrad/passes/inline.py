"""Inlines model-local functions."""

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
    """Inline the functions that `criteria` selects, converting those that are written for another opset."""
    chosen = [function for function in model.functions.values() if criteria(function)]
    if not chosen:
        return model
    # A model whose nodes are all calls of functions need not import the default domain.
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
    """Inline all functions with onnx, which also converts them to the model's opset."""
    typed = with_schemas(onnx.shape_inference.infer_shapes, to_proto(model))
    inlined = with_schemas(onnx.inliner.inline_local_functions, typed, convert_version=True)
    # Dropped, because onnx infers wrong sizes for some pools (see ortgrad.graph.pool_sizes).
    del inlined.graph.value_info[:]
    return from_proto(inlined)
