"""Elements that are masked or ignored have the gradient 0, even if the forward pass turns them into NaN."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

import ortgrad

WAYS = ("auto", "python", "onnx")


# PyTorch's exporters write this for attention with a mask: NaN after the Softmax p of s becomes 0.
REPLACED = {
    "direct": "n = IsNaN(p) y = Where(n, zero, p)",
    "through Identity": "c = Identity(p) n = IsNaN(c) y = Where(n, zero, p)",
    "by scores": """e = Equal(s, low) i = Cast<to = 7>(e) m = ReduceMin(i, last) n = Cast<to = 9>(m)
        y = Where(n, zero, p)""",
    "other way round": """e = Greater(s, low) i = Cast<to = 7>(e) m = ReduceMax(i, last) n = Cast<to = 9>(m)
        c = Identity(p) y = Where(n, c, zero)""",
}


def masked_rows(op_type: str, replaced: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float[2,3,4] x, float[3,4] mask) => (float[2,3,4] y) '
        "<float zero = {0}, float low = {-inf}, int64[1] last = {-1}>"
        f"{{ s = Add(x, mask) p = {op_type} <axis = -1> (s) {REPLACED[replaced]} }}"
    )


@pytest.mark.parametrize("kernels", WAYS)
@pytest.mark.parametrize("replaced", REPLACED)
@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax"])
def test_rows_without_anything(op_type: str, replaced: str, kernels: str) -> None:
    generator = np.random.default_rng(0)
    x, seed = (generator.standard_normal((2, 3, 4)).astype(np.float32) for _ in range(2))
    mask = np.zeros((3, 4), np.float32)
    mask[1] = -np.inf
    if op_type == "Softmax":
        mask[2, 0] = -np.inf
    # By hand: the rows that are there, with PyTorch.
    rows = torch.tensor(x[:, [0, 2]] + mask[[0, 2]], requires_grad=True)
    function = torch.softmax if op_type == "Softmax" else torch.log_softmax
    function(rows, -1).backward(torch.tensor(seed[:, [0, 2]]))
    assert rows.grad is not None
    expected = np.zeros_like(x)
    expected[:, [0, 2]] = rows.grad.numpy()
    built = ortgrad.build_gradient_model(masked_rows(op_type, replaced), wrt="x")
    session = ortgrad.InferenceSession(built, kernels=kernels)
    y, grad = session.run(None, {"x": x, "mask": mask, "y_grad": seed})
    assert not y[:, 1].any()
    np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernels", WAYS)
@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax"])
def test_nan_that_is_used_remains(op_type: str, kernels: str) -> None:
    """Here Where chooses by something else, so that the NaN of a row comes out."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]> g (float[2,3] x, bool[2,3] c) => (float[2,3] y)
        <float zero = {{0}}> {{ p = {op_type} <axis = -1> (x) y = Where(c, p, zero) }}"""
    )
    x = np.float32([[1, 2, 3], [1, np.nan, 3]])
    choice = np.array([[True, True, False]] * 2)
    seed = np.float32([[1, 2, 3], [4, 5, 6]])
    leaf = torch.tensor(x, requires_grad=True)
    function = torch.softmax if op_type == "Softmax" else torch.log_softmax
    torch.where(torch.tensor(choice), function(leaf, -1), 0.0).backward(torch.tensor(seed))
    assert leaf.grad is not None
    built = ortgrad.build_gradient_model(model, wrt="x")
    grad = ortgrad.InferenceSession(built, kernels=kernels).run(
        ["x_grad"], {"x": x, "c": choice, "y_grad": seed}
    )
    np.testing.assert_allclose(grad[0][0], leaf.grad[0].numpy(), rtol=1e-5, atol=1e-6)
    assert np.isnan(leaf.grad[1].numpy()[:2]).all()
    assert np.isnan(grad[0][1][:2]).all()


@pytest.mark.parametrize("kernels", WAYS)
@pytest.mark.parametrize("op_type", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_second_derivative_with_every_label_ignored(op_type: str, kernels: str) -> None:
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    label, direction = np.full(3, 1), np.ones((3, 4), np.float32)
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float[3,4] x, int64[3] label) => (float y)'
        f'{{ y = {op_type} <ignore_index = 1, reduction = "mean"> (x, label) }}'
    )
    first = ortgrad.build_gradient_model(model, wrt="x")
    session = ortgrad.InferenceSession(first, kernels=kernels)
    assert not session.run(["x_grad"], {"x": x, "label": label})[0].any()
    second = ortgrad.build_gradient_model(first, wrt="x", of="x_grad")
    session = ortgrad.InferenceSession(second, kernels=kernels)
    feeds = {"x": x, "label": label, "x_grad_grad": direction}
    result = session.run([session.get_outputs()[-1].name], feeds)[0]
    # PyTorch's gradients are 0, the second as the first.
    t = torch.tensor(x, requires_grad=True)
    scores = t if op_type == "SoftmaxCrossEntropyLoss" else t * 1
    function = (
        torch.nn.functional.cross_entropy
        if op_type == "SoftmaxCrossEntropyLoss"
        else torch.nn.functional.nll_loss
    )
    (grad,) = torch.autograd.grad(function(scores, torch.tensor(label), ignore_index=1), t, create_graph=True)
    if grad.requires_grad:
        (again,) = torch.autograd.grad(grad, t, torch.tensor(direction), allow_unused=True)
        assert again is None or not again.any()
    np.testing.assert_array_equal(result, np.zeros_like(x))
