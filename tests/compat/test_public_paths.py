"""The names of onnxruntime.training 1.19.2 can be imported from where they are there."""

from __future__ import annotations

import importlib

import pytest

PATHS = {
    "api": "CheckpointState LinearLRScheduler Module Optimizer Parameter",
    "api.checkpoint_state": "CheckpointState Parameter",
    "api.lr_scheduler": "LinearLRScheduler",
    "api.module": "Module",
    "api.optimizer": "Optimizer",
    "artifacts": "LossType OptimType generate_artifacts",
    "onnxblock": (
        "Block ForwardBlock TrainingBlock base blocks custom_op_library empty_base load_checkpoint_to_model "
        "loss optim save_checkpoint"
    ),
    "onnxblock.blocks": (
        "Abs Add Block Cast Clip Constant Div InputLike LabelEncoder Linear Log Mul Neg PassThrough Pow "
        "ReduceAllL2 ReduceMean ReduceSum SequenceConstruct Sigmoid Sub"
    ),
    "onnxblock.checkpoint_utils": "load_checkpoint_to_model save_checkpoint",
    "onnxblock.loss": "BCEWithLogitsLoss CrossEntropyLoss L1Loss MSELoss",
    "onnxblock.model_accessor": "ModelAccessor base custom_op_library empty_base",
    "onnxblock.optim": "AdamW ClipGradNorm SGD",
}


@pytest.mark.parametrize("path", PATHS)
def test_path(path: str) -> None:
    module = importlib.import_module(f"ortgrad.training.{path}")
    assert all(hasattr(module, name) for name in PATHS[path].split())
    assert set(module.__all__) == set(PATHS[path].split())
