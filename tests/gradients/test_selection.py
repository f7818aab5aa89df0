"""Elements that the forward pass does not choose have a gradient of 0, even where a derivative is not finite.

The other elements have the gradient of PyTorch, NaN and infinities included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from skl2onnx import to_onnx
from sklearn.datasets import load_iris
from sklearn.linear_model import SGDClassifier
from sklearn.preprocessing import PowerTransformer
from support import KERNELS

import ortgrad

# The operator as text, in PyTorch, and operands at which its derivative is not finite.
OPERATORS: dict[str, tuple[str, Callable[..., torch.Tensor], list[float]]] = {
    "Log": ("v = Log(x)", torch.log, [0.0, -1.0]),
    "Sqrt": ("v = Sqrt(x)", torch.sqrt, [0.0, -1.0]),
    "Reciprocal": ("v = Reciprocal(x)", torch.reciprocal, [0.0]),
    "Exp": ("v = Exp(x)", torch.exp, [100.0, np.inf]),
    "Sinh": ("v = Sinh(x)", torch.sinh, [100.0]),
    "Cosh": ("v = Cosh(x)", torch.cosh, [-100.0]),
    "Asin": ("v = Asin(x)", torch.asin, [1.0, 2.0]),
    "Acos": ("v = Acos(x)", torch.acos, [-1.0, 2.0]),
    "Acosh": ("t = Add(x, two) u = Sub(t, one) v = Acosh(u)", lambda x: torch.acosh(x + 1), [0.0, -1.0]),
    "Atanh": ("v = Atanh(x)", torch.atanh, [1.0, 2.0]),
    "Pow, root": ("v = Pow(x, half)", lambda x: x**0.5, [0.0, -1.0]),
    "Pow, inverse": ("v = Pow(x, minus)", lambda x: x**-1.0, [0.0]),
    "Pow, exponent": ("v = Pow(half, x)", lambda x: 0.5**x, [-200.0]),
    "Pow, both": ("v = Pow(x, x)", lambda x: x**x, [-0.5]),
    "Div, below": ("v = Div(two, x)", lambda x: 2 / x, [0.0]),
    "Div, both": ("v = Div(x, x)", lambda x: x / x, [0.0]),
    "Mul of what is infinite": ("t = Log(x) v = Mul(x, t)", lambda x: x * torch.log(x), [0.0, -1.0]),
    "a chain": (
        "t = Sqrt(x) u = Neg(t) r = Reciprocal(u) v = Mul(r, two)",
        lambda x: -2 / torch.sqrt(x),
        [0.0, -1.0],
    ),
}

GOOD = [0.25, 0.5, 0.75]

# How the first elements are chosen, and the others are not; `c` says which.
CHOICES: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "Where": ("y = Where(c, v, two)", lambda v, c: torch.where(c, v, 2.0)),
    "Where, else": ("n = Not(c) y = Where(n, two, v)", lambda v, c: torch.where(c, v, 2.0)),
    "Where, twice": (
        "w = Where(c, v, two) z = Neg(w) y = Where(e, z, two)",
        lambda v, c: -torch.where(c, v, 2.0),
    ),
    "Where, further on": (
        "a = Mul(v, two) b = Sub(a, one) y = Where(c, b, two)",
        lambda v, c: torch.where(c, 2 * v - 1, 2.0),
    ),
    "Where of one row": (
        "k = Unsqueeze(c, zeroth) y = Where(k, v, two)",
        lambda v, c: torch.where(c, v, 2.0),
    ),
    "mask": ("m = Cast<to = 1>(c) y = Mul(v, m)", lambda v, c: torch.where(c, v, 0.0)),
    "mask in front": ("m = Cast<to = 1>(c) y = Mul(m, v)", lambda v, c: torch.where(c, v, 0.0)),
}

CONSTANTS = """<float two = {2.0}, float one = {1.0}, float half = {0.5}, float minus = {-1.0},
    int64[1] zeroth = {0}>"""


def make_model(nodes: str, shape: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 18]>
        g (float[{shape}] x, bool[{shape.split(",")[-1]}] c, bool[{shape}] e) => (float[{shape}] y)
        {CONSTANTS} {{ {nodes} }}"""
    )


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", OPERATORS)
def test_choices(name: str, choice: str) -> None:
    (text, function, bad), (chosen, select) = OPERATORS[name], CHOICES[choice]
    x = np.array([GOOD + bad], np.float32)
    c = np.arange(x.size) < len(GOOD)
    model = make_model(f"{text} {chosen}", "n, m")
    session = ortgrad.InferenceSession(ortgrad.build_gradient_model(model, wrt="x"))
    feeds = {"x": x, "c": c, "e": np.ones(x.shape, bool), "y_grad": np.full(x.shape, 3, np.float32)}
    (grad,) = session.run(["x_grad"], feeds)
    t = torch.tensor(x, requires_grad=True)
    select(function(t), torch.tensor(c)).backward(torch.full(x.shape, 3.0))
    assert t.grad is not None
    np.testing.assert_allclose(grad[:, c], t.grad[:, c], rtol=1e-5)
    assert (grad[:, ~c] == 0).all()


@pytest.mark.parametrize("kernels", [*KERNELS, "plain"])
@pytest.mark.parametrize(
    ("nodes", "bad"),
    [
        ("v = Log(x) y = Relu(v)", 0.0),
        ("v = Sqrt(x) w = Neg(v) y = Relu(w)", 0.0),
        ("v = Sqrt(x) w = Neg(v) y = ThresholdedRelu<alpha = 0.5>(w)", 0.0),
        ("v = Log(x) y = Clip(v, minus)", 0.0),
        ("v = Reciprocal(x) y = Clip(v, , two)", 0.0),
    ],
)
def test_activations_that_choose(nodes: str, bad: float, kernels: str) -> None:
    built = ortgrad.build_gradient_model(make_model(nodes, "2"), wrt="x")
    session: Any
    if kernels == "plain":
        session = onnxruntime.InferenceSession(built.SerializeToString())
    else:
        session = ortgrad.InferenceSession(built, kernels=kernels)
    x = np.array([bad, 4], np.float32)
    given = {v.name for v in session.get_inputs()}
    feeds = {"x": x, "c": x > 0, "e": x > 0, "y_grad": np.ones(2, np.float32)}
    (grad,) = session.run(["x_grad"], {k: v for k, v in feeds.items() if k in given})
    assert grad[0] == 0
    assert np.isfinite(grad[1])


@pytest.mark.parametrize(
    "nodes",
    [
        # Nothing is chosen here: the gradient is 1, which a product of 0 and infinity does not tell.
        "v = Sqrt(x) y = Mul(v, v)",
        "v = Log(x) y = Exp(v)",
        "v = Reciprocal(x) y = Reciprocal(v)",
        # A sum of both ways to x, of which one is not a choice.
        "v = Sqrt(x) w = Where(c, v, two) s = Mul(v, v) y = Add(w, s)",
    ],
)
def test_other_zeros_stay_unknown(nodes: str) -> None:
    session = ortgrad.InferenceSession(ortgrad.build_gradient_model(make_model(nodes, "1"), wrt="x"))
    feeds = {"x": np.zeros(1, np.float32), "c": np.zeros(1, bool), "e": np.ones(1, bool)}
    (grad,) = session.run(["x_grad"], {**feeds, "y_grad": np.ones(1, np.float32)})
    assert np.isnan(grad).all()


def count(model: onnx.ModelProto, wrt: Any = "x") -> dict[str, int]:
    built = ortgrad.build_gradient_model(model, wrt=wrt)
    return Counter(node.op_type for node in built.graph.node)


def test_choices_cost_nothing_where_derivatives_are_finite() -> None:
    """Scores of attention, with a scale, and functions of a whole power."""
    nodes = "s = Div(x, half) t = Mul(s, two) u = Pow(t, two) v = Add(u, x) w = Tanh(v) y = Where(c, w, two)"
    found = count(make_model(nodes, "3"))
    # One in the forward graph, one for its gradient.
    assert found["Where"] == 2
    # A normalization's scale and bias in front of an activation.
    scaled = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 18]> g (float[n, 4] x) => (float[n, 4] y)
        <float[4] w = {1, 2, 3, 4}, float[4] b = {1, 2, 3, 4}> { s = Mul(x, w) t = Add(s, b) y = Relu(t) }"""
    )
    assert not {"Where", "Greater"} & {*count(scaled, ["x", "w", "b"])}


def test_the_cost_of_many_choices_is_that_of_each() -> None:
    steps = [f"a{i} = Relu(x{i}) b{i} = Relu(a{i}) x{i + 1} = Sqrt(b{i})" for i in range(20)]
    model = make_model(f"x0 = Identity(x) {' '.join(steps)} y = Identity(x20)", "3")
    found = count(model)
    assert found["Where"] <= 20
    assert found["And"] <= 40


def test_an_exponential_function_that_overflows() -> None:
    """A sigmoid as scikit-learn's converters and old exporters write it."""
    nodes = "n = Neg(x) v = Exp(n) w = Add(v, one) y = Reciprocal(w)"
    session = ortgrad.InferenceSession(ortgrad.build_gradient_model(make_model(nodes, "4"), wrt="x"))
    x = np.array([-1000, -89, -1, 3], np.float32)
    feeds = {"x": x, "c": x > 0, "e": x > 0, "y_grad": np.ones(4, np.float32)}
    given = {v.name for v in session.get_inputs()}
    (grad,) = session.run(["x_grad"], {k: v for k, v in feeds.items() if k in given})
    t = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    torch.sigmoid(t).sum().backward()
    assert t.grad is not None
    np.testing.assert_allclose(grad, t.grad, rtol=1e-5, atol=1e-30)


def gradient_of(model: onnx.ModelProto, x: np.ndarray, output: str) -> tuple[np.ndarray, np.ndarray]:
    session = ortgrad.InferenceSession(ortgrad.build_gradient_model(model, wrt="X", of=output))
    (seed,) = (v for v in session.get_inputs() if v.name != "X")
    (y,) = onnxruntime.InferenceSession(model.SerializeToString()).run([output], {"X": x})
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(y.shape).astype(np.float32)
    (grad,) = session.run(["X_grad"], {"X": x, seed.name: weights})
    return grad, weights


def test_a_power_transformer() -> None:
    """Yeo-Johnson: skl2onnx computes both branches, one of them outside of its domain, and masks one."""
    x = load_iris().data.astype(np.float32)
    x -= x.mean(0)
    assert (x < -1).any()
    estimator = PowerTransformer().fit(x)
    grad, weights = gradient_of(to_onnx(estimator, x[:1]), x, "variable")
    step = 1e-5
    up, down = (estimator.transform(x.astype(np.float64) + s) for s in (step, -step))
    np.testing.assert_allclose(grad, weights * (up - down) / (2 * step), rtol=1e-3, atol=1e-4)


def test_a_classifier_with_a_saturated_sigmoid() -> None:
    x, labels = load_iris(return_X_y=True)
    x = (x * 10).astype(np.float32)
    estimator = SGDClassifier(loss="log_loss", random_state=0).fit(x, labels)
    model = to_onnx(estimator, x[:1], options={"zipmap": False})
    scores = x @ estimator.coef_.T.astype(np.float32) + estimator.intercept_.astype(np.float32)
    assert (scores < -100).any()
    grad, weights = gradient_of(model, x, "probabilities")
    t = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    coefficients, intercept = (torch.tensor(v).double() for v in (estimator.coef_, estimator.intercept_))
    p = torch.sigmoid(t @ coefficients.T + intercept)
    # Where all of them vanish in float32, the classes are equally likely.
    kept = (p.detach() > 1e-30).any(1)
    (p / p.sum(1, keepdim=True))[kept].backward(torch.tensor(weights, dtype=torch.float64)[kept])
    assert t.grad is not None
    assert np.isfinite(grad).all()
    np.testing.assert_allclose(grad[kept], t.grad[kept], rtol=1e-3, atol=1e-4)
