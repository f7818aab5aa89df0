"""The gradient rule of the short-time Fourier transform."""

from __future__ import annotations

import math

from onnx import TensorProto

from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient, no_gradient
from ortgrad.graph.lazy import Recorder, ir

# A table of filters for given frequencies, which ONNX declares not differentiable.
no_gradient("MelWeightMatrix")


@gradient("STFT")
def stft_gradient(node: ForwardNode) -> Gradients:
    """dsignal = the frames window * dZ added where they overlap, dwindow = sum(frames * dZ)

    dZ is the gradient of the windowed frames, the conjugate transform of dY.
    """
    op, dy, x, window = node.op, node.grad(0), node.input(0), node.optional(2)
    step = op.Cast(op.Reshape(node.input(1), [1]), to=TensorProto.INT64)
    length = _frame_length(node)
    # The signal as (batch, time, parts): a real one has no imaginary part, and may have no axis for it.
    signal = op.Reshape(x, op.Concat(op.Shape(x, end=2), [-1], axis=0))
    real = x.shape is not None and (len(x.shape) == 2 or x.shape[-1] == 1)
    if _is_long(_known_length(node)):
        dz = _transform(op, dy, length)
    else:
        dz = _product(op, dy, length, 1 if real else 2)
    dz = op.Slice(dz, [0], [1] if real else op.Shape(signal, start=2), [3])
    if window is None:
        return [_overlap_add(op, dz, step, signal, x)]
    dx = _overlap_add(op, dz * op.Unsqueeze(window, [1]), step, signal, x)
    dwindow = None
    if node.wants(2):
        starts = op.Range(0, op.Gather(op.Shape(dy), 1), 1) * step
        places = op.Unsqueeze(starts, [1]) + op.Range(0, op.Squeeze(length, [0]), 1)
        dwindow = op.ReduceSum(op.Gather(signal, places, axis=1) * dz, [0, 1, 3], keepdims=0)
    return [dx, None, dwindow]


# Up to this length, a product with a matrix is faster than onnxruntime's DFT.
_LONGEST_PRODUCT = 1024


def _is_long(length: int | None) -> bool:
    """Whether onnxruntime's DFT of this length is faster than a product, and as accurate.

    For lengths that are not powers of 2, its relative error is 1e-4 in float32.
    """
    return length is not None and length > _LONGEST_PRODUCT and length & (length - 1) == 0


def _transform(op: Recorder, dy: ir.Value, length: ir.Value) -> ir.Value:
    """The conjugate transform of each frame: (batch, frames, length, 2)."""
    count = op.Squeeze(length, [0])
    # A one-sided spectrum is padded with zeros.
    inverse = op.DFT(dy, count, 2, inverse=1) if op.opset >= 20 else op.DFT(dy, count, axis=2, inverse=1)
    return inverse * op.CastLike(length, dy)


def _product(op: Recorder, dy: ir.Value, length: ir.Value, parts: int) -> ir.Value:
    """The real part, or both parts, of `_transform` as a product with a matrix of cosines and sines."""
    times = op.Range(0, op.Squeeze(length, [0]), 1)
    frequencies = op.Unsqueeze(op.Range(0, op.Gather(op.Shape(dy), 2), 1), [1])
    turns = op.Cast(op.Mod(frequencies * times, length), to=TensorProto.DOUBLE)
    angle = turns * (2 * math.pi) / op.Cast(length, to=TensorProto.DOUBLE)
    cosine, sine = (op.CastLike(f(angle), dy) for f in (op.Cos, op.Sin))
    # Real and imaginary part of dY by those of the result: (frequency, 2, time, parts), then a matrix.
    columns = [
        op.Concat(*(op.Unsqueeze(part, [1]) for part in pair), axis=1)
        for pair in ((cosine, -sine), (sine, cosine))[:parts]
    ]
    table = op.Concat(*(op.Unsqueeze(column, [3]) for column in columns), axis=3)
    both = op.Mul(op.Shape(dy, start=2, end=3), [2])
    matrix = op.Reshape(table, op.Concat(both, op.Mul(length, [parts]), axis=0), allowzero=1)
    outer = op.Shape(dy, end=2)
    rows = op.Reshape(dy, op.Concat(outer, both, axis=0), allowzero=1)
    return op.Reshape(op.MatMul(rows, matrix), op.Concat(outer, length, [parts], axis=0), allowzero=1)


def _known_length(node: ForwardNode) -> int | None:
    given, window = node.constant(3), node.optional(2)
    if given is not None:
        return int(given.item())
    if window is None or window.shape is None or node.optional(3) is not None:
        return None
    size = window.shape[0]
    return size if isinstance(size, int) else None


def _frame_length(node: ForwardNode) -> ir.Value:
    """The number of elements of a frame, as a vector of length 1."""
    op, given, window = node.op, node.optional(3), node.optional(2)
    if given is not None:
        return op.Cast(op.Reshape(given, [1]), to=TensorProto.INT64)
    if window is None:
        raise node.unsupported("it has neither a window nor a frame_length")
    return op.shape_of(window)


def _overlap_add(op: Recorder, frames: ir.Value, step: ir.Value, signal: ir.Value, x: ir.Value) -> ir.Value:
    """The sum of frames (batch, frames, length, parts) that begin `step` apart, in the shape of x.

    Frames are cut into blocks of `step`. The r-th blocks of all frames are moved by r, so that blocks of the
    same time are in one column: rows are written one block longer than they are read.
    """
    count, length = op.Shape(frames, start=1, end=2), op.Shape(frames, start=2, end=3)
    outer, parts = op.Shape(frames, end=1), op.Shape(frames, start=3)
    blocks = op.Div(op.Sub(op.Add(length, step), [1]), step)
    zeros = op.Expand(0, [6])
    whole = op.Pad(frames, op.Concat(zeros, op.Sub(op.Mul(blocks, step), length), [0], axis=0))
    apart = op.Reshape(whole, op.Concat(outer, count, blocks, step, parts, axis=0), allowzero=1)
    rows = op.Transpose(apart, perm=[0, 2, 1, 3, 4])
    long = op.Add(count, blocks)
    padded = op.Pad(rows, op.Concat(op.Expand(0, [7]), blocks, [0, 0], axis=0))
    flat = op.Reshape(padded, op.Concat(outer, op.Mul(blocks, long), step, parts, axis=0), allowzero=1)
    short = op.Sub(long, [1])
    cut = op.Slice(flat, [0], op.Mul(blocks, short), [1])
    moved = op.Reshape(cut, op.Concat(outer, blocks, short, step, parts, axis=0), allowzero=1)
    times = op.Mul(short, step)
    total = op.Reshape(
        op.ReduceSum(moved, [1], keepdims=0), op.Concat(outer, times, parts, axis=0), allowzero=1
    )
    # The end of the signal that no frame reaches, or the end of the last block beyond it.
    rest = op.Sub(op.Shape(signal, start=1, end=2), times)
    return op.Reshape(op.Pad(total, op.Concat([0, 0, 0, 0], rest, [0], axis=0)), op.shape_of(x), allowzero=1)
