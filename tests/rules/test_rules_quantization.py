"""Straight-through gradients of quantized operators and models, against PyTorch's fake quantization."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static
from support import ROOT
from support.quantization import (
    RANGES,
    close,
    fake,
    gradients,
    integers,
    make_model,
    seed_of,
    tracked,
    uniform,
)

import ortgrad
from ortgrad.cli import main
from ortgrad.pipelines.explain import explain

# QuantizeLinear and DequantizeLinear


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
@pytest.mark.parametrize(
    ("kind", "domain"),
    [*((kind, "") for kind in RANGES), ("uint8", "com.microsoft"), ("int16", "com.microsoft")],
)
def test_pairs(kind: str, domain: str, axis: int | None) -> None:
    low, high = RANGES[kind]
    shape = (3, 4, 2)
    channels = () if axis is None else (shape[axis],)
    step = 8.0 / (high - low)
    scale = np.asarray(uniform(0.8, 1.2, *channels, seed=1) * step, np.float32)
    zero = np.full(channels, (low + high) // 2 + 1)
    feeds = {"x": uniform(-6, 6, *shape), "s": scale}
    settings = {} if axis is None else {"axis": axis}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], domain=domain, **settings),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], domain=domain, **settings),
    ]
    found = gradients(make_model(nodes, feeds, [integers("z", zero, kind)]), feeds, ["x", "s"])
    t = tracked(feeds)
    y = fake(t["x"], t["s"], zero, kind, (axis or 0) % 3)
    y.backward(torch.tensor(seed_of(found["y"])))
    close(found["y"], y)
    close(found["x"], t["x"].grad)
    assert (found["x"] == 0).any()
    assert (found["x"] != 0).any()
    close(found["s"], t["s"].grad, 5e-3 if kind in ("uint16", "int16") else 1e-4)


def test_without_gradients_of_the_scale() -> None:
    x = uniform(-2, 2, 3, 4)
    zero = torch.zeros(4, dtype=torch.int32)
    scale = uniform(0.005, 0.015, 4)
    model = make_model(
        [
            helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], axis=1),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], axis=1),
        ],
        {"x": x},
        [integers("z", zero.numpy(), "int8"), numpy_helper.from_array(scale, "s")],
    )
    found = gradients(model, {"x": x}, ["x"])
    t = torch.tensor(x, requires_grad=True)
    y = torch.fake_quantize_per_channel_affine(t, torch.tensor(scale), zero, 1, -128, 127)
    y.backward(torch.tensor(seed_of(found["y"])))
    close(found["x"], t.grad)


@pytest.mark.parametrize(("axis", "block"), [(0, 2), (1, 2), (1, 3), (-1, 4)])
@pytest.mark.parametrize("kind", ["int8", "uint4"])
def test_blocks(kind: str, axis: int, block: int) -> None:
    shape = (4, 5, 6) if axis == 1 and block == 2 else (4, 6, 8)
    blocks = list(shape)
    blocks[axis] = -(-shape[axis] // block)
    low, high = RANGES[kind]
    feeds = {
        "x": uniform(-6, 6, *shape),
        "s": uniform(0.8, 1.2, *blocks, seed=1) * np.float32(8 / (high - low)),
    }
    zero = np.full(blocks, (low + high) // 2)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], axis=axis, block_size=block),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], axis=axis, block_size=block),
    ]
    found = gradients(make_model(nodes, feeds, [integers("z", zero, kind)]), feeds, ["x", "s"])
    t = tracked(feeds)
    spread = t["s"].repeat_interleave(block, axis).narrow(axis, 0, shape[axis])
    # One scale for each element, as channels of a vector.
    y = fake(t["x"].reshape(-1, 1), spread.reshape(-1), np.full(t["x"].numel(), zero.flat[0]), kind)
    y.backward(torch.tensor(seed_of(found["y"])).reshape(-1, 1))
    close(found["x"], t["x"].grad)
    close(found["s"], t["s"].grad)


def test_float16() -> None:
    x = uniform(-3, 3, 3, 4).astype(np.float16)
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float16[3, 4] x) => (float16[3, 4] y)
        <int8 z = {3}> {
            q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }"""
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array(0.0125, np.float16), "s"))
    found = gradients(model, {"x": x}, ["x"])
    t = torch.tensor(x.astype(np.float32), requires_grad=True)
    torch.fake_quantize_per_tensor_affine(t, 0.0125, 3, -128, 127).backward(
        torch.tensor(seed_of(t.detach().numpy()))
    )
    assert found["x"].dtype == np.float16
    close(found["x"], t.grad, 1e-3)


def test_float8_is_refused() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[3] x) => (float[3] y) <float s = {0.1}> {
            q = QuantizeLinear<output_dtype = 17>(x, s) y = DequantizeLinear(q, s) }"""
    )
    with pytest.raises(ortgrad.UnsupportedGradientError, match=r"float8e4m3fn of 'q'; quantize to integers"):
        ortgrad.build_gradient_model(model, wrt="x")


# Operators between, on integers

BETWEEN: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Reshape": ("r = Reshape(q, k)", lambda x: x.reshape(2, -1)),
    "Transpose": ("r = Transpose<perm = [0, 1, 3, 2]>(q)", lambda x: x.transpose(2, 3)),
    "MaxPool": (
        "r = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(q)",
        lambda x: torch.nn.functional.max_pool2d(x, 2),
    ),
    "Concat": (
        "t = Transpose<perm = [0, 1, 3, 2]>(q) r = Concat<axis = 1>(q, t, q)",
        lambda x: torch.cat([x, x.mT, x], 1),
    ),
    "Split": (
        "a, b, c = Split<axis = 1, num_outputs = 3>(q) r = Concat<axis = 0>(c, a)",
        lambda x: torch.cat([x[:, 2:], x[:, :1]]),
    ),
    "Gather": (
        "i = Constant<value_ints = [2, 0, 2]>() r = Gather<axis = 1>(q, i)",
        lambda x: x[:, [2, 0, 2]],
    ),
    "Slice": (
        "i = Constant<value_ints = [1]>() j = Constant<value_ints = [3]>() r = Slice(q, i, j, i)",
        lambda x: x[:, 1:3],
    ),
    "Max": ("m = Max(q, zero) r = Identity(m)", lambda x: torch.maximum(x, torch.zeros(()))),
    "Clip": ("r = Clip(q, zero)", lambda x: x.clamp(min=0)),
    "Cast": ("i = Cast<to = 6>(q) r = Cast<to = 3>(i)", lambda x: x),
}


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("symbolic", [False, True])
def test_operators_on_integers(name: str, symbolic: bool) -> None:
    text, function = BETWEEN[name]
    shape = "N, C, H, W" if symbolic and name != "Split" else "2, 3, 4, 4"
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]> g (float[{shape}] x) => (float[...] y)
        <float s = {{0.02}}, int8 zero = {{5}}, int64[2] k = {{2, -1}}> {{
            q = QuantizeLinear(x, s, zero) {text} y = DequantizeLinear(r, s, zero) }}""".replace(
            "float[...]", "float[]"
        )
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    x = uniform(-3, 3, 2, 3, 4, 4)
    found = gradients(model, {"x": x}, ["x"])
    t = torch.tensor(x, requires_grad=True)
    y = function(torch.fake_quantize_per_tensor_affine(t, 0.02, 5, -128, 127))
    y.backward(torch.tensor(seed_of(found["y"])))
    close(found["y"], y)
    close(found["x"], t.grad)


# Operators on quantized tensors

T = torch.nn.functional
OPERATORS: dict[str, tuple[list[tuple[int, ...]], Callable[..., torch.Tensor], dict[str, Any]]] = {
    "QLinearConv": (
        [(2, 3, 5, 5), (4, 3, 3, 3)],
        lambda a, b: T.conv2d(a, b, padding=1),
        {"pads": [1, 1, 1, 1]},
    ),
    "QLinearMatMul": ([(2, 3, 4), (4, 5)], torch.matmul, {}),
    "QLinearAdd": ([(2, 3, 4), (3, 1)], torch.add, {}),
    "QLinearMul": ([(2, 3, 4), (4,)], torch.mul, {}),
    "QLinearLeakyRelu": ([(2, 3, 4)], lambda a: T.leaky_relu(a, 0.2), {"alpha": 0.2}),
    "QLinearSigmoid": ([(2, 3, 4)], torch.sigmoid, {}),
    "QLinearSoftmax": ([(2, 3, 4)], lambda a: torch.softmax(a, -1), {"axis": -1, "opset": 13}),
    "QLinearSoftmax 12": (
        [(2, 3, 4)],
        lambda a: torch.softmax(a.reshape(2, 12), 1).reshape(2, 3, 4),
        {"axis": 1, "opset": 12},
    ),
    "QLinearAveragePool": (
        [(2, 3, 6, 6)],
        lambda a: T.avg_pool2d(a, 2),
        {"kernel_shape": [2, 2], "strides": [2, 2]},
    ),
    "QLinearAveragePool last": (
        [(2, 6, 6, 3)],
        lambda a: T.avg_pool2d(a.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1),
        {"kernel_shape": [2, 2], "strides": [2, 2], "channels_last": 1},
    ),
    "QLinearGlobalAveragePool": (
        [(2, 3, 6, 6)],
        lambda a: a.mean((2, 3), keepdim=True),
        {"channels_last": 0},
    ),
    "QLinearConcat": ([(2, 3), (2, 4)], lambda a, b: torch.cat([a, b], 1), {"axis": 1}),
    "QGemm": ([(3, 4), (5, 4)], lambda a, b: 0.5 * a @ b.T, {"alpha": 0.5, "transB": 1}),
}
STANDARD = {"QLinearConv", "QLinearMatMul"}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_quantized_operators(name: str, kind: str) -> None:
    shapes, function, settings = OPERATORS[name]
    op_type = name.split()[0]
    low, high = RANGES[kind]
    middle = (low + high + 1) // 2
    feeds: dict[str, np.ndarray] = {}
    nodes, triples, floats = [], [], []
    for i, shape in enumerate(shapes):
        feeds[f"x{i}"] = uniform(-1.3, 1.3, *shape, seed=i)
        feeds[f"s{i}"] = np.array(0.008 + 0.001 * i, np.float32)
        nodes.append(helper.make_node("QuantizeLinear", [f"x{i}", f"s{i}", "z"], [f"q{i}"]))
        triples += [f"q{i}", f"s{i}", "z"]
    # Some of the results are outside of the range.
    with torch.no_grad():
        plain = function(*(torch.tensor(feeds[f"x{i}"]) for i in range(len(shapes))))
    feeds["sy"] = np.array(float(plain.abs().max()) / (200 if plain.min() < 0 else 180), np.float32)
    inputs = [*triples, "sy", "z"]
    if op_type == "QLinearConcat":
        inputs = ["sy", "z", *triples]
    elif op_type == "QGemm":
        inputs = [*triples, "", "sy", "z"]
    domain = "" if op_type in STANDARD else "com.microsoft"
    nodes.append(helper.make_node(op_type, inputs, ["q"], domain=domain, **settings))
    nodes.append(helper.make_node("DequantizeLinear", ["q", "sy", "z"], ["y"]))
    found = gradients(make_model(nodes, feeds, [integers("z", middle, kind)]), feeds, list(feeds))
    t = tracked(feeds)
    for i in range(len(shapes)):
        floats.append(fake(t[f"x{i}"], t[f"s{i}"], middle, kind))
    y = fake(function(*floats), t["sy"], middle, kind)
    y.backward(torch.tensor(seed_of(found["y"])))
    # onnxruntime's kernels may round to the neighbouring integer.
    np.testing.assert_allclose(found["y"], y.detach(), atol=1.01 * float(feeds["sy"]))
    for key in feeds:
        # The scale's gradient contains the integers that the forward pass has rounded to.
        close(found[key], t[key].grad, 2e-2 if key == "sy" else 1e-4)


def test_integer_weights_with_a_bias_and_scales_of_channels() -> None:
    """QLinearConv and QGemm as onnxruntime.quantization writes them."""
    generator = np.random.default_rng(0)
    w, v = (generator.integers(-127, 128, shape) for shape in ((4, 3, 3, 3), (5, 36)))
    b, c = (generator.integers(-2000, 2000, n).astype(np.int32) for n in (4, 5))
    feeds = {
        "x": uniform(-1, 1, 2, 3, 5, 5),
        "sx": np.array(0.009, np.float32),
        "sw": uniform(0.001, 0.004, 4),
        "sh": np.array(0.02, np.float32),
        "sv": uniform(0.001, 0.004, 5, seed=1),
        "sy": np.array(0.05, np.float32),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "sx", "z"], ["q"]),
        helper.make_node("QLinearConv", ["q", "sx", "z", "w", "sw", "zw", "sh", "z", "b"], ["h"]),
        helper.make_node("Flatten", ["h"], ["f"]),
        helper.make_node(
            "QGemm",
            ["f", "sh", "z", "v", "sv", "zv", "c", "sy", "z"],
            ["o"],
            domain="com.microsoft",
            transB=1,
            alpha=1.0,
        ),
        helper.make_node("DequantizeLinear", ["o", "sy", "z"], ["y"]),
    ]
    initializers = [
        integers("z", 128, "uint8"),
        integers("zw", np.zeros(4, int), "int8"),
        integers("zv", np.zeros(5, int), "int8"),
        integers("w", w, "int8"),
        integers("v", v, "int8"),
        numpy_helper.from_array(b, "b"),
        numpy_helper.from_array(c, "c"),
    ]
    model = make_model(nodes, feeds, initializers)
    found = gradients(model, feeds, list(feeds))
    t = tracked(feeds)
    x = fake(t["x"], t["sx"], 128, "uint8")
    weight = torch.tensor(w) * t["sw"].reshape(-1, 1, 1, 1)
    h = fake(T.conv2d(x, weight, torch.tensor(b) * t["sx"] * t["sw"]), t["sh"], 128, "uint8")
    matrix = torch.tensor(v) * t["sv"].reshape(-1, 1)
    o = h.flatten(1) @ matrix.T + torch.tensor(c) * t["sh"] * t["sv"]
    y = fake(o, t["sy"], 128, "uint8")
    y.backward(torch.tensor(seed_of(found["y"])))
    close(found["y"], y)
    for key in feeds:
        close(found[key], t[key].grad)


@pytest.mark.parametrize("op_type", ["QLinearAdd", "QLinearMul"])
@pytest.mark.parametrize("opset", [13, 18, 21, 25])
def test_one_tensor_twice(op_type: str, opset: int) -> None:
    feeds = {"x": uniform(-1, 1.4, 3, 4), "s": np.array(0.009, np.float32), "sy": np.array(0.011, np.float32)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node(op_type, ["q", "s", "z", "q", "s", "z", "sy", "z"], ["p"], domain="com.microsoft"),
        helper.make_node("DequantizeLinear", ["p", "sy", "z"], ["y"]),
    ]
    found = gradients(make_model(nodes, feeds, [integers("z", 2, "int8")], opset), feeds, list(feeds))
    t = tracked(feeds)
    x = fake(t["x"], t["s"], 2, "int8")
    y = fake(x + x if op_type == "QLinearAdd" else x * x, t["sy"], 2, "int8")
    y.backward(torch.tensor(seed_of(found["y"])))
    close(found["x"], t["x"].grad)
    close(found["s"], t["s"].grad)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_zero_points_of_columns(batch: tuple[int, ...]) -> None:
    weights = np.random.default_rng(0).integers(0, 255, (6, 4))
    columns = np.array([100, 120, 128, 140])
    feeds = {"x": uniform(-1, 2, *batch, 3, 6), "s": np.array(0.01, np.float32)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("MatMulInteger", ["q", "w", "z", "zw"], ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["f", "s"], ["y"]),
    ]
    initializers = [
        integers("z", 90, "uint8"),
        integers("w", weights, "uint8"),
        integers("zw", columns, "uint8"),
    ]
    found = gradients(make_model(nodes, feeds, initializers), feeds, list(feeds))
    t = tracked(feeds)
    y = fake(t["x"], t["s"], 90, "uint8") @ torch.tensor((weights - columns).astype(np.float32))
    y.backward(torch.tensor(seed_of(found["y"])))
    close(found["y"], y)
    close(found["x"], t["x"].grad)
    close(found["s"], t["s"].grad)


def test_channels_last() -> None:
    """As onnxruntime's optimized files have them."""
    weights = np.random.default_rng(0).integers(-127, 128, (4, 3, 3, 3))
    feeds = {
        "x": uniform(-1, 1, 2, 6, 5, 3),
        "sx": np.array(0.007, np.float32),
        "sw": uniform(0.001, 0.004, 4),
        "sh": np.array(0.0101, np.float32),
    }
    settings = {"domain": "com.microsoft", "channels_last": 1}
    inputs = ["q", "sx", "z", "w", "sw", "zw", "sh", "z"]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "sx", "z"], ["q"]),
        helper.make_node("QLinearConv", inputs, ["h"], **settings, pads=[1, 0, 1, 0]),
        helper.make_node("QLinearGlobalAveragePool", ["h", "sh", "z", "sh", "z"], ["p"], **settings),
        helper.make_node("DequantizeLinear", ["p", "sh", "z"], ["y"]),
    ]
    initializers = [
        integers("z", 128, "uint8"),
        integers("zw", np.zeros(4, int), "int8"),
        integers("w", weights, "int8"),
    ]
    found = gradients(make_model(nodes, feeds, initializers), feeds, ["x", "sw"])
    t = tracked(feeds)
    x = fake(t["x"], t["sx"], 128, "uint8").permute(0, 3, 1, 2)
    h = T.conv2d(x, torch.tensor(weights) * t["sw"].reshape(-1, 1, 1, 1), padding=(1, 0))
    p = fake(h, t["sh"], 128, "uint8").permute(0, 2, 3, 1).mean((1, 2), keepdim=True)
    y = fake(p, t["sh"], 128, "uint8")
    y.backward(torch.tensor(seed_of(found["y"])))
    close(found["y"], y)
    close(found["x"], t["x"].grad)
    close(found["sw"], t["sw"].grad)


class DynamicallyQuantized(torch.autograd.Function):
    """Dynamic quantization to uint8 and back; its scale counts as a constant, as a PyTorch observer's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        low, high = x.min().clamp(max=0), x.max().clamp(min=0)
        scale = (high - low) / 255
        zero = torch.round(-low / scale)
        return (torch.clamp(torch.round(x / scale) + zero, 0, 255) - zero) * scale

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy


@pytest.mark.parametrize("form", ["integer", "to float", "dynamic", "conv"])
def test_dynamic_quantization(form: str) -> None:
    weights = np.random.default_rng(0).integers(-100, 100, (4, 3, 3, 3) if form == "conv" else (6, 4))
    feeds = {
        "x": uniform(-1, 2, *((2, 3, 5, 5) if form == "conv" else (2, 3, 6))),
        "s": np.array(0.02, np.float32) if form in ("conv", "integer") else uniform(0.01, 0.03, 4),
        "b": uniform(-1, 1, 4),
    }
    dynamic = helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "sx", "zx"])
    if form == "dynamic":
        nodes = [
            helper.make_node("DynamicQuantizeMatMul", ["x", "w", "s", "", "b"], ["y"], domain="com.microsoft")
        ]
    elif form == "to float":
        inputs = ["q", "w", "sx", "s", "zx", "", "b"]
        nodes = [dynamic, helper.make_node("MatMulIntegerToFloat", inputs, ["y"], domain="com.microsoft")]
    else:
        op_type = "ConvInteger" if form == "conv" else "MatMulInteger"
        nodes = [
            dynamic,
            helper.make_node(op_type, ["q", "w", "zx"], ["i"]),
            helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["sx", "s"], ["ss"]),
            helper.make_node("Mul", ["f", "ss"], ["p"]),
            *([] if form == "conv" else [helper.make_node("Add", ["p", "b"], ["y"])]),
            *([helper.make_node("Identity", ["p"], ["y"])] if form == "conv" else []),
        ]
    if form == "conv":
        del feeds["b"]
    found = gradients(make_model(nodes, feeds, [integers("w", weights, "int8")]), feeds, list(feeds))
    t = tracked(feeds)
    x = DynamicallyQuantized.apply(t["x"])
    matrix = torch.tensor(weights) * t["s"]
    y = T.conv2d(x, matrix) if form == "conv" else x @ matrix + t["b"]
    y.backward(torch.tensor(seed_of(found["y"])))
    close(found["y"], y)
    for key in feeds:
        close(found[key], t[key].grad)


# Whole models


def qdq_cnn() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A network as quantization-aware training exports it: float weights, fake-quantized in the model."""
    generator = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N, 1, 8, 8] x) => (float[N, 3] y)
        <float sx = {0.01}, float sh = {0.0213}, uint8 z = {120}, uint8 zero = {0},
         int8[4] zw = {0, 0, 0, 0}, int8 zv = {0}, float sv = {0.004}> {
            xq = QuantizeLinear(x, sx, z) xd = DequantizeLinear(xq, sx, z)
            wq = QuantizeLinear<axis = 0>(w, sw, zw) wd = DequantizeLinear<axis = 0>(wq, sw, zw)
            c = Conv<pads = [1, 1, 1, 1]>(xd, wd, b) r = Relu(c)
            rq = QuantizeLinear(r, sh, zero) p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(rq)
            pd = DequantizeLinear(p, sh, zero) f = Flatten(pd)
            vq = QuantizeLinear(v, sv, zv) vd = DequantizeLinear(vq, sv, zv)
            y = Gemm<transB = 1>(f, vd, d) }"""
    )
    weights = {
        "w": uniform(-0.5, 0.5, 4, 1, 3, 3),
        "b": uniform(-0.1, 0.1, 4),
        "v": uniform(-0.5, 0.5, 3, 64, seed=3),
        "d": uniform(-0.1, 0.1, 3),
        "sw": uniform(0.003, 0.0045, 4),
    }
    for name, array in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model, {"x": (1.5 * generator.standard_normal((2, 1, 8, 8))).astype(np.float32)}


@pytest.mark.parametrize("kernels", ["auto", "python", "onnx", "plain"])
def test_a_cnn_against_a_fake_quantized_module(kernels: str) -> None:
    model, feeds = qdq_cnn()
    weights = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    wrt = ["x", "w", "b", "v", "d"]
    found = gradients(model, feeds, wrt, kernels)
    t = tracked({**feeds, **{k: weights[k] for k in wrt[1:]}})
    per_tensor = torch.fake_quantize_per_tensor_affine
    x = per_tensor(t["x"], 0.01, 120, 0, 255)
    zeros = torch.zeros(4, dtype=torch.int32)
    w = torch.fake_quantize_per_channel_affine(t["w"], torch.tensor(weights["sw"]), zeros, 0, -128, 127)
    h = per_tensor(torch.relu(T.conv2d(x, w, t["b"], padding=1)), 0.0213, 0, 0, 255)
    v = per_tensor(t["v"], 0.004, 0, -128, 127)
    y = T.linear(T.max_pool2d(h, 2).flatten(1), v, t["d"])
    y.backward(torch.tensor(seed_of(found["y"])))
    close(found["y"], y)
    for name in wrt:
        close(found[name], t[name].grad)


def test_parameters_are_the_float_weights() -> None:
    model, _ = qdq_cnn()
    built = ortgrad.build_gradient_model(model)
    assert [v.name for v in built.graph.output] == ["y", "w_grad", "b_grad", "v_grad", "d_grad"]


class Calibration(CalibrationDataReader):
    def __init__(self, feeds: list[dict[str, np.ndarray]]) -> None:
        self._feeds: Iterator[dict[str, np.ndarray]] = iter(feeds)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._feeds, None)


class Rounded(torch.autograd.Function):
    """clip(round(x) + zero), straight through where it is not clipped."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, zero: torch.Tensor, low: int, high: int) -> torch.Tensor:
        q = torch.round(x) + zero
        ctx.save_for_backward((q >= low) & (q <= high))
        return q.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return dy * ctx.saved_tensors[0], None, None, None


class Interpreter:
    """Runs the quantized models below in PyTorch; quantized tensors are integers in floats."""

    def __init__(self, model: onnx.ModelProto, feeds: Mapping[str, torch.Tensor]) -> None:
        self.values = dict(feeds)
        self.kinds = {}
        for tensor in model.graph.initializer:
            array = numpy_helper.to_array(tensor)
            self.kinds[tensor.name] = array.dtype.name
            number = array.astype(np.int64 if array.dtype == np.int64 else np.float32)
            self.values.setdefault(tensor.name, torch.tensor(number))
        for node in model.graph.node:
            inputs = [self.values.get(name) for name in node.input]
            settings = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            results = getattr(self, node.op_type)(inputs, settings, node)
            results = results if isinstance(results, tuple) else (results,)
            self.values.update(zip(node.output, results, strict=True))

    @staticmethod
    def along(s: torch.Tensor, x: torch.Tensor, axis: int) -> torch.Tensor:
        return s.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)]) if s.numel() > 1 else s

    def real(self, q: Any, s: Any, z: Any, axis: int = 0) -> torch.Tensor:
        shift = 0 if z is None else self.along(z, q, axis)
        return (q - shift) * self.along(s, q, axis)

    def quantized(self, x: Any, s: Any, z: Any, name: str, axis: int = 0) -> Any:
        return Rounded.apply(x / self.along(s, x, axis), self.along(z, x, axis), *RANGES[self.kinds[name]])

    def QuantizeLinear(self, i: Any, a: Any, node: Any) -> Any:  # noqa: N802
        return self.quantized(*i, node.input[2], a.get("axis", 1))

    def DequantizeLinear(self, i: Any, a: Any, node: Any) -> Any:  # noqa: N802
        return self.real(i[0], i[1], i[2] if len(i) > 2 else None, a.get("axis", 1))

    def DynamicQuantizeLinear(self, i: Any, a: Any, node: Any) -> Any:  # noqa: N802
        with torch.no_grad():
            low, high = i[0].min().clamp(max=0), i[0].max().clamp(min=0)
            scale = (high - low) / 255
            zero = torch.round(-low / scale)
        return Rounded.apply(i[0] / scale, zero, 0, 255), scale, zero

    def Conv(self, i: Any, a: Any, node: Any) -> Any:  # noqa: N802
        pads = a.get("pads", [0, 0, 0, 0])
        x = T.pad(i[0], (pads[1], pads[3], pads[0], pads[2]))
        return T.conv2d(x, i[1], i[2] if len(i) > 2 else None, a.get("strides", 1), groups=a.get("group", 1))

    def ConvInteger(self, i: Any, a: Any, node: Any) -> Any:  # noqa: N802
        shift = i[3] if len(i) > 3 else 0
        return self.Conv([i[0] - i[2], i[1] - shift], a, node)

    def MatMulInteger(self, i: Any, a: Any, node: Any) -> Any:  # noqa: N802
        return (i[0] - i[2]) @ (i[1] - (i[3] if len(i) > 3 else 0))

    def QLinearConv(self, i: Any, a: Any, node: Any) -> Any:  # noqa: N802
        bias = [i[8] * i[1] * i[4]] if len(i) > 8 else []
        y = self.Conv([self.real(*i[:3]), self.real(*i[3:6]), *bias], a, node)
        return self.quantized(y, i[6], i[7], node.input[7])

    def QGemm(self, i: Any, a: Any, node: Any) -> Any:  # noqa: N802
        turned = a.get("transB", 0)
        b = self.real(*i[3:6], 0 if turned else 1)
        y = self.real(*i[:3]) @ (b.T if turned else b) + i[6] * i[1] * i[4]
        return self.quantized(y, i[7], i[8], node.input[8])

    def QLinearMatMul(self, i: Any, a: Any, node: Any) -> Any:  # noqa: N802
        return self.quantized(self.real(*i[:3]) @ self.real(*i[3:6], 1), i[6], i[7], node.input[7])

    def QLinearLeakyRelu(self, i: Any, a: Any, node: Any) -> Any:  # noqa: N802
        return self.quantized(T.leaky_relu(self.real(*i[:3]), a["alpha"]), i[3], i[4], node.input[4])

    def QLinearAveragePool(self, i: Any, a: Any, node: Any) -> Any:  # noqa: N802
        return self.quantized(self.AveragePool([self.real(*i[:3])], a, node), i[3], i[4], node.input[4])

    def Gemm(self, i: Any, a: Any, node: Any) -> Any:  # noqa: N802
        y = i[0] @ (i[1].T if a.get("transB", 0) else i[1])
        return y + i[2] if len(i) > 2 else y

    def MaxPool(self, i: Any, a: Any, node: Any) -> Any:  # noqa: N802
        return T.max_pool2d(i[0], a["kernel_shape"], a["strides"])

    def AveragePool(self, i: Any, a: Any, node: Any) -> Any:  # noqa: N802
        return T.avg_pool2d(i[0], a["kernel_shape"], a["strides"])

    def LeakyRelu(self, i: Any, a: Any, node: Any) -> Any:  # noqa: N802
        return T.leaky_relu(i[0], a.get("alpha", 0.01))

    def Relu(self, i: Any, a: Any, node: Any) -> Any:  # noqa: N802
        return torch.relu(i[0])

    def Flatten(self, i: Any, a: Any, node: Any) -> Any:  # noqa: N802
        return i[0].flatten(1)

    def Reshape(self, i: Any, a: Any, node: Any) -> Any:  # noqa: N802
        return i[0].reshape(i[1].tolist())

    def Cast(self, i: Any, a: Any, node: Any) -> Any:  # noqa: N802
        return i[0]

    def Mul(self, i: Any, a: Any, node: Any) -> Any:  # noqa: N802
        return i[0] * i[1]

    def Add(self, i: Any, a: Any, node: Any) -> Any:  # noqa: N802
        return i[0] + i[1]


@pytest.mark.parametrize("form", ["QDQ", "QDQ per channel", "QOperator", "dynamic"])
def test_what_onnxruntime_quantizes(form: str, tmp_path: Path) -> None:
    source, path = ROOT / "models" / "cnn.onnx", tmp_path / "quantized.onnx"
    image = uniform(0, 1, 4, 1, 8, 8)
    if form == "dynamic":
        quantize_dynamic(source, path, op_types_to_quantize=["Conv", "MatMul", "Gemm"])
    else:
        # The values are larger than in the calibration, so that some are clipped.
        reader = Calibration([{"image": uniform(0, 0.7, 4, 1, 8, 8, seed=i)} for i in range(3)])
        format_ = QuantFormat.QOperator if form == "QOperator" else QuantFormat.QDQ
        quantize_static(source, path, reader, quant_format=format_, per_channel="channel" in form)
    model = onnx.load(path)
    assert {"QDQ": "DequantizeLinear", "QOperator": "QLinearConv", "dynamic": "ConvInteger"}[
        form.split()[0]
    ] in {node.op_type for node in model.graph.node}
    found = gradients(model, {"image": image}, ["image"])
    t = torch.tensor(image, requires_grad=True)
    y = Interpreter(model, {"image": t}).values["logits"]
    y.backward(torch.tensor(seed_of(found["y"])))
    close(found["image"], t.grad)
    assert np.abs(found["image"]).max() > 0


# Messages


def test_integer_weights_cannot_be_trained() -> None:
    model, _ = qdq_cnn()
    with pytest.raises(
        ortgrad.ModelError,
        match=r"'wq' is a quantized tensor, whose int8 .* name 'w', from which .* or its scale 'sw' instead",
    ):
        ortgrad.build_gradient_model(model, wrt="wq")
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N, 2] x) => (float[N, 2] y)
        <int8[2, 2] w = {1, 2, 3, 4}, float s = {0.1}> { d = DequantizeLinear(w, s) y = MatMul(x, d) }"""
    )
    with pytest.raises(ortgrad.ModelError, match=r"'w' is a quantized tensor.* name its scale 's' instead"):
        ortgrad.build_gradient_model(model, wrt="w")
    ortgrad.build_gradient_model(model, wrt="s", straight_through=False)


def test_straight_through_is_a_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = qdq_cnn()
    with pytest.raises(ortgrad.UnsupportedGradientError) as raised:
        ortgrad.build_gradient_model(model, wrt=["x"], straight_through=False)
    text = str(raised.value)
    assert "2 node(s)" in text
    assert "node 'xq'" in text
    assert "node 'rq'" in text
    assert "straight_through=False" in text
    ortgrad.build_gradient_model(model, wrt=["d"], straight_through=False)
    marked = [item.node for item in explain(model, wrt=["x", "w"]) if item.straight_through]
    assert marked == ["xq", "wq", "rq"]
    path, out = str(tmp_path / "model.onnx"), str(tmp_path / "built.onnx")
    onnx.save(model, path)
    assert main(["grad", path, "--wrt", "x", "-o", out]) == 0
    assert main(["grad", path, "--wrt", "x", "-o", out, "--no-straight-through"]) == 3
    capsys.readouterr()
    assert main(["explain", path, "--wrt", "x", "--all"]) == 0
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "(straight-through)" in line]
    assert lines == ["xq", "rq"]


def test_a_check_does_not_judge_straight_through_gradients() -> None:
    model, feeds = qdq_cnn()
    result = ortgrad.check_gradients(model, feeds, wrt=["x", "b", "d"], per_node=True)
    assert [(row.name, row.judged) for row in result.rows] == [("x", False), ("b", False), ("d", True)]
    assert "QuantizeLinear node 'xq'" in result.rows[0].note
    assert "QuantizeLinear node 'rq'" in result.rows[1].note
    assert {"Conv c", "Relu r", "Flatten f", "Gemm y"} <= {row.name for row in result.nodes}
    assert result.ok


BRANCH = """<ir_version: 10, opset_import: ["" : 21]> g (float[N] x, bool c) => (float[N] y)
    <float s = {0.1}, int8 z = {0}> {
        %s y = If(c) <then_branch = t () => (float[N] a) { %s },
                   else_branch = e () => (float[N] b) { b = Neg(x) }> %s }"""


def test_inside_a_subgraph() -> None:
    model = onnx.parser.parse_model(
        BRANCH % ("", "q = QuantizeLinear(x, s, z) a = DequantizeLinear(q, s, z)", "")
    )
    built = ortgrad.build_gradient_model(model, wrt="x")
    x = np.float32([-20, -1, 0.3, 20])
    for condition, expected in ((True, [0, 1, 1, 0]), (False, [-1, -1, -1, -1])):
        feeds = {"x": x, "c": np.array(condition), "y_grad": np.ones(4, np.float32)}
        (found,) = ortgrad.InferenceSession(built).run(["x_grad"], feeds)
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(ortgrad.UnsupportedGradientError, match="QuantizeLinear"):
        ortgrad.build_gradient_model(model, wrt="x", straight_through=False)


def test_across_the_border_of_a_subgraph() -> None:
    text = BRANCH % ("q = QuantizeLinear(x, s, z)", "a = DequantizeLinear(q, s, z)", "")
    with pytest.raises(ortgrad.UnsupportedGradientError, match="'q' goes into its subgraphs"):
        ortgrad.build_gradient_model(onnx.parser.parse_model(text), wrt="x")
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[N] x, bool c) => (float[N] y)
        <float s = {0.1}, int8 z = {0}> {
            q = If(c) <then_branch = t () => (int8[N] a) { a = QuantizeLinear(x, s, z) },
                       else_branch = e () => (int8[N] b) { b = QuantizeLinear(x, s, z) }>
            y = DequantizeLinear(q, s, z) }"""
    with pytest.raises(ortgrad.UnsupportedGradientError, match="'q' goes into its subgraphs or comes out"):
        ortgrad.build_gradient_model(onnx.parser.parse_model(text), wrt="x")
