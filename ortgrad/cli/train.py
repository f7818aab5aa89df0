"""`ortgrad train`: train a model on arrays."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import numpy as np

from ortgrad.cli.files import given_feeds, is_same_file, output_path
from ortgrad.errors import ModelError, TrainingError
from ortgrad.keywords import taken_by
from ortgrad.training import Trainer
from ortgrad.training.optimizers.rules import AnyOptimizer, named


def command(arguments: argparse.Namespace) -> int:
    """Train the model, write it, and print the result."""
    path = output_path(arguments.output, arguments.model, arguments.data, arguments.eval)
    if arguments.resume and arguments.checkpoint is None:
        raise TrainingError("--resume needs --checkpoint")
    written = [arguments.output]
    for name in (arguments.checkpoint, arguments.curve):
        if name is not None:
            output_path(name, arguments.model, arguments.data, arguments.eval)
            if any(is_same_file(name, other) for other in written):
                raise ModelError(f"{name!r} would be written twice; name another file")
            written.append(name)
    data, held_out = _data(arguments)
    given = vars(arguments) | {"output": arguments.loss_output, "optimizer": _optimizer(arguments)}
    trainer = Trainer(**taken_by(Trainer, given))
    given["data"] = _named(data, trainer.input_names)
    given["evaluate"] = None if held_out is None else _named(held_out, trainer.input_names)
    result = trainer.fit(**taken_by(Trainer.fit, given))
    trainer.export(path)
    print(result)
    print(f"{path}: written; {trainer.described} were trained")
    return 0


def _optimizer(arguments: argparse.Namespace) -> AnyOptimizer:
    optimizer = named(arguments.optimizer)
    given = {
        name: value
        for name in ("learning_rate", "weight_decay", "momentum")
        if (value := getattr(arguments, name)) is not None
    }
    unknown = [name for name in given if not hasattr(optimizer, name)]
    if unknown:
        raise TrainingError(f"{unknown[0]} is not a setting of {arguments.optimizer}")
    return replace(optimizer, **given)


def _data(arguments: argparse.Namespace) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray] | None]:
    """Return the arrays for training, and those for evaluation: a file, or a fraction of the data."""
    data = given_feeds(arguments.data)
    assert data is not None
    if arguments.eval is None:
        return data, None
    try:
        fraction = float(arguments.eval)
    except ValueError:
        return data, given_feeds(arguments.eval)
    sizes = {array.shape[:1] for array in data.values()}
    if not 0 < fraction < 1 or len(sizes) != 1 or sizes == {()}:
        raise TrainingError(
            f"--eval {arguments.eval}: a file, or a fraction between 0 and 1 of arrays of one length"
        )
    ((size,),) = sizes
    order = np.random.default_rng(arguments.seed).permutation(size)
    count = round(fraction * size)
    if not 0 < count < size:
        raise TrainingError(f"--eval {arguments.eval}: nothing is left of {size} samples")
    held_out, rest = np.sort(order[:count]), np.sort(order[count:])
    return {k: v[rest] for k, v in data.items()}, {k: v[held_out] for k, v in data.items()}


def _named(data: dict[str, np.ndarray], names: list[str]) -> dict[str, Any]:
    """Return the arrays that the model takes; `arr_0`, `arr_1` and so on stand for its inputs in order."""
    if set(data) == {f"arr_{i}" for i in range(len(names))}:
        return {name: data[f"arr_{i}"] for i, name in enumerate(names)}
    missing = [name for name in names if name not in data]
    if missing:
        raise ModelError(
            f"the data has no array {missing[0]!r}; the model takes {', '.join(names)}, and there are "
            f"{', '.join(data) or 'none'}: write them with numpy.savez"
        )
    return {name: data[name] for name in names}
