"""The forward pass of check_gradients in double, on onnxruntime and on the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from ortgrad.check.double_forms import FORMS, with_double_forms
from ortgrad.check.double_precision import in_double
from ortgrad.check.reference import on_reference
from ortgrad.check.running import on_onnxruntime

Arrays = dict[str, np.ndarray]
IMAGE, SIGNAL = (2, 4, 9, 11), (2, 4, 13)
WINDOWS: list[dict[str, Any]] = [
    {},
    {"pads": [1, 2, 0, 1], "strides": [2, 3]},
    {"dilations": [2, 1], "strides": [1, 2]},
    {"auto_pad": "VALID", "strides": [3, 3]},
    {"auto_pad": "SAME_UPPER", "strides": [2, 3]},
    {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
]
ERF = np.vectorize(math.erf)
EXACT: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Gelu": lambda x: 0.5 * x * (1 + ERF(x / math.sqrt(2))),
    "Gelu tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def cases() -> list[tuple[str, Arrays, dict[str, Any]]]:
    found: list[tuple[str, Arrays, dict[str, Any]]] = []
    for window in WINDOWS:
        for group in (1, 2, 4):
            feeds = {"x": drawn(*IMAGE), "w": drawn(8, 4 // group, 3, 2), "b": drawn(8)}
            found.append(("Conv", feeds, {"group": group, **window}))
        for extra in ({}, {"ceil_mode": 1}):
            if not ("auto_pad" in window and extra):
                found.append(("MaxPool", {"x": drawn(*IMAGE)}, {"kernel_shape": [3, 3], **window, **extra}))
        for count in (0, 1):
            pool = {"kernel_shape": [3, 3], "count_include_pad": count, **window}
            found.append(("AveragePool", {"x": drawn(*IMAGE)}, pool))
    found += [
        ("Conv", {"x": drawn(*SIGNAL), "w": drawn(5, 4, 3)}, {"pads": [2, 1]}),
        ("Conv", {"x": drawn(1, 2, 60), "w": drawn(6, 1, 25)}, {"group": 2, "strides": [3], "pads": [4, 1]}),
        (
            "Conv",
            {"x": drawn(2, 4, 15, 13), "w": drawn(6, 2, 5, 4), "b": drawn(6)},
            {"group": 2, "dilations": [2, 1], "strides": [1, 2], "pads": [1, 2, 3, 0]},
        ),
        ("Conv", {"x": drawn(1, 2, 5, 6, 7), "w": drawn(3, 2, 2, 3, 2)}, {"strides": [1, 2, 2]}),
        ("Resize", {"x": drawn(*IMAGE), "": np.zeros(0), "s": np.float32([1, 1, 2, 1.5])}, {}),
        ("InstanceNormalization", {"x": drawn(*IMAGE), "s": drawn(4), "b": drawn(4)}, {"epsilon": 0.1}),
        ("PRelu", {"x": drawn(*IMAGE), "s": drawn(4, 1, 1)}, {}),
        ("Gelu", {"x": drawn(*IMAGE)}, {"approximate": "tanh"}),
        ("LRN", {"x": drawn(*IMAGE)}, {"size": 3}),
    ]
    for mode in ("linear", "cubic"):
        found.append(
            ("Resize", {"x": drawn(*IMAGE), "": np.zeros(0), "s": np.float32([1, 1, 2, 1.5])}, {"mode": mode})
        )
    plain = set(FORMS) - {"Conv", "AveragePool", "Resize", "InstanceNormalization", "PRelu"}
    found += [(name, {"x": 3 * drawn(*IMAGE)}, {}) for name in sorted(plain)]
    found += [(name, {"x": drawn(*SIGNAL)}, {}) for name in ("GlobalMaxPool", "GlobalAveragePool")]
    return found


def model_of(op_type: str, feeds: Arrays, attributes: dict[str, Any]) -> onnx.ModelProto:
    node = helper.make_node(op_type, list(feeds), ["y"], **attributes)
    inputs = [
        helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for k, v in feeds.items()
        if k
    ]
    outputs = [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case[0]}-{case[2]}")
def test_in_double_as_in_float(case: tuple[str, Arrays, dict[str, Any]]) -> None:
    """On onnxruntime's own kernels in float; the two ways in double agree to much more."""
    op_type, feeds, attributes = case
    model = model_of(*case)
    feeds = {name: array for name, array in feeds.items() if name}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, feeds)
    double = in_double(model)
    reference = on_reference(double)(feeds)["y"]
    assert reference.dtype == np.float64
    np.testing.assert_allclose(reference, expected, rtol=1e-5, atol=1e-5)
    formed = with_double_forms(double)
    if op_type not in FORMS or str(attributes.get("auto_pad", "")).startswith("SAME") or "mode" in attributes:
        return  # the reference runs it
    assert not any(node.op_type == op_type for node in formed.graph.node) or op_type == "Resize"
    actual = on_onnxruntime(formed)(feeds)["y"]
    assert actual.dtype == np.float64 and actual.shape == expected.shape
    exact = EXACT.get(f"{op_type} {attributes.get('approximate', '')}".strip())
    if exact is not None:
        # The reference takes these from function bodies with constants in float.
        reference = exact(feeds["x"].astype(np.float64))
    np.testing.assert_allclose(actual, reference, rtol=1e-11, atol=1e-11)


def test_the_error_function() -> None:
    x = np.concatenate([np.linspace(-7, 7, 2001), [1.9999999, 2.0, 2.0000001, 30.0, -30.0, 1e-200]])
    model = with_double_forms(in_double(model_of("Erf", {"x": x.astype(np.float32)}, {})))
    actual = on_onnxruntime(model)({"x": x})["y"]
    np.testing.assert_allclose(actual, [math.erf(value) for value in x], rtol=4e-15)
