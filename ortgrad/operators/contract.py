"""What the shapes of an operator's inputs must satisfy: declared once, checked in three ways.

    dims={"dY": "N M *Y", "X": "N C *S", "W": "M C *K:S", "bias": "M", "X_shape[]": "N C *S"}

A pattern lists the dimensions of an input. Equal names are equal numbers:

    7          this number
    N          one dimension
    3*H        three times the dimension H
    *S         a run of any number of dimensions
    *K:S       a run of as many dimensions as S has
    1^S        as many ones as S has dimensions; any number of ones if there is no S

"X_shape[]" is about what stands in an integer vector rather than its shape. Where a pattern depends on
attributes, `dims` is a function of them. Every name of a run must be met alone among new runs in a pattern.

Kernels are checked before each call. When a model is prepared, what is known of its shapes is checked; what
is not known is compared at run time by nodes that `Contract.record` adds to the body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from onnx import TensorProto

from ortgrad.errors import NodeError

if TYPE_CHECKING:
    import onnx_ir as ir

    from ortgrad.graph.recorder import Recorder

Patterns: TypeAlias = "Mapping[str, str]"
Dims: TypeAlias = "Patterns | Callable[..., Patterns]"
# Dimensions as far as they are known; None if not even their number is.
Known: TypeAlias = "Sequence[int | str | None] | None"
# A vector of dimensions: numbers where they are known, else something that the graph computes.
_Vector: TypeAlias = "tuple[int, ...] | ir.Value"

_END = 2**63 - 1


def with_axis(axis: int) -> str:
    """The pattern of a tensor that has such an axis."""
    if axis < 0:
        return " ".join(["*R", *(f"D{i}" for i in range(axis, 0))]).replace("D-", "E")
    return " ".join([*(f"D{i}" for i in range(axis + 1)), "*R"])


class _Token(NamedTuple):
    name: str  # "" for a number
    factor: int = 1  # the number itself, or what the dimension is multiplied with
    run: bool = False
    ones: bool = False  # 1^name
    like: str = ""  # the run that has as many dimensions

    @classmethod
    def parse(cls, text: str) -> _Token:
        if text.startswith("1^"):
            return cls(text[2:], run=True, ones=True)
        if text.startswith("*"):
            name, _, like = text[1:].partition(":")
            return cls(name, run=True, like=like)
        factor, star, name = text.partition("*")
        if star:
            return cls(name, int(factor))
        return cls("", int(text)) if text.isdigit() else cls(text)


class _Row(NamedTuple):
    """The pattern of one input, or of what stands in it."""

    name: str
    parameter: int
    contents: bool
    tokens: tuple[_Token, ...]


class Contract:
    """The patterns for one choice of attributes."""

    def __init__(self, inputs: Sequence[str], patterns: Patterns, attributes: Mapping[str, Any]) -> None:
        """`attributes` are those that the patterns depend on."""
        rows = []
        for name, pattern in patterns.items():
            plain = name.removesuffix("[]")
            tokens = tuple(_Token.parse(text) for text in pattern.split())
            rows.append(_Row(plain, inputs.index(plain), plain != name, tokens))
        self._rows = rows
        self._passed: Any = None
        shown = (f"{name} [{', '.join(pattern.split())}]" for name, pattern in patterns.items())
        given = ", ".join(f"{name}={value}" for name, value in attributes.items() if value is not None)
        self.text = ", ".join(shown).replace("[] [", " = [") + (f" with {given}" if given else "")

    def check_arrays(self, arrays: Sequence[np.ndarray | None]) -> None:
        """Raise ValueError unless the arrays' shapes, and what the contract says of contents, fit."""
        # One node sees the same shapes again and again.
        given = [None if a is None else a.shape for a in arrays]
        contents = [
            None if (array := arrays[row.parameter]) is None else array.tolist()
            for row in self._rows
            if row.contents
        ]
        if (given, contents) != self._passed:
            values = dict(zip([row.parameter for row in self._rows if row.contents], contents, strict=True))
            self.check(given, values)
            self._passed = given, contents

    def check_values(self, values: Sequence[ir.Value | None]) -> None:
        """The same for values of a graph, as far as their shapes are known."""
        shapes = [None if value is None else _dimensions(value) for value in values]
        contents = {}
        for row in self._rows:
            value = values[row.parameter]
            known = None if value is None or not row.contents else _contents(value)
            if known is not None:
                contents[row.parameter] = known
        self.check(shapes, contents)

    def check(self, shapes: Sequence[Known], contents: Mapping[int, Any]) -> None:
        """Raise ValueError if what is known of the inputs' shapes contradicts the patterns."""
        dims: dict[str, int] = {}
        runs: dict[str, tuple[Any, ...]] = {}
        for row in self._rows:
            shape: Any = shapes[row.parameter]
            if row.contents:
                if shape is not None and len(shape) != 1:
                    raise self._misfit(row, shapes, contents)
                shape = contents.get(row.parameter)
                if shape is not None and any(d is not None and d < 0 for d in shape):
                    raise self._misfit(row, shapes, contents)
            if shape is not None and not _fits(row.tokens, shape, dims, runs):
                raise self._misfit(row, shapes, contents)

    def _misfit(self, row: _Row, shapes: Sequence[Known], contents: Mapping[int, Any]) -> ValueError:
        def given(row: _Row) -> str:
            value = contents.get(row.parameter) if row.contents else None
            known = shapes[row.parameter] if value is None else value
            dims = (
                "unknown" if known is None else f"[{', '.join('?' if d is None else str(d) for d in known)}]"
            )
            return f"{row.name}{' =' * (value is not None)} {dims}"

        others = ", ".join(given(r) for r in self._rows if r is not row and shapes[r.parameter] is not None)
        return ValueError(
            f"{given(row)} does not fit{' with ' if others else ''}{others}; the shapes must be {self.text}"
        )

    def record(self, op: Recorder, operands: Sequence[ir.Value | None]) -> list[ir.Value]:
        """One vector of zeros if the operands' shapes fit; none if that is known already."""
        bound: dict[str, _Vector] = {}
        found: list[ir.Value] = []
        for row in self._rows:
            value = operands[row.parameter]
            if value is not None:
                _Comparison(op, row, value, bound, found, self.text).run()
        return [found[0] if len(found) == 1 else op.Concat(*found, axis=0)] if found else []

    @property
    def names(self) -> list[str]:
        """The inputs that it speaks of."""
        return [row.name for row in self._rows]


def _fits(tokens: Sequence[_Token], shape: Sequence[Any], dims: dict[str, int], runs: dict[str, Any]) -> bool:
    """Match one pattern; unknown dimensions are None or names, which prove nothing."""
    lengths = [_count(token, runs) for token in tokens]
    if lengths.count(None) > 1:
        return True  # it is not known where one run ends and the other begins
    room = len(shape) - sum(n for n in lengths if n is not None)
    if room < 0 or (room and None not in lengths):
        return False
    at = 0
    for token, count in zip(tokens, lengths, strict=True):
        if not token.run:
            dim = shape[at]
            at += 1
            if not isinstance(dim, int):
                continue
            if not token.name:
                if dim != token.factor:
                    return False
            elif dim % token.factor or dims.setdefault(token.name, dim // token.factor) * token.factor != dim:
                return False
            continue
        length = room if count is None else count
        part = tuple(d if isinstance(d, int) else None for d in shape[at : at + length])
        at += length
        if token.ones:
            if any(d not in (1, None) for d in part):
                return False
            continue
        known = runs.get(token.name, part)
        if known != part:
            if any(a != b for a, b in zip(known, part, strict=True) if a is not None and b is not None):
                return False
            part = tuple(b if a is None else a for a, b in zip(known, part, strict=True))
        runs[token.name] = part
    return True


def _count(token: _Token, runs: Mapping[str, Sequence[Any]]) -> int | None:
    """How many dimensions a token stands for, if that is known."""
    run = runs.get(token.name, runs.get(token.like)) if token.run else ()
    return 1 if not token.run else None if run is None else len(run)


class _Comparison:
    """Compares one operand with its pattern at run time; binds the names that are new."""

    def __init__(
        self,
        op: Recorder,
        row: _Row,
        value: ir.Value,
        bound: dict[str, _Vector],
        found: list[ir.Value],
        text: str,
    ) -> None:
        self.op, self.row, self.value, self.bound, self.found = op, row, value, bound, found
        self.text = text
        self.dims = _contents(value) if row.contents else _dimensions(value)

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
        """The operand is one vector of numbers that are not negative."""
        op, value = self.op, self.value
        if value.shape is None:
            self.found.append(op.Sub(op.Shape(op.Shape(value)), [1]))
        if self.dims is None or any(d is None for d in self.dims):
            self.found.append(op.Min(op.Reshape(self._vector, [-1]), [0]))

    @property
    def _vector(self) -> ir.Value:
        """All dimensions of the operand."""
        if self.dims is not None and all(isinstance(d, int) for d in self.dims):
            return self.op.constant(np.array(self.dims, np.int64))
        if not self.row.contents:
            return self.op.Shape(self.value)
        known = self.value.dtype is not None and self.value.dtype.name == "INT64"
        return self.value if known else self.op.Cast(self.value, to=TensorProto.INT64)

    def _length(self, token: _Token) -> int | None:
        if not token.run:
            return 1
        vector = self.bound.get(token.name, self.bound.get(token.like))
        return None if vector is None else _length_of(vector)

    class _Part(NamedTuple):
        vector: _Vector
        compared: bool  # whether it says something about the operand

    def _part(
        self, token: _Token, before: Sequence[int | None], after: Sequence[int | None]
    ) -> _Comparison._Part:
        op = self.op
        if not token.name:
            return self._Part((token.factor,), True)
        vector = self.bound.get(token.name)
        if token.ones:
            if vector is None:
                raise NodeError(f"{self.row.name}: the pattern speaks of {token.name!r} too early")
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

    def _slice(self, token: _Token, before: Sequence[int | None], after: Sequence[int | None]) -> _Vector:
        """The operand's own dimensions at the place of a token."""
        start: int | None = None if None in before else sum(n or 0 for n in before)
        stop: int | None = None if None in after else -sum(n or 0 for n in after)
        if not token.run:
            stop = stop if start is None else start + 1
            start = stop - 1 if start is None and stop is not None else start
        if start is None or stop is None:
            raise NodeError(
                f"the number of dimensions of {self.value.name!r} is not known; declare its shape "
                "(symbolic dimensions will do)"
            )
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
            return  # `check` has seen all of it
        actual = self._vector
        values = [_as_value(op, part) for part in parts if part != ()]
        if not values:
            expected = op.constant(np.zeros(0, np.int64))
        else:
            expected = values[0] if len(values) == 1 else op.Concat(*values, axis=0)
        if length is None or self.dims is None:
            # Sub would broadcast a vector of one element.
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
    import onnx_ir as ir

    if length is not None:
        vector.shape = ir.Shape([length])


def _dimensions(value: ir.Value) -> tuple[int | None, ...] | None:
    if value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else None for dim in value.shape)


def _contents(value: ir.Value) -> tuple[int | None, ...] | None:
    """What stands in a vector, if that is constant; so many times None if only its length is known."""
    import onnx_ir as ir

    tensor = ir.convenience.get_const_tensor(value)
    if tensor is not None and not value.is_graph_input():
        return tuple(int(d) for d in tensor.numpy().reshape(-1))
    length = _length_of(value)
    return None if length is None else (None,) * length
