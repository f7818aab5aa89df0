"""What all tests share."""

from __future__ import annotations

import gc
import math
import signal

import pytest

from ortgrad.compiled import progress


def pytest_configure() -> None:
    """Let Ctrl-C interrupt tests, also where a shell has started them in the background."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Leave what exists before the first test out of all garbage collections: with thousands of tests and
    PyTorch these would take a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_word_of_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether compilation takes so long that it is announced depends on the machine and on earlier tests."""
    monkeypatch.setattr(progress, "_PATIENCE", math.inf)
