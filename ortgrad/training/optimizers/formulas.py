"""Formulas of one element, evaluated on arrays in NumPy, with as few temporary arrays as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ortgrad.errors import RegistrationError


class _Term(np.lib.mixins.NDArrayOperatorsMixin):
    """A number or an array of a formula that is being recorded: every operation on it becomes a step."""

    def __init__(self, recorded: _Recorded) -> None:
        self.recorded, self.number = recorded, recorded.terms
        recorded.terms += 1

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: _Term) -> _Term:
        result = _Term(self.recorded)
        self.recorded.steps.append((ufunc, [operand.number for operand in operands], result.number))
        return result


class _Recorded:
    """The terms of a formula, and the operations of which they are the operands and results."""

    def __init__(self) -> None:
        self.terms = 0
        self.steps: list[tuple[np.ufunc, list[int], int]] = []


class Program(NamedTuple):
    """The operations of a formula in order.

    Each has the places of its operands and of its result, among the arrays, the numbers and scratch arrays.
    """

    steps: Sequence[tuple[np.ufunc, Sequence[int], int]]
    scratch: int

    def run(
        self, arrays: Sequence[np.ndarray], numbers: Sequence[Any], scratch: Sequence[np.ndarray]
    ) -> None:
        """Evaluate the formula in place."""
        values = [*arrays, *numbers, *scratch]
        for ufunc, operands, result in self.steps:
            ufunc(*[values[operand] for operand in operands], out=values[result])


def record(formula: Callable[..., Any], arrays: int, numbers: int, updated: Sequence[int]) -> Program:
    """Return the operations of a formula, which takes these numbers of arrays and of numbers.

    It returns the new values of the arrays at the places `updated`.
    """
    recorded = _Recorded()
    terms = [_Term(recorded) for _ in range(arrays + numbers)]
    results = formula(*terms)
    targets = {
        result.number: place
        for result, place in zip(results if len(updated) > 1 else [results], updated, strict=True)
    }
    last = {operand: i for i, (_, operands, _) in enumerate(recorded.steps) for operand in operands}
    written = {targets[result]: i for i, (_, _, result) in enumerate(recorded.steps) if result in targets}
    places = {number: number for number in range(len(terms))}
    free: list[int] = []
    count, steps = len(terms), []
    for i, (ufunc, operands, result) in enumerate(recorded.steps):
        used = [places[operand] for operand in operands]
        done = [operand for operand in dict.fromkeys(operands) if last[operand] == i]
        free += [places[each] for each in done if places[each] >= len(terms)]
        # An array whose old values are not needed any more has room for others until the new ones come.
        own = [each for each in done if each in written and last.get(result, i) <= written[each]]
        if result in targets:
            place = targets[result]
            if last.get(place, 0) > i:
                raise RegistrationError(
                    f"{formula.__name__} reads an array after it has computed the new one"
                )
        elif own:
            place = own[0]
        else:
            place = free.pop() if free else count
            count = max(count, place + 1)
        places[result] = place
        steps.append((ufunc, used, place))
    return Program(steps, count - len(terms))
