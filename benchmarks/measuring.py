"""Peers side by side: load, compare, take turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from environments import Worker, WorkerDiedError

Arrays = dict[str, np.ndarray]
# Long enough for a steady state, as in a training loop; the pause lets the last worker's threads go to sleep.
BURST_SECONDS = 0.25
PAUSE_SECONDS = 0.1


class RunFailedError(Exception):
    """A peer that ran once could not run again."""


def load_all(
    workers: Iterable[Worker], folder: Path, *, build: bool = False, **request: Any
) -> tuple[dict[str, Arrays], dict[str, str]]:
    """What each peer computes, and what those say that cannot."""
    results: dict[str, Arrays] = {}
    errors: dict[str, str] = {}
    for worker in workers:
        path = folder / f"{worker.peer}.npz"
        own = folder / worker.peer
        own.mkdir(exist_ok=True)
        asked = {**request, "folder": str(own), "results": str(path)}
        try:
            answer = worker.ask(do="build", **asked) if build else {}
            if "error" not in answer:
                answer = worker.ask(do="load", **asked)
        except WorkerDiedError as error:
            answer = {"error": str(error)}
            worker.restart()
        if "error" in answer:
            errors[worker.peer] = answer["error"]
            continue
        with np.load(path) as file:
            results[worker.peer] = {name: file[name] for name in file.files}
    return results, errors


def take_turns(
    workers: Sequence[Worker],
    rounds: int,
    of_burst: Callable[[list[float]], float],
    calls: tuple[int, int] = (3, 200),
    clock: str = "perf_counter",
) -> dict[str, list[float]]:
    """Per peer the seconds of each round: `of_burst` of a burst of calls, as many as the limits allow.

    `clock` is a function of the module time.
    """
    fewest, most = calls
    burst = {}
    for worker in workers:
        once = min(_time(worker, 3, clock))
        burst[worker.peer] = max(fewest, min(most, round(BURST_SECONDS / once)))
    seconds: dict[str, list[float]] = {worker.peer: [] for worker in workers}
    for turn in range(rounds):
        # Nobody always runs behind the same neighbour.
        start = turn % len(workers)
        for worker in [*workers[start:], *workers[:start]]:
            time.sleep(PAUSE_SECONDS)
            seconds[worker.peer].append(of_burst(_time(worker, burst[worker.peer], clock)))
    return seconds


def _time(worker: Worker, calls: int, clock: str) -> list[float]:
    answer = worker.ask(do="time", calls=calls, clock=clock)
    if "error" in answer:
        raise RunFailedError(f"{worker.peer} ran once and then failed: {answer['error']}")
    seconds: list[float] = answer["seconds"]
    return seconds


def difference(actual: Arrays, expected: Arrays) -> float:
    """The largest difference in any output, relative to the largest value there."""
    worst = 0.0
    for name, array in expected.items():
        if name not in actual or actual[name].shape != array.shape:
            return float("inf")
        scale = float(np.abs(array).max()) or 1.0
        error = float(np.abs(actual[name] - array).max()) / scale
        if not math.isfinite(error):
            return float("inf")
        worst = max(worst, error)
    return worst


def ratio(seconds: Mapping[str, Sequence[float]], over: str, under: str) -> float | None:
    """The median over the rounds of the ratio within a round."""
    if over not in seconds or under not in seconds:
        return None
    return statistics.median(a / b for a, b in zip(seconds[over], seconds[under], strict=True))


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of those values that there are."""
    present = [value for value in values if value is not None]
    return statistics.geometric_mean(present) if present else None
