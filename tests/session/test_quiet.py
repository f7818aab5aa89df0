"""Nothing is written to stderr for a user who did nothing wrong."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime
import pytest
from support import GOLDEN, ROOT

import ortgrad

FILES = [*sorted((ROOT / "models").glob("*.onnx")), GOLDEN / "cnn" / "training_model.onnx"]
CPU = ["CPUExecutionProvider"]
# Of every initializer that can be fed onnxruntime warns in a plain session, whatever the model looks like.
WEIGHT_CAN_BE_FED = "appears in graph inputs and will not be treated as constant"


def _ready(path: Path, kernels: str) -> onnx.ModelProto:
    training = path.parent != ROOT / "models"
    return ortgrad.prepare(path if training else ortgrad.build_gradient_model(path), kernels=kernels)


@pytest.mark.parametrize("kernels", ["python", "onnx", "auto"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_all_ways_are_quiet(path: Path, kernels: str, capfd: pytest.CaptureFixture[str]) -> None:
    model = _ready(path, kernels)
    ortgrad.InferenceSession(model)
    options = onnxruntime.SessionOptions()
    ortgrad.InferenceSession(model, options)
    assert options.log_severity_level == -1, "the caller's options are as they were"
    registered = onnxruntime.SessionOptions()
    ortgrad.register(registered)
    onnxruntime.InferenceSession(model.SerializeToString(), registered, providers=CPU)
    quiet = onnxruntime.SessionOptions()
    quiet.log_severity_level = 3
    onnxruntime.InferenceSession(model.SerializeToString(), quiet, providers=CPU)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_operator_without_a_kernel_is_folded(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    onnxruntime.InferenceSession(_ready(path, "onnx").SerializeToString(), providers=CPU)
    assert "Could not find a CPU kernel" not in capfd.readouterr().err


def test_a_level_that_was_chosen_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    model = ortgrad.build_gradient_model(FILES[0])
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 2
    ortgrad.InferenceSession(model, options)
    assert WEIGHT_CAN_BE_FED in capfd.readouterr().err
    ortgrad.register(options)
    assert options.log_severity_level == 2
