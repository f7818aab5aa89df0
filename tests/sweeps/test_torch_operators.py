"""Samples of PyTorch's own tests have its gradients; `tests/sweeps/torch_operators.py` runs them all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from support import amount
from sweeps.torch_operators import FAILURES, RIGHT, WRONG, differs, judge


@pytest.mark.parametrize(
    ("exporter", "drawn", "right"), [("script", amount(80, 2000), 25), ("dynamo", amount(12, 300), 4)]
)
def test_samples(exporter: str, drawn: int, right: int, tmp_path: Path) -> None:
    script, out = Path(__file__).with_name("torch_operators.py"), tmp_path / "verdicts.json"
    command = [sys.executable, script, "--exporters", exporter, "--draw", str(drawn), "--json", out]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    verdicts = json.loads(out.read_text())
    assert not [verdict for verdict in verdicts if verdict[1] in FAILURES]
    assert sum(kind == RIGHT for _, kind, _ in verdicts) >= right


@pytest.mark.parametrize(("grad", "expected"), [(4.0, RIGHT), (4.1, WRONG)])
def test_a_wrong_gradient_is_found(grad: float, expected: str, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 18]> g (float[1] i0) => (float[1] o0) { o0 = Mul(i0, i0) }"""
    )
    onnx.save(model, tmp_path / "square.onnx")
    arrays = {
        "in:i0": 2.0,
        "out:o0": 4.0,
        "out64:o0": 4.0,
        "seed:o0": 1.0,
        "grad:i0": grad,
        "grad64:i0": grad,
    }
    np.savez(tmp_path / "square.npz", **{name: np.float32([value]) for name, value in arrays.items()})
    assert judge(tmp_path / "square.onnx")[0] == expected


def test_rounding_is_no_difference() -> None:
    one, nan = np.ones(2), np.array([np.nan, 1])
    assert not differs(one + 1e-6, one, one)
    assert not differs(one + 0.1, one + 0.01, one)  # float32 is that far off in PyTorch itself
    assert not differs(nan, nan, nan)
    assert differs(one + 0.01, one, one)
    assert differs(nan, one, one)
    assert differs(one, nan, nan)
    assert differs(np.ones(1), one, one)
