"""Whole networks, trained for twenty steps by ortgrad and by PyTorch from the same weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support import ROOT, assert_close, networks
from support.optimizers import NAMES, adamw, optimizer_model

from ortgrad.training import artifacts
from ortgrad.training.api import CheckpointState, Module, Optimizer

BENCHMARKS = ROOT / "benchmarks"
STEPS = 20
Tensors = dict[str, torch.Tensor]
Arrays = dict[str, np.ndarray]
# model, weights, inputs of a step, and the loss in PyTorch
Case = tuple[onnx.ModelProto, Arrays, Callable[[int], Arrays], Callable[[Tensors], torch.Tensor]]


def from_networks(name: str) -> Case:
    network = getattr(networks, name)()
    return (
        network.model,
        network.weights,
        lambda step: network.inputs(4 + step % 3),
        lambda values: network.torch(values)["loss"],
    )


def from_workloads(name: str) -> Case:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import workloads
        import workloads_torch
    finally:
        sys.path.remove(str(BENCHMARKS))
    sizes = {"batch": 4, "steps": 6, "features": 8, "width": 12, "tokens": 5, "depth": 2, "heads": 2}
    workload = workloads.Workload(name, name, sizes)
    given = workload.feeds()

    def inputs(step: int) -> Arrays:
        numbers = np.random.default_rng(step)
        x = numbers.standard_normal(given["x"].shape).astype(np.float32)
        return {"x": x, "label": numbers.integers(0, 10, given["label"].shape)}

    def loss(values: Tensors) -> torch.Tensor:
        return workloads_torch.KINDS[name](workloads_torch.from_onnx(name, values), sizes)

    return workload.model(), {k: given[k] for k in workload.weights()}, inputs, loss


CASES: dict[str, Callable[[str], Case]] = {
    "resnet": from_networks,
    "gpt": from_networks,
    "gru": from_workloads,
    "lstm": from_workloads,
    "transformer": from_workloads,
}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small tensors, PyTorch's threads spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", CASES)
def test_training(name: str, tmp_path: Path) -> None:
    model, weights, inputs, loss_of = CASES[name](name)
    artifacts.generate_artifacts(
        model,
        requires_grad=list(weights),
        optimizer=artifacts.OptimType.SGD,
        artifact_directory=tmp_path,
    )
    # PyTorch's order of operations.
    node = adamw(adam_mode=0, epsilon=1e-8, weight_decay=0.05)
    onnx.save(optimizer_model([node], NAMES), tmp_path / "adamw.onnx")
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    module = Module(tmp_path / "training_model.onnx", state, session_options=options)
    tensors = {k: torch.from_numpy(v.copy()).requires_grad_() for k, v in weights.items()}

    def train(optimizer: Optimizer, rival: torch.optim.Optimizer) -> None:
        optimizer.set_learning_rate(rival.param_groups[0]["lr"])
        for step in range(STEPS):
            feeds = inputs(step)
            expected = loss_of({**tensors, **{k: torch.from_numpy(v) for k, v in feeds.items()}})
            rival.zero_grad()
            expected.backward()
            outputs = module(*(feeds[k] for k in module.input_names()))
            found = outputs[0] if isinstance(outputs, tuple) else outputs
            assert found == pytest.approx(expected.item(), rel=1e-3), f"step {step}"
            rival.step()
            optimizer.step()
            module.lazy_reset_grad()
        for key, tensor in tensors.items():
            assert_close(state.parameters[key].data, tensor.detach().numpy(), 1e-2)

    values = list(tensors.values())
    train(Optimizer(tmp_path / "optimizer_model.onnx", module), torch.optim.SGD(values, 0.02))
    for key, value in weights.items():
        state.parameters[key] = value
        tensors[key].data.copy_(torch.from_numpy(value))
    # The first optimizer has left its state: a new one begins with nothing.
    state.state.groups.clear()
    rival = torch.optim.AdamW(values, 0.002, eps=1e-8, weight_decay=0.05)
    train(Optimizer(tmp_path / "adamw.onnx", module), rival)
