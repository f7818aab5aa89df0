"""Elements that the forward pass does not choose: their gradient is 0, whatever the derivative is.

In y = Where(x > 0, Log(x), 0), the gradient of Log's output is 0 where x is not positive. At x = 0 its
derivative is infinite, and 0 * inf is NaN. The backward pass therefore remembers the conditions under which a
gradient was set to zero, and applies Where(x > 0, dx, 0) once more to the gradient of an operator whose
derivative may not be finite. Only choices that make the other elements irrelevant count: Where, Relu, Clip,
and a product with a mask of booleans. A gradient that is 0 for another reason, such as that of Sqrt(x) in
Sqrt(x) ** 2 at 0, becomes NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ortgrad.autodiff.rules import Rule, find_rule
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import constant_tensor

# Operators whose result may not be finite, besides those with a singular rule, and operators that pass it on;
# all others are taken to be finite.
_INFINITE = frozenset(["Div", "Exp", "Pow", "Tan"])
_PASSING = frozenset(["Abs", "Add", "Cast", "Identity", "Mul", "Neg", "Sub", "Sum"])
_STEPS = 8


@dataclass(eq=False)
class Choice:
    """Where a gradient is not set to zero.

    `flags` are booleans that broadcast to the gradient, and `chosen` is the value of those elements; numbers
    stand for whether they are positive. `before` is the choice of the gradient from which this one is made.
    """

    flags: ir.Value
    chosen: bool
    before: Choice | None


class Selections:
    """The choices that gradients depend on."""

    def __init__(self, op: Recorder) -> None:
        self._op = op
        self._choices: dict[ir.Value, Choice] = {}

    def behind(self, node: ir.Node, rule: Rule, i: int, dy: ir.Value | None, grad: ir.Value) -> Choice | None:
        """Return the choice for the gradient that the rule has recorded for the i-th input."""
        if not rule.elementwise:
            return None
        before = None if dy is None else self._choices.get(dy)
        flags, chosen = (None, True) if grad is dy else _own_flags(node, i, grad)
        return before if flags is None else Choice(flags, chosen, before)

    def guard(self, node: ir.Node, rule: Rule, i: int, grad: ir.Value, choice: Choice | None) -> ir.Value:
        """Return the gradient, set to zero again if the operator's derivative may not be finite."""
        if choice is None or not (rule.singular or _may_be_infinite(node, i)):
            return grad
        # All conditions become one, so that the next guard has little to do.
        choice.flags, choice.chosen, choice.before = self._together(choice), True, None
        guarded: ir.Value = self._op.Where(choice.flags, grad, 0.0)
        return guarded

    def remember(self, grad: ir.Value, choice: Choice | None) -> None:
        """Remember the choice for a gradient."""
        if choice is not None:
            self._choices[grad] = choice

    def _together(self, choice: Choice) -> ir.Value:
        """Return where all choices agree not to set a gradient to zero."""
        op, found, last = self._op, None, choice
        while True:
            flags = last.flags
            if flags.dtype != ir.DataType.BOOL:
                flags = op.Greater(flags, 0.0)
            flags = flags if last.chosen else op.Not(flags)
            found = flags if found is None else op.And(found, flags)
            if last.before is None:
                return found
            last = last.before


def _own_flags(node: ir.Node, i: int, grad: ir.Value) -> tuple[ir.Value | None, bool]:
    """Return how this node chooses its i-th input; None if it does not."""
    if node.op_type == "Mul":
        other = node.inputs[1 - i]
        cast = None if other is None else other.producer()
        mask = cast.inputs[0] if cast is not None and cast.op_type == "Cast" else None
        return (mask if mask is not None and mask.dtype == ir.DataType.BOOL else None), True
    producer = grad.producer()
    if producer is not None and producer.op_type == "ReluGrad":
        return producer.inputs[1], True
    if producer is not None and producer.op_type == "Where":
        flags, if_true, if_false = producer.inputs
        if _is_zero(if_false):
            return flags, True
        if _is_zero(if_true):
            return flags, False
    return None, True


def _is_zero(value: ir.Value | None) -> bool:
    tensor = constant_tensor(value)
    return tensor is not None and tensor.size == 1 and not tensor.numpy().any()


def _may_be_infinite(node: ir.Node, i: int) -> bool:
    """Return whether the other operand may make the derivative with respect to the i-th input infinite."""
    if node.op_type == "Pow":
        # The derivatives of whole powers are finite, from the first power on.
        exponent = None if i else constant_tensor(node.inputs[1])
        numbers = None if exponent is None else exponent.numpy()
        return numbers is None or not bool(((numbers >= 1) & (numbers % 1 == 0)).all())
    if node.op_type == "Div":
        # If a scalar is zero, no element of the result is finite.
        other = node.inputs[1]
        scalar = other is not None and other.shape is not None and not len(other.shape)
        return i == 1 or not (scalar or constant_tensor(other) is not None)
    if node.op_type == "Mul":
        return _has_infinities(node.inputs[1 - i], _STEPS)
    return False


def _has_infinities(value: ir.Value | None, steps: int) -> bool:
    """Return whether a value comes from an operator whose result may not be finite, a few steps before."""
    node = None if value is None else value.producer()
    if node is None or not steps:
        return False
    rule = find_rule(node.op_type, node.domain)
    if node.op_type in _INFINITE or (rule is not None and rule.singular):
        return True
    return node.op_type in _PASSING and any(_has_infinities(v, steps - 1) for v in node.inputs)
