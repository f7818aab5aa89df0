"""What is minimized: the loss of a model, and what it means for batches and metrics."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from ortgrad.graph.loading import load_model
from ortgrad.training.data import NO_CLASS
from ortgrad.training.losses import LOSSES, Declaration, Loss, check_options, target_name, with_loss
from ortgrad.training.metrics import Measurement, Metric
from ortgrad.training.protos import exists, find_value
from ortgrad.training.scores import are_numbers, classes_of, is_probability, output_of


@dataclass(frozen=True)
class LossSettings:
    """A loss as the user describes it; `options` are those that were given."""

    loss: Loss
    output: str | None
    target: str | None
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Objective:
    """What a loss is computed from, and how the losses of batches are combined."""

    # The names of the loss, of the output that it is computed from, and of the scores behind that output.
    loss: str
    output: str
    scores: str
    # Whether the scores are probabilities nevertheless.
    has_probabilities: bool
    # The dimension of the classes.
    axis: int | None
    # None if the model has computed its loss itself, from any of its inputs.
    target: str | None
    # Whether the loss subtracts target and scores, so that it would broadcast them if their shapes differ.
    compares: bool
    # The labels of the classes if they are not their numbers, and the label that does not count, as a number.
    classes: np.ndarray | None
    ignored: int | None
    # Whether the loss of a batch is a sum or, over elements or labels with these weights, a mean.
    sums: bool
    is_mean: bool
    class_weights: np.ndarray | None
    # Whether every column is a class of its own.
    is_binary: bool

    @property
    def outputs(self) -> list[str]:
        """What evaluation returns beside the loss; the scores are the last ones."""
        return list(dict.fromkeys([self.output, self.scores]))

    @property
    def compared(self) -> tuple[str, Sequence[str]]:
        """The scores, and the inputs that must have their shape."""
        return self.scores, [self.target] if self.target is not None and self.compares else []

    def weight(self, target: np.ndarray | None, count: int) -> float:
        """Return the number of elements that a loss is the mean of, or the sum of their weights.

        If that is not known, it is `count`, the number of samples.
        """
        if self.sums:
            return 1
        if target is None or not self.is_mean:
            return count
        if self.ignored is not None:
            target = target[target != self.ignored]
        return target.size if self.class_weights is None else float(self.class_weights[target].sum())

    def measurement(self, metric: Metric) -> Measurement:
        """Return what measures a metric of outputs and targets."""
        return Measurement(
            metric,
            self.axis,
            self.ignored,
            threshold=0.5 if self.has_probabilities else 0.0,
            several=self.is_binary or self.has_probabilities,
        )


def with_objective(
    loaded: onnx.ModelProto, model: onnx.ModelProto, settings: LossSettings
) -> tuple[onnx.ModelProto, Objective]:
    """Return a model with its loss; `loaded` is the model as it is in its file."""
    loss, options = settings.loss, dict(settings.options)
    classes = None
    if loss in ("cross-entropy", "bce"):
        classes = classes_of(loaded)
        classes = None if classes is None or are_numbers(classes) else classes
        if classes is not None and "ignore_index" in options:
            options["ignore_index"] = NO_CLASS
    made, name, output, scores, axis = _with_loss(model, settings, options)
    constants = {tensor.name for tensor in made.graph.initializer}
    fed = [value.name for value in made.graph.input if value.name not in constants]
    new = {*fed} - {value.name for value in model.graph.input}
    target = settings.target or _target(loss, fed, new)
    is_weighted = loss == "cross-entropy" and "weight" in options
    objective = Objective(
        loss=name,
        output=output,
        scores=scores,
        has_probabilities=is_probability(made, scores),
        axis=axis,
        target=target,
        compares=target is not None
        and target in new
        and _is_like(made, target, scores, options.get("types")),
        classes=classes,
        ignored=options.get("ignore_index"),
        sums=options.get("reduction") == "sum",
        is_mean=isinstance(loss, str) and loss in LOSSES,
        class_weights=np.asarray(options["weight"], np.float64) if is_weighted else None,
        is_binary=loss == "bce",
    )
    return made, objective


def _with_loss(
    model: onnx.ModelProto, settings: LossSettings, options: Mapping[str, Any]
) -> tuple[onnx.ModelProto, str, str, str, int | None]:
    """Return the model with its loss, and the names of the loss, of the output and of its scores.

    The last one is the dimension of the classes.
    """
    loss, output = settings.loss, settings.output
    if isinstance(loss, str) and loss not in LOSSES and exists(model, loss):
        check_options(loss, options)
        outputs = [value.name for value in model.graph.output if value.name != loss]
        chosen = output or (outputs[0] if outputs else loss)
        return model, loss, chosen, chosen, None
    name = "loss"
    while exists(model, name):
        name += "_"
    made, scores, axis = with_loss(model, loss, output, settings.target, name, options)
    if not isinstance(loss, str):
        # A user's block or function may have added anything.
        made = load_model(made)
    return made, name, output_of(model, output), scores, axis


def _target(loss: Loss, inputs: Sequence[str], added: Collection[str]) -> str | None:
    """Return the input with the target; None if the model has computed its loss itself, from any of them."""
    usual = target_name(loss) if isinstance(loss, str) else "target"
    return usual if usual in inputs else next((name for name in inputs if name in added), None)


def _is_like(
    model: onnx.ModelProto, target: str, scores: str, types: Mapping[str, Declaration] | None
) -> bool:
    """Return whether a loss has added a target with the type of the scores, to compare the two."""
    if types is not None and target in types:
        return False
    kind, wanted = (find_value(model, name).type.tensor_type for name in (target, scores))
    return kind.elem_type == wanted.elem_type and len(kind.shape.dim) == len(wanted.shape.dim)
