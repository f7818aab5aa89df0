"""Exports in which scale and variance, bias and mean of a batch normalization are one initializer each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from ortgrad import training
from ortgrad.training import SGD, Trainer, artifacts
from ortgrad.training.api import CheckpointState, Module, Optimizer

STEPS, RATE = 20, 0.1
NODES = """a = MatMul(x, w1) b = BatchNormalization(a, one, zero, zero, one)
    c = Relu(b) y = MatMul(c, w2)"""
WEIGHTS = {
    "w1": np.random.default_rng(0).standard_normal((5, 4), dtype=np.float32),
    "w2": np.random.default_rng(1).standard_normal((4, 3), dtype=np.float32),
    "one": np.ones(4, np.float32),
    "zero": np.zeros(4, np.float32),
}
X = np.random.default_rng(2).standard_normal((16, 5), dtype=np.float32)
LABELS = np.random.default_rng(3).integers(0, 3, 16)


def merged_model(nodes: str = NODES) -> onnx.ModelProto:
    text = f'<ir_version: 10, opset_import: ["" : 21]> g (float[N, 5] x) => (float[N, 3] y) {{ {nodes} }}'
    model = onnx.parser.parse_model(text)
    for name, array in WEIGHTS.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def pytorch() -> tuple[list[float], dict[str, np.ndarray]]:
    """Return PyTorch's losses, and what its batch normalization has in the end."""
    w1, w2 = (torch.tensor(WEIGHTS[name], requires_grad=True) for name in ("w1", "w2"))
    norm = torch.nn.BatchNorm1d(4)
    optimizer = torch.optim.SGD([w1, w2, *norm.parameters()], lr=RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        y = torch.relu(norm(torch.tensor(X) @ w1)) @ w2
        loss = torch.nn.functional.cross_entropy(y, torch.tensor(LABELS))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    names = ("weight", "bias", "running_mean", "running_var")
    return losses, {name: getattr(norm, name).detach().numpy() for name in names}


def compare(values: dict[str, np.ndarray]) -> None:
    _, expected = pytorch()
    ours = {"weight": "one", "bias": "zero"}
    ours |= {"running_mean": "zero.running_mean", "running_var": "one.running_var"}
    for theirs, name in ours.items():
        np.testing.assert_allclose(values[name], expected[theirs], rtol=1e-3, atol=1e-5, err_msg=name)


def test_fit() -> None:
    losses, _ = pytorch()
    trainer = Trainer(merged_model(), loss="cross-entropy", optimizer=SGD(learning_rate=RATE))
    ours = [trainer.step((X, LABELS)) for _ in range(STEPS)]
    np.testing.assert_allclose(ours, losses, rtol=1e-4)
    compare({name: trainer.state.parameter(name) for name in trainer.state.names})
    exported = trainer.export()
    assert exported is not None
    compare({tensor.name: numpy_helper.to_array(tensor) for tensor in exported.graph.initializer})


def test_artifacts(tmp_path: Path) -> None:
    model = merged_model()
    before = model.SerializeToString()
    artifacts.generate_artifacts(
        model,
        requires_grad=list(WEIGHTS),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.SGD,
        artifact_directory=tmp_path,
    )
    assert model.SerializeToString() == before
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(RATE)
    ours = []
    for _ in range(STEPS):
        ours.append(float(module(X, LABELS)))
        optimizer.step()
        module.lazy_reset_grad()
    np.testing.assert_allclose(ours, pytorch()[0], rtol=1e-4)
    compare({name: parameter.data for name, parameter in state.parameters})


def test_parameters_of_several_nodes() -> None:
    nodes = "a = MatMul(x, w1) b = Add(a, zero) c = Relu(b) d = Add(c, zero) y = MatMul(d, w2)"
    with pytest.warns(UserWarning, match="2 nodes share the parameter 'zero', whose elements are all equal"):
        training.fit(merged_model(nodes), (X, LABELS), loss="cross-entropy")
