"""Which gradients pass through rounding: those are straight-through, and no differences agree with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx

from ortgrad.autodiff.rules import find_rule
from ortgrad.graph.protos import all_graphs, dependencies, subgraphs


def rounding_behind(proto: onnx.ModelProto, outputs: Iterable[str]) -> Mapping[str, str]:
    """Return the values between which and the outputs there is rounding, each with the nearest such node."""
    needed = set(outputs)
    found: dict[str, str] = {}
    for node in reversed(proto.graph.node):
        rule = find_rule(node.op_type, node.domain)
        if not needed.intersection(node.output) or (rule is not None and rule.function is None):
            continue
        reads = dependencies(node)
        needed.update(reads)
        behind = next((found[name] for name in node.output if name in found), None)
        if _rounds(node):
            behind = f"{node.op_type} node {(node.name or node.output[0])!r}"
        if behind is not None:
            found.update(dict.fromkeys(reads, behind))
    return found


def _rounds(node: onnx.NodeProto) -> bool:
    nodes = [node, *(inner for graph in subgraphs(node) for each in all_graphs(graph) for inner in each.node)]
    rules = [find_rule(each.op_type, each.domain) for each in nodes]
    return any(rule is not None and rule.straight_through for rule in rules)
