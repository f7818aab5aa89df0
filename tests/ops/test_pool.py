"""MaxPoolGrad and AveragePoolGrad against PyTorch, and against onnxruntime's own MaxPool and AveragePool."""

from __future__ import annotations

import functools
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from support import KERNELS, amount, assert_close, directional_derivative, run_node

import ortgrad
from ortgrad.nodes import average_pool_grad, max_pool_grad
from ortgrad.operators.declaration import find_operator

DTYPES = ("float32", "float64")
TOLERANCE = {"float32": 2e-6, "float64": 1e-13}


@dataclass(frozen=True)
class Pool:
    """A pool over an X of this shape; what PyTorch has no name for, it cannot check."""

    shape: tuple[int, ...]
    attributes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        named = "-".join(f"{k}={v}" for k, v in self.attributes.items())
        return f"{'x'.join(map(str, self.shape))}-{named}".replace(" ", "")

    @property
    def rank(self) -> int:
        return len(self.shape) - 2

    def torch_arguments(self) -> dict[str, Any] | None:
        """The same for PyTorch, or None: it pads both ends alike, by half the kernel at most."""
        given = dict(self.attributes)
        kernel = given.pop("kernel_shape")
        pads = given.pop("pads", [0] * (2 * self.rank))
        if (
            given.pop("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
            or pads[: self.rank] != pads[self.rank :]
        ):
            return None
        if any(2 * p > k for p, k in zip(pads, kernel, strict=False)):
            return None
        strides = given.pop("strides", [1] * self.rank)
        ceil_mode = bool(given.pop("ceil_mode", 0))
        given.pop("storage_order", None)
        return {
            "kernel_size": kernel,
            "stride": strides,
            "padding": pads[: self.rank],
            "ceil_mode": ceil_mode,
            **given,
        }


COMMON = [
    Pool((2, 3, 9), {"kernel_shape": [3], "strides": [2], "pads": [1, 1]}),
    Pool((1, 2, 7), {"kernel_shape": [2]}),
    Pool((2, 1, 10), {"kernel_shape": [3], "strides": [4], "pads": [0, 2]}),
    Pool((2, 2, 7, 6), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    Pool((1, 3, 8, 8), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    Pool((2, 2, 9, 5), {"kernel_shape": [2, 2], "strides": [3, 1]}),
    Pool((2, 2, 6, 7), {"kernel_shape": [3, 2], "strides": [1, 2], "pads": [2, 0, 1, 1]}),
    Pool((1, 2, 8, 7), {"kernel_shape": [3, 3], "strides": [2, 3], "pads": [1, 1, 1, 1], "ceil_mode": 1}),
    Pool((1, 2, 6, 9), {"kernel_shape": [2, 4], "strides": [4, 4], "pads": [0, 1, 1, 2], "ceil_mode": 1}),
    Pool((2, 1, 3, 4), {"kernel_shape": [4, 6], "strides": [3, 3], "ceil_mode": 1}),
    Pool((2, 2, 7, 8), {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    Pool((2, 2, 7, 8), {"kernel_shape": [3, 4], "strides": [2, 3], "auto_pad": "SAME_LOWER"}),
    Pool((2, 2, 6, 8), {"kernel_shape": [1, 1], "strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    Pool((2, 2, 6, 8), {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "VALID"}),
    Pool((2, 2, 6, 8), {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "VALID", "ceil_mode": 1}),
    Pool((2, 2, 8, 9), {"kernel_shape": [3, 2], "dilations": [2, 3], "pads": [1, 0, 2, 1]}),
    Pool((2, 1, 7, 7), {"kernel_shape": [2, 2], "dilations": [3, 2], "strides": [2, 2], "ceil_mode": 1}),
    Pool((3, 2, 5, 6), {"kernel_shape": [5, 6]}),
    Pool((1, 1, 1, 1), {"kernel_shape": [1, 1]}),
    Pool((1, 2, 5, 6, 4), {"kernel_shape": [2, 3, 2], "strides": [1, 2, 1]}),
    Pool((2, 2, 4, 5, 6), {"kernel_shape": [3, 3, 3], "strides": [2, 1, 2], "pads": [1] * 6}),
    Pool((1, 2, 5, 4, 6), {"kernel_shape": [2, 2, 3], "strides": [2, 3, 2], "pads": [0, 1, 2, 1, 0, 1]}),
    Pool(
        (1, 1, 6, 5, 7),
        {"kernel_shape": [2, 2, 2], "dilations": [2, 1, 3], "ceil_mode": 1, "strides": [2, 2, 3]},
    ),
]
AVERAGE = [
    Pool(pool.shape, {**pool.attributes, "count_include_pad": include})
    for pool in COMMON
    for include in (0, 1)
]
MAXIMUM = [
    *COMMON,
    Pool(
        (2, 2, 8, 9), {"kernel_shape": [3, 3], "strides": [1, 2], "dilations": [2, 2], "pads": [1, 1, 1, 1]}
    ),
    Pool((2, 3, 9), {"kernel_shape": [3], "strides": [2], "storage_order": 1}),
    Pool((2, 3, 5, 7), {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "storage_order": 1}),
    Pool((2, 2, 4, 5, 6), {"kernel_shape": [2, 2, 3], "strides": [1, 2, 1], "storage_order": 1}),
    # onnxruntime's windows are not ONNX's here, but the indices tell.
    Pool((1, 2, 10, 10), {"kernel_shape": [3, 3], "dilations": [2, 2], "auto_pad": "SAME_UPPER"}),
    Pool((1, 2, 9, 8), {"kernel_shape": [1, 2], "strides": [4, 4], "auto_pad": "SAME_UPPER"}),
]
# PyTorch's average pools have no dilations.
TORCH_AVERAGE = [p for p in AVERAGE if p.torch_arguments() and "dilations" not in p.attributes]
TORCH_MAXIMUM = [p for p in MAXIMUM if p.torch_arguments()]


@functools.cache
def forward_session(op_type: str, dtype: str, rank: int, attributes: str) -> onnxruntime.InferenceSession:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    outputs = {"Y": element, "Indices": helper.np_dtype_to_tensor_dtype(np.dtype("int64"))}
    if op_type == "AveragePool":
        del outputs["Indices"]
    graph = helper.make_graph(
        [helper.make_node(op_type, ["X"], list(outputs), **json.loads(attributes))],
        op_type,
        [helper.make_tensor_value_info("X", element, [None] * (rank + 2))],
        [helper.make_tensor_value_info(name, type_, None) for name, type_ in outputs.items()],
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    opsets = [helper.make_opsetid("", 22)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def forward(op_type: str, pool: Pool, x: np.ndarray) -> list[np.ndarray]:
    """onnxruntime's own MaxPool (with Indices) or AveragePool."""
    return forward_session(op_type, x.dtype.name, pool.rank, json.dumps(pool.attributes)).run(None, {"X": x})


def distinct(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Values so far apart that no small step changes which one is the largest."""
    return 0.1 * rng.permutation(math.prod(shape)).reshape(shape).astype(np.float64)


def run_max(pool: Pool, dy: np.ndarray, indices: np.ndarray, kernels: str, **shapes: Any) -> np.ndarray:
    node = max_pool_grad("dY", "Indices", "X_shape", "dX", dtype=dy.dtype, **pool.attributes)
    feeds = {"dY": dy, "Indices": indices, "X_shape": np.array(pool.shape, np.int64)}
    return run_node(node, feeds, kernels, **shapes)["dX"]


def run_average(pool: Pool, dy: np.ndarray, kernels: str, **shapes: Any) -> np.ndarray:
    node = average_pool_grad("dY", "X_shape", "dX", dtype=dy.dtype, **pool.attributes)
    feeds = {"dY": dy, "X_shape": np.array(pool.shape, np.int64)}
    return run_node(node, feeds, kernels, **shapes)["dX"]


def average_jacobian(pool: Pool) -> np.ndarray:
    """[X, Y] of one channel. AveragePool is linear: its values on a basis are its derivative."""
    sizes = pool.shape[2:]
    basis = np.eye(math.prod(sizes), dtype=np.float32).reshape(-1, 1, *sizes)
    return forward("AveragePool", pool, basis)[0]


def expected_average(pool: Pool, dy: np.ndarray, jacobian: np.ndarray) -> np.ndarray:
    table = jacobian.reshape(jacobian.shape[0], -1).astype(np.float64)
    planes = dy.reshape(*dy.shape[:2], -1).astype(np.float64)
    return (planes @ table.T).reshape(*dy.shape[:2], *pool.shape[2:]).astype(dy.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("pool", TORCH_MAXIMUM, ids=str)
def test_max_pool_matches_pytorch(pool: Pool, kernels: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    x = distinct(rng, pool.shape).astype(dtype)
    arguments = pool.torch_arguments()
    assert arguments is not None
    arguments["dilation"] = arguments.pop("dilations", 1)
    leaf = torch.tensor(x, requires_grad=True)
    y = getattr(torch.nn.functional, f"max_pool{pool.rank}d")(leaf, **arguments)
    dy = rng.standard_normal(y.shape).astype(dtype)
    y.backward(torch.from_numpy(dy))
    assert leaf.grad is not None
    _, indices = forward("MaxPool", pool, x)
    assert_close(run_max(pool, dy, indices, kernels), leaf.grad.numpy(), TOLERANCE[dtype])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("pool", MAXIMUM, ids=str)
def test_max_pool_matches_differences(pool: Pool, kernels: str) -> None:
    rng = np.random.default_rng(2)
    x = distinct(rng, pool.shape)
    y, indices = forward("MaxPool", pool, x)
    dy, direction = rng.standard_normal(y.shape), rng.standard_normal(x.shape)
    dx = run_max(pool, dy, indices, kernels)
    slope = directional_derivative(
        lambda v: float((dy * forward("MaxPool", pool, v)[0]).sum()), [x], [direction]
    )
    assert float((dx * direction).sum()) == pytest.approx(slope, rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("pool", TORCH_AVERAGE, ids=str)
def test_average_pool_matches_pytorch(pool: Pool, kernels: str, dtype: str) -> None:
    rng = np.random.default_rng(3)
    arguments = pool.torch_arguments()
    assert arguments is not None
    arguments["count_include_pad"] = bool(arguments["count_include_pad"])
    leaf = torch.zeros(pool.shape, dtype=getattr(torch, dtype), requires_grad=True)
    y = getattr(torch.nn.functional, f"avg_pool{pool.rank}d")(leaf, **arguments)
    dy = rng.standard_normal(y.shape).astype(dtype)
    y.backward(torch.from_numpy(dy))
    assert leaf.grad is not None
    assert_close(run_average(pool, dy, kernels), leaf.grad.numpy(), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("pool", AVERAGE, ids=str)
def test_average_pool_matches_differences(pool: Pool, kernels: str, dtype: str) -> None:
    jacobian = average_jacobian(pool)
    dy = np.random.default_rng(4).standard_normal((*pool.shape[:2], *jacobian.shape[2:])).astype(dtype)
    assert_close(run_average(pool, dy, kernels), expected_average(pool, dy, jacobian), 2e-6)


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    rank = draw(st.integers(1, 3))
    sizes, kernel, strides, dilations, heads, tails = [], [], [], [], [], []
    ceil_mode = draw(st.integers(0, 1))
    for _ in range(rank):
        k = draw(st.integers(1, 4))
        d = draw(st.integers(1, 3))
        head, tail = draw(st.integers(0, k - 1)), draw(st.integers(0, k - 1))
        smallest = max(1, (k - 1) * d + 1 - head - tail)
        for values, value in zip((kernel, dilations, heads, tails), (k, d, head, tail), strict=True):
            values.append(value)
        sizes.append(draw(st.integers(smallest, smallest + 5)))
        strides.append(draw(st.integers(1, 4)))
    attributes = {
        "kernel_shape": kernel,
        "strides": strides,
        "dilations": dilations,
        "pads": heads + tails,
        "ceil_mode": ceil_mode,
    }
    return Pool((draw(st.integers(1, 2)), draw(st.integers(1, 3)), *sizes), attributes)


@pytest.mark.parametrize("kernels", KERNELS)
@settings(max_examples=amount(25, 500), deadline=None, derandomize=True, database=None)
@given(pool=pools(), include=st.integers(0, 1))
def test_average_pool_of_any_windows(kernels: str, pool: Pool, include: int) -> None:
    pool = Pool(pool.shape, {**pool.attributes, "count_include_pad": include})
    jacobian = average_jacobian(pool)
    dy = np.random.default_rng(5).standard_normal((*pool.shape[:2], *jacobian.shape[2:]))
    assert_close(run_average(pool, dy, kernels), expected_average(pool, dy, jacobian), 1e-6)


@pytest.mark.parametrize("kernels", KERNELS)
@settings(max_examples=amount(25, 500), deadline=None, derandomize=True, database=None)
@given(pool=pools(), order=st.integers(0, 1))
def test_max_pool_of_any_windows(kernels: str, pool: Pool, order: int) -> None:
    rng = np.random.default_rng(6)
    x = distinct(rng, pool.shape)
    # The values are distinct, so the maximum tells where it was.
    y, _ = forward("MaxPool", pool, x)
    dy = rng.standard_normal(y.shape)
    expected = np.zeros(x.size)
    place = np.argsort(x.reshape(-1))
    seen = y > np.finfo(np.float64).min  # a window that sees padding only has no gradient
    np.add.at(expected, place[np.rint(10 * y[seen]).astype(np.int64)], dy[seen])
    ordered = Pool(pool.shape, {**pool.attributes, "storage_order": order})
    _, indices = forward("MaxPool", ordered, x)
    assert_close(run_max(ordered, dy, indices, kernels), expected.reshape(x.shape), 1e-13)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("order", [0, 1])
def test_windows_without_an_element_have_no_gradient(kernels: str, order: int) -> None:
    attributes = {"kernel_shape": [2, 2], "dilations": [4, 1], "pads": [1, 0, 1, 0], "storage_order": order}
    pool = Pool((2, 2, 3, 3), attributes)
    x = distinct(np.random.default_rng(7), pool.shape)
    y, indices = forward("MaxPool", pool, x)
    assert indices.min() < 0, "onnxruntime has no index for such a window"
    dx = run_max(pool, np.ones_like(y), indices, kernels)
    assert dx.sum() == (y > np.finfo(np.float64).min).sum()


@pytest.mark.parametrize("kernels", KERNELS)
def test_overlapping_maxima_add_up(kernels: str) -> None:
    pool = Pool((1, 1, 5), {"kernel_shape": [3]})
    _, indices = forward("MaxPool", pool, np.array([[[0, 0, 9, 0, 0]]], np.float32))
    dx = run_max(pool, np.array([[[1, 2, 4]]], np.float32), indices, kernels)
    np.testing.assert_array_equal(dx, [[[0, 0, 7, 0, 0]]])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("shape", [(0, 3, 7, 6), (2, 0, 7, 6)])
@pytest.mark.parametrize("extra", [{}, {"dilations": [2, 2]}], ids=["", "dilated"])
def test_empty(kernels: str, shape: tuple[int, ...], extra: dict[str, Any]) -> None:
    pool = Pool(shape, {"kernel_shape": [3, 2], "strides": [2, 2], **extra})
    outputs = (2, 2) if extra else (3, 3)
    dy = np.zeros((*shape[:2], *outputs), np.float32)
    assert run_average(pool, dy, kernels).shape == shape
    for order in (0, 1):
        ordered = Pool(shape, {**pool.attributes, "storage_order": order})
        assert run_max(ordered, dy, np.zeros(dy.shape, np.int64), kernels).shape == shape


@pytest.mark.parametrize("kernels", KERNELS)
def test_empty_3d(kernels: str) -> None:
    pool = Pool((0, 3, 4, 4, 4), {"kernel_shape": [2, 2, 2], "strides": [2, 2, 2]})
    dy = np.zeros((0, 3, 2, 2, 2), np.float32)
    assert run_average(pool, dy, kernels).shape == pool.shape
    assert run_max(pool, dy, np.zeros(dy.shape, np.int64), kernels).shape == pool.shape


@pytest.mark.parametrize("pool", [AVERAGE[6], AVERAGE[15], AVERAGE[23], AVERAGE[40]], ids=str)
def test_average_pool_in_half_precision(pool: Pool) -> None:
    jacobian = average_jacobian(pool)
    dy = np.random.default_rng(8).standard_normal((*pool.shape[:2], *jacobian.shape[2:])).astype(np.float16)
    expected = run_average(pool, dy.astype(np.float32), "python").astype(np.float16)
    assert_close(run_average(pool, dy, "onnx"), expected, 3e-3)


@pytest.mark.parametrize("pool", [MAXIMUM[3], MAXIMUM[15], MAXIMUM[-4]], ids=str)
def test_max_pool_in_half_precision(pool: Pool) -> None:
    rng = np.random.default_rng(9)
    y, indices = forward("MaxPool", pool, distinct(rng, pool.shape))
    dy = rng.standard_normal(y.shape).astype(np.float16)
    expected = run_max(pool, dy.astype(np.float32), indices, "python").astype(np.float16)
    assert_close(run_max(pool, dy, indices, "onnx"), expected, 3e-3)


@pytest.mark.parametrize("kernels", KERNELS)
def test_many_planes_in_pieces(kernels: str) -> None:
    """More than one piece, so more than one thread, and the last piece is a short one."""
    pool = Pool((3, 67, 64, 96), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]})
    dy = np.random.default_rng(10).standard_normal((3, 67, 32, 48)).astype(np.float32)
    leaf = torch.zeros(pool.shape, requires_grad=True)
    torch.nn.functional.avg_pool2d(leaf, 3, 2, 1, count_include_pad=False).backward(torch.from_numpy(dy))
    assert leaf.grad is not None
    assert_close(run_average(pool, dy, kernels), leaf.grad.numpy(), 2e-6)


@pytest.mark.parametrize("kernels", KERNELS)
def test_max_pool_needs_no_attributes(kernels: str) -> None:
    """onnxruntime-training's own tests write the node without any."""
    pool = Pool((1, 1, 4, 4))
    dy = np.array([[[[1, 2], [3, 4]]]], np.float32)
    dx = run_max(pool, dy, np.array([[[[0, 5], [10, 15]]]]), kernels)
    np.testing.assert_array_equal(dx, [[np.diag([1, 2, 3, 4])]])


BASE = {"kernel_shape": [2, 2], "strides": [2, 2]}
MISTAKES = [
    ((1, 1, 2, 2), (1, 1, 4), BASE, "X_shape = [1, 1, 4] does not fit with dY [1, 1, 2, 2]"),
    ((2, 2), (4, 4), {"kernel_shape": [2]}, "dY [2, 2] does not fit"),
    ((1, 1, 2, 2), (1, 1, -4, 4), BASE, "X_shape = [1, 1, -4, 4] does not fit"),
    ((1, 1, 2, 2), (1, 2, 4, 4), BASE, "X_shape = [1, 2, 4, 4] does not fit with dY [1, 1, 2, 2]"),
    ((1, 1, 2, 2), (1, 1, 4, 6), BASE, "gives [1, 1, 2, 3], but dY has [1, 1, 2, 2]"),
    ((1, 1, 2, 2), (1, 1, 2**40, 2**40), BASE, "but dY has [1, 1, 2, 2]"),
    # The output of an input that is one element too small is empty; of a smaller one there is none.
    ((1, 1, 1, 1), (1, 1, 1, 4), {"kernel_shape": [2, 2], "strides": [1, 2]}, "gives [1, 1, 0, 2]"),
    ((1, 1, 1, 1), (1, 1, 1, 4), {"kernel_shape": [3, 2], "strides": [1, 2]}, "does not fit into spatial"),
]


def expect_error(
    node: Any, bad: dict[str, np.ndarray], good: dict[str, np.ndarray] | None, text: str
) -> None:
    """The run fails with this text, and the next one of the same session works."""
    session = ortgrad.InferenceSession(ortgrad.nodes.make_model(node), kernels="python")
    with pytest.raises(ortgrad.KernelError) as caught:
        session.run(None, bad)
    assert text in str(caught.value)
    if good is not None:
        assert session.run(None, good)[0].shape == tuple(good["X_shape"])


@pytest.mark.parametrize(("y", "x", "attributes", "text"), MISTAKES)
def test_mistakes(y: tuple[int, ...], x: tuple[int, ...], attributes: dict[str, Any], text: str) -> None:
    feeds = {"dY": np.ones(y, np.float32), "X_shape": np.array(x, np.int64)}
    good = None
    if attributes is BASE:
        good = {"dY": np.ones((1, 1, 2, 2), np.float32), "X_shape": np.array([1, 1, 4, 4])}
    expect_error(average_pool_grad("dY", "X_shape", "dX", **attributes), feeds, good, text)
    feeds["Indices"] = np.zeros(y, np.int64)
    good = good and {**good, "Indices": np.zeros((1, 1, 2, 2), np.int64)}
    expect_error(max_pool_grad("dY", "Indices", "X_shape", "dX", **attributes), feeds, good, text)


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([[[[0, 1000], [8, 10]]], [[[16, 17], [18, 19]]]], "index 1000 at [0, 0, 0, 1] is out of range"),
        ([[[[0, -1], [8, 10]]], [[[16, 17], [18, 19]]]], "index -1 at [0, 0, 0, 1] is out of range"),
        ([[[[0, 1], [8, 10]]], [[[16, 17], [18, 32]]]], "index 32 at [1, 0, 1, 1] is out of range"),
        # Counted per channel, as PyTorch does: within X, but in the wrong place.
        ([[[[0, 1], [8, 10]]], [[[0, 1], [8, 10]]]], "its batch and channel are [16, 32) of X"),
        ([[[[0, 1]]], [[[16, 17]]]], "Indices [2, 1, 1, 2] does not fit with dY [2, 1, 2, 2]"),
    ],
)
@pytest.mark.parametrize("attributes", [BASE, {}], ids=["windows", "none"])
def test_wrong_indices(indices: Any, text: str, attributes: dict[str, Any]) -> None:
    bad = {
        "dY": np.ones((2, 1, 2, 2), np.float32),
        "X_shape": np.array([2, 1, 4, 4]),
        "Indices": np.array(indices),
    }
    good = {**bad, "Indices": np.array([[[[0, 2], [8, 10]]], [[[16, 18], [24, 31]]]])}
    expect_error(max_pool_grad("dY", "Indices", "X_shape", "dX", **attributes), bad, good, text)


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({}, "kernel_shape is missing"),
        ({"kernel_shape": [3], "dilations": [2], "auto_pad": "SAME_UPPER"}, "give pads instead"),
        ({"kernel_shape": [1], "strides": [3], "auto_pad": "SAME_LOWER"}, "give pads instead"),
        ({"kernel_shape": [3, 3]}, "does not fit"),
        ({"kernel_shape": [0]}, "kernel_shape [0] must be positive"),
        ({"kernel_shape": [3], "strides": [0]}, "strides [0] must be positive"),
        ({"kernel_shape": [3], "pads": [1]}, "pads [1] must have two numbers"),
        ({"kernel_shape": [3], "pads": [1, -1]}, "pads [1, -1] must not be negative"),
    ],
)
def test_attributes_that_average_pool_refuses(attributes: dict[str, Any], text: str) -> None:
    """The kernel refuses them, and so does the body, before anything runs."""
    operator = find_operator("AveragePoolGrad")
    assert operator is not None
    with pytest.raises(ValueError, match=re.escape(text)):
        operator(np.ones((1, 1, 2), np.float32), np.array([1, 1, 4]), **attributes)
    node = average_pool_grad("dY", "X_shape", "dX", **attributes)
    with pytest.raises(ortgrad.OrtgradError, match=re.escape(text)) as caught:
        ortgrad.nodes.make_model(node, shapes={"dY": ["N", 1, "L"]})
    assert "AveragePoolGrad_dX" in str(caught.value)


@pytest.mark.parametrize("kernels", KERNELS)
def test_storage_order_is_checked(kernels: str) -> None:
    with pytest.raises(ortgrad.OrtgradError, match="storage_order must be 0"):
        run_max(
            Pool((1, 1, 4), {"kernel_shape": [2], "strides": [2], "storage_order": 2}),
            np.ones((1, 1, 2), np.float32),
            np.zeros((1, 1, 2), np.int64),
            kernels,
        )


def test_a_shape_of_the_wrong_rank() -> None:
    node = average_pool_grad("dY", "X_shape", "dX", **BASE)
    session = ortgrad.InferenceSession(ortgrad.nodes.make_model(node), kernels="python")
    with pytest.raises(ortgrad.KernelError, match="does not fit"):
        session.run(None, {"dY": np.ones((1, 1, 2, 2), np.float32), "X_shape": np.array([[1, 1, 4, 4]])})


def test_shapes_are_inferred() -> None:
    node = average_pool_grad("dY", "X_shape", "dX", **BASE)
    model = ortgrad.nodes.make_model(node, shapes={"dY": ["N", 3, None, None]})
    inferred = onnx.shape_inference.infer_shapes(model).graph.output[0].type.tensor_type.shape
    assert [d.dim_param or d.dim_value for d in inferred.dim] == ["N", 3, "unk__0", "unk__1"]
    del model.graph.input[1]
    model.graph.initializer.append(numpy_helper.from_array(np.array([5, 3, 4, 4]), "X_shape"))
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph.output[0].type.tensor_type.shape
    assert [d.dim_value for d in inferred.dim] == [5, 3, 4, 4]
