"""`ortgrad train` and `ortgrad artifacts`: what they write, what they say, and their exit codes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import ortgrad
from ortgrad.cli import main
from ortgrad.cli.demo import digits
from ortgrad.training.api import CheckpointState, Module, Optimizer

CNN = str(Path(__file__).parents[1] / "models" / "cnn.onnx")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    train, test = digits()
    for name, part in (("train", train), ("test", test)):
        np.savez(tmp_path / f"{name}.npz", image=part.images, labels=part.labels.astype(np.int32))
    return tmp_path


def run(folder: Path, *more: str) -> int:
    arguments = ["train", CNN, "--data", str(folder / "train.npz"), "--loss", "cross-entropy"]
    return main([*arguments, "-o", str(folder / "trained.onnx"), "--threads", "1", *more])


def accuracy(folder: Path) -> float:
    with np.load(folder / "test.npz") as data:
        (scores,) = ortgrad.InferenceSession(folder / "trained.onnx").run(None, {"image": data["image"]})
        return float((scores.argmax(1) == data["labels"]).mean())


def test_train(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--learning-rate", "0.02", "--schedule", "cosine", "--epochs", "15", "--metric", "accuracy"]
    assert run(folder, *options, "--eval", str(folder / "test.npz")) == 0
    text = capsys.readouterr().out
    assert text.startswith("15 epochs, 675 steps in ")
    assert float(text.split("accuracy ")[1].split()[0]) == pytest.approx(accuracy(folder), abs=1e-3)
    assert accuracy(folder) > 0.95
    trained, model = onnx.load(folder / "trained.onnx"), onnx.load(CNN)
    assert [n.op_type for n in trained.graph.node] == [n.op_type for n in model.graph.node]
    assert [v.name for v in trained.graph.input] == [v.name for v in model.graph.input]


def test_resume_and_progress(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = ["--checkpoint", str(folder / "state.safetensors"), "--resume", "--eval", "0.2"]
    assert run(folder, "--epochs", "1", *checkpoint) == 0
    assert run(folder, "--epochs", "2", *checkpoint, "--progress") == 0
    captured = capsys.readouterr()
    assert "2 epochs, 72 steps" in captured.out
    assert "samples/s" in captured.err
    first = (folder / "trained.onnx").read_bytes()
    assert run(folder, "--epochs", "2", "--eval", "0.2") == 0
    assert (folder / "trained.onnx").read_bytes() == first


def test_arrays_without_names(folder: Path) -> None:
    with np.load(folder / "train.npz") as data:
        np.savez(folder / "train.npz", data["image"][:64], data["labels"][:64])
    assert run(folder, "--optimizer", "sgd", "--momentum", "0.9", "--wrt", "fc.*") == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--loss", "hinge"], "cross-entropy, mse"),
        (["--data", "nothing.npz"], "No such file"),
        (["--data", CNN], "numpy.savez"),
        (["--resume"], "--checkpoint"),
        (["--eval", "2.0"], "fraction"),
        (["--momentum", "0.9"], "momentum is not a setting of adamw"),
        (["--loss", "mse"], "no array 'target'"),
        (["--wrt", "layer9.*"], "layer9"),
        (["--checkpoint", "no/such/folder/state"], "no folder"),
        (["--epochs", "-1"], "epochs"),
    ],
)
def test_failures(folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str) -> None:
    assert run(folder, *more) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert not (folder / "trained.onnx").exists()


def test_a_foreign_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "state.safetensors"
    path.write_bytes(b"foreign")
    assert run(folder, "--checkpoint", str(path), "--resume") == 2
    assert "damaged" in capsys.readouterr().err
    assert path.read_bytes() == b"foreign"


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_artifacts(folder: Path, capsys: pytest.CaptureFixture[str], optimizer: str) -> None:
    arguments = ["--loss", "cross-entropy", "--optimizer", optimizer, "--prefix", "cnn_"]
    assert main(["artifacts", CNN, "-o", str(folder), *arguments]) == 0
    assert "optimizer_model.onnx" in capsys.readouterr().out
    state = CheckpointState.load_checkpoint(folder / "cnn_checkpoint")
    module = Module(folder / "cnn_training_model.onnx", state, folder / "cnn_eval_model.onnx")
    steps = Optimizer(folder / "cnn_optimizer_model.onnx", module)
    steps.set_learning_rate(0.01)
    train, _ = digits()
    losses = []
    for _ in range(10):
        losses.append(float(module(train.images[:64], train.labels[:64])))
        steps.step()
        module.lazy_reset_grad()
    assert losses[-1] < losses[0]


def test_artifacts_without_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["artifacts", CNN, "-o", str(folder / "no"), "--loss", "mse"]) == 2
    assert "no folder" in capsys.readouterr().err
