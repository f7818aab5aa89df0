"""The classes of onnxruntime.training.api."""

from ortgrad.compat.api.checkpoint_state import CheckpointState, Parameter
from ortgrad.compat.api.lr_scheduler import LinearLRScheduler
from ortgrad.compat.api.module import Module
from ortgrad.compat.api.optimizer import Optimizer

__all__ = ["CheckpointState", "LinearLRScheduler", "Module", "Optimizer", "Parameter"]
