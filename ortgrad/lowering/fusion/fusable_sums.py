"""Which sums can be part of a fused node: those of a value over known axes, with what then drops axes."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ortgrad.graph.traversal import constant_tensor, is_operator
from ortgrad.lowering.fusion.expressions import Expression
from ortgrad.lowering.fusion.fusable import ELEMENTS, Fusable, known_shape
from ortgrad.lowering.fusion.program import Total
from ortgrad.threads import lazy

_EXPRESSION = Expression("{0}")


@dataclass(frozen=True, eq=False)
class FusableSum(Fusable):
    """A node of ReduceSum as a result of a fused node; `shape` is that of the value that is added up."""

    axes: tuple[int, ...] = ()
    without: tuple[int, ...] = ()
    # The node that drops axes of the sum, if there is one.
    last: ir.Node | None = None

    @property
    def output(self) -> ir.Value:
        return (self.last or self.node).outputs[0]

    @property
    def nodes(self) -> list[ir.Node]:
        """The nodes that it stands for, the last one first."""
        return [self.node] if self.last is None else [self.last, self.node]

    @lazy
    def expression(self) -> Expression:
        return _EXPRESSION

    def total(self, value: int, by_rows: bool) -> Total:
        """Return the sum as part of a program."""
        return Total(value, self.axes, self.without, by_rows)


def read_sum(node: ir.Node) -> FusableSum | None:
    """Return the node as a sum of a fused node; None if it cannot be one."""
    if not is_operator(node, "ReduceSum") or not node.outputs[0].name:
        return None
    x = node.inputs[0]
    shape = None if x is None else known_shape(x)
    if x is None or shape is None or x.dtype not in ELEMENTS:
        return None
    axes = _axes(node, len(shape))
    if not axes:
        return None
    without = () if node.attributes.get_int("keepdims", 1) else axes
    last = _dropping_node(node, axes) if not without else None
    if last is not None:
        without = _dropped_axes(last, node.outputs[0]) or ()
    operator = f"ReduceSum over {axes} without {without}"
    return FusableSum(node, operator, (x,), (), ELEMENTS[x.dtype], shape, axes, without, last)


def _axes(node: ir.Node, rank: int) -> tuple[int, ...]:
    """Return the axes; an empty tuple if they are unknown, or the node adds nothing up."""
    given = node.inputs[1] if len(node.inputs) > 1 else None
    if given is None:
        return () if node.attributes.get_int("noop_with_empty_axes", 0) else tuple(range(rank))
    tensor = constant_tensor(given)
    if tensor is None:
        return ()
    axes = sorted(int(axis) + (rank if axis < 0 else 0) for axis in tensor.numpy().reshape(-1))
    if len(set(axes)) < len(axes) or any(not 0 <= axis < rank for axis in axes):
        return ()
    return tuple(axes)


def _dropping_node(node: ir.Node, axes: tuple[int, ...]) -> ir.Node | None:
    """Return the node that alone reads a sum, if it only drops axes that were added up."""
    total = node.outputs[0]
    users = {use.node for use in total.uses()}
    if len(users) != 1 or total.is_graph_output():
        return None
    (user,) = users
    if user.graph is not node.graph or user.domain != "" or not user.outputs[0].name:
        return None
    dropped = _dropped_axes(user, total)
    return user if dropped is not None and set(dropped) <= set(axes) else None


def _dropped_axes(node: ir.Node, value: ir.Value) -> tuple[int, ...] | None:
    """Return the axes of a value that a node drops; None if it may do something else."""
    shape = known_shape(value)
    if shape is None or node.op_type not in ("Squeeze", "Reshape") or node.inputs[0] is not value:
        return None
    given = node.inputs[1] if len(node.inputs) > 1 else None
    tensor = constant_tensor(given)
    if tensor is None:
        return None
    numbers = [int(number) for number in tensor.numpy().reshape(-1)]
    if node.op_type == "Squeeze":
        axes = tuple(sorted(number % len(shape) for number in numbers))
        return axes if len(set(axes)) == len(axes) else None
    return _dropped_by_reshape(shape, numbers)


def _dropped_by_reshape(shape: tuple[int | str, ...], numbers: list[int]) -> tuple[int, ...] | None:
    """Return the axes of one element without which a known shape is the one that a Reshape is given."""
    rest = [axis for axis, size in enumerate(shape) if size != 1]
    # A size of 0 may stand for that of the first axis.
    if len(rest) == 1 and numbers != [0] and numbers in ([-1], [shape[rest[0]]]):
        return tuple(axis for axis in range(len(shape)) if axis not in rest)
    if not rest and numbers in ([1], [-1]):
        return tuple(range(len(shape) - 1))
    return None
