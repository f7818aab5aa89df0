"""Gradients of element-wise activations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ortgrad.autodiff.rules import ForwardNode, Gradients, elementwise, gradient
from ortgrad.compiled.functions import ByType, exp
from ortgrad.errors import NodeError
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.compiled import Plan, elementwise_plan
from ortgrad.operators.declaration import DOMAIN, Empty, operator
from ortgrad.ops._kernels import keep_where, piecewise
from ortgrad.ops._types import is_double, is_half

if TYPE_CHECKING:
    Shape = tuple[int, ...]

_LIKE_X = {"dY": "*S", "X": "*S"}
_LIKE_Y = {"dY": "*S", "Y": "*S"}


@operator("ReluGrad", inputs=["dY", "X"], outputs=["dX"], shapes="X", dims=_LIKE_X)
def relu_grad(dy: np.ndarray, x: np.ndarray, *, empty: Empty) -> np.ndarray:
    """dX = dY where X > 0, else 0"""
    return piecewise(lambda dx, dy, x: keep_where(x > 0, dy, out=dx), empty(0, x.shape), dy, x)


@relu_grad.onnx
def relu_grad_body(op: Recorder, dy: ir.Value, x: ir.Value) -> ir.Value:
    return op.Where(op.Greater(x, 0.0), dy, 0.0)


@relu_grad.compiled
def relu_grad_element(dy: float, x: float) -> float:
    return dy if x > 0.0 else 0.0


@operator("SigmoidGrad", inputs=["dY", "Y"], outputs=["dX"], shapes="Y", dims=_LIKE_Y)
def sigmoid_grad(dy: np.ndarray, y: np.ndarray, *, empty: Empty) -> np.ndarray:
    """dX = dY * Y * (1 - Y)"""
    return piecewise(_sigmoid_grad, empty(0, y.shape), dy, y)


def _sigmoid_grad(dx: np.ndarray, dy: np.ndarray, y: np.ndarray) -> None:
    np.subtract(1, y, out=dx)
    dx *= y
    dx *= dy


@sigmoid_grad.onnx
def sigmoid_grad_body(op: Recorder, dy: ir.Value, y: ir.Value) -> ir.Value:
    return dy * y * (1.0 - y)


@sigmoid_grad.compiled
def sigmoid_grad_element(dy: float, y: float) -> float:
    return dy * (y * (1.0 - y))


@operator("TanhGrad", inputs=["dY", "Y"], outputs=["dX"], shapes="Y", dims=_LIKE_Y)
def tanh_grad(dy: np.ndarray, y: np.ndarray, *, empty: Empty) -> np.ndarray:
    """dX = dY * (1 - Y^2)"""
    return piecewise(_tanh_grad, empty(0, y.shape), dy, y)


def _tanh_grad(dx: np.ndarray, dy: np.ndarray, y: np.ndarray) -> None:
    np.multiply(y, y, out=dx)
    np.subtract(1, dx, out=dx)
    dx *= dy


@tanh_grad.onnx
def tanh_grad_body(op: Recorder, dy: ir.Value, y: ir.Value) -> ir.Value:
    return dy * (1.0 - y * y)


@tanh_grad.compiled
def tanh_grad_element(dy: float, y: float) -> float:
    return dy * (1.0 - y * y)


@operator(
    "LeakyReluGrad", inputs=["dY", "Y"], outputs=["dX"], shapes="Y", dims=_LIKE_Y, attributes={"alpha": 0.01}
)
def leaky_relu_grad(dy: np.ndarray, y: np.ndarray, *, alpha: float, empty: Empty) -> np.ndarray:
    """dX = dY where Y > 0, else alpha * dY"""
    _require_slope(alpha)

    def grad(dx: np.ndarray, dy: np.ndarray, y: np.ndarray) -> None:
        # The slope at each Y; np.where takes five times as long.
        if alpha <= 1:
            np.maximum(y > 0, y.dtype.type(alpha), out=dx)
        else:
            np.multiply(y <= 0, y.dtype.type(alpha), out=dx)
            np.maximum(dx, 1, out=dx)
        dx *= dy

    return piecewise(grad, empty(0, y.shape), dy, y)


@leaky_relu_grad.onnx
def leaky_relu_grad_body(op: Recorder, dy: ir.Value, y: ir.Value, *, alpha: float) -> ir.Value:
    _require_slope(alpha)
    positive = op.Greater(y, 0.0)
    if alpha <= 1:
        return dy * op.Max(op.CastLike(positive, dy), alpha)
    return op.Where(positive, dy, dy * alpha)


def _leaky_relu_plan(dy: Shape, y: Shape, dx: Shape, *, alpha: float) -> Plan:
    _require_slope(alpha)
    return elementwise_plan(y)


@leaky_relu_grad.compiled(plan=_leaky_relu_plan)
def leaky_relu_grad_element(dy: float, y: float, alpha: float) -> float:
    return dy if y > 0.0 else alpha * dy


def _require_slope(alpha: float) -> None:
    if alpha < 0:
        raise NodeError(
            f"alpha is {alpha}: with a negative slope the sign of Y does not tell the sign of X, "
            "so the gradient cannot be computed from Y"
        )


@operator(
    "QuickGeluGrad", inputs=["dY", "X"], outputs=["dX"], shapes="X", dims=_LIKE_X, attributes={"alpha": 1.702}
)
def quick_gelu_grad(dy: np.ndarray, x: np.ndarray, *, alpha: float, empty: Empty) -> np.ndarray:
    """dX = dY * s * (1 + alpha X (1 - s)), s = sigmoid(alpha X)"""

    def grad(dx: np.ndarray, dy: np.ndarray, x: np.ndarray) -> None:
        np.multiply(x, -alpha, out=dx)
        np.clip(dx, -_SATURATED, _SATURATED, out=dx)
        _gated_grad(dx, dy, np.exp(dx))

    return piecewise(grad, empty(0, x.shape), dy, x)


@quick_gelu_grad.onnx
def quick_gelu_grad_body(op: Recorder, dy: ir.Value, x: ir.Value, *, alpha: float) -> ir.Value:
    u = op.Clip(x * alpha, -_SATURATED, _SATURATED)
    return _gated_body(op, dy, u, u)


@quick_gelu_grad.compiled
def quick_gelu_grad_element(dy: float, x: float, alpha: float) -> float:
    u = _clipped(x * alpha, _SATURATED)
    return _gated_element(dy, u, u)


# sigmoid(-80) is negligible beside 1, and exp(80) is finite; without this limit an infinite X would give NaN.
_SATURATED = 80.0


def _gated_grad(xdv: np.ndarray, dy: np.ndarray, e: np.ndarray) -> None:
    """dY * d/dX [X sigmoid(-v(X))] = dY * s * (1 - xdv (1 - s)), with e = exp(v), s = 1 / (1 + e) and
    xdv = X dv/dX; puts the result in xdv and overwrites e."""
    # e s is 1 - s without cancellation, the error of which a large xdv would amplify.
    xdv *= e
    e += 1
    s = np.reciprocal(e, out=e)
    xdv *= s
    np.subtract(1, xdv, out=xdv)
    xdv *= s
    xdv *= dy


def _gated_body(op: Recorder, dy: ir.Value, u: ir.Value, xdu: ir.Value) -> ir.Value:
    if is_half(u):
        # exp(80) overflows in half precision, for which Sigmoid is accurate enough; for float32 it is not.
        s, rest = op.Sigmoid(u), op.Sigmoid(-u)
    else:
        e = op.Exp(-u)
        s = op.Reciprocal(e + 1.0)
        rest = e * s
    return dy * s * (xdu * rest + 1.0)


def _gated_element(dy: float, u: float, xdu: float) -> float:
    e = exp(-u)
    s = 1.0 / (1.0 + e)
    return dy * (s * (1.0 + xdu * (e * s)))


def _clipped(x: float, limit: float) -> float:
    """The number between -limit and limit; NaN remains."""
    x = limit if x > limit else x
    return -limit if x < -limit else x


@operator("FastGeluGrad", inputs=["dY", "X"], outputs=["dX"], shapes="X", dims=_LIKE_X)
def fast_gelu_grad(dy: np.ndarray, x: np.ndarray, *, empty: Empty) -> np.ndarray:
    """dX = dY * d/dX [0.5 X (1 + tanh(sqrt(2/pi) (X + 0.044715 X^3)))]"""
    return piecewise(_fast_gelu_grad, empty(0, x.shape), dy, x)


# 0.5 (1 + tanh(v)) = sigmoid(2 v), so u(X) = X (_LINEAR + _CUBIC X^2); u(9.6) is close to _SATURATED.
_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = _LINEAR * 0.044715
_FAST_SATURATED = 9.6


def _fast_gelu_grad(dx: np.ndarray, dy: np.ndarray, x: np.ndarray) -> None:
    x = np.clip(x, -_FAST_SATURATED, _FAST_SATURATED)
    v = x * x
    v *= -_CUBIC
    xdv = np.multiply(v, 3, out=dx)
    v -= _LINEAR
    v *= x
    xdv -= _LINEAR
    xdv *= x
    np.exp(v, out=v)
    _gated_grad(xdv, dy, v)


@fast_gelu_grad.onnx
def fast_gelu_grad_body(op: Recorder, dy: ir.Value, x: ir.Value) -> ir.Value:
    x = op.Clip(x, -_FAST_SATURATED, _FAST_SATURATED)
    cubic = x * x * _CUBIC
    u = x * (cubic + _LINEAR)
    xdu = x * (cubic * 3.0 + _LINEAR)
    return _gated_body(op, dy, u, xdu)


@fast_gelu_grad.compiled
def fast_gelu_grad_element(dy: float, x: float) -> float:
    x = _clipped(x, _FAST_SATURATED)
    cubic = x * x * _CUBIC
    return _gated_element(dy, x * (cubic + _LINEAR), x * (cubic * 3.0 + _LINEAR))


@operator("GeluGrad", inputs=["dY", "X"], outputs=["dX"], shapes="X", dims=_LIKE_X)
def gelu_grad(dy: np.ndarray, x: np.ndarray, *, empty: Empty) -> np.ndarray:
    """dX = dY * (Phi(X) + X phi(X)), Phi and phi the normal distribution and its density"""
    return piecewise(_gelu_grad, empty(0, x.shape), dy, x)


@gelu_grad.onnx
def gelu_grad_body(op: Recorder, dy: ir.Value, x: ir.Value) -> ir.Value:
    return _gelu_body(op, dy, x)


@operator(
    "BiasGeluGrad_dX",
    inputs=["dY", "X", "B"],
    outputs=["dX"],
    shapes="X",
    dims={"dY": "*S C", "X": "*S C", "B": "C"},
)
def bias_gelu_grad_dx(dy: np.ndarray, x: np.ndarray, b: np.ndarray, *, empty: Empty) -> np.ndarray:
    """dX = dY * (Phi(X + B) + (X + B) phi(X + B)), B added along the last axis"""
    return piecewise(_gelu_grad, empty(0, x.shape), dy, x + b)


@bias_gelu_grad_dx.onnx
def bias_gelu_grad_dx_body(op: Recorder, dy: ir.Value, x: ir.Value, b: ir.Value) -> ir.Value:
    return _gelu_body(op, dy, x + b)


# phi(40) is 0 in every type; without this limit an infinite X would give inf * 0 = NaN.
_GELU_SATURATED = 40.0

# Mills' ratio M(a) = Phi(-a) / phi(a) for all a >= 0 in one formula: with r = 1 / (1 + a/k), M(a) is close to
# r p(1 - 2r). Here are k and the coefficients of p from the highest on, by element type, fitted so that the
# error of phi * M stays below the rounding of the type (2.5e-8 and 5e-17).
_MILLS_SCALE: Any = ByType(2.5, 4.0)
_MILLS: Any = ByType(
    (-0.00430585499, -0.0174871067, 0.00935908807, 0.132524118, -0.434797427, 0.708532994),
    (
        1.630998935051585e-06,
        1.374552991239286e-05,
        4.082349592112058e-05,
        1.625515522258986e-05,
        -0.0001338046645972735,
        8.818778105710742e-05,
        0.0010231138747864008,
        -0.002180501928381152,
        -0.004725169061619335,
        0.03784791908314772,
        -0.11688524438989811,
        0.24260238840489778,
        -0.3809427277160881,
        0.4733047658270834,
    ),
)
_NORMAL = 1 / math.sqrt(2 * math.pi)


def _gelu_grad(dx: np.ndarray, dy: np.ndarray, x: np.ndarray) -> None:
    # With a = |X|, Phi(X) + X phi(X) is h = phi(a) (M(a) - a) for negative X and 1 - h for positive X.
    k, (highest, *coefficients) = _MILLS_SCALE[x.dtype.name], _MILLS[x.dtype.name]
    a = np.abs(x)
    np.minimum(a, _GELU_SATURATED, out=a)
    r = a * (1 / k)
    r += 1
    np.divide(1, r, out=r)
    t = r * -2
    t += 1
    h = np.multiply(t, highest, out=dx)
    for coefficient in coefficients[:-1]:
        h += coefficient
        h *= t
    h += coefficients[-1]
    h *= r
    h -= a
    a *= a
    a *= -0.5
    np.exp(a, out=a)
    a *= _NORMAL
    h *= a
    np.greater(x, 0, out=r)
    np.multiply(r, -2, out=t)
    t += 1
    h *= t
    h += r
    h *= dy


def _gelu_body(op: Recorder, dy: ir.Value, x: ir.Value) -> ir.Value:
    x = op.Clip(x, -_GELU_SATURATED, _GELU_SATURATED)
    density = op.Exp(x * x * -0.5) * _NORMAL
    if is_double(x):
        # onnxruntime has no Erf for float64.
        k, (total, *coefficients) = _MILLS_SCALE["float64"], _MILLS["float64"]
        a = op.Abs(x)
        r = op.Reciprocal(a * (1 / k) + 1.0)
        t = 1.0 - r * 2.0
        for coefficient in coefficients:
            total = t * total + coefficient
        h = density * (total * r - a)
        return dy * op.Where(op.Greater(x, 0.0), 1.0 - h, h)
    distribution = (op.Erf(x * math.sqrt(0.5)) + 1.0) * 0.5
    return dy * (distribution + x * density)


@gelu_grad.compiled
def gelu_grad_element(dy: float, x: float) -> float:
    return dy * _gelu_slope(x)


def _bias_gelu_plan(dy: Shape, x: Shape, b: Shape, dx: Shape) -> Plan:
    rows, columns = math.prod(x[:-1]), x[-1]
    return Plan(rows, [(rows, columns), (rows, columns), (columns,), (rows, columns)])


@bias_gelu_grad_dx.compiled(views=[2, 2, 1, 2], plan=_bias_gelu_plan)
def bias_gelu_grad_row(row: int, dy: np.ndarray, x: np.ndarray, b: np.ndarray, dx: np.ndarray) -> None:
    for k in range(len(b)):
        dx[row, k] = dy[row, k] * _gelu_slope(x[row, k] + b[k])


def _gelu_slope(x: float) -> float:
    """Phi(X) + X phi(X), as in `_gelu_grad`"""
    a = abs(x)
    a = _GELU_SATURATED if a > _GELU_SATURATED else a
    r = 1.0 / (1.0 + a / _MILLS_SCALE)
    t = 1.0 - 2.0 * r
    p = 0.0
    for coefficient in _MILLS:
        p = p * t + coefficient
    h = (p * r - a) * (exp(a * a * -0.5) * _NORMAL)
    return 1.0 - h if x > 0.0 else h


elementwise("Relu", lambda op, dy, y, x: op.ReluGrad(dy, y))
elementwise("Sigmoid", lambda op, dy, y, x: op.SigmoidGrad(dy, y))
elementwise("Tanh", lambda op, dy, y, x: op.TanhGrad(dy, y))
elementwise("Swish", lambda op, dy, y, x, **alpha: op.QuickGeluGrad(dy, x, **alpha))
elementwise("QuickGelu", lambda op, dy, y, x, **alpha: op.QuickGeluGrad(dy, x, **alpha), domain=DOMAIN)
elementwise("Gelu", lambda op, dy, y, x: op.GeluGrad(dy, x), domain=DOMAIN)
elementwise("Softplus", lambda op, dy, y, x: dy * op.Sigmoid(x))

elementwise("ThresholdedRelu", lambda op, dy, y, x, *, alpha: op.Where(op.Greater(x, alpha), dy, 0.0))
elementwise("Shrink", lambda op, dy, y, x, *, lambd: op.Where(op.Greater(op.Abs(x), lambd), dy, 0.0))
elementwise(
    "PRelu",
    lambda op, dy, y, x, slope: op.Where(op.Greater(x, 0.0), dy, dy * slope),
    lambda op, dy, y, x, slope: op.Where(op.Greater(x, 0.0), 0.0, dy * x),
)

# For negative X, the exponential is computed from Y, without overflow.
elementwise("Elu", lambda op, dy, y, x, *, alpha: dy * _slope(op, x, 1.0, y + alpha))
elementwise("Selu", lambda op, dy, y, x, *, alpha, gamma: dy * _slope(op, x, gamma, y + alpha * gamma))
elementwise("Celu", lambda op, dy, y, x, *, alpha: dy * _slope(op, x, 1.0, y / alpha + 1.0))


def _slope(op: Recorder, x: ir.Value, positive: float, negative: ir.Value) -> ir.Value:
    """A derivative that depends on the sign of X."""
    return op.Where(op.Greater(x, 0.0), positive, negative)


@gradient("LeakyRelu")
def leaky_relu_gradient(node: ForwardNode) -> ir.Value:
    op, dy, alpha = node.op, node.grad(0), node.attribute("alpha")
    if alpha < 0:
        return op.Where(op.Greater(node.input(0), 0.0), dy, dy * alpha)
    return op.LeakyReluGrad(dy, node.output(0), **node.attributes)


@gradient("Softsign")
def softsign_gradient(node: ForwardNode) -> ir.Value:
    root = node.op.Abs(node.input(0)) + 1.0
    return node.grad(0) / (root * root)


@gradient("Mish")
def mish_gradient(node: ForwardNode) -> ir.Value:
    op, x = node.op, node.input(0)
    t = op.Tanh(op.Softplus(x))
    return node.grad(0) * (t + x * op.Sigmoid(x) * (1.0 - t * t))


@gradient("HardSigmoid")
def hard_sigmoid_gradient(node: ForwardNode) -> ir.Value:
    op, y = node.op, node.output(0)
    inside = op.And(op.Greater(y, 0.0), op.Less(y, 1.0))
    return op.Where(inside, node.grad(0) * node.attribute("alpha"), 0.0)


@gradient("HardSwish")
def hard_swish_gradient(node: ForwardNode) -> ir.Value:
    op, x = node.op, node.input(0)
    slope = op.Where(op.Less(x, 3.0), x * (1 / 3) + 0.5, 1.0)
    return node.grad(0) * op.Where(op.Greater(x, -3.0), slope, 0.0)


@gradient("Gelu")
def gelu_gradient(node: ForwardNode) -> ir.Value:
    op, dy, x = node.op, node.grad(0), node.input(0)
    return op.FastGeluGrad(dy, x) if node.attribute("approximate") == "tanh" else op.GeluGrad(dy, x)


@gradient("FastGelu", domain=DOMAIN, broadcasts=True)
def fast_gelu_gradient(node: ForwardNode) -> Gradients:
    op, x, bias = node.op, node.input(0), node.optional(1)
    dx = op.FastGeluGrad(node.grad(0), x if bias is None else x + bias)
    return dx, dx


@gradient("BiasGelu", domain=DOMAIN, broadcasts=True)
def bias_gelu_gradient(node: ForwardNode) -> Gradients:
    dx = node.op.BiasGeluGrad_dX(node.grad(0), node.input(0), node.input(1))
    return dx, dx
