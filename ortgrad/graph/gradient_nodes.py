"""Walking over the gradient nodes of a model, those in subgraphs included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from ortgrad.graph.recorder import Recorder
from ortgrad.operators.call import Call, parse_call
from ortgrad.operators.declaration import CALL_ATTRIBUTE, Operator, find_operator


def gradient_nodes(model: ir.Model) -> Iterator[tuple[ir.Node, Operator]]:
    """Every node that runs on one of our operators, with that operator.

    A node that calls a function of the model's own is left alone.
    """
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        operator = find_operator(node.op_type, node.domain)
        if operator and (CALL_ATTRIBUTE in node.attributes or node.op_identifier() not in model.functions):
            yield node, operator


def call_of(node: ir.Node, operator: Operator) -> Call:
    """What the node's attribute says; the node must be complete."""
    return parse_call(operator, node.attributes[CALL_ATTRIBUTE].as_string())


def put_in_place(
    node: ir.Node, made: Sequence[ir.Node], op: Recorder, results: Sequence[ir.Value | None]
) -> None:
    """Replace a node by `made` and what `op` recorded; results are in the order of its outputs."""
    graph = node.graph
    assert graph is not None
    recorded = {value for recorded in op.nodes for value in recorded.outputs}
    pairs = [
        # A graph output keeps its name, and so does what was there before.
        (old, op.copy(new) if old.is_graph_output() or new not in recorded else new)
        for old, new in zip(node.outputs, results, strict=False)
        if new is not None and old.name
    ]
    needed = {new for _, new in pairs}
    nodes = [recorded for recorded in reversed(op.nodes) if not _drop_unread(recorded, needed)][::-1]
    ir.convenience.replace_nodes_and_values(
        graph, node, [node], [*made, *nodes], [old for old, _ in pairs], [new for _, new in pairs]
    )


def _drop_unread(node: ir.Node, needed: set[ir.Value]) -> bool:
    """Take a node that nobody reads off its inputs; False if somebody does."""
    if any(value in needed or value.uses() for value in node.outputs):
        return False
    for i in range(len(node.inputs)):
        node.replace_input_with(i, None)
    return True
