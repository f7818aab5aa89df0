"""Names for what is added to a model: of values and nodes, each used once in the model and its subgraphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir


class Names:
    """Hands out names that neither a value nor a node of a model has.

    Whatever makes nodes takes their names from here, so nobody has to compare them later. onnxruntime refuses
    two nodes of a graph with one name, and a value of a subgraph hides one of the same name outside.
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._values: set[str] = set(taken)
        self._nodes: set[str] = set()
        self._numbers: dict[str, int] = {}

    @classmethod
    def of(cls, model: ir.Model) -> Names:
        """The names of a model, in which names that are there twice are changed in place.

        Values of the main graph keep theirs. Node names can be there twice in a file onnxruntime refuses,
        those of values in two branches of an If, or in a subgraph where functions were inlined.
        """
        names = cls(value.name for value in _values(model.graph) if value.name)
        # All are known before one is changed, so that the first of two keeps its name.
        graphs = list(model.graph.subgraphs())
        later = [value for graph in graphs for value in _values(graph) if value.name]
        nodes = [node for graph in (model.graph, *graphs) for node in graph if node.name]
        twice = [value for value in later if _seen(names._values, value)]
        for node in [node for node in nodes if _seen(names._nodes, node)]:
            node.name = names.fresh(node.name or "")
        for value in twice:
            value.name = names.fresh(value.name or "")
        return names

    def fresh(self, name: str) -> str:
        """The name, with a number if it is taken; it is taken from then on."""
        free = name
        while free in self._values or free in self._nodes:
            number = self._numbers[name] = self._numbers.get(name, 1) + 1
            free = f"{name}_{number}"
        self._values.add(free)
        self._nodes.add(free)
        return free

    def rename(self, graph: ir.Graph, scope: str = "") -> None:
        """Give everything in a graph that is not part of the model yet a name of its own."""
        scope = f"{scope}/" if scope else ""
        for inner in (graph, *graph.subgraphs()):
            for value in _values(inner):
                if value.name:
                    value.name = self.fresh(f"{scope}{value.name}")
            for node in inner:
                if node.name:
                    node.name = self.fresh(f"{scope}{node.name}")


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    """The values that a graph itself defines, once each."""
    outputs = (value for node in graph for value in node.outputs)
    return iter(dict.fromkeys((*graph.inputs, *graph.initializers.values(), *outputs)))


def _seen(taken: set[str], named: ir.Value | ir.Node) -> bool:
    """Whether the name is taken; it is afterwards."""
    name = named.name or ""
    seen = name in taken
    taken.add(name)
    return seen
