"""Operators of onnxruntime-training that are written in standard ONNX, one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from support import GOLDEN, assert_close
from torch.nn import functional

import ortgrad
from ortgrad.dialects.training import _translations

Arrays = dict[str, np.ndarray]


def run(
    op_type: str,
    feeds: Arrays,
    outputs: int = 1,
    *,
    domain: str = "com.microsoft",
    constants: Arrays | None = None,
    inputs: list[str] | None = None,
    **attributes: Any,
) -> list[np.ndarray]:
    """The outputs of a model that is one such node; ranks are known, sizes are not."""
    names = [f"z{i}" for i in range(outputs)]
    node = helper.make_node(
        op_type, inputs or [*feeds, *(constants or {})], names, "the node", domain=domain, **attributes
    )
    types = {name: helper.np_dtype_to_tensor_dtype(value.dtype) for name, value in feeds.items()}
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info(n, types[n], [None] * feeds[n].ndim) for n in feeds],
        [onnx.ValueInfoProto(name=name) for name in names],
        [numpy_helper.from_array(value, name) for name, value in (constants or {}).items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = ortgrad.prepare(helper.make_model(graph, opset_imports=opsets, ir_version=8), kernels="onnx")
    return list(ortgrad.InferenceSession(model).run(None, feeds))


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("scale", [np.float32(4), np.array([4], np.int64), np.float64([4])])
def test_scale(shape: tuple[int, ...], scale: np.ndarray) -> None:
    x = numbers(*shape)
    feeds = {"x": np.asarray(x), "scale": np.asarray(scale)}
    for attributes, expected in (({}, x * 4), ({"scale_down": 1}, x / 4)):
        (result,) = run("Scale", feeds, **attributes)
        assert result.shape == shape
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("count", [2, 3])
def test_scaled_sum_and_batch_scale(count: int) -> None:
    arrays = {f"x{i}": numbers(2, 3, seed=i) for i in range(count)}
    scales = {f"scale_{i}": 0.5 + i for i in range(count)}
    (total,) = run("ScaledSum", arrays, **scales)
    np.testing.assert_allclose(
        total, sum(a * s for a, s in zip(arrays.values(), scales.values(), strict=True))
    )
    for part, scale in zip(
        run("BatchScale", {"x": arrays["x0"]}, count, **scales), scales.values(), strict=True
    ):
        np.testing.assert_allclose(part, arrays["x0"] * scale)


@pytest.mark.parametrize(
    ("a", "b", "a_axes", "b_axes"),
    [
        ([2, 3], [2, 3], [], []),
        ([2, 1], [2, 3], [1], []),
        ([3], [2, 3], [0], []),
        ([2, 3], [], [], [1, 0]),
        ([1, 3, 1], [2, 1, 4], [2, 0], [1]),
        ([1], [1, 1], [0], []),
        ([1, 1], [1, 1], [], []),
        ([4, 1, 5], [3, 1], [1], [2, 0]),
        ([1, 3], [0, 3], [0], []),
        ([], [], [], []),
    ],
)
def test_broadcast_gradient_args(a: list[int], b: list[int], a_axes: list[int], b_axes: list[int]) -> None:
    """As onnxruntime-training's kernel: the axes from the last to the first."""
    feeds = {"a": np.array(a, np.int64), "b": np.array(b, np.int64)}
    results = run("BroadcastGradientArgs", feeds, 2)
    assert [r.tolist() for r in results] == [a_axes, b_axes]


@pytest.mark.parametrize("axes", [[0], [1, 2], [-1], []])
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("noop", [0, 1])
def test_reduce_sum_training(axes: list[int], keepdims: int, noop: int) -> None:
    x = numbers(2, 3, 4)
    feeds = {"x": x, "axes": np.array(axes, np.int64)}
    (result,) = run("ReduceSumTraining", feeds, keepdims=keepdims, noop_with_empty_axes=noop)
    over = tuple(axes) if axes else () if noop else (0, 1, 2)
    np.testing.assert_allclose(result, x.sum(axis=over, keepdims=bool(keepdims)), rtol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_concat_and_split(axis: int) -> None:
    parts = {
        f"x{i}": numbers(*((n, 3) if axis in (0, -2) else (2, n)), seed=i) for i, n in enumerate([2, 1, 4])
    }
    joined, lengths = run("ConcatTraining", parts, 2, axis=axis)
    np.testing.assert_array_equal(joined, np.concatenate(list(parts.values()), axis))
    assert lengths.tolist() == [2, 1, 4]
    back = run("SplitTraining", {"x": joined, "split": lengths}, 3, axis=axis)
    for part, expected in zip(back, parts.values(), strict=True):
        np.testing.assert_array_equal(part, expected)


def test_accumulators_of_before() -> None:
    old, value = numbers(2, 3), numbers(2, 3, seed=1)
    feeds = {"old": old, "value": value.astype(np.float64)}
    np.testing.assert_allclose(run("InPlaceAccumulator", feeds)[0], old + value, rtol=1e-6)
    for update in (True, False):
        (total,) = run("InPlaceAccumulator", {**feeds, "update": np.array(update)})
        np.testing.assert_allclose(total, old + value if update else old, rtol=1e-6)
    (zeros,) = run("ZeroGradient", {"old": np.full((2, 3), np.nan, np.float32), "reset": np.array([True])})
    np.testing.assert_array_equal(zeros, np.zeros((2, 3)))


def test_pass_through() -> None:
    feeds = {"a": numbers(2), "b": np.array([3])}
    for result, given in zip(run("PassThrough", feeds, 2), feeds.values(), strict=True):
        np.testing.assert_array_equal(result, given)


def torch_gradients(function: Any, *arrays: np.ndarray) -> list[np.ndarray]:
    """Of the sum of function(*arrays) * dY, the first array."""
    dy, *operands = (torch.from_numpy(a.copy()) for a in arrays)
    for operand in operands:
        operand.requires_grad_()
    (function(*operands) * dy).sum().backward()
    return [operand.grad.numpy() for operand in operands if operand.grad is not None]


@pytest.mark.parametrize("shapes", [((2, 3), (2, 3)), ((2, 3), (3,)), ((1, 3), (2, 1)), ((), (2, 2))])
def test_div_grad(shapes: Any) -> None:
    a, b = numbers(*shapes[0]), np.asarray(np.exp(numbers(*shapes[1], seed=1)))
    dy = numbers(*np.broadcast_shapes(*shapes), seed=2)
    results = run("DivGrad", {"dY": dy, "A": np.asarray(a), "B": b}, 2)
    for result, expected in zip(results, torch_gradients(torch.div, dy, np.asarray(a), b), strict=True):
        assert_close(result, expected, 1e-6)


@pytest.mark.parametrize("group", [1, 2])
def test_conv_transpose_grad(group: int) -> None:
    x, w, b = numbers(2, 4, 5, 4), numbers(4, 3, 3, 2, seed=1), numbers(3 * group, seed=2)
    same = {"stride": (2, 1), "padding": (1, 0), "groups": group}
    y = functional.conv_transpose2d(torch.from_numpy(x), torch.from_numpy(w), torch.from_numpy(b), **same)
    dy = numbers(*y.shape, seed=3)
    expected = torch_gradients(lambda *a: functional.conv_transpose2d(*a, **same), dy, x, w, b)
    attributes = {"strides": [2, 1], "pads": [1, 0, 1, 0], "group": group, "kernel_shape": [3, 2]}
    results = run("ConvTransposeGrad", {"dY": dy, "X": x, "W": w}, 3, **attributes)
    for result, value in zip(results, expected, strict=True):
        assert_close(result, value, 1e-5)


@pytest.mark.parametrize(
    ("attributes", "options"),
    [
        ({"mode": "linear"}, {"mode": "bilinear", "align_corners": False}),
        (
            {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
            {"mode": "bilinear", "align_corners": True},
        ),
        (
            {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
            {"mode": "nearest"},
        ),
    ],
)
def test_resize_grad(attributes: Any, options: Any) -> None:
    x, dy = numbers(2, 3, 4, 5), numbers(2, 3, 8, 15, seed=1)
    (expected,) = torch_gradients(lambda x: functional.interpolate(x, size=(8, 15), **options), dy, x)
    feeds, scales = {"dY": dy, "X": x}, {"scales": np.float32([1, 1, 2, 3])}
    (result,) = run("ResizeGrad", feeds, constants=scales, inputs=["dY", "X", "", "scales"], **attributes)
    assert_close(result, expected, 1e-5)


def test_bias_fast_gelu_grad() -> None:
    x, b, dy = numbers(2, 5), numbers(5, seed=1), numbers(2, 5, seed=2)
    expected = torch_gradients(lambda x: functional.gelu(x + torch.from_numpy(b), approximate="tanh"), dy, x)
    assert_close(run("BiasFastGeluGrad_dX", {"dY": dy, "X": x, "B": b})[0], expected[0], 2e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_sparse_cross_entropy(reduction: str, weighted: bool) -> None:
    """Classes along the last axis, one weight for each sample."""
    logits, label = numbers(2, 3, 4), np.random.default_rng(1).integers(0, 4, (2, 3))
    weight = np.exp(numbers(2, 3, seed=2)) if weighted else np.ones((2, 3), np.float32)
    tensor = torch.from_numpy(logits).requires_grad_()
    log_prob = functional.log_softmax(tensor, -1)
    losses = -log_prob.gather(-1, torch.from_numpy(label)[..., None])[..., 0] * torch.from_numpy(weight)
    total = losses.sum() / (float(weight.sum()) if reduction == "mean" else 1)
    (total * 3).backward()
    feeds = {"logits": logits, "label": label, **({"weight": weight} if weighted else {})}
    loss, result = run("SparseSoftmaxCrossEntropy", feeds, 2, domain="", reduction=reduction)
    assert_close(loss, total.detach().numpy(), 1e-6)
    assert_close(result, log_prob.detach().numpy(), 1e-6)
    feeds = {"dY": np.float32(3), "log_prob": result, **{k: v for k, v in feeds.items() if k != "logits"}}
    feeds["dY"] = np.asarray(feeds["dY"])
    (grad,) = run("SparseSoftmaxCrossEntropyGrad", feeds, domain="", reduction=reduction)
    assert tensor.grad is not None
    assert_close(grad, tensor.grad.numpy(), 2e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_of_distributions(reduction: str) -> None:
    logits, label = numbers(3, 4), np.exp(numbers(3, 4, seed=1))
    tensor = torch.from_numpy(logits).requires_grad_()
    total = -(functional.log_softmax(tensor, -1) * torch.from_numpy(label)).sum()
    total = total / 3 if reduction == "mean" else total
    loss, log_prob = run("SoftmaxCrossEntropy", {"logits": logits, "label": label}, 2, reduction=reduction)
    assert_close(loss, total.detach().numpy(), 1e-6)
    feeds = {"dY": np.asarray(np.float32(3)), "log_prob": log_prob, "label": label}
    (grad,) = run("SoftmaxCrossEntropyGrad", feeds, reduction=reduction)
    # As onnxruntime-training: labels are taken to add up to 1.
    scale = 3 / (3 if reduction == "mean" else 1)
    assert_close(grad, ((np.exp(log_prob) - label) * scale).astype(np.float32), 2e-6)


@pytest.mark.parametrize("ignored", [None, 2])
def test_internal_loss(ignored: int | None) -> None:
    logits, label, bias = numbers(4, 3), np.array([0, 2, 1, 2]), numbers(4, 3, seed=1)
    weight = np.float32([1, 2, 0.5])
    tensor = torch.from_numpy(logits).requires_grad_()
    total = functional.cross_entropy(
        tensor,
        torch.from_numpy(label),
        torch.from_numpy(weight),
        ignore_index=-100 if ignored is None else ignored,
    )
    (total * 3).backward()
    constants = {} if ignored is None else {"ignored": np.array(ignored)}
    index = [] if ignored is None else ["ignored"]
    feeds = {"logits": logits, "label": label, "weight": weight}
    loss, log_prob = run(
        "SoftmaxCrossEntropyLossInternal",
        feeds,
        2,
        constants=constants,
        inputs=[*feeds, *index],
        output_type=TensorProto.DOUBLE,
    )
    assert loss.dtype == log_prob.dtype == np.float64
    assert_close(loss.astype(np.float32), total.detach().numpy(), 1e-6)
    feeds = {
        "dY": np.asarray(np.float32(3)),
        "log_prob": log_prob.astype(np.float32),
        "label": label,
        "weight": weight,
        "bias": bias,
    }
    (grad,) = run(
        "SoftmaxCrossEntropyLossInternalGrad",
        feeds,
        constants=constants,
        inputs=["dY", "log_prob", "label", "weight", *(index or [""]), "bias"],
    )
    assert tensor.grad is not None
    assert_close(grad, tensor.grad.numpy() + bias, 2e-6)


@pytest.mark.parametrize(
    ("op_type", "feeds", "attributes", "text"),
    [
        ("Scale", {"x": numbers(2)}, {}, "it has no input 1"),
        ("ConcatTraining", {"x": numbers(2)}, {}, "attribute 'axis' is missing"),
        ("BatchScale", {"x": numbers(2)}, {}, "attribute 'scale_0' is missing"),
        (
            "SoftmaxCrossEntropy",
            {"x": numbers(2, 3), "t": numbers(2, 3)},
            {"reduction": "none"},
            "must be mean or sum",
        ),
        (
            "SoftmaxCrossEntropyLossInternal",
            {"x": numbers(2, 3), "t": np.array([0, 1]), "w": numbers(3), "i": np.array(1)},
            {},
            "only a constant one",
        ),
        (
            "ResizeGrad",
            {"dY": numbers(2, 3), "x": numbers(2, 3)},
            {},
            "no input 2",
        ),
    ],
)
def test_what_cannot_be_written_is_named(
    op_type: str, feeds: Arrays, attributes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ortgrad.OrtgradError, match=f"{op_type} node 'the node'.*{text}"):
        run(op_type, feeds, **attributes)


def test_all_of_them_are_tested() -> None:
    models = [onnx.load(path) for path in (GOLDEN / "training").glob("*.onnx")]
    found = {node.op_type for model in models for node in model.graph.node}
    text = Path(__file__).read_text()
    assert not [name for name in _translations if name not in found and f'"{name}"' not in text]
