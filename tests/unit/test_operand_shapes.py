"""Operands that are a scalar where ONNX wants a vector, or a vector of one element where it wants a scalar.

onnxruntime takes many of them, and files have them. The gradient is that of the operand as it should be.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from support import KERNELS

import ortgrad

X = np.linspace(-1, 1.5, 12, dtype=np.float32).reshape(2, 1, 6)
# Operator, attributes, then the operands after X as they should be; None is an absent one.
CASES: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("Unsqueeze", {}, [np.array([1])]),
    ("Squeeze", {}, [np.array([1])]),
    *((op, {}, [np.array([2])]) for op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2", "ReduceProd")),
    ("ReduceLogSumExp", {"keepdims": 0}, [np.array([0])]),
    ("Slice", {}, [np.array([1]), np.array([4]), np.array([2]), np.array([1])]),
    ("Pad", {}, [np.array([1, 2]), np.array(0.5, np.float32), np.array([2])]),
    ("Reshape", {}, [np.array([12])]),
    ("Expand", {}, [np.array([6])]),
    ("Split", {"axis": 2}, [np.array([6])]),
    ("CumSum", {}, [np.array(2)]),
    ("Trilu", {}, [np.array(1)]),
    ("TopK", {}, [np.array([3])]),
    ("Clip", {}, [np.array(-0.5, np.float32), np.array(0.7, np.float32)]),
    ("Dropout", {}, [np.array(0.5, np.float32), np.array(False)]),
    ("Pow", {}, [np.array(2.0, np.float32)]),
    ("Gather", {"axis": 2}, [np.array([3])]),
    ("Where", {}, []),
]


def model(op: str, attributes: dict[str, Any], operands: list[Any]) -> onnx.ModelProto:
    names = [f"operand_{i}" for i in range(len(operands))]
    inputs = ["condition", "x", "x"] if op == "Where" else ["x", *names]
    node = helper.make_node(op, inputs, ["y", "other"] if op == "TopK" else ["y"], **attributes)
    tensors = [numpy_helper.from_array(array, name) for name, array in zip(names, operands, strict=True)]
    if op == "Where":
        tensors.append(numpy_helper.from_array(np.array([True]), "condition"))
    graph = helper.make_graph(
        [node],
        op,
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, X.shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def variants() -> list[Any]:
    found = []
    for op, attributes, operands in CASES:
        for i, operand in enumerate(operands):
            if operand.size == 1:
                changed = [*operands]
                changed[i] = operand.reshape(() if operand.ndim else 1)
                found.append(pytest.param(op, attributes, operands, changed, id=f"{op}-{i}"))
    return found


def quiet() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return options


def forward(given: onnx.ModelProto) -> np.ndarray:
    session = onnxruntime.InferenceSession(given.SerializeToString(), quiet())
    return session.run(["y"], {"x": X})[0]


def gradients(given: onnx.ModelProto, seed: np.ndarray) -> list[np.ndarray]:
    built = ortgrad.build_gradient_model(given, wrt="x")
    sessions = [ortgrad.InferenceSession(built, kernels=kernels) for kernels in KERNELS]
    return [session.run(["x_grad"], {"x": X, "y_grad": seed})[0] for session in sessions]


@pytest.mark.parametrize(("op", "attributes", "operands", "changed"), variants())
def test_gradient(op: str, attributes: dict[str, Any], operands: list[Any], changed: list[Any]) -> None:
    usual, given = model(op, attributes, operands), model(op, attributes, changed)
    try:
        y = forward(given)
    except Exception as error:
        assert op != "Unsqueeze" and "ONNXRuntimeError" in str(error)
        return  # onnxruntime does not take it either
    seed = np.random.default_rng(0).normal(size=y.shape).astype(np.float32)
    expected = gradients(usual, seed.reshape(forward(usual).shape))[0]
    for result in gradients(given, seed):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
