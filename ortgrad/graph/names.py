"""Unique names for the values and nodes that are added to a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from ortgrad.graph.traversal import all_graphs


class Names:
    """Generates names that no value or node of a model or its subgraphs has.

    All code that adds nodes takes their names from here, so names need no check later. onnxruntime refuses
    two nodes of the same name in a graph, and a value of a subgraph hides an outer value of the same name.
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._values: set[str] = set(taken)
        self._nodes: set[str] = set()
        self._numbers: dict[str, int] = {}
        # The model whose names are still to be collected.
        self._model: ir.Model | None = None

    @classmethod
    def of(cls, model: ir.Model) -> Names:
        """Return the names of a model, after renaming duplicates in place.

        Values of the main graph keep their names. Duplicate node names occur in files that onnxruntime
        refuses, duplicate value names in the branches of an If and in subgraphs with inlined functions.
        """
        names = cls()
        names._collect(model)
        return names

    @classmethod
    def later(cls, model: ir.Model) -> Names:
        """Return the names of a model, which are collected as by `of` when the first new one is needed."""
        names = cls()
        names._model = model
        return names

    def _collect(self, model: ir.Model) -> None:
        self._values.update(value.name for value in _values(model.graph) if value.name)
        # Collect all names before changing any, so that the first of two equal names is kept.
        graphs = list(all_graphs(model.graph))[1:]
        later = [value for graph in graphs for value in _values(graph) if value.name]
        nodes = [node for graph in (model.graph, *graphs) for node in graph if node.name]
        twice = [value for value in later if _seen(self._values, value)]
        for node in [node for node in nodes if _seen(self._nodes, node)]:
            node.name = self.fresh(node.name or "")
        for value in twice:
            value.name = self.fresh(value.name or "")

    def fresh(self, name: str) -> str:
        """Return the name, with a number appended if it is taken, and reserve it."""
        if self._model is not None:
            model, self._model = self._model, None
            self._collect(model)
        free = name
        while free in self._values or free in self._nodes:
            number = self._numbers[name] = self._numbers.get(name, 1) + 1
            free = f"{name}_{number}"
        self._values.add(free)
        self._nodes.add(free)
        return free

    def rename(self, graph: ir.Graph, scope: str = "") -> None:
        """Give unique names to the values and nodes of a graph that is not yet part of the model."""
        scope = f"{scope}/" if scope else ""
        for inner in all_graphs(graph):
            for value in _values(inner):
                if value.name:
                    value.name = self.fresh(f"{scope}{value.name}")
            for node in inner:
                if node.name:
                    node.name = self.fresh(f"{scope}{node.name}")


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Iterate over the values that the graph itself defines, each once."""
    outputs = (value for node in graph for value in node.outputs)
    return iter(dict.fromkeys((*graph.inputs, *graph.initializers.values(), *outputs)))


def _seen(taken: set[str], named: ir.Value | ir.Node) -> bool:
    """Reserve the name; returns whether it was taken already."""
    name = named.name or ""
    seen = name in taken
    taken.add(name)
    return seen
