"""ConvGrad in standard ONNX operators."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ortgrad.errors import NodeError
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.ops._windows import require_outputs
from ortgrad.ops.conv._body_form import (
    Form,
    has_known_kernel,
    is_double,
    known_kernel,
    known_size,
    reshaped,
    shaped,
    size_of,
)
from ortgrad.ops.conv._body_reads import (
    columns_by_tap,
    columns_of,
    joined,
    joined_axis,
    joined_taps,
    slices_of,
    swapped,
    taps_first,
    taps_last,
    taps_of,
)

if TYPE_CHECKING:
    from ortgrad.ops.conv._body_form import Size

# With fewer input channels than this, one product for all taps is faster than one for each.
_FEW_CHANNELS = 16
# With at least this many, a product with columns of dY is faster than ConvTranspose.
_MANY_CHANNELS = 64
# A kernel with more taps than this is not written out tap by tap: the time that onnxruntime takes to load a
# model grows with the square of the number of nodes, and kernels above 7x7 also run slower.
_MANY_TAPS = 49
# With at most this many positions in a sample, products with W are faster for all samples together.
_FEW_POSITIONS = 49
# With at most this many elements, what all taps read is copied into one matrix of columns.
_COLUMNS = 1_250_000
# The number of float32 in the longest vectors of a processor.
_VECTOR = 16


def conv_grad_body(
    op: Recorder,
    dy: ir.Value,
    x: ir.Value,
    w: ir.Value,
    *,
    group: int,
    kernel_shape: list[int] | None,
    wanted: tuple[bool, bool, bool],
    **attributes: Any,
) -> tuple[ir.Value | None, ir.Value | None, ir.Value | None]:
    """dX = ConvTranspose(dY, W) or the same as a product; dW = X @ dY for each tap of the kernel, or
    Conv(X, dY); dB = sum of dY"""
    # Conv(X, dY) takes kernels of any size. If it is differentiated again, dY is the kernel, whose size need
    # not be known.
    needed = op.checked or needs_kernel(w, dy, attributes["auto_pad"])
    fixed = kernel_shape is not None or has_known_kernel(w) or needed
    kernel = kernel_shape or (known_kernel(w) if fixed else [1] * (op.rank(w) - 2))
    try:
        form = Form.of(x, kernel, group=group, fixed=fixed, **attributes)
    except ValueError as error:
        raise NodeError(str(error)) from error
    if op.checked:
        sizes = op.Shape(x, start=2) if None in form.sizes else [n for n in form.sizes if n is not None]
        dy = require_outputs(op, dy, sizes, kernel, **attributes)
    turns = wanted[0] and _turns(dy, w, form)
    return (
        (_dx_of_turned if turns else _dx)(op, dy, x, w, form) if wanted[0] else None,
        (_dw_of_turned if turns else _dw)(op, dy, x, w, form) if wanted[1] else None,
        op.ReduceSum(dy, [0, *form.axes], keepdims=0) if wanted[2] else None,
    )


def needs_kernel(w: ir.Value, dy: ir.Value, auto_pad: str) -> bool:
    """Return whether the body can only be written for a kernel of known size."""
    return w.shape is None or is_double(dy) or auto_pad.startswith("SAME")


def _dx(op: Recorder, dy: ir.Value, x: ir.Value, w: ir.Value, form: Form) -> ir.Value:
    if is_double(dy):
        return _dx_of_columns(op, dy, x, w, form)
    if form.pointwise and form.group == 1:
        return op.Conv(dy, op.Transpose(w, perm=[1, 0, *form.axes]))
    if _joins_positions(dy, w, form):
        return _dx_of_product(op, dy, x, w, form)
    heads, tails = form.pads or ((0,) * form.rank,) * 2
    # The rest at the end that no window sees, or the largest possible one if the size is not known.
    left = [
        s - 1 if n is None or form.pads is None else (n + h + t - e) % s
        for n, h, t, e, s in zip(form.sizes, heads, tails, form.extents, form.strides, strict=True)
    ]
    dx = op.ConvTranspose(
        dy,
        w,
        kernel_shape=list(form.kernel) if form.fixed else None,
        strides=list(form.strides),
        dilations=list(form.dilations),
        group=form.group,
        pads=[*heads, *tails],
        output_padding=left,
    )
    if form.pads is None:
        starts = form.heads(op, x)
        return op.Slice(dx, starts, starts + op.shape_of(x, 2), form.axes)
    if any(n is None and s > 1 for n, s in zip(form.sizes, form.strides, strict=True)):
        return op.Slice(dx, [0] * form.rank, op.shape_of(x, 2), form.axes)
    return dx


def _turns(dy: ir.Value, w: ir.Value, form: Form) -> bool:
    """Return whether products with columns of dY are faster for dX and dW together."""
    single = dy.dtype is not None and dy.dtype.name == "FLOAT"
    taps = math.prod(form.kernel)
    if not single or form.group > 1 or max(form.strides) > 1 or not 1 < taps <= _MANY_TAPS:
        return False
    samples, filters, channels = known_size(dy, 0), known_size(w, 0), known_size(w, 1)
    if not samples or not filters or not channels or form.outputs is None or 0 in form.sizes:
        return False
    # With more filters than channels, the columns of X are smaller. With few rows, turning W costs more than
    # what is saved.
    rows = samples * math.prod(n or 0 for n in form.sizes)
    wide = channels >= _MANY_CHANNELS and channels >= filters
    return wide and filters <= 2 * rows and rows * filters * taps <= _COLUMNS


def _turned_columns(op: Recorder, dy: ir.Value, w: ir.Value, form: Form) -> ir.Value:
    """(N * positions of X, taps * M): the elements of dY that depend on each position of X, by tap."""
    assert form.outputs is not None and form.pads is not None
    heads, tails = (
        tuple(e - 1 - pad for e, pad in zip(form.extents, pads, strict=True)) for pads in form.pads
    )
    turned = replace(form, sizes=form.outputs, pads=(heads, tails))
    return columns_of(op, dy, size_of(op, w, 0), turned, backwards=True)


def _dx_of_turned(op: Recorder, dy: ir.Value, x: ir.Value, w: ir.Value, form: Form) -> ir.Value:
    """The columns of dY @ W, which is the convolution of dY with the reversed kernel."""
    filters, channels = size_of(op, w, 0), size_of(op, w, 1)
    by_tap = taps_first(op, w, filters, channels, math.prod(form.kernel))
    dx = op.Gemm(_turned_columns(op, dy, w, form), op.Flatten(by_tap, axis=2))
    dx = shaped(op, dx, size_of(op, x, 0), *(n or 0 for n in form.sizes), channels)
    return op.Transpose(dx, perm=[0, 1 + form.rank, *range(1, 1 + form.rank)])


def _dw_of_turned(op: Recorder, dy: ir.Value, x: ir.Value, w: ir.Value, form: Form) -> ir.Value:
    """X @ the same columns of dY"""
    filters, channels = size_of(op, w, 0), size_of(op, w, 1)
    rows = op.Flatten(op.Transpose(x, perm=[0, *form.axes, 1]), axis=1 + form.rank)
    dw = op.Gemm(_turned_columns(op, dy, w, form), rows, transA=1)
    dw = taps_last(op, dw, filters, channels, math.prod(form.kernel))
    return shaped(op, dw, filters, channels, *form.kernel)


def _joins_positions(dy: ir.Value, w: ir.Value, form: Form) -> bool:
    """Return whether one product for all samples is faster than the products of ConvTranspose."""
    single = dy.dtype is not None and dy.dtype.name == "FLOAT"
    if not single or form.rank != 2 or form.group > 1 or form.pads is None or not form.fixed:
        return False
    sizes = form.positions(dy), known_size(w, 0), known_size(w, 1)
    return all(size is not None and size > 0 for size in sizes) and (sizes[0] or 0) <= _FEW_POSITIONS


def _dx_of_product(op: Recorder, dy: ir.Value, x: ir.Value, w: ir.Value, form: Form) -> ir.Value:
    """dY @ W, added up where windows overlap."""
    positions, channels = form.positions(dy), known_size(w, 1)
    assert positions is not None and channels is not None and form.pads is not None
    rows = op.Flatten(op.Transpose(dy, perm=[0, *form.axes, 1]), axis=1 + form.rank)
    products = op.Gemm(rows, op.Flatten(w, axis=1))
    products = shaped(op, products, size_of(op, dy, 0), positions, channels * math.prod(form.kernel))
    sizes = [n for n in form.sizes if n is not None]
    return op.Col2Im(
        op.Transpose(products, perm=[0, 2, 1]),
        sizes if len(sizes) == form.rank else op.shape_of(x, 2),
        list(form.kernel),
        pads=[*form.pads[0], *form.pads[1]],
        strides=list(form.strides),
        dilations=list(form.dilations),
    )


def _dx_of_columns(op: Recorder, dy: ir.Value, x: ir.Value, w: ir.Value, form: Form) -> ir.Value:
    """The same without ConvTranspose, which onnxruntime does not have in float64: W @ dY, added up."""
    rank, strides, group = form.rank, list(form.strides), form.group
    channels, samples = op.shape_of(x, 1, 2), op.shape_of(x, 0, 1)
    outputs = [op.shape_of(dy, axis, axis + 1) for axis in form.axes]
    others = op.ReduceProd(op.shape_of(w, 1), keepdims=1)
    kernels = reshaped(op, w, [group], op.shape_of(w, 0, 1) / group, others)
    columns = op.MatMul(op.Transpose(kernels, perm=[0, 2, 1]), _by_group(op, dy, form))
    taps = list(form.kernel)
    columns = reshaped(op, columns, channels, taps, samples, *outputs)
    # Tap k of output o is added at k * dilation + o * stride. With a stride, the taps get zeros between them
    # instead of the dilation, and zeros behind them, to fill rows as long as the stride.
    gaps = [d - 1 if s > 1 else 0 for s, d in zip(strides, form.dilations, strict=True)]
    if any(gaps):
        own = [2 + 2 * i for i in range(rank)]
        columns = op.Pad(op.Unsqueeze(columns, own), [0] * rank + gaps, None, own, rank=2 + 3 * rank)
        taps = [k * (g + 1) for k, g in zip(taps, gaps, strict=True)]
        columns = reshaped(op, columns, channels, taps, samples, *outputs)
    fill = [-k % s for k, s in zip(taps, strides, strict=True)]
    if any(fill):
        columns = op.Pad(columns, [0] * rank + fill, None, list(range(1, 1 + rank)), rank=2 + 2 * rank)
    rows = [-(-k // s) for k, s in zip(taps, strides, strict=True)]
    split = [n for pair in zip(rows, strides, strict=True) for n in pair]
    columns = reshaped(op, columns, channels, split, samples, *outputs)
    # Now row r of output o is added at r * shift + o, in units of the stride.
    order = [axis for i in range(rank) for axis in (1 + 2 * i, 2 + 2 * rank + i, 2 + 2 * i)]
    dx = op.Transpose(columns, perm=[0, 1 + 2 * rank, *order])
    shape = op.Shape(dx)
    sizes: list[ir.Value] = []
    behind = op.constant(np.array([1]))
    for i in reversed(range(rank)):
        before = op.ReduceProd(op.Slice(shape, [0], [2 + 3 * i]), keepdims=1)
        behind = behind * strides[i]
        shift = form.dilations[i] if strides[i] == 1 else 1
        dx = reshaped(op, dx, before, [rows[i]], outputs[i], behind)
        dx, size = _add_shifted(op, dx, rows[i], shift, outputs[i], before, behind)
        behind = behind * size
        sizes.insert(0, size * strides[i])
    dx = op.Transpose(reshaped(op, dx, channels, samples, *sizes), perm=[1, 0, *form.axes])
    heads = form.heads(op, x)
    dx = op.Slice(dx, heads, op.shape_of(x, 2) + heads, form.axes)
    if max(strides) == 1:
        return dx
    # The elements that no window reaches.
    missing = op.shape_of(x, 2) - op.Shape(dx, start=2)
    return op.Pad(dx, op.Concat([0] * rank, missing, axis=0), None, form.axes, rank=2 + rank)


def _add_shifted(
    op: Recorder,
    value: ir.Value,
    rows: int,
    shift: int,
    length: ir.Value,
    before: ir.Value,
    behind: ir.Value,
) -> tuple[ir.Value, ir.Value]:
    """Return the sum over the rows of (before, rows, length, behind), each of which is moved by `shift` more
    than the one before, and the length of the sum."""
    # Rows with enough zeros after them, cut into rows that are shorter by the shift.
    reach = length + (rows - 1) * shift
    if rows > 1:
        value = op.Pad(value, [0, rows * shift], None, [2], rank=4)
        line = reshaped(op, value, before, (reach + shift) * rows, behind)
        value = reshaped(op, op.Slice(line, [0], [-rows * shift], [1]), before, [rows], reach, behind)
    return op.ReduceSum(value, [1], keepdims=0), reach


def _dw(op: Recorder, dy: ir.Value, x: ir.Value, w: ir.Value, form: Form) -> ir.Value:
    if math.prod(form.kernel) > _MANY_TAPS or not form.fixed:
        x, dy = _with_a_sample(op, x, form), _with_a_sample(op, dy, form)
        return (_dw_of_columns if is_double(dy) else _dw_of_conv)(op, dy, x, w, form)
    filters, channels = size_of(op, w, 0), size_of(op, w, 1)
    if filters == form.group and channels == 1:
        dw = _dw_of_channels(op, dy, x, form)
    elif form.group > 1 or not _joins_samples(dy, filters, channels, form):
        dw = _dw_of_samples(op, dy, x, filters, channels, form)
    else:
        dw = _dw_of_rows(op, dy, x, filters, channels, form)
    return shaped(op, dw, filters, channels, *form.kernel)


def _joins_samples(dy: ir.Value, filters: Size, channels: Size, form: Form) -> bool:
    """Return whether moving the samples next to the positions costs less than adding up their products."""
    positions = form.positions(dy)
    if not isinstance(filters, int) or not isinstance(channels, int) or positions is None:
        return True
    return (
        known_size(dy, 0) == 1
        or positions * (filters + channels) <= math.prod(form.kernel) * filters * channels
    )


def _dw_of_channels(op: Recorder, dy: ir.Value, x: ir.Value, form: Form) -> ir.Value:
    """(M, taps, 1) of a depthwise convolution, whose products are between vectors."""
    taps = taps_of(op, dy, form.padded(op, x), form)
    products = [op.ReduceSum(tap * dy, form.axes, keepdims=1) for tap in taps]
    return op.ReduceSum(joined(op, products, 2), [0], keepdims=0)


def _dw_of_samples(
    op: Recorder, dy: ir.Value, x: ir.Value, filters: Size, channels: Size, form: Form
) -> ir.Value:
    """(M, C, taps) as the sum over the samples of products for each group."""
    samples, positions, group = size_of(op, dy, 0), form.positions(dy), form.group
    size = op.ReduceProd(op.shape_of(dy, 2), keepdims=1) if positions is None else positions
    share = filters // group if isinstance(filters, int) else filters / group
    across = shaped(op, dy, samples, group, share, size)
    taps = math.prod(form.kernel)
    if taps > 1 and group == 1 and isinstance(channels, int) and channels < _FEW_CHANNELS:
        x, last = form.padded(op, x), form.rank - 1
        turned = op.Transpose(op.Squeeze(across, [1]), perm=[0, 2, 1])
        if form.rank == 2 and form.outputs is not None:
            # The rows of the kernel come last, as Gather puts them.
            x = joined_axis(op, x, form, last, first=2, axis=1)
            down = np.add.outer(
                np.arange(form.kernel[0]) * form.dilations[0], np.arange(form.outputs[0]) * form.strides[0]
            )
            columns = shaped(op, op.Gather(x, down, axis=2), samples, taps * channels, size)
            dw = op.ReduceSum(op.MatMul(columns, turned), [0], keepdims=0)
            dw = shaped(op, dw, form.kernel[1], channels, form.kernel[0], filters)
            return op.Transpose(dw, perm=[3, 1, 2, 0])
        columns = joined_taps(op, x, form, first=2, axis=1)
        columns = shaped(op, columns, samples, taps * channels, size)
        dw = op.ReduceSum(op.MatMul(columns, turned), [0], keepdims=0)
        return op.Transpose(shaped(op, dw, taps, channels, filters), perm=[2, 1, 0])
    parts = taps_of(op, dy, form.padded(op, x), form)
    parts = [shaped(op, part, samples, group, channels, size) for part in parts]
    products = [op.MatMul(across, op.Transpose(part, perm=[0, 1, 3, 2])) for part in parts]
    dw = op.ReduceSum(joined(op, products, 1), [0], keepdims=0)
    return taps_last(op, dw, filters, channels, taps)


def _dw_of_rows(
    op: Recorder, dy: ir.Value, x: ir.Value, filters: Size, channels: Size, form: Form
) -> ir.Value:
    """(M, C, taps), with one product for all samples."""
    # Gemm and not MatMul, which leaves its output uninitialized if there are no samples.
    rows = op.Flatten(_samples_second(op, dy, form), axis=1)
    taps = math.prod(form.kernel)
    if taps == 1:
        (part,) = taps_of(op, dy, form.padded(op, _samples_second(op, x, form)), form)
        return op.Gemm(rows, op.Flatten(part, axis=1), transB=1)
    joins = isinstance(channels, int) and _joins_taps(dy, filters, channels, form)
    if joins and isinstance(channels, int) and channels < _FEW_CHANNELS:
        columns = joined_taps(op, form.padded(op, _samples_second(op, x, form)), form, first=2, axis=1)
        return op.Gemm(rows, op.Reshape(columns, [channels * taps, -1]), transB=1)
    if joins and _has_many_rows(dy, filters, form):
        dw = op.Gemm(rows, columns_of(op, x, channels, form))
        return taps_last(op, swapped(op, dw, filters, taps, channels), filters, channels, taps)
    if joins:
        dw = op.MatMul(rows, columns_by_tap(op, x, channels, form))
        return taps_last(op, dw, filters, channels, taps)
    # With the channels last, slices consist of long pieces.
    last = 1 + form.rank
    x = form.padded(op, op.Transpose(x, perm=[0, *form.axes, 1]), first=1)
    products = [op.Gemm(rows, op.Flatten(part, axis=last)) for part in slices_of(op, x, form, first=1)]
    return taps_last(op, joined(op, products, 0), filters, channels, taps)


def _joins_taps(dy: ir.Value, filters: Size, channels: int, form: Form) -> bool:
    """Return whether one product for all taps is faster than one for each, though columns are copied."""
    samples, positions = known_size(dy, 0), form.positions(dy)
    if channels < _FEW_CHANNELS:
        return channels > 0
    if not samples or not positions or not filters or not isinstance(filters, int) or form.outputs is None:
        return False
    rows = samples * positions
    return rows <= filters or rows * channels * math.prod(form.kernel) <= _COLUMNS


def conv_of_columns(
    op: Recorder,
    dy: ir.Value,
    x: ir.Value,
    w: ir.Value,
    b: ir.Value | None = None,
    *,
    group: int,
    kernel_shape: list[int] | None,
    **attributes: Any,
) -> ir.Value | None:
    """Y = the columns of X @ W + B, if these are small or dW is computed from them; otherwise None"""
    filters, channels = known_size(w, 0), known_size(w, 1)
    if group > 1 or not has_known_kernel(w) or filters is None or channels is None:
        return None
    try:
        form = Form.of(x, known_kernel(w), group=group, fixed=True, **attributes)
    except ValueError:
        return None  # The body of the gradient says why.
    taps = math.prod(form.kernel)
    joins = _joins_samples(dy, filters, channels, form) and _joins_taps(dy, filters, channels, form)
    if not joins or channels < _FEW_CHANNELS or not 1 < taps <= _MANY_TAPS:
        return None
    samples, positions = known_size(dy, 0) or 0, form.positions(dy) or 0
    many_rows = _has_many_rows(dy, filters, form)
    if not many_rows and not _wastes_columns(samples, positions):
        return None
    by_tap = taps_first(op, w, filters, channels, taps)
    assert form.outputs is not None
    if many_rows:
        by_filter = op.Flatten(swapped(op, by_tap, taps, filters, channels), axis=1)
        y = op.Gemm(columns_of(op, x, channels, form), by_filter, b, transB=1)
        y = shaped(op, y, samples, *form.outputs, filters)
        return op.Transpose(y, perm=[0, 1 + form.rank, *range(1, 1 + form.rank)])
    columns = op.Transpose(columns_by_tap(op, x, channels, form), perm=[0, 2, 1])
    y = op.ReduceSum(op.MatMul(by_tap, columns), [0], keepdims=0)
    y = y if b is None else op.Add(y, op.Unsqueeze(b, [1]))
    return op.Transpose(shaped(op, y, filters, samples, *form.outputs), perm=[1, 0, *form.axes])


def _has_many_rows(dy: ir.Value, filters: Size, form: Form) -> bool:
    """Return whether W is small compared with the columns, so that it can be sorted by filter and tap."""
    samples, positions = known_size(dy, 0) or 0, form.positions(dy) or 0
    return isinstance(filters, int) and samples * positions >= 2 * filters


def _wastes_columns(samples: int, positions: int) -> bool:
    """Return whether onnxruntime's Conv computes much more than its result.

    It has a product for each sample, which computes whole vectors of positions.
    """
    return positions > 1 and samples * (-positions % _VECTOR) >= 3 * _VECTOR


def _samples_second(op: Recorder, value: ir.Value, form: Form) -> ir.Value:
    """(N, C, ...) as (C, N, ...)"""
    if known_size(value, 0) == 1:
        return op.Unsqueeze(op.Squeeze(value, [0]), [1])
    return op.Transpose(value, perm=[1, 0, *form.axes])


def _with_a_sample(op: Recorder, value: ir.Value, form: Form) -> ir.Value:
    """The value, with a sample of zeros if the batch is empty.

    With an empty batch, onnxruntime's Conv may never return, and MatMul leaves its output uninitialized.
    """
    samples = value.shape[0] if value.shape is not None else None
    if isinstance(samples, int) and samples > 0:
        return value
    missing = op.Max(1 - op.Shape(value, end=1), 0)
    return op.Pad(value, op.Concat([0], missing, axis=0), None, [0], rank=2 + form.rank)


def _dw_of_conv(op: Recorder, dy: ir.Value, x: ir.Value, w: ir.Value, form: Form) -> ir.Value:
    """X convolved with dY: channels and samples are exchanged, and so are strides and dilations."""
    group, swap = form.group, [1, 0, *form.axes]
    pads = [*form.pads[0], *form.pads[1]] if form.pads else None
    x = x if form.pads else form.padded(op, x)
    if group == 1:
        x = op.Transpose(x, perm=swap)
    else:
        count, channels, sizes = op.shape_of(x, 0, 1), op.shape_of(w, 1, 2), op.shape_of(x, 2)
        x = reshaped(op, x, count, [group], channels, sizes)
        x = op.Transpose(x, perm=[2, 1, 0, *(axis + 1 for axis in form.axes)])
        x = reshaped(op, x, channels, count * group, sizes)
    dw = op.Conv(
        x,
        op.Transpose(dy, perm=swap),
        group=group,
        pads=pads,
        strides=list(form.dilations),
        dilations=list(form.strides),
    )
    # The rest at the end that no window sees would become taps beyond the kernel.
    kernel = list(form.kernel) if form.fixed else op.shape_of(w, 2)
    dw = op.Slice(dw, [0] * form.rank, kernel, form.axes)
    return op.Transpose(dw, perm=swap)


def _dw_of_columns(op: Recorder, dy: ir.Value, x: ir.Value, w: ir.Value, form: Form) -> ir.Value:
    """The same without Conv, which onnxruntime does not have in float64: columns of the padded X @ dY."""
    rank, x = form.rank, form.padded(op, x)
    for i in range(rank):
        # Each spatial axis becomes two: the taps, and the outputs.
        count = op.Squeeze(op.shape_of(dy, 2 + i, 3 + i))
        starts = op.Range(0, count, 1) * form.strides[i]
        taps = op.Unsqueeze(op.Range(0, form.kernel[i], 1), [1]) * form.dilations[i]
        x = op.Gather(x, starts + taps, axis=2 + 2 * i)
    x = op.Transpose(x, perm=[1, *range(2, 2 + 2 * rank, 2), 0, *range(3, 3 + 2 * rank, 2)])
    across = _by_group(op, dy, form)
    others = op.ReduceProd(op.shape_of(w, 1), keepdims=1)
    columns = reshaped(op, x, [form.group], others, op.Shape(across, start=2))
    dw = op.MatMul(columns, op.Transpose(across, perm=[0, 2, 1]))
    return op.Reshape(op.Transpose(dw, perm=[0, 2, 1]), op.shape_of(w), allowzero=1)


def _by_group(op: Recorder, dy: ir.Value, form: Form) -> ir.Value:
    """dY as (group, M / group, samples and positions)."""
    # Samples are next to positions, since onnxruntime does not broadcast a product over an empty batch.
    swapped = op.Transpose(dy, perm=[1, 0, *form.axes])
    columns = op.ReduceProd(op.Shape(swapped, start=1), keepdims=1)
    return reshaped(op, swapped, [form.group], op.Shape(swapped, end=1) / form.group, columns)
