"""Compiled kernels of batch normalization and its gradient.

The tensors have the axes batch, channel and rest. The first phase computes sums over blocks of samples, for
each channel; the second adds these up and computes the large output. A task is for one channel. If the rest
has one element, the tensors are `flat`: their axes are batch, 1 and channel, and a task is for SUMS channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from ortgrad.compiled.functions import SUMS, blend, double, doubles, sqrt
from ortgrad.compiled.sums import ROWS
from ortgrad.operators.compiled import Plan
from ortgrad.operators.records import numbers_of
from ortgrad.ops._rows import clear_row
from ortgrad.ops._sums import CHUNK, groups_of

_Shape: TypeAlias = "tuple[int, ...] | None"


class Division(NamedTuple):
    """How sums over samples are divided into tasks."""

    step: int  # samples of a block
    groups: int  # of channels
    parts: int  # into which the samples are divided in the second phase
    flat: bool


class Normalized(NamedTuple):
    """What the normalization has read, with the mean and the inverse standard deviation of X."""

    dy: np.ndarray
    x: np.ndarray
    scale: np.ndarray
    mean: np.ndarray
    inv: np.ndarray


class Gradients(NamedTuple):
    dx: np.ndarray
    d_scale: np.ndarray
    d_bias: np.ndarray


class Normalization(NamedTuple):
    """What is applied to X. In training mode, its own statistics take the place of the given ones."""

    x: np.ndarray
    scale: np.ndarray
    b: np.ndarray
    input_mean: np.ndarray
    input_var: np.ndarray
    epsilon: float
    training_mode: int


class Statistics(NamedTuple):
    """The outputs of training mode, and the weights of the previous statistics and of X's own."""

    running_mean: np.ndarray
    running_var: np.ndarray
    saved_mean: np.ndarray
    saved_inv: np.ndarray
    momentum: float
    share: float


def channel_plan(x: _Shape, vectors: Sequence[_Shape], *, sums: int) -> tuple[Plan, tuple[int, ...]] | None:
    """The plan without views, and the shape of X with three axes; None if a vector has another length."""
    assert x is not None
    if not x:
        return None
    samples, channels, rest = x[0], x[1] if len(x) > 1 else 1, math.prod(x[2:])
    if any(vector is not None and vector != (channels,) for vector in vectors):
        return None
    # A block has at most ROWS samples and, if possible, at least 64 elements.
    step = min(ROWS, max(1, 64 // max(1, rest)))
    blocks = -(-samples // step)
    groups = groups_of(channels) if rest == 1 else channels
    # More tasks if there are few channels; each adds up the sums of its channel once more.
    parts = max(1, min(samples // 2048, 8)) if rest == 1 else 1 if channels >= 16 else min(samples, 16)
    parts = max(1, parts)
    numbers = {"division": numbers_of(Division(step, groups, parts, rest == 1))}
    scratch = [(sums, blocks, channels), (parts, 3, channels)]
    plan = Plan((blocks * groups, groups * parts), [], numbers, work=5 * math.prod(x), scratch=scratch)
    return plan, (samples, 1, channels) if rest == 1 else (samples, channels, rest)


def grad_plan(dy: _Shape, x: _Shape, *others: _Shape, epsilon: float) -> Plan | None:
    scale, mean, inv, dx, d_scale, d_bias = others
    made = channel_plan(x, (scale, mean, inv), sums=2)
    if made is None:
        return None
    plan, shape = made
    vectors = [(0 if v is None else v[0],) for v in (scale, mean, inv, d_scale, d_bias)]
    large = (0, 0, 0) if dx is None else shape
    return plan._replace(views=[shape, shape, *vectors[:3], large, *vectors[3:]])


def grad_sums(
    task: int,
    dy: np.ndarray,
    x: np.ndarray,
    scale: np.ndarray,
    mean: np.ndarray,
    sums: np.ndarray,
    division: Division,
) -> None:
    """The sums of dY and of dY * (X - mean)"""
    step, groups, flat = division.step, division.groups, division.flat
    samples, channels, rest = x.shape[0], len(scale), 1 if flat else x.shape[2]
    block, group = task // groups, task % groups
    begin, end = block * step, min(block * step + step, samples)
    if flat:
        first = group * SUMS
        last = min(first + SUMS, channels)
        plain, weighted, centre = sums[0, block, first:last], sums[1, block, first:last], mean[first:last]
        clear_row(plain)
        clear_row(weighted)
        for n in range(begin, end):
            a, b = dy[n, 0, first:last], x[n, 0, first:last]
            for k in range(last - first):
                plain[k] += a[k]
            for k in range(last - first):
                weighted[k] += a[k] * (b[k] - x.dtype.type(centre[k]))
        return
    total, product, middle = double(0.0), double(0.0), x.dtype.type(mean[group])
    for n in range(begin, end):
        for first in range(0, rest, CHUNK):
            last = min(first + CHUNK, rest)
            a, b = dy[n, group, first:last], x[n, group, first:last]
            part, other = 0.0, 0.0
            for k in range(last - first):
                part += a[k]
                other += a[k] * (b[k] - middle)
            total += part
            product += other
    sums[0, block, group] = total
    sums[1, block, group] = product


def grad_apply(
    task: int,
    given: Normalized,
    gradients: Gradients,
    sums: np.ndarray,
    factors: np.ndarray,
    division: Division,
) -> None:
    """dX = factor * (dY + shift + (X - mean) * slope), with three numbers per channel"""
    dy, x, scale, mean, inv = given
    dx, d_scale, d_bias = gradients
    parts, flat = division.parts, division.flat
    samples, channels, rest = x.shape[0], len(scale), 1 if flat else x.shape[2]
    group, part = task // parts, task % parts
    first = group * SUMS if flat else group
    last = min(first + SUMS, channels) if flat else group + 1
    plain, weighted = doubles(), doubles()
    _add_blocks(sums[0], first, last, plain)
    _add_blocks(sums[1], first, last, weighted)
    slope, shift, factor = factors[part, 0], factors[part, 1], factors[part, 2]
    count = max(1, samples * rest)
    for k in range(last - first):
        scaled = double(x.dtype.type(inv[first + k]))
        weighted[k] *= scaled
        slope[first + k] = -weighted[k] * scaled / count
        shift[first + k] = -plain[k] / count
        factor[first + k] = double(scale[first + k]) * scaled
    if part == 0:
        if len(d_scale) > 0:
            for k in range(last - first):
                d_scale[first + k] = weighted[k]
        if len(d_bias) > 0:
            for k in range(last - first):
                d_bias[first + k] = plain[k]
    if dx.shape[0] == 0:
        return
    for n in range(samples * part // parts, samples * (part + 1) // parts):
        if flat:
            a, b, into = dy[n, 0, first:last], x[n, 0, first:last], dx[n, 0, first:last]
            u, v, w, m = slope[first:last], shift[first:last], factor[first:last], mean[first:last]
            for k in range(last - first):
                into[k] = w[k] * (a[k] + v[k] + (b[k] - x.dtype.type(m[k])) * u[k])
        else:
            _apply_row(
                dy[n, group],
                x[n, group],
                x.dtype.type(mean[group]),
                slope[group],
                shift[group],
                factor[group],
                dx[n, group],
            )


def _apply_row(
    dy: np.ndarray, x: np.ndarray, centre: float, slope: float, shift: float, factor: float, dx: np.ndarray
) -> None:
    for k in range(len(dx)):
        dx[k] = factor * (dy[k] + shift + (x[k] - centre) * slope)


def _add_blocks(blocks: np.ndarray, first: int, last: int, sums: np.ndarray) -> None:
    """sums[k] = the sum of blocks[:, first + k], in double precision"""
    for k in range(last - first):
        sums[k] = 0.0
    for i in range(blocks.shape[0]):
        row = blocks[i, first:last]
        for k in range(last - first):
            sums[k] += double(row[k])


def internal_plan(
    x: _Shape, *others: _Shape, epsilon: float, momentum: float, training_mode: int
) -> Plan | None:
    inputs, outputs = others[:4], others[5:]
    made = channel_plan(x, inputs, sums=3)
    if made is None or (not training_mode and any(shape is not None for shape in outputs)):
        return None
    plan, shape = made
    assert isinstance(plan.tasks, tuple)
    vectors = [(0 if v is None else v[0],) for v in (*inputs, *outputs)]
    return plan._replace(
        tasks=(plan.tasks[0] if training_mode else 0, plan.tasks[1]),
        views=[shape, *vectors[:4], shape, *vectors[4:]],
        numbers={**plan.numbers, "share": 1 - momentum},
    )


def internal_sums(task: int, x: np.ndarray, scale: np.ndarray, sums: np.ndarray, division: Division) -> None:
    add_moments(task, x, sums, len(scale), division, 1)


def add_moments(
    task: int,
    x: np.ndarray,
    sums: np.ndarray,
    channels: int,
    division: Division,
    centred: int,
) -> None:
    """Compute a number near the mean of a block (0 unless `centred`), and sums of differences and squares."""
    step, groups, flat = division.step, division.groups, division.flat
    samples, rest = x.shape[0], 1 if flat else x.shape[2]
    block, group = task // groups, task % groups
    begin, end = block * step, min(block * step + step, samples)
    if flat:
        first = group * SUMS
        last = min(first + SUMS, channels)
        near, plain, squares = (
            sums[0, block, first:last],
            sums[1, block, first:last],
            sums[2, block, first:last],
        )
        clear_row(near)
        clear_row(plain)
        clear_row(squares)
        if centred:
            for n in range(begin, end):
                row = x[n, 0, first:last]
                for k in range(last - first):
                    near[k] += row[k]
            for k in range(last - first):
                near[k] /= x.dtype.type(end - begin)
        for n in range(begin, end):
            row = x[n, 0, first:last]
            for k in range(last - first):
                plain[k] += row[k] - near[k]
            for k in range(last - first):
                squares[k] += (row[k] - near[k]) * (row[k] - near[k])
        return
    total = double(0.0)
    if centred:
        for n in range(begin, end):
            for first in range(0, rest, CHUNK):
                row = x[n, group, first : min(first + CHUNK, rest)]
                part = 0.0
                for k in range(len(row)):
                    part += row[k]
                total += part
    centre = x.dtype.type(total / max(1, (end - begin) * rest))
    total, square = double(0.0), double(0.0)
    for n in range(begin, end):
        for first in range(0, rest, CHUNK):
            row = x[n, group, first : min(first + CHUNK, rest)]
            part, other = 0.0, 0.0
            for k in range(len(row)):
                difference = row[k] - centre
                part += difference
                other += difference * difference
            total += part
            square += other
    sums[0, block, group] = centre
    sums[1, block, group] = total
    sums[2, block, group] = square


def internal_apply(
    task: int,
    given: Normalization,
    y: np.ndarray,
    statistics: Statistics,
    sums: np.ndarray,
    factors: np.ndarray,
    division: Division,
) -> None:
    """Y = (X - mean) * factor + shift, with three numbers per channel"""
    x, scale, b, input_mean, input_var, epsilon, training_mode = given
    running_mean, running_var, saved_mean, saved_inv, momentum, share = statistics
    step, parts, flat = division.step, division.parts, division.flat
    samples, channels, rest = x.shape[0], len(scale), 1 if flat else x.shape[2]
    group, part = task // parts, task % parts
    first = group * SUMS if flat else group
    last = min(first + SUMS, channels) if flat else group + 1
    centre, factor, shift = factors[part, 0], factors[part, 1], factors[part, 2]
    mean, variance = doubles(), doubles()
    if training_mode:
        moments(sums, first, last, step, samples, rest, mean, variance)
    else:
        for k in range(last - first):
            mean[k] = input_mean[first + k]
            variance[k] = input_var[first + k]
    for k in range(last - first):
        c = first + k
        deviation = sqrt(variance[k] + double(epsilon))
        centre[c] = mean[k]
        factor[c] = double(scale[c]) / deviation
        shift[c] = b[c]
        if part == 0:
            if len(running_mean) > 0:
                running_mean[c] = blend(double(input_mean[c]), double(momentum), mean[k], double(share))
            if len(running_var) > 0:
                running_var[c] = blend(double(input_var[c]), double(momentum), variance[k], double(share))
            if len(saved_mean) > 0:
                saved_mean[c] = mean[k]
            if len(saved_inv) > 0:
                saved_inv[c] = double(1.0) / deviation
    for n in range(samples * part // parts, samples * (part + 1) // parts):
        if flat:
            row, into = x[n, 0, first:last], y[n, 0, first:last]
            u, v, w = centre[first:last], factor[first:last], shift[first:last]
            for k in range(last - first):
                into[k] = (row[k] - u[k]) * v[k] + w[k]
        else:
            _normalize_row(x[n, group], centre[group], factor[group], shift[group], y[n, group])


def _normalize_row(x: np.ndarray, centre: float, factor: float, shift: float, y: np.ndarray) -> None:
    for k in range(len(y)):
        y[k] = (x[k] - centre) * factor + shift


def moments(
    sums: np.ndarray,
    first: int,
    last: int,
    step: int,
    samples: int,
    rest: int,
    mean: np.ndarray,
    variance: np.ndarray,
) -> None:
    """Compute the means and the variances of channels from the sums of their blocks."""
    width, blocks, count = last - first, sums.shape[1], max(1, samples * rest)
    for k in range(width):
        mean[k] = 0.0
        variance[k] = 0.0
    for i in range(blocks):
        size = double(min(step, samples - i * step) * rest)
        near, plain = sums[0, i, first:last], sums[1, i, first:last]
        for k in range(width):
            # Differences from an infinite number are NaN; the mean is that number.
            difference = double(plain[k]) if plain[k] == plain[k] else double(0.0)
            mean[k] += double(near[k]) * size + difference
    for k in range(width):
        mean[k] /= count
    for i in range(blocks):
        size = double(min(step, samples - i * step) * rest)
        near, plain, squares = sums[0, i, first:last], sums[1, i, first:last], sums[2, i, first:last]
        for k in range(width):
            offset = double(near[k]) - mean[k]
            variance[k] += double(squares[k]) + offset * (double(plain[k]) * 2.0 + offset * size)
    for k in range(width):
        variance[k] /= count
