"""Gradients of activations against PyTorch, finite differences and the limits at infinity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import KERNELS, amount, assert_close, directional_derivative, run_node, symbolic_shapes

import ortgrad
from ortgrad.errors import KernelError, NodeError
from ortgrad.operators.declaration import find_operator

F = torch.nn.functional
TOLERANCE = {"float32": 2e-6, "float64": 2e-14}


@dataclass(frozen=True)
class Activation:
    """A forward function, and whether its gradient operator reads the output instead of the input."""

    operator: str
    forward: Callable[..., torch.Tensor]
    from_output: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)
    bias: bool = False


ACTIVATIONS = [
    Activation("ReluGrad", F.relu),
    Activation("SigmoidGrad", torch.sigmoid, from_output=True),
    Activation("TanhGrad", torch.tanh, from_output=True),
    Activation("LeakyReluGrad", lambda x: F.leaky_relu(x, 0.01), from_output=True),
    Activation("LeakyReluGrad", lambda x: F.leaky_relu(x, 0.13), True, {"alpha": 0.13}),
    Activation("LeakyReluGrad", lambda x: F.leaky_relu(x, 1.0), True, {"alpha": 1.0}),
    Activation("LeakyReluGrad", lambda x: F.leaky_relu(x, 2.5), True, {"alpha": 2.5}),
    Activation("QuickGeluGrad", lambda x: x * torch.sigmoid(1.702 * x)),
    Activation("QuickGeluGrad", lambda x: x * torch.sigmoid(-0.7 * x), attributes={"alpha": -0.7}),
    Activation("GeluGrad", F.gelu),
    Activation("FastGeluGrad", lambda x: F.gelu(x, approximate="tanh")),
    Activation("BiasGeluGrad_dX", lambda x, b: F.gelu(x + b), bias=True),
]
SMOOTH = [a for a in ACTIVATIONS if a.operator not in ("ReluGrad", "LeakyReluGrad")]
GELUS = [a for a in ACTIVATIONS if "Gelu" in a.operator and not a.bias]
SHAPES = [(7,), (1,), (2, 3), (1, 4, 5), (2, 1, 3, 4), (0,), (3, 0, 2)]


def name_of(activation: Activation) -> str:
    return "-".join([activation.operator, *map(str, activation.attributes.values())])


def feeds_of(activation: Activation, x: np.ndarray, dy: np.ndarray, b: np.ndarray | None) -> dict[str, Any]:
    if activation.from_output:
        return {"dY": dy, "Y": activation.forward(torch.from_numpy(x)).numpy()}
    return {"dY": dy, "X": x} | ({} if b is None else {"B": b})


def compute(activation: Activation, feeds: dict[str, np.ndarray], kernels: str) -> np.ndarray:
    operator = find_operator(activation.operator)
    builder = getattr(ortgrad.nodes, operator.builder_name)
    return run_node(builder(*feeds, ["dX"], **activation.attributes), feeds, kernels)["dX"]


def by_autograd(activation: Activation, x: np.ndarray, dy: np.ndarray, b: np.ndarray | None) -> np.ndarray:
    leaf = torch.from_numpy(x).requires_grad_()
    y = activation.forward(leaf, *([] if b is None else [torch.from_numpy(b)]))
    (dx,) = torch.autograd.grad(y, leaf, torch.from_numpy(dy))
    return dx.numpy()


def draw(activation: Activation, shape: tuple[int, ...], dtype: str, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    b = rng.standard_normal(shape[-1:]).astype(dtype) if activation.bias else None
    return [(2 * rng.standard_normal(shape)).astype(dtype), rng.standard_normal(shape).astype(dtype), b]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=name_of)
def test_against_pytorch(activation: Activation, dtype: str, kernels: str) -> None:
    for shape in SHAPES:
        x, dy, b = draw(activation, shape, dtype)
        actual = compute(activation, feeds_of(activation, x, dy, b), kernels)
        assert_close(actual, by_autograd(activation, x, dy, b), TOLERANCE[dtype])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("activation", SMOOTH, ids=name_of)
def test_against_finite_differences(activation: Activation, kernels: str) -> None:
    x, dy, b = draw(activation, (3, 8), "float64")
    direction = np.random.default_rng(1).standard_normal(x.shape)

    def loss(x: np.ndarray) -> float:
        y = activation.forward(torch.from_numpy(x), *([] if b is None else [torch.from_numpy(b)]))
        return float((y.numpy() * dy).sum())

    actual = compute(activation, feeds_of(activation, x, dy, b), kernels)
    assert (actual * direction).sum() == pytest.approx(
        directional_derivative(loss, [x], [direction]), rel=1e-9
    )


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=name_of)
def test_large_arrays_are_cut_into_pieces_without_loss(activation: Activation, kernels: str) -> None:
    x, dy, b = draw(activation, (3, 70_001), "float32")
    actual = compute(activation, feeds_of(activation, x, dy, b), kernels)
    assert_close(actual, by_autograd(activation, x, dy, b), TOLERANCE["float32"])


@settings(max_examples=amount(20, 400), deadline=None, derandomize=True)
@given(
    activation=st.sampled_from(ACTIVATIONS),
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    dtype=st.sampled_from(list(TOLERANCE)),
    kernels=st.sampled_from(KERNELS),
    seed=st.integers(0, 2**20),
)
def test_any_shape(
    activation: Activation, shape: tuple[int, ...], dtype: str, kernels: str, seed: int
) -> None:
    x, dy, b = draw(activation, shape, dtype, seed)
    actual = compute(activation, feeds_of(activation, x, dy, b), kernels)
    assert_close(actual, by_autograd(activation, x, dy, b), TOLERANCE[dtype])


@pytest.mark.parametrize("kernels", KERNELS)
def test_scalars(kernels: str) -> None:
    dy, x = np.array(2, np.float32), np.array(0.5, np.float32)
    dx = run_node(ortgrad.nodes.tanh_grad("dY", "Y", "dX"), {"dY": dy, "Y": x}, kernels)["dX"]
    assert_close(dx, np.array(1.5, np.float32), 0)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=name_of)
def test_float16_body(activation: Activation) -> None:
    x, dy, b = draw(activation, (4, 6), "float16")
    feeds = feeds_of(activation, x, dy, b)
    wide = compute(activation, {k: v.astype(np.float32) for k, v in feeds.items()}, "onnx")
    assert_close(compute(activation, feeds, "onnx").astype(np.float32), wide, 4e-3)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "activation", [a for a in SMOOTH if "Gelu" in a.operator and not a.bias], ids=name_of
)
def test_gelus_are_exact_everywhere(activation: Activation, dtype: str, kernels: str) -> None:
    x = np.linspace(-15, 15, 100_001).astype(dtype)
    actual = compute(activation, {"dY": np.ones_like(x), "X": x}, kernels)
    expected = by_autograd(activation, x.astype(np.float64), np.ones(x.shape), None)
    # PyTorch itself is 22 units off for the tanh form.
    units = 3 if activation.operator == "GeluGrad" else 30
    assert np.abs(actual - expected).max() < units * np.finfo(dtype).eps


LIMITS = [
    ("ReluGrad", {}, 0, 1),
    ("QuickGeluGrad", {}, 0, 1),
    ("QuickGeluGrad", {"alpha": -1.0}, 1, 0),
    ("GeluGrad", {}, 0, 1),
    ("FastGeluGrad", {}, 0, 1),
]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("operator", "attributes", "left", "right"), LIMITS)
def test_limits_at_infinity(
    operator: str, attributes: dict[str, Any], left: int, right: int, dtype: str, kernels: str
) -> None:
    x = np.array([-np.inf, -1e30, -1e10, -500, 500, 1e10, 1e30, np.inf, np.nan], dtype)
    dx = compute(
        Activation(operator, F.relu, attributes=attributes), {"dY": np.ones_like(x), "X": x}, kernels
    )
    expected = [left] * 4 + [right] * 4
    np.testing.assert_allclose(dx[:-1], expected, atol=2e-6 if dtype == "float32" else 1e-14)
    assert np.isnan(dx[-1]) or operator == "ReluGrad"


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_relu_cuts_off_what_is_not_finite(dtype: str, kernels: str) -> None:
    dy = np.array([np.inf, -np.inf, np.nan, np.inf, np.nan, 3, 3, 3], dtype)
    # Above 0 is what is at least the smallest normal number: sessions take smaller ones for 0.
    x = np.array([-1, 0, -1, 1, 1, np.nan, np.finfo(dtype).tiny, -0.0], dtype)
    dx = compute(ACTIVATIONS[0], {"dY": dy, "X": x}, kernels)
    np.testing.assert_array_equal(dx, np.array([0, 0, 0, np.inf, np.nan, 0, 3, 0], dtype))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=name_of)
def test_shapes_must_be_equal(activation: Activation) -> None:
    x, dy, b = draw(activation, (3, 4), "float32")
    feeds = feeds_of(activation, x, dy, b)
    operator = find_operator(activation.operator)
    node = getattr(ortgrad.nodes, operator.builder_name)(*feeds, ["dX"], name="cut", **activation.attributes)
    model = ortgrad.nodes.make_model(node, shapes=symbolic_shapes(feeds))
    session = ortgrad.InferenceSession(model, kernels="python")
    with pytest.raises(KernelError, match=r"'cut' failed.*does not fit with dY \[2, 4\]"):
        session.run(None, feeds | {"dY": dy[:2]})
    assert_close(session.run(None, feeds)[0], by_autograd(activation, x, dy, b), TOLERANCE["float32"])


@pytest.mark.parametrize("shape", [(3,), (2, 4), ()])
def test_the_bias_is_a_vector(shape: tuple[int, ...]) -> None:
    feeds = {
        "dY": np.ones((2, 4), np.float32),
        "X": np.ones((2, 4), np.float32),
        "B": np.ones(shape, np.float32),
    }
    with pytest.raises((KernelError, NodeError), match=r"must be dY \[\*S, C\], X \[\*S, C\], B \[C\]"):
        run_node(ortgrad.nodes.bias_gelu_grad_dx("dY", "X", "B", "dX"), feeds, "python")


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_negative_slope_is_refused(kernels: str) -> None:
    feeds = {"dY": np.ones(3, np.float32), "Y": np.ones(3, np.float32)}
    with pytest.raises((KernelError, NodeError), match=r"alpha is -0\.5: with a negative slope"):
        run_node(ortgrad.nodes.leaky_relu_grad("dY", "Y", "dX", alpha=-0.5), feeds, kernels)


def test_calling_an_operator_leaves_the_arrays_alone() -> None:
    operator = find_operator("TanhGrad")
    dy, y = np.asfortranarray(np.full((2, 3), 2.0)), np.full((2, 3), 0.5)
    np.testing.assert_array_equal(operator(dy, y), np.full((2, 3), 1.5))
    assert (dy == 2).all() and (y == 0.5).all()
