"""Contracts: patterns for the shapes of an operator's inputs, declared once and checked in three ways.

    dims={"dY": "N M *Y", "X": "N C *S", "W": "M C *K:S", "bias": "M", "X_shape[]": "N C *S"}

A pattern lists the dimensions of an input. Equal names stand for equal numbers:

    7          this number
    N          one dimension
    3*H        three times the dimension H
    *S         a run of any number of dimensions
    *K:S       a run of as many dimensions as S has
    1^S        as many ones as S has dimensions; any number of ones if there is no S

"X_shape[]" describes the elements of an integer vector rather than its shape. Where a pattern depends on
attributes, `dims` is a function of them. Every run must be introduced by a pattern without other new runs.

The inputs of a kernel are checked before each call. When a model is prepared, its known shapes are checked;
unknown dimensions are compared at run time, by nodes of the body (see ortgrad.graph.contract_checks).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Patterns: TypeAlias = "Mapping[str, str]"
Dims: TypeAlias = "Patterns | Callable[..., Patterns]"
# A shape with None or a name for each unknown dimension; None if the rank is unknown.
Known: TypeAlias = "Sequence[int | str | None] | None"
# More than any tensor of NumPy has.
MOST_DIMENSIONS = 64


def with_axis(axis: int) -> str:
    """Return the pattern of a tensor whose rank is large enough for the axis."""
    if axis < 0:
        return " ".join(["*R", *(f"D{i}" for i in range(axis, 0))]).replace("D-", "E")
    return " ".join([*(f"D{i}" for i in range(axis + 1)), "*R"])


def check_length(name: str, length: int) -> None:
    """Raise ValueError if a vector of this length is no shape, before something as long is made of it."""
    if length > MOST_DIMENSIONS:
        raise ValueError(f"{name} has {length} numbers: no tensor has so many dimensions")


class Token(NamedTuple):
    name: str  # "" for a number
    factor: int = 1  # the number itself, or the factor of the dimension
    run: bool = False
    ones: bool = False  # 1^name
    like: str = ""  # a run with the same number of dimensions

    @classmethod
    def parse(cls, text: str) -> Token:
        if text.startswith("1^"):
            return cls(text[2:], run=True, ones=True)
        if text.startswith("*"):
            name, _, like = text[1:].partition(":")
            return cls(name, run=True, like=like)
        factor, star, name = text.partition("*")
        if star:
            return cls(name, int(factor))
        return cls("", int(text)) if text.isdigit() else cls(text)


class Row(NamedTuple):
    """The pattern of one input's shape, or of its elements if `contents` is true."""

    name: str
    parameter: int
    contents: bool
    tokens: tuple[Token, ...]


class Contract:
    """The patterns for one choice of attributes."""

    def __init__(self, inputs: Sequence[str], patterns: Patterns, attributes: Mapping[str, Any]) -> None:
        """`attributes` are the attributes that the patterns depend on; they are shown in errors."""
        rows = []
        for name, pattern in patterns.items():
            plain = name.removesuffix("[]")
            tokens = tuple(Token.parse(text) for text in pattern.split())
            rows.append(Row(plain, inputs.index(plain), plain != name, tokens))
        self.rows = rows
        self._passed: Any = None
        shown = (f"{name} [{', '.join(pattern.split())}]" for name, pattern in patterns.items())
        given = ", ".join(f"{name}={value}" for name, value in attributes.items() if value is not None)
        self.text = ", ".join(shown).replace("[] [", " = [") + (f" with {given}" if given else "")

    def check_arrays(self, arrays: Sequence[np.ndarray | None]) -> None:
        """Raise ValueError unless the arrays' shapes, and the elements that the contract covers, match."""
        # The shapes of a node rarely change between calls, so the last accepted ones are remembered.
        given = [None if a is None else a.shape for a in arrays]
        contents = []
        for row in self.rows:
            if row.contents:
                array = arrays[row.parameter]
                if array is not None:
                    check_length(row.name, array.size)
                contents.append(None if array is None else array.tolist())
        if (given, contents) != self._passed:
            values = dict(zip([row.parameter for row in self.rows if row.contents], contents, strict=True))
            self.check(given, values)
            self._passed = given, contents

    def check(self, shapes: Sequence[Known], contents: Mapping[int, Any]) -> None:
        """Raise ValueError if the known part of the inputs' shapes contradicts the patterns."""
        dims: dict[str, int] = {}
        runs: dict[str, tuple[Any, ...]] = {}
        for row in self.rows:
            shape: Any = shapes[row.parameter]
            if row.contents:
                if shape is not None and len(shape) != 1:
                    raise self._misfit(row, shapes, contents)
                shape = contents.get(row.parameter)
                if shape is not None and any(d is not None and d < 0 for d in shape):
                    raise self._misfit(row, shapes, contents)
            if shape is not None and not _fits(row.tokens, shape, dims, runs):
                raise self._misfit(row, shapes, contents)

    def _misfit(self, row: Row, shapes: Sequence[Known], contents: Mapping[int, Any]) -> ValueError:
        def given(row: Row) -> str:
            value = contents.get(row.parameter) if row.contents else None
            known = shapes[row.parameter] if value is None else value
            dims = (
                "unknown" if known is None else f"[{', '.join('?' if d is None else str(d) for d in known)}]"
            )
            return f"{row.name}{' =' * (value is not None)} {dims}"

        others = ", ".join(given(r) for r in self.rows if r is not row and shapes[r.parameter] is not None)
        return ValueError(
            f"{given(row)} does not fit{' with ' if others else ''}{others}; the shapes must be {self.text}"
        )

    @property
    def names(self) -> list[str]:
        """The names of the inputs that have a pattern."""
        return [row.name for row in self.rows]


def _fits(tokens: Sequence[Token], shape: Sequence[Any], dims: dict[str, int], runs: dict[str, Any]) -> bool:
    """Match one pattern. Unknown dimensions (None or a name) match anything."""
    lengths = [_count(token, runs) for token in tokens]
    if lengths.count(None) > 1:
        return True  # the boundary between the runs is unknown
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


def _count(token: Token, runs: Mapping[str, Sequence[Any]]) -> int | None:
    """Return the number of dimensions that a token stands for; None if it is unknown."""
    run = runs.get(token.name, runs.get(token.like)) if token.run else ()
    return 1 if not token.run else None if run is None else len(run)
