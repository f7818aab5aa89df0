"""Trainer: trains a forward model on arrays."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ortgrad.errors import ArgumentTypeError, TrainingError, TrainingFileError, TrainingModelError
from ortgrad.graph.loading import ModelLike
from ortgrad.keywords import checked
from ortgrad.progress import Progress
from ortgrad.training.arguments import check_count
from ortgrad.training.data import Inputs, Source, limited, source_of
from ortgrad.training.engine import Engine
from ortgrad.training.epochs import Run
from ortgrad.training.exporting import export
from ortgrad.training.judging import Judge
from ortgrad.training.losses import Declaration, Loss, options_of
from ortgrad.training.metrics import Metric, check_metric
from ortgrad.training.objective import LossSettings, Objective, with_objective
from ortgrad.training.optimizers.passes import thread_count
from ortgrad.training.optimizers.rules import AnyOptimizer, Optimizer, named
from ortgrad.training.results import Result, draw_curve, import_figure
from ortgrad.training.resuming import Place
from ortgrad.training.schedules import Pace, Schedule
from ortgrad.training.scores import influencing
from ortgrad.training.selection import Patterns
from ortgrad.training.state import TrainingState
from ortgrad.training.statistics import untrained_normalizations
from ortgrad.training.stepper import Stepper
from ortgrad.training.subject import Original, subject_of
from ortgrad.training.updates import Clipping, Updates


@checked
class Trainer:
    """Trains a forward model: loss, optimizer and state in one object.

    `loss` is a loss as `add_loss` takes it, with its `output`, `target` and further options, or the name of a
    scalar that the model computes. `optimizer` is an object such as `SGD(momentum=0.9)`, or the name of its
    class in lower case, such as "adamw". `learning_rate` replaces that of the optimizer.

    `wrt` and `exclude` choose what is trained, see `parameters`. `groups` overrides settings by pattern:
    `{"*.bias": {"weight_decay": 0}, "head.*": {"learning_rate": 0.1}}`. Later ones override earlier ones.

    The learning rate rises in the first `warmup` steps (a fraction of all if it is less than 1) and then
    follows `schedule`: "constant", "linear" or "cosine", both to 0, or a function of the step and of the
    number of steps that returns a factor. The mean of the gradients of `accumulate` batches makes one step.
    Gradients are clipped to values of at most `clip_value`, then to a norm of at most `clip_norm`.

    Dropout is on. With `statistics="trained"`, batch normalizations use and update the statistics of batches.
    Those without a trained parameter keep their statistics and compute what they do in inference. (One that
    has no parameters at all counts as trained if a layer before it is, or if all parameters of the model
    are.) "all" updates the statistics of all batch normalizations, "none" those of none. `seed` determines
    the order of samples and the random numbers in the model. `threads` is the number of threads of sessions
    and optimizer (0: as many as there are processors).

    >>> import numpy as np, onnx
    >>> from ortgrad.training import SGD, Trainer
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 2}> { y = MatMul(x, w) }''')
    >>> x, target = np.float32([[1, 0], [0, 1], [1, 1]]), np.float32([[3], [1], [4]])
    >>> trainer = Trainer(model, loss="mse", optimizer=SGD(learning_rate=0.3, momentum=0.5))
    >>> result = trainer.fit((x, target), epochs=100, batch_size=3)
    >>> trainer.state.parameter("w").round(3).tolist()
    [[3.0], [1.0]]
    """

    def __init__(
        self,
        model: ModelLike,
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
    ) -> None:
        loss_settings = LossSettings(loss, output, target, options_of(locals()))
        self.optimizer = _optimizer(optimizer, learning_rate)
        pace = Pace(schedule, warmup)
        clipping = Clipping(clip_value, clip_norm)
        self.accumulate = check_count("accumulate", accumulate, 1)
        check_count("seed", seed, 0)
        threads = thread_count(check_count("threads", threads, 0))
        subject = subject_of(model, wrt, exclude, self.optimizer, groups or {})
        self._original = Original(subject.source)
        with_loss, objective = with_objective(subject.loaded, subject.model, loss_settings)
        trained = _influencing(with_loss, objective.loss, subject.trained) if wrt is None else subject.trained
        engine = Engine(
            with_loss,
            trained,
            objective.loss,
            objective.outputs,
            accumulates=accumulate > 1,
            threads=threads,
            untrained=untrained_normalizations(subject.model, subject.trained, subject.known, statistics),
            compared=objective.compared,
        )
        inputs = _with_target(engine.inputs, objective, ignore_index)
        updates = Updates(engine.state, self.optimizer, subject.settings, clipping, threads)
        self._seed = seed
        self._stepper = Stepper(engine, inputs, objective, updates, pace, seed)

    @property
    def state(self) -> TrainingState:
        """Parameters and optimizer state, which a step changes in place."""
        return self._stepper.state

    @property
    def steps(self) -> int:
        """The number of steps made so far."""
        return self._stepper.steps

    @property
    def described(self) -> str:
        """The numbers of trained parameters and of their elements, as text."""
        arrays = self.state.trainable.arrays
        count, elements = len(arrays), sum(array.size for array in arrays.values())
        return f"{count} parameter{'s' if count != 1 else ''} with {elements:,} elements"

    @property
    def input_names(self) -> list[str]:
        """The names of the arrays in a batch: the inputs of the model, and the target."""
        return list(self._stepper.inputs.names)

    def step(self, *batches: Any, total: int | None = None) -> float:
        """Make a step on a batch, or on several whose gradients are averaged; returns the mean loss.

        A batch is a dict of arrays by name, or a tuple of arrays in the order of `input_names`. `total` is
        the number of steps for the schedule.
        """
        stepper = self._stepper
        if total is None and stepper.pace.needs_total:
            raise TrainingError(
                f"{stepper.pace.described} needs the number of all steps: step(batch, total=...)"
            )
        if not 0 < len(batches) <= self.accumulate:
            raise TrainingError(
                f"a step takes one batch, or up to accumulate={self.accumulate} of them, not {len(batches)}"
            )
        losses = []
        for i, batch in enumerate(batches):
            arrays = stepper.inputs.ordered(batch, "the batch")
            losses.append(stepper.gradients(arrays, add=i > 0, where="the batch"))
        stepper.update(len(losses), total)
        return float(np.mean(losses))

    def fit(
        self,
        data: Any,
        *,
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
        """Train for a number of epochs and return the result.

        `data` is a tuple of arrays in the order of `input_names`, a dict of arrays by name, or an iterable of
        batches, each such a tuple or dict. The last batch of arrays may be smaller.

        `steps_per_epoch` ends every epoch after this number of steps. Data with a length must have enough
        batches for them. Data without a length, which may be endless, continues in the next epoch where it
        stopped, and starts again when it has ended. Schedules that depend on the number of steps need either
        a length or `steps_per_epoch`.

        After each epoch, the loss and the `metric` of held-out data `evaluate` are computed: "accuracy",
        "mse", or a function of outputs and targets. The training stops if the metric, or else the loss, has
        not improved for `patience` epochs; for a function, `maximize` says whether it should rise.
        The result then has the parameters of the last epoch, not those of the best.

        `checkpoint` is a file that is written after every epoch, and every `checkpoint_every` steps. With
        `resume`, the training continues from the file if it exists. The parameters are then equal, bit for
        bit, to those of a training that was never interrupted and wrote its checkpoints after the same steps.

        `progress` shows on stderr what is trained, and a progress bar: always (True), never (False), or if
        stderr is a terminal (None). `curve` is a PNG file for the losses, which needs matplotlib.
        """
        check_count("epochs", epochs, 0)
        check_count("batch_size", batch_size, 1)
        numbers = {"steps_per_epoch": steps_per_epoch, "checkpoint_every": checkpoint_every}
        for key, value in {**numbers, "patience": patience}.items():
            if value is not None:
                check_count(key, value, 1)
        if (resume or checkpoint_every) and checkpoint is None:
            raise TrainingError("resume and checkpoint_every need the file of a checkpoint")
        if checkpoint is not None and self._original.is_at(Path(checkpoint)):
            raise TrainingError(f"the checkpoint {str(checkpoint)!r} would overwrite the model")
        judge = Judge(metric, patience, maximize, has_data=evaluate is not None)
        if curve is not None:
            import_figure()
        stepper = self._stepper
        source = self._batches(data, batch_size, self._seed if shuffle else None, steps_per_epoch)
        if source.smallest is not None and epochs:
            stepper.check_samples(source.smallest, "the last batch")
        if evaluate is not None:
            self._check_held_out(evaluate, batch_size, epochs)
        if resume and checkpoint is not None and Path(checkpoint).exists():
            self.load(checkpoint)
        else:
            stepper.place = Place(start=self.steps)
        run = Run(stepper, source, epochs, self.accumulate, checkpoint, checkpoint_every)
        # What was resumed may have stopped already.
        stopped = judge.stops(stepper.place.waited)
        with Progress(progress) as bar:
            bar.say(f"training {self.described}")
            while stepper.place.epoch < epochs and not stopped:
                record = run.epoch(bar)
                if evaluate is not None:
                    record.eval_loss, record.metric = self.evaluate(evaluate, metric, batch_size=batch_size)
                run.finish(record, judge)
                stopped = judge.stops(stepper.place.waited)
        result = self._result(stopped, judge.name)
        if curve is not None:
            draw_curve(result, curve)
        return result

    def _batches(self, data: Any, batch_size: int, seed: int | None, steps: int | None) -> Source:
        """Return the batches of data, for this many steps in an epoch."""
        inputs, pace = self._stepper.inputs, self._stepper.pace
        source = source_of(data, inputs, batch_size, seed)
        if steps is None:
            if source.count is None and pace.needs_total:
                raise TrainingError(
                    f"{pace.described} needs the number of all steps, and the data has no length: say how "
                    "many steps there are in an epoch, steps_per_epoch="
                )
            return source
        count = steps * self.accumulate
        if source.count is not None:
            possible = math.ceil(source.count / self.accumulate)
            if steps > possible:
                raise TrainingError(
                    f"steps_per_epoch is {steps}, but the data has {source.count} batches, which are "
                    f"{possible} steps"
                )
            count = min(count, source.count)
        return limited(source, count, data, inputs)

    def _check_held_out(self, data: Any, batch_size: int, epochs: int) -> None:
        """Raise an error for held-out data that cannot be used, before the first step."""
        what = "the held-out data"
        source = source_of(data, self._stepper.inputs, batch_size, None, what)
        if isinstance(data, Iterator):
            if epochs > 1:
                raise TrainingError(
                    f"{what} is an iterator, which can be used once, for {epochs} epochs: give a list"
                )
            return
        for batch in source.begin(0, 0):
            self._stepper.engine.check(batch, "batch 0 of the held-out data")
            break

    def _result(self, stopped: bool, metric: str | None) -> Result:
        place, arrays = self._stepper.place, self.state.trainable.arrays
        return Result(
            trainer=self,
            steps=self.steps,
            seconds=place.seconds,
            stopped_early=stopped,
            metric_name=metric,
            parameters=len(arrays),
            elements=sum(array.size for array in arrays.values()),
            losses=list(place.losses),
            history=list(place.history),
        )

    def evaluate(
        self, data: Any, metric: Metric | None = None, *, batch_size: int = 32
    ) -> tuple[float, float | None]:
        """Return the loss of data in evaluation mode, and the metric if one is given.

        The loss is the mean over all samples; with `reduction="sum"`, it is the sum.
        """
        stepper, objective = self._stepper, self._stepper.objective
        source = source_of(data, stepper.inputs, batch_size, None, "the held-out data")
        measured = None
        if metric is not None:
            check_metric(metric)
            if objective.target is None:
                raise TrainingError(
                    "a metric compares outputs with a target, and the model computes its loss itself: name "
                    f"the input that has the target as target= ({', '.join(self.input_names)})"
                )
            measured = objective.measurement(metric)
        total, count = 0.0, 0.0
        for number, batch in enumerate(source.begin(0, 0)):
            try:
                loss, *outputs = stepper.engine.evaluate(batch)
            except TrainingError as error:
                raise type(error)(f"batch {number} of the held-out data: {error}") from error
            size = stepper.weight(batch)
            if size:
                total, count = total + float(loss.reshape(())) * size, count + size
            target = stepper.target(batch)
            if measured is not None and target is not None:
                # The last ones are the scores, of which an output may have the probabilities.
                measured.add(outputs[-1 if metric == "accuracy" else 0], target)
        return (
            total if objective.sums or not count else total / count,
            None if measured is None else measured.value(),
        )

    def export(self, path: str | os.PathLike[str] | None = None) -> onnx.ModelProto | None:
        """Return the trained forward model, or write it to a file."""
        original = self._original
        if original.is_changed:
            raise TrainingFileError(
                0,
                f"{original.source!r} was changed or removed since the Trainer read it: write the parameters "
                "into another copy of the model, ortgrad.training.export(model, trainer)",
            )
        return export(original.source, self.state, path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint, which replaces the file as a whole."""
        self._stepper.save(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue from a checkpoint; if it does not fit, nothing is changed."""
        self._stepper.load(path)


def _influencing(model: onnx.ModelProto, loss: str, names: Sequence[str]) -> list[str]:
    """Return the parameters that influence the loss; weight decay would change the others."""
    reached = influencing(model, loss)
    found = [name for name in names if name in reached]
    if not found:
        raise TrainingModelError("the loss does not depend on any parameter of the model")
    return found


def _with_target(inputs: Inputs, objective: Objective, ignored: int | None) -> Inputs:
    """Return the inputs of a model with what is known about the target."""
    target, classes = objective.target or inputs.names[-1], objective.classes
    if objective.is_binary and target not in inputs.columns:
        # Several columns are classes of their own, each of which a sample may have.
        classes = None
    return replace(inputs, target=target, classes=classes, ignored=ignored)


def _optimizer(optimizer: str | AnyOptimizer, learning_rate: float | None) -> AnyOptimizer:
    if isinstance(optimizer, str):
        optimizer = named(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(f"optimizer is a {type(optimizer).__name__}, not a name or an optimizer")
    return optimizer if learning_rate is None else replace(optimizer, learning_rate=learning_rate)
