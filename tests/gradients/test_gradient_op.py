"""ONNX's own Gradient operator, expanded into a graph that stock onnxruntime runs."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.backend.test.case.model import collect_testcases

import ortgrad

HEADER = '<ir_version: 10, opset_import: ["" : 21, "ai.onnx.preview.training" : 1]>'
TRAINING = "ai.onnx.preview.training.Gradient"


def run(model: onnx.ModelProto, **feeds: np.ndarray) -> list[np.ndarray]:
    """On plain onnxruntime, made ready by ortgrad.prepare."""
    ready = ortgrad.prepare(model, kernels="onnx")
    assert {node.domain for node in ready.graph.node} <= {""}
    assert {opset.domain for opset in ready.opset_import} == {"", "com.microsoft"}
    onnx.checker.check_model(ready)
    session = onnxruntime.InferenceSession(ready.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{HEADER} {text.replace('Gradient', TRAINING)}")


@pytest.mark.parametrize("name", ["test_gradient_of_add", "test_gradient_of_add_and_mul"])
@pytest.mark.parametrize("kernels", ["auto", "python", "onnx"])
def test_onnx_backend_tests(name: str, kernels: str) -> None:
    (case,) = [case for case in collect_testcases() if case.name == name]
    session = ortgrad.InferenceSession(case.model, kernels=kernels)
    names = [value.name for value in session.get_inputs()]
    for inputs, outputs in case.data_sets:
        for actual, expected in zip(
            session.run(None, dict(zip(names, inputs, strict=True))), outputs, strict=True
        ):
            np.testing.assert_array_equal(actual, expected)


def test_the_gradient_is_taken_at_the_values_that_are_fed() -> None:
    model = parse(
        """agraph (float[N] x, float[N] w, float[N] other) => (float[N] y, float[N] dx, float[N] dw) {
            h = Mul(x, w)
            y = Mul(h, x)
            dx, dw = Gradient <xs = ["x", "w"], y = "y"> (other, w)
        }"""
    )
    x, w, other = np.float32([1, 2]), np.float32([3, 4]), np.float32([5, 6])
    y, dx, dw = run(model, x=x, w=w, other=other)
    np.testing.assert_array_equal(y, x * x * w)
    np.testing.assert_array_equal(dx, 2 * other * w)
    np.testing.assert_array_equal(dw, other * other)


def test_intermediate_tensors_cut_the_graph() -> None:
    model = parse(
        """agraph (float[N] x, float[N] z) => (float[N] dh, float[N] dz) {
            h = Mul(x, x)
            p = Mul(h, z)
            y = Mul(p, h)
            dh, dz = Gradient <xs = ["h", "z"], y = "y"> (h, z)
        }"""
    )
    x, z = np.float32([1, 2]), np.float32([3, 4])
    dh, dz = run(model, x=x, z=z)
    np.testing.assert_array_equal(dh, 2 * x * x * z)
    np.testing.assert_array_equal(dz, x**4)


def test_constant_inputs_and_missing_outputs() -> None:
    model = parse(
        """agraph (float[N] x, float[N] w, float[N] c) => (float[N] dw, float[N] dc) {
            p = Mul(x, w)
            y = Mul(p, w)
            "", dw, dc = Gradient <xs = ["x", "w", "c"], zs: strings = [], y = "y"> (x, w, c)
        }"""
    )
    x, w, c = np.float32([1, 2]), np.float32([3, 4]), np.float32([5, 6])
    dw, dc = run(model, x=x, w=w, c=c)
    np.testing.assert_array_equal(dw, 2 * x * w)
    np.testing.assert_array_equal(dc, np.zeros(2, np.float32))


def test_gradient_of_a_gradient() -> None:
    model = parse(
        """agraph (float[N] x, float[N] w) => (float[N] dw, float[N] dwdx, float[N] dwdw) {
            h = Mul(x, w)
            p = Mul(h, h)
            y = Mul(p, w)
            dx, dw = Gradient <xs = ["x", "w"], y = "y"> (x, w)
            dwdx, dwdw = Gradient <xs = ["x", "w"], y = "dw"> (x, w)
        }"""
    )
    x, w = np.float32([1, 2]), np.float32([3, 4])
    dw, dwdx, dwdw = run(model, x=x, w=w)
    np.testing.assert_allclose(dw, 3 * x**2 * w**2, rtol=1e-6)
    np.testing.assert_allclose(dwdx, 6 * x * w**2, rtol=1e-6)
    np.testing.assert_allclose(dwdw, 6 * x**2 * w, rtol=1e-6)


def test_a_model_with_the_operator_can_be_differentiated() -> None:
    model = parse(
        """agraph (double[N] x, double[N] w) => (double[N] z) {
            h = Mul(x, w)
            y = Mul(h, x)
            dx = Gradient <xs = ["x"], zs = ["w"], y = "y"> (x, w)
            z = Mul(dx, dx)
        }"""
    )
    ortgrad.check_gradients(model).raise_if_wrong()


def test_values_inside_a_branch_follow_what_is_fed() -> None:
    model = parse(
        """agraph (bool c, float[N] x, float[N] other) => (float[N] dx) {
            h = Mul(x, x)
            y = If (c) <
                then_branch = t () => (float[N] a) { a = Mul(h, x) },
                else_branch = e () => (float[N] b) { b = Identity(h) }
            >
            dx = Gradient <xs = ["x"], y = "y"> (other)
        }"""
    )
    x, other = np.float32([1, 2]), np.float32([5, 6])
    for flag, expected in ((True, 3 * other**2), (False, 2 * other)):
        (dx,) = run(model, c=np.array(flag), x=x, other=other)
        np.testing.assert_array_equal(dx, expected)


@pytest.mark.parametrize(
    "attributes, inputs, text",
    [
        ('xs = ["nothing"], y = "y"', "x", "there is no tensor 'nothing' in the graph"),
        ('xs = ["x"], y = "nothing"', "x", "there is no tensor 'nothing' in the graph"),
        ('xs = ["x"], y = "y"', "x, x", "it has 2 inputs and 1 outputs"),
        ('xs = ["x"]', "x", "has no attribute .y."),
        ('xs = ["x"], y = "later"', "x", "depends on a Gradient node that comes later"),
    ],
)
def test_bad_nodes(attributes: str, inputs: str, text: str) -> None:
    model = parse(
        f"""agraph (float[N] x) => (float[N] dx, float[N] later) {{
            y = Mul(x, x)
            dx = Gradient <{attributes}> ({inputs})
            later = Gradient <xs = ["x"], y = "y"> (x)
        }}"""
    )
    with pytest.raises(ortgrad.NodeError, match=text):
        ortgrad.prepare(model)


def test_what_cannot_be_differentiated_is_named() -> None:
    model = parse(
        """agraph (float[N] x) => (float[N] dx) {
            y = custom.Unknown(x)
            dx = Gradient <xs = ["x"], y = "y"> (x)
        }"""
    )
    with pytest.raises(ortgrad.UnsupportedGradientError, match="Unknown"):
        ortgrad.prepare(model)
