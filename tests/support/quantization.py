"""Quantized models, and fake quantization in PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper

import ortgrad

RANGES = {
    "uint8": (0, 255),
    "int8": (-128, 127),
    "uint16": (0, 65535),
    "int16": (-32768, 32767),
    "uint4": (0, 15),
    "int4": (-8, 7),
}


TYPES = {name: getattr(TensorProto, name.upper()) for name in RANGES}


def uniform(low: float, high: float, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


def integers(name: str, values: Any, kind: str) -> TensorProto:
    array = np.asarray(values)
    return helper.make_tensor(name, TYPES[kind], array.shape, array.reshape(-1).tolist())


def make_model(
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, np.ndarray],
    initializers: list[TensorProto],
    opset: int = 21,
    output: str = "y",
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(k, TensorProto.FLOAT, v.shape) for k, v in inputs.items()],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        initializers,
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def gradients(
    model: onnx.ModelProto, feeds: dict[str, np.ndarray], wrt: list[str], kernels: str = "auto"
) -> dict[str, np.ndarray]:
    """The gradients of the sum of y * cos(0, 1, 2, ...), and y itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built = ortgrad.build_gradient_model(model, wrt=wrt)
    if kernels == "plain":
        session: Any = onnxruntime.InferenceSession(built.SerializeToString())
    else:
        session = ortgrad.InferenceSession(built, kernels=kernels)
    output = model.graph.output[0].name
    (y,) = onnxruntime.InferenceSession(model.SerializeToString()).run([output], feeds)
    found = session.run([f"{name}_grad" for name in wrt], {**feeds, f"{output}_grad": seed_of(y)})
    return {"y": y, **dict(zip(wrt, found, strict=True))}


def seed_of(y: np.ndarray) -> np.ndarray:
    return np.cos(np.arange(y.size)).reshape(y.shape).astype(y.dtype)


def close(found: np.ndarray, expected: Any, tolerance: float = 1e-4) -> None:
    expected = np.asarray(expected.detach() if isinstance(expected, torch.Tensor) else expected)
    assert found.shape == expected.shape
    scale = max(float(np.abs(expected).max()), 1e-6)
    np.testing.assert_allclose(found / scale, expected / scale, rtol=0, atol=tolerance)


def fake(x: torch.Tensor, scale: torch.Tensor, zero: Any, kind: str, axis: int = 0) -> torch.Tensor:
    """PyTorch's fake quantization with a gradient of the scale."""
    zeros = torch.tensor(np.asarray(zero), dtype=torch.float32)
    low, high = RANGES[kind]
    if scale.ndim == 0:
        return torch._fake_quantize_learnable_per_tensor_affine(
            x, scale.reshape(1), zeros.reshape(1), low, high, 1.0
        )
    return torch._fake_quantize_learnable_per_channel_affine(
        x, scale, zeros.reshape(-1), axis, low, high, 1.0
    )


def tracked(feeds: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(array, requires_grad=True) for name, array in feeds.items()}
