"""Gradient rules of Conv and ConvTranspose, against finite differences and PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.rules import check_against_torch, check_rule, one_node
from torch.nn import functional

import ortgrad


def normal(*shape: int, seed: int = 0, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# Both kinds of kernels, both kinds of shapes.
WAYS = [(True, "onnx"), (False, "python")]
Case = tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]

CONV: list[Case] = [
    ("1d", (2, 2, 7), (3, 2, 3), {"pads": [1, 0], "strides": [2]}),
    ("2d", (2, 2, 5, 6), (3, 2, 3, 2), {}),
    (
        "2d-all",
        (2, 4, 7, 6),
        (4, 2, 3, 2),
        {"pads": [1, 0, 2, 1], "strides": [2, 1], "dilations": [1, 2], "group": 2},
    ),
    ("3d", (1, 2, 4, 5, 4), (2, 2, 2, 3, 2), {"pads": [1, 0, 1, 0, 1, 0]}),
    ("same-upper", (2, 1, 6, 5), (2, 1, 3, 2), {"auto_pad": "SAME_UPPER", "strides": [2, 1]}),
    ("same-lower", (2, 1, 6, 5), (2, 1, 3, 2), {"auto_pad": "SAME_LOWER", "strides": [2, 1]}),
    ("valid", (2, 1, 6, 5), (2, 1, 3, 2), {"auto_pad": "VALID"}),
]
TRANSPOSED: list[Case] = [
    ("1d", (2, 2, 5), (2, 3, 3), {"pads": [1, 0], "strides": [2]}),
    ("2d", (2, 2, 4, 3), (2, 3, 3, 2), {}),
    (
        "2d-all",
        (2, 4, 4, 3),
        (4, 2, 3, 2),
        {"pads": [1, 0, 2, 1], "strides": [2, 3], "dilations": [1, 2], "group": 2, "output_padding": [1, 2]},
    ),
    ("3d", (1, 2, 3, 2, 3), (2, 2, 2, 3, 2), {"strides": [1, 2, 1]}),
    ("same-upper", (2, 1, 4, 3), (1, 2, 3, 4), {"auto_pad": "SAME_UPPER", "strides": [2, 3]}),
    ("same-lower", (2, 1, 4, 3), (1, 2, 3, 4), {"auto_pad": "SAME_LOWER", "strides": [2, 3]}),
    ("shape", (2, 1, 3, 3), (1, 2, 3, 3), {"output_shape": [6, 8], "strides": [2, 3]}),
    (
        "shape-upper",
        (2, 1, 3, 3),
        (1, 2, 3, 3),
        {"output_shape": [6, 8], "strides": [2, 3], "auto_pad": "SAME_UPPER"},
    ),
    (
        "shape-larger",
        (1, 1, 3, 3),
        (1, 2, 3, 3),
        {"output_shape": [10, 8], "strides": [3, 2], "output_padding": [1, 1]},
    ),
]


def inputs_of(x: tuple[int, ...], w: tuple[int, ...], filters: int) -> list[np.ndarray]:
    return [normal(*x), normal(*w, seed=1), normal(filters, seed=2)]


@pytest.mark.parametrize(("symbolic", "kernels"), WAYS)
@pytest.mark.parametrize(("x", "w", "attributes"), [c[1:] for c in CONV], ids=[c[0] for c in CONV])
def test_conv(
    x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any], symbolic: bool, kernels: str
) -> None:
    given = {**attributes, "kernel_shape": list(w[2:])}
    check_rule("Conv", inputs_of(x, w, w[0]), given, symbolic=symbolic, kernels=kernels)


@pytest.mark.parametrize(("symbolic", "kernels"), WAYS)
@pytest.mark.parametrize(
    ("x", "w", "attributes"), [c[1:] for c in TRANSPOSED], ids=[c[0] for c in TRANSPOSED]
)
def test_conv_transpose(
    x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any], symbolic: bool, kernels: str
) -> None:
    given = {**attributes, "kernel_shape": list(w[2:])}
    bias = w[1] * attributes.get("group", 1)
    check_rule("ConvTranspose", inputs_of(x, w, bias), given, symbolic=symbolic, kernels=kernels)


@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_pytorch(op_type: str, rank: int) -> None:
    x, w, b = normal(2, 4, *(6, 5, 4)[:rank]), normal(4, 2, *(3, 2, 2)[:rank], seed=1), normal(4, seed=2)
    function = getattr(functional, f"conv{'_transpose' if op_type != 'Conv' else ''}{rank}d")
    attributes = {"strides": [2] * rank, "pads": [1] * (2 * rank), "group": 2}

    def forward(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return function(x, w, b, stride=2, padding=1, groups=2)

    check_against_torch(op_type, forward, [x, w, b], attributes, symbolic=False, tolerance=1e-5)


@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
def test_second_derivatives(op_type: str) -> None:
    attributes = {"strides": [2, 1], "pads": [1, 0, 0, 1], "kernel_shape": [3, 2]}
    inputs: list[np.ndarray | None] = [normal(2, 2, 5, 4), normal(2, 2, 3, 2, seed=1)]
    check_rule(op_type, inputs, attributes, second=True)


@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
def test_second_derivatives_of_large_kernels(op_type: str) -> None:
    """Towards W this is a convolution itself, with a kernel whose size is not known before the run."""
    attributes = {"strides": [3], "pads": [5, 2], "kernel_shape": [51], "group": 2}
    inputs: list[np.ndarray | None] = [normal(2, 2, 60), normal(2, 1, 51, seed=1)]
    check_rule(op_type, inputs, attributes, second=True)


@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
def test_without_bias_in_newest_opset(op_type: str) -> None:
    check_rule(op_type, [normal(2, 2, 5, 4), normal(2, 2, 3, 2, seed=1)], opset=22, symbolic=False)


def test_conv_is_one_node() -> None:
    model, _ = one_node("Conv", inputs_of((2, 2, 5, 5), (3, 2, 3, 3), 3), symbolic=False)
    built = ortgrad.build_gradient_model(model, wrt=["a", "b", "c"])
    assert [node.op_type for node in built.graph.node] == ["Conv", "ConvGrad"]


def test_kernel_of_unknown_size() -> None:
    model, _ = one_node("ConvTranspose", inputs_of((2, 1, 5, 5), (1, 2, 3, 3), 2), {"auto_pad": "SAME_UPPER"})
    with pytest.raises(ortgrad.UnsupportedGradientError, match="kernel size is not known"):
        ortgrad.build_gradient_model(model, wrt=["a"])


def test_rank_of_unknown_size() -> None:
    model, _ = one_node("ConvTranspose", inputs_of((2, 1, 5, 5), (1, 2, 3, 3), 2))
    # The rank of W, which equals that of X, is not known either.
    for value in model.graph.input[:2]:
        value.type.tensor_type.ClearField("shape")
    with pytest.raises(ortgrad.UnsupportedGradientError, match="number of dimensions"):
        ortgrad.build_gradient_model(model, wrt=["a"])
