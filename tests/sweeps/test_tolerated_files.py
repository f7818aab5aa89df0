"""What onnxruntime loads, ortgrad loads with the same results; see tests/sweeps/tolerated_files.py."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from sweeps.tolerated_files import AMBIGUOUS, CHANGES, X, changed, network, ours, plain

import ortgrad
from ortgrad.errors import ModelError

# onnxruntime refuses these. The first is what onnxruntime-training writes.
REPAIRED = {"surplus outputs of a normalization", "Constants of one name in a subgraph"}


@pytest.mark.parametrize("name", CHANGES)
def test_what_onnxruntime_loads(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = changed(name)
    before = model.SerializeToString()
    there, here = plain(model), ours(model)
    assert model.SerializeToString() == before
    if name in AMBIGUOUS:
        assert isinstance(here, ModelError) and "with different values" in str(here)
    elif there is not None:
        assert isinstance(here, tuple), here
        for a, b in zip(there, here[0], strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-5)
        np.testing.assert_allclose(here[1], differences(model), rtol=2e-2, atol=2e-3)
    elif name in REPAIRED:
        assert isinstance(here, tuple)
    else:
        assert isinstance(here, ortgrad.OrtgradError)


def differences(model: onnx.ModelProto) -> np.ndarray:
    """The gradient of the sum of y towards x, by differences of what onnxruntime computes."""
    gradient = np.zeros_like(X)
    for place in np.ndindex(X.shape):
        step = np.zeros_like(X)
        step[place] = 2**-8
        above, below = plain(model, X + step), plain(model, X - step)
        assert above is not None and below is not None
        gradient[place] = (above[0].sum(dtype=np.float64) - below[0].sum(dtype=np.float64)) / 2**-7
    return gradient


def test_gradient_of_the_network() -> None:
    """By PyTorch, so that the differences above mean something."""
    import torch

    x = torch.from_numpy(X).requires_grad_()
    w = torch.tensor([[1, -2], [3, 0.5], [-1, 2]])
    c, b = torch.tensor([2.0, 3.0]), torch.tensor([0.5, -0.5])
    ((torch.relu(x @ w) * c + b) * c).sum().backward()
    assert x.grad is not None
    np.testing.assert_allclose(differences(network()), x.grad.numpy(), rtol=1e-2, atol=1e-3)
