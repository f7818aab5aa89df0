"""What users get who do not have Numba, which is optional. These tests run with and without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest

import ortgrad
from ortgrad.cli import main
from ortgrad.compiled import machine_code
from ortgrad.errors import MissingPackageError
from ortgrad.operators.declaration import INTERNAL_DOMAIN
from ortgrad.pipelines.prepare import prepare_loaded


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "is_installed", lambda: False)
    # No session may be made with this: the op library is filled once, and would lack the compiled functions.
    monkeypatch.setattr(machine_code, "entry", lambda: None)


def relu_model() -> onnx.ModelProto:
    return ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX"))


def test_compiled_kernels_are_refused(without_numba: None) -> None:
    for make in (ortgrad.InferenceSession, ortgrad.prepare):
        with pytest.raises(MissingPackageError, match=r"needs Numba: pip install 'ortgrad\[compiled\]'"):
            make(relu_model(), kernels="compiled")


def test_the_command_line_says_what_to_install(
    without_numba: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "model.onnx")
    onnx.save(relu_model(), path)
    for arguments in (
        ["compile"],
        ["compile", path],
        ["prepare", path, "-o", str(tmp_path / "out.onnx"), "--kernels", "compiled"],
    ):
        assert main(arguments) == 2
        assert "pip install 'ortgrad[compiled]'" in capsys.readouterr().err


def test_auto_runs_bodies(without_numba: None) -> None:
    assert "ReluGrad" not in {node.op_type for node in ortgrad.prepare(relu_model()).graph.node}


def test_nothing_is_fused(without_numba: None) -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N] x) => (float[N] y) { a = Exp(x)  b = Mul(a, x)  y = Sigmoid(b) }""")
    built = ortgrad.build_gradient_model(model, wrt=["x"])
    prepared = prepare_loaded(built, "auto", bodies=False)
    assert INTERNAL_DOMAIN not in {node.domain for node in prepared.graph.node}


SCRIPT = """
import sys
sys.modules["numba"] = sys.modules["llvmlite"] = None
import numpy as np, onnx, ortgrad
model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    g (float[2, 3, 8, 8] x, float[4, 3, 3, 3] w) => (float[2, 4, 3, 3] y) {
        c = Conv(x, w)  r = Relu(c)  y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
    }''')
built = ortgrad.build_gradient_model(model, wrt=["x", "w"])
rng = np.random.default_rng(0)
for kernels in ("auto", "onnx", "python"):
    session = ortgrad.InferenceSession(built, kernels=kernels)
    feeds = {v.name: rng.standard_normal(v.shape).astype(np.float32) for v in session.get_inputs()}
    session.run(None, feeds)
"""


def test_sessions_do_not_import_it() -> None:
    """An import of a module that is None fails."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
