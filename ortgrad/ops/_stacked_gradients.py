"""Gradients of outer values that are computed once, after the backward loop.

The gradient of a matrix of weights is a product in every iteration, and that of a sequence of which each
iteration reads an element is full of zeros. Added up iteration by iteration, they would be read and written
in each. The operands of these terms are stacked by the loop instead, and one product, or one GatherGrad, has
the sum as its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortgrad.graph.recorder import Recorder
from ortgrad.operators.declaration import DOMAIN

Dimension = int | ir.SymbolicDim | None


@dataclass(frozen=True)
class StackedGradient:
    """How the gradient of an outer value is computed after the loop."""

    # The shapes of what is stacked in every iteration.
    operands: dict[ir.Value, tuple[Dimension, ...]]
    # Takes the outer value and the stacks.
    compute: Callable[[Recorder, ir.Value, Sequence[ir.Value]], ir.Value]


def stacked_gradient(
    value: ir.Value, term: ir.Value, is_steady: Callable[[ir.Value], bool]
) -> StackedGradient | None:
    """Return how the sum of a term over all iterations is computed after the loop; None if it is not.

    `value` is the outer value whose gradient the sum is. Only what has the same shape in all iterations can
    be stacked; `is_steady` tells for some values that they have.
    """
    node, shape = term.producer(), value.shape
    inputs = [] if node is None else [each for each in node.inputs if each is not None]
    if node is None or shape is None or len(inputs) != len(node.inputs):
        return None
    if (node.domain, node.op_type) == ("", "Gemm") and _multiplies_transposed(node):
        # Both factors have as many rows. An empty stack has the columns that are known.
        steady = next((each for each in inputs if is_steady(each)), None)
        if steady is None or steady.shape is None or not all(isinstance(size, int) for size in shape):
            return None
        rows = steady.shape[0]
        return StackedGradient({each: (rows, n) for each, n in zip(inputs, shape, strict=True)}, _product)
    if (node.domain, node.op_type) == (DOMAIN, "GatherGrad") and node.attributes.get_int("axis", 0) == 0:
        _, indices, terms = inputs
        if is_steady(indices) and indices.shape is not None:
            sizes = tuple(indices.shape)
            return StackedGradient({indices: sizes, terms: (*sizes, *shape[1:])}, _gathered)
    return None


def _multiplies_transposed(node: ir.Node) -> bool:
    integers, scale = node.attributes.get_int, node.attributes.get_float("alpha", 1.0)
    return (integers("transA", 0), integers("transB", 0), scale, len(node.inputs)) == (1, 0, 1.0, 2)


def _product(op: Recorder, value: ir.Value, stacks: Sequence[ir.Value]) -> ir.Value:
    left, right = (op.Flatten(stack, axis=2) for stack in stacks)
    return op.Gemm(left, right, transA=1)


def _gathered(op: Recorder, value: ir.Value, stacks: Sequence[ir.Value]) -> ir.Value:
    indices, terms = stacks
    shape = op.shape_of(value)
    # An empty stack has no sizes that are not known before.
    sizes = op.Concat(op.Shape(indices), op.Slice(shape, [1], [2**63 - 1], [0]), axis=0)
    return op.GatherGrad(shape, indices, op.Reshape(terms, sizes, allowzero=1), axis=0)
