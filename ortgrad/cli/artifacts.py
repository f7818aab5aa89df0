"""`ortgrad artifacts`: the files with which onnxruntime.training and ortgrad.training.api train a model."""

from __future__ import annotations

import argparse

from ortgrad.cli.train import existing_folder
from ortgrad.graph.loading import load_model
from ortgrad.training.artifacts import LossType, OptimType, generate_artifacts
from ortgrad.training.selection import selected
from ortgrad.training.statistics import running_statistics

LOSSES = {
    "cross-entropy": LossType.CrossEntropyLoss,
    "mse": LossType.MSELoss,
    "l1": LossType.L1Loss,
    "bce": LossType.BCEWithLogitsLoss,
}
OPTIMIZERS = {"adamw": OptimType.AdamW, "sgd": OptimType.SGD}


def command(arguments: argparse.Namespace) -> int:
    """Write the four files and print their names."""
    folder = existing_folder(arguments.output)
    model = load_model(arguments.model)
    trained = selected(model, arguments.wrt, arguments.exclude)
    statistics = [name for name in running_statistics(model) if name not in trained]
    generate_artifacts(
        arguments.model,
        requires_grad=trained,
        frozen_params=statistics,
        loss=None if arguments.loss is None else LOSSES[arguments.loss],
        optimizer=OPTIMIZERS[arguments.optimizer],
        artifact_directory=folder,
        prefix=arguments.prefix,
    )
    print(f"{len(trained)} parameters are trained, {len(statistics)} are running statistics")
    for name in ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint"):
        print(f"  {folder / (arguments.prefix + name)}")
    return 0
