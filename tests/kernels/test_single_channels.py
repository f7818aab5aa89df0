"""Gradients of convolutions whose inputs have a single channel, against PyTorch in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import assert_close, needs_numba, symbolic_shapes
from support.convolutions import expected, make_feeds, node_for

import ortgrad
from ortgrad.pipelines.prepare import prepare_loaded

# Shapes of X and W, attributes
CASES: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "spectrogram": ([2, 1, 2000], [102, 1, 100], {"strides": [40]}),
    "resampling": ([1, 1, 300], [2, 1, 11], {"strides": [3], "pads": [5, 4]}),
    "grey image": ([2, 1, 9, 10], [20, 1, 3, 3], {"pads": [1, 1, 1, 1]}),
    "padding of the same size": ([1, 1, 9, 10], [5, 1, 4, 3], {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    "gaps": ([1, 1, 30], [4, 1, 2], {"strides": [3]}),
    "3d": ([1, 1, 5, 6, 7], [4, 1, 2, 3, 2], {"dilations": [2, 1, 1]}),
}
# Filters for which dW is left to the compiled kernel.
FEWEST = 16
OUTPUTS = ("dX", "dW", "dB")


@needs_numba
@pytest.mark.parametrize("outputs", [OUTPUTS, ("dX",), ("dX", None, "dB"), (None, "dW")])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_they_are_left_to_onnxruntime(case: str, dynamic: bool, outputs: tuple[str | None, ...]) -> None:
    x, w, attributes = CASES[case]
    feeds = make_feeds(x, w, attributes, np.float32)
    shapes = {**symbolic_shapes(feeds), "W": w} if dynamic else {name: a.shape for name, a in feeds.items()}
    node = node_for(feeds, attributes, outputs)
    model = ortgrad.nodes.make_model(node, shapes=shapes, dtype=np.dtype(np.float32))
    wanted = [name for name in outputs if name]
    results = ortgrad.InferenceSession(model).run(wanted, feeds)
    gradients = expected(feeds, attributes)
    for name, result in zip(wanted, results, strict=True):
        assert_close(result, gradients[name], 2e-5)
    for each in prepare_loaded(model, "auto", bodies=False).graph.node:
        assert each.domain == "" or ("dX" not in each.output and w[0] >= FEWEST)
