"""Operators that ONNX has removed or changed: what onnxruntime still runs has gradients, or a clear error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from onnxruntime.capi import onnxruntime_pybind11_state as native
from torch.nn import functional

import ortgrad
from ortgrad import training

LAST = 9  # opset
Arrays = dict[str, np.ndarray]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Case:
    op_type: str
    function: Callable[..., torch.Tensor]
    x: np.ndarray
    attributes: dict[str, Any] = field(default_factory=dict)
    further: tuple[Any, ...] = ()
    opset: int = LAST
    dtype: Any = np.int64

    def __str__(self) -> str:
        return "-".join([self.op_type, *map(str, self.attributes), str(len(self.further)), str(self.opset)])

    def feeds(self) -> Arrays:
        return {"x": self.x} | {f"i{i}": np.array(v, self.dtype) for i, v in enumerate(self.further)}

    def model(self, shapes: bool = False) -> onnx.ModelProto:
        infos = [
            helper.make_tensor_value_info(
                name,
                helper.np_dtype_to_tensor_dtype(a.dtype),
                a.shape if shapes else [f"{name}{k}" for k in range(a.ndim)],
            )
            for name, a in self.feeds().items()
        ]
        nodes = [
            helper.make_node("Exp", ["x"], ["e"]),
            helper.make_node(self.op_type, ["e", *list(self.feeds())[1:]], ["m"], **self.attributes),
            helper.make_node("Mul", ["m", "m"], ["y"]),
        ]
        graph = helper.make_graph(nodes, "g", infos, [helper.make_tensor_value_info("y", 1, None)])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=4)


def crop(left: int, top: int, right: int, bottom: int) -> Callable[..., torch.Tensor]:
    return lambda x: x[:, :, top : x.shape[2] - bottom, left : x.shape[3] - right]


def normalized(axes: tuple[int, ...], variance: bool) -> Callable[..., torch.Tensor]:
    def function(x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(axes, keepdim=True)
        return centred / x.std(axes, correction=0, keepdim=True) if variance else centred

    return function


IMAGES = normal(2, 3, 5, 6)
BIAS = torch.tensor([1.0, -2.0, 3.0]).reshape(3, 1, 1)
CASES = [
    Case("Affine", lambda x: 2 * x - 3, normal(2, 3), {"alpha": 2.0, "beta": -3.0}),
    Case("Affine", lambda x: x, normal(2, 3), opset=7),
    Case("Scale", lambda x: 3 * x, normal(2, 3), {"scale": 3.0}),
    Case("Scale", lambda x: x, normal(4), opset=7),
    Case("ScaledTanh", lambda x: 2 * torch.tanh(x / 2), normal(2, 3), {"alpha": 2.0, "beta": 0.5}),
    Case(
        "ParametricSoftplus",
        lambda x: 2 * functional.softplus(x / 2),
        normal(2, 3),
        {"alpha": 2.0, "beta": 0.5},
    ),
    Case("ImageScaler", lambda x: 2 * x + BIAS, IMAGES, {"scale": 2.0, "bias": [1.0, -2.0, 3.0]}),
    Case("ImageScaler", lambda x: x + BIAS, IMAGES, {"bias": [1.0, -2.0, 3.0]}),
    Case("Crop", crop(1, 2, 1, 0), IMAGES, {"border": [1, 2, 1, 0]}),
    Case("Crop", crop(0, 0, 0, 2), IMAGES, {"border": [0, 0, 0, 2]}),
    Case("Crop", lambda x: x[:, :, 1:3, 2:5], IMAGES, {"border": [2, 1, 3, 4], "scale": [2, 3]}),
    Case("DynamicSlice", lambda x, *_: x[0:1, 1:3], normal(2, 4), further=([0, 1], [1, 3])),
    Case("DynamicSlice", lambda x, *_: x[:, -2:], normal(2, 4), further=([-2], [99], [1]), dtype=np.int32),
    Case("ThresholdedRelu", lambda x: torch.where(x > 1, x, 0), normal(2, 3)),
    Case("ThresholdedRelu", lambda x: torch.where(x > 0.7, x, 0), normal(2, 3), {"alpha": 0.7}, opset=7),
    *(
        Case(
            "MeanVarianceNormalization",
            normalized((0, 1, 2, 3) if across else (0, 2, 3), bool(variance)),
            IMAGES,
            {"across_channels": across, "normalize_variance": variance},
            opset=8,
        )
        for across in (0, 1)
        for variance in (0, 1)
    ),
    Case("MeanVarianceNormalization", normalized((0, 2, 3), True), IMAGES, opset=8),
    *(
        Case(op, lambda x: x, normal(2, 3), opset=v)
        for op in ("MemcpyFromHost", "MemcpyToHost")
        for v in (7, 20)
    ),
]


def run(model: onnx.ModelProto, feeds: Arrays) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    result: np.ndarray = session.run(["y"], feeds)[0]
    return result


@pytest.mark.parametrize("shapes", [True, False], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: Case, shapes: bool) -> None:
    model, feeds = case.model(shapes), case.feeds()
    expected = run(model, feeds)
    seed = normal(*expected.shape)
    session = ortgrad.InferenceSession(ortgrad.build_gradient_model(model, wrt="x"))
    y, grad = session.run(None, {**feeds, "y_grad": seed})
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)

    x = torch.tensor(case.x, requires_grad=True)
    result = case.function(torch.exp(x)) ** 2
    result.backward(torch.tensor(seed))
    assert x.grad is not None
    np.testing.assert_allclose(grad, x.grad.numpy(), rtol=1e-4, atol=1e-4 * np.abs(grad).max())

    # The slope of what onnxruntime itself computes.
    direction, step = normal(*case.x.shape), 1e-3
    ends = [run(model, {**feeds, "x": case.x + s * step * direction}) for s in (1, -1)]
    slope = float(np.sum(seed * (ends[0] - ends[1]).astype(np.float64)) / (2 * step))
    assert abs(slope - float(np.sum(grad * direction))) < 5e-3 * (np.abs(grad * direction).sum() + 1)


def test_other_ways() -> None:
    """Without gradients, in a check, and in a training."""
    case = CASES[6]
    np.testing.assert_array_equal(
        ortgrad.InferenceSession(case.model()).run(None, case.feeds())[0], run(case.model(), case.feeds())
    )
    assert ortgrad.check_gradients(case.model(True), case.feeds(), per_node=True).ok
    model = onnx.parser.parse_model("""<ir_version: 4, opset_import: ["" : 9]>
        g (float[N, 3] x, float[3, 2] w) => (float[N, 2] y) <float[3, 2] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}> {
            a = MatMul(x, w)
            b = Affine<alpha = 2.0, beta = 1.0>(a)
            y = ScaledTanh<alpha = 1.5, beta = 0.5>(b)
        }""")
    data = normal(8, 3), np.zeros((8, 2), np.float32)
    assert training.parameters(model) == ["w"]
    result = training.fit(model, data, loss="mse", epochs=30, learning_rate=0.05, progress=False)
    assert result.loss < 0.8 * result.losses[0]


def test_in_a_branch() -> None:
    model = onnx.parser.parse_model("""<ir_version: 4, opset_import: ["" : 9]>
        g (float[N] x, bool c) => (float[N] y) {
            y = If(c) <then_branch = one () => (float[N] p) { p = Affine<alpha = 3.0>(x) },
                       else_branch = two () => (float[N] q) { q = Scale<scale = 5.0>(x) }>
        }""")
    session = ortgrad.InferenceSession(ortgrad.build_gradient_model(model, wrt="x"))
    x = normal(3)
    for c, factor in ((True, 3), (False, 5)):
        feeds = {"x": x, "c": np.array(c)}
        np.testing.assert_array_equal(run(model, feeds), factor * x)
        y, grad = session.run(None, {**feeds, "y_grad": x})
        np.testing.assert_array_equal(y, factor * x)
        np.testing.assert_array_equal(grad, factor * x)


# Operators that onnxruntime declares, but has no CPU kernel for.
NOT_ON_CPU = {
    *("DisentangledAttention_TRT", "EfficientNMS_TRT", "MultilevelCropAndResize_TRT", "PyramidROIAlign_TRT"),
    *("GRUUnit", "GivenTensorFill"),
}
# Tested elsewhere.
ELSEWHERE = {"SimplifiedLayerNormalization", "LayerNormalization"}


def test_every_operator_that_onnxruntime_adds_is_accounted_for() -> None:
    versions: dict[str, set[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            versions.setdefault(schema.name, set()).add(schema.since_version)
    kernels = {
        kernel.op_name: kernel.version_range[0]
        for kernel in native.get_all_opkernel_def()
        if kernel.domain in ("", "ai.onnx")
        and kernel.provider == "CPUExecutionProvider"
        # Which onnx does not know, or not in this version.
        and kernel.version_range[0] < min(versions.get(kernel.op_name, {kernel.version_range[0] + 1}))
    }
    assert {"Affine", "ThresholdedRelu"} <= set(kernels)
    assert set(kernels) == {case.op_type for case in CASES} | ELSEWHERE
    declared = {s.name for s in native.get_all_operator_schema() if s.domain == ""}
    assert declared - set(versions) - set(kernels) == NOT_ON_CPU


@pytest.mark.parametrize("op_type", sorted(NOT_ON_CPU))
@pytest.mark.parametrize("opset", [LAST, 20])
def test_others_are_refused(op_type: str, opset: int) -> None:
    node = helper.make_node(op_type, ["x"], ["y"], name="the_node")
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", 1, [2])],
        [helper.make_tensor_value_info("y", 1, [2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=4)
    with pytest.raises(ortgrad.OrtgradError, match=f"{op_type}.*'the_node'"):
        ortgrad.build_gradient_model(model, wrt="x")


OF_A_CROP = "its border must have four elements, and its scale two"


@pytest.mark.parametrize(
    ("op_type", "attributes", "message"),
    [
        ("ScaledTanh", {"alpha": 1.0}, "it has no attribute 'beta'"),
        ("ParametricSoftplus", {"beta": 1.0}, "it has no attribute 'alpha'"),
        ("ImageScaler", {}, "it has no attribute 'bias'"),
        ("Crop", {"border": [1, 2]}, OF_A_CROP),
        (
            "Crop",
            {"border": [1, 2, 1, 0], "scale": [1]},
            "its border must have four elements, and its scale two",
        ),
    ],
)
def test_malformed_nodes_are_refused(op_type: str, attributes: dict[str, Any], message: str) -> None:
    model = Case(op_type, lambda x: x, IMAGES, attributes).model()
    with pytest.raises(ortgrad.ModelError, match=f"{op_type} node 'm': {message}"):
        ortgrad.build_gradient_model(model, wrt="x")


def test_newer_models_with_them_are_refused() -> None:
    """onnxruntime does not know them there."""
    model = Case("Affine", lambda x: x, normal(2), opset=12).model()
    with pytest.raises(ortgrad.UnsupportedGradientError, match="Affine"):
        ortgrad.build_gradient_model(model, wrt="x")
