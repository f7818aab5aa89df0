"""The examples run, and what they print is right."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"backward_graph", "run_training_model"}


def test_backward_graph() -> None:
    checks = load("backward_graph").main()
    assert len(checks) == 5
    for slope, difference in checks.values():
        assert slope == pytest.approx(difference, rel=1e-5, abs=1e-6)
        assert abs(slope) > 1e-3


def test_run_training_model() -> None:
    loss, parameter = load("run_training_model").main()
    assert loss < 1e-5
    assert parameter < 1e-5
