"""Gradients of matrices that the body of a Loop multiplies with: one product after it, not a sum per step."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import parser

import ortgrad

HEADER = '<ir_version: 10, opset_import: ["" : 18]> main '
CARRY = "t = Tanh(p) yes = Identity(c)"
BODIES = {
    "plain": "p = MatMul(s, w)",
    "turned": "q = Transpose<perm = [1, 0]>(w) p = MatMul(s, q)",
    "twice": "a = MatMul(s, w) b = Tanh(a) p = MatMul(b, w)",
    "both ways": "a = MatMul(s, w) q = Transpose<perm = [1, 0]>(w) b = MatMul(a, q) p = Add(b, s)",
    "Gemm": "p = Gemm<alpha = 0.5, transB = 1>(s, w)",
    "also elsewhere": "a = MatMul(s, w) m = ReduceMean<keepdims = 0>(w) p = Add(a, m)",
}


def make_model(body: str, rows: str, size: int = 3) -> onnx.ModelProto:
    inputs = f"float[{rows}, {size}] x, float[{size}, {size}] w, int64 n, bool go"
    state = f"float[{rows}, {size}]"
    step = f"step (int64 i, bool c, {state} s) => (bool yes, {state} t) {{ {BODIES[body]} {CARRY} }}"
    return parser.parse_model(f"{HEADER} ({inputs}) => ({state} y) {{ y = Loop<body = {step}>(n, go, x) }}")


def loops(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    return [node for node in graph.node if node.op_type == "Loop"]


def in_torch(body: str, x: torch.Tensor, w: torch.Tensor, steps: int) -> torch.Tensor:
    for _ in range(steps):
        p = {
            "plain": lambda s: s @ w,
            "turned": lambda s: s @ w.T,
            "twice": lambda s: torch.tanh(s @ w) @ w,
            "both ways": lambda s: s @ w @ w.T + s,
            "Gemm": lambda s: 0.5 * s @ w.T,
            "also elsewhere": lambda s: s @ w + w.mean(),
        }[body](x)
        x = torch.tanh(p)
    return x


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("rows", ["N", "?", "2"])
def test_gradients_are_those_of_torch(body: str, rows: str) -> None:
    model = make_model(body, rows)
    built = ortgrad.build_gradient_model(model, wrt=["x", "w"])
    session = ortgrad.InferenceSession(built)
    random = np.random.default_rng(1)
    for count, steps in ((2, 0), (2, 1), (2, 4)) + (((1, 3), (5, 2)) if rows != "2" else ()):
        x, dy = random.standard_normal((2, count, 3), np.float32)
        w = random.standard_normal((3, 3), np.float32)
        feeds = {"x": x, "w": w, "n": np.array(steps), "go": np.array(True), "y_grad": dy}
        found = session.run(["x_grad", "w_grad"], feeds)
        tensors = [torch.from_numpy(array).double().requires_grad_() for array in (x, w)]
        y = in_torch(body, *tensors, steps)
        expected = torch.autograd.grad(y, tensors, torch.from_numpy(dy).double(), allow_unused=True)
        for array, tensor in zip(found, expected, strict=True):
            wanted = np.zeros_like(array) if tensor is None else tensor.numpy()
            np.testing.assert_allclose(array, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("body", ["plain", "turned", "twice", "both ways", "Gemm"])
def test_no_matrix_is_carried(body: str) -> None:
    built = ortgrad.build_gradient_model(make_model(body, "N", 16), wrt=["x", "w"])
    backward = loops(built.graph)[-1]
    carried = [
        tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in backward.attribute[0].g.input
    ]
    assert (16, 16) not in carried


def test_rows_that_may_differ_are_summed() -> None:
    """A state that grows cannot be stacked."""
    body = "p = MatMul(s, w) q = Tanh(p) t = Concat<axis = 0>(q, x) yes = Identity(c)"
    text = f"""(float[N, 3] x, float[3, 3] w, int64 n, bool go) => (float[M, 3] y) {{
        y = Loop<body = step (int64 i, bool c, float[A, 3] s) => (bool yes, float[B, 3] t) {{
            {body} }}>(n, go, x) }}"""
    model = parser.parse_model(HEADER + text)
    random = np.random.default_rng(2)
    feeds = {
        "x": random.standard_normal((2, 3), np.float32),
        "w": random.standard_normal((3, 3), np.float32),
        "n": np.array(3),
        "go": np.array(True),
    }
    result = ortgrad.check_gradients(model, feeds, wrt=["x", "w"])
    assert result.ok, str(result)


def test_more_rows_than_the_matrix_has_are_summed() -> None:
    """Stacks would be larger than the matrix."""
    built = ortgrad.build_gradient_model(make_model("plain", "20"), wrt=["w"])
    backward = loops(built.graph)[-1]
    assert any("w_grad_sum" in value.name for value in backward.attribute[0].g.input)
