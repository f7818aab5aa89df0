"""A training whose processes are killed ends with the same parameters."""

from __future__ import annotations

from pathlib import Path

from process import training_process


def test_killed_processes(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    expected = training_process.finished(tmp_path / "whole")
    found, hits = training_process.killed(tmp_path / "killed", 3)
    assert hits > 0
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name
