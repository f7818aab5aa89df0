"""Gradient rules of pools, against finite differences and PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnx import parser
from support.rules import check_against_torch, check_rule, gradients, one_node
from torch.nn import functional

import ortgrad


def normal(*shape: int, seed: int = 0, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def apart(*shape: int) -> np.ndarray:
    """Numbers that no small step makes equal."""
    generator = np.random.default_rng(0)
    count = int(np.prod(shape))
    return ((generator.permutation(count) - count / 2 + 0.25) / 8).astype(np.float32).reshape(shape)


# Both kinds of kernels, both kinds of shapes.
WAYS = [(True, "onnx"), (False, "python")]
Case = tuple[tuple[int, ...], dict[str, Any]]

WINDOWS: list[Case] = [
    ((2, 2, 7), {"kernel_shape": [3], "strides": [2], "pads": [1, 1]}),
    ((2, 2, 5, 6), {"kernel_shape": [3, 2]}),
    ((2, 2, 5, 6), {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 2, 1]}),
    ((2, 2, 5, 6), {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    ((1, 2, 5, 6), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1}),
    ((1, 2, 6, 5), {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ((1, 2, 6, 5), {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    ((1, 2, 6, 5), {"kernel_shape": [3, 2], "auto_pad": "VALID"}),
    ((1, 2, 7, 6), {"kernel_shape": [2, 3], "dilations": [2, 2], "pads": [1, 1, 1, 1]}),
    ((1, 2, 4, 5, 4), {"kernel_shape": [2, 3, 2], "strides": [1, 2, 2]}),
]


@pytest.mark.parametrize(("symbolic", "kernels"), WAYS)
@pytest.mark.parametrize(("shape", "attributes"), WINDOWS)
def test_max_pool(shape: tuple[int, ...], attributes: dict[str, Any], symbolic: bool, kernels: str) -> None:
    check_rule("MaxPool", [apart(*shape)], attributes, symbolic=symbolic, kernels=kernels)


@pytest.mark.parametrize("storage_order", [0, 1])
def test_max_pool_with_indices(storage_order: int) -> None:
    attributes = {"kernel_shape": [2, 3], "storage_order": storage_order}
    check_rule("MaxPool", [apart(1, 2, 5, 6)], attributes, outputs=(None, np.int64))


@pytest.mark.parametrize(("symbolic", "kernels"), WAYS)
@pytest.mark.parametrize("count_include_pad", [0, 1])
@pytest.mark.parametrize(("shape", "attributes"), WINDOWS)
def test_average_pool(
    shape: tuple[int, ...], attributes: dict[str, Any], count_include_pad: int, symbolic: bool, kernels: str
) -> None:
    given = {**attributes, "count_include_pad": count_include_pad}
    check_rule("AveragePool", [normal(*shape)], given, opset=19, symbolic=symbolic, kernels=kernels)


@pytest.mark.parametrize(("p", "symbolic"), [(1, False), (2, True), (3, True)])
@pytest.mark.parametrize(("shape", "attributes"), WINDOWS)
def test_lp_pool(shape: tuple[int, ...], attributes: dict[str, Any], p: int, symbolic: bool) -> None:
    check_rule("LpPool", [apart(*shape)], {**attributes, "p": p}, symbolic=symbolic)


@pytest.mark.parametrize(
    ("shape", "symbolic"), [((2, 3, 5), True), ((2, 3, 4, 5), False), ((1, 2, 3, 2, 4), True)]
)
@pytest.mark.parametrize(
    ("op_type", "attributes"),
    [
        ("GlobalAveragePool", {}),
        ("GlobalMaxPool", {}),
        *(("GlobalLpPool", {"p": p}) for p in (1, 2, 3)),
    ],
)
def test_global_pools(
    op_type: str, attributes: dict[str, Any], shape: tuple[int, ...], symbolic: bool
) -> None:
    check_rule(op_type, [apart(*shape)], attributes, symbolic=symbolic)


@pytest.mark.parametrize(
    ("op_type", "attributes"),
    [
        ("AveragePool", {"kernel_shape": [2, 3], "strides": [2, 1], "pads": [1, 0, 0, 1]}),
        ("GlobalAveragePool", {}),
        ("LpPool", {"kernel_shape": [2, 3], "pads": [1, 0, 0, 1]}),
        ("LpPool", {"kernel_shape": [2, 3], "p": 3}),
        ("GlobalLpPool", {}),
        ("GlobalLpPool", {"p": 3}),
        ("MaxPool", {"kernel_shape": [2, 3], "strides": [2, 1]}),
        ("GlobalMaxPool", {}),
    ],
)
def test_second_derivatives(op_type: str, attributes: dict[str, Any]) -> None:
    check_rule(op_type, [apart(2, 2, 4, 5)], attributes, second=True)


def test_equal_values() -> None:
    x = np.zeros((1, 2, 4, 4), np.float32)
    check_against_torch(
        "MaxPool", lambda x: functional.max_pool2d(x, 2), [x], {"kernel_shape": [2, 2], "strides": [2, 2]}
    )
    check_against_torch("GlobalMaxPool", lambda x: functional.adaptive_max_pool2d(x, 1), [x])


@pytest.mark.parametrize("op_type", ["LpPool", "GlobalLpPool"])
def test_norm_of_zero(op_type: str) -> None:
    attributes = {"kernel_shape": [2, 2]} if op_type == "LpPool" else {}
    model, feeds = one_node(op_type, [np.zeros((1, 1, 3, 3), np.float32)], attributes)
    seed = np.ones((1, 1, 2, 2) if op_type == "LpPool" else (1, 1, 1, 1), np.float32)
    assert not gradients(model, feeds, {"y": seed}, ["a"])["a"].any()


POOLED = (1, 2, 3, 3)


def unpooled(kernel: int, stride: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = (POOLED[2] - 1) * stride + kernel
    return functional.max_pool2d(torch.tensor(normal(1, 2, size, size)), kernel, stride, return_indices=True)


@pytest.mark.parametrize("shape", [None, (1, 2, 8, 8)])
def test_max_unpool(shape: tuple[int, ...] | None) -> None:
    values, places = unpooled(2, 2)
    planes = np.arange(2).reshape(1, 2, 1, 1) * (36 if shape is None else 64)
    inputs = [values.numpy(), places.numpy() + planes, *([] if shape is None else [np.array(shape)])]
    check_rule("MaxUnpool", inputs, {"kernel_shape": [2, 2], "strides": [2, 2]}, second=True)


def test_max_unpool_writes_a_place_twice() -> None:
    values, places = unpooled(3, 1)
    inputs: list[np.ndarray | None] = [values.numpy(), places.numpy() + 25 * np.arange(2).reshape(1, 2, 1, 1)]
    assert len(np.unique(inputs[1])) < values.numel()
    check_rule("MaxUnpool", inputs, {"kernel_shape": [3, 3], "strides": [1, 1]})


@pytest.mark.parametrize("opset", [19, 22])
def test_newer_opsets(opset: int) -> None:
    for op_type in ("MaxPool", "AveragePool", "LpPool"):
        attributes = {"kernel_shape": [2, 2], "dilations": [2, 1]}
        check_rule(op_type, [apart(1, 2, 5, 5)], attributes, opset=opset)
    for op_type in ("GlobalMaxPool", "GlobalAveragePool"):
        check_rule(op_type, [apart(1, 2, 5, 5)], opset=opset)


@pytest.mark.parametrize("kernels", ["python", "onnx", "auto"])
@pytest.mark.parametrize("sizes", [(2,), (2, 2), (2, 5), (5, 2), (5, 2, 4)])
@pytest.mark.parametrize(
    ("op_type", "extra"), [("AveragePool", ""), ("AveragePool", ", count_include_pad = 1"), ("LpPool", "")]
)
def test_outputs_that_turn_out_empty(op_type: str, extra: str, sizes: tuple[int, ...], kernels: str) -> None:
    """One element less than a window, and the output of a pool of onnxruntime is empty; dX is 0."""
    rank = len(sizes)
    x, y = (", ".join(f"{name}{i}" for i in range(rank)) for name in "xy")
    text = f"""<ir_version: 10, opset_import: ["" : 18]> main (float[N, C, {x}] x) => (float[N, C, {y}] y) {{
        y = {op_type}<kernel_shape = {[3] * rank}{extra}>(x)
    }}"""
    built = ortgrad.build_gradient_model(parser.parse_model(text), wrt="x")
    session = ortgrad.InferenceSession(built, kernels=kernels)
    for shape in [(2, 3, *sizes), (2, 3, *(n + 1 for n in sizes))]:
        dy = np.ones((2, 3, *(n - 2 for n in shape[2:])), np.float32)
        (dx,) = session.run(["x_grad"], {"x": np.ones(shape, np.float32), "y_grad": dy})
        assert dx.shape == shape
        assert dx.any() == bool(dy.size)
