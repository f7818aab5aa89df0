"""Depthwise convolutions for Numba: every filter reads one channel, so all taps are done in one pass over it.

Some rows of a channel, a strip, are copied into a box: padded, divided by the strides into parts so that one
step of a window is one element, and flattened with the pitch of the box. With k the flattened position, r(t)
the part and o(t) the offset of tap t, and E the rows of dY with the same pitch and zeros around them,

    Y[k] = B + sum over t of W[t] X_r(t)[k + o(t)]
    dW[t] = sum over k of E[k] X_r(t)[k + o(t)]
    dX_r[k] = sum over t with r(t) = r of W[t] E[k - o(t)]

so the inner loops are long and contiguous however narrow the channel is. Where there is a single row, as in
one dimension, strips are some of its columns.
The products with the zeros of E must vanish. If W is not finite, or dW is not because X may not be, the NumPy
kernel takes over.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ortgrad.compiled.functions import SLACK, add_row, allocate, allocate_integers, copy, double, release
from ortgrad.operators.compiled import Plan
from ortgrad.ops._windows import windows

if TYPE_CHECKING:
    Sizes = tuple[int, ...]

# Elements of a strip: its boxes, dY and the sums stay in the nearest caches.
_STRIP = 4096
# Rows are read to a multiple of this length, which is that of a vector. What lies behind them is 0.
_VECTOR = 16

# Places in `geometry`: first what has two numbers, for rows and columns.
_OUTPUT, _SIZE, _STRIDE, _HEAD, _REACH = 0, 2, 4, 6, 8
_PITCH = 10
_ROWS, _COLUMNS = 11, 12  # of a strip: of Y for the convolution, of the boxes of X for the gradient
_STRIPS = 13  # of a channel
_FILTERS = 14  # that read the same channel
_EVERYWHERE = 15  # whether every element of X is in a part
_CHANNELS = 16  # of a task; those that are small enough for a single strip share one
_WANTED = 17  # 1 for dX, 2 for dW, 4 for dB


class _Boxes(NamedTuple):
    geometry: list[int]
    lines: list[int]  # the first row of each part, and
    edges: list[int]  # the first column; there is a part for each combination
    ends: list[int]  # the number of taps in a part and those before it
    taps: list[int]  # the taps, ordered by parts
    starts: list[int]  # where each begins in the boxes of all parts
    places: list[int]  # where it begins in E


def _boxes(x: Sizes, w: Sizes, y: Sizes, halo: bool, attributes: dict[str, Any]) -> _Boxes | None:
    """Return the numbers of a plan; `halo` says that strips are of X, which reach beyond those of Y."""
    group = attributes.pop("group")
    attributes.pop("kernel_shape")
    win = windows(x[2:], w[2:], **attributes)
    fits = y[2:] == win.outputs and x[1] == group and w[1] == 1
    if not fits or len(x) > 4 or not math.prod(x) * math.prod(w):
        return None
    ones, zeros = (1,) * (4 - len(x)), (0,) * (4 - len(x))
    sizes, outputs, strides = ones + win.sizes, ones + win.outputs, ones + win.strides
    heads, kernel, dilations = zeros + win.heads, ones + win.kernel, ones + win.dilations
    reach = [(k - 1) * d // s for k, d, s in zip(kernel, dilations, strides, strict=True)]
    filters = w[0] // group
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
    boxes = _Boxes([], lines, edges, [], [], [], [])
    for number, part in enumerate(itertools.product(lines, edges)):
        for t, offset in found[part]:
            boxes.taps.append(t)
            boxes.starts.append(number * (strip + reach[0]) * pitch + offset)
            boxes.places.append(reach[1] + reach[0] * pitch - offset)
        boxes.ends.append(len(boxes.taps))
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    everywhere = len(found) == math.prod(strides) and all(
        (o - 1) * s + e >= n + h
        for o, s, e, n, h in zip(outputs, strides, extents, sizes, heads, strict=True)
    )
    together = min(group, max(1, _STRIP // ((strip + reach[0]) * pitch))) if strips == 1 else 1
    scalars = pitch, strip, columns, strips, filters, int(everywhere), together, 0
    boxes.geometry.extend((*outputs, *sizes, *strides, *heads, *reach, *scalars))
    return boxes


def plan_grad(
    dy: Sizes, x: Sizes, w: Sizes, dx: Sizes | None, dw: Sizes | None, db: Sizes | None, **attributes: Any
) -> Plan | None:
    """Return the plan of the gradient; None for what is not depthwise, empty or three-dimensional."""
    boxes = _boxes(x, w, dy, True, attributes)
    if boxes is None:
        return None
    geometry, strips, taps = boxes.geometry, boxes.geometry[_STRIPS], len(boxes.taps)
    geometry[_WANTED] = (dx is not None) + 2 * (dw is not None) + 4 * (db is not None)
    samples, filters = dy[:2]
    flat = [(*shape[:2], math.prod(shape[2:])) for shape in (dy, x)]
    weights = (filters, taps)
    sums = filters if geometry[_WANTED] > 1 else 0
    return Plan(
        tasks=(samples * -(-x[1] // geometry[_CHANNELS]) * strips, sums),
        views=[*flat, weights, flat[1] if dx else (0, 0, 0), weights if dw else (0, 0), db or (0,)],
        numbers=boxes._asdict(),
        work=samples * filters * (math.prod(dy[2:]) * taps // 4 + 64),
        scratch=[(samples, strips, filters, taps + 1) if sums else (0, 0, 0, 0)],
    )


def plan(x: Sizes, w: Sizes, b: Sizes | None, y: Sizes, **attributes: Any) -> Plan | None:
    """Return the plan of the convolution; None as for the gradient."""
    boxes = _boxes(x, w, y, False, attributes)
    if boxes is None:
        return None
    flat = [(*shape[:2], math.prod(shape[2:])) for shape in (x, y)]
    taps = len(boxes.taps)
    return Plan(
        tasks=x[0] * -(-x[1] // boxes.geometry[_CHANNELS]) * boxes.geometry[_STRIPS],
        views=[flat[0], (w[0], taps), b or (0,), flat[1]],
        numbers=boxes._asdict(),
        work=x[0] * w[0] * (math.prod(y[2:]) * taps // 8 + 32),
    )


def convolve_strip(
    task: int,
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray,
    y: np.ndarray,
    geometry: np.ndarray,
    lines: np.ndarray,
    edges: np.ndarray,
    taps: np.ndarray,
    starts: np.ndarray,
) -> bool:
    """Compute a strip of the outputs of one channel, or of some."""
    sample, first, last, strip = _channels(task, geometry, x.shape[1])
    top, left, rows, columns = _strip(geometry, strip, geometry[_OUTPUT], geometry[_OUTPUT + 1])
    pitch = geometry[_PITCH]
    boxes = len(lines) * len(edges) * (geometry[_ROWS] + geometry[_REACH]) * pitch + SLACK
    memory = allocate(boxes + rows * pitch + SLACK + len(taps) + _size_of_rows(geometry))
    if len(memory) == 0:
        return True
    sums, weights = memory[boxes:], memory[boxes + rows * pitch + SLACK :]
    width = geometry[_OUTPUT + 1]
    for channel in range(first, last):
        _fill_boxes(
            memory[:boxes], weights[len(taps) :], x[sample, channel], top, left, geometry, lines, edges
        )
        for m in range(channel * geometry[_FILTERS], (channel + 1) * geometry[_FILTERS]):
            for t in range(len(taps)):
                weights[t] = w[m, taps[t]]
            add_row(sums, memory, starts, weights, rows * pitch)
            bias, values = b[m] if len(b) > 0 else 0.0, y[sample, m, top * width + left :]
            for k in range(rows * pitch):
                sums[k] += bias
            for row in range(rows):
                copy(values[row * width :], sums[row * pitch : row * pitch + columns])
    release(memory)
    return False


def differentiate_strip(
    task: int,
    dy: np.ndarray,
    x: np.ndarray,
    w: np.ndarray,
    dx: np.ndarray,
    dw: np.ndarray,
    db: np.ndarray,
    partial: np.ndarray,
    geometry: np.ndarray,
    lines: np.ndarray,
    edges: np.ndarray,
    ends: np.ndarray,
    taps: np.ndarray,
    starts: np.ndarray,
    places: np.ndarray,
) -> bool:
    """Compute a strip of dX of one channel, or of some, and what the same rows of dY add to dW and dB."""
    sample, first, last, strip = _channels(task, geometry, x.shape[1])
    pitch, reach, lead = geometry[_PITCH], geometry[_REACH], geometry[_REACH + 1]
    top, left, rows, columns = _strip(
        geometry, strip, geometry[_OUTPUT] + reach, geometry[_OUTPUT + 1] + lead
    )
    filters, wanted = geometry[_FILTERS], geometry[_WANTED]
    boxes = len(ends) * (geometry[_ROWS] + reach) * pitch + SLACK
    length, total = (rows + reach) * pitch + lead + SLACK, rows * pitch + SLACK
    terms = allocate_integers(filters * len(taps))
    memory = allocate(boxes + filters * (length + len(taps)) + len(edges) * total + _size_of_rows(geometry))
    failed = len(memory) == 0 or len(terms) == 0
    embedded, sums = memory[boxes:], memory[boxes + filters * length :]
    weights = sums[len(edges) * total :]
    padded = weights[filters * len(taps) :]
    # The rows and columns of dY that begin in this strip.
    own, own_columns = min(rows, geometry[_OUTPUT] - top), min(columns, geometry[_OUTPUT + 1] - left)
    count = (own - 1) * pitch + own_columns if own > 0 and own_columns > 0 else 0
    for channel in range(first, first if failed else last):
        for i in range(filters):
            into = embedded[i * length : (i + 1) * length]
            _embed(into, dy[sample, channel * filters + i], top, left, rows, geometry)
        if wanted & 2:
            _fill_boxes(memory[:boxes], padded, x[sample, channel], top, left, geometry, lines, edges)
        for i in range(filters if wanted > 1 else 0):
            begin = i * length + reach * pitch + lead
            values = embedded[begin : begin + (count + _VECTOR - 1) // _VECTOR * _VECTOR]
            into = partial[sample, strip, channel * filters + i]
            if wanted & 2:
                failed = _correlate(into, values, memory, starts, taps) or failed
            sum_of_dy = 0.0
            for k in range(len(values)):
                sum_of_dy += values[k]
            into[len(taps)] = sum_of_dy
        if wanted & 1:
            target = dx[sample, channel]
            if geometry[_EVERYWHERE] == 0:
                _clear(target, top, left, rows, columns, geometry)
            begin = 0
            for part in range(len(ends)):
                term, check = 0, 0.0
                for i in range(filters):
                    for t in range(begin, ends[part]):
                        terms[term] = i * length + places[t]
                        weights[term] = w[channel * filters + i, taps[t]]
                        check += weights[term] * 0.0
                        term += 1
                failed = failed or check != 0.0
                begin, edge = ends[part], part % len(edges)
                add_row(sums[edge * total :], embedded, terms[:term], weights, rows * pitch)
                if edge == len(edges) - 1:
                    line = lines[part // len(edges)]
                    _write_rows(target, sums, padded, top, left, rows, columns, line, edges, geometry)
    release(memory)
    release(terms)
    return failed


def add_strips(
    m: int,
    dy: np.ndarray,
    x: np.ndarray,
    w: np.ndarray,
    dx: np.ndarray,
    dw: np.ndarray,
    db: np.ndarray,
    partial: np.ndarray,
    geometry: np.ndarray,
    lines: np.ndarray,
    edges: np.ndarray,
    ends: np.ndarray,
    taps: np.ndarray,
    starts: np.ndarray,
    places: np.ndarray,
) -> None:
    """Add what the strips of all samples contribute to dW and dB of a filter."""
    for t in range(len(taps) + 1):
        total = double(0.0)
        for sample in range(partial.shape[0]):
            for strip in range(partial.shape[1]):
                total += double(partial[sample, strip, m, t])
        if t < len(taps):
            if geometry[_WANTED] & 2:
                dw[m, t] = total
        elif geometry[_WANTED] & 4:
            db[m] = total


def _channels(task: int, geometry: np.ndarray, channels: int) -> tuple[int, int, int, int]:
    """Return the sample, the first and last channel and the strip of a task."""
    together, strip = task // geometry[_STRIPS], task % geometry[_STRIPS]
    of_sample = (channels + geometry[_CHANNELS] - 1) // geometry[_CHANNELS]
    first = together % of_sample * geometry[_CHANNELS]
    return together // of_sample, first, min(channels, first + geometry[_CHANNELS]), strip


def _strip(geometry: np.ndarray, strip: int, rows: int, columns: int) -> tuple[int, int, int, int]:
    """Return the first row and column of a strip, and its rows and columns, of so many in all."""
    if geometry[_OUTPUT] == 1 and geometry[_REACH] == 0:
        left = strip * geometry[_COLUMNS]
        return 0, left, 1, min(geometry[_COLUMNS], columns - left)
    top = strip * geometry[_ROWS]
    return top, 0, min(geometry[_ROWS], rows - top), columns


def _size_of_rows(geometry: np.ndarray) -> int:
    """Return the size of the padded rows before they are divided into parts; 0 if they are not."""
    step = geometry[_STRIDE + 1]
    return (geometry[_ROWS] + geometry[_REACH]) * geometry[_PITCH] * step if step > 1 else 0


def _correlate(
    into: np.ndarray, values: np.ndarray, boxes: np.ndarray, starts: np.ndarray, taps: np.ndarray
) -> bool:
    """Compute into[tap] = sum over k of values[k] * boxes[start + k]; True if one is not finite."""
    n, t, total = len(values), 0, 0.0
    while t + 9 <= len(taps):
        x0, x1, x2 = boxes[starts[t] :], boxes[starts[t + 1] :], boxes[starts[t + 2] :]
        x3, x4, x5 = boxes[starts[t + 3] :], boxes[starts[t + 4] :], boxes[starts[t + 5] :]
        x6, x7, x8 = boxes[starts[t + 6] :], boxes[starts[t + 7] :], boxes[starts[t + 8] :]
        a0, a1, a2, a3, a4, a5, a6, a7, a8 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        for k in range(n):
            e = values[k]
            a0 += e * x0[k]
            a1 += e * x1[k]
            a2 += e * x2[k]
            a3 += e * x3[k]
            a4 += e * x4[k]
            a5 += e * x5[k]
            a6 += e * x6[k]
            a7 += e * x7[k]
            a8 += e * x8[k]
        into[taps[t]], into[taps[t + 1]], into[taps[t + 2]] = a0, a1, a2
        into[taps[t + 3]], into[taps[t + 4]], into[taps[t + 5]] = a3, a4, a5
        into[taps[t + 6]], into[taps[t + 7]], into[taps[t + 8]] = a6, a7, a8
        t += 9
    while t + 3 <= len(taps):
        x0, x1, x2 = boxes[starts[t] :], boxes[starts[t + 1] :], boxes[starts[t + 2] :]
        a0, a1, a2 = 0.0, 0.0, 0.0
        for k in range(n):
            a0 += values[k] * x0[k]
            a1 += values[k] * x1[k]
            a2 += values[k] * x2[k]
        into[taps[t]], into[taps[t + 1]], into[taps[t + 2]] = a0, a1, a2
        t += 3
    while t < len(taps):
        x0, a0 = boxes[starts[t] :], 0.0
        for k in range(n):
            a0 += values[k] * x0[k]
        into[taps[t]] = a0
        t += 1
    for t in range(len(taps)):
        total += into[t] * 0.0
    return total != 0.0


def _fill_boxes(
    boxes: np.ndarray,
    padded: np.ndarray,
    channel: np.ndarray,
    top: int,
    left: int,
    geometry: np.ndarray,
    lines: np.ndarray,
    edges: np.ndarray,
) -> None:
    """Copy the rows that a strip of outputs reads into the boxes of all parts, with zeros for the padding."""
    pitch, width, step = geometry[_PITCH], geometry[_SIZE + 1], geometry[_STRIDE + 1]
    count = geometry[_ROWS] + geometry[_REACH]
    # What the padded rows hold of X, and where that is.
    shift = geometry[_HEAD + 1] - left * step
    low = min(pitch * step, max(0, shift))
    high = min(pitch * step, max(low, width + shift))
    rest = boxes[len(lines) * len(edges) * count * pitch :]
    for k in range(len(rest)):
        rest[k] = 0.0
    for i in range(len(lines)):
        first = (i * len(edges)) * count * pitch
        box = boxes[first : first + count * pitch] if step == 1 else padded[: count * pitch * step]
        for k in range(len(box)):
            box[k] = 0.0
        for row in range(count if low < high else 0):
            a = (top + row) * geometry[_STRIDE] + lines[i] - geometry[_HEAD]
            if a >= 0 and a < geometry[_SIZE]:
                place = row * pitch * step
                copy(box[place + low : place + high], channel[a * width + low - shift :])
        if step > 1:
            for j in range(len(edges)):
                part, values = boxes[first + j * count * pitch :], box[edges[j] :]
                if step == 2:
                    for k in range(count * pitch):
                        part[k] = values[2 * k]
                else:
                    for k in range(count * pitch):
                        part[k] = values[step * k]


def _embed(
    into: np.ndarray, channel: np.ndarray, top: int, left: int, rows: int, geometry: np.ndarray
) -> None:
    """Copy what a strip of dX depends on of dY, with zeros around it."""
    pitch, width, lead = geometry[_PITCH], geometry[_OUTPUT + 1], geometry[_REACH + 1]
    begin, count = top - geometry[_REACH], rows + geometry[_REACH]
    low = max(0, lead - left)
    high = min(pitch, width + lead - left)
    for k in range(len(into)):
        into[k] = 0.0
    if low < high:
        for row in range(max(0, -begin), min(count, geometry[_OUTPUT] - begin)):
            line = into[row * pitch + low : row * pitch + high]
            copy(line, channel[(begin + row) * width + left - lead + low :])


def _write_rows(
    channel: np.ndarray,
    sums: np.ndarray,
    padded: np.ndarray,
    top: int,
    left: int,
    rows: int,
    columns: int,
    line: int,
    edges: np.ndarray,
    geometry: np.ndarray,
) -> None:
    """Write the sums of all parts with the same rows to where they are in dX."""
    pitch, width, step = geometry[_PITCH], geometry[_SIZE + 1], geometry[_STRIDE + 1]
    shift = geometry[_HEAD + 1] - left * step
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
        a = (top + row) * geometry[_STRIDE] + line - geometry[_HEAD]
        if a >= 0 and a < geometry[_SIZE]:
            place = row * pitch * step
            copy(channel[a * width + low - shift :], values[place + low : place + high])


def _clear(channel: np.ndarray, top: int, left: int, rows: int, columns: int, geometry: np.ndarray) -> None:
    """Set dX to 0 in a strip, and behind it if it is the last one."""
    width, size = geometry[_SIZE + 1], geometry[_SIZE]
    first = min(size, max(0, top * geometry[_STRIDE] - geometry[_HEAD]))
    last = min(size, max(0, (top + rows) * geometry[_STRIDE] - geometry[_HEAD]))
    if top + rows == geometry[_OUTPUT] + geometry[_REACH]:
        last = size
    low = min(width, max(0, left * geometry[_STRIDE + 1] - geometry[_HEAD + 1]))
    high = min(width, max(0, (left + columns) * geometry[_STRIDE + 1] - geometry[_HEAD + 1]))
    if left + columns == geometry[_OUTPUT + 1] + geometry[_REACH + 1]:
        high = width
    for row in range(first, last):
        line = channel[row * width + low : row * width + high]
        for k in range(len(line)):
            line[k] = 0.0
