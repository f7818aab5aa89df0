"""Gradient rules of element-wise mathematics: arithmetic, functions, selection, running sums."""

from __future__ import annotations

import math

import numpy as np

from ortgrad.autodiff.rules import ForwardNode, Gradients, elementwise, gradient, no_gradient
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.ops._types import cast_like

# Piecewise constant, or dependent on shapes only.
no_gradient("Floor", "Ceil", "Round", "Sign", "Hardmax")
no_gradient("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsNaN", "IsInf")
no_gradient("Not", "And", "Or", "Xor", "BitShift", "BitwiseNot", "BitwiseAnd", "BitwiseOr", "BitwiseXor")
no_gradient("Shape", "Size", "NonZero", "ArgMax", "ArgMin", "NonMaxSuppression")
no_gradient("BitCast", "Constant", "ConstantOfShape", "EyeLike", "Bernoulli", "Multinomial")
no_gradient("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")

elementwise("Identity", lambda op, dy, y, x: dy)
elementwise("Add", lambda op, dy, y, a, b: dy, lambda op, dy, y, a, b: dy)
elementwise("Sub", lambda op, dy, y, a, b: dy, lambda op, dy, y, a, b: -dy)
elementwise("Mul", lambda op, dy, y, a, b: dy * b, lambda op, dy, y, a, b: dy * a)
elementwise("Div", lambda op, dy, y, a, b: dy / b, lambda op, dy, y, a, b: -(dy / b * y))
elementwise(
    "Mod", lambda op, dy, y, a, b: dy, lambda op, dy, y, a, b: -(dy * op.Round((a - y) / b)), singular=True
)
elementwise(
    "Where",
    None,
    lambda op, dy, y, c, a, b: op.Where(c, dy, 0.0),
    lambda op, dy, y, c, a, b: op.Where(c, 0.0, dy),
)

elementwise("Neg", lambda op, dy, y, x: -dy)
elementwise("Abs", lambda op, dy, y, x: dy * op.Sign(x))
elementwise("Sqrt", lambda op, dy, y, x: dy * 0.5 / y, singular=True)
elementwise("Reciprocal", lambda op, dy, y, x: -(dy * (y * y)), singular=True)
elementwise("Exp", lambda op, dy, y, x: dy * _at_most(op, y))
elementwise("Log", lambda op, dy, y, x: dy / x, singular=True)
elementwise("Erf", lambda op, dy, y, x: dy * (op.Exp(-(x * x)) * (2 / math.sqrt(math.pi))))

elementwise("Sin", lambda op, dy, y, x: dy * op.Cos(x))
elementwise("Cos", lambda op, dy, y, x: -(dy * op.Sin(x)))
elementwise("Tan", lambda op, dy, y, x: dy * (y * y + 1.0))
elementwise("Asin", lambda op, dy, y, x: dy / op.Sqrt(1.0 - x * x), singular=True)
elementwise("Acos", lambda op, dy, y, x: -(dy / op.Sqrt(1.0 - x * x)), singular=True)
elementwise("Atan", lambda op, dy, y, x: dy / (x * x + 1.0))
elementwise("Sinh", lambda op, dy, y, x: dy * op.Cosh(x), singular=True)
elementwise("Cosh", lambda op, dy, y, x: dy * op.Sinh(x), singular=True)
elementwise("Asinh", lambda op, dy, y, x: dy / op.Sqrt(x * x + 1.0))
elementwise("Acosh", lambda op, dy, y, x: dy / op.Sqrt(x * x - 1.0), singular=True)
elementwise("Atanh", lambda op, dy, y, x: dy / (1.0 - x * x), singular=True)


elementwise("Cast", lambda op, dy, y, x, **_: cast_like(op, dy, x))
elementwise("CastLike", lambda op, dy, y, x, like, **_: cast_like(op, dy, x))


def _at_most(op: Recorder, y: ir.Value) -> ir.Value:
    """Y with infinity replaced by the largest number, because dY may be 0 there, as in 1 / (1 + Exp(X))."""
    return y if y.dtype is None else op.Min(y, op.number(float(np.finfo(y.dtype.numpy()).max), y))


@gradient("Pow", broadcasts=True)
def pow_gradient(node: ForwardNode) -> ir.Value | Gradients | None:
    op, dy, x = node.op, node.grad(0), node.input(0)
    known = node.constant(1)
    if known is not None and known.size == 1 and not node.wants(1):
        return _power_gradient(node, float(known.reshape(())))
    e = cast_like(op, node.input(1), x)
    zero = op.Equal(e, 0.0)
    # x**0 is 1 even at 0, where x**-1 is not finite.
    dx = dy * (e * op.Pow(x, op.Where(zero, e, e - 1.0)))
    flat = op.And(op.Equal(x, 0.0), op.GreaterOrEqual(e, 0.0))
    de = dy * (node.output(0) * op.Log(op.Where(flat, 1.0, x)))
    return dx, de


def _power_gradient(node: ForwardNode, e: float) -> ir.Value | None:
    op, dy, x = node.op, node.grad(0), node.input(0)
    if e == 0:
        return None
    if e == 1:
        return dy
    return dy * ((x if e == 2 else op.Pow(x, op.number(e - 1, x))) * e)


@gradient("Sum", broadcasts=True)
def sum_gradient(node: ForwardNode) -> Gradients:
    return [node.grad(0)] * len(node.inputs)


@gradient("Mean", broadcasts=True)
def mean_gradient(node: ForwardNode) -> Gradients:
    count = len(node.inputs)
    share = node.grad(0) if count == 1 else node.grad(0) * (1 / count)
    return [share] * count


@gradient("Max", "Min", broadcasts=True)
def max_gradient(node: ForwardNode) -> ir.Value | Gradients:
    op, dy = node.op, node.grad(0)
    if len(node.inputs) == 1:
        return dy
    if len(node.inputs) == 2:
        a, b = node.input(0), node.input(1)
        wins = op.Greater(a, b) if node.op_type == "Max" else op.Less(a, b)
        da = op.Where(op.Equal(a, b), dy * 0.5, op.Where(wins, dy, 0.0))
        return da, dy - da
    # The inputs that equal the result share its gradient.
    chosen = [op.Equal(node.input(i), node.output(0)) for i in range(len(node.inputs))]
    share = dy / op.Sum(*(op.CastLike(c, dy) for c in chosen))
    return [op.Where(c, share, 0.0) for c in chosen]


@gradient("Clip", broadcasts=True)
def clip_gradient(node: ForwardNode) -> ir.Value | Gradients:
    op, dy, x = node.op, node.grad(0), node.input(0)
    low, high = node.optional(1), node.optional(2)
    if low is None and high is None:
        return dy
    # Elements within the bounds, or on them, are unchanged.
    dx = op.Where(op.Equal(x, node.output(0)), dy, 0.0)
    below = op.Less(x, low) if low is not None else None
    above = op.Greater(x, high) if high is not None else None
    if below is not None and above is not None:
        below, above = op.And(below, op.Less(low, high)), op.Or(above, op.Less(high, low))
    return dx, *(None if outside is None else op.Where(outside, dy, 0.0) for outside in (below, above))


@gradient("CumSum")
def cum_sum_gradient(node: ForwardNode) -> ir.Value:
    return _running_sum_grad(node, node.grad(0))


def _running_sum_grad(node: ForwardNode, dy: ir.Value) -> ir.Value:
    exclusive, reverse = node.attribute("exclusive"), node.attribute("reverse")
    return node.op.CumSum(dy, node.input(1), exclusive=exclusive, reverse=1 - reverse)


@gradient("CumProd")
def cum_prod_gradient(node: ForwardNode) -> ir.Value:
    op, dy, x, axis = node.op, node.grad(0), node.input(0), node.input(1)
    exclusive, reverse = node.attribute("exclusive"), node.attribute("reverse")
    # All products from the first zero on are 0. The gradient of that zero consists of the products without
    # it, and the elements after it have none.
    zero = op.Equal(x, 0.0)
    first = op.And(zero, op.Equal(op.CumSum(op.CastLike(zero, x), axis, reverse=reverse), 1.0))
    without = op.Where(first, 1.0, x)
    products = op.CumProd(without, axis, exclusive=exclusive, reverse=reverse)
    at_first = _running_sum_grad(node, dy * products)
    before = _running_sum_grad(node, dy * node.output(0)) / without
    return op.Where(first, at_first, op.Where(zero, 0.0, before))


@gradient("Range")
def range_gradient(node: ForwardNode) -> Gradients:
    op, dy = node.op, node.grad(0)
    steps = op.CastLike(op.Range(0, op.Size(dy), 1), dy)
    return op.ReduceSum(dy, keepdims=0), None, op.ReduceSum(dy * steps, keepdims=0)
