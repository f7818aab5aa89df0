"""The nodes between targets and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from ortgrad.autodiff.backward import active_values
from ortgrad.autodiff.rules import find_rule
from ortgrad.graph.traversal import FLOAT_TYPES, dependencies, subgraphs


def nodes_between(graph: ir.Graph, wrt: Iterable[ir.Value], of: Iterable[ir.Value]) -> Iterator[ir.Node]:
    """Yield the nodes between `wrt` and `of`, including those in the subgraphs of such nodes."""
    active, needed = active_values(graph, wrt), set(of)
    for node in reversed(graph):
        if not any(value in needed for value in node.outputs):
            continue
        reads = [value for value in dependencies(node) if value in active]
        needed.update(reads)
        if reads:
            yield node
            for inner in subgraphs(node):
                fed = [value for value in inner.inputs if value.dtype is None or value.dtype in FLOAT_TYPES]
                yield from nodes_between(inner, [*active, *fed], inner.outputs)


def straight_through_nodes(
    graph: ir.Graph, targets: Iterable[ir.Value], outputs: Iterable[ir.Value]
) -> list[ir.Node]:
    """Return the nodes between the targets and the outputs that have a straight-through gradient."""
    found = [(node, find_rule(node.op_type, node.domain)) for node in nodes_between(graph, targets, outputs)]
    return [node for node, rule in found if rule is not None and rule.straight_through][::-1]
