"""Gathers and scatters: their gradient rules, and GatherGrad, GatherElementsGrad, GatherNDGrad.

Sums are written with ScatterElements, which runs on one thread: in onnxruntime's ScatterND several threads
add to the same place at the same time, and terms are lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto

from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.contract import MOST_DIMENSIONS, with_axis
from ortgrad.operators.declaration import DOMAIN, FLOATS, INTEGERS, Empty, Operand, Shape, operator
from ortgrad.ops import _index_kernels
from ortgrad.ops._types import narrowed, widened

# The number of elements whose positions are computed at a time.
_CHUNK = 1 << 18


def shape_of(operand: Operand | None) -> Shape | None:
    """The shape that is the value of an operand, as far as it is known."""
    if operand is None:
        return None
    if operand.value is not None:
        return tuple(int(d) for d in operand.value)
    if operand.shape is None or len(operand.shape) != 1 or not isinstance(operand.shape[0], int):
        return None
    # Longer vectors are not shapes, and are refused.
    return (None,) * operand.shape[0] if operand.shape[0] <= MOST_DIMENSIONS else None


def size_of(op: Recorder, value: ir.Value) -> ir.Value:
    """The number of elements, as a vector of length 1."""
    if value.shape is not None and value.shape.is_static():
        return op.constant(np.array([math.prod(value.shape.numpy())], np.int64))
    return op.Reshape(op.Size(value), [1])


def numbered(op: Recorder, shape: ir.Value) -> ir.Value:
    """The numbers of the elements of a tensor of this shape, in that shape."""
    return op.Reshape(op.Range(0, op.ReduceProd(shape, keepdims=0), 1), shape, allowzero=1)


def scatter_back(
    op: Recorder, dy: ir.Value, shape: ir.Value, select: Callable[[ir.Value], ir.Value], unique: bool = False
) -> ir.Value:
    """Add each element of dY to the place that `select` took it from; `unique` if no place occurs twice."""
    selected = select(numbered(op, shape))
    dy = op.require_shape(dy, selected, "dY of the shape of what is selected")
    return scatter_flat(op, dy, shape, selected, unique)


def scatter_flat(
    op: Recorder, dy: ir.Value, shape: ir.Value, positions: ir.Value, unique: bool = False
) -> ir.Value:
    """Add the elements of dY to zeros of a shape, at these positions in the flattened tensor."""
    positions = op.Reshape(positions, [-1])
    # onnxruntime's ScatterElements does not add half-precision numbers.
    terms = op.Reshape(dy if unique else widened(op, dy), [-1])
    zeros = op.Expand(op.number(0.0, terms), op.ReduceProd(shape, keepdims=1))
    total = op.ScatterElements(zeros, positions, terms, axis=0, reduction="none" if unique else "add")
    total = op.Reshape(total, shape, allowzero=1)
    return total if unique else narrowed(op, total, dy)


def _positive(indices: np.ndarray, length: int) -> np.ndarray:
    """Indices along an axis of that length, negative ones counted from its end."""
    if indices.size:
        low, high = int(indices.min()), int(indices.max())
        if low < -length or high >= length:
            raise ValueError(f"index {low if low < -length else high} is out of range for length {length}")
        if low < 0:
            indices = np.where(indices < 0, indices + length, indices)
    return indices.astype(np.intp, copy=False)


def _add_rows(dx: np.ndarray, rows: np.ndarray, dy: np.ndarray) -> None:
    """dx[rows[i]] += dy[i], in place, for arrays of two axes."""
    width = dx.shape[1]
    # add.at is fast for one-dimensional arrays only.
    flat, columns = dx.reshape(-1), np.arange(width)
    step = max(1, _CHUNK // max(1, width))
    for i in range(0, len(rows), step):
        positions = rows[i : i + step, np.newaxis] * width + columns
        np.add.at(flat, positions.reshape(-1), dy[i : i + step].reshape(-1))


def _gather_dims(*, axis: int) -> dict[str, str]:
    x = with_axis(axis).split()
    place = axis + (axis < 0) * len(x)
    return {"indices": "*I", "shape[]": " ".join(x), "dY": " ".join([*x[:place], "*I", *x[place + 1 :]])}


@operator(
    "GatherGrad",
    inputs=["shape: I", "indices: Tind", "dY"],
    outputs=["dX"],
    shapes=lambda shape, *_, **__: [shape_of(shape)],
    dims=_gather_dims,
    attributes={"axis": 0},
    types={"T": FLOATS, "I": INTEGERS, "Tind": INTEGERS},
    auto="python",
)
def gather_grad(
    shape: np.ndarray, indices: np.ndarray, dy: np.ndarray, *, axis: int, empty: Empty
) -> np.ndarray:
    """dX[indices] += dY along an axis, dX = 0 before"""
    dims = tuple(shape.tolist())
    axis %= len(dims)
    outer, length, inner = math.prod(dims[:axis]), dims[axis], math.prod(dims[axis + 1 :])
    rows = _positive(indices, length).reshape(-1)
    dx = empty(0, dims)
    dx.fill(0)
    if rows.size == 1:
        dx.reshape(outer, length, inner)[:, rows[0]] = dy.reshape(outer, inner)
    elif dy.size:
        rows = (np.arange(outer)[:, np.newaxis] * length + rows).reshape(-1)
        _add_rows(dx.reshape(-1, inner), rows, dy.reshape(-1, inner))
    return dx


@gather_grad.onnx
def gather_grad_body(
    op: Recorder, shape: ir.Value, indices: ir.Value, dy: ir.Value, *, axis: int
) -> ir.Value:
    shape = op.Cast(shape, to=TensorProto.INT64)
    length = op.Gather(shape, axis)
    # Dimensions: outer axes, indices and, unless the axis is known to be the last, inner axes.
    rank = shape.shape[0] if shape.shape is not None else None
    if isinstance(rank, int):
        axis %= rank
    last = axis == -1 or axis + 1 == rank
    rows = op.Reshape(op.Cast(indices, to=TensorProto.INT64), [1, -1] if last else [1, -1, 1])
    if op.checked:
        outside = op.Or(op.Less(rows, -length), op.GreaterOrEqual(rows, length))
        dy = op.require(dy, [outside], "indices that the axis has")
    rows = op.Where(op.Less(rows, 0), rows + length, rows)
    if axis != 0:
        outer = op.ReduceProd(op.Slice(shape, [0], [axis]), keepdims=0)
        starts = op.Range(0, outer, 1) * length
        rows = op.Reshape(starts, [-1, 1] if last else [-1, 1, 1]) + rows
    if not last:
        inner = op.ReduceProd(op.Slice(shape, [axis + 1], [np.iinfo(np.int64).max]), keepdims=0)
        rows = rows * inner + op.Range(0, inner, 1)
    return scatter_flat(op, dy, shape, rows)


@operator(
    "GatherElementsGrad",
    inputs=["dY", "shape: int64", "indices: Tind"],
    outputs=["dX"],
    shapes=lambda dy, shape, *_, **__: [shape_of(shape)],
    dims=lambda axis: {
        "indices": with_axis(axis),
        "dY": with_axis(axis),
        "shape[]": _as_many(with_axis(axis)),
    },
    attributes={"axis": 0},
    types={"T": FLOATS, "Tind": INTEGERS},
)
def gather_elements_grad(
    dy: np.ndarray, shape: np.ndarray, indices: np.ndarray, *, axis: int, empty: Empty
) -> np.ndarray:
    """dX[.., indices[i], ..] += dY[.., i, ..] along an axis, dX = 0 before"""
    dims = tuple(shape.tolist())
    axis %= len(dims)
    if any(n > d for i, (n, d) in enumerate(zip(dy.shape, dims, strict=True)) if i != axis):
        raise ValueError(f"indices of shape {list(indices.shape)} do not fit into {list(dims)}")
    positions = _positive(indices, dims[axis]) * math.prod(dims[axis + 1 :])
    for i, n in enumerate(dy.shape):
        if i != axis:
            along = np.arange(n) * math.prod(dims[i + 1 :])
            positions += along.reshape(-1, *[1] * (dy.ndim - 1 - i))
    dx = empty(0, dims)
    dx.fill(0)
    np.add.at(dx.reshape(-1), positions.reshape(-1), dy.reshape(-1))
    return dx


@gather_elements_grad.onnx
def gather_elements_grad_body(
    op: Recorder, dy: ir.Value, shape: ir.Value, indices: ir.Value, *, axis: int
) -> ir.Value:
    terms = widened(op, dy)
    zeros = op.Expand(op.number(0.0, terms), shape)
    return narrowed(op, op.ScatterElements(zeros, indices, terms, axis=axis, reduction="add"), dy)


def _as_many(pattern: str) -> str:
    """A pattern of the same number of dimensions, of any lengths."""
    return " ".join(f"*X:{token[1:]}" if token.startswith("*") else f"X{token}" for token in pattern.split())


def _gather_nd_dims(*, batch_dims: int) -> dict[str, str]:
    if batch_dims < 0:
        raise ValueError(f"batch_dims is {batch_dims}; it must not be negative")
    batch = " ".join(f"B{i}" for i in range(batch_dims))
    return {"shape[]": f"{batch} *D", "indices": f"{batch} *I depth", "dY": f"{batch} *Y"}


@operator(
    "GatherNDGrad",
    inputs=["shape: int64", "indices: int64", "dY"],
    outputs=["dX"],
    shapes=lambda shape, *_, **__: [shape_of(shape)],
    dims=_gather_nd_dims,
    attributes={"batch_dims": 0},
    auto="python",
)
def gather_nd_grad(
    shape: np.ndarray, indices: np.ndarray, dy: np.ndarray, *, batch_dims: int, empty: Empty
) -> np.ndarray:
    """dX[indices[i]] += dY[i], dX = 0 before, in each of the leading `batch_dims` axes"""
    dims = tuple(shape.tolist())
    end = batch_dims + indices.shape[-1]
    if end > len(dims):
        raise ValueError(
            f"indices of shape {list(indices.shape)} do not fit {list(dims)} with batch_dims {batch_dims}"
        )
    expected = indices.shape[:-1] + dims[end:]
    if dy.shape != expected:
        raise ValueError(f"dY has shape {list(dy.shape)}, the selection has {list(expected)}")
    batch = math.prod(dims[:batch_dims])
    rows = np.arange(batch).reshape(-1, *[1] * (indices.ndim - 1 - batch_dims))
    indices = indices.reshape(batch, *indices.shape[batch_dims:])
    for i, length in enumerate(dims[batch_dims:end]):
        rows = rows * length + _positive(indices[..., i], length)
    rows = np.broadcast_to(rows, indices.shape[:-1]).reshape(-1)
    inner = math.prod(dims[end:])
    dx = empty(0, dims)
    dx.fill(0)
    if dy.size:
        _add_rows(dx.reshape(-1, inner), rows, dy.reshape(-1, inner))
    return dx


@gather_nd_grad.onnx
def gather_nd_grad_body(
    op: Recorder, shape: ir.Value, indices: ir.Value, dy: ir.Value, *, batch_dims: int
) -> ir.Value:
    return scatter_back(op, dy, shape, lambda x: op.GatherND(x, indices, batch_dims=batch_dims))


gather_grad.compiled(views={"shape": 1, "indices": 1, "dy": 3, "dx": 2}, plan=_index_kernels.gather_plan)(
    _index_kernels.gather_grad_rows
)
gather_elements_grad.compiled(
    views={"dy": 3, "shape": 1, "indices": 3, "dx": 1},
    plan=_index_kernels.gather_elements_plan,
    first=_index_kernels.gather_elements_grad_clear,
)(_index_kernels.gather_elements_grad_part)
gather_nd_grad.compiled(
    views={"shape": 1, "indices": 3, "dy": 3, "dx": 2}, plan=_index_kernels.gather_nd_plan
)(_index_kernels.gather_nd_grad_rows)


@gradient("Gather")
def gather_gradient(node: ForwardNode) -> ir.Value:
    op, dy, x, axis = node.op, node.grad(0), node.input(0), node.attribute("axis")
    index = node.constant(1)
    if index is None or index.size != 1 or index.ndim > 1:
        return op.GatherGrad(op.shape_of(x), node.input(1), dy, **node.attributes)
    # With one constant index, the gradient is padded to the length of the axis.
    i = int(index.item())
    if index.ndim == 0:
        dy = op.Unsqueeze(dy, [axis])
    length, rank = (None, None) if x.shape is None else (x.shape[axis], len(x.shape))
    if isinstance(length, int):
        i %= length
        return op.Pad(dy, [i, length - 1 - i], None, [axis], rank=rank)
    others = op.Sub(op.Gather(op.shape_of(x), [axis]), [1])
    before, after = ([i], op.Sub(others, [i])) if i >= 0 else (op.Add(others, [i + 1]), [-1 - i])
    return op.Pad(dy, op.Concat(before, after, axis=0), None, [axis], rank=rank)


@gradient("GatherElements")
def gather_elements_gradient(node: ForwardNode) -> ir.Value:
    op, shape = node.op, node.op.shape_of(node.input(0))
    return op.GatherElementsGrad(node.grad(0), shape, node.input(1), **node.attributes)


@gradient("GatherND")
def gather_nd_gradient(node: ForwardNode) -> ir.Value:
    op, shape = node.op, node.op.shape_of(node.input(0))
    return op.GatherNDGrad(shape, node.input(1), node.grad(0), **node.attributes)


@gradient("GatherGrad", domain=DOMAIN)
def gather_grad_gradient(node: ForwardNode) -> Gradients:
    return None, None, node.op.Gather(node.grad(0), node.input(1), axis=node.attribute("axis"))


@gradient("GatherElementsGrad", domain=DOMAIN)
def gather_elements_grad_gradient(node: ForwardNode) -> ir.Value:
    return node.op.GatherElements(node.grad(0), node.input(2), axis=node.attribute("axis"))


@gradient("GatherNDGrad", domain=DOMAIN)
def gather_nd_grad_gradient(node: ForwardNode) -> Gradients:
    batch = node.attribute("batch_dims")
    return None, None, node.op.GatherND(node.grad(0), node.input(1), batch_dims=batch)


@gradient("TopK")
def top_k_gradient(node: ForwardNode) -> ir.Value:
    op, axis = node.op, node.attribute("axis")
    return op.GatherElementsGrad(node.grad(0), op.shape_of(node.input(0)), node.add_output(1), axis=axis)


@gradient("Unique")
def unique_gradient(node: ForwardNode) -> ir.Value:
    # Of equal elements, the first one gets the whole gradient.
    return _selected_back(node, node.add_output(1))


@gradient("Compress")
def compress_gradient(node: ForwardNode) -> ir.Value:
    op, x, axis = node.op, node.input(0), node.attribute("axis")
    # onnxruntime ignores the part of the condition beyond the length of the input.
    length = size_of(op, x) if axis is None else op.Gather(op.shape_of(x), [axis])
    condition = op.Slice(node.input(1), [0], length)
    return _selected_back(node, op.Squeeze(op.NonZero(condition), [0]))


def _selected_back(node: ForwardNode, indices: ir.Value) -> ir.Value:
    """The gradient of a selection along an axis, or of the flattened input."""
    op, dy, x, axis = node.op, node.grad(0), node.input(0), node.attribute("axis")
    if axis is not None:
        return op.GatherGrad(op.shape_of(x), indices, dy, axis=axis)
    return op.Reshape(op.GatherGrad(size_of(op, x), indices, dy, axis=0), op.shape_of(x), allowzero=1)


@gradient("OneHot")
def one_hot_gradient(node: ForwardNode) -> Gradients:
    op, dy, values = node.op, node.grad(0), node.input(2)
    off_on = op.Concat(
        op.Reshape(op.number(0.0, values), [1]), op.Reshape(op.number(1.0, values), [1]), axis=0
    )
    hit = op.OneHot(node.input(0), node.input(1), off_on, axis=node.attribute("axis"))
    on = op.ReduceSum(dy * hit, keepdims=0)
    off = op.ReduceSum(dy * (1.0 - hit), keepdims=0)
    return None, None, op.Concat(op.Reshape(off, [1]), op.Reshape(on, [1]), axis=0)


@gradient("ScatterElements")
def scatter_elements_gradient(node: ForwardNode) -> Gradients:
    op, dy, axis = node.op, node.grad(0), node.attribute("axis")
    indices, updates = node.input(1), node.input(2)
    if node.attribute("reduction") == "add":
        return dy, None, op.GatherElements(dy, indices, axis=axis)
    if node.attribute("reduction") == "none":
        rest = op.ScatterElements(dy, indices, op.full_like(updates, 0.0), axis=axis)
        du = op.GatherElements(dy, indices, axis=axis)
        if _may_repeat(node, axis):
            # Of several updates of one element, the last one remains.
            numbers = numbered(op, op.shape_of(indices))
            places = op.Expand(0, op.shape_of(node.input(0)))
            last = op.GatherElements(
                op.ScatterElements(places, indices, numbers, axis=axis), indices, axis=axis
            )
            du = op.Where(op.Equal(last, numbers), du, 0.0)
        return rest, None, du
    dx, du = _scatter_reduced(node, dy, node.input(0), node.output(0), indices, updates, axis)
    return dx, None, du


@gradient("ScatterND")
def scatter_nd_gradient(node: ForwardNode) -> Gradients:
    op, dy, x, indices, updates = node.op, node.grad(0), node.input(0), node.input(1), node.input(2)
    if node.attribute("reduction") == "add":
        return dy, None, op.GatherND(dy, indices)
    if node.attribute("reduction") == "none":
        rest, du = op.ScatterND(dy, indices, op.full_like(updates, 0.0)), op.GatherND(dy, indices)
        if _may_repeat(node):
            rows = op.Shape(indices, end=-1)
            numbers = numbered(op, rows)
            places = op.Expand(0, op.Slice(op.shape_of(x), [0], op.Shape(indices, start=-1)))
            last = op.GatherND(op.ScatterND(places, indices, numbers), indices)
            inner = op.Size(op.shape_of(updates)) - op.Size(rows)
            mask_shape = op.Concat(rows, op.Expand([1], op.Reshape(inner, [1])), axis=0)
            du = op.Where(op.Reshape(op.Equal(last, numbers), mask_shape, allowzero=1), du, 0.0)
        return rest, None, du
    # Equivalent to ScatterElements on the flattened tensors.
    positions = op.GatherND(numbered(op, op.shape_of(x)), indices)
    flat = [op.Reshape(v, [-1]) for v in (dy, x, node.output(0), positions, updates)]
    dx, du = _scatter_reduced(node, *flat)
    dx, du = (op.Reshape(v, op.shape_of(like), allowzero=1) for v, like in ((dx, x), (du, updates)))
    return dx, None, du


def _may_repeat(node: ForwardNode, axis: int | None = None) -> bool:
    """Whether two updates may be for the same element; `axis` is None for ScatterND."""
    shape, dims, known = node.input(1).shape, node.input(0).shape, node.constant(1)
    if shape is not None and all(size == 1 for size in (shape[:-1] if axis is None else [shape[axis]])):
        return False
    if dims is None or known is None or known.size == 0:
        return True
    lengths = dims[: known.shape[-1]] if axis is None else [dims[axis]]
    if (known < 0).any():
        if not all(isinstance(length, int) for length in lengths):
            return True
        known = np.where(known < 0, known + np.array(lengths), known)
    if axis is None:
        rows = known.reshape(-1, known.shape[-1])
        return len(np.unique(rows, axis=0)) < len(rows)
    return bool((np.diff(np.sort(known, axis), axis=axis) == 0).any())


def _scatter_reduced(
    node: ForwardNode,
    dy: ir.Value,
    x: ir.Value,
    y: ir.Value,
    indices: ir.Value,
    updates: ir.Value,
    axis: int = 0,
) -> tuple[ir.Value, ir.Value]:
    """The gradients of ScatterElements(x, indices, updates) with reduction mul, max or min."""
    op = node.op

    def gather(value: ir.Value) -> ir.Value:
        return op.GatherElements(value, indices, axis=axis)

    def scatter(start: ir.Value, terms: ir.Value, reduction: str) -> ir.Value:
        return op.ScatterElements(start, indices, terms, axis=axis, reduction=reduction)

    if node.attribute("reduction") == "mul":
        zeros, ones = op.full_like(x, 0.0), op.full_like(x, 1.0)
        others = product_of_others(
            op,
            updates,
            lambda factors: gather(scatter(ones, factors, "mul")),
            lambda terms: gather(scatter(zeros, terms, "add")),
        )
        return dy * scatter(ones, updates, "mul"), gather(dy * x) * others
    # Elements that equal the extreme share the gradient equally, as in PyTorch's scatter_reduce.
    stays, arrives = op.Equal(x, y), op.Equal(updates, gather(y))
    count = scatter(op.Cast(stays, to=TensorProto.INT64), op.Cast(arrives, to=TensorProto.INT64), "add")
    share = dy / op.CastLike(count, x)
    return op.Where(stays, share, 0.0), op.Where(arrives, gather(share), 0.0)


def product_of_others(
    op: Recorder, x: ir.Value, product: Callable[..., Any], total: Callable[..., Any]
) -> ir.Value:
    """For each element, the product of the others in its group, even if the group contains zeros.

    `product` and `total` reduce over the groups. The result can be differentiated once more: with one zero
    among the others, their product is that zero times the rest.
    """
    zero = op.Equal(x, 0.0)
    factors, zeros, is_zero = op.Where(zero, 1.0, x), op.Where(zero, x, 0.0), op.CastLike(zero, x)
    other_zeros, count = total(zeros) - zeros, total(is_zero) - is_zero
    of_zeros = op.Where(op.Equal(count, 0.0), 1.0, op.Where(op.Equal(count, 1.0), other_zeros, 0.0))
    return product(factors) / factors * of_zeros


@gradient("TensorScatter")
def tensor_scatter_gradient(node: ForwardNode) -> Gradients:
    op, dy, update, first = node.op, node.grad(0), node.input(1), node.optional(2)
    rank = node.rank()
    axis, circular = node.attribute("axis") % rank, node.attribute("mode") == "circular"
    rest = op.TensorScatter(dy, op.full_like(update, 0.0), first, **node.attributes)
    length = op.Gather(op.shape_of(update), [axis])
    if first is None:
        return rest, op.Slice(dy, [0], length, [axis])
    positions = op.Unsqueeze(first, [1]) + op.Range(0, op.Squeeze(length, [0]), 1)
    if circular:
        positions = op.Mod(positions, op.Gather(op.shape_of(node.input(0)), [axis]))
    positions = op.Unsqueeze(positions, [i for i in range(1, rank) if i != axis])
    return rest, op.GatherElements(dy, op.Expand(positions, op.shape_of(update)), axis=axis)
