"""The result of a training."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import onnx

from ortgrad.errors import MissingPackageError
from ortgrad.keywords import checked

if TYPE_CHECKING:
    from ortgrad.training.state import TrainingState
    from ortgrad.training.trainer import Trainer


@dataclass
class Epoch:
    """What was measured in an epoch: the mean loss in training and, with data for it, in evaluation."""

    loss: float
    eval_loss: float | None = None
    metric: float | None = None


@checked
@dataclass
class Result:
    """The result of a training; its text is one line.

    `losses` has the loss of every step, `history` what was measured in every epoch; `parameters` and
    `elements` are the numbers of tensors and of elements that were trained. `model` is the trained
    forward model, which `export` writes to a file. It has the present parameters of the trainer: if that
    trains further, they change.
    """

    trainer: Trainer
    steps: int
    seconds: float
    stopped_early: bool
    metric_name: str | None
    # How many parameters were trained, and how many elements they have.
    parameters: int
    elements: int
    losses: list[float] = field(repr=False)
    history: list[Epoch] = field(repr=False)

    @property
    def state(self) -> TrainingState:
        """Parameters and optimizer state."""
        return self.trainer.state

    @property
    def loss(self) -> float:
        """The mean loss in training of the last epoch."""
        return self.history[-1].loss if self.history else float("nan")

    @property
    def metric(self) -> float | None:
        """The metric after the last epoch."""
        return self.history[-1].metric if self.history else None

    @property
    def model(self) -> onnx.ModelProto:
        """The trained forward model."""
        model = self.trainer.export()
        assert model is not None
        return model

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the trained forward model to a file."""
        self.trainer.export(path)

    def as_dict(self) -> dict[str, Any]:
        """Return the history by name, for a table or a plot."""
        records = [asdict(epoch) for epoch in self.history]
        return {key: [record[key] for record in records] for key in asdict(Epoch(0.0))}

    def __str__(self) -> str:
        epochs = len(self.history)
        text = f"{epochs} epoch{'s' if epochs != 1 else ''}, {self.steps} steps in {self.seconds:.1f} s"
        if not self.history:
            return text
        last = self.history[-1]
        text += f": loss {last.loss:.4g}"
        if last.eval_loss is not None:
            text += f", held out {last.eval_loss:.4g}"
        if last.metric is not None:
            text += f", {self.metric_name} {last.metric:.4g}"
        return text + (" (stopped early)" if self.stopped_early else "")


def draw_curve(result: Result, path: str | os.PathLike[str]) -> None:
    """Write the loss of every step, and what was measured in every epoch, as a picture."""
    figure_class = import_figure()
    figure = figure_class(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    count = len(result.losses)
    axes.plot(range(1, count + 1), result.losses, linewidth=0.8, label="loss")
    ends = [count * (i + 1) / max(1, len(result.history)) for i in range(len(result.history))]
    for name, label in (("eval_loss", "held out"), ("metric", result.metric_name)):
        values = [getattr(epoch, name) for epoch in result.history]
        if values and values[0] is not None:
            axes.plot(ends, values, marker="o", label=label)
    axes.set_xlabel("step")
    axes.legend()
    figure.savefig(os.fspath(path), format="png")


def import_figure() -> Any:
    """Return matplotlib's Figure, or raise MissingPackageError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            "a loss curve needs matplotlib, which is not installed: python -m pip install matplotlib"
        ) from error
    return Figure
