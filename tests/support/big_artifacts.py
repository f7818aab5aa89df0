"""Artifacts of large layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ortgrad.training import artifacts
from ortgrad.training.api import CheckpointState, Module


def load(folder: Path, *, evaluation: bool = True, **options: Any) -> tuple[CheckpointState, Module]:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    path = folder / "eval_model.onnx" if evaluation else None
    return state, Module(folder / "training_model.onnx", state, path, **options)


def big_artifacts(place: Path, width: int) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 18]>
        big (float[N, {width}] x) => (float[N, {width}] y) {{ h = MatMul (x, w)  y = Add (h, b) }}"""
    )
    numbers = np.random.default_rng(0)
    for name, shape in {"w": (width, width), "b": (width,)}.items():
        value = numbers.standard_normal(shape).astype(np.float32) / width
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    artifacts.generate_artifacts(
        model,
        requires_grad=["w", "b"],
        loss=artifacts.LossType.MSELoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=place,
    )
