"""The short way, first part: parameters, losses and the export of what was trained."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from support import ROOT

import ortgrad
from ortgrad import training
from ortgrad.errors import ArgumentTypeError, NameNotFoundError, TrainingError, TrainingModelError
from ortgrad.training import checkpoint, onnxblock, weights
from ortgrad.training.api import CheckpointState

F = torch.nn.functional


def model_of(text: str, weights: dict[str, np.ndarray] | None = None, opset: int = 21) -> onnx.ModelProto:
    model: onnx.ModelProto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g {text}')
    tensors = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    model.graph.initializer.extend(tensors)
    return model


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def loss_and_gradient(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    built = ortgrad.build_gradient_model(model, wrt="x", of="loss")
    loss, gradient = ortgrad.InferenceSession(built).run(["loss", "x_grad"], feeds)
    return loss, gradient


# Parameters


@pytest.mark.parametrize("name", ["cnn", "gru", "mlp"])
def test_parameters_are_those_of_the_builder(name: str) -> None:
    path = ROOT / "models" / f"{name}.onnx"
    built = ortgrad.build_gradient_model(path)
    recorded = {p.key: p.value for p in built.metadata_props}["ortgrad.wrt"]
    assert training.parameters(path) == json.loads(recorded)


NORMALIZED = """(float[N, 2, L] x) => (float[N, 2, L] y)
    { a = BatchNormalization(x, bn_scale, bn_bias, bn_mean, bn_var)
      b = Mul(a, factor) y = Dropout(b, ratio) }"""
PARTS = {
    "bn_scale": np.ones(2, np.float32),
    "bn_bias": np.zeros(2, np.float32),
    "bn_mean": np.zeros(2, np.float32),
    "bn_var": np.ones(2, np.float32),
    "factor": np.float32(2),
    "ratio": np.float32(0.5),
}


def test_statistics_and_settings_are_no_parameters() -> None:
    model = model_of(NORMALIZED, PARTS)
    assert training.parameters(model) == ["bn_scale", "bn_bias"]
    assert training.parameters(model, "*_scale") == ["bn_scale"]
    assert training.parameters(model, exclude=["*_scale"]) == ["bn_bias"]
    # A full name stands for any floating-point initializer.
    assert training.parameters(model, ["bn_*", "factor"]) == ["bn_scale", "bn_bias", "factor"]


@pytest.mark.parametrize("arguments", [{"patterns": "layer9.*"}, {"exclude": "bn_scales"}])
def test_a_pattern_must_match(arguments: dict[str, str]) -> None:
    with pytest.raises(NameNotFoundError, match="matches no parameter"):
        training.parameters(model_of(NORMALIZED, PARTS), **arguments)


# Losses against PyTorch

SHAPES = {"(N, C)": (4, 5), "(N, C, L)": (4, 5, 6), "(N, C, H, W)": (2, 5, 3, 4)}


def identity(*dims: int | str) -> onnx.ModelProto:
    shape = ", ".join(map(str, dims))
    return model_of(f"(float[{shape}] x) => (float[{shape}] y) {{ y = Identity(x) }}")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("options", [{}, {"weight": np.float32([1, 2, 0.5, 3, 1])}, {"ignore_index": 2}])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_cross_entropy(shape: tuple[int, ...], options: dict[str, Any], reduction: str) -> None:
    names = ["N", 5, "H", "W"][: len(shape)]
    model = training.add_loss(identity(*names), "cross-entropy", reduction=reduction, **options)
    x, labels = normal(*shape), np.random.default_rng(0).integers(0, 5, (shape[0], *shape[2:]))
    tensor = torch.tensor(x, requires_grad=True)
    wanted = {k: torch.tensor(v) if k == "weight" else v for k, v in options.items()}
    expected = F.cross_entropy(tensor, torch.tensor(labels), reduction=reduction, **wanted)
    expected.backward()
    loss, gradient = loss_and_gradient(model, {"x": x, "labels": labels})
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    assert tensor.grad is not None
    np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("dims", "axis"), [(("N", "S", 7), None), (("N", 3, 7), -1)])
def test_cross_entropy_of_tokens(dims: tuple[Any, ...], axis: int | None) -> None:
    model = training.add_loss(identity(*dims), "cross-entropy", axis=axis)
    x, labels = normal(2, 3, 7), np.random.default_rng(0).integers(0, 7, (2, 3))
    tensor = torch.tensor(x, requires_grad=True)
    expected = F.cross_entropy(tensor.flatten(0, 1), torch.tensor(labels).flatten())
    expected.backward()
    loss, gradient = loss_and_gradient(model, {"x": x, "labels": labels})
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    assert tensor.grad is not None
    np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_classes_that_the_shapes_do_not_tell() -> None:
    with pytest.raises(TrainingModelError, match="axis=1 or axis=-1"):
        training.add_loss(identity("N", 3, 7), "cross-entropy")


DISTANCES: dict[str, Callable[..., torch.Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "huber": F.huber_loss,
    "bce": F.binary_cross_entropy_with_logits,
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", DISTANCES)
def test_losses_of_a_target(name: str, reduction: str) -> None:
    options = {"delta": 0.7} if name == "huber" else {}
    x, target = normal(6, 5), np.random.default_rng(1).random((6, 5)).astype(np.float32)
    model = training.add_loss(identity("N", 5), name, reduction=reduction, **options)
    tensor = torch.tensor(x, requires_grad=True)
    expected = DISTANCES[name](tensor, torch.tensor(target), reduction=reduction, **options)
    if reduction == "none":
        (loss,) = ortgrad.InferenceSession(model).run(["loss"], {"x": x, "target": target})
        np.testing.assert_allclose(loss, expected.detach().numpy(), rtol=1e-5, atol=1e-6)
        return
    expected.backward()
    loss, gradient = loss_and_gradient(model, {"x": x, "target": target})
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    assert tensor.grad is not None
    np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_a_function_as_a_loss() -> None:
    def weighted(op: Any, output: Any, wanted: Any, importance: Any) -> Any:
        error = output - wanted
        return op.ReduceMean(importance * error * error, keepdims=0)

    # An old opset, in which ReduceMean has its axes as an attribute.
    source = model_of("(float[N, 3] x) => (float[N, 3] y) { y = Tanh(x) }", opset=11)
    types: dict[str, Any] = {"importance": (np.float32, ["N", 1])}
    model = training.add_loss(source, weighted, types=types, name="loss")
    assert [value.name for value in model.graph.input] == ["x", "wanted", "importance"]
    x, wanted, importance = normal(4, 3), normal(4, 3), np.abs(normal(4, 1))
    tensor = torch.tensor(x, requires_grad=True)
    expected = (torch.tensor(importance) * (tensor.tanh() - torch.tensor(wanted)) ** 2).mean()
    expected.backward()
    loss, gradient = loss_and_gradient(model, {"x": x, "wanted": wanted, "importance": importance})
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    assert tensor.grad is not None
    np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_a_function_of_values_of_the_model() -> None:
    model = training.add_loss(identity("N", 3), lambda op, y, x: op.ReduceSum(y * x, keepdims=0))
    assert [value.name for value in model.graph.input] == ["x"]
    (loss,) = ortgrad.InferenceSession(model).run(["loss"], {"x": np.full((2, 3), 2, np.float32)})
    assert loss == 24


def test_a_block_as_a_loss() -> None:
    model = training.add_loss(identity("N", 3), onnxblock.loss.MSELoss(), target="t")
    assert [value.name for value in model.graph.input] == ["x", "t"]
    assert [value.name for value in model.graph.output] == ["y", "loss"]


SOFTMAX = "(float[N, 3] x) => (float[N, 3] y) { s = Neg(x) y = Softmax(s) }"


@pytest.mark.parametrize(
    ("text", "loss", "options", "error", "words"),
    [
        (SOFTMAX, "cross-entropy", {"axis": 0}, TrainingModelError, "output='s'"),
        (SOFTMAX, "bce", {}, TrainingModelError, "loss is 'cross-entropy'"),
        (
            "(float[N, 3] x) => (float[N, 3] y) { y = Sigmoid(x) }",
            "cross-entropy",
            {},
            TrainingModelError,
            "'bce'",
        ),
        (
            "(float[N, 1] x) => (float[N, 1] y) { y = Relu(x) }",
            "cross-entropy",
            {},
            TrainingModelError,
            "'bce'",
        ),
        (SOFTMAX, "hinge", {}, TrainingError, "cross-entropy, mse"),
        (SOFTMAX, "mse", {"weight": [1.0]}, TrainingError, "weight"),
        (SOFTMAX, "mse", {"ignore_index": 1}, TrainingError, "ignore_index"),
        (SOFTMAX, "mse", {"pos_weight": [1.0]}, TrainingError, "pos_weight"),
        (SOFTMAX, "huber", {"delta": 0.0}, TrainingError, "delta"),
        (SOFTMAX, "mse", {"reduction": "median"}, TrainingError, "reduction"),
        (SOFTMAX, "mse", {"output": "z"}, NameNotFoundError, "'z'"),
        (SOFTMAX, "mse", {"name": "s"}, TrainingModelError, "another name"),
        (SOFTMAX, "mse", {"target": "s"}, TrainingModelError, "another name"),
        (SOFTMAX, lambda op, y: 3, {}, ArgumentTypeError, "int"),
        (SOFTMAX, lambda op: None, {}, ArgumentTypeError, "loss\\(op, output, target\\)"),
        ("(int64[N] x) => (int64[N] y) { y = Identity(x) }", "mse", {}, TrainingModelError, "no floating"),
    ],
)
def test_losses_that_are_refused(
    text: str, loss: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        training.add_loss(model_of(text), loss, **options)


# Export

LINEAR = "(float[N, 2] x) => (float[N, 3] y) { y = MatMul(x, w) }"


def linear() -> onnx.ModelProto:
    return model_of(LINEAR, {"w": normal(2, 3)})


def test_export_of_all_kinds_of_state(tmp_path: Path) -> None:
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    path = tmp_path / "state.safetensors"
    state = checkpoint.Checkpoint(trainable={"w": w})
    checkpoint.save(state, path)
    loaded = CheckpointState.load_checkpoint(path)
    for each in ({"w": w}, state, path, loaded):
        assert training.export(linear(), each, tmp_path / "trained.onnx") is None
        trained = onnx.load(tmp_path / "trained.onnx")
        np.testing.assert_array_equal(numpy_helper.to_array(trained.graph.initializer[0]), w)
        assert [value.name for value in (*trained.graph.input, *trained.graph.output)] == ["x", "y"]


def test_export_of_a_large_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("(float[N, 20] x) => (float[N, 20] y) { y = MatMul(x, w) }", {"w": normal(20, 20)})
    monkeypatch.setattr(weights, "EXTERNAL_FROM", 1000)
    w = np.ones((20, 20), np.float32)
    training.export(model, {"w": w}, tmp_path / "trained.onnx")
    assert (tmp_path / "trained.onnx.data").stat().st_size == w.nbytes
    np.testing.assert_array_equal(
        numpy_helper.to_array(onnx.load(tmp_path / "trained.onnx").graph.initializer[0]), w
    )
    # The exported model is trained further, its data beside it.
    again = training.export(tmp_path / "trained.onnx", {"w": 2 * w})
    assert again is not None
    np.testing.assert_array_equal(numpy_helper.to_array(again.graph.initializer[0]), 2 * w)


def test_weights_in_constants_and_subgraphs() -> None:
    model = model_of("""(float[2] x, bool c) => (float[2] y) {
        k = Constant<value = float[2] {1, 2}>()
        a = Mul(x, k)
        y = If(c) <
            then_branch = one () => (float[2] p) { u = Constant<value = float[2] {3, 4}>() p = Mul(a, u) },
            else_branch = two () => (float[2] q) { q = Neg(a) }
        >
    }""")
    assert training.parameters(model) == ["k", "u"]
    made = training.export(model, {"k": np.float32([5, 6]), "u": np.float32([7, 8])})
    assert made is not None
    (y,) = ortgrad.InferenceSession(made).run(None, {"x": np.float32([1, 1]), "c": np.array(True)})
    np.testing.assert_array_equal(y, [35, 48])


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ({"v": normal(2, 3)}, TrainingModelError, "no parameter 'v'"),
        ({"w": normal(3, 2)}, TrainingModelError, "float32\\[3, 2\\]"),
        ({"w": normal(2, 3).astype(np.float64)}, TrainingModelError, "float64"),
        (3, ArgumentTypeError, "int"),
    ],
)
def test_states_that_do_not_fit(state: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        training.export(linear(), state)


def test_a_full_disk_keeps_the_old_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trained.onnx"
    training.export(linear(), {"w": normal(2, 3)}, path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        training.export(linear(), {"w": np.zeros((2, 3), np.float32)}, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
