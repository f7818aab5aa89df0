"""Declarations: the schema, the stub and the docs come from them, and twice is an error."""

from __future__ import annotations

import importlib.util
import pkgutil

import numpy as np
import onnx
import pytest
from onnx import helper
from support import ROOT

import ortgrad
from ortgrad import ops
from ortgrad.autodiff.rules import gradient
from ortgrad.operators.declaration import all_operators, find_operator, operator
from ortgrad.operators.schema import schemas_known

OPERATORS = {o.name: o for o in all_operators()}


def generated() -> object:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_stub_and_operator_table_are_fresh() -> None:
    module = generated()
    assert (ROOT / "ortgrad" / "nodes.pyi").read_text() == module.stub(), "run docs/generate.py"
    assert (ROOT / "docs" / "operators.md").read_text() == module.operator_table(), "run docs/generate.py"


def test_the_seeds_are_there() -> None:
    seeds = (
        "ReluGrad SigmoidGrad TanhGrad LeakyReluGrad QuickGeluGrad SoftmaxGrad SoftmaxGrad_13 LogSoftmaxGrad "
        "LogSoftmaxGrad_13 DropoutGrad TrainableDropoutGrad ConvGrad MaxPoolGrad AveragePoolGrad GRUTraining "
        "GRUGrad"
    )
    assert set(seeds.split()) <= set(OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_is_complete(name: str) -> None:
    declared = OPERATORS[name]
    assert declared.body is not None
    assert declared.doc
    assert declared.builder_name in dir(ortgrad.nodes)
    with schemas_known():
        schema = onnx.defs.get_schema(name, 1, declared.domain)
    assert [i.name for i in schema.inputs] == [s.name for s in declared.inputs]
    assert set(schema.attributes) == {*declared.attributes, "ortgrad", "ortgrad_body"}


FAMILIES = [m.name.rpartition(".")[2] for m in pkgutil.walk_packages(ops.__path__, "ops.") if not m.ispkg]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name[0] != "_"])
def test_every_family_has_tests(family: str) -> None:
    tests = {path.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert tests & {f"test_{family}.py", f"test_rules_{family}.py"}


def test_declaring_twice_is_an_error() -> None:
    with pytest.raises(ortgrad.RegistrationError, match="declared already"):
        operator("ReluGrad", inputs=["dY"], outputs=["dX"], shapes="dY")
    with pytest.raises(ortgrad.RegistrationError, match="has a body"):
        find_operator("ReluGrad").onnx(lambda op, dy, x: dy)
    with pytest.raises(ortgrad.RegistrationError, match="rule already"):
        gradient("Relu")(lambda node: ())


def test_a_schema_from_elsewhere_is_not_overwritten() -> None:
    schema = onnx.defs.OpSchema("ElsewhereGrad", "com.example.elsewhere", 1)
    onnx.defs.register_schema(schema)
    declare = operator(
        "ElsewhereGrad", domain="com.example.elsewhere", inputs=["dY"], outputs=["dX"], shapes="dY"
    )
    try:
        with pytest.raises(ortgrad.RegistrationError, match="from elsewhere"):
            declare(lambda dy: dy)
    finally:
        onnx.defs.deregister_schema("ElsewhereGrad", 1, "com.example.elsewhere")


def test_strict_shape_inference_understands_the_nodes() -> None:
    node = ortgrad.nodes.leaky_relu_grad("dY", "Y", "dX", alpha=0.2)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["N", 3]) for n in ("dY", "Y")],
        [helper.make_tensor_value_info("dX", onnx.TensorProto.FLOAT, None)],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    with schemas_known():
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    dims = inferred.graph.output[0].type.tensor_type.shape.dim
    assert [d.dim_param or d.dim_value for d in dims] == ["N", 3]
    onnx.checker.check_model(ortgrad.prepare(inferred, kernels="python"), full_check=True)
    inferred.graph.node[0].attribute.append(helper.make_attribute("beta", 1))
    with schemas_known(), pytest.raises(onnx.checker.ValidationError, match="beta"):
        onnx.checker.check_model(inferred)


def test_an_operator_can_be_called_on_arrays() -> None:
    dy, x = np.float64([1, 2]), np.float64([-1, 1])
    np.testing.assert_array_equal(find_operator("ReluGrad")(dy, x), [0, 2])
    np.testing.assert_array_equal(dy, [1, 2])
