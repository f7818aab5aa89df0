"""The work per node does not grow with the model. All pairs: `python tests/sweeps/scaling.py --lines`."""

from __future__ import annotations

import sys

import onnx
import pytest
from support.scaling_models import chain
from sweeps.scaling import growing

import ortgrad

# The script has more pairs, and those that take longer.
PAIRS = [
    ("shared weights", "build all"),
    ("fan out", "explain"),
    ("outputs", "build"),
    ("slices", "build all"),
    ("calls", "build"),
    ("branches", "build all"),
    ("loops", "explain"),
    ("names", "parameters"),
    ("weights", "session onnx"),
]


@pytest.mark.parametrize(("model", "way"), PAIRS)
def test_work_per_node(model: str, way: str) -> None:
    assert growing(model, way, 12) == []


def test_models_deeper_than_the_recursion_limit() -> None:
    depth = sys.getrecursionlimit() + 200
    backward = ortgrad.build_gradient_model(chain(depth), wrt="x")
    onnx.checker.check_model(backward)
    assert len(backward.graph.node) > 2 * depth
