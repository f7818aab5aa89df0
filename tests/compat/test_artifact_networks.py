"""Artifacts that onnxruntime-training 1.19.2 has written; see tests/golden/networks/make.py."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from support import GOLDEN
from sweeps.artifact_networks import try_network

import ortgrad

FOLDERS = sorted(path.parent for path in (GOLDEN / "networks").glob("*/expected.npz"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_artifacts(folder: Path, tmp_path: Path) -> None:
    """They train as in 1.19.2, evaluate, resume to the bit, and are exported in inference mode."""
    assert try_network(folder, tmp_path) == ["train", "evaluate", "save", "resume", "export"]


@pytest.mark.parametrize("kernels", ["auto", "onnx"])
def test_evaluation_models_in_sessions(kernels: str) -> None:
    """BatchNormalization has three outputs in some of them, and no training mode."""
    path = GOLDEN / "networks" / "normalized_in_training" / "eval_model.onnx"
    model = onnx.load(path)
    assert [len(n.output) for n in model.graph.node if n.op_type == "BatchNormalization"] == [3]
    names = [value.name for value in ortgrad.InferenceSession(path, kernels=kernels).get_inputs()]
    assert {"x", "labels"} <= set(names)
    ready = ortgrad.prepare(path, kernels=kernels)
    assert [len(n.output) for n in ready.graph.node if n.op_type == "BatchNormalization"] == [1]
    built = ortgrad.build_gradient_model(path, wrt="x")
    assert "x_grad" in {value.name for value in built.graph.output}
