"""Patterns of subgraphs, written as functions that record them.

    BIASED = Pattern(lambda op, x, w, bias: op.Add(op.Conv(x, w), bias))

    for match in BIASED.find(model.graph):
        match.values["bias"], match.node("Conv"), match.is_private

The parameters of the function stand for any values, and None for an absent input: `op.either(bias, None)`. A
parameter or node that is used twice is the same one in both places. The operands of commutative operators are
found in either order. All nodes are standard operators, in one graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import onnx_ir as ir

from ortgrad.graph.outputs import remove_nodes

_COMMUTATIVE = frozenset({"Add", "Mul"})


@dataclass(frozen=True, eq=False)
class Parameter:
    """Any value."""

    name: str


@dataclass(frozen=True, eq=False)
class Result:
    """The first output of a node of one of some operators, whose only inputs are the operands."""

    operators: frozenset[str]
    operands: tuple[Term, ...]


@dataclass(frozen=True, eq=False)
class Choice:
    """Any of several terms; an earlier one is preferred."""

    terms: tuple[Term, ...]


# None is an absent input.
Term = Parameter | Result | Choice | None
# What terms stand for; the result of the whole pattern comes first.
_Found = Mapping[Parameter | Result, ir.Value]


class Operators:
    """The object `op` of patterns: `op.Add(x, y)`, `op.one_of("Relu", "Tanh")(x)`, `op.either(x, y)`."""

    def __getattr__(self, op_type: str) -> Callable[..., Result]:
        return self.one_of(op_type)

    def one_of(self, *op_types: str) -> Callable[..., Result]:
        """Return a function of operands, for a node of any of these operators."""
        return lambda *operands: Result(frozenset(op_types), operands)

    def either(self, *terms: Term) -> Choice:
        """Return what stands for any of these terms."""
        return Choice(terms)


@dataclass(frozen=True)
class Match:
    """The nodes that match a pattern, the last one first, and the values of its parameters."""

    nodes: Sequence[ir.Node]
    values: Mapping[str, ir.Value]

    @property
    def root(self) -> ir.Node:
        """The last node, which computes the result."""
        return self.nodes[0]

    @property
    def is_private(self) -> bool:
        """Whether nothing else needs the outputs of the nodes before the last one."""
        inner = [value for node in self.nodes[1:] for value in node.outputs]
        read = any(v.is_graph_output() or any(u.node not in self.nodes for u in v.uses()) for v in inner)
        return not read and not any(value in inner for value in self.values.values())

    def node(self, op_type: str) -> ir.Node:
        """Return the last node of an operator."""
        return next(node for node in self.nodes if node.op_type == op_type)

    def remove_unread(self) -> None:
        """Remove the nodes whose outputs nothing reads any more."""
        left = {node for node in self.nodes if node.graph is not None}
        while gone := {n for n in left if not any(v.uses() or v.is_graph_output() for v in n.outputs)}:
            remove_nodes(gone)
            left -= gone


class Pattern:
    """A subgraph with one result, described by a function that records it."""

    def __init__(self, function: Callable[..., Term]) -> None:
        _, *parameters = inspect.signature(function).parameters.values()
        self._term = function(Operators(), *(Parameter(each.name) for each in parameters))
        self._last = _last_operators(self._term)

    def find(self, nodes: Iterable[ir.Node]) -> Iterator[Match]:
        """Yield the matches that end with one of the nodes.

        Each is found when it is asked for: the graph may be changed in between, and a match holds values that
        later replacements make out of date.
        """
        for node in [node for node in nodes if node.op_type in self._last]:
            if node.graph is not None:
                for match in self.match(node.outputs[0]):
                    yield match
                    if node.graph is None:
                        break

    def match(self, value: ir.Value | None) -> Iterator[Match]:
        """Yield the matches that compute a value."""
        for found in _matches(self._term, value, {}):
            producers = (each.producer() for term, each in found.items() if isinstance(term, Result))
            nodes = [node for node in producers if node is not None]
            if len({node.graph for node in nodes}) == 1:
                yield Match(nodes, {t.name: each for t, each in found.items() if isinstance(t, Parameter)})


def _last_operators(term: Term) -> frozenset[str]:
    if isinstance(term, Choice):
        return frozenset().union(*map(_last_operators, term.terms))
    return term.operators if isinstance(term, Result) else frozenset()


def _matches(term: Term, value: ir.Value | None, found: _Found) -> Iterator[_Found]:
    """Yield what was found before, together with each way in which the term can stand for the value."""
    if isinstance(term, Choice):
        for each in term.terms:
            yield from _matches(each, value, found)
    elif term is None or value is None:
        if term is None and value is None:
            yield found
    elif term in found:
        if found[term] is value:
            yield found
    elif isinstance(term, Parameter):
        yield {**found, term: value}
    else:
        node = value.producer()
        if node is None or node.domain or node.op_type not in term.operators or value is not node.outputs[0]:
            return
        inputs = node.inputs
        for order in (inputs, inputs[::-1]) if node.op_type in _COMMUTATIVE else (inputs,):
            yield from _match_all(list(zip_longest(term.operands, order)), {**found, term: value})


def _match_all(pairs: Sequence[tuple[Term, ir.Value | None]], found: _Found) -> Iterator[_Found]:
    if not pairs:
        yield found
        return
    for each in _matches(*pairs[0], found):
        yield from _match_all(pairs[1:], each)
