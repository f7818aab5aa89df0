"""Standard operators under onnxruntime's own name, weights of a few bits, operators without a gradient."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from ortgrad.autodiff.definitions import definition, undefined
from ortgrad.autodiff.node_view import NodeView
from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.declaration import DOMAIN
from ortgrad.ops._quantized import unpacked
from ortgrad.ops._types import cast_like

# The values that the 4 bits of MatMulBnb4 stand for.
_FP4 = [
    0.0,
    0.0052083334885537624,
    0.6666666865348816,
    1.0,
    0.3333333432674408,
    0.5,
    0.1666666716337204,
    0.25,
]
_NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


@definition("SampleOp", domain=DOMAIN)
def sample_op(op: Recorder, node: NodeView) -> ir.Value:
    """X"""
    return node.input(0)


@definition("ExpandDims", domain=DOMAIN)
def expand_dims(op: Recorder, node: NodeView) -> ir.Value:
    """Unsqueeze along one axis"""
    return op.Unsqueeze(node.input(0), op.Reshape(op.Cast(node.input(1), to=TensorProto.INT64), [1]))


@definition("GatherND", domain=DOMAIN)
def gather_nd(op: Recorder, node: NodeView) -> ir.Value:
    """GatherND"""
    return op.GatherND(node.input(0), op.Cast(node.input(1), to=TensorProto.INT64))


@definition("Pad", domain=DOMAIN)
def pad(op: Recorder, node: NodeView) -> ir.Value:
    """Pad"""
    value = node.optional(2)
    scalar = None if value is None else op.Reshape(value, np.zeros(0, np.int64))
    pads = op.Reshape(node.input(1), [-1])
    return op.Pad(node.input(0), pads, scalar, mode=node.attribute("mode", "constant"))


@definition("Range", domain=DOMAIN)
def range_(op: Recorder, node: NodeView) -> ir.Value:
    """start, start + delta, ... below limit"""
    delta = node.optional(2)
    step = op.CastLike(1, node.input(0)) if delta is None else delta
    return op.Range(*(op.Reshape(v, np.zeros(0, np.int64)) for v in (node.input(0), node.input(1), step)))


@definition("Trilu", domain=DOMAIN)
def trilu(op: Recorder, node: NodeView) -> ir.Value:
    """Trilu"""
    return op.Trilu(node.input(0), node.optional(1), upper=node.attribute("upper", 1))


@definition("Unique", domain=DOMAIN)
def unique(op: Recorder, node: NodeView) -> Sequence[ir.Value]:
    """The different elements in the order of their first occurrence, their places and their numbers"""
    y, _, places, counts = op.Unique(node.input(0), sorted=0, _outputs=4)
    return y, places, counts


@definition("UnfoldTensor", domain=DOMAIN)
def unfold_tensor(op: Recorder, node: NodeView) -> ir.Value:
    """All windows along an axis; the positions in a window are the last axis"""
    x, size, step, rank = node.input(0), node.attribute("size"), node.attribute("step", 1), node.rank()
    axis = node.attribute("dim", -1) % rank
    length = op.Squeeze(op.Shape(x, start=axis, end=axis + 1), [0])
    starts = op.Range(0, length - (size - 1), step)
    windows = op.Gather(x, op.Unsqueeze(starts, [1]) + op.constant(np.arange(size)), axis=axis)
    return op.Transpose(windows, perm=[*range(axis + 1), *range(axis + 2, rank + 1), axis + 1])


@definition("CDist", domain=DOMAIN)
def c_dist(op: Recorder, node: NodeView) -> ir.Value:
    """The distance of every row of A to every row of B"""
    metric = node.attribute("metric", "sqeuclidean")
    if metric not in ("euclidean", "sqeuclidean"):
        raise node.unsupported(f"its metric {metric!r} is not known")
    difference = op.Unsqueeze(node.input(0), [1]) - op.Unsqueeze(node.input(1), [0])
    reduce = op.ReduceL2 if metric == "euclidean" else op.ReduceSumSquare
    distances: ir.Value = reduce(difference, [2], keepdims=0)
    return distances


@definition("GridSample", domain=DOMAIN)
def grid_sample(op: Recorder, node: NodeView) -> ir.Value:
    """GridSample"""
    return _grid_sample(op, node, node.input(0), node.input(1), node.attribute("align_corners", 0))


def _grid_sample(op: Recorder, node: NodeView, x: ir.Value, grid: ir.Value, align_corners: int) -> ir.Value:
    mode = node.attribute("mode", "bilinear")
    if op.opset >= 20:
        mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    padding = node.attribute("padding_mode", "zeros")
    sampled: ir.Value = op.GridSample(x, grid, mode=mode, padding_mode=padding, align_corners=align_corners)
    return sampled


@definition("CropAndResize", domain=DOMAIN)
def crop_and_resize(op: Recorder, node: NodeView) -> ir.Value:
    """Samples of X on a grid over each region, corners included"""
    x, rois, size = node.input(0), node.input(1), op.Cast(node.input(3), to=TensorProto.INT64)
    corners = [op.Slice(rois, [i], [i + 1], [1]) for i in range(4)]
    lines = []
    for axis in (0, 1):
        count = op.Squeeze(op.Slice(size, [axis], [axis + 1], [0]), [0])
        first, last = corners[axis], corners[axis + 2]
        # From 0 at the first corner to 1 at the last; a single line is in the middle.
        steps = op.CastLike(op.Range(0, count, 1), x)
        share = steps / op.CastLike(op.Max(count - 1, op.constant(np.array(1))), x)
        share = op.Where(op.Equal(count, op.constant(np.array(1))), share + 0.5, share)
        lines.append(first + (last - first) * share)
    rows, columns = op.Unsqueeze(lines[0], [2]), op.Unsqueeze(lines[1], [1])
    rows, columns = rows + columns * 0.0, columns + rows * 0.0
    grid = op.Concat(op.Unsqueeze(columns, [3]), op.Unsqueeze(rows, [3]), axis=3) * 2.0 - 1.0
    images = op.Gather(x, node.input(2), axis=0)
    y = _grid_sample(op, node, images, grid, 1)
    inside = op.And(_in_unit(op, rows), _in_unit(op, columns))
    return op.Where(op.Unsqueeze(inside, [1]), y, node.attribute("extrapolation_value", 0.0))


def _in_unit(op: Recorder, value: ir.Value) -> ir.Value:
    return op.And(op.GreaterOrEqual(value, 0.0), op.LessOrEqual(value, 1.0))


@gradient("NGramRepeatBlock", domain=DOMAIN)
def n_gram_repeat_block_gradient(node: ForwardNode) -> Gradients:
    """Scores of tokens that would repeat are replaced by -inf; the others pass."""
    op = node.op
    return None, op.Where(op.IsInf(node.output(0)), 0.0, node.grad(0))


@definition("MatMulNBits", domain=DOMAIN)
def mat_mul_n_bits(op: Recorder, node: NodeView) -> ir.Value:
    """A B' + bias, with B from integers of a few bits and a scale and zero point per block"""
    if node.attribute("weight_prepacked", 0):
        raise node.unsupported("its weight is packed for another device")
    a, scales = node.input(0), node.input(2)
    zeros, groups, bias = (node.optional(i) for i in (3, 4, 5))
    bits, size = node.attribute("bits", 4), node.attribute("block_size")
    n, k = node.attribute("N"), node.attribute("K")
    blocks = -(-k // size)
    # [N, block, element]
    weight = op.Reshape(cast_like(op, unpacked(op, node, node.input(1), bits), a), [n, blocks, size])
    if zeros is None:
        zero = op.number(2.0 ** (bits - 1), a)
    else:
        if zeros.dtype is not None and zeros.dtype.name == "UINT8":
            rows = op.Reshape(zeros, [n, -1])
            zeros = cast_like(op, op.Slice(unpacked(op, node, rows, bits), [0], [blocks], [1]), a)
        zero = op.Reshape(zeros, [n, blocks, 1])
    scales = op.Reshape(scales, [n, blocks, 1])
    if groups is None:
        weight = op.Slice(op.Reshape((weight - zero) * scales, [n, -1]), [0], [k], [1])
    else:
        # `groups` has the block that an element takes its scale and zero point from.
        if zeros is not None:
            zero = op.Gather(op.Squeeze(zero, [2]), groups, axis=1)
        weight = op.Slice(op.Reshape(weight, [n, -1]), [0], [k], [1])
        weight = (weight - zero) * op.Gather(op.Squeeze(scales, [2]), groups, axis=1)
    y = op.MatMul(a, op.Transpose(weight, perm=[1, 0]))
    return y if bias is None else y + bias


@definition("MatMulBnb4", domain=DOMAIN)
def mat_mul_bnb4(op: Recorder, node: NodeView) -> ir.Value:
    """A B' with B from 4-bit numbers and a scale per block of its elements"""
    n, k, size = node.attribute("N"), node.attribute("K"), node.attribute("block_size")
    packed, blocks = node.input(1), -(-n * k // size)
    high = op.BitShift(packed, np.array(4, np.uint8), direction="RIGHT")
    low = op.BitwiseAnd(packed, np.array(15, np.uint8))
    codes = op.Cast(
        op.Reshape(op.Concat(*(op.Reshape(v, [-1, 1]) for v in (high, low)), axis=1), [-1]),
        to=TensorProto.INT64,
    )
    values = np.array(_NF4 if node.attribute("quant_type") else _FP4 + [-v for v in _FP4], np.float32)
    elements = op.Slice(
        op.Gather(cast_like(op, op.constant(values), node.input(0)), codes), [0], [n * k], [0]
    )
    padded = op.Pad(elements, [0, blocks * size - n * k])
    scaled = op.Reshape(padded, [blocks, size]) * op.Reshape(node.input(2), [blocks, 1])
    weight = op.Reshape(op.Slice(op.Reshape(scaled, [-1]), [0], [n * k], [0]), [n, k])
    turned = node.attribute("transB", 1)
    return op.MatMul(node.input(0), op.Transpose(weight, perm=[1, 0]) if turned else weight)


undefined(
    *("BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch"),
    domain=DOMAIN,
    why="it searches or samples sequences of words with a whole decoder; differentiate the decoder",
)
undefined(
    *("DecoderMaskedMultiHeadAttention", "DecoderMaskedSelfAttention"),
    domain=DOMAIN,
    why="it computes one word at a time and writes into a buffer; use the model before that fusion",
)
undefined(
    "SparseAttention",
    domain=DOMAIN,
    why="its pattern of blocks is known at run time only; use the model before that fusion",
)
undefined(
    *("PackedAttention", "PackedMultiHeadAttention", "LongformerAttention"),
    domain=DOMAIN,
    why="it runs on CUDA only; use the model before that fusion",
)
undefined("AttnLSTM", domain=DOMAIN, why="no exporter and no optimizer makes it; use LSTM and MatMul")
undefined("WordConvEmbedding", domain=DOMAIN, why="no exporter and no optimizer makes it; use Conv")
undefined("MaxpoolWithMask", domain=DOMAIN, why="no exporter and no optimizer makes it; use MaxPool")
undefined("SparseToDenseMatMul", domain=DOMAIN, why="A is a sparse tensor; use MatMul")
undefined(
    "MatMulFpQ4",
    domain=DOMAIN,
    why="its weights are packed for one kind of processor; use MatMulNBits, which replaced it",
)
undefined("QLinearReduceMean", domain=DOMAIN, why="onnxruntime has no kernel for it; use ReduceMean")
undefined(
    *("AveragePool", "Conv", "GlobalAveragePool", "GlobalMaxPool", "MaxPool"),
    *("ReorderInput", "ReorderOutput", "Upsample"),
    domain="com.microsoft.nchwc",
    why="the model was optimized for one kind of processor; optimize it with ORT_ENABLE_EXTENDED at most",
)
