"""Replacement of values, also among the outputs of a graph; a model with gradients has many outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import onnx_ir as ir

# The places of values, by `id`, among the outputs of a graph. They are checked before use: others may change
# the list. The values themselves would keep their graph alive.
_places: WeakKeyDictionary[ir.Graph, dict[int, list[int]]] = WeakKeyDictionary()


def replace_values(old: Sequence[ir.Value], new: Sequence[ir.Value]) -> None:
    """Let the readers of the old values read the new ones, which also take their places as outputs.

    onnx-ir searches all outputs of the graph for each of the values.
    """
    for before, after in zip(old, new, strict=True):
        release_output(before, after)
        before.replace_all_uses_with(after)


def replace_node(
    node: ir.Node,
    made: Sequence[ir.Node],
    pairs: Sequence[tuple[ir.Value, ir.Value]],
    gone: list[ir.Node] | None = None,
) -> None:
    """Put nodes into the place of another one; `pairs` are its outputs with the values that replace them.

    The new values get what is known of the old ones, and their names. With `gone`, the node stays, without
    inputs, and is added to this list, for `remove_nodes`.
    """
    graph = node.graph
    assert graph is not None
    for old, new in pairs:
        new.type = new.type if old.type is None else old.type
        new.shape = new.shape if old.shape is None else old.shape
        new.const_value = new.const_value if old.const_value is None else old.const_value
        new.name = new.name if old.name is None else old.name
    replace_values([old for old, _ in pairs], [new for _, new in pairs])
    graph.insert_after(node, made)
    if gone is None:
        graph.remove(node, safe=True)
        return
    for i in range(len(node.inputs)):
        node.replace_input_with(i, None)
    gone.append(node)


def remove_nodes(nodes: Iterable[ir.Node]) -> None:
    """Remove nodes whose outputs nothing reads; onnx-ir looks at all outputs of a graph in each removal."""
    by_graph: dict[ir.Graph, list[ir.Node]] = {}
    for node in nodes:
        assert isinstance(node.graph, ir.Graph)
        by_graph.setdefault(node.graph, []).append(node)
    for graph, removed in by_graph.items():
        graph.remove(removed, safe=True)


def release_output(old: ir.Value, new: ir.Value) -> None:
    """Put a value into the place of another one among the outputs of its graph, if that is one."""
    graph = old.graph
    if graph is None or not old.is_graph_output():
        return
    # What was noted may be of an earlier state of the list.
    for known in (_places.get(graph, {}), None):
        places = _note(graph) if known is None else known
        for i in places.pop(id(old), ()):
            if i < len(graph.outputs) and graph.outputs[i] is old:
                graph.outputs[i] = new
                places.setdefault(id(new), []).append(i)
        if not old.is_graph_output():
            return


def _note(graph: ir.Graph) -> dict[int, list[int]]:
    places: dict[int, list[int]] = {}
    for i, value in enumerate(graph.outputs):
        places.setdefault(id(value), []).append(i)
    _places[graph] = places
    return places
