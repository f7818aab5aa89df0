"""Gradients of outer values that are computed once, after the backward loop.

The gradient of a matrix of weights is a product in every iteration; the gradient of a sequence from which
each iteration reads one element is mostly zeros. A sum of such terms would be read and written in every
iteration. Instead, the loop stacks the operands of the terms, and one product, or one GatherGrad, computes
the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortgrad.graph.recorder import Recorder
from ortgrad.operators.declaration import DOMAIN

Dimension = int | ir.SymbolicDim | None
Stacks = Mapping[ir.Value, ir.Value]


@dataclass(frozen=True)
class StackedGradient:
    """How the gradient of an outer value is computed after the loop."""

    # The values that every iteration stacks, and their shapes.
    operands: dict[ir.Value, tuple[Dimension, ...]]
    # Takes the stacks of the operands.
    compute: Callable[[Recorder, Stacks], ir.Value]


def stacked_gradient(
    value: ir.Value, grad: ir.Value, is_steady: Callable[[ir.Value], bool]
) -> StackedGradient | None:
    """Return how the sum over all iterations is computed after the loop; None if it is not.

    `grad` is the gradient of an outer value in one iteration. Only values that have the same shape in all
    iterations can be stacked; `is_steady` recognizes some of them.
    """
    return None if value.shape is None else _Finder(value, is_steady).find(grad, tuple(value.shape))


class _Finder:
    """Finds the operands of the gradient of a value."""

    def __init__(self, value: ir.Value, is_steady: Callable[[ir.Value], bool]) -> None:
        self._value = value
        self._is_steady = is_steady

    def find(
        self, grad: ir.Value, shape: Sequence[Dimension], turned: bool = False
    ) -> StackedGradient | None:
        """`shape` is that of the gradient. With `turned`, its transpose is to be computed."""
        node = grad.producer()
        inputs = [] if node is None else [each for each in node.inputs if each is not None]
        if node is None or len(inputs) != len(node.inputs):
            return None
        if (node.domain, node.op_type) == (DOMAIN, "GatherGrad"):
            return None if turned else self._gathered(node)
        if node.domain:
            return None
        if node.op_type in ("Add", "Sum"):
            parts = [self.find(each, shape, turned) for each in inputs]
            known = [part for part in parts if part is not None]
            return _sum(known) if len(known) == len(parts) else None
        if node.op_type == "Transpose":
            turns = len(shape) == 2 and list(node.attributes.get_ints("perm", [1, 0])) == [1, 0]
            return self.find(inputs[0], shape[::-1], not turned) if turns else None
        return self._product(node, inputs, shape, turned) if node.op_type == "Gemm" else None

    def _product(
        self, node: ir.Node, factors: Sequence[ir.Value], shape: Sequence[Dimension], turned: bool
    ) -> StackedGradient | None:
        flags = [node.attributes.get_int(name, 0) for name in ("transA", "transB")]
        scale = node.attributes.get_float("alpha", 1.0)
        # Both factors have this number of rows. Their columns must be known, for an empty stack.
        steady = next((each for each in factors if self._is_steady(each)), None)
        sizes = [size for size in shape if isinstance(size, int)]
        if flags != [1, 0] or len(factors) != 2 or len(sizes) != 2 or steady is None or steady.shape is None:
            return None
        rows = steady.shape[0]
        if isinstance(rows, int) and rows * sum(sizes) > sizes[0] * sizes[1]:
            # The stacks would be larger than the sum.
            return None

        def compute(op: Recorder, stacks: Stacks) -> ir.Value:
            left, right = (op.Flatten(stacks[each], axis=2) for each in factors)
            left, right = (right, left) if turned else (left, right)
            return op.Gemm(left, right, transA=1, alpha=None if scale == 1 else scale)

        return StackedGradient({each: (rows, n) for each, n in zip(factors, sizes, strict=True)}, compute)

    def _gathered(self, node: ir.Node) -> StackedGradient | None:
        _, indices, terms = node.inputs
        value, shape = self._value, self._value.shape
        if node.attributes.get_int("axis", 0) or indices is None or terms is None or shape is None:
            return None
        if not self._is_steady(indices) or indices.shape is None:
            return None

        def compute(op: Recorder, stacks: Stacks) -> ir.Value:
            whole, places = op.shape_of(value), stacks[indices]
            # For an empty stack, all sizes must be known beforehand.
            sizes = op.Concat(op.Shape(places), op.Slice(whole, [1], [2**63 - 1], [0]), axis=0)
            return op.GatherGrad(whole, places, op.Reshape(stacks[terms], sizes, allowzero=1), axis=0)

        own = tuple(indices.shape)
        return StackedGradient({indices: own, terms: (*own, *tuple(shape)[1:])}, compute)


def _sum(parts: Sequence[StackedGradient]) -> StackedGradient:
    operands = {operand: shape for part in parts for operand, shape in part.operands.items()}
    return StackedGradient(operands, lambda op, stacks: op.sum([each.compute(op, stacks) for each in parts]))
