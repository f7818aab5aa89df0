"""Everything that makes or runs a model, on four threads at once: each result is the one that it is alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.everything import WORK, Outcome

THREADS, CALLS = 4, 20


@pytest.fixture
def numbered(tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """New folders of one name, as files may hold the name of theirs."""
    count = 0
    lock = threading.Lock()

    def make() -> Path:
        nonlocal count
        with lock:
            count += 1
            folder = tmp_path / str(count) / "folder"
        folder.mkdir(parents=True)
        return folder

    yield make


def on_threads(names: list[str], make: Callable[[], Path]) -> list[Outcome]:
    start = threading.Barrier(THREADS)

    def work(number: int) -> list[tuple[int, Outcome]]:
        start.wait()
        return [(i, WORK[names[i]](make())) for i in range(number, len(names), THREADS)]

    with ThreadPoolExecutor(THREADS) as pool:
        done = [pair for pairs in pool.map(work, range(THREADS)) for pair in pairs]
    return [outcome for _, outcome in sorted(done, key=lambda pair: pair[0])]


@pytest.mark.parametrize("name", WORK)
def test_one_thing(name: str, numbered: Callable[[], Path]) -> None:
    expected = WORK[name](numbered())
    for outcome in on_threads([name] * CALLS, numbered):
        np.testing.assert_equal(outcome, expected)


def test_different_things(numbered: Callable[[], Path]) -> None:
    expected = {name: work(numbered()) for name, work in WORK.items()}
    names = list(WORK) * 3
    random.Random(0).shuffle(names)
    for name, outcome in zip(names, on_threads(names, numbered), strict=True):
        np.testing.assert_equal(outcome, expected[name], err_msg=name)
