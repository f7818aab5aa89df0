"""Normalizations: layer, RMS, batch, instance and group normalization, Lp and mean-variance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ortgrad.errors import NodeError
from ortgrad.gradient import Node, Slots, gradient
from ortgrad.kernels import blockwise, require_same_shape
from ortgrad.registry import FLOATS, Operand, Shape, operator

if TYPE_CHECKING:
    import onnx_ir as ir

    from ortgrad.bodies import Ops

_FLOAT, _DOUBLE = 1, 11  # TensorProto's numbers
_LAYER_TYPES = {"T": FLOATS, "U": ("float32", "float64"), "V": FLOATS}
_Arrays = tuple[np.ndarray | None, ...]


def _layer_shapes(outputs: int) -> Callable[..., Sequence[Shape | None]]:
    """X_grad is like X, the others are like scale."""

    def shapes(_: Operand, x: Operand, scale: Operand, *__: Operand, axis: int) -> Sequence[Shape | None]:
        return [x.shape] + [scale.shape] * (outputs - 1)

    return shapes


@operator(
    "LayerNormalizationGrad",
    inputs=["Y_grad: V", "X: T", "scale: V", "mean: U", "inv_std_dev: U"],
    outputs=["X_grad?: T", "scale_grad?: V", "bias_grad?: V"],
    shapes=_layer_shapes(3),
    attributes={"axis": -1},
    types=_LAYER_TYPES,
)
def layer_normalization_grad(
    dy: np.ndarray,
    x: np.ndarray,
    scale: np.ndarray,
    mean: np.ndarray,
    inv: np.ndarray,
    *,
    axis: int,
    wanted: tuple[bool, ...],
) -> _Arrays:
    """dX = inv_std_dev * (g - mean(g) - N * mean(g * N)), g = dY * scale, N = (X - mean) * inv_std_dev

    The means are over all axes from `axis` on; scale_grad = sum(dY * N) and bias_grad = sum(dY) are
    sums over the axes before it.
    """
    shifts = _per_row("mean", mean, x, axis)
    scales = _per_row("inv_std_dev", inv, x, axis)

    def normalize(x: np.ndarray, shifts: np.ndarray, scales: np.ndarray) -> None:
        x -= shifts
        x *= scales

    blockwise(normalize, _rows(x, axis), shifts, scales)
    return _layer_grad(dy, x, scale, inv, axis, wanted, centre=True)


@layer_normalization_grad.onnx
def _(
    op: Ops,
    dy: ir.Value,
    x: ir.Value,
    scale: ir.Value,
    mean: ir.Value,
    inv: ir.Value,
    *,
    axis: int,
    wanted: tuple[bool, ...],
) -> list[ir.Value | None]:
    centred = op.Sub(_flat(op, x, axis, inv), _flat(op, mean, axis, inv))
    normalized = op.Mul(centred, op.Flatten(inv, axis=axis))
    return _layer_body(op, dy, x, scale, normalized, inv, axis, centre=True)


@operator(
    "SimplifiedLayerNormalizationGrad",
    inputs=["Y_grad: V", "X: T", "scale: V", "inv_std_var: U"],
    outputs=["X_grad?: T", "scale_grad?: V"],
    shapes=_layer_shapes(2),
    attributes={"axis": -1},
    types=_LAYER_TYPES,
)
def simplified_layer_normalization_grad(
    dy: np.ndarray, x: np.ndarray, scale: np.ndarray, inv: np.ndarray, *, axis: int, wanted: tuple[bool, ...]
) -> _Arrays:
    """dX = inv_std_var * (g - N * mean(g * N)), g = dY * scale, N = X * inv_std_var

    The mean is over all axes from `axis` on; scale_grad = sum(dY * N) is a sum over the axes before it.
    """
    rows = _rows(x, axis)
    rows *= _per_row("inv_std_var", inv, x, axis)
    return _layer_grad(dy, x, scale, inv, axis, wanted, centre=False)


@simplified_layer_normalization_grad.onnx
def _(
    op: Ops,
    dy: ir.Value,
    x: ir.Value,
    scale: ir.Value,
    inv: ir.Value,
    *,
    axis: int,
    wanted: tuple[bool, ...],
) -> list[ir.Value | None]:
    normalized = op.Mul(_flat(op, x, axis, inv), op.Flatten(inv, axis=axis))
    return _layer_body(op, dy, x, scale, normalized, inv, axis, centre=False)[:2]


@operator(
    "InvertibleLayerNormalizationGrad",
    inputs=["Y_grad: V", "Y: V", "scale: V", "bias: V", "inv_std_var: U"],
    outputs=["X_grad?: V", "scale_grad?: V", "bias_grad?: V"],
    shapes=_layer_shapes(3),
    attributes={"axis": -1},
    types={"V": FLOATS, "U": ("float32", "float64")},
)
def invertible_layer_normalization_grad(
    dy: np.ndarray,
    y: np.ndarray,
    scale: np.ndarray,
    bias: np.ndarray,
    inv: np.ndarray,
    *,
    axis: int,
    wanted: tuple[bool, ...],
) -> _Arrays:
    """LayerNormalizationGrad with N = (Y - bias) / scale, so that X need not be kept"""
    if not scale.all():
        raise ValueError("scale holds a 0, so Y does not tell what X was")
    require_same_shape(scale=scale, bias=bias)
    rows = _rows(y, axis)
    if rows.shape[1] == scale.size:
        rows -= bias.reshape(-1)
        rows /= scale.reshape(-1)
    return _layer_grad(dy, y, scale, inv, axis, wanted, centre=True)


@invertible_layer_normalization_grad.onnx
def _(
    op: Ops,
    dy: ir.Value,
    y: ir.Value,
    scale: ir.Value,
    bias: ir.Value,
    inv: ir.Value,
    *,
    axis: int,
    wanted: tuple[bool, ...],
) -> list[ir.Value | None]:
    scaled = op.Sub(_flat(op, y, axis, inv), _flat(op, bias, 0, inv))
    normalized = op.Div(scaled, _flat(op, scale, 0, inv))
    return _layer_body(op, dy, y, scale, normalized, inv, axis, centre=True)


def _rows(array: np.ndarray, axis: int) -> np.ndarray:
    """As a matrix: what is normalized together is a row."""
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(f"axis {axis} is out of range for a tensor with {array.ndim} dimensions")
    shape = array.shape
    axis %= array.ndim
    return array.reshape(math.prod(shape[:axis]), math.prod(shape[axis:]))


def _per_row(name: str, statistic: np.ndarray, x: np.ndarray, axis: int) -> np.ndarray:
    count = len(_rows(x, axis))
    if statistic.size != count:
        raise ValueError(
            f"{name} must have one value for each of the {count} rows of X {list(x.shape)} "
            f"(axis {axis}), it has {list(statistic.shape)}"
        )
    return statistic.astype(x.dtype, copy=False).reshape(count, 1)


def _layer_grad(
    dy: np.ndarray,
    normalized: np.ndarray,
    scale: np.ndarray,
    inv: np.ndarray,
    axis: int,
    wanted: tuple[bool, ...],
    *,
    centre: bool,
) -> _Arrays:
    """The gradients, from X normalized; overwrites dY and that."""
    require_same_shape(Y_grad=dy, X=normalized)
    if scale.shape != normalized.shape[axis:]:
        raise ValueError(
            f"scale must have the shape of X from axis {axis} on, {list(normalized.shape[axis:])}, "
            f"it has {list(scale.shape)}"
        )
    want_x, want_scale, want_bias = (*wanted, False)[:3]
    weights = scale.astype(normalized.dtype, copy=False).reshape(-1)
    share = weights / max(1, weights.size)
    sums = np.zeros((2, weights.size), dy.dtype)

    def grad(dy: np.ndarray, n: np.ndarray, inv: np.ndarray) -> None:
        # Sums over rows and columns as products, which go through BLAS.
        ones = np.ones(len(dy), dy.dtype)
        if want_bias:
            sums[1] += ones @ dy
        product = dy * n
        if want_scale:
            sums[0] += ones @ product
        if want_x:
            n *= (product @ share)[:, None]
            if centre:
                n += (dy @ share)[:, None]
            dy *= weights
            dy -= n
            dy *= inv

    blockwise(grad, _rows(dy, axis), _rows(normalized, axis), _per_row("inv_std_dev", inv, normalized, axis))
    dx = dy.astype(normalized.dtype, copy=False) if want_x else None
    per_column = [
        total.reshape(scale.shape) if want else None
        for total, want in zip(sums, (want_scale, want_bias), strict=True)
    ]
    return (dx, *per_column)[: len(wanted)]


def _flat(op: Ops, value: ir.Value, axis: int, like: ir.Value) -> ir.Value:
    return op.Flatten(_cast(op, value, like), axis=axis)


def _cast(op: Ops, value: ir.Value, like: ir.Value) -> ir.Value:
    """The value in the element type of `like`."""
    same = value.dtype is not None and value.dtype == like.dtype
    return value if same else op.CastLike(value, like)


def _layer_body(
    op: Ops,
    dy: ir.Value,
    x: ir.Value,
    scale: ir.Value,
    normalized: ir.Value,
    inv: ir.Value,
    axis: int,
    *,
    centre: bool,
) -> list[ir.Value | None]:
    """The gradients, from X normalized as a matrix; all in the element type of inv_std_dev."""
    rows, weights = _flat(op, dy, axis, inv), _flat(op, scale, 0, inv)
    product = op.Mul(rows, normalized)
    g = op.Mul(rows, weights)
    pull = op.Mul(normalized, op.ReduceMean(op.Mul(product, weights), [1]))
    if centre:
        pull = op.Add(pull, op.ReduceMean(g, [1]))
    dx = op.Mul(op.Sub(g, pull), op.Flatten(inv, axis=axis))
    shape = op.shape(scale)
    return [
        _cast(op, op.Reshape(dx, op.shape(x), allowzero=1), x),
        _cast(op, op.Reshape(op.ReduceSum(product, [0]), shape), scale),
        _cast(op, op.Reshape(op.ReduceSum(rows, [0]), shape), scale),
    ]


def _batch_shapes(_: Operand, x: Operand, scale: Operand, *__: Operand, **___: Any) -> list[Shape | None]:
    return [x.shape, scale.shape, scale.shape]


@operator(
    "BatchNormalizationGrad",
    inputs=["dY: T", "X: T", "scale: T1", "mean: T2", "variance: T2"],
    outputs=["X_grad?: T", "scale_grad?: T1", "bias_grad?: T1"],
    shapes=_batch_shapes,
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
) -> _Arrays:
    """dX = scale * inv * (dY - bias_grad / n - N * scale_grad / n), N = (X - mean) * inv

    `mean` and `inv` are the batch's mean and inverse standard deviation, which BatchNormInternal saves;
    the latter comes in as the input `variance`, whatever its name says, and `epsilon` is in it already.
    bias_grad = sum(dY) and scale_grad = sum(dY * N) are sums over the n values of a channel.
    """
    require_same_shape(dY=dy, X=x)
    _check_channels(x, scale=scale, mean=mean, variance=inv)
    kind = x.dtype
    mean, inv = mean.astype(kind, copy=False), inv.astype(kind, copy=False)
    grads, values = _channels(dy), _channels(x)
    ones = np.ones(values.shape[2], kind)
    total, weighted = np.zeros((2, values.shape[1]), kind)

    def add_up(dy: np.ndarray, x: np.ndarray) -> None:
        x -= mean[:, None]
        total[:] += (dy @ ones).sum(axis=0)
        weighted[:] += ((dy * x) @ ones).sum(axis=0)

    blockwise(add_up, grads, values)
    weighted *= inv
    if wanted[0]:
        count = max(1, values.shape[0] * values.shape[2])
        factor = scale.astype(kind, copy=False) * inv
        slope = (weighted * inv / -count)[:, None]
        shift = (total / -count)[:, None]

        def grad(dy: np.ndarray, x: np.ndarray) -> None:
            x *= slope
            x += shift
            dy += x
            dy *= factor[:, None]

        blockwise(grad, grads, values)
    per_channel = [weighted.astype(scale.dtype, copy=False), total.astype(scale.dtype, copy=False)]
    return tuple(value if want else None for value, want in zip([dy, *per_channel], wanted, strict=True))


@batch_normalization_grad.onnx
def _(
    op: Ops,
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
    mean, inv = _cast(op, mean, x), _cast(op, inv, x)
    centred = op.Sub(x, _on_channels(op, mean, rank))
    total = _channel_sum(op, dy, rank)
    weighted = op.Mul(_channel_sum(op, op.Mul(dy, centred), rank), inv)
    # dX = scale * inv * (dY - total / n - centred * slope): the products of channels are cheap.
    factor = op.Mul(_cast(op, scale, x), inv)
    per_value = op.Div(factor, _cast(op, _count(op, x, _other_axes(rank)), x))
    slope, shift = op.Mul(op.Mul(weighted, inv), per_value), op.Mul(total, per_value)
    pull = op.Add(op.Mul(centred, _on_channels(op, slope, rank)), _on_channels(op, shift, rank))
    dx = op.Sub(op.Mul(dy, _on_channels(op, factor, rank)), pull)
    return [dx, _cast(op, weighted, scale), _cast(op, total, scale)]


def _internal_shapes(x: Operand, scale: Operand, *_: Operand, **__: Any) -> list[Shape | None]:
    return [x.shape] + [scale.shape] * 4


@operator(
    "BatchNormInternal",
    inputs=["X: T", "scale: T1", "B: T1", "input_mean: T2", "input_var: T2"],
    outputs=["Y: T", "running_mean?: T2", "running_var?: T2", "saved_mean?: T2", "saved_inv_std?: T2"],
    shapes=_internal_shapes,
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
) -> _Arrays:
    """Y = (X - mean) * inv * scale + B, with inv = 1 / sqrt(var + epsilon)

    With `training_mode`, mean and var (of the population) are the batch's; running_mean and
    running_var are momentum * input + (1 - momentum) * batch, and saved_mean and saved_inv_std are
    mean and inv. Without it, they are input_mean and input_var, and Y is the only output.
    """
    _check_internal(training_mode, wanted)
    _check_channels(x, scale=scale, B=b, input_mean=input_mean, input_var=input_var)
    kind, values = x.dtype, _channels(x)
    mean, var = (v.astype(kind, copy=False) for v in (input_mean, input_var))
    if training_mode:
        ones = np.ones(values.shape[2], kind)
        count = max(1, values.shape[0] * values.shape[2])
        mean = (values @ ones).sum(axis=0) / count
        values -= mean[:, None]
        squares = np.zeros(len(mean), kind)

        def add_up(x: np.ndarray) -> None:
            squares[:] += ((x * x) @ ones).sum(axis=0)

        blockwise(add_up, values)
        var = squares / count
    else:
        values -= mean[:, None]
    inv = 1 / np.sqrt(var + kind.type(epsilon))
    factor, shift = scale.astype(kind, copy=False) * inv, b.astype(kind, copy=False)

    def apply(x: np.ndarray) -> None:
        x *= factor[:, None]
        x += shift[:, None]

    blockwise(apply, values)
    rest = 1 - momentum
    per_channel = [input_mean * momentum + mean * rest, input_var * momentum + var * rest, mean, inv]
    outputs = [x, *(value.astype(input_mean.dtype, copy=False) for value in per_channel)]
    return tuple(value if want else None for value, want in zip(outputs, wanted, strict=True))


@batch_norm_internal.onnx
def _(
    op: Ops,
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
    mean, var = _cast(op, input_mean, x), _cast(op, input_var, x)
    if training_mode:
        mean = _channel_mean(op, x, rank)
    centred = op.Sub(x, _on_channels(op, mean, rank))
    if training_mode:
        var = _channel_mean(op, op.Mul(centred, centred), rank)
    inv = op.Reciprocal(op.Sqrt(op.Add(var, epsilon)))
    factor = _on_channels(op, op.Mul(_cast(op, scale, x), inv), rank)
    y = op.Add(op.Mul(centred, factor), _on_channels(op, _cast(op, b, x), rank))
    running = [
        op.Add(op.Mul(old, momentum), op.Mul(_cast(op, new, old), 1 - momentum))
        for old, new in ((input_mean, mean), (input_var, var))
    ]
    return [y, *running, _cast(op, mean, input_mean), _cast(op, inv, input_mean)]


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


def _channels(x: np.ndarray) -> np.ndarray:
    """[batch, channel, rest]; a vector has one channel."""
    channels = x.shape[1] if x.ndim > 1 else 1
    return x.reshape(x.shape[0], channels, math.prod(x.shape[2:]))


def _other_axes(rank: int) -> list[int]:
    """All but that of the channels."""
    return [0, *range(2, rank)]


def _on_channels(op: Ops, vector: ir.Value, rank: int) -> ir.Value:
    """A value per channel so that it broadcasts with [batch, channel, ...]."""
    return op.Unsqueeze(vector, list(range(1, rank - 1))) if rank > 2 else vector


def _channel_sum(op: Ops, value: ir.Value, rank: int) -> ir.Value:
    return op.ReduceSum(value, _other_axes(rank), keepdims=int(rank == 1))


def _channel_mean(op: Ops, value: ir.Value, rank: int) -> ir.Value:
    return op.ReduceMean(value, _other_axes(rank), keepdims=int(rank == 1))


def _count(op: Ops, x: ir.Value, axes: Sequence[int]) -> ir.Value:
    """How many elements of X are along the axes, in its element type (half precision: float)."""
    wide = x.dtype is not None and x.dtype.itemsize == 8
    dims = None if x.shape is None else [x.shape[a] for a in axes]
    if dims is not None and all(isinstance(d, int) for d in dims):
        count = math.prod(d for d in dims if isinstance(d, int))
        return op.constant(np.array(count, np.float64 if wide else np.float32))
    lengths = op.Gather(op.Shape(x), list(axes))
    return op.Cast(op.ReduceProd(lengths, keepdims=0), to=_DOUBLE if wide else _FLOAT)


def _wide(op: Ops, value: ir.Value) -> ir.Value:
    """Half precision as float, for sums and squares."""
    half = value.dtype is not None and value.dtype.itemsize == 2
    return op.Cast(value, to=_FLOAT) if half else value


def _statistics(op: Ops, x: ir.Value, axes: list[int], epsilon: float) -> tuple[ir.Value, ir.Value]:
    """The mean and the inverse standard deviation along axes, which stay with length 1."""
    mean = op.ReduceMean(x, axes)
    centred = op.Sub(x, mean)
    variance = op.ReduceMean(op.Mul(centred, centred), axes)
    return mean, op.Reciprocal(op.Sqrt(op.Add(variance, epsilon)))


def _standardized_grad(
    op: Ops, g: ir.Value, normalized: ir.Value, inv: ir.Value, axes: list[int]
) -> ir.Value:
    """inv * (g - mean(g) - N * mean(g * N)), g the gradient of N = (X - mean) * inv"""
    pull = op.Mul(normalized, op.ReduceMean(op.Mul(g, normalized), axes))
    return op.Mul(inv, op.Sub(g, op.Add(pull, op.ReduceMean(g, axes))))


@gradient("LayerNormalization")
def _(node: Node) -> Slots:
    op, x = node.op, node.input(0)
    axis = node.attribute("axis") % node.rank()
    axes = list(range(axis, node.rank()))
    if x.dtype is not None and x.dtype.itemsize == 8:
        # onnxruntime's Mean and InvStdDev are float even then.
        mean, inv = _statistics(op, x, axes, node.attribute("epsilon"))
    else:
        mean, inv = node.output(1), node.output(2)
    d_mean, d_inv = node.optional_grad(1), node.optional_grad(2)
    parts: list[ir.Value] = []
    d_scale = d_bias = None
    if node.optional_grad(0) is not None:
        dx, d_scale, d_bias = _layer_slots(node, node.grad(0), x, mean, inv, axis, bias=2)
        parts.append(dx)
    if d_inv is not None:
        parts.append(_inverse_grad(op, d_inv, op.Sub(_cast(op, x, inv), mean), inv, axes))
    if d_mean is not None:
        count = _count(op, x, axes)
        share = op.Div(_cast(op, d_mean, count), count)
        parts.append(share if parts else op.Expand(share, op.shape(x)))
    return _total(op, [_cast(op, part, x) for part in parts]), d_scale, d_bias


def _inverse_grad(op: Ops, d_inv: ir.Value, centred: ir.Value, inv: ir.Value, axes: list[int]) -> ir.Value:
    """What flows back through inv = 1 / sqrt(mean(centred^2) + epsilon)"""
    cube = op.Mul(op.Mul(inv, inv), inv)
    slope = op.Div(op.Mul(_cast(op, d_inv, inv), cube), _count(op, centred, axes))
    return op.Neg(op.Mul(centred, slope))


def _total(op: Ops, parts: Sequence[ir.Value]) -> ir.Value:
    return parts[0] if len(parts) == 1 else op.Sum(*parts)


def _layer_slots(
    node: Node,
    dy: ir.Value,
    x: ir.Value,
    mean: ir.Value | None,
    inv: ir.Value,
    axis: int,
    *,
    scale: int = 1,
    bias: int | None = None,
) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """The gradients towards X, scale and bias; these are the numbers of the inputs."""
    op, weights = node.op, node.input(scale)
    shift = None if bias is None else node.optional(bias)

    def layer_grad(dy: ir.Value, weights: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        if mean is None:
            return *op.SimplifiedLayerNormalizationGrad(dy, x, weights, inv, axis=axis, _outputs=2), None
        dx, d_scale, d_bias = op.LayerNormalizationGrad(dy, x, weights, mean, inv, axis=axis, _outputs=3)
        return dx, d_scale, d_bias

    if all(_spans(value, x, axis) for value in (weights, shift) if value is not None):
        return layer_grad(dy, weights)
    from ortgrad.backward import unbroadcast  # imports onnx-ir, which takes a while

    # scale or bias are stretched to the shape of X.
    ones = op.Expand(op.number(1.0, x), op.Shape(x, start=axis))
    dx = layer_grad(op.Mul(dy, weights), ones)[0]
    values = _cast(op, x, inv)
    normalized = op.Mul(values if mean is None else op.Sub(values, mean), inv)
    d_scale = unbroadcast(op, op.Mul(dy, _cast(op, normalized, dy)), weights, x)
    return dx, d_scale, None if shift is None else unbroadcast(op, dy, shift, x)


def _spans(value: ir.Value, x: ir.Value, axis: int) -> bool:
    """Whether a value that broadcasts to X has the shape that X has from `axis` on."""
    if value.shape is None or x.shape is None or len(value.shape) != len(x.shape) - axis:
        return False
    return all(
        dim != 1 or other == 1 if isinstance(dim, int) else dim.value is not None and dim == other
        for dim, other in zip(value.shape, list(x.shape)[axis:], strict=True)
    )


@gradient("RMSNormalization")
def _(node: Node) -> Slots:
    op, x = node.op, node.input(0)
    axis = node.attribute("axis") % node.rank()
    inv = _inverse_rms(op, x, axis, node.rank(), node.attribute("epsilon"))
    return _layer_slots(node, node.grad(0), x, None, inv, axis)[:2]


def _inverse_rms(op: Ops, x: ir.Value, axis: int, rank: int, epsilon: float) -> ir.Value:
    x = _wide(op, x)
    return op.Reciprocal(op.Sqrt(op.Add(op.ReduceMean(op.Mul(x, x), list(range(axis, rank))), epsilon)))


@gradient("SimplifiedLayerNormalization")
def _(node: Node) -> Slots:
    op, x = node.op, node.input(0)
    # onnx has no schema for it, so there are no defaults to fill in.
    axis, epsilon = node.attributes.get("axis", -1) % node.rank(), node.attributes.get("epsilon", 1e-5)
    inv = _inverse_rms(op, x, axis, node.rank(), epsilon)
    parts: list[ir.Value] = []
    d_scale = None
    if node.optional_grad(0) is not None:
        dx, d_scale, _ = _layer_slots(node, node.grad(0), x, None, inv, axis)
        parts.append(dx)
    d_inv = node.optional_grad(1)
    if d_inv is not None:
        part = _inverse_grad(op, d_inv, _cast(op, x, inv), inv, list(range(axis, node.rank())))
        parts.append(_cast(op, part, x))
    return _total(op, parts), d_scale


@gradient("SkipLayerNormalization", domain="com.microsoft")
def _(node: Node) -> Slots:
    d_sum, d_gamma, d_beta = _sum_grad(node, node.input(0), output=3, scale=2, bias=3)
    return d_sum, _stretched(node, d_sum, 1), d_gamma, d_beta, _stretched(node, d_sum, 4)


@gradient("SkipSimplifiedLayerNormalization", domain="com.microsoft")
def _(node: Node) -> Slots:
    d_sum, d_gamma, _ = _sum_grad(node, node.input(0), output=3, scale=2, bias=None)
    return d_sum, _stretched(node, d_sum, 1), d_gamma, _stretched(node, d_sum, 3)


@gradient("EmbedLayerNormalization", domain="com.microsoft")
def _(node: Node) -> Slots:
    import onnx_ir as ir  # takes a while

    op, ids, positions = node.op, node.input(0), node.optional(8)
    # Only its type and shape are of interest.
    like = op.Gather(node.input(2), ids)
    table = node.input(2).shape
    if ids.shape is not None and table is not None:
        like.shape = ir.Shape([*ids.shape, table[1]])
    d_sum, d_gamma, d_beta = _sum_grad(node, like, output=2, scale=5, bias=6)

    def table_grad(i: int, indices: ir.Value, dy: ir.Value) -> ir.Value:
        return op.GatherGrad(op.shape(node.input(i)), indices, dy, axis=0)

    if positions is not None:
        d_position = table_grad(3, op.Expand(positions, op.Shape(ids)), d_sum)
    else:
        length = op.Squeeze(op.Shape(ids, start=1))
        d_position = table_grad(3, op.Range(0, length, 1), op.ReduceSum(d_sum, [0], keepdims=0))
    d_segment = None if node.optional(1) is None else table_grad(4, node.input(1), d_sum)
    return None, None, table_grad(2, ids, d_sum), d_position, d_segment, d_gamma, d_beta


def _sum_grad(
    node: Node, like: ir.Value, *, output: int, scale: int, bias: int | None
) -> tuple[ir.Value, ir.Value | None, ir.Value | None]:
    """The gradients towards a sum that is normalized along its last axis, towards scale and bias.

    The forward node returns the sum as that output; onnx has no schema for it, so its type and shape are
    those of `like`, and there are no defaults of attributes to fill in.
    """
    op, total = node.op, node.output(output)
    if any(node.optional_grad(i) is not None for i in (1, 2) if i != output):
        raise node.unsupported("onnxruntime does not compute its mean and inverse standard deviation")
    total.type = total.type or like.type
    total.shape = total.shape or like.shape
    axis, epsilon = op.rank(total) - 1, node.attributes.get("epsilon", 1e-12)
    parts = [] if node.optional_grad(output) is None else [node.grad(output)]
    d_scale = d_bias = mean = None
    if node.optional_grad(0) is not None:
        if bias is None:
            inv = _inverse_rms(op, total, axis, axis + 1, epsilon)
        else:
            mean, inv = _statistics(op, _wide(op, total), [axis], epsilon)
        dx, d_scale, d_bias = _layer_slots(node, node.grad(0), total, mean, inv, axis, scale=scale, bias=bias)
        parts.append(dx)
    return _total(op, parts), d_scale, d_bias


def _stretched(node: Node, grad: ir.Value, i: int) -> ir.Value | None:
    """The gradient towards an optional input that was stretched to the shape of the first."""
    from ortgrad.backward import unbroadcast

    value = node.optional(i)
    return None if value is None else unbroadcast(node.op, grad, value, node.input(0))


@gradient("BatchNormalization")
def _(node: Node) -> Slots:
    op, rank = node.op, node.rank()
    if node.attribute("training_mode"):
        return _batch_statistics_grad(node)
    dy, x = _wide(op, node.grad(0)), _wide(op, node.input(0))
    scale, mean, var = (_cast(op, node.input(i), x) for i in (1, 3, 4))
    inv = op.Reciprocal(op.Sqrt(op.Add(var, node.attribute("epsilon"))))
    factor = op.Mul(scale, inv)
    centred = op.Sub(x, _on_channels(op, mean, rank))
    d_bias = _channel_sum(op, dy, rank)
    d_scale = op.Mul(inv, _channel_sum(op, op.Mul(dy, centred), rank))
    return (
        op.Mul(dy, _on_channels(op, factor, rank)),
        d_scale,
        d_bias,
        op.Neg(op.Mul(factor, d_bias)),
        op.Mul(op.Mul(op.Mul(factor, inv), d_scale), -0.5),
    )


def _batch_statistics_grad(node: Node) -> Slots:
    op, rank, momentum = node.op, node.rank(), node.attribute("momentum")
    x = _wide(op, node.input(0))
    mean = _channel_mean(op, x, rank)
    centred = op.Sub(x, _on_channels(op, mean, rank))
    d_running_mean, d_running_var = node.optional_grad(1), node.optional_grad(2)
    slots: list[ir.Value | None] = [None] * 5
    parts = []
    if node.optional_grad(0) is not None:
        var = _channel_mean(op, op.Mul(centred, centred), rank)
        inv = op.Reciprocal(op.Sqrt(op.Add(var, node.attribute("epsilon"))))
        dx, slots[1], slots[2] = op.BatchNormalizationGrad(
            _wide(op, node.grad(0)),
            x,
            node.input(1),
            mean,
            inv,
            epsilon=node.attribute("epsilon"),
            _outputs=3,
        )
        parts.append(dx)
    # The running statistics are momentum * input + (1 - momentum) * the batch's.
    share = op.Div(op.number(1 - momentum, x), _count(op, x, _other_axes(rank)))
    if d_running_var is not None:
        slots[4] = op.Mul(d_running_var, momentum)
        slope = op.Mul(op.Mul(_cast(op, d_running_var, x), 2.0), share)
        parts.append(op.Mul(centred, _on_channels(op, slope, rank)))
    if d_running_mean is not None:
        slots[3] = op.Mul(d_running_mean, momentum)
        shift = _on_channels(op, op.Mul(_cast(op, d_running_mean, x), share), rank)
        parts.append(shift if parts else op.Expand(shift, op.shape(x)))
    slots[0] = _total(op, parts)
    return slots


@gradient("InstanceNormalization")
def _(node: Node) -> Slots:
    op, rank = node.op, node.rank()
    dy, x = _wide(op, node.grad(0)), _wide(op, node.input(0))
    axes = list(range(2, rank))
    mean, inv = _statistics(op, x, axes, node.attribute("epsilon"))
    normalized = op.Mul(op.Sub(x, mean), inv)
    # scale is the same along the axes, so it can wait; the sums over them serve three gradients.
    total, weighted = op.ReduceSum(dy, axes), op.ReduceSum(op.Mul(dy, normalized), axes)
    factor = op.Mul(inv, _on_channels(op, _cast(op, node.input(1), x), rank))
    count = _count(op, x, axes)
    pull = op.Add(op.Mul(normalized, op.Div(weighted, count)), op.Div(total, count))
    dx = op.Mul(factor, op.Sub(dy, pull))
    return dx, _channel_sum(op, weighted, rank), _channel_sum(op, total, rank)


@gradient("GroupNormalization")
def _(node: Node) -> Slots:
    op, rank, groups = node.op, node.rank(), node.attribute("num_groups")
    dy, x = _wide(op, node.grad(0)), _wide(op, node.input(0))
    scale, shape, grouped = _cast(op, node.input(1), x), op.shape(x), [0, groups, -1]
    per_group = op.opset < 21  # before, scale and bias have a value per group, not per channel
    values = op.Reshape(x, grouped)
    mean, inv = _statistics(op, values, [2], node.attribute("epsilon"))
    normalized = op.Mul(op.Sub(values, mean), inv)
    if per_group:
        dy, rank = op.Reshape(dy, grouped), 3
        g, weighted = op.Mul(dy, _on_channels(op, scale, 3)), op.Mul(dy, normalized)
    else:
        g = op.Reshape(op.Mul(dy, _on_channels(op, scale, rank)), grouped)
        weighted = op.Mul(dy, op.Reshape(normalized, shape))
    dx = op.Reshape(_standardized_grad(op, g, normalized, inv, [2]), shape)
    return dx, _channel_sum(op, weighted, rank), _channel_sum(op, dy, rank)


@gradient("MeanVarianceNormalization")
def _(node: Node) -> Slots:
    op, axes = node.op, [axis % node.rank() for axis in node.attribute("axes")]
    dy, x = _wide(op, node.grad(0)), _wide(op, node.input(0))
    centred = op.Sub(x, op.ReduceMean(x, axes))
    deviation = op.Sqrt(op.ReduceMean(op.Mul(centred, centred), axes))
    # Y = centred / (deviation + 1e-9); where all values are equal, it does not move with the deviation.
    flat = op.Equal(deviation, 0.0)
    normalized = op.Where(flat, 0.0, op.Div(centred, op.Where(flat, 1.0, deviation)))
    return (_standardized_grad(op, dy, normalized, op.Reciprocal(op.Add(deviation, 1e-9)), axes),)


@gradient("LpNormalization")
def _(node: Node) -> Slots:
    op, axis, p = node.op, [node.attribute("axis")], node.attribute("p")
    dy, x, y = node.grad(0), node.input(0), node.output(0)
    norm = op.ReduceL2(x, axis) if p == 2 else op.ReduceL1(x, axis)
    # Where all is 0, so is Y by definition, and nothing flows back.
    zero = op.Equal(norm, 0.0)
    slope = y if p == 2 else op.Sign(x)
    tangent = op.Sub(dy, op.Mul(slope, op.ReduceSum(op.Mul(dy, y), axis)))
    return (op.Where(zero, 0.0, op.Div(tangent, op.Where(zero, 1.0, norm))),)
