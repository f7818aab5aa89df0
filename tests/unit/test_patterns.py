"""Patterns of subgraphs: what they match, and which values their parameters stand for."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from ortgrad.graph.outputs import replace_node
from ortgrad.graph.patterns import Match, Operators, Pattern, Term


def graph(nodes: str, outputs: str = "y") -> ir.Graph:
    declared = ", ".join(f"float[N] {name}" for name in outputs.split())
    text = (
        f'<ir_version: 10, opset_import: ["" : 21]> g (float[N] x, float[N] w) => ({declared}) {{ {nodes} }}'
    )
    return ir.serde.deserialize_model(onnx.parser.parse_model(text)).graph


def names(match: Match) -> dict[str, str]:
    return {parameter: value.name or "" for parameter, value in match.values.items()}


SUM = Pattern(lambda op, a, b: op.Add(op.Exp(a), b))
SQUARE = Pattern(lambda op, a: op.Mul(a, a))
CLIPPED = Pattern(lambda op, a, low, high: op.Clip(a, op.either(low, None), op.either(high, None)))


@pytest.mark.parametrize(
    ("pattern", "nodes", "found"),
    [
        (SUM, "e = Exp(x) y = Add(e, w)", [{"a": "x", "b": "w"}]),
        (SUM, "e = Exp(x) y = Add(w, e)", [{"a": "x", "b": "w"}]),
        (SUM, "e = Exp(x) f = Exp(w) y = Add(e, f)", [{"a": "x", "b": "f"}, {"a": "w", "b": "e"}]),
        (SUM, "e = Exp(x) y = Sub(e, w)", []),
        (SUM, "e = custom.Exp(x) y = Add(e, w)", []),
        (SUM, "y = Add(x, w)", []),
        (SQUARE, "y = Mul(x, w)", []),
        (CLIPPED, "y = Clip(x)", [{"a": "x"}]),
        (CLIPPED, "y = Clip(x, , w)", [{"a": "x", "high": "w"}]),
        (CLIPPED, "y = Clip(x, w, x)", [{"a": "x", "low": "w", "high": "x"}]),
        (Pattern(lambda op, a: op.Clip(a)), "y = Clip(x)", [{"a": "x"}]),
        (Pattern(lambda op, a: op.Clip(a)), "y = Clip(x, w)", []),
        (Pattern(lambda op, a, b: op.Sub(b, op.Exp(a))), "e = Exp(x) y = Sub(e, w)", []),
        (Pattern(lambda op, a: op.one_of("Exp", "Log")(a)), "y = Log(x)", [{"a": "x"}]),
    ],
)
def test_matches(pattern: Pattern, nodes: str, found: list[dict[str, str]]) -> None:
    assert [names(match) for match in pattern.find(graph(nodes))] == found


def test_a_value_that_is_used_twice_is_the_same() -> None:
    matches = list(SQUARE.find(graph("s = Mul(x, w) y = Mul(s, s)")))
    assert {match.root.outputs[0].name for match in matches} == {"y"}


def test_a_node_that_is_used_twice_is_the_same() -> None:
    def shared(op: Operators, a: Term) -> Term:
        e = op.Exp(a)
        return op.Add(e, op.Neg(e))

    pattern = Pattern(shared)
    assert list(pattern.find(graph("e = Exp(x) n = Neg(e) y = Add(n, e)")))
    # Equal, but another node.
    assert not list(pattern.find(graph("e = Exp(x) f = Exp(x) n = Neg(e) y = Add(n, f)")))


def test_alternatives() -> None:
    def activated(op: Operators, a: Term, b: Term) -> Term:
        total = op.either(op.Add(a, b), op.Exp(a))
        return op.either(op.Relu(total), total)

    found = Pattern(activated).find(graph("e = Exp(x) a = Add(w, w) y = Relu(a) z = Relu(e)", "y z"))
    nodes = [[node.op_type for node in match.nodes] for match in found if match.values["a"].name in "xw"]
    # The operands of a sum are tried in both orders.
    assert nodes == [["Exp"], ["Add"], ["Add"], ["Relu", "Add"], ["Relu", "Add"], ["Relu", "Exp"]]


@pytest.mark.parametrize(
    ("nodes", "outputs", "private"),
    [
        ("e = Exp(x) y = Add(e, w)", "y", True),
        ("e = Exp(x) y = Add(e, w)", "y e", False),
        ("e = Exp(x) y = Add(e, w) z = Neg(e)", "y z", False),
        ("e = Exp(x) y = Add(e, e)", "y", False),
        ("e = Exp(x) y = Add(e, w) z = Neg(y)", "y z", True),
    ],
)
def test_who_else_reads_inner_values(nodes: str, outputs: str, private: bool) -> None:
    assert next(SUM.find(graph(nodes, outputs))).is_private == private


def test_nodes_that_nobody_reads_are_removed() -> None:
    found = graph("e = Exp(x) s = Add(e, w) n = Neg(e) y = Mul(n, n)")
    next(SUM.find(found)).remove_unread()
    assert [node.op_type for node in found] == ["Exp", "Neg", "Mul"]


def test_no_node_is_found_after_it_was_replaced() -> None:
    found = graph("e = Exp(x) f = Exp(w) s = Add(e, f) y = Neg(x)")
    for match in SUM.find(found):
        # Both operands of the sum could be the function.
        assert match.values["a"].name == "x"
        match.remove_unread()
    assert [node.op_type for node in found] == ["Exp", "Neg"]


def test_matches_follow_changes_of_the_graph() -> None:
    """Sums are replaced one after the other: what the second one reads is the replacement of the first."""
    found = graph("e = Exp(x) s = Add(e, w) f = Exp(s) y = Add(f, w)")
    operands = []
    for match in SUM.find(found):
        operands.append(match.values["a"].name)
        made = ir.node("Sum", match.values.values())
        made.outputs[0].name = f"{match.root.outputs[0].name}'"
        replace_node(match.root, [made], [(match.root.outputs[0], made.outputs[0])])
        match.remove_unread()
    assert operands == ["x", "s"]
    assert [node.op_type for node in found] == ["Sum", "Sum"]
    assert found[1].inputs[0] is found[0].outputs[0]
