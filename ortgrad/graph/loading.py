"""Loading of models from a ModelProto, bytes or a path."""

from __future__ import annotations

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
from ortgrad.graph.tolerated import repaired
from ortgrad.graph.trials import refusal
from ortgrad.graph.validation import check_fields, check_graphs, refuse_internal_operators
from ortgrad.graph.versions import with_known_versions
from ortgrad.operators.declaration import CALL_ATTRIBUTE, DOMAIN, find_operator
from ortgrad.operators.schema import with_schemas

# Versions assumed for domains that a model does not import; onnxruntime assumes the newest that it has.
ASSUMED_VERSIONS = {"": 23, "ai.onnx.ml": onnx.defs.onnx_ml_opset_version()}

# In bytes: larger models are not copied to leave something out.
_LARGEST_COPY = 1 << 28
LARGEST_MESSAGE = (1 << 31) - 1  # protobuf's limit, in bytes
# The exceptions that onnx's checker, shape inference and version converter raise for an invalid model.
ONNX_ERRORS: tuple[type[Exception], ...] = (
    onnx.checker.ValidationError,
    onnx.shape_inference.InferenceError,
    onnx.version_converter.ConvertError,
    RuntimeError,
    IndexError,
    ValueError,
)

ModelLike: TypeAlias = "onnx.ModelProto | bytes | str | os.PathLike[str]"


def load_model(model: ModelLike, *, external_data: bool = True, bodies: bool = True) -> onnx.ModelProto:
    """Return the model as a validated ModelProto that imports the domains of its nodes.

    Its versions are those that onnxruntime takes, if it means the same in them. A ModelProto that needs no
    change is returned itself, not a copy. Without `bodies`, the bodies of gradient nodes are left out where
    this is cheap: they contain most nodes of a model with gradients.
    """
    if isinstance(model, onnx.ModelProto):
        model = _checked(model, "the ModelProto")
        if not bodies and _unneeded(model) and _weights_size(model.graph) <= _LARGEST_COPY:
            model = _without_bodies(copy_of(model))
        return _complete(model)
    if isinstance(model, bytes):
        return _complete(_checked(_parse(model, "the bytes", bodies), "the bytes"))
    if not isinstance(model, (str, os.PathLike)):
        raise ModelError(f"a model is an onnx.ModelProto, bytes or a path, not {type(model).__name__}")
    path = Path(model)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read the model {str(path)!r}: {error.strerror}") from error
    proto = _checked(_parse(data, f"the file {str(path)!r}", bodies), f"the file {str(path)!r}")
    if external_data:
        try:
            onnx.load_external_data_for_model(proto, str(path.parent))
        except (OSError, ValueError, RuntimeError, onnx.checker.ValidationError) as error:
            # onnx raises RuntimeError for an error of the C++ file system library.
            raise ModelError(f"cannot read the external data of {str(path)!r}: {one_line(error)}") from error
    return _complete(proto)


def _weights_size(graph: onnx.GraphProto) -> int:
    """Return the bytes of the initializers; ByteSize would write the whole model for that."""
    return sum(
        math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        for tensor in graph.initializer
    )


def imports_domain(model: onnx.ModelProto) -> bool:
    """Return whether the model imports com.microsoft.

    onnxruntime fuses nodes into operators of that domain. If a model does not import it, and a library such
    as ortgrad declares operators in it, onnxruntime assumes version 1000 and finds none of its own operators.
    """
    return any(opset.domain == DOMAIN for opset in model.opset_import)


def with_import(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of the model that imports com.microsoft."""
    copy = copy_of(model)
    copy.opset_import.add(domain=DOMAIN, version=1)
    return copy


@contextmanager
def diagnosing(model: onnx.ModelProto) -> Iterator[None]:
    """Within this context, raise ModelError for an unexpected exception if the model is invalid.

    An invalid model can make the passes fail in many ways. The ModelError says why onnx or onnxruntime
    refuses the model. If both accept it, the original exception is raised: it is due to a bug in ortgrad or
    in a user's rule.
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
    """Return why onnx or onnxruntime refuses the model; None if both accept it, or if it is too large."""
    if model.ByteSize() >= LARGEST_MESSAGE:
        return None
    try:
        with_schemas(onnx.checker.check_model, model)
        with_schemas(onnx.shape_inference.infer_shapes, model, check_type=True, strict_mode=True)
    except ONNX_ERRORS as complaint:
        return one_line(complaint)
    error = refusal(model)
    # An operator that onnxruntime does not implement does not make the model invalid.
    return None if error is None or "is not a registered" in str(error) else one_line(error)


def refused(error: Exception) -> ModelError:
    """Return the ModelError for a model that onnxruntime does not load."""
    return ModelError(f"onnxruntime does not load the model: {one_line(error)}")


def one_line(error: BaseException) -> str:
    """Return the text of an exception on one line, cut to 1000 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 1000 else f"{text[:1000]} ..."


def with_dense_initializers(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model, or a copy with dense instead of sparse initializers, which onnx-ir cannot hold."""
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


def _parse(data: bytes, where: str, bodies: bool) -> onnx.ModelProto:
    try:
        model = onnx.ModelProto.FromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"there is no ONNX model in {where}: it cannot be parsed") from error
    return model if bodies else _without_bodies(model)


def _without_bodies(model: onnx.ModelProto) -> onnx.ModelProto:
    """Remove functions that are nothing but bodies of complete gradient nodes, in place."""
    bodies = _unneeded(model)
    if bodies:
        kept = [f for f in model.functions if (f.domain, f.name, f.overload) not in bodies]
        del model.functions[:]
        model.functions.extend(kept)
    return model


def _unneeded(model: onnx.ModelProto) -> set[tuple[str, str, str]]:
    """Return the names of functions that only complete gradient nodes call."""
    bodies = {
        (f.domain, f.name, f.overload)
        for f in model.functions
        if f.overload and find_operator(f.name, f.domain) is not None
    }
    if bodies:
        others = [f.node for f in model.functions if (f.domain, f.name, f.overload) not in bodies]
        for node in (node for nodes in (model.graph.node, *others) for node in all_nodes(nodes)):
            key = (node.domain, node.op_type, node.overload)
            if key in bodies and not any(a.name == CALL_ATTRIBUTE for a in node.attribute):
                bodies.remove(key)
    return bodies


def _checked(model: onnx.ModelProto, where: str) -> onnx.ModelProto:
    if not model.opset_import or not model.HasField("graph"):
        raise ModelError(f"there is no ONNX model in {where}: graph or opset_import is missing")
    check_fields(model)
    refuse_internal_operators(model)
    return model


def _complete(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with imports and versions that onnxruntime takes; ModelError if it is invalid."""
    model = repaired(with_known_versions(_with_imports(model)))
    check_graphs(model)
    return model


def _with_imports(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model, or a copy with the imports that onnxruntime assumes for missing ones."""
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
        # "ai.onnx" is another name for "".
        assumed[""] = imports["ai.onnx"]
    return {domain: version for domain, version in assumed.items() if domain not in imports}
