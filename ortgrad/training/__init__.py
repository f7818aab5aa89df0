"""Training of ONNX models: `fit` and `Trainer`, their losses and optimizers."""

from ortgrad.training.exporting import export
from ortgrad.training.fitting import fit
from ortgrad.training.losses import add_loss
from ortgrad.training.optimizers.rules import SGD, Adagrad, Adam, AdamW, RMSprop
from ortgrad.training.results import Result
from ortgrad.training.selection import parameters
from ortgrad.training.trainer import Trainer

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "RMSprop",
    "Result",
    "Trainer",
    "add_loss",
    "export",
    "fit",
    "parameters",
]
