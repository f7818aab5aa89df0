"""Nodes whose inputs declare no shape: the gradients are those with shapes, or an error names the node."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from support.rule_cases import CASES, Case, normal
from support.sessions import forward, make_session, run, without_ranks

import ortgrad

GATHERS = [
    Case("Gather", [normal(3, 4, 5), np.array(indices)], {"axis": axis}, constants=constants)
    for axis in range(-3, 3)
    for indices in ([[0, 2], [-1, 2]], [1, 1, 0], 1)
    for constants in ([], [1])
]


@pytest.mark.parametrize("case", [*CASES, *GATHERS], ids=lambda case: case.name)
def test_each_rule(case: Case) -> None:
    model, feeds = case.make()
    open_model = without_ranks(model)
    results = forward(open_model, feeds)
    assert results is not None
    generator = np.random.default_rng(0)
    seeds = {
        # A scalar that is known to be one is seeded with 1.
        name: np.asarray(generator.standard_normal(value.shape) if value.ndim else 1.0, value.dtype)
        for name, value in results.items()
        if value.dtype == np.float32
    }
    try:
        built = ortgrad.build_gradient_model(open_model, wrt=case.wrt, of=list(seeds))
    except ortgrad.UnsupportedGradientError as error:
        # Or a node of the definition that was put in its place.
        assert "node 'node'" in str(error) or "node 'node/" in str(error), error
        assert ("kernel_shape" in str(error)) <= case.op_type.startswith("Conv"), error
        assert case.op_type != "Gather", error
        return
    expected = ortgrad.build_gradient_model(model, wrt=case.wrt, of=list(seeds))
    right = run(make_session(expected, "onnx", "all"), feeds, seeds, len(case.wrt))
    for way in ("onnx", "python", "plain"):
        found = run(make_session(built, way, "all"), feeds, seeds, len(case.wrt))
        for name, actual, wanted in zip(case.wrt, found, right, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5, err_msg=f"{name}, {way}")


SCAN = """<ir_version: 10, opset_import: ["" : 18]>
g (double x, double[2] s) => (double y) {
    y, z = Scan<num_scan_inputs = 1, body = b (double[2] h, double part) => (double[2] next, double[2] out) {
        m = ReduceMean<keepdims = 0>(part)
        a = Add(h, m)
        next = Tanh(a)
        out = Sin(a)
    }>(s, x)
}"""


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 2, 2)], ids=str)
@pytest.mark.parametrize("way", ["onnx", "python", "plain"])
def test_what_a_scan_slices(shape: tuple[int, ...], way: str) -> None:
    model = without_ranks(onnx.parser.parse_model(SCAN))
    body = next(a.g for a in model.graph.node[0].attribute if a.name == "body")
    body.input[1].type.tensor_type.ClearField("shape")
    built = ortgrad.build_gradient_model(model, wrt="x", of="y")
    generator = np.random.default_rng(0)
    x, s, seed = (generator.standard_normal(n) for n in (shape, 2, 2))
    (actual,) = run(make_session(built, way, "all"), {"x": x, "s": s}, {"y": seed}, 1)
    tensor, state = torch.tensor(x, requires_grad=True), torch.tensor(s)
    for part in tensor:
        state = torch.tanh(state + part.mean())
    state.backward(torch.tensor(seed))
    np.testing.assert_allclose(actual, tensor.grad, rtol=1e-9)
