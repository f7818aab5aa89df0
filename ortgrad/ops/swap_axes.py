"""Transpositions that swap two axes before others, for sessions that run compiled kernels.

The heads of an attention and the groups of a channel shuffle are transposed like this: runs of elements stay
together. onnxruntime copies each of them with a call; here vectors are copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ortgrad.compiled.functions import TILE, copy_vector
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.compiled import Plan
from ortgrad.operators.declaration import INTERNAL_DOMAIN, Operand, Shape, operator


def _shapes(x: Operand, *, axis: int) -> Sequence[Shape | None]:
    return [None if x.shape is None else tuple(x.shape[i] for i in swapped(len(x.shape), axis))]


def _dims(*, axis: int) -> dict[str, str]:
    return {"X": " ".join([*(f"B{i}" for i in range(axis)), "M", "N", "*R"])}


def swapped(rank: int, axis: int) -> list[int]:
    """Return the axes in their order after `axis` and the next one have changed places."""
    order = list(range(rank))
    order[axis], order[axis + 1] = axis + 1, axis
    return order


@operator(
    "SwapAxes",
    domain=INTERNAL_DOMAIN,
    inputs=["X"],
    outputs=["Y"],
    shapes=_shapes,
    dims=_dims,
    attributes={"axis": 0},
)
def swap_axes(x: np.ndarray, *, axis: int) -> np.ndarray:
    """Y = X with `axis` and the next axis in each other's place"""
    return np.swapaxes(x, axis, axis + 1)


@swap_axes.onnx
def swap_axes_body(op: Recorder, x: ir.Value, *, axis: int) -> ir.Value:
    rank = len(x.shape) if x.shape is not None else 0
    return op.Transpose(x, perm=swapped(rank, axis))


def plan(x: Sequence[int], y: Sequence[int], *, axis: int) -> Plan | None:
    """Return the plan; None if runs are not whole vectors, and for tensors without elements."""
    batch, rows, columns, run = math.prod(x[:axis]), x[axis], x[axis + 1], math.prod(x[axis + 2 :])
    if run % TILE or not batch * rows * columns * run:
        return None
    return Plan(
        tasks=batch * columns,
        views=[(math.prod(x),)] * 2,
        numbers={"rows": rows, "columns": columns, "run": run},
    )


@swap_axes.compiled(views=[1, 1], plan=plan)
def swap_axes_task(task: int, x: np.ndarray, y: np.ndarray, rows: int, columns: int, run: int) -> None:
    """Copy the runs of a column into the row that it becomes."""
    place, start = task * rows * run, (task // columns * rows * columns + task % columns) * run
    for i in range(rows):
        for k in range(0, run, TILE):
            copy_vector(y, place + i * run + k, x, start + i * columns * run + k)
