"""One call of `Trainer.fit`: epochs of batches."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ortgrad.errors import CheckpointError
from ortgrad.progress import Progress
from ortgrad.training.data import Batch, Source
from ortgrad.training.judging import Judge
from ortgrad.training.results import Epoch
from ortgrad.training.stepper import Stepper


class Run:
    """One call of `fit`: it trains epochs of batches and writes checkpoints."""

    def __init__(
        self,
        stepper: Stepper,
        source: Source,
        epochs: int,
        accumulate: int,
        path: str | os.PathLike[str] | None,
        every: int | None,
    ) -> None:
        self._stepper, self._source, self._path, self._every = stepper, source, path, every
        self._accumulate = accumulate
        per_epoch = None if source.count is None else math.ceil(source.count / accumulate)
        self._total = None if per_epoch is None else per_epoch * epochs
        self._started, self._first, self._saved = time.monotonic(), stepper.steps, stepper.steps
        self._before, self._samples = stepper.place.seconds, 0
        self._check_place({**source.settings, "accumulate": accumulate})

    def _check_place(self, batches: dict[str, Any]) -> None:
        """Note how batches are made; raises CheckpointError if the epoch was begun with other ones."""
        place = self._stepper.place
        changed = [key for key, value in place.batches.items() if batches.get(key, value) != value]
        if place.batch and changed:
            name = changed[0]
            raise CheckpointError(
                f"the checkpoint is in the middle of epoch {place.epoch + 1}, which began with "
                f"{name}={place.batches[name]}, not {batches[name]}: the rest of it would be other samples"
            )
        place.batches = batches

    def _save(self) -> None:
        """Write a checkpoint if one is wanted."""
        if self._path is not None:
            self._stepper.save(self._path)
            self._saved = self._stepper.steps

    def epoch(self, bar: Progress) -> Epoch:
        """Train until the end of the epoch, and return its loss."""
        stepper, place = self._stepper, self._stepper.place
        first = place.batch
        losses: list[float] = []
        weights: list[float] = []
        seen = 0
        for number, (batch, is_last) in enumerate(_with_last(self._source.begin(place.epoch, first)), first):
            where = f"epoch {place.epoch + 1}, batch {number + 1}"
            losses.append(stepper.gradients(batch, add=bool(losses), where=where))
            weights.append(stepper.weight(batch))
            seen += stepper.count(batch)
            if len(losses) == self._accumulate or is_last:
                self._step(number + 1, losses, weights, seen)
                losses, weights, seen = [], [], 0
                self._show(bar)
                # At the end of an epoch there is a checkpoint anyway.
                if self._every and not is_last and stepper.steps - self._saved >= self._every:
                    self._save()
        is_sum = stepper.objective.sums or not place.samples
        return Epoch(place.loss if is_sum else place.loss / place.samples)

    def finish(self, record: Epoch, judge: Judge) -> None:
        """Note what was measured in the epoch, and write the checkpoint."""
        place = self._stepper.place
        judge.check(record, place.epoch + 1)
        best, waited = judge.compare(record, place.best, place.waited)
        self._stepper.place = replace(
            place,
            epoch=place.epoch + 1,
            batch=0,
            loss=0.0,
            samples=0,
            best=best,
            waited=waited,
            history=[*place.history, record],
        )
        self._save()

    def _step(self, done: int, losses: list[float], weights: list[float], seen: int) -> None:
        place = self._stepper.place

        def note() -> None:
            self._samples += seen
            place.batch = done
            place.loss += sum(loss * weight for loss, weight in zip(losses, weights, strict=True))
            place.samples += sum(weights)
            place.seconds = self._before + time.monotonic() - self._started
            place.losses.append(float(np.mean(losses)))

        self._stepper.update(len(losses), self._total, note)

    def _show(self, bar: Progress) -> None:
        place = self._stepper.place
        speed = self._samples / max(1e-9, time.monotonic() - self._started)
        text = f"epoch {place.epoch + 1}, loss {place.losses[-1]:.4g}, {speed:.0f} samples/s"
        done = self._stepper.steps - self._first
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
