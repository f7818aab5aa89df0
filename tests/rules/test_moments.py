"""Which nodes a session with compiled kernels replaces by Moments, and that the results are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from support import COMPILES, KERNELS

import ortgrad
from ortgrad.pipelines.prepare import prepare_loaded

HEADER = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>'
MEAN = "m = ReduceMean <keepdims = {keepdims}> (x, axes)"
DEVIATION = """
    s = Mul(c, c)
    v = ReduceMean <keepdims = {keepdims}> (s, {second})
    e = Constant <value_float = 0.1> ()
    w = Add({sum})
    r = Sqrt(w)
    i = Reciprocal(r)
"""


def text(
    *,
    axes: str = "2, 3",
    shape: str = "N,3,4,5",
    keepdims: int = 1,
    c: str = "c = Sub(x, m)",
    second: str = "axes",
    sum_: str = "v, e",
    extra: str = "",
    outputs: str = "float[a,b,c,d] y",
    tail: str = "p = Mul(c, i)",
) -> str:
    body = (MEAN + "\n" + c + DEVIATION).format(keepdims=keepdims, second=second, sum=sum_)
    vector = len(axes.split(","))
    return f"""{HEADER}
    g (float[{shape}] x) => ({outputs})
    <int64[{vector}] axes = {{{axes}}}, int64[1] other = {{3}}, int64[2] behind = {{1, 2}}> {{
        {body}
        {extra}
        {tail}
        y = com.microsoft.ReluGrad(p, p)
    }}"""


REPLACED = {
    "instances": text(),
    "rows": text(axes="-1", shape="7,6,300"),
    "epsilon first": text(sum_="e, v"),
    "channels": text(
        axes="0, 2, 3", keepdims=0, c="u = Unsqueeze(m, behind) c = Sub(x, u)", tail="p = Mul(m, i)"
    ),
    "columns": text(axes="0", shape="N,4", keepdims=0, tail="p = Mul(m, i)"),
    "the difference is an output": text(outputs="float[a,b,c,d] y, float[e,f,g,h] c"),
    "the variance is an output": text(outputs="float[a,b,c,d] y, float[e,f,g,h] v"),
    "without a mean": text(c="c = Sub(x, x)"),
    "other axes of the mean": text(second="other"),
    "not a difference": text(c="c = Relu(x)"),
}
LEFT = {
    "axes that are not next to each other": text(axes="1, 3", shape="2,3,4,5"),
    "a product of two values": text().replace("Mul(c, c)", "Mul(c, x)"),
    "the inverse is an output": text(outputs="float[a,b,c,d] y, float[e,f,g,h] i"),
    "the mean is an output": text(outputs="float[a,b,c,d] y, float[e,f,g,h] m"),
    "a mean along the wrong axes": text(
        axes="0, 2, 3",
        shape="5,5,5,5",
        keepdims=0,
        c="u = Unsqueeze(m, other) c = Sub(x, u)",
        tail="p = Mul(m, i)",
    ).replace("int64[1] other = {3}", "int64[1] other = {1}"),
    "no epsilon": text(sum_="v, v"),
}


def session_nodes(model: onnx.ModelProto, kernels: Any = "auto") -> list[str]:
    return [node.op_type for node in prepare_loaded(model, kernels, bodies=False).graph.node]


def results(model: onnx.ModelProto, kernels: Any) -> list[np.ndarray]:
    dims = model.graph.input[0].type.tensor_type.shape.dim
    shape = [dim.dim_value or 5 for dim in dims]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return ortgrad.InferenceSession(model, kernels=kernels).run(None, {"x": x})


@pytest.mark.parametrize("name", REPLACED)
def test_replaced(name: str) -> None:
    model = onnx.parser.parse_model(REPLACED[name])
    assert ("Moments" in session_nodes(model)) == COMPILES
    assert ("Reciprocal" not in session_nodes(model)) == COMPILES
    assert "Moments" not in session_nodes(model, "onnx")
    for actual, expected in zip(results(model, "auto"), results(model, "onnx"), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    model = onnx.parser.parse_model(LEFT[name])
    used = session_nodes(model)
    # The mean of squares alone may be replaced.
    if name == "a mean along the wrong axes":
        calls = [n for n in prepare_loaded(model, "auto", bodies=False).graph.node if n.op_type == "Moments"]
        assert all(b'"centred":0' in a.s for n in calls for a in n.attribute if a.name == "ortgrad")
        assert "Sub" in used
    else:
        assert "Moments" not in used
    for actual, expected in zip(results(model, "auto"), results(model, "onnx"), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_in_a_branch() -> None:
    model = onnx.parser.parse_model(
        f"""{HEADER}
        g (float[N,6] x, bool b) => (float[N,6] y) <int64[1] axes = {{1}}> {{
            y = If (b) <
                then_branch = t () => (float[N,6] p) {{
                    m = ReduceMean(x, axes)
                    c = Sub(x, m)
                    s = Mul(c, c)
                    v = ReduceMean(s, axes)
                    e = Constant <value_float = 0.1> ()
                    w = Add(v, e)
                    r = Sqrt(w)
                    i = Reciprocal(r)
                    o = Mul(c, i)
                    p = com.microsoft.ReluGrad(o, o)
                }},
                else_branch = f () => (float[N,6] q) {{ q = Identity(x) }}
            >
        }}"""
    )
    prepared = prepare_loaded(model, "auto", bodies=False)
    branch = next(a.g for a in prepared.graph.node[-1].attribute if a.name == "then_branch")
    assert ("Moments" in [node.op_type for node in branch.node]) == COMPILES
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    outputs = [
        ortgrad.InferenceSession(model, kernels=kernels).run(None, {"x": x, "b": np.array(True)})[0]
        for kernels in ("auto", "onnx")
    ]
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-6)


def test_saved_models_have_no_such_node() -> None:
    model = onnx.parser.parse_model(
        f"""{HEADER}
        g (float[N,3,4,5] x, float[3] s, float[3] b) => (float[N,3,4,5] y) {{
            y = InstanceNormalization(x, s, b)
        }}"""
    )
    built = ortgrad.build_gradient_model(model, wrt=["x", "s"])
    for kernels in ("auto", *KERNELS):
        assert "Moments" not in {node.op_type for node in ortgrad.prepare(built, kernels=kernels).graph.node}
    assert session_nodes(built).count("Moments") == COMPILES


def test_an_epsilon_that_can_be_fed() -> None:
    model = onnx.parser.parse_model(
        f"""{HEADER}
        g (float[3,20] x) => (float[3,20] y) <int64[1] axes = {{1}}, float e = {{0.1}}> {{
            m = ReduceMean(x, axes) c = Sub(x, m) s = Mul(c, c) v = ReduceMean(s, axes)
            w = Add(v, e) r = Sqrt(w) i = Reciprocal(r) y = Mul(c, i)
        }}"""
    )
    built = ortgrad.build_gradient_model(model, wrt=["e"])
    x = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    feeds = {"x": x, "y_grad": x, "e": np.array(5, np.float32)}
    y = ortgrad.InferenceSession(built).run(["y"], feeds)[0]
    expected = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 5)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
