"""Batch, instance, group and mean-variance normalization, against PyTorch and finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from support import KERNELS, assert_close, run_node
from support.rules import check_against_torch, check_rule, gradients, one_node, torch_gradients
from torch.nn import functional

import ortgrad

EPSILON = 1e-5


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    return np.asarray(x + dtype(0.5), dtype)


BATCHES = [(6,), (5, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 2, 3, 2), (1, 3, 4, 4)]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", BATCHES)
def test_batch_gradient_operators(shape: tuple[int, ...], dtype: Any, kernels: str) -> None:
    channels = shape[1] if len(shape) > 1 else 1
    x, dy = normal(*shape, dtype=dtype), normal(*shape, seed=1, dtype=dtype)
    scale, bias, mean, var = (normal(channels, seed=s, dtype=dtype) for s in (2, 3, 4, 5))
    var = abs(var)
    names = ["Y", "running_mean", "running_var", "saved_mean", "saved_inv_std"]
    node = ortgrad.nodes.batch_norm_internal("X", "scale", "B", "mean", "var", names, momentum=0.7)
    forward = run_node(node, {"X": x, "scale": scale, "B": bias, "mean": mean, "var": var}, kernels)

    tensors = [torch.tensor(a, requires_grad=True) for a in (x, scale, bias)]
    rows = tensors[0].reshape(-1, 1) if x.ndim == 1 else tensors[0]
    y = functional.batch_norm(rows, None, None, tensors[1], tensors[2], training=True, eps=EPSILON)
    y = y.reshape(shape)
    axes = (0, *range(2, x.ndim))
    batch_mean, batch_var = x.mean(axes).reshape(-1), x.var(axes).reshape(-1)
    tolerance = 2e-5 if dtype is np.float32 else 1e-12
    for name, value in zip(
        names,
        [
            y.detach().numpy(),
            0.7 * mean + 0.3 * batch_mean,
            0.7 * var + 0.3 * batch_var,
            batch_mean,
            1 / np.sqrt(batch_var + EPSILON),
        ],
        strict=True,
    ):
        assert_close(forward[name], value.astype(dtype), tolerance)

    y.backward(torch.tensor(dy))
    outputs = ["dX", "dScale", "dB"]
    node = ortgrad.nodes.batch_normalization_grad("dY", "X", "scale", "mean", "inv", outputs)
    feeds = {"dY": dy, "X": x, "scale": scale, "mean": forward["saved_mean"], "inv": forward["saved_inv_std"]}
    result = run_node(node, feeds, kernels)
    for name, tensor in zip(outputs, tensors, strict=True):
        assert tensor.grad is not None
        assert_close(result[name], tensor.grad.numpy(), tolerance)


@pytest.mark.parametrize("kernels", KERNELS)
def test_sums_alone(kernels: str) -> None:
    x, dy, vectors = normal(4, 3, 5), normal(4, 3, 5, seed=1), [normal(3, seed=s) for s in (2, 3)]
    tensors = [torch.tensor(v, requires_grad=True) for v in vectors]
    y = functional.batch_norm(torch.tensor(x), None, None, *tensors, training=True, eps=EPSILON)
    y.backward(torch.tensor(dy))
    mean, inv = x.mean((0, 2)), 1 / np.sqrt(x.var((0, 2)) + np.float32(EPSILON))
    feeds = {"dY": dy, "X": x, "scale": vectors[0], "mean": mean, "inv": inv}
    node = ortgrad.nodes.batch_normalization_grad(*feeds, [None, "dScale", "dB"])
    result = run_node(node, feeds, kernels)
    for name, tensor in zip(["dScale", "dB"], tensors, strict=True):
        assert tensor.grad is not None
        assert_close(result[name], tensor.grad.numpy(), 2e-5)


@pytest.mark.parametrize("kernels", KERNELS)
def test_batch_norm_internal_without_training(kernels: str) -> None:
    x, vectors = normal(2, 3, 4), [abs(normal(3, seed=s)) for s in range(4)]
    node = ortgrad.nodes.batch_norm_internal("X", "s", "B", "m", "v", ["Y"], training_mode=0)
    feeds = dict(zip("XsBmv", [x, *vectors], strict=True))
    scale, bias, mean, var = (torch.tensor(v) for v in vectors)
    expected = functional.batch_norm(torch.tensor(x), mean, var, scale, bias)
    assert_close(run_node(node, feeds, kernels)["Y"], expected.numpy(), 1e-6)


ERRORS: list[tuple[str, list[tuple[int, ...]], str]] = [
    (
        "batch_normalization_grad",
        [(2, 3), (2, 3), (2,), (3,), (3,)],
        r"mean \[3\] does not fit with .*scale \[2\]",
    ),
    (
        "batch_norm_internal",
        [(2, 3), (3,), (3,), (3,), (2,)],
        r"input_var \[2\] does not fit",
    ),
]


@pytest.mark.parametrize(("builder", "shapes", "message"), ERRORS)
def test_errors(builder: str, shapes: Sequence[tuple[int, ...]], message: str) -> None:
    names = "abcde"
    outputs = ["y"] if builder == "batch_norm_internal" else ["x", "y", "z"]
    node = getattr(ortgrad.nodes, builder)(*names, outputs)
    feeds = {name: normal(*shape) for name, shape in zip(names, shapes, strict=True)}
    with pytest.raises(ortgrad.KernelError, match=message):
        run_node(node, feeds, "python")


# Rules.


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("shape", BATCHES)
def test_batch_normalization(shape: tuple[int, ...], kernels: str) -> None:
    channels = shape[1] if len(shape) > 1 else 1
    x = normal(*shape)
    scale, bias, mean, var = (abs(normal(channels, seed=s)) for s in (1, 2, 3, 4))

    def function(training: bool) -> Callable[..., torch.Tensor]:
        def apply(
            x: torch.Tensor, s: torch.Tensor, b: torch.Tensor, m: torch.Tensor, v: torch.Tensor
        ) -> torch.Tensor:
            if training:
                rows = x.reshape(-1, 1) if x.ndim == 1 else x
                y = functional.batch_norm(rows, None, None, s, b, training=True, eps=EPSILON)
                return y.reshape(x.shape)
            on_channels = (-1, *[1] * (x.ndim - 2))
            s, b, m, v = (t.reshape(on_channels) if x.ndim > 1 else t for t in (s, b, m, v))
            return (x - m) * torch.rsqrt(v + EPSILON) * s + b

        return apply

    inputs = [x, scale, bias, mean, var]
    for symbolic in (False, True):
        check_against_torch(
            "BatchNormalization",
            function(False),
            inputs,
            kernels=kernels,
            symbolic=symbolic,
            tolerance=2e-5,
        )
        model, feeds = training_model(inputs, symbolic=symbolic)
        seed = normal(*shape, seed=6)
        expected = torch_gradients(function(True), inputs, seed)
        actual = gradients(model, feeds, {"y": seed}, list(feeds), kernels)
        for name, grad, other in zip(actual, actual.values(), expected, strict=True):
            assert other is not None
            np.testing.assert_allclose(grad, other, rtol=1e-4, atol=1e-5, err_msg=name)


def training_model(
    inputs: Sequence[np.ndarray], *, symbolic: bool = False, **attributes: Any
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """BatchNormalization in training mode, which has three outputs."""
    feeds = dict(zip("abcde", inputs, strict=True))
    kind = helper.np_dtype_to_tensor_dtype(inputs[0].dtype)
    infos = [
        helper.make_tensor_value_info(
            n, kind, [f"{n}_{i}" for i in range(a.ndim)] if symbolic else list(a.shape)
        )
        for n, a in feeds.items()
    ]
    node = helper.make_node("BatchNormalization", list(feeds), ["y", "m", "v"], training_mode=1, **attributes)
    results = [helper.make_tensor_value_info(n, kind, None) for n in ("y", "m", "v")]
    graph = helper.make_graph([node], "graph", infos, results)
    imports = [helper.make_opsetid("", 18)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10), feeds


@pytest.mark.parametrize("outputs", [("y", "m", "v"), ("m", "v"), ("m",), ("v",)])
def test_batch_normalization_running_statistics(outputs: tuple[str, ...]) -> None:
    inputs = [normal(2, 3, 4), *(abs(normal(3, seed=i)) for i in range(1, 5))]
    model, feeds = training_model(inputs, momentum=0.6, epsilon=0.01)
    ortgrad.check_gradients(model, feeds, wrt=list(feeds), of=list(outputs)).raise_if_wrong()


def test_batch_normalization_differences() -> None:
    inputs = [normal(3, 2, 4), *(abs(normal(2, seed=s)) + 0.5 for s in (1, 2, 3, 4))]
    check_rule("BatchNormalization", inputs, second=True, symbolic=False)
    model, feeds = training_model(inputs)
    built = ortgrad.build_gradient_model(model, wrt=list(feeds), of="y")
    seeds, results = {"y_grad": normal(3, 2, 4, seed=6)}, ["a_grad", "b_grad", "c_grad"]
    ortgrad.check_gradients(built, {**feeds, **seeds}, wrt=["a", "b"], of=results).raise_if_wrong()


@pytest.mark.parametrize("opset", [18, 22])
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 4, 5), (1, 3, 2, 3, 2)])
@pytest.mark.parametrize("symbolic", [False, True])
def test_instance_normalization(shape: tuple[int, ...], symbolic: bool, opset: int) -> None:
    inputs = [normal(*shape), normal(3, seed=1), normal(3, seed=2)]

    def function(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return functional.instance_norm(x, weight=scale, bias=bias, eps=1e-5)

    options: dict[str, Any] = {"symbolic": symbolic, "opset": opset}
    check_against_torch("InstanceNormalization", function, inputs, tolerance=2e-5, **options)
    check_rule("InstanceNormalization", inputs, second=len(shape) == 3, **options)


@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize(
    ("shape", "groups"), [((2, 6, 4), 3), ((2, 6, 2, 3), 2), ((2, 4, 3), 4), ((2, 4, 3), 1)]
)
@pytest.mark.parametrize("symbolic", [False, True])
def test_group_normalization(shape: tuple[int, ...], groups: int, symbolic: bool, opset: int) -> None:
    count = groups if opset == 18 else shape[1]
    inputs = [normal(*shape), normal(count, seed=1), normal(count, seed=2)]

    def function(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        repeats = x.shape[1] // count
        scale, bias = scale.repeat_interleave(repeats), bias.repeat_interleave(repeats)
        return functional.group_norm(x, groups, scale, bias)

    options: dict[str, Any] = {"symbolic": symbolic, "opset": opset}
    attributes = {"num_groups": groups}
    check_against_torch("GroupNormalization", function, inputs, attributes, tolerance=2e-5, **options)
    # In double throughout, or the differences would be computed in float.
    precise = {"stash_type": onnx.TensorProto.DOUBLE} if opset == 21 else {}
    check_rule("GroupNormalization", inputs, {**attributes, **precise}, second=groups == 3, **options)


@pytest.mark.parametrize("axes", [None, [1], [-1], [0, 1, 2, 3], [0, 2]])
def test_mean_variance_normalization(axes: list[int] | None) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        over = axes or [0, 2, 3]
        return (x - x.mean(over, keepdim=True)) / (x.std(over, correction=0, keepdim=True) + 1e-9)

    x, attributes = normal(2, 3, 4, 5), {} if axes is None else {"axes": axes}
    for symbolic in (False, True):
        check_against_torch(
            "MeanVarianceNormalization", function, [x], attributes, symbolic=symbolic, tolerance=2e-5
        )
    check_rule("MeanVarianceNormalization", [x], attributes, second=True)


def test_mean_variance_normalization_of_equal_values_is_finite() -> None:
    model, feeds = one_node("MeanVarianceNormalization", [np.ones((2, 3, 2, 2), np.float32)])
    seed = normal(2, 3, 2, 2)
    grad = gradients(model, feeds, {"y": seed}, ["a"])["a"]
    assert np.isfinite(grad).all()


HALF: list[tuple[str, list[np.ndarray], dict[str, Any], int]] = [
    ("BatchNormalization", [normal(4, 2, 6), *[abs(normal(2)) + 0.5] * 4], {}, 18),
    ("BatchNormalization", [normal(4, 2, 6), *[abs(normal(2)) + 0.5] * 4], {"training_mode": 1}, 18),
    ("InstanceNormalization", [normal(2, 3, 8), normal(3), normal(3)], {}, 18),
    ("GroupNormalization", [normal(2, 4, 8), normal(4), normal(4)], {"num_groups": 2}, 21),
    ("MeanVarianceNormalization", [normal(2, 3, 2, 2)], {}, 24),
]


@pytest.mark.parametrize(("op_type", "inputs", "attributes", "opset"), HALF)
def test_half_precision(
    op_type: str, inputs: list[np.ndarray], attributes: dict[str, Any], opset: int
) -> None:
    results = []
    for dtype in (np.float32, np.float16):
        arrays = [a.astype(dtype) for a in inputs]
        if attributes.get("training_mode"):
            model, feeds = training_model(arrays)
        else:
            model, feeds = one_node(op_type, arrays, attributes, opset=opset)
        seed = normal(*inputs[0].shape, seed=8).astype(dtype)
        results.append(gradients(model, feeds, {"y": seed}, list(feeds), kernels="onnx"))
    for name, full in results[0].items():
        assert results[1][name].dtype == np.float16
        scale = max(1.0, float(np.abs(full).max()))
        np.testing.assert_allclose(results[1][name].astype(np.float32), full, atol=2e-2 * scale, err_msg=name)
