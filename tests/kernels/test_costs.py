"""The costs by which plans of convolutions choose between ways: a file for the machine, and its fit."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import ROOT

from ortgrad.compiled import cache
from ortgrad.operators.compiled import Plan
from ortgrad.ops.conv import _compiled, costs

pytest.importorskip("numba", reason="kernels are compiled by Numba, which is optional")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache that is empty."""
    monkeypatch.setenv("ORTGRAD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", False)
    costs.current.cache_clear()
    yield tmp_path / "cache"
    costs.current.cache_clear()


def plan() -> Plan:
    """The plan of a convolution with few positions."""
    x, w = (1, 64, 4, 4), (64, 64, 3, 3)
    made = _compiled.plan(x, x, w, x, w, None, group=1, kernel_shape=None, pads=[1] * 4)
    assert made is not None
    return made


def put(text: str) -> None:
    path = costs.path()
    path.parent.mkdir(mode=0o700)
    path.write_text(text)


def with_number(number: Any) -> str:
    parts = {name: part._asdict() for name, part in costs.BUILT_IN._asdict().items()}
    parts["few_dx"]["tile"] = number
    return json.dumps(parts)


def test_without_a_file_they_are_built_in(folder: Path) -> None:
    assert costs.current() == costs.BUILT_IN
    assert not folder.exists()


def test_a_file_decides(folder: Path) -> None:
    before = plan()
    written = costs.BUILT_IN._replace(ratios=costs.Ratios(few=2.0), many_dx=costs.ManyDx(call=1.25))
    costs.write(written)
    assert costs.current() == costs.BUILT_IN
    costs.current.cache_clear()
    assert costs.current() == written
    assert plan() != before
    assert costs.path().stat().st_mode & 0o77 == 0


MALFORMED = {
    "no JSON": "{",
    "a list": "[]",
    "no text": "\udcff",
    "an unknown name": json.dumps({"dx": {}}),
    "a missing name": json.dumps({name: {} for name in costs.Costs._fields}),
    "text": with_number("1"),
    "a truth value": with_number(True),
    "a list of numbers": with_number([1.0]),
    "nothing": with_number(None),
    "negative": with_number(-1),
    "not a number": with_number(float("nan")),
    "infinite": with_number(float("inf")),
    "too large": with_number(10**400),
    "deep": "[" * 50_000,
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_is_ignored(text: str, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    costs.path().write_bytes(text.encode(errors="surrogateescape"))
    with pytest.warns(RuntimeWarning, match=r"costs-.*\.json is ignored: .*; remove it, or run"):
        assert costs.current() == costs.BUILT_IN


def test_a_long_file_is_ignored(folder: Path) -> None:
    put(with_number(1) + " " * 100_000)
    assert costs.current() == costs.BUILT_IN


@pytest.mark.skipif(sys.platform == "win32", reason="this system has other permissions of files")
def test_a_file_that_others_can_write_is_ignored(folder: Path) -> None:
    put(with_number(1))
    costs.path().chmod(0o666)
    with pytest.warns(RuntimeWarning, match="others can write"):
        assert costs.current() == costs.BUILT_IN


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import tune

    yield tune
    del sys.modules["tune"]


def test_the_script_fits_all_of_them(tune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[costs.Costs] = []
    monkeypatch.setattr(costs, "write", written.append)
    monkeypatch.setattr(sys, "argv", ["tune.py", "--cases", "2", "--rounds", "1", "--write"])
    monkeypatch.setattr(tune, "ROUND_SECONDS", 0.0)
    assert tune.main() == 0
    (found,) = written
    for before, after in zip(costs.BUILT_IN, found, strict=True):
        assert type(before) is type(after)
        assert all(np.isfinite(number) and number >= 0 for number in after)


def test_costs_are_found(tune: Any) -> None:
    """Times that are made of known costs."""
    random, known = np.random.default_rng(0), costs.FewDx(1000, 30, 0.2, 5, 0.01, 0.03)
    timed = []
    for _ in range(60):
        counts = costs.FewDx(1, *np.exp(random.uniform(0, [5, 10, 6, 15, 12])))
        seconds = sum(cost * count for cost, count in zip(known, counts, strict=True)) * 1e-9
        timed.append(tune.Timed(counts, seconds * random.uniform(0.99, 1.01)))
    found = tune.fitted(timed, costs.BUILT_IN.few_dx)
    assert max(tune.errors(timed, found)) < 0.05
    np.testing.assert_allclose(found, known, rtol=0.3)
