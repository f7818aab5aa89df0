"""Slices that take everything, and gradients of slices that divide an axis; against PyTorch in float64."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import parser

import ortgrad
from ortgrad.graph.serialization import read, write
from ortgrad.lowering.slices import join_slices
from ortgrad.pipelines.prepare import prepare_loaded

HEAD = '<ir_version: 10, opset_import: ["" : 21]>'
END = 2**63 - 1


def sliced(bounds: list[tuple[int, int]], axis: int, shape: str = "[4,6]") -> onnx.ModelProto:
    """The sum of a different function of every slice of x."""
    functions = ["Tanh", "Exp", "Sin", "Neg"]
    lines, sums = [], []
    for i, (start, end) in enumerate(bounds):
        lines.append(f"s{i} = Constant<value_ints=[{start}]>() e{i} = Constant<value_ints=[{end}]>()")
        lines.append(f"a{i} = Slice(x, s{i}, e{i}, axes) b{i} = {functions[i]}(a{i})")
        lines.append(f"r{i} = ReduceSum<keepdims=0>(b{i})")
        sums.append(f"r{i}")
    text = f"""{HEAD} g (double{shape} x) => (double y) {{
        axes = Constant<value_ints=[{axis}]>() {" ".join(lines)} y = Sum({", ".join(sums)}) }}"""
    return ortgrad.build_gradient_model(parser.parse_model(text), wrt=["x"])


def expected(bounds: list[tuple[int, int]], axis: int, x: np.ndarray) -> np.ndarray:
    tensor = torch.tensor(x, requires_grad=True)
    functions = [torch.tanh, torch.exp, torch.sin, torch.neg]
    total = torch.zeros((), dtype=torch.float64)
    for (start, end), function in zip(bounds, functions, strict=False):
        place = [slice(None)] * x.ndim
        place[axis] = slice(start, end)
        total = total + function(tensor[tuple(place)]).sum()
    total.backward()
    assert tensor.grad is not None
    return tensor.grad.numpy()


def operators(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in prepare_loaded(model, "onnx", bodies=False).graph.node}


@pytest.mark.parametrize(
    ("bounds", "joined"),
    [
        ([(0, 2), (2, 6)], True),
        ([(2, 4), (0, 2), (4, END)], True),
        ([(-6, -4), (2, 5), (5, 6)], True),
        ([(0, 1), (1, 2), (2, 3), (3, 6)], True),
        ([(0, 2), (3, 6)], False),
        ([(0, 3), (2, 6)], False),
        ([(1, 3), (3, 6)], False),
        ([(0, 3), (3, 5)], False),
        ([(0, 6), (2, 4)], False),
        ([(0, 3), (3, 6), (0, 6)], False),
    ],
    ids=str,
)
def test_slices_that_divide_an_axis(bounds: list[tuple[int, int]], joined: bool) -> None:
    x = np.random.default_rng(0).standard_normal((4, 6))
    for axis in (1, -1):
        model = sliced(bounds, axis)
        assert ("Concat" in operators(model)) == joined
        assert ("Pad" in operators(model)) != joined
        actual = ortgrad.InferenceSession(model).run(["x_grad"], {"x": x})[0]
        np.testing.assert_allclose(actual, expected(bounds, 1, x), rtol=1e-12)


def test_an_axis_of_unknown_length() -> None:
    bounds = [(0, 2), (2, END)]
    model = sliced(bounds, 0, "[N,3]")
    session = ortgrad.InferenceSession(model)
    for length in (1, 2, 5):
        x = np.random.default_rng(length).standard_normal((length, 3))
        actual = session.run(["x_grad"], {"x": x})[0]
        np.testing.assert_allclose(actual, expected(bounds, 0, x), rtol=1e-12)


def test_a_slice_that_takes_everything_is_left_out() -> None:
    text = f"""{HEAD} g (double[N,M] x) => (double y) {{
        zeros = Constant<value_ints=[0,0]>() ends = Constant<value_ints=[2147483647,{END}]>()
        axes = Constant<value_ints=[1,0]>() steps = Constant<value_ints=[1,1]>()
        a = Slice(x, zeros, ends, axes, steps) b = Mul(a, x) y = ReduceSum<keepdims=0>(b) }}"""
    source = parser.parse_model(text)
    model = ortgrad.build_gradient_model(source, wrt=["x"])
    assert "Slice" not in {node.op_type for node in model.graph.node}
    x = np.random.default_rng(0).standard_normal((2, 3))
    y, dx = ortgrad.InferenceSession(model).run(["y", "x_grad"], {"x": x})
    np.testing.assert_allclose(y, (x * x).sum(), rtol=1e-12)
    np.testing.assert_allclose(dx, 2 * x, rtol=1e-12)
    # Its result is a target here.
    model = ortgrad.build_gradient_model(source, wrt=["a"])
    np.testing.assert_allclose(ortgrad.InferenceSession(model).run(["a_grad"], {"x": x})[0], x, rtol=1e-12)


@pytest.mark.parametrize(
    ("start", "end", "step"), [(1, END, 1), (0, 2, 1), (0, END, 2), (-1, -END, -1), (0, -1, 1)]
)
def test_other_slices_stay(start: int, end: int, step: int) -> None:
    text = f"""{HEAD} g (double[N] x) => (double y) {{
        s = Constant<value_ints=[{start}]>() e = Constant<value_ints=[{end}]>()
        a = Constant<value_ints=[0]>() t = Constant<value_ints=[{step}]>()
        b = Slice(x, s, e, a, t) c = Exp(b) y = ReduceSum<keepdims=0>(c) }}"""
    model = ortgrad.build_gradient_model(parser.parse_model(text), wrt=["x"])
    assert "Slice" in {node.op_type for node in model.graph.node}
    x = np.random.default_rng(0).standard_normal(5)
    wanted = np.zeros(5)
    place = slice(start, end, step) if step > 0 else slice(None, None, -1)
    wanted[place] = np.exp(x[place])
    actual = ortgrad.InferenceSession(model).run(["x_grad"], {"x": x})[0]
    np.testing.assert_allclose(actual, wanted, rtol=1e-12)


@pytest.mark.parametrize(
    ("first", "second"), [("[1,2]", "[5,4]"), ("[2]", "[5,4]"), ("[N,2]", "[M,4]"), ("[5,2]", "[5,4]")]
)
def test_sums_that_broadcast_stay(first: str, second: str) -> None:
    text = f"""{HEAD} g (float{first} x, float{second} z) => (float y) {{
        last = Constant<value_ints=[-1]>()
        behind = Constant<value_ints=[0, 4]>() before = Constant<value_ints=[2, 0]>()
        a = Pad(x, behind, , last) b = Pad(z, before, , last) y = Add(a, b) }}"""
    model = parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    shape = {"[1,2]": (1, 2), "[2]": (2,), "[N,2]": (1, 2), "[5,2]": (5, 2)}[first]
    x, z = np.ones(shape, np.float32), np.ones((5, 4), np.float32)
    simple = write(join_slices(read(model)), model)
    (y,) = ortgrad.InferenceSession(simple).run(None, {"x": x, "z": z})
    np.testing.assert_array_equal(y, np.ones((5, 6), np.float32))
    assert ("Concat" in {node.op_type for node in simple.graph.node}) == (first == "[5,2]")
