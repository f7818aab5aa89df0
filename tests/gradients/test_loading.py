"""Models as others write them load and run, with the op library registered as well as without it."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, parser
from onnxruntime import GraphOptimizationLevel

import ortgrad
from ortgrad.graph.loading import load_model
from ortgrad.operators.declaration import CALL_ATTRIBUTE

OPSET_17 = '<ir_version: 8, opset_import: ["" : 17]>'
# Each is fused by onnxruntime to an operator of com.microsoft, which none of them imports.
FUSED = {
    "FusedMatMul": "(float[2,4,3] x, float[2,4,5] w) => (float[2,3,5] y)"
    "{ t = Transpose<perm=[0,2,1]>(x) y = MatMul(t, w) }",
    "scaled FusedMatMul": "(float[2,4,3] x, float[2,3,5] w) => (float[2,4,5] y)"
    "<float c = {0.5}> { t = Mul(x, c) y = MatMul(t, w) }",
    "QuickGelu": "(float[2,4] x) => (float[2,4] y)"
    "<float c = {1.702}> { t = Mul(x, c) s = Sigmoid(t) y = Mul(x, s) }",
    "Gelu": "(float[2,4] x) => (float[2,4] y) <float r = {1.4142135}, float o = {1.0}, float h = {0.5}>"
    "{ d = Div(x, r) e = Erf(d) a = Add(e, o) m = Mul(x, a) y = Mul(m, h) }",
    "BiasGelu": "(float[2,4] z) => (float[2,4] y)"
    "<float[4] b = {1,2,3,4}, float r = {1.4142135}, float o = {1.0}, float h = {0.5}>"
    "{ x = Add(z, b) d = Div(x, r) e = Erf(d) a = Add(e, o) m = Mul(x, a) y = Mul(m, h) }",
    "SkipLayerNormalization": "(float[2,3,4] x, float[2,3,4] z) => (float[2,3,4] y)"
    "<float[4] s = {1,2,3,4}, float[4] b = {1,2,3,4}>"
    "{ a = Add(x, z) y = LayerNormalization<axis=-1>(a, s, b) }",
    "FusedConv": "(float[1,1,4,4] x) => (float[1,1,3,3] y) <float[1,1,2,2] w = {1,2,3,4}>"
    "{ a = Conv(x, w) y = Relu(a) }",
    "FusedGemm": "(float[2,2] x) => (float[2,2] y) <float[2,2] w = {1,2,3,4}> { a = Gemm(x, w) y = Relu(a) }",
}
LEVELS = [
    GraphOptimizationLevel.ORT_DISABLE_ALL,
    GraphOptimizationLevel.ORT_ENABLE_BASIC,
    GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    GraphOptimizationLevel.ORT_ENABLE_ALL,
]
WAYS = ("plain", "registered", "own", "own, registered")


def run(model: onnx.ModelProto, way: str, level: GraphOptimizationLevel, feeds: dict) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    if "registered" in way:
        ortgrad.register(options)
    if "own" in way:
        session = ortgrad.InferenceSession(model, options)
    else:
        data = model.SerializeToString()
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return session.run(None, {name: feeds[name] for name in feeds if name in inputs_of(session)})


def inputs_of(session: onnxruntime.InferenceSession) -> set[str]:
    return {value.name for value in (*session.get_inputs(), *session.get_overridable_initializers())}


def feeds_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        value.name: generator.standard_normal([d.dim_value for d in value.type.tensor_type.shape.dim]).astype(
            np.float32
        )
        for value in model.graph.input
    }


@pytest.mark.parametrize("name", FUSED)
def test_models_that_onnxruntime_fuses_load_everywhere(name: str) -> None:
    forward = parser.parse_model(f"{OPSET_17} g {FUSED[name]}")
    wrt = [value.name for value in forward.graph.input]
    models = {
        "forward": ortgrad.prepare(forward),
        "built": ortgrad.build_gradient_model(forward, wrt=wrt),
        "prepared": ortgrad.prepare(ortgrad.build_gradient_model(forward, wrt=wrt), kernels="onnx"),
    }
    for model in models.values():
        feeds = feeds_of(model)
        expected = run(model, "plain", LEVELS[0], feeds)
        for way, level in product(WAYS, LEVELS):
            for result, value in zip(run(model, way, level, feeds), expected, strict=True):
                np.testing.assert_allclose(result, value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FUSED)
def test_a_session_of_ours_takes_models_without_the_import(name: str) -> None:
    forward = parser.parse_model(f"{OPSET_17} g {FUSED[name]}")
    before = forward.SerializeToString(deterministic=True)
    feeds = feeds_of(forward)
    (expected,) = run(forward, "plain", LEVELS[-1], feeds)
    (result,) = run(forward, "own, registered", LEVELS[-1], feeds)
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)
    assert forward.SerializeToString(deterministic=True) == before


# Sizes of -1


def test_a_size_of_minus_one_is_not_known() -> None:
    """Older exporters write -1 as a number; onnxruntime takes it for any size."""
    text = """<ir_version: 7, opset_import: ["" : 11]> g (float[A, 3, B, C] x) => (float[A, 3, 1, 1] y)
        { p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x) y = GlobalAveragePool(p) }"""
    model = parser.parse_model(text)
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = -1
    built = ortgrad.build_gradient_model(model, wrt="x")
    assert "dim_value: -1" not in str(built.graph)
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 6), dtype=np.float32)
    seed = np.ones((2, 3, 1, 1), np.float32)
    # Each of the windows' maxima gets an equal share.
    windows = x.reshape(2, 3, 4, 2, 3, 2)
    largest = windows == windows.max((3, 5), keepdims=True)
    expected = largest.reshape(x.shape) / np.float32(12)
    for way in WAYS:
        np.testing.assert_allclose(
            run(built, way, LEVELS[-1], {"x": x, "y_grad": seed})[-1], expected, rtol=1e-5
        )


# Imports that are missing, or written in another way


@pytest.mark.parametrize(
    ("imports", "body"),
    [
        ('"" : 17', "t = com.microsoft.QuickGelu(x) y = Mul(t, t)"),
        ('"com.microsoft" : 1', "t = com.microsoft.QuickGelu(x) y = Mul(t, t)"),
        ('"ai.onnx" : 17', "t = ReduceMean<axes=[1]>(x) y = Mul(x, t)"),
        ('"ai.onnx" : 17', "t = com.microsoft.Gelu(x) u = Split<axis=1>(t) y = Mul(u, u)"),
    ],
)
def test_imports_that_onnxruntime_does_without(imports: str, body: str) -> None:
    text = f"<ir_version: 8, opset_import: [{imports}]> g (float[2,4] x) => (float[2,4] y) {{ {body} }}"
    model = parser.parse_model(text)
    (expected,) = run(model, "plain", LEVELS[-1], feeds_of(model))
    built = ortgrad.build_gradient_model(model, wrt="x")
    # Behind an operator that onnx does not know nothing tells the shape of the seed.
    seed = np.random.default_rng(1).standard_normal(expected.shape, dtype=np.float32)
    feeds = {**feeds_of(model), "y_grad": seed}
    for way in WAYS:
        result, grad = run(built, way, LEVELS[-1], feeds)
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            grad, differences(model, feeds["x"], feeds["y_grad"]), rtol=0.02, atol=0.02
        )


def differences(model: onnx.ModelProto, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """Central differences of onnxruntime's forward pass."""
    grad = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        moved = []
        for step in (1e-2, -1e-2):
            changed = x.copy()
            changed[index] += step
            (y,) = run(model, "plain", LEVELS[-1], {"x": changed})
            moved.append(np.sum(y.astype(np.float64) * dy))
        grad[index] = (moved[0] - moved[1]) / 2e-2
    return grad


# IR version 3: initializers are listed as inputs


def old_model() -> onnx.ModelProto:
    model = parser.parse_model(
        '<ir_version: 3, opset_import: ["" : 9]> g (float[2,3] x, float[3,4] w, float[4] b) => (float[2,4] y)'
        "<float[3,4] w = {1,2,3,4,5,6,7,8,9,10,11,12}, float[4] b = {1,2,3,4}>"
        "{ t = MatMul(x, w) u = Add(t, b) y = Relu(u) }"
    )
    names = {value.name for value in model.graph.input}
    for tensor in model.graph.initializer:
        if tensor.name not in names:
            model.graph.input.append(helper.make_tensor_value_info(tensor.name, 1, tensor.dims))
    return model


@pytest.mark.parametrize("way", WAYS)
def test_weights_of_old_models_can_be_fed(way: str) -> None:
    model = old_model()
    assert {value.name for value in model.graph.input} == {"x", "w", "b"}
    built = ortgrad.build_gradient_model(model, wrt=["w", "b"])
    onnx.checker.check_model(built, full_check=True)
    assert built.ir_version >= 10
    generator = np.random.default_rng(0)
    x, w, dy = (generator.standard_normal(s).astype(np.float32) for s in ((2, 3), (3, 4), (2, 4)))
    b = np.zeros(4, np.float32)
    y, w_grad, b_grad = run(built, way, LEVELS[-1], {"x": x, "w": w, "b": b, "y_grad": dy})
    np.testing.assert_allclose(y, np.maximum(x @ w, 0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(w_grad, x.T @ (dy * (x @ w > 0)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(b_grad, (dy * (x @ w > 0)).sum(0), rtol=1e-5, atol=1e-5)


def test_constants_of_old_models_stay_constants() -> None:
    built = ortgrad.build_gradient_model(old_model(), wrt="x")
    assert [value.name for value in built.graph.input] == ["x", "y_grad"]
    assert {tensor.name for tensor in built.graph.initializer} == {"w", "b"}


def test_sessions_do_without_the_bodies_of_gradient_nodes(tmp_path: Path) -> None:
    text = "g (float[2,3] x) => (float[2,3] y) { a = Relu(x) y = Tanh(a) }"
    built = ortgrad.build_gradient_model(parser.parse_model(f"{OPSET_17} {text}"), wrt=["x"])
    path = tmp_path / "model.onnx"
    onnx.save(built, path)
    names = [function.name for function in built.functions]
    assert set(names) == {"ReluGrad", "TanhGrad"}
    feeds = {"x": np.float32([[-1, 0, 1], [2, 3, 4]]), "y_grad": np.ones((2, 3), np.float32)}
    x = feeds["x"]
    for source in (built, built.SerializeToString(), path):
        assert not load_model(source, bodies=False).functions
        assert len(load_model(source).functions) == 2
        actual = ortgrad.InferenceSession(source).run(["x_grad"], feeds)[0]
        np.testing.assert_allclose(actual, np.where(x > 0, 1 - np.tanh(x) ** 2, 0), atol=1e-6)
    assert [function.name for function in built.functions] == names


def test_a_function_that_another_node_calls_stays() -> None:
    built = ortgrad.build_gradient_model(
        parser.parse_model(f"{OPSET_17} g (float[3] x) => (float[3] y) {{ y = Relu(x) }}"), wrt=["x"]
    )
    node = next(node for node in built.graph.node if node.op_type == "ReluGrad")
    node.attribute.remove(next(a for a in node.attribute if a.name == CALL_ATTRIBUTE))
    (function,) = built.functions
    # It has another meaning now.
    del function.node[:]
    function.node.add(op_type="Add", input=[function.input[0]] * 2, output=[function.output[0]])
    assert len(load_model(built.SerializeToString(), bodies=False).functions) == 1
    feeds = {"x": np.float32([-1, 0, 1]), "y_grad": np.float32([1, 2, 3])}
    for source in (built, built.SerializeToString()):
        actual = ortgrad.InferenceSession(source).run(["x_grad"], feeds)[0]
        np.testing.assert_array_equal(actual, [2, 4, 6])
