"""The gradients of Conv and ConvTranspose."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient
from ortgrad.errors import NodeError
from ortgrad.operators.declaration import Choice, Empty, Operand, Shape, operator
from ortgrad.ops._windows import (
    AUTO_PADS,
    Windows,
    explicit_pads,
    per_dimension,
    require_outputs,
    spatial,
    windows,
)

if TYPE_CHECKING:
    import onnx_ir as ir

    from ortgrad.graph.recorder import Recorder

# How many elements a matrix of columns may have: it should stay in the cache between its uses. Columns of
# X are read once more to be added up, and pay for larger ones.
_DY_COLUMN_ELEMENTS = 1 << 21
_X_COLUMN_ELEMENTS = 1 << 22
# A 1x1 kernel needs no such matrix; collecting samples for a larger product pays up to this many columns.
_POINTWISE_COLUMNS = 1 << 12
# In the body: with fewer input channels than this, one product for all taps is faster than one for each.
_FEW_CHANNELS = 16
# A kernel with more taps than this is not written out tap by tap: the time in which onnxruntime loads a model
# grows with the square of the number of nodes, and above 7x7 it runs slower, too.
_MANY_TAPS = 49
_END = 1 << 62


def _shapes(dy: Operand, x: Operand, w: Operand, **_: Any) -> Sequence[Shape | None]:
    return [x.shape, w.shape, w.shape[:1] if w.shape else None]


def _dims(*, group: int, kernel_shape: list[int] | None, **_: Any) -> dict[str, str]:
    if group < 1:
        raise ValueError(f"group is {group}; it must be positive")
    y, x, kernel = spatial(kernel_shape)
    return {"dY": f"N {group}*M {y}", "X": f"N {group}*C {x}", "W": f"{group}*M C {kernel}"}


@operator(
    "ConvGrad",
    inputs=["dY", "X", "W"],
    outputs=["dX?", "dW?", "dB?"],
    shapes=_shapes,
    dims=_dims,
    attributes={
        "auto_pad": Choice(*AUTO_PADS),
        "dilations": list[int],
        "group": 1,
        "kernel_shape": list[int],
        "pads": list[int],
        "strides": list[int],
    },
)
def conv_grad(
    dy: np.ndarray,
    x: np.ndarray,
    w: np.ndarray,
    *,
    auto_pad: str,
    dilations: list[int] | None,
    group: int,
    kernel_shape: list[int] | None,
    pads: list[int] | None,
    strides: list[int] | None,
    wanted: tuple[bool, bool, bool],
    empty: Empty,
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """dX = W turned, convolved with dY; dW = X correlated with dY; dB = sum of dY"""
    win = windows(
        x.shape[2:], w.shape[2:], auto_pad=auto_pad, strides=strides, dilations=dilations, pads=pads
    )
    if dy.shape != (len(x), len(w), *win.outputs):
        raise ValueError(
            f"dY has shape {list(dy.shape)}, but Conv of X {list(x.shape)} and W {list(w.shape)} "
            f"gives {[len(x), len(w), *win.outputs]}"
        )
    db = _sum_over_positions(dy) if wanted[2] else None
    if not (dy.size and x.size and w.size):
        return np.zeros_like(x), np.zeros_like(w), db
    dx = empty(0, x.shape) if wanted[0] else None
    dw = empty(1, w.shape) if wanted[1] else None
    # Columns of X are copied for dW and added up again for dX; those of dY are copied once and serve both, so
    # that they may be this many times as large.
    worth = 1.75 if wanted[0] and wanted[1] else 1.5 if wanted[0] else 0.9
    if not (wanted[0] or wanted[1]):
        return None, None, db
    # Zeros around dY would meet all of X and W, but those around X meet only dY, as in PyTorch and the body.
    # That matters if X or W is not finite; what is not finite in X is in dW, too.
    few = len(w) <= worth * x.shape[1]
    if few and not _has_windows_of_padding(win) and (dx is None or _is_finite(w)):
        _through_columns_of_dy(dy, x, w, win, group, dx, dw)
        if dw is None or _is_finite(dw):
            return dx, dw, db
    _through_columns_of_x(dy, x, w, win, group, dx, dw)
    return dx, dw, db


def _is_finite(w: np.ndarray) -> bool:
    """Whether all elements are finite; it may deny that of some larger than 1e18."""
    flat = w.reshape(-1)
    return math.isfinite(flat @ flat)


def _has_windows_of_padding(win: Windows) -> bool:
    """Whether there may be windows that hold nothing of X."""
    return any(
        max(head, tail) > (kernel - 1) * dilation or dilation > size
        for size, kernel, dilation, head, tail in zip(
            win.sizes, win.kernel, win.dilations, win.heads, win.tails, strict=True
        )
    )


def _sum_over_positions(dy: np.ndarray) -> np.ndarray:
    flat = dy.reshape(*dy.shape[:2], math.prod(dy.shape[2:]))
    # A product with ones is several times as fast as sum().
    return (flat @ np.ones(flat.shape[2], dy.dtype)).sum(axis=0)


@dataclass(frozen=True)
class _Phase:
    """The input positions p + q * stride, which the same taps of the kernel reach with stride 1.

    Tap taps[i], counted through the flattened kernel, brings position q to output q + offsets[i].
    """

    positions: tuple[slice, ...]
    sizes: tuple[int, ...]
    taps: list[int]
    offsets: list[tuple[int, ...]]

    def of(self, x: np.ndarray) -> np.ndarray:
        return x[(slice(None), slice(None), *self.positions)]


def _phases(win: Windows) -> list[_Phase]:
    axes = []
    for size, kernel, stride, dilation, head in zip(
        win.sizes, win.kernel, win.strides, win.dilations, win.heads, strict=True
    ):
        axis = []
        for p in range(stride):
            reached = [(k, p + head - k * dilation) for k in range(kernel)]
            taps = [(k, at // stride) for k, at in reached if at % stride == 0]
            axis.append((slice(p, None, stride), max(0, -(-(size - p) // stride)), taps))
        axes.append(axis)
    phases = []
    for parts in itertools.product(*axes):
        pairs = list(itertools.product(*(taps for _, _, taps in parts)))
        phases.append(
            _Phase(
                tuple(positions for positions, _, _ in parts),
                tuple(size for _, size, _ in parts),
                [int(np.ravel_multi_index([k for k, _ in pair], win.kernel)) for pair in pairs],
                [tuple(offset for _, offset in pair) for pair in pairs],
            )
        )
    return phases


@dataclass(frozen=True)
class _Block:
    """Some samples, and of one sample perhaps only some positions in the first spatial dimension."""

    samples: slice
    rows: slice
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        return self.samples.stop - self.samples.start

    def of(self, array: np.ndarray, starts: Sequence[int] | None = None) -> np.ndarray:
        """The block of an (N, C, ...) array, spatially moved by `starts`, as (C, N, ...)."""
        starts = [0] * len(self.sizes) if starts is None else starts
        moved = [
            slice(a + self.rows.start * (i == 0), a + self.rows.start * (i == 0) + n)
            for i, (a, n) in enumerate(zip(starts, self.sizes, strict=True))
        ]
        return array[(self.samples, slice(None), *moved)].swapaxes(0, 1)


def _blocks(samples: int, sizes: tuple[int, ...], columns: int) -> Iterator[_Block]:
    """Cut samples of these spatial sizes into blocks of about so many columns."""
    first, *others = sizes
    width = math.prod(others)
    together = max(1, min(samples, columns // max(first * width, 1)))
    rows = max(1, first if together > 1 else columns // max(width, 1))
    for n in range(0, samples, together):
        for r in range(0, first, rows):
            end, stop = min(n + together, samples), min(r + rows, first)
            yield _Block(slice(n, end), slice(r, stop), (stop - r, *others))


class _Scratch:
    """One piece of memory for arrays of changing shapes: fresh pages cost more than filling them."""

    def __init__(self, dtype: np.dtype) -> None:
        self._memory = np.empty(0, dtype)

    def array(self, *shape: int) -> np.ndarray:
        size = math.prod(shape)
        if self._memory.size < size:
            self._memory = np.empty(size, self._memory.dtype)
        return self._memory[:size].reshape(shape)


def _through_columns_of_dy(
    dy: np.ndarray,
    x: np.ndarray,
    w: np.ndarray,
    win: Windows,
    group: int,
    dx: np.ndarray | None,
    dw: np.ndarray | None,
) -> None:
    """For each phase: dX = W @ columns of dY, dW = columns of dY @ X."""
    filters, channels = len(w) // group, w.shape[1]
    kernels = w.reshape(group, filters, channels, math.prod(win.kernel))
    columns_memory, x_memory = _Scratch(dy.dtype), _Scratch(dy.dtype)
    phases = _phases(win)
    heads, sizes = _frame(win.outputs, [(o, p.sizes) for p in phases for o in p.offsets])
    padded = _inside(dy, heads, sizes)
    for phase in phases:
        taps = len(phase.taps)
        if not taps:
            if dx is not None:
                phase.of(dx)[...] = 0
            continue
        turned = kernels[..., phase.taps].swapaxes(1, 2).reshape(group, channels, filters * taps)
        dw_part = np.zeros((group, filters * taps, channels), dy.dtype)
        dw_block = np.empty_like(dw_part)
        starts = [[h + o for h, o in zip(heads, offset, strict=True)] for offset in phase.offsets]
        limit = _DY_COLUMN_ELEMENTS // (len(w) * taps)
        for block in _blocks(len(x), phase.sizes, limit if taps > 1 else min(limit, _POINTWISE_COLUMNS)):
            if taps > 1:
                stack = columns_memory.array(len(w), taps, block.count, *block.sizes)
                for i, start in enumerate(starts):
                    stack[:, i] = block.of(padded, start)
                columns = stack.reshape(group, filters * taps, -1)
            else:
                columns = _matrix(block.of(padded, starts[0]), group, columns_memory)
            if dw is not None:
                block_x = _matrix(block.of(phase.of(x)), group, x_memory)
                np.matmul(columns, block_x.swapaxes(1, 2), out=dw_block)
                dw_part += dw_block
            if dx is not None:
                place = block.of(phase.of(dx))
                block_dx = place if _has_flat_rows(place) else x_memory.array(*place.shape)
                np.matmul(turned, columns, out=block_dx.reshape(group, channels, -1))
                if block_dx is not place:
                    place[...] = block_dx
        if dw is not None:
            dw_taps = dw.reshape(kernels.shape)
            dw_taps[..., phase.taps] = dw_part.reshape(group, filters, taps, channels).swapaxes(2, 3)


def _through_columns_of_x(
    dy: np.ndarray,
    x: np.ndarray,
    w: np.ndarray,
    win: Windows,
    group: int,
    dx: np.ndarray | None,
    dw: np.ndarray | None,
) -> None:
    """dW = columns of X @ dY; columns of dX = W @ dY, added up."""
    taps = math.prod(win.kernel)
    rows, filters = w.shape[1] * taps, len(w) // group
    turned = np.ascontiguousarray(w.reshape(group, filters, rows).swapaxes(1, 2))
    dw_total = np.zeros((group, rows, filters), dy.dtype)
    dw_block = np.empty_like(dw_total)
    columns_memory, dy_memory = _Scratch(dy.dtype), _Scratch(dy.dtype)
    # Padded copies of the phases; for each tap the copy and where in it the first output reads.
    phases = [phase for phase in _phases(win) if phase.taps]
    frames, x_parts, dx_parts, reads = [], [], [], []
    for number, phase in enumerate(phases):
        offsets = [tuple(-o for o in offset) for offset in phase.offsets]
        heads, sizes = _frame(phase.sizes, [(o, win.outputs) for o in offsets])
        frames.append(heads)
        if dw is not None:
            x_parts.append(_inside(phase.of(x), heads, sizes))
        if dx is not None:
            dx_parts.append(np.zeros((*x.shape[:2], *sizes), dy.dtype))
        for tap, offset in zip(phase.taps, offsets, strict=True):
            reads.append((number, tap, [h + o for h, o in zip(heads, offset, strict=True)]))
    for block in _blocks(len(x), win.outputs, _X_COLUMN_ELEMENTS // (x.shape[1] * taps)):
        stack = columns_memory.array(x.shape[1], taps, block.count, *block.sizes)
        columns = stack.reshape(group, rows, -1)
        block_dy = _matrix(block.of(dy), group, dy_memory)
        if dw is not None:
            for number, tap, start in reads:
                stack[:, tap] = block.of(x_parts[number], start)
            np.matmul(columns, block_dy.swapaxes(1, 2), out=dw_block)
            dw_total += dw_block
        if dx is not None:
            np.matmul(turned, block_dy, out=columns)
            for number, tap, start in reads:
                place = block.of(dx_parts[number], start)
                place += stack[:, tap]
    if dw is not None:
        dw.reshape(group, filters, rows)[...] = dw_total.swapaxes(1, 2)
    if dx is not None:
        dx[...] = 0
        for phase, heads, part in zip(phases, frames, dx_parts, strict=True):
            inner = tuple(slice(h, h + n) for h, n in zip(heads, phase.sizes, strict=True))
            phase.of(dx)[...] = part[(slice(None), slice(None), *inner)]


def _frame(
    sizes: Sequence[int], reads: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The padding before an array of these sizes, and its size with all padding, that
    reading (starts, sizes) of it needs."""
    heads, padded = [], []
    for i, size in enumerate(sizes):
        heads.append(max(0, *(-starts[i] for starts, _ in reads)))
        padded.append(heads[i] + max(size, *(starts[i] + read[i] for starts, read in reads)))
    return tuple(heads), tuple(padded)


def _inside(array: np.ndarray, heads: Sequence[int], sizes: tuple[int, ...]) -> np.ndarray:
    """The array with zeros around it, spatially of these sizes: itself if it has them already."""
    if array.shape[2:] == sizes:
        return array
    frame = np.zeros((*array.shape[:2], *sizes), array.dtype)
    inner = tuple(slice(h, h + n) for h, n in zip(heads, array.shape[2:], strict=True))
    frame[(slice(None), slice(None), *inner)] = array
    return frame


def _has_flat_rows(block: np.ndarray) -> bool:
    return bool(block[0].flags.c_contiguous)


def _matrix(block: np.ndarray, group: int, memory: _Scratch) -> np.ndarray:
    """A (C, N, ...) block as (group, C / group, columns): itself if its rows are flat, else copied."""
    if not _has_flat_rows(block):
        copied = memory.array(*block.shape)
        copied[...] = block
        block = copied
    return block.reshape(group, block.shape[0] // group, -1)


@conv_grad.onnx
def conv_grad_body(
    op: Recorder,
    dy: ir.Value,
    x: ir.Value,
    w: ir.Value,
    *,
    auto_pad: str,
    dilations: list[int] | None,
    group: int,
    kernel_shape: list[int] | None,
    pads: list[int] | None,
    strides: list[int] | None,
    wanted: tuple[bool, bool, bool],
) -> tuple[ir.Value | None, ir.Value | None, ir.Value | None]:
    # Towards a kernel of many taps, dY is the kernel of another convolution. To differentiate that once more,
    # its sizes need not be known.
    fixed = op.checked or kernel_shape is not None or _has_known_kernel(w) or _needs_kernel(w, dy, auto_pad)
    kernel = kernel_shape or (_known_kernel(op, w) if fixed else [1] * (op.rank(w) - 2))
    try:
        form = _Form.of(x, kernel, auto_pad, strides, dilations, pads, fixed=fixed)
    except ValueError as error:
        raise NodeError(str(error)) from error
    if op.checked:
        sizes = op.Shape(x, start=2) if None in form.sizes else [n for n in form.sizes if n is not None]
        dy = require_outputs(
            op, dy, sizes, kernel, auto_pad=auto_pad, strides=strides, dilations=dilations, pads=pads
        )
    axes = [0, *range(2, 2 + len(kernel))]
    return (
        _dx_body(op, dy, x, w, form, group) if wanted[0] else None,
        _dw_body(op, dy, x, w, form, group) if wanted[1] else None,
        op.ReduceSum(dy, axes, keepdims=0) if wanted[2] else None,
    )


def _needs_kernel(w: ir.Value, dy: ir.Value, auto_pad: str) -> bool:
    """Whether the body can only be written for a kernel of known size."""
    return w.shape is None or _is_double(dy) or auto_pad.startswith("SAME")


def _has_known_kernel(w: ir.Value) -> bool:
    return w.shape is not None and len(w.shape) > 2 and all(isinstance(n, int) for n in list(w.shape)[2:])


def _known_kernel(op: Recorder, w: ir.Value) -> list[int]:
    sizes = list(w.shape)[2:] if w.shape is not None else []
    if not _has_known_kernel(w):
        raise NodeError(f"the kernel size is not known; declare the shape of {w.name!r} or give kernel_shape")
    return [int(n) for n in sizes]  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Form:
    """What is known of the windows before the run. Sizes may be unknown, and then pads, too."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    sizes: tuple[int | None, ...]  # of X
    pads: tuple[tuple[int, ...], tuple[int, ...]] | None
    auto_pad: str
    fixed: bool  # whether the kernel is known; if not, ones stand for its sizes, and sizes are not known

    @classmethod
    def of(
        cls,
        x: ir.Value,
        kernel: Sequence[int],
        auto_pad: str,
        strides: Sequence[int] | None,
        dilations: Sequence[int] | None,
        pads: Sequence[int] | None,
        *,
        fixed: bool = True,
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
        return cls(kernel, strides, dilations, sizes, known, auto_pad, fixed)

    @property
    def extents(self) -> list[int]:
        return [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]

    @property
    def rank(self) -> int:
        return len(self.kernel)

    @property
    def axes(self) -> list[int]:
        return list(range(2, 2 + self.rank))

    def starts(self) -> Iterator[tuple[int, ...]]:
        """For each tap of the kernel, where in the padded input its reading begins."""
        for tap in itertools.product(*map(range, self.kernel)):
            yield tuple(k * d for k, d in zip(tap, self.dilations, strict=True))

    def pads_at_run_time(self, op: Recorder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The padding for SAME_UPPER and SAME_LOWER, before and after."""
        strides = op.constant(np.array(self.strides, np.int64))
        sizes = op.Shape(x, start=2)
        outputs = op.Div(op.Add(sizes, op.Sub(strides, 1)), strides)
        reach = op.Add(op.Mul(op.Sub(outputs, 1), strides), self.extents)
        total = op.Max(op.Sub(reach, sizes), [0])
        small = op.Div(total, 2)
        large = op.Sub(total, small)
        return (small, large) if self.auto_pad == "SAME_UPPER" else (large, small)


def _dx_body(op: Recorder, dy: ir.Value, x: ir.Value, w: ir.Value, form: _Form, group: int) -> ir.Value:
    if _is_double(dy):
        return _dx_body_of_columns(op, dy, x, w, form, group)
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
        group=group,
        pads=[*heads, *tails],
        output_padding=left,
    )
    if form.pads is None:
        starts, _ = form.pads_at_run_time(op, x)
        return op.Slice(dx, starts, op.Add(starts, op.Shape(x, start=2)), form.axes)
    if any(n is None and s > 1 for n, s in zip(form.sizes, form.strides, strict=True)):
        return op.Slice(dx, [0] * form.rank, op.Shape(x, start=2), form.axes)
    return dx


def _is_double(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.name == "DOUBLE"


def _dx_body_of_columns(
    op: Recorder, dy: ir.Value, x: ir.Value, w: ir.Value, form: _Form, group: int
) -> ir.Value:
    """The same without ConvTranspose, which onnxruntime does not have in float64: W @ dY, added up."""
    rank, strides = form.rank, list(form.strides)
    channels, samples = op.Shape(x, start=1, end=2), op.Shape(x, end=1)
    outputs = [op.Shape(dy, start=axis, end=axis + 1) for axis in form.axes]
    filters, others = op.Div(op.Shape(w, end=1), [group]), op.ReduceProd(op.Shape(w, start=1), keepdims=1)
    kernels = op.Reshape(w, op.Concat([group], filters, others, axis=0), allowzero=1)
    columns = op.MatMul(op.Transpose(kernels, perm=[0, 2, 1]), _of_group(op, dy, form, group))
    taps = list(form.kernel)
    columns = op.Reshape(columns, op.Concat(channels, taps, samples, *outputs, axis=0), allowzero=1)
    # Tap k of output o is added at k * dilation + o * stride. With a stride, the taps get zeros between them
    # instead of the dilation, and zeros behind them, to fill rows as long as the stride.
    gaps = [d - 1 if s > 1 else 0 for s, d in zip(strides, form.dilations, strict=True)]
    if any(gaps):
        own = [2 + 2 * i for i in range(rank)]
        columns = op.Pad(op.Unsqueeze(columns, own), [0] * rank + gaps, None, own, rank=2 + 3 * rank)
        taps = [k * (g + 1) for k, g in zip(taps, gaps, strict=True)]
        columns = op.Reshape(columns, op.Concat(channels, taps, samples, *outputs, axis=0), allowzero=1)
    fill = [-k % s for k, s in zip(taps, strides, strict=True)]
    if any(fill):
        columns = op.Pad(columns, [0] * rank + fill, None, list(range(1, 1 + rank)), rank=2 + 2 * rank)
    rows = [-(-k // s) for k, s in zip(taps, strides, strict=True)]
    split = [n for pair in zip(rows, strides, strict=True) for n in pair]
    columns = op.Reshape(columns, op.Concat(channels, split, samples, *outputs, axis=0), allowzero=1)
    # Now row r of output o is added at r * shift + o, in units of the stride.
    order = [axis for i in range(rank) for axis in (1 + 2 * i, 2 + 2 * rank + i, 2 + 2 * i)]
    dx = op.Transpose(columns, perm=[0, 1 + 2 * rank, *order])
    shape = op.Shape(dx)
    sizes: list[ir.Value] = []
    behind = op.constant(np.array([1]))
    for i in reversed(range(rank)):
        before = op.ReduceProd(op.Slice(shape, [0], [2 + 3 * i]), keepdims=1)
        behind = op.Mul(behind, [strides[i]])
        shift = form.dilations[i] if strides[i] == 1 else 1
        dx = op.Reshape(dx, op.Concat(before, [rows[i]], outputs[i], behind, axis=0), allowzero=1)
        dx, size = _add_shifted(op, dx, rows[i], shift, outputs[i], before, behind)
        behind = op.Mul(behind, size)
        sizes.insert(0, op.Mul(size, [strides[i]]))
    dx = op.Reshape(dx, op.Concat(channels, samples, *sizes, axis=0), allowzero=1)
    dx = op.Transpose(dx, perm=[1, 0, *form.axes])
    heads = op.constant(np.array(form.pads[0])) if form.pads else form.pads_at_run_time(op, x)[0]
    dx = op.Slice(dx, heads, op.Add(heads, op.Shape(x, start=2)), form.axes)
    if max(strides) == 1:
        return dx
    # What no window reaches.
    missing = op.Sub(op.Shape(x, start=2), op.Shape(dx, start=2))
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
    reach = op.Add(length, [(rows - 1) * shift])
    if rows > 1:
        value = op.Pad(value, [0, rows * shift], None, [2], rank=4)
        joined = op.Concat(before, op.Mul(op.Add(reach, [shift]), [rows]), behind, axis=0)
        value = op.Slice(op.Reshape(value, joined, allowzero=1), [0], [-rows * shift], [1])
        value = op.Reshape(value, op.Concat(before, [rows], reach, behind, axis=0), allowzero=1)
    return op.ReduceSum(value, [1], keepdims=0), reach


def _dw_body(op: Recorder, dy: ir.Value, x: ir.Value, w: ir.Value, form: _Form, group: int) -> ir.Value:
    taps = math.prod(form.kernel)
    if taps > _MANY_TAPS or not form.fixed:
        x, dy = _with_a_sample(op, x, form), _with_a_sample(op, dy, form)
        if not _is_double(dy):
            return _dw_body_of_conv(op, dy, x, w, form, group)
    if form.pads is None:
        at_run_time = op.Concat(*form.pads_at_run_time(op, x), axis=0)
        x = op.Pad(x, at_run_time, None, form.axes, rank=2 + form.rank)
    elif any((*form.pads[0], *form.pads[1])):
        x = op.Pad(x, [*form.pads[0], *form.pads[1]], None, form.axes, rank=2 + form.rank)
    if taps > _MANY_TAPS:
        return _dw_body_of_columns(op, dy, x, w, form, group)
    parts = _taps(op, dy, x, form) if taps > 1 or max(form.strides) > 1 else [x]
    parts = [_by_group(op, part, dy, group) for part in parts]
    across = op.Transpose(_by_group(op, dy, dy, group), perm=[0, 1, 3, 2])
    channels = w.shape[1] if w.shape is not None else None
    if group == 1 and isinstance(channels, int) and channels < _FEW_CHANNELS:
        parts = [op.Concat(*parts, axis=2)]
    products = [op.ReduceSum(op.MatMul(part, across), [0], keepdims=0) for part in parts]
    dw = op.Concat(*products, axis=1) if len(products) > 1 else products[0]
    filters = op.Div(op.Shape(w, start=0, end=1), [group])
    dw = op.Reshape(dw, op.Concat([group], [taps], op.Shape(w, start=1, end=2), filters, axis=0), allowzero=1)
    return op.Reshape(op.Transpose(dw, perm=[0, 3, 2, 1]), op.Shape(w), allowzero=1)


def _with_a_sample(op: Recorder, value: ir.Value, form: _Form) -> ir.Value:
    """The value, with a sample of zeros if the batch is empty.

    Over an empty one, a Conv of onnxruntime may never return, and a MatMul leaves its output as it was.
    """
    samples = value.shape[0] if value.shape is not None else None
    if isinstance(samples, int) and samples > 0:
        return value
    missing = op.Max(op.Sub([1], op.Shape(value, end=1)), [0])
    return op.Pad(value, op.Concat([0], missing, axis=0), None, [0], rank=2 + form.rank)


def _dw_body_of_conv(
    op: Recorder, dy: ir.Value, x: ir.Value, w: ir.Value, form: _Form, group: int
) -> ir.Value:
    """X convolved with dY: channels and samples change places, and so do strides and dilations."""
    pads = None
    if form.pads is None:
        at_run_time = op.Concat(*form.pads_at_run_time(op, x), axis=0)
        x = op.Pad(x, at_run_time, None, form.axes, rank=2 + form.rank)
    else:
        pads = [*form.pads[0], *form.pads[1]]
    swap = [1, 0, *form.axes]
    if group == 1:
        x = op.Transpose(x, perm=swap)
    else:
        count, channels, sizes = op.Shape(x, end=1), op.Shape(w, start=1, end=2), op.Shape(x, start=2)
        x = op.Reshape(x, op.Concat(count, [group], channels, sizes, axis=0), allowzero=1)
        x = op.Transpose(x, perm=[2, 1, 0, *(axis + 1 for axis in form.axes)])
        x = op.Reshape(x, op.Concat(channels, op.Mul(count, [group]), sizes, axis=0), allowzero=1)
    dw = op.Conv(
        x,
        op.Transpose(dy, perm=swap),
        group=group,
        pads=pads,
        strides=list(form.dilations),
        dilations=list(form.strides),
    )
    # What the windows leave over at the end would be taps beyond the kernel.
    kernel = list(form.kernel) if form.fixed else op.Shape(w, start=2)
    dw = op.Slice(dw, [0] * form.rank, kernel, form.axes)
    return op.Transpose(dw, perm=swap)


def _dw_body_of_columns(
    op: Recorder, dy: ir.Value, x: ir.Value, w: ir.Value, form: _Form, group: int
) -> ir.Value:
    """The same without Conv, which onnxruntime does not have in float64: columns of the padded X @ dY."""
    rank = form.rank
    for i in range(rank):
        # Each spatial axis becomes two: the taps, and the outputs.
        count = op.Squeeze(op.Shape(dy, start=2 + i, end=3 + i))
        starts = op.Mul(op.Range(0, count, 1), form.strides[i])
        taps = op.Mul(op.Unsqueeze(op.Range(0, form.kernel[i], 1), [1]), form.dilations[i])
        x = op.Gather(x, op.Add(starts, taps), axis=2 + 2 * i)
    x = op.Transpose(x, perm=[1, *range(2, 2 + 2 * rank, 2), 0, *range(3, 3 + 2 * rank, 2)])
    across = _of_group(op, dy, form, group)
    others = op.ReduceProd(op.Shape(w, start=1), keepdims=1)
    columns = op.Reshape(x, op.Concat([group], others, op.Shape(across, start=2), axis=0), allowzero=1)
    dw = op.MatMul(columns, op.Transpose(across, perm=[0, 2, 1]))
    return op.Reshape(op.Transpose(dw, perm=[0, 2, 1]), op.Shape(w), allowzero=1)


def _of_group(op: Recorder, dy: ir.Value, form: _Form, group: int) -> ir.Value:
    """dY as (group, M / group, samples and positions)."""
    # Samples beside positions: onnxruntime does not broadcast a product over an empty batch.
    swapped = op.Transpose(dy, perm=[1, 0, *form.axes])
    filters = op.Div(op.Shape(swapped, end=1), [group])
    columns = op.ReduceProd(op.Shape(swapped, start=1), keepdims=1)
    return op.Reshape(swapped, op.Concat([group], filters, columns, axis=0), allowzero=1)


def _taps(op: Recorder, dy: ir.Value, x: ir.Value, form: _Form) -> list[ir.Value]:
    """For each tap of the kernel, what it reads of the padded X."""
    phases = {
        starts: tuple(a % s for a, s in zip(starts, form.strides, strict=True)) for starts in form.starts()
    }
    steps = list(form.strides) if max(form.strides) > 1 else None
    if steps is None or len(set(phases.values())) == len(phases):
        # Counted from the end, the slices need not know the sizes.
        ends = [[a - e + 1 or _END for a, e in zip(starts, form.extents, strict=True)] for starts in phases]
        return [op.Slice(x, list(a), b, form.axes, steps) for a, b in zip(phases, ends, strict=True)]
    # Slices with steps are slow, so they are made once for all the taps that share a phase.
    every = {
        p: op.Slice(x, list(p), [_END] * form.rank, form.axes, steps) for p in dict.fromkeys(phases.values())
    }
    parts = []
    for starts, phase in phases.items():
        first = [a // s for a, s in zip(starts, form.strides, strict=True)]
        parts.append(op.Slice(every[phase], first, op.Add(op.Shape(dy, start=2), first), form.axes))
    return parts


def _by_group(op: Recorder, value: ir.Value, dy: ir.Value, group: int) -> ir.Value:
    """(N, C, ...) as (N, group, C / group, positions), where the positions are those of dY."""
    # Not -1: that fails if the batch is empty.
    positions = op.ReduceProd(op.Shape(dy, start=2), keepdims=1)
    channels = op.Div(op.Shape(value, start=1, end=2), [group])
    shape = op.Concat(op.Shape(value, start=0, end=1), [group], channels, positions, axis=0)
    return op.Reshape(value, shape, allowzero=1)


def _require_kernel(node: ForwardNode) -> None:
    """Refuse a node whose kernel size cannot be told, by its own name and not that of its gradient."""
    w = node.input(1)
    known = bool(node.attribute("kernel_shape")) or _has_known_kernel(w)
    if not known and _needs_kernel(w, node.grad(0), node.attribute("auto_pad")):
        raise node.unsupported(
            f"its kernel size is not known; declare the shape of {w.name!r}, or give the node a kernel_shape"
        )


@gradient("Conv")
def conv_gradient(node: ForwardNode) -> Gradients:
    _require_kernel(node)
    return node.op.ConvGrad(
        node.grad(0),
        node.input(0),
        node.input(1),
        auto_pad=node.attribute("auto_pad"),
        dilations=node.attribute("dilations"),
        group=node.attribute("group"),
        kernel_shape=node.attribute("kernel_shape"),
        pads=node.attribute("pads"),
        strides=node.attribute("strides"),
        _outputs=3,
    )


@gradient("ConvTranspose")
def conv_transpose_gradient(node: ForwardNode) -> Gradients:
    """dX = Conv(dY, W); dW is that convolution's gradient towards W for the gradient X; dB = sum of dY"""
    op, dy, w = node.op, node.grad(0), node.input(1)
    axes = list(range(2, node.rank()))
    _require_kernel(node)
    pads = _transposed_pads(node)
    known = isinstance(pads, list)
    spread = dy if known else op.Pad(dy, pads, None, axes, rank=node.rank())
    same = {
        "dilations": node.attribute("dilations"),
        "group": node.attribute("group"),
        "kernel_shape": node.attribute("kernel_shape"),
        "pads": pads if known else None,
        "strides": node.attribute("strides"),
    }
    _, dw, _ = op.ConvGrad(node.input(0), spread, w, **same, _outputs=3)
    return op.Conv(spread, w, **same), dw, op.ReduceSum(dy, [0, *axes], keepdims=0)


def _transposed_pads(node: ForwardNode) -> list[int] | ir.Value:
    """The pads of ConvTranspose, computed at run time where they depend on a size that is not known."""
    op, x, auto_pad = node.op, node.input(0), node.attribute("auto_pad")
    rank = node.rank() - 2
    output_shape = node.attribute("output_shape")
    if not output_shape and not auto_pad.startswith("SAME"):
        return list(node.attribute("pads") or [0] * (2 * rank))
    kernel = node.attribute("kernel_shape") or _known_kernel(op, node.input(1))
    strides = per_dimension("strides", node.attribute("strides"), rank)
    dilations = per_dimension("dilations", node.attribute("dilations"), rank)
    extra = node.attribute("output_padding") or [0] * rank
    # The pads of an input of size 1, and how much they grow with each element more.
    reach = [a + (k - 1) * d + 1 for a, k, d in zip(extra, kernel, dilations, strict=True)]
    if output_shape:
        first = [r - n for r, n in zip(reach, output_shape[-rank:], strict=True)]
        growth = list(strides)
    else:
        first = [r - s for r, s in zip(reach, strides, strict=True)]
        growth = [0] * rank
    sizes = [n if isinstance(n, int) else None for n in list(x.shape)[2:]] if x.shape is not None else []
    if any(growth) and None in sizes:
        more = op.Mul(op.Sub(op.Shape(x, start=2), 1), growth)
        total = op.Max(op.Add(more, first), 0)
        small = op.Div(total, 2)
        large = op.Sub(total, small)
        return op.Concat(*((small, large) if auto_pad == "SAME_UPPER" else (large, small)), axis=0)
    totals = [max(f + g * ((n or 1) - 1), 0) for f, g, n in zip(first, growth, sizes, strict=True)]
    halves, rests = [t // 2 for t in totals], [t - t // 2 for t in totals]
    return [*halves, *rests] if auto_pad == "SAME_UPPER" else [*rests, *halves]
