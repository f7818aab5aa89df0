"""Models in float16 and bfloat16, which are trained in float32: small updates would be lost in rounding."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ortgrad.errors import TrainingModelError
from ortgrad.graph.protos import all_graphs, all_nodes, copy_of, declared_values, subgraphs

HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
# Attributes that are an element type.
_TYPES = ("to", "dtype", "output_datatype", "output_dtype", "stash_type", "softmax_precision")


def in_single_precision(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in which all tensors of float16 and bfloat16 are float32; without any, the model."""
    if not any(_is_half(graph) for graph in all_graphs(model.graph)) and not any(
        any(map(_node_is_half, all_nodes(function.node))) for function in model.functions
    ):
        return model
    made = copy_of(model)
    for graph in all_graphs(made.graph):
        _widen_graph(graph)
    for function in made.functions:
        _widen_attributes(function.node)
        for value in function.value_info:
            _widen_type(value.type)
        for inner in (graph for node in all_nodes(function.node) for graph in subgraphs(node)):
            _widen_graph(inner)
    return made


def in_half_precision(name: str, array: np.ndarray, kind: int) -> np.ndarray:
    """Return a parameter, trained in float32, in the type that it has in the model."""
    with np.errstate(over="ignore"):
        half: np.ndarray = array.astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
    if not np.array_equal(np.isfinite(half.astype(np.float32)), np.isfinite(array)):
        largest = float(np.abs(array[np.isfinite(array)]).max())
        raise TrainingModelError(
            f"parameter {name!r} has grown to {largest:.3g}, which {half.dtype} cannot represent: train with "
            "a smaller learning rate or with weight decay"
        )
    return half


def _is_half(graph: onnx.GraphProto) -> bool:
    kinds = [tensor.data_type for tensor in graph.initializer]
    kinds += [value.type.tensor_type.elem_type for value in declared_values(graph)]
    return any(kind in HALVES for kind in kinds) or any(map(_node_is_half, graph.node))


def _node_is_half(node: onnx.NodeProto) -> bool:
    return any(
        (a.name in _TYPES and a.i in HALVES) or (a.HasField("t") and a.t.data_type in HALVES)
        for a in node.attribute
    )


def _widen_graph(graph: onnx.GraphProto) -> None:
    for tensor in graph.initializer:
        _widen(tensor)
    for value in declared_values(graph):
        _widen_type(value.type)
    _widen_attributes(graph.node)


def _widen(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in HALVES:
        array = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _widen_type(kind: onnx.TypeProto) -> None:
    which = kind.WhichOneof("value")
    if which in ("tensor_type", "sparse_tensor_type"):
        inner = getattr(kind, which)
        if inner.elem_type in HALVES:
            inner.elem_type = TensorProto.FLOAT
    elif which in ("sequence_type", "optional_type"):
        _widen_type(getattr(kind, which).elem_type)


def _widen_attributes(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                _widen(attribute.t)
            elif attribute.name in _TYPES and attribute.i in HALVES:
                attribute.i = TensorProto.FLOAT
