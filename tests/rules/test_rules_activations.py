"""Gradient rules of activations, softmax, dropout and losses, against finite differences and PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from support import KERNELS
from support.rules import check_against_torch, check_rule, gradients, one_node
from torch.nn import functional

import ortgrad


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def normal(*shape: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    x = scale * np.random.default_rng(seed).standard_normal(shape)
    # Away from 0, where many of them have a kink.
    return (x + 0.05 * np.sign(x)).astype(np.float32)


MS = "com.microsoft"
Function = Callable[..., torch.Tensor]
# Operator, domain, opset, attributes, PyTorch.
ACTIVATIONS: list[tuple[str, str, int, dict[str, Any], Function]] = [
    ("Relu", "", 18, {}, functional.relu),
    ("Sigmoid", "", 18, {}, torch.sigmoid),
    ("Tanh", "", 18, {}, torch.tanh),
    ("LeakyRelu", "", 18, {}, functional.leaky_relu),
    ("LeakyRelu", "", 18, {"alpha": 0.3}, lambda x: functional.leaky_relu(x, 0.3)),
    ("LeakyRelu", "", 22, {"alpha": -0.3}, lambda x: functional.leaky_relu(x, -0.3)),
    ("LeakyRelu", "", 18, {"alpha": 1.5}, lambda x: functional.leaky_relu(x, 1.5)),
    ("Elu", "", 18, {}, functional.elu),
    ("Elu", "", 22, {"alpha": 0.7}, lambda x: functional.elu(x, 0.7)),
    ("Selu", "", 18, {}, functional.selu),
    ("Selu", "", 18, {"alpha": 2.0, "gamma": 3.0}, lambda x: 3 * functional.elu(x, 2.0)),
    ("Celu", "", 18, {}, functional.celu),
    ("Celu", "", 18, {"alpha": 0.6}, lambda x: functional.celu(x, 0.6)),
    ("Softplus", "", 18, {}, functional.softplus),
    ("Softsign", "", 18, {}, functional.softsign),
    ("Mish", "", 18, {}, functional.mish),
    ("HardSigmoid", "", 18, {}, lambda x: torch.clamp(0.2 * x + 0.5, 0, 1)),
    ("HardSigmoid", "", 22, {"alpha": 1 / 6, "beta": 0.5}, functional.hardsigmoid),
    ("HardSwish", "", 18, {}, functional.hardswish),
    ("Swish", "", 24, {}, functional.silu),
    ("Swish", "", 24, {"alpha": 0.5}, lambda x: x * torch.sigmoid(0.5 * x)),
    ("ThresholdedRelu", "", 18, {}, lambda x: functional.threshold(x, 1.0, 0.0)),
    ("ThresholdedRelu", "", 18, {"alpha": -0.5}, lambda x: functional.threshold(x, -0.5, 0.0)),
    ("Shrink", "", 18, {"lambd": 0.5, "bias": 0.5}, functional.softshrink),
    ("Shrink", "", 18, {"lambd": 1.5}, lambda x: functional.hardshrink(x, 1.5)),
    ("Shrink", "", 18, {"lambd": -1.0, "bias": 0.25}, lambda x: x + 0.25 * torch.sign(1 - x).detach()),
    ("Gelu", "", 20, {}, functional.gelu),
    ("Gelu", "", 20, {"approximate": "tanh"}, lambda x: functional.gelu(x, approximate="tanh")),
    ("Gelu", MS, 18, {}, functional.gelu),
    ("FastGelu", MS, 18, {}, lambda x: functional.gelu(x, approximate="tanh")),
    ("QuickGelu", MS, 18, {}, lambda x: x * torch.sigmoid(1.702 * x)),
    ("QuickGelu", MS, 18, {"alpha": 1.0}, functional.silu),
]
NAMES = [f"{row[0]}-{row[3]}" for row in ACTIVATIONS]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("op_type", "domain", "opset", "attributes", "function"), ACTIVATIONS, ids=NAMES)
def test_activations(
    op_type: str, domain: str, opset: int, attributes: dict[str, Any], function: Function, kernels: str
) -> None:
    where: dict[str, Any] = {"domain": domain, "opset": opset, "kernels": kernels}
    x = normal(3, 7)
    check_against_torch(op_type, function, [x], attributes, **where)
    if kernels == "onnx" and (op_type, opset) != ("LeakyRelu", 22):
        check_rule(op_type, [x], attributes, second=True, **where)


# Where the derivative jumps, PyTorch decides; far out nothing overflows.
EDGES: list[tuple[str, int, dict[str, Any], Function, np.ndarray]] = [
    ("Relu", 18, {}, functional.relu, array(-1, 0, 1)),
    ("LeakyRelu", 18, {}, functional.leaky_relu, array(-1, 0, 1)),
    ("LeakyRelu", 18, {"alpha": 0.0}, lambda x: functional.leaky_relu(x, 0.0), array(-1, 0, 1)),
    ("LeakyRelu", 18, {"alpha": -1.0}, lambda x: functional.leaky_relu(x, -1.0), array(-1, 0, 1)),
    ("Elu", 18, {"alpha": 0.5}, lambda x: functional.elu(x, 0.5), array(-200, -1, 0, 1, 200)),
    ("Selu", 18, {}, functional.selu, array(-200, -1, 0, 1, 200)),
    ("Celu", 18, {"alpha": 0.5}, lambda x: functional.celu(x, 0.5), array(-200, -1, 0, 1, 40)),
    ("Softsign", 18, {}, functional.softsign, array(-200, 0, 200)),
    ("Softplus", 18, {}, functional.softplus, array(-200, 0, 200)),
    ("Mish", 18, {}, functional.mish, array(-200, 0, 200)),
    ("Sigmoid", 18, {}, torch.sigmoid, array(-200, 0, 200)),
    ("HardSigmoid", 18, {"alpha": 1 / 6, "beta": 0.5}, functional.hardsigmoid, array(-4, -3, 0, 3, 4)),
    ("HardSwish", 18, {}, functional.hardswish, array(-4, -3, 0, 3, 4)),
    ("ThresholdedRelu", 18, {}, lambda x: functional.threshold(x, 1.0, 0.0), array(0, 1, 2)),
    ("Shrink", 18, {"lambd": 0.5, "bias": 0.5}, functional.softshrink, array(-1, -0.5, 0, 0.5, 1)),
    ("Gelu", 20, {}, functional.gelu, array(-200, 0, 200)),
]


@pytest.mark.parametrize(("op_type", "opset", "attributes", "function", "x"), EDGES)
def test_edges(
    op_type: str, opset: int, attributes: dict[str, Any], function: Function, x: np.ndarray
) -> None:
    check_against_torch(op_type, function, [x], attributes, opset=opset)


@pytest.mark.parametrize("op_type", ["Elu", "Selu", "Celu", "Softplus", "Mish", "Gelu"])
def test_second_derivatives_far_out_are_finite(op_type: str) -> None:
    x = array(-200, 0, 200)
    model, feeds = one_node(op_type, [x], opset=20)
    first = ortgrad.build_gradient_model(model, wrt="a")
    seeds = {"y_grad": np.ones_like(x)}
    second = gradients(first, {**feeds, **seeds}, {"a_grad": np.ones_like(x)}, ["a"])
    assert np.isfinite(second["a"]).all()


@pytest.mark.parametrize("slope", [(), (1,), (4,), (3, 1, 1), (2, 3, 2, 4)])
@pytest.mark.parametrize("symbolic", [False, True])
def test_prelu(slope: tuple[int, ...], symbolic: bool) -> None:
    def function(x: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, slope * x)

    inputs = [normal(2, 3, 2, 4), np.asarray(normal(*slope, seed=1), np.float32)]
    check_against_torch("PRelu", function, inputs, symbolic=symbolic)
    check_rule("PRelu", inputs, symbolic=symbolic)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("op_type", ["BiasGelu", "FastGelu"])
def test_gelu_with_bias(op_type: str, kernels: str) -> None:
    approximate = "none" if op_type == "BiasGelu" else "tanh"

    def function(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x + bias, approximate=approximate)

    inputs = [normal(2, 3, 4), normal(4, seed=1)]
    check_against_torch(op_type, function, inputs, domain=MS, kernels=kernels)
    check_rule(op_type, inputs, domain=MS, kernels=kernels, second=True)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("op_type", "function"), [("Softmax", torch.softmax), ("LogSoftmax", torch.log_softmax)]
)
@pytest.mark.parametrize("axis", [None, 0, 1, -2])
def test_softmax(op_type: str, function: Function, axis: int | None, kernels: str) -> None:
    attributes = {} if axis is None else {"axis": axis}
    x = normal(2, 3, 4)
    dim = -1 if axis is None else axis
    check_against_torch(op_type, lambda x: function(x, dim), [x], attributes, kernels=kernels)
    if kernels == "onnx":
        check_rule(op_type, [x], attributes, second=True, kernels=kernels)


@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax"])
def test_masked_softmax_has_no_nan(op_type: str) -> None:
    x = np.array([[1, -np.inf, 2], [-np.inf, -np.inf, 0], [0, 0, 0]], np.float32)
    function = torch.softmax if op_type == "Softmax" else torch.log_softmax
    for kernels in KERNELS:
        check_against_torch(op_type, lambda x: function(x, -1), [x], kernels=kernels)


@pytest.mark.parametrize("opset", [12, 11])
def test_softmax_of_old_models(opset: int) -> None:
    x = normal(2, 3, 4)
    model, feeds = one_node("Softmax", [x], {"axis": 1}, opset=opset, symbolic=False)
    seed = normal(2, 3, 4, seed=1)
    actual = gradients(model, feeds, {"y": seed}, ["a"])["a"]
    t = torch.tensor(x, requires_grad=True)
    torch.softmax(t.flatten(1), 1).reshape(t.shape).backward(torch.tensor(seed))
    assert t.grad is not None
    np.testing.assert_allclose(actual, t.grad.numpy(), atol=1e-6)


# Dropout: ratio, training_mode, which of them are initializers, whether something is dropped.
DROPOUT: list[tuple[float | None, bool | None, tuple[int, ...], float]] = [
    (None, None, (), 0.0),
    (0.3, None, (1,), 0.0),
    (0.3, False, (1, 2), 0.0),
    (0.3, False, (), 0.0),
    (0.3, True, (1, 2), 0.3),
    (0.3, True, (1,), 0.3),
    (0.3, True, (2,), 0.3),
    (0.3, True, (), 0.3),
    (None, True, (2,), 0.5),
    (0.0, True, (1, 2), 0.0),
]


@pytest.mark.parametrize(("ratio", "training", "constants", "rate"), DROPOUT)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("with_mask", [False, True])
def test_dropout(
    ratio: float | None,
    training: bool | None,
    constants: tuple[int, ...],
    rate: float,
    kernels: str,
    with_mask: bool,
) -> None:
    inputs = [
        1 + np.random.default_rng(0).random((40, 50)).astype(np.float32),
        None if ratio is None else np.array(ratio, np.float32),
        None if training is None else np.array(training),
    ]
    outputs = [None, np.bool_] if with_mask else [None]
    model, feeds = one_node("Dropout", inputs, constants=constants, outputs=outputs)
    built = ortgrad.build_gradient_model(model, wrt="a")
    session = ortgrad.InferenceSession(built, kernels=kernels)
    seed = normal(40, 50)
    y, dx = session.run(["y", "a_grad"], {**feeds, "y_grad": seed})
    x = inputs[0]
    assert x is not None
    np.testing.assert_allclose(dx, seed * y / x, rtol=1e-5)
    assert abs(np.mean(y == 0) - rate) < 0.05


REDUCTIONS = ("mean", "sum", "none")
IGNORED = (None, 1, -100)


def loss_inputs(
    shape: tuple[int, ...], weighted: bool, ignored: int | None, labels: type = np.int64
) -> list[np.ndarray | None]:
    rng = np.random.default_rng(3)
    label = rng.integers(0, shape[1], (shape[0], *shape[2:])).astype(labels)
    if ignored is not None:
        label.reshape(-1)[::3] = ignored
    weight = (0.5 + rng.random(shape[1])).astype(np.float32) if weighted else None
    inputs = [normal(*shape), label, weight]
    return inputs if weighted else inputs[:2]


@pytest.mark.parametrize("op_type", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
@pytest.mark.parametrize(
    ("reduction", "ignored", "weighted"), list(product(REDUCTIONS, IGNORED, [False, True]))
)
def test_losses(op_type: str, reduction: str, ignored: int | None, weighted: bool) -> None:
    attributes = {"reduction": reduction} | ({} if ignored is None else {"ignore_index": ignored})
    torch_loss = functional.cross_entropy if op_type.startswith("Softmax") else functional.nll_loss

    def function(x: torch.Tensor, label: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        weight = None if weight is None else weight.detach()
        index = -100 if ignored is None else ignored
        return torch_loss(x, label.long(), weight, ignore_index=index, reduction=reduction)

    for shape in ((5, 3), (2, 4, 3), (2, 3, 2, 2)):
        inputs = loss_inputs(shape, weighted, ignored)
        for kernels in KERNELS if op_type.startswith("Softmax") and len(shape) == 3 else ["onnx"]:
            # PyTorch has no gradient towards the weights.
            constants = [2] if weighted else []
            check_against_torch(op_type, function, inputs, attributes, constants=constants, kernels=kernels)
    inputs = loss_inputs((2, 4, 3), weighted, ignored, np.int32)
    check_rule(op_type, inputs, attributes, wrt=["a", "c"] if weighted else ["a"])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("of", ["y", "z", "yz"])
def test_log_prob_has_a_gradient_too(reduction: str, of: str) -> None:
    inputs = loss_inputs((2, 4, 3), True, 1)
    model, feeds = one_node(
        "SoftmaxCrossEntropyLoss", inputs, {"reduction": reduction, "ignore_index": 1}, outputs=[None, None]
    )
    for kernels in KERNELS:
        ortgrad.check_gradients(model, feeds, wrt=["a", "c"], of=list(of), kernels=kernels).raise_if_wrong()


@pytest.mark.parametrize("op_type", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_all_ignored(op_type: str) -> None:
    x, label = normal(2, 3), np.array([1, 1])
    model, feeds = one_node(op_type, [x, label], {"ignore_index": 1})
    for kernels in KERNELS:
        grads = gradients(model, feeds, {"y": np.ones((), np.float32)}, ["a"], kernels)
        np.testing.assert_array_equal(grads["a"], np.zeros_like(x))


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
@pytest.mark.parametrize(
    ("op_type", "attributes"),
    [
        ("Relu", {}),
        ("Sigmoid", {}),
        ("Tanh", {}),
        ("Softmax", {}),
        ("LogSoftmax", {}),
        ("LeakyRelu", {}),
        ("Elu", {}),
        ("Selu", {}),
        ("Softplus", {}),
        ("Softsign", {}),
        ("Mish", {}),
        ("HardSigmoid", {}),
        ("HardSwish", {}),
        ("ThresholdedRelu", {}),
        ("Shrink", {}),
    ],
)
def test_other_float_types(op_type: str, attributes: dict[str, Any], dtype: type) -> None:
    x, seed = normal(2, 3), normal(2, 3, seed=1)
    expected = gradients(*one_node(op_type, [x], attributes), {"y": seed}, ["a"])["a"]
    for kernels in (*KERNELS, "auto"):
        model, feeds = one_node(op_type, [x.astype(dtype)], attributes)
        actual = gradients(model, feeds, {"y": seed.astype(dtype)}, ["a"], kernels)["a"]
        assert actual.dtype == dtype
        np.testing.assert_allclose(actual, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("op_type", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_losses_in_other_float_types(op_type: str, dtype: type) -> None:
    inputs = loss_inputs((2, 4, 3), True, 1)
    one = np.ones((), np.float32)
    expected = gradients(*one_node(op_type, inputs, {"ignore_index": 1}), {"y": one}, ["a", "c"])
    typed = [None if a is None else a.astype(dtype) if a.dtype.kind == "f" else a for a in inputs]
    model, feeds = one_node(op_type, typed, {"ignore_index": 1})
    for name, grad in gradients(model, feeds, {"y": one.astype(dtype)}, ["a", "c"]).items():
        assert grad.dtype == dtype
        np.testing.assert_allclose(grad, expected[name], rtol=2e-2, atol=1e-2)


def test_second_derivative_of_a_loss() -> None:
    for op_type in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
        model, feeds = one_node(op_type, loss_inputs((4, 3), False, None))
        built = ortgrad.build_gradient_model(model, wrt="a")
        if op_type.startswith("Softmax"):
            ortgrad.check_gradients(built, feeds, wrt="a", of="a_grad").raise_if_wrong()
        else:
            second = ortgrad.build_gradient_model(built, wrt="a", of="a_grad")
            seed = np.ones((4, 3), np.float32)
            zeros = ortgrad.InferenceSession(second).run(None, {**feeds, "a_grad_grad": seed})[-1]
            assert not zeros.any()


def test_the_forward_outputs_stay() -> None:
    model, feeds = one_node("SoftmaxCrossEntropyLoss", loss_inputs((4, 3), False, None))
    built = ortgrad.build_gradient_model(model, wrt="a")
    assert [output.name for output in built.graph.output] == ["y", "a_grad"]
    onnx.checker.check_model(built)
    assert len(ortgrad.InferenceSession(built).run(None, feeds)) == 2
