"""Gradients of Softmax and LogSoftmax against PyTorch and finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import KERNELS, amount, assert_close, directional_derivative, run_node

import ortgrad
from ortgrad.errors import KernelError, NodeError

OPERATORS = ["softmax_grad", "softmax_grad_13", "log_softmax_grad", "log_softmax_grad_13"]
TOLERANCE = {"float32": 2e-6, "float64": 2e-14}
CASES: list[tuple[tuple[int, ...], int | None]] = [
    ((5, 7), None),
    ((5, 7), 0),
    ((4,), 0),
    ((2, 3, 4), 0),
    ((2, 3, 4), 1),
    ((2, 3, 4), 2),
    ((2, 3, 4), -1),
    ((2, 3, 4), -2),
    ((2, 3, 4), -3),
    ((1, 3, 2, 5), 1),
    ((2, 3, 4, 2), -3),
    ((3, 1), 1),
    ((0, 3), 1),
    ((3, 0), 1),
]


def forward(operator: str, x: torch.Tensor, axis: int | None) -> torch.Tensor:
    function = torch.log_softmax if operator.startswith("log") else torch.softmax
    if operator.endswith("_13"):
        return function(x, -1 if axis is None else axis)
    axis = (1 if axis is None else axis) % x.ndim
    return function(x.flatten(axis), axis).reshape(x.shape)


def compute(operator: str, dy: np.ndarray, y: np.ndarray, axis: int | None, kernels: str) -> np.ndarray:
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    node = getattr(ortgrad.nodes, operator)("dY", "Y", "dX", **attributes)
    return run_node(node, {"dY": dy, "Y": y}, kernels)["dX"]


def check(
    operator: str, shape: tuple[int, ...], axis: int | None, dtype: str, kernels: str, seed: int = 0
) -> None:
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal(shape).astype(dtype)).requires_grad_()
    dy = rng.standard_normal(shape).astype(dtype)
    y = forward(operator, x, axis)
    (expected,) = torch.autograd.grad(y, x, torch.from_numpy(dy))
    actual = compute(operator, dy, y.detach().numpy(), axis, kernels)
    assert_close(actual, expected.numpy(), TOLERANCE[dtype])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_against_pytorch(operator: str, kernels: str) -> None:
    for shape, axis in CASES:
        for dtype in TOLERANCE:
            check(operator, shape, axis, dtype, kernels)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_large_arrays(operator: str, kernels: str) -> None:
    check(operator, (300, 1001), 1, "float32", kernels)
    check(operator, (2, 200_000), 1, "float32", kernels)
    check(operator, (30_000, 3, 2), 1, "float32", kernels)


@settings(max_examples=amount(25, 500), deadline=None, derandomize=True)
@given(
    operator=st.sampled_from(OPERATORS),
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    position=st.floats(0, 0.999),
    dtype=st.sampled_from(list(TOLERANCE)),
    kernels=st.sampled_from(KERNELS),
    seed=st.integers(0, 2**20),
)
def test_any_shape_and_axis(
    operator: str, shape: tuple[int, ...], position: float, dtype: str, kernels: str, seed: int
) -> None:
    axis = int(position * 2 * len(shape)) - len(shape)
    check(operator, shape, axis, dtype, kernels, seed)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_against_finite_differences(operator: str, kernels: str) -> None:
    rng = np.random.default_rng(0)
    x, dy, direction = rng.standard_normal((3, 3, 4, 5))

    def loss(x: np.ndarray) -> float:
        return float((forward(operator, torch.from_numpy(x), 1).numpy() * dy).sum())

    y = forward(operator, torch.from_numpy(x), 1).numpy()
    actual = (compute(operator, dy, y, 1, kernels) * direction).sum()
    assert actual == pytest.approx(directional_derivative(loss, [x], [direction]), rel=1e-9)


@pytest.mark.parametrize("operator", OPERATORS)
def test_float16_body(operator: str) -> None:
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 4, 6)).astype(np.float16)
    y = forward(operator, torch.from_numpy(x), 1).numpy()
    wide = compute(operator, dy.astype(np.float32), y.astype(np.float32), 1, "onnx")
    assert_close(compute(operator, dy, y, 1, "onnx").astype(np.float32), wide, 4e-3)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_masked_class_has_no_gradient(kernels: str) -> None:
    y = np.array([[-np.inf, np.log(0.25), np.log(0.75)]], np.float32)
    dy = np.array([[0, 1, 2]], np.float32)
    actual = compute("log_softmax_grad_13", dy, y, -1, kernels)
    assert_close(actual, np.array([[0, 0.25, -0.25]], np.float32), 2e-7)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("axis", [2, -3])
def test_the_axis_must_be_in_range(operator: str, axis: int, kernels: str) -> None:
    y = np.ones((2, 3), np.float32)
    with pytest.raises((KernelError, NodeError), match=f"does not fit.*axis={axis}"):
        compute(operator, y, y, axis, kernels)


@pytest.mark.parametrize("operator", OPERATORS)
def test_shapes_must_be_equal(operator: str) -> None:
    model = ortgrad.nodes.make_model(
        getattr(ortgrad.nodes, operator)("dY", "Y", "dX"), shapes={"dY": ["a", "b"], "Y": ["c", "d"]}
    )
    session = ortgrad.InferenceSession(model, kernels="python")
    y = np.full((2, 3), 1 / 3, np.float32)
    with pytest.raises(KernelError, match=r"Y \[2, 3\] does not fit with dY \[1, 3\]"):
        session.run(None, {"dY": y[:1], "Y": y})
    assert session.run(None, {"dY": y, "Y": y})[0].shape == (2, 3)
