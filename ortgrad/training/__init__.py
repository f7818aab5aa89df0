"""Training of ONNX models: a short way (`fit`), and the interface of onnxruntime.training 1.19.2."""

from ortgrad.training.exporting import export
from ortgrad.training.losses import add_loss
from ortgrad.training.selection import parameters

__all__ = ["add_loss", "export", "parameters"]
