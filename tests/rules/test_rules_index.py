"""Gathers and scatters: rules and gradient operators against finite differences, PyTorch and NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import KERNELS, amount, assert_close, run_node
from support.rules import check_against_torch, check_rule, gradients, one_node

import ortgrad


def normal(*shape: int, seed: int = 0, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


CASES: list[tuple[str, list[np.ndarray | None], dict[str, Any]]] = [
    ("Gather", [normal(4, 3), ints([0, 2], [0, -1])], {}),
    ("Gather", [normal(2, 4, 3), ints(1, 1, 3)], {"axis": 1}),
    ("Gather", [normal(2, 4, 3), ints(1, 1, 3).astype(np.int32)], {"axis": -1 - 1}),
    ("Gather", [normal(2, 4, 3), np.array(2)], {"axis": 1}),
    ("Gather", [normal(2, 4, 3), np.array(-1)], {"axis": -2}),
    ("Gather", [normal(2, 4, 3), ints(1)], {"axis": 2}),
    ("GatherElements", [normal(3, 4), ints([0, 0, 2], [1, -1, 3])], {"axis": 1}),
    ("GatherElements", [normal(3, 4), ints([0, 0, 2, 1]).astype(np.int32)], {}),
    ("GatherND", [normal(3, 4, 2), ints([0, 1], [2, -1], [0, 1])], {}),
    ("GatherND", [normal(3, 4), ints([0, 1], [2, -1])], {}),
    ("GatherND", [normal(2, 3, 4), ints([[1], [1]], [[0], [-2]])], {"batch_dims": 1}),
    ("GatherND", [normal(2, 3, 4), np.arange(6).reshape(2, 3, 1) % 4], {"batch_dims": 2}),
    ("Compress", [normal(3, 4), np.array([True, False, True])], {"axis": 0}),
    ("Compress", [normal(3, 4), np.array([False, True, True])], {"axis": -1}),
    ("Compress", [normal(3, 4), np.array([False, True, True, False, True])], {}),
    ("Unique", [normal(7)], {}),
    ("Unique", [normal(2, 3)], {"sorted": 0}),
    ("Unique", [normal(2, 3)], {"axis": 1}),
    ("TensorScatter", [normal(2, 5, 3), normal(2, 2, 3, seed=1)], {}),
    ("TensorScatter", [normal(2, 5, 3), normal(2, 2, 3, seed=1), ints(1, 3)], {}),
    (
        "TensorScatter",
        [normal(2, 2, 5), normal(2, 2, 3, seed=1), ints(4, 0)],
        {"axis": 2, "mode": "circular"},
    ),
]


@pytest.mark.parametrize("constant", [True, False], ids=["constant", "run-time"])
@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)]
)
def test_differences(
    op_type: str, inputs: list[np.ndarray | None], attributes: dict[str, Any], constant: bool
) -> None:
    later = [i for i, array in enumerate(inputs) if array is not None and array.dtype.kind != "f"]
    opset = 24 if op_type == "TensorScatter" else 18
    if not constant:
        check_rule(op_type, inputs, attributes, opset=opset)
    elif later:
        for symbolic in (False, True):
            check_rule(op_type, inputs, attributes, opset=opset, constants=later, symbolic=symbolic)


UPDATES: list[tuple[str, np.ndarray, tuple[int, ...], dict[str, Any]]] = [
    ("ScatterElements", ints([0, 2, 1], [1, 0, -1]), (2, 3), {}),
    ("ScatterElements", ints([0, 2], [1, 0], [3, -2]), (3, 2), {"axis": 1}),
    ("ScatterND", ints([0], [2]), (2, 4), {}),
    ("ScatterND", ints([[0, 1]], [[2, -1]]), (2, 1), {}),
]
REDUCTIONS = ("none", "add", "mul", "max", "min")


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("op_type", "indices", "shape", "attributes"), UPDATES)
def test_scatter(
    op_type: str, indices: np.ndarray, shape: tuple[int, ...], attributes: dict[str, Any], reduction: str
) -> None:
    inputs = [normal(3, 4), indices, normal(*shape, seed=1)]
    check_rule(op_type, inputs, {**attributes, "reduction": reduction}, wrt=["a", "c"])


REPEATED: list[tuple[str, np.ndarray, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ("ScatterElements", ints(1, 1, 0, 1), (4,), (4,), {}),
    ("ScatterElements", ints(1, -3, 0, -4), (4,), (4,), {}),
    ("ScatterElements", ints([0, 2, 2, 0], [1, 0, -1, -2]), (3, 3), (2, 4), {"axis": 1}),
    ("ScatterElements", ints([0, 2], [0, 1], [-3, 2]), (3, 2), (3, 2), {"axis": 0}),
    ("ScatterND", ints([1], [1], [0], [1]), (4,), (4,), {}),
    ("ScatterND", ints([1], [-2], [0]), (3, 2), (3, 2), {}),
    ("ScatterND", ints([[1, 0], [0, 1]], [[1, 0], [-1, -2]]), (2, 2, 3), (2, 2, 3), {}),
]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("op_type", "indices", "shape", "updates", "attributes"), REPEATED)
def test_scatter_to_one_place(
    op_type: str,
    indices: np.ndarray,
    shape: tuple[int, ...],
    updates: tuple[int, ...],
    attributes: dict[str, Any],
    reduction: str,
) -> None:
    inputs = [normal(*shape), indices, normal(*updates, seed=1)]
    attributes = {**attributes, "reduction": reduction}
    check_rule(op_type, inputs, attributes, wrt=["a", "c"], second=reduction in ("none", "add", "mul"))
    if reduction == "none":
        # How the last update is found depends on what is known about the indices.
        for symbolic in (False, True):
            check_rule(op_type, inputs, attributes, wrt=["a", "c"], constants=[1], symbolic=symbolic)


@pytest.mark.parametrize("indices", [[0, 2, 2, 1], [3, 3, -1, 3], [0, 1, 2, 3]])
def test_fill_like_torch(indices: list[int]) -> None:
    """However often an element is filled, it passes its gradient to the value once."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 18]> g (float[4] a, int64[4] b, float c) => (float[4] y) {
        s = Shape(b) u = Expand(c, s) y = ScatterElements(a, b, u) }"""
    )
    a, c, dy = (torch.tensor(v, requires_grad=True) for v in (normal(4), normal(1)[0], normal(4, seed=2)))
    a.index_fill(0, torch.tensor(indices) % 4, c).backward(dy)
    feeds = {"a": a.detach().numpy(), "b": ints(*indices), "c": c.detach().numpy()}
    for kernels in KERNELS:
        found = gradients(model, feeds, {"y": dy.detach().numpy()}, ["a", "c"], kernels)
        for name, leaf in (("a", a), ("c", c)):
            assert leaf.grad is not None
            assert_close(found[name], leaf.grad.numpy(), 1e-6)


TIES = np.array([1, 2, 0, 3], np.float32)


@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize(
    ("reduction", "updates"),
    [
        ("prod", [2, 0, 3, 5]),
        ("prod", [0, 0, 0, 5]),
        ("amax", [2, 2, 1, -1]),
        ("amin", [2, 2, 1, -1]),
        ("amax", [7, 7, 0.5, 7]),
        ("sum", [1, 2, 3, 4]),
    ],
)
def test_scatter_like_torch(reduction: str, updates: list[float], opset: int) -> None:
    """Ties share equally, zeros among the factors leave the product of the others."""
    check_against_torch(
        "ScatterElements",
        lambda x, i, u: x.scatter_reduce(0, i, u, reduction),
        [TIES, ints(1, 1, 0, 1), np.array(updates, np.float32)],
        {"reduction": {"prod": "mul", "amax": "max", "amin": "min", "sum": "add"}[reduction]},
        opset=opset,
    )


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("is_sorted", [0, 1])
@pytest.mark.parametrize(("axis", "opset"), [(-1, 18), (0, 24)])
def test_topk(largest: int, is_sorted: int, axis: int, opset: int) -> None:
    attributes = {"largest": largest, "sorted": is_sorted, "axis": axis}
    inputs = [normal(4, 5), ints(3)]
    check_rule("TopK", inputs, attributes, outputs=(None, np.int64), wrt=["a"], opset=opset)
    if is_sorted:
        check_against_torch(
            "TopK",
            lambda x, k: x.topk(3, dim=axis, largest=bool(largest)).values,
            inputs,
            attributes,
            outputs=(None, np.int64),
            opset=opset,
        )


@pytest.mark.parametrize("axis", [-1, 0])
def test_one_hot(axis: int) -> None:
    inputs = [ints(1, -2, 0, 9), np.array(4), np.array([2, 5], np.float32)]
    check_rule("OneHot", inputs, {"axis": axis}, wrt=["c"])


def test_unique_of_equal_elements() -> None:
    model, feeds = one_node("Unique", [np.array([3, 1, 3, 1], np.float32)])
    grad = gradients(model, feeds, {"y": np.array([5, 7], np.float32)}, ["a"])["a"]
    np.testing.assert_array_equal(grad, [7, 5, 0, 0])


@pytest.mark.parametrize(
    ("op_type", "function", "inputs", "attributes"),
    [
        ("Gather", lambda x, i: x[i], [normal(9, 4), ints([0, 8], [0, -1])], {}),
        ("Gather", lambda x, i: x[:, i], [normal(2, 4, 3), ints(1, 1, 3)], {"axis": 1}),
        (
            "GatherElements",
            lambda x, i: x.gather(1, i),
            [normal(3, 4), ints([0, 0, 2], [1, 1, 3], [0, 0, 0])],
            {"axis": 1},
        ),
        (
            "GatherND",
            lambda x, i: x[i[..., 0], i[..., 1]],
            [normal(3, 4, 2), ints([0, 1], [2, 3], [0, 1])],
            {},
        ),
    ],
)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_torch(
    op_type: str,
    function: Callable[..., torch.Tensor],
    inputs: list[np.ndarray],
    attributes: dict[str, Any],
    kernels: str,
    dtype: type,
) -> None:
    inputs = [inputs[0].astype(dtype), *inputs[1:]]
    check_against_torch(op_type, function, inputs, attributes, kernels=kernels)


def test_second_derivatives() -> None:
    from onnx import helper

    for op_type, inputs, attributes in CASES[:11]:
        model, feeds = one_node(op_type, inputs, attributes)
        graph = model.graph
        graph.node[0].output[0] = "taken"
        graph.node.append(helper.make_node("ReduceSumSquare", ["taken"], ["y"], keepdims=0))
        graph.output[0].type.tensor_type.shape.SetInParent()
        built = ortgrad.build_gradient_model(model, wrt=["a"])
        ortgrad.check_gradients(built, feeds, wrt=["a"], of=["a_grad"]).raise_if_wrong()


def test_many_terms_in_one_place() -> None:
    """onnxruntime's ScatterND loses some of them."""
    index, dy = np.zeros((50000, 1), np.int64), np.ones((50000, 16), np.float32)
    expected = np.array([[50000] * 16, [0] * 16], np.float32)
    model, feeds = one_node("GatherND", [np.zeros((2, 16), np.float32), index])
    for kernels in KERNELS:
        grad = gradients(model, feeds, {"y": dy}, ["a"], kernels)["a"]
        np.testing.assert_array_equal(grad, expected)
    model, feeds = one_node("Gather", [np.zeros((2, 16), np.float32), index[:, 0]])
    for kernels in KERNELS:
        grad = gradients(model, feeds, {"y": dy}, ["a"], kernels)["a"]
        np.testing.assert_array_equal(grad, expected)


@st.composite
def gathers(draw: Any) -> tuple[tuple[int, ...], int, np.ndarray]:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    length = shape[axis]
    count = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    seed = draw(st.integers(0, 99))
    return shape, axis, np.random.default_rng(seed).integers(-length, length, count)


@settings(max_examples=amount(25, 500), deadline=None, derandomize=True)
@given(gathers())
def test_gather_grad(case: tuple[tuple[int, ...], int, np.ndarray]) -> None:
    shape, axis, indices = case
    for dtype in (np.float32, np.float64, np.float16):
        dy = normal(*np.zeros(shape).take(indices, axis).shape, dtype=dtype)
        expected = np.zeros(shape)
        window = (slice(None),) * (axis % len(shape))
        np.add.at(expected, (*window, indices), dy.astype(np.float64))
        node = ortgrad.nodes.gather_grad("shape", "indices", "dY", ["dX"], axis=axis)
        feeds = {"shape": ints(*shape), "indices": indices, "dY": dy}
        for kernels in KERNELS:
            tolerance = 2e-3 if dtype is np.float16 else 1e-6
            assert_close(run_node(node, feeds, kernels)["dX"], expected.astype(dtype), tolerance)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_other_gradients(kernels: str, dtype: type) -> None:
    tolerance = 2e-3 if dtype is np.float16 else 1e-6
    dy, indices = normal(2, 3, dtype=dtype), ints([0, 3, 0], [-1, 3, 1])
    expected = np.zeros((2, 4))
    np.add.at(expected, (np.arange(2)[:, None], indices), dy.astype(np.float64))
    node = ortgrad.nodes.gather_elements_grad("dY", "shape", "indices", ["dX"], axis=-1)
    feeds = {"dY": dy, "shape": ints(2, 4), "indices": indices}
    assert_close(run_node(node, feeds, kernels)["dX"], expected.astype(dtype), tolerance)
    dy, indices = normal(2, 2, 3, dtype=dtype), ints([[1], [1]], [[0], [-2]])
    expected = np.zeros((2, 4, 3))
    np.add.at(expected, (np.arange(2)[:, None], indices[..., 0]), dy.astype(np.float64))
    node = ortgrad.nodes.gather_nd_grad("shape", "indices", "dY", ["dX"], batch_dims=1)
    feeds = {"shape": ints(2, 4, 3), "indices": indices, "dY": dy}
    assert_close(run_node(node, feeds, kernels)["dX"], expected.astype(dtype), tolerance)


def test_refusals() -> None:
    shape, dy = ints(4, 3), normal(2, 3)
    gather = ortgrad.nodes.gather_grad("shape", "indices", "dY", ["dX"])
    elements = ortgrad.nodes.gather_elements_grad("dY", "shape", "indices", ["dX"])
    nd = ortgrad.nodes.gather_nd_grad("shape", "indices", "dY", ["dX"])
    for node, indices, text in (
        (gather, ints(0, 4), "index 4 is out of range for length 4"),
        (gather, ints(-5, 0), "index -5 is out of range for length 4"),
        (gather, ints(0, 1, 2), r"dY \[2, 3\] does not fit"),
        (elements, ints([0, 0, 4], [0, 0, 0]), "index 4 is out of range"),
        (elements, ints([0, 0, 1]), r"dY \[2, 3\] does not fit with indices \[1, 3\]"),
        (nd, ints([4], [0]), "index 4 is out of range"),
        (nd, ints([0, 0, 0], [0, 0, 0]), "do not fit"),
    ):
        with pytest.raises(ortgrad.KernelError, match=text):
            run_node(node, {"shape": shape, "indices": indices, "dY": dy}, "python")
    run_node(gather, {"shape": shape, "indices": ints(0, 3), "dY": dy}, "python")
