"""The activations of recurrent operators, and their derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortgrad.errors import NodeError
from ortgrad.graph.lazy import Recorder, ir


@dataclass(frozen=True)
class Function:
    """y = f(x) and dy/dx written in y, in NumPy (in place; into a second array) and in standard ONNX.

    `alpha` and `beta` are the defaults; None where there is no such parameter, NaN where it must be given
    because ONNX and onnxruntime do not agree on a default.
    """

    apply: Callable[[np.ndarray, float, float], Any]
    slope: Callable[[np.ndarray, np.ndarray, float, float], Any]
    onnx: Callable[[Recorder, ir.Value, float, float], ir.Value]
    onnx_slope: Callable[[Recorder, ir.Value, float, float], ir.Value]
    alpha: float | None = None
    beta: float | None = None
    # Whether y tells dy/dx for this alpha.
    invertible: Callable[[float], bool] = lambda alpha: True


def _sigmoid(x: np.ndarray, alpha: float, beta: float) -> None:
    # 1 / (1 + exp(-x)) without the overflow for a large negative x.
    x *= 0.5
    np.tanh(x, out=x)
    x *= 0.5
    x += 0.5


def _sigmoid_slope(y: np.ndarray, out: np.ndarray, alpha: float, beta: float) -> None:
    np.subtract(1, y, out=out)
    out *= y


def _tanh_slope(y: np.ndarray, out: np.ndarray, alpha: float, beta: float) -> None:
    np.multiply(y, y, out=out)
    np.subtract(1, out, out=out)


def _scaled_tanh_slope(y: np.ndarray, out: np.ndarray, alpha: float, beta: float) -> None:
    np.multiply(y, y, out=out)
    out *= -beta / alpha
    out += alpha * beta


def _softsign_slope(y: np.ndarray, out: np.ndarray, alpha: float, beta: float) -> None:
    np.abs(y, out=out)
    np.subtract(1, out, out=out)
    np.square(out, out=out)


def _softplus_slope(y: np.ndarray, out: np.ndarray, alpha: float, beta: float) -> None:
    np.negative(y, out=out)
    np.expm1(out, out=out)
    np.negative(out, out=out)


def _onnx_step(op: Recorder, condition: ir.Value, like: ir.Value, scale: float = 1.0) -> ir.Value:
    step = op.CastLike(condition, like)
    return step if scale == 1.0 else step * scale


_MUST_BE_GIVEN = float("nan")

FUNCTIONS = {
    "Sigmoid": Function(
        _sigmoid,
        _sigmoid_slope,
        lambda op, x, a, b: op.Sigmoid(x),
        lambda op, y, a, b: y * (1.0 - y),
    ),
    "Tanh": Function(
        lambda x, a, b: np.tanh(x, out=x),
        _tanh_slope,
        lambda op, x, a, b: op.Tanh(x),
        lambda op, y, a, b: 1.0 - y * y,
    ),
    "Relu": Function(
        lambda x, a, b: np.maximum(x, 0, out=x),
        lambda y, out, a, b: np.greater(y, 0, out=out),
        lambda op, x, a, b: op.Relu(x),
        lambda op, y, a, b: _onnx_step(op, op.Greater(y, 0.0), y),
    ),
    "Affine": Function(
        lambda x, a, b: np.add(np.multiply(x, a, out=x), b, out=x),
        lambda y, out, a, b: np.copyto(out, a),
        lambda op, x, a, b: x * a + b,
        lambda op, y, a, b: op.full_like(y, a),
        alpha=_MUST_BE_GIVEN,
        beta=_MUST_BE_GIVEN,
    ),
    "LeakyRelu": Function(
        lambda x, a, b: np.multiply(x, a, out=x, where=x < 0),
        lambda y, out, a, b: np.copyto(out, np.where(y > 0, 1, a)),
        lambda op, x, a, b: op.Where(op.Less(x, 0.0), x * a, x),
        lambda op, y, a, b: _onnx_step(op, op.Greater(y, 0.0), y, 1 - a) + a,
        alpha=0.01,
        invertible=lambda alpha: alpha >= 0,
    ),
    "ThresholdedRelu": Function(
        lambda x, a, b: np.copyto(x, 0, where=x <= a),
        lambda y, out, a, b: np.greater(y, 0, out=out),
        lambda op, x, a, b: op.Where(op.Greater(x, a), x, 0.0),
        lambda op, y, a, b: _onnx_step(op, op.Greater(y, 0.0), y),
        alpha=_MUST_BE_GIVEN,
        invertible=lambda alpha: alpha >= 0,
    ),
    "ScaledTanh": Function(
        lambda x, a, b: np.multiply(np.tanh(np.multiply(x, b, out=x), out=x), a, out=x),
        _scaled_tanh_slope,
        lambda op, x, a, b: op.Tanh(x * b) * a,
        lambda op, y, a, b: a * b - y * y * (b / a),
        alpha=_MUST_BE_GIVEN,
        beta=_MUST_BE_GIVEN,
        invertible=lambda alpha: alpha != 0,
    ),
    "HardSigmoid": Function(
        lambda x, a, b: np.clip(np.add(np.multiply(x, a, out=x), b, out=x), 0, 1, out=x),
        lambda y, out, a, b: np.multiply((y > 0) & (y < 1), a, out=out),
        lambda op, x, a, b: op.Clip(x * a + b, op.number(0.0, x), op.number(1.0, x)),
        lambda op, y, a, b: _onnx_step(op, op.And(op.Greater(y, 0.0), op.Less(y, 1.0)), y, a),
        alpha=0.2,
        beta=0.5,
    ),
    "Elu": Function(
        lambda x, a, b: np.copyto(x, a * np.expm1(np.minimum(x, 0)), where=x < 0),
        lambda y, out, a, b: np.copyto(out, np.where(y > 0, 1, y + a)),
        lambda op, x, a, b: op.Where(op.Less(x, 0.0), (op.Exp(op.Min(x, 0.0)) - 1.0) * a, x),
        lambda op, y, a, b: op.Where(op.Greater(y, 0.0), op.number(1.0, y), y + a),
        alpha=1.0,
        invertible=lambda alpha: alpha >= 0,
    ),
    "Softsign": Function(
        lambda x, a, b: np.divide(x, 1 + np.abs(x), out=x),
        _softsign_slope,
        lambda op, x, a, b: x / (op.Abs(x) + 1.0),
        lambda op, y, a, b: (1.0 - op.Abs(y)) * (1.0 - op.Abs(y)),
    ),
    "Softplus": Function(
        lambda x, a, b: np.logaddexp(0, x, out=x),
        _softplus_slope,
        # No exponential overflows.
        lambda op, x, a, b: op.Relu(x) + op.Log(op.Exp(-op.Abs(x)) + 1.0),
        lambda op, y, a, b: 1.0 - op.Exp(-y),
    ),
}
_BY_LOWER_CASE = {name.lower(): name for name in FUNCTIONS}


@dataclass(frozen=True)
class Activation:
    """A function with its parameters."""

    name: str
    alpha: float
    beta: float

    def apply(self, x: np.ndarray) -> None:
        """x = f(x), in place."""
        FUNCTIONS[self.name].apply(x, self.alpha, self.beta)

    def slope(self, y: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """f'(x) for y = f(x)."""
        out = np.empty_like(y) if out is None else out
        FUNCTIONS[self.name].slope(y, out, self.alpha, self.beta)
        return out

    def onnx(self, op: Recorder, x: ir.Value) -> ir.Value:
        return FUNCTIONS[self.name].onnx(op, x, self.alpha, self.beta)

    def onnx_slope(self, op: Recorder, y: ir.Value) -> ir.Value:
        return FUNCTIONS[self.name].onnx_slope(op, y, self.alpha, self.beta)


def parse_activations(
    names: Sequence[str],
    alphas: Sequence[float] | None,
    betas: Sequence[float] | None,
    *,
    gradient: bool,
) -> list[Activation]:
    """The activations of these names; alphas and betas go to those that take one, in order.

    For `gradient`, the derivative of each must follow from its output.
    """
    rest = {"alpha": list(alphas or ()), "beta": list(betas or ())}
    result = []
    for given in names:
        name = _BY_LOWER_CASE.get(given.lower())
        if name is None:
            raise NodeError(f"activation {given!r} is unknown; there are {', '.join(FUNCTIONS)}")
        function = FUNCTIONS[name]
        values = {}
        for parameter, left in rest.items():
            standard = getattr(function, parameter)
            values[parameter] = 0.0 if standard is None else left.pop(0) if left else standard
            if np.isnan(values[parameter]):
                raise NodeError(f"activation {name} needs a value in activation_{parameter}")
        if gradient and not function.invertible(values["alpha"]):
            raise NodeError(
                f"the gradient of activation {name} with alpha {values['alpha']} "
                "cannot be told from its output"
            )
        result.append(Activation(name, **values))
    return result
