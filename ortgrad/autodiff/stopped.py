"""Finds gradients that are zero because every path contains an operator without a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from ortgrad.autodiff.backward import BackwardPass, active_values
from ortgrad.autodiff.rules import find_rule
from ortgrad.graph.traversal import FLOAT_TYPES, dependencies, subgraphs

# Operators that depend only on the shape or type of an operand, not on its elements.
_VALUE_BLIND = {"Shape", "Size", "EyeLike", "RandomNormalLike", "RandomUniformLike"}
_SHOWN = 3


def describe_stops(
    backward: BackwardPass, nodes: Sequence[ir.Node], targets: Sequence[ir.Value], outputs: Sequence[ir.Value]
) -> str | None:
    """Return a sentence on targets that affect the outputs only through operators without a gradient."""
    zero = [value for value in targets if not backward.has_gradient(value)]
    if not zero:
        return None
    needed = _needed(nodes, outputs)
    zero = [value for value in zero if value in needed]

    def stops(values: Sequence[ir.Value]) -> list[ir.Node]:
        """Return the nodes that stop the gradients of the values."""
        open_ = {v for v in active_values(nodes, values) if v in needed and not backward.has_gradient(v)}
        return [
            node
            for node in nodes
            if node.op_type not in _VALUE_BLIND
            and any(value in open_ for value in dependencies(node))
            and any(value in needed and value not in open_ for value in node.outputs)
        ]

    def all_without_gradient(values: Sequence[ir.Value]) -> bool:
        return all(_has_no_gradient(node, needed) for node in stops(values))

    if not all_without_gradient(zero):
        zero = [value for value in zero if all_without_gradient([value])]
    if not zero:
        return None
    named = [f"{n.op_type} node {n.name or next(v.name for v in n.outputs if v.name)!r}" for n in stops(zero)]
    several = len(zero) > 1
    return (
        f"the gradient{'s' * several} of {_listed([repr(v.name) for v in zero])} "
        f"{'are' if several else 'is'} zero: every path to {_listed([repr(v.name) for v in outputs])} is "
        f"stopped by {_listed(named)}"
    )


def stopping_nodes(
    nodes: Sequence[ir.Node], targets: Iterable[ir.Value], outputs: Iterable[ir.Value]
) -> set[ir.Node]:
    """Return the nodes without a gradient whose operands depend on the targets, and the outputs on them."""
    needed, active = _needed(nodes, outputs), active_values(nodes, targets)
    return {
        node
        for node in nodes
        if node.op_type not in _VALUE_BLIND
        and any(value in active for value in dependencies(node))
        and any(value in needed for value in node.outputs)
        and not any(value in active for value in node.outputs)
        and _has_no_gradient(node, needed)
    }


def _has_no_gradient(node: ir.Node, needed: set[ir.Value]) -> bool:
    """Return whether the operator is declared to have no gradient, or has integer outputs.

    No warning is needed where a rule finds that one operand has no influence (the base of Pow with an
    exponent of 0), or where a loop passes on its initial values.
    """
    rule = find_rule(node.op_type, node.domain)
    if rule is not None and rule.function is None:
        return True
    integers = [v for v in node.outputs if v in needed and v.dtype not in (*FLOAT_TYPES, None)]
    return bool(integers) and not subgraphs(node)


def _needed(nodes: Sequence[ir.Node], outputs: Iterable[ir.Value]) -> set[ir.Value]:
    """Return the values whose elements the outputs may depend on, including those that subgraphs capture."""
    needed = set(outputs)
    for node in reversed(nodes):
        if node.op_type not in _VALUE_BLIND and any(value in needed for value in node.outputs):
            needed.update(value for value in node.inputs if value is not None)
            for graph in subgraphs(node):
                needed |= _needed(list(graph), graph.outputs)
    return needed


def _listed(names: Sequence[str]) -> str:
    """Join the first few names, and say how many more there are."""
    more = len(names) - _SHOWN
    if more > 1:
        return f"{', '.join(names[:_SHOWN])} and {more} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
