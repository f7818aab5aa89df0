"""Artifacts of twenty networks, and what onnxruntime-training 1.19.2 computes with them.

Run with onnxruntime-training-cpu 1.19.2, onnx 1.16 and PyTorch: python make.py folder [name ...]
Each network gets a folder with its artifacts and `expected.npz`: the batches, the losses of four steps and
the parameters after them, and the loss of the evaluation model, if 1.19.2 can run it. Then
`python tests/sweeps/artifact_networks.py folder` tries them with ortgrad; a few are beside this file.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime.training.onnxblock as onnxblock
import torch
from onnxruntime.training import artifacts
from onnxruntime.training.api import CheckpointState, Module, Optimizer
from torch import nn
from torch.onnx import TrainingMode

STEPS = 4
CROSS_ENTROPY, MSE = artifacts.LossType.CrossEntropyLoss, artifacts.LossType.MSELoss
BCE, L1 = artifacts.LossType.BCEWithLogitsLoss, artifacts.LossType.L1Loss
ADAMW, SGD = artifacts.OptimType.AdamW, artifacts.OptimType.SGD
TRAINING, EVAL = TrainingMode.TRAINING, TrainingMode.EVAL


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.layers(x))


class Bag(nn.Module):
    """The mean of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 6), nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids).mean(1))


class Tied(nn.Module):
    """The table of the inputs is the matrix of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.table) @ self.table.t()


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.first(hidden), self.second(hidden)


class Attention(nn.Module):
    """One layer of a transformer on tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv, self.out = nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm, self.inner, self.outer = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        q, k, v = (part.reshape(-1, 5, 2, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = torch.softmax(q @ k.transpose(2, 3) / 2.0, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(-1, 5, 8))
        x = self.norm(x + self.outer(nn.functional.gelu(self.inner(x))))
        return self.head(x[:, 0])


class TwoLosses(onnxblock.Block):
    """Cross entropy of the first output and squared errors of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = onnxblock.loss.CrossEntropyLoss()
        self.errors = onnxblock.loss.MSELoss()
        self.add = onnxblock.blocks.Add()

    def build(self, first: str, second: str) -> str:
        entropy = self.classes(first, labels_name="labels")
        return self.add(entropy, self.errors(second, target_name="target"))


class Penalized(onnxblock.Block):
    """Mean squared error, and a penalty on the size of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.errors, self.add = onnxblock.loss.MSELoss(), onnxblock.blocks.Add()
        self.mean, self.square = onnxblock.blocks.ReduceMean(keepdims=False), onnxblock.blocks.Mul()

    def build(self, output: str) -> str:
        return self.add(self.errors(output), self.mean(self.square(output, output)))


class Clipped(onnxblock.optim.AdamW):
    def __init__(self) -> None:
        super().__init__(clip_grad=onnxblock.optim.ClipGradNorm(0.5), weight_decay=0.1)


class WithLoss(nn.Module):
    """The loss is the first output of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        return ((y - target) ** 2).mean(), y


def separable(channels: int) -> nn.Module:
    return Residual(
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 1, bias=False),
        nn.BatchNorm2d(channels),
    )


def mlp(activation: nn.Module, outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), activation, nn.Linear(8, outputs))


def convolutions(*extra: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), *extra, nn.Flatten(), nn.Linear(144, 3)
    )


IMAGE, VECTOR, SIGNAL = (1, 8, 8), (5,), (4, 12)
CLASSES = ("classes", 3)


def real(*shape: int) -> tuple[str, tuple[int, ...]]:
    return "real", shape


# module, inputs, targets, opset, mode of the export, options
NETWORKS = {
    "mlp": (mlp(nn.ReLU()), [real(*VECTOR)], [CLASSES], 15, EVAL, {}),
    "mlp_sgd": (mlp(nn.Tanh(), 2), [real(*VECTOR)], [real(2)], 12, EVAL, {"loss": MSE, "optimizer": SGD}),
    "normalized_in_training": (convolutions(), [real(*IMAGE)], [CLASSES], 15, TRAINING, {}),
    "normalized_in_inference": (convolutions(), [real(*IMAGE)], [CLASSES], 15, EVAL, {}),
    "normalized_unlisted": (convolutions(), [real(*IMAGE)], [CLASSES], 14, TRAINING, {"unlisted": "running"}),
    "normalized_old": (convolutions(), [real(*IMAGE)], [CLASSES], 13, TRAINING, {"evaluates": False}),
    "layer_norm": (
        nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 2)),
        *([real(*VECTOR)], [real(2)], 14, EVAL, {"loss": L1}),
    ),
    "transformer": (Attention(), [("ids", (5,), 9)], [CLASSES], 14, TRAINING, {}),
    "embeddings": (Bag(), [("ids", (4,), 11)], [CLASSES], 16, EVAL, {"optimizer": SGD}),
    "dropout": (
        nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
        *([real(*VECTOR)], [CLASSES], 15, TRAINING, {"random": True}),
    ),
    "pools": (
        nn.Sequential(
            *(nn.Conv2d(1, 3, 3, padding=1), nn.MaxPool2d(2), nn.AvgPool2d(2)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)),
        ),
        *([real(*IMAGE)], [CLASSES], 15, EVAL, {"fixed": True}),
    ),
    "autoencoder": (
        nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.LeakyReLU(), nn.Conv2d(3, 1, 5, padding=2)),
        *([real(*IMAGE)], [real(*IMAGE)], 15, EVAL, {"loss": BCE}),
    ),
    "groups": (
        nn.Sequential(
            nn.Conv1d(4, 6, 3, groups=2, dilation=2), nn.LeakyReLU(), nn.Flatten(), nn.Linear(48, 3)
        ),
        *([real(*SIGNAL)], [CLASSES], 15, EVAL, {}),
    ),
    "separable": (
        nn.Sequential(nn.Conv2d(1, 4, 3), separable(4), nn.Flatten(), nn.Linear(144, 3)),
        *([real(*IMAGE)], [CLASSES], 15, TRAINING, {"optimizer": SGD}),
    ),
    "residual_signal": (
        nn.Sequential(
            Residual(nn.Conv1d(4, 4, 3, padding=1, bias=False), nn.BatchNorm1d(4), nn.Sigmoid()),
            *(nn.Flatten(), nn.Linear(48, 2)),
        ),
        *([real(*SIGNAL)], [real(2)], 17, TRAINING, {"loss": MSE, "frozen": "4"}),
    ),
    "two_losses": (Heads(), [real(*VECTOR)], [CLASSES, real(2)], 15, EVAL, {"loss": TwoLosses()}),
    "penalized": (
        mlp(nn.SiLU(), 2),
        [real(*VECTOR)],
        [real(2)],
        15,
        EVAL,
        {"loss": Penalized(), "optimizer": Clipped()},
    ),
    "own_loss": (WithLoss(), [real(*VECTOR), real(3)], [], 15, EVAL, {"loss": None}),
    "tied": (
        Tied(),
        *([real(7)], [real(7)], 18, EVAL),
        {"loss": MSE, "arguments": {"nominal_checkpoint": True, "prefix": "tied_"}},
    ),
    "extra_outputs": (
        mlp(nn.GELU()),
        *([real(*VECTOR)], [CLASSES], 20, EVAL),
        {"arguments": {"additional_output_names": ["y"], "ort_format": True}},
    ),
}


def batch(kind: tuple, numbers: np.random.Generator, count: int) -> np.ndarray:
    if kind[0] == "classes":
        return numbers.integers(0, kind[1], count)
    if kind[0] == "ids":
        return numbers.integers(0, kind[2], (count, *kind[1]))
    return numbers.standard_normal((count, *kind[1])).astype(np.float32)


def export(name: str) -> onnx.ModelProto:
    module, inputs, _, opset, mode, options = NETWORKS[name]
    numbers = np.random.default_rng(0)
    examples = tuple(torch.from_numpy(batch(kind, numbers, 4)) for kind in inputs)
    names = ["x", "t"][: len(inputs)]
    outputs = {"two_losses": ["y", "z"], "own_loss": ["loss", "y"]}.get(name, ["y"])
    axes = {value: {0: "N"} for value in [*names, *outputs] if value != "loss"}
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            *(module, examples, file),
            dynamo=False,
            training=mode,
            do_constant_folding=False,
            opset_version=opset,
            input_names=names,
            output_names=outputs,
            dynamic_axes=None if "fixed" in options else axes,
        )
    return onnx.load_from_string(file.getvalue())


def make(name: str, folder: Path) -> None:
    torch.manual_seed(len(name))
    module, inputs, targets, _, _, options = NETWORKS[name]
    for layer in module.modules():
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    model = export(name)
    names = [tensor.name for tensor in model.graph.initializer]
    trained = [n for n, _ in module.named_parameters() if n in names]
    trained += [n for n in names if n not in trained and n.startswith("onnx::")]
    frozen = [n for n in trained if "frozen" in options and n.startswith(options["frozen"])]
    trained = [n for n in trained if n not in frozen]
    if "unlisted" not in options:
        frozen += [n for n in names if "running" in n]
    given = options.get("arguments", {})
    artifacts.generate_artifacts(
        model,
        requires_grad=trained,
        frozen_params=frozen,
        loss=options.get("loss", CROSS_ENTROPY),
        optimizer=options.get("optimizer", ADAMW),
        artifact_directory=str(folder),
        **given,
    )
    prefix = str(folder / given.get("prefix", ""))
    prefix += "" if given.get("prefix") else os.sep
    numbers = np.random.default_rng(1)
    saved = {}
    for step in range(STEPS):
        for i, kind in enumerate((*inputs, *targets)):
            saved[f"x{step}_{i}"] = batch(kind, numbers, 4 if "fixed" in options else 4 + step % 2)
    places = range(len(inputs) + len(targets))

    def loss_of(result: object) -> np.ndarray:
        return np.asarray(result[0] if isinstance(result, tuple) else result).reshape(())

    state = CheckpointState.load_checkpoint(prefix + "checkpoint")
    trainer = Module(prefix + "training_model.onnx", state)
    optimizer = Optimizer(prefix + "optimizer_model.onnx", trainer)
    optimizer.set_learning_rate(0.01)
    losses = []
    for step in range(STEPS):
        losses.append(loss_of(trainer(*(saved[f"x{step}_{i}"] for i in places))))
        optimizer.step()
        trainer.lazy_reset_grad()
    for parameter, value in state.parameters:
        saved[f"p_{parameter}"] = value.data.copy()
    saved["losses"], saved["random"] = np.array(losses), np.array("random" in options)
    np.savez_compressed(folder / "expected.npz", **saved)
    print(name, "trains:", *(f"{loss:.4f}" for loss in losses), flush=True)
    if not options.get("evaluates", True):
        print(name, "is evaluated with the statistics of the batch there, and changes the running ones")
        return
    # 1.19.2 refuses some of its own evaluation models.
    try:
        trainer = Module(prefix + "training_model.onnx", state, prefix + "eval_model.onnx")
        trainer.eval()
        saved["evaluated"] = loss_of(trainer(*(saved[f"x0_{i}"] for i in places)))
    except Exception as error:
        print(name, "cannot be evaluated there:", str(error)[:160].replace("\n", " "), flush=True)
        return
    np.savez_compressed(folder / "expected.npz", **saved)
    print(name, "evaluated:", f"{saved['evaluated']:.4f}", flush=True)


if __name__ == "__main__":
    chosen = sys.argv[2:] or list(NETWORKS)
    for each in chosen:
        place = Path(sys.argv[1]).absolute() / each
        place.mkdir(parents=True, exist_ok=True)
        if len(chosen) == 1:
            os.chdir(place)  # 1.19.2 writes temp.onnx into the working folder
            make(each, place)
            (place / "temp.onnx").unlink(missing_ok=True)
        else:
            # In a process of its own: some of its errors end the process.
            subprocess.run([sys.executable, __file__, sys.argv[1], each])
