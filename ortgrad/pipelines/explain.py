"""explain: lists the gradient operators of every node, and the nodes that cannot be differentiated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from ortgrad.autodiff.paths import straight_through_nodes
from ortgrad.autodiff.rules import find_rule
from ortgrad.autodiff.stopped import stopping_nodes
from ortgrad.graph.feeds import checked_feeds
from ortgrad.graph.loading import ModelLike, diagnosing, load_model
from ortgrad.graph.traversal import all_nodes, subgraphs
from ortgrad.pipelines.backward_graph import Request, run_backward
from ortgrad.pipelines.build import names_of
from ortgrad.pipelines.stops import warn_about_stops


@dataclass(frozen=True)
class Explanation:
    """A forward node, with the operators that compute its gradient or the reason why there are none.

    `straight_through` marks nodes that round, or whose subgraphs do, and are differentiated as if they
    did not; `stops` those without a gradient through which `of` depends on `wrt`; `defined` those that
    compute the result of an operator without a rule, in whose place its definition was put.
    """

    node: str
    operator: str
    gradient: tuple[str, ...] = ()
    reason: str = ""
    supported: bool = True
    straight_through: bool = False
    stops: bool = False
    defined: bool = False


def explain(
    model: ModelLike,
    *,
    wrt: str | Sequence[str] | None = None,
    of: str | Sequence[str] | None = None,
    feeds: Mapping[str, np.ndarray] | None = None,
) -> list[Explanation]:
    """Return an Explanation for every forward node; the arguments are those of `build_gradient_model`.

    A node without a rule but with a function body is listed as the nodes of the body.
    """
    proto = load_model(model)
    # A rule may change the operator of its node to a training operator; show the one in the file.
    written = {name: node for node in proto.graph.node for name in node.output if name}
    given = None if feeds is None else checked_feeds(proto, feeds)
    with diagnosing(proto):
        request = Request(proto, names_of("wrt", wrt), names_of("of", of), feeds=given, as_written=True)
        ran = run_backward(request)
    if not ran.backward.failures:
        warn_about_stops(ran.stopped)
    backward = ran.backward
    recorded = dict(backward.visits)
    rounding = set(straight_through_nodes(ran.model.graph, ran.targets, ran.outputs))
    failed = {failure.node: failure.reason for failure in backward.failures}
    # With failures the gradients are incomplete, so nothing can be called unused.
    used = None if failed else _live([backward.total(value) for value in ran.targets])
    stopping = stopping_nodes(list(ran.model.graph), ran.targets, ran.outputs)
    found = []
    for node in ran.model.graph:
        outputs = [value.name for value in node.outputs if value.name]
        original = next((written[name] for name in outputs if name in written), None)
        operator = _qualified(node) if original is None else original.op_type
        label = node.name or outputs[0]
        rule = find_rule(node.op_type, node.domain)
        defined = original is not None and original.op_type != node.op_type and _has_no_rule(original)
        if node in failed:
            found.append(Explanation(label, operator, reason=failed[node], supported=False))
        elif node in recorded:
            made = tuple(
                _qualified(n)
                for n in recorded[node]
                if n.op_type != "Constant" and (used is None or n in used)
            )
            reason = "" if made else "the gradient passes unchanged"
            through = node in rounding or any(n in rounding for g in subgraphs(node) for n in all_nodes(g))
            found.append(Explanation(label, operator, made, reason, True, through, defined=defined))
        elif rule is not None and rule.function is None and node.inputs:
            reason = "no gradient flows through this operator"
            found.append(Explanation(label, operator, reason=reason, stops=node in stopping))
        else:
            reason = "not between wrt and of"
            found.append(Explanation(label, operator, reason=reason, stops=node in stopping))
    return found


def _has_no_rule(node: onnx.NodeProto) -> bool:
    return find_rule(node.op_type, node.domain) is None


def _qualified(node: ir.Node) -> str:
    """Return the operator's name, with the domain unless it is ONNX's or com.microsoft."""
    plain = node.domain in ("", "ai.onnx", "com.microsoft")
    return node.op_type if plain else f"{node.domain}::{node.op_type}"


def _live(results: Iterable[ir.Value | None]) -> set[ir.Node]:
    """Return the nodes that the results are computed from."""
    waiting = [value.producer() for value in results if value is not None]
    live: set[ir.Node] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in live:
            live.add(node)
            waiting += [value.producer() for value in node.inputs if value is not None]
    return live
