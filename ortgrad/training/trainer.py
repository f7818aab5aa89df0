"""Trainer: trains a forward model on arrays."""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ortgrad.errors import ArgumentTypeError, TrainingError, TrainingFileError, TrainingModelError
from ortgrad.graph.loading import ModelLike, load_model
from ortgrad.graph.matching import nearest
from ortgrad.keywords import checked
from ortgrad.progress import Progress
from ortgrad.threads import call_elsewhere
from ortgrad.training import checkpoint as checkpoints
from ortgrad.training.arguments import check_count
from ortgrad.training.data import NO_CLASS, Batch, limited, samples, source_of, targeted
from ortgrad.training.engine import Engine, with_weights_outside
from ortgrad.training.epochs import Run
from ortgrad.training.exporting import export
from ortgrad.training.half_precision import in_single_precision
from ortgrad.training.linear_models import linear_parameters, open_linear_models, why_none
from ortgrad.training.losses import LOSSES, Declaration, Loss, check_options, target_name, with_loss
from ortgrad.training.metrics import Measurement, Metric, check_metric
from ortgrad.training.optimizers import kernels
from ortgrad.training.optimizers.passes import thread_count, warm_up
from ortgrad.training.optimizers.rules import OPTIMIZERS, AnyOptimizer, Optimizer, Step
from ortgrad.training.protos import exists, find_value
from ortgrad.training.results import Epoch, Result, draw_curve, import_figure
from ortgrad.training.resuming import GROUP, PROPERTY, VERSION, Place, matched, read_place
from ortgrad.training.schedules import Schedule, make_schedule, needs_total
from ortgrad.training.scores import are_numbers, classes_of, influencing, is_probability, output_of
from ortgrad.training.selection import Patterns, all_parameters, selected, settings_of
from ortgrad.training.state import TrainingState
from ortgrad.training.statistics import separate_statistics, untrained_normalizations, warn_of_merged


@dataclass(frozen=True)
class _Block:
    """Parameters that lie side by side and have the same settings."""

    dtype: np.dtype
    part: slice
    learning_rate: float
    weight_decay: float


@checked
class Trainer:
    """Trains a forward model: loss, optimizer and state in one object.

    `loss` is a loss as `add_loss` takes it, with its `output`, `target` and further options, or the name of a
    scalar that the model computes. `optimizer` is "adamw", "adam", "sgd", "rmsprop" or "adagrad", or an
    object such as `SGD(momentum=0.9)`. `learning_rate` replaces that of the optimizer.

    `wrt` and `exclude` choose what is trained, see `parameters`. `groups` has other settings by pattern:
    `{"*.bias": {"weight_decay": 0}, "head.*": {"learning_rate": 0.1}}`. Later ones override earlier ones.

    The learning rate rises in the first `warmup` steps (a fraction of all if it is less than 1) and then
    follows `schedule`: "constant", "linear" or "cosine", both to 0, or a function of the step and of the
    number of steps that returns a factor. The mean of the gradients of `accumulate` batches makes one step.
    Gradients are clipped to values of at most `clip_value`, then to a norm of at most `clip_norm`.

    Dropout is on. With `statistics="trained"`, batch normalizations use and update the statistics of batches,
    but those none of whose parameters is trained stay as they are, and compute what they do in inference:
    "all" trains the statistics of all of them, "none" of none. (One without parameters of its own is trained
    if a layer before it is, or if all parameters of the model are.) `seed` determines the order of
    samples and the random numbers in the model. `threads` is that of sessions and optimizer (0: all).

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
        self.optimizer = _optimizer(optimizer, learning_rate)
        self._schedule = make_schedule(schedule, warmup)
        self._needs_total = needs_total(schedule, warmup)
        self._described = f"schedule={schedule!r}" if schedule != "constant" else f"warmup={warmup}"
        for name, value in (("clip_norm", clip_norm), ("clip_value", clip_value)):
            if value is not None and not value > 0:
                raise TrainingError(f"{name} is {value}; it must be positive")
        self._clip_norm, self._clip_value = clip_norm, clip_value
        self.accumulate, self._seed = check_count("accumulate", accumulate, 1), check_count("seed", seed, 0)
        self._threads = thread_count(check_count("threads", threads, 0))
        proto = load_model(model)
        known = all_parameters(proto)
        names = selected(proto, known, wrt, exclude)
        if not names:
            raise TrainingModelError(f"the model has no parameters to train{why_none(proto)}")
        settings = settings_of(proto, names, self.optimizer, groups or {})
        # Parameters with the same settings lie side by side.
        order = sorted(names, key=lambda name: list(dict.fromkeys(settings.values())).index(settings[name]))
        linear = linear_parameters(proto)
        base = with_weights_outside(proto, [name for name in names if name not in linear])
        base, added = separate_statistics(base, names)
        warn_of_merged(proto, names)
        # Functions are inlined, so that the weights in them can be set.
        self._source: ModelLike = base if proto.functions or added else model
        self._version = _version_of(self._source)
        base = in_single_precision(open_linear_models(base))
        given = {"reduction": reduction, "weight": weight, "pos_weight": pos_weight, "delta": delta}
        given |= {"ignore_index": ignore_index, "axis": axis, "types": types}
        options = {key: value for key, value in given.items() if value is not None}
        classes = None
        if loss in ("cross-entropy", "bce"):
            classes = classes_of(proto)
            classes = None if classes is None or are_numbers(classes) else classes
            if classes is not None and ignore_index is not None:
                options["ignore_index"] = NO_CLASS
        made, name, self._output, scores, self._axis = _with_loss(base, loss, output, target, options)
        self._ignored = options.get("ignore_index")
        self._sums, self._is_mean = reduction == "sum", isinstance(loss, str) and loss in LOSSES
        is_weighted = loss == "cross-entropy" and weight is not None
        self._class_weights = np.asarray(weight, np.float64) if is_weighted else None
        self._is_binary = loss == "bce"
        # Whether the outputs from which an accuracy is computed are probabilities.
        self._has_probabilities = is_probability(made, scores)
        if wrt is None:
            # Weight decay would change what has no gradient.
            reached = influencing(made, name)
            order = [each for each in order if each in reached]
            if not order:
                raise TrainingModelError("the loss does not depend on any parameter of the model")
        constants = {tensor.name for tensor in made.graph.initializer}
        fed = [value.name for value in made.graph.input if value.name not in constants]
        new = {*fed} - {value.name for value in base.graph.input}
        found = target or _target(loss, fed, new)
        is_compared = found is not None and found in new and _is_like(made, found, scores, types)
        self._engine = Engine(
            made,
            order,
            name,
            list(dict.fromkeys([self._output, scores])),
            accumulates=accumulate > 1,
            threads=threads,
            untrained=untrained_normalizations(base, names, known, statistics),
            compared=(scores, [found] if found is not None and is_compared else []),
        )
        self._knows_target = found is not None
        self._target = found or self._engine.inputs.names[-1]
        if loss == "bce" and self._target not in self._engine.inputs.columns:
            # Several columns are classes of their own, each of which a sample may have.
            classes = None
        self._engine.inputs = targeted(self._engine.inputs, self._target, classes, ignore_index)
        self._blocks = _blocks(self.state, settings)
        self._group = self.state.group(GROUP, self.optimizer.momentums)
        for arena in self._group.momentums.values() if self.optimizer.initial else ():
            for array in arena.arrays.values():
                array[...] = self.optimizer.initial
        self._group.initial_rate = self.optimizer.learning_rate
        self._warm_up()
        self._engine.seed(seed, 0)
        self._place = Place()

    def _warm_up(self) -> None:
        for dtype in self.state.trainable.flats:
            if dtype not in (np.float32, np.float64):
                raise TrainingModelError(f"parameters of the type {dtype} cannot be trained")
            for each in (*self.optimizer.passes(), kernels.squares, kernels.scale, kernels.clamp):
                warm_up(each, dtype)

    @property
    def state(self) -> TrainingState:
        """Parameters and optimizer state, which a step changes in place."""
        return self._engine.state

    @property
    def steps(self) -> int:
        """The number of steps that were made."""
        return self._group.step

    @property
    def described(self) -> str:
        """How many parameters are trained, and how many elements they have, as a text."""
        arrays = self.state.trainable.arrays
        count, elements = len(arrays), sum(array.size for array in arrays.values())
        return f"{count} parameter{'s' if count != 1 else ''} with {elements:,} elements"

    def _count(self, batch: Batch) -> int:
        """Return the number of samples of a batch."""
        return samples(batch, self._engine.inputs.names.index(self._target) if self._knows_target else None)

    def _weight(self, batch: Batch) -> float:
        """Return of how many elements the loss of a batch is the mean, or the sum of their weights.

        Where that is not known, it is the number of samples.
        """
        if self._sums:
            return 1
        if not self._is_mean:
            return self._count(batch)
        target = batch[self._engine.inputs.names.index(self._target)]
        if self._ignored is not None:
            target = target[target != self._ignored]
        return target.size if self._class_weights is None else float(self._class_weights[target].sum())

    @property
    def input_names(self) -> list[str]:
        """What a batch consists of: the inputs of the model, and the target."""
        return list(self._engine.inputs.names)

    # Steps

    def step(self, *batches: Any, total: int | None = None) -> float:
        """Make a step on a batch, or on several whose gradients are averaged; returns the mean loss.

        A batch is a dict of arrays by name, or a tuple of arrays in the order of `input_names`. `total` is
        the number of steps for the schedule.
        """
        if total is None and self._needs_total:
            raise TrainingError(f"{self._described} needs the number of all steps: step(batch, total=...)")
        if not 0 < len(batches) <= self.accumulate:
            raise TrainingError(
                f"a step takes one batch, or up to accumulate={self.accumulate} of them, not {len(batches)}"
            )
        losses = []
        for i, batch in enumerate(batches):
            arrays = self._engine.inputs.ordered(batch, "the batch")
            losses.append(self._gradients(arrays, i > 0, "the batch"))
        self._update(len(losses), self._factor(total))
        return float(np.mean(losses))

    def _factor(self, total: int | None) -> float:
        # A schedule that depends on the number of steps is refused where that is not known.
        factor = self._schedule(self.steps - self._place.start, total or 0)
        if not isinstance(factor, numbers.Real) or not 0 <= factor < math.inf:
            raise TrainingError(
                f"the schedule returned {factor} for step {self.steps + 1}; it must return a factor of the "
                "learning rate, a number that is not negative"
            )
        return factor

    def _gradients(self, batch: Batch, add: bool, where: str) -> float:
        self._check_samples(self._count(batch), where)
        try:
            loss = self._engine.gradients(batch, add=add)
        except TrainingError as error:
            raise type(error)(f"{where}: {error}") from error
        if not math.isfinite(loss):
            if not self._weight(batch):
                raise TrainingError(f"{where}: no label of the batch counts, so that it has no mean loss")
            raise TrainingError(f"the loss is {loss} in step {self.steps + 1} ({where}); {_UNCHANGED}")
        return loss

    def _check_samples(self, count: int, where: str) -> None:
        name = self._engine.needs_samples
        if count == 1 and name:
            raise TrainingError(
                f"{where} has one sample, and the batch normalization of {name!r} computes the mean and the "
                "variance of a batch: choose a batch_size that leaves none over, or statistics='none'"
            )

    def _update(self, count: int, factor: float, note: Callable[[], None] | None = None) -> None:
        """Make a step with the gradients there are, the sum of those of `count` batches, and note it."""
        self._check_gradients()
        # On a thread that handles no signals: done as a whole or not at all.
        call_elsewhere(lambda: self._apply(count, factor, note))

    def _check_gradients(self) -> None:
        """Raise TrainingError if a gradient is not finite: of Sqrt at 0, for example."""
        gradients = self.state.allocate_gradients()
        if math.isfinite(kernels.norm(list(gradients.flats.values()), threads=self._threads)):
            return
        # The square of a large number in double precision may be infinite.
        wrong = [name for name, array in gradients.arrays.items() if not np.isfinite(array).all()]
        if wrong:
            raise TrainingError(
                f"the gradient of {wrong[0]!r} is not finite in step {self.steps + 1}, though the loss is; "
                f"{_UNCHANGED}"
            )

    def _apply(self, count: int, factor: float, note: Callable[[], None] | None) -> None:
        state, threads = self.state, self._threads
        gradients = state.allocate_gradients()
        flats = list(gradients.flats.values())
        if count > 1:
            for flat in flats:
                kernels.scale(flat, threads=threads, factor=1 / count)
        if self._clip_value is not None:
            for flat in flats:
                kernels.clamp(flat, threads=threads, bound=self._clip_value)
        if self._clip_norm is not None:
            kernels.clip(flats, self._clip_norm, threads)
        momentums = [self._group.momentums[name] for name in self.optimizer.momentums]
        for block in self._blocks:
            arrays = [a.flats[block.dtype][block.part] for a in (state.trainable, gradients, *momentums)]
            step = Step(self.steps + 1, factor * block.learning_rate, block.weight_decay, threads)
            self.optimizer.update(arrays, step)
        self._group.step += 1
        if note is not None:
            note()

    # Training

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
        """Train for a number of epochs and return what came of it.

        `data` is a tuple of arrays in the order of `input_names`, a dict of arrays by name, or an iterable of
        batches, each such a tuple or dict. The last batch of arrays may be smaller.

        `steps_per_epoch` ends every epoch after so many steps. Data that knows its length must have enough
        batches for them. Data without a length, which may be endless, goes on in the next epoch where it has
        stopped, and begins anew when it has ended. Schedules that depend on the number of steps need one of
        the two.

        After each epoch, the loss and the `metric` of held-out data `evaluate` are computed: "accuracy",
        "mse", or a function of outputs and targets. The training stops if the metric, or else the loss, has
        not improved for `patience` epochs; `maximize` says of a function whether it is to rise or to fall.
        The result then has the parameters of the last epoch, not those of the best.

        `checkpoint` is a file that is written after every epoch, and every `checkpoint_every` steps. With
        `resume`, the training continues there if the file exists, and gives the same parameters, to the bit,
        as one that was never interrupted and wrote its checkpoints after the same steps.

        `progress` shows on stderr how much is trained, and a bar: always, never, or with None if it is a
        terminal. `curve` is a PNG file for the losses, which needs matplotlib.
        """
        check_count("epochs", epochs, 0)
        check_count("batch_size", batch_size, 1)
        numbers = {"steps_per_epoch": steps_per_epoch, "checkpoint_every": checkpoint_every}
        for key, value in {**numbers, "patience": patience}.items():
            if value is not None:
                check_count(key, value, 1)
        if (resume or checkpoint_every) and checkpoint is None:
            raise TrainingError("resume and checkpoint_every need the file of a checkpoint")
        if checkpoint is not None and self._is_source(Path(checkpoint)):
            raise TrainingError(f"the checkpoint {str(checkpoint)!r} would overwrite the model")
        name = None if metric is None else check_metric(metric)
        if (metric is not None or patience is not None) and evaluate is None:
            raise TrainingError("a metric and patience need held-out data: evaluate=")
        rises = maximize if callable(metric) else metric == "accuracy"
        if rises is None and patience is not None:
            raise TrainingError(f"patience needs to know whether {name} is to rise or to fall: maximize=")
        if maximize is not None and not callable(metric):
            raise TrainingError("maximize is for a metric that is a function")
        if curve is not None:
            import_figure()
        inputs = self._engine.inputs
        source = source_of(data, inputs, batch_size, self._seed if shuffle else None)
        if steps_per_epoch is not None:
            source = limited(source, self._batches(steps_per_epoch, source.count), data, inputs)
        elif source.count is None and self._needs_total:
            raise TrainingError(
                f"{self._described} needs the number of all steps, and the data has no length: say how many "
                "steps there are in an epoch, steps_per_epoch="
            )
        if source.smallest is not None and epochs:
            self._check_samples(source.smallest, "the last batch")
        if evaluate is not None:
            self._check_held_out(evaluate, batch_size, epochs)
        if resume and checkpoint is not None and Path(checkpoint).exists():
            self.load(checkpoint)
        else:
            self._place = Place(start=self.steps)
        run = Run(self, source, epochs, checkpoint, checkpoint_every)
        run.check_place(source.settings)
        # What was resumed may have stopped already.
        stopped = patience is not None and self._place.waited >= patience
        with Progress(progress) as bar:
            bar.say(f"training {self.described}")
            while self._place.epoch < epochs and not stopped:
                run.epoch(bar)
                total, count = self._place.loss, self._place.samples
                record = Epoch(total if self._sums or not count else total / count)
                if evaluate is not None:
                    record.eval_loss, record.metric = self.evaluate(evaluate, metric, batch_size=batch_size)
                if patience is not None and not math.isfinite(_compared_value(record)):
                    raise TrainingError(
                        f"epoch {self._place.epoch + 1}: patience cannot decide by a held-out loss of "
                        f"{record.eval_loss} and a metric of {record.metric}"
                    )
                stopped = self._finish_epoch(record, bool(rises), patience, run)
        result = self._result(stopped, name)
        if curve is not None:
            draw_curve(result, curve)
        return result

    def _check_held_out(self, data: Any, batch_size: int, epochs: int) -> None:
        """Raise an error for held-out data that cannot be used, before the first step."""
        what = "the held-out data"
        source = source_of(data, self._engine.inputs, batch_size, None, what)
        if isinstance(data, Iterator):
            if epochs > 1:
                raise TrainingError(
                    f"{what} is an iterator, which can be used once, for {epochs} epochs: give a list"
                )
            return
        for batch in source.begin(0, 0):
            self._engine.check(batch, "batch 0 of the held-out data")
            break

    def _is_source(self, path: Path) -> bool:
        """Return whether a file is the one from which the model was read."""
        if not isinstance(self._source, (str, os.PathLike)):
            return False
        source = Path(self._source)
        return path.exists() and source.exists() and path.samefile(source)

    def _batches(self, steps: int, count: int | None) -> int:
        """Return the number of batches of this many steps, of `count` if that is known."""
        if count is None:
            return steps * self.accumulate
        if steps > math.ceil(count / self.accumulate):
            raise TrainingError(
                f"steps_per_epoch is {steps}, but the data has {count} batches, which are "
                f"{math.ceil(count / self.accumulate)} steps"
            )
        return min(steps * self.accumulate, count)

    def _finish_epoch(self, record: Epoch, rises: bool, patience: int | None, run: Run) -> bool:
        """Note what was measured, write the checkpoint, and return whether to stop."""
        place = self._place
        best, waited = place.best, place.waited
        if record.eval_loss is not None:
            value = -_compared_value(record) if rises else _compared_value(record)
            better = best is None or value < best
            best, waited = (value, 0) if better else (best, waited + 1)
        self._place = replace(
            place,
            epoch=place.epoch + 1,
            batch=0,
            loss=0.0,
            samples=0,
            best=best,
            waited=waited,
            history=[*place.history, record],
        )
        run.save()
        return patience is not None and waited >= patience

    def _result(self, stopped: bool, metric: str | None) -> Result:
        place, arrays = self._place, self.state.trainable.arrays
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
        source = source_of(data, self._engine.inputs, batch_size, None, "the held-out data")
        measured = None
        if metric is not None:
            check_metric(metric)
            if not self._knows_target:
                raise TrainingError(
                    "a metric compares outputs with a target, and the model computes its loss itself: name "
                    f"the input that has the target as target= ({', '.join(self.input_names)})"
                )
            threshold = 0.5 if self._has_probabilities else 0.0
            measured = Measurement(
                metric,
                self._axis,
                self._ignored,
                threshold=threshold,
                several=self._is_binary or self._has_probabilities,
            )
        total, count = 0.0, 0.0
        for number, batch in enumerate(source.begin(0, 0)):
            try:
                loss, *outputs = self._engine.evaluate(batch)
            except TrainingError as error:
                raise type(error)(f"batch {number} of the held-out data: {error}") from error
            size = self._weight(batch)
            if size:
                total, count = total + float(loss.reshape(())) * size, count + size
            if measured is not None:
                # The last ones are the scores, of which an output may have the probabilities.
                output = outputs[-1 if metric == "accuracy" else 0]
                measured.add(output, batch[self._engine.inputs.names.index(self._target)])
        return (
            total if self._sums or not count else total / count,
            None if measured is None else measured.value(),
        )

    def export(self, path: str | os.PathLike[str] | None = None) -> onnx.ModelProto | None:
        """Return the trained forward model, or write it to a file."""
        if _version_of(self._source) != self._version:
            raise TrainingFileError(
                0,
                f"{self._source!r} was changed or removed since the Trainer read it: write the parameters "
                "into another copy of the model, ortgrad.training.export(model, trainer)",
            )
        return export(self._source, self.state, path)

    # Checkpoints

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint, which replaces the file as a whole."""
        contents = self.state.checkpoint()
        place = {"version": VERSION, "optimizer": type(self.optimizer).__name__, "seed": self._seed}
        contents.properties[PROPERTY] = json.dumps({**place, "place": asdict(self._place)})
        checkpoints.save(contents, path)
        # The random numbers of Dropout follow from the seed and the step of the last checkpoint.
        self._engine.seed(self._seed, self.steps)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue from a checkpoint; if it does not fit, nothing is changed."""
        found = checkpoints.load(path)
        place = read_place(found, path, type(self.optimizer).__name__, self._seed)
        copies = list(matched(self.state, found, path, self.optimizer.momentums))

        def copy() -> None:
            for target, source in copies:
                target[...] = source
            self._group.step, self._place = found.optimizer[GROUP].step, place

        call_elsewhere(copy)
        self._engine.seed(self._seed, self.steps)


def _compared_value(record: Epoch) -> float:
    """Return the metric of held-out data, or else the loss."""
    value = record.metric if record.metric is not None else record.eval_loss
    assert value is not None
    return value


# What is said after an error in a step.
_UNCHANGED = "the parameters are as they were before this step"


def _is_like(
    model: onnx.ModelProto, target: str, scores: str, types: Mapping[str, Declaration] | None
) -> bool:
    """Return whether a loss has added a target with the type of the scores, to compare the two."""
    if types is not None and target in types:
        return False
    kind, wanted = (find_value(model, name).type.tensor_type for name in (target, scores))
    return kind.elem_type == wanted.elem_type and len(kind.shape.dim) == len(wanted.shape.dim)


def _version_of(source: ModelLike) -> tuple[int, int] | None:
    """Return what tells whether a file has changed; None if it is no file, or not there."""
    if not isinstance(source, (str, os.PathLike)):
        return None
    try:
        found = os.stat(source)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _optimizer(optimizer: str | AnyOptimizer, learning_rate: float | None) -> AnyOptimizer:
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            known, near = ", ".join(OPTIMIZERS), nearest(optimizer, OPTIMIZERS)
            raise TrainingError(f"optimizer is {optimizer!r}; it must be one of {known}{near}")
        optimizer = OPTIMIZERS[optimizer]()
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(f"optimizer is a {type(optimizer).__name__}, not a name or an optimizer")
    return optimizer if learning_rate is None else replace(optimizer, learning_rate=learning_rate)


def _blocks(state: TrainingState, settings: Mapping[str, tuple[float, float]]) -> list[_Block]:
    found: dict[tuple[np.dtype, tuple[float, float]], list[int]] = {}
    for name, span in state.trainable.spans.items():
        found.setdefault((span.dtype, settings[name]), []).extend([span.start, span.stop])
    return [_Block(dtype, slice(min(ends), max(ends)), *setting) for (dtype, setting), ends in found.items()]


def _with_loss(
    model: onnx.ModelProto,
    loss: Loss,
    output: str | None,
    target: str | None,
    options: Mapping[str, Any],
) -> tuple[onnx.ModelProto, str, str, str, int | None]:
    """Return the model with its loss, and the names of the loss, of the output and of its scores.

    The last one is the dimension of the classes.
    """
    if isinstance(loss, str) and loss not in LOSSES and exists(model, loss):
        check_options(loss, options)
        outputs = [value.name for value in model.graph.output if value.name != loss]
        chosen = output or (outputs[0] if outputs else loss)
        return model, loss, chosen, chosen, None
    name = "loss"
    while exists(model, name):
        name += "_"
    made, scores, axis = with_loss(model, loss, output, target, name, options)
    if not isinstance(loss, str):
        # A user's block or function may have added anything.
        made = load_model(made)
    return made, name, output_of(model, output), scores, axis


def _target(loss: Loss, inputs: Sequence[str], added: Collection[str]) -> str | None:
    """Return the input with the target; None if the model has computed its loss itself, from any of them."""
    usual = target_name(loss) if isinstance(loss, str) else "target"
    return usual if usual in inputs else next((name for name in inputs if name in added), None)
