"""Gradient rules of reductions."""

from __future__ import annotations

import math

from onnx import TensorProto

from ortgrad.autodiff.rules import ForwardNode, gradient
from ortgrad.graph.lazy import ir
from ortgrad.ops.index import product_of_others


def _kept(node: ForwardNode, value: ir.Value) -> ir.Value:
    """A value of the shape of the output, reshaped so that it broadcasts with the input."""
    if node.attribute("keepdims") or node.optional(1) is None:
        # Without axes, the reduction is over all of them (or none): a scalar broadcasts as it is.
        return value
    axes = node.constant(1)
    if axes is not None and not axes.size:
        return value
    return node.op.Unsqueeze(value, node.input(1))


def _again(node: ForwardNode, op_type: str, value: ir.Value) -> ir.Value:
    """Another reduction over the same axes, which keep length 1."""
    reduce = getattr(node.op, op_type)
    return reduce(
        value, node.optional(1), keepdims=1, noop_with_empty_axes=node.attribute("noop_with_empty_axes")
    )


def _expanded(node: ForwardNode, value: ir.Value) -> ir.Value:
    return node.op.Expand(value, node.op.shape_of(node.input(0)))


@gradient("ReduceSum")
def reduce_sum_gradient(node: ForwardNode) -> ir.Value:
    return _expanded(node, _kept(node, node.grad(0)))


@gradient("ReduceMean")
def reduce_mean_gradient(node: ForwardNode) -> ir.Value:
    op, x, y = node.op, node.input(0), node.output(0)
    if x.shape is not None and y.shape is not None and x.shape.is_static() and y.shape.is_static():
        share = op.number(math.prod(y.shape.numpy()) / max(math.prod(x.shape.numpy()), 1), x)
    else:
        # In double, because integers cannot be divided by 0, and half precision ends at 65504.
        size_y, size_x = (op.Cast(op.Size(value), to=TensorProto.DOUBLE) for value in (y, x))
        share = op.CastLike(size_y / size_x, x)
    return _expanded(node, _kept(node, node.grad(0) * share))


@gradient("ReduceMax", "ReduceMin")
def reduce_max_gradient(node: ForwardNode) -> ir.Value:
    # Elements that equal the extreme share the gradient equally, as in PyTorch's amax and amin.
    op, x = node.op, node.input(0)
    reached = op.Equal(x, _kept(node, node.output(0)))
    count = _again(node, "ReduceSum", op.CastLike(reached, x))
    return op.Where(reached, _kept(node, node.grad(0)) / count, 0.0)


@gradient("ReduceProd")
def reduce_prod_gradient(node: ForwardNode) -> ir.Value:
    others = product_of_others(
        node.op,
        node.input(0),
        lambda factors: _again(node, "ReduceProd", factors),
        lambda terms: _again(node, "ReduceSum", terms),
    )
    return _kept(node, node.grad(0)) * others


@gradient("ReduceL1")
def reduce_l1_gradient(node: ForwardNode) -> ir.Value:
    return _kept(node, node.grad(0)) * node.op.Sign(node.input(0))


@gradient("ReduceL2")
def reduce_l2_gradient(node: ForwardNode) -> ir.Value:
    # 0 at the origin, as in PyTorch; the inner Where keeps NaN out of second derivatives.
    op, dy, y = node.op, node.grad(0), node.output(0)
    origin = op.Equal(y, 0.0)
    scale = op.Where(origin, 0.0, dy / op.Where(origin, 1.0, y))
    return node.input(0) * _kept(node, scale)


@gradient("ReduceSumSquare")
def reduce_sum_square_gradient(node: ForwardNode) -> ir.Value:
    return node.input(0) * _kept(node, node.grad(0) * 2.0)


@gradient("ReduceLogSum")
def reduce_log_sum_gradient(node: ForwardNode) -> ir.Value:
    total = _again(node, "ReduceSum", node.input(0))
    return _expanded(node, _kept(node, node.grad(0)) / total)


@gradient("ReduceLogSumExp")
def reduce_log_sum_exp_gradient(node: ForwardNode) -> ir.Value:
    op, y = node.op, node.output(0)
    # Where everything is -inf, so is Y, and the difference would be NaN.
    y = op.Where(op.Equal(y, -math.inf), 0.0, y)
    share = op.Exp(node.input(0) - _kept(node, y))
    return _kept(node, node.grad(0)) * share
