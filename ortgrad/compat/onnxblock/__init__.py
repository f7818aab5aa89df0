"""Blocks that stack nodes on a model: building blocks, losses, optimizers, and models made of them."""

from ortgrad.compat.onnxblock import blocks, loss, optim
from ortgrad.compat.onnxblock.blocks import Block
from ortgrad.compat.onnxblock.checkpoint_utils import load_checkpoint_to_model, save_checkpoint
from ortgrad.compat.onnxblock.model_accessor import base, custom_op_library, empty_base
from ortgrad.compat.onnxblock.models import ForwardBlock, TrainingBlock

__all__ = [
    "Block",
    "ForwardBlock",
    "TrainingBlock",
    "base",
    "blocks",
    "custom_op_library",
    "empty_base",
    "load_checkpoint_to_model",
    "loss",
    "optim",
    "save_checkpoint",
]
