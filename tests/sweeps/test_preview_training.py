"""Optimizers as nodes: ONNX's of ai.onnx.preview.training, and those of onnxruntime-training."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support import assert_close

import ortgrad

ONNX_TESTS = [
    "test_adagrad",
    "test_adagrad_multiple",
    "test_adam",
    "test_adam_multiple",
    "test_momentum",
    "test_momentum_multiple",
    "test_nesterov_momentum",
]
Arrays = list[np.ndarray]


@functools.cache
def cases() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        return {case.name: case for case in collect_testcases(None)}


@pytest.mark.parametrize("name", ONNX_TESTS)
def test_onnx_backend_tests(name: str) -> None:
    """On stock onnxruntime, without a library: nothing but standard operators is left."""
    case = cases()[name]
    ready = ortgrad.prepare(case.model)
    assert {node.domain for node in ready.graph.node} == {""}
    plain = onnxruntime.InferenceSession(ready.SerializeToString(), providers=["CPUExecutionProvider"])
    ours = ortgrad.InferenceSession(case.model)
    for inputs, outputs in case.data_sets:
        feeds = dict(zip([value.name for value in case.model.graph.input], inputs, strict=True))
        for session in (plain, ours):
            results = session.run(None, feeds)
            for result, expected in zip(results, outputs, strict=True):
                assert_close(result, expected, 1e-5)


def onnx_model(op_type: str, count: int, kinds: str, **attributes: Any) -> onnx.ModelProto:
    """A model of one node on `count` tensors of each kind."""
    names = [f"{kind}{i}" for kind in kinds for i in range(count)]
    outputs = [f"{name}_new" for name in names if not name.startswith("G")]
    node = onnx.helper.make_node(
        op_type, ["R", "T", *names], outputs, domain="ai.onnx.preview.training", **attributes
    )
    make, double = onnx.helper.make_tensor_value_info, onnx.TensorProto.DOUBLE
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [
            make("R", double, []),
            make("T", onnx.TensorProto.INT64, []),
            *(make(n, double, None) for n in names),
        ],
        [make(name, double, None) for name in outputs],
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("ai.onnx.preview.training", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


def run_steps(model: onnx.ModelProto, kinds: str, x: Arrays, grads: Sequence[Arrays], first: int) -> Arrays:
    """The tensors after a step per element of `grads`; `first` is the count T of the first step."""
    session = ortgrad.InferenceSession(model)
    state = {kind: [np.zeros_like(value) for value in x] for kind in kinds if kind != "G"} | {"X": x}
    for t, grad in enumerate(grads, first):
        values = state | {"G": grad}
        feeds = {f"{kind}{i}": v for kind in kinds for i, v in enumerate(values[kind])}
        results = session.run(None, {**feeds, "R": np.array(0.1), "T": np.array(t)})
        left = iter(results)
        state = {kind: [next(left) for _ in x] for kind in kinds if kind != "G"}
    return state["X"]


def torch_steps(make: Any, x: Arrays, grads: Sequence[Arrays]) -> Arrays:
    parameters = [torch.nn.Parameter(torch.tensor(value)) for value in x]
    optimizer = make(parameters)
    for grad in grads:
        for parameter, value in zip(parameters, grad, strict=True):
            parameter.grad = torch.tensor(value)
        optimizer.step()
    return [parameter.detach().numpy() for parameter in parameters]


def problem(dtype: Any = np.float64) -> tuple[Arrays, list[Arrays]]:
    """Tensors of several ranks, one of them empty, and gradients for four steps."""
    numbers = np.random.default_rng(3)
    shapes = [(3, 4), (5,), (), (0, 2)]

    def draw() -> Arrays:
        return [np.asarray(numbers.standard_normal(shape), dtype) for shape in shapes]

    return draw(), [draw() for _ in range(4)]


@pytest.mark.parametrize(
    ("op_type", "kinds", "attributes", "make", "first"),
    [
        (
            "Adagrad",
            "XGH",
            {"decay_factor": 0.1, "norm_coefficient": 0.2, "epsilon": 1e-3},
            lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.1, weight_decay=0.2, eps=1e-3),
            0,
        ),
        (
            "Momentum",
            "XGV",
            {"alpha": 0.9, "beta": 0.7, "norm_coefficient": 0.2, "mode": "standard"},
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.3, weight_decay=0.2),
            0,
        ),
        (
            "Momentum",
            "XGV",
            {"alpha": 0.9, "beta": 1.0, "norm_coefficient": 0.2, "mode": "nesterov"},
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.2, nesterov=True),
            0,
        ),
        (
            "Adam",
            "XGVH",
            # With an epsilon of 0 the order of correction and epsilon does not matter.
            {"alpha": 0.8, "beta": 0.95, "norm_coefficient": 0.2, "epsilon": 0.0},
            lambda p: torch.optim.Adam(p, 0.1, betas=(0.8, 0.95), weight_decay=0.2, eps=0.0),
            1,
        ),
    ],
    ids=["adagrad", "momentum", "nesterov", "adam"],
)
def test_optimizers_of_onnx_against_pytorch(
    op_type: str, kinds: str, attributes: dict[str, Any], make: Any, first: int
) -> None:
    x, grads = problem()
    model = onnx_model(op_type, len(x), kinds, **attributes)
    for result, expected in zip(
        run_steps(model, kinds, x, grads, first), torch_steps(make, x, grads), strict=True
    ):
        # Attributes of nodes are float32.
        assert_close(result, expected, 1e-6)


def test_adam_with_epsilon_and_decay_after_the_update() -> None:
    """By the formulas of the specification, in float64."""
    alpha, beta, norm, post, eps, rate = (float(np.float32(v)) for v in (0.7, 0.9, 0.1, 0.05, 0.02, 0.25))
    attributes = {"alpha": alpha, "beta": beta, "epsilon": eps}
    model = onnx_model("Adam", 1, "XGVH", norm_coefficient=norm, norm_coefficient_post=post, **attributes)
    session = ortgrad.InferenceSession(model)
    x, g, v, h = np.random.default_rng(1).random((4, 3))
    for t in (0, 3):
        results = session.run(
            None, {"R": np.array(rate), "T": np.array(t), "X0": x, "G0": g, "V0": v, "H0": h}
        )
        regular = norm * x + g
        v_new, h_new = alpha * v + (1 - alpha) * regular, beta * h + (1 - beta) * regular**2
        adjusted = rate * np.sqrt(1 - beta**t) / (1 - alpha**t) if t else rate
        x_new = (1 - post) * (x - adjusted * v_new / (np.sqrt(h_new) + eps))
        for result, expected in zip(results, (x_new, v_new, h_new), strict=True):
            assert_close(result, expected, 1e-12)


def test_a_wrong_number_of_tensors_and_an_unknown_mode_are_refused() -> None:
    model = onnx_model("Momentum", 1, "XGV", alpha=0.9, beta=1.0, norm_coefficient=0.0, mode="other")
    with pytest.raises(ortgrad.NodeError, match="mode"):
        ortgrad.prepare(model)
    model = onnx_model("Momentum", 1, "XGV", alpha=0.9, beta=1.0, norm_coefficient=0.0, mode="standard")
    del model.graph.node[0].input[-1]
    with pytest.raises(ortgrad.ModelError):
        ortgrad.prepare(model)


def sequence_model(op_type: str, inputs: str, outputs: str, dtype: Any, **attributes: Any) -> onnx.ModelProto:
    """A model of one optimizer node of onnxruntime-training; sequences have names in lower case."""
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    tensors = {"RATE": (onnx.TensorProto.FLOAT, [1]), "STEP": (onnx.TensorProto.INT64, [1])}

    def value(name: str) -> onnx.ValueInfoProto:
        if name in tensors:
            return onnx.helper.make_tensor_value_info(name, *tensors[name])
        if name.isupper():
            return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.BOOL, [1])
        return onnx.helper.make_tensor_sequence_value_info(name, kind, None)

    node = onnx.helper.make_node(
        op_type, inputs.split(), outputs.split(), domain="com.microsoft", **attributes
    )
    graph = onnx.helper.make_graph(
        [node], "g", [value(name) for name in inputs.split()], [value(name) for name in outputs.split()]
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


ADAMW = "RATE STEP weights gradients momentums squares", "FLAG weights_new momentums_new squares_new"


def adamw_steps(dtype: Any, x: Arrays, grads: Sequence[Arrays], **attributes: Any) -> Arrays:
    session = ortgrad.InferenceSession(sequence_model("AdamWOptimizer", *ADAMW, dtype, **attributes))
    m, v = ([np.zeros_like(value) for value in x] for _ in range(2))
    for step, grad in enumerate(grads, 1):
        feeds = {"weights": x, "gradients": grad, "momentums": m, "squares": v}
        rate = np.array([0.125], np.float32)
        flag, x, m, v = session.run(None, {**feeds, "RATE": rate, "STEP": np.array([step])})
        assert flag.tolist() == [True]
    return x


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_adamw_mode_0_is_that_of_pytorch(dtype: Any) -> None:
    x, grads = problem(dtype)
    given = {"alpha": 0.8, "beta": 0.95, "epsilon": 1e-3, "weight_decay": 0.25, "adam_mode": 0}
    results = adamw_steps(dtype, x, grads, **given)

    def make(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, 0.125, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.25)

    for result, expected in zip(results, torch_steps(make, x, grads), strict=True):
        assert_close(result, expected, 2e-6)


@pytest.mark.parametrize("correct_bias", [0, 1])
def test_adamw_mode_1_is_that_of_onnxruntime_training(correct_bias: int) -> None:
    x, grads = problem()
    b1, b2, eps, decay = (float(np.float32(v)) for v in (0.8, 0.95, 1e-3, 0.25))
    given = {"alpha": b1, "beta": b2, "epsilon": eps, "weight_decay": decay, "adam_mode": 1}
    results = adamw_steps(np.float64, x, grads, correct_bias=correct_bias, **given)
    for i, value in enumerate(x):
        w, m, v = value.copy(), np.zeros_like(value), np.zeros_like(value)
        for t, grad in enumerate(grads, 1):
            m, v = b1 * m + (1 - b1) * grad[i], b2 * v + (1 - b2) * grad[i] ** 2
            scale = np.sqrt(1 - b2**t) / (1 - b1**t) if correct_bias else 1.0
            w = w - 0.125 * scale * m / (np.sqrt(v) + eps)
            w = w - 0.125 * decay * w
        assert_close(results[i], np.asarray(w), 1e-12)


def test_update_signal() -> None:
    model = sequence_model("SGDOptimizerV2", "RATE weights gradients SIGNAL", "FLAG weights_new", np.float32)
    session = ortgrad.InferenceSession(model)
    x, grads = problem(np.float32)
    for signal in (True, False):
        feeds = {"RATE": np.float32([0.5]), "weights": x, "gradients": grads[0], "SIGNAL": np.array([signal])}
        flag, new = session.run(None, feeds)
        assert flag.tolist() == [signal]
        for result, value, grad in zip(new, x, grads[0], strict=True):
            assert_close(result, np.asarray(value - 0.5 * signal * grad), 1e-6)


@pytest.mark.parametrize("most", [0.5, 100.0])
def test_clipping_is_that_of_pytorch(most: float) -> None:
    model = sequence_model("InplaceClipGradNorm", "gradients", "clipped", np.float32, max_norm=most)
    _, (grad, *_) = problem(np.float32)
    (clipped,) = ortgrad.InferenceSession(model).run(None, {"gradients": grad})
    parameters = [torch.nn.Parameter(torch.tensor(value)) for value in grad]
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    torch.nn.utils.clip_grad_norm_(parameters, most)
    for result, parameter in zip(clipped, parameters, strict=True):
        assert parameter.grad is not None
        assert_close(result, parameter.grad.numpy(), 1e-6)


def test_norm_of_several_tensors() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>'
        "g (float[N] a, float[N, M] b) => (float norm) { norm = com.microsoft.ReduceAllL2(a, b) }"
    )
    a, b = np.float32([1, 2]), np.float32([[3], [4]])
    (norm,) = ortgrad.InferenceSession(model).run(None, {"a": a, "b": b})
    assert norm == pytest.approx(30**0.5, rel=1e-6)
