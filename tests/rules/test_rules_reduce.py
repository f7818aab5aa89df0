"""Gradient rules of reductions, against finite differences and PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.rules import check_against_torch, check_rule, gradients, one_node

INF = np.inf
Function = Callable[[torch.Tensor, list[int], bool], torch.Tensor]


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def some(*shape: int, dtype: type = np.float32) -> np.ndarray:
    """Positive, and far from ties."""
    values = np.random.default_rng(0).permutation(int(np.prod(shape)))
    return (0.3 + values.reshape(shape) / 10).astype(dtype)


def prod(x: torch.Tensor, axes: list[int], keepdims: bool) -> torch.Tensor:
    for axis in sorted((a % x.ndim for a in axes), reverse=True):
        x = x.prod(axis, keepdim=keepdims)
    return x


REDUCTIONS: list[tuple[str, Function]] = [
    ("ReduceSum", lambda x, axes, keep: x.sum(axes, keepdim=keep)),
    ("ReduceMean", lambda x, axes, keep: x.mean(axes, keepdim=keep)),
    ("ReduceMax", lambda x, axes, keep: x.amax(axes, keepdim=keep)),
    ("ReduceMin", lambda x, axes, keep: x.amin(axes, keepdim=keep)),
    ("ReduceProd", prod),
    ("ReduceL1", lambda x, axes, keep: x.abs().sum(axes, keepdim=keep)),
    ("ReduceL2", lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keepdim=keep)),
    ("ReduceLogSum", lambda x, axes, keep: x.sum(axes, keepdim=keep).log()),
    ("ReduceLogSumExp", lambda x, axes, keep: x.logsumexp(axes, keepdim=keep)),
    ("ReduceSumSquare", lambda x, axes, keep: x.square().sum(axes, keepdim=keep)),
]
NAMES = [name for name, _ in REDUCTIONS]
by_operator = pytest.mark.parametrize(("op_type", "function"), REDUCTIONS, ids=NAMES)


@by_operator
@pytest.mark.parametrize("axes", [[1], [-1, 0], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("keepdims", [0, 1])
def test_axes(op_type: str, function: Function, axes: list[int], keepdims: int) -> None:
    for constants, symbolic, dtype in (([1], False, np.float32), ([], True, np.float64)):
        check_against_torch(
            op_type,
            lambda x, _: function(x, axes, bool(keepdims)),
            [some(2, 3, 4, dtype=dtype), ints(*axes)],
            {"keepdims": keepdims},
            constants=constants,
            symbolic=symbolic,
        )


@by_operator
def test_no_axes(op_type: str, function: Function) -> None:
    """Absent, or an empty list: all axes, or none with noop_with_empty_axes."""
    x = some(2, 3)
    for inputs, constants, keepdims in (([x], [], 0), ([x, ints()], [], 1), ([x, ints()], [1], 0)):
        for noop in (0, 1):
            attributes = {"keepdims": keepdims, "noop_with_empty_axes": noop}
            check_rule(op_type, inputs, attributes, constants=constants)


@by_operator
def test_second_derivatives(op_type: str, function: Function) -> None:
    check_rule(op_type, [some(2, 3), ints(1)], {"keepdims": 1}, second=True)


@pytest.mark.parametrize("op_type", ["ReduceMax", "ReduceMin"])
@pytest.mark.parametrize("opset", [18, 20, 26])
def test_ties(op_type: str, opset: int) -> None:
    x = np.array([[1, 2, 2], [3, 3, 3], [1, 1, 2]], np.float32)
    function = torch.amax if op_type == "ReduceMax" else torch.amin
    check_against_torch(op_type, lambda x, _: function(x, 1, keepdim=True), [x, ints(1)], opset=opset)


ZEROS = np.array([[2, 3, 4], [0, 3, 4], [0, 3, 0], [0, 0, 0], [-2, 0, 5]], np.float32)


def test_zeros_in_a_product() -> None:
    check_against_torch("ReduceProd", lambda x, _: x.prod(1), [ZEROS, ints(1)], {"keepdims": 0})
    check_rule("ReduceProd", [ZEROS, ints(1)], {"keepdims": 0}, second=True)


@pytest.mark.parametrize(
    ("op_type", "function", "x"),
    [
        ("ReduceL1", lambda x: x.abs().sum(1), [[0, -1, 2], [0, 0, 0]]),
        ("ReduceL2", lambda x: torch.linalg.vector_norm(x, 2, 1), [[0, 3, 4], [0, 0, 0]]),
        ("ReduceLogSumExp", lambda x: x[:1].logsumexp(1), [[-INF, 1, 2]]),
        ("ReduceLogSumExp", lambda x: x.logsumexp(1), [[1000, 1, 2], [-1000, -1001, -2000]]),
    ],
)
def test_special_points(op_type: str, function: Callable[..., Any], x: list[list[float]]) -> None:
    inputs = [np.array(x, np.float32), ints(1)]
    check_against_torch(op_type, lambda x, _: function(x), inputs, {"keepdims": 0})


def test_no_nan() -> None:
    masked = np.array([[-INF, -INF], [0, 1]], np.float32)
    model, feeds = one_node("ReduceLogSumExp", [masked, ints(1)], {"keepdims": 0})
    grad = gradients(model, feeds, {"y": np.ones(2, np.float32)}, ["a"])["a"]
    np.testing.assert_array_equal(grad[0], [0, 0])
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("op_type", NAMES)
def test_half_precision(op_type: str) -> None:
    axes, seed = ints(1), np.ones(2)
    grads = []
    for dtype in (np.float16, np.float32):
        model, feeds = one_node(op_type, [some(2, 3, dtype=dtype), axes], {"keepdims": 0})
        grads.append(gradients(model, feeds, {"y": seed.astype(dtype)}, ["a"])["a"])
    assert grads[0].dtype == np.float16
    np.testing.assert_allclose(grads[0], grads[1], rtol=5e-3, atol=1e-3)


@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMean", "ReduceL2", "ReduceSumSquare"])
def test_empty(op_type: str) -> None:
    for shape, axis, reduced in (((0, 3), 1, (0,)), ((0, 3), 0, (3,))):
        model, feeds = one_node(op_type, [np.zeros(shape, np.float32), ints(axis)], {"keepdims": 0})
        grad = gradients(model, feeds, {"y": np.ones(reduced, np.float32)}, ["a"])["a"]
        assert grad.shape == shape


def test_a_mean_of_many_in_half_precision() -> None:
    x = np.zeros((1, 80000), np.float16)
    for symbolic in (False, True):
        model, feeds = one_node("ReduceMean", [x, ints(1)], {"keepdims": 0}, symbolic=symbolic)
        grad = gradients(model, feeds, {"y": np.ones(1, np.float16)}, ["a"])["a"]
        np.testing.assert_allclose(grad, 1 / 80000, rtol=0.01)
