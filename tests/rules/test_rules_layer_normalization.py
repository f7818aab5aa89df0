"""Layer, RMS and Lp normalization: gradient operators and rules, against PyTorch and finite differences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from support import KERNELS, assert_close, run_node
from support.rules import check_against_torch, check_rule, gradients, one_node
from torch.nn import functional

import ortgrad
from ortgrad.operators.declaration import find_operator

MS = "com.microsoft"
EPSILON = 1e-5


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    return np.asarray(x + dtype(0.5), dtype)


def rms(x: torch.Tensor, scale: torch.Tensor, axis: int, epsilon: float = EPSILON) -> torch.Tensor:
    axes = tuple(range(axis % x.ndim, x.ndim))
    return x * torch.rsqrt((x * x).mean(axes, keepdim=True) + epsilon) * scale


def layer(
    x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, axis: int, epsilon: float = EPSILON
) -> torch.Tensor:
    y = functional.layer_norm(x, x.shape[axis % x.ndim :], eps=epsilon) * scale
    return y if bias is None else y + bias


LAYERS = [((4, 5), -1), ((2, 3, 4), -1), ((2, 3, 4), 1), ((2, 3, 4), -2), ((2, 3, 4), 0), ((2, 3, 4, 5), 2)]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("shape", "axis"), LAYERS)
def test_layer_gradient_operators(shape: tuple[int, ...], axis: int, dtype: Any, kernels: str) -> None:
    first = axis % len(shape)
    axes = tuple(range(first, len(shape)))
    x, dy = normal(*shape, dtype=dtype), normal(*shape, seed=1, dtype=dtype)
    scale, bias = (normal(*shape[first:], seed=s, dtype=dtype) for s in (2, 3))
    mean = x.mean(axes, keepdims=True)
    inv = 1 / np.sqrt(x.var(axes, keepdims=True) + dtype(EPSILON))
    names = ["dX", "dScale", "dBias"]
    tensors = [torch.tensor(a, requires_grad=True) for a in (x, scale, bias)]
    y = layer(tensors[0], tensors[1], tensors[2], axis)
    y.backward(torch.tensor(dy))
    expected = {name: t.grad.numpy() for name, t in zip(names, tensors, strict=True) if t.grad is not None}
    tolerance = 5e-6 if dtype is np.float32 else 1e-12

    node = ortgrad.nodes.layer_normalization_grad("dY", "X", "scale", "mean", "inv", names, axis=axis)
    result = run_node(node, {"dY": dy, "X": x, "scale": scale, "mean": mean, "inv": inv}, kernels)
    for name in names:
        assert_close(result[name], expected[name], tolerance)

    node = ortgrad.nodes.invertible_layer_normalization_grad(
        "dY", "Y", "scale", "bias", "inv", names, axis=axis
    )
    feeds = {"dY": dy, "Y": y.detach().numpy(), "scale": scale, "bias": bias, "inv": inv}
    result = run_node(node, feeds, kernels)
    for name in names:
        assert_close(result[name], expected[name], 20 * tolerance)

    tensors = [torch.tensor(a, requires_grad=True) for a in (x, scale)]
    rms(tensors[0], tensors[1], axis).backward(torch.tensor(dy))
    inv = 1 / np.sqrt((x * x).mean(axes, keepdims=True) + dtype(EPSILON))
    node = ortgrad.nodes.simplified_layer_normalization_grad("dY", "X", "scale", "inv", names[:2], axis=axis)
    result = run_node(node, {"dY": dy, "X": x, "scale": scale, "inv": inv}, kernels)
    for name, tensor in zip(names, tensors, strict=False):
        assert tensor.grad is not None
        assert_close(result[name], tensor.grad.numpy(), tolerance)


@pytest.mark.parametrize("kernels", KERNELS)
def test_sums_alone(kernels: str) -> None:
    x, dy, scale, bias = normal(6, 5), normal(6, 5, seed=1), normal(5, seed=2), normal(5, seed=3)
    tensors = [torch.tensor(a, requires_grad=True) for a in (scale, bias)]
    layer(torch.tensor(x), tensors[0], tensors[1], 1).backward(torch.tensor(dy))
    mean, inv = x.mean(1, keepdims=True), 1 / np.sqrt(x.var(1, keepdims=True) + np.float32(EPSILON))
    feeds = {"dY": dy, "X": x, "scale": scale, "mean": mean, "inv": inv}
    node = ortgrad.nodes.layer_normalization_grad(*feeds, [None, "dScale", "dBias"])
    result = run_node(node, feeds, kernels)
    for name, tensor in zip(["dScale", "dBias"], tensors, strict=True):
        assert tensor.grad is not None
        assert_close(result[name], tensor.grad.numpy(), 5e-6)


MIXED = [(np.float32, np.float64), (np.float64, np.float32)]


@pytest.mark.parametrize(("kind", "weight_kind"), MIXED)
def test_mixed_types(kind: Any, weight_kind: Any) -> None:
    x, dy, scale = (normal(6, 5, dtype=kind), normal(6, 5, seed=1, dtype=weight_kind), normal(5, seed=2))
    tensors = [torch.tensor(a.astype(np.float64), requires_grad=True) for a in (x, scale, scale)]
    layer(tensors[0], tensors[1], tensors[2], 1).backward(torch.tensor(dy.astype(np.float64)))
    wide = x.astype(np.float64)
    mean, inv = wide.mean(1, keepdims=True), 1 / np.sqrt(wide.var(1, keepdims=True) + EPSILON)
    arrays = (dy, x, scale.astype(weight_kind), mean, inv)
    kinds = (kind, weight_kind, weight_kind)
    result = find_operator("LayerNormalizationGrad")(*arrays, axis=-1)
    for value, tensor, dtype in zip(result, tensors, kinds, strict=True):
        assert tensor.grad is not None
        assert value.dtype == dtype
        np.testing.assert_allclose(value, tensor.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_half_precision_bodies() -> None:
    x, dy = normal(4, 3, 8), normal(4, 3, 8, seed=1)
    scale, mean = normal(8, seed=2), x.mean(2, keepdims=True)
    inv = 1 / np.sqrt(x.var(2, keepdims=True) + np.float32(EPSILON))
    node = ortgrad.nodes.layer_normalization_grad("dY", "X", "scale", "mean", "inv", ["dX", "ds", "db"])
    feeds = {"dY": dy, "X": x, "scale": scale, "mean": mean, "inv": inv}
    expected = run_node(node, feeds, "onnx")
    half = {name: a if name in ("mean", "inv") else a.astype(np.float16) for name, a in feeds.items()}
    model, _ = one_node("Identity", [x])  # a frame to put the node in
    model.graph.node[0].CopyFrom(node)
    del model.graph.input[:], model.graph.output[:]
    for name, array in half.items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        model.graph.input.append(helper.make_tensor_value_info(name, kind, array.shape))
    for name in expected:
        model.graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT16, None))
    model.opset_import.append(helper.make_opsetid(MS, 1))
    actual = ortgrad.InferenceSession(model, kernels="onnx").run(list(expected), half)
    for value, (name, other) in zip(actual, expected.items(), strict=True):
        np.testing.assert_allclose(value.astype(np.float32), other, atol=2e-2, err_msg=name)


ERRORS: list[tuple[str, list[tuple[int, ...]], dict[str, Any], str]] = [
    ("layer_normalization_grad", [(2, 3), (2, 4), (4,), (2, 1), (2, 1)], {}, "does not fit"),
    ("layer_normalization_grad", [(2, 3), (2, 3), (2,), (2, 1), (2, 1)], {}, r"scale \[2\] does not fit"),
    ("layer_normalization_grad", [(2, 3), (2, 3), (3,), (3, 1), (2, 1)], {}, r"mean \[3, 1\] does not fit"),
    (
        "layer_normalization_grad",
        [(2, 3), (2, 3), (3,), (2, 1), (2, 1)],
        {"axis": 2},
        "does not fit.*axis=2",
    ),
    ("invertible_layer_normalization_grad", [(2, 3), (2, 3), (3,), (2,), (2, 1)], {}, "does not fit"),
]


@pytest.mark.parametrize(("builder", "shapes", "attributes", "message"), ERRORS)
def test_errors(
    builder: str, shapes: Sequence[tuple[int, ...]], attributes: dict[str, Any], message: str
) -> None:
    names = "abcde"
    node = getattr(ortgrad.nodes, builder)(*names, ["x", "y", "z"], **attributes)
    feeds = {name: normal(*shape) for name, shape in zip(names, shapes, strict=True)}
    with pytest.raises((ortgrad.KernelError, ortgrad.NodeError), match=message):
        run_node(node, feeds, "python")


# Rules.


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("shape", "axis"), LAYERS)
def test_layer_normalization(shape: tuple[int, ...], axis: int, symbolic: bool, kernels: str) -> None:
    inner = shape[axis % len(shape) :]
    x, scale, bias = normal(*shape), normal(*inner, seed=1), normal(*inner, seed=2)
    options: dict[str, Any] = {"symbolic": symbolic, "kernels": kernels}
    attributes = {"axis": axis}
    for inputs in ([x, scale, bias], [x, scale, None]):
        check_against_torch(
            "LayerNormalization",
            lambda x, s, b: layer(x, s, b, axis),
            inputs,
            attributes,
            tolerance=1e-5,
            **options,
        )
    check_against_torch(
        "RMSNormalization",
        lambda x, s: rms(x, s, axis),
        [x, scale],
        attributes,
        opset=23,
        tolerance=1e-5,
        **options,
    )
    check_against_torch(
        "SimplifiedLayerNormalization",
        lambda x, s: rms(x, s, axis),
        [x, scale],
        {**attributes, "epsilon": EPSILON},
        tolerance=1e-5,
        **options,
    )


@pytest.mark.parametrize("shape", [(1,), (4,), (3, 1), (1, 4), (2, 1, 4)])
@pytest.mark.parametrize("symbolic", [False, True])
def test_layer_normalization_with_stretched_scale(shape: tuple[int, ...], symbolic: bool) -> None:
    x, scale, bias = normal(2, 3, 4), normal(*shape, seed=1), normal(1, 4, seed=2)
    check_against_torch(
        "LayerNormalization",
        lambda x, s, b: layer(x, s, b, 1),
        [x, scale, bias],
        {"axis": 1},
        symbolic=symbolic,
        tolerance=1e-5,
    )


def statistics_model(op_type: str, outputs: Sequence[str], dtype: Any) -> onnx.ModelProto:
    names = [name if name in outputs else "" for name in ("y", "mean", "inv")]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    infos = [helper.make_tensor_value_info("x", kind, [2, "n", 4])]
    infos += [helper.make_tensor_value_info(name, kind, [4]) for name in ("s", "b")]
    results = [
        helper.make_tensor_value_info(n, kind if n == "y" else onnx.TensorProto.FLOAT, None) for n in outputs
    ]
    node = helper.make_node(op_type, ["x", "s", "b"], names or ["y"], epsilon=0.1)
    return helper.make_model(
        helper.make_graph([node], "graph", infos, results),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=10,
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("outputs", [("y", "mean"), ("y", "inv"), ("y", "mean", "inv")])
def test_layer_normalization_statistics(outputs: tuple[str, ...], dtype: Any) -> None:
    x = normal(2, 3, 4, dtype=dtype)
    s, b = normal(4, seed=1, dtype=dtype), normal(4, seed=2, dtype=dtype)
    t = torch.tensor(x, requires_grad=True)
    inv = torch.rsqrt(t.var(2, correction=0, keepdim=True) + 0.1)
    results = {
        "y": layer(t, torch.tensor(s), torch.tensor(b), 2, 0.1),
        "mean": t.mean(2, keepdim=True),
        "inv": inv,
    }
    seeds = {n: normal(*results[n].shape, seed=7, dtype=dtype if n == "y" else np.float32) for n in outputs}
    total = sum((results[n] * torch.tensor(seed)).sum() for n, seed in seeds.items())
    assert isinstance(total, torch.Tensor)
    total.backward()
    model = statistics_model("LayerNormalization", outputs, dtype)
    grad = gradients(model, {"x": x, "s": s, "b": b}, seeds, ["x"])["x"]
    assert t.grad is not None
    assert_close(grad, t.grad.numpy(), 1e-5 if dtype is np.float32 else 1e-6)


def test_only_wanted_gradients_are_computed() -> None:
    model, _ = one_node("LayerNormalization", [normal(2, 4), normal(4), normal(4)], symbolic=False)
    built = ortgrad.build_gradient_model(model, wrt="a")
    node = next(n for n in built.graph.node if n.op_type == "LayerNormalizationGrad")
    call = next(a.s for a in node.attribute if a.name == "ortgrad")
    assert json.loads(call)["outputs"] == [1, 0, 0]


def test_layer_normalization_differences() -> None:
    x, scale, bias = normal(2, 3, 4), normal(4, seed=1), normal(4, seed=2)
    check_rule("LayerNormalization", [x, scale, bias], second=True)
    check_rule(
        "LayerNormalization", [x, normal(3, 4), normal(3, 4)], {"axis": 1}, second=True, symbolic=False
    )
    check_rule("RMSNormalization", [x, scale], opset=23, second=True)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("skip", [(2, 3, 4), (1, 3, 4), (3, 4)])
@pytest.mark.parametrize("symbolic", [False, True])
def test_skip_layer_normalization(skip: tuple[int, ...], symbolic: bool, kernels: str) -> None:
    options: dict[str, Any] = {"domain": MS, "symbolic": symbolic, "kernels": kernels, "tolerance": 2e-5}
    x, s = normal(2, 3, 4), normal(*skip, seed=1)
    gamma, beta, bias = (normal(4, seed=i) for i in (2, 3, 4))
    check_against_torch(
        "SkipLayerNormalization",
        lambda x, s, g, b, c: layer(x + s + c, g, b, 2, 1e-12),
        [x, s, gamma, beta, bias],
        **options,
    )
    check_against_torch(
        "SkipLayerNormalization",
        lambda x, s, g: layer(x + s, g, None, 2, 0.1),
        [x, s, gamma],
        {"epsilon": 0.1},
        **options,
    )
    check_against_torch(
        "SkipSimplifiedLayerNormalization",
        lambda x, s, g, c: rms(x + s + c, g, 2, 1e-12),
        [x, s, gamma, bias],
        **options,
    )


@pytest.mark.parametrize("positions", [False, True])
def test_embed_layer_normalization(positions: bool) -> None:
    ids, segments = np.array([[0, 1, 1], [2, 0, 6]], np.int32), np.array([[0, 1, 1], [1, 0, 1]], np.int32)
    tables = [normal(n, 4, seed=i) for i, n in enumerate((7, 5, 2))]
    places = np.array([[4, 1, 1], [1, 0, 1]], np.int32)
    inputs = [ids, segments, *tables, normal(4, seed=4), normal(4, seed=5)]
    inputs += [np.ones((2, 3), np.int32), places] if positions else []

    def function(i: torch.Tensor, s: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        word, position, segment, gamma, beta = rest[:5]
        at = functional.embedding(rest[6], position) if positions else position[:3]
        total = functional.embedding(i, word) + at + functional.embedding(s, segment)
        return layer(total, gamma, beta, 2, 1e-12)

    names = dict(zip("abcdefgh", inputs, strict=False))
    assert len(names) == len(inputs) or positions
    if positions:
        model, feeds = _embed_model(inputs)
        tensors = [torch.tensor(a, requires_grad=a.dtype == np.float32) for a in inputs]
        y = function(*tensors)
        seed = normal(*y.shape, seed=9)
        y.backward(torch.tensor(seed))
        wrt = [n for n, a in feeds.items() if a.dtype == np.float32]
        actual = gradients(model, feeds, {"y": seed}, wrt)
        for (name, grad), t in zip(actual.items(), [t for t in tensors if t.requires_grad], strict=True):
            assert t.grad is not None
            np.testing.assert_allclose(grad, t.grad.numpy(), rtol=1e-4, atol=1e-4, err_msg=name)
    else:
        check_against_torch(
            "EmbedLayerNormalization", function, inputs, domain=MS, symbolic=False, tolerance=2e-5
        )


def _embed_model(inputs: Sequence[np.ndarray]) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    feeds = {f"i{i}": a for i, a in enumerate(inputs)}
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in feeds.items()
    ]
    node = helper.make_node("EmbedLayerNormalization", list(feeds), ["y", "m"], domain=MS)
    outputs = [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(MS, 1)]
    graph = helper.make_graph([node], "graph", infos, outputs)
    return helper.make_model(graph, opset_imports=imports, ir_version=10), feeds


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [None, 0, 1, -2])
@pytest.mark.parametrize("opset", [18, 22])
def test_lp_normalization(p: int, axis: int | None, opset: int) -> None:
    x, attributes = normal(2, 3, 4), {"p": p} if axis is None else {"p": p, "axis": axis}
    for symbolic in (False, True):
        check_against_torch(
            "LpNormalization",
            lambda x: functional.normalize(x, p, -1 if axis is None else axis),
            [x],
            attributes,
            symbolic=symbolic,
            opset=opset,
            tolerance=2e-5,
        )
    check_rule("LpNormalization", [x], attributes, second=True, opset=opset)


@pytest.mark.parametrize("p", [1, 2])
def test_lp_normalization_of_zeros(p: int) -> None:
    x = np.array([[0, 0], [3, 4]], np.float32)
    model, feeds = one_node("LpNormalization", [x], {"p": p})
    grad = gradients(model, feeds, {"y": np.ones_like(x)}, ["a"])["a"]
    np.testing.assert_array_equal(grad[0], 0)
    assert np.isfinite(grad).all()


HALF: list[tuple[str, list[np.ndarray], dict[str, Any], int]] = [
    ("LayerNormalization", [normal(2, 3, 8), normal(8), normal(8)], {}, 18),
    ("RMSNormalization", [normal(2, 3, 8), normal(8)], {}, 23),
    ("LpNormalization", [normal(2, 8)], {}, 18),
]


@pytest.mark.parametrize(("op_type", "inputs", "attributes", "opset"), HALF)
def test_half_precision(
    op_type: str, inputs: list[np.ndarray], attributes: dict[str, Any], opset: int
) -> None:
    results = []
    for dtype in (np.float32, np.float16):
        arrays = [a.astype(dtype) for a in inputs]
        model, feeds = one_node(op_type, arrays, attributes, opset=opset)
        seed = normal(*inputs[0].shape, seed=8).astype(dtype)
        results.append(gradients(model, feeds, {"y": seed}, list(feeds), kernels="onnx"))
    for name, full in results[0].items():
        assert results[1][name].dtype == np.float16
        scale = max(1.0, float(np.abs(full).max()))
        np.testing.assert_allclose(results[1][name].astype(np.float32), full, atol=2e-2 * scale, err_msg=name)
