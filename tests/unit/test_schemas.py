"""ortgrad's schemas are in onnx's table only while onnx works for ortgrad."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser
from support import PATIENCE, ROOT

import ortgrad
import ortgrad.operators.schema
from ortgrad.operators.schema import schemas_known

MODELS = ROOT / "models"
MODEL = """
<ir_version: 10, opset_import: ["" : 18]>
g (float[N,1,8,8] x, float[2,1,3,3] w) => (float[N,2,3,3] y)
{ c = Conv(x, w) r = Relu(c) y = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r) }
"""


def in_another_process(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    # Kernels may have to be compiled, and that is announced.
    assert all(line.startswith("ortgrad: compiling ") for line in done.stderr.splitlines()), done.stderr
    return done.stdout


def schemas() -> set[tuple[str, str, int]]:
    return {(s.domain, s.name, s.since_version) for s in onnx.defs.get_all_schemas_with_history()}


def test_nothing_that_ortgrad_does_leaves_schemas_behind() -> None:
    in_another_process(
        """
import sys
import onnx
schemas = lambda: {(s.domain, s.name, s.since_version) for s in onnx.defs.get_all_schemas_with_history()}
before = schemas()
import ortgrad
import ortgrad.operators.schema
assert schemas() == before
built = ortgrad.build_gradient_model(sys.argv[1])
assert schemas() == before
ready = ortgrad.prepare(built, kernels="python")
ortgrad.InferenceSession(ready)
assert schemas() == before
ortgrad.check_gradients(sys.argv[1], per_node=True)
assert schemas() == before
try:
    ortgrad.build_gradient_model(sys.argv[1], wrt="nothing of that name")
except ortgrad.ModelError:
    assert schemas() == before
else:
    raise AssertionError
""",
        str(MODELS / "cnn.onnx"),
    )


def test_built_models_are_valid_where_ortgrad_is_not(tmp_path: Path) -> None:
    for kernels in ("python", "onnx", "auto"):
        built = ortgrad.build_gradient_model(parser.parse_model(MODEL), wrt=["x", "w"])
        onnx.save(ortgrad.prepare(built, kernels=kernels), tmp_path / f"{kernels}.onnx")
    in_another_process(
        """
import sys
import onnx
for path in sys.argv[1:]:
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
assert "ortgrad" not in sys.modules
""",
        *map(str, tmp_path.iterdir()),
    )


def test_nested_and_shared() -> None:
    before = schemas()
    with schemas_known():
        known = schemas()
        assert known > before
        with schemas_known():
            assert schemas() == known
        assert schemas() == known
    assert schemas() == before


def test_threads_build_at_once() -> None:
    """Each thread leaves the schemas to those that still need them."""
    model = parser.parse_model(MODEL)
    expected = ortgrad.build_gradient_model(model, wrt=["x", "w"]).SerializeToString(deterministic=True)
    before = schemas()
    start = threading.Barrier(4)

    def build(_: int) -> list[bytes]:
        start.wait()
        return [
            ortgrad.build_gradient_model(model, wrt=["x", "w"]).SerializeToString(deterministic=True)
            for _ in range(8)
        ]

    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(build, range(4)):
            assert set(results) == {expected}
    assert schemas() == before


def test_a_schema_that_somebody_registers_later_stays_theirs() -> None:
    theirs = onnx.defs.OpSchema("ReluGrad", "com.microsoft", 1)
    onnx.defs.register_schema(theirs)
    try:
        built = ortgrad.build_gradient_model(parser.parse_model(MODEL), wrt="x")
        assert onnx.defs.has("ReluGrad", "com.microsoft")
    finally:
        onnx.defs.deregister_schema("ReluGrad", 1, "com.microsoft")
    x = np.ones((1, 1, 8, 8), np.float32)
    w, dy = np.ones((2, 1, 3, 3), np.float32), np.ones((1, 2, 3, 3), np.float32)
    *_, grad = ortgrad.InferenceSession(built).run(None, {"x": x, "w": w, "y_grad": dy})
    assert np.isfinite(grad).all() and grad.sum() == 2 * 9 * 9


@pytest.mark.skipif(importlib.util.find_spec("skl2onnx") is None, reason="skl2onnx is not installed")
@pytest.mark.parametrize("order", ["import ortgrad, skl2onnx", "import skl2onnx, ortgrad"])
def test_beside_skl2onnx(order: str) -> None:
    in_another_process(f"{order}\nfrom skl2onnx.algebra.onnx_ops import OnnxRelu")


def test_onnx_calls_back_where_no_signal_is_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnx's binding makes a TypeError of a KeyboardInterrupt that is raised while it converts a value."""
    places: set[bool] = set()
    infer = ortgrad.operators.schema._call_of

    def spy(*args: Any) -> Any:
        places.add(threading.current_thread() is threading.main_thread())
        return infer(*args)

    monkeypatch.setattr(ortgrad.operators.schema, "_call_of", spy)
    model = parser.parse_model(MODEL)
    built = ortgrad.build_gradient_model(model, wrt=["x", "w"])
    ortgrad.InferenceSession(built)
    ortgrad.prepare(built)
    ortgrad.check_gradients(model, wrt=["x", "w"])
    assert places == {False}
