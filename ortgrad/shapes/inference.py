"""Inference of types and shapes with onnx."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnx
import onnx_ir as ir

from ortgrad.errors import ModelError
from ortgrad.graph import protos
from ortgrad.graph.metadata import VERSION
from ortgrad.graph.serialization import is_known, to_proto
from ortgrad.graph.traversal import all_nodes, subgraphs
from ortgrad.operators.schema import with_schemas
from ortgrad.shapes.attention_sizes import hide_unknown_lengths
from ortgrad.shapes.element_sizes import forget_element_sizes, hide_initial_sizes
from ortgrad.shapes.equal_sizes import name_equal_sizes
from ortgrad.shapes.long_vectors import hide_lengths, restore_lengths
from ortgrad.shapes.missing_shapes import fill_in_shapes, write_out_sides
from ortgrad.shapes.outer_constants import copy_constants_inside
from ortgrad.shapes.pool_sizes import round_sizes_down

# In bytes. Larger initializers do not determine shapes, and onnx copies the model that it is given.
_LARGEST_CONSTANT = 1000


def infer_types(model: ir.Model) -> None:
    """Infer the types and shapes of all values of the model and its subgraphs, in place."""
    _infer(model)
    while fill_in_shapes(model.graph):
        _infer(model)
    name_equal_sizes(model.graph)


def is_inferred(model: ir.Model) -> bool:
    """Return whether nothing is left to infer.

    This is so if this version of build_gradient_model made the model, and all values have types and shapes:
    nobody has added nodes since then without stating what they compute.
    """
    from ortgrad import __version__

    return model.metadata_props.get(VERSION) == __version__ and all(
        value.type is not None and value.shape is not None
        for node in all_nodes(model.graph)
        for value in node.outputs
        if value.name
    )


def _infer(model: ir.Model) -> None:
    with without_weights(model):
        proto = to_proto(model)
        copy_constants_inside(proto.graph)
        lengths = hide_lengths(proto)
        round_sizes_down(proto.graph)
        write_out_sides(proto.graph)
        inferred = _inferred(proto)
        hidden = [hide(proto.graph, inferred.graph) for hide in (hide_initial_sizes, hide_unknown_lengths)]
        if any(hidden):
            inferred = _inferred(proto)
    restore_lengths(inferred.graph, lengths)
    forget_element_sizes(inferred.graph)
    _merge(model.graph, inferred.graph)


def _inferred(proto: onnx.ModelProto) -> onnx.ModelProto:
    try:
        return with_schemas(
            onnx.shape_inference.infer_shapes, proto, check_type=False, strict_mode=False, data_prop=True
        )
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
        raise ModelError(f"onnx cannot infer the types of the model: {error}") from error


@contextmanager
def without_weights(model: ir.Model) -> Iterator[list[ir.Value]]:
    """Within this context, initializers that are large, or only defaults of inputs, are plain inputs.

    Yields these initializers.
    """
    graph, inputs = model.graph, list(model.graph.inputs)
    large = []
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is None:
            continue
        if value.is_graph_input():
            # Its value is only a default: another one may be fed.
            large.append((name, value))
        elif tensor.nbytes > _LARGEST_CONSTANT:
            value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
            large.append((name, value))
    order = list(graph.initializers.items())
    try:
        for name, value in large:
            del graph.initializers[name]
            if not value.is_graph_input():
                graph.inputs.append(value)
        yield [value for _, value in large]
    finally:
        graph.inputs[:] = inputs
        graph.initializers.clear()
        graph.initializers.update(order)


def _merge(graph: ir.Graph, inferred: onnx.GraphProto) -> None:
    found = {info.name: info.type for info in (*inferred.input, *inferred.value_info, *inferred.output)}
    for value in (*graph.inputs, *(value for node in graph for value in node.outputs)):
        if value.name in found and is_known(found[value.name]):
            _apply(value, found[value.name])
    for node, proto in zip(graph, inferred.node, strict=True):
        for subgraph, inferred_subgraph in zip(subgraphs(node), protos.subgraphs(proto), strict=True):
            _merge(subgraph, inferred_subgraph)


def _apply(value: ir.Value, found: onnx.TypeProto) -> None:
    type_ = ir.serde.deserialize_type_proto_for_type(found)
    shape = ir.serde.deserialize_type_proto_for_shape(found)
    if type_ is not None and type_ != value.type:
        value.type = type_
    if shape is not None and shape != value.shape:
        value.shape = shape
