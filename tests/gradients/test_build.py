"""The builder: names, seeds, zeros, intermediates, errors, no waste, higher orders, shapes, opsets."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from support import ROOT

import ortgrad
from ortgrad.passes import attach

MODELS = ROOT / "models"


def parse(text: str, opset: int = 21) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {text}')


def run(model: onnx.ModelProto, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    session = ortgrad.InferenceSession(model)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def names(values: object) -> list[str]:
    return [value.name for value in values]  # type: ignore[attr-defined]


SQUARE = """agraph (float[N,3] x, float[3] b) => (float[N,3] y, float[N,3] z) <float[3] w = {1.0, 2.0, 3.0}> {
    h = Mul(x, w)
    y = Mul(h, h)
    z = Add(y, b)
}"""
x, b, w = np.float32([[1, 2, 3], [4, 5, 6]]), np.float32([1, 1, 1]), np.float32([1, 2, 3])


def test_outputs_and_inputs_are_named_after_what_they_belong_to() -> None:
    built = ortgrad.build_gradient_model(parse(SQUARE), wrt=["x", "h"], of="y")
    assert names(built.graph.input) == ["x", "b", "y_grad"]
    assert names(built.graph.output) == ["y", "z", "x_grad", "h_grad"]
    onnx.checker.check_model(built, full_check=True)


def test_every_initializer_is_the_default_and_can_be_fed() -> None:
    built = ortgrad.build_gradient_model(parse(SQUARE))
    assert names(built.graph.output) == ["y", "z", "w_grad"]
    seed = np.ones_like(x)
    once = run(built, x=x, b=b, y_grad=seed)
    np.testing.assert_allclose(once["w_grad"], (2 * x * x * w).sum(0))
    other = run(built, x=x, b=b, y_grad=seed, w=2 * w)
    np.testing.assert_allclose(other["w_grad"], (4 * x * x * w).sum(0))


def test_several_outputs_have_a_seed_each() -> None:
    built = ortgrad.build_gradient_model(parse(SQUARE), wrt=["x", "b"], of=["y", "z"])
    assert names(built.graph.input) == ["x", "b", "y_grad", "z_grad"]
    found = run(built, x=x, b=b, y_grad=np.ones_like(x), z_grad=2 * np.ones_like(x))
    np.testing.assert_allclose(found["x_grad"], 3 * 2 * x * w * w)
    np.testing.assert_allclose(found["b_grad"], [4, 4, 4])


def test_intermediate_values_get_the_whole_gradient() -> None:
    model = parse(
        """agraph (float[N] x) => (float[N] y) { h = Mul(x, x) p = Mul(h, x) q = Mul(h, h) y = Add(p, q) }"""
    )
    found = run(
        ortgrad.build_gradient_model(model, wrt=["h", "x"]), x=np.float32([2, 3]), y_grad=np.float32([1, 1])
    )
    np.testing.assert_allclose(found["h_grad"], [2 + 8, 3 + 18])
    np.testing.assert_allclose(found["x_grad"], [3 * 4 + 4 * 8, 3 * 9 + 4 * 27])


def test_what_does_not_matter_has_zeros() -> None:
    found = run(ortgrad.build_gradient_model(parse(SQUARE), wrt="b", of="y"), x=x, b=b, y_grad=x)
    np.testing.assert_array_equal(found["b_grad"], np.zeros(3, np.float32))


def test_the_output_itself_and_names_given_twice() -> None:
    built = ortgrad.build_gradient_model(parse(SQUARE), wrt=["y", "y"], of="y")
    assert names(built.graph.output) == ["y", "z", "y_grad_2"]
    found = run(built, x=x, b=b, y_grad=x)
    np.testing.assert_array_equal(found["y_grad_2"], x)


def test_taken_names_are_not_taken_again() -> None:
    model = parse("agraph (float[N] x, float[N] x_grad) => (float[N] y_grad) { y_grad = Mul(x, x_grad) }")
    built = ortgrad.build_gradient_model(model, wrt=["x", "x_grad"])
    assert names(built.graph.output)[0] == "y_grad"
    assert len(set(names(built.graph.output) + names(built.graph.input))) == 6
    onnx.checker.check_model(built, full_check=True)


def test_shared_gradients_are_separate_outputs() -> None:
    model = parse("agraph (float[N] a, float[N] b) => (float[N] y) { y = Add(a, b) }")
    found = run(
        ortgrad.build_gradient_model(model, wrt=["a", "b"]),
        a=np.float32([1]),
        b=np.float32([2]),
        y_grad=np.float32([3]),
    )
    assert found["a_grad"] == found["b_grad"] == 3


def test_a_single_scalar_is_seeded_with_one() -> None:
    model = parse("agraph (float[N] x) => (float y) { s = Mul(x, x) y = ReduceSum <keepdims = 0> (s) }")
    built = ortgrad.build_gradient_model(model, wrt="x")
    assert names(built.graph.input) == ["x"]
    np.testing.assert_allclose(run(built, x=np.float32([1, 2]))["x_grad"], [2, 4])


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"wrt": "xx"}, KeyError, "wrt='xx' is not a value of the model; did you mean 'x'"),
        ({"wrt": "x", "of": "hh"}, KeyError, "of='hh' is not a value of the model; did you mean 'h'"),
        ({"wrt": "x", "of": "[z]*"}, KeyError, "is not a value of the model"),
        ({"wrt": "yy*"}, KeyError, "matches no floating-point value of the model; did you mean 'y'"),
        ({"wrt": "[ij]"}, KeyError, "matches no floating-point value"),
        ({"wrt": "i"}, ValueError, "wrt='i' has element type int64"),
        ({"wrt": "x", "of": "j"}, ValueError, "of='j' has element type int64"),
        ({}, ValueError, "no parameters .* name what you want in wrt"),
    ],
)
def test_wrong_names(arguments: dict[str, str], error: type[Exception], text: str) -> None:
    model = parse(
        """agraph (float[N] x, int64[N] i) => (float[N] y, int64[N] j)
        { h = Mul(x, x) y = Mul(h, x) j = Add(i, i) }"""
    )
    with pytest.raises(ortgrad.ModelError, match=text) as caught:
        ortgrad.build_gradient_model(model, **arguments)
    assert isinstance(caught.value, error)


def test_all_that_is_not_supported_is_listed_at_once() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21, "custom" : 1]>
        agraph (float[N] x, float[N] z) => (float[N] y) {
            [first] a = custom.One(x)
            [second] b = custom.Two(a)
            [unrelated] c = custom.Three(z)
            y = Add(b, c)
        }"""
    )
    with pytest.raises(ortgrad.UnsupportedGradientError) as caught:
        ortgrad.build_gradient_model(model, wrt="x")
    text = str(caught.value)
    assert "2 node(s)" in text and "'first'" in text and "'second'" in text and "unrelated" not in text
    assert isinstance(caught.value, NotImplementedError)


def test_the_callers_model_is_not_changed() -> None:
    model = parse(SQUARE)
    before = model.SerializeToString(deterministic=True)
    ortgrad.build_gradient_model(model, wrt="x")
    assert model.SerializeToString(deterministic=True) == before


def test_building_is_deterministic() -> None:
    texts = {
        ortgrad.build_gradient_model(parse(SQUARE), wrt=["x", "w"]).SerializeToString(deterministic=True)
        for _ in range(3)
    }
    assert len(texts) == 1


@pytest.mark.parametrize("name", ["cnn.onnx", "gru.onnx", "mlp.onnx"])
def test_no_node_is_dead_or_there_twice(name: str) -> None:
    built = ortgrad.build_gradient_model(MODELS / name)
    onnx.checker.check_model(built)
    read = {value for node in built.graph.node for value in node.input} | set(names(built.graph.output))
    for node in built.graph.node:
        assert read & set(node.output), f"nobody reads {node.name}"
    deterministic = [node for node in built.graph.node if node.op_type != "Dropout"]
    seen = Counter(
        (
            node.op_type,
            tuple(node.input),
            tuple(
                a.SerializeToString(deterministic=True)
                for a in sorted(node.attribute, key=lambda a: a.name)
                if a.name != "ortgrad"
            ),
        )
        for node in deterministic
    )
    assert max(seen.values()) == 1
    every = [node.name for node in built.graph.node if node.name]
    assert len(every) == len(set(every))


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("name, feed", [("cnn.onnx", "image"), ("mlp.onnx", "features")])
def test_one_model_serves_every_batch(name: str, feed: str, batch: int) -> None:
    model = onnx.load(MODELS / name)
    built = ortgrad.build_gradient_model(model)
    info = next(value for value in model.graph.input if value.name == feed)
    shape = [batch, *(dim.dim_value for dim in info.type.tensor_type.shape.dim[1:])]
    feeds = {feed: np.random.default_rng(batch).standard_normal(shape).astype(np.float32)}
    feeds |= {"training_mode": np.array(False)} if name == "mlp.onnx" else {}
    wrt = [tensor.name for tensor in model.graph.initializer if tensor.data_type == 1 and tensor.dims]
    ortgrad.check_gradients(model, feeds, wrt=wrt, directions=1).raise_if_wrong()
    assert names(built.graph.output)[1:] == [f"{name}_grad" for name in wrt]


@pytest.mark.parametrize("opset", range(13, onnx.defs.onnx_opset_version() + 1))
def test_opsets(opset: int) -> None:
    model = parse(
        """agraph (float[N,3] x, float[3,2] w) => (float[N,2] y) {
            m = MatMul(x, w)
            t = Tanh(m)
            y = Softmax(t)
        }""",
        opset,
    )
    built = ortgrad.build_gradient_model(model, wrt=["x", "w"])
    version = next(o.version for o in built.opset_import if o.domain == "")
    # onnxruntime may be older than onnx: the version is then the newest that it takes.
    assert version == max(opset, 18) if taken(opset) else version < opset
    assert taken(version)
    onnx.checker.check_model(built)
    ortgrad.check_gradients(model).raise_if_wrong()


def taken(opset: int) -> bool:
    """Whether onnxruntime itself loads a model of this opset."""
    model = parse("agraph (float x) => (float y) { y = Abs(x) }", opset)
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except onnxruntime.capi.onnxruntime_pybind11_state.Fail:
        return False
    return True


@pytest.mark.parametrize("order", [2, 3])
def test_higher_orders(order: int) -> None:
    model = parse("agraph (double x) => (double y) { a = Mul(x, x) b = Mul(a, x) y = Mul(b, a) }")
    of = "y"
    for _ in range(order):
        model = ortgrad.build_gradient_model(model, wrt="x", of=of)
        of = model.graph.output[-1].name
    point = np.array(2.0)
    expected = {2: 5 * 4 * 2.0**3, 3: 5 * 4 * 3 * 2.0**2}[order]
    assert run(model, x=point)[of] == pytest.approx(expected)
    onnx.checker.check_model(model, full_check=True)


def test_second_order_opens_gradient_operators_on_the_path_only() -> None:
    model = parse(
        "agraph (float[N] x, float[N] z) => (float[N] y) { a = Tanh(x) b = Sigmoid(z) y = Add(a, b) }"
    )
    once = ortgrad.build_gradient_model(model, wrt=["x", "z"])
    assert Counter(node.op_type for node in once.graph.node)["SigmoidGrad"] == 1
    twice = ortgrad.build_gradient_model(once, wrt="x", of="x_grad")
    kinds = Counter(node.op_type for node in twice.graph.node)
    assert kinds["SigmoidGrad"] == 1 and kinds["TanhGrad"] <= 1
    ortgrad.check_gradients(once, wrt="x", of="x_grad").raise_if_wrong()


def test_a_built_model_runs_on_plain_onnxruntime() -> None:
    model = parse("agraph (float[N] x) => (float[N] y) { a = Tanh(x) y = Mul(a, a) }")
    built = ortgrad.build_gradient_model(model, wrt="x")
    session = onnxruntime.InferenceSession(built.SerializeToString(), providers=["CPUExecutionProvider"])
    point = np.float32([0.5, -1])
    _, grad = session.run(None, {"x": point, "y_grad": np.ones(2, np.float32)})
    np.testing.assert_allclose(grad, 2 * np.tanh(point) * (1 - np.tanh(point) ** 2), rtol=1e-5)


def test_the_bodies_of_equal_nodes_are_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[str] = []

    def counted(call: Any, *arguments: Any) -> Any:
        recorded.append(call.operator.name)
        return make_function(call, *arguments)

    make_function = attach.make_function
    monkeypatch.setattr(attach, "make_function", counted)
    nodes = " ".join(f"v{i + 1} = {'Relu' if i % 2 else 'Tanh'}(v{i})" for i in range(40))
    built = ortgrad.build_gradient_model(
        parse(f"g (float[N, 3] v0) => (float[N, 3] v40) {{ {nodes} }}"), wrt="v0"
    )
    assert sorted(recorded) == ["ReluGrad", "TanhGrad"]
    assert len(built.functions) == 2


def test_dimensions_without_a_name() -> None:
    """Values of unknown but equal lengths need no sums at run time, and no names are left behind."""
    model = parse(
        """g (float[?, 3] x) => (float[?, 3] y) <float[3] w = {1.0, 2.0, 3.0}> {
            a = Mul(x, w) b = Sin(a) c = Mul(b, x) d = Add(c, a) y = Sub(d, b) }"""
    )
    built = ortgrad.build_gradient_model(model, wrt="x")
    counts = Counter(node.op_type for node in built.graph.node)
    assert counts["ReduceSum"] == 0
    dims = [d for v in (*built.graph.input, *built.graph.output) for d in v.type.tensor_type.shape.dim]
    assert not any(d.dim_param for d in dims)
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    found = run(built, x=x, y_grad=np.ones((4, 3), np.float32))["x_grad"]
    w = np.float32([1, 2, 3])
    np.testing.assert_allclose(
        found, np.cos(x * w) * w * x + np.sin(x * w) + w - np.cos(x * w) * w, rtol=1e-4
    )
