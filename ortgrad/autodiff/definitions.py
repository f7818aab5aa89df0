"""Definitions: operators written in other operators.

    @definition("BiasAdd", domain="com.microsoft")
    def bias_add(op, node):
        return node.input(0) + node.input(1) + node.input(2)

A definition records what a forward node computes and returns its outputs, None for those that it does not
compute; a single value is the first output. It serves two purposes: an operator without a gradient rule is
differentiated through its definition, and the types and shapes of the outputs of an operator that onnx does
not know are inferred from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from ortgrad.autodiff.node_view import NodeView
from ortgrad.errors import RegistrationError
from ortgrad.graph.lazy import Recorder, ir

Definition: TypeAlias = "Callable[[Recorder, NodeView], Sequence[ir.Value | None] | ir.Value]"
_Definition = TypeVar("_Definition", bound=Definition)

# The domain of definitions of operators that ONNX had up to opset 9, and that onnxruntime still runs.
RETIRED = "ortgrad.retired"

NO_RULE = "there is no gradient rule for it"

_definitions: dict[tuple[str, str], Definition] = {}
_reasons: dict[tuple[str, str], str] = {}


def definition(*op_types: str, domain: str = "") -> Callable[[_Definition], _Definition]:
    """Declare the definition of forward operators."""

    def declare(function: _Definition) -> _Definition:
        for op_type in op_types:
            if (domain, op_type) in _definitions:
                raise RegistrationError(f"{domain or 'ai.onnx'}::{op_type} has a definition already")
            _definitions[domain, op_type] = function
        return function

    return declare


def undefined(*op_types: str, domain: str = "", why: str) -> None:
    """Declare that operators have neither a definition nor a gradient rule, and why."""

    def refuse(op: Recorder, node: NodeView) -> ir.Value:
        raise node.unsupported(f"{NO_RULE}: {why}")

    definition(*op_types, domain=domain)(refuse)
    _reasons.update(((domain, op_type), why) for op_type in op_types)


def find_definition(op_type: str, domain: str) -> Definition | None:
    """Return the definition of an operator, or None."""
    return _definitions.get(("" if domain == "ai.onnx" else domain, op_type))


def all_definitions() -> Mapping[tuple[str, str], Definition]:
    """Return all definitions by (domain, operator), without those of old operators."""
    return {
        key: function for key, function in _definitions.items() if key not in _reasons and key[0] != RETIRED
    }


def retired_operators() -> list[str]:
    """Return the operators with a definition for models of opset 9 and older."""
    return sorted(op_type for domain, op_type in _definitions if domain == RETIRED)


def all_reasons() -> Mapping[tuple[str, str], str]:
    """Return by (domain, operator) why operators are not differentiated."""
    return dict(_reasons)
