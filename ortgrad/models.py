"""Reading a model from whatever the caller has: ModelProto, bytes or path."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias

import onnx
from google.protobuf.message import DecodeError

from ortgrad.call import EMPTY_PREFIX
from ortgrad.errors import ModelError

ModelLike: TypeAlias = "onnx.ModelProto | bytes | str | os.PathLike[str]"


def load_model(model: ModelLike, *, external_data: bool = True) -> onnx.ModelProto:
    """The model as a ModelProto (the caller's own object if it is one already)."""
    if isinstance(model, onnx.ModelProto):
        return _checked(model, "the ModelProto")
    if isinstance(model, bytes):
        return _checked(_parse(model, "the bytes"), "the bytes")
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
    return proto


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
