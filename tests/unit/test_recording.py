"""Writing rules and bodies: arithmetic on values, element-wise rules, attributes, names of operators."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from support import PATIENCE

import ortgrad
from ortgrad.autodiff import rules
from ortgrad.autodiff.rules import ForwardNode, elementwise, gradient
from ortgrad.errors import RegistrationError
from ortgrad.graph.recorder import Recorder
from ortgrad.operators.declaration import all_operators

DOMAIN = "test.recording"
OPSET = 18
X = np.array([[0.5, -1.5, 2.0], [3.0, 0.25, -4.0]], np.float32)


def value(name: str, dtype: ir.DataType | None = ir.DataType.FLOAT, shape: Any = (2, 3)) -> ir.Value:
    return ir.Value(
        name=name, type=None if dtype is None else ir.TensorType(dtype), shape=ir.Shape(list(shape))
    )


def recorded(op: Recorder) -> list[str]:
    return [node.op_type for node in op.nodes if node.op_type != "Constant"]


def evaluate(op: Recorder, inputs: list[ir.Value], output: ir.Value, *arrays: np.ndarray) -> np.ndarray:
    """What the recorded nodes compute, by onnx's reference evaluator."""
    output.shape = None
    graph = ir.Graph(inputs, [output], nodes=op.nodes, name="g", opset_imports={"": OPSET})
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    feeds = {v.name: array for v, array in zip(inputs, arrays, strict=True)}
    return ReferenceEvaluator(model).run(None, feeds)[0]


@pytest.fixture
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that a test declares are gone after it."""
    monkeypatch.setattr(rules, "_rules", dict(rules._rules))


# Arithmetic on values


def test_arithmetic_records_the_operators_in_the_order_of_python() -> None:
    op, x, y = Recorder(OPSET), value("x"), value("y")
    with op.arithmetic():
        result = -(1.0 - x * y) / (2.0 + y) - 0.5 * (3.0 / y)
    assert recorded(op) == ["Mul", "Sub", "Neg", "Add", "Div", "Div", "Mul", "Sub"]
    expected = -(1 - X * X) / (2 + X) - 0.5 * (3 / X)
    np.testing.assert_allclose(evaluate(op, [x, y], result, X, X), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "dtype", [ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16]
)
def test_a_float_takes_the_element_type_of_the_value_beside_it(dtype: ir.DataType) -> None:
    op, x = Recorder(OPSET), value("x", dtype)
    with op.arithmetic():
        results = [x * 0.1, 0.1 * x, x - 0.1, 0.1 - x, x / 0.1, 0.1 / x, x + 0.1, 0.1 + x]
    (constant,) = [node for node in op.nodes if node.op_type == "Constant"]
    assert constant.outputs[0].dtype == dtype
    assert {result.dtype for result in results} == {dtype}


def test_where_no_type_is_known_a_float_is_cast_at_run_time() -> None:
    op, x = Recorder(OPSET), value("x", None)
    with op.arithmetic():
        result = x * 0.1
    assert recorded(op) == ["CastLike", "Mul"]
    x.type = ir.TensorType(ir.DataType.FLOAT)
    actual = evaluate(op, [x], result, X)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, X * np.float32(0.1), rtol=1e-6)


def test_an_int_is_an_int64_and_division_rounds_towards_zero() -> None:
    op, n = Recorder(OPSET), value("n", ir.DataType.INT64, (3,))
    with op.arithmetic():
        result = (n - 1) / 2
    assert result.dtype == ir.DataType.INT64
    lengths = np.array([4, 5, -4], np.int64)
    assert evaluate(op, [n], result, lengths).tolist() == [1, 2, -2]


def test_lists_are_vectors_on_either_side() -> None:
    op, n = Recorder(OPSET), value("n", ir.DataType.INT64, (3,))
    with op.arithmetic():
        result = [1, 2, 3] * n + [1]
    assert evaluate(op, [n], result, np.array([4, 5, 6], np.int64)).tolist() == [5, 11, 19]


def test_equal_expressions_are_recorded_once() -> None:
    op, x, y = Recorder(OPSET), value("x"), value("y")
    with op.arithmetic():
        assert x * y is x * y
        assert x * 2.0 is x * 2.0
        assert x * y is not y * x
    assert recorded(op) == ["Mul", "Mul", "Mul"]


def test_values_have_no_arithmetic_outside() -> None:
    op, x = Recorder(OPSET), value("x")
    with op.arithmetic():
        pass
    with pytest.raises(ValueError, match="handler"):
        x * x


def test_the_innermost_recorder_records() -> None:
    outer, inner, x = Recorder(OPSET), Recorder(OPSET), value("x")
    with outer.arithmetic():
        with inner.arithmetic():
            x + x
        x * x
    assert recorded(inner) == ["Add"]
    assert recorded(outer) == ["Mul"]


def test_subgraphs_record_their_own_arithmetic() -> None:
    op, x = Recorder(OPSET), value("x")

    def positive(op: Recorder) -> list[ir.Value]:
        doubled = x * 2.0
        test = op.Greater(op.ReduceMax(doubled, keepdims=0), 5.0)
        inner: ir.Value = op.If(
            test,
            then_branch=op.subgraph("large", [], lambda op: [doubled - 1.0]),
            else_branch=op.subgraph("small", [], lambda op: [doubled + 1.0]),
        )
        inner.type = x.type
        return [inner * x]

    with op.arithmetic():
        condition = op.Greater(op.ReduceSum(x, keepdims=0), 0.0)
        branch = op.If(
            condition,
            then_branch=op.subgraph("positive", [], positive),
            else_branch=op.subgraph("negative", [], lambda op: [-x]),
        )
        branch.type = x.type
        result = branch / 4.0
    assert recorded(op) == ["ReduceSum", "Greater", "If", "Div"]
    np.testing.assert_allclose(evaluate(op, [x], result, X), (2 * X - 1) * X / 4, rtol=1e-6)


def test_an_error_ends_the_arithmetic() -> None:
    op, x = Recorder(OPSET), value("x")
    with pytest.raises(ZeroDivisionError), op.arithmetic():
        x * (1 / 0)
    with pytest.raises(ValueError, match="handler"):
        x * x


def test_two_threads_record_at_once() -> None:
    barrier = threading.Barrier(2, timeout=PATIENCE)
    recorders = [Recorder(OPSET), Recorder(OPSET)]
    failures: list[BaseException] = []

    def record(number: int) -> None:
        op, x = recorders[number], value(f"x{number}")
        try:
            for _ in range(20):
                barrier.wait()
                with op.arithmetic():
                    barrier.wait()
                    x = x * x if number else x + x
                    # The other one may leave while this one goes on.
                    if number:
                        barrier.wait()
                        x = -x
                if not number:
                    barrier.wait()
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=record, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert recorded(recorders[0]) == ["Add"] * 20
    assert recorded(recorders[1]) == ["Mul", "Neg"] * 20
    with pytest.raises(ValueError, match="handler"):
        value("x") * value("x")


class Spy:
    """Another library's handler of arithmetic."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, op_type: str) -> Any:
        return lambda *operands: self.calls.append(op_type) or operands[0]


@pytest.fixture
def spy() -> Iterator[Spy]:
    spy = Spy()
    previous = ir.set_value_magic_handler(spy)
    yield spy
    ir.set_value_magic_handler(previous)


def test_the_handler_of_somebody_else_is_put_back(spy: Spy) -> None:
    op, x = Recorder(OPSET), value("x")
    x + x
    with op.arithmetic():
        x * x
    x - x
    with pytest.raises(KeyError), op.arithmetic():
        raise KeyError
    x / x
    assert spy.calls == ["Add", "Sub", "Div"]
    assert recorded(op) == ["Mul"]


def test_other_threads_keep_the_handler_of_somebody_else(spy: Spy) -> None:
    op, x = Recorder(OPSET), value("x")
    with op.arithmetic():
        other = threading.Thread(target=lambda: x - x)
        other.start()
        other.join()
        x * x
    assert spy.calls == ["Sub"]
    assert recorded(op) == ["Mul"]


def test_a_thread_without_a_recorder_has_no_arithmetic() -> None:
    op, x, errors = Recorder(OPSET), value("x"), []

    def multiply() -> None:
        try:
            x * x
        except ValueError as error:
            errors.append(str(error))

    with op.arithmetic():
        other = threading.Thread(target=multiply)
        other.start()
        other.join()
    assert len(errors) == 1
    assert "handler" in errors[0]
    assert not op.nodes


def test_building_models_leaves_the_handler_of_somebody_else(spy: Spy) -> None:
    ortgrad.build_gradient_model(custom_model("Mul", [X, X], domain=""), wrt=["a"])
    value("x") + value("x")
    assert spy.calls == ["Add"]


# Element-wise rules


def custom_model(
    op_type: str, arrays: list[np.ndarray], domain: str = DOMAIN, **attributes: Any
) -> onnx.ModelProto:
    """A model of one node; inputs are a, b, ..., the output y has the broadcast shape."""
    names = list("abc"[: len(arrays)])
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    graph = helper.make_graph(
        [helper.make_node(op_type, names, ["y"], name="node", domain=domain, **attributes)],
        "graph",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, a.shape)
            for name, a in zip(names, arrays, strict=True)
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
    )
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


class Blend(OpRun):
    """y = a * b * gain + a"""

    op_domain = DOMAIN

    def _run(self, a: np.ndarray, b: np.ndarray, gain: float = 0.0) -> tuple[np.ndarray]:  # type: ignore[override]
        return ((a * b * gain + a).astype(np.float32),)


def blend_gradients(wrt: list[str], dy: np.ndarray) -> list[np.ndarray]:
    model = custom_model("Blend", [X, X[0]], gain=0.5)
    built = ortgrad.build_gradient_model(model, wrt=wrt)
    session = ReferenceEvaluator(built, new_ops=[Blend])
    return session.run([f"{name}_grad" for name in wrt], {"a": X, "b": X[0], "y_grad": dy})


DY = np.linspace(-1, 2, 6, dtype=np.float32).reshape(2, 3)


def test_one_function_per_input_and_broadcasting_is_undone(own_rules: None) -> None:
    elementwise(
        "Blend",
        lambda op, dy, y, a, b, *, gain: dy * (b * gain + 1.0),
        lambda op, dy, y, a, b, *, gain: dy * a * gain,
        domain=DOMAIN,
    )
    da, db = blend_gradients(["a", "b"], DY)
    np.testing.assert_allclose(da, DY * (X[0] * 0.5 + 1), rtol=1e-6)
    np.testing.assert_allclose(db, (DY * X * 0.5).sum(axis=0), rtol=1e-6)


def test_the_output_and_all_attributes_are_at_hand(own_rules: None) -> None:
    seen = []

    def first(op: Recorder, dy: Any, y: Any, a: Any, b: Any, **attributes: Any) -> Any:
        seen.append(attributes)
        return dy * (y / a)

    elementwise("Blend", first, None, domain=DOMAIN)
    (da,) = blend_gradients(["a"], DY)
    np.testing.assert_allclose(da, DY * (X[0] * 0.5 + 1), rtol=1e-5)
    assert seen == [{"gain": 0.5}]


def test_none_is_an_input_without_gradient(own_rules: None) -> None:
    elementwise("Blend", lambda op, dy, y, a, b: dy * 2.0, None, domain=DOMAIN)
    da, db = blend_gradients(["a", "b"], DY)
    np.testing.assert_allclose(da, DY * 2)
    np.testing.assert_array_equal(db, np.zeros(3, np.float32))


def test_functions_for_gradients_that_nobody_needs_are_not_called(own_rules: None) -> None:
    elementwise("Blend", lambda op, dy, y, a, b: 1 / 0, lambda op, dy, y, a, b: dy, domain=DOMAIN)
    (db,) = blend_gradients(["b"], DY)
    np.testing.assert_allclose(db, DY.sum(axis=0), rtol=1e-6)


def test_a_second_rule_is_refused(own_rules: None) -> None:
    with pytest.raises(RegistrationError, match="Exp has a gradient rule already"):
        elementwise("Exp", lambda op, dy, y, x: dy)


def test_a_rule_may_return_a_single_gradient_or_none(own_rules: None) -> None:
    @gradient("Blend", domain=DOMAIN)
    def blend_gradient(node: ForwardNode) -> ir.Value | None:
        return node.grad(0) * 3.0 if node.wants(0) else None

    (da,) = blend_gradients(["a"], DY)
    np.testing.assert_allclose(da, DY * 3)
    (db,) = blend_gradients(["b"], DY)
    np.testing.assert_array_equal(db, np.zeros(3, np.float32))


# Tracebacks


def frames_of(model: onnx.ModelProto, error: type[Exception]) -> list[str]:
    with pytest.raises(error) as caught:
        ortgrad.build_gradient_model(model, wrt=["a"])
    return [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_a_traceback_shows_the_operator_of_an_element_wise_rule(own_rules: None) -> None:
    elementwise("Blend", lambda op, dy, y, a, b: dy * (1 / 0), domain=DOMAIN)
    assert frames_of(custom_model("Blend", [X, X]), ZeroDivisionError)[-1] == "gradient_of_Blend"


def test_a_function_keeps_its_name_in_a_traceback(own_rules: None) -> None:
    def slope(op: Recorder, dy: Any, y: Any, a: Any, b: Any) -> Any:
        return dy * (1 / 0)

    elementwise("Blend", slope, domain=DOMAIN)
    assert frames_of(custom_model("Blend", [X, X]), ZeroDivisionError)[-1] == "slope"


def test_no_rule_and_no_body_is_nameless() -> None:
    functions = [rule.function for rule in rules.all_rules().values() if rule.function is not None]
    functions += [operator.body for operator in all_operators() if operator.body is not None]
    assert len(functions) > 150
    assert not {function.__name__ for function in functions} & {"_", "<lambda>", "rule"}


# Names of operators, and attributes


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("Rehsape", "Reshape"),
        ("Softmaxgrad_13", "SoftmaxGrad_13"),
        ("Matmul", "MatMul"),
        ("ReluGard", "ReluGrad"),
    ],
)
def test_an_unknown_operator_is_an_error_that_offers_a_known_one(written: str, meant: str) -> None:
    op = Recorder(OPSET)
    with pytest.raises(AttributeError, match=f"{written!r}; did you mean {meant!r}?"):
        getattr(op, written)(value("x"))
    assert not op.nodes


@pytest.mark.parametrize("written", ["Multply", "Flurb", "Gelu"])  # Gelu is there from opset 20 on
def test_an_unknown_operator_is_never_recorded(written: str) -> None:
    op = Recorder(OPSET)
    with pytest.raises(AttributeError, match=f"neither opset 18 of ONNX nor ortgrad has .* {written!r}"):
        getattr(op, written)(value("x"))
    assert not op.nodes


def test_a_misspelled_operator_fails_in_the_line_that_has_it(own_rules: None) -> None:
    @gradient("Blend", domain=DOMAIN)
    def blend_gradient(node: ForwardNode) -> ir.Value:
        return node.op.Multply(node.grad(0), node.input(1))

    with pytest.raises(AttributeError, match="'Multply'") as caught:
        ortgrad.build_gradient_model(custom_model("Blend", [X, X]), wrt=["a"])
    lines = {frame.name: frame.line for frame in traceback.extract_tb(caught.value.__traceback__)}
    assert "node.op.Multply" in (lines["blend_gradient"] or "")


def test_an_operator_of_another_domain_is_recorded_as_it_is() -> None:
    op = Recorder(OPSET)
    op.Flurb(value("x"), _domain="com.example")
    assert [(node.domain, node.op_type) for node in op.nodes] == [("com.example", "Flurb")]


def test_small_names_are_not_operators() -> None:
    with pytest.raises(AttributeError):
        Recorder(OPSET).shape(value("x"))


def test_attributes_of_the_forward_operator_are_left_out() -> None:
    op, x = Recorder(OPSET), value("x")
    op.DropoutGrad(x, value("mask", ir.DataType.BOOL), seed=7)
    op.LeakyReluGrad(x, x, alpha=0.5)
    assert [list(node.attributes) for node in op.nodes] == [[], ["alpha"]]


ATTRIBUTES: list[tuple[str, dict[str, Any], str]] = [
    ("Softmax", {"axis": 0}, "SoftmaxGrad_13"),
    ("LogSoftmax", {"axis": 0}, "LogSoftmaxGrad_13"),
    ("LeakyRelu", {"alpha": 0.3}, "LeakyReluGrad"),
    ("Swish", {"alpha": 0.7}, "QuickGeluGrad"),
]


@pytest.mark.parametrize(("op_type", "given", "name"), ATTRIBUTES)
def test_attributes_reach_the_gradient_node(op_type: str, given: dict[str, Any], name: str) -> None:
    model = custom_model(op_type, [X], domain="", **given)
    model.opset_import[0].version = 24
    built = ortgrad.build_gradient_model(model, wrt=["a"])
    (node,) = [node for node in built.graph.node if node.op_type == name]
    found = {a.name: helper.get_attribute_value(a) for a in node.attribute if a.name in given}
    assert found == pytest.approx(given)
