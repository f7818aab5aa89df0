"""Gradients of pools, over any number of spatial dimensions."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto

from ortgrad.autodiff.rules import ForwardNode, gradient
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.compiled import Plan
from ortgrad.operators.declaration import Choice, Empty, Operand, Shape, operator
from ortgrad.ops import _box_filter, _pools
from ortgrad.ops._kernels import parallel
from ortgrad.ops._windows import (
    AUTO_PADS,
    Windows,
    explicit_pads,
    per_dimension,
    require_outputs,
    spatial,
    windows,
)
from ortgrad.ops.index import scatter_flat

# The number of elements of dX at a time that stay in the cache from one axis to the next.
_PIECE = 1 << 19
# The end of a Slice that has no end.
_END = 2**63 - 1
_ATTRIBUTES = {
    "auto_pad": Choice(*AUTO_PADS),
    "ceil_mode": 0,
    "dilations": list[int],
    "kernel_shape": list[int],
    "pads": list[int],
    "strides": list[int],
}


def _shapes(*operands: Operand | None, **_: Any) -> Sequence[Shape | None]:
    dy, x_shape = operands[0], operands[-1]
    if x_shape is not None and x_shape.value is not None:
        return [tuple(int(n) for n in x_shape.value)]
    if dy is None or dy.shape is None:
        return [None]
    return [dy.shape[:2] + (None,) * (len(dy.shape) - 2)]


def _dims(*, kernel_shape: list[int] | None, **_: Any) -> dict[str, str]:
    y, x = spatial(kernel_shape)[:2]
    return {"dY": f"N C {y}", "X_shape[]": f"N C {x}"}


def _max_dims(
    *,
    kernel_shape: list[int] | None,
    auto_pad: str,
    strides: list[int] | None,
    dilations: list[int] | None,
    pads: list[int] | None,
    **_: Any,
) -> dict[str, str]:
    dims = _dims(kernel_shape=kernel_shape)
    pads = pads if auto_pad == "NOTSET" else None
    # The number of spatial dimensions that the attributes say, which need not include kernel_shape.
    rank = len(kernel_shape or strides or dilations or (pads or ())[::2])
    if rank:
        per_dimension("strides", strides, rank)
        per_dimension("dilations", dilations, rank)
        explicit_pads(pads, rank)
        y, x = (" ".join(f"{name}{i}" for i in range(rank)) for name in "YS")
        dims = {"dY": f"N C {y}", "X_shape[]": f"N C {x}"}
    return {**dims, "Indices": dims["dY"]}


@operator(
    "MaxPoolGrad",
    inputs=["dY", "Indices: int64", "X_shape: int64"],
    outputs=["dX"],
    shapes=_shapes,
    dims=_max_dims,
    attributes={**_ATTRIBUTES, "storage_order": 0},
    auto="python",
)
def max_pool_grad(
    dy: np.ndarray,
    indices: np.ndarray,
    x_shape: np.ndarray,
    *,
    kernel_shape: list[int] | None,
    storage_order: int,
    empty: Empty,
    **attributes: Any,
) -> np.ndarray:
    """dX[Indices] += dY, the indices counted over the whole of X as MaxPool writes them"""
    shape = tuple(x_shape.tolist())
    _require_order(storage_order)
    # The indices are sufficient. The attributes, which onnxruntime-training does not need, are only checked,
    # and that only where ONNX and onnxruntime agree on the windows.
    if kernel_shape and not _unclear(kernel_shape, **attributes):
        _windows(dy.shape, shape, kernel_shape, **attributes)
    # Column-major indices are row-major ones over the spatial dimensions in reverse order.
    sizes = shape[2:] if storage_order == 0 else shape[:1:-1]
    dx = empty(0, shape) if storage_order == 0 else np.empty(shape[:2] + sizes, dy.dtype)
    dx[...] = 0
    if dy.size:
        if any(d > n for d, n in zip(attributes["dilations"] or (), shape[2:], strict=False)):
            dy, indices = _without_blank(dy, indices, math.prod(sizes))
        _require_own_channel(indices, math.prod(sizes))
        np.add.at(dx.reshape(-1), indices.reshape(-1), dy.reshape(-1))
    return dx if storage_order == 0 else dx.transpose(0, 1, *range(dx.ndim - 1, 1, -1))


def _plan_max(
    dy: tuple[int, ...],
    indices: tuple[int, ...],
    x_shape: tuple[int, ...],
    dx: tuple[int, ...],
    *,
    kernel_shape: list[int] | None,
    storage_order: int,
    **attributes: Any,
) -> Plan | None:
    _require_order(storage_order)
    if kernel_shape and not _unclear(kernel_shape, **attributes):
        _windows(dy, dx, kernel_shape, **attributes)
    blank = any(d > n for d, n in zip(attributes["dilations"] or (), dx[2:], strict=False))
    return _pools.plan_max(dy, dx, storage_order == 1, blank)


max_pool_grad.compiled(views={"dy": 2, "indices": 2, "x_shape": 1, "dx": 2}, plan=_plan_max)(
    _pools.max_pool_grad_channel
)


def _require_order(storage_order: int) -> None:
    if storage_order not in (0, 1):
        raise ValueError(f"storage_order must be 0 (row major) or 1 (column major), got {storage_order}")


def _by_channel(indices: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The indices with one row for each batch and channel, and where these begin in X."""
    flat = indices.reshape(indices.shape[0] * indices.shape[1], -1)
    return flat, step * np.arange(len(flat))


def _without_blank(dy: np.ndarray, indices: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Both, without the windows that skip the whole input: MaxPool's index for those is -1."""
    flat, starts = _by_channel(indices, step)
    blank = flat < starts[:, None]
    kept = np.where(blank, 0, dy.reshape(flat.shape))
    return kept.astype(dy.dtype, copy=False), np.where(blank, starts[:, None], flat).reshape(indices.shape)


def _require_own_channel(indices: np.ndarray, step: int) -> None:
    """Raise unless the windows of each channel have their maximum in that channel."""
    flat, starts = _by_channel(indices, step)
    outside = (flat.min(axis=1) < starts) | (flat.max(axis=1) >= starts + step)
    if outside.any():
        row = int(np.argmax(outside))
        column = int(np.argmax((flat[row] < starts[row]) | (flat[row] >= starts[row] + step)))
        position = [int(i) for i in np.unravel_index(row * flat.shape[1] + column, indices.shape)]
        raise ValueError(
            f"index {flat[row, column]} at {position} is out of range: its batch and channel are "
            f"[{starts[row]}, {starts[row] + step}) of X"
        )


@max_pool_grad.onnx
def max_pool_grad_body(
    op: Recorder,
    dy: ir.Value,
    indices: ir.Value,
    x_shape: ir.Value,
    *,
    kernel_shape: list[int] | None,
    storage_order: int,
    dilations: list[int] | None,
    **attributes: Any,
) -> ir.Value:
    _require_order(storage_order)
    if op.checked and kernel_shape and not _unclear(kernel_shape, dilations=dilations, **attributes):
        sizes = op.Slice(x_shape, [2], [_END])
        dy = require_outputs(op, dy, sizes, kernel_shape, dilations=dilations, pool=True, **attributes)
    if max(dilations or [1]) > 1:
        # A dilated window can skip the whole of a small input; its index is then not the index of an element.
        sizes, planes = op.Slice(x_shape, [2], [_END]), op.Slice(op.Shape(dy), [0], [2])
        numbers = op.Range(0, op.ReduceProd(planes, keepdims=0), 1)
        starts = numbers * op.ReduceProd(sizes, keepdims=0)
        ones = [1] * len(dilations or ())
        starts = op.Reshape(starts, op.Concat(planes, ones, axis=0), allowzero=1)
        over = op.Cast(op.Greater(dilations, sizes), to=TensorProto.INT64)
        blank = op.And(op.Less(indices, starts), op.Cast(op.ReduceMax(over, keepdims=0), to=TensorProto.BOOL))
        dy, indices = op.Where(blank, 0.0, dy), op.Where(blank, starts, indices)
    dy = _require_indices(op, dy, indices, x_shape)
    if storage_order == 0:
        return scatter_flat(op, dy, x_shape, indices)
    turned = [0, 1, *range(len(kernel_shape) + 1 if kernel_shape else op.rank(dy) - 1, 1, -1)]
    return op.Transpose(scatter_flat(op, dy, op.Gather(x_shape, turned), indices), perm=turned)


def _require_indices(op: Recorder, dy: ir.Value, indices: ir.Value, x_shape: ir.Value) -> ir.Value:
    """dY, whose windows must have their maximum in their own channel."""
    if not op.checked:
        return dy
    planes = op.ReduceProd(op.Slice(x_shape, [0], [2]), keepdims=1)
    step = op.ReduceProd(op.Slice(x_shape, [2], [_END]), keepdims=0)
    starts = op.Unsqueeze(op.Range(0, op.Squeeze(planes), 1) * step, [1])
    rows = op.Concat(planes, op.ReduceProd(op.Shape(dy, start=2), keepdims=1), axis=0)
    offsets = op.Reshape(indices, rows, allowzero=1) - starts
    outside = op.Or(op.Less(offsets, 0), op.GreaterOrEqual(offsets, step))
    return op.require(dy, [outside], "Indices that are in the batch and channel of their window")


@operator(
    "AveragePoolGrad",
    inputs=["dY", "X_shape: int64"],
    outputs=["dX"],
    shapes=_shapes,
    dims=_dims,
    attributes={**_ATTRIBUTES, "count_include_pad": 0},
    auto="onnx",
)
def average_pool_grad(
    dy: np.ndarray,
    x_shape: np.ndarray,
    *,
    kernel_shape: list[int] | None,
    count_include_pad: int,
    empty: Empty,
    **attributes: Any,
) -> np.ndarray:
    """dX = the sum over the windows that hold X of dY / the number of elements in the window"""
    full_shape = tuple(x_shape.tolist())
    w = _windows(dy.shape, full_shape, _clear_kernel(kernel_shape, **attributes), **attributes)
    if not dy.size:
        dx = empty(0, full_shape)
        dx.fill(0)
        return dx
    divisors = _divisors(w, count_include_pad, attributes["ceil_mode"])
    counts = functools.reduce(np.multiply.outer, divisors).astype(dy.dtype)
    plans = [_box_filter.plan_spread(w, i) for i in range(w.rank)]
    planes = dy.reshape(-1, *w.outputs)
    dx = empty(0, full_shape)
    dx_planes = dx.reshape(len(planes), *w.sizes)
    piece = max(1, _PIECE // max(1, math.prod(w.sizes)))

    def spread(number: int) -> None:
        chosen = slice(number * piece, (number + 1) * piece)
        source = planes[chosen] / counts
        # A box filter is separable: it takes `kernel` steps per axis instead of kernel ** rank in all.
        for axis in range(w.rank, 0, -1):
            target = dx_planes[chosen]
            if axis > 1:
                target = np.empty(
                    (*source.shape[:axis], w.sizes[axis - 1], *source.shape[axis + 1 :]), dy.dtype
                )
            _box_filter.spread(plans[axis - 1], source, target, axis)
            source = target

    parallel(spread, -(-len(planes) // piece))
    return dx


def _plan_average(
    dy: tuple[int, ...],
    x_shape: tuple[int, ...],
    dx: tuple[int, ...],
    *,
    kernel_shape: list[int] | None,
    count_include_pad: int,
    **attributes: Any,
) -> Plan | None:
    w = _windows(dy, dx, _clear_kernel(kernel_shape, **attributes), **attributes)
    return _pools.plan_average(dy, dx, w, _divisors(w, count_include_pad, attributes["ceil_mode"]))


average_pool_grad.compiled(views={"dy": 3, "x_shape": 1, "dx": 2}, plan=_plan_average)(
    _pools.average_pool_grad_strip
)


def _divisors(w: Windows, count_include_pad: int, ceil_mode: int) -> list[np.ndarray]:
    """How many elements the windows along each axis are averaged over."""
    whole = bool(count_include_pad and not ceil_mode)
    return [_counts(w, i, count_include_pad, whole) for i in range(w.rank)]


def _counts(w: Windows, i: int, count_include_pad: int, whole: bool) -> np.ndarray:
    """How many elements the windows along one axis are averaged over; `whole` counts all of the kernel."""
    if whole:
        return np.full(w.outputs[i], w.kernel[i])
    starts = np.arange(w.outputs[i]) * w.strides[i] - w.heads[i]
    # Positions that ceil_mode adds behind the padding do not count.
    end = w.sizes[i] + (w.tails[i] if count_include_pad else 0)
    last = np.minimum(-((starts - end) // w.dilations[i]), w.kernel[i])
    first = 0 if count_include_pad else np.maximum(-(starts // w.dilations[i]), 0)
    return np.maximum(last - first, 1)


def _clear_kernel(
    kernel_shape: list[int] | None,
    *,
    auto_pad: str,
    strides: list[int] | None,
    dilations: list[int] | None,
    **_: Any,
) -> list[int]:
    """kernel_shape; raises if it is missing or onnxruntime places the windows differently."""
    if not kernel_shape:
        raise ValueError("kernel_shape is missing")
    if _unclear(kernel_shape, auto_pad=auto_pad, strides=strides, dilations=dilations):
        raise ValueError(
            f"auto_pad {auto_pad} with kernel_shape {kernel_shape}, strides {strides} and dilations "
            f"{dilations} means one thing in ONNX and another in onnxruntime; give pads instead"
        )
    return kernel_shape


def _unclear(
    kernel_shape: list[int],
    *,
    auto_pad: str,
    strides: list[int] | None,
    dilations: list[int] | None,
    **_: Any,
) -> bool:
    """Whether onnxruntime may place the windows differently from ONNX.

    It computes the pads of SAME for a kernel without dilations, and where they are negative (the stride is
    larger than the kernel) it crops X at both ends.
    """
    rank = len(kernel_shape)
    steps, gaps = per_dimension("strides", strides, rank), per_dimension("dilations", dilations, rank)
    return auto_pad.startswith("SAME") and any(
        (k > 1 and d > 1) or k < s - 1 for k, s, d in zip(kernel_shape, steps, gaps, strict=True)
    )


def _windows(
    dy: tuple[int, ...],
    shape: tuple[int, ...],
    kernel_shape: list[int],
    *,
    ceil_mode: int,
    **attributes: Any,
) -> Windows:
    """The windows over an X of this shape; raises unless they give an output of dY's shape."""
    w = windows(shape[2:], kernel_shape, ceil_mode=bool(ceil_mode), pool=True, **attributes)
    if w.outputs != dy[2:]:
        raise ValueError(
            f"pooling an X of shape {list(shape)} with kernel_shape {kernel_shape} gives "
            f"{[*shape[:2], *w.outputs]}, but dY has {list(dy)}"
        )
    return w


@average_pool_grad.onnx
def average_pool_grad_body(
    op: Recorder,
    dy: ir.Value,
    x_shape: ir.Value,
    *,
    kernel_shape: list[int] | None,
    count_include_pad: int,
    **attributes: Any,
) -> ir.Value:
    kernel_shape = _clear_kernel(kernel_shape, **attributes)
    auto_pad, ceil_mode = attributes["auto_pad"], attributes["ceil_mode"]
    rank = len(kernel_shape) if dy.shape is None else op.rank(dy) - 2
    kernel = per_dimension("kernel_shape", kernel_shape, rank)
    if op.checked:
        dy = require_outputs(op, dy, op.Slice(x_shape, [2], [_END]), kernel, pool=True, **attributes)
    steps, gaps = (per_dimension(name, attributes[name], rank) for name in ("strides", "dilations"))
    heads, tails = explicit_pads(attributes["pads"] if auto_pad == "NOTSET" else None, rank)
    if dy.shape is not None and 0 in list(dy.shape):
        # The zero is joined to dY without elements, so that dY's comparisons stay.
        zero = op.Reshape(op.number(0.0, dy), [1])
        return op.Expand(op.Concat(op.Reshape(dy, [0], allowzero=1), zero, axis=0), x_shape)
    y_shape = op.Shape(dy)

    def weights(i: int) -> ir.Value:
        """[outputs, sizes] of axis i: the share of each input in each output."""
        size, count = op.Gather(x_shape, i + 2), op.Gather(y_shape, i + 2)
        extent = (kernel[i] - 1) * gaps[i] + 1
        head: Any = heads[i]
        if auto_pad.startswith("SAME"):
            total = op.Max((count - 1) * steps[i] + extent - size, 0)
            head = (total + int(auto_pad == "SAME_LOWER")) / 2
        starts = op.Unsqueeze(op.Range(0, count, 1) * steps[i] - head, [1])
        offsets = op.Unsqueeze(op.Range(0, size, 1), [0]) - starts
        held = op.And(op.GreaterOrEqual(offsets, 0), op.Less(offsets, extent))
        if gaps[i] > 1:
            held = op.And(held, op.Equal(op.Mod(offsets, gaps[i]), 0))
        if count_include_pad and (not ceil_mode or auto_pad.startswith("SAME")):
            # Not a division by the kernel size: onnxruntime would fuse it into the product as a float32.
            return op.Where(held, op.number(1 / kernel[i], dy), op.number(0.0, dy))
        shares = op.CastLike(held, dy)
        if not count_include_pad:
            return shares / op.Max(op.ReduceSum(shares, [1], keepdims=1), 1.0)
        # Positions that ceil_mode adds behind the padding do not count.
        room = size + (tails[i] + gaps[i] - 1) - starts
        return shares / op.CastLike(op.Min(room / gaps[i], kernel[i]), dy)

    matrices = [weights(i) for i in range(rank)]
    # A matrix product would spread infinities and NaN over a whole axis; as in PyTorch, they must stay in
    # their windows. Testing the sum of dY is cheaper than testing every element.
    total = op.ReduceSum(op.ReduceSum(dy, list(range(2, rank + 2)), keepdims=0), None, keepdims=0)

    def spread(op: Recorder) -> ir.Value:
        result: ir.Value = op.If(
            op.IsNaN(total - total),
            then_branch=op.subgraph("special", [], lambda op: [_spread_apart(op, dy, x_shape, matrices)]),
            else_branch=op.subgraph("finite", [], lambda op: [_spread(op, dy, x_shape, matrices)]),
        )
        return result

    if dy.shape is not None and all(isinstance(n, int) for n in list(dy.shape)[2:]):
        return spread(op)
    # For an empty dY, onnxruntime's products fail or are left uninitialized.
    return op.If(
        op.Equal(op.Size(dy), 0),
        then_branch=op.subgraph("empty", [], lambda op: [op.Expand(op.number(0.0, dy), x_shape)]),
        else_branch=op.subgraph("full", [], lambda op: [spread(op)]),
    )


def _spread(op: Recorder, dy: ir.Value, x_shape: ir.Value, matrices: list[ir.Value]) -> ir.Value:
    """dY times a matrix [outputs, sizes] along each spatial axis."""
    # One product per axis: the matrices are small compared to dY, and up to about 200 elements per axis
    # onnxruntime has nothing faster, nor anything else for float64.
    rank, y_shape = len(matrices), op.Shape(dy)
    dx = op.MatMul(dy, matrices[-1])
    for i in range(rank - 2, -1, -1):
        # The axes before this one and those behind it are one dimension each.
        before = op.ReduceProd(op.Slice(y_shape, [0], [i + 2]), keepdims=1)
        behind = op.ReduceProd(op.Slice(x_shape, [i + 3], [_END]), keepdims=1)
        folded = op.Concat(before, op.Slice(y_shape, [i + 2], [i + 3]), behind, axis=0)
        dx = op.Reshape(dx, folded, allowzero=1)
        matrix = op.Unsqueeze(op.Transpose(matrices[i], perm=[1, 0]), [0])
        # onnxruntime does not broadcast 1 to 0, so an empty batch gets an empty stack of matrices.
        dx = op.MatMul(op.Slice(matrix, [0], op.Min(before, 1)), dx)
    return op.Reshape(dx, x_shape, allowzero=1) if rank > 1 else dx


def _spread_apart(op: Recorder, dy: ir.Value, x_shape: ir.Value, matrices: list[ir.Value]) -> ir.Value:
    """The same, but infinities and NaN reach only the places with a weight."""
    zero, one, most = (op.number(value, dy) for value in (0.0, 1.0, math.inf))
    kinds = {math.nan: op.IsNaN(dy), math.inf: op.Equal(dy, most), -math.inf: op.Equal(dy, -most)}
    special = op.IsNaN(dy - dy)
    dx = _spread(op, op.Where(special, zero, dy), x_shape, matrices)
    for value, places in kinds.items():
        reached = op.Greater(_spread(op, op.Where(places, one, zero), x_shape, matrices), zero)
        dx = dx + op.Where(reached, op.number(value, dy), zero)
    return dx


@gradient("MaxPool")
def max_pool_gradient(node: ForwardNode) -> ir.Value:
    op, x_shape = node.op, node.op.shape_of(node.input(0))
    return op.MaxPoolGrad(node.grad(0), node.add_output(1), x_shape, **node.attributes)


@gradient("AveragePool")
def average_pool_gradient(node: ForwardNode) -> ir.Value:
    dy = node.grad(0) * _cut_off(node) if _may_be_cut_off(node) else node.grad(0)
    return node.op.AveragePoolGrad(dy, node.op.shape_of(node.input(0)), **node.attributes)


def _may_be_cut_off(node: ForwardNode) -> bool:
    """Whether X may be smaller than a window, and the places of the window behind it do not count.

    onnxruntime counts them before opset 19, as AveragePoolGrad does.
    """
    if node.op.opset < 19 or not node.attribute("count_include_pad") or node.attribute("ceil_mode"):
        return False
    if node.attribute("auto_pad").startswith("SAME"):
        return False
    kernel, gaps, padding = _padded(node)
    shape = node.input(0).shape
    sizes = [None] * len(kernel) if shape is None else list(shape)[2:]
    return any(
        not isinstance(n, int) or n + p < (k - 1) * d + 1
        for n, k, d, p in zip(sizes, kernel, gaps, padding, strict=True)
    )


def _cut_off(node: ForwardNode) -> ir.Value:
    """The size of the kernel divided by the number of its places in X and its padding."""
    op, x = node.op, node.input(0)
    kernel, gaps, padding = _padded(node)
    places = op.Add(op.Shape(x, start=2), [p + d - 1 for p, d in zip(padding, gaps, strict=True)]) / gaps
    count = op.ReduceProd(op.Min(places, kernel), keepdims=0)
    return op.number(float(math.prod(kernel)), x) / op.CastLike(count, x)


def _padded(node: ForwardNode) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The kernel, the dilations, and the padding at both ends together."""
    rank = len(node.attribute("kernel_shape"))
    kernel = per_dimension("kernel_shape", node.attribute("kernel_shape"), rank)
    gaps = per_dimension("dilations", node.attribute("dilations"), rank)
    pads = node.attribute("pads") if node.attribute("auto_pad") == "NOTSET" else None
    heads, tails = explicit_pads(pads, rank)
    return kernel, gaps, tuple(map(sum, zip(heads, tails, strict=True)))


@gradient("LpPool")
def lp_pool_gradient(node: ForwardNode) -> ir.Value:
    """dX = |X|^(p-1) sign(X) * (dY / Y^(p-1), summed over the windows that hold X)"""
    op, x = node.op, node.input(0)
    same = {name: value for name, value in node.attributes.items() if name != "p"}
    share = _lp_share(node)
    if node.attribute("ceil_mode"):
        # Windows that reach beyond the padding hold fewer elements than the kernel has; count them.
        one = op.Expand(op.number(1.0, x), op.Concat([1, 1], op.Shape(x, start=2), axis=0))
        share = share * op.LpPool(one, p=1, **same)
        summed = op.AveragePoolGrad(share, op.shape_of(x), **same)
    else:
        share = share * float(math.prod(same["kernel_shape"]))
        summed = op.AveragePoolGrad(share, op.shape_of(x), count_include_pad=1, **same)
    return _lp_slope(node) * summed


@gradient("GlobalLpPool")
def global_lp_pool_gradient(node: ForwardNode) -> ir.Value:
    return _lp_slope(node) * _lp_share(node)


def _lp_slope(node: ForwardNode) -> ir.Value:
    """|X|^(p-1) sign(X)"""
    op, x, p = node.op, node.input(0), node.attribute("p")
    if p == 1:
        return op.Sign(x)
    if p == 2:
        return x
    power = op.Pow(x, float(p - 1))
    return power if p % 2 == 0 else power * op.Sign(x)


def _lp_share(node: ForwardNode) -> ir.Value:
    """dY / Y^(p-1), 0 where Y is 0"""
    op, dy, y, p = node.op, node.grad(0), node.output(0), node.attribute("p")
    if p == 1:
        return dy
    # The inner Where keeps NaN out of second derivatives.
    origin = op.Equal(y, 0.0)
    norm = op.Where(origin, 1.0, y)
    return op.Where(origin, 0.0, dy / (norm if p == 2 else op.Pow(norm, float(p - 1))))


@gradient("GlobalAveragePool")
def global_average_pool_gradient(node: ForwardNode) -> ir.Value:
    op, x = node.op, node.input(0)
    count = op.CastLike(op.ReduceProd(op.Shape(x, start=2), keepdims=0), node.grad(0))
    return op.Expand(node.grad(0) / count, op.shape_of(x))


@gradient("GlobalMaxPool")
def global_max_pool_gradient(node: ForwardNode) -> ir.Value:
    """dX = dY at the first maximum, as in PyTorch's adaptive_max_pool"""
    op, x = node.op, node.input(0)
    positions = op.ReduceProd(op.Shape(x, start=2), keepdims=1)
    flat = op.Reshape(x, op.Concat(op.Shape(x, end=2), positions, axis=0), allowzero=1)
    first = op.ArgMax(flat, axis=2, keepdims=1)
    numbers = op.Range(0, op.Squeeze(positions), 1)
    dy = op.Reshape(node.grad(0), [0, 0, 1])
    return op.Reshape(op.Where(op.Equal(numbers, first), dy, 0.0), op.shape_of(x), allowzero=1)


@gradient("MaxUnpool")
def max_unpool_gradient(node: ForwardNode) -> ir.Value:
    """dX = dY[I]"""
    op, indices = node.op, node.input(1)
    rank = len(node.attribute("kernel_shape"))
    kernel = per_dimension("kernel_shape", node.attribute("kernel_shape"), rank)
    strides = per_dimension("strides", node.attribute("strides"), rank)
    dx = op.Gather(op.Reshape(node.grad(0), [-1]), indices)
    if all(k <= s for k, s in zip(kernel, strides, strict=True)):
        return dx
    # Windows overlap, so an index may occur several times; Y holds the value of the last one.
    flat = op.Reshape(indices, [-1])
    numbers = op.Range(0, op.Size(indices), 1)
    empty = op.Expand(0, op.Reshape(op.Size(node.output(0)), [1]))
    last = op.Gather(op.ScatterElements(empty, flat, numbers, axis=0), indices)
    return op.Where(op.Equal(last, op.Reshape(numbers, op.Shape(indices))), dx, 0.0)
