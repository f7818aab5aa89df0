"""Nodes that are differentiated through a body: functions of the model, and functions of the schemas."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper

import ortgrad
from ortgrad.autodiff.rules import _rules
from ortgrad.graph.names import Names
from ortgrad.graph.schema_functions import open_schema_function

F = TensorProto.FLOAT
# Per operator: its inputs (element type, shape) and attributes.
SCHEMA_FUNCTIONS = {
    "Celu": ([(F, [3, 4])], {"alpha": 2.0}),
    "CenterCropPad": ([(F, [5, 4]), np.array([3, 6])], {}),
    "Clip": ([(F, [3, 4]), np.float32(-0.5), np.float32(0.5)], {}),
    "Elu": ([(F, [3, 4])], {"alpha": 0.5}),
    "Gelu": ([(F, [3, 4])], {"approximate": "tanh"}),
    "GroupNormalization": ([(F, [2, 4, 3]), (F, [4]), (F, [4])], {"num_groups": 2}),
    "HardSigmoid": ([(F, [3, 4])], {}),
    "HardSwish": ([(F, [3, 4])], {}),
    "LayerNormalization": ([(F, [2, 3, 4]), (F, [4]), (F, [4])], {}),
    "LeakyRelu": ([(F, [3, 4])], {"alpha": 0.2}),
    "LogSoftmax": ([(F, [3, 4])], {"axis": 0}),
    "MeanVarianceNormalization": ([(F, [2, 3, 4, 5])], {}),
    "Mish": ([(F, [3, 4])], {}),
    "NegativeLogLikelihoodLoss": ([(F, [3, 4]), np.array([1, 0, 3])], {}),
    "PRelu": ([(F, [3, 4]), (F, [4])], {}),
    "RMSNormalization": ([(F, [2, 3, 4]), (F, [4])], {}),
    "ReduceL1": ([(F, [3, 4]), np.array([1])], {}),
    "ReduceL2": ([(F, [3, 4]), np.array([0])], {}),
    "ReduceLogSumExp": ([(F, [3, 4]), np.array([0])], {}),
    "ReduceSumSquare": ([(F, [3, 4])], {}),
    "Relu": ([(F, [3, 4])], {}),
    "Selu": ([(F, [3, 4])], {}),
    "Shrink": ([(F, [3, 4])], {"lambd": 0.3, "bias": 0.1}),
    "Softmax": ([(F, [3, 4])], {}),
    "SoftmaxCrossEntropyLoss": ([(F, [3, 4]), np.array([1, 0, 3])], {}),
    "Softplus": ([(F, [3, 4])], {}),
    "Softsign": ([(F, [3, 4])], {}),
    "ThresholdedRelu": ([(F, [3, 4])], {"alpha": 0.4}),
}


def one_node(op_type: str, opset: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    inputs, attributes = SCHEMA_FUNCTIONS[op_type]
    generator = np.random.default_rng(0)
    feeds, infos, initializers = {}, [], []
    for i, item in enumerate(inputs):
        name = f"x{i}"
        if isinstance(item, tuple):
            shape = item[1]
            if op_type == "GroupNormalization" and opset < 21 and i:
                shape = [2]  # one per group
            feeds[name] = generator.standard_normal(shape).astype(np.float32)
            infos.append(helper.make_tensor_value_info(name, F, [f"{name}_{k}" for k in range(len(shape))]))
        else:
            initializers.append(onnx.numpy_helper.from_array(np.asarray(item), name))
    node = helper.make_node(op_type, [f"x{i}" for i in range(len(inputs))], ["y"], name="node", **attributes)
    graph = helper.make_graph(
        [node], "graph", infos, [helper.make_tensor_value_info("y", F, None)], initializers
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), feeds


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


@pytest.mark.parametrize("opset", [18, 20, 21, 23, 24])
@pytest.mark.parametrize("op_type", SCHEMA_FUNCTIONS)
def test_a_body_computes_what_the_node_computes(op_type: str, opset: int) -> None:
    if not onnx.defs.has(op_type, opset):
        return
    model, feeds = one_node(op_type, opset)
    opened = ir.from_proto(model)
    (node,) = opened.graph
    assert open_schema_function(node, opened.opset_imports, Names.of(opened))
    proto = ir.to_proto(opened)
    assert op_type not in {node.op_type for node in proto.graph.node}
    np.testing.assert_allclose(run(proto, feeds), run(model, feeds), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [18, 24])
@pytest.mark.parametrize("op_type", ["Celu", "HardSwish", "PRelu", "LeakyRelu"])
def test_a_node_without_a_rule_is_differentiated_through_its_body(
    op_type: str, opset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(_rules, ("", op_type), raising=False)
    model, feeds = one_node(op_type, opset)
    ortgrad.check_gradients(model, feeds).raise_if_wrong()


def test_only_nodes_on_the_path_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(_rules, ("", "Celu"), raising=False)
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        agraph (float[N] x, float[N] z) => (float[N] y, float[N] other) {
            a = Celu(x)
            b = Celu(z)
            y = Mul(a, b)
            other = Celu(y)
        }"""
    )
    built = ortgrad.build_gradient_model(model, wrt="x", of="y")
    assert [node.op_type for node in built.graph.node].count("Celu") == 2


def test_a_body_in_a_subgraph_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(_rules, ("", "Celu"), raising=False)
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        agraph (bool c, float[N] x) => (float[N] y) {
            y = If (c) <
                then_branch = t () => (float[N] a) { a = Celu(x) },
                else_branch = e () => (float[N] b) { b = Mul(x, x) }
            >
        }"""
    )
    for flag in (True, False):
        ortgrad.check_gradients(model, {"c": np.array(flag)}).raise_if_wrong()


def functions(*texts: str) -> list[onnx.FunctionProto]:
    return [onnx.parser.parse_function(text) for text in texts]


def test_functions_with_overloads_attributes_and_calls() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21, "my" : 1]>
        g (float[N,3] x, float[3] w) => (float[N,3] y) {
            a = my.power:two(x)
            b = my.power:three(x)
            c = Add(a, b)
            d = my.outer <k = 2.0> (c, w)
            e = my.outer(c, w)
            y = Add(d, e)
        }"""
    )
    model.functions.extend(
        functions(
            '<opset_import: ["" : 21], domain: "my", overload: "two"> power (x) => (y) { y = Mul(x, x) }',
            '<opset_import: ["" : 21], domain: "my", overload: "three"> power (x) => (y) '
            "{ t = Mul(x, x) y = Mul(t, x) }",
            '<opset_import: ["" : 21, "my" : 1], domain: "my"> outer <k: float = 3.0> (x, w) => (y) '
            "{ c = Constant <value_float: float = @k> () s = my.times <q: float = @k> (x) "
            "t = Mul(s, c) y = Mul(t, w) }",
            '<opset_import: ["" : 21], domain: "my"> times <q> (x) => (y) '
            "{ c = Constant <value_float: float = @q> () y = Mul(x, c) }",
        )
    )
    check = ortgrad.check_gradients(model, per_node=True)
    check.raise_if_wrong()
    assert check.forward == "float64 on onnxruntime"


@pytest.mark.parametrize("own", [13, 18, 21])
def test_functions_of_another_opset(own: int) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21, "my" : 1]>
        g (float[N,3] x, float[3] w) => (float[N,3] y) { a = my.square(x) y = Mul(a, w) }"""
    )
    model.functions.extend(
        functions(
            f'<opset_import: ["" : {own}], domain: "my"> square (x) => (y) '
            "{ i = Identity(x) y = Mul(i, x) }"
        )
    )
    ortgrad.check_gradients(model).raise_if_wrong()


def test_a_function_that_cannot_be_converted() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 13, "my" : 1]>
        g (float[N,3] x) => (float[N,3] y) { y = my.square(x) }"""
    )
    model.functions.extend(
        functions(
            '<opset_import: ["" : 18], domain: "my"> square (x) => (y) { i = Identity(x) y = Mul(i, x) }'
        )
    )
    with pytest.raises(ortgrad.ModelError, match="cannot be inlined"):
        ortgrad.build_gradient_model(model, wrt="x")


def test_functions_that_call_each_other() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21, "my" : 1]>
        g (float[N] x) => (float[N] y) { y = my.ping(x) }"""
    )
    model.functions.extend(
        functions(
            '<opset_import: ["" : 21, "my" : 1], domain: "my"> ping (x) => (y) { y = my.pong(x) }',
            '<opset_import: ["" : 21, "my" : 1], domain: "my"> pong (x) => (y) { y = my.ping(x) }',
        )
    )
    with pytest.raises(ortgrad.ModelError, match="cannot be inlined"):
        ortgrad.build_gradient_model(model, wrt="x")
