"""Values off the path of the gradient may be anything: maps, sequences, strings, other domains."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, parser

import ortgrad

WAYS = ("plain", "registered", "own")
MAPS = helper.make_sequence_type_proto(
    helper.make_map_type_proto(onnx.TensorProto.INT64, helper.make_tensor_type_proto(1, []))
)


def run(model: onnx.ModelProto, way: str, feeds: dict[str, Any]) -> dict[str, Any]:
    options = onnxruntime.SessionOptions()
    if way == "registered":
        ortgrad.register(options)
    if way == "own":
        session = ortgrad.InferenceSession(model, options)
    else:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    names = [value.name for value in session.get_outputs()]
    known = {value.name for value in session.get_inputs()}
    fed = {name: value for name, value in feeds.items() if name in known}
    return dict(zip(names, session.run(None, fed), strict=True))


def check(
    model: onnx.ModelProto,
    feeds: dict[str, Any],
    expected: dict[str, np.ndarray],
    caplog: pytest.LogCaptureFixture,
    of: str = "y",
) -> None:
    """Every output stays, the gradients are the expected ones, and nobody complains."""
    before = model.SerializeToString(deterministic=True)
    outputs = run(model, "plain", feeds)
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        built = ortgrad.build_gradient_model(model, wrt=list(expected), of=of)
        prepared = ortgrad.prepare(built, kernels="onnx")
    assert not caplog.records
    assert model.SerializeToString(deterministic=True) == before
    for ready in (built, prepared):
        values = (*ready.graph.input, *ready.graph.output)
        tensors = [v.type.tensor_type for v in values if v.type.HasField("tensor_type")]
        if all(tensor.HasField("shape") for tensor in tensors):
            # The checker wants ranks, and there are seeds whose rank nothing tells.
            onnx.checker.check_model(ready)
        for way in WAYS:
            found = run(ready, way, {**feeds, f"{of}_grad": np.ones_like(outputs[of])})
            assert list(found) == [*outputs, *(f"{name}_grad" for name in expected)]
            for name, value in outputs.items():
                assert same(found[name], value), name
            for name, value in expected.items():
                np.testing.assert_allclose(found[f"{name}_grad"], value, rtol=1e-4, atol=1e-5)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, np.ndarray) and one.dtype.kind not in "OUS":
        return bool(np.allclose(one, other, rtol=1e-5, atol=1e-6))
    return bool(np.all(one == other))


def classifier(opset: int) -> onnx.ModelProto:
    """Weights, a Softmax, and the nodes that skl2onnx adds after it."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Softmax", ["a"], ["y"], axis=1),
        helper.make_node("ZipMap", ["y"], ["z"], domain="ai.onnx.ml", classlabels_int64s=[3, 5]),
        helper.make_node("ArgMax", ["y"], ["label"], axis=1, keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", 1, ["N", 3])],
        [
            helper.make_tensor_value_info("label", onnx.TensorProto.INT64, ["N"]),
            helper.make_value_info("z", MAPS),
            helper.make_tensor_value_info("y", 1, ["N", 2]),
        ],
        [onnx.numpy_helper.from_array(WEIGHT, "w")],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


WEIGHT = np.array([[1, -1], [0.5, 2], [0.1, 0.3]], np.float32)
X = np.array([[0.3, -1, 2], [1, 0.2, -0.4]], np.float32)


@pytest.mark.parametrize("opset", [9, 15, 21])
def test_a_map_output_is_carried_along(opset: int, caplog: pytest.LogCaptureFixture) -> None:
    # The outputs of Softmax always add up to 1: the gradient for dY of ones vanishes.
    zeros = {"x": np.zeros_like(X), "w": np.zeros_like(WEIGHT)}
    check(classifier(opset), {"x": X}, zeros, caplog)


def test_a_map_has_no_gradient() -> None:
    with pytest.raises(ortgrad.ModelError, match=r"'z' is not known to be a tensor.*'y'.* ZipMap "):
        ortgrad.build_gradient_model(classifier(21), wrt="x", of="z")


def test_a_map_input_is_carried_along(caplog: pytest.LogCaptureFixture) -> None:
    kind = helper.make_map_type_proto(onnx.TensorProto.INT64, helper.make_tensor_type_proto(1, []))
    cast = helper.make_node("CastMap", ["m"], ["k"], domain="ai.onnx.ml", cast_to="TO_FLOAT")
    graph = helper.make_graph(
        [cast, helper.make_node("Mul", ["k", "x"], ["y"])],
        "graph",
        [helper.make_value_info("m", kind), helper.make_tensor_value_info("x", 1, [1, 2])],
        [helper.make_tensor_value_info("y", 1, [1, 2])],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    feeds = {"m": {0: 2.0, 1: 3.0}, "x": np.ones((1, 2), np.float32)}
    check(model, feeds, {"x": np.array([[2, 3]], np.float32)}, caplog)


OFF_THE_PATH = {
    "sequence output": "(float[2,3] x) => (float[2,3] y, seq(float[1,3]) s)"
    "{ y = Mul(x, x) s = SplitToSequence(x) }",
    "sequence inside": "(float[2,3] x) => (float[2,3] y, int64 n)"
    "{ y = Mul(x, x) s = SplitToSequence(x) n = SequenceLength(s) }",
    "sequence input": "(seq(float[3]) s, float[2,3] x) => (float[2,3] y, int64 n)"
    "{ y = Mul(x, x) n = SequenceLength(s) }",
    "optional": "(float[2,3] x) => (float[2,3] y, bool b)"
    "{ y = Mul(x, x) o = Optional(x) b = OptionalHasElement(o) }",
    "strings": "(float[2,3] x, string[N] t) => (float[2,3] y, string[M] u)"
    "{ y = Mul(x, x) u = Concat<axis = 0>(t, t) }",
    "another domain": "(float[2,3] x) => (float[2,3] y, float[2,3] u)"
    "{ y = Mul(x, x) u = ai.onnx.ml.Binarizer<threshold = 0.5>(x) }",
}


@pytest.mark.parametrize("opset", [15, 17, 21])
@pytest.mark.parametrize("name", OFF_THE_PATH)
def test_other_types_off_the_path(name: str, opset: int, caplog: pytest.LogCaptureFixture) -> None:
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}, "ai.onnx.ml" : 1]> g {OFF_THE_PATH[name]}'
    )
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    feeds = {"x": x, "s": [x[0], x[1]], "t": np.array(["a", "b"], object)}
    check(model, feeds, {"x": 2 * x}, caplog)


# Models as skl2onnx writes them by default


@pytest.fixture(scope="module")
def fitted() -> dict[str, Any]:
    pytest.importorskip("skl2onnx")
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler, StandardScaler

    generator = np.random.default_rng(0)
    x = generator.standard_normal((60, 4)).astype(np.float32)
    y = (x[:, 0] + x[:, 1] > 0).astype(int) + (x[:, 2] > 0.5)
    models = {
        "MLPClassifier": MLPClassifier((5,), max_iter=20, random_state=0),
        "MinMaxScaler, MLPClassifier": make_pipeline(
            MinMaxScaler(), MLPClassifier((5,), max_iter=20, random_state=0)
        ),
        "LogisticRegression": LogisticRegression(),
        "StandardScaler, LogisticRegression": make_pipeline(StandardScaler(), LogisticRegression()),
    }
    with warnings.catch_warnings():
        # 20 iterations are not enough for them.
        warnings.simplefilter("ignore")
        return {name: model.fit(x, y) for name, model in models.items()}


@pytest.mark.parametrize("name", ["MLPClassifier", "MinMaxScaler, MLPClassifier"])
def test_classifiers_of_scikit_learn(
    name: str, fitted: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    from skl2onnx import to_onnx

    x = np.random.default_rng(1).standard_normal((2, 4)).astype(np.float32)
    model = to_onnx(fitted[name], x[:1])
    scores = next(node.input[0] for node in model.graph.node if node.op_type == "Softmax")
    model.graph.output.append(helper.make_tensor_value_info(scores, 1, None))

    def total(x: np.ndarray) -> np.ndarray:
        """The sum of the scores, in float64 by hand."""
        steps = fitted[name].steps if hasattr(fitted[name], "steps") else [("mlp", fitted[name])]
        values = x.astype(np.float64)
        if len(steps) > 1:
            values = values * steps[0][1].scale_ + steps[0][1].min_
        network = steps[-1][1]
        hidden = np.maximum(values @ network.coefs_[0] + network.intercepts_[0], 0)
        return (hidden @ network.coefs_[1] + network.intercepts_[1]).sum(axis=1)

    grad = np.zeros(x.shape)
    for i in range(x.shape[1]):
        step = np.eye(4)[i] * 1e-4
        grad[:, i] = (total(x + step) - total(x - step)) / 2e-4
    check(model, {"X": x}, {"X": grad.astype(np.float32)}, caplog, of=scores)
