"""Outputs of nodes in `wrt`: what the node computes from the value inside of it does not count."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser

import ortgrad

HEAD = '<ir_version: 10, opset_import: ["" : 18, "f" : 1]>'
# Every model computes p = sin(x), q = sin(x)^2 in one node, or through containers, and y = p q.
MODELS = {
    "function": """p, q = f.F(x) y = Mul(p, q) }
        <domain: "f", opset_import: ["" : 18]> F (x) => (a, b) { a = Sin(x) b = Mul(a, a)""",
    "nested functions": """p, q = f.G(x) y = Mul(p, q) }
        <domain: "f", opset_import: ["" : 18]> F (x) => (a, b) { a = Sin(x) b = Mul(a, a) }
        <domain: "f", opset_import: ["" : 18, "f" : 1]> G (x) => (c, d) { c, d = f.F(x)""",
    "constant If": """k = Constant<value = bool {1}>() p, q = If(k) <
        then_branch = t () => (float[3] a, float[3] b) { a = Sin(x) b = Mul(a, a) },
        else_branch = e () => (float[3] a, float[3] b) { a = Cos(x) b = Exp(x) }> y = Mul(p, q)""",
    "If": """z = ReduceSum<keepdims = 0>(x) k = Greater(z, n) p, q = If(k) <
        then_branch = t () => (float[3] a, float[3] b) { a = Sin(x) b = Mul(a, a) },
        else_branch = e () => (float[3] a, float[3] b) { a = Cos(x) b = Exp(x) }> y = Mul(p, q)""",
    "sequence": """a = Sin(x) s = SequenceConstruct(a, x) z = Constant<value = int64 {0}>()
        p = SequenceAt(s, z) q = Mul(a, a) y = Mul(p, q)""",
    "optional": "a = Sin(x) o = Optional(a) p = OptionalGetElement(o) q = Mul(a, a) y = Mul(p, q)",
    "equal nodes": "a = Sin(x) p = Sin(x) q = Mul(a, a) y = Mul(p, q)",
    "identity": "a = Sin(x) p = Identity(a) q = Mul(a, a) y = Mul(p, q)",
    "several outputs": """a = Sin(x) l = Constant<value = int64[2] {1, 2}>() b = Mul(a, a)
        j = Concat<axis = 0>(a, b) h = Constant<value = int64[2] {3, 3}>() p, q = Split<axis = 0>(j, h)
        y = Mul(p, q)""",
}


@pytest.mark.parametrize("wrt", [["p"], ["q"], ["p", "q"], ["[p]"], ["x"], ["p", "x"]], ids=",".join)
@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str, wrt: list[str]) -> None:
    model = parser.parse_model(
        f"{HEAD} g (float[3] x) => (float[3] y) <float n = {{-100}}> {{ {MODELS[name]} }}"
    )
    built = ortgrad.build_gradient_model(model, wrt=wrt)
    onnx.checker.check_model(built)
    x = np.array([0.5, -1, 2])
    expected = {"p": np.sin(x) ** 2, "q": np.sin(x), "x": 3 * np.sin(x) ** 2 * np.cos(x)}
    names = [target.strip("[]") for target in wrt]
    feeds = {"x": x.astype(np.float32), "y_grad": np.ones(3, np.float32)}
    results = ortgrad.InferenceSession(built).run([f"{target}_grad" for target in names], feeds)
    for target, result in zip(names, results, strict=True):
        np.testing.assert_allclose(result, expected[target], rtol=1e-5, err_msg=target)
    outputs = ortgrad.InferenceSession(built).run(["y"], feeds)
    np.testing.assert_allclose(outputs[0], np.sin(x) ** 3, rtol=1e-5)
