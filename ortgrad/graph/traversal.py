"""Traversal of onnx-ir graphs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np
import onnx_ir as ir

FLOAT_TYPES = frozenset([ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
_GRAPHS = frozenset([ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS])


def is_float_tensor(value: ir.Value) -> bool:
    """Return whether a value is a floating-point tensor, not a sequence of them."""
    return isinstance(value.type, ir.TensorType) and value.dtype in FLOAT_TYPES


def is_standard(node: ir.Node) -> bool:
    """Return whether the operator of a node is in ONNX's default domain, which onnx-ir always calls ""."""
    return not node.domain


def is_operator(node: ir.Node, *op_types: str) -> bool:
    """Return whether a node has one of these standard operators."""
    return not node.domain and node.op_type in op_types


def is_integer(value: ir.Value) -> bool:
    """Return whether the elements are known not to be floating-point numbers."""
    return value.dtype is not None and value.dtype not in FLOAT_TYPES


def dimensions(value: ir.Value | None) -> tuple[int | str | None, ...] | None:
    """Return the sizes of a value, or their names, each None if it has none; None if the rank is unknown."""
    if value is None or value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)


def sizes_of(value: ir.Value | None) -> tuple[int | None, ...] | None:
    """Return the sizes of a value, each None if it is unknown; None if the rank is unknown."""
    if value is None or value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else None for dim in value.shape)


def constant_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor of a constant that cannot be fed; None for other values."""
    return None if value is None or value.is_graph_input() else ir.convenience.get_const_tensor(value)


def constant_array(value: ir.Value | None) -> np.ndarray | None:
    """Return the elements of a constant that cannot be fed; None for other values."""
    tensor = constant_tensor(value)
    return None if tensor is None else tensor.numpy()


def constant_number(value: ir.Value | None) -> float | None:
    """Return a constant of one element, of any type of numbers, that cannot be fed; None for other values."""
    tensor = constant_tensor(value)
    return float(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None


def only_reader(value: ir.Value) -> ir.Node | None:
    """Return the node that alone reads a value, which is no output of a graph either."""
    users = {use.node for use in value.uses()}
    return users.pop() if len(value.uses()) == 1 and not value.is_graph_output() else None


def dependencies(node: ir.Node) -> list[ir.Value]:
    """Return the values that a node reads, including those that its subgraphs capture."""
    found = [value for value in node.inputs if value is not None]
    for graph in subgraphs(node):
        found += captured_values(graph)
    return found


def all_nodes(graph: ir.Graph | ir.Function) -> Iterator[ir.Node]:
    """Yield the nodes of a graph and those in their subgraphs, at any depth.

    A node comes before those in its own subgraphs. `ir.Graph.all_nodes` does the same in several times the
    time, and there are dozens of passes.
    """
    for node in graph:
        yield node
        for inner in subgraphs(node):
            yield from all_nodes(inner)


def all_graphs(graph: ir.Graph) -> Iterator[ir.Graph]:
    """Yield a graph and the subgraphs of its nodes, at any depth."""
    yield graph
    for node in graph:
        for inner in subgraphs(node):
            yield from all_graphs(inner)


def nodes_before(
    graph: ir.Graph, values: Iterable[ir.Value], stop: Collection[ir.Value] = ()
) -> list[ir.Node]:
    """Return the nodes of a graph on which values depend, last one first, up to the values `stop`."""
    needed, found = set(values), []
    for node in reversed(graph):
        if any(value in needed and value not in stop for value in node.outputs):
            needed.update(dependencies(node))
            found.append(node)
    return found


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """Return the graphs in a node's attributes."""
    graphs: list[ir.Graph] = []
    for attribute in node.attributes.data.values():
        if attribute.type in _GRAPHS:
            graphs += [attribute.value] if attribute.type == ir.AttributeType.GRAPH else attribute.value
    return graphs


def captured_values(graph: ir.Graph) -> list[ir.Value]:
    """Return the outer values that the nodes or outputs of a subgraph use."""
    own: set[ir.Value] = {*graph.inputs, *graph.initializers.values()}
    found: dict[ir.Value, None] = {}
    for node in graph:
        found.update((value, None) for value in dependencies(node) if value not in own)
        own.update(node.outputs)
    found.update((value, None) for value in graph.outputs if value not in own)
    return list(found)


def release_captured(node: ir.Node) -> None:
    """Let the subgraphs of a node that is no longer needed use nothing.

    Otherwise the outer values that they capture would count their nodes as users, in onnx-ir even after the
    node was removed.
    """
    for inner in (inner for graph in subgraphs(node) for inner in all_nodes(graph)):
        for i in range(len(inner.inputs)):
            inner.replace_input_with(i, None)


def values_by_name(graph: ir.Graph) -> dict[str, ir.Value]:
    """Return the named values of a graph, without those in its subgraphs."""
    values = [*graph.inputs, *graph.initializers.values()]
    values += [output for node in graph for output in node.outputs]
    return {value.name: value for value in values if value.name}
