"""Gradients of Softmax and LogSoftmax.

Up to opset 12 they normalize over all axes from `axis` on (the input is coerced to a matrix),
from opset 13 on over `axis` alone; the operators for the latter have names that end in _13.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient
from ortgrad.errors import NodeError
from ortgrad.operators.contract import with_axis
from ortgrad.operators.declaration import Empty, operator
from ortgrad.ops._kernels import blockwise

if TYPE_CHECKING:
    import onnx_ir as ir

    from ortgrad.graph.recorder import Recorder


def _dims(*, axis: int) -> dict[str, str]:
    return {"dY": with_axis(axis), "Y": with_axis(axis)}


@operator("SoftmaxGrad", inputs=["dY", "Y"], outputs=["dX"], shapes="Y", dims=_dims, attributes={"axis": 1})
def softmax_grad(dy: np.ndarray, y: np.ndarray, *, axis: int, empty: Empty) -> np.ndarray:
    """dX = Y * (dY - sum(Y * dY)), the sum over all axes from `axis` on"""
    return _from_axis_on(_softmax, dy, y, axis, empty)


@softmax_grad.onnx
def softmax_grad_body(op: Recorder, dy: ir.Value, y: ir.Value, *, axis: int) -> ir.Value:
    return _body_from_axis_on(_softmax_body, op, dy, y, axis)


@operator(
    "SoftmaxGrad_13", inputs=["dY", "Y"], outputs=["dX"], shapes="Y", dims=_dims, attributes={"axis": -1}
)
def softmax_grad_13(dy: np.ndarray, y: np.ndarray, *, axis: int, empty: Empty) -> np.ndarray:
    """dX = Y * (dY - sum(Y * dY)), the sum over `axis`"""
    return _over_axis(_softmax, dy, y, axis, empty)


@softmax_grad_13.onnx
def softmax_grad_13_body(op: Recorder, dy: ir.Value, y: ir.Value, *, axis: int) -> ir.Value:
    return _softmax_body(op, dy, y, axis)


@operator(
    "LogSoftmaxGrad", inputs=["dY", "Y"], outputs=["dX"], shapes="Y", dims=_dims, attributes={"axis": 1}
)
def log_softmax_grad(dy: np.ndarray, y: np.ndarray, *, axis: int, empty: Empty) -> np.ndarray:
    """dX = dY - exp(Y) * sum(dY), the sum over all axes from `axis` on"""
    return _from_axis_on(_log_softmax, dy, y, axis, empty)


@log_softmax_grad.onnx
def log_softmax_grad_body(op: Recorder, dy: ir.Value, y: ir.Value, *, axis: int) -> ir.Value:
    return _body_from_axis_on(_log_softmax_body, op, dy, y, axis)


@operator(
    "LogSoftmaxGrad_13", inputs=["dY", "Y"], outputs=["dX"], shapes="Y", dims=_dims, attributes={"axis": -1}
)
def log_softmax_grad_13(dy: np.ndarray, y: np.ndarray, *, axis: int, empty: Empty) -> np.ndarray:
    """dX = dY - exp(Y) * sum(dY), the sum over `axis`"""
    return _over_axis(_log_softmax, dy, y, axis, empty)


@log_softmax_grad_13.onnx
def log_softmax_grad_13_body(op: Recorder, dy: ir.Value, y: ir.Value, *, axis: int) -> ir.Value:
    return _log_softmax_body(op, dy, y, axis)


def _softmax(dx: np.ndarray, dy: np.ndarray, y: np.ndarray) -> None:
    np.subtract(dy, np.einsum("iaj,iaj->ij", dy, y)[:, None], out=dx)
    dx *= y


def _softmax_body(op: Recorder, dy: ir.Value, y: ir.Value, axis: int) -> ir.Value:
    _check_axis(y, axis)
    return op.Mul(y, op.Sub(dy, op.ReduceSum(op.Mul(y, dy), [axis])))


def _log_softmax(dx: np.ndarray, dy: np.ndarray, y: np.ndarray) -> None:
    np.exp(y, out=dx)
    dx *= dy.sum(axis=1, keepdims=True)
    np.subtract(dy, dx, out=dx)


def _log_softmax_body(op: Recorder, dy: ir.Value, y: ir.Value, axis: int) -> ir.Value:
    _check_axis(y, axis)
    return op.Sub(dy, op.Mul(op.Exp(y), op.ReduceSum(dy, [axis])))


def _over_axis(
    grad: Callable[..., None], dy: np.ndarray, y: np.ndarray, axis: int, empty: Empty
) -> np.ndarray:
    axis = _normalized(axis, y.ndim)
    dx = empty(0, y.shape)
    blockwise(grad, *(_matrices(a, axis, axis + 1) for a in (dx, dy, y)))
    return dx


def _from_axis_on(
    grad: Callable[..., None], dy: np.ndarray, y: np.ndarray, axis: int, empty: Empty
) -> np.ndarray:
    axis = _normalized(axis, y.ndim)
    dx = empty(0, y.shape)
    blockwise(grad, *(_matrices(a, axis, y.ndim) for a in (dx, dy, y)))
    return dx


def _matrices(array: np.ndarray, start: int, stop: int) -> np.ndarray:
    """The array with three axes: those before `start`, those that are summed over, those from `stop` on."""
    shape = array.shape
    return array.reshape(math.prod(shape[:start]), math.prod(shape[start:stop]), math.prod(shape[stop:]))


def _body_from_axis_on(
    body: Callable[..., ir.Value], op: Recorder, dy: ir.Value, y: ir.Value, axis: int
) -> ir.Value:
    _check_axis(y, axis)
    matrices = [op.Flatten(value, axis=axis) for value in (dy, y)]
    return op.Reshape(body(op, *matrices, 1), op.Shape(y))


def _normalized(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise NodeError(f"axis {axis} is out of range for a tensor with {rank} dimensions")
    return axis % rank


def _check_axis(value: ir.Value, axis: int) -> None:
    if value.shape is not None:
        _normalized(axis, len(value.shape))


@gradient("Softmax")
def softmax_gradient(node: ForwardNode) -> Gradients:
    y = without_nan(node, node.output(0), 0.0)
    return (node.op.SoftmaxGrad_13(node.grad(0), y, axis=node.attribute("axis")),)


@gradient("LogSoftmax")
def log_softmax_gradient(node: ForwardNode) -> Gradients:
    y = without_nan(node, node.output(0), -math.inf)
    return (node.op.LogSoftmaxGrad_13(node.grad(0), y, axis=node.attribute("axis")),)


def without_nan(node: ForwardNode, y: ir.Value, instead: float) -> ir.Value:
    """Probabilities without the NaN that the model itself takes out of the node's first output.

    A row that is masked away is NaN. Exporters write IsNaN and Where behind it, so that nothing flows back
    there; but 0 * NaN is NaN.
    """
    if not _is_tested(node.output(0)):
        return y
    cleaned: ir.Value = node.op.Where(node.op.IsNaN(y), node.op.number(instead, y), y)
    return cleaned


def _is_tested(value: ir.Value) -> bool:
    """Whether the model asks where the value is NaN."""
    for user, _ in value.uses():
        if user.op_type == "IsNaN":
            return True
        if user.op_type in ("Identity", "Cast", "CastLike") and _is_tested(user.outputs[0]):
            return True
    return False
