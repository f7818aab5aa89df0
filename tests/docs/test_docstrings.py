"""The examples in the docstrings of the public names."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import ortgrad

PUBLIC = [
    name
    for name in ortgrad.__all__
    if not inspect.isclass(thing := getattr(ortgrad, name)) or not issubclass(thing, Exception)
]
FURTHER = [
    "runtime.placements.placements",
    "training.Adam",
    "training.api.CheckpointState",
    "training.api.LinearLRScheduler",
    "training.api.Module",
    "training.api.Optimizer",
    "training.api.Parameter",
    "training.checkpoint.load",
    "training.checkpoint.save",
    "training.lora.add_lora",
    "training.lora.load_lora",
    "training.lora.lora_parameters",
    "training.lora.merge_lora",
    "training.lora.save_lora",
    "training.Adagrad",
    "training.AdamW",
    "training.RMSprop",
    "training.SGD",
    "training.Trainer",
    "training.add_loss",
    "training.export",
    "training.fit",
    "training.parameters",
]
SCRIPT = """
import doctest, importlib, sys
module, _, name = f"ortgrad.{sys.argv[1]}".rpartition(".")
thing = getattr(importlib.import_module(module), name)
(test,) = doctest.DocTestFinder(recurse=False).find(thing, sys.argv[1], module=False, globs={})
assert test.examples, "there is no example"
sys.exit(doctest.DocTestRunner().run(test).failed)
"""


@pytest.mark.parametrize("name", [*PUBLIC, *FURTHER])
def test_example(name: str) -> None:
    """In a process of its own: examples declare operators."""
    command = [sys.executable, "-W", "error", "-c", SCRIPT, name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
