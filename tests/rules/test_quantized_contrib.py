"""Quantized operators of onnxruntime on integers, or that round inside: against PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from support import KERNELS
from support.quantization import close, fake, gradients, integers, make_model, seed_of, tracked, uniform

import ortgrad

MS = "com.microsoft"


def number(value: float) -> np.ndarray:
    return np.array(value, np.float32)


@pytest.mark.parametrize("count", [1, 2, 101, 150])
def test_any_number_of_operands(count: int) -> None:
    """QLinearConcat has no limit on its operands."""
    feeds: dict[str, np.ndarray] = {"sy": number(0.02)}
    nodes, inputs = [], ["sy", "z"]
    for i in range(count):
        feeds |= {f"x{i}": uniform(-1, 1, 2, 1, seed=i), f"s{i}": number(0.007 + 0.0001 * i)}
        nodes.append(helper.make_node("QuantizeLinear", [f"x{i}", f"s{i}", "z"], [f"q{i}"]))
        inputs += [f"q{i}", f"s{i}", "z"]
    nodes.append(helper.make_node("QLinearConcat", inputs, ["q"], domain=MS, axis=1))
    nodes.append(helper.make_node("DequantizeLinear", ["q", "sy", "z"], ["y"]))
    model = make_model(nodes, feeds, [integers("z", 128, "uint8")])
    asked = ["x0", f"x{count - 1}", f"s{count - 1}", "sy"]
    found = gradients(model, feeds, list(dict.fromkeys(asked)))
    t = tracked(feeds)
    parts = [fake(t[f"x{i}"], t[f"s{i}"], 128, "uint8") for i in range(count)]
    y = fake(torch.cat(parts, 1), t["sy"], 128, "uint8")
    y.backward(torch.tensor(seed_of(found["y"])))
    np.testing.assert_allclose(found["y"], y.detach(), atol=0.0201)
    for name in asked:
        close(found[name], t[name].grad, 2e-2 if name == "sy" else 1e-4)


def test_scales_of_the_last_operands_are_no_parameters() -> None:
    inputs = ["sy", "z", *(name for i in range(120) for name in ("q", f"s{i}", "z"))]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "sy", "z"], ["q"]),
        helper.make_node("QLinearConcat", inputs, ["p"], domain=MS, axis=1),
        helper.make_node("DequantizeLinear", ["p", "sy", "z"], ["d"]),
        helper.make_node("MatMul", ["d", "w"], ["y"]),
    ]
    model = make_model(nodes, {"x": uniform(-1, 1, 2, 1)}, [integers("z", 128, "uint8")])
    scales = {"sy": np.array([0.01], np.float32)} | {
        f"s{i}": np.array([0.01], np.float32) for i in range(120)
    }
    model.graph.initializer.extend(
        numpy_helper.from_array(v, k) for k, v in ({"w": uniform(-1, 1, 120, 2)} | scales).items()
    )
    built = ortgrad.build_gradient_model(model)
    assert [v.name for v in built.graph.output] == ["y", "w_grad"]


@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (3, 1)])
def test_where(shape: tuple[int, int]) -> None:
    condition = np.random.default_rng(1).random((3, 4)) > 0.5
    feeds = {
        "a": uniform(-1.3, 1.3, *shape),
        "b": uniform(-1.3, 1.3, 4, seed=1),
        "sa": number(0.008),
        "sb": number(0.01),
        "sy": number(0.0085),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["a", "sa", "z"], ["qa"]),
        helper.make_node("QuantizeLinear", ["b", "sb", "z"], ["qb"]),
        helper.make_node(
            "QLinearWhere", ["c", "qa", "sa", "z", "qb", "sb", "z", "sy", "z"], ["q"], domain=MS
        ),
        helper.make_node("DequantizeLinear", ["q", "sy", "z"], ["y"]),
    ]
    model = make_model(nodes, feeds, [integers("z", 128, "uint8")])
    model.graph.initializer.append(helper.make_tensor("c", 9, (3, 4), condition.reshape(-1).tolist()))
    found = gradients(model, feeds, list(feeds))
    t = tracked(feeds)
    chosen = torch.where(
        torch.tensor(condition), fake(t["a"], t["sa"], 128, "uint8"), fake(t["b"], t["sb"], 128, "uint8")
    )
    y = fake(chosen, t["sy"], 128, "uint8")
    y.backward(torch.tensor(seed_of(found["y"])))
    np.testing.assert_allclose(found["y"], y.detach(), atol=0.0086)
    for name in feeds:
        close(found[name], t[name].grad, 2e-2 if name == "sy" else 1e-4)


def test_max_pool_with_the_channels_last() -> None:
    feeds = {"x": uniform(-1, 1, 2, 6, 5, 3), "s": number(0.007)}
    pool: dict[str, Any] = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 0]}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("NhwcMaxPool", ["q"], ["p"], domain=MS, **pool),
        helper.make_node("DequantizeLinear", ["p", "s", "z"], ["y"]),
    ]
    found = gradients(make_model(nodes, feeds, [integers("z", 128, "uint8")]), feeds, ["x", "s"])
    t = tracked(feeds)
    x = fake(t["x"], t["s"], 128, "uint8").permute(0, 3, 1, 2)
    y = torch.nn.functional.max_pool2d(x, (3, 2), (2, 1), (1, 0)).permute(0, 2, 3, 1)
    y.backward(torch.tensor(seed_of(found["y"])))
    close(found["y"], y)
    close(found["x"], t["x"].grad)


def test_integers_of_16_bits() -> None:
    feeds = {"x": uniform(-1, 1, 3, 4), "s": number(4e-5)}
    weights = np.random.default_rng(0).integers(-30000, 30000, (4, 5))
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("MatMulInteger16", ["q", "w"], ["i"], domain=MS),
        helper.make_node("Cast", ["i"], ["f"], to=1),
        helper.make_node("Mul", ["f", "s"], ["y"]),
    ]
    model = make_model(nodes, feeds, [integers("z", 0, "int16"), integers("w", weights, "int16")])
    found = gradients(model, feeds, ["x", "s"])
    t = tracked(feeds)
    y = fake(t["x"], t["s"], 0, "int16") @ torch.tensor(weights, dtype=torch.float32)
    y.backward(torch.tensor(seed_of(found["y"])))
    close(found["y"], y)
    close(found["x"], t["x"].grad)


STEPS, BATCH, WIDTH, HIDDEN = 5, 3, 4, 6


def lstm(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, b: torch.Tensor, states: Any) -> Any:
    """One direction; W and R are transposed, the gates are i, o, f and c."""
    (h, c), made = states, []
    for step in x:
        i, o, f, g = (step @ w + h @ r + b[: 4 * HIDDEN] + b[4 * HIDDEN :]).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        made.append(h)
    return torch.stack(made), h, c


@pytest.mark.parametrize(
    ("kernels", "form", "columns"),
    [
        *((kernels, "forward", True) for kernels in (*KERNELS, "plain")),
        *(("auto", form, columns) for form in ("reverse", "bidirectional") for columns in (False, True)),
    ],
)
def test_lstm(kernels: str, form: str, columns: bool) -> None:
    directions = 2 if form == "bidirectional" else 1
    rng = np.random.default_rng(0)
    kind = "int8" if columns else "uint8"
    low, high = (-100, 100) if columns else (20, 236)
    w, r = (rng.integers(low, high, (directions, n, 4 * HIDDEN)) for n in (WIDTH, HIDDEN))
    scales = (directions, 4 * HIDDEN) if columns else (directions,)
    zero = np.full(scales, 0 if columns else 128)
    feeds = {
        "x": uniform(-1, 1, STEPS, BATCH, WIDTH),
        "b": uniform(-1, 1, directions, 8 * HIDDEN, seed=1),
        "h": uniform(-1, 1, directions, BATCH, HIDDEN, seed=2),
        "c": uniform(-1, 1, directions, BATCH, HIDDEN, seed=3),
        "sw": uniform(0.004, 0.008, *scales, seed=4),
        "sr": uniform(0.004, 0.008, *scales, seed=5),
    }
    inputs = ["x", "w", "r", "b", "", "h", "c", "", "sw", "zw", "sr", "zr"]
    settings: dict[str, Any] = {"hidden_size": HIDDEN, "direction": form, "domain": MS}
    nodes = [
        helper.make_node("DynamicQuantizeLSTM", inputs, ["all", "last", "cell"], **settings),
        helper.make_node("ReduceSum", ["all"], ["sum"], keepdims=0),
        helper.make_node("Sub", ["last", "cell"], ["difference"]),
        helper.make_node("Add", ["difference", "sum"], ["y"]),
    ]
    initializers = [integers("w", w, kind), integers("r", r, kind), integers("zw", zero, kind)]
    model = make_model(nodes, feeds, [*initializers, integers("zr", zero, kind)])
    found = gradients(model, feeds, list(feeds), kernels)
    t = tracked(feeds)
    sums, ends = [], []
    for i in range(directions):
        matrices = [(torch.tensor(q[i]) - int(zero.flat[0])) * t[s][i] for q, s in ((w, "sw"), (r, "sr"))]
        x = t["x"].flip(0) if form == "reverse" or i else t["x"]
        made, h, c = lstm(x, *matrices, t["b"][i], (t["h"][i], t["c"][i]))
        sums.append(made.sum())
        ends.append(h - c)
    y = torch.stack(ends) + sum(sums)
    y.backward(torch.tensor(seed_of(found["y"])))
    # onnxruntime rounds X and the states of every step to 8 bits.
    close(found["y"], y, 1e-2)
    for name in feeds:
        close(found[name], t[name].grad, 1e-4)


def test_lstm_of_onnxruntime_quantization(tmp_path: Any) -> None:
    """An LSTM as quantize_dynamic writes it."""
    weights = {"w": uniform(-1, 1, 1, 4 * HIDDEN, WIDTH), "r": uniform(-1, 1, 1, 4 * HIDDEN, HIDDEN, seed=1)}
    nodes = [
        helper.make_node("LSTM", ["x", "w", "r"], ["all", "last"], hidden_size=HIDDEN),
        helper.make_node("ReduceMean", ["last"], ["y"], keepdims=0),
    ]
    model = make_model(nodes, {"x": np.zeros((STEPS, BATCH, WIDTH))}, [], opset=17)
    model.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in weights.items())
    paths = [str(tmp_path / name) for name in ("float.onnx", "quantized.onnx")]
    onnx.save(model, paths[0])
    quantize_dynamic(*paths, weight_type=QuantType.QInt8)
    quantized = onnx.load(paths[1])
    assert "DynamicQuantizeLSTM" in {node.op_type for node in quantized.graph.node}
    feeds = {"x": uniform(-1, 1, STEPS, BATCH, WIDTH)}
    grads = [
        ortgrad.InferenceSession(ortgrad.build_gradient_model(m, wrt="x", of="y")).run(["x_grad"], feeds)[0]
        for m in (model, quantized)
    ]
    # The weights differ by their rounding.
    close(grads[1], grads[0], 2e-2)


def test_straight_through_is_named() -> None:
    rng = np.random.default_rng(0)
    inputs = ["x", "w", "r", "", "", "", "", "", "s", "z", "s", "z"]
    node = helper.make_node("DynamicQuantizeLSTM", inputs, ["y"], hidden_size=HIDDEN, domain=MS)
    initializers = [
        integers(n, rng.integers(0, 255, (1, k, 4 * HIDDEN)), "uint8")
        for n, k in (("w", WIDTH), ("r", HIDDEN))
    ]
    feeds = {"x": uniform(-1, 1, STEPS, BATCH, WIDTH), "s": np.array([0.01], np.float32)}
    model = make_model([node], feeds, [*initializers, integers("z", [128], "uint8")])
    onnxruntime.InferenceSession(model.SerializeToString())
    with pytest.raises(ortgrad.UnsupportedGradientError, match="DynamicQuantizeLSTM"):
        ortgrad.build_gradient_model(model, wrt="x", straight_through=False)
