"""Gradient rules: functions that record the gradients of a forward node's inputs.

    elementwise("Exp", lambda op, dy, y, x: dy * y)

    @gradient("Gather")
    def gather_gradient(node):
        shape = node.op.shape_of(node.input(0))
        return node.op.GatherGrad(shape, node.input(1), node.grad(0), **node.attributes)

A rule returns one value per input, None for an input without a gradient; a single value is the gradient of
the first input. Sums over broadcast axes, casts and accumulation are added by the backward pass, which also
drops the nodes that no requested gradient depends on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from ortgrad.autodiff.node_view import NodeView
from ortgrad.errors import RegistrationError
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.keywords import checked
from ortgrad.operators.declaration import find_anywhere

Gradients: TypeAlias = "Sequence[ir.Value | None]"
RuleFunction: TypeAlias = "Callable[[ForwardNode], Gradients | ir.Value | None]"
_Rule = TypeVar("_Rule", bound="RuleFunction")
Derivative: TypeAlias = "Callable[..., ir.Value]"
Scales: TypeAlias = Mapping[int, int] | Callable[[int], Mapping[int, int]]


@dataclass(frozen=True)
class Rule:
    """A declared rule; `function` is None for an operator whose gradient is zero everywhere."""

    function: RuleFunction | None
    broadcasts: bool = False
    scales: Scales | None = None
    straight_through: bool = False
    # Whether an element of the output depends on one element of each (broadcast) input.
    elementwise: bool = False
    # Whether the derivative may be infinite or NaN, whatever the other operands are.
    singular: bool = False

    def scales_of(self, count: int) -> Mapping[int, int]:
        """Return the index of the scale of each quantized input of a node with `count` inputs."""
        if self.scales is None:
            return {}
        return self.scales(count) if callable(self.scales) else self.scales


class UnsupportedError(Exception):
    """Raised by a rule for a node that it cannot differentiate; see `ForwardNode.unsupported`."""


_rules: dict[tuple[str, str], Rule] = {}


@checked
def gradient(
    *op_types: str,
    domain: str = "",
    broadcasts: bool = False,
    scales: Scales | None = None,
    straight_through: bool = False,
) -> Callable[[_Rule], _Rule]:
    """Declare the gradient rule of forward operators.

    With `broadcasts`, every gradient may have the shape of the (broadcast) output; it is summed to the shape
    of its input.

    `scales` is given for operators on quantized tensors: the index of the scale of each quantized input (-1
    for the output), as far as they have scales, or a function of the number of inputs that returns it. Their
    first output and their inputs have gradients even if their elements are integers; such a gradient is a
    float tensor, in units of the integers. If the first output is of integers, others are its scale and zero
    point and have no gradient. An operator that rounds to integers is declared with `straight_through`:
    rounding is differentiated as if it were the identity.

    >>> import ortgrad
    >>> @ortgrad.gradient("Square", domain="my.domain")
    ... def square_gradient(node):
    ...     return node.grad(0) * (node.input(0) * 2.0)
    """

    def declare(function: _Rule) -> _Rule:
        for op_type in op_types:
            _add(
                domain, op_type, Rule(function, broadcasts, scales, straight_through, elementwise=broadcasts)
            )
        return function

    return declare


def elementwise(
    op_type: str, *derivatives: Derivative | None, domain: str = "", singular: bool = False
) -> None:
    """Declare the gradient rule of an element-wise operator: one function per input.

        elementwise("Exp", lambda op, dy, y, x: dy * y)
        elementwise("Mul", lambda op, dy, y, a, b: dy * b, lambda op, dy, y, a, b: dy * a)
        elementwise("Elu", lambda op, dy, y, x, *, alpha: dy * op.Where(op.Greater(x, 0.0), 1.0, y + alpha))

    Each function is called with the recorder, the gradient of the output, the output and the inputs;
    keyword-only parameters receive the node's attributes of that name, `**attributes` all attributes. None
    stands for an input without a gradient. With several inputs, every gradient may have the shape of the
    (broadcast) output. An operator whose derivative may be infinite or NaN somewhere is `singular`.
    """
    for derivative in derivatives:
        if derivative is not None:
            _name_lambda(derivative, f"gradient_of_{op_type}")

    def rule(node: ForwardNode) -> Gradients:
        dy, y = node.grad(0), node.output(0)
        return [
            derivative(node.op, dy, y, *node.inputs, **_attributes_for(derivative, node))
            if derivative is not None and node.wants(i)
            else None
            for i, derivative in enumerate(derivatives)
        ]

    rule.__name__ = f"gradient_of_{op_type}"
    declared = Rule(rule, broadcasts=len(derivatives) > 1, elementwise=True, singular=singular)
    _add(domain, op_type, declared)


def _attributes_for(function: Derivative, node: ForwardNode) -> Mapping[str, Any]:
    """Return the node's attributes that the function takes as keyword parameters."""
    names = _keywords_of(function)
    return node.attributes if names is None else {name: node.attribute(name) for name in names}


@functools.cache
def _keywords_of(function: Derivative) -> Sequence[str] | None:
    """Return the names of the keyword parameters; None if there may be any."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def _name_lambda(function: Derivative, name: str) -> None:
    """Give a lambda a name for tracebacks; named functions keep theirs."""
    if function.__name__ == "<lambda>":
        function.__name__ = function.__qualname__ = name
        function.__code__ = function.__code__.replace(co_name=name)


def no_gradient(*op_types: str, domain: str = "") -> None:
    """Declare that operators are piecewise constant: their gradient is zero, as in PyTorch."""
    for op_type in op_types:
        _add(domain, op_type, Rule(None))


def _add(domain: str, op_type: str, rule: Rule) -> None:
    if (domain, op_type) in _rules:
        raise RegistrationError(f"{domain or 'ai.onnx'}::{op_type} has a gradient rule already")
    _rules[domain, op_type] = rule


def find_rule(op_type: str, domain: str) -> Rule | None:
    """Return the rule of an operator, or None."""
    return _rules.get(("" if domain == "ai.onnx" else domain, op_type))


def all_rules() -> Mapping[tuple[str, str], Rule]:
    """Return all declared rules by (domain, operator)."""
    return dict(_rules)


class ForwardNode(NodeView):
    """The argument of a gradient rule: a forward node, with the gradients of its outputs."""

    def __init__(
        self,
        node: ir.Node,
        op: Recorder,
        grads: Sequence[ir.Value | None],
        attributes: Mapping[str, Any],
        active: frozenset[ir.Value] | set[ir.Value],
    ) -> None:
        super().__init__(node, attributes)
        self.op = op
        self.active = active
        # Gradients of outer values that a subgraph of the node captures.
        self.captured: dict[ir.Value, ir.Value] = {}
        self._grads = grads

    @property
    def forward(self) -> ir.Node:
        return self.node

    def wants(self, i: int) -> bool:
        """Return whether the gradient of the i-th input is needed."""
        return self.optional(i) in self.active

    def output(self, i: int) -> ir.Value:
        """Return the i-th output; it is an error if it is absent."""
        if not self.has_output(i):
            raise self.unsupported(f"it has no output {i}")
        return self.outputs[i]

    def add_output(self, i: int) -> ir.Value:
        """Return the i-th output; if it is absent, it is added to the forward node."""
        if i >= len(self.outputs):
            self.forward.resize_outputs(i + 1)
        value = self.outputs[i]
        if not value.name:
            named = next(output.name for output in self.outputs if output.name)
            value.name = self.op.names.fresh(f"{named}/output_{i}")
        return value

    def become(self, op_type: str, domain: str) -> None:
        """Replace the operator of the forward node.

        The outputs of the new operator must begin with those of the old one.
        """
        self.forward.domain, self.forward.op_type, self.forward.version = domain, op_type, None

    def grad(self, i: int) -> ir.Value:
        """Return the gradient of the i-th output, or zeros of its shape if it has none."""
        given = self.optional_grad(i)
        return self.op.zeros_for(self.add_output(i)) if given is None else given

    def optional_grad(self, i: int) -> ir.Value | None:
        """Return the gradient of the i-th output, or None if it has none."""
        return self._grads[i] if i < len(self._grads) else None

    def attributes_for(self, op_type: str) -> dict[str, Any]:
        """Return the node's attributes that the gradient operator `op_type` declares as well."""
        declared = find_anywhere(op_type)
        assert declared is not None, op_type
        return {name: self.attributes[name] for name in declared.attributes if name in self.attributes}

    def unsupported(self, why: str) -> UnsupportedError:
        """Return the error to raise if the node cannot be differentiated; `why` is shown to the user."""
        return UnsupportedError(why)
