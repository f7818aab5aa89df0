"""Node builders: complete nodes, and clear errors for what does not fit."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import ortgrad
from ortgrad import nodes
from ortgrad.operators.declaration import Operator, all_operators

# With outputs that a node may leave out.
OPTIONAL = [operator for operator in all_operators() if any(output.optional for output in operator.outputs)]


def attributes(node: onnx.NodeProto) -> dict:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def test_a_complete_node() -> None:
    node = nodes.conv_grad("dY", "X", "W", ["dX", "dW", "dB"], pads=[1, 1, 1, 1])
    assert (node.domain, node.op_type) == ("com.microsoft", "ConvGrad")
    assert list(node.input) == ["dY", "X", "W"]
    assert list(node.output) == ["dX", "dW", "dB"]
    assert attributes(node)["pads"] == [1, 1, 1, 1]
    call = json.loads(attributes(node)["ortgrad"])
    assert call["attributes"]["pads"] == [1, 1, 1, 1]
    assert call["inputs"] == [1, 1, 1]
    assert call["outputs"] == [1, 1, 1]


def test_unwanted_outputs_and_absent_inputs_are_named() -> None:
    node = nodes.conv_grad("dY", "X", "W", [None, "dW"], kernel_shape=[3, 3])
    assert all(node.output)
    assert json.loads(attributes(node)["ortgrad"])["outputs"] == [0, 1, 0]
    node = nodes.dropout_grad("dY", outputs="dX")
    assert all(node.input)
    assert json.loads(attributes(node)["ortgrad"])["inputs"] == [1, 0, 0, 0]


def test_floats_travel_exactly() -> None:
    node = nodes.leaky_relu_grad("dY", "Y", "dX", alpha=0.1)
    dy = np.array([1.0])
    for kernels in ("python", "onnx"):
        session = ortgrad.InferenceSession(nodes.make_model(node, dtype=np.float64), kernels=kernels)
        assert session.run(None, {"dY": dy, "Y": -dy})[0] == 0.1


def test_inputs_and_outputs_by_keyword() -> None:
    by_position = nodes.relu_grad("a", "b", "c", name="n")
    assert nodes.relu_grad(X="b", dY="a", outputs=["c"], name="n") == by_position
    assert list(nodes.relu_grad("a", "b").output) == ["dX"]


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: nodes.relu_grad("dY"), "needs its input X"),
        (lambda: nodes.relu_grad("dY", "X", ["dX", "more"]), "has 1 outputs, 2 names"),
        (lambda: nodes.relu_grad("dY", "X", [None]), "needs a name for its output dX"),
        (lambda: nodes.conv_grad("dY", "X", "W", [None, None, None]), "at least one output"),
        (lambda: nodes.relu_grad("dY", "X", "dX", alpha=1.0), "no argument 'alpha'"),
        (lambda: nodes.leaky_relu_grad("dY", "Y", "dX", alpha="steep"), "'alpha' takes float"),
        (lambda: nodes.leaky_relu_grad("dY", "Y", "dX", alpha=float("nan")), "must be finite"),
        (lambda: nodes.conv_grad("dY", "X", "W", "dX", pads=1), "'pads' takes a list of int"),
        (lambda: nodes.conv_grad("dY", "X", "W", "dX", auto_pad="SAME"), "must be one of NOTSET"),
        (lambda: nodes.make_model(nodes.relu_grad("a", "b", "c"), shapes={"d": [1]}), "'d'"),
        (lambda: nodes.make_model(helper.make_node("Relu", ["a"], ["b"])), "not Relu"),
    ],
)
def test_what_does_not_fit(build, text: str) -> None:
    with pytest.raises(ortgrad.OrtgradError, match=text):
        build()


def test_wrong_calls_are_type_errors() -> None:
    with pytest.raises(TypeError, match="got 4 arguments"):
        nodes.relu_grad("a", "b", "c", "d")
    with pytest.raises(TypeError, match="'X' twice"):
        nodes.relu_grad("a", "b", X="b")
    with pytest.raises(AttributeError, match="no_such_grad"):
        nodes.no_such_grad("a")


def test_a_model_of_several_nodes_runs_anywhere() -> None:
    model = nodes.make_model(
        [nodes.tanh_grad("dY", "Y", "dT"), nodes.relu_grad("dT", "X", "dX")],
        shapes={n: ["N", 2] for n in ("dY", "Y", "X", "dX")},
    )
    onnx.checker.check_model(model, full_check=True)
    assert [i.name for i in model.graph.input] == ["dY", "Y", "X"]
    assert [o.name for o in model.graph.output] == ["dX"]
    feeds = {"dY": np.ones((2, 2), np.float32), "Y": np.full((2, 2), 0.5, np.float32)}
    feeds["X"] = np.float32([[1, -1], [0, 2]])
    plain = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(plain.run(None, feeds)[0], [[0.75, 0], [0, 0.75]])


@pytest.mark.parametrize("operator", OPTIONAL, ids=lambda operator: operator.name)
def test_nodes_of_helper_leave_out_what_is_optional(operator: Operator) -> None:
    """Their empty names are neither inputs nor outputs of the model."""
    wanted = [parameter for parameter in operator.outputs if not parameter.optional] or operator.outputs[:1]
    inputs = [parameter.name * (not parameter.optional) for parameter in operator.inputs]
    outputs = [parameter.name * (parameter in wanted) for parameter in operator.outputs]
    # Bodies of these need the number of dimensions, or the size of the kernel.
    spatial = operator.name in ("ConvGrad", "BatchNormalizationGrad", "BatchNormInternal")
    shapes = {name: [4, 4, 3, 3] for name in ("X", "W") if spatial and name in inputs}
    node = helper.make_node(operator.name, inputs, outputs, domain=operator.domain)
    model = nodes.make_model(node, shapes=shapes)
    assert [value.name for value in model.graph.input] == list(filter(None, inputs))
    found = [value.name for value in model.graph.output]
    # An accumulator always returns its buffer.
    assert "" not in found and set(filter(None, outputs)) <= set(found)


def test_builders_explain_themselves() -> None:
    assert "dB?" in nodes.conv_grad.__doc__
    assert nodes.conv_grad.__name__ == "conv_grad"
