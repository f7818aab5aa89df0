"""Sizes as expressions of other sizes, in a form in which equal expressions of a kind are identical."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass

# A size without a name of its own: what computes it, and from what.
Computed = tuple[object, ...]
Atom = str | Computed
Monomial = tuple[Atom, ...]


@dataclass(frozen=True)
class Size:
    """A polynomial with integer coefficients: a sum of products of atoms.

    An atom is the name of a size, or a tuple that begins with a word and describes how it is computed.
    """

    terms: frozenset[tuple[Monomial, int]]

    @staticmethod
    def of(number: int) -> Size:
        return Size(frozenset([((), number)] if number else []))

    @staticmethod
    def atom(atom: Atom) -> Size:
        return Size(frozenset([((atom,), 1)]))

    @property
    def number(self) -> int | None:
        """The size if it is a known number."""
        if not self.terms:
            return 0
        ((monomial, factor),) = self.terms if len(self.terms) == 1 else [(("",), 0)]
        return None if monomial else factor

    @property
    def single(self) -> Atom | None:
        """The atom if there is nothing else."""
        ((monomial, factor),) = self.terms if len(self.terms) == 1 else [((), 0)]
        return monomial[0] if len(monomial) == 1 and factor == 1 else None

    @property
    def is_size(self) -> bool:
        """Whether it is known not to be negative."""
        return all(f >= 0 and all(map(_is_size, monomial)) for monomial, f in self.terms)

    def __add__(self, other: Size) -> Size:
        found = dict(self.terms)
        for monomial, factor in other.terms:
            found[monomial] = found.get(monomial, 0) + factor
        return Size(frozenset((m, f) for m, f in found.items() if f))

    def __sub__(self, other: Size) -> Size:
        return self + other * Size.of(-1)

    def __mul__(self, other: Size) -> Size:
        found: dict[Monomial, int] = {}
        for one, first in self.terms:
            for two, second in other.terms:
                monomial = tuple(sorted((*one, *two), key=repr))
                found[monomial] = found.get(monomial, 0) + first * second
        return Size(frozenset((m, f) for m, f in found.items() if f))

    def __floordiv__(self, divisor: int) -> Size:
        """Return the quotient, rounded down; the divisor is positive."""
        # A quotient of a quotient is one: (n // s + b) // t = (n + b s) // (s t).
        atoms = [m[0] for m, f in self.terms if len(m) == 1 and f == 1 and isinstance(m[0], tuple)]
        if len(atoms) == 1 and isinstance(atoms[0], tuple) and atoms[0][0] == "//":
            _, inner, by = atoms[0]
            rest = (self - Size.atom(atoms[0])).number
            if rest is not None and isinstance(inner, Size) and isinstance(by, int):
                return (inner + Size.of(rest * by)) // (by * divisor)
        # Multiples of the divisor are not rounded.
        whole = Size(frozenset((m, f // divisor) for m, f in self.terms if f // divisor))
        rest_ = Size(frozenset((m, f % divisor) for m, f in self.terms if f % divisor))
        number = rest_.number
        return whole if number is not None else whole + Size.atom(("//", rest_, divisor))

    def shared(self, divisor: Size) -> Size:
        """Return the quotient of a division without remainder, by a divisor that is not 0."""
        if len(divisor.terms) == 1:
            ((parts, by),) = divisor.terms
            found = [_without(monomial, parts) for monomial, _ in self.terms]
            exact = all(factor % by == 0 for _, factor in self.terms)
            if exact and all(monomial is not None for monomial in found):
                pairs = zip(found, self.terms, strict=True)
                return Size(frozenset((m, f // by) for m, (_, f) in pairs if m is not None))
        return Size.of(1) if self == divisor else Size.atom(("/", self, divisor))


def product(sizes: Iterable[Size]) -> Size:
    """Return the product of sizes."""
    return functools.reduce(operator.mul, sizes, Size.of(1))


def broadcast(sizes: Iterable[Size]) -> Size:
    """Return the size to which operands of these sizes are broadcast; each of them is that size or 1."""
    found: set[Size] = set()
    for size in sizes:
        if size.number is not None and size.number != 1:
            return size
        single = size.single
        members = single[1] if isinstance(single, tuple) and single[0] == "broadcast" else None
        if isinstance(members, frozenset):
            found |= members
        elif size.number is None:
            found.add(size)
    if len(found) == 1:
        return found.pop()
    return Size.atom(("broadcast", frozenset(found))) if found else Size.of(1)


def _is_size(atom: Atom) -> bool:
    if isinstance(atom, str):
        return True
    inner = atom[1] if atom[0] == "//" else None
    return inner.is_size if isinstance(inner, Size) else atom[0] != "element"


def _without(monomial: Monomial, parts: Monomial) -> Monomial | None:
    """Return the product without some factors; None if it does not have them."""
    left = list(monomial)
    for part in parts:
        if part not in left:
            return None
        left.remove(part)
    return tuple(left)
