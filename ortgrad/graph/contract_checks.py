"""Checks of a contract on graph values: known shapes when a model is prepared, the others at run time.

See ortgrad.operators.contract for the patterns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from ortgrad.errors import NodeError, unknown_rank
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import constant_tensor, sizes_of
from ortgrad.operators.contract import Contract, Row, Token, check_length

# A vector of dimensions: a tuple if all are known, else a value that the graph computes.
_Vector: TypeAlias = "tuple[int, ...] | ir.Value"

_END = 2**63 - 1


def check_values(contract: Contract, values: Sequence[ir.Value | None]) -> None:
    """Raise ValueError if the known part of the values' shapes contradicts the contract."""
    shapes = [sizes_of(value) for value in values]
    contents = {}
    for row in contract.rows:
        value = values[row.parameter]
        known = None if value is None or not row.contents else _contents(row.name, value)
        if known is not None:
            contents[row.parameter] = known
    contract.check(shapes, contents)


def record_comparisons(
    op: Recorder, contract: Contract, operands: Sequence[ir.Value | None]
) -> list[ir.Value]:
    """Record a vector that is all zeros if the operands' shapes match; returns [] if they are known to."""
    bound: dict[str, _Vector] = {}
    found: list[ir.Value] = []
    for row in contract.rows:
        value = operands[row.parameter]
        if value is not None:
            _Comparison(op, row, value, bound, found, contract.text).run()
    return [found[0] if len(found) == 1 else op.Concat(*found, axis=0)] if found else []


class _Comparison:
    """Compares one operand with its pattern at run time and binds the names that are new."""

    def __init__(
        self,
        op: Recorder,
        row: Row,
        value: ir.Value,
        bound: dict[str, _Vector],
        found: list[ir.Value],
        text: str,
    ) -> None:
        self.op, self.row, self.value, self.bound, self.found = op, row, value, bound, found
        self.text = text
        self.dims = _contents(self.row.name, value) if row.contents else sizes_of(value)

    def run(self) -> None:
        op, tokens = self.op, self.row.tokens
        if self.row.contents:
            self._require_lengths()
        if len(tokens) == 1 and tokens[0].ones and tokens[0].name not in self.bound:
            if self.dims is None or any(d is None for d in self.dims):
                self.found.append(op.Sub(self._vector, [1]))
            return
        lengths = [self._length(token) for token in tokens]
        new = [t for t in tokens if t.run and t.name not in self.bound]
        fixed = sum(n for n in lengths if n is not None)
        if self.dims is None and new and not new[0].like and fixed:
            self.found.append(op.Sub(op.Min(op.Shape(self._vector), [fixed]), [fixed]))
        compare, parts = not new, []
        for i, token in enumerate(tokens):
            part = self._part(token, lengths[:i], lengths[i + 1 :])
            compare = compare or part.compared
            parts.append(part.vector)
        if compare:
            self._compare(parts, None if None in lengths else fixed)

    def _require_lengths(self) -> None:
        """Require the operand to be a vector without negative numbers."""
        op, value = self.op, self.value
        if value.shape is None:
            self.found.append(op.Sub(op.Shape(op.Shape(value)), [1]))
        if self.dims is None or any(d is None for d in self.dims):
            self.found.append(op.Min(op.Reshape(self._vector, [-1]), [0]))

    @property
    def _vector(self) -> ir.Value:
        """All dimensions of the operand, as a value."""
        if self.dims is not None and all(isinstance(d, int) for d in self.dims):
            return self.op.constant(np.array(self.dims, np.int64))
        if not self.row.contents:
            return self.op.Shape(self.value)
        known = self.value.dtype is not None and self.value.dtype.name == "INT64"
        # Whether it is a vector is compared elsewhere; onnxruntime may abort if Concat gets anything else.
        vector = self.value if self.dims is not None else self.op.Reshape(self.value, [-1])
        return vector if known else self.op.Cast(vector, to=7)

    def _length(self, token: Token) -> int | None:
        if not token.run:
            return 1
        vector = self.bound.get(token.name, self.bound.get(token.like))
        return None if vector is None else _length_of(vector)

    class _Part(NamedTuple):
        vector: _Vector
        compared: bool  # whether the operand must be compared with it

    def _part(
        self, token: Token, before: Sequence[int | None], after: Sequence[int | None]
    ) -> _Comparison._Part:
        op = self.op
        if not token.name:
            return self._Part((token.factor,), True)
        vector = self.bound.get(token.name)
        if token.ones:
            if vector is None:
                raise NodeError(f"{self.row.name}: the pattern uses {token.name!r} before it is bound")
            length = _length_of(vector)
            if length is not None:
                return self._Part((1,) * length, True)
            return self._Part(op.Expand([1], op.Shape(vector)), True)
        if vector is not None:
            return self._Part(_times(op, vector, token.factor), True)
        own = self._slice(token, before, after)
        if token.factor != 1:
            share = (
                tuple(d // token.factor for d in own)
                if isinstance(own, tuple)
                else op.Div(own, [token.factor])
            )
            self.bound[token.name] = share
            return self._Part(_times(op, share, token.factor), not isinstance(own, tuple))
        self.bound[token.name] = own
        if token.like and (like := self.bound.get(token.like)) is not None:
            lengths = _length_of(own), _length_of(like)
            if None in lengths:
                vectors = [op.Shape(_as_value(op, v)) for v in (own, like)]
                self.found.append(op.Sub(*vectors))
        return self._Part(own, False)

    def _slice(self, token: Token, before: Sequence[int | None], after: Sequence[int | None]) -> _Vector:
        """Return the operand's dimensions at the position of a token."""
        start: int | None = None if None in before else sum(n or 0 for n in before)
        stop: int | None = None if None in after else -sum(n or 0 for n in after)
        if not token.run:
            stop = stop if start is None else start + 1
            start = stop - 1 if start is None and stop is not None else start
        if start is None or stop is None:
            raise NodeError(unknown_rank(repr(self.value.name)))
        if self.dims is not None:
            part = self.dims[start : stop or None]
            if all(isinstance(d, int) for d in part):
                return tuple(d for d in part if d is not None)
            length: int | None = len(part)
        elif token.run and not start and not stop:
            return self._vector
        else:
            length = None if token.run else 1
        result: ir.Value = self.op.Slice(self._vector, [start], [stop or _END])
        _set_length(result, length)
        return result

    def _compare(self, parts: Sequence[_Vector], length: int | None) -> None:
        op = self.op
        if self.dims is not None and None not in self.dims and all(isinstance(p, tuple) for p in parts):
            return  # `check_values` has compared these already
        actual = self._vector
        values = [_as_value(op, part) for part in parts if part != ()]
        if not values:
            expected = op.constant(np.zeros(0, np.int64))
        else:
            expected = values[0] if len(values) == 1 else op.Concat(*values, axis=0)
        if length is None or self.dims is None:
            # Fails if the lengths differ; Sub alone would broadcast a vector of one element.
            count = op.Shape(expected) if length is None else [length]
            actual = op.saying(op.Reshape(actual, count, allowzero=1), self.text)
        self.found.append(op.Sub(actual, expected))


def _times(op: Recorder, vector: _Vector, factor: int) -> _Vector:
    if factor == 1:
        return vector
    if isinstance(vector, tuple):
        return tuple(factor * d for d in vector)
    product: ir.Value = op.Mul(vector, [factor])
    _set_length(product, 1)
    return product


def _as_value(op: Recorder, vector: _Vector) -> ir.Value:
    return op.constant(np.array(vector, np.int64)) if isinstance(vector, tuple) else vector


def _length_of(vector: _Vector) -> int | None:
    if isinstance(vector, tuple):
        return len(vector)
    dim = None if vector.shape is None or len(vector.shape) != 1 else vector.shape[0]
    return dim if isinstance(dim, int) else None


def _set_length(vector: ir.Value, length: int | None) -> None:
    if length is not None:
        vector.shape = ir.Shape([length])


def _contents(name: str, value: ir.Value) -> tuple[int | None, ...] | None:
    """Return the elements of a constant vector, or one None per element if only its length is known."""
    tensor = constant_tensor(value)
    length = _length_of(value) if tensor is None else tensor.size
    check_length(name, length or 0)
    if tensor is not None:
        return tuple(int(d) for d in tensor.numpy().reshape(-1))
    return None if length is None else (None,) * length
