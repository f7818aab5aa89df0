"""Depthwise convolutions for Numba: every filter reads one channel, so all taps are done in one pass over it.

With k the flattened position in a box, r(t) the part and o(t) the offset of tap t, and E the rows of dY with
zeros around them (see ortgrad.ops._strips),

    Y[k] = B + sum over t of W[t] X_r(t)[k + o(t)]
    dW[t] = sum over k of E[k] X_r(t)[k + o(t)]
    dX_r[k] = sum over t with r(t) = r of W[t] E[k - o(t)]

The products with the zeros of E must vanish. If W is not finite, or dW is not because X may not be, the NumPy
kernel takes over.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ortgrad.compiled.functions import SLACK, add_row, allocate, allocate_integers, copy_row, double, release
from ortgrad.operators.compiled import Plan
from ortgrad.ops._strips import (
    CHANNELS,
    EVERYWHERE,
    FILTERS,
    HEAD,
    OUTPUT,
    PITCH,
    REACH,
    ROWS,
    SIZE,
    STRIDE,
    STRIPS,
    WANTED,
    Boxes,
    boxes_of,
    clear_strip,
    embed,
    fill_boxes,
    size_of_rows,
    task_channels,
    task_strip,
    write_rows,
)
from ortgrad.ops._windows import windows

if TYPE_CHECKING:
    Sizes = tuple[int, ...]

# Rows are read to a multiple of this length, which is that of a vector. What lies behind them is 0.
_VECTOR = 16


def _boxes(x: Sizes, w: Sizes, y: Sizes, halo: bool, attributes: dict[str, Any]) -> Boxes | None:
    """Return the numbers of a plan; `halo` says that strips are of X, which reach beyond those of Y."""
    group = attributes.pop("group")
    attributes.pop("kernel_shape")
    win = windows(x[2:], w[2:], **attributes)
    fits = y[2:] == win.outputs and x[1] == group and w[1] == 1
    if not fits or len(x) > 4 or not math.prod(x) * math.prod(w):
        return None
    return boxes_of(win, group, w[0] // group, halo)


def plan_grad(
    dy: Sizes, x: Sizes, w: Sizes, dx: Sizes | None, dw: Sizes | None, db: Sizes | None, **attributes: Any
) -> Plan | None:
    """Return the plan of the gradient; None for what is not depthwise, empty or three-dimensional."""
    boxes = _boxes(x, w, dy, True, attributes)
    if boxes is None:
        return None
    geometry, strips, taps = boxes.geometry, boxes.geometry[STRIPS], len(boxes.taps)
    geometry[WANTED] = (dx is not None) + 2 * (dw is not None) + 4 * (db is not None)
    samples, filters = dy[:2]
    flat = [(*shape[:2], math.prod(shape[2:])) for shape in (dy, x)]
    weights = (filters, taps)
    sums = filters if geometry[WANTED] > 1 else 0
    return Plan(
        tasks=(samples * -(-x[1] // geometry[CHANNELS]) * strips, sums),
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
        tasks=x[0] * -(-x[1] // boxes.geometry[CHANNELS]) * boxes.geometry[STRIPS],
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
    sample, first, last, strip = task_channels(task, geometry, x.shape[1])
    top, left, rows, columns = task_strip(geometry, strip, geometry[OUTPUT], geometry[OUTPUT + 1])
    pitch = geometry[PITCH]
    boxes = len(lines) * len(edges) * (geometry[ROWS] + geometry[REACH]) * pitch + SLACK
    memory = allocate(boxes + rows * pitch + SLACK + len(taps) + size_of_rows(geometry))
    if len(memory) == 0:
        return True
    sums, weights = memory[boxes:], memory[boxes + rows * pitch + SLACK :]
    width = geometry[OUTPUT + 1]
    for channel in range(first, last):
        fill_boxes(
            memory[:boxes], weights[len(taps) :], x[sample, channel], top, left, geometry, lines, edges, 0.0
        )
        for m in range(channel * geometry[FILTERS], (channel + 1) * geometry[FILTERS]):
            for t in range(len(taps)):
                weights[t] = w[m, taps[t]]
            add_row(sums, memory, starts, weights, rows * pitch)
            bias, values = b[m] if len(b) > 0 else 0.0, y[sample, m, top * width + left :]
            for k in range(rows * pitch):
                sums[k] += bias
            for row in range(rows):
                copy_row(values[row * width :], sums[row * pitch : row * pitch + columns])
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
    sample, first, last, strip = task_channels(task, geometry, x.shape[1])
    pitch, reach, lead = geometry[PITCH], geometry[REACH], geometry[REACH + 1]
    top, left, rows, columns = task_strip(
        geometry, strip, geometry[OUTPUT] + reach, geometry[OUTPUT + 1] + lead
    )
    filters, wanted = geometry[FILTERS], geometry[WANTED]
    boxes = len(ends) * (geometry[ROWS] + reach) * pitch + SLACK
    length, total = (rows + reach) * pitch + lead + SLACK, rows * pitch + SLACK
    terms = allocate_integers(filters * len(taps))
    memory = allocate(boxes + filters * (length + len(taps)) + len(edges) * total + size_of_rows(geometry))
    failed = len(memory) == 0 or len(terms) == 0
    embedded, sums = memory[boxes:], memory[boxes + filters * length :]
    weights = sums[len(edges) * total :]
    padded = weights[filters * len(taps) :]
    # The rows and columns of dY that begin in this strip.
    own, own_columns = min(rows, geometry[OUTPUT] - top), min(columns, geometry[OUTPUT + 1] - left)
    count = (own - 1) * pitch + own_columns if own > 0 and own_columns > 0 else 0
    # The rows of the box that are not all padding.
    step = geometry[STRIDE]
    low = min(rows, max(0, geometry[HEAD] // step - top))
    high = min(rows, max(low, (geometry[SIZE] + geometry[HEAD] + step - 1) // step - top))
    for channel in range(first, first if failed else last):
        for i in range(filters):
            into = embedded[i * length : (i + 1) * length]
            embed(into, dy[sample, channel * filters + i], top, left, rows, geometry)
        if wanted & 2:
            fill_boxes(memory[:boxes], padded, x[sample, channel], top, left, geometry, lines, edges, 0.0)
        for i in range(filters if wanted > 1 else 0):
            begin = i * length + reach * pitch + lead
            values = embedded[begin : begin + (count + _VECTOR - 1) // _VECTOR * _VECTOR]
            into = partial[sample, strip, channel * filters + i]
            if wanted & 2:
                failed = _correlate(into, values, memory, starts, taps) or failed
            sum_of_dy = double(0.0)
            for k in range(len(values)):
                sum_of_dy += double(values[k])
            into[len(taps)] = sum_of_dy
        if wanted & 1:
            target = dx[sample, channel]
            if geometry[EVERYWHERE] == 0:
                clear_strip(target, top, left, rows, columns, geometry)
            begin = 0
            for part in range(len(ends)):
                term, check = 0, 0.0
                for i in range(filters):
                    for t in range(begin, ends[part]):
                        terms[term] = i * length + places[t] + low * pitch
                        weights[term] = w[channel * filters + i, taps[t]]
                        check += weights[term] * 0.0
                        term += 1
                failed = failed or check != 0.0
                begin, edge = ends[part], part % len(edges)
                into = sums[edge * total + low * pitch :]
                add_row(into, embedded, terms[:term], weights, (high - low) * pitch)
                if edge == len(edges) - 1:
                    line = lines[part // len(edges)]
                    write_rows(target, sums, padded, top, left, rows, columns, line, edges, geometry)
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
            if geometry[WANTED] & 2:
                dw[m, t] = total
        elif geometry[WANTED] & 4:
            db[m] = total


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
