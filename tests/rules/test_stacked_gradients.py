"""Gradients of what all iterations of a loop read: computed after the loop, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from onnx import parser
from torch import Tensor

import ortgrad

# Arguments of all models: a sequence, an initial state, weights of both and a bias.
INPUTS = "double[T, N, 3] x, double[N, 4] h, double[3, 4] w, double[4, 4] u, double[4] b"

LOOP = """
    {
        trips = Shape <start = 0, end = 1> (x)
        count = Squeeze (trips)
        yes = Constant <value = bool {1}> ()
        last, all = Loop (count, yes, h) <body = body
            (int64 i, bool go, double[N, 4] before) => (bool again, double[N, 4] after, double[N, 4] kept) {
                again = Identity (go)
                now = Gather <axis = 0> (x, i)
                %s
                sum = Add (left, right)
                whole = Add (sum, b)
                after = Tanh (whole)
                kept = Mul (after, after)
            }>
    }
"""
SCAN = """
    {
        last, all = Scan <num_scan_inputs = 1, body = body
            (double[N, 4] before, double[N, 3] now) => (double[N, 4] after, double[N, 4] kept) {
                left = MatMul (now, w)
                right = MatMul (before, u)
                sum = Add (left, right)
                whole = Add (sum, b)
                after = Tanh (whole)
                kept = Mul (after, after)
            }> (h, x)
    }
"""
PRODUCTS = {
    "MatMul": "left = MatMul (now, w)\nright = MatMul (before, u)",
    "Gemm": "left = Gemm (now, w)\nright = Gemm (before, u)",
    "Gemm with transposed weights": "left = MatMul (now, w)\nright = Gemm <transB = 1> (before, u)",
}


def recurrence(turned: bool = False) -> Callable[..., list[Tensor]]:
    def run(x: Tensor, h: Tensor, w: Tensor, u: Tensor, b: Tensor) -> list[Tensor]:
        kept = []
        for now in x:
            h = torch.tanh(now @ w + h @ (u.T if turned else u) + b)
            kept.append(h * h)
        return [h, torch.stack(kept) if kept else x.new_zeros(0, *h.shape)]

    return run


def model_of(name: str) -> onnx.ModelProto:
    text = SCAN if name == "Scan" else LOOP % PRODUCTS[name]
    header = '<ir_version: 10, opset_import: ["" : 21]>'
    results = "double[N, 4] last, double[T, N, 4] all"
    return parser.parse_model(f"{header} main ({INPUTS}) => ({results}) {text}")


def arrays_of(steps: int, batch: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(steps)
    shapes = {"x": (steps, batch, 3), "h": (batch, 4), "w": (3, 4), "u": (4, 4), "b": (4,)}
    return {name: 0.5 * random.standard_normal(shape) for name, shape in shapes.items()}


def gradients(function: Callable[..., list[Tensor]], arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    tensors = [torch.tensor(array, requires_grad=True) for array in arrays.values()]
    last, kept = function(*tensors)
    (last.sum() + (kept * kept).sum()).backward()
    return [np.zeros(t.shape) if t.grad is None else t.grad.numpy() for t in tensors]


def with_loss(model: onnx.ModelProto) -> onnx.ModelProto:
    graph = model.graph
    graph.node.append(onnx.helper.make_node("ReduceSum", ["last"], ["first"], keepdims=0))
    graph.node.append(onnx.helper.make_node("ReduceSumSquare", ["all"], ["second"], keepdims=0))
    graph.node.append(onnx.helper.make_node("Add", ["first", "second"], ["loss"]))
    graph.output.append(onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.DOUBLE, []))
    return model


def backward_body(model: onnx.ModelProto) -> onnx.GraphProto:
    node = [n for n in model.graph.node if n.op_type in ("Loop", "Scan")][-1]
    return next(attribute.g for attribute in node.attribute if attribute.name == "body")


@pytest.mark.parametrize("name", [*PRODUCTS, "Scan"])
def test_gradients(name: str) -> None:
    model = ortgrad.build_gradient_model(with_loss(model_of(name)), of="loss", wrt=list("xhwub"))
    body = backward_body(model)
    for value in body.output:
        # No iteration reads or writes the gradient of the weights or of the whole sequence.
        sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        assert sizes not in ([3, 4], [4, 4]) and len(sizes) < 3
    assert "GatherGrad" not in {node.op_type for node in body.node}
    for kernels in ("onnx", "python", "auto"):
        session = ortgrad.InferenceSession(model, kernels=kernels)
        for steps, batch in ((5, 2), (1, 1), (3, 0), (7, 3)) + ((0, 2),) * (name != "Scan"):
            arrays = arrays_of(steps, batch)
            expected = gradients(recurrence(name == "Gemm with transposed weights"), arrays)
            actual = session.run([f"{key}_grad" for key in arrays], arrays)
            for one, other in zip(actual, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def test_several_elements_in_an_iteration() -> None:
    """An iteration reads two elements, some of which are read again by others."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    main (double[T, 3] x, int64[K, 2] places, double[3] w) => (double loss) {
        trips = Shape <start = 0, end = 1> (places)
        count = Squeeze (trips)
        yes = Constant <value = bool {1}> ()
        zero = Constant <value = double {0}> ()
        loss = Loop (count, yes, zero) <body = body
            (int64 i, bool go, double before) => (bool again, double after) {
                again = Identity (go)
                own = Gather <axis = 0> (places, i)
                now = Gather <axis = 0> (x, own)
                scaled = Mul (now, w)
                square = ReduceSumSquare <keepdims = 0> (scaled)
                after = Add (before, square)
            }>
    }"""
    model = ortgrad.build_gradient_model(parser.parse_model(text), wrt=["x", "w"])
    assert "GatherGrad" not in {node.op_type for node in backward_body(model).node}
    session = ortgrad.InferenceSession(model)
    random = np.random.default_rng(0)
    x, w = random.standard_normal((5, 3)), random.standard_normal(3)
    for places in (np.array([[0, 1], [1, 4], [-1, 1]]), np.zeros((0, 2), np.int64)):
        tensors = [torch.tensor(array, requires_grad=True) for array in (x, w)]
        chosen = tensors[0][torch.tensor(places)]
        (chosen * tensors[1]).square().sum().backward()
        actual = session.run(["x_grad", "w_grad"], {"x": x, "w": w, "places": places})
        for one, tensor in zip(actual, tensors, strict=True):
            assert tensor.grad is not None
            np.testing.assert_allclose(one, tensor.grad.numpy(), rtol=1e-10)


def test_rows_that_change_are_not_stacked() -> None:
    """The state has one row more in every iteration."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    main (double[N, 3] x, double[3, 3] w) => (double loss) {
        three = Constant <value = int64 {3}> ()
        yes = Constant <value = bool {1}> ()
        last = Loop (three, yes, x) <body = body (int64 i, bool go, before) => (bool again, after) {
                again = Identity (go)
                product = MatMul (before, w)
                y = Tanh (product)
                one = Constant <value = int64[1] {1}> ()
                zero = Constant <value = int64[1] {0}> ()
                row = Slice (before, zero, one)
                after = Concat <axis = 0> (y, row)
            }>
        loss = ReduceSumSquare <keepdims = 0> (last)
    }"""
    model = parser.parse_model(text)
    body = model.graph.node[2].attribute[0].g
    for value in (body.input[2], body.output[1]):
        value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, onnx.TensorProto.DOUBLE, [None, 3]))
    built = ortgrad.build_gradient_model(model, wrt=["x", "w"])
    random = np.random.default_rng(0)
    arrays = {"x": random.standard_normal((2, 3)), "w": random.standard_normal((3, 3))}
    x, w = (torch.tensor(array, requires_grad=True) for array in arrays.values())
    state = x
    for _ in range(3):
        state = torch.cat([torch.tanh(state @ w), state[:1]])
    state.square().sum().backward()
    actual = ortgrad.InferenceSession(built).run(["x_grad", "w_grad"], arrays)
    for one, tensor in zip(actual, (x, w), strict=True):
        assert tensor.grad is not None
        np.testing.assert_allclose(one, tensor.grad.numpy(), rtol=1e-10)


def test_second_derivatives() -> None:
    """The gradient's Loop stacks, and is differentiated itself."""
    first = ortgrad.build_gradient_model(with_loss(model_of("MatMul")), of="loss", wrt=["u"])
    graph = first.graph
    graph.node.append(onnx.helper.make_node("ReduceSumSquare", ["u_grad"], ["norm"], keepdims=0))
    graph.output.append(onnx.helper.make_tensor_value_info("norm", onnx.TensorProto.DOUBLE, []))
    second = ortgrad.build_gradient_model(first, of="norm", wrt=["x", "w", "u"])
    arrays = arrays_of(4, 2)
    tensors = [torch.tensor(array, requires_grad=True) for array in arrays.values()]
    last, kept = recurrence()(*tensors)
    loss = last.sum() + (kept * kept).sum()
    (grad,) = torch.autograd.grad(loss, [tensors[3]], create_graph=True)
    expected = torch.autograd.grad(grad.square().sum(), [tensors[0], tensors[2], tensors[3]])
    session = ortgrad.InferenceSession(second)
    names = [o.name for o in session.get_outputs()]
    wanted = [next(n for n in reversed(names) if n.startswith(f"{key}_grad")) for key in "xwu"]
    for one, other in zip(session.run(wanted, arrays), expected, strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-9, atol=1e-10)
