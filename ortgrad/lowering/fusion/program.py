"""The program of a fused node: what it computes, step by step, as its attributes hold it.

    operands: ["float row", "float row", "bool one"]    of the inputs v0, v1 and v2
    steps:    ["v3 = Add(v0, v1)", "v4 = Where(v2, v3, 0.5)"]
    results:  [4]
    sums:     ["v3 over 0 2 3 without 2 3 by rows"]
    nodes:    ["layer1/Add", "layer1/Where"]

A step applies an operator of ortgrad.lowering.fusion.expressions. Its operands are inputs, results of earlier
steps and constants, which stand in as many brackets as they have dimensions. "row" and "one" tell how an
input is expected to vary along the last axes of the results: by element, or not at all. The compiled kernel
is made for that; the NumPy kernel computes with inputs that turn out to be different.

After the results come the sums: of a value over axes, some of which the sum does not keep. "by rows" tells
that the last axes are expected to be among them, "by columns" that all others are.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ortgrad.errors import NodeError
from ortgrad.lowering.fusion.expressions import Expression, find_expression, literal, own_kernel
from ortgrad.operators.contract import MOST_DIMENSIONS
from ortgrad.threads import lazy

Shape: TypeAlias = "tuple[int, ...]"
_VALUE = re.compile(r"v(\d+)")
_SUM = re.compile(r"v(\d+) over ([\d ]+?)(?: without ([\d ]+))? by (rows|columns)")


class Constant(NamedTuple):
    """A constant of one element."""

    number: float
    rank: int = 0


class Operand(NamedTuple):
    """An input: its type, "float" or "bool", and whether it varies along the rows of the results."""

    type: str
    varies: bool
    # The number of axes of one element that are added behind its own.
    ones: int = 0

    def extended(self, shape: Shape) -> Shape:
        """Return the shape of the input with these axes."""
        return (*shape, *(1,) * self.ones)


class Total(NamedTuple):
    """A sum of a value over axes. The sum has one element along each, or is without it."""

    value: int
    axes: tuple[int, ...]
    without: tuple[int, ...]
    # Whether the last axes of the value are among them, or all others.
    by_rows: bool

    def shape(self, full: Shape) -> Shape:
        """Return the shape of the sum of a value of this shape."""
        sizes = (1 if axis in self.axes else size for axis, size in enumerate(full))
        return tuple(size for axis, size in enumerate(sizes) if axis not in self.without)

    def __str__(self) -> str:
        axes, without = (" ".join(map(str, each)) for each in (self.axes, self.without))
        words = [f"v{self.value} over {axes}", *([f"without {without}"] if without else [])]
        return " ".join([*words, "by rows" if self.by_rows else "by columns"])


@dataclass(frozen=True)
class Step:
    """The application of an operator. Operands are numbers of values, or constants."""

    operator: str
    operands: tuple[int | Constant, ...]
    attributes: tuple[tuple[str, float], ...] = ()

    @lazy
    def expression(self) -> Expression:
        found = find_expression(self.operator)
        if found is None:
            raise NodeError(f"a fused node cannot compute {self.operator}")
        return found

    def __str__(self) -> str:
        arguments = [_constant_text(o) if isinstance(o, Constant) else f"v{o}" for o in self.operands]
        arguments += (f"{name}={value!r}" for name, value in self.attributes)
        return f"{self.operator}({', '.join(arguments)})"


@dataclass(frozen=True)
class Program:
    """The steps of a fused node. Values are numbered: first the inputs, then the result of every step."""

    operands: tuple[Operand, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]
    sums: tuple[Total, ...] = ()

    def to_attributes(self) -> dict[str, Any]:
        """Return the attributes that describe the program, without the names of the nodes."""
        first = len(self.operands)
        return {
            "operands": [
                f"{o.type} {'row' if o.varies else 'one'}" + (f" {o.ones}" if o.ones else "")
                for o in self.operands
            ],
            "steps": [f"v{first + i} = {step}" for i, step in enumerate(self.steps)],
            "results": list(self.results),
            "sums": list(map(str, self.sums)),
        }

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, Any]) -> Program:
        """Read the attributes; raises NodeError unless `to_attributes` wrote them."""
        try:
            operands = tuple(_read_operand(text) for text in attributes["operands"])
            steps = []
            for i, text in enumerate(attributes["steps"], len(operands)):
                steps.append(_read_step(text, i))
            results = tuple(int(i) for i in attributes["results"])
            sums = tuple(_read_sum(text) for text in attributes["sums"])
            program = cls(operands, tuple(steps), results, sums)
            program._check()
        except (AttributeError, KeyError, TypeError, ValueError, SyntaxError, RecursionError) as error:
            raise NodeError(f"the program of a fused node cannot be read: {error}") from error
        return program

    @lazy
    def types(self) -> tuple[str, ...]:
        """The type of every value."""
        return (*(operand.type for operand in self.operands), *(s.expression.gives for s in self.steps))

    @property
    def cost(self) -> int:
        """About the number of elementary operations per element."""
        return sum(step.expression.cost for step in self.steps)

    def shapes(self, inputs: Sequence[Shape], nodes: Sequence[str]) -> list[Shape]:
        """Return the shapes of the results and sums.

        Raises ValueError with the name of a node that does not fit.
        """
        shapes = self.value_shapes(inputs, nodes)
        return [*(shapes[i] for i in self.results), *(s.shape(shapes[s.value]) for s in self.sums)]

    def value_shapes(self, inputs: Sequence[Shape], nodes: Sequence[str]) -> list[Shape]:
        """Return the shape of every value, as `shapes`."""
        shapes = [operand.extended(shape) for operand, shape in zip(self.operands, inputs, strict=True)]
        for step, node in zip(self.steps, nodes, strict=True):
            given = [(1,) * o.rank if isinstance(o, Constant) else shapes[o] for o in step.operands]
            try:
                if step.expression.equal_shapes and len(set(given)) > 1:
                    raise ValueError
                shapes.append(np.broadcast_shapes(*given))
            except ValueError:
                shown = ", ".join(str(list(shape)) for shape in given)
                raise ValueError(f"node {node!r} ({step.operator}): the shapes {shown} do not fit") from None
            self._check_own(step, given)
        for total in self.sums:
            shape, axis = shapes[total.value], max(total.axes)
            if len(shape) <= axis:
                raise ValueError(f"a value of shape {list(shape)} has no axis {axis}")
        return shapes

    def _check_own(self, step: Step, shapes: list[Shape]) -> None:
        """Let the planner of an operator of ortgrad refuse its attributes."""
        own = own_kernel(step.operator)
        if own is not None and own[1].plan is not None:
            own[1].plan(*shapes, shapes[0], **dict(step.attributes))

    def _check(self) -> None:
        if not (self.operands and (self.steps or self.sums) and (self.results or self.sums)):
            raise ValueError("it has no inputs, no steps or no results")
        known = len(self.operands)
        for i, step in enumerate(self.steps, known):
            expression, count = step.expression, len(step.operands)
            if count != expression.operands and not (expression.variadic and count > 0):
                raise ValueError(f"{step} has {count} operands")
            takes = [expression.takes] * count if isinstance(expression.takes, str) else expression.takes
            for operand, type_ in zip(step.operands, takes, strict=True):
                if isinstance(operand, int) and operand >= i:
                    raise ValueError(f"{step} refers to a later value")
                if type_ != ("float" if isinstance(operand, Constant) else self.types[operand]):
                    raise ValueError(f"{step} takes another type")
            names = set(re.findall(r"\{([a-z]\w*)\}", expression.text))
            if names != {name for name, _ in step.attributes}:
                raise ValueError(f"{step} has other attributes than {sorted(names)}")
        for i in self.results:
            if not known <= i < known + len(self.steps) or self.types[i] != "float":
                raise ValueError(f"v{i} cannot be a result")
        for total in self.sums:
            if not total.axes or not set(total.without) <= set(total.axes) or min(total.axes) < 0:
                raise ValueError(f"{str(total)!r} is not a sum")
            if total.value >= known + len(self.steps) or self.types[total.value] != "float":
                raise ValueError(f"v{total.value} cannot be added up")
        if len({total.by_rows for total in self.sums}) > 1:
            raise ValueError("it has sums of two kinds")


def values_of(step: Step) -> Iterator[int]:
    """Yield the numbers of the values that a step reads."""
    return (operand for operand in step.operands if isinstance(operand, int))


def _constant_text(constant: Constant) -> str:
    return "[" * constant.rank + literal(constant.number).strip("()") + "]" * constant.rank


def _read_operand(text: str) -> Operand:
    type_, kind, *ones = text.split()
    if type_ not in ("float", "bool") or kind not in ("row", "one") or len(ones) > 1:
        raise ValueError(f"{text!r} does not describe an input")
    count = int(ones[0]) if ones else 0
    if not 0 <= count <= MOST_DIMENSIONS:
        raise ValueError(f"{text!r} has {count} axes of one element")
    return Operand(type_, kind == "row", count)


def _read_sum(text: str) -> Total:
    found = _SUM.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a sum")
    value, axes, without, kind = found.groups(default="")
    return Total(int(value), tuple(map(int, axes.split())), tuple(map(int, without.split())), kind == "rows")


def _read_step(text: str, i: int) -> Step:
    (assignment,) = ast.parse(text).body
    call = assignment.value if isinstance(assignment, ast.Assign) else None
    if (
        not isinstance(call, ast.Call)
        or not isinstance(call.func, ast.Name)
        or not text.startswith(f"v{i} = ")
    ):
        raise ValueError(f"{text!r} is not step v{i}")
    attributes = tuple((str(k.arg), _number(k.value)) for k in call.keywords)
    return Step(call.func.id, tuple(map(_read_argument, call.args)), attributes)


def _read_argument(tree: ast.expr) -> int | Constant:
    if isinstance(tree, ast.Name):
        found = _VALUE.fullmatch(tree.id)
        if found is None:
            raise ValueError(f"{tree.id!r} is not a value")
        return int(found[1])
    rank = 0
    while isinstance(tree, ast.List):
        (tree,) = tree.elts
        rank += 1
    return Constant(_number(tree), rank)


def _number(tree: ast.expr) -> float:
    number = ast.literal_eval(tree)
    if not isinstance(number, (int, float)):
        raise ValueError(f"{number!r} is not a number")
    return float(number)
