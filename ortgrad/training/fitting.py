"""fit: train a forward model on data in one call."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ortgrad.graph.loading import ModelLike, load_model
from ortgrad.keywords import checked, taken_by
from ortgrad.training.loss_nodes import CustomLoss
from ortgrad.training.loss_types import suggest_types
from ortgrad.training.losses import Declaration, Loss
from ortgrad.training.metrics import Metric
from ortgrad.training.optimizers.rules import AnyOptimizer
from ortgrad.training.results import Result
from ortgrad.training.schedules import Schedule
from ortgrad.training.selection import Patterns
from ortgrad.training.trainer import Trainer


@checked
def fit(
    model: ModelLike,
    data: Any,
    *,
    loss: Loss,
    optimizer: str | AnyOptimizer = "adamw",
    wrt: Patterns = None,
    exclude: Patterns = None,
    learning_rate: float | None = None,
    groups: Mapping[str, Mapping[str, float]] | None = None,
    schedule: str | Schedule = "constant",
    warmup: float = 0,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    accumulate: int = 1,
    seed: int = 0,
    threads: int = 0,
    statistics: str = "trained",
    output: str | None = None,
    target: str | None = None,
    reduction: str | None = None,
    weight: Any = None,
    pos_weight: Any = None,
    ignore_index: int | None = None,
    axis: int | None = None,
    delta: float | None = None,
    types: Mapping[str, Declaration] | None = None,
    epochs: int = 1,
    batch_size: int = 32,
    steps_per_epoch: int | None = None,
    shuffle: bool = True,
    evaluate: Any = None,
    metric: Metric | None = None,
    patience: int | None = None,
    maximize: bool | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    progress: bool | None = None,
    curve: str | os.PathLike[str] | None = None,
) -> Result:
    """Train a forward model on data and return the result.

    The arguments up to `types` are those of `Trainer`, the others those of `Trainer.fit`.

    >>> import numpy as np, onnx
    >>> from ortgrad.training import fit
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 2}> { y = MatMul(x, w) }''')
    >>> x, target = np.float32([[1, 0], [0, 1], [1, 1]]), np.float32([[3], [1], [4]])
    >>> result = fit(model, (x, target), loss="mse", learning_rate=0.1, epochs=100, batch_size=3)
    >>> len(result.history), result.steps, result.loss < 0.1
    (100, 100, True)
    """
    given = locals()
    if callable(loss) and not isinstance(loss, CustomLoss):
        data, types = suggest_types(load_model(model), loss, output, target, data, types or {})
        given |= {"data": data, "types": types}
    return Trainer(**taken_by(Trainer, given)).fit(**taken_by(Trainer.fit, given))
