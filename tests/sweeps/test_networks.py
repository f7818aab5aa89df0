"""Whole networks: their gradients, and Hessian-vector products, are PyTorch's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from support import assert_close, networks
from support.networks import Arrays, Network, Tensors

import ortgrad

NETWORKS: list[Callable[[], Network]] = [
    networks.resnet,
    networks.mobilenet,
    networks.vit,
    networks.gpt,
    networks.unet,
    networks.gru,
    networks.recurrence,
    networks.mlp,
    networks.convolutions,
]
KERNELS = ("auto", "python", "onnx")
TOLERANCE = 1e-4  # relative to the largest value


def tensors(network: Network, feeds: Arrays) -> Tensors:
    values = {name: torch.tensor(array) for name, array in {**network.weights, **feeds}.items()}
    for value in values.values():
        value.requires_grad_(value.is_floating_point())
    return values


def targets(network: Network) -> list[str]:
    """All weights, and the inputs that have a gradient."""
    return [name for name, value in tensors(network, network.inputs(1)).items() if value.requires_grad]


def run(session: ortgrad.InferenceSession, feeds: Arrays) -> Arrays:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


@pytest.mark.parametrize("make", NETWORKS, ids=lambda make: make.__name__)
def test_gradients(make: Callable[[], Network]) -> None:
    """With all kernels, and one model for every batch."""
    network = make()
    wrt = targets(network)
    built = ortgrad.build_gradient_model(network.model, wrt=wrt, of="loss")
    onnx.checker.check_model(built, full_check=True)
    sessions = [ortgrad.InferenceSession(built, kernels=kernels) for kernels in KERNELS]
    for batch in (3, 1, 8):
        feeds = network.inputs(batch)
        values = tensors(network, feeds)
        expected = network.torch(values)
        grads = torch.autograd.grad(expected["loss"], [values[name] for name in wrt])
        assert any(grad.any() for grad in grads)
        for session in sessions:
            results = run(session, feeds)
            for name, value in expected.items():
                assert_close(results[name], value.detach().numpy(), TOLERANCE)
            for name, grad in zip(wrt, grads, strict=True):
                assert_close(results[f"{name}_grad"], grad.numpy(), TOLERANCE)


SMOOTH = [networks.mlp, networks.convolutions, networks.gpt]


@pytest.mark.parametrize("make", SMOOTH, ids=lambda make: make.__name__)
def test_hessian_vector_products(make: Callable[[], Network]) -> None:
    """A gradient model differentiated again, with the vector as the gradients' seeds."""
    network = make()
    wrt = targets(network)
    first = ortgrad.build_gradient_model(network.model, wrt=wrt, of="loss")
    second = ortgrad.build_gradient_model(first, wrt=wrt, of=[f"{name}_grad" for name in wrt])
    feeds = network.inputs(3)
    values = tensors(network, feeds)
    generator = np.random.default_rng(0)
    vector = [generator.standard_normal(values[name].shape).astype(np.float32) for name in wrt]
    inputs = [values[name] for name in wrt]
    grads = torch.autograd.grad(network.torch(values)["loss"], inputs, create_graph=True)
    expected = torch.autograd.grad(grads, inputs, [torch.tensor(v) for v in vector])
    seeds = {f"{name}_grad_grad": v for name, v in zip(wrt, vector, strict=True)}
    for kernels in KERNELS:
        session = ortgrad.InferenceSession(second, kernels=kernels)
        results = run(session, {**feeds, **seeds})
        for name, product in zip(wrt, expected, strict=True):
            assert_close(results[f"{name}_grad_2"], product.numpy(), TOLERANCE)


@pytest.mark.parametrize("kernels", KERNELS)
def test_lstm_with_peepholes(kernels: str) -> None:
    model, feeds = networks.lstm_with_peepholes()
    ortgrad.check_gradients(model, feeds, kernels=kernels).raise_if_wrong()


def test_file_holds_each_weight_once() -> None:
    """The gradient model of twelve layers is as large as the model, but for what the nodes take."""
    sizes = networks.Sizes(layers=12, hidden=256, tokens=32, vocabulary=1000)
    network = networks.gpt(sizes)
    built = ortgrad.build_gradient_model(network.model, of="loss")
    names = [tensor.name for tensor in built.graph.initializer]
    assert len(names) == len(set(names))
    assert set(network.weights) <= set(names)
    weights = sum(array.nbytes for array in network.weights.values())
    assert weights > 2**25
    assert built.ByteSize() - weights < weights // 50
    assert {f"{name}_grad" for name in network.weights} <= {value.name for value in built.graph.output}
