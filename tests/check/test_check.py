"""check_gradients: it finds wrong gradients, names the node, and says what it measured with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from support import GOLDEN, ROOT

import ortgrad
from ortgrad.autodiff.rules import ForwardNode, Gradients, Rule, _rules
from ortgrad.check import comparison
from ortgrad.check.differences import derivative, noise_of
from ortgrad.check.double_precision import in_double
from ortgrad.check.randomness import with_fixed_draws, with_marked_draws
from ortgrad.check.reachable import differentiable
from ortgrad.check.running import Backward

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
    def rule(node: ForwardNode) -> Gradients:
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
    def rule(node: ForwardNode) -> Gradients:
        return (node.op.Mul(node.grad(0), float("inf")),)

    monkeypatch.setitem(_rules, ("", "Identity"), Rule(rule))
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[N] x) => (float[N] y) { y = Identity(x) }'
    )
    (row,) = ortgrad.check_gradients(model).rows
    assert not row.ok and row.error == np.inf and "not finite" in row.note


OVERFLOWS = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[3] x) => (float[3] y) { e = Exp(x) f = Div(e, e) y = Add(f, x) }"""


@pytest.mark.parametrize(("x", "note"), [(100, "float32 results are not finite"), (1000, "neither are the")])
def test_results_that_are_not_finite(x: float, note: str) -> None:
    """exp(x) / exp(x) is NaN in float32 for x = 100, and for x = 1000 in double as well."""
    (row,) = ortgrad.check_gradients(
        onnx.parser.parse_model(OVERFLOWS), {"x": np.float32([0.5, x, 1.0])}
    ).rows
    assert note in row.note and row.ok == (x == 100) and not row.wrong


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
    [(TensorProto.FLOAT16, 1e-2), (TensorProto.FLOAT, 1e-5), (TensorProto.DOUBLE, 1e-6)],
)
def test_the_tolerance_follows_the_element_type(element: int, tolerance: float) -> None:
    node = helper.make_node("Mul", ["x", "x"], ["y"])
    values = [helper.make_tensor_value_info(name, element, ["N", 3]) for name in "xy"]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (row,) = ortgrad.check_gradients(model).rows
    assert row.ok and row.tolerance == tolerance
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


def test_progress_is_reported(model: onnx.ModelProto) -> None:
    calls: list[tuple[int, int, str]] = []
    ortgrad.check_gradients(model, wrt="x", per_node=True, progress=lambda *call: calls.append(call))
    assert calls[0] == (0, 1, "building the gradient model")
    assert calls[1:] == [(1, 4, "x"), (2, 4, "Mul h"), (3, 4, "Mul y"), (4, 4, "Sub z")]


def test_nothing_to_check() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (int64[N] x) => (int64[N] y) { y = Identity(x) }'
    )
    with pytest.raises(ortgrad.ModelError, match=r"no floating-point input.*int64 tensors"):
        ortgrad.check_gradients(model)
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N] x) => (seq(float[N]) s, int64[1] n)
        { s = SequenceConstruct(x, x) n = Shape(x) }"""
    )
    with pytest.raises(ortgrad.ModelError, match=r"no floating-point output.*a sequence and int64 tensors"):
        ortgrad.check_gradients(model)
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N] x, seq(float[N]) s) => (float[N] y)
        { i = Constant<value_int = 0>() z = SequenceAt(s, i) y = Mul(x, z) }"""
    )
    with pytest.raises(ortgrad.ModelError, match="'s' is a sequence, not a tensor: feed it"):
        ortgrad.check_gradients(model, wrt="x")


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
    assert differentiable(model) == ["x"]
    # A Dropout and its gradient read the ratio.
    assert "ratio" not in differentiable(onnx.load(GOLDEN / "training" / "dropout.onnx"))
    assert "scales" not in differentiable(onnx.load(GOLDEN / "training" / "resize.onnx"))
    assert ortgrad.check_gradients(GOLDEN / "training" / "dropout.onnx", directions=1).ok


MODELS = ROOT / "models"
LAYERS = """<ir_version: 10, opset_import: ["" : 21]>
layers (float[N,4,6] x, float[6,6] w, float[6] scale, float[6] bias) => (float[N,4,6] y) {
    h = MatMul(x, w)
    n = LayerNormalization(h, scale, bias)
    t = Transpose<perm = [0, 2, 1]>(n)
    s = MatMul(n, t)
    p = Softmax(s)
    a = MatMul(p, n)
    r = Relu(a)
    y = Add(r, x)
}"""
# Gradients as something that is wrong would give them.
MUTATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "one percent": lambda g: g * g.dtype.type(1.01),
    "sign": lambda g: -g,
    "zero": np.zeros_like,
    "one element": lambda g: np.where(np.abs(g) == np.abs(g).max(), 0, g).astype(g.dtype),
    "one element, one percent": lambda g: np.where(np.abs(g) == np.abs(g).max(), 1.01 * g, g).astype(g.dtype),
    "order": lambda g: np.roll(g, 1),
}


@pytest.mark.parametrize("name", ["cnn.onnx", "gru.onnx", "mlp.onnx"])
def test_the_models_of_the_package(name: str) -> None:
    check = ortgrad.check_gradients(MODELS / name)
    assert all(row.ok for row in check.rows), check
    assert check.fixed == (("Dropout dropout",) if name == "mlp.onnx" else ())


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("name", ["gru.onnx", "mlp.onnx", "layers", "training/top_k.onnx"])
def test_every_wrong_gradient_is_found(name: str, mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both precisions, and in either of them alone."""
    if name == "layers":
        model = onnx.parser.parse_model(LAYERS)
    else:
        model = onnx.load((GOLDEN if "/" in name else MODELS) / name)
    wrt = ["x", "w"] if "/" in name else None
    right, sessions, passes = Backward.run, list[object](), {0}

    def mutated(self: Backward, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self not in sessions:
            sessions.append(self)
        found = right(self, feeds)
        chosen = sessions.index(self) in passes
        return {k: MUTATIONS[mutation](g) if chosen else g for k, g in found.items()}

    monkeypatch.setattr(Backward, "run", mutated)
    for which in ({0}, {1}, {0, 1}) if name == "mlp.onnx" else ({0, 1},):
        passes = which
        sessions.clear()
        result = ortgrad.check_gradients(model, wrt=wrt, directions=1)
        assert result.rows and all(row.wrong for row in result.rows), result
        assert len(sessions) == 2 - (name == "gru.onnx")


@pytest.mark.parametrize(
    "op_type, name",
    [("Gemm", "mlp.onnx"), ("Tanh", "mlp.onnx"), ("Dropout", "mlp.onnx"), ("GRU", "gru.onnx")],
)
def test_rules_that_are_a_little_wrong(op_type: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = _rules["", op_type].function
    assert right is not None

    def gradients(node: ForwardNode) -> list[Any]:
        result = right(node)
        return list(result) if isinstance(result, (list, tuple)) else [result]

    def scaled(node: ForwardNode) -> Gradients:
        return [None if grad is None else node.op.Mul(grad, 1.01) for grad in gradients(node)]

    def first_is_missing(node: ForwardNode) -> Gradients:
        return [None, *gradients(node)[1:]]

    for rule in (scaled, first_is_missing):
        monkeypatch.setitem(_rules, ("", op_type), Rule(rule))
        assert any(row.wrong for row in ortgrad.check_gradients(MODELS / name, directions=1).rows)


def test_noise_is_no_error() -> None:
    """Differences of this model in single precision are off by 3e-2."""
    check = ortgrad.check_gradients(
        GOLDEN / "cnn" / "training_model.onnx", wrt=["x", "w1", "b1"], directions=1
    )
    assert check.forward == "float64 on onnxruntime"
    assert all(row.ok and row.tolerance < 1e-3 for row in check.rows), check


def test_what_rounding_hides_is_not_judged() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[N,3] x) => (float[N,3] y) {
        big = Constant<value_float = 1.0e8>() b = Add(x, big) d = Sub(b, big) y = Mul(d, d)
    }"""
    (row,) = ortgrad.check_gradients(onnx.parser.parse_model(text)).rows
    # Single precision loses x altogether; in double the gradient is right.
    assert row.ok and "in double only: float32 is imprecise here" in row.note


def test_gradients_that_cancel_behind_equal_columns() -> None:
    """The gradient of what a normalization reads adds up to 0, and a matrix of ones multiplies the roundings.

    PyTorch's float32 gradient is off as well; in float64 all agree.
    """
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        g (float[2,3,64] x, float[2,3,64] z) => (float[2,3,64] y) {
            h, , , s = com.microsoft.SkipLayerNormalization(x, z, w, b)
            p = MatMul(h, ones)
            q = MatMul(p, ones)
            y = com.microsoft.SkipLayerNormalization(q, s, w, b)
        }"""
    )
    weights = {"w": np.ones(64), "b": np.ones(64), "ones": np.ones((64, 64))}
    model.graph.initializer.extend(
        numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items()
    )
    random = np.random.default_rng(0)
    feeds = {n: random.standard_normal((2, 3, 64)).astype(np.float32) for n in ("x", "z")}
    seed = random.standard_normal((2, 3, 64)).astype(np.float32)
    expected = {}
    for precision in (torch.float32, torch.float64):
        x, z, w, b, ones, dy = (
            torch.tensor(a, dtype=precision) for a in (*feeds.values(), *weights.values(), seed)
        )
        w.requires_grad_()
        h = torch.nn.functional.layer_norm(x + z, (64,), w, b, 1e-12)
        y = torch.nn.functional.layer_norm(h @ ones @ ones + x + z, (64,), w, b, 1e-12)
        expected[precision] = torch.autograd.grad(y, w, dy)[0].numpy()
    right = expected[torch.float64]
    assert np.abs(expected[torch.float32] - right).max() > 1e-3 * np.abs(right).max()
    double = ortgrad.build_gradient_model(in_double(model), wrt=["w"])
    given = {**feeds, "y_grad": seed}
    found = ortgrad.InferenceSession(double).run(
        ["w_grad"], {n: a.astype(np.float64) for n, a in given.items()}
    )[0]
    np.testing.assert_allclose(found, right, atol=1e-6)
    (row,) = ortgrad.check_gradients(model, feeds, wrt=["w"]).rows
    assert row.ok and "in double only: float32 is imprecise here" in row.note
    # Nothing but onnxruntime has this operator, and only in single precision.
    text = """<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
    g (float[3,3] x) => (float[3,3] y) {
        big = Constant<value_float = 3.0e6>() q = com.microsoft.Inverse(x)
        b = Add(q, big) d = Sub(b, big) y = Mul(d, d)
    }"""
    check_ = ortgrad.check_gradients(onnx.parser.parse_model(text))
    assert check_.forward == "single precision"
    assert not check_.ok and not check_.judged and not any(row.wrong for row in check_.rows)
    assert "not judged:" in str(check_)
    with pytest.raises(ortgrad.WrongGradientError, match="could not be judged"):
        check_.raise_if_wrong()


@pytest.mark.filterwarnings("ignore::ortgrad.StoppedGradientWarning")
@pytest.mark.parametrize(
    "nodes",
    [
        "y = Relu(x)",
        "y = Abs(x)",
        "z = Neg(x) y = Max(x, z)",
        "y = Floor(x)",
        "y = Clip(x, zero, one)",
        "y = Sqrt(x)",
        "y = MaxPool<kernel_shape = [2]>(x)",
        "y = HardSigmoid<alpha = 1.0, beta = 0.0>(x)",
    ],
)
def test_beside_kinks(nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All elements are where the function is not smooth."""
    text = f"""<ir_version: 10, opset_import: ["" : 21]> g (float[1,N,M] x) => (float[P,Q,R] y)
        <float zero = {{0.0}}, float one = {{1.0}}> {{ {nodes} }}"""
    model, feeds = onnx.parser.parse_model(text), {"x": np.zeros((1, 2, 4), np.float32)}
    (row,) = ortgrad.check_gradients(model, feeds, wrt="x").rows
    assert row.ok
    op_type = next(node.op_type for node in model.graph.node if "y" in node.output)
    if op_type in ("Abs", "Max", "MaxPool"):
        return  # the gradient is the one in the middle, as the central differences are
    assert "beside the given point" in row.note
    monkeypatch.setitem(_rules, ("", op_type), Rule(lambda node: (node.op.Neg(node.grad(0)), *[None] * 2)))
    (row,) = ortgrad.check_gradients(model, feeds, wrt="x").rows
    assert row.wrong


def test_many_kinks_near_the_point() -> None:
    """A network of 1500 Relus, wherever it is, has kinks within a hundredth of the weights' size."""
    generator = np.random.default_rng(0)
    weights = [(generator.standard_normal((300, 300)) / 15).astype(np.float32) for _ in range(5)]
    nodes, last = [], "x"
    for i in range(5):
        nodes.append(helper.make_node("MatMul", [last, f"w{i}"], [f"h{i}"]))
        nodes.append(helper.make_node("Relu", [f"h{i}"], [last := f"r{i}"]))
    graph = helper.make_graph(
        nodes,
        "deep",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 300])],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, ["N", 300])],
        [numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    result = ortgrad.check_gradients(model)
    assert all(row.ok and row.tolerance < 1e-4 for row in result.rows), result


# Random models

RANDOM = {
    "RandomNormalLike": "r = RandomNormalLike(x) y = Mul(x, r)",
    "RandomNormalLike with a seed": "r = RandomNormalLike<seed = 3.0>(x) y = Mul(x, r)",
    "RandomUniformLike": "r = RandomUniformLike<low = 1.0, high = 2.0>(x) y = Mul(x, r)",
    "RandomNormal": "r = RandomNormal<shape = [4]>() y = Mul(x, r)",
    "RandomUniform": "r = RandomUniform<shape = [4]>() y = Mul(x, r)",
    "Bernoulli": "p = Sigmoid(x) r = Bernoulli(p) y = Mul(x, r)",
    "Multinomial": "p = Sigmoid(x) i = Multinomial<sample_size = 4>(p) y = GatherElements<axis = 1>(x, i)",
    "Dropout": "z = Mul(x, x) y = Dropout(z, half, yes)",
    "Dropout with a mask": """z = Mul(x, x) d, m = Dropout<seed = 1>(z, half, yes)
        f = Cast<to = 1>(m) y = Mul(d, f)""",
    "Dropout with defaults": "z = Mul(x, x) y = Dropout(z, , yes)",
    "in a function": "y = f.noise(x)",
    "in a branch": """c = Constant<value_int = 1>() b = Cast<to = 9>(c)
        r = If(b)<then_branch = g () => (float[4] t) { t = RandomNormal<shape = [4]>() },
                  else_branch = g () => (float[4] e) { e = RandomUniform<shape = [4]>() }>
        y = Mul(x, r)""",
}


def random_model(nodes: str, opset: int = 21) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : {opset}, "f" : 1]>
        g (float[N,4] x) => (float[N,4] y)
        <float half = {{0.5}}, bool yes = {{1}}, bool no = {{0}}> {{ {nodes} }}
        <domain: "f", opset_import: ["" : {opset}]> noise (a) => (b)
        {{ r = RandomNormalLike(a) b = Mul(a, r) }}"""
    )


@pytest.mark.parametrize("kind", RANDOM)
def test_random_models(kind: str) -> None:
    check_ = ortgrad.check_gradients(random_model(RANDOM[kind]), wrt="x")
    assert all(row.ok for row in check_.rows), check_
    assert check_.fixed
    assert "the model is random" in str(check_)


@pytest.mark.parametrize("opset", [13, 18, 23])
def test_the_gradient_of_dropout_is_checked(opset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("z = Mul(x, x) y = Dropout(z, half, yes)", opset)
    assert ortgrad.check_gradients(model, wrt="x").ok
    monkeypatch.setitem(_rules, ("", "Dropout"), Rule(lambda node: (node.grad(0),)))  # without the mask
    assert not ortgrad.check_gradients(model, wrt="x").ok


@pytest.mark.parametrize("nodes", ["y = Dropout(x)", "y = Dropout(x, half)", "y = Dropout(x, half, no)"])
def test_a_dropout_that_is_switched_off_is_not_random(nodes: str) -> None:
    assert ortgrad.check_gradients(random_model(nodes), wrt="x").fixed == ()
    model = MODELS / "mlp.onnx"
    off = ortgrad.check_gradients(model, {"training_mode": np.array(False)}, wrt="fc1.bias")
    assert off.ok and off.fixed == ()


def test_random_nodes_by_themselves() -> None:
    check_ = ortgrad.check_gradients(MODELS / "mlp.onnx", per_node=True)
    assert [row.name for row in check_.nodes if row.ok] == [
        "Gemm fc1",
        "Tanh tanh",
        "Dropout dropout",
        "Gemm fc2",
        "Softmax softmax",
    ]


@pytest.mark.parametrize("kind", [kind for kind in RANDOM if "branch" not in kind])
def test_fixed_draws_are_spread_as_the_operator_would(kind: str) -> None:
    marked, found = with_marked_draws(random_model(RANDOM[kind]), {})
    assert found
    fixed = with_fixed_draws(marked)
    onnx.checker.check_model(fixed, full_check=True)
    node = next(n for n in marked.graph.node if n.op_type.startswith(("Random", "Bern", "Multi", "Dropout")))
    name = node.output[0]
    fixed.graph.output.append(onnx.ValueInfoProto(name=name))
    rows = 1000
    feeds = {"x": np.random.default_rng(0).uniform(1, 2, (rows, 4)).astype(np.float32)}
    drawn, again = (onnxruntime_run(fixed, feeds, name) for _ in range(2))
    np.testing.assert_array_equal(drawn, again)
    np.testing.assert_array_equal(drawn, ReferenceEvaluator(fixed).run([name], feeds)[0])
    if drawn.shape != (rows, 4):
        return
    if node.op_type == "RandomNormalLike":
        assert abs(drawn.mean()) < 0.1 and abs(drawn.std() - 1) < 0.1
    elif node.op_type == "RandomUniformLike":
        assert abs(drawn.mean() - 1.5) < 0.05 and 1 < drawn.min() < 1.01 and 1.99 < drawn.max() < 2
    elif node.op_type == "Dropout":
        assert abs((drawn == 0).mean() - 0.5) < 0.05
        kept = drawn != 0
        np.testing.assert_allclose(drawn[kept], 2 * feeds["x"][kept] ** 2, rtol=1e-6)
    elif node.op_type == "Multinomial":
        assert set(np.unique(drawn)) == {0, 1, 2, 3}
    # Neighbours have nothing to do with each other.
    flat = drawn.astype(np.float64).ravel()
    if node.op_type != "Dropout":
        assert abs(np.corrcoef(flat[1:], flat[:-1])[0, 1]) < 0.06


def onnxruntime_run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], name: str) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run([name], feeds)[0])


# Differences


def test_derivatives_know_their_error() -> None:
    steps = [1e-2 / 4**k for k in range(10)]
    for function, expected in ((np.sin, 1.0), (np.exp, 1.0), (lambda t: np.cos(3 * t + 1), -3 * np.sin(1))):
        found = derivative(lambda t, f=function: np.array([f(t)]), steps, 1e-16)  # type: ignore[misc]
        assert abs(found.value - expected) <= found.error < 1e-8 and found.jump == 0
    kink = derivative(lambda t: np.array([max(t, 0.0) + t * t]), steps, 1e-16)
    assert abs(kink.jump - 1) < 1e-6
    step = derivative(lambda t: np.array([np.floor(t)]), steps, 1e-16)
    assert step.error > abs(step.value)
    near = derivative(lambda t: np.array([max(t - 1e-5, 0.0) + t]), steps, 1e-16)
    assert abs(near.value - 1) <= near.error < 1e-6 and near.jump == 0
    generator = np.random.default_rng(0)
    for _ in range(50):
        noisy = derivative(lambda t: np.array([np.sin(t) + 1e-7 * generator.standard_normal()]), steps, 1e-16)
        assert abs(noisy.value - 1) <= 2 * noisy.error
    assert derivative(lambda t: np.array([np.nan]), steps, 1e-16).error == np.inf
    stairs = derivative(lambda t: np.array([np.round(t + 0.3, 2)]), steps, 1e-16)
    assert stairs.value == 0 and stairs.error < 1e-6
    assert derivative(lambda t: np.array([np.round(t, 2)]), steps, 1e-16, plateaus=True).error == np.inf


def test_noise_is_measured() -> None:
    generator = np.random.default_rng(0)
    for deviation in (1e-3, 1e-7, 1e-12):
        noisy = [
            noise_of(lambda t, d=deviation: np.array([np.exp(t) + d * generator.standard_normal()]))  # type: ignore[misc]
            for _ in range(20)
        ]
        assert deviation / 3 < np.median(noisy) < 3 * deviation
    assert noise_of(lambda t: np.array([np.exp(3 * t)])) < 1e-14
    # A function in single precision is a staircase, and its steps are noise.
    stairs = noise_of(lambda t: np.array([float(np.float32(1.37 + t))]))
    assert 1e-8 < stairs < 1e-6


@pytest.mark.parametrize("size", [1, 3, 5])
def test_the_reference_normalizes_all_channels(size: int) -> None:
    """onnx's own LRN leaves out channels: little beside the constant here, but all of the slope."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]> g (float[1, 6, 3, 3] x) => (float[1, 6, 3, 3] y) {{
            n = LRN<size = {size}, alpha = 0.01>(x)
            s = Sub(n, x)
            c = Constant<value_float = 50.0>()
            y = Add(s, c)
        }}"""
    )
    result = ortgrad.check_gradients(model)
    assert result.forward == "float64 on onnx.reference"
    result.raise_if_wrong()


def test_a_size_of_minus_one_is_drawn() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[N, 3] x) => (float[M, 3] y) { y = Mul(x, x) }'
    )
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = -1
    result = ortgrad.check_gradients(model)
    assert result.judged
    result.raise_if_wrong()


def test_a_rounding_that_changes_shapes() -> None:
    """The gradient model does not run where the limit of a Range is rounded up."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[3, 3] x) => (float[3, 3] y)
        <float limit = {3.0}, float zero = {0.0}, float one = {1.0}, float[1] w = {1.0e-6}> {
            r = Range(zero, limit, one)
            s = Add(x, r)
            t = Mul(s, w)
            y = Sin(t)
        }"""
    )
    result = ortgrad.check_gradients(model)
    assert not any(row.wrong for row in result.rows) and result.ok, result


def test_slow_models_are_checked_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "PATIENCE", 0.0)
    result = ortgrad.check_gradients(MODELS / "cnn.onnx")
    assert all(row.ok and "together with" in row.note for row in result.rows), result
    # One that is wrong is found among the others.
    right = Backward.run

    def mutated(self: Backward, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {k: 1.01 * g if k == chosen else g for k, g in right(self, feeds).items()}

    chosen = result.rows[-1].name
    monkeypatch.setattr(Backward, "run", mutated)
    found = ortgrad.check_gradients(MODELS / "cnn.onnx")
    assert [row.name for row in found.rows if row.wrong] == [chosen], found


def test_time_runs_out() -> None:
    result = ortgrad.check_gradients(MODELS / "mlp.onnx", per_node=True, seconds=0.0)
    assert not result.judged and all("time ran out" in row.note for row in (*result.rows, *result.nodes))
    assert len(result.nodes) == 5


def test_imprecise_float32_is_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 gradient within 1e-3 of one in double that is right, as onnxruntime's operators are."""
    right = Backward.run

    def imprecise(self: Backward, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = right(self, feeds)
        return {k: g * np.float32(1 + 5e-4) if g.dtype == np.float32 else g for k, g in found.items()}

    monkeypatch.setattr(Backward, "run", imprecise)
    for row in ortgrad.check_gradients(MODELS / "mlp.onnx").rows:
        assert row.ok and "compared with the gradient in double" in row.note
