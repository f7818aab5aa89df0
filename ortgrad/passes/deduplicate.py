"""Common subexpression elimination, which leaves random operators alone."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ortgrad.graph.attributes import content
from ortgrad.graph.recorder import RANDOM
from ortgrad.graph.traversal import subgraphs


def deduplicate(model: ir.Model) -> ir.Model:
    """Merge equal nodes of the main graph, which must be in topological order."""
    graph = model.graph
    seen: dict[Any, ir.Node] = {}
    gone: list[ir.Node] = []
    for node in list(graph):
        if node.op_type in RANDOM or subgraphs(node):
            continue
        key = (
            node.op_identifier(),
            tuple(map(id, node.inputs)),
            len(node.outputs),
            tuple(sorted((a.name, content(a)) for a in node.attributes.values())),
        )
        first = seen.setdefault(key, node)
        if first is node or any(value.is_graph_output() for value in node.outputs):
            continue
        ir.convenience.replace_all_uses_with(node.outputs, first.outputs)
        gone.append(node)
    graph.remove(gone, safe=True)
    return model
