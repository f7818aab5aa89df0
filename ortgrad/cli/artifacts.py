"""`ortgrad artifacts`: the files with which onnxruntime.training and ortgrad.training.api train a model."""

from __future__ import annotations

import argparse
from pathlib import Path

from ortgrad.cli.files import output_path
from ortgrad.compat.artifacts import LossType, OptimType, generate_artifacts
from ortgrad.graph.loading import load_model
from ortgrad.training.selection import all_parameters, selected
from ortgrad.training.statistics import running_statistics, untrained_normalizations

LOSSES = {
    "cross-entropy": LossType.CrossEntropyLoss,
    "mse": LossType.MSELoss,
    "l1": LossType.L1Loss,
    "bce": LossType.BCEWithLogitsLoss,
}
FILES = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")
OPTIMIZERS = {"adamw": OptimType.AdamW, "sgd": OptimType.SGD}


def command(arguments: argparse.Namespace) -> int:
    """Write the four files and print their names."""
    folder = Path(arguments.output)
    for name in FILES if folder.is_dir() else ():
        output_path(str(folder / (arguments.prefix + name)), arguments.model)
    model = load_model(arguments.model)
    known = all_parameters(model)
    trained = selected(model, known, arguments.wrt, arguments.exclude)
    untrained = untrained_normalizations(model, trained, known, arguments.statistics)
    statistics = [name for name in running_statistics(model, untrained) if name not in trained]
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
    for name in FILES:
        print(f"  {folder / (arguments.prefix + name)}")
    return 0
