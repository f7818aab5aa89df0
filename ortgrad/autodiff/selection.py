"""Elements that the forward pass does not choose: their gradient is 0, whatever the derivative is.

In y = Where(x > 0, Log(x), 0), the gradient of Log's output is 0 where x is not positive. At x = 0 its
derivative is infinite, and 0 * inf is NaN. The backward pass therefore remembers under which conditions a
gradient was set to zero, and says Where(x > 0, dx, 0) once more behind an operator whose derivative may not be
finite. Only choices count, which make the other elements irrelevant: Where, Relu, Clip, a product with a mask
of booleans. A gradient that is 0 for another reason, as behind Sqrt(x) ** 2 at 0, stays NaN.
"""

from __future__ import annotations

from typing import TypeAlias

import onnx_ir as ir

from ortgrad.autodiff.rules import Rule
from ortgrad.graph.recorder import Recorder

# Booleans that broadcast to a gradient, and which of both values the elements have that are not set to zero.
# Numbers stand for whether they are positive; the comparison is recorded where it is needed.
Condition: TypeAlias = tuple[ir.Value, bool]

# Element-wise operators whose derivative may be infinite or NaN at finite operands.
_SINGULAR = frozenset(
    [
        "Acos",
        "Acosh",
        "Asin",
        "Atanh",
        "Cosh",
        "Div",
        "Exp",
        "Log",
        "Mod",
        "Pow",
        "Reciprocal",
        "Sinh",
        "Sqrt",
    ]
)


class Selections:
    """The conditions under which gradients were set to zero."""

    def __init__(self, op: Recorder) -> None:
        self._op = op
        self._conditions: dict[ir.Value, tuple[Condition, ...]] = {}

    def behind(
        self, node: ir.Node, rule: Rule, i: int, dy: ir.Value | None, grad: ir.Value
    ) -> tuple[Condition, ...]:
        """Return the conditions of the gradient that the rule has recorded for the i-th input."""
        if not rule.elementwise:
            return ()
        inherited = () if dy is None else self._conditions.get(dy, ())
        return (*inherited, *self._own(node, i, grad))

    def guard(self, node: ir.Node, i: int, grad: ir.Value, conditions: tuple[Condition, ...]) -> ir.Value:
        """Return the gradient, set to zero again if the operator's derivative may not be finite."""
        if node.op_type not in _SINGULAR and not (node.op_type == "Mul" and _varies(node.inputs[1 - i])):
            return grad
        for condition, chosen in conditions:
            if condition.dtype != ir.DataType.BOOL:
                condition = self._op.Greater(condition, 0.0)
            grad = self._op.Where(condition, grad, 0.0) if chosen else self._op.Where(condition, 0.0, grad)
        return grad

    def remember(self, grad: ir.Value, conditions: tuple[Condition, ...]) -> None:
        """Remember the conditions of a gradient."""
        if conditions:
            self._conditions[grad] = conditions

    def _own(self, node: ir.Node, i: int, grad: ir.Value) -> tuple[Condition, ...]:
        """Return the condition under which this node chooses its i-th input."""
        if node.op_type == "Mul":
            other = node.inputs[1 - i]
            cast = None if other is None else other.producer()
            mask = cast.inputs[0] if cast is not None and cast.op_type == "Cast" else None
            return ((mask, True),) if mask is not None and mask.dtype == ir.DataType.BOOL else ()
        producer = grad.producer()
        if producer is None:
            return ()
        if producer.op_type == "ReluGrad":
            y = producer.inputs[1]
            assert y is not None
            return ((y, True),)
        if producer.op_type == "Where":
            condition, if_true, if_false = producer.inputs
            assert condition is not None
            if _is_zero(if_false):
                return ((condition, True),)
            if _is_zero(if_true):
                return ((condition, False),)
        return ()


def _is_zero(value: ir.Value | None) -> bool:
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return tensor is not None and tensor.size == 1 and not tensor.numpy().any()


def _varies(value: ir.Value | None) -> bool:
    """Return whether an operand is no constant; constants are finite."""
    return value is not None and ir.convenience.get_const_tensor(value) is None
