"""Transpositions that swap two axes, in sessions with compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from support import COMPILES, needs_numba
from support.calls import Case
from support.compiled import checked_tasks

import ortgrad
from ortgrad.operators.declaration import INTERNAL_DOMAIN
from ortgrad.ops.swap_axes import swap_axes
from ortgrad.pipelines.prepare import prepare_loaded

# The shape of X and the order of its axes
CASES: list[tuple[list[int], list[int]]] = [
    ([2, 5, 3, 32], [0, 2, 1, 3]),
    ([2, 3, 5, 4, 8], [0, 2, 1, 3, 4]),
    ([7, 2, 16], [1, 0, 2]),
    ([2, 3, 4, 5, 48], [0, 1, 3, 2, 4]),
    ([1, 1, 6, 16], [0, 2, 1, 3]),
]


def model_of(shape: Sequence[Any], order: Sequence[int], dtype: str = "float32") -> onnx.ModelProto:
    """A transposition beside a gradient node: only models with one are prepared."""
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    inputs = {"X": shape, "dY": [1], "Z": [1]}
    graph = helper.make_graph(
        [
            helper.make_node("Transpose", ["X"], ["Y"], perm=list(order)),
            helper.make_node("ReluGrad", ["dY", "Z"], ["dX"], domain="com.microsoft"),
        ],
        "transposition",
        [helper.make_tensor_value_info(n, element, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, element, None) for n in ("Y", "dX")],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def feeds_of(shape: Sequence[int], dtype: str = "float32") -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    return {"X": x, "dY": np.ones(1, dtype), "Z": np.ones(1, dtype)}


def is_swapped(model: onnx.ModelProto) -> bool:
    nodes = prepare_loaded(model, "auto", bodies=False).graph.node
    return (INTERNAL_DOMAIN, "SwapAxes") in {(node.domain, node.op_type) for node in nodes}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("shape", "order"), CASES, ids=str)
def test_transpositions(shape: list[int], order: list[int], dtype: str) -> None:
    x = feeds_of(shape, dtype)["X"]
    expected = torch.tensor(x).permute(order).numpy()
    first = next(i for i, k in enumerate(order) if i != k)
    for sizes in (shape, [f"x{i}" if i < first + 2 else n for i, n in enumerate(shape)]):
        model = model_of(sizes, order, dtype)
        assert is_swapped(model) == COMPILES
        session = ortgrad.InferenceSession(model)
        for _ in range(2):
            np.testing.assert_array_equal(session.run(["Y"], feeds_of(shape, dtype))[0], expected)


def test_the_numpy_kernel() -> None:
    for shape, order in CASES:
        x = feeds_of(shape)["X"]
        axis = next(i for i, k in enumerate(order) if i != k)
        np.testing.assert_array_equal(swap_axes(x, axis=axis), torch.tensor(x).permute(order).numpy())


def test_empty_tensors_and_other_sizes() -> None:
    session = ortgrad.InferenceSession(model_of(["N", "M", 3, 16], [0, 2, 1, 3]))
    for shape in ((2, 5, 3, 16), (0, 5, 3, 16), (1, 1, 3, 16), (2, 0, 3, 16)):
        feeds = feeds_of(shape)
        expected = torch.tensor(feeds["X"]).permute(0, 2, 1, 3).numpy()
        np.testing.assert_array_equal(session.run(["Y"], feeds)[0], expected)


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ([2, 5, 3, 17], [0, 2, 1, 3]),
        ([2, 5, 3, "D"], [0, 2, 1, 3]),
        ([2, 5, 3, 16], [0, 3, 1, 2]),
        ([2, 5, 3, 16], [2, 1, 0, 3]),
        ([2, 5, 3, 16], [0, 1, 3, 2]),
        ([2, 5, 3, 16], [0, 1, 2, 3]),
        ([32, 16], [1, 0]),
    ],
    ids=str,
)
def test_others_stay(shape: list[Any], order: list[int]) -> None:
    assert not is_swapped(model_of(shape, order))


@needs_numba
def test_no_task_reads_or_writes_outside_its_tensors() -> None:
    """Numba's checks raise an IndexError; a result that was not written is NaN."""
    for shape, order in CASES:
        x = feeds_of(shape)["X"]
        axis = next(i for i, k in enumerate(order) if i != k)
        results = checked_tasks(swap_axes, Case("SwapAxes", {"X": x}, {"axis": axis}))
        assert results is not None
        np.testing.assert_array_equal(results[0], np.transpose(x, order))


@needs_numba
def test_threads() -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = ortgrad.InferenceSession(model_of([8, 64, 8, 32], [0, 2, 1, 3]), options)
    feeds = feeds_of((8, 64, 8, 32))
    np.testing.assert_array_equal(session.run(["Y"], feeds)[0], np.transpose(feeds["X"], (0, 2, 1, 3)))
