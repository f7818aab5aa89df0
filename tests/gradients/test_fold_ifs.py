"""Ifs with a constant condition: the branch that is taken stands in their place."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser
from support import KERNELS

import ortgrad

HEAD = '<ir_version: 10, opset_import: ["" : 18]>'
CONDITIONS = {
    "constant": ("c = Constant<value = bool {%d}>()", "", ""),
    "initializer": ("", "<bool c = {%d}>", ""),
    "vector": ("c = Constant<value = bool[1] {%d}>()", "", ""),
    "fed": ("", "", ", bool c"),
}
BRANCHES = {
    "nodes": "t = Mul(x, w) a = Sin(t) b = Mul(a, t)",
    "captured": "a = Identity(x) b = Mul(x, w)",
    "weight of its own": "v = Constant<value = float[3] {1, -2, 3}>() a = Mul(x, v) b = Mul(a, w)",
    "nested": """k = Constant<value = bool {1}>() a = If(k) <
        then_branch = inner () => (float[3] p) { p = Mul(x, x) },
        else_branch = other () => (float[3] p) { p = Mul(w, w) }> b = Mul(a, w)""",
}


def model(condition: str, branch: str, taken: bool) -> onnx.ModelProto:
    node, initializer, given = CONDITIONS[condition]
    then, else_ = (BRANCHES[branch], "a = Cos(x) b = Exp(w)")[:: 1 if taken else -1]
    return parser.parse_model(
        f"""{HEAD} g (float[3] x, float[3] w{given}) => (float[3] y)
        {initializer % taken if initializer else ""} {{
        {node % taken if node else ""}
        p, q = If(c) <then_branch = then () => (float[3] a, float[3] b) {{ {then} }},
                      else_branch = else () => (float[3] a, float[3] b) {{ {else_} }}>
        y = Add(p, q) }}"""
    )


def expected(branch: str, x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By hand: the gradients of the sum of a and b."""
    if branch == "nodes":
        t = x * w
        dt = np.cos(t) + np.sin(t) + t * np.cos(t)
        return dt * w, dt * x
    if branch == "captured":
        return 1 + w, x
    if branch == "weight of its own":
        v = np.array([1, -2, 3])
        return v * (1 + w), x * v
    return 2 * x * (1 + w), x * x


@pytest.mark.parametrize("kernels", [*KERNELS, "plain"])
@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_gradients(condition: str, branch: str, taken: bool, kernels: str) -> None:
    built = ortgrad.build_gradient_model(model(condition, branch, taken), wrt=["x", "w"])
    left = [node.op_type for node in built.graph.node]
    assert ("If" in left) == (condition == "fed")
    x, w = np.array([0.5, -1, 2], np.float32), np.array([1.5, 0.3, -0.7], np.float32)
    feeds = {"x": x, "w": w, "y_grad": np.ones(3, np.float32)}
    if condition == "fed":
        feeds["c"] = np.array(taken)
    if kernels == "plain":
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(built.SerializeToString(), options)
    else:
        session = ortgrad.InferenceSession(built, kernels=kernels)
    results = session.run(["x_grad", "w_grad"], feeds)
    for result, value in zip(results, expected(branch, x.astype(float), w.astype(float)), strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("taken", [True, False])
def test_inside_of_a_loop(taken: bool) -> None:
    """onnxruntime 1.31 folds such an If as well, and may not find its result again."""
    loop = parser.parse_model(
        f"""{HEAD} g (float[3] x, int64 n) => (float[3] y) <bool go = {{1}}> {{
        y = Loop(n, go, x) <body = b (int64 i, bool more, float[3] s) => (bool next, float[3] t) {{
            next = Identity(more)
            c = Constant<value = bool {{{int(taken)}}}>()
            u = If(c) <then_branch = then () => (float[3] a) {{ a = Mul(s, s) }},
                       else_branch = else () => (float[3] a) {{ a = Sin(s) }}>
            t = Mul(u, x) }}> }}"""
    )
    built = ortgrad.build_gradient_model(loop, wrt=["x"])
    x = np.array([0.5, -1, 1.2], np.float32)
    (result,) = ortgrad.InferenceSession(built).run(
        ["x_grad"], {"x": x, "n": np.array(2), "y_grad": np.ones(3, np.float32)}
    )
    d = x.astype(float)
    # (x^2 x)^2 x = x^7, or sin(sin(x) x) x
    inner = np.sin(d) * d
    sine = np.sin(inner) + d * np.cos(inner) * (np.cos(d) * d + np.sin(d))
    np.testing.assert_allclose(result, 7 * d**6 if taken else sine, rtol=1e-5)


@pytest.mark.parametrize("output", ["p", "q"])
def test_an_output_of_the_if_is_not_the_value_inside(output: str) -> None:
    """Inside, q is computed from p; between the outputs of the If there is no such path."""
    given = parser.parse_model(
        f"""{HEAD} g (float[3] x) => (float[3] y) {{ c = Constant<value = bool {{1}}>()
        p, q = If(c) <then_branch = then () => (float[3] a, float[3] b) {{ a = Sin(x) b = Mul(a, a) }},
                      else_branch = else () => (float[3] a, float[3] b) {{ a = Cos(x) b = Exp(x) }}>
        y = Mul(p, q) }}"""
    )
    built = ortgrad.build_gradient_model(given, wrt=output)
    x = np.array([0.5, -1, 2], np.float32)
    feeds = {"x": x, "y_grad": np.ones(3, np.float32)}
    (result,) = ortgrad.InferenceSession(built).run([f"{output}_grad"], feeds)
    # y = p q, p = sin(x), q = sin(x)^2
    np.testing.assert_allclose(result, np.sin(x) ** 2 if output == "p" else np.sin(x), rtol=1e-5)
