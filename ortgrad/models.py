"""Reading a model from whatever the caller has: ModelProto, bytes or path."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

import onnx
from google.protobuf.message import DecodeError

from ortgrad.call import EMPTY_PREFIX
from ortgrad.errors import ModelError
from ortgrad.registry import DOMAIN

# The versions of domains that a model does not import; onnxruntime takes the newest it knows.
ASSUMED_VERSIONS = {"": 23, "ai.onnx.ml": onnx.defs.onnx_ml_opset_version()}

ModelLike: TypeAlias = "onnx.ModelProto | bytes | str | os.PathLike[str]"


def load_model(model: ModelLike, *, external_data: bool = True) -> onnx.ModelProto:
    """The model as a ModelProto that imports the domains of its nodes.

    It is the caller's own object if that is one already.
    """
    if isinstance(model, onnx.ModelProto):
        return _with_imports(_checked(model, "the ModelProto"))
    if isinstance(model, bytes):
        return _with_imports(_checked(_parse(model, "the bytes"), "the bytes"))
    if not isinstance(model, (str, os.PathLike)):
        raise ModelError(f"a model is an onnx.ModelProto, bytes or a path, not {type(model).__name__}")
    path = Path(model)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read the model {str(path)!r}: {error.strerror}") from error
    proto = _checked(_parse(data, f"the file {str(path)!r}"), f"the file {str(path)!r}")
    if external_data:
        try:
            onnx.load_external_data_for_model(proto, str(path.parent))
        except (OSError, ValueError, onnx.checker.ValidationError) as error:
            raise ModelError(f"cannot read the external data of {str(path)!r}: {error}") from error
    return _with_imports(proto)


def imports_domain(model: onnx.ModelProto) -> bool:
    """Whether the model says which version of com.microsoft it means.

    onnxruntime fuses nodes to operators of that domain. If a model does not import it, and a library
    declares operators in it, as ours does, onnxruntime takes it for version 1000 and finds none of its own.
    """
    return any(opset.domain == DOMAIN for opset in model.opset_import)


def with_import(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model that imports com.microsoft."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.opset_import.add(domain=DOMAIN, version=1)
    return copy


def check_names(graph: onnx.GraphProto, outer: frozenset[str] = frozenset()) -> None:
    """Raise ModelError if a node or output of the graph reads a value that nothing computes."""
    known = {value.name for value in (*graph.input, *graph.initializer)} | outer
    known.update(tensor.values.name for tensor in graph.sparse_initializer)
    known.update(name for node in graph.node for name in node.output)
    for node in graph.node:
        for name in node.input:
            if name and name not in known and not name.startswith(EMPTY_PREFIX):
                where = node.name or next(iter(node.output), "")
                raise ModelError(
                    f"{node.op_type} node {where!r} reads {name!r}, which is nowhere in the model"
                )
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                check_names(inner, frozenset(known))
    for value in graph.output:
        if value.name not in known:
            raise ModelError(f"the output {value.name!r} is computed nowhere in the model")


def _parse(data: bytes, where: str) -> onnx.ModelProto:
    try:
        return onnx.ModelProto.FromString(data)
    except DecodeError as error:
        raise ModelError(f"there is no ONNX model in {where}: it cannot be parsed") from error


def _checked(model: onnx.ModelProto, where: str) -> onnx.ModelProto:
    if not model.opset_import or not model.HasField("graph"):
        raise ModelError(f"there is no ONNX model in {where}: graph or opset_import is missing")
    return model


def _with_imports(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, or a copy with the imports that onnxruntime assumes where one is missing."""
    if not any(_missing_imports(part) for part in (model, *model.functions)):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for part in (copy, *copy.functions):
        missing = _missing_imports(part)
        imports = [opset for opset in part.opset_import if opset.domain != "ai.onnx"]
        imports += [onnx.OperatorSetIdProto(domain=d, version=v) for d, v in missing.items()]
        del part.opset_import[:]
        part.opset_import.extend(imports)
    return copy


def _missing_imports(part: onnx.ModelProto | onnx.FunctionProto) -> dict[str, int]:
    imports = {opset.domain: opset.version for opset in part.opset_import}
    nodes = part.graph.node if isinstance(part, onnx.ModelProto) else part.node
    assumed = {domain: ASSUMED_VERSIONS.get(domain, 1) for domain in _domains(nodes)}
    if "ai.onnx" in imports:
        # Another name for "".
        assumed[""] = imports["ai.onnx"]
    return {domain: version for domain, version in assumed.items() if domain not in imports}


def _domains(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    found = set()
    for node in nodes:
        found.add("" if node.domain == "ai.onnx" else node.domain)
        for attribute in node.attribute:
            if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
                for graph in (attribute.g, *attribute.graphs):
                    found |= _domains(graph.node)
    return found
