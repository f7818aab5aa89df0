"""Names for what is added to a graph."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from ortgrad.backward import subgraphs


def taken_names(graph: ir.Graph) -> set[str]:
    """Every name of a value in a graph and its subgraphs."""
    taken = {value.name for value in (*graph.inputs, *graph.initializers.values()) if value.name}
    return taken | {value.name for node in graph.all_nodes() for value in node.outputs if value.name}


def free_name(name: str, taken: set[str]) -> str:
    """The name, with a number if it is taken; it is taken from then on."""
    free, number = name, 2
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    taken.add(free)
    return free


def name_nodes(nodes: Iterable[ir.Node], taken: set[str], keep: Iterable[ir.Value] = ()) -> None:
    """Give recorded nodes and values names that nothing else has; a built model can be built again."""
    kept = set(keep)
    for node in nodes:
        for value in node.outputs:
            if value not in kept and value.name:
                value.name = free_name(value.name, taken)
        node.name = node.outputs[0].name
        for graph in subgraphs(node):
            for value in graph.inputs:
                value.name = free_name(value.name or "input", taken)
            name_nodes(graph, taken, kept)
