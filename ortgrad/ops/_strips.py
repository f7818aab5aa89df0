"""Strips of channels in boxes, for compiled kernels that slide windows over one channel at a time.

Some rows of a channel, a strip, are copied into a box: padded, divided by the strides into parts so that one
step of a window is one element, and flattened with the pitch of the box. So the offset of a tap of the window
is one number, and inner loops are long and contiguous however narrow the channel is. dY gets the same pitch,
with zeros around it. Where there is a single row, as in one dimension, strips are some of its columns.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple, TypeAlias

import numpy as np

from ortgrad.compiled.functions import SLACK, copy_row
from ortgrad.operators.compiled import Integers
from ortgrad.ops._windows import Plane, Windows

# The first row and column of a strip, and its rows and columns.
Strip: TypeAlias = tuple[int, int, int, int]
# Elements of a strip: its boxes, dY and the sums stay in the nearest caches.
_STRIP = 4096


class Geometry(NamedTuple):
    """The numbers that all tasks read."""

    output: Plane
    size: Plane
    stride: Plane
    head: Plane
    reach: Plane
    pitch: int
    rows: int  # of a strip: of Y for the convolution, of the boxes of X for the gradient
    columns: int
    strips: int  # of a channel
    everywhere: bool  # whether every element of X is in a part
    channels: int  # of a task; those that are small enough for a single strip share one


class Boxes(NamedTuple):
    geometry: Geometry
    lines: list[int]  # the first row of each part, and
    edges: list[int]  # the first column; there is a part for each combination
    ends: list[int]  # the number of taps in a part and those before it
    taps: list[int]  # the taps, ordered by parts
    starts: list[int]  # where each begins in the boxes of all parts


def boxes_of(win: Windows, channels: int, halo: bool) -> Boxes:
    """Return the boxes for windows in one or two dimensions over `channels` channels."""
    ones, zeros = (1,) * (2 - win.rank), (0,) * (2 - win.rank)
    sizes, outputs, strides = ones + win.sizes, ones + win.outputs, ones + win.strides
    heads, kernel, dilations = zeros + win.heads, ones + win.kernel, ones + win.dilations
    reach = [(k - 1) * d // s for k, d, s in zip(kernel, dilations, strides, strict=True)]
    rows, columns = (o + r if halo else o for o, r in zip(outputs, reach, strict=True))
    if outputs[0] == 1 and reach[0] == 0:
        strips = -(-columns // max(1, _STRIP, 2 * reach[1]))
        strip, columns = 1, -(-columns // strips)
        pitch = columns + reach[1]
    else:
        pitch = outputs[1] + reach[1]
        strips = -(-rows // max(1, _STRIP // pitch, 2 * reach[0]))
        strip = -(-rows // strips)
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for t, (i, j) in enumerate(itertools.product(*map(range, kernel))):
        row, column = i * dilations[0], j * dilations[1]
        offset = row // strides[0] * pitch + column // strides[1]
        found.setdefault((row % strides[0], column % strides[1]), []).append((t, offset))
    lines, edges = (sorted({part[axis] for part in found}) for axis in range(2))
    ends: list[int] = []
    taps: list[int] = []
    starts: list[int] = []
    for number, part in enumerate(itertools.product(lines, edges)):
        for t, offset in found[part]:
            taps.append(t)
            starts.append(number * (strip + reach[0]) * pitch + offset)
        ends.append(len(taps))
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    everywhere = len(found) == math.prod(strides) and all(
        (o - 1) * s + e >= n + h
        for o, s, e, n, h in zip(outputs, strides, extents, sizes, heads, strict=True)
    )
    together = min(channels, max(1, _STRIP // ((strip + reach[0]) * pitch))) if strips == 1 else 1
    geometry = Geometry(
        output=Plane(*outputs),
        size=Plane(*sizes),
        stride=Plane(*strides),
        head=Plane(*heads),
        reach=Plane(*reach),
        pitch=pitch,
        rows=strip,
        columns=columns,
        strips=strips,
        everywhere=everywhere,
        channels=together,
    )
    return Boxes(geometry, lines, edges, ends, taps, starts)


def task_channels(task: int, geometry: Geometry, channels: int) -> tuple[int, int, int, int]:
    """Return the sample, the first and last channel and the strip of a task."""
    together, strip = task // geometry.strips, task % geometry.strips
    of_sample = (channels + geometry.channels - 1) // geometry.channels
    first = together % of_sample * geometry.channels
    return together // of_sample, first, min(channels, first + geometry.channels), strip


def task_strip(geometry: Geometry, strip: int, rows: int, columns: int) -> Strip:
    """Return the first row and column of a strip, and its size, for `rows` and `columns` in all."""
    if geometry.output.height == 1 and geometry.reach.height == 0:
        left = strip * geometry.columns
        return 0, left, 1, min(geometry.columns, columns - left)
    top = strip * geometry.rows
    return top, 0, min(geometry.rows, rows - top), columns


def size_of_rows(geometry: Geometry) -> int:
    """Return the size of the padded rows before they are divided into parts; 0 if they are not."""
    step = geometry.stride.width
    return (geometry.rows + geometry.reach.height) * geometry.pitch * step if step > 1 else 0


def fill_boxes(
    boxes: np.ndarray,
    padded: np.ndarray,
    channel: np.ndarray,
    strip: Strip,
    geometry: Geometry,
    lines: Integers,
    edges: Integers,
    padding: float,
) -> None:
    """Copy the rows that a strip of outputs reads into the boxes of all parts."""
    top, left, _, _ = strip
    pitch, width, step = geometry.pitch, geometry.size.width, geometry.stride.width
    count = geometry.rows + geometry.reach.height
    # What the padded rows hold of X, and where that is.
    shift = geometry.head.width - left * step
    low = min(pitch * step, max(0, shift))
    high = min(pitch * step, max(low, width + shift))
    rest = boxes[len(lines) * len(edges) * count * pitch :]
    for k in range(len(rest)):
        rest[k] = 0.0
    for i in range(len(lines)):
        first = (i * len(edges)) * count * pitch
        box = boxes[first : first + count * pitch] if step == 1 else padded[: count * pitch * step]
        for k in range(len(box)):
            box[k] = padding
        for row in range(count if low < high else 0):
            a = (top + row) * geometry.stride.height + lines[i] - geometry.head.height
            if a >= 0 and a < geometry.size.height:
                place = row * pitch * step
                copy_row(box[place + low : place + high], channel[a * width + low - shift :])
        if step > 1:
            for j in range(len(edges)):
                part, values = boxes[first + j * count * pitch :], box[edges[j] :]
                if step == 2:
                    for k in range(count * pitch):
                        part[k] = values[2 * k]
                else:
                    for k in range(count * pitch):
                        part[k] = values[step * k]


def write_rows(
    channel: np.ndarray,
    sums: np.ndarray,
    padded: np.ndarray,
    strip: Strip,
    line: int,
    edges: Integers,
    geometry: Geometry,
) -> None:
    """Write the sums of all parts with the same rows to where they are in dX."""
    top, left, rows, columns = strip
    pitch, width, step = geometry.pitch, geometry.size.width, geometry.stride.width
    shift = geometry.head.width - left * step
    low = max(0, shift)
    high = min(columns * step, width + shift)
    if low >= high:
        return
    values, size, total = sums, rows * pitch, rows * pitch + SLACK
    if step > 1:
        values = padded
        second = sums[total:]
        if step == 2 and len(edges) == 2:
            for k in range(size):
                padded[2 * k] = sums[k]
                padded[2 * k + 1] = second[k]
        else:
            if len(edges) < step:
                for k in range(size * step):
                    padded[k] = 0.0
            for j in range(len(edges)):
                to, of = padded[edges[j] :], sums[j * total :]
                for k in range(size):
                    to[k * step] = of[k]
    for row in range(rows):
        a = (top + row) * geometry.stride.height + line - geometry.head.height
        if a >= 0 and a < geometry.size.height:
            place = row * pitch * step
            copy_row(channel[a * width + low - shift :], values[place + low : place + high])


def clear_strip(channel: np.ndarray, strip: Strip, geometry: Geometry) -> None:
    """Set dX to 0 in a strip, and behind it if it is the last one."""
    top, left, rows, columns = strip
    width, size = geometry.size.width, geometry.size.height
    first = min(size, max(0, top * geometry.stride.height - geometry.head.height))
    last = min(size, max(0, (top + rows) * geometry.stride.height - geometry.head.height))
    if top + rows == geometry.output.height + geometry.reach.height:
        last = size
    low = min(width, max(0, left * geometry.stride.width - geometry.head.width))
    high = min(width, max(0, (left + columns) * geometry.stride.width - geometry.head.width))
    if left + columns == geometry.output.width + geometry.reach.width:
        high = width
    for row in range(first, last):
        line = channel[row * width + low : row * width + high]
        for k in range(len(line)):
            line[k] = 0.0
