"""check_gradients: it finds wrong gradients, names the node, and says what it measured with."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import ortgrad
from ortgrad.check import _differentiable
from ortgrad.double import in_double
from ortgrad.gradient import Node, Rule, Slots, _rules

MODEL = """<ir_version: 10, opset_import: ["" : 21]>
agraph (float[N,3] x, int64 k) => (float[N,3] y, int64 n, float[N,3] z)
<float[3] w = {1.5, -2.0, 0.5}> {
    h = Mul(x, w)
    y = Mul(h, h)
    z = Sub(h, y)
    n = Identity(k)
}"""


@pytest.fixture
def model() -> onnx.ModelProto:
    return onnx.parser.parse_model(MODEL)


@pytest.fixture
def wrong_rule(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def rule(node: Node) -> Slots:
        return node.grad(0), node.grad(0)  # the second one has the wrong sign

    monkeypatch.setitem(_rules, ("", "Sub"), Rule(rule, broadcasts=True))
    yield


def test_right_gradients(model: onnx.ModelProto) -> None:
    check = ortgrad.check_gradients(model)
    assert check.ok
    assert [row.name for row in check.rows] == ["w", "x"] or [row.name for row in check.rows] == ["x", "w"]
    assert all(row.error < 1e-5 for row in check.rows)
    assert check.forward == "float64 on onnxruntime"
    check.raise_if_wrong()
    assert "ok" in str(check) and "WRONG" not in str(check)


@pytest.mark.usefixtures("wrong_rule")
def test_wrong_gradients(model: onnx.ModelProto) -> None:
    check = ortgrad.check_gradients(model, per_node=True)
    assert not check.ok
    assert not any(row.ok for row in check.rows)
    assert [row.name for row in check.nodes if not row.ok] == ["Sub z"]
    assert "Sub z" in str(check) and "WRONG" in str(check)
    with pytest.raises(ortgrad.WrongGradientError, match="Sub z"):
        check.raise_if_wrong()
    assert issubclass(ortgrad.WrongGradientError, AssertionError)


@pytest.mark.usefixtures("wrong_rule")
def test_only_what_is_asked_for_is_checked(model: onnx.ModelProto) -> None:
    assert ortgrad.check_gradients(model, of="y", wrt="x", per_node=True).ok
    assert not ortgrad.check_gradients(model, of=["y", "z"], wrt="w").ok


def test_a_gradient_that_is_not_finite_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(node: Node) -> Slots:
        return (node.op.Mul(node.grad(0), float("inf")),)

    monkeypatch.setitem(_rules, ("", "Identity"), Rule(rule))
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[N] x) => (float[N] y) { y = Identity(x) }'
    )
    (row,) = ortgrad.check_gradients(model).rows
    assert not row.ok and row.error == np.inf


def test_a_missing_part_of_a_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_rules, ("", "Add"), Rule(lambda node: (node.grad(0), None), broadcasts=True))
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N] x) => (float[N] y) { h = Mul(x, x) y = Add(x, h) }"""
    )
    assert not ortgrad.check_gradients(model).ok


@pytest.mark.parametrize("kernels", ["auto", "python", "onnx"])
def test_intermediate_values_and_gradient_operators(kernels: str) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,4] x) => (float[N,4] y) { h = Sigmoid(x) t = Tanh(h) y = Mul(t, x) }"""
    )
    check = ortgrad.check_gradients(model, wrt=["x", "h"], kernels=kernels, per_node=True)
    check.raise_if_wrong()
    assert [row.name for row in check.nodes] == ["Sigmoid h", "Tanh t", "Mul y"]
    built = ortgrad.build_gradient_model(model, wrt="x")
    ortgrad.check_gradients(built, wrt="x", of="x_grad", kernels=kernels).raise_if_wrong()


def test_scalars_seed_themselves() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float x) => (float y) { y = Mul(x, x) }'
    )
    ortgrad.check_gradients(model).raise_if_wrong()


@pytest.mark.parametrize(
    "element, tolerance",
    [(TensorProto.FLOAT16, 3e-2), (TensorProto.FLOAT, 1e-3), (TensorProto.DOUBLE, 1e-6)],
)
def test_the_tolerance_follows_the_element_type(element: int, tolerance: float) -> None:
    node = helper.make_node("Mul", ["x", "x"], ["y"])
    values = [helper.make_tensor_value_info(name, element, ["N", 3]) for name in "xy"]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (row,) = ortgrad.check_gradients(model).rows
    assert row.ok
    assert (
        row.tolerance
        == {TensorProto.FLOAT16: 3e-2, TensorProto.FLOAT: 1e-3, TensorProto.DOUBLE: 1e-6}[element]
    )
    assert ortgrad.check_gradients(model, tolerance=0.5).rows[0].tolerance == 0.5


def test_feeds_may_be_partial_and_unknown_ones_are_refused(model: onnx.ModelProto) -> None:
    ortgrad.check_gradients(model, {"x": np.ones((5, 3), np.float32)}).raise_if_wrong()
    with pytest.raises(ortgrad.ModelError, match="no input 'q' to feed"):
        ortgrad.check_gradients(model, {"q": np.ones(3)})


def test_random_feeds_stay_where_the_model_is_finite() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,M] x) => (float[N,M] y) { l = Log(x) y = Mul(l, x) }"""
    )
    ortgrad.check_gradients(model).raise_if_wrong()


def test_a_model_that_cannot_be_fed_at_random() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N,3] x, int64[2] s) => (float[P,Q] y)
        { h = Mul(x, x) y = Reshape(h, s) }"""
    )
    with pytest.raises(ortgrad.ModelError, match="give feeds"):
        ortgrad.check_gradients(model, {"s": np.array([7, 7])})


def test_a_random_forward_pass_is_refused() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N] x) => (float[N] y)
        { r = RandomNormalLike(x) y = Mul(x, r) }"""
    )
    with pytest.raises(ortgrad.ModelError, match="random"):
        ortgrad.check_gradients(model)


def test_progress_is_reported(model: onnx.ModelProto) -> None:
    calls: list[tuple[int, int, str]] = []
    ortgrad.check_gradients(model, wrt="x", per_node=True, progress=lambda *call: calls.append(call))
    assert calls == [(1, 4, "x"), (2, 4, "Mul h"), (3, 4, "Mul y"), (4, 4, "Sub z")]


def test_nothing_to_check() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (int64[N] x) => (int64[N] y) { y = Identity(x) }'
    )
    with pytest.raises(ortgrad.ModelError, match="no floating-point input"):
        ortgrad.check_gradients(model)


def test_double_has_casts_where_an_operator_takes_no_double() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[1,1,N] x, float[3] scales) => (float[1,1,M] y) {
            two = Constant <value_float = 2.0> ()
            s = Mul(scales, two)
            y0 = Resize <mode = "linear"> (x, , s)
            f = Cast <to = 1> (y0)
            y = Mul(f, two)
        }"""
    )
    double = in_double(model)
    onnx.checker.check_model(double, full_check=True)
    assert double.graph.output[0].type.tensor_type.elem_type == TensorProto.DOUBLE
    x, scales = np.arange(3.0).reshape(1, 1, 3), np.array([0.5, 0.5, 1.0])
    (expected,) = ortgrad.InferenceSession(model).run(
        None, {"x": x.astype(np.float32), "scales": scales.astype(np.float32)}
    )
    (actual,) = ReferenceEvaluator(double).run(None, {"x": x, "scales": scales})
    assert actual.dtype == np.float64
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_the_default_leaves_out_what_has_no_gradient() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[1,1,4] x) => (float[1,1,M] y) <float[3] scales = {1.0, 1.0, 2.0}>
        { y = Resize <mode = "linear"> (x, , scales) }"""
    )
    assert _differentiable(model) == ["x"]
