"""Convolutions with a bias, a sum and an activation, by PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper

from ortgrad.pipelines.prepare import prepare_loaded
from support.calls import Case
from support.geometries import pads_of

Geometry = tuple[list[int], list[int], dict[str, Any]]


CONVOLUTIONS = {
    1: torch.nn.functional.conv1d,
    2: torch.nn.functional.conv2d,
    3: torch.nn.functional.conv3d,
}


ACTIVATIONS: dict[str, tuple[dict[str, float], Any]] = {
    "": ({}, lambda y: y),
    "Relu": ({}, torch.relu),
    "LeakyRelu": ({"alpha": 0.25}, lambda y: torch.nn.functional.leaky_relu(y, 0.25)),
    "Clip": ({"alpha": -0.5, "beta": 0.75}, lambda y: torch.clamp(y, -0.5, 0.75)),
}


def make_arrays(geometry: Geometry, dtype: str) -> tuple[dict[str, np.ndarray], torch.Tensor]:
    """The inputs, and the convolution without B and Z that PyTorch computes of them in float64."""
    x_shape, w_shape, attributes = geometry
    random = np.random.default_rng(1)
    x, w = (random.standard_normal(shape).astype(dtype) for shape in (x_shape, w_shape))
    pads = pads_of(x_shape[2:], w_shape[2:], attributes)
    wide = [torch.tensor(array.astype(np.float64)) for array in (x, w)]
    padded = torch.nn.functional.pad(wide[0], [n for pair in reversed(pads) for n in pair])
    steps = {"stride": attributes.get("strides", 1), "dilation": attributes.get("dilations", 1)}
    y = CONVOLUTIONS[x.ndim - 2](padded, wide[1], **steps, groups=attributes.get("group", 1))
    b, z = (random.standard_normal(shape).astype(dtype) for shape in (w_shape[0], tuple(y.shape)))
    return {"X": x, "W": w, "B": b, "Z": z}, y


def expect(arrays: dict[str, np.ndarray], y: torch.Tensor, activation: str, inputs: str) -> np.ndarray:
    if "B" in inputs:
        y = y + torch.tensor(arrays["B"].astype(np.float64)).reshape(-1, *[1] * (y.ndim - 2))
    if "Z" in inputs:
        y = y + torch.tensor(arrays["Z"].astype(np.float64))
    result: np.ndarray = ACTIVATIONS[activation][1](y).numpy()
    return result.astype(arrays["X"].dtype)


def conv_model(
    arrays: dict[str, np.ndarray],
    attributes: dict[str, Any],
    activation: str = "",
    inputs: str = "XWB",
    *,
    dynamic: bool = False,
    constant: bool = False,
) -> onnx.ModelProto:
    """Conv, if "Z" is among the inputs an Add, and an activation; the result is Y."""
    used = {name: arrays[name] for name in inputs}
    element = helper.np_dtype_to_tensor_dtype(arrays["X"].dtype)
    shapes = {name: list(array.shape) for name, array in used.items()}
    y_shape: list[Any] = list(arrays["Z"].shape)
    if dynamic:
        y_shape = [f"y{i}" for i in range(len(y_shape))]
        shapes = {**shapes, "X": [f"x{i}" for i in range(len(y_shape))]}
    made = [helper.make_node("Conv", [n for n in "XWB" if n in inputs], ["c"], name="conv", **attributes)]
    if "Z" in inputs:
        made.append(helper.make_node("Add", ["Z", "c"], ["s"]))
    initializers = []
    if activation == "Clip":
        bounds = ACTIVATIONS["Clip"][0]
        for name, bound in bounds.items():
            initializers.append(onnx.numpy_helper.from_array(np.array(bound, arrays["X"].dtype), name))
        made.append(helper.make_node("Clip", [made[-1].output[0], *bounds], ["a"]))
    elif activation:
        made.append(helper.make_node(activation, [made[-1].output[0]], ["a"], **ACTIVATIONS[activation][0]))
    made[-1].output[0] = "Y"
    # Models without gradients are not changed.
    made.append(helper.make_node("ReluGrad", ["X", "X"], ["other"], domain="com.microsoft"))
    values = [helper.make_tensor_value_info(name, element, shape) for name, shape in shapes.items()]
    if constant:
        values = [value for value in values if value.name != "W"]
        initializers.append(onnx.numpy_helper.from_array(arrays["W"], "W"))
    graph = helper.make_graph(
        made,
        "g",
        values,
        [helper.make_tensor_value_info("Y", element, y_shape)],
        initializers,
        value_info=[helper.make_tensor_value_info(n, element, y_shape) for n in ("c", "s")],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def operators_of(model: onnx.ModelProto, kernels: str = "auto") -> list[str]:
    return [n.op_type for n in prepare_loaded(model, kernels, bodies=False).graph.node][:-1]


def case_of(arrays: dict[str, np.ndarray], attributes: dict[str, Any], activation: str, inputs: str) -> Case:
    numbers = ACTIVATIONS[activation][0]
    return Case(
        "DenseConv",
        {name: arrays[name] for name in inputs},
        {**attributes, "activation": activation, **numbers},
    )
