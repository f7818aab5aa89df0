"""Conversion between ModelProto and the onnx-ir models on which the passes work."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx_ir as ir

from ortgrad.errors import ModelError
from ortgrad.graph import protos
from ortgrad.graph.loading import one_line, with_dense_initializers
from ortgrad.graph.portable_calls import restore_gradient_nodes
from ortgrad.graph.protos import FIRST_WITH_CONSTANTS, copy_of, declared_values
from ortgrad.graph.traversal import all_graphs
from ortgrad.operators.declaration import DOMAIN

# The first version with function overloads; the oldest supported onnxruntime reads it.
IR_VERSION = 10


def read(source: onnx.ModelProto) -> ir.Model:
    """Convert the model to onnx-ir, with IR version 10 or newer. Weights are not copied."""
    try:
        model = from_proto(with_dense_initializers(source))
    except ir.serde.SerdeError as error:
        raise ModelError(f"the model cannot be read: {_reason(error)}") from error
    if model.ir_version < FIRST_WITH_CONSTANTS:
        for value in [value for value in model.graph.inputs if value.is_initializer()]:
            model.graph.inputs.remove(value)
    model.ir_version = max(model.ir_version, IR_VERSION)
    restore_gradient_nodes(model)
    _open_negative_sizes(model)
    _own_names(model)
    return model


def _open_negative_sizes(model: ir.Model) -> None:
    """Make negative sizes unknown. Exporters write -1 for an unknown size; onnx would compute with it."""
    for graph in all_graphs(model.graph):
        for value in (*graph.inputs, *(value for node in graph for value in node.outputs)):
            if value.shape is not None and any(isinstance(dim, int) and dim < 0 for dim in value.shape):
                dims = [None if isinstance(dim, int) and dim < 0 else dim for dim in value.shape]
                value.shape = ir.Shape(dims)


def _own_names(model: ir.Model) -> None:
    """Wrap tensors of the caller's proto, so that renaming a value does not rename the caller's tensor."""
    bodies = [graph for f in model.functions.values() for graph in all_graphs(f.graph)]
    for graph in (*all_graphs(model.graph), *bodies):
        for value in graph.initializers.values():
            if value.const_value is not None:
                value.const_value = _with_own_name(value.const_value)
        for node in graph:
            tensor = node.attributes.get("value") if node.op_type == "Constant" else None
            if tensor is not None and not tensor.is_ref():
                node.attributes["value"] = ir.AttrTensor("value", _with_own_name(tensor.value))


def _with_own_name(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    # onnx-ir already wraps external data and strings in objects that hold the name themselves.
    if not isinstance(tensor, ir.TensorProtoTensor) or tensor.dtype == ir.DataType.STRING:
        return tensor
    return ir.LazyTensor(lambda: tensor, tensor.dtype, tensor.shape, name=tensor.name)


def write(model: ir.Model, source: onnx.ModelProto) -> onnx.ModelProto:
    """Convert the model to a ModelProto that loads with and without the registered op library.

    `source` is the model that was read; types that onnx-ir cannot hold are copied from it.
    """
    # See imports_domain in ortgrad.graph.loading.
    model.opset_imports.setdefault(DOMAIN, 1)
    written = to_proto(model)
    foreign = {v.name: v.type for v in (*source.graph.input, *source.graph.output) if not is_known(v.type)}
    for value in (*written.graph.input, *written.graph.output):
        if value.name in foreign:
            value.type.CopyFrom(foreign[value.name])
    return written


def _reason(error: BaseException) -> str:
    """Return the text of the error's first cause; that of onnx-ir's own error contains the whole model."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(error)


def from_proto(source: onnx.ModelProto) -> ir.Model:
    """Convert the model to onnx-ir, without types that onnx-ir cannot hold, such as the maps of ZipMap."""
    if not all(is_known(value.type) for value in _values(source.graph)):
        source = copy_of(source)
        for value in _values(source.graph):
            if not is_known(value.type):
                value.ClearField("type")
    return ir.from_proto(source)


def refill(model: ir.Model, source: onnx.ModelProto) -> ir.Model:
    """Replace all that a model contains by what a function of onnx has made of it."""
    made = from_proto(source)
    model.graph = made.graph
    for own, other in ((model.functions, made.functions), (model.metadata_props, made.metadata_props)):
        own.clear()
        own.update(other)  # type: ignore[arg-type]
    model.ir_version, model.model_version = made.ir_version, made.model_version
    model.producer_name, model.producer_version = made.producer_name, made.producer_version
    model.domain, model.doc_string = made.domain, made.doc_string
    return model


def is_known(type_: onnx.TypeProto) -> bool:
    """Return whether onnx-ir can hold a type."""
    kind = type_.WhichOneof("value")
    if kind in ("sequence_type", "optional_type"):
        return is_known(getattr(type_, kind).elem_type)
    return kind in (None, "tensor_type", "sparse_tensor_type")


def _values(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    return (value for inner in protos.all_graphs(graph) for value in declared_values(inner))


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Convert the model to a ModelProto. Drops shapes of values without a type, which ONNX cannot store."""
    bodies = [graph for f in model.functions.values() for graph in all_graphs(f.graph)]
    for graph in (*all_graphs(model.graph), *bodies):
        for value in (*graph.inputs, *(value for node in graph for value in node.outputs)):
            if value.type is None:
                value.shape = None
    return ir.to_proto(model)
