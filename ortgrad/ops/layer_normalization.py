"""Normalizations of single samples: layer and RMS normalization, also fused with additions, and Lp."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient
from ortgrad.autodiff.unbroadcast import unbroadcast
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.declaration import FLOATS, Empty, Operand, Shape, operator
from ortgrad.ops import _layer_kernels
from ortgrad.ops._kernels import blockwise
from ortgrad.ops._normalization import Axes, axes_from, count_along, inverse_root, statistics, sum_of
from ortgrad.ops._types import cast_like, is_double, widened

_TYPES = {"T": FLOATS, "U": ("float32", "float64"), "V": FLOATS}
_FORWARD_ATTRIBUTES = ("epsilon", "stash_type")
_Arrays = tuple[np.ndarray | None, ...]


def _layer_shapes(outputs: int) -> Callable[..., Sequence[Shape | None]]:
    """X_grad is like X, the others are like scale."""

    def shapes(_: Operand, x: Operand, scale: Operand, *__: Operand, axis: int) -> Sequence[Shape | None]:
        return [x.shape] + [scale.shape] * (outputs - 1)

    return shapes


def _layer_dims(axis: int, x: str, *statistics: str, bias: bool = False) -> dict[str, str]:
    if axis < 0:
        outer, inner = "*O", " ".join(f"D{i}" for i in range(-axis))
        ones = " ".join("1" for _ in range(-axis))
    else:
        outer, inner, ones = " ".join(f"O{i}" for i in range(axis)), "D0 *D", "1 1^D"
    dims = {"Y_grad": f"{outer} {inner}", x: f"{outer} {inner}", "scale": inner}
    if bias:
        dims["bias"] = inner
    return dims | dict.fromkeys(statistics, f"{outer} {ones}")


@operator(
    "LayerNormalizationGrad",
    inputs=["Y_grad: V", "X: T", "scale: V", "mean: U", "inv_std_dev: U"],
    outputs=["X_grad?: T", "scale_grad?: V", "bias_grad?: V"],
    shapes=_layer_shapes(3),
    dims=lambda axis: _layer_dims(axis, "X", "mean", "inv_std_dev"),
    attributes={"axis": -1},
    forward_attributes=_FORWARD_ATTRIBUTES,
    types=_TYPES,
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
    empty: Empty,
) -> _Arrays:
    """dX = inv_std_dev * (g - mean(g) - N * mean(g * N)), g = dY * scale, N = (X - mean) * inv_std_dev

    The means are over all axes from `axis` on; scale_grad = sum(dY * N) and bias_grad = sum(dY) are
    sums over the axes before it.
    """
    mean, inv = _per_row(mean, x), _per_row(inv, x)

    def normalize(n: np.ndarray, x: np.ndarray, inv: np.ndarray, mean: np.ndarray) -> None:
        np.subtract(x, mean, out=n)
        n *= inv

    return _layer_grad(normalize, dy, x, scale, inv, mean, axis=axis, wanted=wanted, empty=empty)


@layer_normalization_grad.onnx
def layer_normalization_grad_body(
    op: Recorder,
    dy: ir.Value,
    x: ir.Value,
    scale: ir.Value,
    mean: ir.Value,
    inv: ir.Value,
    *,
    axis: int,
    wanted: tuple[bool, ...],
) -> list[ir.Value | None]:
    centred = _flat(op, x, axis, inv) - _flat(op, mean, axis, inv)
    normalized = centred * op.Flatten(inv, axis=axis)
    return _layer_body(op, dy, x, scale, normalized, inv, axis, centre=True)


@operator(
    "SimplifiedLayerNormalizationGrad",
    inputs=["Y_grad: V", "X: T", "scale: V", "inv_std_var: U"],
    outputs=["X_grad?: T", "scale_grad?: V"],
    shapes=_layer_shapes(2),
    dims=lambda axis: _layer_dims(axis, "X", "inv_std_var"),
    attributes={"axis": -1},
    forward_attributes=_FORWARD_ATTRIBUTES,
    types=_TYPES,
)
def simplified_layer_normalization_grad(
    dy: np.ndarray,
    x: np.ndarray,
    scale: np.ndarray,
    inv: np.ndarray,
    *,
    axis: int,
    wanted: tuple[bool, ...],
    empty: Empty,
) -> _Arrays:
    """dX = inv_std_var * (g - N * mean(g * N)), g = dY * scale, N = X * inv_std_var

    The mean is over all axes from `axis` on; scale_grad = sum(dY * N) is a sum over the axes before it.
    """
    inv = _per_row(inv, x)

    def normalize(n: np.ndarray, x: np.ndarray, inv: np.ndarray) -> None:
        np.multiply(x, inv, out=n)

    return _layer_grad(normalize, dy, x, scale, inv, axis=axis, wanted=wanted, empty=empty, centre=False)


@simplified_layer_normalization_grad.onnx
def simplified_layer_normalization_grad_body(
    op: Recorder,
    dy: ir.Value,
    x: ir.Value,
    scale: ir.Value,
    inv: ir.Value,
    *,
    axis: int,
    wanted: tuple[bool, ...],
) -> list[ir.Value | None]:
    normalized = _flat(op, x, axis, inv) * op.Flatten(inv, axis=axis)
    return _layer_body(op, dy, x, scale, normalized, inv, axis, centre=False)[:2]


@operator(
    "InvertibleLayerNormalizationGrad",
    inputs=["Y_grad: V", "Y: V", "scale: V", "bias: V", "inv_std_var: U"],
    outputs=["X_grad?: V", "scale_grad?: V", "bias_grad?: V"],
    shapes=_layer_shapes(3),
    dims=lambda axis: _layer_dims(axis, "Y", "inv_std_var", bias=True),
    attributes={"axis": -1},
    forward_attributes=_FORWARD_ATTRIBUTES,
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
    empty: Empty,
) -> _Arrays:
    """LayerNormalizationGrad with N = (Y - bias) / scale, so that X need not be kept"""
    if not scale.all():
        raise ValueError("scale holds a 0, so Y does not tell what X was")
    inv = _per_row(inv, y)

    def normalize(n: np.ndarray, y: np.ndarray, inv: np.ndarray) -> None:
        np.subtract(y, bias.reshape(-1), out=n)
        n /= scale.reshape(-1)

    return _layer_grad(normalize, dy, y, scale, inv, axis=axis, wanted=wanted, empty=empty)


@invertible_layer_normalization_grad.onnx
def invertible_layer_normalization_grad_body(
    op: Recorder,
    dy: ir.Value,
    y: ir.Value,
    scale: ir.Value,
    bias: ir.Value,
    inv: ir.Value,
    *,
    axis: int,
    wanted: tuple[bool, ...],
) -> list[ir.Value | None]:
    if op.checked:
        dy = op.require(dy, [op.Equal(scale, 0.0)], "a scale without 0, or else Y does not tell what X was")
    scaled = _flat(op, y, axis, inv) - _flat(op, bias, 0, inv)
    normalized = scaled / _flat(op, scale, 0, inv)
    return _layer_body(op, dy, y, scale, normalized, inv, axis, centre=True)


layer_normalization_grad.compiled(
    views={"dy": 2, "x": 2, "scale": 1, "mean": 1, "inv": 1, "dx": 2, "d_scale": 1, "d_bias": 1},
    scratch={"scale_sums": 2, "bias_sums": 2},
    plan=_layer_kernels.layer_plan,
    first=_layer_kernels.layer_grad_rows,
)(_layer_kernels.layer_grad_columns)
simplified_layer_normalization_grad.compiled(
    views={"dy": 2, "x": 2, "scale": 1, "inv": 1, "dx": 2, "d_scale": 1},
    scratch={"scale_sums": 2},
    plan=_layer_kernels.simplified_plan,
    first=_layer_kernels.simplified_layer_grad_rows,
)(_layer_kernels.simplified_layer_grad_columns)
invertible_layer_normalization_grad.compiled(
    views={"dy": 2, "y": 2, "scale": 1, "bias": 1, "inv": 1, "dx": 2, "d_scale": 1, "d_bias": 1},
    scratch={"scale_sums": 2, "bias_sums": 2},
    plan=_layer_kernels.layer_plan,
    first=_layer_kernels.invertible_layer_grad_rows,
)(_layer_kernels.layer_grad_columns)


def _rows(array: np.ndarray, axis: int) -> np.ndarray:
    """As a matrix whose rows are normalized."""
    shape = array.shape
    axis %= array.ndim
    return array.reshape(math.prod(shape[:axis]), math.prod(shape[axis:]))


def _per_row(statistic: np.ndarray, x: np.ndarray) -> np.ndarray:
    return statistic.astype(x.dtype, copy=False).reshape(statistic.size, 1)


def _layer_grad(
    normalize: Callable[..., None],
    dy: np.ndarray,
    x: np.ndarray,
    scale: np.ndarray,
    inv: np.ndarray,
    *per_row: np.ndarray,
    axis: int,
    wanted: tuple[bool, ...],
    empty: Empty,
    centre: bool = True,
) -> _Arrays:
    """The gradients; normalize(n, x, inv, *per_row) writes some rows of X, normalized, to n."""
    want_x, want_scale, want_bias = (*wanted, False)[:3]
    weights = scale.astype(x.dtype, copy=False).reshape(-1)
    share = weights / max(1, weights.size)
    sums = np.zeros((2, weights.size), dy.dtype)

    def grad(dx: np.ndarray, dy: np.ndarray, x: np.ndarray, inv: np.ndarray, *per_row: np.ndarray) -> None:
        normalize(dx, x, inv, *per_row)
        # Sums over rows and columns are written as products, which BLAS computes.
        ones = np.ones(len(dy), dy.dtype)
        if want_bias:
            sums[1] += ones @ dy
        product = dy * dx
        if want_scale:
            sums[0] += ones @ product
        if want_x:
            dx *= (product @ share)[:, None]
            if centre:
                dx += (dy @ share)[:, None]
            np.subtract(np.multiply(dy, weights, out=product), dx, out=dx)
            dx *= inv

    dx = empty(0, x.shape) if want_x else np.empty_like(x)
    blockwise(grad, *(_rows(a, axis) for a in (dx, dy, x)), inv, *per_row)
    per_column = [
        total.reshape(scale.shape) if want else None
        for total, want in zip(sums, (want_scale, want_bias), strict=True)
    ]
    return (dx if want_x else None, *per_column)[: len(wanted)]


def _flat(op: Recorder, value: ir.Value, axis: int, like: ir.Value) -> ir.Value:
    return op.Flatten(cast_like(op, value, like), axis=axis)


def _layer_body(
    op: Recorder,
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
    product = rows * normalized
    g = rows * weights
    pull = normalized * op.ReduceMean(product * weights, [1])
    if centre:
        pull = pull + op.ReduceMean(g, [1])
    dx = (g - pull) * op.Flatten(inv, axis=axis)
    shape = op.shape_of(scale)
    return [
        cast_like(op, op.Reshape(dx, op.shape_of(x), allowzero=1), x),
        cast_like(op, op.Reshape(op.ReduceSum(product, [0]), shape), scale),
        cast_like(op, op.Reshape(op.ReduceSum(rows, [0]), shape), scale),
    ]


@gradient("LayerNormalization")
def layer_normalization_gradient(node: ForwardNode) -> Gradients:
    op, x = node.op, node.input(0)
    axis = _axis(node)
    axes = axes_from(op, x, axis)
    if is_double(x):
        # onnxruntime's Mean and InvStdDev are float32 for a float64 X too.
        mean, inv = statistics(op, x, axes, node.attribute("epsilon"))
    else:
        mean, inv = node.add_output(1), node.add_output(2)
    d_mean, d_inv = node.optional_grad(1), node.optional_grad(2)
    parts: list[ir.Value] = []
    d_scale = d_bias = None
    if node.optional_grad(0) is not None:
        dx, d_scale, d_bias = _layer_gradients(node, node.grad(0), x, mean, inv, axis, bias=2)
        parts.append(dx)
    if d_inv is not None:
        parts.append(_inverse_grad(op, d_inv, cast_like(op, x, inv) - mean, inv, axes))
    if d_mean is not None:
        count = count_along(op, x, axes)
        share = cast_like(op, d_mean, count) / count
        parts.append(share if parts else op.Expand(share, op.shape_of(x)))
    return sum_of(op, [cast_like(op, part, x) for part in parts]), d_scale, d_bias


def _inverse_grad(op: Recorder, d_inv: ir.Value, centred: ir.Value, inv: ir.Value, axes: Axes) -> ir.Value:
    """The gradient of `centred` through inv = 1 / sqrt(mean(centred^2) + epsilon)"""
    cube = inv * inv * inv
    slope = cast_like(op, d_inv, inv) * cube / count_along(op, centred, axes)
    return -(centred * slope)


def _layer_gradients(
    node: ForwardNode,
    dy: ir.Value,
    x: ir.Value,
    mean: ir.Value | None,
    inv: ir.Value,
    axis: int,
    *,
    scale: int = 1,
    bias: int | None = None,
) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """The gradients of X, scale and bias; `scale` and `bias` are the positions of these inputs."""
    op, weights = node.op, node.input(scale)
    shift = None if bias is None else node.optional(bias)

    def layer_grad(dy: ir.Value, weights: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        if mean is None:
            return *op.SimplifiedLayerNormalizationGrad(dy, x, weights, inv, axis=axis, _outputs=2), None
        dx, d_scale, d_bias = op.LayerNormalizationGrad(dy, x, weights, mean, inv, axis=axis, _outputs=3)
        return dx, d_scale, d_bias

    if all(_spans(value, x, axis) for value in (weights, shift) if value is not None):
        return layer_grad(dy, weights)

    # scale or bias is broadcast to the shape of X.
    ones = op.Expand(op.number(1.0, x), op.Shape(x, start=axis))
    dx = layer_grad(dy * weights, ones)[0]
    values = cast_like(op, x, inv)
    normalized = (values if mean is None else values - mean) * inv
    d_scale = unbroadcast(op, dy * cast_like(op, normalized, dy), weights, x)
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
def rms_normalization_gradient(node: ForwardNode) -> Gradients:
    op, x = node.op, node.input(0)
    axis = _axis(node)
    inv = _inverse_rms(op, x, axes_from(op, x, axis), node.attribute("epsilon"))
    return _layer_gradients(node, node.grad(0), x, None, inv, axis)[:2]


def _axis(node: ForwardNode) -> int:
    """The first of the axes, counted from the front if the rank is known."""
    shape = node.input(0).shape
    # onnx has no schema for SimplifiedLayerNormalization, so no defaults are known.
    axis: int = node.attribute("axis", -1)
    return axis if shape is None else axis % len(shape)


def _inverse_rms(op: Recorder, x: ir.Value, axes: Axes, epsilon: float) -> ir.Value:
    x = widened(op, x)
    return inverse_root(op, op.ReduceMean(x * x, axes) + epsilon)


@gradient("SimplifiedLayerNormalization")
def simplified_layer_normalization_gradient(node: ForwardNode) -> Gradients:
    op, x = node.op, node.input(0)
    axis = _axis(node)
    axes = axes_from(op, x, axis)
    inv = _inverse_rms(op, x, axes, node.attribute("epsilon", 1e-5))
    parts: list[ir.Value] = []
    d_scale = None
    if node.optional_grad(0) is not None:
        dx, d_scale, _ = _layer_gradients(node, node.grad(0), x, None, inv, axis)
        parts.append(dx)
    d_inv = node.optional_grad(1)
    if d_inv is not None:
        part = _inverse_grad(op, d_inv, cast_like(op, x, inv), inv, axes)
        parts.append(cast_like(op, part, x))
    return sum_of(op, parts), d_scale


@gradient("LpNormalization")
def lp_normalization_gradient(node: ForwardNode) -> ir.Value:
    op, axis, p = node.op, [node.attribute("axis")], node.attribute("p")
    dy, x, y = node.grad(0), node.input(0), node.output(0)
    norm = op.ReduceL2(x, axis) if p == 2 else op.ReduceL1(x, axis)
    # Where the norm is 0, Y is 0 by definition, and so is the gradient.
    zero = op.Equal(norm, 0.0)
    slope = y if p == 2 else op.Sign(x)
    tangent = dy - slope * op.ReduceSum(dy * y, axis)
    return op.Where(zero, 0.0, tangent / op.Where(zero, 1.0, norm))
