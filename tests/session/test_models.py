"""The models that ship in models/ are what their script makes, and run."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import numpy as np
import onnx
import onnxruntime
import pytest
from support import ROOT

MODELS = ROOT / "models"
# Per model: its input, that input's shape for a batch of n, what else to feed, the number of classes.
RUNS = {
    "cnn.onnx": ("image", lambda n: (n, 1, 8, 8), {}, 10),
    "gru.onnx": ("sequence", lambda n: (5 + n, n, 8), {}, 4),
    "mlp.onnx": ("features", lambda n: (n, 16), {"training_mode": np.array(False)}, 3),
}


def make_models() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_models", MODELS / "make_models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_shipped_model_has_its_maker() -> None:
    assert {path.name for path in MODELS.glob("*.onnx")} == set(RUNS) == set(make_models().MODELS)


@pytest.mark.parametrize("name", RUNS)
def test_the_script_reproduces_the_file(name: str) -> None:
    made = make_models().MODELS[name]()
    assert made.SerializeToString(deterministic=True) == (MODELS / name).read_bytes()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", RUNS)
def test_the_model_is_valid_and_runs(name: str, batch: int) -> None:
    onnx.checker.check_model(onnx.load(MODELS / name), full_check=True)
    session = onnxruntime.InferenceSession(MODELS / name, providers=["CPUExecutionProvider"])
    feed, shape, others, classes = RUNS[name]
    values = np.random.default_rng(batch).standard_normal(shape(batch), dtype=np.float32)
    (scores,) = session.run(None, {feed: values, **others})
    assert scores.shape == (batch, classes)
    assert np.isfinite(scores).all()
    assert np.ptp(scores) > 0


def test_dropout_of_the_mlp_can_be_switched_on() -> None:
    # onnxruntime removes a Dropout whose mask nobody reads, in training mode too.
    session = onnxruntime.InferenceSession(
        MODELS / "mlp.onnx", providers=["CPUExecutionProvider"], disabled_optimizers=["EliminateDropout"]
    )
    features = np.ones((4, 16), np.float32)
    (off,) = session.run(None, {"features": features, "training_mode": np.array(False)})
    (on,) = session.run(None, {"features": features, "training_mode": np.array(True)})
    np.testing.assert_array_equal(off, np.broadcast_to(off[0], off.shape))
    assert np.abs(on - off).max() > 1e-3
