"""One call of `Trainer.fit`: epochs of batches."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ortgrad.errors import CheckpointError
from ortgrad.progress import Progress
from ortgrad.training.data import Batch, Source

if TYPE_CHECKING:
    from ortgrad.training.trainer import Trainer


class Run:
    """One call of `fit`: the batches, and when checkpoints are written."""

    def __init__(
        self,
        trainer: Trainer,
        source: Source,
        epochs: int,
        path: str | os.PathLike[str] | None,
        every: int | None,
    ) -> None:
        self._trainer, self._source, self._path, self._every = trainer, source, path, every
        per_epoch = None if source.count is None else math.ceil(source.count / trainer.accumulate)
        self._total = None if per_epoch is None else per_epoch * epochs
        self._started, self._first, self._saved = time.monotonic(), trainer.steps, trainer.steps
        self._before, self._samples = trainer._place.seconds, 0

    def check_place(self, batches: Mapping[str, Any]) -> None:
        """Note how batches are made; raises TrainingError if the epoch was begun with others."""
        place = self._trainer._place
        batches = {**batches, "accumulate": self._trainer.accumulate}
        changed = [key for key, value in place.batches.items() if batches.get(key, value) != value]
        if place.batch and changed:
            name = changed[0]
            raise CheckpointError(
                f"the checkpoint is in the middle of epoch {place.epoch + 1}, which began with "
                f"{name}={place.batches[name]}, not {batches[name]}: the rest of it would be other samples"
            )
        place.batches = batches

    def save(self) -> None:
        """Write a checkpoint if one is wanted."""
        if self._path is not None:
            self._trainer.save(self._path)
            self._saved = self._trainer.steps

    def epoch(self, bar: Progress) -> None:
        """Train until the end of the epoch."""
        trainer = self._trainer
        first = trainer._place.batch
        losses: list[float] = []
        weights: list[float] = []
        seen = 0
        for number, (batch, is_last) in enumerate(
            _with_last(self._source.begin(trainer._place.epoch, first)), first
        ):
            where = f"epoch {trainer._place.epoch + 1}, batch {number + 1}"
            losses.append(trainer._gradients(batch, bool(losses), where))
            weights.append(trainer._weight(batch))
            seen += trainer._count(batch)
            if len(losses) == trainer.accumulate or is_last:
                self._step(number + 1, losses, weights, seen)
                losses, weights, seen = [], [], 0
                self._show(bar)
                # At the end of an epoch there is a checkpoint anyway.
                if self._every and not is_last and trainer.steps - self._saved >= self._every:
                    self.save()

    def _step(self, done: int, losses: list[float], weights: list[float], seen: int) -> None:
        trainer, place = self._trainer, self._trainer._place

        def note() -> None:
            self._samples += seen
            place.batch = done
            place.loss += sum(loss * weight for loss, weight in zip(losses, weights, strict=True))
            place.samples += sum(weights)
            place.seconds = self._before + time.monotonic() - self._started
            place.losses.append(float(np.mean(losses)))

        trainer._update(len(losses), trainer._factor(self._total), note)

    def _show(self, bar: Progress) -> None:
        trainer = self._trainer
        speed = self._samples / max(1e-9, time.monotonic() - self._started)
        place = trainer._place
        text = f"epoch {place.epoch + 1}, loss {place.losses[-1]:.4g}, {speed:.0f} samples/s"
        done = trainer.steps - self._first
        bar(done, done + 1 if self._total is None else self._total - self._first + place.start, text)


def _with_last(batches: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Yield each batch, and whether it is the last."""
    previous: Batch | None = None
    for batch in batches:
        if previous is not None:
            yield previous, False
        previous = batch
    if previous is not None:
        yield previous, True
