"""Scripts in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def run_script(*parts: str) -> list[str]:
    """A process of its own for what changes the process."""
    script = "\n".join(map(textwrap.dedent, parts))
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\n")[:-1]
