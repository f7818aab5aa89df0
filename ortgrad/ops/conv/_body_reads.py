"""What the windows of a convolution read, and kernels in the same order, in standard ONNX operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ortgrad.graph.lazy import Recorder, ir
from ortgrad.ops.conv._body_form import Form, known_size, shaped, size_of

if TYPE_CHECKING:
    from ortgrad.ops.conv._body_form import Size

_END = 1 << 62


def columns_of(op: Recorder, x: ir.Value, channels: Size, form: Form, *, backwards: bool = False) -> ir.Value:
    """(N * positions, taps * C): what each window reads of X, whose sizes must be known.

    The last tap comes first with `backwards`.
    """
    windows, taps = _places(form)
    places = op.Add(windows.reshape(-1, 1), taps[::-1] if backwards else taps)
    x = shaped(op, _channels_last(op, x, form), size_of(op, x, 0), math.prod(form.padded_sizes), channels)
    return op.Flatten(op.Gather(x, places, axis=1), axis=2)


def columns_by_tap(op: Recorder, x: ir.Value, channels: Size, form: Form) -> ir.Value:
    """(taps, N * positions, C): the same for each tap; the number of samples must be known, too."""
    windows, taps = _places(form)
    samples, size = known_size(x, 0) or 0, math.prod(form.padded_sizes)
    rows = np.add.outer(size * np.arange(samples), windows).reshape(-1)
    x = shaped(op, _channels_last(op, x, form), samples * size, channels)
    return op.Gather(x, op.Add(taps.reshape(-1, 1), rows), axis=0)


def _channels_last(op: Recorder, x: ir.Value, form: Form) -> ir.Value:
    """X with its padding, and its channels behind the positions."""
    # Gather then copies long pieces, and on several threads, unlike Slice and Concat.
    return form.padded(op, op.Transpose(x, perm=[0, *form.axes, 1]), first=1)


def _places(form: Form) -> tuple[np.ndarray, np.ndarray]:
    """Where windows begin in a sample of the padded X, and where taps are in a window."""
    assert form.outputs is not None
    windows, taps = (
        np.ravel_multi_index(
            tuple(s * i for s, i in zip(steps, np.indices(counts), strict=True)), form.padded_sizes
        ).reshape(-1)
        for steps, counts in ((form.strides, form.outputs), (form.dilations, form.kernel))
    )
    return windows, taps


def taps_first(op: Recorder, w: ir.Value, filters: Size, channels: Size, taps: int) -> ir.Value:
    """(M, C, ...) as (taps, M, C)"""
    return op.Transpose(shaped(op, w, filters, channels, taps), perm=[2, 0, 1])


def taps_last(op: Recorder, dw: ir.Value, filters: Size, channels: Size, taps: int) -> ir.Value:
    """(taps, M, C) as (M, C, taps)"""
    # onnxruntime moves a single axis quickly.
    return op.Transpose(shaped(op, dw, taps, filters, channels), perm=[1, 2, 0]) if taps > 1 else dw


def swapped(op: Recorder, value: ir.Value, first: Size, second: Size, last: Size) -> ir.Value:
    """(first, second, last) as (second, first, last)"""
    # onnxruntime would merge a Transpose with the one that moves the taps, into one that is slow on several
    # threads: it starts them again for each filter.
    assert isinstance(first, int) and isinstance(second, int)
    rows = op.Add(np.arange(second).reshape(-1, 1), second * np.arange(first))
    return op.Gather(shaped(op, value, first * second, last), rows, axis=0)


def joined(op: Recorder, values: Sequence[ir.Value], axis: int) -> ir.Value:
    return op.Concat(*values, axis=axis) if len(values) > 1 else values[0]


def taps_of(op: Recorder, dy: ir.Value, x: ir.Value, form: Form) -> list[ir.Value]:
    """For each tap of the kernel, what it reads of the padded X."""
    if math.prod(form.kernel) == max(form.strides) == 1:
        return [x]
    starts = [form.start(tap) for tap in np.ndindex(form.kernel)]
    phases = [tuple(a % s for a, s in zip(start, form.strides, strict=True)) for start in starts]
    if max(form.strides) == 1 or len(set(phases)) == len(phases):
        return slices_of(op, x, form, first=2)
    steps = list(form.strides)
    parts = []
    for start, phase in zip(starts, phases, strict=True):
        # Slices with steps are slow; this one is recorded once for all the taps that share a phase.
        every = op.Slice(x, list(phase), [_END] * form.rank, form.axes, steps)
        first = [a // s for a, s in zip(start, form.strides, strict=True)]
        ends = op.shape_of(dy, 2) + first
        parts.append(op.Slice(every, first, ends, form.axes))
    return parts


def slices_of(op: Recorder, x: ir.Value, form: Form, *, first: int) -> list[ir.Value]:
    """The same by one slice of X for each tap; `first` is the first spatial axis of X."""
    axes = list(range(first, first + form.rank))
    steps = list(form.strides) if max(form.strides) > 1 else None
    parts = []
    for tap in np.ndindex(form.kernel):
        start = form.start(tap)
        # Counted from the end, ends do not depend on the sizes.
        ends = [a - e + 1 or _END for a, e in zip(start, form.extents, strict=True)]
        parts.append(op.Slice(x, list(start), ends, axes, steps))
    return parts


def joined_taps(op: Recorder, x: ir.Value, form: Form, *, first: int, axis: int) -> ir.Value:
    """What all taps read of the padded X, one after the other along an axis."""
    for i in reversed(range(form.rank)):
        x = joined_axis(op, x, form, i, first=first, axis=axis)
    return x


def joined_axis(op: Recorder, x: ir.Value, form: Form, i: int, *, first: int, axis: int) -> ir.Value:
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
    return joined(op, parts, axis)
