"""What all tests share, and which of them run.

Plain `pytest` runs the folders of QUICK, in at most two minutes on two cores; `pytest --all` runs all, and
`pytest --sweep` runs all with more random cases. A folder or file that is named always runs.
"""

from __future__ import annotations

import gc
import math
import os
import signal
from pathlib import Path

import pytest
import support

from ortgrad.compiled import progress

TESTS = Path(__file__).parent
QUICK = ("unit", "gradients", "session", "cli", "training", "compat")
# Of each of several processes: all together keep all cores busy. Tests of threads and of processes that
# compile say how many they want.
ONE = ("ORTGRAD_COMPILE_PROCESSES", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help=f"run all tests, not only {', '.join(QUICK)}")
    parser.addoption("--sweep", action="store_true", help="run all tests, with more random cases: for hours")


def pytest_configure(config: pytest.Config) -> None:
    # Before test modules are imported, which ask for it.
    support.LONG = config.getoption("--sweep")
    if config.getoption("numprocesses", None):
        # The processes that are about to be started inherit it.
        for variable in ONE:
            os.environ.setdefault(variable, "1")
    # Let Ctrl-C interrupt tests, also where a shell has started them in the background.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.getoption("--all") or config.getoption("--sweep") or collection_path.parent != TESTS:
        return None
    named = [Path(config.invocation_params.dir, text.partition("::")[0]).resolve() for text in config.args]
    if any(path.is_relative_to(collection_path) for path in named):
        return None
    return (collection_path.is_dir() and collection_path.name not in QUICK) or None


def pytest_collection_finish() -> None:
    """Leave what exists before the first test out of all garbage collections: with thousands of tests and
    PyTorch these would take a tenth of the time."""
    gc.collect()
    gc.freeze()


def pytest_sessionstart() -> None:
    """Whether compilation takes so long that it is announced depends on the machine and on earlier tests."""
    progress._PATIENCE = math.inf
