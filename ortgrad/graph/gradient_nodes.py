"""Traversal and replacement of a model's gradient nodes, including those in subgraphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from ortgrad.graph.outputs import replace_node
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import all_nodes, release_captured
from ortgrad.operators.call import Call, parse_call
from ortgrad.operators.declaration import CALL_ATTRIBUTE, Operator, find_operator


def gradient_nodes(model: ir.Model) -> Iterator[tuple[ir.Node, Operator]]:
    """Yield every node of a declared operator, with that operator.

    A node that calls a function of that name in the model is left out, unless ortgrad completed the node.
    """
    for node in list(all_nodes(model.graph)):
        operator = find_operator(node.op_type, node.domain)
        if operator and (CALL_ATTRIBUTE in node.attributes or node.op_identifier() not in model.functions):
            yield node, operator


def call_of(node: ir.Node, operator: Operator) -> Call:
    """Return the call of a node, which must be complete."""
    return parse_call(operator, node.attributes[CALL_ATTRIBUTE].as_string())


def put_in_place(
    node: ir.Node,
    made: Sequence[ir.Node],
    op: Recorder,
    results: Sequence[ir.Value | None],
    gone: list[ir.Node] | None = None,
) -> None:
    """Replace a node by the nodes `made` and the nodes of `op`; `results` replace its outputs, in order.

    With `gone`, the node itself is left to the caller, see `replace_node`.
    """
    recorded = {value for recorded in op.nodes for value in recorded.outputs}
    pairs = [
        # A copy, so that both a graph output and a value that existed before keep their names.
        (old, op.copy(new) if old.is_graph_output() or new not in recorded else new)
        for old, new in zip(node.outputs, results, strict=False)
        if new is not None and old.name
    ]
    needed = {new for _, new in pairs}
    nodes = [recorded for recorded in reversed(op.nodes) if not _drop_unread(recorded, needed)][::-1]
    replace_node(node, [*made, *nodes], pairs, gone)


def _drop_unread(node: ir.Node, needed: set[ir.Value]) -> bool:
    """Disconnect a node from its inputs if none of its outputs is used; returns whether that was so."""
    if any(value in needed or value.uses() for value in node.outputs):
        return False
    for i in range(len(node.inputs)):
        node.replace_input_with(i, None)
    release_captured(node)
    return True
