"""Walking over protos, without onnx-ir, which takes a while to import."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx
from onnx import TensorProto

FLOAT, DOUBLE = TensorProto.FLOAT, TensorProto.DOUBLE
INT64, BOOL = TensorProto.INT64, TensorProto.BOOL
FLOATS = (FLOAT, DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes and those in their subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from all_nodes(graph.node)


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and the subgraphs of its nodes, at any depth."""
    yield graph
    for node in all_nodes(graph.node):
        yield from subgraphs(node)


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs in a node's attributes."""
    for attribute in node.attribute:
        # An absent graph would become present if it were written to.
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def declared_values(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """The values of a graph whose types are written down, without those of its subgraphs."""
    return [*graph.input, *graph.output, *graph.value_info]


def dependencies(node: onnx.NodeProto) -> list[str]:
    """The names that a node reads, those that its subgraphs capture included."""
    names = [name for name in node.input if name]
    return list(dict.fromkeys(names + [name for graph in subgraphs(node) for name in captured_names(graph)]))


def captured_names(graph: onnx.GraphProto) -> list[str]:
    """The names that a subgraph reads from outside of it."""
    own = {value.name for value in (*graph.input, *graph.initializer)}
    found: dict[str, None] = {}
    for node in graph.node:
        found.update((name, None) for name in dependencies(node) if name not in own)
        own.update(node.output)
    found.update((value.name, None) for value in graph.output if value.name not in own)
    return list(found)


def copy_of(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model that may be changed."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy
