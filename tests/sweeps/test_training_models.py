"""Whole training models as onnxruntime-training 1.19.2 writes them (see tests/golden/training/make.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from support import GOLDEN, KERNELS, assert_close, networks

import ortgrad

FOLDER = GOLDEN / "training"
MODELS = sorted(path.stem for path in FOLDER.glob("*.npz"))
NETWORKS = sorted(path.stem for path in FOLDER.glob("*.onnx") if path.stem not in MODELS)
Arrays = dict[str, np.ndarray]


def gradients(session: ortgrad.InferenceSession, feeds: Arrays, weights: Arrays) -> tuple[Any, Arrays]:
    """The loss, and by weight what the accumulators add to zeros."""
    buffers = {f"{name}_grad.accumulation.buffer": np.zeros_like(value) for name, value in weights.items()}
    wanted = [session.get_outputs()[0].name, *(f"{name}.out" for name in buffers)]
    known = {value.name for value in session.get_inputs()}
    everything = {**feeds, **weights, **buffers, "lazy_reset_grad": np.array([False])}
    loss, *grads = session.run(wanted, {k: v for k, v in everything.items() if k in known})
    return loss, dict(zip(weights, grads, strict=True))


def load(name: str) -> tuple[Path, Arrays, Arrays, Arrays]:
    """The model, feeds, weights and, if onnxruntime-training can run it, its results."""
    saved = dict(np.load(FOLDER / f"{name}.npz"))
    path = FOLDER / f"{name}.onnx"
    trained = {
        i.name.split("_grad.")[0] for i in onnx.load(path).graph.input if "_grad.accumulation" in i.name
    }
    given = {key.removeprefix("feed:"): value for key, value in saved.items() if key.startswith("feed:")}
    feeds = {key: value for key, value in given.items() if key not in trained}
    results = {key: value for key, value in saved.items() if not key.startswith("feed:")}
    return path, feeds, {key: given[key] for key in sorted(trained)}, results


@pytest.mark.parametrize("kernels", [*KERNELS, "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_results_of_onnxruntime_training(name: str, kernels: str) -> None:
    path, feeds, weights, expected = load(name)
    loss, grads = gradients(ortgrad.InferenceSession(path, kernels=kernels), feeds, weights)
    assert grads
    if expected:
        assert_close(loss, expected["loss"], 1e-6)
    for key, value in grads.items():
        if expected:
            assert_close(value, expected[f"grad:{key}"], 1e-5)


# Dropout draws another mask for each run.
@pytest.mark.parametrize("name", [name for name in MODELS if name != "dropout"])
def test_gradients_are_differences_of_the_loss(name: str) -> None:
    path, feeds, weights, _ = load(name)
    session = ortgrad.InferenceSession(path)
    _, grads = gradients(session, feeds, weights)
    numbers, step = np.random.default_rng(2), 1e-3
    for key, value in weights.items():
        direction = numbers.standard_normal(value.shape).astype(np.float32)
        direction /= np.linalg.norm(direction)
        moved = [{**weights, key: value + sign * step * direction} for sign in (1, -1)]
        above, below = (float(gradients(session, feeds, w)[0]) for w in moved)
        slope = float((grads[key] * direction).sum())
        assert slope == pytest.approx((above - below) / (2 * step), rel=1e-2, abs=5e-4)


@pytest.mark.parametrize("kernels", [*KERNELS, "auto"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_against_pytorch(name: str, kernels: str) -> None:
    network = getattr(networks, name)()
    path = FOLDER / f"{name}.onnx"
    names = {i.name for i in onnx.load(path).graph.input}
    weights = {k: v for k, v in network.weights.items() if f"{k}_grad.accumulation.buffer" in names}
    session = ortgrad.InferenceSession(path, kernels=kernels)
    for batch in (1, 3, 8):
        feeds = network.inputs(batch)
        tensors = {k: torch.from_numpy(v.copy()) for k, v in {**network.weights, **feeds}.items()}
        for key in weights:
            tensors[key].requires_grad_()
        expected = network.torch(tensors)["loss"]
        expected.backward()
        loss, grads = gradients(session, feeds, weights)
        assert_close(loss, expected.detach().numpy(), 1e-5)
        for key, value in grads.items():
            grad = tensors[key].grad
            assert grad is not None
            # onnxruntime-training gives a Gelu that is approximated by tanh the gradient of the exact one.
            assert_close(value, grad.numpy(), 1e-3 if name == "gpt" else 1e-4)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "dropout"])
def test_training_models_can_be_differentiated(name: str) -> None:
    """Towards the weights once more, through whatever operators onnxruntime-training puts in the way."""
    path, feeds, weights, expected = load(name)
    model = onnx.load(path)
    loss = model.graph.output[0].name
    built = ortgrad.build_gradient_model(model, wrt=list(weights), of=loss)
    session = ortgrad.InferenceSession(built)
    made = [value.name for value in session.get_outputs()][-len(weights) :]
    zeros = {
        value.name: np.zeros([1 if isinstance(d, str) else d for d in value.shape], np.float32)
        for value in session.get_inputs()
        if value.name.endswith("accumulation.buffer")
    }
    known = {value.name for value in session.get_inputs()}
    everything = {**feeds, **weights, **zeros, "lazy_reset_grad": np.array([False])}
    results = session.run(made, {k: v for k, v in everything.items() if k in known})
    for weight, result in zip(weights, results, strict=True):
        if expected:
            assert_close(result, expected[f"grad:{weight}"], 1e-5)
