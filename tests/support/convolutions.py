"""Convolutions by PyTorch, and their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime
import torch

import ortgrad

CONVOLUTIONS = {
    1: torch.nn.functional.conv1d,
    2: torch.nn.functional.conv2d,
    3: torch.nn.functional.conv3d,
}


def torch_pads(sizes: list[int], kernel: list[int], attributes: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(before, after) for each dimension, SAME as ONNX defines it."""
    rank = len(sizes)
    if attributes.get("auto_pad", "NOTSET").startswith("SAME"):
        pads = []
        for i in range(rank):
            stride = attributes.get("strides", [1] * rank)[i]
            extent = (kernel[i] - 1) * attributes.get("dilations", [1] * rank)[i] + 1
            total = max((-(-sizes[i] // stride) - 1) * stride + extent - sizes[i], 0)
            upper = attributes["auto_pad"] == "SAME_UPPER"
            pads.append((total // 2, total - total // 2) if upper else (total - total // 2, total // 2))
        return pads
    flat = attributes.get("pads", [0] * 2 * rank)
    return list(zip(flat[:rank], flat[rank:], strict=True))


def forward(x: torch.Tensor, w: torch.Tensor, attributes: Mapping[str, Any]) -> torch.Tensor:
    pads = torch_pads(list(x.shape[2:]), list(w.shape[2:]), attributes)
    padded = torch.nn.functional.pad(x, [n for pair in reversed(pads) for n in pair])
    return CONVOLUTIONS[x.ndim - 2](
        padded,
        w,
        stride=attributes.get("strides", 1),
        dilation=attributes.get("dilations", 1),
        groups=attributes.get("group", 1),
    )


def make_feeds(
    x_shape: list[int], w_shape: list[int], attributes: Mapping[str, Any], dtype: Any
) -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    x, w = random.standard_normal(x_shape), random.standard_normal(w_shape)
    y = forward(torch.tensor(x), torch.tensor(w), attributes)
    feeds = {"dY": random.standard_normal(tuple(y.shape)), "X": x, "W": w}
    return {name: array.astype(dtype) for name, array in feeds.items()}


def expected(feeds: Mapping[str, np.ndarray], attributes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """PyTorch's gradients, computed in float64."""
    x, w = (torch.tensor(feeds[name].astype(np.float64), requires_grad=True) for name in ("X", "W"))
    bias = torch.zeros(len(w), dtype=torch.float64, requires_grad=True)
    y = forward(x, w, attributes) + bias.reshape(-1, *[1] * (x.ndim - 2))
    y.backward(torch.tensor(feeds["dY"].astype(np.float64)))
    gradients = {"dX": x.grad, "dW": w.grad, "dB": bias.grad}
    return {name: g.numpy().astype(feeds["X"].dtype) for name, g in gradients.items() if g is not None}


def node_for(
    feeds: Mapping[str, np.ndarray], attributes: Mapping[str, Any], outputs: Any = ("dX", "dW", "dB")
) -> Any:
    # Nothing else tells a body the kernel's size if the dimensions are symbolic.
    kernel_shape = list(feeds["W"].shape[2:])
    return ortgrad.nodes.conv_grad("dY", "X", "W", list(outputs), kernel_shape=kernel_shape, **attributes)


def check_threads(x: list[int], w: list[int], attributes: Mapping[str, Any]) -> None:
    """Compiled gradients are the same on any number of threads."""
    feeds = make_feeds(x, w, attributes, np.float32)
    model = ortgrad.nodes.make_model(node_for(feeds, attributes))
    results = []
    for threads in (1, 2, 5):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        results.append(ortgrad.InferenceSession(model, options, kernels="compiled").run(None, feeds))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
