"""Gradients of Dropout against PyTorch and onnxruntime's own Dropout."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from support import KERNELS, amount, assert_close, directional_derivative, run_node

import ortgrad
from ortgrad.errors import KernelError

OPERATORS = ["dropout_grad", "trainable_dropout_grad"]
TOLERANCE = {"float32": 2e-7, "float64": 4e-16}


def compute(operator: str, kernels: str, **feeds: np.ndarray) -> np.ndarray:
    node = getattr(ortgrad.nodes, operator)(**{name: name for name in feeds}, outputs="dX")
    return run_node(node, feeds, kernels)["dX"]


def draw(shape: tuple[int, ...], dtype: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return np.asarray(rng.standard_normal(shape), dtype), np.asarray(rng.random(shape) > 0.4)


def by_autograd(dy: np.ndarray, mask: np.ndarray, ratio: float) -> np.ndarray:
    x = torch.zeros(dy.shape, dtype=torch.from_numpy(dy).dtype, requires_grad=True)
    y = torch.where(torch.from_numpy(mask), x / (1 - ratio), 0.0)
    (dx,) = torch.autograd.grad(y, x, torch.from_numpy(dy))
    return dx.numpy()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("operator", OPERATORS)
def test_against_pytorch(operator: str, dtype: str, kernels: str) -> None:
    for shape in [(4, 6), (1,), (), (2, 3, 4), (0, 3), (3, 70_001)]:
        dy, mask = draw(shape, dtype)
        for ratio in (0.0, 0.25, 0.9):
            actual = compute(operator, kernels, dY=dy, mask=mask, ratio=np.array(ratio, dtype))
            exact = float(np.array(ratio, dtype))
            assert_close(actual, by_autograd(dy, mask, exact), TOLERANCE[dtype])


@settings(max_examples=amount(15, 300), deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    ratio=st.floats(0, 0.984375, width=32),
    dtype=st.sampled_from(list(TOLERANCE)),
    kernels=st.sampled_from(KERNELS),
    seed=st.integers(0, 2**20),
)
def test_any_shape_and_ratio(
    shape: tuple[int, ...], ratio: float, dtype: str, kernels: str, seed: int
) -> None:
    dy, mask = draw(shape, dtype, seed)
    actual = compute("dropout_grad", kernels, dY=dy, mask=mask, ratio=np.array([ratio], dtype))
    # 1 - ratio is rounded to the type.
    assert_close(actual, by_autograd(dy, mask, ratio), 200 * TOLERANCE[dtype])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("training", [True, False])
def test_against_finite_differences_of_onnxruntime(training: bool, kernels: str) -> None:
    """The gradient belongs to the Dropout that made the mask, in both modes."""
    node = helper.make_node("Dropout", ["x", "ratio", "training"], ["y", "mask"], seed=7)
    double, boolean = onnx.TensorProto.DOUBLE, onnx.TensorProto.BOOL
    value = helper.make_tensor_value_info
    inputs = [value("x", double, [50]), value("ratio", double, []), value("training", boolean, [])]
    outputs = [value("y", double, [50]), value("mask", boolean, [50])]
    graph = helper.make_graph([node], "dropout", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    flags = {"ratio": np.array(0.3), "training": np.array(training)}
    rng = np.random.default_rng(0)
    x, dy, direction = rng.standard_normal((3, 50))

    def forward(x: np.ndarray) -> list[np.ndarray]:
        # A new session starts the seed over, so that every run draws the same mask.
        return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x, **flags})

    mask = forward(x)[1]
    assert mask.all() != training
    actual = compute(
        "dropout_grad", kernels, dY=dy, mask=mask, ratio=flags["ratio"], training_mode=flags["training"]
    )
    expected = directional_derivative(lambda x: float((forward(x)[0] * dy).sum()), [x], [direction])
    assert (actual * direction).sum() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_what_is_absent(operator: str, kernels: str) -> None:
    dy, mask = draw((3, 4), "float32")
    true, false = np.array(True), np.array([False])
    half = np.array(0.5, np.float32)
    cases: list[tuple[dict[str, Any], np.ndarray]] = [
        ({}, dy),
        ({"ratio": half}, dy),
        ({"mask": mask}, by_autograd(dy, mask, 0.5)),
        ({"mask": mask, "training_mode": true}, by_autograd(dy, mask, 0.5)),
        ({"mask": mask, "training_mode": false}, dy),
        ({"mask": mask, "ratio": half, "training_mode": false}, dy),
    ]
    for feeds, expected in cases:
        assert_close(compute(operator, kernels, dY=dy, **feeds), expected, 0)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("dtype", "ratio_type"), [("float64", "float32"), ("float32", "float64")])
def test_the_ratio_has_a_type_of_its_own(dtype: str, ratio_type: str, kernels: str) -> None:
    dy, mask = draw((3, 4), dtype)
    node = ortgrad.nodes.dropout_grad("dY", "mask", "ratio", outputs="dX")
    model = ortgrad.nodes.make_model(node, dtype=dtype)
    wanted = helper.np_dtype_to_tensor_dtype(np.dtype(ratio_type))
    next(i for i in model.graph.input if i.name == "ratio").type.tensor_type.elem_type = wanted
    session = ortgrad.InferenceSession(model, kernels=kernels)
    (actual,) = session.run(None, {"dY": dy, "mask": mask, "ratio": np.array(0.25, ratio_type)})
    assert_close(actual, by_autograd(dy, mask, 0.25), TOLERANCE[dtype])


def test_float16_body() -> None:
    dy, mask = draw((4, 6), "float16")
    actual = compute("dropout_grad", "onnx", dY=dy, mask=mask, ratio=np.array(0.3, np.float16))
    assert_close(actual.astype(np.float32), by_autograd(dy.astype(np.float32), mask, 0.3), 2e-3)


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_is_not_finite_is_dropped_too(kernels: str) -> None:
    dy, mask = np.array([np.inf, np.nan, np.inf], np.float32), np.array([False, False, True])
    np.testing.assert_array_equal(compute("dropout_grad", kernels, dY=dy, mask=mask), [0, 0, np.inf])


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"ratio": np.array([1.0], np.float32)}, r"ratio must be in \[0, 1\), it is 1\.0"),
        ({"ratio": np.array([-0.5], np.float32)}, r"ratio must be in \[0, 1\), it is -0\.5"),
        ({"ratio": np.array([np.nan], np.float32)}, r"ratio must be in \[0, 1\), it is nan"),
        ({"ratio": np.zeros(2, np.float32)}, r"ratio \[2\] does not fit"),
        ({"training_mode": np.zeros(0, bool)}, r"training_mode \[0\] does not fit"),
        ({"mask": np.ones((4,), bool)}, r"mask \[4\] does not fit with dY \[3\]"),
    ],
)
def test_wrong_inputs(operator: str, wrong: dict[str, np.ndarray], text: str) -> None:
    right = {
        "dY": np.ones(3, np.float32),
        "mask": np.ones(3, bool),
        "ratio": np.array([0.5], np.float32),
        "training_mode": np.array([True]),
    }
    node = getattr(ortgrad.nodes, operator)(*right, "dX")
    model = ortgrad.nodes.make_model(node, shapes={name: [name] for name in right})
    session = ortgrad.InferenceSession(model, kernels="python")
    with pytest.raises(KernelError, match=text):
        session.run(None, right | wrong)
    np.testing.assert_array_equal(session.run(None, right)[0], [2, 2, 2])


@pytest.mark.parametrize("ratio", [1.5, -0.5, np.nan])
def test_the_body_refuses_a_wrong_ratio(ratio: float) -> None:
    dy = np.ones(3, np.float32)
    with pytest.raises(Exception, match=r"DropoutGrad requires a ratio in \[0, 1\)|it requires a ratio"):
        compute("dropout_grad", "onnx", dY=dy, mask=dy > 0, ratio=np.array(ratio, np.float32))
