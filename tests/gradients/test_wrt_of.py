"""What `wrt` and `of` may name: patterns, intermediate values, parameters by default, weights anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.reference
import pytest

import ortgrad
from ortgrad.cli import main
from ortgrad.pipelines.explain import explain


def parse(text: str, opset: int = 21) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {text}')


def gradients(model: onnx.ModelProto, **names: object) -> list[str]:
    built = ortgrad.build_gradient_model(model, **names)
    wrt = json.loads(metadata(built)["ortgrad.wrt"])
    assert [value.name for value in built.graph.output][-len(wrt) :] == [f"{name}_grad" for name in wrt]
    return wrt


def metadata(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def run(model: onnx.ModelProto, **feeds: object) -> dict[str, np.ndarray]:
    session = ortgrad.InferenceSession(model)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {k: np.asarray(v) for k, v in feeds.items()}), strict=True))


NETWORK = """net (float[N, 2, 4, 4] image, int64 steps) => (int64[N] label, float[N, 3] scores) <
        float[2, 2, 1, 1] layer1__weight = {1, 2, 3, 4},
        float[2] layer1__bn__weight = {1, 1},
        float[2] layer1__bn__bias = {0, 0},
        float[2] layer1__bn__running_mean = {0, 0},
        float[2] layer1__bn__running_var = {1, 1},
        float[1] layer2__bias = {0},
        float ratio = {0.5},
        float low = {-5},
        float[4] scales = {1, 1, 2, 2},
        float two = {2},
        float[3] exponents = {2, 2, 2},
        float eps = {0.001},
        int64[2] flat = {-1, 32},
        bool training = {0}
    > {
        c = Conv(image, layer1__weight)
        n = BatchNormalization(
            c, layer1__bn__weight, layer1__bn__bias, layer1__bn__running_mean, layer1__bn__running_var
        )
        r = Clip(n, low)
        d = Dropout(r, ratio, training)
        e = Resize <mode = "nearest"> (d, , scales)
        p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (e)
        f = Reshape(p, flat)
        m = MatMul(f, layer2__weight)
        a = Add(m, layer2__bias)
        q = Pow(a, exponents)
        s = Add(q, eps)
        h = Pow(s, two)
        scores = Softmax(h)
        label = ArgMax <axis = 1, keepdims = 0> (scores)
    }"""


def network() -> onnx.ModelProto:
    model = parse(NETWORK)
    weight = np.random.default_rng(0).standard_normal((32, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "layer2__weight"))
    # The parser takes no dots.
    for tensor in model.graph.initializer:
        tensor.name = tensor.name.replace("__", ".")
    for node in model.graph.node:
        node.input[:] = [name.replace("__", ".") for name in node.input]
    return model


PARAMETERS = ["layer1.weight", "layer1.bn.weight", "layer1.bn.bias", "layer2.bias", "layer2.weight"]


def test_the_default_is_parameters_and_the_first_floating_point_output() -> None:
    """No statistics, ratios, bounds, scales, exponents, scalars; not an integer output that comes first."""
    built = ortgrad.build_gradient_model(network())
    found = metadata(built)
    assert json.loads(found["ortgrad.wrt"]) == PARAMETERS
    assert json.loads(found["ortgrad.of"]) == ["scores"]
    assert found["ortgrad.version"] == ortgrad.__version__
    assert [value.name for value in built.graph.input][:3] == ["image", "steps", "scores_grad"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layer1.*", PARAMETERS[:3]),
        ("layer?.weight", ["layer1.weight", "layer2.weight"]),
        ("*running*", ["layer1.bn.running_mean", "layer1.bn.running_var"]),
        ("*", ["image", *PARAMETERS]),
        ("[cn]", ["c", "n"]),
        (["layer2.bias", "layer2.*", "ratio"], ["layer2.bias", "layer2.weight", "ratio"]),
    ],
)
def test_patterns(pattern: str | list[str], expected: list[str]) -> None:
    assert gradients(network(), wrt=pattern) == expected


def test_a_name_that_is_there_is_no_pattern() -> None:
    model = parse("g (float[2] a, float[2] b) => (float[2] y) { y = Mul(a, b) }")
    model.graph.input[0].name = model.graph.node[0].input[0] = "[b]"
    assert gradients(model, wrt="[b]") == ["[b]"]
    assert gradients(model, wrt="[!c]") == ["b"]


def test_an_intermediate_value_is_differentiated() -> None:
    model = parse(
        "g (float[N] x) => (float[N] y) { h = Mul(x, x) s = ReduceSum <keepdims = 0> (h) y = Mul(x, s) }"
    )
    built = ortgrad.build_gradient_model(model, wrt="x", of="h")
    assert [value.name for value in built.graph.output] == ["y", "x_grad"]
    found = run(built, x=np.float32([1, 2]), h_grad=np.float32([1, 10]))
    np.testing.assert_array_equal(found["x_grad"], [2, 40])
    # A scalar is seeded with 1, as an output is.
    scalar = ortgrad.build_gradient_model(model, wrt=["x", "h"], of="s")
    np.testing.assert_array_equal(run(scalar, x=np.float32([1, 2]))["x_grad"], [2, 4])
    ortgrad.check_gradients(model, wrt="x", of="h").raise_if_wrong()
    ortgrad.check_gradients(model, wrt="x", of=["s", "y"]).raise_if_wrong()
    assert {item.node: item.reason for item in explain(model, wrt="x", of="h")}[
        "y"
    ] == "not between wrt and of"


def test_weights_in_constant_nodes_can_be_fed() -> None:
    model = parse(
        """g (float[N, 2] x) => (float[N, 2] y) {
            w = Constant <value = float[2, 2] {1, 2, 3, 4}> ()
            eps = Constant <value_float = 0.5> ()
            m = MatMul(x, w)
            y = Add(m, eps)
        }"""
    )
    assert gradients(model) == ["w"]
    built = ortgrad.build_gradient_model(model, wrt=["w", "eps"])
    x, seed = np.float32([[1, 2]]), np.float32([[1, -1]])
    found = run(built, x=x, y_grad=seed, w=np.eye(2, dtype=np.float32))
    np.testing.assert_array_equal(found["y"], x + 0.5)
    np.testing.assert_array_equal(found["w_grad"], x.T @ seed)
    np.testing.assert_array_equal(found["eps_grad"], 0)
    np.testing.assert_array_equal(run(built, x=x, y_grad=seed)["y"], x @ [[1, 2], [3, 4]] + 0.5)
    ortgrad.check_gradients(model, wrt=["w", "eps"]).raise_if_wrong()


SUBGRAPHS = """g (float[2] x, bool c, int64 n) => (float[2] z) {
    y = If (c) <
        then_branch = a () => (float[2] r)
            { w = Constant <value = float[2] {1, 2}> () q = Mul(x, w) r = Tanh(q) },
        else_branch = b () => (float[2] r2) { r2 = Constant <value = float[2] {3, 4}> () }
    >
    z = Loop (n, c, y) <body = body (int64 i, bool g, float[2] s) => (bool g2, float[2] s2)
        <float[2] v = {2, 3}> { g2 = Identity(g) t = Mul(s, v) s2 = Tanh(t) }>
}"""


def test_weights_inside_subgraphs() -> None:
    model = parse(SUBGRAPHS)
    assert sorted(gradients(model)) == ["r2", "v", "w"]
    built = ortgrad.build_gradient_model(model)
    onnx.checker.check_model(built)
    for flag in (True, False):
        feeds = {"c": np.array(flag), "n": np.array(3)}
        ortgrad.check_gradients(model, feeds, wrt=["r2", "v", "w", "x"]).raise_if_wrong()
    point = {"x": np.float32([1, 1]), "c": True, "n": np.int64(0), "z_grad": np.float32([1, 1])}
    np.testing.assert_array_equal(run(built, **point, w=np.float32([0, 0]))["z"], [0, 0])


def test_names_inside_subgraphs_that_are_no_weights_or_not_unique() -> None:
    model = parse(SUBGRAPHS.replace("r2 = Constant", "w = Constant").replace("r2", "w"))
    assert gradients(model) == ["v"]
    with pytest.raises(KeyError, match="wrt='w' is not a value of the model: it is inside a subgraph"):
        ortgrad.build_gradient_model(model, wrt="w")
    with pytest.raises(KeyError, match="of='q' is not a value of the model: it is inside a subgraph"):
        ortgrad.build_gradient_model(model, of="q")


@pytest.mark.parametrize(
    ("body", "first", "then"),
    [
        ("y = Pow(x, p)", 2.0, 3.0),
        ("y = Clip(x, p)", 0.0, 1.5),
        ("y = Where(c, x, p)", 0.0, 1.5),
        ("y = Mul(p, x)", 2.0, 3.0),
        ('y = Resize <mode = "linear"> (x, , p)', [1.0, 2.0], [1.0, 3.0]),
        ('y = Resize <mode = "nearest"> (x, , p)', [1.0, 2.0], [1.0, 0.5]),
        ("s = Cast <to = 7> (p) y = Expand(x, s)", [1.0, 1.0, 1.0], [3.0, 1.0, 1.0]),
    ],
)
@pytest.mark.filterwarnings("ignore:the gradient of 'p' is zero")
def test_what_is_fed_for_a_constant_counts(body: str, first: object, then: object) -> None:
    """A constant in `wrt` is no constant any more: feeding it is the same as having it in the model."""
    head = "(float[M, 4] x) => (float[P, Q] y) <bool[4] c = {1, 0, 1, 0}>"
    x = np.float32([[0.5, 1.25, 2, 3], [4, -1, -2, 1]])
    sessions = []
    for value in (first, then):
        model = parse(f"g {head} {{ {body} }}")
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(value), "p"))
        sessions.append(ortgrad.InferenceSession(ortgrad.build_gradient_model(model, wrt=["x", "p"])))
    shape = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})[0].shape
    seed = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    expected = sessions[1].run(None, {"x": x, "y_grad": seed})
    actual = sessions[0].run(None, {"x": x, "y_grad": seed, "p": np.array(then, np.float32)})
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    ortgrad.check_gradients(model, {"x": x}, wrt="x").raise_if_wrong()


def test_parameters_before_an_integer_output() -> None:
    model = parse(
        """g (float[N, 2] x) => (int64[N] label) <float[2, 2] w = {1, 2, 3, 4}>
        { m = MatMul(x, w) label = ArgMax <axis = 1, keepdims = 0> (m) }"""
    )
    assert gradients(model, of="m") == ["w"]
    with pytest.raises(ValueError, match="no floating-point output"):
        ortgrad.build_gradient_model(model)


def test_a_model_that_is_built_again_says_so() -> None:
    model = parse(
        "g (double[2] x) => (double y) { t = Mul(x, x) u = Mul(t, x) y = ReduceSum <keepdims = 0> (u) }"
    )
    model.metadata_props.add(key="author", value="me")
    once = ortgrad.build_gradient_model(model, wrt="x")
    twice = ortgrad.build_gradient_model(once, wrt="x", of="x_grad")
    found = metadata(twice)
    assert found == {
        "author": "me",
        "ortgrad.version": ortgrad.__version__,
        "ortgrad.wrt": '["x"]',
        "ortgrad.of": '["x_grad"]',
    }
    assert len(twice.metadata_props) == 4
    assert metadata(ortgrad.prepare(twice, kernels="onnx"))["ortgrad.of"] == '["x_grad"]'


def test_the_nodes_of_a_backward_graph_hold_no_parameters() -> None:
    model = parse(
        """g (float[1, 1, 2, 2] x) => (float[1, 1, 4, 4] y)
        <float[1, 1, 1, 1] w = {2}, float[4] scales = {1, 1, 2, 2}>
        { c = Conv(x, w) r = Resize <mode = "linear"> (c, , scales) y = Mul(r, r) }"""
    )
    once = ortgrad.build_gradient_model(model, wrt=["x", "w"])
    twice = ortgrad.build_gradient_model(once, of="x_grad")
    assert metadata(twice)["ortgrad.wrt"] == '["w"]'


def test_the_command_line_takes_patterns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(network(), tmp_path / "net.onnx")
    arguments = [str(tmp_path / "net.onnx"), "--wrt", "layer1.*", "--of", "a"]
    assert main(["grad", *arguments, "-o", str(tmp_path / "out.onnx")]) == 0
    assert json.loads(metadata(onnx.load(tmp_path / "out.onnx"))["ortgrad.wrt"]) == PARAMETERS[:3]
    assert main(["explain", *arguments]) == 0
    assert "ConvGrad" in capsys.readouterr().out
    assert main(["check", *arguments]) == 0
    assert "layer1.bn.bias" in capsys.readouterr().out
