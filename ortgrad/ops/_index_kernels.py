"""Compiled kernels of the gradients of gathers.

Each task owns a part of dX, to which no other task adds, and adds to it in the order of the indices. A task
that meets an index out of range fails.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np

from ortgrad.compiled.functions import SUMS
from ortgrad.operators.compiled import Integers, Plan
from ortgrad.operators.records import numbers_of
from ortgrad.ops._rows import add_to, clear_row
from ortgrad.ops._sums import groups_of

_Shape: TypeAlias = "tuple[int, ...]"
# The number of elements that a task sets to 0.
_ZEROS = 1 << 14


def _parts(batch: int, rows: int, inner: int, count: int) -> int:
    """Return the number of parts of the rows of a matrix, each of which reads all indices.

    There are more parts if the indices are few in comparison with the elements that are read or written.
    """
    useful = (rows * inner // max(1, count)) // 64 + inner // 16
    return 1 if batch >= 16 else max(1, min(16, rows, useful))


def gather_plan(shape: _Shape, indices: _Shape, dy: _Shape, dx: _Shape, *, axis: int) -> Plan:
    axis %= len(dx)
    outer, length, inner = math.prod(dx[:axis]), dx[axis], math.prod(dx[axis + 1 :])
    count = math.prod(indices)
    parts = _parts(outer, length, inner, count)
    return Plan(
        outer * parts,
        [shape, (count,), (outer, count, inner), (outer, length * inner)],
        {"parts": parts, "length": length},
        work=outer * (length + 3 * count) * inner,
    )


def gather_grad_rows(
    task: int, indices: np.ndarray, dy: np.ndarray, dx: np.ndarray, parts: int, length: int
) -> bool:
    i, part, inner = task // parts, task % parts, dy.shape[2]
    first, last = length * part // parts, length * (part + 1) // parts
    clear_row(dx[i, first * inner : last * inner])
    for k in range(len(indices)):
        row = int(indices[k])
        if row < 0:
            row += length
        if row < 0 or row >= length:
            return True
        if first <= row < last:
            add_to(dx[i, row * inner : row * inner + inner], dy[i, k])
    return False


def gather_nd_plan(shape: _Shape, indices: _Shape, dy: _Shape, dx: _Shape, *, batch_dims: int) -> Plan | None:
    end = batch_dims + indices[-1]
    if end > len(dx) or dy != indices[:-1] + dx[end:]:
        return None
    batch, rows, inner = math.prod(dx[:batch_dims]), math.prod(dx[batch_dims:end]), math.prod(dx[end:])
    count = math.prod(indices[batch_dims:-1])
    parts = _parts(batch, rows, inner, count)
    return Plan(
        batch * parts,
        [shape, (batch, count, indices[-1]), (batch, count, inner), (batch, rows * inner)],
        {"parts": parts, "lengths": dx[batch_dims:end], "rows": rows},
        work=batch * (rows + 3 * count) * inner,
    )


def gather_nd_grad_rows(
    task: int, indices: np.ndarray, dy: np.ndarray, dx: np.ndarray, parts: int, lengths: Integers, rows: int
) -> bool:
    i, part, inner = task // parts, task % parts, dy.shape[2]
    first, last = rows * part // parts, rows * (part + 1) // parts
    clear_row(dx[i, first * inner : last * inner])
    for k in range(indices.shape[1]):
        row = 0
        for axis in range(len(lengths)):
            place = int(indices[i, k, axis])
            if place < 0:
                place += lengths[axis]
            if place < 0 or place >= lengths[axis]:
                return True
            row = row * lengths[axis] + place
        if first <= row < last:
            add_to(dx[i, row * inner : row * inner + inner], dy[i, k])
    return False


class Part(NamedTuple):
    """What the tasks of GatherElementsGrad have in common."""

    whole: bool  # whether dY is as large as dX along the other axes
    groups: int  # of elements behind the axis
    length: int  # of the axis
    below: int  # elements of dX behind the axis


class Places(NamedTuple):
    """The sizes of dY and the strides of dX, before the axis and behind it."""

    outer_sizes: Integers
    outer_strides: Integers
    inner_sizes: Integers
    inner_strides: Integers


def gather_elements_plan(dy: _Shape, shape: _Shape, indices: _Shape, dx: _Shape, *, axis: int) -> Plan | None:
    axis %= len(dx)
    if any(n > d for i, (n, d) in enumerate(zip(dy, dx, strict=True)) if i != axis):
        return None
    outer, count, inner = math.prod(dy[:axis]), dy[axis], math.prod(dy[axis + 1 :])
    below = math.prod(dx[axis + 1 :])
    groups = groups_of(inner)
    view = outer, count, inner
    # If dY is as large as dX along the other axes, each task sets its own part to 0 before it adds to it.
    whole = dy[:axis] == dx[:axis] and dy[axis + 1 :] == dx[axis + 1 :]
    return Plan(
        (0 if whole else -(-math.prod(dx) // _ZEROS), outer * groups),
        [view, shape, view, (math.prod(dx),)],
        {
            "part": numbers_of(Part(whole, groups, dx[axis], below)),
            "outer_sizes": dy[:axis],
            "outer_strides": [math.prod(dx[i + 1 :]) for i in range(axis)],
            # Where the sizes of dY and dX are equal, so are the places.
            "inner_sizes": () if dy[axis + 1 :] == dx[axis + 1 :] else dy[axis + 1 :],
            "inner_strides": [math.prod(dx[i + 1 :]) for i in range(axis + 1, len(dx))],
        },
        work=math.prod(dx) + 8 * math.prod(dy),
    )


def gather_elements_grad_clear(task: int, dx: np.ndarray) -> None:
    clear_row(dx[task * _ZEROS : min(task * _ZEROS + _ZEROS, len(dx))])


def gather_elements_grad_part(
    task: int,
    dy: np.ndarray,
    indices: np.ndarray,
    dx: np.ndarray,
    part: Part,
    places: Places,
) -> bool:
    whole, groups, length, below = part.whole, part.groups, part.length, part.below
    i, first = task // groups, task % groups * SUMS
    last = min(first + SUMS, dy.shape[2])
    start = _place(i, places.outer_sizes, places.outer_strides)
    if whole and groups == 1:
        clear_row(dx[start : start + length * below])
    elif whole:
        for row in range(length):
            clear_row(dx[start + row * below + first : start + row * below + last])
    for k in range(dy.shape[1]):
        for j in range(first, last):
            row = int(indices[i, k, j])
            if row < 0:
                row += length
            if row < 0 or row >= length:
                return True
            column = j
            if len(places.inner_sizes) > 0:
                column = _place(j, places.inner_sizes, places.inner_strides)
            dx[start + row * below + column] += dy[i, k, j]
    return False


def _place(index: int, sizes: Integers, strides: Integers) -> int:
    """The place of an element in a tensor with these strides, by its index in one with these sizes."""
    place = 0
    for axis in range(len(sizes) - 1, -1, -1):
        place += index % sizes[axis] * strides[axis]
        index //= sizes[axis]
    return place
