"""What the tests of training share: models in text form, and training them here and with PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from ortgrad.training.api import CheckpointState, Module, Optimizer
from ortgrad.training.artifacts import LossType, OptimType, generate_artifacts

Arrays = dict[str, np.ndarray]


def parse(text: str, initializers: Arrays | None = None, opset: int = 18) -> onnx.ModelProto:
    model: onnx.ModelProto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> {text}')
    tensors = (onnx.numpy_helper.from_array(v, k) for k, v in (initializers or {}).items())
    model.graph.initializer.extend(tensors)
    return model


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def trained(
    folder: Path,
    model: onnx.ModelProto,
    requires_grad: list[str],
    steps: list[tuple[np.ndarray, ...]],
    **options: Any,
) -> tuple[list[float], CheckpointState, Module]:
    """The losses of steps of SGD with a rate of 0.05, the state after them, and the module."""
    options.setdefault("loss", LossType.CrossEntropyLoss)
    options.setdefault("optimizer", OptimType.SGD)
    generate_artifacts(model, requires_grad, artifact_directory=folder, **options)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.05)
    losses = []
    for step in steps:
        module.train()
        losses.append(float(module(*step)))
        optimizer.step()
        module.lazy_reset_grad()
    return losses, state, module


def torch_losses(
    parameters: dict[str, torch.Tensor],
    forward: Callable[..., torch.Tensor],
    steps: list[tuple[np.ndarray, ...]],
) -> list[float]:
    optimizer = torch.optim.SGD(list(parameters.values()), 0.05)
    losses = []
    for x, t in steps:
        loss = torch.nn.functional.cross_entropy(forward(torch.tensor(x)), torch.tensor(t))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
