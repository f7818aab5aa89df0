"""Nodes that were removed, and the nodes in their subgraphs, are users of no value any more.

onnx-ir removes a node without the nodes in its subgraphs, which go on counting as users of what they capture.
Passes that ask for users would then keep what is not needed, or fail to remove it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper
from support.passes import check_uses

import ortgrad
from ortgrad.pipelines import backward_graph, preparation
from ortgrad.training import onnxblock

CAPTURED = "a = Sin(x) b = Mul(a, x) c = Exp(b)"
HEADER = '<ir_version: 10, opset_import: ["" : 21]> g (float[3] x, int64 count, bool choice) => (float[3] y)'
BODIES = {
    "Loop": """t = Loop(count, choice, x) <body = body (int64 i, bool before, float[3] s)
        => (bool after, float[3] r) { after = Identity(before) d = Mul(c, b) r = Add(s, d) }>""",
    "Scan": """rows = Unsqueeze(x, zero) t = Scan <num_scan_inputs = 1,
        body = body (float[3] row) => (float[3] r) { d = Mul(c, b) r = Add(row, d) }>(rows)""",
    "If": """t = If(choice) <then_branch = yes () => (float[3] r) { r = Mul(c, b) },
        else_branch = no () => (float[3] q) { q = Add(c, b) }>""",
    "Loop in If": """t = If(choice) <then_branch = yes () => (float[3] r) {
        r = Loop(count, choice, x) <body = body (int64 i, bool before, float[3] s) => (bool after, float[3] n)
        { after = Identity(before) d = Mul(c, b) n = Add(s, d) }> },
        else_branch = no () => (float[3] q) { q = Neg(x) }>""",
}
CASES = {
    **{f"unused {name}": f"{body} y = Add(a, x)" for name, body in BODIES.items()},
    **{
        f"If that takes {taken}": f"""k = Constant<value = bool {{{int(taken)}}}>() t = If(k)
        <then_branch = yes () => (float[3] r) {{ r = Mul(c, b) }},
        else_branch = no () => (float[3] q) {{ q = Add(a, x) }}>
        y = Add(t, x)"""
        for taken in (False, True)
    },
}


def checked(model: ir.Model, *passes: Callable[[ir.Model], ir.Model]) -> ir.Model:
    for each in passes:
        model = each(model)
        check_uses(model)
    return model


@pytest.fixture(autouse=True)
def check_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (backward_graph, preparation):
        monkeypatch.setattr(module, "run", checked)


@pytest.mark.parametrize("kernels", ["auto", "onnx", "python"])
@pytest.mark.parametrize("case", CASES)
def test_unused_subgraphs(case: str, kernels: Any) -> None:
    model = onnx.parser.parse_model(f"{HEADER} <int64[1] zero = {{0}}> {{ {CAPTURED} {CASES[case]} }}")
    feeds = {"x": np.float32([0.5, -1, 2]), "count": np.array(2), "choice": np.array(True)}
    plain = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = plain.run(None, feeds)
    (y,) = ortgrad.InferenceSession(model, kernels=kernels).run(None, feeds)
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    backward = ortgrad.build_gradient_model(model, wrt="x")
    kept = {node.op_type for node in backward.graph.node}
    assert not kept & {"Loop", "Scan", "If"}
    dy = np.float32([1, 2, 3])
    y, dx = ortgrad.InferenceSession(backward, kernels=kernels).run(None, {**feeds, "y_grad": dy})
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    numeric = np.zeros(3)
    for i in range(3):
        step = np.zeros(3, np.float32)
        step[i] = 1e-2
        high, low = (plain.run(None, {**feeds, "x": feeds["x"] + s})[0] for s in (step, -step))
        numeric[i] = dy @ (high - low).astype(np.float64) / 2e-2
    np.testing.assert_allclose(dx, numeric, rtol=5e-3, atol=5e-3)


def test_an_optimizer_model_without_its_results() -> None:
    """Whose only output is a flag: onnxruntime-training updates the parameters in place."""
    tensors = [numpy_helper.from_array(np.ones((2, 3), np.float32), "w")]
    with onnxblock.empty_base() as accessor:
        flag = onnxblock.optim.AdamW()((tensors, []))
        model = accessor.model
    w, dw = np.ones((2, 3), np.float32), np.full((2, 3), 0.5, np.float32)
    feeds: dict[str, Any] = {"params": [w], "gradients": [dw]}
    feeds |= {"first_order_moments": [0 * w], "second_order_moments": [0 * w]}
    feeds |= {"learning_rate": np.float32([0.1]), "step": np.int64([1])}
    (updated,) = ortgrad.InferenceSession(model).run([flag], feeds)
    assert updated.all()
