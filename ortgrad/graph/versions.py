"""IR version and opsets of models: lowered to those that the installed onnxruntime takes.

onnx is often newer than onnxruntime, and writes its own newest versions by default. onnxruntime refuses them
whatever the model holds, although most models mean the same in an older version.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import onnx
from onnx import TensorProto, helper

from ortgrad.graph.protos import all_graphs, all_nodes, copy_of, declared_values
from ortgrad.graph.trials import refusal

# What the newest IR versions have added: element types, and nothing else. A model of a later version may hold
# fields that onnxruntime would silently ignore, so it keeps its version.
_ADDED_TYPES = {12: {24}, 13: {25, 26}, 14: {27, 28}}  # FLOAT8E8M0; UINT2, INT2; FLOAT6E2M3, FLOAT6E3M2
_LAST_KNOWN = max(_ADDED_TYPES)
_OLDEST_TRIED = 8

Part = onnx.ModelProto | onnx.FunctionProto


def with_known_versions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model, or a copy with versions that onnxruntime takes, if it means the same in them."""
    if not _may_be_too_new(model):
        return model
    lowered = copy_of(model)
    lower_opsets(lowered, "", newest_opset(""))
    lower_opsets(lowered, "ai.onnx.ml", newest_opset("ai.onnx.ml"))
    newest = newest_ir_version()
    if newest < lowered.ir_version <= _LAST_KNOWN:
        added = set().union(*(types for version, types in _ADDED_TYPES.items() if version > newest))
        if not added & set(_element_types(lowered)):
            lowered.ir_version = newest
    return lowered


def _may_be_too_new(model: onnx.ModelProto) -> bool:
    """Return whether a version of the model is newer than what every supported onnxruntime takes."""
    # Probing takes a session, so it waits for a model that needs it.
    if model.ir_version > 10 and model.ir_version > newest_ir_version():
        return True
    oldest = {"": 23, "ai.onnx.ml": 5}
    return any(
        opset.version > oldest[domain] and opset.version > newest_opset(domain)
        for part in (model, *model.functions)
        for opset in part.opset_import
        if (domain := _domain(opset.domain)) in oldest
    )


def lower_opsets(model: onnx.ModelProto, domain: str, newest: int) -> bool:
    """Lower the imports of a domain to a version, in place, unless an operator in use has changed since.

    Return whether all of them are at most that version then.
    """
    lowered = []
    for part in (model, *model.functions):
        nodes = part.graph.node if isinstance(part, onnx.ModelProto) else part.node
        used = {node.op_type for node in all_nodes(nodes) if _domain(node.domain) == domain}
        for opset in part.opset_import:
            if _domain(opset.domain) == domain and opset.version > newest:
                if any(_since(name, opset.version, domain) != _since(name, newest, domain) for name in used):
                    return False
                lowered.append(opset)
    for opset in lowered:
        opset.version = newest
    return True


def _since(op_type: str, opset: int, domain: str) -> int | None:
    """Return the first opset with the definition of an operator that holds in the given one, or None."""
    if not onnx.defs.has(op_type, opset, domain):
        return None
    return int(onnx.defs.get_schema(op_type, opset, domain).since_version)


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _element_types(model: onnx.ModelProto) -> Iterator[int]:
    """Yield the element types that a model names: of tensors, of values and in attributes (Cast's `to`)."""
    bodies = [f.node for f in model.functions]
    for function in model.functions:
        yield from (_element_type(value.type) for value in function.value_info)
    for graph in all_graphs(model.graph):
        yield from (_element_type(value.type) for value in declared_values(graph))
        yield from (tensor.data_type for tensor in graph.initializer)
        yield from (tensor.values.data_type for tensor in graph.sparse_initializer)
    for nodes in (model.graph.node, *bodies):
        for node in all_nodes(nodes):
            for attribute in node.attribute:
                if attribute.name in ("to", "dtype", "output_dtype"):
                    yield attribute.i
                yield attribute.t.data_type
                yield from (tensor.data_type for tensor in attribute.tensors)


def _element_type(type_: onnx.TypeProto) -> int:
    while (kind := type_.WhichOneof("value")) in ("sequence_type", "optional_type", "map_type"):
        inner = getattr(type_, kind)
        type_ = inner.value_type if kind == "map_type" else inner.elem_type
    return int(getattr(getattr(type_, kind), "elem_type", 0)) if kind else 0


@functools.cache
def newest_ir_version() -> int:
    """Return the newest IR version that onnxruntime takes, as far as onnx has one."""
    return next((v for v in range(onnx.IR_VERSION, _OLDEST_TRIED, -1) if _is_taken(v, "", 1)), _OLDEST_TRIED)


@functools.cache
def newest_opset(domain: str) -> int:
    """Return the newest opset of a domain that onnxruntime takes, as far as onnx has one."""
    known = onnx.defs.onnx_ml_opset_version() if domain else onnx.defs.onnx_opset_version()
    return next((v for v in range(known, 1, -1) if _is_taken(_OLDEST_TRIED, domain, v)), 1)


def _is_taken(ir_version: int, domain: str, opset: int) -> bool:
    """Return whether onnxruntime loads a model of these versions that holds nothing else."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    graph = helper.make_graph([], "versions", [value], [value])
    imports = [helper.make_opsetid("", 18)] if domain else []
    model = helper.make_model(
        graph, opset_imports=[*imports, helper.make_opsetid(domain, opset)], ir_version=ir_version
    )
    return refusal(model) is None
