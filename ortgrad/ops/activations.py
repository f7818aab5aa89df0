"""Gradients of element-wise activations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ortgrad.errors import NodeError
from ortgrad.kernels import elementwise, keep_where, require_same_shape
from ortgrad.registry import operator

if TYPE_CHECKING:
    import onnx_ir as ir

    from ortgrad.bodies import Ops


@operator("ReluGrad", inputs=["dY", "X"], outputs=["dX"], shapes="X", auto="python")
def relu_grad(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """dX = dY where X > 0, else 0"""
    require_same_shape(dY=dy, X=x)
    return elementwise(lambda dy, x: keep_where(x > 0, dy), dy, x)


@relu_grad.onnx
def _(op: Ops, dy: ir.Value, x: ir.Value) -> ir.Value:
    return op.Where(op.Greater(x, 0.0), dy, 0.0)


@operator("SigmoidGrad", inputs=["dY", "Y"], outputs=["dX"], shapes="Y")
def sigmoid_grad(dy: np.ndarray, y: np.ndarray) -> np.ndarray:
    """dX = dY * Y * (1 - Y)"""
    require_same_shape(dY=dy, Y=y)
    return elementwise(_sigmoid_grad, dy, y)


def _sigmoid_grad(dy: np.ndarray, y: np.ndarray) -> None:
    dy *= y
    np.subtract(1, y, out=y)
    dy *= y


@sigmoid_grad.onnx
def _(op: Ops, dy: ir.Value, y: ir.Value) -> ir.Value:
    return op.Mul(op.Mul(dy, y), op.Sub(1.0, y))


@operator("TanhGrad", inputs=["dY", "Y"], outputs=["dX"], shapes="Y")
def tanh_grad(dy: np.ndarray, y: np.ndarray) -> np.ndarray:
    """dX = dY * (1 - Y^2)"""
    require_same_shape(dY=dy, Y=y)
    return elementwise(_tanh_grad, dy, y)


def _tanh_grad(dy: np.ndarray, y: np.ndarray) -> None:
    y *= y
    np.subtract(1, y, out=y)
    dy *= y


@tanh_grad.onnx
def _(op: Ops, dy: ir.Value, y: ir.Value) -> ir.Value:
    return op.Mul(dy, op.Sub(1.0, op.Mul(y, y)))


@operator("LeakyReluGrad", inputs=["dY", "Y"], outputs=["dX"], shapes="Y", attributes={"alpha": 0.01})
def leaky_relu_grad(dy: np.ndarray, y: np.ndarray, *, alpha: float) -> np.ndarray:
    """dX = dY where Y > 0, else alpha * dY"""
    require_same_shape(dY=dy, Y=y)
    _require_slope(alpha)

    def grad(dy: np.ndarray, y: np.ndarray) -> None:
        if alpha <= 1:
            np.maximum(y > 0, alpha, out=y)
        else:
            np.multiply(y <= 0, alpha, out=y)
            np.maximum(y, 1, out=y)
        np.multiply(dy, y, out=dy)

    return elementwise(grad, dy, y)


@leaky_relu_grad.onnx
def _(op: Ops, dy: ir.Value, y: ir.Value, *, alpha: float) -> ir.Value:
    _require_slope(alpha)
    return op.Where(op.Greater(y, 0.0), dy, op.Mul(dy, alpha))


def _require_slope(alpha: float) -> None:
    if alpha < 0:
        raise NodeError(
            f"alpha is {alpha}: with a negative slope the sign of Y does not tell the sign of X, "
            "so the gradient cannot be computed from Y"
        )


@operator("QuickGeluGrad", inputs=["dY", "X"], outputs=["dX"], shapes="X", attributes={"alpha": 1.702})
def quick_gelu_grad(dy: np.ndarray, x: np.ndarray, *, alpha: float) -> np.ndarray:
    """dX = dY * s * (1 + alpha X (1 - s)), s = sigmoid(alpha X)"""
    require_same_shape(dY=dy, X=x)

    def grad(dy: np.ndarray, x: np.ndarray) -> None:
        np.multiply(x, alpha, out=x)
        np.clip(x, -_SATURATED, _SATURATED, out=x)
        _gated_grad(dy, x.copy(), x)

    return elementwise(grad, dy, x)


@quick_gelu_grad.onnx
def _(op: Ops, dy: ir.Value, x: ir.Value, *, alpha: float) -> ir.Value:
    u = op.Clip(op.Mul(x, alpha), -_SATURATED, _SATURATED)
    return _gated_body(op, dy, u, u)


# sigmoid(-800) is 0 in every type; past it, 0 * inf would make a NaN of an infinite X.
_SATURATED = 800.0


def _gated_grad(dy: np.ndarray, u: np.ndarray, xdu: np.ndarray) -> None:
    """dY * d/dX [X sigmoid(u(X))], with xdu = X * du/dX; overwrites all three."""
    np.negative(u, out=u)
    np.exp(u, out=u)
    u += 1
    s = np.reciprocal(u, out=u)
    dy *= s
    np.subtract(1, s, out=s)
    s *= xdu
    s += 1
    dy *= s


def _gated_body(op: Ops, dy: ir.Value, u: ir.Value, xdu: ir.Value) -> ir.Value:
    s = op.Sigmoid(u)
    return op.Mul(op.Mul(dy, s), op.Add(op.Mul(xdu, op.Sub(1.0, s)), 1.0))


@operator("FastGeluGrad", inputs=["dY", "X"], outputs=["dX"], shapes="X")
def fast_gelu_grad(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """dX = dY * d/dX [0.5 X (1 + tanh(sqrt(2/pi) (X + 0.044715 X^3)))]"""
    require_same_shape(dY=dy, X=x)
    return elementwise(_fast_gelu_grad, dy, x)


# 0.5 (1 + tanh(v)) = sigmoid(2 v), so u(X) = X (_LINEAR + _CUBIC X^2); u(22) is close to _SATURATED.
_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = _LINEAR * 0.044715
_FAST_SATURATED = 22.0


def _fast_gelu_grad(dy: np.ndarray, x: np.ndarray) -> None:
    np.clip(x, -_FAST_SATURATED, _FAST_SATURATED, out=x)
    u = x * x
    u *= _CUBIC
    xdu = u * 3
    u += _LINEAR
    u *= x
    xdu += _LINEAR
    xdu *= x
    _gated_grad(dy, u, xdu)


@fast_gelu_grad.onnx
def _(op: Ops, dy: ir.Value, x: ir.Value) -> ir.Value:
    x = op.Clip(x, -_FAST_SATURATED, _FAST_SATURATED)
    cubic = op.Mul(op.Mul(x, x), _CUBIC)
    u = op.Mul(x, op.Add(cubic, _LINEAR))
    xdu = op.Mul(x, op.Add(op.Mul(cubic, 3.0), _LINEAR))
    return _gated_body(op, dy, u, xdu)


@operator("GeluGrad", inputs=["dY", "X"], outputs=["dX"], shapes="X")
def gelu_grad(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """dX = dY * (Phi(X) + X phi(X)), Phi and phi the normal distribution and its density"""
    require_same_shape(dY=dy, X=x)
    return elementwise(_gelu_grad, dy, x)


@gelu_grad.onnx
def _(op: Ops, dy: ir.Value, x: ir.Value) -> ir.Value:
    return _gelu_body(op, dy, x)


@operator("BiasGeluGrad_dX", inputs=["dY", "X", "B"], outputs=["dX"], shapes="X")
def bias_gelu_grad_dx(dy: np.ndarray, x: np.ndarray, b: np.ndarray) -> np.ndarray:
    """dX = dY * (Phi(X + B) + (X + B) phi(X + B)), B added along the last axis"""
    require_same_shape(dY=dy, X=x)
    if b.ndim != 1 or x.shape[-1:] != b.shape:
        raise ValueError(
            f"B must be a vector as long as X's last axis: B has {list(b.shape)}, X has {list(x.shape)}"
        )
    np.add(x, b, out=x)
    return elementwise(_gelu_grad, dy, x)


@bias_gelu_grad_dx.onnx
def _(op: Ops, dy: ir.Value, x: ir.Value, b: ir.Value) -> ir.Value:
    return _gelu_body(op, dy, op.Add(x, b))


# phi(40) is 0 in every type; past it, inf * 0 would make a NaN of an infinite X.
_GELU_SATURATED = 40.0

# Mills' ratio M(a) = Phi(-a) / phi(a) for all a >= 0: with r = 1 / (1 + a/k), M(a) = r p(1 - 2r), where p is
# a truncated Chebyshev series (Shepherd and Laframboise, Math. Comp. 36, 1981), written in powers.
# Here are k and the coefficients of p from the highest on; phi * M comes out exact up to rounding.
_MILLS: dict[str, tuple[float, tuple[float, ...]]] = {
    "float32": (
        4.0,
        (
            -9.8586047e-05,
            8.10428524e-05,
            0.000979958114,
            -0.00217836518,
            -0.0047075929,
            0.0378471391,
            -0.116888282,
            0.24260249,
            -0.380942578,
            0.473304764,
        ),
    ),
    "float64": (
        5.0,
        (
            2.4841114781456244e-09,
            -1.1887020028999392e-09,
            -2.8654163286774206e-08,
            1.4973760179142712e-08,
            2.104095581429502e-07,
            -1.6221760431994864e-07,
            -1.3823570641334204e-06,
            1.9913297423535405e-06,
            8.359459879674713e-06,
            -2.494543886441291e-05,
            -2.976544710432346e-05,
            0.0002731713313304409,
            -0.00039999264025777724,
            -0.0015006564743978061,
            0.010425100512721601,
            -0.03465094682631296,
            0.08272894314461672,
            -0.15718221510890437,
            0.24830941231482087,
            -0.33357331903779747,
            0.38561620943063135,
        ),
    ),
}


def _gelu_grad(dy: np.ndarray, x: np.ndarray) -> None:
    # With a = |X|, Phi(X) + X phi(X) is h = phi(a) (M(a) - a) for negative X and 1 - h for positive X.
    k, (highest, *coefficients) = _MILLS[x.dtype.name]
    a = np.abs(x)
    np.minimum(a, _GELU_SATURATED, out=a)
    r = a * (1 / k)
    r += 1
    np.reciprocal(r, out=r)
    t = r * -2
    t += 1
    h = t * highest
    for coefficient in coefficients[:-1]:
        h += coefficient
        h *= t
    h += coefficients[-1]
    h *= r
    h -= a
    a *= a
    a *= -0.5
    np.exp(a, out=a)
    a *= 1 / math.sqrt(2 * math.pi)
    h *= a
    np.greater(x, 0, out=x)
    np.multiply(x, -2, out=t)
    t += 1
    h *= t
    h += x
    dy *= h


def _gelu_body(op: Ops, dy: ir.Value, x: ir.Value) -> ir.Value:
    x = op.Clip(x, -_GELU_SATURATED, _GELU_SATURATED)
    distribution = op.Mul(op.Add(op.Erf(op.Mul(x, math.sqrt(0.5))), 1.0), 0.5)
    density = op.Mul(op.Exp(op.Mul(op.Mul(x, x), -0.5)), 1 / math.sqrt(2 * math.pi))
    return op.Mul(dy, op.Add(distribution, op.Mul(x, density)))
