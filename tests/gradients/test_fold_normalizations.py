"""Batch normalizations with fixed statistics behind convolutions are folded into them; against PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from support import KERNELS

import ortgrad
from ortgrad.pipelines.explain import explain

Arrays = dict[str, np.ndarray]
# Shape of X and W, attributes of Conv, and whether it has a bias.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], bool]] = {
    "1D": ((2, 3, 9), (4, 3, 3), {}, False),
    "2D": ((2, 3, 8, 7), (4, 3, 3, 2), {"pads": [1, 0, 1, 1]}, True),
    "3D": ((1, 2, 4, 5, 4), (3, 2, 2, 2, 2), {"strides": [1, 2, 1]}, False),
    "pointwise": ((2, 5, 6, 6), (4, 5, 1, 1), {}, True),
    "grouped": ((2, 6, 6, 6), (4, 3, 3, 3), {"group": 2, "dilations": [2, 1]}, False),
    "depthwise": ((1, 4, 9, 9), (4, 1, 3, 3), {"group": 4, "pads": [1, 1, 1, 1], "strides": [2, 2]}, True),
    "empty batch": ((0, 3, 8, 8), (4, 3, 3, 3), {}, True),
    "few elements": ((1, 64, 3, 3), (4, 64, 3, 3), {}, False),
}
PARAMETERS = ["w", "b", "scale", "bias", "mean", "var"]


def weights(case: str) -> Arrays:
    _, w, _, has_bias = CASES[case]
    generator = np.random.default_rng(7)
    arrays = {
        "w": generator.standard_normal(w),
        "b": generator.standard_normal(w[0]),
        "scale": generator.standard_normal(w[0]),
        "bias": generator.standard_normal(w[0]),
        "mean": generator.standard_normal(w[0]),
        "var": generator.uniform(0.2, 2, w[0]),
    }
    return {name: a.astype(np.float32) for name, a in arrays.items() if has_bias or name != "b"}


def model(
    case: str,
    *,
    epsilon: float | None = 1e-3,
    symbolic: bool = False,
    more: tuple[onnx.NodeProto, ...] = (),
    outputs: tuple[str, ...] = ("y",),
    **normalization: float,
) -> onnx.ModelProto:
    x, _, attributes, has_bias = CASES[case]
    shape = [f"d{i}" if i != 1 else size for i, size in enumerate(x)] if symbolic else x
    if epsilon is not None:
        normalization = {**normalization, "epsilon": epsilon}
    nodes = [
        helper.make_node("Conv", ["x", "w", *(["b"] if has_bias else [])], ["c"], name="conv", **attributes),
        helper.make_node(
            "BatchNormalization", ["c", "scale", "bias", "mean", "var"], ["n"], name="norm", **normalization
        ),
        helper.make_node("HardSwish", ["n"], ["y"]),
        *more,
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights(case).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def expected(case: str, x: np.ndarray, seed: np.ndarray, epsilon: float) -> dict[str, np.ndarray]:
    """Gradients of PyTorch, in double precision."""
    _, w, attributes, _ = CASES[case]
    rank = len(w) - 2
    tensors = {n: torch.tensor(a, dtype=torch.float64) for n, a in {"x": x, **weights(case)}.items()}
    for tensor in tensors.values():
        tensor.requires_grad_()
    pads = attributes.get("pads", [0] * 2 * rank)
    both = [pad for axis in reversed(range(rank)) for pad in (pads[axis], pads[rank + axis])]
    convolve = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[rank - 1]
    c = convolve(
        torch.nn.functional.pad(tensors["x"], both),
        tensors["w"],
        tensors.get("b"),
        stride=attributes.get("strides", [1] * rank),
        dilation=attributes.get("dilations", [1] * rank),
        groups=attributes.get("group", 1),
    )
    # By hand: PyTorch's own has no gradient of the statistics.
    column = [1, -1, *[1] * rank]
    inverse = 1 / torch.sqrt(tensors["var"] + epsilon)
    n = (c - tensors["mean"].reshape(column)) * (inverse * tensors["scale"]).reshape(column)
    y = torch.nn.functional.hardswish(n + tensors["bias"].reshape(column))
    found = torch.autograd.grad(y, list(tensors.values()), torch.tensor(seed, dtype=torch.float64))
    return {name: grad.numpy() for name, grad in zip(tensors, found, strict=True)}


def operators(built: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in built.graph.node]


def feeds_for(case: str) -> Arrays:
    return {"x": np.random.default_rng(3).standard_normal(CASES[case][0], dtype=np.float32)}


def with_seed(built: onnx.ModelProto, source: onnx.ModelProto, feeds: Arrays) -> Arrays:
    y = ortgrad.InferenceSession(source).run(["y"], feeds)[0]
    seed = np.random.default_rng(5).standard_normal(y.shape).astype(y.dtype)
    return {**feeds, "y_grad": seed}


def check(actual: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], tolerance: float) -> None:
    for name, value in wanted.items():
        scale = max(1.0, float(np.abs(value).max(initial=0)))
        np.testing.assert_allclose(actual[name] / scale, value / scale, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_gradients(case: str, symbolic: bool, kernels: str) -> None:
    source = model(case, symbolic=symbolic)
    names = [name for name in PARAMETERS if name in weights(case)]
    built = ortgrad.build_gradient_model(source, wrt=["x", *names])
    if case not in ("empty batch", "few elements") or symbolic:
        assert "BatchNormalization" not in operators(built)
        assert "BatchNormalizationGrad" not in operators(built)
    feeds = with_seed(built, source, feeds_for(case))
    found = ortgrad.InferenceSession(built, kernels=kernels).run([f"{n}_grad" for n in ["x", *names]], feeds)
    wanted = expected(case, feeds["x"], feeds["y_grad"], 1e-3)
    check(dict(zip(["x", *names], found, strict=True)), {n: wanted[n] for n in ["x", *names]}, 2e-5)


@pytest.mark.parametrize("case", ["2D", "depthwise"])
def test_finite_differences_and_default_epsilon(case: str) -> None:
    report = ortgrad.check_gradients(
        model(case, epsilon=None), wrt=["w", "scale", "var"], feeds=feeds_for(case)
    )
    assert report.ok, str(report)


@pytest.mark.parametrize("case", ["2D", "grouped"])
def test_forward_result_and_names_stay(case: str) -> None:
    source = model(case)
    built = ortgrad.build_gradient_model(source)
    feeds = with_seed(built, source, feeds_for(case))
    expected_y = ortgrad.InferenceSession(source).run(["y"], {"x": feeds["x"]})[0]
    np.testing.assert_allclose(
        ortgrad.InferenceSession(built).run(["y"], feeds)[0], expected_y, rtol=1e-5, atol=1e-5
    )
    assert "conv" in [node.name for node in built.graph.node]


@pytest.mark.parametrize(
    ("reason", "options", "wrt", "of"),
    [
        ("result of the convolution is a target", {}, ["w", "c"], "y"),
        ("result of the convolution is differentiated", {}, ["w"], ["y", "c"]),
        ("result of the convolution is an output", {"outputs": ("y", "c")}, ["w"], "y"),
        (
            "result read twice",
            {"more": (helper.make_node("Neg", ["c"], ["d"]),), "outputs": ("y", "d")},
            ["w"],
            "y",
        ),
        ("weights are constant", {}, ["scale", "bias"], "y"),
    ],
)
def test_not_folded(reason: str, options: dict[str, Any], wrt: list[str], of: Any) -> None:
    source = model("2D", **options)
    built = ortgrad.build_gradient_model(source, wrt=wrt, of=of)
    assert "BatchNormalization" in operators(built), reason


def test_many_weights_and_few_elements() -> None:
    """A filter with more weights than it computes elements is not worth it."""
    built = ortgrad.build_gradient_model(model("few elements"), wrt=["w"])
    assert "BatchNormalization" in operators(built)


def test_half_precision_with_float_statistics() -> None:
    source = model("2D")
    for tensor in source.graph.initializer:
        if tensor.name in ("w", "b", "scale", "bias"):
            tensor.CopyFrom(
                numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name)
            )
    for value in (*source.graph.input, *source.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    built = ortgrad.build_gradient_model(source, wrt=["w", "scale"])
    assert "BatchNormalization" in operators(built)


def test_explain_shows_the_nodes_of_the_file() -> None:
    found = {each.node: each.operator for each in explain(model("2D"))}
    assert found["conv"] == "Conv" and found["norm"] == "BatchNormalization"
