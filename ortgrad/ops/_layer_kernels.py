"""Compiled kernels of the gradients of layer normalizations.

The first phase computes X_grad by rows, and sums over blocks of rows for the gradients of scale and bias. The
second adds these up, SUMS columns per task.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np

from ortgrad.compiled.functions import SUMS, double
from ortgrad.compiled.sums import row_blocks
from ortgrad.operators.compiled import Plan
from ortgrad.ops._rows import add_to, clear_row
from ortgrad.ops._sums import CHUNK, add_blocks, groups_of

_Shape: TypeAlias = "tuple[int, ...] | None"


def layer_plan(dy: _Shape, x: _Shape, scale: _Shape, mean: _Shape, *others: _Shape, axis: int) -> Plan:
    """The tensors as matrices whose rows are normalized; `mean` may stand for the bias."""
    _, dx, d_scale, d_bias = others
    assert x is not None and scale is not None and mean is not None
    rows, columns = math.prod(x[: axis % len(x)]), math.prod(scale)
    outputs = [0 if shape is None else columns for shape in (d_scale, d_bias)]
    blocks = row_blocks(rows)
    return Plan(
        (blocks, groups_of(max(outputs))),
        [
            (rows, columns),
            (rows, columns),
            (columns,),
            (math.prod(mean),),
            (rows,),
            (0 if dx is None else rows, columns),
            *((size,) for size in outputs),
        ],
        {"blocks": blocks},
        work=5 * rows * columns,
        scratch=[(blocks, outputs[0]), (blocks, outputs[1])],
    )


def simplified_plan(
    dy: _Shape, x: _Shape, scale: _Shape, inv: _Shape, dx: _Shape, d_scale: _Shape, *, axis: int
) -> Plan:
    plan = layer_plan(dy, x, scale, inv, inv, dx, d_scale, None, axis=axis)
    views = [plan.views[i] for i in (0, 1, 2, 4, 5, 6)]
    return plan._replace(views=views, scratch=plan.scratch[:1])


class Sums(NamedTuple):
    """The sums of blocks of rows, for the gradients of scale and bias."""

    scale_sums: np.ndarray
    bias_sums: np.ndarray
    blocks: int


def layer_grad_rows(
    task: int,
    dy: np.ndarray,
    x: np.ndarray,
    scale: np.ndarray,
    mean: np.ndarray,
    inv: np.ndarray,
    dx: np.ndarray,
    sums: Sums,
) -> None:
    rows, columns = x.shape
    scale_sums, bias_sums, blocks = sums
    clear_row(scale_sums[task])
    clear_row(bias_sums[task])
    for row in range(rows * task // blocks, rows * (task + 1) // blocks):
        centre, factor = x.dtype.type(mean[row]), x.dtype.type(inv[row])
        if dx.shape[0] > 0:
            plain, weighted = double(0.0), double(0.0)
            for first in range(0, columns, CHUNK):
                last = min(first + CHUNK, columns)
                a, b, w = dy[row, first:last], x[row, first:last], scale[first:last]
                part, other = 0.0, 0.0
                for k in range(last - first):
                    g = a[k] * w[k]
                    part += g
                    other += g * ((b[k] - centre) * factor)
                plain += part
                weighted += other
            pull, slope = x.dtype.type(plain / columns), x.dtype.type(weighted / columns)
            if columns == 1:
                dx[row, 0] = _nothing(pull, factor)
            else:
                _write_row(dy[row], x[row], scale, centre, factor, pull, slope, dx[row])
        _add_row(dy[row], x[row], centre, factor, scale_sums[task], bias_sums[task])


def simplified_layer_grad_rows(
    task: int,
    dy: np.ndarray,
    x: np.ndarray,
    scale: np.ndarray,
    inv: np.ndarray,
    dx: np.ndarray,
    scale_sums: np.ndarray,
    blocks: int,
) -> None:
    rows, columns = x.shape
    zero = x.dtype.type(0.0)
    clear_row(scale_sums[task])
    for row in range(rows * task // blocks, rows * (task + 1) // blocks):
        factor = x.dtype.type(inv[row])
        if dx.shape[0] > 0:
            weighted = double(0.0)
            for first in range(0, columns, CHUNK):
                last = min(first + CHUNK, columns)
                a, b, w = dy[row, first:last], x[row, first:last], scale[first:last]
                part = 0.0
                for k in range(last - first):
                    part += a[k] * w[k] * (b[k] * factor)
                weighted += part
            _write_row(dy[row], x[row], scale, zero, factor, zero, x.dtype.type(weighted / columns), dx[row])
        _add_row(dy[row], x[row], zero, factor, scale_sums[task], scale_sums[task, :0])


def invertible_layer_grad_rows(
    task: int,
    dy: np.ndarray,
    y: np.ndarray,
    scale: np.ndarray,
    bias: np.ndarray,
    inv: np.ndarray,
    dx: np.ndarray,
    sums: Sums,
) -> bool:
    rows, columns = y.shape
    scale_sums, bias_sums, blocks = sums
    for k in range(columns):
        if scale[k] == 0.0:
            return True
    clear_row(scale_sums[task])
    clear_row(bias_sums[task])
    for row in range(rows * task // blocks, rows * (task + 1) // blocks):
        factor = y.dtype.type(inv[row])
        if dx.shape[0] > 0:
            plain, weighted = double(0.0), double(0.0)
            for first in range(0, columns, CHUNK):
                last = min(first + CHUNK, columns)
                a, b = dy[row, first:last], y[row, first:last]
                w, shift = scale[first:last], bias[first:last]
                part, other = 0.0, 0.0
                for k in range(last - first):
                    g = a[k] * w[k]
                    part += g
                    other += g * ((b[k] - shift[k]) / w[k])
                plain += part
                weighted += other
            pull, slope = y.dtype.type(plain / columns), y.dtype.type(weighted / columns)
            a, b, into = dy[row], y[row], dx[row]
            if columns == 1:
                into[0] = _nothing(pull, factor)
            for k in range(columns if columns > 1 else 0):
                into[k] = factor * (a[k] * scale[k] - pull - (b[k] - bias[k]) / scale[k] * slope)
        if scale_sums.shape[1] > 0:
            a, b, total = dy[row], y[row], scale_sums[task]
            for k in range(columns):
                total[k] += a[k] * ((b[k] - bias[k]) / scale[k])
        if bias_sums.shape[1] > 0:
            add_to(bias_sums[task], dy[row])
    return False


def _nothing(pull: float, factor: float) -> float:
    """dX of a row with one element, 0 or NaN.

    The difference of dY * scale and its mean would be the rounding of the product, times a large factor.
    """
    return (pull - pull) * factor


def _write_row(
    dy: np.ndarray,
    x: np.ndarray,
    scale: np.ndarray,
    centre: float,
    factor: float,
    pull: float,
    slope: float,
    dx: np.ndarray,
) -> None:
    """dX = factor * (dY * scale - pull - N * slope), N = (X - centre) * factor"""
    for k in range(len(dx)):
        dx[k] = factor * (dy[k] * scale[k] - pull - (x[k] - centre) * factor * slope)


def _add_row(
    dy: np.ndarray,
    x: np.ndarray,
    centre: float,
    factor: float,
    scale_sums: np.ndarray,
    bias_sums: np.ndarray,
) -> None:
    """Add dY * N and dY to the sums that are wanted."""
    # In loops of their own: a loop that writes to several arrays is not vectorized.
    if len(scale_sums) > 0:
        for k in range(len(scale_sums)):
            scale_sums[k] += dy[k] * ((x[k] - centre) * factor)
    if len(bias_sums) > 0:
        add_to(bias_sums, dy)


def layer_grad_columns(
    task: int, d_scale: np.ndarray, d_bias: np.ndarray, scale_sums: np.ndarray, bias_sums: np.ndarray
) -> None:
    if len(d_scale) > 0:
        add_blocks(scale_sums, task * SUMS, d_scale)
    if len(d_bias) > 0:
        add_blocks(bias_sums, task * SUMS, d_bias)


def simplified_layer_grad_columns(task: int, d_scale: np.ndarray, scale_sums: np.ndarray) -> None:
    if len(d_scale) > 0:
        add_blocks(scale_sums, task * SUMS, d_scale)
