"""Geometries of convolutions, and how exact their results are."""

from __future__ import annotations

from typing import Any

import numpy as np

import support

Geometry = tuple[list[int], list[int], dict[str, Any]]


# Shapes of X and W, and attributes: what decides about tiles, blocks, panels and tasks.
CHOSEN: dict[str, Geometry] = {
    "one position": ([1, 5, 1, 1], [7, 5, 3, 3], {"pads": [1, 1, 1, 1]}),
    "one position of many samples": ([70, 5, 1], [7, 5, 1], {}),
    "wide rows": ([1, 7, 3, 130], [20, 7, 3, 3], {"pads": [1, 1, 1, 1]}),
    "panels over several samples": ([9, 30, 4, 4], [40, 30, 3, 3], {"pads": [1, 1, 1, 1]}),
    "panels, channels divided": ([1, 200, 8, 8], [130, 200, 3, 3], {"pads": [1, 1, 1, 1]}),
    "rows longer than a sum": ([1, 3, 1100], [17, 3, 4], {"pads": [2, 1], "strides": [2]}),
    "more taps than a sum": ([2, 2, 20, 20], [3, 2, 17, 17], {"pads": [3, 2, 1, 0]}),
    "more filters than a block": ([2, 3, 6, 5], [150, 3, 2, 2], {}),
    "pointwise, in place": ([2, 9, 8, 6], [20, 9, 1, 1], {}),
    "pointwise, not in place": ([2, 9, 7, 7], [20, 9, 1, 1], {}),
    "pointwise strided": ([2, 9, 9, 8], [20, 9, 1, 1], {"strides": [2, 3]}),
    "patches": ([2, 3, 12, 8], [40, 3, 4, 4], {"strides": [4, 4]}),
    "gaps between windows": ([1, 4, 11, 13], [5, 4, 2, 2], {"strides": [3, 4], "pads": [1, 0, 2, 1]}),
    "dilated over the padding": ([1, 4, 5, 6], [5, 4, 3, 3], {"dilations": [4, 3], "pads": [4, 3, 4, 3]}),
    "padding on one side": ([2, 4, 6, 7], [18, 4, 3, 5], {"pads": [0, 4, 2, 0], "strides": [1, 2]}),
    "windows that see padding only": ([1, 3, 6, 1], [5, 3, 2, 2], {"strides": [3, 3], "pads": [1, 3, 0, 0]}),
    "rows that see padding only": ([2, 3, 2, 9], [5, 3, 2, 2], {"strides": [4, 1], "pads": [5, 0, 3, 9]}),
    "rest behind the windows": ([1, 6, 10, 11], [8, 6, 3, 3], {"strides": [4, 3]}),
    "much padding": ([3, 14, 4, 4], [20, 14, 3, 3], {"pads": [1, 1, 1, 1]}),
    "much padding, strided": ([2, 13, 7, 8], [70, 13, 5, 3], {"pads": [2, 1, 2, 1], "strides": [2, 2]}),
    "taps that see padding only": ([2, 7, 2, 1], [18, 7, 5, 5], {"pads": [2, 4, 4, 5], "dilations": [1, 2]}),
    "much padding of a row": ([2, 40, 9], [17, 40, 7], {"pads": [3, 3]}),
    "groups": ([2, 12, 9, 9], [60, 4, 3, 3], {"group": 3, "pads": [1, 1, 1, 1]}),
    "3d": ([1, 5, 6, 7, 8], [18, 5, 3, 2, 3], {"pads": [1, 0, 1, 1, 1, 1], "strides": [2, 1, 1]}),
}


def random_geometry(random: np.random.Generator) -> Geometry:
    rank, group = int(random.integers(1, 4)), int(random.choice([1, 1, 1, 2, 3]))
    channels = int(random.integers(1, 41 if group == 1 else 9))
    filters = int(random.choice([1, 3, 5, 16, 17, 20, 64, 70])) if group == 1 else int(random.integers(1, 20))
    pointwise = random.random() < 0.2
    kernel = random.integers(1, 2 if pointwise else 5, rank).tolist()
    strides = random.integers(1, 2 if pointwise else 4, rank).tolist()
    dilations = random.integers(1, 3, rank).tolist()
    pads = (random.integers(0, 4, 2 * rank) * (random.random(2 * rank) < 0.7)).tolist()
    sizes = random.integers(1, {1: 600, 2: 24, 3: 9}[rank], rank).tolist()
    for i in range(rank):
        sizes[i] = max(sizes[i], (kernel[i] - 1) * dilations[i] + 1 - pads[i] - pads[rank + i])
    attributes = {"strides": strides, "dilations": dilations, "pads": pads, "group": group}
    return (
        [int(random.integers(1, 5)), group * channels, *sizes],
        [group * filters, channels, *kernel],
        attributes,
    )


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    support.assert_close(actual, expected, {"float32": 2e-5, "float64": 1e-12}[expected.dtype.name])


def pads_of(sizes: list[int], kernel: list[int], attributes: dict[str, Any]) -> list[tuple[int, int]]:
    """(before, after) for each dimension, SAME as ONNX defines it."""
    rank, auto_pad = len(sizes), attributes.get("auto_pad", "NOTSET")
    if not auto_pad.startswith("SAME"):
        flat = attributes.get("pads", [0] * 2 * rank)
        return list(zip(flat[:rank], flat[rank:], strict=True))
    pads = []
    for i in range(rank):
        stride = attributes.get("strides", [1] * rank)[i]
        total = max((-(-sizes[i] // stride) - 1) * stride + kernel[i] - sizes[i], 0)
        halves = total // 2, total - total // 2
        pads.append(halves if auto_pad == "SAME_UPPER" else halves[::-1])
    return pads
