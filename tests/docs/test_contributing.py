"""CONTRIBUTING.md names files that exist, and what it says about error texts is true."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from support import ROOT

# Shorter parts of a text, such as "; it must be positive", may be in several files.
LONG = 30


def test_the_files_that_it_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:ortgrad|tests|docs|benchmarks)/[\w./]+\.\w+)`", text)
    assert len(named) > 30
    assert [name for name in named if not (ROOT / name).exists()] == []


def error_texts(path: Path) -> Iterator[str]:
    """The constant parts of the texts of errors that a module raises."""
    for node in ast.walk(ast.parse(path.read_text())):
        refuses = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "unsupported"
        if refuses or isinstance(node, ast.Raise):
            constants = (inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant))
            yield from (value.strip() for value in constants if isinstance(value, str))


def test_the_text_of_an_error_is_in_one_file() -> None:
    places = defaultdict(set)
    for path in (ROOT / "ortgrad").rglob("*.py"):
        for text in error_texts(path):
            if len(text) >= LONG:
                places[text].add(path.relative_to(ROOT).as_posix())
    assert len(places) > 300
    assert {text: files for text, files in places.items() if len(files) > 1} == {}
