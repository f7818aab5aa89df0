"""`ortgrad train` and `ortgrad artifacts`: what they write, what they say, and their exit codes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from support import ROOT

import ortgrad
from ortgrad.cli import main
from ortgrad.cli.demo import digits
from ortgrad.cli.wording import for_command_line
from ortgrad.training.api import CheckpointState, Module, Optimizer
from ortgrad.training.artifacts import LossType, generate_artifacts

CNN = str(ROOT / "models" / "cnn.onnx")


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


def test_artifacts_make_their_folder(folder: Path) -> None:
    assert main(["artifacts", CNN, "-o", str(folder / "new" / "folder"), "--loss", "cross-entropy"]) == 0
    files = sorted(path.name for path in (folder / "new" / "folder").iterdir())
    assert files == ["checkpoint", "eval_model.onnx", "optimizer_model.onnx", "training_model.onnx"]
    other = folder / "other" / "folder"
    generate_artifacts(
        onnx.load(CNN), ["fc.weight"], artifact_directory=other, loss=LossType.CrossEntropyLoss
    )
    assert (other / "training_model.onnx").exists()
    (folder / "file").write_text("")
    assert main(["artifacts", CNN, "-o", str(folder / "file"), "--loss", "mse"]) == 2


def test_adam_and_statistics(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--optimizer", "adam", "--wrt", "fc.*", "--statistics", "none") == 0
    assert "2 parameters with 650 elements were trained" in capsys.readouterr().out


# Files that a command reads are not overwritten


def save_external(path: Path, data: str) -> None:
    model = onnx.load(CNN)
    onnx.save_model(model, str(path), save_as_external_data=True, location=data, size_threshold=0)


def commands(folder: Path) -> dict[str, list[str]]:
    data = ["--data", str(folder / "train.npz"), "--loss", "cross-entropy", "--epochs", "0"]
    return {
        "grad": ["grad", "MODEL", "-o", "OUT"],
        "prepare": ["prepare", "MODEL", "-o", "OUT"],
        "train": ["train", "MODEL", "-o", "OUT", *data],
        "checkpoint": ["train", "MODEL", "-o", str(folder / "t.onnx"), "--checkpoint", "OUT", *data],
        "curve": ["train", "MODEL", "-o", str(folder / "t.onnx"), "--curve", "OUT", *data],
    }


KINDS = ["itself", "link", "hard_link", "relative", "external", "external_of_output"]


@pytest.mark.parametrize(
    ("command", "kind"),
    [*(("grad", kind) for kind in KINDS)]
    + [
        (command, kind)
        for command in ("prepare", "train", "checkpoint", "curve")
        for kind in ("itself", "hard_link", "external")
    ],
)
def test_a_command_does_not_overwrite_what_it_reads(
    command: str, kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = folder / "m.onnx"
    save_external(model, "out.onnx.data")
    out = {
        "itself": model,
        "link": folder / "link.onnx",
        "hard_link": folder / "hard.onnx",
        "relative": folder / "x" / ".." / "m.onnx",
        "external": folder / "out.onnx.data",
        "external_of_output": folder / "out.onnx",
    }[kind]
    (folder / "x").mkdir()
    (folder / "link.onnx").symlink_to(model)
    (folder / "hard.onnx").hardlink_to(model)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    arguments = [{"MODEL": str(model), "OUT": str(out)}.get(a, a) for a in commands(folder)[command]]
    assert main(arguments) == 2
    assert "name another file" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_data_and_artifacts_are_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder / "training_model.onnx"
    model.write_bytes(Path(CNN).read_bytes())
    assert main(["artifacts", str(model), "-o", str(folder), "--loss", "cross-entropy"]) == 2
    for option in (["-o", str(folder / "train.npz")], ["--checkpoint", str(folder / "train.npz")]):
        assert run(folder, *option) == 2
    assert capsys.readouterr().err.count("name another file") == 3
    assert model.read_bytes() == Path(CNN).read_bytes()


# Errors in the words of the command line

KEYWORD = re.compile(r"(?<![-\w])[a-z]+(_[a-z]+)*=")
UNDERSCORES = re.compile(r"(?<![-\w./])(learning_rate|batch_size|checkpoint_every|weight_decay|clip_norm)\b")
MISTAKES: dict[str, tuple[list[str], str]] = {
    "wrt": (["grad", CNN, "-o", "OUT", "--wrt", "nothing"], "--wrt 'nothing'"),
    "wrt_pattern": (["grad", CNN, "-o", "OUT", "--wrt", "nothing.*"], "--wrt 'nothing.*'"),
    "of": (["grad", CNN, "-o", "OUT", "--of", "nothing"], "--of 'nothing'"),
    "explain": (["explain", CNN, "--wrt", "nothing"], "--wrt 'nothing'"),
    "check": (["check", CNN, "--wrt", "nothing"], "--wrt 'nothing'"),
    "train_wrt": (["train", CNN, "-o", "OUT", "--wrt", "nothing"], "--wrt 'nothing'"),
    "train_exclude": (["train", CNN, "-o", "OUT", "--exclude", "nothing"], "--exclude 'nothing'"),
    "train_all_excluded": (["train", CNN, "-o", "OUT", "--exclude", "*"], "with --wrt"),
    "loss_output": (["train", CNN, "-o", "OUT", "--loss-output", "no"], "--loss-output 'no'"),
    "target": (["train", CNN, "-o", "OUT", "--target", "logits"], "--target"),
    "learning_rate": (["train", CNN, "-o", "OUT", "--learning-rate", "-1"], "--learning-rate is -1"),
    "weight_decay": (["train", CNN, "-o", "OUT", "--weight-decay", "-1"], "--weight-decay is -1"),
    "clip_norm": (["train", CNN, "-o", "OUT", "--clip-norm", "0"], "--clip-norm is 0"),
    "batch_size": (["train", CNN, "-o", "OUT", "--batch-size", "0"], "--batch-size is 0"),
    "every": (["train", CNN, "-o", "OUT", "--checkpoint-every", "5"], "--checkpoint-every"),
    "patience": (["train", CNN, "-o", "OUT", "--patience", "5"], "--eval"),
    "artifacts": (["artifacts", CNN, "-o", "OUT", "--wrt", "nothing"], "--wrt 'nothing'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_errors_name_the_options(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, words = MISTAKES[name]
    arguments = [str(folder / "out.onnx") if a == "OUT" else a for a in arguments]
    if arguments[0] == "train":
        arguments += ["--data", str(folder / "train.npz"), "--loss", "cross-entropy"]
    assert main(arguments) == 2
    text = capsys.readouterr().err
    assert words in text
    unquoted = re.sub(r"'[^']*'", "''", text)
    assert not KEYWORD.search(unquoted), text
    assert not UNDERSCORES.search(unquoted), text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("wrt='a' and of='b'", "--wrt 'a' and --of 'b'"),
        ("name its input, output='z'", "name its input, --loss-output 'z'"),
        ("axis=1 or axis=-1", "--axis 1 or --axis -1"),
        ("give the target another name, target=", "give the target another name, --target"),
        ("straight_through=False excludes", "--no-straight-through excludes"),
        ("prepare with kernels='onnx'", "prepare with --kernels 'onnx'"),
        ("the value 'wrt=x' and 'learning_rate'", "the value 'wrt=x' and 'learning_rate'"),
        ("requires_grad='w' is no initializer", "--wrt 'w' is no initializer"),
        ("one of a.learning_rate, off=3", "one of a.learning_rate, off=3"),
    ],
)
def test_wording(text: str, expected: str) -> None:
    assert for_command_line(text) == expected
