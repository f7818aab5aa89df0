"""Gradient rules of RoiAlign, MaxRoiPool, DeformConv, Col2Im and LRN, against differences and PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from support.rules import check_against_torch, check_rule, gradients, one_node
from torch.nn import functional

import ortgrad


def normal(*shape: int, seed: int = 0, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("symbolic", [True, False], ids=["symbolic", "static"])
def test_lrn(size: int, symbolic: bool) -> None:
    attributes = {"size": size, "alpha": 0.5, "beta": 0.6, "bias": 1.3}
    check_rule("LRN", [normal(2, 5, 2, 3)], attributes, symbolic=symbolic, second=True)


def test_pytorch_lrn() -> None:
    layer = torch.nn.LocalResponseNorm(3, alpha=0.5, beta=0.6, k=1.3)
    attributes = {"size": 3, "alpha": 0.5, "beta": 0.6, "bias": 1.3}
    check_against_torch("LRN", layer, [normal(2, 5, 2, 3)], attributes, tolerance=1e-5)


COLUMNS: list[tuple[tuple[int, ...], tuple[int, ...], int, dict[str, Any]]] = [
    ((5, 6), (2, 3), 16, {}),
    ((5, 6), (1, 5), 10, {}),
    ((5, 6), (3, 3), 12, {"pads": [0, 1, 2, 1], "strides": [2, 1], "dilations": [1, 2]}),
    ((7,), (3,), 3, {"strides": [2]}),
    ((3, 4, 5), (1, 2, 5), 9, {}),
    ((3, 4, 5), (2, 2, 2), 18, {"pads": [1, 0, 0, 0, 0, 1], "strides": [1, 2, 2]}),
]


@pytest.mark.parametrize("constant", [True, False], ids=["constant", "run-time"])
@pytest.mark.parametrize(("image", "block", "blocks", "attributes"), COLUMNS)
def test_col2im(
    image: tuple[int, ...], block: tuple[int, ...], blocks: int, attributes: dict[str, Any], constant: bool
) -> None:
    x = normal(2, 3 * int(np.prod(block)), blocks)
    inputs: list[np.ndarray | None] = [x, ints(*image), ints(*block)]
    where: dict[str, Any] = {"constants": [1, 2] if constant else [], "symbolic": False}
    check_rule("Col2Im", inputs, attributes, second=len(image) == 2, **where)


def test_pytorch_col2im() -> None:
    check_against_torch(
        "Col2Im",
        lambda x, *_: functional.fold(x, (5, 6), (2, 3), stride=(1, 2), padding=1),
        [normal(2, 18, 18), ints(5, 6), ints(2, 3)],
        {"strides": [1, 2], "pads": [1, 1, 1, 1]},
        constants=[1, 2],
    )


def test_col2im_of_unknown_rank() -> None:
    model, _ = one_node("Col2Im", [normal(2, 18, 10), ints(3, 6), ints(2, 3)])
    with pytest.raises(ortgrad.UnsupportedGradientError, match="number of spatial dimensions"):
        ortgrad.build_gradient_model(model, wrt=["a"])


def test_col2im_that_onnxruntime_gets_wrong() -> None:
    inputs: list[np.ndarray | None] = [normal(1, 6, 5), ints(9), ints(3)]
    model, _ = one_node("Col2Im", inputs, {"dilations": [2]}, symbolic=False)
    with pytest.raises(ortgrad.UnsupportedGradientError, match="onnxruntime's result differs from ONNX's"):
        ortgrad.build_gradient_model(model, wrt=["a"])


def deformed(
    group: int = 1, sets: int = 1, *, mask: bool = True, bias: bool = True, **attributes: Any
) -> tuple[list[np.ndarray | None], dict[str, Any]]:
    """Inputs and attributes of a DeformConv on 4 channels with a 3x2 kernel."""
    x, w = normal(2, 4, 5, 6), normal(4, 4 // group, 3, 2, seed=1)
    probe = functional.conv2d(
        torch.tensor(x),
        torch.tensor(w),
        stride=attributes.get("strides", 1),
        padding=attributes.get("pads", [0, 0])[:2],
        dilation=attributes.get("dilations", 1),
        groups=group,
    )
    height, width = probe.shape[2:]
    offset = normal(2, sets * 12, height, width, seed=2)
    inputs: list[np.ndarray | None] = [x, w, offset, normal(4, seed=3) if bias else None]
    if mask:
        inputs.append(normal(2, sets * 6, height, width, seed=4))
    return inputs, {"group": group, "offset_group": sets, "kernel_shape": [3, 2], **attributes}


DEFORMED = [
    {},
    {"mask": False, "bias": False},
    {"mask": False, "pads": [1, 1, 1, 1], "strides": [2, 1]},
    {"group": 2, "pads": [1, 0, 1, 0], "dilations": [1, 2]},
    {"sets": 2},
    {"group": 2, "sets": 4, "strides": [1, 2]},
]


@pytest.mark.parametrize("options", DEFORMED)
@pytest.mark.parametrize(("symbolic", "kernels"), [(True, "onnx"), (False, "python")])
def test_deform_conv(options: dict[str, Any], symbolic: bool, kernels: str) -> None:
    inputs, attributes = deformed(**options)
    check_rule("DeformConv", inputs, attributes, opset=19, symbolic=symbolic, kernels=kernels)


def test_deform_conv_of_newest_opset_twice() -> None:
    inputs, attributes = deformed(sets=2)
    check_rule("DeformConv", inputs, attributes, opset=22, second=True)


def test_pytorch_deform_conv_without_offsets() -> None:
    """Without offsets it is Conv."""
    inputs, attributes = deformed(group=2, mask=False, pads=[1, 1, 1, 1])
    inputs[2] = np.zeros_like(inputs[2])

    def forward(x: torch.Tensor, w: torch.Tensor, _: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(x, w, b, padding=1, groups=2)

    check_against_torch("DeformConv", forward, inputs, attributes, opset=19, constants=[2], tolerance=1e-5)


def regions(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Regions (x1, y1, x2, y2) in and around two images of 8 x 9, and which image they are of."""
    generator = np.random.default_rng(5)
    start = generator.uniform(-2, 6, (count, 2))
    rois = np.concatenate([start, start + generator.uniform(0.3, 6, (count, 2))], axis=1)
    return rois.astype(np.float32), generator.integers(0, 2, count)


@pytest.mark.parametrize("symbolic", [True, False], ids=["symbolic", "static"])
@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("half", ["half_pixel", "output_half_pixel"])
@pytest.mark.parametrize("ratio", [0, 2])
def test_roi_align(mode: str, half: str, ratio: int, symbolic: bool) -> None:
    attributes = {
        "mode": mode,
        "coordinate_transformation_mode": half,
        "sampling_ratio": ratio,
        "output_height": 2,
        "output_width": 3,
        "spatial_scale": 1.2,
    }
    rois, images = regions(5)
    inputs: list[np.ndarray | None] = [normal(2, 3, 8, 9), rois, images]
    check_rule("RoiAlign", inputs, attributes, wrt=["a"], symbolic=symbolic, second=mode == "avg")


def test_regions_without_extent() -> None:
    rois = np.array([[3, 3, 1, 1], [2, 2, 2, 2], [1, 1, 5, 6]], np.float32)
    inputs: list[np.ndarray | None] = [normal(2, 3, 8, 9), rois, ints(0, 1, 1)]
    for mode in ("avg", "max"):
        attributes = {"mode": mode, "output_height": 2, "output_width": 3}
        check_rule("RoiAlign", inputs, attributes, wrt=["a"])


REGIONS = [[0, 0, 0, 8, 7], [1, 2, 1, 5, 6], [1, -3.3, -2, 3, 3], [0, 6, 5, 20, 20], [0, 30, 30, 40, 40]]
REGIONS += [[1, 4, 4, 4, 4], [0, 1.5, 2.5, 6.5, 5.5]]


@pytest.mark.parametrize("pooled", [(2, 2), (3, 4), (1, 1)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("symbolic", [False, True])
def test_max_roi_pool(pooled: tuple[int, int], scale: float, symbolic: bool) -> None:
    """Overlapping regions, regions partly and wholly outside, of one element, with halves to round."""
    random = np.random.default_rng(0)
    x = random.permutation(2 * 3 * 8 * 9).reshape(2, 3, 8, 9).astype(np.float32)
    rois = np.array(REGIONS, np.float32)
    attributes = {"pooled_shape": list(pooled), "spatial_scale": scale}
    model, feeds = one_node("MaxRoiPool", [x, rois], attributes, symbolic=symbolic)
    seed = random.standard_normal((len(rois), 3, *pooled)).astype(np.float32)
    y, dx = np.zeros(seed.shape), np.zeros(x.shape)
    for n, (image, *corners) in enumerate(rois):
        x1, y1, x2, y2 = (np.copysign(np.floor(abs(c * scale) + 0.5), c) for c in corners)
        high, wide = max(y2 - y1 + 1, 1) / pooled[0], max(x2 - x1 + 1, 1) / pooled[1]
        for i, j in np.ndindex(*pooled):
            top, bottom = (int(np.clip(y1 + t, 0, 8)) for t in (np.floor(i * high), np.ceil((i + 1) * high)))
            left, right = (int(np.clip(x1 + t, 0, 9)) for t in (np.floor(j * wide), np.ceil((j + 1) * wide)))
            if top < bottom and left < right:
                for c in range(3):
                    part = x[int(image), c, top:bottom, left:right]
                    row, column = np.unravel_index(part.argmax(), part.shape)
                    y[n, c, i, j] = part.max()
                    dx[int(image), c, top + row, left + column] += seed[n, c, i, j]
    np.testing.assert_array_equal(
        onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)[0], y
    )
    for kernels in ("auto", "python", "onnx"):
        np.testing.assert_allclose(gradients(model, feeds, {"y": seed}, ["a"], kernels)["a"], dx, atol=1e-6)
