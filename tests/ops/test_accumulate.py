"""The gradient accumulator: sums, overwriting, mixed types."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from support import KERNELS, amount, assert_close, run_node

import ortgrad
from ortgrad.errors import KernelError


def compute(
    kernels: str, buffer: np.ndarray, value: np.ndarray, overwrite: bool | None
) -> dict[str, np.ndarray]:
    feeds = {"buffer": buffer, "value": value}
    if overwrite is not None:
        feeds["overwrite"] = np.array([overwrite])
    node = ortgrad.nodes.in_place_accumulator_v2(*feeds, outputs=["updated", "total"])
    return run_node(node, feeds, kernels)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("overwrite", [None, False, True])
@pytest.mark.parametrize("shape", [(3, 4), (1,), (), (0, 2), (2, 70_001)])
def test_sums_and_overwrites(
    shape: tuple[int, ...], overwrite: bool | None, dtype: str, kernels: str
) -> None:
    rng = np.random.default_rng(0)
    buffer, value = (np.asarray(rng.standard_normal(shape), dtype) for _ in range(2))
    result = compute(kernels, buffer, value, overwrite)
    np.testing.assert_array_equal(result["updated"], [True])
    expected = torch.from_numpy(value)
    if not overwrite:
        expected = torch.from_numpy(buffer) + expected
    assert_close(result["total"], expected.numpy(), 0)


@settings(max_examples=amount(10, 200), deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    kernels=st.sampled_from(KERNELS),
    overwrite=st.sampled_from([None, False, True]),
)
def test_any_shape(shape: tuple[int, ...], kernels: str, overwrite: bool | None) -> None:
    buffer, value = np.full(shape, 2.0), np.full(shape, 3.0)
    expected = np.full(shape, 3.0 if overwrite else 5.0)
    assert_close(compute(kernels, buffer, value, overwrite)["total"], expected, 0)


@pytest.mark.parametrize("kernels", KERNELS)
def test_overwriting_forgets_what_is_not_finite(kernels: str) -> None:
    buffer, value = np.array([np.nan, np.inf], np.float32), np.array([1, 2], np.float32)
    assert_close(compute(kernels, buffer, value, True)["total"], value, 0)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("dtype", "value_type"), [("float64", "float32"), ("float32", "float64")])
def test_the_value_has_a_type_of_its_own(dtype: str, value_type: str, overwrite: bool, kernels: str) -> None:
    node = ortgrad.nodes.in_place_accumulator_v2("buffer", "value", "overwrite", ["updated", "total"])
    model = ortgrad.nodes.make_model(node, dtype=dtype)
    wanted = helper.np_dtype_to_tensor_dtype(np.dtype(value_type))
    next(i for i in model.graph.input if i.name == "value").type.tensor_type.elem_type = wanted
    session = ortgrad.InferenceSession(model, kernels=kernels)
    buffer, value = np.ones(3, dtype), np.full(3, 0.5, value_type)
    feeds = {"buffer": buffer, "value": value, "overwrite": np.array([overwrite])}
    assert_close(session.run(["total"], feeds)[0], np.full(3, 0.5 if overwrite else 1.5, dtype), 0)


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_sum_is_optional(kernels: str) -> None:
    feeds = {"buffer": np.ones(3, np.float32), "value": np.ones(3, np.float32)}
    node = ortgrad.nodes.in_place_accumulator_v2("buffer", "value", outputs=["updated"])
    result = run_node(node, feeds, kernels)
    assert list(result) == ["updated"]
    np.testing.assert_array_equal(result["updated"], [True])


def test_float16_body() -> None:
    buffer, value = np.array([1, 2], np.float16), np.array([0.5, 0.25], np.float16)
    assert_close(compute("onnx", buffer, value, False)["total"], np.array([1.5, 2.25], np.float16), 0)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"value": np.ones(2, np.float32)}, r"value \[2\] does not fit with accumulation_buffer \[3\]"),
        ({"overwrite": np.zeros(2, bool)}, r"overwrite_flag \[2\] does not fit"),
    ],
)
def test_wrong_inputs(wrong: dict[str, np.ndarray], text: str) -> None:
    right = {
        "buffer": np.ones(3, np.float32),
        "value": np.ones(3, np.float32),
        "overwrite": np.zeros(1, bool),
    }
    node = ortgrad.nodes.in_place_accumulator_v2(*right, ["updated", "total"])
    model = ortgrad.nodes.make_model(node, shapes={name: [name] for name in right})
    session = ortgrad.InferenceSession(model, kernels="python")
    with pytest.raises(KernelError, match=text):
        session.run(None, right | wrong)
    np.testing.assert_array_equal(session.run(["total"], right)[0], [2, 2, 2])
