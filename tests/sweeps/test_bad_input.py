"""Malformed calls, hundreds of them in one process: each an exception, and the next run works."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import Fail
from support import GoldenCase, assert_close, golden_cases, symbolic_shapes

import ortgrad
from ortgrad import nodes
from ortgrad.operators.declaration import find_operator

CASES = {case.name: case for case in golden_cases() if find_operator(case.op_type)}


def dynamic_model(case: GoldenCase) -> onnx.ModelProto:
    """The golden node with nothing known of its inputs' sizes, so that onnxruntime lets all through."""
    operator = find_operator(case.op_type)
    build = getattr(nodes, operator.builder_name)
    inputs = dict(zip([slot.name for slot in operator.inputs], case.inputs, strict=False))
    if case.op_type in ("MaxPoolGrad", "AveragePoolGrad"):
        inputs["X_shape"] = "X_shape"
    floats = [a.dtype for a in case.feeds.values() if a.dtype.kind == "f"]
    node = build(**inputs, outputs=case.outputs, **case.attributes)
    feeds = feeds_of(case)
    model = nodes.make_model(node, dtype=floats[0], shapes=symbolic_shapes(feeds))
    for given in model.graph.input:
        element = onnx.helper.np_dtype_to_tensor_dtype(feeds[given.name].dtype)
        given.type.CopyFrom(onnx.helper.make_tensor_type_proto(element, None))
    for made in [*model.graph.output, *model.graph.value_info]:
        made.type.tensor_type.ClearField("shape")
    return model


def feeds_of(case: GoldenCase) -> dict[str, np.ndarray]:
    feeds = dict(case.feeds)
    if case.op_type in ("MaxPoolGrad", "AveragePoolGrad"):
        feeds["X_shape"] = np.array(case.output_shapes[0], np.int64)
    return feeds


def mutations(case: GoldenCase) -> list[tuple[str, str, np.ndarray]]:
    """One input at a time with an axis too many, too long a last axis, or nothing in it."""
    found = []
    for name, array in feeds_of(case).items():
        if array.ndim == 0 or (case.op_type.endswith("Grad_dX") and name == "B"):
            continue
        longer = np.concatenate([array, np.repeat(array[..., :1], 7, axis=-1)], axis=-1)
        found.append((name, "an axis too many", np.stack([array, array])))
        found.append((name, "too long", longer))
        found.append((name, "empty", array[..., :0]))
    return found


# More classes than labels name are no mistake.
WELL_FORMED = {("SoftmaxCrossEntropyLossGrad", "log_prob", "too long")}
MALFORMED = [
    pytest.param(name, wrong, array, id=f"{name}-{wrong}-{how.replace(' ', '_')}")
    for name, case in CASES.items()
    for wrong, how, array in mutations(case)
    if (case.op_type, wrong, how) not in WELL_FORMED
]


def test_there_are_enough_of_them() -> None:
    assert len(MALFORMED) >= 200


@pytest.fixture(scope="module")
def sessions() -> dict:
    return {}


@pytest.mark.parametrize(("name", "wrong", "array"), MALFORMED)
def test_malformed(name: str, wrong: str, array: np.ndarray, sessions: dict) -> None:
    case = CASES[name]
    if name not in sessions:
        model = dynamic_model(case)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        ortgrad.register(options)
        plain = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        sessions[name] = ortgrad.InferenceSession(model, kernels="python"), plain
    session, plain = sessions[name]
    feeds = feeds_of(case)

    with pytest.raises(ortgrad.KernelError, match=case.op_type) as caught:
        session.run(None, {**feeds, wrong: array})
    assert caught.value.reason
    with pytest.raises(Fail, match=case.op_type):
        plain.run(None, {**feeds, wrong: array})

    outputs = dict(zip(case.expected, session.run(list(case.expected), feeds), strict=True))
    for output, expected in case.expected.items():
        assert_close(outputs[output], expected, 1e-5)
