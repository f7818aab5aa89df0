"""What element-wise operators compute for one element: the text of a Python expression for each.

`{0}`, `{1}` ... stand for the operands, and names in braces for attributes. One text serves two purposes. In
a compiled kernel the operands are numbers, and the functions are those of COMPILED. In the NumPy kernel of a
fused node the operands are arrays, and the functions those of NUMPY. NaN and infinities give what they give
in onnxruntime's operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ortgrad.compiled import mathematics
from ortgrad.compiled.functions import exp, sqrt
from ortgrad.operators.compiled import CompiledKernel
from ortgrad.operators.declaration import Operator, find_operator

FLOAT, BOOL = "float", "bool"


class Expression(NamedTuple):
    """An element-wise operator of a fused node."""

    text: str
    # The types that it takes and gives, "float" or "bool": one for all operands, or one for each.
    takes: str | tuple[str, ...] = FLOAT
    gives: str = FLOAT
    # Whether it takes any number of operands, which it combines from left to right.
    variadic: bool = False
    # Whether the operands must have one shape.
    equal_shapes: bool = False
    # About the number of elementary operations.
    cost: int = 1
    # About the time that onnxruntime takes for a node of this operator, compared with one that adds.
    alone: int = 1

    @property
    def operands(self) -> int:
        """The number of operands, which is the smallest one for a variadic operator."""
        return sum(f"{{{i}}}" in self.text for i in range(4))


# A function of several steps costs about this many operations.
_FUNCTION = 12

TABLE: dict[str, Expression] = {
    "Add": Expression("{0} + {1}"),
    "Sub": Expression("{0} - {1}"),
    "Mul": Expression("{0} * {1}"),
    "Div": Expression("{0} / {1}", cost=4),
    "Sum": Expression("{0} + {1}", variadic=True),
    "Neg": Expression("-{0}"),
    "Abs": Expression("abs({0})"),
    "Reciprocal": Expression("1.0 / {0}", cost=4),
    "Sqrt": Expression("sqrt({0})", cost=6),
    "Square": Expression("{0} * {0}"),
    "Cube": Expression("{0} * {0} * {0}", cost=2),
    "Exp": Expression("exp({0})", cost=_FUNCTION),
    "Log": Expression("log({0})", cost=_FUNCTION, alone=8),
    "Erf": Expression("erf({0})", cost=2 * _FUNCTION),
    "Tanh": Expression("tanh({0})", cost=2 * _FUNCTION),
    # onnxruntime's is not slow, but wrong for large negative numbers: 0 or 6e-8 instead of 2e-8.
    "Sigmoid": Expression("sigmoid({0})", cost=_FUNCTION, alone=2),
    "Softplus": Expression("softplus({0})", cost=2 * _FUNCTION, alone=50),
    "Mish": Expression("{0} * tanh(softplus({0}))", cost=4 * _FUNCTION, alone=50),
    "Relu": Expression("where({0} < 0.0, 0.0, {0})"),
    "LeakyRelu": Expression("where({0} < 0.0, {alpha} * {0}, {0})"),
    "PRelu": Expression("where({0} < 0.0, {1} * {0}, {0})", alone=20),
    "ThresholdedRelu": Expression("where({0} > {alpha}, {0}, 0.0)"),
    "Elu": Expression("where({0} < 0.0, {alpha} * (exp({0}) - 1.0), {0})", cost=_FUNCTION, alone=8),
    "Celu": Expression(
        "where({0} < 0.0, {alpha} * (exp({0} / {alpha}) - 1.0), {0})", cost=_FUNCTION, alone=8
    ),
    "Selu": Expression(
        "{gamma} * where({0} > 0.0, {0}, {alpha} * (exp({0}) - 1.0))", cost=_FUNCTION, alone=8
    ),
    "HardSigmoid": Expression("maximum(minimum({alpha} * {0} + {beta}, 1.0), 0.0)", cost=2),
    "HardSwish": Expression(
        f"{{0}} * maximum(minimum({{0}} * {1 / 6!r} + 0.5, 1.0), 0.0)",
        cost=3,
        alone=2,
    ),
    "Softsign": Expression("{0} / (1.0 + abs({0}))", cost=4, alone=2),
    "Gelu": Expression(
        f"0.5 * {{0}} * (1.0 + erf({{0}} * {math.sqrt(0.5)!r}))",
        cost=2 * _FUNCTION,
    ),
    "TanhGelu": Expression(
        f"0.5 * {{0}} * (1.0 + tanh({{0}} * ({math.sqrt(2 / math.pi)!r} + "
        f"{math.sqrt(2 / math.pi) * 0.044715!r} * {{0}} * {{0}})))",
        cost=2 * _FUNCTION,
    ),
    "Swish": Expression("{0} * sigmoid({alpha} * {0})", cost=_FUNCTION, alone=3),
    "Min": Expression("minimum({0}, {1})", variadic=True),
    "Max": Expression("maximum({0}, {1})", variadic=True),
    "Clip": Expression("minimum(maximum({0}, {1}), {2})", cost=2),
    "Sign": Expression("where({0} > 0.0, 1.0, where({0} < 0.0, -1.0, {0}))", cost=2, alone=5),
    "Where": Expression("where({0}, {1}, {2})", (BOOL, FLOAT, FLOAT)),
    "Equal": Expression("{0} == {1}", gives=BOOL),
    "Greater": Expression("{0} > {1}", gives=BOOL),
    "GreaterOrEqual": Expression("{0} >= {1}", gives=BOOL),
    "Less": Expression("{0} < {1}", gives=BOOL),
    "LessOrEqual": Expression("{0} <= {1}", gives=BOOL),
    "IsNaN": Expression("{0} != {0}", gives=BOOL),
    "And": Expression("{0} & {1}", BOOL, BOOL),
    "Or": Expression("{0} | {1}", BOOL, BOOL),
    "Xor": Expression("{0} ^ {1}", BOOL, BOOL),
    "Not": Expression("negation({0})", BOOL, BOOL),
    "ToFloat": Expression("where({0}, 1.0, 0.0)", BOOL),
    "ToBool": Expression("{0} != 0.0", gives=BOOL),
    "DropoutGrad": Expression("where({1}, {0} * {scale}, 0.0)", (FLOAT, BOOL), equal_shapes=True),
}

_ERF = np.vectorize(math.erf, otypes=[float])

NUMPY: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "sqrt": np.sqrt,
    "exp": np.exp,
    "log": np.log,
    "erf": lambda x: _ERF(x).astype(x.dtype),
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softplus": lambda x: np.logaddexp(x, 0),
    "where": np.where,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "negation": np.logical_not,
}
COMPILED: dict[str, Any] = {
    "exp": exp,
    "sqrt": sqrt,
    **{name: getattr(mathematics, name) for name in NUMPY.keys() - {"abs", "exp", "sqrt"}},
}


def own_kernel(name: str) -> tuple[Operator, CompiledKernel] | None:
    """Return ortgrad's operator of that name if it has a compiled kernel for one element."""
    operator = find_operator(name)
    kernel = None if operator is None else operator.compiled_kernel
    if operator is None or kernel is None or not kernel.elementwise:
        return None
    return operator, kernel


def find_expression(name: str) -> Expression | None:
    """Return the expression of an operator: one of the table, or a call of ortgrad's element function."""
    if name in TABLE:
        return TABLE[name]
    own = own_kernel(name)
    if own is None:
        return None
    operator, kernel = own
    arguments = [f"{{{i}}}" for i in range(len(operator.inputs))]
    arguments += (f"{{{number}}}" for number in kernel.numbers)
    return Expression(f"{name}({', '.join(arguments)})", equal_shapes=True, cost=_FUNCTION)


def literal(number: float) -> str:
    """Return the text of a number in an expression."""
    if math.isinf(number):
        return "1e999" if number > 0 else "(-1e999)"
    text = repr(float(number))
    return f"({text})" if text.startswith("-") else text


def write(expression: Expression, operands: list[str], attributes: Mapping[str, float]) -> str:
    """Return the text of an expression for these operands."""
    numbers = {name: literal(value) for name, value in attributes.items()}
    if not expression.variadic:
        return expression.text.format(*operands, **numbers)
    text = operands[0]
    for operand in operands[1:]:
        text = expression.text.format(f"({text})" if text != operands[0] else text, operand)
    return text
