"""Gradients of Softmax and LogSoftmax.

Up to opset 12 they normalize over all axes from `axis` on (the input is coerced to a matrix),
from opset 13 on over `axis` alone; the operators for the latter have names that end in _13.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ortgrad.autodiff.rules import ForwardNode, gradient
from ortgrad.compiled.functions import SUMS, double, doubles, exp, use_short_vectors
from ortgrad.compiled.sums import ROWS
from ortgrad.errors import NodeError
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.compiled import Plan
from ortgrad.operators.contract import with_axis
from ortgrad.operators.declaration import Empty, operator
from ortgrad.ops._kernels import blockwise
from ortgrad.ops._rows import clear_row
from ortgrad.ops._sums import CHUNK, groups_of


def _dims(*, axis: int) -> dict[str, str]:
    return {"dY": with_axis(axis), "Y": with_axis(axis)}


_CONTRACT: dict[str, Any] = {"inputs": ["dY", "Y"], "outputs": ["dX"], "shapes": "Y", "dims": _dims}


@operator("SoftmaxGrad", **_CONTRACT, attributes={"axis": 1})
def softmax_grad(dy: np.ndarray, y: np.ndarray, *, axis: int, empty: Empty) -> np.ndarray:
    """dX = Y * (dY - sum(Y * dY)), the sum over all axes from `axis` on"""
    return _over_axes(_softmax, dy, y, axis, empty)


@operator("SoftmaxGrad_13", **_CONTRACT, attributes={"axis": -1})
def softmax_grad_13(dy: np.ndarray, y: np.ndarray, *, axis: int, empty: Empty) -> np.ndarray:
    """dX = Y * (dY - sum(Y * dY)), the sum over `axis`"""
    return _over_axes(_softmax, dy, y, axis, empty, alone=True)


@operator("LogSoftmaxGrad", **_CONTRACT, attributes={"axis": 1})
def log_softmax_grad(dy: np.ndarray, y: np.ndarray, *, axis: int, empty: Empty) -> np.ndarray:
    """dX = dY - exp(Y) * sum(dY), the sum over all axes from `axis` on"""
    return _over_axes(_log_softmax, dy, y, axis, empty)


@operator("LogSoftmaxGrad_13", **_CONTRACT, attributes={"axis": -1})
def log_softmax_grad_13(dy: np.ndarray, y: np.ndarray, *, axis: int, empty: Empty) -> np.ndarray:
    """dX = dY - exp(Y) * sum(dY), the sum over `axis`"""
    return _over_axes(_log_softmax, dy, y, axis, empty, alone=True)


def _softmax(dx: np.ndarray, dy: np.ndarray, y: np.ndarray) -> None:
    np.subtract(dy, np.einsum("iaj,iaj->ij", dy, y)[:, None], out=dx)
    dx *= y


def _log_softmax(dx: np.ndarray, dy: np.ndarray, y: np.ndarray) -> None:
    np.exp(y, out=dx)
    dx *= dy.sum(axis=1, keepdims=True)
    np.subtract(dy, dx, out=dx)


def _over_axes(
    grad: Callable[..., None], dy: np.ndarray, y: np.ndarray, axis: int, empty: Empty, alone: bool = False
) -> np.ndarray:
    """Apply a kernel that sums over `axis` alone, or over all axes from `axis` on."""
    axis = _normalized(axis, y.ndim)
    stop = axis + 1 if alone else y.ndim
    dx = empty(0, y.shape)
    blockwise(grad, *(_matrices(a, axis, stop) for a in (dx, dy, y)))
    return dx


def _matrices(array: np.ndarray, start: int, stop: int) -> np.ndarray:
    """The array with three axes: those before `start`, those that are summed over, those from `stop` on."""
    shape = array.shape
    return array.reshape(math.prod(shape[:start]), math.prod(shape[start:stop]), math.prod(shape[stop:]))


def _plan(alone: bool) -> Callable[..., Plan]:
    """The tensors with three axes as in `_matrices`; a task is a row, or SUMS rows side by side."""

    def plan(dy: tuple[int, ...], y: tuple[int, ...], dx: tuple[int, ...], *, axis: int) -> Plan:
        axis = _normalized(axis, len(y))
        stop = axis + 1 if alone else len(y)
        outer, count, inner = math.prod(y[:axis]), math.prod(y[axis:stop]), math.prod(y[stop:])
        # Kernels are fast along the last axis.
        shape = (outer, 1, count) if inner == 1 else (outer, count, inner)
        groups = groups_of(inner)
        tasks = outer * groups if count else 0
        return Plan(tasks, [shape] * 3, {"groups": groups, "contiguous": inner == 1})

    return plan


@softmax_grad.compiled(views=[3, 3, 3], plan=_plan(alone=False))
@softmax_grad_13.compiled(views=[3, 3, 3], plan=_plan(alone=True))
def softmax_grad_rows(
    task: int, dy: np.ndarray, y: np.ndarray, dx: np.ndarray, groups: int, contiguous: int
) -> None:
    i = task // groups
    if contiguous:
        _softmax_row(dy[i, 0], y[i, 0], dx[i, 0])
        return
    first = task % groups * SUMS
    last, final = min(first + SUMS, y.shape[2]), y.shape[1] - 1
    # Until it is computed itself, the final row of dX holds the sums.
    sums = dx[i, final, first:last]
    _sum_columns(sums, first, dy[i], y[i], True)
    for k in range(final):
        a, b, into = dy[i, k, first:last], y[i, k, first:last], dx[i, k, first:last]
        for j in range(last - first):
            into[j] = b[j] * (a[j] - sums[j])
    a, b = dy[i, final, first:last], y[i, final, first:last]
    for j in range(last - first):
        sums[j] = b[j] * (a[j] - sums[j])


def _sum_columns(sums: np.ndarray, first: int, dy: np.ndarray, y: np.ndarray, weighted: bool) -> None:
    """Compute the sums of some columns of dY, or of dY * Y if `weighted`."""
    count, totals = len(sums), doubles()
    for j in range(count):
        totals[j] = 0.0
    for begin in range(0, dy.shape[0], ROWS):
        # The sums of these rows.
        clear_row(sums)
        for k in range(begin, min(begin + ROWS, dy.shape[0])):
            a, b = dy[k, first : first + count], y[k, first : first + count]
            if weighted:
                for j in range(count):
                    sums[j] += a[j] * b[j]
            else:
                for j in range(count):
                    sums[j] += a[j]
        for j in range(count):
            totals[j] += double(sums[j])
    for j in range(count):
        sums[j] = totals[j]


def _softmax_row(dy: np.ndarray, y: np.ndarray, dx: np.ndarray) -> None:
    use_short_vectors()
    total = double(0.0)
    for first in range(0, len(dx), CHUNK):
        a, b, part = dy[first : first + CHUNK], y[first : first + CHUNK], 0.0
        for k in range(len(a)):
            part += a[k] * b[k]
        total += part
    rounded = y.dtype.type(total)
    for k in range(len(dx)):
        dx[k] = y[k] * (dy[k] - rounded)


@log_softmax_grad.compiled(views=[3, 3, 3], plan=_plan(alone=False))
@log_softmax_grad_13.compiled(views=[3, 3, 3], plan=_plan(alone=True))
def log_softmax_grad_rows(
    task: int, dy: np.ndarray, y: np.ndarray, dx: np.ndarray, groups: int, contiguous: int
) -> None:
    i = task // groups
    if contiguous:
        _log_softmax_row(dy[i, 0], y[i, 0], dx[i, 0])
        return
    first = task % groups * SUMS
    last, final = min(first + SUMS, y.shape[2]), y.shape[1] - 1
    # As in softmax_grad_rows.
    sums = dx[i, final, first:last]
    _sum_columns(sums, first, dy[i], y[i], False)
    for k in range(final):
        a, b, into = dy[i, k, first:last], y[i, k, first:last], dx[i, k, first:last]
        for j in range(last - first):
            into[j] = a[j] - exp(b[j]) * sums[j]
    a, b = dy[i, final, first:last], y[i, final, first:last]
    for j in range(last - first):
        sums[j] = a[j] - exp(b[j]) * sums[j]


def _log_softmax_row(dy: np.ndarray, y: np.ndarray, dx: np.ndarray) -> None:
    total = double(0.0)
    for first in range(0, len(dx), CHUNK):
        a, part = dy[first : first + CHUNK], 0.0
        for k in range(len(a)):
            part += a[k]
        total += part
    rounded = y.dtype.type(total)
    for k in range(len(dx)):
        dx[k] = dy[k] - exp(y[k]) * rounded


@softmax_grad_13.onnx
def softmax_grad_13_body(op: Recorder, dy: ir.Value, y: ir.Value, *, axis: int) -> ir.Value:
    _check_axis(y, axis)
    return y * (dy - op.ReduceSum(y * dy, [axis]))


@log_softmax_grad_13.onnx
def log_softmax_grad_13_body(op: Recorder, dy: ir.Value, y: ir.Value, *, axis: int) -> ir.Value:
    _check_axis(y, axis)
    return dy - op.Exp(y) * op.ReduceSum(dy, [axis])


@softmax_grad.onnx
def softmax_grad_body(op: Recorder, dy: ir.Value, y: ir.Value, *, axis: int) -> ir.Value:
    return _as_matrices(softmax_grad_13_body, op, dy, y, axis)


@log_softmax_grad.onnx
def log_softmax_grad_body(op: Recorder, dy: ir.Value, y: ir.Value, *, axis: int) -> ir.Value:
    return _as_matrices(log_softmax_grad_13_body, op, dy, y, axis)


def _as_matrices(
    body: Callable[..., ir.Value], op: Recorder, dy: ir.Value, y: ir.Value, axis: int
) -> ir.Value:
    """Apply a body to the values with all axes from `axis` on as one."""
    _check_axis(y, axis)
    matrices = [op.Flatten(value, axis=axis) for value in (dy, y)]
    return op.Reshape(body(op, *matrices, axis=1), op.Shape(y))


def _normalized(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise NodeError(f"axis {axis} is out of range for a tensor with {rank} dimensions")
    return axis % rank


def _check_axis(value: ir.Value, axis: int) -> None:
    if value.shape is not None:
        _normalized(axis, len(value.shape))


@gradient("Softmax")
def softmax_gradient(node: ForwardNode) -> ir.Value:
    y = _without_unused_nan(node, 0.0)
    return node.op.SoftmaxGrad_13(node.grad(0), y, **node.attributes)


@gradient("LogSoftmax")
def log_softmax_gradient(node: ForwardNode) -> ir.Value:
    y = _without_unused_nan(node, -math.inf)
    return node.op.LogSoftmaxGrad_13(node.grad(0), y, **node.attributes)


def without_nan(node: ForwardNode, y: ir.Value, instead: float) -> ir.Value:
    """Probabilities with NaN replaced, if the model itself tests the node's first output for NaN.

    A row in which everything is masked is NaN. Exporters replace it with IsNaN and Where, which give it a
    gradient of 0; but 0 * NaN is NaN.
    """
    if not _is_read_by(node.output(0), "IsNaN", 0):
        return y
    cleaned: ir.Value = node.op.Where(node.op.IsNaN(y), node.op.number(instead, y), y)
    return cleaned


def _without_unused_nan(node: ForwardNode, instead: float) -> ir.Value:
    """The result of a softmax with NaN replaced where the model does not use it.

    Exporters also find the rows to replace by their scores, which are all -inf. NaN that is used has a
    gradient other than 0, and remains.
    """
    op, y = node.op, without_nan(node, node.output(0), instead)
    if y is node.output(0) and _is_read_by(y, "Where", 1, 2):
        unused = op.And(op.IsNaN(y), op.Equal(node.grad(0), 0.0))
        y = op.Where(unused, op.number(instead, y), y)
    return y


def _is_read_by(value: ir.Value, op_type: str, *inputs: int) -> bool:
    """Whether a node of that type reads the value, or a copy of it, as one of these inputs."""
    for user, i in value.uses():
        if user.op_type == op_type and i in inputs:
            return True
        if user.op_type in ("Identity", "Cast", "CastLike") and _is_read_by(
            user.outputs[0], op_type, *inputs
        ):
            return True
    return False
