"""The snippets for `fit` in docs/training.md run, in order, as a reader would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from support import ROOT


def test_snippets_run(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "training.md").read_text()
    section = text[text.index("## The short way") :].split("\n## ")[0]
    snippets = re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)
    assert len(snippets) == 4
    script = tmp_path / "short_way.py"
    script.write_text(
        "\n".join(
            [
                *snippets[:3],
                "assert result.metric > 0.97 and accuracy > 0.7",
                snippets[3],
                "assert result.metric > 0.9",
            ]
        )
    )
    (tmp_path / "models").symlink_to(ROOT / "models")
    result = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "accuracy 0.9" in result.stdout
    assert (tmp_path / "trained.onnx").exists()
    assert "['LinearClassifier.coefficients', 'LinearClassifier.intercepts']" in result.stdout
    assert (tmp_path / "iris.onnx").exists()
