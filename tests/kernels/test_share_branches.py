"""The gradient of an If reads what the forward If has computed, against formulas in NumPy and differences."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, parser
from support import KERNELS

import ortgrad
from ortgrad.graph.protos import all_nodes
from ortgrad.pipelines.prepare import Kernels, prepare_loaded

HEAD = '<ir_version: 10, opset_import: ["" : 21]>'
# Both branches compute with the weights; the second has equal constants, and an If inside.
MODEL = f"""{HEAD} g (bool c, bool d, float[N,3] x) => (float[N,3] y)
    <float[3,3] w = {{1,2,3,4,-5,6,7,8,9}}, float[3,3] v = {{0.5,1,0,-1,2,1,1,1,0.25}}>
{{
    y = If (c) <
        then_branch = a () => (float[N,3] p) {{ t = MatMul(x, w) u = Tanh(t) r = MatMul(u, w) p = Sin(r) }},
        else_branch = b () => (float[N,3] q) {{
            one = Constant<value_float=1.0>() two = Constant<value_float=1.0>()
            s = MatMul(x, v) k = Add(s, one) l = Add(s, two) m = Mul(k, l)
            n = If (d) <
                then_branch = e () => (float[N,3] h) {{ h = Exp(s) }},
                else_branch = f () => (float[N,3] i) {{ i = Cos(m) }}
            >
            q = Mul(n, m)
        }}
    >
}}"""


def expected(c: bool, d: bool, x: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    if c:
        return np.sin(np.tanh(x @ weights["w"]) @ weights["w"])
    s = x @ weights["v"]
    m = (s + 1) ** 2
    return (np.exp(s) if d else np.cos(m)) * m


def built(after: str = "") -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The model with gradients in double, and its weights; `after` is what follows the If."""
    model = parser.parse_model(MODEL)
    weights = {t.name: onnx.numpy_helper.to_array(t).astype(np.float64) / 8 for t in model.graph.initializer}
    del model.graph.initializer[:]
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in weights.items())
    for value in (*model.graph.input[2:], *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    for node in all_nodes(model.graph.node):
        for attribute in node.attribute:
            for value in attribute.g.output:
                value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
            if attribute.name == "value_float":
                tensor = onnx.numpy_helper.from_array(np.array(attribute.f, np.float64))
                attribute.CopyFrom(helper.make_attribute("value", tensor))
    if after:
        model.graph.node.append(helper.make_node(after, ["y"], ["z"]))
        model.graph.output.add().CopyFrom(model.graph.output[0])
        model.graph.output[1].name = "z"
    of = "z" if after else "y"
    return ortgrad.build_gradient_model(model, wrt=["x", "w", "v"], of=of), weights


def branches(model: onnx.ModelProto, number: int, kernels: Kernels = "auto") -> list[list[str]]:
    """The operators in the branches of an If of the main graph, in a session."""
    nodes = [n for n in prepare_loaded(model, kernels, bodies=False).graph.node if n.op_type == "If"]
    graphs = {a.name: a.g for a in nodes[number].attribute}
    return [[n.op_type for n in all_nodes(graphs[name].node)] for name in ("then_branch", "else_branch")]


def test_the_gradient_does_not_repeat_the_forward_nodes() -> None:
    model, _ = built()
    before = [n for n in model.graph.node if n.op_type == "If"][1]
    assert "Tanh" in [n.op_type for n in all_nodes(before.attribute[0].g.node)]
    then, other = branches(model, 1)
    assert "Tanh" not in then
    # What it computes are products with gradients: one for x, two for w; and one each for x and v.
    assert len([op for op in then if op in ("MatMul", "Gemm")]) == 4
    assert len([op for op in other if op in ("MatMul", "Gemm")]) == 2


@pytest.mark.parametrize("kernels", ["auto", "onnx", "python"])
@pytest.mark.parametrize("after", ["", "Sigmoid"])
@pytest.mark.parametrize("d", [False, True])
@pytest.mark.parametrize("c", [False, True])
def test_gradients(c: bool, d: bool, after: str, kernels: Kernels) -> None:
    model, weights = built(after)
    random = np.random.default_rng(0)
    values = {"x": random.standard_normal((4, 3)), **weights}
    seed = random.standard_normal((4, 3))
    of = "z" if after else "y"

    def total(values: dict[str, np.ndarray]) -> float:
        y = expected(c, d, values["x"], values)
        return float(np.sum(seed * (1 / (1 + np.exp(-y)) if after else y)))

    session = ortgrad.InferenceSession(model, kernels=kernels)
    feeds = {"c": np.array(c), "d": np.array(d), **values, f"{of}_grad": seed}
    names = [output.name for output in session.get_outputs()]
    for _ in range(2):
        results = dict(zip(names, session.run(None, feeds), strict=True))
    np.testing.assert_allclose(results["y"], expected(c, d, values["x"], values), rtol=1e-12)
    step = 1e-6
    for name, value in values.items():
        wanted = np.zeros_like(value)
        for place in np.ndindex(value.shape):
            moved = [value.copy(), value.copy()]
            moved[0][place] += step
            moved[1][place] -= step
            wanted[place] = (total({**values, name: moved[0]}) - total({**values, name: moved[1]})) / (
                2 * step
            )
        np.testing.assert_allclose(results[f"{name}_grad"], wanted, rtol=1e-6, atol=1e-7)


def test_random_nodes_are_not_shared() -> None:
    model = onnx.parser.parse_model(
        f"""{HEAD} g (bool c, float[3] x) => (float[3] y, float[3] z) {{
        y = If (c) <
            then_branch = a () => (float[3] p) {{ r = RandomNormalLike(x) s = Exp(x) p = Mul(r, s) }},
            else_branch = b () => (float[3] q) {{ q = Neg(x) }}
        >
        z = If (c) <
            then_branch = d () => (float[3] t) {{ u = RandomNormalLike(x) v = Exp(x) t = Mul(u, v) }},
            else_branch = e () => (float[3] w) {{ w = Neg(x) }}
        >
        k = com.microsoft.ReluGrad(x, x)
    }}"""
    )
    model.opset_import.add(domain="com.microsoft", version=1)
    then, other = branches(model, 1)
    assert "RandomNormalLike" in then and "Exp" not in then
    # A branch must compute its outputs.
    assert other == ["Identity", "Constant"] or other == ["Identity"]
    session = ortgrad.InferenceSession(model)
    x = np.float32([1, 2, 3])
    for result in session.run(None, {"c": np.array(False), "x": x}):
        np.testing.assert_array_equal(result, -x)
    for result in session.run(None, {"c": np.array(True), "x": x}):
        assert np.isfinite(result).all()


# Nodes of which the gradient needs more results than the branch itself, and the shapes of their weights.
EXTENDED = {
    "MaxPool": ("p = MaxPool<kernel_shape = [2]>(x)", {}),
    "LSTM": ("z = LSTM<hidden_size = 2>(x, w, r) p = Squeeze(z, one)", {"w": (1, 8, 2), "r": (1, 8, 2)}),
    "GRU": ("z, p = GRU<hidden_size = 2>(x, w, r)", {"w": (1, 6, 2), "r": (1, 6, 2)}),
}


@pytest.mark.parametrize("operator", EXTENDED)
def test_what_the_gradient_needs_is_computed_in_the_first_branch(operator: str) -> None:
    nodes, weights = EXTENDED[operator]
    inputs = "".join(f", float[{', '.join(map(str, shape))}] {name}" for name, shape in weights.items())
    model = parser.parse_model(f"""{HEAD} g (bool c, float[4,3,2] x{inputs}) => (float[a,b,d] y)
        <int64[1] one = {{1}}>
    {{
        y = If (c) <
            then_branch = a () => (float[a,b,d] p) {{ {nodes} }},
            else_branch = b () => (float[a,b,d] q) {{ q = Sin(x) }}
        >
    }}""")
    wrt = ["x", *weights]
    gradients = ortgrad.build_gradient_model(model, wrt=wrt)
    for kernels in ("auto", *KERNELS):
        then, backward = (branches(gradients, number, kernels)[0] for number in (0, 1))
        if "Scan" in then:
            # The bodies of the recurrence and of its gradient; only the first one computes gates.
            assert then.count("Scan") == backward.count("Scan") == 1
            assert "Sigmoid" in then and "Sigmoid" not in backward
        else:
            assert sum(name.startswith(operator) for name in then) == 1
            assert not any(name.startswith(operator) and "Grad" not in name for name in backward)
    random = np.random.default_rng(4)
    feeds = {name: random.standard_normal(shape, np.float32) for name, shape in weights.items()}
    feeds["x"] = random.standard_normal((4, 3, 2), np.float32)
    for condition in (True, False):
        checked = ortgrad.check_gradients(model, {**feeds, "c": np.array(condition)}, wrt=wrt)
        assert checked.ok, str(checked)
