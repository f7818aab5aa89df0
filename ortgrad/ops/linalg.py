"""Gradient rules of products, determinants and Fourier transforms."""

from __future__ import annotations

import string
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
from onnx import TensorProto

from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient
from ortgrad.autodiff.unbroadcast import unbroadcast
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.declaration import DOMAIN
from ortgrad.ops._flow import choose


@gradient("MatMul")
def mat_mul_gradient(node: ForwardNode) -> Gradients:
    op, a, b = node.op, node.input(0), node.input(1)
    if a.shape is None and b.shape is not None and len(b.shape) == 2:
        # Rows of any number of dimensions times a matrix.
        rows, dy = op.Flatten(a, axis=-1), op.Flatten(node.grad(0), axis=-1)
        da = op.Reshape(op.Gemm(dy, b, transB=1), op.Shape(a), allowzero=1)
        return da, op.Gemm(rows, dy, transA=1)
    if a.shape is None or b.shape is None:
        return _product_at_run_time(node)
    return _Product(node).grads(node.grad(0))


def _product_at_run_time(
    node: ForwardNode, turned_a: bool = False, turned_b: bool = False, alpha: float = 1.0
) -> Gradients:
    """The gradients of alpha op(A) op(B), op the transpose or the identity, for any ranks."""
    op, turned = node.op, [turned_a, turned_b]
    # A vector is a row on the left, a column on the right; a stack of matrices is left as it is.
    shapes = [op.Shape(node.input(i)) for i in range(2)]
    ones = [op.Slice([1], [0], op.Sub([2], op.Shape(shape))) for shape in shapes]
    a, b = (
        op.Reshape(
            node.input(i),
            op.Concat(*([ones[i], shapes[i]] if turned[i] == bool(i) else [shapes[i], ones[i]]), axis=0),
            allowzero=1,
        )
        for i in range(2)
    )
    sizes = op.Shape(node.grad(0))
    matrix = op.Sub(op.Sub([2], op.Shape(ones[0])), op.Shape(ones[1]))
    stack = op.Slice(sizes, [0], op.Sub(op.Shape(sizes), matrix))
    rows, columns = -1 if turned_a else -2, -2 if turned_b else -1
    lengths = [op.Gather(op.Shape(a), [rows]), op.Gather(op.Shape(b), [columns])]
    dy = op.Reshape(node.grad(0), op.Concat(stack, *lengths, axis=0), allowzero=1)
    dy = dy if alpha == 1 else dy * alpha
    grads: list[ir.Value | None] = [None, None]
    if node.wants(0):
        da = zero_if_empty(op, op.MatMul(dy, b if turned_b else _turned(op, b)), b, columns)
        grads[0] = _unstacked(op, _turned(op, da) if turned_a else da, a, shapes[0])
    if node.wants(1):
        db = zero_if_empty(op, op.MatMul(a if turned_a else _turned(op, a), dy), a, rows)
        grads[1] = _unstacked(op, _turned(op, db) if turned_b else db, b, shapes[1])
    return grads


def _unstacked(op: Recorder, grad: ir.Value, matrices: ir.Value, shape: ir.Value) -> ir.Value:
    return op.Reshape(unbroadcast(op, grad, matrices, grad), shape, allowzero=1)


def _turned(op: Recorder, value: ir.Value) -> ir.Value:
    """A stack of matrices of unknown rank, each one transposed."""
    shape = op.Shape(value)
    stack, rows, columns = (op.Slice(shape, [i], [j]) for i, j in ((0, -2), (-2, -1), (-1, 1 << 31)))
    flat = op.Concat(op.ReduceProd(stack, keepdims=1), rows, columns, axis=0)
    turned = op.Transpose(op.Reshape(value, flat, allowzero=1), perm=[0, 2, 1])
    return op.Reshape(turned, op.Concat(stack, columns, rows, axis=0), allowzero=1)


@gradient("Gemm")
def gemm_gradient(node: ForwardNode) -> Gradients:
    op, dy, a, beta = node.op, node.grad(0), node.input(0), node.attribute("beta")
    product = _Product(
        node,
        bool(node.attribute("transA")),
        bool(node.attribute("transB")),
        node.attribute("alpha"),
        # onnxruntime also takes a vector on the left, as a row.
        ranks=(2, 2),
    )
    if a.shape is None:
        product.operands[0] = op.Flatten(a, axis=-1)
    da, db = product.grads(dy)
    if a.shape is None and da is not None:
        da = op.Reshape(da, op.Shape(a), allowzero=1)
    if not node.wants(2):
        return da, db
    dc = unbroadcast(op, dy, node.input(2), node.output(0))
    return da, db, dc if beta == 1 else dc * beta


@gradient("FusedMatMul", "TransposeMatMul", domain=DOMAIN)
def fused_mat_mul_gradient(node: ForwardNode) -> Gradients:
    op, dy = node.op, node.grad(0)
    alpha = node.attribute("alpha")
    batch = [bool(node.attribute(name)) for name in ("transBatchA", "transBatchB")]
    if not any(batch) and (node.input(0).shape is None or node.input(1).shape is None):
        return _product_at_run_time(
            node,
            bool(node.attribute("transA")),
            bool(node.attribute("transB")),
            1.0 if alpha is None else alpha,
        )
    # A vector is never transposed.
    turned_a, turned_b = (
        bool(node.attribute(name)) and node.rank(i) > 1 for i, name in enumerate(("transA", "transB"))
    )
    product = _Product(node, turned_a, turned_b, 1.0 if alpha is None else alpha)
    for i in range(2):
        if batch[i]:
            # The first axis is that of the rows (or columns); the batch axes are between it and the last.
            rank = node.rank(i)
            product.operands[i] = op.Transpose(node.input(i), perm=[*range(1, rank - 1), 0, rank - 1])
    grads = list(product.grads(dy))
    for i in range(2):
        if batch[i] and grads[i] is not None:
            rank = node.rank(i)
            grads[i] = op.Transpose(grads[i], perm=[rank - 2, *range(rank - 2), rank - 1])
    return grads


class _Product:
    """alpha op(A) op(B), op the transpose or the identity; A and B are vectors or stacks of matrices."""

    def __init__(
        self,
        node: ForwardNode,
        turned_a: bool = False,
        turned_b: bool = False,
        alpha: float = 1.0,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.node = node
        self.op = node.op
        self.operands = [node.input(0), node.input(1)]
        self.ranks = [node.rank(0), node.rank(1)] if ranks is None else list(ranks)
        self.turned = [turned_a, turned_b]
        self.alpha = alpha
        self.dy: ir.Value | None = None

    def grads(self, dy: ir.Value) -> tuple[ir.Value | None, ir.Value | None]:
        op, (a, b), ranks = self.op, self.operands, self.ranks
        if max(ranks) > 2 or ranks == [1, 1]:
            # Other products are Gemm nodes, which scale the result themselves.
            dy = dy if self.alpha == 1 else dy * self.alpha
        if ranks == [1, 1]:
            return dy * b, dy * a
        # A vector is a row on the left, a column on the right.
        if ranks[1] == 1:
            dy = op.Unsqueeze(dy, [-1])
        if ranks[0] == 1:
            dy = op.Unsqueeze(dy, [-2])
        self.dy = dy
        rows = op.Unsqueeze(a, [0]) if ranks[0] == 1 else a
        columns = op.Unsqueeze(b, [1]) if ranks[1] == 1 else b
        da = self._left(dy, columns) if self.node.wants(0) else None
        db = self._right(dy, rows) if self.node.wants(1) else None
        return da, db

    def _left(self, dy: ir.Value, b: ir.Value) -> ir.Value:
        """dA = dY op(B)^T, or its transpose."""
        turned_a, turned_b = self.turned
        rank = max(*self.ranks, 2)
        b_rank = max(self.ranks[1], 2)
        if turned_a:
            da = self._multiply(b, b_rank, turned_b, dy, rank, True)
        else:
            da = self._multiply(dy, rank, False, b, b_rank, not turned_b)
        if b_rank > 2:
            return self._unstacked(da, 0)
        return self.op.Squeeze(da, [0]) if self.ranks[0] == 1 else da

    def _right(self, dy: ir.Value, a: ir.Value) -> ir.Value:
        """dB = op(A)^T dY, or its transpose."""
        op, (turned_a, turned_b) = self.op, self.turned
        rank = max(*self.ranks, 2)
        a_rank = max(self.ranks[0], 2)
        if a_rank > 2 and self.ranks[1] <= 2 and not turned_a:
            # One product of all rows instead of a sum over a stack of products.
            a, dy = self._as_matrix(a), self._as_matrix(dy, self.operands[1])
            db = op.Gemm(dy, a, transA=1) if turned_b else op.Gemm(a, dy, transA=1)
            return op.Squeeze(db, [1]) if self.ranks[1] == 1 else db
        if turned_b:
            db = self._multiply(dy, rank, True, a, a_rank, turned_a)
        else:
            db = self._multiply(a, a_rank, not turned_a, dy, rank, False)
        if a_rank > 2:
            return self._unstacked(db, 1)
        return op.Squeeze(db, [1]) if self.ranks[1] == 1 else db

    def _as_matrix(self, value: ir.Value, weights: ir.Value | None = None) -> ir.Value:
        """A value as a matrix of all its rows; it has the columns of the weights, or keeps its own."""
        op = self.op
        if weights is None:
            width = value.shape[-1] if value.shape is not None else None
        elif self.ranks[1] == 1:
            width = 1
        else:
            width = weights.shape[-2 if self.turned[1] else -1] if weights.shape is not None else None
        if isinstance(width, int) and width:
            return op.Reshape(value, [-1, width])
        # Without elements, -1 would be ambiguous.
        rows = op.ReduceProd(op.Shape(value, end=-1), keepdims=1)
        return op.Reshape(value, op.Concat(rows, op.Shape(value, start=-1), axis=0), allowzero=1)

    def _multiply(
        self, x: ir.Value, x_rank: int, turn_x: bool, y: ir.Value, y_rank: int, turn_y: bool
    ) -> ir.Value:
        op = self.op
        if x_rank == y_rank == 2:
            scale = self.alpha if max(self.ranks) <= 2 and self.alpha != 1 else None
            return op.Gemm(x, y, transA=int(turn_x) or None, transB=int(turn_y) or None, alpha=scale)
        product = op.MatMul(
            transposed(op, x, x_rank) if turn_x else x, transposed(op, y, y_rank) if turn_y else y
        )
        # The operand that is not dY is more likely to have a known shape.
        operand, axis = (x, -2 if turn_x else -1) if y is self.dy else (y, -1 if turn_y else -2)
        return zero_if_empty(op, product, operand, axis)

    def _unstacked(self, grad: ir.Value, i: int) -> ir.Value:
        """Sum over the axes of the stack along which operand i was broadcast."""
        operand = self.operands[i]
        own, other = operand.shape, self.operands[1 - i].shape
        full = ir.Value(name="stack")
        if own is not None and other is not None:
            batch = [_broadcast(*pair) for pair in zip_longest(own[-3::-1], other[-3::-1], fillvalue=1)]
            # As a row, a vector has one axis more.
            matrix = [1, own[0]] if len(own) == 1 else own[-2:]
            full.shape = ir.Shape([*batch[::-1], *matrix])
        return unbroadcast(self.op, grad, operand, full)


def _broadcast(a: int | ir.SymbolicDim, b: int | ir.SymbolicDim) -> int | ir.SymbolicDim | None:
    if isinstance(a, int) and a == 1:
        return b
    return a if a == b or (isinstance(b, int) and b == 1) else None


def transposed(op: Recorder, value: ir.Value, rank: int) -> ir.Value:
    """A stack of matrices, each one transposed."""
    return op.Transpose(value, perm=[*range(rank - 2), rank - 1, rank - 2])


def zero_if_empty(op: Recorder, product: ir.Value, operand: ir.Value, axis: int) -> ir.Value:
    """The product of stacks of matrices, 0 if the axis of the operand that it sums over is empty.

    For an empty axis, onnxruntime sets the first matrix of the stack and leaves the others uninitialized.
    """
    length = operand.shape[axis] if operand.shape is not None else None
    if isinstance(length, int) and length:
        return product
    count = op.Shape(operand, start=axis, end=None if axis == -1 else axis + 1)
    return op.Where(op.Equal(count, [0]), op.number(0.0, product), product)


@gradient("Einsum")
def einsum_gradient(node: ForwardNode) -> Gradients:
    terms, result = _parse(node)
    shapes = [node.input(i).shape for i in range(len(terms))]
    occurrences: dict[str, list[int | ir.SymbolicDim]] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for label, length in zip(term, shape or (), strict=True):
            occurrences.setdefault(label, []).append(length)
    # By operand, the labels along which it has length 1 and is broadcast.
    stretched = [
        {k for k, n in zip(term, shape or (), strict=True) if n == 1 and any(m != 1 for m in occurrences[k])}
        for term, shape in zip(terms, shapes, strict=True)
    ]
    return [
        _einsum_grad(node, i, terms, result, stretched, occurrences) if node.wants(i) else None
        for i in range(len(terms))
    ]


def _einsum_grad(
    node: ForwardNode,
    i: int,
    terms: Sequence[str],
    result: str,
    stretched: Sequence[set[str]],
    occurrences: dict[str, list[int | ir.SymbolicDim]],
) -> ir.Value:
    """dX as an Einsum of dY and the other operands"""
    op, x, term = node.op, node.input(i), terms[i]
    others, factors = [], []
    for j, other in enumerate(terms):
        if j != i:
            gone = [p for p, k in enumerate(other) if k in stretched[j]]
            factors.append(op.Squeeze(node.input(j), gone) if gone else node.input(j))
            others.append("".join(k for k in other if k not in stretched[j]))
    kept = [k for k in dict.fromkeys(term) if k not in stretched[i]]
    target = "".join(k for k in kept if k in result or any(k in other for other in others))
    dx = node.grad(0)
    if factors or sorted(target) != sorted(result):
        equation = f"{','.join([result, *others])}->{target}"
        if all(_is_positive(occurrences[k]) for k in "".join([result, *others])):
            dx = op.Einsum(dx, *factors, equation=equation)
        else:
            dx = _einsum_or_zeros(op, [dx, *factors], equation, x, [term.index(k) for k in target])
    elif target != result:
        dx = op.Transpose(dx, perm=[result.index(k) for k in target])
    # Axes of length 1 for labels that are broadcast, repeated, or in no other term.
    present = {term.index(k) for k in target}
    missing = [p for p in range(len(term)) if p not in present]
    if missing:
        dx = op.Unsqueeze(dx, missing)
    for p, k in enumerate(term):
        if k in kept and p != term.index(k):
            dx = op.Where(_diagonal(op, x, term.index(k), p, len(term)), dx, 0.0)
    certain = all(_same(occurrences[k]) for k in kept)
    if not certain or any(k not in target for k in kept):
        dx = op.Expand(dx, op.shape_of(x))
    if certain:
        return dx
    # At run time, some length may turn out to be 1 and the operand to be broadcast.
    return unbroadcast(op, dx, x, ir.Value(name="unknown"))


def _einsum_or_zeros(
    op: Recorder, operands: Sequence[ir.Value], equation: str, x: ir.Value, axes: Sequence[int]
) -> ir.Value:
    """The Einsum, or zeros with the lengths of some axes of x if an operand is empty.

    For some empty operands, onnxruntime's Einsum terminates the process with a division by 0.
    """
    count = op.Size(operands[0])
    for operand in operands[1:]:
        count = count * op.Size(operand)
    return choose(
        op,
        op.Equal(count, 0),
        lambda op: op.Expand(op.number(0.0, operands[0]), op.Gather(op.shape_of(x), list(axes))),
        lambda op: op.Einsum(*operands, equation=equation),
        like=operands[0],
    )


def _is_positive(lengths: Sequence[int | ir.SymbolicDim]) -> bool:
    """Whether an axis with these lengths in the operands (1 is broadcast) is certainly not empty."""
    return any(isinstance(n, int) and n > 1 for n in lengths) or all(n == 1 for n in lengths)


def _same(lengths: Sequence[int | ir.SymbolicDim]) -> bool:
    """Whether the lengths other than 1 are certainly equal."""
    first, *rest = [n for n in lengths if n != 1] or [1]
    known = isinstance(first, int) or first.value is not None or not rest
    return known and all(n == first for n in rest)


def _diagonal(op: Recorder, x: ir.Value, first: int, second: int, rank: int) -> ir.Value:
    """True where the indices along two axes are equal."""
    shape = op.shape_of(x)
    steps = op.Range(0, op.Gather(shape, first), 1)
    along = [op.Unsqueeze(steps, [p for p in range(rank) if p != axis]) for axis in (first, second)]
    return op.Equal(*along)


def _parse(node: ForwardNode) -> tuple[list[str], str]:
    """The terms and the result of the equation, with letters in place of an ellipsis."""
    left, arrow, result = node.attribute("equation").replace(" ", "").partition("->")
    terms = left.split(",")
    hidden = [node.rank(i) - len(term.replace("...", "")) for i, term in enumerate(terms)]
    free = [c for c in string.ascii_letters if c not in left]
    count = max((n for n, term in zip(hidden, terms, strict=True) if "..." in term), default=0)
    if count > len(free):
        raise node.unsupported("its equation and ranks need more than 52 letters")
    letters = "".join(free[:count])
    if not arrow:
        labels = left.replace("...", "").replace(",", "")
        result = "..." + "".join(sorted(k for k in set(labels) if labels.count(k) == 1))
    terms = [t.replace("...", letters[count - n :]) for t, n in zip(terms, hidden, strict=True)]
    return terms, result.replace("...", letters)


@gradient("Det")
def det_gradient(node: ForwardNode) -> ir.Value:
    op, x = node.op, node.input(0)
    size = x.shape[-1] if x.shape is not None else None
    dy = op.Unsqueeze(node.grad(0), [-2, -1])
    if size == 0:
        return op.full_like(x, 0.0)
    if size == 1:
        return dy
    if isinstance(size, int) and size <= _LARGEST_COFACTORS:
        return dy * _cofactors(op, x, size, node.rank())
    scale = dy * op.Unsqueeze(node.output(0), [-2, -1])
    inverse = op.Inverse(x, _domain=DOMAIN)
    return scale * (_turned(op, inverse) if x.shape is None else transposed(op, inverse, len(x.shape)))


# Up to this size, the gradient of a determinant is computed from cofactors, which also exist for singular
# matrices.
_LARGEST_COFACTORS = 6


def _cofactors(op: Recorder, x: ir.Value, size: int, rank: int) -> ir.Value:
    others = np.array([[j for j in range(size) if j != i] for i in range(size)], np.int64)
    minors = op.Gather(op.Gather(x, others, axis=rank - 2), others, axis=rank)
    # row, rows of the minor, column, columns of the minor
    minors = op.Transpose(minors, perm=[*range(rank - 2), rank - 2, rank, rank - 1, rank + 1])
    signs = (-1.0) ** np.add.outer(np.arange(size), np.arange(size))
    return op.Det(minors) * op.CastLike(op.constant(signs), x)


@gradient("Inverse", domain=DOMAIN)
def inverse_gradient(node: ForwardNode) -> ir.Value:
    op, y, shape = node.op, node.output(0), node.input(0).shape
    y = _turned(op, y) if shape is None else transposed(op, y, len(shape))
    return -op.MatMul(op.MatMul(y, node.grad(0)), y)


@gradient("DFT")
def dft_gradient(node: ForwardNode) -> ir.Value:
    op, x, dy = node.op, node.input(0), node.grad(0)
    inverse, onesided = bool(node.attribute("inverse")), bool(node.attribute("onesided"))
    axis = _dft_axis(node)
    given = node.optional(1)
    own = _dft_length(op, x, axis)
    if given is not None:
        length = op.Cast(op.Reshape(given, [1]), to=TensorProto.INT64)
    else:
        length = _dft_length(op, node.output(0), axis) if inverse else own
    scale = op.CastLike(length, x)
    if inverse and onesided:
        _require_half(node)
        # Each frequency also stands for its conjugate, except the first and, for even lengths, the last.
        dx = _dft(node, dy, length, axis, onesided=1)
        steps = op.Range(0, op.Squeeze(length, [0]) / 2 + 1, 1)
        single = op.Equal(op.Mod(steps * 2, length), 0)
        weights = op.Where(single, op.number(1.0, x), op.number(2.0, x))
        behind = _dft_rank(node) - axis
        shape = op.Concat([-1], op.Expand(op.constant(np.array([1], np.int64)), op.Sub(behind, [1])), axis=0)
        dx = dx * op.Reshape(weights / scale, shape)
    elif inverse:
        dx = _dft(node, dy, length, axis) / scale
    else:
        # A one-sided spectrum is padded with zeros.
        dx = _dft(node, dy, length, axis, inverse=1) * scale
    parts = x.shape[-1] if x.shape is not None else None
    if parts != 2:
        # A real signal has no imaginary part.
        dx = op.Slice(dx, [0], op.Shape(x, start=-1) if parts != 1 else [1], [-1])
    if given is None:
        return dx
    # Elements that were cut off have a gradient of 0; padding has none.
    there = op.Add(op.Div(length, [2]), [1]) if inverse and onesided else length
    pads = op.Concat([0], own - there, axis=0)
    return op.Pad(dx, pads, None, axis, rank=None if x.shape is None else len(x.shape))


def _require_half(node: ForwardNode) -> None:
    """Refuse a number of frequencies for which onnxruntime's result differs from ONNX's."""
    length, axis, shape = node.constant(1), node.constant(2), node.input(0).shape
    place = node.attribute("axis") if node.op.opset < 20 else -2 if axis is None else int(axis.item())
    count = None if shape is None or (axis is None and node.optional(2) is not None) else shape[place]
    if length is not None and isinstance(count, int) and count != int(length.item()) // 2 + 1:
        raise node.unsupported(
            f"it has {count} frequencies for an inverse transform of length {int(length.item())}: "
            "onnxruntime's result differs from ONNX's unless there are half the length plus 1"
        )


def _dft(node: ForwardNode, value: ir.Value, length: ir.Value, axis: ir.Value, **attributes: int) -> ir.Value:
    op = node.op
    count = op.Squeeze(length, [0])
    if op.opset >= 20:
        return op.DFT(value, count, op.Squeeze(axis, [0]), **attributes)
    return op.DFT(value, count, axis=node.attribute("axis"), **attributes)


def _dft_axis(node: ForwardNode) -> ir.Value:
    """The axis as a vector of length 1, counted from the front."""
    op, shape, given = node.op, node.input(0).shape, node.constant(2)
    axis = node.attribute("axis") if op.opset < 20 else -2 if node.optional(2) is None else given
    if axis is not None and shape is not None:
        return op.constant(np.array([int(axis) % len(shape)], np.int64))
    return op.Mod(op.Reshape(node.input(2), [1]) if axis is None else [int(axis)], _dft_rank(node))


def _dft_rank(node: ForwardNode) -> ir.Value:
    """The rank of the signal as a vector of length 1."""
    op, x = node.op, node.input(0)
    return op.Shape(op.Shape(x)) if x.shape is None else op.constant(np.array([len(x.shape)], np.int64))


def _dft_length(op: Recorder, value: ir.Value, axis: ir.Value) -> ir.Value:
    return op.Gather(op.shape_of(value), axis)
