"""Unbroadcasting: sums the gradient of a broadcast operand to the operand's own shape."""

from __future__ import annotations

import numpy as np

from ortgrad.errors import NodeError
from ortgrad.graph.lazy import Recorder, ir

# Operators whose first output has the shape of their first input, and those that broadcast all inputs.
KEEPING = frozenset(
    [
        *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Cast", "CastLike", "Ceil"),
        *("Celu", "Clip", "Cos", "Cosh", "Dropout", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid"),
        *("HardSwish", "Hardmax", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Log", "LogSoftmax", "Mish"),
        *("Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh"),
        *("Softmax", "Softplus", "Softsign", "Sqrt", "Swish", "Tan", "Tanh", "ThresholdedRelu"),
    ]
)
BROADCASTING = frozenset(["Add", "Div", "Max", "Mean", "Min", "Mod", "Mul", "Pow", "Sub", "Sum", "Where"])


def unbroadcast(op: Recorder, grad: ir.Value, value: ir.Value, output: ir.Value) -> ir.Value:
    """Sum a gradient of the shape of `output` over the axes along which `value` was broadcast."""
    source, target = value.shape, output.shape
    if source is None or target is None:
        if _keeps_shape(value, output):
            return grad
        if source is not None and all(isinstance(dim, int) and dim == 1 for dim in source):
            summed = op.ReduceSum(grad, keepdims=0)
            return op.Reshape(summed, [1] * len(source)) if len(source) else summed
        return _unbroadcast_at_run_time(op, grad, value)
    lead = len(target) - len(source)
    if lead < 0:
        raise NodeError(
            f"its output {output.name!r} of shape {target} has fewer axes than its input {value.name!r} of "
            f"shape {source}; the shapes that the model declares contradict each other"
        )
    axes = list(range(lead))
    single: list[int] = []
    for i, dim in enumerate(source):
        other = target[lead + i]
        if isinstance(dim, int) and dim == 1:
            # If the output's size is unknown, it may be 1 as well; the sum is then over one element.
            (single if isinstance(other, int) and other == 1 else axes).append(lead + i)
        elif not isinstance(dim, int) and (dim.value is None or dim != other):
            # The size may be 1 at run time.
            return _unbroadcast_at_run_time(op, grad, value)
    if not axes:
        return grad
    if axes == list(range(lead)):
        return op.ReduceSum(grad, axes, keepdims=0)
    # onnxruntime sums along consecutive axes at once, and along the last ones fastest.
    summed = op.ReduceSum(grad, sorted([*axes, *single]), keepdims=1)
    return op.Squeeze(summed, list(range(lead))) if lead else summed


def _keeps_shape(value: ir.Value, output: ir.Value) -> bool:
    """Return whether an operand is known to have the shape of the result."""
    node = output.producer()
    if node is None or node.domain not in ("", "ai.onnx"):
        return False
    if node.op_type in KEEPING:
        return value is node.inputs[0]
    if node.op_type not in BROADCASTING:
        return False
    operands = [operand for operand in node.inputs if operand is not None]
    return len({_origin(operand) for operand in operands if not _is_scalar(operand)} | {_origin(value)}) == 1


def _origin(value: ir.Value) -> ir.Value:
    """Return a value that has the same shape, from which this one is computed."""
    while (node := value.producer()) is not None and node.domain in ("", "ai.onnx"):
        operands = [operand for operand in node.inputs if operand is not None]
        if node.op_type in BROADCASTING:
            operands = [operand for operand in operands if not _is_scalar(operand)]
            # There is no recursion, so only what is computed from one tensor is recognized.
            if len(set(operands)) != 1:
                break
        elif node.op_type not in KEEPING or value is not node.outputs[0] or not operands:
            break
        value = operands[0]
    return value


def _is_scalar(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) == 0


def _unbroadcast_at_run_time(op: Recorder, grad: ir.Value, value: ir.Value) -> ir.Value:
    shape, full = op.shape_of(value), op.Shape(grad)
    # The value's shape, extended with leading ones to the rank of the gradient.
    missing = op.Sub(op.Shape(full), op.Shape(shape))
    aligned = op.Concat(op.Expand(np.array([1], np.int64), missing), shape, axis=0)
    axes = op.Squeeze(op.NonZero(op.And(op.Equal(aligned, [1]), op.Not(op.Equal(full, [1])))), [0])
    return op.Reshape(op.ReduceSum(grad, axes, keepdims=1, noop_with_empty_axes=1), shape, allowzero=1)
