"""Walking over the gradient nodes of a model, those in subgraphs included."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from ortgrad.call import Call, parse_call
from ortgrad.registry import CALL_ATTRIBUTE, Operator, Shape, find_operator


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


def dimensions(value: ir.Value) -> Shape | None:
    """The shape as far as it is known: numbers, names, or None; None if the rank is not."""
    if value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)
