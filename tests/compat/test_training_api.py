"""ortgrad.training.api: steps, parameters, properties, files, and what goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support import GOLDEN, PATIENCE, ROOT, assert_close
from support.big_artifacts import big_artifacts, load

import ortgrad
from ortgrad.errors import (
    ArgumentTypeError,
    CheckpointError,
    ParameterNotFoundError,
    TrainingError,
    TrainingFileError,
    TrainingModelError,
)
from ortgrad.training import artifacts, checkpoint, weights
from ortgrad.training.api import CheckpointState, LinearLRScheduler, Module, Optimizer, Parameter
from ortgrad.training.optimizers import passes

CNN = GOLDEN / "cnn"
OrtValue = onnxruntime.OrtValue

MLP = """<ir_version: 10, opset_import: ["" : 18]>
    mlp (float[N, 6] x) => (float[N, 4] logits) {
        h = Gemm <transB = 1> (x, w1, b1)
        r = Relu (h)
        logits = Gemm <transB = 1> (r, w2, b2)
    }"""


def mlp() -> onnx.ModelProto:
    """Two layers with weights from a fixed generator."""
    model = onnx.parser.parse_model(MLP)
    numbers = np.random.default_rng(0)
    for name, shape in {"w1": (5, 6), "b1": (5,), "w2": (4, 5), "b2": (4,)}.items():
        value = numbers.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts of the small network; the first layer's weight is frozen."""
    place = tmp_path_factory.mktemp("artifacts")
    artifacts.generate_artifacts(
        mlp(),
        requires_grad=["b1", "w2", "b2"],
        frozen_params=["w1"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=place,
        nominal_checkpoint=True,
        additional_output_names=["logits"],
    )
    return place


def batch(seed: int = 0, size: int = 8) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(seed)
    return numbers.standard_normal((size, 6)).astype(np.float32), numbers.integers(0, 4, size)


class Torch:
    """The same network in PyTorch."""

    def __init__(self, state: CheckpointState) -> None:
        self.values = {
            name: torch.from_numpy(p.data.copy()).requires_grad_(p.requires_grad)
            for name, p in state.parameters
        }

    def backward(self, x: np.ndarray, labels: np.ndarray) -> float:
        w = self.values
        hidden = torch.relu(torch.from_numpy(x) @ w["w1"].T + w["b1"])
        loss = torch.nn.functional.cross_entropy(hidden @ w["w2"].T + w["b2"], torch.from_numpy(labels))
        loss.backward()
        return loss.item()

    def assert_gradients(self, state: CheckpointState) -> None:
        for name, parameter in state.parameters:
            expected = self.values[name].grad
            if expected is None:
                assert parameter.grad is None
            else:
                assert parameter.grad is not None
                assert_close(parameter.grad, expected.numpy(), 1e-5)


# Steps


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("compiled", [True, False])
def test_artifacts_of_onnxruntime_training(
    kind: type, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five steps with its own Module and Optimizer gave these losses and parameters."""
    if not compiled:
        monkeypatch.setattr(passes, "is_compiled", lambda: False)
    expected = np.load(CNN / "expected.npz")
    state = CheckpointState.load_checkpoint(kind(CNN / "checkpoint"))
    module = Module(kind(CNN / "training_model.onnx"), state, kind(CNN / "eval_model.onnx"))
    optimizer = Optimizer(kind(CNN / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(0.01)
    for step, loss in enumerate(expected["losses"]):
        found = module(expected[f"step{step}_x"], expected[f"step{step}_labels"])
        assert found == pytest.approx(loss, rel=1e-5)
        optimizer.step()
        module.lazy_reset_grad()
    for name, parameter in state.parameters:
        assert_close(parameter.data, expected[f"param_{name}"], 1e-4)


def test_batch_normalization_of_onnxruntime_training() -> None:
    """Its artifacts with frozen statistics, updated in place; the gradients of two batches add up."""
    folder = GOLDEN / "batch_norm"
    expected = np.load(folder / "expected.npz")
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    for step, loss in enumerate(expected["L"]):
        assert module(expected[f"x{step}"], expected[f"t{step}"]) == pytest.approx(loss, rel=1e-5)
        if step % 2:
            optimizer.step()
            module.lazy_reset_grad()
    for name, parameter in state.parameters:
        assert_close(parameter.data, expected[f"p_{name}"], 1e-5)


def test_gradients_add_up_until_they_are_reset(folder: Path) -> None:
    state, module = load(folder)
    for resets in (False, False, True, False):
        if resets:
            module.lazy_reset_grad()
        if resets or not state.parameters["b1"].grad.any():  # type: ignore[union-attr]
            reference = Torch(state)
        for seed in range(3):
            loss, logits = module(*batch(seed))
            assert loss == pytest.approx(reference.backward(*batch(seed)), rel=1e-5)
            assert logits.shape == (8, 4)
            reference.assert_gradients(state)


def test_a_loop_that_never_accumulates_has_one_session(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Module] = []
    make = Module._make_train_session

    def counted(self: Module) -> Any:
        made.append(self)
        return make(self)

    monkeypatch.setattr(Module, "_make_train_session", counted)
    _, module = load(folder)
    for seed in range(3):
        module(*batch(seed))
        module.lazy_reset_grad()
    assert len(made) == 1
    module(*batch(0))
    module(*batch(1))
    module.lazy_reset_grad()
    module(*batch(2))
    assert len(made) == 2


def test_parameters_and_gradients_stay_where_they_are(folder: Path) -> None:
    state, module = load(folder)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    views = {name: (p.data, p.grad) for name, p in state.parameters}
    for seed in range(4):
        module(*batch(seed))
        optimizer.step()
        if seed == 2:
            module.lazy_reset_grad()
    for name, (data, grad) in views.items():
        parameter = state.parameters[name]
        assert np.shares_memory(parameter.data, data)
        assert np.array_equal(parameter.data, data)
        assert (grad is None) == (parameter.grad is None)
        if grad is not None:
            assert np.shares_memory(parameter.grad, grad) and grad.any()  # type: ignore[arg-type]
    # A view can be written to, and the next step sees it.
    before = module(*batch())[0]
    views["b2"][0][:] += [5, 0, 0, 0]
    assert module(*batch())[0] != before


def test_results_of_a_step_are_not_overwritten_by_the_next(folder: Path) -> None:
    _, module = load(folder)
    values = [OrtValue.ortvalue_from_numpy(array) for array in batch(0)]
    first = module(*values)[1]
    copy = first.numpy().copy()
    arrays = module(*batch(0))[1]
    module(*batch(1))
    assert np.array_equal(first.numpy(), copy)
    assert np.array_equal(arrays, copy)


def test_a_step_allocates_nothing_the_size_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big_artifacts(tmp_path, 1024)
    x = np.ones((4, 1024), np.float32)
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(passes, "is_compiled", lambda: False)
        state, module = load(tmp_path)
        optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
        for _ in range(2):
            module(x, x)
            optimizer.step()
        tracemalloc.start()
        for _ in range(3):
            module(x, x)
            optimizer.step()
            module.lazy_reset_grad()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        size = state.parameters["w"].data.nbytes
        # NumPy's own blocks are a fixed number of chunks.
        assert peak < size / 4, f"{peak} bytes of a model of {size}"


def test_results_with_any_number_of_threads(tmp_path: Path) -> None:
    big_artifacts(tmp_path, 512)
    x = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    found = []
    for threads in (1, 2, 5):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        state, module = load(tmp_path, session_options=options)
        optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
        gradients = state.state.allocate_gradients()
        gradients["w"][...] = np.random.default_rng(1).standard_normal((512, 512))
        for _ in range(3):
            optimizer.step()
        found.append(state.parameters["w"].data.tobytes())
    assert len(set(found)) == 1
    assert x.any()


def test_arrays_and_ort_values(folder: Path) -> None:
    _, module = load(folder)
    x, labels = batch()
    values = OrtValue.ortvalue_from_numpy(x), OrtValue.ortvalue_from_numpy(labels)
    for mode in (True, False):
        module.train(mode)
        by_array = module(x, labels)
        by_value = module(*values)
        mixed = module(values[0], labels)
        assert isinstance(by_array, tuple) and isinstance(by_value, tuple)
        for a, b, c in zip(by_array, by_value, mixed, strict=True):
            assert isinstance(a, np.ndarray) and isinstance(c, np.ndarray) and isinstance(b, OrtValue)
            assert np.array_equal(a, b.numpy()) and np.array_equal(a, c)
        turned = np.asfortranarray(x)
        assert np.array_equal(module(turned, labels)[0], by_array[0])


def test_names_that_end_like_gradients_in_evaluation(tmp_path: Path) -> None:
    """Such inputs of a training model are buffers; in an evaluation model they are the user's."""
    artifacts.generate_artifacts(
        mlp(), requires_grad=["w1"], loss=artifacts.LossType.CrossEntropyLoss, artifact_directory=tmp_path
    )
    model = onnx.load(tmp_path / "eval_model.onnx")
    for value in model.graph.input:
        if value.name == "x":
            value.name = "x_grad"
    for node in model.graph.node:
        node.input[:] = ["x_grad" if name == "x" else name for name in node.input]
    onnx.save(model, tmp_path / "eval_model.onnx")
    _, module = load(tmp_path)
    expected = module(*batch())
    assert module.eval().input_names() == ["x_grad", "labels"]
    assert module(*batch()) == pytest.approx(expected, rel=1e-6)


def test_modes_and_names(folder: Path) -> None:
    _, module = load(folder)
    assert module.training and module.train() is module
    assert module.input_names() == ["x", "labels"]
    assert module.output_names()[1:] == ["logits"]
    assert module.eval() is module and not module.training
    assert module.input_names() == ["x", "labels"]
    assert len(module.output_names()) == 2
    assert not module.train(False).training and module.train(True).training


def test_evaluation_does_not_touch_gradients(folder: Path) -> None:
    state, module = load(folder)
    reference = Torch(state)
    loss = module(*batch())[0]
    reference.backward(*batch())
    assert module.eval()(*batch())[0] == pytest.approx(loss, rel=1e-6)
    module.eval()(*batch(1))
    reference.assert_gradients(state)


def test_one_output_comes_bare(tmp_path: Path) -> None:
    artifacts.generate_artifacts(
        mlp(), requires_grad=["w1"], loss=artifacts.LossType.CrossEntropyLoss, artifact_directory=tmp_path
    )
    _, module = load(tmp_path)
    assert isinstance(module(*batch()), np.ndarray)


def test_strings(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 18]>
        g (string[N, 2] s) => (float[N, 2] y) <float[2] w = {1, 2}> {
            x = Cast <to = 1> (s)  y = Mul (x, w) }"""
    )
    artifacts.generate_artifacts(
        model, requires_grad=["w"], loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path
    )
    state, module = load(tmp_path)
    strings, target = np.array([["1.0", "2.0"]]), np.float32([[0, 0]])
    assert module(strings, target) == pytest.approx((1 + 16) / 2)
    assert state.parameters["w"].grad.tolist() == [1, 8]  # type: ignore[union-attr]
    module(strings.astype(object), target)
    assert state.parameters["w"].grad.tolist() == [2, 16]  # type: ignore[union-attr]
    assert module.eval()(strings, target) == pytest.approx((1 + 16) / 2)


BATCH_NORM = """<ir_version: 10, opset_import: ["" : 18]>
    g (float[N, 3, 4, 4] x) => (float[N, 3, 4, 4] y) {
        h = Conv <kernel_shape = [1, 1]> (x, w)
        y = BatchNormalization <momentum = 0.75> (h, scale, bias, mean, var)
    }"""


def batch_norm_artifacts(place: Path) -> dict[str, np.ndarray]:
    model = onnx.parser.parse_model(BATCH_NORM)
    numbers = np.random.default_rng(3)
    values = {
        "w": numbers.standard_normal((3, 3, 1, 1)).astype(np.float32),
        "scale": np.float32([1, 2, 3]),
        "bias": np.float32([0, 1, 2]),
        "mean": np.float32([0.5, 0, 1]),
        "var": np.float32([1, 2, 0.5]),
    }
    for name, value in values.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    artifacts.generate_artifacts(
        model,
        requires_grad=["w", "scale", "bias"],
        frozen_params=["mean", "var"],
        loss=artifacts.LossType.MSELoss,
        optimizer=artifacts.OptimType.SGD,
        artifact_directory=place,
    )
    return values


@pytest.mark.parametrize("accumulate", [False, True])
def test_running_statistics_are_updated_in_place(accumulate: bool, tmp_path: Path) -> None:
    values = batch_norm_artifacts(tmp_path)
    state, module = load(tmp_path)
    views = {name: state.parameters[name].data for name in ("mean", "var")}
    norm = torch.nn.BatchNorm2d(3, momentum=0.25)
    with torch.no_grad():
        for mine, name in ((norm.running_mean, "mean"), (norm.running_var, "var")):
            assert mine is not None
            mine.copy_(torch.from_numpy(values[name]))
        norm.weight.copy_(torch.from_numpy(values["scale"]))
        norm.bias.copy_(torch.from_numpy(values["bias"]))
    w = torch.from_numpy(values["w"])
    numbers = np.random.default_rng(0)
    for step in range(4):
        x = numbers.standard_normal((5, 3, 4, 4)).astype(np.float32)
        target = numbers.standard_normal((5, 3, 4, 4)).astype(np.float32)
        result = norm(torch.nn.functional.conv2d(torch.from_numpy(x), w))
        expected = torch.nn.functional.mse_loss(result, torch.from_numpy(target))
        assert module(x, target) == pytest.approx(expected.item(), rel=1e-5)
        if not accumulate:
            module.lazy_reset_grad()
        assert norm.running_mean is not None and norm.running_var is not None
        assert_close(views["mean"], norm.running_mean.numpy(), 1e-5)
        assert_close(views["var"], norm.running_var.numpy(), 1e-5)
        assert step < 4
    norm.eval()
    result = norm(torch.nn.functional.conv2d(torch.from_numpy(x), w))
    expected = torch.nn.functional.mse_loss(result, torch.from_numpy(target))
    assert module.eval()(x, target) == pytest.approx(expected.item(), rel=1e-5)


def test_running_statistics_as_onnxruntime_training_writes_them(tmp_path: Path) -> None:
    """BatchNormInternal with statistics as inputs, and no output for them."""
    source = onnx.load(GOLDEN / "training" / "batch_normalization.onnx")
    graph = source.graph
    saved = np.load(GOLDEN / "training" / "batch_normalization.npz")
    known = {t.name: onnx.numpy_helper.to_array(t).copy() for t in graph.initializer}
    (node,) = (n for n in graph.node if n.op_type == "BatchNormInternal")
    frozen = {name: known[name] for name in node.input[3:5]}
    kept = [t for t in graph.initializer if t.name not in frozen]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    for name, value in frozen.items():
        graph.input.append(onnx.helper.make_tensor_value_info(name, 1, value.shape))
    trained = {i.name.split("_grad.")[0] for i in graph.input if "_grad.accumulation" in i.name}
    onnx.save(source, tmp_path / "training_model.onnx")
    state = checkpoint.Checkpoint(trainable={name: saved[f"feed:{name}"] for name in trained}, frozen=frozen)
    checkpoint.save(state, tmp_path / "checkpoint")
    loaded, module = load(tmp_path, evaluation=False)
    feeds = [saved[f"feed:{name}"] for name in module.input_names()]
    mean, var = (loaded.parameters[name].data for name in node.input[3:5])
    old = mean.copy(), var.copy()
    loss = module(*feeds)
    assert loss == pytest.approx(float(saved["loss"]), rel=1e-5)
    for name in trained:
        gradient = loaded.parameters[name].grad
        assert gradient is not None
        assert_close(gradient, saved[f"grad:{name}"], 1e-5)
    assert not np.array_equal(mean, old[0]) and not np.array_equal(var, old[1])
    once = mean.copy()
    module(*feeds)
    # With the same batch, each step goes the same part of the way to its mean.
    np.testing.assert_allclose(mean - once, 0.9 * (once - old[0]), rtol=1e-4, atol=1e-6)


def test_models_with_external_data(folder: Path, tmp_path: Path) -> None:
    """Constants that are not parameters stay in the models, and may be in a second file beside them."""
    model = mlp()
    artifacts.generate_artifacts(
        model, requires_grad=["w2"], loss=artifacts.LossType.CrossEntropyLoss, artifact_directory=tmp_path
    )
    expected = load(tmp_path)[1](*batch())
    for name in ("training_model.onnx", "eval_model.onnx"):
        loaded = onnx.load(tmp_path / name)
        onnx.save(
            loaded, tmp_path / name, save_as_external_data=True, location=f"{name}.bin", size_threshold=0
        )
    _, module = load(tmp_path)
    assert module(*batch()) == expected
    assert module(*batch()) == expected
    module.export_model_for_inferencing(tmp_path / "m.onnx", ["logits"])
    assert run(tmp_path / "m.onnx", x=batch()[0])[0].shape == (8, 4)


def test_parameters_of_other_types(tmp_path: Path) -> None:
    """Trained in double precision; frozen ones of any type; scalars, and tensors without elements."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 18]>
        g (double[N, 3] x) => (double[N, 3] y) <
            double[3] w = {1, 2, 3}, double scale = {2}, int64[2] shape = {-1, 3}, bool flag = {1},
            double[0] nothing = {}> {
            a = Mul (x, w)
            b = Mul (a, scale)
            c = Reshape (b, shape)
            d = Where (flag, c, x)
            none = ReduceSum <keepdims = 0> (nothing)
            y = Add (d, none)
        }"""
    )
    artifacts.generate_artifacts(
        model,
        requires_grad=["w", "scale"],
        frozen_params=["shape", "flag", "nothing"],
        loss=artifacts.LossType.MSELoss,
        optimizer=artifacts.OptimType.SGD,
        artifact_directory=tmp_path,
    )
    state, module = load(tmp_path)
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.5)
    x = np.array([[1.0, 1, 1]])
    for _ in range(2):
        assert module(x, np.zeros((1, 3))) == pytest.approx(4 * 14 / 3)
    assert_close(np.asarray(state.parameters["scale"].grad), np.array(2 * 2 * 2 * 14 / 3), 1e-12)
    optimizer.step()
    assert state.parameters["scale"].data == pytest.approx(2 - 0.5 * 2 * 2 * 2 * 14 / 3)
    with pytest.raises(TrainingError, match="Only float is supported"):
        module.get_contiguous_parameters()
    CheckpointState.save_checkpoint(state, tmp_path / "c", include_optimizer_state=True)
    again = CheckpointState.load_checkpoint(tmp_path / "c")
    assert again.parameters["flag"].data.dtype == np.bool_


def test_two_modules_on_one_state(folder: Path) -> None:
    state, module = load(folder)
    other = Module(folder / "training_model.onnx", state)
    reference = Torch(state)
    module(*batch(0))
    reference.backward(*batch(0))
    reference.assert_gradients(state)
    other.lazy_reset_grad()
    reference = Torch(state)
    other(*batch(1))
    reference.backward(*batch(1))
    reference.assert_gradients(state)


# Parameters and properties


def test_parameters(folder: Path) -> None:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    assert [name for name, _ in state.parameters] == ["b1", "b2", "w1", "w2"]
    assert len(state.parameters) == 4
    assert "w1" in state.parameters and "nothing" not in state.parameters
    parameter = state.parameters["w1"]
    assert isinstance(parameter, Parameter)
    assert (parameter.name, parameter.requires_grad, parameter.grad) == ("w1", False, None)
    assert state.parameters["w2"].requires_grad and state.parameters["w2"].grad is None
    assert repr(parameter) == "Parameter(name=w1, requires_grad=False)"
    assert "b1" in repr(state.parameters) and "3 trainable and 1 frozen" in repr(state)
    with pytest.raises(KeyError, match="Parameter nothing not found"):
        state.parameters["nothing"]
    with pytest.raises(ParameterNotFoundError):
        state.parameters["nothing"] = np.zeros(1, np.float32)
    Module(folder / "training_model.onnx", state)
    assert state.parameters["w2"].grad is not None and not state.parameters["w2"].grad.any()
    assert state.parameters["w1"].grad is None


@pytest.mark.parametrize("with_module", [False, True])
def test_parameters_can_be_set(with_module: bool, folder: Path) -> None:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    view = state.parameters["w1"].data
    module = Module(folder / "training_model.onnx", state) if with_module else None
    state.parameters["w1"].data = np.ones((5, 6), np.float32)
    assert (view == 1).all()
    state.parameters["w1"] = np.full((5, 6), 2, np.float32)
    assert (view == 2).all()
    state.parameters["w1"] = OrtValue.ortvalue_from_numpy(np.full((5, 6), 3, np.float32))
    assert (view == 3).all()
    bad: list[tuple[Any, type[Exception]]] = [
        (np.ones((6, 5), np.float32), RuntimeError),
        (np.ones((5, 6), np.float64), RuntimeError),
        (np.ones((1, 5, 6), np.float32), RuntimeError),
        ([[1.0] * 6] * 5, TypeError),
        (3.0, TypeError),
    ]
    for value, error in bad:
        with pytest.raises(error, match="w1") as caught:
            state.parameters["w1"] = value
        assert isinstance(caught.value, ortgrad.OrtgradError)
        with pytest.raises(error, match="w1"):
            state.parameters["w1"].data = value
    assert (view == 3).all()
    module = module or Module(folder / "training_model.onnx", state)
    reference = Torch(state)
    assert module(*batch())[0] == pytest.approx(reference.backward(*batch()), rel=1e-5)


def test_properties(tmp_path: Path) -> None:
    checkpoint.save(checkpoint.Checkpoint(), tmp_path / "c")
    state = CheckpointState.load_checkpoint(tmp_path / "c")
    properties = state.properties
    values: dict[str, Any] = {
        "z": 1,
        "a": 0.1,
        "m": "text",
        "flag": True,
        "n": np.int64(5),
        "f": np.float32(2),
    }
    for name, value in values.items():
        properties[name] = value
    assert [name for name, _ in properties] == sorted(values)
    assert len(properties) == 6 and "z" in properties and "y" not in properties
    assert properties["a"] == float(np.float32(0.1))
    assert properties["flag"] == 1 and type(properties["flag"]) is int
    assert "text" in repr(properties) and "text" in repr(state)
    with pytest.raises(KeyError, match="Property y not found"):
        properties["y"]
    for bad in ([1], None, {}, 1 << 70, b"x", 1j):
        with pytest.raises(TypeError) as caught:
            properties["bad"] = bad  # type: ignore[assignment]
        assert isinstance(caught.value, ortgrad.OrtgradError)
    with pytest.raises(ArgumentTypeError):
        properties[1] = 1  # type: ignore[index]
    for name in ("c", "c.safetensors"):
        CheckpointState.save_checkpoint(state, tmp_path / name)
        found = CheckpointState.load_checkpoint(tmp_path / name)
        assert dict(found.properties) == dict(properties)


def test_contiguous_parameters(folder: Path) -> None:
    state, module = load(folder)
    order = ["w1", "b1", "w2", "b2"]
    everything = module.get_contiguous_parameters()
    expected = np.concatenate([state.parameters[n].data.reshape(-1) for n in order])
    assert np.array_equal(everything.numpy(), expected)
    assert module.get_parameters_size(False) == expected.size == 30 + 5 + 20 + 4
    assert module.get_parameters_size() == module.get_parameters_size(True) == 29
    trained = module.get_contiguous_parameters(trainable_only=True).numpy()
    assert np.array_equal(trained, expected[30:])
    everything.numpy()[...] = 7  # a copy
    assert np.array_equal(module.get_contiguous_parameters().numpy(), expected)
    view = state.parameters["b2"].data
    module.copy_buffer_to_parameters(OrtValue.ortvalue_from_numpy(trained + 1))
    assert np.array_equal(module.get_contiguous_parameters(True).numpy(), trained + 1)
    assert np.array_equal(view, trained[-4:] + 1)
    assert np.array_equal(state.parameters["w1"].data.reshape(-1), expected[:30])
    module.copy_buffer_to_parameters(expected, trainable_only=False)
    value = module.get_contiguous_parameters()
    module.copy_buffer_to_parameters(value, trainable_only=False)
    assert np.array_equal(module.get_contiguous_parameters().numpy(), expected)
    for bad in (expected, trained[:-1], trained.astype(np.float64)):
        with pytest.raises(RuntimeError, match="Parameters buffer size incorrect"):
            module.copy_buffer_to_parameters(bad)
    with pytest.raises(TypeError):
        module.copy_buffer_to_parameters([1.0])


def test_a_nominal_checkpoint(folder: Path) -> None:
    complete, module = load(folder)
    state = CheckpointState.load_checkpoint(folder / "nominal_checkpoint")
    assert "nominal" in repr(state) and "w1" in state.parameters and len(state.parameters) == 4
    other = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", other)
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: state.parameters["w1"], "Please load the parameter states first"),
        (lambda: list(state.parameters), "Please load the parameter states first"),
        (lambda: other(*batch()), "Please load the model parameters first."),
        (lambda: other.eval()(*batch()), "Please load the model parameters first."),
        (optimizer.step, "Please load the model parameters first."),
        (other.get_contiguous_parameters, "Please load the model parameters first."),
        (lambda: other.export_model_for_inferencing("x.onnx", ["logits"]), "load the model parameters first"),
        (lambda: other.copy_buffer_to_parameters(np.zeros(29, np.float32)), "all parameters need to be"),
    ]
    for call, text in refused:
        with pytest.raises(TrainingError, match=text):
            call()
    with pytest.raises(TrainingError, match="Please load all the parameter states first"):
        state.parameters["w1"] = np.zeros((5, 6), np.float32)
    assert other.get_parameters_size(False) == 59
    other.copy_buffer_to_parameters(module.get_contiguous_parameters(), trainable_only=False)
    rival = Optimizer(folder / "optimizer_model.onnx", module)
    for seed in range(3):
        assert module.train()(*batch(seed))[0] == other.train()(*batch(seed))[0]
        optimizer.step()
        rival.step()
    for name, parameter in complete.parameters:
        assert np.array_equal(state.parameters[name].data, parameter.data)


# Optimizer and schedule


def test_learning_rate(folder: Path) -> None:
    _, module = load(folder)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    assert optimizer.get_learning_rate() == pytest.approx(0.001)
    optimizer.set_learning_rate(0.1)
    assert optimizer.get_learning_rate() == float(np.float32(0.1))


def test_linear_schedule(folder: Path) -> None:
    """Up to the initial rate in the first steps, then down to 0: not the other way round."""
    _, module = load(folder)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    scheduler = LinearLRScheduler(optimizer, 2, 6, 0.5)
    rates = [optimizer.get_learning_rate()]
    for seed in range(7):
        module(*batch(seed))
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.get_learning_rate())
    assert rates == pytest.approx([0, 0.25, 0.5, 0.375, 0.25, 0.125, 0, 0])
    assert LinearLRScheduler(optimizer, 0, 0, 1.0) is not None
    assert optimizer.get_learning_rate() == 0


@pytest.mark.parametrize("name", ["saved", "saved.safetensors"])
@pytest.mark.parametrize("kind", [artifacts.OptimType.AdamW, artifacts.OptimType.SGD])
def test_a_training_is_continued_to_the_bit(name: str, kind: artifacts.OptimType, tmp_path: Path) -> None:
    artifacts.generate_artifacts(
        mlp(),
        requires_grad=["w1", "b1", "w2", "b2"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=kind,
        artifact_directory=tmp_path,
    )

    def steps(path: Path, first: int, last: int) -> CheckpointState:
        state = CheckpointState.load_checkpoint(path)
        module = Module(tmp_path / "training_model.onnx", state)
        optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
        optimizer.set_learning_rate(0.05)
        for seed in range(first, last):
            module(*batch(seed))
            optimizer.step()
            module.lazy_reset_grad()
        return state

    straight = steps(tmp_path / "checkpoint", 0, 6)
    half = steps(tmp_path / "checkpoint", 0, 3)
    CheckpointState.save_checkpoint(half, tmp_path / name, include_optimizer_state=True)
    # Saved once more before there is an optimizer: the state is still complete.
    again = CheckpointState.load_checkpoint(tmp_path / name)
    CheckpointState.save_checkpoint(again, tmp_path / name, include_optimizer_state=True)
    resumed = steps(tmp_path / name, 3, 6)
    for key, parameter in straight.parameters:
        assert parameter.data.tobytes() == resumed.parameters[key].data.tobytes()
    saved = checkpoint.load(tmp_path / name).optimizer["group0"]
    assert saved.step == 3
    expected = ["momentum0", "momentum1"] if kind is artifacts.OptimType.AdamW else ["momentum0"]
    assert sorted(saved.momentums["w1"]) == expected
    CheckpointState.save_checkpoint(half, tmp_path / name)
    assert not checkpoint.load(tmp_path / name).optimizer


def test_optimizer_state_that_does_not_fit(folder: Path, tmp_path: Path) -> None:
    state, module = load(folder)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    module(*batch())
    optimizer.step()
    CheckpointState.save_checkpoint(state, tmp_path / "good", include_optimizer_state=True)

    def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[], Optimizer]:
        contents = checkpoint.load(tmp_path / "good")
        change(contents.optimizer["group0"].momentums)
        checkpoint.save(contents, tmp_path / "bad")
        loaded = CheckpointState.load_checkpoint(tmp_path / "bad")
        other = Module(folder / "training_model.onnx", loaded)
        return lambda: Optimizer(folder / "optimizer_model.onnx", other)

    with pytest.raises(TrainingError, match="nothing about parameter 'b1'"):
        changed(lambda m: m.pop("b1"))()
    with pytest.raises(TrainingError, match="no momentum1 of parameter 'b1'"):
        changed(lambda m: m["b1"].pop("momentum1"))()
    with pytest.raises(TrainingError, match="momentum0 of parameter 'b1'"):
        changed(lambda m: m["b1"].update(momentum0=np.zeros(4, np.float32)))()
    assert changed(lambda m: None)() is not None


# Bad input


def test_a_batch_that_does_not_fit(folder: Path) -> None:
    state, module = load(folder)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    x, labels = batch()
    bad: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((x,), RuntimeError, r"2 inputs \(x, labels\), not 1"),
        ((x, labels, x), RuntimeError, "not 3"),
        ((), RuntimeError, "not 0"),
        ((x.astype(np.float64), labels), RuntimeError, "double"),
        ((x, labels.astype(np.float32)), RuntimeError, "float"),
        ((x[:, :5], labels), RuntimeError, r"shape \[8, 5\]"),
        ((x[0], labels), RuntimeError, r"shape \[6\]"),
        ((x, labels.reshape(-1, 1)), RuntimeError, "shape"),
        ((x, labels.tolist()), TypeError, "labels.*list"),
        (
            (OrtValue.ortvalue_from_numpy(x[:, :5]), OrtValue.ortvalue_from_numpy(labels)),
            RuntimeError,
            "shape",
        ),
        ((np.array([["a"] * 6] * 8), labels), RuntimeError, "string"),
    ]
    for mode in (True, False):
        for values, kind, text in bad:
            module.train(mode)
            with pytest.raises(kind, match=text) as caught:
                module(*values)
            assert isinstance(caught.value, ortgrad.OrtgradError)
    # Nothing was computed: what has been added up so far is still there.
    reference = Torch(state)
    module.train()
    module(x, labels)
    with pytest.raises(TrainingError):
        module(x)
    module(x, labels)
    reference.backward(x, labels)
    reference.backward(x, labels)
    reference.assert_gradients(state)
    optimizer.step()


@pytest.mark.parametrize("label", [4, 10**9])
def test_labels_out_of_range(label: int, folder: Path) -> None:
    """The step fails; the gradients count as lost, and the next step begins anew."""
    state, module = load(folder)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    x, labels = batch()
    wrong = labels.copy()
    wrong[3] = label
    before = {name: p.data.copy() for name, p in state.parameters}
    for earlier in range(3):
        for seed in range(earlier):
            module(*batch(seed))
        with pytest.raises(RuntimeError, match=r"(label|index).* is out of range") as caught:
            module(x, wrong)
        assert isinstance(caught.value, ortgrad.OrtgradError)
        with pytest.raises(TrainingError, match="last training step failed"):
            optimizer.step()
        reference = Torch(state)
        loss = module(x, labels)[0]
        assert loss == pytest.approx(reference.backward(x, labels), rel=1e-5)
        reference.assert_gradients(state)
        module.lazy_reset_grad()
    for name, value in before.items():
        assert np.array_equal(state.parameters[name].data, value)
    with pytest.raises(TrainingError, match="out of range"):
        module.eval()(x, wrong)
    module.eval()(x, labels)
    optimizer.step()


@pytest.mark.parametrize("mode", [True, False])
def test_negative_labels(mode: bool, folder: Path) -> None:
    """onnxruntime would take -1 for the last class."""
    state, module = load(folder)
    x, labels = batch()
    wrong = labels.copy()
    wrong[3] = -1
    reference = Torch(state)
    module(x, labels)
    module.train(mode)
    with pytest.raises(TrainingError, match="out of range: input 'labels' has the label -1"):
        module(x, wrong)
    with pytest.raises(TrainingError, match="out of range"):
        module(OrtValue.ortvalue_from_numpy(x), OrtValue.ortvalue_from_numpy(wrong))
    module.train()(x, labels)
    reference.backward(x, labels)
    reference.backward(x, labels)
    reference.assert_gradients(state)


def test_batches_of_different_lengths(folder: Path) -> None:
    _, module = load(folder)
    with pytest.raises(RuntimeError):
        module(batch(0, 8)[0], batch(0, 7)[1])
    module(*batch(0, 7))


def test_evaluation_without_a_model_for_it(folder: Path, tmp_path: Path) -> None:
    _, module = load(folder, evaluation=False)
    module.eval()
    calls: list[Callable[[], Any]] = [
        lambda: module(*batch()),
        module.input_names,
        module.output_names,
        lambda: module.export_model_for_inferencing(tmp_path / "m.onnx", ["logits"]),
    ]
    for call in calls:
        with pytest.raises(TrainingError, match="no evaluation model"):
            call()
    module.train()
    module(*batch())


def test_arguments_of_the_wrong_type(folder: Path, tmp_path: Path) -> None:
    state, module = load(folder)
    with pytest.raises(TypeError, match="Invalid argument for CheckpointState"):
        CheckpointState("checkpoint")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="CheckpointState"):
        Module(folder / "training_model.onnx", "checkpoint")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Module"):
        Optimizer(folder / "optimizer_model.onnx", state)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        CheckpointState.save_checkpoint("x", tmp_path / "c")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="list"):
        module.export_model_for_inferencing(tmp_path / "m.onnx", "logits")  # type: ignore[arg-type]
    for device in ("cuda", "cuda:1", "dml"):
        with pytest.raises(TrainingError, match="CPU"):
            load(folder, device=device)


def test_artifacts_that_do_not_belong_together(folder: Path, tmp_path: Path) -> None:
    def attempt(**changes: Any) -> None:
        contents = checkpoint.load(folder / "checkpoint")
        for name, array in changes.items():
            contents.trainable[name] = array
        checkpoint.save(contents, tmp_path / "c")
        Module(folder / "training_model.onnx", CheckpointState.load_checkpoint(tmp_path / "c"))

    attempt()
    bad = {
        "parameter 'more' of the checkpoint is not an input": {"more": np.zeros(3, np.float32)},
        r"parameter 'w2' has the shape \[4, 4\], but the model takes \[4, 5\]": {
            "w2": np.zeros((4, 4), np.float32)
        },
        "parameter 'w2' has the type tensor.double.": {"w2": np.zeros((4, 5))},
    }
    for text, change in bad.items():
        with pytest.raises(TrainingModelError, match=text):
            attempt(**change)
    contents = checkpoint.load(folder / "checkpoint")
    contents.trainable["w1"] = contents.frozen.pop("w1")
    checkpoint.save(contents, tmp_path / "c")
    with pytest.raises(TrainingModelError, match="Gradient buffer input not provided for param: w1"):
        Module(folder / "training_model.onnx", CheckpointState.load_checkpoint(tmp_path / "c"))


def test_files_that_are_something_else(folder: Path, tmp_path: Path) -> None:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    (tmp_path / "bad").write_bytes(b"not a model")
    for path in (tmp_path / "bad", tmp_path / "missing", folder / "checkpoint", tmp_path):
        with pytest.raises(RuntimeError, match="the training model") as caught:
            Module(path, state)
        assert isinstance(caught.value, TrainingModelError)
        with pytest.raises(TrainingModelError, match="the evaluation model"):
            Module(folder / "training_model.onnx", state, path)
    module = Module(folder / "training_model.onnx", state)
    for path in (tmp_path / "bad", tmp_path / "missing"):
        with pytest.raises(TrainingModelError, match="the optimizer model"):
            Optimizer(path, module)
    with pytest.raises(TrainingModelError, match="an optimizer model has one node"):
        Optimizer(folder / "training_model.onnx", module)
    with pytest.raises(TrainingModelError, match="Gradient buffer"):
        Module(folder / "eval_model.onnx", state)
    for path in (tmp_path / "bad", folder / "training_model.onnx"):
        with pytest.raises(CheckpointError):
            CheckpointState.load_checkpoint(path)
    module(*batch())


# Export


def run(path: Path, **feeds: np.ndarray) -> list[np.ndarray]:
    """In a plain session of onnxruntime."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert sorted(value.name for value in session.get_inputs()) == sorted(feeds)
    return list(session.run(None, feeds))


@pytest.mark.parametrize("large", [False, True])
def test_export(large: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:
        monkeypatch.setattr(weights, "EXTERNAL_FROM", 0)
        monkeypatch.setattr(weights, "_SMALLEST_EXTERNAL", 40)
    _, module = load(folder)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    module(*batch())
    optimizer.step()
    x, labels = batch(1)
    expected = module.eval()(x, labels)[1]
    module.export_model_for_inferencing(tmp_path / "m.onnx", ["logits"])
    (found,) = run(tmp_path / "m.onnx", x=x)
    assert_close(found, expected, 1e-6)
    files = ["m.onnx", "m.onnx.data"] if large else ["m.onnx"]
    assert sorted(os.listdir(tmp_path)) == files
    model = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [value.name for value in model.graph.input] == ["x"]
    assert {t.name for t in model.graph.initializer} == {"w1", "b1", "w2", "b2"}
    assert {node.op_type for node in model.graph.node} == {"Gemm", "Relu"}
    assert [opset.domain for opset in model.opset_import] == [""]


def test_export_of_intermediate_values(folder: Path, tmp_path: Path) -> None:
    _, module = load(folder)
    module.export_model_for_inferencing(str(tmp_path / "m.onnx"), ["r", "h"])
    x, labels = batch()
    r, h = run(tmp_path / "m.onnx", x=x)
    assert np.array_equal(r, np.maximum(h, 0)) and h.shape == (8, 5)
    assert {t.name for t in onnx.load(tmp_path / "m.onnx").graph.initializer} == {"w1", "b1"}
    loss = module.eval().output_names()[0]
    module.export_model_for_inferencing(tmp_path / "l.onnx", [loss])
    assert run(tmp_path / "l.onnx", x=x, labels=labels)[0] == pytest.approx(module(x, labels)[0], rel=1e-6)


def test_export_of_what_is_not_there(folder: Path, tmp_path: Path) -> None:
    _, module = load(folder)
    for names, text in (
        (["nothing"], "nothing could not be found"),
        ([], "non empty"),
        ([""], "not be found"),
    ):
        with pytest.raises(TrainingError, match=text):
            module.export_model_for_inferencing(tmp_path / "m.onnx", names)
    with pytest.raises(TrainingFileError, match="nowhere"):
        module.export_model_for_inferencing(tmp_path / "nowhere" / "m.onnx", ["logits"])
    assert not os.listdir(tmp_path)


# Interruptions


@pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
def test_ctrl_c_does_not_tear_a_file(tmp_path: Path) -> None:
    """Saving goes on until the file is complete; then KeyboardInterrupt is raised."""
    path, value = tmp_path / "c", np.zeros(3_000_000, np.float32)
    interrupted, last = 0, 0.0
    for i in range(12):
        value[...] = i
        timer = threading.Timer(0.001 * i, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            checkpoint.save(checkpoint.Checkpoint(trainable={"w": value}), path)
            timer.join()
            time.sleep(0.001)
        except KeyboardInterrupt:
            interrupted += 1
        timer.join()
        if path.exists():
            found = checkpoint.load(path).trainable["w"]
            assert (found == found[0]).all() and found[0] in (i, last)
            last = float(found[0])
        assert [name for name in os.listdir(tmp_path) if name != "c"] == []
    assert interrupted


@pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
@pytest.mark.parametrize("compiled", [True, False])
def test_ctrl_c_does_not_tear_an_optimizer_step(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is done as a whole, counter included, or not at all, whenever the signal arrives."""
    if not compiled:
        monkeypatch.setattr(passes, "is_compiled", lambda: False)
    big_artifacts(tmp_path, 700)
    (state, module), (other_state, other_module) = load(tmp_path), load(tmp_path)
    optimizer, other = (Optimizer(tmp_path / "optimizer_model.onnx", m) for m in (module, other_module))
    x = np.ones((2, 700), np.float32)
    for each in (module, other_module):
        each(x, x)
    interrupted = 0
    for delay in np.linspace(0, 0.004, 25):
        timer = threading.Timer(float(delay), os.kill, (os.getpid(), signal.SIGINT))
        before = state.state.groups["group0"].step
        try:
            timer.start()
            optimizer.step()
            timer.join()
            time.sleep(0.001)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            timer.join()
        done = state.state.groups["group0"].step - before
        assert done in (0, 1)
        for _ in range(done):
            other.step()
        for name, parameter in state.parameters:
            assert parameter.data.tobytes() == other_state.parameters[name].data.tobytes()
        for momentum, arena in state.state.groups["group0"].momentums.items():
            same = other_state.state.groups["group0"].momentums[momentum]
            assert all(arena[name].tobytes() == same[name].tobytes() for name in arena.arrays)
    assert interrupted


@pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
def test_ctrl_c_during_a_training_step(tmp_path: Path) -> None:
    """Parameters are as before; the next step begins anew."""
    script = f"""
import os, signal, threading, sys
import numpy as np
sys.path.insert(0, {str(ROOT / "tests")!r})
from pathlib import Path
from support.big_artifacts import big_artifacts, load
from ortgrad.errors import TrainingError
folder = Path({str(tmp_path)!r})
big_artifacts(folder, 1000)
state, module = load(folder)
x = np.ones((200, 1000), np.float32)
module(x, x)
module.lazy_reset_grad()
gradient = module(x, x), state.parameters["w"].grad.copy()
before = state.parameters["w"].data.copy()
interrupted = 0
for i in range(8):
    timer = threading.Timer(0.002 * i, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        while True:
            module(x, x)
    except KeyboardInterrupt:
        interrupted += 1
    timer.join()
    module.lazy_reset_grad()
    assert np.array_equal(state.parameters["w"].data, before)
    assert module(x, x) == gradient[0]
    assert np.array_equal(state.parameters["w"].grad, gradient[1])
assert interrupted == 8
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=PATIENCE)
