"""Inlines model-local functions."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx.inliner
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from ortgrad.errors import ModelError
from ortgrad.graph.names import Names
from ortgrad.graph.schema_functions import unchanged
from ortgrad.graph.serialization import refill, to_proto
from ortgrad.graph.traversal import all_nodes
from ortgrad.operators.schema import with_schemas


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
                return _convert(model)
        InlinePass(criteria=_with_free_names(model, criteria))(model)
    except (ValueError, RuntimeError, ir.passes.PreconditionError) as error:
        raise ModelError(f"a function of the model cannot be inlined: {error}") from error
    return model


def _with_free_names(
    model: ir.Model, criteria: Callable[[ir.Function], bool]
) -> Callable[[ir.Function], bool]:
    """Return the criteria, with names that are free for the next call of a function that is selected.

    The pass asks before each call. By itself it would search for a free name from the number 2 on, in each
    call.
    """
    graph = model.graph
    values = [value for node in all_nodes(graph) for value in node.outputs]
    names = Names(v.name for v in (*graph.inputs, *graph.initializers.values(), *values) if v.name)
    for node in all_nodes(graph):
        names.fresh(node.name or "node")
    own: dict[ir.Function, list[tuple[ir.Value | ir.Node, str]]] = {}

    def selects(function: ir.Function) -> bool:
        if not criteria(function):
            return False
        if function not in own:
            own[function] = [(node, node.name or "node") for node in function]
            results = [value for node in function for value in node.outputs]
            own[function] += [(value, value.name) for value in results if value.name]
        for each, name in own[function]:
            each.name = names.fresh(name)
        return True

    return selects


def _convert(model: ir.Model) -> ir.Model:
    """Inline all functions with onnx, which also converts them to the model's opset."""
    typed = with_schemas(onnx.shape_inference.infer_shapes, to_proto(model))
    inlined = with_schemas(onnx.inliner.inline_local_functions, typed, convert_version=True)
    # Dropped, because onnx infers wrong sizes for some pools (see ortgrad.shapes.pool_sizes).
    del inlined.graph.value_info[:]
    return refill(model, inlined)
