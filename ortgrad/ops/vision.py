"""Gradient rules of RoiAlign, MaxRoiPool, DeformConv, Col2Im and LRN."""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto

from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient
from ortgrad.graph.lazy import ir
from ortgrad.ops._sampling import sample
from ortgrad.ops._windows import explicit_pads, per_dimension


@gradient("LRN")
def lrn_gradient(node: ForwardNode) -> ir.Value:
    """dX = dY * S^-beta - 2 alpha beta X * mean(dY * Y / S), S = bias + alpha * mean(X^2) over channels"""
    op, dy, x, y = node.op, node.grad(0), node.input(0), node.output(0)
    alpha, beta, size = (node.attribute(name) for name in ("alpha", "beta", "size"))
    before = (size - 1) // 2
    positions = op.ReduceProd(op.Shape(x, start=2), keepdims=1)
    channels = op.Concat(op.Shape(x, end=2), positions, axis=0)

    def mean(value: ir.Value, pads: list[int]) -> ir.Value:
        rows = op.Unsqueeze(op.Reshape(value, channels, allowzero=1), [1])
        means = op.AveragePool(rows, kernel_shape=[size, 1], pads=pads, count_include_pad=1)
        return op.Reshape(means, op.shape_of(x), allowzero=1)

    squares = mean(x * x, [before, 0, size - 1 - before, 0])
    s = squares * alpha + node.attribute("bias")
    # The windows that contain a channel have the pads exchanged.
    others = mean(dy * y / s, [size - 1 - before, 0, before, 0])
    near = dy * op.Pow(s, -beta)
    return near - x * (2 * alpha * beta) * others


@gradient("Col2Im")
def col2_im_gradient(node: ForwardNode) -> ir.Value:
    """dX = the blocks of dY, as columns"""
    op, dy, image, block = node.op, node.grad(0), node.input(1), node.input(2)
    count = next((s[0] for s in (image.shape, block.shape) if s is not None), None)
    if not isinstance(count, int):
        raise node.unsupported("the number of spatial dimensions is not known")
    strides = per_dimension("strides", node.attribute("strides"), count)
    dilations = per_dimension("dilations", node.attribute("dilations"), count)
    if count != 2 and max(dilations) > 1:
        raise node.unsupported(
            f"with dilations {list(dilations)} and {count} spatial dimensions, onnxruntime's result differs "
            "from ONNX's"
        )
    heads, tails = explicit_pads(node.attribute("pads"), count)
    if any((*heads, *tails)):
        dy = op.Pad(dy, [*heads, *tails], None, list(range(2, 2 + count)), rank=2 + count)
    for i in range(count):
        taps = op.Range(0, op.Gather(block, i), 1) * dilations[i]
        room = op.Gather(image, i) + (heads[i] + tails[i])
        extent = (op.Gather(block, i) - 1) * dilations[i] + 1
        steps = (room - extent) / strides[i] + 1
        starts = op.Range(0, steps, 1) * strides[i]
        # Each spatial axis becomes two: the position in the block, and the block.
        dy = op.Gather(dy, op.Unsqueeze(taps, [1]) + starts, axis=2 + 2 * i)
    if count > 1:
        order = [*range(2, 2 + 2 * count, 2), *range(3, 3 + 2 * count, 2)]
        dy = op.Transpose(dy, perm=[0, 1, *order])
    return op.Reshape(dy, op.shape_of(node.input(0)), allowzero=1)


@gradient("DeformConv")
def deform_conv_gradient(node: ForwardNode) -> Gradients:
    """The gradients of Conv, with columns that are samples of X at the offsets, multiplied by the mask"""
    op, dy, x, w, mask = node.op, node.grad(0), node.input(0), node.input(1), node.optional(4)
    known = node.attribute("kernel_shape") or (list(w.shape)[2:] if w.shape is not None else [])
    sizes = [n for n in known if isinstance(n, int)]
    if len(sizes) != 2 or len(known) != 2:
        raise node.unsupported("its kernel size is not known, or it does not have two spatial dimensions")
    taps = math.prod(sizes)
    group, sets = node.attribute("group"), node.attribute("offset_group")
    # Images are the channels that share their offsets: (N * sets, C / sets, H, W).
    batch, positions = op.Shape(x, end=1), op.ReduceProd(op.Shape(dy, start=2), keepdims=1)
    images = op.Mul(batch, [sets])
    per_set = op.Div(op.Shape(x, start=1, end=2), [sets])
    shape = op.Concat(images, per_set, op.Shape(x, start=2), axis=0)
    points = op.Mul(positions, [taps])
    places = _by_point(node, node.input(2), images, points, positions, 2) + _places(node, sizes)
    samples = sample(op, op.Reshape(x, shape, allowzero=1), places, [0, 1], "linear", "zeros", False)
    # dY and W by group, and from them the gradient of the columns: (N, group, C / group * taps, positions).
    by_group = op.Concat(batch, [group], op.Div(op.Shape(dy, start=1, end=2), [group]), positions, axis=0)
    dy_groups = op.Reshape(dy, by_group, allowzero=1)
    rows = op.Mul(op.Shape(w, start=1, end=2), [taps])
    filters = op.Div(op.Shape(w, end=1), [group])
    w_groups = op.Reshape(w, op.Concat([group], filters, rows, axis=0), allowzero=1)
    columns = op.MatMul(op.Transpose(w_groups, perm=[0, 2, 1]), dy_groups)
    # Transposed: by image, point and channel.
    by_channel = op.Concat(images, per_set, [taps], positions, axis=0)
    grads = op.Transpose(op.Reshape(columns, by_channel, allowzero=1), perm=[0, 2, 3, 1])
    grads = op.Reshape(grads, op.Concat(images, points, per_set, axis=0), allowzero=1)
    dmask = dw = None
    factors = _by_point(node, mask, images, points, positions, 1) if mask is not None else None
    if node.wants(1) or (mask is not None and node.wants(4)):
        values = samples.sums()
        if mask is not None:
            by_tap = op.ReduceSum(grads * values, [2], keepdims=1)
            dmask = op.Reshape(by_tap, op.shape_of(mask), allowzero=1)
            values = values * factors
        by_tap = op.Reshape(values, op.Concat(images, [taps], positions, per_set, axis=0), allowzero=1)
        columns = op.Reshape(
            op.Transpose(by_tap, perm=[0, 3, 1, 2]),
            op.Concat(batch, [group], rows, positions, axis=0),
            allowzero=1,
        )
        products = op.MatMul(dy_groups, op.Transpose(columns, perm=[0, 1, 3, 2]))
        dw = op.Reshape(op.ReduceSum(products, [0], keepdims=0), op.shape_of(w), allowzero=1)
    if mask is not None:
        grads = grads * factors
    dx = op.Reshape(op.Transpose(samples.grad_of_rows(grads), perm=[0, 2, 1]), op.shape_of(x), allowzero=1)
    doffset = None
    if node.wants(2):
        moved = op.Reshape(
            samples.grad_of_coordinates(grads), op.Concat(images, [taps], positions, [2], axis=0), allowzero=1
        )
        doffset = op.Reshape(op.Transpose(moved, perm=[0, 1, 3, 2]), op.shape_of(node.input(2)), allowzero=1)
    return dx, dw, doffset, op.ReduceSum(dy, [0, 2, 3], keepdims=0), dmask


def _by_point(
    node: ForwardNode,
    value: ir.Value,
    images: ir.Value,
    points: ir.Value,
    positions: ir.Value,
    components: int,
) -> ir.Value:
    """(N, sets * taps * components, ...) as (N * sets, taps * positions, components)."""
    op = node.op
    if components > 1:
        apart = op.Concat(images, [-1, components], positions, axis=0)
        value = op.Transpose(op.Reshape(value, apart), perm=[0, 1, 3, 2])
    return op.Reshape(value, op.Concat(images, points, [components], axis=0), allowzero=1)


def _places(node: ForwardNode, sizes: list[int]) -> ir.Value:
    """The positions that the taps of a convolution without offsets read: (taps * positions, 2)."""
    op = node.op
    strides = per_dimension("strides", node.attribute("strides"), 2)
    dilations = per_dimension("dilations", node.attribute("dilations"), 2)
    heads, _ = explicit_pads(node.attribute("pads"), 2)
    outputs = op.Shape(node.grad(0), start=2)
    taps = op.constant(np.array(sizes, np.int64))
    full = op.Concat(taps, outputs, axis=0)
    axes = []
    for i in range(2):
        tap = np.arange(sizes[i], dtype=np.int64) * dilations[i] - heads[i]
        start = op.Range(0, op.Gather(outputs, i), 1) * strides[i]
        # The axes of `full`: tap row, tap column, output row, output column.
        place = op.constant(tap.reshape([-1, 1, 1, 1] if i == 0 else [-1, 1, 1])) + (
            op.Unsqueeze(start, [1]) if i == 0 else start
        )
        axes.append(op.Reshape(op.Expand(place, full), [-1, 1]))
    return op.CastLike(op.Concat(*axes, axis=1), node.input(2))


@gradient("RoiAlign")
def roi_align_gradient(node: ForwardNode) -> ir.Value:
    """dX = the transposed interpolation of dY; as in PyTorch, the regions have no gradient"""
    return _mean_of_regions(node) if node.attribute("mode") == "avg" else _maximum_of_regions(node)


class _Reads:
    """The positions of the samples along a spatial axis of X: (regions, outputs, samples)."""

    def __init__(self, node: ForwardNode, axis: int) -> None:
        op, rois = node.op, node.input(1)
        scale, ratio = node.attribute("spatial_scale"), node.attribute("sampling_ratio")
        outputs = node.attribute("output_height" if axis == 0 else "output_width")
        half = node.attribute("coordinate_transformation_mode") == "half_pixel"
        self.op = op
        self.size = op.Gather(op.Shape(node.input(0)), 2 + axis)
        # A region is (x1, y1, x2, y2).
        start, end = (op.Gather(rois, [i], axis=1) * scale for i in (1 - axis, 3 - axis))
        if half:
            start, end = start - 0.5, end - 0.5
        length = op.Unsqueeze(end - start, [2])
        step = (length if half else op.Max(length, 1.0)) / float(outputs)
        self.exists: ir.Value | None = None
        if ratio > 0:
            numbers, count = op.Range(0, ratio, 1), op.number(float(ratio), rois)
        else:
            # One per element of X in each region; all get the number of the largest, some of them unused.
            count = op.Ceil(step)
            most = op.ReduceMax(
                op.Concat(op.Reshape(count, [-1]), op.CastLike([1], rois), axis=0), keepdims=0
            )
            numbers = op.Range(0, op.Cast(most, to=TensorProto.INT64), 1)
            self.exists = op.Less(op.CastLike(numbers, rois), count)
            count = op.Max(count, 1.0)
        self.count = count
        first = op.CastLike(np.arange(outputs, dtype=np.float32)[:, None], rois) * step
        within = (op.CastLike(numbers, rois) + 0.5) * step / count
        place = op.Unsqueeze(start, [2]) + first + within
        size = op.CastLike(self.size, rois)
        self.inside = op.And(op.GreaterOrEqual(place, -1.0), op.LessOrEqual(place, size))
        self.place = op.Min(op.Max(place, 0.0), size - 1.0)

    def shares(self) -> ir.Value:
        """The weight of each element of X in each output: (regions, outputs, elements)."""
        op = self.op
        elements = op.CastLike(op.Range(0, self.size, 1), self.place)
        near = op.Max(1.0 - op.Abs(op.Unsqueeze(self.place, [3]) - elements), 0.0)
        used = self.inside if self.exists is None else op.And(self.inside, self.exists)
        weight = op.CastLike(used, near) / self.count
        # Rows times columns: (regions, outputs, 1, samples) by (..., samples, elements).
        return op.Squeeze(op.MatMul(op.Unsqueeze(weight, [2]), near), [2])

    def corners(self, axes: list[int]) -> tuple[ir.Value, ir.Value]:
        """The two elements around each sample and their weights, with axes of length 1 inserted."""
        op = self.op
        low = op.Floor(self.place)
        fraction = self.place - low
        weights = op.Concat(*(op.Unsqueeze(part, [3]) for part in (1.0 - fraction, fraction)), axis=3)
        weights = weights * op.CastLike(op.Unsqueeze(self.inside, [3]), weights)
        pair = op.Add(op.Unsqueeze(op.Cast(low, to=TensorProto.INT64), [3]), [0, 1])
        return op.Unsqueeze(op.Min(pair, self.size - 1), axes), op.Unsqueeze(weights, axes)


def _mean_of_regions(node: ForwardNode) -> ir.Value:
    op, x, dy = node.op, node.input(0), node.grad(0)
    rows, columns = _Reads(node, 0).shares(), _Reads(node, 1).shares()
    # Along the rows of X first, then for all regions of an image at once: (regions * outputs, C * W).
    spread = op.Transpose(op.MatMul(dy, op.Unsqueeze(columns, [1])), perm=[0, 2, 1, 3])
    height, batch = node.attribute("output_height"), op.Shape(x, end=1)
    lines = op.Mul(op.Shape(node.input(1), end=1), [height])
    width = op.Shape(x, start=1, end=2) * op.Shape(x, start=3)
    spread = op.Reshape(spread, op.Concat(lines, width, axis=0), allowzero=1)
    images = op.Range(0, op.Squeeze(batch), 1)
    own = op.CastLike(op.Equal(op.Unsqueeze(images, [1]), node.input(2)), rows)
    by_image = op.Unsqueeze(own, [1, 3]) * op.Transpose(rows, perm=[2, 0, 1])
    tall = op.Shape(x, start=2, end=3)
    by_image = op.Reshape(by_image, op.Concat(batch, tall, lines, axis=0), allowzero=1)
    apart = op.Concat(batch, tall, op.Shape(x, start=1, end=2), op.Shape(x, start=3), axis=0)
    return op.Transpose(op.Reshape(op.MatMul(by_image, spread), apart, allowzero=1), perm=[0, 2, 1, 3])


def _maximum_of_regions(node: ForwardNode) -> ir.Value:
    """onnxruntime takes the maximum of the elements around all samples, each times its weight."""
    op = node.op
    tall, wide = _Reads(node, 0), _Reads(node, 1)
    # (regions, output rows, output columns, sample rows, sample columns, 2, 2)
    (row, row_weight), (column, column_weight) = tall.corners([2, 4, 6]), wide.corners([1, 3, 5])
    image = node.input(2) * (tall.size * wide.size)
    index = row * wide.size + column + op.Unsqueeze(image, [1, 2, 3, 4, 5, 6])
    weight = row_weight * column_weight
    exists = None
    if tall.exists is not None and wide.exists is not None:
        exists = op.And(op.Unsqueeze(tall.exists, [2, 4, 5, 6]), op.Unsqueeze(wide.exists, [1, 3, 5, 6]))
        exists = op.Expand(exists, op.Shape(weight))
    return _from_maxima(node, index, exists, weight)


def _from_maxima(
    node: ForwardNode, index: ir.Value, exists: ir.Value | None, weight: ir.Value | None = None
) -> ir.Value:
    """dX, where each output is the maximum of some elements of X, each times its weight.

    The elements are numbered with their images, as (regions, output rows, output columns, ...); `exists` says
    which of them exist.
    """
    op, x, dy = node.op, node.input(0), node.grad(0)
    regions, channels = op.Shape(node.input(1), end=1), op.Shape(x, start=1, end=2)
    # Now (regions, outputs, terms of the maximum, C).
    outputs = op.ReduceProd(op.Shape(dy, start=2), keepdims=1)
    flat = op.Concat(regions, outputs, op.ReduceProd(op.Shape(index, start=3), keepdims=1), axis=0)
    index = op.Max(op.Reshape(index, flat, allowzero=1), 0)
    places = op.Concat(op.Shape(x, end=2), op.ReduceProd(op.Shape(x, start=2), keepdims=1), axis=0)
    by_place = op.Transpose(op.Reshape(x, places, allowzero=1), perm=[0, 2, 1])
    count = op.ReduceProd(op.Shape(by_place, end=2), keepdims=1)
    # One more, so that an image without elements has one to read.
    elements = op.Pad(op.Reshape(by_place, op.Concat(count, channels, axis=0), allowzero=1), [0, 0, 1, 0])
    terms = op.Gather(elements, index)
    rows = op.Concat(regions, outputs, [1], channels, axis=0)
    parts = op.Reshape(op.Transpose(dy, perm=[0, 2, 3, 1]), rows, allowzero=1)
    if weight is not None:
        weight = op.Unsqueeze(op.Reshape(weight, flat, allowzero=1), [3])
        terms, parts = terms * weight, parts * weight
    if exists is not None:
        exists = op.Unsqueeze(op.Reshape(exists, flat, allowzero=1), [3])
        terms = op.Where(exists, terms, -math.inf)
    numbers = op.Unsqueeze(op.Range(0, op.Gather(op.Shape(index), 2), 1), [1])
    chosen = op.Equal(numbers, op.ArgMax(terms, axis=2, keepdims=1))
    # A part without elements, of a region beyond the image, has an output of 0.
    chosen = chosen if exists is None else op.And(chosen, exists)
    grads = op.GatherGrad(op.Shape(elements), index, op.Where(chosen, parts, 0.0), axis=0)
    grads = op.Reshape(op.Slice(grads, [0], count, [0]), op.Shape(by_place), allowzero=1)
    return op.Reshape(op.Transpose(grads, perm=[0, 2, 1]), op.shape_of(x), allowzero=1)


@gradient("MaxRoiPool")
def max_roi_pool_gradient(node: ForwardNode) -> ir.Value:
    """dX = dY at the maximum of each part of a region; the regions have no gradient"""
    op, x = node.op, node.input(0)
    rows, row_there = _region_parts(node, 0)
    columns, column_there = _region_parts(node, 1)
    # (regions, output rows, output columns, elements of a part), then the elements flat.
    height, width = (op.Gather(op.Shape(x), 2 + axis) for axis in range(2))
    image = op.Cast(op.Gather(node.input(1), [0], axis=1), to=TensorProto.INT64) * (height * width)
    index = op.Unsqueeze(rows, [2, 4]) * width + op.Unsqueeze(columns, [1, 3])
    index = index + op.Unsqueeze(image, [2, 3, 4])
    there = op.And(op.Unsqueeze(row_there, [2, 4]), op.Unsqueeze(column_there, [1, 3]))
    return _from_maxima(node, index, there)


def _region_parts(node: ForwardNode, axis: int) -> tuple[ir.Value, ir.Value]:
    """The elements of X along an axis that belong to each part of each region, and which of them exist."""
    op, rois = node.op, node.input(1)
    count = node.attribute("pooled_shape")[axis]
    size = op.Gather(op.Shape(node.input(0)), 2 + axis)
    # A region is (image, x1, y1, x2, y2); onnxruntime rounds halves away from 0.
    scaled = (op.Gather(rois, [i], axis=1) * node.attribute("spatial_scale") for i in (2 - axis, 4 - axis))
    start, end = (op.Sign(place) * op.Floor(op.Abs(place) + 0.5) for place in scaled)
    step = op.Max(end - start + 1.0, 1.0) / float(count)
    numbers = op.CastLike(np.arange(count, dtype=np.float32), rois)
    last = op.CastLike(size, rois)
    first, beyond = (
        op.Cast(op.Min(op.Max(place + start, 0.0), last), to=TensorProto.INT64)
        for place in (op.Floor(numbers * step), op.Ceil((numbers + 1.0) * step))
    )
    # All parts get the number of elements of the largest, and at least one.
    longest = op.ReduceMax(op.Concat(op.Reshape(beyond - first, [-1]), [1], axis=0), keepdims=0)
    places = op.Unsqueeze(first, [2]) + op.Range(0, longest, 1)
    return op.Min(places, size - 1), op.Less(places, op.Unsqueeze(beyond, [2]))
