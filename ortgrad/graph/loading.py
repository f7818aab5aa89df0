"""Reading a model from whatever the caller has: ModelProto, bytes or path."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import numpy_helper

from ortgrad.errors import ModelError, OrtgradError
from ortgrad.graph.protos import all_graphs, all_nodes, copy_of
from ortgrad.graph.validation import check_fields, check_graphs
from ortgrad.operators.declaration import DOMAIN

# The versions of domains that a model does not import; onnxruntime takes the newest it knows.
ASSUMED_VERSIONS = {"": 23, "ai.onnx.ml": onnx.defs.onnx_ml_opset_version()}

LARGEST_MESSAGE = (1 << 31) - 1  # bytes that protobuf writes
# What onnx's checker, shape inference and version converter raise for a model that they refuse.
ONNX_ERRORS: tuple[type[Exception], ...] = (
    onnx.checker.ValidationError,
    onnx.shape_inference.InferenceError,
    onnx.version_converter.ConvertError,
    RuntimeError,
    IndexError,
    ValueError,
)

ModelLike: TypeAlias = "onnx.ModelProto | bytes | str | os.PathLike[str]"


def load_model(model: ModelLike, *, external_data: bool = True) -> onnx.ModelProto:
    """The model as a ModelProto that imports the domains of its nodes.

    It is the caller's own object if that is one already.
    """
    if isinstance(model, onnx.ModelProto):
        return _complete(_checked(model, "the ModelProto"))
    if isinstance(model, bytes):
        return _complete(_checked(_parse(model, "the bytes"), "the bytes"))
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
        except (OSError, ValueError, RuntimeError, onnx.checker.ValidationError) as error:
            # RuntimeError is what onnx makes of an error of C++'s file system library.
            raise ModelError(f"cannot read the external data of {str(path)!r}: {one_line(error)}") from error
    return _complete(proto)


def imports_domain(model: onnx.ModelProto) -> bool:
    """Whether the model says which version of com.microsoft it means.

    onnxruntime fuses nodes to operators of that domain. If a model does not import it, and a library
    declares operators in it, as ours does, onnxruntime takes it for version 1000 and finds none of its own.
    """
    return any(opset.domain == DOMAIN for opset in model.opset_import)


def with_import(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model that imports com.microsoft."""
    copy = copy_of(model)
    copy.opset_import.add(domain=DOMAIN, version=1)
    return copy


@contextmanager
def judging(model: onnx.ModelProto) -> Iterator[None]:
    """Say what is wrong with the model where working on it fails in an unforeseen way.

    What an invalid model makes of the code behind this cannot all be foreseen, so the model is judged by
    onnx, and by onnxruntime if it is one for it. If they find nothing, the exception is passed on: that is
    an error of ours, or of a rule from elsewhere.
    """
    try:
        yield
    except (OrtgradError, MemoryError):
        raise
    except Exception as error:
        complaint = _complaint(model)
        if complaint is None:
            raise
        raise ModelError(
            f"the model is not valid: {complaint} (found after {type(error).__name__}: {one_line(error)})"
        ) from error


def _complaint(model: onnx.ModelProto) -> str | None:
    """Why onnx or onnxruntime refuses the model; None if they do not, or if it is too large for them."""
    from ortgrad.operators.schema import with_schemas

    if model.ByteSize() >= LARGEST_MESSAGE:
        return None
    try:
        with_schemas(onnx.checker.check_model, model)
        with_schemas(onnx.shape_inference.infer_shapes, model, check_type=True, strict_mode=True)
    except ONNX_ERRORS as error:
        return one_line(error)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except onnxruntime_errors() as error:
        # That it lacks an operator says nothing about the model.
        return None if "is not a registered" in str(error) else one_line(error)
    return None


@functools.cache
def onnxruntime_errors() -> tuple[type[Exception], ...]:
    """The exceptions that onnxruntime makes of its statuses; they have no base class of their own."""
    import onnxruntime.capi.onnxruntime_pybind11_state as state

    return tuple(e for e in vars(state).values() if isinstance(e, type) and issubclass(e, Exception))


def refused(error: Exception) -> ModelError:
    """The error for a model that onnxruntime does not load, with its text."""
    return ModelError(f"onnxruntime does not load the model: {one_line(error)}")


def one_line(error: BaseException) -> str:
    """The text of an exception on one line, not too long to read."""
    text = " ".join(str(error).split())
    return text if len(text) <= 1000 else f"{text[:1000]} ..."


def with_dense_initializers(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, or a copy without sparse initializers, which onnx-ir has no place for."""
    if not any(graph.sparse_initializer for graph in all_graphs(model.graph)):
        return model
    copy = copy_of(model)
    for graph in all_graphs(copy.graph):
        graph.initializer.extend(_dense(tensor) for tensor in graph.sparse_initializer)
        del graph.sparse_initializer[:]
    return copy


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    name, dims = sparse.values.name, list(sparse.dims)
    values, places = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    if math.prod(dims) * values.itemsize > LARGEST_MESSAGE:
        raise ModelError(
            f"the sparse initializer {name!r} of shape {dims} takes more than 2 GB when it is dense"
        )
    dense = np.zeros(dims, values.dtype)
    try:
        if places.ndim == 1:
            dense.reshape(-1)[places] = values.reshape(-1)
        else:
            dense[tuple(places.T)] = values.reshape(-1)
    except IndexError as error:
        raise ModelError(f"the sparse initializer {name!r} of shape {dims}: {error}") from error
    return numpy_helper.from_array(dense, name)


def _parse(data: bytes, where: str) -> onnx.ModelProto:
    try:
        return onnx.ModelProto.FromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"there is no ONNX model in {where}: it cannot be parsed") from error


def _checked(model: onnx.ModelProto, where: str) -> onnx.ModelProto:
    if not model.opset_import or not model.HasField("graph"):
        raise ModelError(f"there is no ONNX model in {where}: graph or opset_import is missing")
    check_fields(model)
    return model


def _complete(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with all its imports, and nothing wrong with it that can be seen."""
    model = _with_imports(model)
    check_graphs(model)
    return model


def _with_imports(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, or a copy with the imports that onnxruntime assumes where one is missing."""
    if not any(_missing_imports(part) for part in (model, *model.functions)):
        return model
    copy = copy_of(model)
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
    domains = {"" if node.domain == "ai.onnx" else node.domain for node in all_nodes(nodes)}
    assumed = {domain: ASSUMED_VERSIONS.get(domain, 1) for domain in domains}
    if "ai.onnx" in imports:
        # Another name for "".
        assumed[""] = imports["ai.onnx"]
    return {domain: version for domain, version in assumed.items() if domain not in imports}
