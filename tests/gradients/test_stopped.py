"""Gradients that are zero because no operator on the way has one: a warning says so, once."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest

import ortgrad
from ortgrad.cli import main
from ortgrad.pipelines.explain import explain


def parse(text: str, opset: int = 21) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {text}')


BRANCH = "(float[N] o) {{ o = {}(x) }}"
LOOP = "(int64 i, bool more, float[N] s) => (bool again, float[N] t) { again = Identity(more) "
# (graph, what stops the gradient of x)
STOPPED = {
    "one": ("(float[N] x) => (float[N] y) { f = Floor(x) y = Mul(f, f) }", ["Floor node 'f'"]),
    "behind": (
        "(float[N] x) => (float[N] y) { h = Sin(x) a = Mul(h, h) r = Round(a) y = Exp(r) }",
        ["Round node 'r'"],
    ),
    "several": (
        "(float[N] x) => (float[N] y) { s = Sin(x) f = Floor(s) g = Sign(x) y = Add(f, g) }",
        ["Floor node 'f'", "Sign node 'g'"],
    ),
    "cast": (
        "(float[N] x) => (float[N] y) { i = Cast<to = 7>(x) c = Cast<to = 1>(i) y = Mul(c, c) }",
        ["Cast node 'i'"],
    ),
    "one-hot": (
        """(float[N] x) => (float[N, 4] y) <int64 depth = {4}, float[2] v = {0, 1}> {
            i = Cast<to = 7>(x) y = OneHot(i, depth, v) }""",
        ["Cast node 'i'"],
    ),
    "argmax": (
        "(float[N, 3] x) => (float[N] y) { a = ArgMax<axis = 1, keepdims = 0>(x) y = Cast<to = 1>(a) }",
        ["ArgMax node 'a'"],
    ),
    "indices": (
        """(float[N] x) => (float[M] y) <int64[1] k = {2}> { v, i = TopK(x, k) y = Cast<to = 1>(i) }""",
        ["TopK node 'v'"],
    ),
    "quantized, then cast": (
        """(float[N] x, float[N] w) => (float[N] y) <float scale = {0.1}, uint8 zero = {3}> {
            i = Cast<to = 7>(x) f = Cast<to = 1>(i) q = QuantizeLinear(f, scale, zero)
            d = DequantizeLinear(q, scale, zero) y = Mul(d, w) }""",
        ["Cast node 'i'"],
    ),
    "condition": (
        "(float[N] x, float[N] w) => (float[N] y) { c = Greater(x, w) y = Where(c, w, w) }",
        ["Greater node 'c'"],
    ),
}
# Gradients that are zero without a word: the values of x do not matter, or another path has a gradient.
QUIET = {
    "quantized": """(float[N] x, float[N] w) => (float[N] y) <float scale = {0.1}, uint8 zero = {3}> {
        q = QuantizeLinear(x, scale, zero) d = DequantizeLinear(q, scale, zero) y = Mul(d, w) }""",
    "unused": "(float[N] x, float[N] w) => (float[N] y, float[N] z) { y = Exp(w) z = Floor(x) }",
    "shape": """(float[N] x) => (float[N] y) {
        s = Shape(x) y = ConstantOfShape<value = float[1] {2}>(s) }""",
    "size": "(float[N] x, float[N] w) => (float[N] y) { n = Size(x) c = Cast<to = 1>(n) y = Mul(c, w) }",
    "other path": "(float[N] x) => (float[N] y) { f = Floor(x) y = Sub(x, f) }",
    "one branch": f"""(float[N] x, bool c) => (float[N] y) {{
        y = If(c) <then_branch = t () => {BRANCH.format("Floor")},
                   else_branch = e () => {BRANCH.format("Sin")}> }}""",
    "no iterations": f"""(float[N] x, int64 n) => (float[N] y) {{
        y = Loop(n, , x) <body = b {LOOP} t = Floor(s) }}> }}""",
    "exponent 0": "(float[N] x) => (float[N] y) <float zero = {0}> { p = Pow(x, zero) y = Exp(p) }",
    "size in a loop": f"""(float[N] x, float[N] s0, int64 n) => (float[N] y) {{
        y = Loop(n, , s0) <body = b {LOOP} k = Size(x) f = CastLike(k, s) t = Add(s, f) }}> }}""",
    "itself": "(float[N] x) => (float[N] y) { y = Identity(x) }",
}


@pytest.mark.parametrize("name", STOPPED)
def test_every_path_is_stopped(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, stops = STOPPED[name]
    model = parse(f"g {text}")
    expected = f"the gradient of 'x' is zero: every path to 'y' is stopped by {' and '.join(stops)}"
    with pytest.warns(ortgrad.StoppedGradientWarning, match=re.escape(expected)) as found:
        built = ortgrad.build_gradient_model(model, wrt="x", of="y")
    assert [warning.filename for warning in found] == [__file__]
    assert "x_grad" in {value.name for value in built.graph.output}
    with pytest.warns(ortgrad.StoppedGradientWarning, match=re.escape(expected)) as found:
        explain(model, wrt="x", of="y")
    assert [warning.filename for warning in found] == [__file__]
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    assert main(["grad", str(path), "--wrt", "x", "--of", "y", "-o", str(tmp_path / "built.onnx")]) == 0
    assert main(["explain", str(path), "--wrt", "x", "--of", "y"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"ortgrad: warning: {expected}"] * 2


@pytest.mark.parametrize("name", QUIET)
def test_nothing_to_say(name: str) -> None:
    model = parse(f"g {QUIET[name]}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ortgrad.build_gradient_model(model, wrt="x", of="y")


def test_the_gradient_is_zero_all_the_same() -> None:
    model = parse(f"g {STOPPED['several'][0]}")
    with pytest.warns(ortgrad.StoppedGradientWarning):
        built = ortgrad.build_gradient_model(model, wrt="x", of="y")
    x = np.float32([0.5, 1.5])
    found = ortgrad.InferenceSession(built).run(["x_grad"], {"x": x, "y_grad": x})
    np.testing.assert_array_equal(found[0], [0, 0])


def test_it_can_be_made_an_error() -> None:
    with pytest.raises(ortgrad.StoppedGradientWarning):
        ortgrad.build_gradient_model(parse(f"g {STOPPED['several'][0]}"), wrt="x", of="y")


def test_one_warning_for_all() -> None:
    weights = ", ".join(f"float[2] w{i} = {{1, 2}}" for i in range(6))
    nodes = " ".join(f"f{i} = Floor(w{i}) s{i + 1} = Add(s{i}, f{i})" for i in range(6))
    model = parse(f"g (float[2] x) => (float[2] y) <{weights}> {{ s0 = Sin(x) {nodes} y = Exp(s6) }}")
    with pytest.warns(ortgrad.StoppedGradientWarning) as found:
        ortgrad.build_gradient_model(model, wrt=["x", *(f"w{i}" for i in range(6))])
    assert [str(warning.message) for warning in found] == [
        "the gradients of 'w0', 'w1', 'w2' and 3 more are zero: every path to 'y' is stopped by "
        "Floor node 'f0', Floor node 'f1', Floor node 'f2' and 3 more"
    ]


def test_each_by_itself() -> None:
    model = parse("g (float[2] x, float[2] w) => (float[2] y) { p = Pow(w, z) f = Floor(x) y = Add(p, f) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0), "z"))
    with pytest.warns(
        ortgrad.StoppedGradientWarning, match="^the gradient of 'x' is zero: .* Floor node 'f'$"
    ):
        ortgrad.build_gradient_model(model, wrt=["x", "w"])


LABELS = """g (float[N, 3] x) => (int64[N] label) <float[3, 3] w = {1, 0, 0, 0, 1, 0, 0, 0, 1}> {
    logits = MatMul(x, w)
    label = ArgMax<axis = 1, keepdims = 0>(logits)
}"""
THRESHOLD = """g (float[N] x) => (int32[N] label) <float half = {0.5}> {
    p = Sigmoid(x)
    above = Greater(p, half)
    one = Cast<to = 6>(above)
    label = Identity(one)
}"""


@pytest.mark.parametrize(
    ("text", "name"), [(LABELS, "logits"), (THRESHOLD, "p")], ids=["argmax", "threshold"]
)
@pytest.mark.parametrize("declared", [True, False])
def test_integer_outputs_name_what_to_take_instead(text: str, name: str, declared: bool) -> None:
    model = parse(text)
    if not declared:
        model.graph.output[0].ClearField("type")
    with pytest.raises(ortgrad.ModelError, match=f"has element type int.*; differentiate {name!r}"):
        ortgrad.build_gradient_model(model, wrt="x", of="label")
    with pytest.raises(ortgrad.ModelError, match=f"no floating-point output .* such as {name!r}"):
        ortgrad.build_gradient_model(model, wrt="x")
    ortgrad.build_gradient_model(model, wrt="x", of=name)


def test_integer_outputs_that_nothing_differentiable_leads_to() -> None:
    model = parse("g (float[N, 3] x) => (int64[N] label) { label = ArgMax<axis = 1, keepdims = 0>(x) }")
    with pytest.raises(ortgrad.ModelError, match=r"int64, which has no gradient$"):
        ortgrad.build_gradient_model(model, wrt="x", of="label")


def test_integer_outputs_are_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("ortgrad.pipelines.opening.OPENING", (never,))
    monkeypatch.setattr("ortgrad.pipelines.backward_graph.infer_proven_shapes", never)
    with pytest.raises(ortgrad.ModelError, match="differentiate 'logits'"):
        ortgrad.build_gradient_model(parse(LABELS), wrt="x", of="label")


@pytest.mark.parametrize("op", ["MaxPool<kernel_shape = [2]>(x)", "Relu(x)", "Abs(x)"])
def test_second_derivatives_that_are_zero(op: str) -> None:
    """Nobody is surprised by those of functions that are linear in pieces."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> g (float[1, 1, 4] x) => (float[1, 1, K] y) {{ y = {op} }}'
    )
    once = ortgrad.build_gradient_model(model, wrt="x")
    ortgrad.build_gradient_model(once, wrt="x", of="x_grad")
