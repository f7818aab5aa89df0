"""Training of float16 models: in float32, against PyTorch, and written back as float16."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from ortgrad.errors import TrainingModelError
from ortgrad.training import SGD, Trainer, export, fit, parameters

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 1, 4, 4)).astype(np.float16)
Y = RNG.integers(0, 3, 16)


def _module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, 3),
        nn.Softmax(1),
    ).half()


@pytest.fixture(scope="module")
def exported() -> onnx.ModelProto:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the older exporter is much faster
        torch.onnx.export(
            _module().train(),
            (torch.tensor(X),),
            file,
            dynamo=False,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
            input_names=["x"],
            dynamic_axes={"x": {0: "N"}},
        )
    return onnx.load_from_string(file.getvalue())


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_training(exported: onnx.ModelProto, dtype: Any, tmp_path: Path) -> None:
    """Data may be float16 or float32; what is written has the types of the model that was given."""
    reference = _module().double()
    # Also the running statistics, which the export has changed. The weights begin as the rounded ones.
    start = {t.name: torch.tensor(onnx.numpy_helper.to_array(t)) for t in exported.graph.initializer}
    reference.load_state_dict({**reference.state_dict(), **start})
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.3)
    for _ in range(6):
        optimizer.zero_grad()
        scores = reference[:5](torch.tensor(X.astype(np.float64)))
        nn.functional.cross_entropy(scores, torch.tensor(Y)).backward()
        optimizer.step()
    x = X.astype(dtype)
    result = fit(
        exported, (x, Y), loss="cross-entropy", optimizer=SGD(learning_rate=0.3), epochs=6, batch_size=16
    )
    wanted = {name: value.detach().numpy() for name, value in reference.state_dict().items()}
    for name in parameters(exported):
        found = result.state.parameter(name)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted[name], rtol=0, atol=1e-4)
    result.export(tmp_path / "trained.onnx")
    made = onnx.load(tmp_path / "trained.onnx")
    for old, new in zip(exported.graph.initializer, made.graph.initializer, strict=True):
        assert (old.name, old.data_type) == (new.name, new.data_type)
        np.testing.assert_allclose(onnx.numpy_helper.to_array(new), wanted[new.name], rtol=2e-3, atol=2e-3)
    assert [v.type for v in made.graph.input] == [v.type for v in exported.graph.input]
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx")
    (probabilities,) = session.run(None, {"x": X})
    assert probabilities.dtype == np.float16
    exact = reference.eval()(torch.tensor(X.astype(np.float64))).detach().numpy()
    np.testing.assert_allclose(probabilities, exact, rtol=0, atol=1e-2)


def test_small_updates_add_up(exported: onnx.ModelProto, tmp_path: Path) -> None:
    """Each of them would be lost in float16. A checkpoint has the weights in float32."""
    trainer = Trainer(exported, loss="cross-entropy", optimizer=SGD(learning_rate=1e-4))
    name = parameters(exported)[-1]
    before = trainer.state.parameter(name).copy()
    trainer.fit((X, Y), epochs=2, batch_size=16, checkpoint=tmp_path / "c")
    change = trainer.state.parameter(name) - before
    assert 0 < np.abs(change).max() < 1e-4
    again = Trainer(exported, loss="cross-entropy", optimizer=SGD(learning_rate=1e-4))
    again.load(tmp_path / "c")
    np.testing.assert_array_equal(again.state.parameter(name), trainer.state.parameter(name))


# In this language, numbers of float16 are the integers of the same bits: 15360 is 1, 14336 a half.
CASTS = """<ir_version: 10, opset_import: ["" : 21, "local" : 1]>
g (float[N, 2] x, bool train) => (float16[N, 2] y)
<float16[2, 2] w = {15360, 16384, 16896, 17408}>
{
    h = Cast <to = 10> (x)
    c = Constant <value = float16[1] {14336}> ()
    s = local.scaled (h, c)
    z = MatMul(s, w)
    y = If (train) <
        then_branch = then () => (float16[N, 2] a) { a = Tanh(z) },
        else_branch = other () => (float16[N, 2] b) <float16[2] k = {15360, 15360}> { b = Mul(z, k) }
    >
}
<domain: "local", opset_import: ["" : 21]>
scaled (u, v) => (t) { one = Constant <value = float16[1] {15360}> () w = Add(v, one) t = Mul(u, w) }
"""


def test_all_places_of_a_type() -> None:
    """Casts, constants, subgraphs, functions: all of them are float32 in training."""
    model = onnx.parser.parse_model(CASTS)
    x, target = np.float32([[1, 2], [3, 4]]), np.zeros((2, 2), np.float16)
    trainer = Trainer(model, loss="mse", optimizer=SGD(learning_rate=0.01), wrt="w")
    loss = trainer.step({"x": x, "train": np.array(False), "target": target})
    product = 1.5 * x @ np.float32([[1, 2], [3, 4]])
    assert loss == pytest.approx(float(np.mean(product**2)))
    gradient = 1.5 * x.T @ (2 * product / 4)
    made = trainer.export()
    assert made is not None
    (tensor,) = [t for t in made.graph.initializer if t.name == "w"]
    np.testing.assert_allclose(
        onnx.numpy_helper.to_array(tensor),
        (np.float32([[1, 2], [3, 4]]) - 0.01 * gradient).astype(np.float16),
        rtol=1e-3,
    )
    assert tensor.data_type == onnx.TensorProto.FLOAT16


def test_numbers_that_float16_does_not_have(exported: onnx.ModelProto) -> None:
    name = parameters(exported)[-1]
    with pytest.raises(TrainingModelError, match=f"{name}.*1e\\+05, which float16 cannot represent"):
        export(exported, {name: np.full(3, 1e5, np.float32)})
