"""Gradient rules of element-wise mathematics: arithmetic, functions, selection, running sums."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient, no_gradient

if TYPE_CHECKING:
    import onnx_ir as ir

# Piecewise constant, or of another tensor's shape only.
no_gradient("Floor", "Ceil", "Round", "Sign", "Hardmax")
no_gradient("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsNaN", "IsInf")
no_gradient("Not", "And", "Or", "Xor", "BitShift", "BitwiseNot", "BitwiseAnd", "BitwiseOr", "BitwiseXor")
no_gradient("Shape", "Size", "NonZero", "ArgMax", "ArgMin", "NonMaxSuppression", "QuantizeLinear")
no_gradient("Constant", "ConstantOfShape", "EyeLike", "Bernoulli", "Multinomial")
no_gradient("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")


@gradient("Identity")
def identity_gradient(node: ForwardNode) -> Gradients:
    return (node.grad(0),)


@gradient("Cast", "CastLike")
def cast_gradient(node: ForwardNode) -> Gradients:
    return (_in_type_of(node, node.grad(0), node.input(0)),)


@gradient("Add", broadcasts=True)
def add_gradient(node: ForwardNode) -> Gradients:
    return node.grad(0), node.grad(0)


@gradient("Sub", broadcasts=True)
def sub_gradient(node: ForwardNode) -> Gradients:
    return node.grad(0), node.op.Neg(node.grad(0))


@gradient("Mul", broadcasts=True)
def mul_gradient(node: ForwardNode) -> Gradients:
    op, dy = node.op, node.grad(0)
    return op.Mul(dy, node.input(1)), op.Mul(dy, node.input(0))


@gradient("Div", broadcasts=True)
def div_gradient(node: ForwardNode) -> Gradients:
    da = node.op.Div(node.grad(0), node.input(1))
    return da, node.op.Neg(node.op.Mul(da, node.output(0)))


@gradient("Mod", broadcasts=True)
def mod_gradient(node: ForwardNode) -> Gradients:
    op, dy = node.op, node.grad(0)
    quotient = op.Round(op.Div(op.Sub(node.input(0), node.output(0)), node.input(1)))
    return dy, op.Neg(op.Mul(dy, quotient))


@gradient("Pow", broadcasts=True)
def pow_gradient(node: ForwardNode) -> Gradients:
    op, dy, x = node.op, node.grad(0), node.input(0)
    known = node.constant(1)
    if known is not None and known.size == 1 and not node.wants(1):
        return (_power_grad(node, float(known.reshape(()))),)
    e = _in_type_of(node, node.input(1), x)
    zero = op.Equal(e, 0.0)
    # x**0 is 1 even at 0, where x**-1 is not finite.
    dx = op.Mul(dy, op.Mul(e, op.Pow(x, op.Where(zero, e, op.Sub(e, 1.0)))))
    flat = op.And(op.Equal(x, 0.0), op.GreaterOrEqual(e, 0.0))
    de = op.Mul(dy, op.Mul(node.output(0), op.Log(op.Where(flat, 1.0, x))))
    return dx, de


def _power_grad(node: ForwardNode, e: float) -> ir.Value | None:
    op, dy, x = node.op, node.grad(0), node.input(0)
    if e == 0:
        return None
    if e == 1:
        return dy
    return op.Mul(dy, op.Mul(x if e == 2 else op.Pow(x, op.number(e - 1, x)), e))


def _in_type_of(node: ForwardNode, value: ir.Value, like: ir.Value) -> ir.Value:
    if value.dtype is not None and value.dtype == like.dtype:
        return value
    return node.op.CastLike(value, like)


@gradient("Sum", broadcasts=True)
def sum_gradient(node: ForwardNode) -> Gradients:
    return [node.grad(0)] * len(node.inputs)


@gradient("Mean", broadcasts=True)
def mean_gradient(node: ForwardNode) -> Gradients:
    count = len(node.inputs)
    share = node.grad(0) if count == 1 else node.op.Mul(node.grad(0), 1 / count)
    return [share] * count


@gradient("Max", "Min", broadcasts=True)
def max_gradient(node: ForwardNode) -> Gradients:
    op, dy = node.op, node.grad(0)
    if len(node.inputs) == 1:
        return (dy,)
    if len(node.inputs) == 2:
        a, b = node.input(0), node.input(1)
        wins = op.Greater(a, b) if node.op_type == "Max" else op.Less(a, b)
        da = op.Where(op.Equal(a, b), op.Mul(dy, 0.5), op.Where(wins, dy, 0.0))
        return da, op.Sub(dy, da)
    # Those that are equal to the result share its gradient.
    chosen = [op.Equal(node.input(i), node.output(0)) for i in range(len(node.inputs))]
    share = op.Div(dy, op.Sum(*(op.CastLike(c, dy) for c in chosen)))
    return [op.Where(c, share, 0.0) for c in chosen]


@gradient("Where", broadcasts=True)
def where_gradient(node: ForwardNode) -> Gradients:
    op, dy, condition = node.op, node.grad(0), node.input(0)
    return None, op.Where(condition, dy, 0.0), op.Where(condition, 0.0, dy)


@gradient("Clip", broadcasts=True)
def clip_gradient(node: ForwardNode) -> Gradients:
    op, dy, x = node.op, node.grad(0), node.input(0)
    low, high = node.optional(1), node.optional(2)
    if low is None and high is None:
        return (dy,)
    # What is within the bounds, or on them, comes out unchanged.
    dx = op.Where(op.Equal(x, node.output(0)), dy, 0.0)
    below = op.Less(x, low) if low is not None else None
    above = op.Greater(x, high) if high is not None else None
    if below is not None and above is not None:
        below, above = op.And(below, op.Less(low, high)), op.Or(above, op.Less(high, low))
    return dx, *(None if outside is None else op.Where(outside, dy, 0.0) for outside in (below, above))


@gradient("Neg")
def neg_gradient(node: ForwardNode) -> Gradients:
    return (node.op.Neg(node.grad(0)),)


@gradient("Abs")
def abs_gradient(node: ForwardNode) -> Gradients:
    return (node.op.Mul(node.grad(0), node.op.Sign(node.input(0))),)


@gradient("Sqrt")
def sqrt_gradient(node: ForwardNode) -> Gradients:
    return (node.op.Div(node.op.Mul(node.grad(0), 0.5), node.output(0)),)


@gradient("Reciprocal")
def reciprocal_gradient(node: ForwardNode) -> Gradients:
    op, y = node.op, node.output(0)
    return (op.Neg(op.Mul(node.grad(0), op.Mul(y, y))),)


@gradient("Exp")
def exp_gradient(node: ForwardNode) -> Gradients:
    return (node.op.Mul(node.grad(0), node.output(0)),)


@gradient("Log")
def log_gradient(node: ForwardNode) -> Gradients:
    return (node.op.Div(node.grad(0), node.input(0)),)


@gradient("Erf")
def erf_gradient(node: ForwardNode) -> Gradients:
    op, x = node.op, node.input(0)
    density = op.Mul(op.Exp(op.Neg(op.Mul(x, x))), 2 / math.sqrt(math.pi))
    return (op.Mul(node.grad(0), density),)


@gradient("Sin")
def sin_gradient(node: ForwardNode) -> Gradients:
    return (node.op.Mul(node.grad(0), node.op.Cos(node.input(0))),)


@gradient("Cos")
def cos_gradient(node: ForwardNode) -> Gradients:
    return (node.op.Neg(node.op.Mul(node.grad(0), node.op.Sin(node.input(0)))),)


@gradient("Tan")
def tan_gradient(node: ForwardNode) -> Gradients:
    op, y = node.op, node.output(0)
    return (op.Mul(node.grad(0), op.Add(op.Mul(y, y), 1.0)),)


@gradient("Asin")
def asin_gradient(node: ForwardNode) -> Gradients:
    op, x = node.op, node.input(0)
    return (op.Div(node.grad(0), op.Sqrt(op.Sub(1.0, op.Mul(x, x)))),)


@gradient("Acos")
def acos_gradient(node: ForwardNode) -> Gradients:
    op, x = node.op, node.input(0)
    return (op.Neg(op.Div(node.grad(0), op.Sqrt(op.Sub(1.0, op.Mul(x, x))))),)


@gradient("Atan")
def atan_gradient(node: ForwardNode) -> Gradients:
    op, x = node.op, node.input(0)
    return (op.Div(node.grad(0), op.Add(op.Mul(x, x), 1.0)),)


@gradient("Sinh")
def sinh_gradient(node: ForwardNode) -> Gradients:
    return (node.op.Mul(node.grad(0), node.op.Cosh(node.input(0))),)


@gradient("Cosh")
def cosh_gradient(node: ForwardNode) -> Gradients:
    return (node.op.Mul(node.grad(0), node.op.Sinh(node.input(0))),)


@gradient("Asinh")
def asinh_gradient(node: ForwardNode) -> Gradients:
    op, x = node.op, node.input(0)
    return (op.Div(node.grad(0), op.Sqrt(op.Add(op.Mul(x, x), 1.0))),)


@gradient("Acosh")
def acosh_gradient(node: ForwardNode) -> Gradients:
    op, x = node.op, node.input(0)
    return (op.Div(node.grad(0), op.Sqrt(op.Sub(op.Mul(x, x), 1.0))),)


@gradient("Atanh")
def atanh_gradient(node: ForwardNode) -> Gradients:
    op, x = node.op, node.input(0)
    return (op.Div(node.grad(0), op.Sub(1.0, op.Mul(x, x))),)


@gradient("CumSum")
def cum_sum_gradient(node: ForwardNode) -> Gradients:
    return (_running_sum_grad(node, node.grad(0)),)


def _running_sum_grad(node: ForwardNode, dy: ir.Value) -> ir.Value:
    exclusive, reverse = node.attribute("exclusive"), node.attribute("reverse")
    return node.op.CumSum(dy, node.input(1), exclusive=exclusive, reverse=1 - reverse)


@gradient("CumProd")
def cum_prod_gradient(node: ForwardNode) -> Gradients:
    op, dy, x, axis = node.op, node.grad(0), node.input(0), node.input(1)
    exclusive, reverse = node.attribute("exclusive"), node.attribute("reverse")
    # The first zero ends all products that pass it, so its own gradient is made of the products without it,
    # and what comes after it has none.
    zero = op.Equal(x, 0.0)
    first = op.And(zero, op.Equal(op.CumSum(op.CastLike(zero, x), axis, reverse=reverse), 1.0))
    without = op.Where(first, 1.0, x)
    products = op.CumProd(without, axis, exclusive=exclusive, reverse=reverse)
    at_first = _running_sum_grad(node, op.Mul(dy, products))
    before = op.Div(_running_sum_grad(node, op.Mul(dy, node.output(0))), without)
    return (op.Where(first, at_first, op.Where(zero, 0.0, before)),)


@gradient("Range")
def range_gradient(node: ForwardNode) -> Gradients:
    op, dy = node.op, node.grad(0)
    steps = op.CastLike(op.Range(0, op.Size(dy), 1), dy)
    return op.ReduceSum(dy, keepdims=0), None, op.ReduceSum(op.Mul(dy, steps), keepdims=0)


@gradient("DequantizeLinear")
def dequantize_linear_gradient(node: ForwardNode) -> Gradients:
    """dScale = sum(dY * (X - zero_point)), the sum over what shares a scale"""
    op, dy, shape = node.op, node.grad(0), node.input(1).shape
    if shape is None or len(shape) > 1 or not shape.is_static():
        raise node.unsupported("a gradient towards its scale needs one scale, or a known number of them")
    single = shape.numpy() in ((), (1,))
    axis = 0 if single else node.attribute("axis") % node.rank()
    x, zero_point = op.CastLike(node.input(0), dy), node.optional(2)
    if zero_point is not None:
        trailing = 0 if single else node.rank() - axis - 1
        zero_point = op.CastLike(zero_point, dy)
        x = op.Sub(x, op.Unsqueeze(zero_point, list(range(1, trailing + 1))) if trailing else zero_point)
    weighted = op.Mul(dy, x)
    if single:
        return None, op.Reshape(op.ReduceSum(weighted, keepdims=0), list(shape.numpy()))
    others = [i for i in range(node.rank()) if i != axis]
    return None, op.ReduceSum(weighted, others, keepdims=0, noop_with_empty_axes=1)
