"""Models of IR version 3, whose weights are inputs that onnxruntime does not let anybody feed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import ortgrad
from ortgrad import training
from ortgrad.training import artifacts
from ortgrad.training.api import CheckpointState, Module, Optimizer
from ortgrad.training.lora import add_lora, lora_parameters, merge_lora

X = np.random.default_rng(0).standard_normal((8, 3), dtype=np.float32)
TARGET = X @ np.float32([[1, 0], [0, 2], [-1, 1]])
DATA = (X, TARGET)


def old_model() -> onnx.ModelProto:
    model = onnx.parser.parse_model("""<ir_version: 3, opset_import: ["" : 8]>
        g (float[N, 3] x, float[3, 2] w, float[2] b) => (float[N, 2] y) { z = MatMul(x, w) y = Add(z, b) }""")
    for name, shape in {"w": (3, 2), "b": (2,)}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    return model


def run(model: onnx.ModelProto) -> np.ndarray:
    """Return what stock onnxruntime computes; the model takes `x` and nothing else."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == ["x"]
    result: np.ndarray = session.run(["y"], {"x": X})[0]
    return result


@pytest.mark.parametrize("kernels", ["auto", "onnx", "python"])
def test_weights_can_be_fed(kernels: Any) -> None:
    session = ortgrad.InferenceSession(ortgrad.build_gradient_model(old_model()), kernels=kernels)
    w = np.float32([[1, 2], [3, 4], [5, 6]])
    y, dw, db = session.run(None, {"x": X, "w": w, "y_grad": TARGET})
    np.testing.assert_allclose(y, X @ w + 1, rtol=1e-5)
    np.testing.assert_allclose(dw, X.T @ TARGET, rtol=1e-5)
    np.testing.assert_allclose(db, TARGET.sum(axis=0), rtol=1e-5)


def test_gradients_are_checked() -> None:
    assert ortgrad.check_gradients(old_model(), wrt=["w", "b", "x"]).ok


def test_fit_and_export() -> None:
    result = training.fit(old_model(), DATA, loss="mse", learning_rate=0.1, epochs=200)
    np.testing.assert_allclose(run(result.model), TARGET, atol=0.05)


def test_artifacts(tmp_path: Path) -> None:
    artifacts.generate_artifacts(
        old_model(),
        requires_grad=["w", "b"],
        loss=artifacts.LossType.MSELoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    before = module(X, TARGET)
    optimizer.step()
    assert module.eval()(X, TARGET) < before
    module.export_model_for_inferencing(tmp_path / "trained.onnx", ["y"])
    y = run(onnx.load(tmp_path / "trained.onnx"))
    np.testing.assert_allclose(y, X @ state.parameters["w"].data + state.parameters["b"].data, rtol=1e-5)


def test_adapters() -> None:
    adapted = add_lora(old_model(), "w", rank=2)
    result = training.fit(
        adapted, DATA, loss="mse", wrt=[*lora_parameters(adapted), "b"], learning_rate=0.05, epochs=100
    )
    y = run(result.model)
    assert np.abs(y - TARGET).mean() < 0.5 * np.abs(run(old_model()) - TARGET).mean()
    np.testing.assert_allclose(run(merge_lora(result.model)), y, rtol=1e-4, atol=1e-5)
