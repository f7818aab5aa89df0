"""The classes of onnxruntime.training.api."""

from ortgrad.training.api.checkpoint_state import CheckpointState, Parameter
from ortgrad.training.api.lr_scheduler import LinearLRScheduler
from ortgrad.training.api.module import Module
from ortgrad.training.api.optimizer import Optimizer

__all__ = ["CheckpointState", "LinearLRScheduler", "Module", "Optimizer", "Parameter"]
