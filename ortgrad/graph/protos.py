"""Traversal of onnx protos, without onnx-ir, which is slow to import."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_Message = TypeVar("_Message")

FLOAT, DOUBLE = TensorProto.FLOAT, TensorProto.DOUBLE
INT64, BOOL = TensorProto.INT64, TensorProto.BOOL
FLOATS = (FLOAT, DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
# Before this IR version every initializer is also a graph input, but onnxruntime accepts no feed for it.
FIRST_WITH_CONSTANTS = 4
# The types of numbers in attributes of Constant.
_CONSTANT_TYPES = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
}


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield the nodes and those in their subgraphs, at any depth."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from all_nodes(graph.node)


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield the graph and the subgraphs of its nodes, at any depth."""
    yield graph
    for node in all_nodes(graph.node):
        yield from subgraphs(node)


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs in a node's attributes."""
    for attribute in node.attribute:
        # Writing to an absent graph would make it present.
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def is_operator(node: onnx.NodeProto, op_type: str) -> bool:
    """Return whether a node has this standard operator."""
    return node.op_type == op_type and node.domain in ("", "ai.onnx")


def constant_tensor(node: onnx.NodeProto) -> TensorProto | None:
    """Return the tensor of a Constant node; None for other nodes, for text and for sparse tensors."""
    for attribute in node.attribute if is_operator(node, "Constant") else ():
        if attribute.name == "value":
            return attribute.t
        if attribute.name in _CONSTANT_TYPES:
            array = np.array(helper.get_attribute_value(attribute), _CONSTANT_TYPES[attribute.name])
            return numpy_helper.from_array(array)
    return None


def declared_values(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Return the values of a graph that have a declared type, without those of its subgraphs."""
    return [*graph.input, *graph.output, *graph.value_info]


def dependencies(node: onnx.NodeProto) -> list[str]:
    """Return the names that a node reads, including those that its subgraphs capture."""
    names = [name for name in node.input if name]
    return list(dict.fromkeys(names + [name for graph in subgraphs(node) for name in captured_names(graph)]))


def captured_names(graph: onnx.GraphProto) -> list[str]:
    """Return the names that a subgraph captures from outside."""
    own = {value.name for value in (*graph.input, *graph.initializer)}
    found: dict[str, None] = {}
    for node in graph.node:
        found.update((name, None) for name in dependencies(node) if name not in own)
        own.update(node.output)
    found.update((value.name, None) for value in graph.output if value.name not in own)
    return list(found)


def copy_of(message: _Message) -> _Message:
    """Return a copy of a model, a graph, a node or another message."""
    copy: Any = type(message)()
    copy.CopyFrom(message)
    return copy


def replace(field: Any, messages: Iterable[Any]) -> None:
    """Make these messages the elements of a repeated field, which may contain some of them already."""
    made = list(messages)
    del field[:]
    field.extend(made)


def keep(field: Any, wanted: Callable[[Any], bool]) -> None:
    """Remove the other elements from a repeated field; those that stay are not copied."""
    for i in reversed(range(len(field))):
        if not wanted(field[i]):
            del field[i]


def opset_of(message: onnx.ModelProto | onnx.FunctionProto, default: int = 1) -> int:
    """Return the opset of ONNX's own operators that a model or function imports."""
    return next((o.version for o in message.opset_import if o.domain in ("", "ai.onnx")), default)
