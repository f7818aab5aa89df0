"""Constants that onnx's shape inference does not see: behind integer arithmetic, and outside of subgraphs."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import ortgrad


def gradient(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    built = ortgrad.build_gradient_model(model, wrt="x", of="y")
    session = ortgrad.InferenceSession(built)
    y = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x, **others(model)})[0]
    seed = np.cos(np.arange(y.size)).reshape(y.shape).astype(np.float32)
    return session.run(["x_grad"], {"x": x, "y_grad": seed, **others(model)})[0]


def others(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {value.name: np.array(True) for value in model.graph.input if value.name != "x"}


X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 4)
# What reads a constant, followed by a node whose rule needs the number of dimensions.
READERS = {
    "axes of a sum": "z = ReduceSum <keepdims = 0> (x, c)",
    "axes of a squared sum": "z = ReduceSumSquare <keepdims = 0> (x, c)",
    "axes of a maximum": "z = ReduceMax <keepdims = 0> (x, c)",
    "axes of an Unsqueeze": "z = Unsqueeze (x, c)",
    "axes of a Squeeze": "u = Unsqueeze (x, c) \n z = Squeeze (u, c)",
    "a shape": "z = Reshape (x, shape)",
    "a shape to expand to": "z = Expand (x, shape)",
    "a part of a shape": """
        s = Shape (x)
        p = Slice (s, zero, c)
        t = Concat <axis = 0> (p, m)
        z = Reshape (x, t)
    """,
    "repeats": "z = Tile (x, three)",
    "pads": "z = Pad (x, six)",
}
CONSTANTS = """int64[1] c = {1}, int64[1] zero = {0}, int64[1] m = {-1}, int64[4] shape = {1, 2, 3, 4},
    int64[3] three = {1, 1, 2}, int64[6] six = {0, 0, 0, 0, 0, 1}"""


@pytest.mark.parametrize("name", READERS)
def test_a_subgraph_reads_constants_outside_of_it(name: str) -> None:
    """The gradient is that of the same nodes outside of a subgraph."""
    start = '<ir_version: 10, opset_import: ["" : 20]>'
    nodes = f"{READERS[name]} \n n = LpNormalization (z) \n y = Mul (n, z)"
    plain = onnx.parser.parse_model(f"{start} g (float[A, 3, 4] x) => (float y) <{CONSTANTS}> {{ {nodes} }}")
    branch = nodes.replace("y =", "out =")
    inside = onnx.parser.parse_model(
        f"""{start} g (float[A, 3, 4] x, bool flag) => (float y) <{CONSTANTS}> {{
            y = If (flag) <then_branch = a () => (float out) {{ {branch} }},
                           else_branch = b () => (float same) {{ {branch.replace("out =", "same =")} }}>
        }}"""
    )
    for model in (plain, inside):
        model.graph.output[0].type.tensor_type.ClearField("shape")
    for node in inside.graph.node:
        for attribute in node.attribute:
            attribute.g.output[0].type.tensor_type.ClearField("shape")
    np.testing.assert_allclose(gradient(inside, X), gradient(plain, X), rtol=1e-6, atol=1e-6)


# Shapes behind arithmetic on constants; `two` and `three` are a dimension and the rank in which it is.
ARITHMETIC = {
    "Mod": "k = Mod (two, three)",
    "Div": "k = Div (five, two)",
    "Where": "e = Equal (two, three) \n k = Where (e, five, two)",
    "Cast": "i = Cast <to = 6> (two) \n k = Cast <to = 7> (i)",
    "Max": "k = Max (two, zero)",
    "Neg": "p = Neg (one) \n q = Add (p, three) \n k = Abs (q)",
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_a_shape_behind_integer_arithmetic(name: str) -> None:
    """As PyTorch writes `unflatten`: what is before an axis, new sizes, what is behind it."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20]> g (float[A, 3, 4] x) => (float y) <
            int64 zero = {{0}}, int64 one = {{1}}, int64 two = {{2}}, int64 three = {{3}}, int64 five = {{5}},
            int64[1] begin = {{0}}, int64[1] row = {{1}}, int64[2] sizes = {{2, -1}}
        > {{
            {ARITHMETIC[name]}
            end = Reshape (k, row)
            s = Shape (x)
            before = Slice (s, begin, end)
            shape = Concat <axis = 0> (before, sizes)
            r = Reshape (x, shape)
            y = LpNormalization (r)
        }}"""
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    norm = np.sqrt((X.reshape(2, 3, 2, 2) ** 2).sum(-1, keepdims=True))
    unit = X.reshape(2, 3, 2, 2) / norm
    dy = np.cos(np.arange(24)).reshape(2, 3, 2, 2)
    expected = (dy - unit * (unit * dy).sum(-1, keepdims=True)) / norm
    np.testing.assert_allclose(gradient(model, X), expected.reshape(X.shape), rtol=1e-4, atol=1e-5)
