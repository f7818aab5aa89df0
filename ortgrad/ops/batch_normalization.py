"""Normalizations of channels: batch, instance and group normalization, and mean-variance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient
from ortgrad.errors import NodeError
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.compiled import vectors
from ortgrad.operators.declaration import FLOATS, Empty, Operand, Shape, operator
from ortgrad.ops import _batch_kernels
from ortgrad.ops._kernels import blockwise
from ortgrad.ops._normalization import count_along, inverse_root, statistics, sum_of
from ortgrad.ops._types import cast_like, widened

_Arrays = tuple[np.ndarray | None, ...]


def _batch_shapes(_: Operand, x: Operand, scale: Operand, *__: Operand, **___: Any) -> list[Shape | None]:
    return [x.shape, scale.shape, scale.shape]


@operator(
    "BatchNormalizationGrad",
    inputs=["dY: T", "X: T", "scale: T1", "mean: T2", "variance: T2"],
    outputs=["X_grad?: T", "scale_grad?: T1", "bias_grad?: T1"],
    shapes=_batch_shapes,
    dims={"dY": "N *S", "X": "N *S", "scale": "C", "mean": "C", "variance": "C"},
    attributes={"epsilon": 1e-5},
    types={"T": FLOATS, "T1": FLOATS, "T2": FLOATS},
)
def batch_normalization_grad(
    dy: np.ndarray,
    x: np.ndarray,
    scale: np.ndarray,
    mean: np.ndarray,
    inv: np.ndarray,
    *,
    epsilon: float,
    wanted: tuple[bool, ...],
    empty: Empty,
) -> _Arrays:
    """dX = scale * inv * (dY - bias_grad / n - N * scale_grad / n), N = (X - mean) * inv

    `mean` and `inv` are the batch's mean and inverse standard deviation, which BatchNormInternal saves. In
    spite of its name, the input `variance` is the latter, which includes `epsilon` already.
    bias_grad = sum(dY) and scale_grad = sum(dY * N) are sums over the n values of a channel.
    """
    _check_channels(x, scale=scale, mean=mean, variance=inv)
    kind = x.dtype
    mean, inv = mean.astype(kind, copy=False), inv.astype(kind, copy=False)
    dx = empty(0, x.shape) if wanted[0] else np.empty_like(x)
    # The memory of dX holds the centred values first.
    centred, grads, values = (_channels(a) for a in (dx, dy, x))
    ones = np.ones(values.shape[2], kind)
    total, weighted = np.zeros((2, values.shape[1]), kind)

    def add_up(centred: np.ndarray, dy: np.ndarray, x: np.ndarray) -> None:
        np.subtract(x, mean[:, None], out=centred)
        total[:] += (dy @ ones).sum(axis=0)
        weighted[:] += ((dy * centred) @ ones).sum(axis=0)

    blockwise(add_up, centred, grads, values)
    weighted *= inv
    if wanted[0]:
        count = max(1, values.shape[0] * values.shape[2])
        factor = scale.astype(kind, copy=False) * inv
        slope = (weighted * inv / -count)[:, None]
        shift = (total / -count)[:, None]

        def grad(dx: np.ndarray, dy: np.ndarray) -> None:
            dx *= slope
            dx += shift
            dx += dy
            dx *= factor[:, None]

        blockwise(grad, centred, grads)
    per_channel = [weighted.astype(scale.dtype, copy=False), total.astype(scale.dtype, copy=False)]
    return tuple(value if want else None for value, want in zip([dx, *per_channel], wanted, strict=True))


@batch_normalization_grad.onnx
def batch_normalization_grad_body(
    op: Recorder,
    dy: ir.Value,
    x: ir.Value,
    scale: ir.Value,
    mean: ir.Value,
    inv: ir.Value,
    *,
    epsilon: float,
    wanted: tuple[bool, ...],
) -> list[ir.Value]:
    rank = op.rank(x)
    dy = _require_channels(op, dy, x, scale, rank)
    mean, inv = cast_like(op, mean, x), cast_like(op, inv, x)
    centred = x - _on_channels(op, mean, rank)
    total = _channel_sum(op, dy, rank)
    weighted = _channel_sum(op, dy * centred, rank) * inv
    # dX = factor * (dY - shift - centred * slope), with products per channel wherever possible.
    factor = cast_like(op, scale, x) * inv
    count = cast_like(op, count_along(op, x, _other_axes(rank)), x)
    slope, shift = weighted * inv / count, total / count
    pull = centred * _on_channels(op, slope, rank) + _on_channels(op, shift, rank)
    # The factor is applied last, so that an infinite one is not subtracted from itself.
    dx = (dy - pull) * _on_channels(op, factor, rank)
    return [dx, cast_like(op, weighted, scale), cast_like(op, total, scale)]


def _internal_shapes(x: Operand, scale: Operand, *_: Operand, **__: Any) -> list[Shape | None]:
    return [x.shape] + [scale.shape] * 4


@operator(
    "BatchNormInternal",
    inputs=["X: T", "scale: T1", "B: T1", "input_mean: T2", "input_var: T2"],
    outputs=["Y: T", "running_mean?: T2", "running_var?: T2", "saved_mean?: T2", "saved_inv_std?: T2"],
    shapes=_internal_shapes,
    dims={"X": "N *S", "scale": "C", "B": "C", "input_mean": "C", "input_var": "C"},
    attributes={"epsilon": 1e-5, "momentum": 0.9, "training_mode": 1},
    types={"T": FLOATS, "T1": FLOATS, "T2": FLOATS},
)
def batch_norm_internal(
    x: np.ndarray,
    scale: np.ndarray,
    b: np.ndarray,
    input_mean: np.ndarray,
    input_var: np.ndarray,
    *,
    epsilon: float,
    momentum: float,
    training_mode: int,
    wanted: tuple[bool, ...],
    empty: Empty,
) -> _Arrays:
    """Y = (X - mean) * inv * scale + B, with inv = 1 / sqrt(var + epsilon)

    With `training_mode`, mean and var (of the population) are the batch's; running_mean and
    running_var are momentum * input + (1 - momentum) * batch, and saved_mean and saved_inv_std are
    mean and inv. Without it, they are input_mean and input_var, and Y is the only output.
    """
    _check_internal(training_mode, wanted)
    _check_channels(x, scale=scale, B=b, input_mean=input_mean, input_var=input_var)
    # The memory of Y holds the centred values first.
    y = empty(0, x.shape)
    kind, values, centred = x.dtype, _channels(x), _channels(y)
    mean, var = (v.astype(kind, copy=False) for v in (input_mean, input_var))
    if training_mode:
        ones = np.ones(values.shape[2], kind)
        count = max(1, values.shape[0] * values.shape[2])
        mean = (values @ ones).sum(axis=0) / count
        squares = np.zeros(len(mean), kind)

        def add_up(centred: np.ndarray, x: np.ndarray) -> None:
            np.subtract(x, mean[:, None], out=centred)
            squares[:] += ((centred * centred) @ ones).sum(axis=0)

        blockwise(add_up, centred, values)
        var = squares / count
    else:
        np.subtract(values, mean[:, None], out=centred)
    inv = 1 / np.sqrt(var + kind.type(epsilon))
    factor, shift = scale.astype(kind, copy=False) * inv, b.astype(kind, copy=False)

    def apply(y: np.ndarray) -> None:
        y *= factor[:, None]
        y += shift[:, None]

    blockwise(apply, centred)
    rest = 1 - momentum
    per_channel = [input_mean * momentum + mean * rest, input_var * momentum + var * rest, mean, inv]
    outputs = [y, *(value.astype(input_mean.dtype, copy=False) for value in per_channel)]
    return tuple(value if want else None for value, want in zip(outputs, wanted, strict=True))


@batch_norm_internal.onnx
def batch_norm_internal_body(
    op: Recorder,
    x: ir.Value,
    scale: ir.Value,
    b: ir.Value,
    input_mean: ir.Value,
    input_var: ir.Value,
    *,
    epsilon: float,
    momentum: float,
    training_mode: int,
    wanted: tuple[bool, ...],
) -> list[ir.Value]:
    _check_internal(training_mode, wanted)
    rank = op.rank(x)
    x = _require_channels(op, x, x, scale, rank)
    mean, var = cast_like(op, input_mean, x), cast_like(op, input_var, x)
    if training_mode:
        mean = _channel_mean(op, x, rank)
    centred = x - _on_channels(op, mean, rank)
    if training_mode:
        var = _channel_mean(op, centred * centred, rank)
    inv = inverse_root(op, var + epsilon)
    factor = _on_channels(op, cast_like(op, scale, x) * inv, rank)
    y = centred * factor + _on_channels(op, cast_like(op, b, x), rank)
    running = [
        old * momentum + cast_like(op, new, old) * (1 - momentum)
        for old, new in ((input_mean, mean), (input_var, var))
    ]
    return [y, *running, cast_like(op, mean, input_mean), cast_like(op, inv, input_mean)]


batch_normalization_grad.compiled(
    views={"dy": 3, "x": 3, "scale": 1, "mean": 1, "inv": 1, "dx": 3, "d_scale": 1, "d_bias": 1},
    scratch={"sums": 3, "factors": 3},
    plan=_batch_kernels.grad_plan,
    first=_batch_kernels.grad_sums,
)(_batch_kernels.grad_apply)
batch_norm_internal.compiled(
    views={
        "x": 3,
        **vectors("scale b input_mean input_var"),
        "y": 3,
        **vectors("running_mean running_var saved_mean saved_inv"),
    },
    scratch={"sums": 3, "factors": 3},
    plan=_batch_kernels.internal_plan,
    first=_batch_kernels.internal_sums,
)(_batch_kernels.internal_apply)


def _check_internal(training_mode: int, wanted: tuple[bool, ...]) -> None:
    if not training_mode and any(wanted[1:]):
        raise NodeError("without training_mode, Y is the only output")


def _check_channels(x: np.ndarray, **vectors: np.ndarray) -> None:
    if x.ndim == 0:
        raise ValueError("X must have at least one dimension")
    channels = x.shape[1] if x.ndim > 1 else 1
    for name, vector in vectors.items():
        if vector.shape != (channels,):
            raise ValueError(
                f"{name} must have one value per channel of X {list(x.shape)}, [{channels}], "
                f"it has {list(vector.shape)}"
            )


def _require_channels(op: Recorder, value: ir.Value, x: ir.Value, scale: ir.Value, rank: int) -> ir.Value:
    """The value, provided that scale (and all that is as long) has one element per channel of X."""
    known = [
        None if v.shape is None else v.shape[i] for v, i in ((x, 1), (scale, 0)) if rank > 1 or v is scale
    ]
    if rank > 1 and all(isinstance(n, int) for n in known):
        if known[0] != known[1]:
            raise ValueError(f"scale must have one value per channel of X, [{known[0]}], it has [{known[1]}]")
        return value
    if not op.checked:
        return value
    channels = op.Shape(x, start=1, end=2) if rank > 1 else [1]
    return op.require(value, [op.Shape(scale) - channels], "X [N, C, ...], scale [C]")


def _channels(x: np.ndarray) -> np.ndarray:
    """[batch, channel, rest]; a vector has one channel."""
    channels = x.shape[1] if x.ndim > 1 else 1
    return x.reshape(x.shape[0], channels, math.prod(x.shape[2:]))


def _other_axes(rank: int) -> list[int]:
    """All axes except the axis of the channels."""
    return [0, *range(2, rank)]


def _on_channels(op: Recorder, vector: ir.Value, rank: int) -> ir.Value:
    """A vector of one element per channel, shaped to broadcast with [batch, channel, ...]."""
    return op.Unsqueeze(vector, list(range(1, rank - 1))) if rank > 2 else vector


def _channel_sum(op: Recorder, value: ir.Value, rank: int) -> ir.Value:
    return op.ReduceSum(value, _other_axes(rank), keepdims=int(rank == 1))


def _channel_mean(op: Recorder, value: ir.Value, rank: int) -> ir.Value:
    return op.ReduceMean(value, _other_axes(rank), keepdims=int(rank == 1))


class _View:
    """The input of a node as [batch, channel, ...]; with three dimensions if the rank is not known."""

    def __init__(self, node: ForwardNode) -> None:
        self._node = node
        self._known = node.input(0).shape
        self.rank = 3 if self._known is None else len(self._known)
        self.x = self.of(node.input(0))

    def of(self, value: ir.Value) -> ir.Value:
        """A value of the shape of the input."""
        op, value = self._node.op, widened(self._node.op, value)
        if self._known is not None:
            return value
        sizes = op.Shape(value)
        # A vector has one channel.
        parts = [op.ReduceProd(op.Slice(sizes, [i], [end]), keepdims=1) for i, end in ((1, 2), (2, 1 << 31))]
        return op.Reshape(value, op.Concat(op.Gather(sizes, [0]), *parts, axis=0), allowzero=1)

    def back(self, grad: ir.Value) -> ir.Value:
        """The gradient in the shape of the input."""
        op = self._node.op
        return (
            grad if self._known is not None else op.Reshape(grad, op.Shape(self._node.input(0)), allowzero=1)
        )


@gradient("BatchNormalization")
def batch_normalization_gradient(node: ForwardNode) -> Gradients:
    if node.attribute("training_mode"):
        return _training_gradients(node)
    op, view = node.op, _View(node)
    dy, x, rank = view.of(node.grad(0)), view.x, view.rank
    scale, mean, var = (cast_like(op, node.input(i), x) for i in (1, 3, 4))
    inv = inverse_root(op, var + node.attribute("epsilon"))
    factor = scale * inv
    # The gradient of X is the same as in training mode.
    _, d_scale, d_bias = op.BatchNormalizationGrad(dy, x, scale, mean, inv, _outputs=3)
    return (
        view.back(dy * _on_channels(op, factor, rank)),
        d_scale,
        d_bias,
        -(factor * d_bias),
        factor * inv * d_scale * -0.5,
    )


def _training_gradients(node: ForwardNode) -> Gradients:
    op, view, momentum = node.op, _View(node), node.attribute("momentum")
    x, rank = view.x, view.rank
    mean = _channel_mean(op, x, rank)
    centred = x - _on_channels(op, mean, rank)
    d_running_mean, d_running_var = node.optional_grad(1), node.optional_grad(2)
    gradients: list[ir.Value | None] = [None] * 5
    parts = []
    if node.optional_grad(0) is not None:
        var = _channel_mean(op, centred * centred, rank)
        inv = inverse_root(op, var + node.attribute("epsilon"))
        operands = view.of(node.grad(0)), x, node.input(1), mean, inv
        dx, gradients[1], gradients[2] = op.BatchNormalizationGrad(
            *operands, epsilon=node.attribute("epsilon"), _outputs=3
        )
        parts.append(dx)
    # The running statistics are momentum * input + (1 - momentum) * the batch's.
    share = op.number(1 - momentum, x) / count_along(op, x, _other_axes(rank))
    if d_running_var is not None:
        gradients[4] = d_running_var * momentum
        slope = cast_like(op, d_running_var, x) * 2.0 * share
        parts.append(centred * _on_channels(op, slope, rank))
    if d_running_mean is not None:
        gradients[3] = d_running_mean * momentum
        shift = _on_channels(op, cast_like(op, d_running_mean, x) * share, rank)
        parts.append(shift if parts else op.Expand(shift, op.shape_of(x)))
    gradients[0] = view.back(sum_of(op, parts))
    return gradients


class _Parts:
    """X as [1, batch * parts, rest], with the statistics of every part: to BatchNormalizationGrad, a channel.

    By default, there are as many parts as channels.
    """

    def __init__(self, node: ForwardNode, x: ir.Value, parts: int | None = None) -> None:
        op = self._op = node.op
        if x.shape is not None and x.shape.is_static():
            batch, channels, *rest = x.shape.numpy()
            count = channels if parts is None else parts
            size = channels * math.prod(rest) // max(1, count)
            self.counts: Any = op.constant(np.array([batch, count], np.int64))
            self._shape: Any = op.constant(np.array([1, batch * count, size], np.int64))
        else:
            sizes = op.shape_of(x)
            number = op.Slice(sizes, [1], [2]) if parts is None else op.constant(np.array([parts], np.int64))
            self.counts = op.Concat(op.Slice(sizes, [0], [1]), number, axis=0)
            length = op.Div(op.ReduceProd(op.Slice(sizes, [1], [1 << 31]), keepdims=1), op.Max(number, [1]))
            self._shape = op.Concat([1], op.ReduceProd(self.counts, keepdims=1), length, axis=0)
        self.x = self.of(x)

    def of(self, value: ir.Value) -> ir.Value:
        """A value of the shape of X."""
        return self._op.Reshape(value, self._shape, allowzero=1)

    def spread(self, vector: ir.Value) -> ir.Value:
        """A vector with an element per part of a sample, repeated for every sample."""
        return self._op.Reshape(self._op.Expand(vector, self.counts), [-1])

    def total(self, vector: ir.Value) -> ir.Value:
        """The sum over all samples."""
        return self._op.ReduceSum(self._op.Reshape(vector, self.counts, allowzero=1), [0], keepdims=0)

    def statistics(self, epsilon: float) -> list[ir.Value]:
        return [self._op.Reshape(v, [-1]) for v in statistics(self._op, self.x, [2], epsilon)]


@gradient("InstanceNormalization")
def instance_normalization_gradient(node: ForwardNode) -> Gradients:
    return _part_gradients(node, None)


def _part_gradients(node: ForwardNode, number: int | None) -> Gradients:
    """The gradients if scale and bias have a value for each part that is normalized."""
    op, view = node.op, _View(node)
    parts = _Parts(node, view.x, number)
    dx, d_scale, d_bias = op.BatchNormalizationGrad(
        parts.of(view.of(node.grad(0))),
        parts.x,
        parts.spread(cast_like(op, node.input(1), view.x)),
        *parts.statistics(node.attribute("epsilon")),
        _outputs=3,
    )
    dx = view.back(op.Reshape(dx, op.shape_of(view.x), allowzero=1))
    return dx, parts.total(d_scale), parts.total(d_bias)


@gradient("GroupNormalization")
def group_normalization_gradient(node: ForwardNode) -> Gradients:
    op, view, number = node.op, _View(node), node.attribute("num_groups")
    if op.opset < 21:
        # Before, scale and bias have a value per group, not per channel.
        return _part_gradients(node, number)
    dy, x = view.of(node.grad(0)), view.x
    groups, channels = _Parts(node, x, number), _Parts(node, x)
    mean, inv = groups.statistics(node.attribute("epsilon"))
    one = op.number(1.0, x)
    g = dy * _on_channels(op, cast_like(op, node.input(1), x), view.rank)
    ones = op.Expand(one, op.Shape(mean))
    dx = op.BatchNormalizationGrad(groups.of(g), groups.x, ones, mean, inv, _outputs=3)[0]
    # For scale and bias, each channel has the statistics of its group.
    per_group = op.Concat([1], op.Div(op.Shape(x, start=1, end=2), [number]), axis=0)
    mean, inv = (op.Reshape(op.Expand(op.Unsqueeze(v, [1]), per_group), [-1]) for v in (mean, inv))
    ones = op.Expand(one, op.Shape(mean))
    _, d_scale, d_bias = op.BatchNormalizationGrad(channels.of(dy), channels.x, ones, mean, inv, _outputs=3)
    dx = view.back(op.Reshape(dx, op.shape_of(x), allowzero=1))
    return dx, channels.total(d_scale), channels.total(d_bias)


def _standardized_grad(
    op: Recorder, g: ir.Value, normalized: ir.Value, inv: ir.Value, axes: list[int]
) -> ir.Value:
    """inv * (g - mean(g) - N * mean(g * N)), g the gradient of N = (X - mean) * inv"""
    pull = normalized * op.ReduceMean(g * normalized, axes)
    return inv * (g - (pull + op.ReduceMean(g, axes)))


@gradient("MeanVarianceNormalization")
def mean_variance_normalization_gradient(node: ForwardNode) -> ir.Value:
    op, axes = node.op, node.attribute("axes")
    dy, x = widened(op, node.grad(0)), widened(op, node.input(0))
    centred = x - op.ReduceMean(x, axes)
    deviation = op.Sqrt(op.ReduceMean(centred * centred, axes))
    # Y = centred / (deviation + 1e-9); where all values are equal, Y does not depend on the deviation.
    flat = op.Equal(deviation, 0.0)
    normalized = op.Where(flat, 0.0, centred / op.Where(flat, 1.0, deviation))
    return _standardized_grad(op, dy, normalized, op.Reciprocal(deviation + 1e-9), axes)
