"""A normalization of one element is constant: its gradient is 0, without the rounding of a product."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from support.calls import WAYS

import ortgrad

CASES = {
    "LayerNormalization": ((7, 3, 1), 1, "LayerNormalization<epsilon = 1e-10>(x, s, b)"),
    "RMS of one element": ((7, 3, 1), 1, "RMSNormalization<epsilon = 1e-30>(x, s)"),
    "InstanceNormalization": ((2, 4, 1), 4, "InstanceNormalization<epsilon = 1e-10>(x, s, b)"),
    "GroupNormalization": ((2, 4, 1), 4, "GroupNormalization<num_groups = 4, epsilon = 1e-10>(x, s, b)"),
    "BatchNormalization": (
        (1, 4),
        4,
        "BatchNormalization<training_mode = 1, epsilon = 1e-10>(x, s, b, b, s)",
    ),
    "SkipLayerNormalization": (
        (7, 3, 1),
        1,
        "com.microsoft.SkipLayerNormalization<epsilon = 1e-10>(x, x, s, b)",
    ),
}


@pytest.mark.parametrize("kernels", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_zero(case: str, kernels: Any) -> None:
    shape, count, call = CASES[case]
    outputs = "y, mean, var" if case.startswith("Batch") else "y"
    sizes = ", ".join(map(str, shape))
    model = onnx.parser.parse_model(f"""
        <ir_version: 11, opset_import: ["" : 23, "com.microsoft" : 1]>
        g (float[{sizes}] x, float[{count}] s, float[{count}] b) => (float[{sizes}] y)
        {{ {outputs} = {call} }}""")
    numbers = np.random.default_rng(0)
    feeds = {name: numbers.normal(size=size) for name, size in (("x", shape), ("s", count), ("b", count))}
    feeds = {**feeds, "s": np.abs(feeds["s"]) + 0.1, "y_grad": numbers.normal(size=shape)}
    session = ortgrad.InferenceSession(ortgrad.build_gradient_model(model, wrt="x"), kernels=kernels)
    (dx,) = session.run(["x_grad"], {name: array.astype(np.float32) for name, array in feeds.items()})
    # x / sqrt(x^2) is constant as well, but only up to rounding.
    bound = 1e-5 if case.startswith("RMS") else 0
    assert np.abs(dx).max() <= bound
