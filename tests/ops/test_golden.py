"""Every operator against data from onnxruntime-training's own kernels, as it writes the nodes."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from support import KERNELS, GoldenCase, assert_close, golden_cases

import ortgrad
from ortgrad.operators.declaration import find_operator

ELEMENTWISE = 2e-6
OTHERS = 1e-5
CASES = [case for case in golden_cases() if find_operator(case.op_type)]


def foreign_model(case: GoldenCase) -> onnx.ModelProto:
    """The node exactly as onnxruntime-training writes it: optional inputs and outputs left out."""

    def info(name: str, array: np.ndarray, shape: list[int]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shape)

    node = helper.make_node(case.op_type, case.inputs, case.outputs, domain=case.domain, **case.attributes)
    graph = helper.make_graph(
        [node],
        case.name,
        [info(name, array, list(array.shape)) for name, array in case.feeds.items()],
        [info(name, array, list(array.shape)) for name, array in case.expected.items()],
    )
    opsets = [helper.make_opsetid("", 15), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def check(case: GoldenCase, session: onnxruntime.InferenceSession) -> None:
    outputs = dict(zip(case.expected, session.run(list(case.expected), case.feeds), strict=True))
    heavy = case.op_type in ("ConvGrad", "MaxPoolGrad", "AveragePoolGrad", "GRUGrad", "LSTMGrad")
    for name, expected in case.expected.items():
        assert_close(outputs[name], expected, OTHERS if heavy else ELEMENTWISE)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden(case: GoldenCase, kernels: str) -> None:
    check(case, ortgrad.InferenceSession(foreign_model(case), kernels=kernels))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden_in_a_plain_session(case: GoldenCase) -> None:
    options = onnxruntime.SessionOptions()
    ortgrad.register(options)
    model = ortgrad.prepare(foreign_model(case), kernels="python").SerializeToString()
    check(case, onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]))
