"""ConvGrad in standard ONNX operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ortgrad.errors import NodeError
from ortgrad.ops._windows import explicit_pads, per_dimension, require_outputs, windows

if TYPE_CHECKING:
    import onnx_ir as ir

    from ortgrad.graph.recorder import Recorder

    # A size that is known, or a vector of one element that holds it at run time.
    Size = int | ir.Value

# With fewer input channels than this, one product for all taps is faster than one for each.
_FEW_CHANNELS = 16
# With at least this many, a product with columns of dY is faster than ConvTranspose.
_MANY_CHANNELS = 64
# A kernel with more taps than this is not written out tap by tap: the time in which onnxruntime loads a model
# grows with the square of the number of nodes, and above 7x7 it runs slower, too.
_MANY_TAPS = 49
# With at most this many positions in a sample, products with W are faster for all samples together.
_FEW_POSITIONS = 49
# With at most this many elements, what all taps read is copied into one matrix of columns.
_COLUMNS = 1_250_000
# The number of float32 in the longest vectors of a processor.
_VECTOR = 16
_END = 1 << 62


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
    # Conv(X, dY) takes kernels of any size. Where it is differentiated once more, dY is the kernel, and its
    # size need not be known.
    needed = op.checked or needs_kernel(w, dy, attributes["auto_pad"])
    fixed = kernel_shape is not None or has_known_kernel(w) or needed
    kernel = kernel_shape or (known_kernel(w) if fixed else [1] * (op.rank(w) - 2))
    try:
        form = _Form.of(x, kernel, group=group, fixed=fixed, **attributes)
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
    """Whether the body can only be written for a kernel of known size."""
    return w.shape is None or _is_double(dy) or auto_pad.startswith("SAME")


def has_known_kernel(w: ir.Value) -> bool:
    """Whether the shape of W tells the size of the kernel."""
    return w.shape is not None and len(w.shape) > 2 and all(isinstance(n, int) for n in w.shape[2:])


def known_kernel(w: ir.Value) -> list[int]:
    """The size of the kernel as the shape of W tells it."""
    if not has_known_kernel(w):
        raise NodeError(f"the kernel size is not known; declare the shape of {w.name!r} or give kernel_shape")
    return [n for n in list(w.shape or ())[2:] if isinstance(n, int)]


def _is_double(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.name == "DOUBLE"


@dataclass(frozen=True)
class _Form:
    """What is known of the windows before the run. Sizes may be unknown, and then pads, too."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    sizes: tuple[int | None, ...]  # of X
    pads: tuple[tuple[int, ...], tuple[int, ...]] | None
    auto_pad: str
    group: int
    fixed: bool  # whether the kernel is known; if not, ones stand for its sizes, and sizes are not known

    @classmethod
    def of(
        cls,
        x: ir.Value,
        kernel: Sequence[int],
        *,
        group: int,
        fixed: bool,
        auto_pad: str,
        strides: Sequence[int] | None,
        dilations: Sequence[int] | None,
        pads: Sequence[int] | None,
    ) -> _Form:
        rank = len(kernel)
        if x.shape is not None and len(x.shape) != rank + 2:
            raise ValueError(f"X has {len(x.shape)} dimensions, but the kernel has {rank} spatial ones")
        dims = list(x.shape)[2:] if x.shape is not None else [None] * rank
        sizes = tuple(d if isinstance(d, int) and fixed else None for d in dims)
        strides = per_dimension("strides", strides, rank)
        dilations = per_dimension("dilations", dilations, rank)
        kernel = per_dimension("kernel_shape", kernel, rank)
        extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
        known: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        if auto_pad == "NOTSET":
            known = explicit_pads(pads, rank)
        elif auto_pad == "VALID":
            known = (0,) * rank, (0,) * rank
        elif all(n is not None or s == 1 for n, s in zip(sizes, strides, strict=True)):
            # With stride 1 the padding does not depend on the size.
            some = [e if n is None else n for n, e in zip(sizes, extents, strict=True)]
            win = windows(some, kernel, auto_pad=auto_pad, strides=strides, dilations=dilations)
            known = win.heads, win.tails
        elif any(s > e + 1 for s, e in zip(strides, extents, strict=True)):
            raise ValueError(
                f"auto_pad {auto_pad} with strides {list(strides)} and kernel {list(kernel)} may leave gaps "
                "where the sizes of X are not known; give pads instead"
            )
        return cls(kernel, strides, dilations, sizes, known, auto_pad, group, fixed)

    @property
    def extents(self) -> list[int]:
        return [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]

    @property
    def rank(self) -> int:
        return len(self.kernel)

    @property
    def axes(self) -> list[int]:
        return list(range(2, 2 + self.rank))

    @property
    def outputs(self) -> tuple[int, ...] | None:
        """How many windows there are along each axis, if the sizes of X are known and there are any."""
        if self.pads is None or None in self.sizes:
            return None
        ends = zip(self.padded_sizes, self.extents, self.strides, strict=True)
        counts = tuple((n - e) // s + 1 for n, e, s in ends)
        return counts if min(counts) > 0 else None

    @property
    def padded_sizes(self) -> tuple[int, ...]:
        """The sizes of X with its padding, which must be known."""
        assert self.pads is not None
        return tuple((n or 0) + h + t for n, h, t in zip(self.sizes, *self.pads, strict=True))

    @property
    def pointwise(self) -> bool:
        """Whether there is one window for each position of X, and nothing else in it."""
        padded = self.pads is None or any(map(any, self.pads))
        return self.fixed and math.prod(self.kernel) == max(self.strides) == 1 and not padded

    def start(self, tap: Sequence[int]) -> tuple[int, ...]:
        """Where a tap of the kernel begins to read in the padded X."""
        return tuple(k * d for k, d in zip(tap, self.dilations, strict=True))

    def positions(self, dy: ir.Value) -> int | None:
        """The number of windows, if it is known."""
        sizes = [_known(dy, axis) for axis in self.axes]
        return None if None in sizes else math.prod(size for size in sizes if size is not None)

    def heads(self, op: Recorder, x: ir.Value) -> list[int] | ir.Value:
        """The padding before X."""
        return list(self.pads[0]) if self.pads else self._pads_at_run_time(op, x)[0]

    def padded(self, op: Recorder, x: ir.Value, first: int = 2) -> ir.Value:
        """X with its padding; `first` is its first spatial axis."""
        axes = list(range(first, first + self.rank))
        if self.pads is None:
            pads = op.Concat(*self._pads_at_run_time(op, x, first), axis=0)
        else:
            pads = [*self.pads[0], *self.pads[1]]
            if not any(pads):
                return x
        return op.Pad(x, pads, None, axes, rank=2 + self.rank)

    def _pads_at_run_time(self, op: Recorder, x: ir.Value, first: int = 2) -> tuple[ir.Value, ir.Value]:
        """The padding for SAME_UPPER and SAME_LOWER, before and after."""
        sizes, strides = op.shape_of(x, first, first + self.rank), list(self.strides)
        outputs = (sizes + [s - 1 for s in strides]) / strides
        total = op.Max((outputs - 1) * strides + self.extents - sizes, 0)
        small = total / 2
        large = total - small
        return (small, large) if self.auto_pad == "SAME_UPPER" else (large, small)


def _known(value: ir.Value, axis: int) -> int | None:
    size = None if value.shape is None else value.shape[axis]
    return size if isinstance(size, int) else None


def _size(op: Recorder, value: ir.Value, axis: int) -> Size:
    known = _known(value, axis)
    return op.Shape(value, start=axis, end=axis + 1) if known is None else known


def _shaped(op: Recorder, value: ir.Value, *sizes: Size) -> ir.Value:
    """The value in a shape, with a constant where that is possible."""
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) == len(sizes):
        return op.Reshape(value, known, allowzero=1)
    if len(known) == len(sizes) - 1 and all(known):
        return op.Reshape(value, [size if isinstance(size, int) else -1 for size in sizes])
    return _reshaped(op, value, *([size] if isinstance(size, int) else size for size in sizes))


def _reshaped(op: Recorder, value: ir.Value, *sizes: ir.Value | list[int]) -> ir.Value:
    """The value in a shape that is put together of vectors."""
    # Never -1: that fails if the value is empty.
    return op.Reshape(value, op.Concat(*sizes, axis=0), allowzero=1)


def _dx(op: Recorder, dy: ir.Value, x: ir.Value, w: ir.Value, form: _Form) -> ir.Value:
    if _is_double(dy):
        return _dx_of_columns(op, dy, x, w, form)
    if form.pointwise and form.group == 1:
        return op.Conv(dy, op.Transpose(w, perm=[1, 0, *form.axes]))
    if _joins_positions(dy, w, form):
        return _dx_of_product(op, dy, x, w, form)
    heads, tails = form.pads or ((0,) * form.rank,) * 2
    # What the windows leave over at the end, or the most they can if the size is not known.
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


def _turns(dy: ir.Value, w: ir.Value, form: _Form) -> bool:
    """Whether products with columns of dY are faster, for dX and dW together."""
    single = dy.dtype is not None and dy.dtype.name == "FLOAT"
    taps = math.prod(form.kernel)
    if not single or form.group > 1 or max(form.strides) > 1 or not 1 < taps <= _MANY_TAPS:
        return False
    samples, filters, channels = _known(dy, 0), _known(w, 0), _known(w, 1)
    if not samples or not filters or not channels or form.outputs is None or 0 in form.sizes:
        return False
    # With more filters than channels, the columns of X are smaller. With few rows, turning W costs more than
    # what is saved.
    rows = samples * math.prod(n or 0 for n in form.sizes)
    wide = channels >= _MANY_CHANNELS and channels >= filters
    return wide and filters <= 2 * rows and rows * filters * taps <= _COLUMNS


def _turned_columns(op: Recorder, dy: ir.Value, w: ir.Value, form: _Form) -> ir.Value:
    """(N * positions of X, taps * M): for each position of X, what of dY depends on it, by tap."""
    assert form.outputs is not None and form.pads is not None
    heads, tails = (
        tuple(e - 1 - pad for e, pad in zip(form.extents, pads, strict=True)) for pads in form.pads
    )
    turned = replace(form, sizes=form.outputs, pads=(heads, tails))
    return columns_of(op, dy, _size(op, w, 0), turned, backwards=True)


def _dx_of_turned(op: Recorder, dy: ir.Value, x: ir.Value, w: ir.Value, form: _Form) -> ir.Value:
    """The columns of dY @ W: the convolution of dY with the kernel turned around."""
    filters, channels = _size(op, w, 0), _size(op, w, 1)
    by_tap = _taps_first(op, w, filters, channels, math.prod(form.kernel))
    dx = op.Gemm(_turned_columns(op, dy, w, form), op.Flatten(by_tap, axis=2))
    dx = _shaped(op, dx, _size(op, x, 0), *(n or 0 for n in form.sizes), channels)
    return op.Transpose(dx, perm=[0, 1 + form.rank, *range(1, 1 + form.rank)])


def _dw_of_turned(op: Recorder, dy: ir.Value, x: ir.Value, w: ir.Value, form: _Form) -> ir.Value:
    """X @ the same columns of dY"""
    filters, channels = _size(op, w, 0), _size(op, w, 1)
    rows = op.Flatten(op.Transpose(x, perm=[0, *form.axes, 1]), axis=1 + form.rank)
    dw = op.Gemm(_turned_columns(op, dy, w, form), rows, transA=1)
    dw = _taps_last(op, dw, filters, channels, math.prod(form.kernel))
    return _shaped(op, dw, filters, channels, *form.kernel)


def _joins_positions(dy: ir.Value, w: ir.Value, form: _Form) -> bool:
    """Whether one product for all samples is faster than those that ConvTranspose computes."""
    single = dy.dtype is not None and dy.dtype.name == "FLOAT"
    if not single or form.rank != 2 or form.group > 1 or form.pads is None or not form.fixed:
        return False
    sizes = form.positions(dy), _known(w, 0), _known(w, 1)
    return all(size is not None and size > 0 for size in sizes) and (sizes[0] or 0) <= _FEW_POSITIONS


def _dx_of_product(op: Recorder, dy: ir.Value, x: ir.Value, w: ir.Value, form: _Form) -> ir.Value:
    """dY @ W, added up where windows overlap."""
    positions, channels = form.positions(dy), _known(w, 1)
    assert positions is not None and channels is not None and form.pads is not None
    rows = op.Flatten(op.Transpose(dy, perm=[0, *form.axes, 1]), axis=1 + form.rank)
    products = op.Gemm(rows, op.Flatten(w, axis=1))
    products = _shaped(op, products, _size(op, dy, 0), positions, channels * math.prod(form.kernel))
    sizes = [n for n in form.sizes if n is not None]
    return op.Col2Im(
        op.Transpose(products, perm=[0, 2, 1]),
        sizes if len(sizes) == form.rank else op.shape_of(x, 2),
        list(form.kernel),
        pads=[*form.pads[0], *form.pads[1]],
        strides=list(form.strides),
        dilations=list(form.dilations),
    )


def _dx_of_columns(op: Recorder, dy: ir.Value, x: ir.Value, w: ir.Value, form: _Form) -> ir.Value:
    """The same without ConvTranspose, which onnxruntime does not have in float64: W @ dY, added up."""
    rank, strides, group = form.rank, list(form.strides), form.group
    channels, samples = op.shape_of(x, 1, 2), op.shape_of(x, 0, 1)
    outputs = [op.shape_of(dy, axis, axis + 1) for axis in form.axes]
    others = op.ReduceProd(op.shape_of(w, 1), keepdims=1)
    kernels = _reshaped(op, w, [group], op.shape_of(w, 0, 1) / group, others)
    columns = op.MatMul(op.Transpose(kernels, perm=[0, 2, 1]), _by_group(op, dy, form))
    taps = list(form.kernel)
    columns = _reshaped(op, columns, channels, taps, samples, *outputs)
    # Tap k of output o is added at k * dilation + o * stride. With a stride, the taps get zeros between them
    # instead of the dilation, and zeros behind them, to fill rows as long as the stride.
    gaps = [d - 1 if s > 1 else 0 for s, d in zip(strides, form.dilations, strict=True)]
    if any(gaps):
        own = [2 + 2 * i for i in range(rank)]
        columns = op.Pad(op.Unsqueeze(columns, own), [0] * rank + gaps, None, own, rank=2 + 3 * rank)
        taps = [k * (g + 1) for k, g in zip(taps, gaps, strict=True)]
        columns = _reshaped(op, columns, channels, taps, samples, *outputs)
    fill = [-k % s for k, s in zip(taps, strides, strict=True)]
    if any(fill):
        columns = op.Pad(columns, [0] * rank + fill, None, list(range(1, 1 + rank)), rank=2 + 2 * rank)
    rows = [-(-k // s) for k, s in zip(taps, strides, strict=True)]
    split = [n for pair in zip(rows, strides, strict=True) for n in pair]
    columns = _reshaped(op, columns, channels, split, samples, *outputs)
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
        dx = _reshaped(op, dx, before, [rows[i]], outputs[i], behind)
        dx, size = _add_shifted(op, dx, rows[i], shift, outputs[i], before, behind)
        behind = behind * size
        sizes.insert(0, size * strides[i])
    dx = op.Transpose(_reshaped(op, dx, channels, samples, *sizes), perm=[1, 0, *form.axes])
    heads = form.heads(op, x)
    dx = op.Slice(dx, heads, op.shape_of(x, 2) + heads, form.axes)
    if max(strides) == 1:
        return dx
    # What no window reaches.
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
    """Of (before, rows, length, behind) the sum over the rows, each moved by `shift` more than the last;
    and how long that is."""
    # Rows with enough zeros behind them, cut into rows that are shorter by the shift.
    reach = length + (rows - 1) * shift
    if rows > 1:
        value = op.Pad(value, [0, rows * shift], None, [2], rank=4)
        joined = _reshaped(op, value, before, (reach + shift) * rows, behind)
        value = _reshaped(op, op.Slice(joined, [0], [-rows * shift], [1]), before, [rows], reach, behind)
    return op.ReduceSum(value, [1], keepdims=0), reach


def _dw(op: Recorder, dy: ir.Value, x: ir.Value, w: ir.Value, form: _Form) -> ir.Value:
    if math.prod(form.kernel) > _MANY_TAPS or not form.fixed:
        x, dy = _with_a_sample(op, x, form), _with_a_sample(op, dy, form)
        return (_dw_of_columns if _is_double(dy) else _dw_of_conv)(op, dy, x, w, form)
    filters, channels = _size(op, w, 0), _size(op, w, 1)
    if filters == form.group and channels == 1:
        dw = _dw_of_channels(op, dy, x, form)
    elif form.group > 1 or not _joins_samples(dy, filters, channels, form):
        dw = _dw_of_samples(op, dy, x, filters, channels, form)
    else:
        dw = _dw_of_rows(op, dy, x, filters, channels, form)
    return _shaped(op, dw, filters, channels, *form.kernel)


def _joins_samples(dy: ir.Value, filters: Size, channels: Size, form: _Form) -> bool:
    """Whether moving the samples beside the positions costs less than adding up the samples' products."""
    positions = form.positions(dy)
    if not isinstance(filters, int) or not isinstance(channels, int) or positions is None:
        return True
    return (
        _known(dy, 0) == 1 or positions * (filters + channels) <= math.prod(form.kernel) * filters * channels
    )


def _dw_of_channels(op: Recorder, dy: ir.Value, x: ir.Value, form: _Form) -> ir.Value:
    """(M, taps, 1) of a depthwise convolution, whose products are between vectors."""
    taps = _taps(op, dy, form.padded(op, x), form)
    products = [op.ReduceSum(tap * dy, form.axes, keepdims=1) for tap in taps]
    return op.ReduceSum(_joined(op, products, 2), [0], keepdims=0)


def _dw_of_samples(
    op: Recorder, dy: ir.Value, x: ir.Value, filters: Size, channels: Size, form: _Form
) -> ir.Value:
    """(M, C, taps) as the sum over the samples of products for each group."""
    samples, positions, group = _size(op, dy, 0), form.positions(dy), form.group
    size = op.ReduceProd(op.shape_of(dy, 2), keepdims=1) if positions is None else positions
    share = filters // group if isinstance(filters, int) else filters / group
    across = _shaped(op, dy, samples, group, share, size)
    taps = math.prod(form.kernel)
    if taps > 1 and group == 1 and isinstance(channels, int) and channels < _FEW_CHANNELS:
        x, last = form.padded(op, x), form.rank - 1
        turned = op.Transpose(op.Squeeze(across, [1]), perm=[0, 2, 1])
        if form.rank == 2 and form.outputs is not None:
            # The rows of the kernel come last, as Gather puts them.
            x = _joined_axis(op, x, form, last, first=2, axis=1)
            down = np.add.outer(
                np.arange(form.kernel[0]) * form.dilations[0], np.arange(form.outputs[0]) * form.strides[0]
            )
            columns = _shaped(op, op.Gather(x, down, axis=2), samples, taps * channels, size)
            dw = op.ReduceSum(op.MatMul(columns, turned), [0], keepdims=0)
            dw = _shaped(op, dw, form.kernel[1], channels, form.kernel[0], filters)
            return op.Transpose(dw, perm=[3, 1, 2, 0])
        columns = _joined_taps(op, x, form, first=2, axis=1)
        columns = _shaped(op, columns, samples, taps * channels, size)
        dw = op.ReduceSum(op.MatMul(columns, turned), [0], keepdims=0)
        return op.Transpose(_shaped(op, dw, taps, channels, filters), perm=[2, 1, 0])
    parts = _taps(op, dy, form.padded(op, x), form)
    parts = [_shaped(op, part, samples, group, channels, size) for part in parts]
    products = [op.MatMul(across, op.Transpose(part, perm=[0, 1, 3, 2])) for part in parts]
    dw = op.ReduceSum(_joined(op, products, 1), [0], keepdims=0)
    return _taps_last(op, dw, filters, channels, taps)


def _dw_of_rows(
    op: Recorder, dy: ir.Value, x: ir.Value, filters: Size, channels: Size, form: _Form
) -> ir.Value:
    """(M, C, taps), with one product for all samples."""
    # Gemm and not MatMul, which leaves its output as it was if there are no samples.
    rows = op.Flatten(_samples_second(op, dy, form), axis=1)
    taps = math.prod(form.kernel)
    if taps == 1:
        (part,) = _taps(op, dy, form.padded(op, _samples_second(op, x, form)), form)
        return op.Gemm(rows, op.Flatten(part, axis=1), transB=1)
    joins = isinstance(channels, int) and _joins_taps(dy, filters, channels, form)
    if joins and isinstance(channels, int) and channels < _FEW_CHANNELS:
        columns = _joined_taps(op, form.padded(op, _samples_second(op, x, form)), form, first=2, axis=1)
        return op.Gemm(rows, op.Reshape(columns, [channels * taps, -1]), transB=1)
    if joins and _has_many_rows(dy, filters, form):
        dw = op.Gemm(rows, columns_of(op, x, channels, form))
        return _taps_last(op, _swapped(op, dw, filters, taps, channels), filters, channels, taps)
    if joins:
        dw = op.MatMul(rows, _columns_by_tap(op, x, channels, form))
        return _taps_last(op, dw, filters, channels, taps)
    # With the channels last, slices consist of long pieces.
    last = 1 + form.rank
    x = form.padded(op, op.Transpose(x, perm=[0, *form.axes, 1]), first=1)
    products = [op.Gemm(rows, op.Flatten(part, axis=last)) for part in _slices(op, x, form, first=1)]
    return _taps_last(op, _joined(op, products, 0), filters, channels, taps)


def _joins_taps(dy: ir.Value, filters: Size, channels: int, form: _Form) -> bool:
    """Whether one product for all taps is faster than one for each, in spite of copying the columns."""
    samples, positions = _known(dy, 0), form.positions(dy)
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
    filters, channels = _known(w, 0), _known(w, 1)
    if group > 1 or not has_known_kernel(w) or filters is None or channels is None:
        return None
    try:
        form = _Form.of(x, known_kernel(w), group=group, fixed=True, **attributes)
    except ValueError:
        return None  # The body of the gradient says why.
    taps = math.prod(form.kernel)
    joins = _joins_samples(dy, filters, channels, form) and _joins_taps(dy, filters, channels, form)
    if not joins or channels < _FEW_CHANNELS or not 1 < taps <= _MANY_TAPS:
        return None
    samples, positions = _known(dy, 0) or 0, form.positions(dy) or 0
    many_rows = _has_many_rows(dy, filters, form)
    if not many_rows and not _wastes_columns(samples, positions):
        return None
    by_tap = _taps_first(op, w, filters, channels, taps)
    assert form.outputs is not None
    if many_rows:
        by_filter = op.Flatten(_swapped(op, by_tap, taps, filters, channels), axis=1)
        y = op.Gemm(columns_of(op, x, channels, form), by_filter, b, transB=1)
        y = _shaped(op, y, samples, *form.outputs, filters)
        return op.Transpose(y, perm=[0, 1 + form.rank, *range(1, 1 + form.rank)])
    columns = op.Transpose(_columns_by_tap(op, x, channels, form), perm=[0, 2, 1])
    y = op.ReduceSum(op.MatMul(by_tap, columns), [0], keepdims=0)
    y = y if b is None else op.Add(y, op.Unsqueeze(b, [1]))
    return op.Transpose(_shaped(op, y, filters, samples, *form.outputs), perm=[1, 0, *form.axes])


def _has_many_rows(dy: ir.Value, filters: Size, form: _Form) -> bool:
    """Whether W is so small beside the columns that sorting it by filter and tap costs little."""
    samples, positions = _known(dy, 0) or 0, form.positions(dy) or 0
    return isinstance(filters, int) and samples * positions >= 2 * filters


def _wastes_columns(samples: int, positions: int) -> bool:
    """Whether onnxruntime's Conv computes much more than its result.

    It has a product for each sample, which computes whole vectors of positions.
    """
    return positions > 1 and samples * (-positions % _VECTOR) >= 3 * _VECTOR


def columns_of(
    op: Recorder, x: ir.Value, channels: Size, form: _Form, *, backwards: bool = False
) -> ir.Value:
    """(N * positions, taps * C): what each window reads of X, whose sizes must be known.

    The last tap comes first with `backwards`.
    """
    windows, taps = _places(form)
    places = op.Add(windows.reshape(-1, 1), taps[::-1] if backwards else taps)
    x = _shaped(op, _channels_last(op, x, form), _size(op, x, 0), math.prod(form.padded_sizes), channels)
    return op.Flatten(op.Gather(x, places, axis=1), axis=2)


def _columns_by_tap(op: Recorder, x: ir.Value, channels: Size, form: _Form) -> ir.Value:
    """(taps, N * positions, C): the same for each tap; the number of samples must be known, too."""
    windows, taps = _places(form)
    samples, size = _known(x, 0) or 0, math.prod(form.padded_sizes)
    rows = np.add.outer(size * np.arange(samples), windows).reshape(-1)
    x = _shaped(op, _channels_last(op, x, form), samples * size, channels)
    return op.Gather(x, op.Add(taps.reshape(-1, 1), rows), axis=0)


def _channels_last(op: Recorder, x: ir.Value, form: _Form) -> ir.Value:
    """X with its padding, and its channels behind the positions."""
    # This way Gather copies long pieces, and on several threads, unlike Slice and Concat.
    return form.padded(op, op.Transpose(x, perm=[0, *form.axes, 1]), first=1)


def _places(form: _Form) -> tuple[np.ndarray, np.ndarray]:
    """Where windows begin in a sample of the padded X, and where taps are in a window."""
    assert form.outputs is not None
    windows, taps = (
        np.ravel_multi_index(
            tuple(s * i for s, i in zip(steps, np.indices(counts), strict=True)), form.padded_sizes
        ).reshape(-1)
        for steps, counts in ((form.strides, form.outputs), (form.dilations, form.kernel))
    )
    return windows, taps


def _taps_first(op: Recorder, w: ir.Value, filters: Size, channels: Size, taps: int) -> ir.Value:
    """(M, C, ...) as (taps, M, C)"""
    return op.Transpose(_shaped(op, w, filters, channels, taps), perm=[2, 0, 1])


def _taps_last(op: Recorder, dw: ir.Value, filters: Size, channels: Size, taps: int) -> ir.Value:
    """(taps, M, C) as (M, C, taps)"""
    # onnxruntime is quick at moving a single axis.
    return op.Transpose(_shaped(op, dw, taps, filters, channels), perm=[1, 2, 0]) if taps > 1 else dw


def _swapped(op: Recorder, value: ir.Value, first: Size, second: Size, last: Size) -> ir.Value:
    """(first, second, last) as (second, first, last)"""
    # onnxruntime would merge a Transpose with the one that moves the taps, into one that is slow on several
    # threads: it starts them again for each filter.
    assert isinstance(first, int) and isinstance(second, int)
    rows = op.Add(np.arange(second).reshape(-1, 1), second * np.arange(first))
    return op.Gather(_shaped(op, value, first * second, last), rows, axis=0)


def _samples_second(op: Recorder, value: ir.Value, form: _Form) -> ir.Value:
    """(N, C, ...) as (C, N, ...)"""
    if _known(value, 0) == 1:
        return op.Unsqueeze(op.Squeeze(value, [0]), [1])
    return op.Transpose(value, perm=[1, 0, *form.axes])


def _joined(op: Recorder, values: Sequence[ir.Value], axis: int) -> ir.Value:
    return op.Concat(*values, axis=axis) if len(values) > 1 else values[0]


def _with_a_sample(op: Recorder, value: ir.Value, form: _Form) -> ir.Value:
    """The value, with a sample of zeros if the batch is empty.

    Over an empty one, a Conv of onnxruntime may never return, and a MatMul leaves its output as it was.
    """
    samples = value.shape[0] if value.shape is not None else None
    if isinstance(samples, int) and samples > 0:
        return value
    missing = op.Max(1 - op.Shape(value, end=1), 0)
    return op.Pad(value, op.Concat([0], missing, axis=0), None, [0], rank=2 + form.rank)


def _dw_of_conv(op: Recorder, dy: ir.Value, x: ir.Value, w: ir.Value, form: _Form) -> ir.Value:
    """X convolved with dY: channels and samples change places, and so do strides and dilations."""
    group, swap = form.group, [1, 0, *form.axes]
    pads = [*form.pads[0], *form.pads[1]] if form.pads else None
    x = x if form.pads else form.padded(op, x)
    if group == 1:
        x = op.Transpose(x, perm=swap)
    else:
        count, channels, sizes = op.shape_of(x, 0, 1), op.shape_of(w, 1, 2), op.shape_of(x, 2)
        x = _reshaped(op, x, count, [group], channels, sizes)
        x = op.Transpose(x, perm=[2, 1, 0, *(axis + 1 for axis in form.axes)])
        x = _reshaped(op, x, channels, count * group, sizes)
    dw = op.Conv(
        x,
        op.Transpose(dy, perm=swap),
        group=group,
        pads=pads,
        strides=list(form.dilations),
        dilations=list(form.strides),
    )
    # What the windows leave over at the end would be taps beyond the kernel.
    kernel = list(form.kernel) if form.fixed else op.shape_of(w, 2)
    dw = op.Slice(dw, [0] * form.rank, kernel, form.axes)
    return op.Transpose(dw, perm=swap)


def _dw_of_columns(op: Recorder, dy: ir.Value, x: ir.Value, w: ir.Value, form: _Form) -> ir.Value:
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
    columns = _reshaped(op, x, [form.group], others, op.Shape(across, start=2))
    dw = op.MatMul(columns, op.Transpose(across, perm=[0, 2, 1]))
    return op.Reshape(op.Transpose(dw, perm=[0, 2, 1]), op.shape_of(w), allowzero=1)


def _by_group(op: Recorder, dy: ir.Value, form: _Form) -> ir.Value:
    """dY as (group, M / group, samples and positions)."""
    # Samples beside positions: onnxruntime does not broadcast a product over an empty batch.
    swapped = op.Transpose(dy, perm=[1, 0, *form.axes])
    columns = op.ReduceProd(op.Shape(swapped, start=1), keepdims=1)
    return _reshaped(op, swapped, [form.group], op.Shape(swapped, end=1) / form.group, columns)


def _taps(op: Recorder, dy: ir.Value, x: ir.Value, form: _Form) -> list[ir.Value]:
    """For each tap of the kernel, what it reads of the padded X."""
    if math.prod(form.kernel) == max(form.strides) == 1:
        return [x]
    starts = [form.start(tap) for tap in np.ndindex(form.kernel)]
    phases = [tuple(a % s for a, s in zip(start, form.strides, strict=True)) for start in starts]
    if max(form.strides) == 1 or len(set(phases)) == len(phases):
        return _slices(op, x, form, first=2)
    steps = list(form.strides)
    parts = []
    for start, phase in zip(starts, phases, strict=True):
        # Slices with steps are slow; this one is recorded once for all the taps that share a phase.
        every = op.Slice(x, list(phase), [_END] * form.rank, form.axes, steps)
        first = [a // s for a, s in zip(start, form.strides, strict=True)]
        ends = op.shape_of(dy, 2) + first
        parts.append(op.Slice(every, first, ends, form.axes))
    return parts


def _slices(op: Recorder, x: ir.Value, form: _Form, *, first: int) -> list[ir.Value]:
    """The same by one slice of X for each tap; `first` is the first spatial axis of X."""
    axes = list(range(first, first + form.rank))
    steps = list(form.strides) if max(form.strides) > 1 else None
    parts = []
    for tap in np.ndindex(form.kernel):
        start = form.start(tap)
        # Counted from the end, the slices need not know the sizes.
        ends = [a - e + 1 or _END for a, e in zip(start, form.extents, strict=True)]
        parts.append(op.Slice(x, list(start), ends, axes, steps))
    return parts


def _joined_taps(op: Recorder, x: ir.Value, form: _Form, *, first: int, axis: int) -> ir.Value:
    """What all taps read of the padded X, one after the other along an axis."""
    for i in reversed(range(form.rank)):
        x = _joined_axis(op, x, form, i, first=first, axis=axis)
    return x


def _joined_axis(op: Recorder, x: ir.Value, form: _Form, i: int, *, first: int, axis: int) -> ir.Value:
    """The same for the taps along one spatial axis of the kernel."""
    kernel, extent, step = form.kernel[i], form.extents[i], form.strides[i]
    if kernel == step == 1:
        return x
    starts = [k * form.dilations[i] for k in range(kernel)]
    count = None if form.outputs is None else form.outputs[i]
    if 1 < step < kernel and count is not None:
        # Slices with steps are slow; these are recorded once for all the taps that share a phase.
        every = [op.Slice(x, [a % step], [_END], [first + i], [step]) for a in starts]
        cuts = zip(every, (a // step for a in starts), strict=True)
        parts = [op.Slice(part, [a], [a + count], [first + i]) for part, a in cuts]
    else:
        steps = [step] if step > 1 else None
        parts = [op.Slice(x, [a], [a - extent + 1 or _END], [first + i], steps) for a in starts]
    return _joined(op, parts, axis)
