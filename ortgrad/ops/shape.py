"""Gradient rules of operators that move elements, and SliceGrad."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient
from ortgrad.errors import NodeError
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.contract import check_length
from ortgrad.operators.declaration import FLOATS, INTEGERS, Empty, operator
from ortgrad.ops.index import numbered, scatter_back, scatter_flat, shape_of


@gradient("Reshape", "Flatten")
def reshape_gradient(node: ForwardNode) -> ir.Value:
    return node.op.Reshape(node.grad(0), node.op.shape_of(node.input(0)), allowzero=1)


@gradient("Squeeze", "Unsqueeze")
def squeeze_gradient(node: ForwardNode) -> ir.Value:
    axes = node.constant(1)
    # For Squeeze, an empty list of axes stands for all of length 1.
    if axes is None or not axes.size:
        return reshape_gradient(node)
    inverse = node.op.Unsqueeze if node.op_type == "Squeeze" else node.op.Squeeze
    # onnxruntime accepts a scalar as the axes of Unsqueeze, but not of Squeeze.
    return inverse(node.grad(0), axes.reshape(-1).astype(np.int64))


@gradient("Transpose")
def transpose_gradient(node: ForwardNode) -> ir.Value:
    perm = node.attribute("perm")
    inverse = None if perm is None else [int(i) for i in np.argsort(perm)]
    return node.op.Transpose(node.grad(0), perm=inverse)


@gradient("Expand", broadcasts=True)
def expand_gradient(node: ForwardNode) -> ir.Value:
    return node.grad(0)


@gradient("Tile")
def tile_gradient(node: ForwardNode) -> ir.Value:
    op, x, repeats = node.op, node.input(0), node.constant(1)
    rank = _known_rank(x)
    if rank is None:
        # The repetitions and the lengths of all axes, interleaved.
        pairs = op.Concat(op.Unsqueeze(node.input(1), [1]), op.Unsqueeze(op.Shape(x), [1]), axis=1)
        split = op.Reshape(node.grad(0), op.Reshape(pairs, [-1]), allowzero=1)
        sums = op.Range(0, op.Size(pairs), 2)
        # A scalar has no axes.
        return op.ReduceSum(split, sums, keepdims=0, noop_with_empty_axes=1)
    times: list[int | ir.Value] = (
        [op.Slice(node.input(1), [i], [i + 1]) for i in range(rank)] if repeats is None else repeats.tolist()
    )
    # Each tiled axis is split into two: the repetitions, which are summed over, and the axis itself.
    lengths: list[int | ir.Value] = []
    places = []
    for i, count in enumerate(times):
        if not (isinstance(count, int) and count == 1):
            places.append(len(lengths))
            lengths.append(count)
        lengths.append(_length(op, x, i))
    if not places:
        return node.grad(0)
    split = op.Reshape(node.grad(0), _vector(op, *lengths), allowzero=1)
    return op.ReduceSum(split, places, keepdims=0)


def _known_rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _length(op: Recorder, value: ir.Value, axis: int) -> int | ir.Value:
    """The length of an axis: a number if it is known, else a vector of length 1."""
    known = value.shape[axis] if value.shape is not None else None
    if isinstance(known, int):
        return known
    return op.Shape(value, start=axis, end=None if axis == -1 else axis + 1)


def _vector(op: Recorder, *lengths: int | ir.Value) -> ir.Value:
    """The lengths as one vector."""
    if all(isinstance(n, int) for n in lengths):
        return op.constant(np.array(lengths, np.int64))
    return op.Concat(*([n] if isinstance(n, int) else n for n in lengths), axis=0)


@gradient("Pad")
def pad_gradient(node: ForwardNode) -> ir.Value | Gradients:
    op, dy, x, axes = node.op, node.grad(0), node.input(0), node.optional(3)
    mode, rank = node.attribute("mode"), _known_rank(x)
    if mode != "constant":
        # The positions in X of the elements of the output.
        source = op.Pad(numbered(op, op.shape_of(x)), node.input(1), None, axes, rank=rank, mode=mode)
        return scatter_flat(op, dy, op.shape_of(x), source)
    pads = node.constant(1)
    dx = op.Pad(dy, -node.input(1) if pads is None else op.constant(-pads), None, axes, rank=rank)
    if not node.wants(2):
        return dx
    value = node.input(2)
    padding = op.Pad(op.full_like(x, 0.0), node.input(1), op.number(1.0, x), axes, rank=rank)
    total = op.ReduceSum(dy * padding, keepdims=0)
    return dx, None, op.Reshape(total, op.shape_of(value))


@gradient("CenterCropPad")
def center_crop_pad_gradient(node: ForwardNode) -> ir.Value:
    op, x, axes = node.op, node.input(0), node.attribute("axes")
    # Negative pads crop. The division rounds towards 0, as both cropping and padding do.
    missing = op.shape_of(x) - op.shape_of(node.output(0))
    missing = missing if axes is None else op.Gather(missing, axes)
    before = missing / 2
    pads = op.Concat(before, missing - before, axis=0)
    return op.Pad(node.grad(0), pads, None, axes, rank=_known_rank(x))


@gradient("Concat")
def concat_gradient(node: ForwardNode) -> ir.Value | Gradients:
    op, axis, inputs = node.op, node.attribute("axis"), [node.input(i) for i in range(len(node.inputs))]
    if len(inputs) == 1:
        return node.grad(0)
    lengths = _vector(op, *(_length(op, x, axis) for x in inputs))
    return tuple(op.Split(node.grad(0), lengths, axis=axis, _outputs=len(inputs)))


@gradient("Split")
def split_gradient(node: ForwardNode) -> ir.Value:
    count = len(node.outputs)
    if count == 1:
        return node.grad(0)
    grads = [node.grad(i) for i in range(count)]
    return node.op.Concat(*grads, axis=node.attribute("axis"))


@gradient("DepthToSpace")
def depth_to_space_gradient(node: ForwardNode) -> ir.Value:
    op, block = node.op, node.attribute("blocksize")
    # SpaceToDepth orders channels as DCR does: rows and columns of the block, then depth.
    dx = op.SpaceToDepth(node.grad(0), blocksize=block)
    if node.attribute("mode") == "DCR":
        return dx
    x = node.input(0)
    batch, height, width = (_length(op, x, i) for i in (0, 2, 3))
    shape = _vector(op, batch, block * block, _length(op, node.output(0), 1), height, width)
    split = op.Transpose(op.Reshape(dx, shape, allowzero=1), perm=[0, 2, 1, 3, 4])
    return op.Reshape(split, op.shape_of(x), allowzero=1)


@gradient("SpaceToDepth")
def space_to_depth_gradient(node: ForwardNode) -> ir.Value:
    return node.op.DepthToSpace(node.grad(0), **node.attributes)


@gradient("Trilu")
def trilu_gradient(node: ForwardNode) -> ir.Value:
    return node.op.Trilu(node.grad(0), node.optional(1), **node.attributes)


@gradient("ReverseSequence")
def reverse_sequence_gradient(node: ForwardNode) -> ir.Value:
    return node.op.ReverseSequence(node.grad(0), node.input(1), **node.attributes)


@gradient("Slice")
def slice_gradient(node: ForwardNode) -> ir.Value:
    op, dy, x, starts, steps = node.op, node.grad(0), node.input(0), node.input(1), node.optional(4)
    axes = _slice_axes(node)
    given = node.constant(4)
    if steps is not None and (given is None or (given != 1).any()):
        if starts.dtype not in (None, axes.dtype):
            axes = op.Cast(axes, to=int(starts.dtype))
        return op.SliceGrad(dy, op.shape_of(x), starts, node.input(2), axes, steps)
    pads = _static_pads(node)
    if pads is not None:
        return op.Pad(dy, pads, None, axes, rank=_known_rank(x))
    first, length = op.Cast(starts, to=TensorProto.INT64), op.Gather(op.shape_of(x), axes)
    first = op.Where(op.Less(first, 0), first + length, first)
    before = op.Min(op.Max(first, 0), length)
    after = length - before - op.Gather(op.shape_of(node.output(0)), axes)
    return op.Pad(dy, op.Concat(before, after, axis=0), None, axes, rank=_known_rank(x))


def _slice_axes(node: ForwardNode) -> ir.Value:
    op, axes, known = node.op, node.optional(3), node.constant(3)
    if known is not None:
        return op.constant(known.astype(np.int64))
    if axes is not None:
        return op.Cast(axes, to=TensorProto.INT64)
    shape = node.input(1).shape
    if shape is not None and isinstance(shape[0], int):
        return op.constant(np.arange(shape[0]))
    return op.Range(0, op.Size(node.input(1)), 1)


def _static_pads(node: ForwardNode) -> list[int] | None:
    """What a slice with constant bounds cuts off before and after it, by axis; None if not known."""
    starts, ends, shape = node.constant(1), node.constant(2), node.input(0).shape
    axes = np.arange(len(starts)) if starts is not None and node.optional(3) is None else node.constant(3)
    if starts is None or ends is None or axes is None or shape is None:
        return None
    if not starts.shape == ends.shape == axes.shape == (starts.size,):
        raise NodeError(
            f"starts, ends and axes have shapes {starts.shape}, {ends.shape} and {axes.shape}; "
            "they must be vectors of one length"
        )
    before, after = [], []
    for start, end, axis in zip(starts, ends, axes, strict=True):
        length = shape[int(axis)]
        if not isinstance(length, int):
            return None
        first, last, _ = slice(int(start), int(end)).indices(length)
        before.append(first)
        after.append(length - max(first, last))
    return before + after


@operator(
    "SliceGrad",
    inputs=["dY", "shape: int64", "starts: Tind", "ends: Tind", "axes?: Tind", "steps?: Tind"],
    outputs=["dX"],
    shapes=lambda dy, shape, *_: [shape_of(shape)],
    dims={"shape[]": "*X", "dY": "*Y:X", "starts": "A", "ends": "A", "axes": "A", "steps": "A"},
    types={"T": FLOATS, "Tind": INTEGERS},
    auto="python",
)
def slice_grad(
    dy: np.ndarray,
    shape: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    axes: np.ndarray | None,
    steps: np.ndarray | None,
    *,
    empty: Empty,
) -> np.ndarray:
    """dX[starts:ends:steps] = dY, 0 elsewhere"""
    dims = tuple(shape.tolist())
    check_length("starts", starts.size)
    axes = np.arange(starts.size) if axes is None else axes
    steps = np.ones(starts.size, np.int64) if steps is None else steps
    if len(set((axes % max(1, len(dims))).tolist())) < axes.size:
        raise ValueError(f"axes {axes.tolist()} name one axis of {list(dims)} twice")
    window = [slice(None)] * len(dims)
    for start, end, axis, step in zip(*(a.tolist() for a in (starts, ends, axes, steps)), strict=True):
        if not -len(dims) <= axis < len(dims):
            raise ValueError(f"axis {axis} does not exist in the shape {list(dims)}")
        if step == 0:
            raise ValueError("a step is 0")
        first, last, _ = slice(start, end, step).indices(dims[axis])
        # Here, a bound of -1 means before the first element, not the last one.
        picked = range(first, last, step)
        window[axis] = slice(first, last if last >= 0 else None, step) if picked else slice(0, 0)
    dx = empty(0, dims)
    dx.fill(0)
    part = dx[tuple(window)]
    if part.shape != dy.shape:
        raise ValueError(f"the slice of {list(dims)} has shape {list(part.shape)}, dY has {list(dy.shape)}")
    part[...] = dy
    return dx


@slice_grad.onnx
def slice_grad_body(
    op: Recorder,
    dy: ir.Value,
    shape: ir.Value,
    starts: ir.Value,
    ends: ir.Value,
    axes: ir.Value | None,
    steps: ir.Value | None,
) -> ir.Value:
    return scatter_back(op, dy, shape, lambda x: op.Slice(x, starts, ends, axes, steps), unique=True)
