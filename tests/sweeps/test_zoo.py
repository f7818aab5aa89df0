"""Known architectures, exported by PyTorch: their gradients are PyTorch's, in every way to run them."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest
import torch
from support.sessions import WAYS, session
from support.zoo import ARCHITECTURES
from support.zoo.architecture import TESTED, Architecture
from support.zoo.exporting import Elements, export, weights
from torch import Tensor, nn

import ortgrad

# For what another exporter writes of the same architecture.
FEWER_WAYS = ("auto", "onnx")
Arrays = dict[str, np.ndarray]


def run(model: onnx.ModelProto, way: str, feeds: Arrays) -> Arrays:
    run = session(model, way)
    names = [output.name for output in run.get_outputs()]
    return dict(zip(names, run.run(None, feeds), strict=True))


def expected(
    architecture: Architecture, module: nn.Module, feeds: dict[str, Tensor], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], Arrays]:
    """Outputs, seeds for their gradients, and the gradients of parameters and inputs."""
    module = copy.deepcopy(module).to(dtype)
    values = {
        name: feed.to(dtype, copy=True).requires_grad_() if feed.is_floating_point() else feed
        for name, feed in feeds.items()
    }
    found = module(*values.values())
    outputs = [found] if isinstance(found, Tensor) else list(found)
    generator = torch.Generator().manual_seed(2)
    seeds = [torch.randn(y.shape, generator=generator) for y in outputs]
    targets = dict(module.named_parameters()) | {n: v for n, v in values.items() if v.requires_grad}
    grads = torch.autograd.grad(
        outputs,
        list(targets.values()),
        [s.to(dtype) for s in seeds],
        allow_unused=True,
        materialize_grads=True,
    )
    return outputs, seeds, {name: grad.numpy() for name, grad in zip(targets, grads, strict=True)}


def assert_close(name: str, actual: np.ndarray, single: np.ndarray, double: np.ndarray) -> None:
    """As close to float64 as 2e-5 of the largest value, or a few times as far as PyTorch's float32 is."""
    assert actual.shape == double.shape, name
    noise = np.abs(single.astype(np.float64) - double).max(initial=0.0)
    allowed = 2e-5 * np.abs(double).max(initial=0.0) + 8 * noise
    error = np.abs(actual - double).max(initial=0.0)
    assert error <= allowed, (
        f"{name}: error {error:.2e}, allowed {allowed:.2e}, largest {np.abs(double).max():.2e}"
    )


CASES = [
    pytest.param(architecture, exporter, id=f"{architecture.name}-{exporter}")
    for architecture in ARCHITECTURES
    for exporter in architecture.exporters
]


@pytest.mark.filterwarnings("ignore::ortgrad.ParameterWarning")  # about what exporters do
@pytest.mark.parametrize(("architecture", "exporter"), CASES)
def test_gradients(architecture: Architecture, exporter: str) -> None:
    module = architecture.module()
    model = export(architecture, module, exporter)
    elements = Elements(module)
    found = {name: array for name, array in weights(model).items() if elements.find(array)[0].any()}
    # Single numbers are not parameters by default.
    wrt = ["*", *(name for name, array in found.items() if array.size == 1)]
    built = ortgrad.build_gradient_model(model, wrt=wrt, of=list(architecture.outputs))

    feeds = architecture.feeds(TESTED)
    outputs, seeds, single = expected(architecture, module, feeds, torch.float32)
    exact, _, double = expected(architecture, module, feeds, torch.float64)
    arrays = {name: feed.numpy() for name, feed in feeds.items()}
    arrays |= {f"{n}_grad": s.numpy() for n, s in zip(architecture.outputs, seeds, strict=True)}
    for way in WAYS if exporter == architecture.exporters[0] else FEWER_WAYS:
        results = run(built, way, arrays)
        for name, y, z in zip(architecture.outputs, outputs, exact, strict=True):
            assert_close(name, results[name], y.detach().numpy(), z.detach().numpy())
        grads = elements.gather(found, {name: results[f"{name}_grad"] for name in found})
        for name, grad in grads.items():
            # What the exporter left out has no influence.
            grads[name] = np.where(np.isnan(grad) & (double[name] == 0), 0, grad)
            assert not np.isnan(grads[name]).any(), f"{name} is not in the exported model"
        grads |= {name: results[f"{name}_grad"] for name in feeds if name in double}
        assert double.keys() == grads.keys()
        for name, grad in grads.items():
            assert_close(f"{way}: {name}", grad, single[name], double[name])
