"""Files declare shapes that a run contradicts: gradients rely on what follows from inputs and constants."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

import ortgrad

Lie = Callable[[list[int]], list["int | str | None"]]
# What exporters write instead of the shape of a value.
LIES: dict[str, Lie] = {
    "nothing": list,
    "one axis more": lambda shape: [1, *shape],
    "one axis less": lambda shape: [*shape[1:]],
    "other sizes": lambda shape: [size + 1 for size in shape],
    "ones": lambda shape: [1 for _ in shape],
    "one name": lambda shape: ["N" for _ in shape],
}
# The shapes of the values, and how they are computed.
MODELS = {
    "product": (
        """(float[2, 3] x, float[3] w) => (float[2, 3] z) { t = Mul(x, w) u = Add(t, w) z = Mul(u, t) }""",
        {"t": [2, 3], "u": [2, 3], "z": [2, 3]},
    ),
    "matrices": (
        """(float[N, 3] x, float[3, 4] w) => (float[N, 4] z) {
            t = MatMul(x, w)
            u = ReduceMax <keepdims = 1> (t, axes)
            v = Sub(t, u)
            z = Softmax(v)
        }""",
        {"t": [2, 4], "u": [2, 1], "v": [2, 4], "z": [2, 4]},
    ),
    "reshaped": (
        """(float[N, 3] x, float[3] w) => (float[M, 2] z) {
            s = Shape(x)
            t = Mul(x, w)
            u = Transpose(t)
            v = Reshape(u, pairs)
            z = LogSoftmax(v)
        }""",
        {"t": [2, 3], "u": [3, 2], "v": [3, 2], "z": [3, 2]},
    ),
    "if": (
        """(float[2, 3] x, float[3] w, bool c) => (float[2, 3] z) {
            t = Mul(x, w)
            z = If (c) <
                then_branch = a () => (float[2, 3] r) { q = Mul(t, w) r = Tanh(q) },
                else_branch = b () => (float[2, 3] r2) { q2 = Add(t, w) r2 = Softmax(q2) }
            >
        }""",
        {"t": [2, 3], "q": [2, 3], "r": [2, 3], "q2": [2, 3], "r2": [2, 3], "z": [2, 3]},
    ),
    "loop": (
        """(float[2, 3] x, float[3] w, bool c) => (float[2, 3] z) {
            z = Loop (trips, c, x) <body = b (int64 i, bool g, float[2, 3] s) => (bool g2, float[2, 3] s2)
                { g2 = Identity(g) q = Mul(s, w) s2 = Tanh(q) }>
        }""",
        {"s": [2, 3], "q": [2, 3], "s2": [2, 3], "z": [2, 3]},
    ),
    "if, fed shape": (
        """(float[2, 3] x, float[3] w, bool c, int64[K] shape) => (float[3, 2] z) {
            u = Mul(x, w)
            t = Reshape(u, shape)
            z = If (c) <
                then_branch = a () => (float[3, 2] r) { q = Mul(t, t) r = Tanh(q) },
                else_branch = b () => (float[3, 2] r2) { r2 = Identity(t) }
            >
        }""",
        {"u": [2, 3], "t": [3, 2], "q": [3, 2], "r": [3, 2], "r2": [3, 2], "z": [3, 2]},
    ),
    "loop, fed shape": (
        """(float[2, 3] x, float[3] w, bool c, int64[K] shape) => (float[3, 2] z, float[2, 3, 2] all) {
            u = Mul(x, w)
            t = Reshape(u, shape)
            z, all = Loop (trips, c, t) <body = b (int64 i, bool g, float[3, 2] s)
                => (bool g2, float[3, 2] s2, float[3, 2] p)
                { g2 = Identity(g) q = Mul(s, t) s2 = Tanh(q) p = Sin(q) }>
        }""",
        {"u": [2, 3], "t": [3, 2], "s": [3, 2], "q": [3, 2], "s2": [3, 2], "p": [3, 2], "z": [3, 2]},
    ),
}
FEEDS = {
    "x": np.float32([[0.1, -0.2, 0.3], [0.4, 0.5, -0.6]]),
    "c": np.array(True),
    "shape": np.array([3, 2]),
}


def parse(name: str) -> onnx.ModelProto:
    text = MODELS[name][0]
    head, arrow, body = text.partition(" {")
    constants = "<int64 trips = {2}, int64[1] axes = {1}, int64[2] pairs = {-1, 2}>"
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> g {head} {constants}{arrow}{body}'
    )


def declare(graph: onnx.GraphProto, shapes: dict[str, list[int]], lie: Lie, inputs: bool = False) -> None:
    """Write what is not true over outputs, values in between, and inputs of subgraphs."""
    found = {value.name: value for value in (*graph.output, *graph.value_info)}
    found |= {value.name: value for value in graph.input if inputs}
    for node in graph.node:
        for name in node.output:
            if name in shapes and name not in found:
                found[name] = graph.value_info.add(name=name)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                declare(attribute.g, shapes, lie, True)
    for name, value in found.items():
        if name in shapes:
            value.CopyFrom(helper.make_tensor_value_info(name, TensorProto.FLOAT, lie(shapes[name])))


def quiet() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return options


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("name", MODELS)
def test_what_a_file_declares_changes_nothing(name: str, lie: str) -> None:
    truth = parse(name)
    weight = (3, 4) if name == "matrices" else (3,)
    feeds = dict(FEEDS, w=np.random.default_rng(0).standard_normal(weight).astype(np.float32))
    names = [value.name for value in truth.graph.input]
    if lie == "nothing":
        ortgrad.check_gradients(truth, {k: feeds[k] for k in names}).raise_if_wrong()
    model = parse(name)
    declare(model.graph, MODELS[name][1], LIES[lie])
    seed = np.random.default_rng(1).standard_normal(MODELS[name][1]["z"]).astype(np.float32)
    results = []
    for source in (truth, model):
        built = ortgrad.build_gradient_model(source, wrt=["x", "w"])
        fed = {k: v for k, v in {**feeds, "z_grad": seed}.items() if k in {i.name for i in built.graph.input}}
        for kernels in ("auto", "onnx"):
            session = ortgrad.InferenceSession(built, quiet(), kernels=kernels)
            results.append(session.run(None, fed)[1:])
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_seed_is_not_declared_as_the_file_declares_its_output() -> None:
    """The rank of an exporter's example, and a size that is another at run time."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N, 25, 3] x, int64[M] shape) => (float[24, 5] y) { t = Mul(x, x) y = Reshape(t, shape) }"""
    )
    built = ortgrad.build_gradient_model(model, wrt="x")
    (seed,) = [value for value in built.graph.input if value.name == "y_grad"]
    assert not seed.type.tensor_type.HasField("shape")
    x = np.ones((1, 25, 3), np.float32)
    feeds = {"x": x, "shape": np.array([1, 3, 25]), "y_grad": np.full((1, 3, 25), 2, np.float32)}
    plain = onnxruntime.InferenceSession(built.SerializeToString(), quiet())
    for session in (ortgrad.InferenceSession(built, quiet()), plain):
        np.testing.assert_array_equal(session.run(["x_grad"], feeds)[0], 4 * x)


UNKNOWN_RANK = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[2, 6] x, int64[M] shape, float[K] k) => (float[Q, P, 4] y)
    { t = Reshape(x, shape) n = ReduceMean(t) s = Sub(t, n) y = Resize<mode = "nearest">(s, , k) }"""


def test_a_declared_rank_counts_where_nothing_else_is_known() -> None:
    """Behind a Reshape to a computed shape only the file knows the rank that Resize's rule needs."""
    model = onnx.parser.parse_model(UNKNOWN_RANK)
    model.graph.value_info.append(helper.make_tensor_value_info("t", TensorProto.FLOAT, ["P", 6]))
    built = ortgrad.build_gradient_model(model, wrt="x")
    generator = np.random.default_rng(0)
    x, seed = (generator.standard_normal(s).astype(np.float32) for s in ((2, 6), (2, 12)))
    feeds = {"x": x, "k": np.float32([1, 2]), "shape": np.array([2, 6]), "y_grad": seed}
    _, dx = ortgrad.InferenceSession(built, quiet()).run(None, feeds)
    flow = seed.reshape(2, 6, 2).sum(-1)
    np.testing.assert_allclose(dx, flow - flow.mean(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("declared", [[6], ["A", "B", "C"]])
def test_a_declared_rank_that_is_wrong_is_an_error(declared: list[str | int]) -> None:
    model = onnx.parser.parse_model(UNKNOWN_RANK)
    with pytest.raises(ortgrad.UnsupportedGradientError, match="number of dimensions of its input 's'"):
        ortgrad.build_gradient_model(model, wrt="x")
    model.graph.value_info.append(helper.make_tensor_value_info("t", TensorProto.FLOAT, declared))
    built = ortgrad.build_gradient_model(model, wrt="x")
    x, seed = (np.ones(shape, np.float32) for shape in ((2, 6), (2, 12)))
    feeds = {"x": x, "k": np.float32([1, 2]), "shape": np.array([2, 6]), "y_grad": seed}
    for kernels in ("auto", "python", "onnx"):
        session = ortgrad.InferenceSession(built, quiet(), kernels=kernels)
        with pytest.raises(Exception, match=f"t/declared_with_{len(declared)}_dimensions"):
            session.run(None, feeds)


def test_a_wrong_rank_that_no_rule_needs_is_none() -> None:
    model = onnx.parser.parse_model(UNKNOWN_RANK.replace('Resize<mode = "nearest">(s, , k)', "Mul(s, s)"))
    model.graph.value_info.append(helper.make_tensor_value_info("t", TensorProto.FLOAT, [2, 3, 4]))
    built = ortgrad.build_gradient_model(model, wrt="x")
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    feeds = {"x": x, "k": np.ones(2, np.float32), "shape": np.array([12]), "y_grad": x.reshape(12)}
    flow = 2 * (x - x.mean()) * x
    grad = ortgrad.InferenceSession(built, quiet()).run(["x_grad"], feeds)[0]
    np.testing.assert_allclose(grad, flow - flow.mean(), rtol=1e-5)


def test_a_declared_scalar_is_seeded_with_one_if_it_is_one() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[1] x, int64[M] shape) => (float y) { t = Mul(x, x) y = Reshape(t, shape) }"""
    )
    built = ortgrad.build_gradient_model(model, wrt="x")
    assert [value.name for value in built.graph.input] == ["x", "shape"]
    session = ortgrad.InferenceSession(built, quiet())
    x = np.float32([3])
    np.testing.assert_array_equal(session.run(["x_grad"], {"x": x, "shape": np.zeros(0, np.int64)})[0], [6])
    for shape in ([1], [1, 1]):
        with pytest.raises(
            ortgrad.KernelError, match="requires a scalar, because the model declares y as one"
        ):
            session.run(["x_grad"], {"x": x, "shape": np.array(shape)})


@pytest.mark.parametrize("kernels", ["auto", "python", "onnx"])
def test_a_declared_scalar_that_has_a_batch(kernels: str) -> None:
    """onnxruntime must not compute with the scalar before the check fails."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N, 1] x, int64[M] shape) => (float y) <float two = {2}>
        { t = Reshape(x, shape) s = Sigmoid(t) m = Mul(s, two) y = Add(m, two) }"""
    )
    session = ortgrad.InferenceSession(ortgrad.build_gradient_model(model, wrt="x"), quiet(), kernels=kernels)
    grad = session.run(["x_grad"], {"x": np.zeros((1, 1), np.float32), "shape": np.zeros(0, np.int64)})[0]
    np.testing.assert_allclose(grad, [[0.5]])
    with pytest.raises(ortgrad.KernelError, match="requires a scalar, because the model declares y as one"):
        session.run(["x_grad"], {"x": np.zeros((8, 1), np.float32), "shape": np.array([8])})


def test_defaults_that_can_be_fed_prove_nothing() -> None:
    """An initializer that is an input too may be another at run time."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[2, 6] x, int64[2] shape) => (float[3, 4] y) <int64[2] shape = {3, 4}>
        { t = Reshape(x, shape) s = ReduceMax <keepdims = 1> (t) y = Sub(t, s) }"""
    )
    built = ortgrad.build_gradient_model(model, wrt="x")
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    seed = np.arange(12, dtype=np.float32).reshape(6, 2)
    feeds = {"x": x, "shape": np.array([6, 2]), "y_grad": seed}
    expected = seed.copy().reshape(2, 6)
    expected[1, 5] -= seed.sum()
    np.testing.assert_allclose(ortgrad.InferenceSession(built, quiet()).run(None, feeds)[1], expected)


@pytest.mark.parametrize("way", ["auto", "python", "onnx", "plain", "not optimised"])
@pytest.mark.parametrize("scanned", ["float[3] part", "float part"])
@pytest.mark.parametrize(("before", "after"), [("float[2,3]", "float"), ("float", "float[2,3]")])
def test_states_of_a_scan(before: str, after: str, scanned: str, way: str) -> None:
    """Where nothing proves a rank, that of a Scan's states is the one by which onnxruntime allocates them."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 18]> g (float[6] x, int64[K] shape, float[4,3] s)
        => (float[4,3] y) {{
            start = Reshape(x, shape)
            last, y = Scan<num_scan_inputs = 1, body = b ({before} state, {scanned})
                => ({after} next, float[3] out) {{
                    m = Mul(state, part) next = Tanh(m)
                    out = ReduceSum<keepdims = 0>(next, axis) }}>(start, s)
        }}"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "axis"))
    for value in (*model.graph.node[1].attribute[1].g.input, *model.graph.node[1].attribute[1].g.output):
        if not value.type.tensor_type.shape.dim:
            value.type.tensor_type.ClearField("shape")
    built = ortgrad.build_gradient_model(model, wrt=["x", "s"], of="y")
    if way in ("plain", "not optimised"):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if way == "not optimised":
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(built.SerializeToString(), options)
    else:
        session = ortgrad.InferenceSession(built, kernels=way)
    rng = np.random.default_rng(0)
    x, s, dy = (rng.normal(size=shape).astype(np.float32) for shape in ((6,), (4, 3), (4, 3)))
    results = session.run(["x_grad", "s_grad"], {"x": x, "shape": np.array([2, 3]), "s": s, "y_grad": dy})
    leaves = [torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in (x, s)]
    state, total = leaves[0].reshape(2, 3), torch.tensor(0.0, dtype=torch.float64)
    for part, weight in zip(leaves[1], torch.tensor(dy), strict=True):
        state = torch.tanh(state * part)
        total = total + (state.sum(0) * weight).sum()
    total.backward()
    for result, leaf in zip(results, leaves, strict=True):
        np.testing.assert_allclose(result, leaf.grad.numpy(), rtol=1e-4, atol=1e-6)
