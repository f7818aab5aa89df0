"""Every place that takes a name offers the nearest one that the model has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import ortgrad
from ortgrad import training
from ortgrad.cli import main
from ortgrad.training import Trainer, artifacts, lora

MODEL = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    g (float[N, 3] x, float[N, 2] target) => (float[N, 2] scores, float loss)
    <float[3, 2] enc_w = {1, 2, 3, 4, 5, 6}, float[2] enc_b = {0, 0}> {
        h = MatMul(x, enc_w) scores = Add(h, enc_b) e = Sub(scores, target) s = Mul(e, e)
        loss = ReduceMean<keepdims = 0>(s)
    }""")
X, T = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)
BACKWARD = ortgrad.build_gradient_model(MODEL, wrt=["enc_w"], of="loss")
MSE = artifacts.LossType.MSELoss


def session(kernels: Any = "auto") -> ortgrad.InferenceSession:
    return ortgrad.InferenceSession(BACKWARD, kernels=kernels)


def value(array: np.ndarray) -> onnxruntime.OrtValue:
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def trainer(**options: Any) -> Trainer:
    return Trainer(MODEL, **{"loss": "loss", **options})


def generate(**options: Any) -> None:
    artifacts.generate_artifacts(MODEL, **{"requires_grad": ["enc_w"], **options})


CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "wrt": (lambda: ortgrad.build_gradient_model(MODEL, wrt="X"), "x"),
    "wrt, a pattern": (lambda: ortgrad.build_gradient_model(MODEL, wrt="Enc_*"), "enc_w"),
    "of": (lambda: ortgrad.build_gradient_model(MODEL, of="Loss"), "loss"),
    "feeds": (lambda: ortgrad.build_gradient_model(MODEL, feeds={"X": X}), "x"),
    "wrt of a check": (lambda: ortgrad.check_gradients(MODEL, wrt="X"), "x"),
    "of of a check": (lambda: ortgrad.check_gradients(MODEL, of="Loss"), "loss"),
    "feeds of a check": (lambda: ortgrad.check_gradients(MODEL, {"Target": T}), "target"),
    "an input": (lambda: session().run(None, {"X": X, "target": T}), "x"),
    "a further input": (lambda: session().run(None, {"x": X, "target": T, "Enc_w": X}), "enc_w"),
    "an output": (lambda: session().run(["Loss"], {"x": X, "target": T}), "loss"),
    "an OrtValue": (
        lambda: session().run_with_ort_values(["loss"], {"X": value(X), "target": value(T)}),
        "x",
    ),
    "an output as an OrtValue": (
        lambda: session().run_with_ort_values(["Loss"], {"x": value(X), "target": value(T)}),
        "loss",
    ),
    "wrt of a training": (lambda: trainer(wrt="Enc_w"), "enc_w"),
    "exclude": (lambda: trainer(exclude="Enc_b"), "enc_b"),
    "groups": (lambda: trainer(groups={"Enc_w": {"learning_rate": 0.1}}), "enc_w"),
    "a loss of the model": (lambda: trainer(loss="Loss"), "loss"),
    "a loss": (lambda: trainer(loss="crossentropy"), "cross-entropy"),
    "an optimizer": (lambda: trainer(optimizer="AdamW"), "adamw"),
    "the output of a loss": (lambda: trainer(loss="mse", output="Scores"), "scores"),
    "an array of a batch": (lambda: trainer().step({"X": X, "x": X, "target": T}), "x"),
    "a parameter of a state": (lambda: trainer().state.parameter("Enc_w"), "enc_w"),
    "parameters": (lambda: training.parameters(MODEL, "Enc_w"), "enc_w"),
    "an exported parameter": (
        lambda: training.export(MODEL, {"Enc_w": np.ones((3, 2), np.float32)}),
        "enc_w",
    ),
    "targets of LoRA": (lambda: lora.add_lora(MODEL, "Enc_w"), "enc_w"),
    "requires_grad": (lambda: generate(requires_grad=["Enc_w"], loss=MSE), "enc_w"),
    "additional outputs": (lambda: generate(additional_output_names=["Scores"]), "scores"),
    "inputs of a loss": (lambda: generate(loss=MSE, loss_input_names=["Scores", "t"]), "scores"),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_nearest_name_is_offered(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, offered = CALLS[name]
    with pytest.raises(Exception, match=f"did you mean '{offered}'"):
        call()


@pytest.mark.parametrize("kernels", ["auto", "onnx", "python"])
def test_errors_of_runs_keep_their_types(kernels: str) -> None:
    """Those of onnxruntime itself, so that code for it finds what it expects."""
    ours = session(kernels)
    theirs = onnxruntime.InferenceSession(MODEL.SerializeToString())
    right = {"x": X, "target": T}
    for outputs, feeds in ((None, {"X": X}), (["Loss"], right), (None, {**right, "u": X})):
        with pytest.raises(Exception, match=r".") as expected:
            theirs.run(outputs, feeds)
        with pytest.raises(type(expected.value), match="the model has no"):
            ours.run(outputs, feeds)
    # What has another reason is told as before.
    with pytest.raises(Exception, match="Got invalid dimensions"):
        ours.run(None, {"x": T, "target": T})


@pytest.mark.parametrize(
    "arguments", [["grad", "--wrt", "X"], ["explain", "--of", "Loss"], ["check", "--wrt", "X"]]
)
def test_on_the_command_line(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(MODEL, path)
    command, option, name = arguments
    more = ["-o", str(tmp_path / "b.onnx")] if command == "grad" else []
    assert main([command, str(path), *more, option, name]) != 0
    text = capsys.readouterr().err
    assert f"{option} '{name}'" in text
    assert f"did you mean '{name.lower()}'" in text
