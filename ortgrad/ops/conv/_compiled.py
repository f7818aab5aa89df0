"""ConvGrad for Numba, without columns: every tap of the kernel reads the same padded row at another place.

A channel is copied into a box: the padded input, divided by the strides into components so that one step of a
window is one element, and flattened. The boxes of several samples follow each other. Let E be dY in boxes of
the same pitch with zeros around it, and X_r the component r of X. With k the flattened position, and o(t) and
r(t) the offset and the component of tap t,

    dW[m, c, t] = sum over k of E[m, k] X_r(t)[c, k + o(t)]
    dX_r[c, k] = sum over m, and over t with r(t) = r, of W[m, c, t] E[m, k - o(t)]

so both gradients are sums over long contiguous rows. The products with the zeros around dY must vanish, so
the NumPy kernel takes over if X or W contain NaN or infinities.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ortgrad.compiled.functions import SLACK, add_rows, allocate, allocate_integers, double, release
from ortgrad.operators.compiled import Plan
from ortgrad.ops._windows import windows

if TYPE_CHECKING:
    Sizes = tuple[int, ...]

# Elements of a row that are worked on at once: some rows of this length fit into the nearest cache.
_CHUNK = 1024
# Elements of the boxes of a channel that a task works on: as many samples as fit, at least one.
_ROW = 8192
# The most channels and filters of a task for dW. With fewer tasks than this they are fewer.
_CHANNELS, _FILTERS, _FEW = 12, 64, 8

# Places in `geometry`: first what has three numbers, one per dimension.
_OUTPUT, _SIZE, _STRIDE, _HEAD, _BOX = 0, 3, 6, 9, 12
_GROUPS = 15
_LEAD = 16  # zeros before the first element of dY in its box
_DX_TASKS, _DW_TASKS = 17, 18
_CHANNELS_OF_TASK, _FILTERS_OF_TASK = 19, 20  # for dW
_SAMPLES = 21  # whose boxes are worked on at once


def plan(
    dy: Sizes, x: Sizes, w: Sizes, dx: Sizes | None, dw: Sizes | None, db: Sizes | None, **attributes: Any
) -> Plan | None:
    """Return the plan; None for tensors without elements, and for more than three spatial dimensions."""
    group, rank = attributes.pop("group"), len(x) - 2
    attributes.pop("kernel_shape")
    win = windows(x[2:], w[2:], **attributes)
    if dy[2:] != win.outputs or rank > 3 or not math.prod(x) * math.prod(w):
        return None
    ones, zeros = (1,) * (3 - rank), (0,) * (3 - rank)
    sizes, outputs, strides = ones + win.sizes, ones + win.outputs, ones + win.strides
    heads, tails = zeros + win.heads, zeros + win.tails
    box = [-(-(n + a + b) // s) for n, a, b, s in zip(sizes, heads, tails, strides, strict=True)]
    pitches = box[1] * box[2], box[2], 1
    components, offsets = [], []
    for tap in itertools.product(*map(range, ones + win.kernel)):
        reach = [k * d for k, d in zip(tap, ones + win.dilations, strict=True)]
        parts = [r % s for r, s in zip(reach, strides, strict=True)]
        components.append((parts[0] * strides[1] + parts[1]) * strides[2] + parts[2])
        offsets.append(sum(r // s * p for r, s, p in zip(reach, strides, pitches, strict=True)))
    taps = sorted(range(len(offsets)), key=lambda t: components[t])
    firsts = [sum(c < i for c in components) for i in range(math.prod(strides) + 1)]
    lead = max(offsets)
    samples, (filters, channels) = x[0], w[:2]
    together = min(samples, max(1, _ROW // math.prod(box)))
    # The rows of dY are read once per task for dW, so it should have many channels.
    channels_of_task, filters_of_task = _CHANNELS, _FILTERS
    while group * -(-channels // channels_of_task) * -(-filters // group // filters_of_task) < _FEW:
        if channels_of_task > 3:
            channels_of_task //= 2
        elif filters_of_task > 4:
            filters_of_task //= 2
        else:
            break
    blocks = group * -(-channels // channels_of_task)
    dx_tasks = 0 if dx is None else -(-samples // together) * group * -(-channels // 4)
    dw_tasks = 0 if dw is None else blocks * -(-filters // group // filters_of_task)
    scalars = group, lead, dx_tasks, dw_tasks, channels_of_task, filters_of_task, together
    flat = [(*shape[:2], math.prod(shape[2:])) for shape in (dy, x, w)]
    return Plan(
        tasks=(samples * filters, dx_tasks + dw_tasks + (filters if db else 0)),
        views=[*flat, flat[1] if dx else (0, 0, 0), flat[2] if dw else (0, 0, 0), db or (0,)],
        numbers={
            "geometry": [*outputs, *sizes, *strides, *heads, *box, *scalars],
            "components": components,
            "offsets": offsets,
            "taps": taps,
            "firsts": firsts,
        },
        work=samples * math.prod(w) * math.prod(outputs) // 8,
        scratch=[(filters * (lead + samples * math.prod(box)) + SLACK,)],
    )


def embed(
    task: int,
    dy: np.ndarray,
    x: np.ndarray,
    w: np.ndarray,
    dx: np.ndarray,
    dw: np.ndarray,
    db: np.ndarray,
    boxes: np.ndarray,
    geometry: np.ndarray,
    components: np.ndarray,
    offsets: np.ndarray,
    taps: np.ndarray,
    firsts: np.ndarray,
) -> None:
    """Copy one channel of dY into its box."""
    sample, m = task // dy.shape[1], task % dy.shape[1]
    length, values = geometry[_BOX] * geometry[_BOX + 1] * geometry[_BOX + 2], dy[sample, m]
    place = _place(dy, geometry, sample, m)
    box = boxes[place - (geometry[_LEAD] if sample == 0 else 0) : place + length]
    for k in range(len(box)):
        box[k] = 0.0
    rows, width = geometry[_OUTPUT + 1], geometry[_OUTPUT + 2]
    box = boxes[place : place + length]
    for i in range(geometry[_OUTPUT] * rows):
        start = (i // rows * geometry[_BOX + 1] + i % rows) * geometry[_BOX + 2]
        to, row = box[start : start + width], values[i * width : (i + 1) * width]
        for k in range(width):
            to[k] = row[k]


def conv_grad_task(
    task: int,
    dy: np.ndarray,
    x: np.ndarray,
    w: np.ndarray,
    dx: np.ndarray,
    dw: np.ndarray,
    db: np.ndarray,
    boxes: np.ndarray,
    geometry: np.ndarray,
    components: np.ndarray,
    offsets: np.ndarray,
    taps: np.ndarray,
    firsts: np.ndarray,
) -> bool:
    """Compute dX of four channels of some samples, dW of some channels and filters, or dB of a filter."""
    if task < geometry[_DX_TASKS]:
        return _channels_task(task, dy, w, dx, boxes, geometry, offsets, taps, firsts)
    task -= geometry[_DX_TASKS]
    if task < geometry[_DW_TASKS]:
        return _weights_task(task, dy, x, w, dw, boxes, geometry, components, offsets, len(firsts) - 1)
    task -= geometry[_DW_TASKS]
    total = double(0.0)
    for sample in range(dy.shape[0]):
        values = dy[sample, task]
        for k in range(len(values)):
            total += double(values[k])
    db[task] = total
    return False


def _channels_task(
    task: int,
    dy: np.ndarray,
    w: np.ndarray,
    dx: np.ndarray,
    boxes: np.ndarray,
    geometry: np.ndarray,
    offsets: np.ndarray,
    taps: np.ndarray,
    firsts: np.ndarray,
) -> bool:
    """Compute dX of up to four channels of some samples."""
    groups, channels, filters = geometry[_GROUPS], w.shape[1], w.shape[0] // geometry[_GROUPS]
    quads = (channels + 3) // 4
    pack, group, channel = task // (groups * quads), task // quads % groups, task % quads * 4
    count, first = min(4, channels - channel), pack * geometry[_SAMPLES]
    samples = min(geometry[_SAMPLES], dy.shape[0] - first)
    box = geometry[_BOX] * geometry[_BOX + 1] * geometry[_BOX + 2]
    stride = samples * box + SLACK
    sums, weights = allocate(4 * stride), allocate(4 * filters * len(taps))
    starts = allocate_integers(filters * len(taps))
    failed = len(sums) == 0 or len(weights) == 0 or len(starts) == 0
    for component in range(0 if failed else len(firsts) - 1):
        own, term, total = taps[firsts[component] : firsts[component + 1]], 0, 0.0
        for m in range(group * filters, (group + 1) * filters):
            place = _place(dy, geometry, first, m)
            for t in own:
                starts[term] = place - offsets[t]
                for i in range(4):
                    weights[4 * term + i] = w[m, channel + i, t] if i < count else 0.0
                    total += weights[4 * term + i] * 0.0
                term += 1
        failed = failed or total != 0.0
        add_rows(sums, stride, boxes, starts[:term], weights, samples * box)
        for sample in range(samples):
            for i in range(count):
                values = sums[i * stride + sample * box : i * stride + (sample + 1) * box]
                _copy(dx[first + sample, group * channels + channel + i], values, component, geometry, False)
    release(sums)
    release(weights)
    release(starts)
    return failed


def _place(dy: np.ndarray, geometry: np.ndarray, sample: int, m: int) -> int:
    """The place of the first element of a channel of dY in the boxes."""
    box = geometry[_BOX] * geometry[_BOX + 1] * geometry[_BOX + 2]
    return m * (geometry[_LEAD] + dy.shape[0] * box) + geometry[_LEAD] + sample * box


def _weights_task(
    task: int,
    dy: np.ndarray,
    x: np.ndarray,
    w: np.ndarray,
    dw: np.ndarray,
    boxes: np.ndarray,
    geometry: np.ndarray,
    components: np.ndarray,
    offsets: np.ndarray,
    parts: int,
) -> bool:
    """Compute dW of some channels and filters; `parts` is the number of components."""
    channels, filters = w.shape[1], w.shape[0] // geometry[_GROUPS]
    step, most = geometry[_CHANNELS_OF_TASK], geometry[_FILTERS_OF_TASK]
    channel_tasks, filter_tasks = (channels + step - 1) // step, (filters + most - 1) // most
    group, channel = task // (channel_tasks * filter_tasks), task // filter_tasks % channel_tasks * step
    first = group * filters + task % filter_tasks * most
    last = min(first + most, (group + 1) * filters)
    count, box = min(step, channels - channel), geometry[_BOX] * geometry[_BOX + 1] * geometry[_BOX + 2]
    memory = allocate(count * parts * geometry[_SAMPLES] * box)
    if len(memory) == 0:
        return True
    # What lies between the first and the last element of dY in its box.
    rows = (geometry[_OUTPUT] - 1) * geometry[_BOX + 1] + geometry[_OUTPUT + 1] - 1
    reach = rows * geometry[_BOX + 2] + geometry[_OUTPUT + 2]
    finite = True
    for pack in range((x.shape[0] + geometry[_SAMPLES] - 1) // geometry[_SAMPLES]):
        sample = pack * geometry[_SAMPLES]
        samples = min(geometry[_SAMPLES], x.shape[0] - sample)
        length = samples * box
        span = parts * length
        for i in range(count):
            for component in range(parts):
                for j in range(samples):
                    into = memory[i * span + component * length + j * box :]
                    _copy(x[sample + j, group * channels + channel + i], into, component, geometry, True)
        total, used = 0.0, memory[: count * span]
        for k in range(len(used)):
            total += used[k] * 0.0
        finite = finite and total == 0.0
        end, pitch = length - box + reach, geometry[_LEAD] + x.shape[0] * box
        for start in range(0, end, _CHUNK):
            n, at = min(_CHUNK, end - start), _place(dy, geometry, sample, 0) + start
            column = 0
            while column < count * len(offsets):
                columns = 3 if column + 3 <= count * len(offsets) else 1
                c0, t0 = column // len(offsets), column % len(offsets)
                x0 = memory[c0 * span + components[t0] * length + offsets[t0] + start :]
                m = first
                if columns == 3:
                    c1, t1 = (column + 1) // len(offsets), (column + 1) % len(offsets)
                    c2, t2 = (column + 2) // len(offsets), (column + 2) % len(offsets)
                    x1 = memory[c1 * span + components[t1] * length + offsets[t1] + start :]
                    x2 = memory[c2 * span + components[t2] * length + offsets[t2] + start :]
                    while m + 4 <= last:
                        d0, d1 = boxes[m * pitch + at :], boxes[(m + 1) * pitch + at :]
                        d2, d3 = boxes[(m + 2) * pitch + at :], boxes[(m + 3) * pitch + at :]
                        a0, a1, a2, b0, b1, b2 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
                        e0, e1, e2, f0, f1, f2 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
                        for k in range(n):
                            p0, p1, p2, p3, q0, q1, q2 = d0[k], d1[k], d2[k], d3[k], x0[k], x1[k], x2[k]
                            a0 += p0 * q0
                            a1 += p0 * q1
                            a2 += p0 * q2
                            b0 += p1 * q0
                            b1 += p1 * q1
                            b2 += p1 * q2
                            e0 += p2 * q0
                            e1 += p2 * q1
                            e2 += p2 * q2
                            f0 += p3 * q0
                            f1 += p3 * q1
                            f2 += p3 * q2
                        fresh = sample == 0 and start == 0
                        _add_to_four_weights(dw, m, channel + c0, t0, a0, b0, e0, f0, fresh)
                        _add_to_four_weights(dw, m, channel + c1, t1, a1, b1, e1, f1, fresh)
                        _add_to_four_weights(dw, m, channel + c2, t2, a2, b2, e2, f2, fresh)
                        m += 4
                    while m < last:
                        d0 = boxes[m * pitch + at :]
                        a0, a1, a2 = 0.0, 0.0, 0.0
                        for k in range(n):
                            a0 += d0[k] * x0[k]
                            a1 += d0[k] * x1[k]
                            a2 += d0[k] * x2[k]
                        if sample > 0 or start > 0:
                            a0 += dw[m, channel + c0, t0]
                            a1 += dw[m, channel + c1, t1]
                            a2 += dw[m, channel + c2, t2]
                        dw[m, channel + c0, t0] = a0
                        dw[m, channel + c1, t1] = a1
                        dw[m, channel + c2, t2] = a2
                        m += 1
                while m < last:
                    d0 = boxes[m * pitch + at :]
                    a0 = 0.0
                    for k in range(n):
                        a0 += d0[k] * x0[k]
                    if sample > 0 or start > 0:
                        a0 += dw[m, channel + c0, t0]
                    dw[m, channel + c0, t0] = a0
                    m += 1
                column += columns
    release(memory)
    return not finite


def _add_to_four_weights(
    dw: np.ndarray, m: int, c: int, t: int, a: float, b: float, e: float, f: float, fresh: bool
) -> None:
    """Add to dW of four filters, or set it."""
    if not fresh:
        a += dw[m, c, t]
        b += dw[m + 1, c, t]
        e += dw[m + 2, c, t]
        f += dw[m + 3, c, t]
    dw[m, c, t] = a
    dw[m + 1, c, t] = b
    dw[m + 2, c, t] = e
    dw[m + 3, c, t] = f


def _copy(channel: np.ndarray, box: np.ndarray, component: int, geometry: np.ndarray, inward: bool) -> None:
    """Copy a component of a channel into its box, with zeros for the padding; or, not inward, back."""
    strides, sizes = geometry[_STRIDE : _STRIDE + 3], geometry[_SIZE : _SIZE + 3]
    step, width, rows = strides[2], geometry[_BOX + 2], geometry[_BOX + 1]
    shift0 = component // (strides[1] * step) - geometry[_HEAD]
    shift1 = component // step % strides[1] - geometry[_HEAD + 1]
    shift2 = component % step - geometry[_HEAD + 2]
    # The elements from low to high are not padding.
    low = min(width, max(0, (step - 1 - shift2) // step))
    high = min(width, max(low, (sizes[2] - shift2 + step - 1) // step))
    for i in range(geometry[_BOX] * rows):
        line = box[i * width : (i + 1) * width]
        a, b = i // rows * strides[0] + shift0, i % rows * strides[1] + shift1
        if a < 0 or a >= sizes[0] or b < 0 or b >= sizes[1]:
            if inward:
                for k in range(width):
                    line[k] = 0.0
            continue
        inner, count = line[low:high], high - low
        start = (a * sizes[1] + b) * sizes[2] + low * step + shift2
        values = channel[start : start + count * step]
        if not inward:
            for k in range(count):
                values[k * step] = inner[k]
            continue
        for k in range(low):
            line[k] = 0.0
        if step == 1:
            for k in range(count):
                inner[k] = values[k]
        else:
            for k in range(count):
                inner[k] = values[k * step]
        rest = line[high:width]
        for k in range(width - high):
            rest[k] = 0.0
