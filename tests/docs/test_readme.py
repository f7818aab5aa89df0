"""Every Python snippet of the README runs, in order, as a reader would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from support import ROOT


def test_snippets_run(tmp_path: Path) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert len(snippets) >= 5
    script = tmp_path / "readme.py"
    script.write_text("\n".join([*snippets, "assert result.metric > 0.97"]))
    for folder in ("models", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    # A process of its own: the snippets declare an operator.
    result = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_the_files_that_it_links_are_there() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert links
    for link in links:
        assert (ROOT / link).exists(), link
