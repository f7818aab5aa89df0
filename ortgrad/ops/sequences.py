"""Gradient rules of operators on sequences.

The gradient of a sequence is a sequence of the same length, whose element i is the gradient of element i.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient, no_gradient
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.ops._flow import choose

no_gradient("SequenceEmpty", "SequenceLength", "OptionalHasElement")


@gradient("SequenceConstruct")
def sequence_construct_gradient(node: ForwardNode) -> Gradients:
    return [node.op.SequenceAt(node.grad(0), i) for i in range(len(node.inputs))]


@gradient("SequenceAt")
def sequence_at_gradient(node: ForwardNode) -> ir.Value:
    return node.op.placed(node.grad(0), _place(node, 1), node.input(0))


@gradient("SequenceInsert")
def sequence_insert_gradient(node: ForwardNode) -> Gradients:
    op, dy = node.op, node.grad(0)
    if node.optional(2) is None:
        # The end. The sequence is not read, so a Loop that appends to it need not keep it.
        return op.SequenceErase(dy), op.SequenceAt(dy, -1)
    place = _place(node, 2)
    return op.SequenceErase(dy, place), op.SequenceAt(dy, place)


@gradient("SequenceErase")
def sequence_erase_gradient(node: ForwardNode) -> ir.Value:
    op, s = node.op, node.input(0)
    place = None if node.optional(1) is None else _place(node, 1)
    erased = op.SequenceAt(s, -1 if place is None else place)
    erased.shape = s.shape
    return op.SequenceInsert(node.grad(0), op.full_like(erased, 0.0), *([] if place is None else [place]))


@gradient("SplitToSequence")
def split_to_sequence_gradient(node: ForwardNode) -> ir.Value:
    op, x, axis, squeezed = node.op, node.input(0), node.attribute("axis"), False
    if not node.attribute("keepdims"):
        split = node.optional(1)
        if split is not None and (split.shape is None or len(split.shape) != 1):
            raise node.unsupported(
                "it has keepdims=0 and a split that is not known to be a vector: ONNX then ignores keepdims, "
                "onnxruntime does not; leave out the split or keepdims"
            )
        squeezed = split is None
    return _concatenated(op, node.grad(0), x, axis, squeezed)


@gradient("ConcatFromSequence")
def concat_from_sequence_gradient(node: ForwardNode) -> ir.Value:
    op, s, dy, axis = node.op, node.input(0), node.grad(0), node.attribute("axis")
    if node.attribute("new_axis"):
        return op.SplitToSequence(dy, axis=axis, keepdims=0)
    return op.SplitToSequence(dy, _lengths(op, s, axis), axis=axis)


@gradient("Optional", "OptionalGetElement")
def optional_gradient(node: ForwardNode) -> ir.Value:
    raise node.unsupported(
        "an optional value has a gradient only where OptionalGetElement reads the output of an Optional node "
        "directly; pass the tensor or sequence itself from one subgraph to the other"
    )


def _place(node: ForwardNode, i: int) -> ir.Value:
    """Return the position in the i-th input, counted from the start of the sequence in the first input."""
    op, place, known = node.op, node.input(i), node.constant(i)
    if known is not None and known.item() >= 0:
        return op.constant(np.array(known.item()))
    place = op.Cast(place, to=TensorProto.INT64)
    return op.Where(op.Less(place, 0), place + op.SequenceLength(node.input(0)), place)


def _lengths(op: Recorder, sequence: ir.Value, axis: int) -> ir.Value:
    """Return the lengths of the elements of a sequence along an axis, as a vector."""
    number, condition = (
        ir.Value(name=op.name(f"lengths/{name}"), type=ir.TensorType(dtype), shape=ir.Shape([]))
        for name, dtype in (("i", ir.DataType.INT64), ("condition", ir.DataType.BOOL))
    )

    def step(op: Recorder, i: ir.Value, condition: ir.Value) -> list[ir.Value]:
        length = op.Shape(op.SequenceAt(sequence, i), start=axis, end=None if axis == -1 else axis + 1)
        return [op.constant(np.array(True)), op.Squeeze(length, [0])]

    body = op.subgraph("lengths", [number, condition], step)
    (lengths,) = op.add("Loop", [op.SequenceLength(sequence), None], {"body": body})
    lengths.type, lengths.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([None])
    return lengths


def _concatenated(op: Recorder, sequence: ir.Value, like: ir.Value, axis: int, new_axis: bool) -> ir.Value:
    """Return the elements of a sequence as one tensor of a given shape."""

    def concatenated(op: Recorder) -> ir.Value:
        return op.ConcatFromSequence(sequence, axis=axis, new_axis=int(new_axis))

    known = like.shape[axis] if like.shape is not None and len(like.shape) else None
    if isinstance(known, int) and known > 0:
        return concatenated(op)
    # onnxruntime does not concatenate an empty sequence.
    is_empty = op.Equal(op.SequenceLength(sequence), 0)
    result = choose(op, is_empty, lambda op: op.full_like(like, 0.0), concatenated, like)
    result.shape = like.shape
    return result
