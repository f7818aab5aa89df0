"""Pools and their gradients for Numba. Every task owns its part of dX: overlapping windows do not meet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ortgrad.compiled.functions import SLACK, Pooled, add_row, allocate, copy_row, pool_squares, release
from ortgrad.operators.compiled import Integers, Plan
from ortgrad.operators.records import numbers_of
from ortgrad.ops._strips import (
    Geometry,
    Strip,
    boxes_of,
    clear_strip,
    fill_boxes,
    size_of_rows,
    task_channels,
    task_strip,
    write_rows,
)
from ortgrad.ops._windows import Windows

if TYPE_CHECKING:
    Sizes = tuple[int, ...]

# Places in X are kept as floating-point numbers, so that a vector has as many of them as of values.
_MOST_PLACES = 1 << 24
_LEAST = -math.inf


class MaxSizes(NamedTuple):
    depth: int
    height: int
    width: int
    column_major: bool
    may_be_blank: bool


class Depths(NamedTuple):
    """The first of three dimensions: the layers of a channel, of Y or X, and their windows."""

    layers: int = 1
    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    head: int = 0

    @classmethod
    def of(cls, win: Windows, layers: int) -> Depths:
        return cls(layers, win.kernel[0], win.strides[0], win.dilations[0], win.heads[0])


class Sums(NamedTuple):
    """Where each tap begins in dY with zeros around it, and in the sums of rows; and where parts end."""

    row_starts: Integers
    row_ends: Integers
    column_starts: Integers
    column_ends: Integers


class Counts(NamedTuple):
    """The sizes of windows: the products of their numbers of elements along each axis."""

    depths: Depths
    deep_counts: Integers
    row_counts: Integers
    column_counts: Integers


class Maxima(NamedTuple):
    y: np.ndarray
    indices: np.ndarray


class Taps(NamedTuple):
    """Where the taps of a window begin in the boxes, and how far from its first element they are in X."""

    starts: Integers
    offsets: Integers
    depths: Depths
    squares: int  # whether all windows are squares of two by two elements beside each other


def plan_max(dy: Sizes, x: Sizes, column_major: bool, may_be_blank: bool) -> Plan | None:
    """Return the plan of MaxPoolGrad; one task per channel."""
    rank = len(x) - 2
    if rank > 3:
        return None
    planes = math.prod(x[:2])
    depth, height, width = (*[1] * (3 - rank), *x[2:])
    flat = planes, math.prod(dy[2:])
    sizes = MaxSizes(depth, height, width, column_major, may_be_blank)
    return Plan(
        tasks=planes,
        views=[flat, flat, (len(x),), (planes, depth * height * width)],
        numbers={"sizes": numbers_of(sizes)},
        work=4 * math.prod(flat) + math.prod(x),
    )


def max_pool_grad_channel(
    task: int, dy: np.ndarray, indices: np.ndarray, dx: np.ndarray, sizes: MaxSizes
) -> bool:
    """Add dY to dX where the maxima are; fails if an index is not in its channel."""
    values, places, target = dy[task], indices[task], dx[task]
    size, begin, failed = len(target), task * len(target), False
    for k in range(size):
        target[k] = 0.0
    for k in range(len(values)):
        place = places[k] - begin
        if place < 0 or place >= size:
            # A window that skips the whole of a small input has the index -1.
            failed = failed or place >= size or not sizes.may_be_blank
        else:
            if sizes.column_major:
                rows = place // sizes.depth
                line = place % sizes.depth * sizes.height + rows % sizes.height
                place = line * sizes.width + rows // sizes.height
            target[place] += values[k]
    return failed


def plan_average(dy: Sizes, x: Sizes, win: Windows, counts: Sequence[np.ndarray]) -> Plan | None:
    """Return the plan of AveragePoolGrad, for the number of elements of the windows along each axis."""
    if win.rank > 3 or not math.prod(dy) or not math.prod(x):
        return None
    deep = win.rank == 3
    flat = Windows(*(numbers[1:] if deep else numbers for numbers in _fields(win)))
    depth, outputs = (win.sizes[0], win.outputs[0]) if deep else (1, 1)
    planes = math.prod(x[:2])
    boxes = boxes_of(flat, planes * depth, True)
    geometry, pitch, reach = boxes.geometry, boxes.geometry.pitch, boxes.geometry.reach
    # A box filter is separable: first rows are added up, then columns.
    taps: dict[str, list[int]] = {"row_starts": [], "row_ends": [], "column_starts": [], "column_ends": []}
    pair = (1,) * (2 - flat.rank)
    kernel, strides, dilations = pair + flat.kernel, pair + flat.strides, pair + flat.dilations
    for axis, (name, parts) in enumerate((("row", boxes.lines), ("column", boxes.edges))):
        for part in parts:
            reaches = [k * dilations[axis] for k in range(kernel[axis])]
            own = [reach[axis] - r // strides[axis] for r in reaches if r % strides[axis] == part]
            taps[f"{name}_starts"] += [start * pitch if axis == 0 else start for start in own]
            taps[f"{name}_ends"].append(len(taps[f"{name}_starts"]))
    numbers = [[1]] * (3 - len(counts)) + [count.tolist() for count in counts]
    return Plan(
        tasks=-(-planes * depth // geometry.channels) * geometry.strips,
        views=[
            (planes, outputs, math.prod(flat.outputs)),
            (len(x),),
            (planes * depth, math.prod(flat.sizes)),
        ],
        numbers={
            "geometry": numbers_of(geometry),
            "lines": boxes.lines,
            "edges": boxes.edges,
            **taps,
            "depths": numbers_of(Depths.of(win, depth) if deep else Depths()),
            "deep_counts": numbers[0],
            "row_counts": numbers[1],
            "column_counts": numbers[2],
        },
        work=math.prod(x) * sum(win.kernel),
    )


def _fields(win: Windows) -> tuple[tuple[int, ...], ...]:
    return win.sizes, win.outputs, win.kernel, win.strides, win.dilations, win.heads, win.tails


def average_pool_grad_strip(
    task: int,
    dy: np.ndarray,
    dx: np.ndarray,
    geometry: Geometry,
    lines: Integers,
    edges: Integers,
    of: Sums,
    counts: Counts,
) -> bool:
    """Compute a strip of dX of one channel, or of some; in three dimensions of one layer of a channel."""
    _, first, last, number = task_channels(task, geometry, dx.shape[0])
    pitch, reach, lead = geometry.pitch, geometry.reach.height, geometry.reach.width
    widths = geometry.output.width
    strip = task_strip(geometry, number, geometry.output.height + reach, widths + lead)
    rows = strip[2]
    length, total = (rows + reach) * pitch + lead + SLACK, rows * pitch + lead + SLACK
    most = max(len(of.row_starts), len(of.column_starts))
    memory = allocate(length + (1 + len(edges)) * total + most + 2 * widths + size_of_rows(geometry))
    if len(memory) == 0:
        return True
    embedded, sums_of_rows, sums = memory[:length], memory[length:], memory[length + total :]
    ones = sums[len(edges) * total :]
    divisors = ones[most : most + widths]
    quotients = ones[most + widths : most + 2 * widths]
    padded = ones[most + 2 * widths :]
    for k in range(most):
        ones[k] = 1.0
    for channel in range(first, last):
        layers = counts.depths.layers
        values, layer = dy[channel // layers], channel % layers
        _embed_quotients(embedded, values, layer, strip, divisors, quotients, geometry, counts)
        target, begin = dx[channel], 0
        if not geometry.everywhere:
            clear_strip(target, strip, geometry)
        for i in range(len(lines)):
            starts = of.row_starts[begin : of.row_ends[i]]
            add_row(sums_of_rows, embedded, starts, ones, rows * pitch + lead)
            begin, of_column = of.row_ends[i], 0
            for j in range(len(edges)):
                into, own = sums[j * (total - lead) :], of.column_starts[of_column : of.column_ends[j]]
                add_row(into, sums_of_rows, own, ones, rows * pitch)
                of_column = of.column_ends[j]
            write_rows(target, sums, padded, strip, lines[i], edges, geometry)
    release(memory)
    return False


def _embed_quotients(
    into: np.ndarray,
    dy: np.ndarray,
    layer: int,
    strip: Strip,
    divisors: np.ndarray,
    quotients: np.ndarray,
    geometry: Geometry,
    counts: Counts,
) -> None:
    """Write dY, divided by the sizes of its windows and with zeros around it; added up over the layers."""
    top, left, rows, _ = strip
    pitch, width, lead = geometry.pitch, geometry.output.width, geometry.reach.width
    begin, count = top - geometry.reach.height, rows + geometry.reach.height
    low, high = max(0, lead - left), min(pitch, width + lead - left)
    for k in range(len(into)):
        into[k] = 0.0
    fresh = True
    for output in range(dy.shape[0]):
        # The place of the layer in the window.
        place = layer + counts.depths.head - output * counts.depths.stride
        gap = counts.depths.dilation
        if place < 0 or place % gap != 0 or place // gap >= counts.depths.kernel:
            continue
        before = -1
        for row in range(max(0, -begin), min(count, geometry.output.height - begin)):
            if low >= high:
                break
            number = counts.deep_counts[output] * counts.row_counts[begin + row]
            start = left - lead + low
            if number != before:
                for k in range(high - low):
                    divisors[k] = counts.column_counts[start + k] * number
                before = number
            values = dy[output, (begin + row) * width + start :]
            line = into[row * pitch + low : row * pitch + high]
            if fresh:
                for k in range(len(line)):
                    quotients[k] = values[k] / divisors[k]
                copy_row(line, quotients)
            else:
                for k in range(len(line)):
                    line[k] += values[k] / divisors[k]
        fresh = False


def plan_max_pool(x: Sizes, y: Sizes, win: Windows) -> Plan | None:
    """Return the plan of MaxPool with indices, for windows without dilations."""
    if win.rank > 3 or not math.prod(x) or not math.prod(y) or math.prod(win.sizes) > _MOST_PLACES:
        return None
    deep = win.rank == 3
    flat = Windows(*(numbers[1:] if deep else numbers for numbers in _fields(win)))
    depth, outputs = (win.sizes[0], win.outputs[0]) if deep else (1, 1)
    planes = math.prod(x[:2])
    boxes = boxes_of(flat, planes * outputs, False)
    # Of equal elements the first one counts, so taps are in the order of the elements.
    taps = sorted(range(len(boxes.taps)), key=boxes.taps.__getitem__)
    height, width = flat.kernel if flat.rank == 2 else (1, *flat.kernel)
    layers = planes * outputs, math.prod(flat.outputs)
    return Plan(
        tasks=-(-layers[0] // boxes.geometry.channels) * boxes.geometry.strips,
        views=[(planes, depth, math.prod(flat.sizes)), layers, layers],
        numbers={
            "geometry": numbers_of(boxes.geometry),
            "lines": boxes.lines,
            "edges": boxes.edges,
            "starts": [boxes.starts[t] for t in taps],
            "offsets": [i * flat.sizes[-1] + j for i in range(height) for j in range(width)],
            "depths": numbers_of(Depths.of(win, outputs) if deep else Depths()),
            "squares": int(_are_squares(flat) and not deep),
        },
        work=math.prod(y) * math.prod(win.kernel),
    )


def _are_squares(win: Windows) -> bool:
    """Return whether all windows are squares of two by two elements beside each other."""
    if win.kernel != (2, 2) or win.strides != (2, 2) or any(win.heads):
        return False
    return all(2 * count <= size for count, size in zip(win.outputs, win.sizes, strict=True))


def max_pool_strip(
    task: int,
    x: np.ndarray,
    into: Maxima,
    geometry: Geometry,
    lines: Integers,
    edges: Integers,
    taps: Taps,
) -> bool:
    """Compute a strip of the maxima of one channel, or of some, and where they are in X.

    As in onnxruntime, the maximum is the first element of the window until a later one is larger. So it is
    NaN only if the first one is.
    """
    y, indices, starts, offsets = into.y, into.indices, taps.starts, taps.offsets
    _, first, last, number = task_channels(task, geometry, y.shape[0])
    pitch, width, step = geometry.pitch, geometry.output.width, geometry.stride.width
    strip = task_strip(geometry, number, geometry.output.height, width)
    top, left, rows, columns = strip
    if taps.squares != 0:
        for channel in range(first, last):
            for row in range(top, top + rows):
                place, start = 2 * row * geometry.size.width + 2 * left, row * width + left
                origin = channel * x.shape[2] + place
                pool_squares(
                    x[channel, 0],
                    place,
                    place + geometry.size.width,
                    Pooled(y[channel], indices[channel], start),
                    columns,
                    origin,
                    geometry.size.width,
                )
        return False
    size = len(lines) * len(edges) * (geometry.rows + geometry.reach.height) * pitch + SLACK
    count = rows * pitch
    memory = allocate(size + 2 * count + len(offsets) + size_of_rows(geometry))
    if len(memory) == 0:
        return True
    boxes, best = memory[:size], memory[size : size + count]
    places = memory[size + count : size + 2 * count]
    numbers = memory[size + 2 * count : size + 2 * count + len(offsets)]
    padded = memory[size + 2 * count + len(offsets) :]
    for channel in range(first, last):
        plane, output = channel // taps.depths.layers, channel % taps.depths.layers
        begin, fresh = output * taps.depths.stride - taps.depths.head, True
        for layer in range(max(0, begin), min(x.shape[1], begin + taps.depths.kernel)):
            values = x[plane, layer]
            fill_boxes(boxes, padded, values, strip, geometry, lines, edges, _LEAST)
            for t in range(len(offsets)):
                numbers[t] = offsets[t] + layer * x.shape[2]
            if fresh:
                line, place = boxes[starts[0] :], numbers[0]
                for k in range(count):
                    best[k] = line[k]
                    places[k] = place
                _start_inside(best, places, values, place, strip, geometry)
            _keep_largest(best, places, boxes, starts, numbers, 1 if fresh else 0)
            fresh = False
        for row in range(rows):
            start = (top + row) * width + left
            copy_row(y[channel, start:], best[row * pitch : row * pitch + columns])
            to, of = indices[channel, start : start + columns], places[row * pitch : row * pitch + columns]
            line_start = (top + row) * geometry.stride.height - geometry.head.height
            origin = plane * x.shape[1] * x.shape[2] + line_start * geometry.size.width
            origin += left * step - geometry.head.width
            for k in range(columns):
                to[k] = origin + k * step + int(of[k])
    release(memory)
    return False


def _keep_largest(
    best: np.ndarray, places: np.ndarray, boxes: np.ndarray, starts: Integers, numbers: np.ndarray, t: int
) -> None:
    """Replace what is less than the values of the taps from t on, and its place."""
    # Without branches, so that the loops are vectorized; with more taps at once they are not.
    while t + 3 <= len(starts):
        x0, x1, x2 = boxes[starts[t] :], boxes[starts[t + 1] :], boxes[starts[t + 2] :]
        n0, n1, n2 = numbers[t], numbers[t + 1], numbers[t + 2]
        for k in range(len(best)):
            largest, place = best[k], places[k]
            v0, v1, v2 = x0[k], x1[k], x2[k]
            place = n0 if v0 > largest else place
            largest = v0 if v0 > largest else largest
            place = n1 if v1 > largest else place
            largest = v1 if v1 > largest else largest
            places[k] = n2 if v2 > largest else place
            best[k] = v2 if v2 > largest else largest
        t += 3
    while t < len(starts):
        x0, n0 = boxes[starts[t] :], numbers[t]
        for k in range(len(best)):
            largest, place, v0 = best[k], places[k], x0[k]
            places[k] = n0 if v0 > largest else place
            best[k] = v0 if v0 > largest else largest
        t += 1


def _start_inside(
    best: np.ndarray,
    places: np.ndarray,
    values: np.ndarray,
    number: float,
    strip: Strip,
    geometry: Geometry,
) -> None:
    """Begin with the first element of the window that is not padding, where the first tap is padding."""
    top, left, rows, columns = strip
    pitch, width = geometry.pitch, geometry.size.width
    for row in range(rows):
        a = (top + row) * geometry.stride.height - geometry.head.height
        for column in range(columns):
            b = (left + column) * geometry.stride.width - geometry.head.width
            if a >= 0 and b >= 0:
                break
            place = max(a, 0) * width + max(b, 0)
            best[row * pitch + column] = values[place]
            # `number` is the place of the first tap, which is counted from the start of the window.
            places[row * pitch + column] = number + (place - a * width - b)
