"""What the tests share: running one node, comparing, and the golden data."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime
import pytest

import ortgrad
from ortgrad.compiled import machine_code
from ortgrad.graph import loading
from ortgrad.pipelines.prepare import Kernels

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
# Seconds after which a process or a thread counts as hanging. Slow and busy machines need some of them.
PATIENCE = 900
# Whether sessions with kernels="auto" run compiled kernels.
COMPILES = machine_code.is_installed()
# Without Numba, "auto" takes the place of "compiled".
FASTEST: Kernels = "compiled" if COMPILES else "auto"
KERNELS: tuple[Kernels, ...] = ("python", "onnx", FASTEST)
# Those with which the body of a recurrence runs: "auto" is among KERNELS only without Numba.
BODIES: tuple[Kernels, ...] = ("onnx", "auto")

# Whether pytest was called with --sweep.
LONG = False


def amount(normal: int, long: int) -> int:
    """The number of random cases to try: `long` with --sweep."""
    return long if LONG else normal


# For tests of compiled kernels only. What others compute is tested without Numba as well.
needs_numba = pytest.mark.skipif(not COMPILES, reason="kernels are compiled by Numba, which is optional")


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """The largest error, relative to the largest expected value, is at most `tolerance`."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    if actual.size:
        scale = max(float(np.nanmax(np.abs(expected))), 1e-30)
        worst = float(np.nanmax(np.abs(actual.astype(np.float64) - expected.astype(np.float64)))) / scale
        assert worst <= tolerance, f"error {worst:.2e} relative to the largest value, allowed {tolerance:.0e}"


def symbolic_shapes(feeds: Mapping[str, np.ndarray]) -> dict[str, list[str]]:
    """Every dimension of every input unknown: what runs with these runs with any batch."""
    return {name: [f"{name}_{i}" for i in range(array.ndim)] for name, array in feeds.items()}


def float_type(feeds: Mapping[str, np.ndarray]) -> np.dtype:
    return next(array.dtype for array in feeds.values() if array.dtype.kind == "f")


@functools.lru_cache(maxsize=100)
def _model_of(node: bytes, shapes: tuple[tuple[str, tuple], ...], dtype: np.dtype) -> onnx.ModelProto:
    """The model of a node: the same in all ways to run it, and for other feeds of the same ranks."""
    return ortgrad.nodes.make_model(onnx.NodeProto.FromString(node), shapes=dict(shapes), dtype=dtype)


def run_node(
    node: onnx.NodeProto,
    feeds: Mapping[str, np.ndarray],
    kernels: str,
    *,
    shapes: Mapping[str, Sequence[int | str | None]] | None = None,
    fresh: bool = False,
) -> dict[str, np.ndarray]:
    """Run a one-node model in an ortgrad session; the outputs by name.

    `fresh` is for tests that change how the model is made.
    """
    declared = symbolic_shapes(feeds) if shapes is None else shapes
    key = tuple((name, tuple(shape)) for name, shape in declared.items())
    make = _model_of.__wrapped__ if fresh else _model_of
    model = make(node.SerializeToString(deterministic=True), key, float_type(feeds))
    session = ortgrad.InferenceSession(model, kernels=kernels)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, dict(feeds)), strict=True))


def session_of_passes(
    model: onnx.ModelProto, options: onnxruntime.SessionOptions | None = None
) -> ortgrad.InferenceSession:
    """A session of a model that some passes have made, with operators that are refused in files."""
    with mock.patch.object(loading, "refuse_internal_operators"):
        return ortgrad.InferenceSession(model, options, kernels=FASTEST)


def directional_derivative(
    function: Callable[..., float], arguments: Sequence[np.ndarray], directions: Sequence[np.ndarray]
) -> float:
    """Central difference of a scalar function of float64 arrays, with two steps extrapolated."""

    def difference(step: float) -> float:
        forward = function(*(a + step * d for a, d in zip(arguments, directions, strict=True)))
        backward = function(*(a - step * d for a, d in zip(arguments, directions, strict=True)))
        return (forward - backward) / (2 * step)

    coarse, fine = difference(2e-4), difference(1e-4)
    return (4 * fine - coarse) / 3


@dataclass(frozen=True)
class GoldenCase:
    """One node run on onnxruntime-training's kernel."""

    name: str
    op_type: str
    domain: str
    attributes: dict[str, Any]
    inputs: list[str]
    outputs: list[str]
    output_shapes: list[list[int] | None]
    feeds: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]


def golden_cases() -> list[GoldenCase]:
    cases = []
    for path in sorted((GOLDEN / "ops").glob("*.npz")):
        with np.load(path) as data:
            meta = json.loads(str(data["meta"]))
            cases.append(
                GoldenCase(
                    name=path.stem,
                    feeds={n: data[f"in_{n}"] for n in meta["inputs"] if n},
                    expected={n: data[f"out_{n}"] for n in meta["outputs"] if n},
                    **meta,
                )
            )
    return cases
