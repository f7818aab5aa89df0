"""The examples run, and what they print is right."""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support import PATIENCE, ROOT

EXAMPLES = ROOT / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested() -> None:
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tests


def test_backward_graph() -> None:
    checks = load("backward_graph").main()
    assert len(checks) == 5
    for slope, difference in checks.values():
        assert slope == pytest.approx(difference, rel=1e-5, abs=1e-6)
        assert abs(slope) > 1e-3


def test_run_training_model() -> None:
    loss, parameter = load("run_training_model").main()
    assert loss < 1e-5
    assert parameter < 1e-5


def test_fine_tune_cnn(tmp_path: Path) -> None:
    before, after, changed = load("fine_tune_cnn").main(tmp_path / "trained.onnx")
    assert before < 0.5
    assert after > 0.9
    assert changed == ["fc.weight", "fc.bias"]
    assert (tmp_path / "trained.onnx").exists()


def test_train_gru() -> None:
    result = load("train_gru").main(epochs=15)
    assert result.metric > 0.8
    assert result.history[-1].loss < 0.2 * result.history[0].loss


def test_lora_transformer(tmp_path: Path) -> None:
    before, after, share = load("lora_transformer").main(tmp_path / "adapters.safetensors")
    assert before < 0.6
    assert after > 0.9
    assert share < 0.2
    assert (tmp_path / "adapters.safetensors").exists()


def test_continue_artifacts() -> None:
    error, first, last = load("continue_artifacts").main()
    assert error < 1e-5
    assert last < 0.9 * first


def test_saliency(tmp_path: Path) -> None:
    picture = tmp_path / "saliency.png"
    sums, changes = load("saliency").main(picture, epochs=6)
    # What the pixels contribute is what the image changes in the score.
    np.testing.assert_allclose(sums, changes, rtol=0.05, atol=0.2)
    gray = read_png(picture)
    assert gray.shape == (510, 420)
    tile = 8 * 12 + 2 * 3
    for row in range(5):
        for left in (0, 2 * tile + 12):
            digit, saliency = (gray[row * tile :][:tile, left + i * tile :][:, :tile] for i in (0, 1))
            inside = (slice(3, -3), slice(3, -3))
            # The saliency is on the strokes of the digit, and nowhere else.
            assert saliency[inside][digit[inside] == 0].max(initial=0) == 0
            assert np.corrcoef(digit[inside].ravel(), saliency[inside].ravel())[0, 1] > 0.5


def read_png(path: Path) -> np.ndarray:
    """The gray values of a PNG with one IDAT chunk and no filters; checksums are verified."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length]) == (zlib.crc32(kind + body),)
        chunks[kind], at = body, at + 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 0, 0, 0, 0]
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not lines[:, 0].any()
    return lines[:, 1:]


def test_fgsm() -> None:
    clean, at_random, adversarial = load("fgsm").main(epochs=6)
    assert clean > 0.9
    assert at_random > clean - 0.1
    assert adversarial < clean - 0.3


def test_second_derivatives() -> None:
    error, norms = load("second_derivatives").main()
    assert error < 1e-8
    # Newton's method doubles the number of right digits in every step.
    assert norms[-1] < 1e-8
    assert norms[-1] < norms[-2] ** 1.5


def test_custom_rule() -> None:
    # A process of its own: the example declares operators.
    code = (
        "import runpy, sys; check, before, after = runpy.run_path(sys.argv[1])['main'](); "
        "assert check.ok and after < 0.3 * before, (check, before, after)"
    )
    script = str(EXAMPLES / "custom_rule.py")
    result = subprocess.run(
        [sys.executable, "-c", code, script], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert result.returncode == 0, result.stderr
    assert "SquarePlus hidden  ok" in result.stdout
