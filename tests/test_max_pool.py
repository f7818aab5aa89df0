"""The gradient of MaxPool from its input, in sessions with compiled kernels, against PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from test_compiled import checked_tasks
from test_malformed_calls import Case

import ortgrad
from ortgrad.operators.declaration import INTERNAL_DOMAIN
from ortgrad.ops.max_pool import max_pool_input_grad
from ortgrad.pipelines.prepare import prepare_loaded

pytest.importorskip("numba", reason="the nodes are replaced in sessions that run compiled kernels")

POOLS = {
    1: torch.nn.functional.max_pool1d,
    2: torch.nn.functional.max_pool2d,
    3: torch.nn.functional.max_pool3d,
}
# X, attributes
CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "2x2": ([2, 3, 6, 8], {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "3x3 strided": ([2, 3, 9, 8], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}),
    "5x5": ([1, 4, 7, 6], {"kernel_shape": [5, 5], "pads": [2] * 4}),
    "stride 3": ([1, 2, 11, 13], {"kernel_shape": [3, 2], "strides": [2, 3]}),
    "strides larger than the kernel": ([1, 2, 11, 13], {"kernel_shape": [2, 1], "strides": [4, 3]}),
    "asymmetric pads": ([1, 2, 7, 6], {"kernel_shape": [3, 3], "pads": [0, 2, 1, 0]}),
    "dilated": ([1, 2, 9, 10], {"kernel_shape": [3, 2], "dilations": [2, 3], "strides": [2, 1]}),
    "ceil_mode": ([1, 2, 6, 7], {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    "ceil_mode with pads": (
        [1, 2, 6, 7],
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4, "ceil_mode": 1},
    ),
    "the whole of X": ([2, 3, 4, 5], {"kernel_shape": [4, 5]}),
    "1x1": ([2, 3, 4, 5], {"kernel_shape": [1, 1]}),
    "VALID": ([2, 3, 7, 5], {"kernel_shape": [2, 2], "auto_pad": "VALID"}),
    "1d": ([2, 3, 9], {"kernel_shape": [3], "strides": [2], "pads": [1, 1]}),
    "3d": ([2, 2, 5, 6, 7], {"kernel_shape": [2, 3, 2], "strides": [2, 1, 2], "pads": [1, 1, 0, 0, 1, 1]}),
    "3d dilated": ([1, 2, 7, 6, 9], {"kernel_shape": [2, 2, 3], "dilations": [3, 2, 2]}),
    "empty batch": ([0, 3, 6, 6], {"kernel_shape": [2, 2]}),
    "many channels": ([3, 70, 8, 8], {"kernel_shape": [2, 2], "strides": [2, 2]}),
}


def pool_model(rank: int, attributes: dict[str, Any], dtype: str = "float32") -> onnx.ModelProto:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    sizes = ["N", "C", *(f"S{i}" for i in range(rank))]
    graph = helper.make_graph(
        [helper.make_node("MaxPool", ["x"], ["y"], **attributes)],
        "pool",
        [helper.make_tensor_value_info("x", element, sizes)],
        [helper.make_tensor_value_info("y", element, None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def expected_grad(x: np.ndarray, dy: np.ndarray, **attributes: Any) -> np.ndarray:
    """PyTorch's, of a pool over X with -inf around it; it takes no asymmetric pads."""
    rank = x.ndim - 2
    kernel, strides, dilations = (
        attributes.get(name) or [1] * rank for name in ("kernel_shape", "strides", "dilations")
    )
    pads = attributes.get("pads") or [0] * (2 * rank)
    value = torch.from_numpy(x).requires_grad_()
    if not x.size:
        return np.zeros_like(x)
    # Enough behind X for the last windows of ceil_mode.
    around = [(pads[i], pads[rank + i] + kernel[i] * dilations[i] + strides[i]) for i in range(rank)]
    padded = torch.nn.functional.pad(value, [n for pair in reversed(around) for n in pair], value=-np.inf)
    y = POOLS[rank](padded, kernel, strides, 0, dilations)
    y = y[(slice(None), slice(None), *(slice(n) for n in dy.shape[2:]))]
    y.backward(torch.from_numpy(dy))
    assert value.grad is not None
    return value.grad.numpy()


def arrays(name: str, dtype: str, *, ties: bool = False) -> tuple[np.ndarray, np.ndarray]:
    shape, attributes = CASES[name]
    rng = np.random.default_rng(0)
    x = rng.integers(0, 3, shape).astype(dtype) if ties else rng.standard_normal(shape).astype(dtype)
    plain = onnxruntime.InferenceSession(pool_model(len(shape) - 2, attributes, dtype).SerializeToString())
    return x, rng.standard_normal(plain.run(None, {"x": x})[0].shape).astype(dtype)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_against_pytorch(name: str, dtype: str, ties: bool) -> None:
    shape, attributes = CASES[name]
    x, dy = arrays(name, dtype, ties=ties)
    built = ortgrad.build_gradient_model(pool_model(len(shape) - 2, attributes, dtype), wrt="x")
    dx = expected_grad(x, dy, **attributes)
    for kernels in ("compiled", "auto", "onnx"):
        _, actual = ortgrad.InferenceSession(built, kernels=kernels).run(None, {"x": x, "y_grad": dy})
        np.testing.assert_allclose(actual, dx, rtol=1e-6, err_msg=kernels)
    np.testing.assert_allclose(max_pool_input_grad(dy, x, **attributes), dx, rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_no_kernel_reads_or_writes_outside_its_tensors(name: str) -> None:
    attributes = CASES[name][1]
    x, dy = arrays(name, "float32")
    case = Case("MaxPoolInputGrad", {"dY": dy, "X": x}, attributes)
    (actual,) = checked_tasks(max_pool_input_grad, case)
    np.testing.assert_allclose(actual, expected_grad(x, dy, **attributes), rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_numbers_that_are_not_finite(value: float) -> None:
    """A NaN is not a maximum beside a number; a window without a maximum has its first element."""
    x = np.float32([[[[value, 1, value, value], [2, value, value, value]]]])
    dy = np.float32([[[[3, 5]]]])
    attributes = {"kernel_shape": [2, 2], "strides": [2, 2]}
    first = [3, 0, 5, 0, 0, 0, 0, 0] if value == np.inf else [0, 0, 5, 0, 3, 0, 0, 0]
    built = ortgrad.build_gradient_model(pool_model(2, attributes), wrt="x")
    _, actual = ortgrad.InferenceSession(built, kernels="compiled").run(None, {"x": x, "y_grad": dy})
    np.testing.assert_array_equal(actual.reshape(-1), first)
    np.testing.assert_array_equal(max_pool_input_grad(dy, x, **attributes).reshape(-1), first)


def test_a_dilated_window_that_skips_the_whole_of_x() -> None:
    x, attributes = np.ones((1, 1, 1), np.float32), {"kernel_shape": [2], "dilations": [2], "pads": [1, 1]}
    dy = np.float32([[[7]]])
    built = ortgrad.build_gradient_model(pool_model(1, attributes), wrt="x")
    _, actual = ortgrad.InferenceSession(built, kernels="compiled").run(None, {"x": x, "y_grad": dy})
    np.testing.assert_array_equal(actual, [[[0]]])
    np.testing.assert_array_equal(max_pool_input_grad(dy, x, **attributes), [[[0]]])


def prepared(model: onnx.ModelProto, kernels: Any = "auto") -> dict[str, onnx.NodeProto]:
    ready = prepare_loaded(model, kernels, bodies=False)
    return {node.op_type: node for node in ready.graph.node}


def test_nodes_are_replaced_in_sessions_only() -> None:
    built = ortgrad.build_gradient_model(pool_model(2, CASES["2x2"][1]), wrt="x")
    nodes = prepared(built)
    assert "MaxPoolGrad" not in nodes
    assert nodes["MaxPoolInputGrad"].domain == INTERNAL_DOMAIN
    assert list(nodes["MaxPool"].output) == ["y"]
    for kernels in ("python", "onnx"):
        assert len(prepared(built, kernels)["MaxPool"].output) == 2
    assert "MaxPoolInputGrad" not in {node.op_type for node in ortgrad.prepare(built).graph.node}


def test_indices_that_others_read_stay() -> None:
    model = pool_model(2, CASES["2x2"][1])
    model.graph.node[0].output.append("where")
    model.graph.output.add(name="where", type=helper.make_tensor_type_proto(onnx.TensorProto.INT64, None))
    built = ortgrad.build_gradient_model(model, wrt="x", of="y")
    assert len(prepared(built)["MaxPool"].output) == 2
    x, dy = arrays("2x2", "float32")
    _, where, dx = ortgrad.InferenceSession(built).run(None, {"x": x, "y_grad": dy})
    np.testing.assert_array_equal(dx.reshape(-1)[where.reshape(-1)], dy.reshape(-1))


def test_windows_that_onnxruntime_may_place_differently_stay() -> None:
    built = ortgrad.build_gradient_model(
        pool_model(2, {"kernel_shape": [2, 2], "auto_pad": "SAME_UPPER"}), wrt="x"
    )
    assert len(prepared(built)["MaxPool"].output) == 2


def test_a_seed_of_another_size_is_refused() -> None:
    built = ortgrad.build_gradient_model(pool_model(2, CASES["2x2"][1]), wrt="x")
    session = ortgrad.InferenceSession(built, kernels="compiled")
    x, dy = arrays("2x2", "float32")
    for _ in range(2):
        with pytest.raises(ortgrad.OrtgradError):
            session.run(None, {"x": x, "y_grad": dy[:, :, 1:]})
    np.testing.assert_allclose(
        session.run(["x_grad"], {"x": x, "y_grad": dy})[0],
        expected_grad(x, dy, **CASES["2x2"][1]),
        rtol=1e-6,
    )
