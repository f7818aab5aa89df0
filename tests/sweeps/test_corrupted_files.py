"""Damaged and hostile model files: an OrtgradError that says what is wrong, in reasonable time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper, parser
from support import amount
from support.scaling_models import chain
from sweeps.corruption import TEXTS, Worker, corrupted, is_allowed

import ortgrad
from ortgrad.autodiff.unbroadcast import unbroadcast
from ortgrad.graph import validation
from ortgrad.graph.loading import diagnosing
from ortgrad.graph.recorder import Recorder
from ortgrad.pipelines.explain import explain

FILES = range(amount(30, 1000))
HEAD = '<ir_version: 10, opset_import: ["" : 21, "local" : 1]>'


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def test_damaged_files(worker: Worker) -> None:
    wrong = {}
    succeeded = 0
    for seed in FILES:
        found = worker.try_file(seed)
        succeeded += found.get("build towards everything") == "ok"
        bad = {step: what for step, what in found.items() if not is_allowed(what)}
        if bad:
            wrong[seed] = corrupted(seed)[:2], bad
    assert not wrong
    # Damage that nothing survives would test the parser alone.
    assert succeeded > len(FILES) / 10


def test_files_are_damaged_the_same_way_every_time() -> None:
    assert corrupted(11) == corrupted(11) != corrupted(11 + 1)


def _model(text: str, functions: str = "") -> onnx.ModelProto:
    return parser.parse_model(f"{HEAD} graph {text} {functions}")


def _regression() -> onnx.ModelProto:
    text = "(float[N, 3] x) => (float[N, 2] y) { m = MatMul(x, w) y = Softmax<axis = 1>(m) }"
    model = _model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((3, 2), np.float32), "w"))
    return model


WRONG = {
    "negative dimension": (lambda m: m.graph.initializer[0].dims.__setitem__(0, -3), "dimensions"),
    "huge dimension": (lambda m: m.graph.initializer[0].dims.__setitem__(0, 2**40), "bytes are needed, 24"),
    "overflowing dimensions": (lambda m: m.graph.initializer[0].dims.extend([2**40, 2**40]), "no tensor"),
    "missing data": (
        lambda m: m.graph.initializer[0].ClearField("raw_data"),
        "6 of float_data are needed, 0",
    ),
    "unknown element type": (lambda m: setattr(m.graph.initializer[0], "data_type", 99), "element type 99"),
    "no element type": (lambda m: m.graph.initializer[0].ClearField("data_type"), "element type 0"),
    "attribute without kind": (lambda m: m.graph.node[1].attribute[0].ClearField("type"), "of no kind"),
    "attribute of another kind": (
        lambda m: setattr(m.graph.node[1].attribute[0], "type", AttributeProto.FLOATS),
        "says that it is of kind FLOATS, but has",
    ),
    "attribute that the operator does not take": (
        lambda m: m.graph.node[1].attribute[0].CopyFrom(helper.make_attribute("axis", 1.5)),
        "attribute 'axis' of Softmax node 'y' is of kind FLOAT; the operator takes INT",
    ),
    "two outputs of a name": (lambda m: m.graph.node[1].output.__setitem__(0, "m"), "computes 'm', which"),
    "two inputs of a name": (lambda m: m.graph.input.append(m.graph.input[0]), "'x' is among the inputs"),
    "missing input": (lambda m: m.graph.node[0].input.__setitem__(0, "q"), "reads 'q', which is nowhere"),
    "missing output": (lambda m: setattr(m.graph.output[0], "name", "q"), "'q' is computed nowhere"),
    "too few inputs": (lambda m: m.graph.node[0].input.pop(), "has 1 inputs; the operator has 2"),
    "too many outputs": (lambda m: m.graph.node[0].output.append("q"), "has 2 outputs; the operator has 1"),
    "no operator": (lambda m: m.graph.node[0].ClearField("op_type"), "does not say which operator"),
    "opset": (lambda m: setattr(m.opset_import[0], "version", -1), "imports version -1"),
    "external data without a file": (
        lambda m: (
            setattr(m.graph.initializer[0], "data_location", TensorProto.EXTERNAL),
            m.graph.initializer[0].ClearField("raw_data"),
        ),
        "in another file, but not in which",
    ),
    "declared dimension": (
        lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[1], "dim_value", 2**62),
        "has a dimension of 4,611,686,018,427,387,904",
    ),
    "a cycle": (lambda m: m.graph.node[0].input.__setitem__(0, "y"), "cycle|acyclic|sort"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said(what: str) -> None:
    model = _regression()
    damage, message = WRONG[what]
    damage(model)
    for call in (ortgrad.build_gradient_model, explain, ortgrad.check_gradients, ortgrad.InferenceSession):
        with pytest.raises(ortgrad.ModelError, match=message):
            call(model)
    if what != "a cycle":  # which is none of its business
        with pytest.raises(ortgrad.ModelError, match=message):
            ortgrad.prepare(model)


@pytest.mark.parametrize("where", ["node", "input", "attribute", "tensor", "value", "domain"])
def test_text_that_is_not_utf8(where: str) -> None:
    model = _regression()
    unlikely = "unlikely"
    if where == "node":
        model.graph.node[0].name = unlikely
    elif where == "input":
        model.graph.node[0].input[0] = unlikely
    elif where == "attribute":
        model.graph.node[1].attribute[0].name = unlikely
    elif where == "tensor":
        model.graph.initializer[0].name = unlikely
    elif where == "value":
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = unlikely
    else:
        model.graph.node[0].domain = unlikely
    data = model.SerializeToString().replace(b"unlikely", b"unlike\xff\xfe")
    for call in (ortgrad.build_gradient_model, ortgrad.prepare, ortgrad.InferenceSession, explain):
        with pytest.raises(ortgrad.ModelError, match=r"UTF-8|cannot be parsed"):
            call(data)


def test_a_branch_that_is_missing() -> None:
    model = _model(TEXTS["branches"])
    del model.graph.node[0].attribute[1]
    with pytest.raises(ortgrad.ModelError, match=r"If node 'y' has no attribute '(then|else)_branch'"):
        ortgrad.build_gradient_model(model)


def test_an_invalid_model_is_told_from_an_error_of_ours() -> None:
    valid, invalid = _regression(), _regression()
    invalid.graph.initializer[0].dims[:] = [2, 3]
    with pytest.raises(ZeroDivisionError), diagnosing(valid):
        _ = 1 / 0
    with (
        pytest.raises(ortgrad.ModelError, match=r"not valid.*ZeroDivisionError") as caught,
        diagnosing(invalid),
    ):
        _ = 1 / 0
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    for passed in (ortgrad.NodeError("x"), KeyboardInterrupt(), MemoryError()):
        with pytest.raises(type(passed)) as same, diagnosing(invalid):
            raise passed
        assert same.value is passed


def test_what_onnxruntime_refuses() -> None:
    model = _regression()
    model.graph.initializer[0].dims[:] = [2, 3]
    with pytest.raises(ortgrad.ModelError, match=r"onnxruntime does not load the model: .*MatMul") as caught:
        ortgrad.InferenceSession(model)
    assert "onnxruntime" in type(caught.value.__cause__).__module__


@pytest.mark.parametrize("places", [[0, 5], [[0, 0], [2, 1]]])
def test_sparse_initializers(places: list) -> None:
    model = _model("(float[N, 3] x) => (float[N, 2] y) { y = MatMul(x, w) }")
    values = numpy_helper.from_array(np.float32([4, 5]), "w")
    indices = numpy_helper.from_array(np.array(places, np.int64), "places")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [3, 2]))
    session = ortgrad.InferenceSession(ortgrad.build_gradient_model(model, wrt=["x", "w"]))
    x = np.float32([[1, 2, 3]])
    y, x_grad, w_grad = session.run(None, {"x": x, "y_grad": np.float32([[1, 10]])})
    np.testing.assert_array_equal(y, [[4, 15]])
    np.testing.assert_array_equal(x_grad, [[4, 0, 50]])
    np.testing.assert_array_equal(w_grad, [[1, 10], [2, 20], [3, 30]])
    model.graph.sparse_initializer[0].dims[0] = 1
    with pytest.raises(ortgrad.ModelError, match="sparse initializer 'w'"):
        ortgrad.build_gradient_model(model, wrt=["x"])


# Small files that ask for much


def _calls(levels: int, each: int, gradient: bool = False) -> onnx.ModelProto:
    """Functions that call functions, `each` times each."""
    functions = '<domain: "local", opset_import: ["" : 21]> f0 (x) => (y) { y = Tanh(x) }'
    for i in range(1, levels + 1):
        body = " ".join(f"v{j + 1} = local.f{i - 1}(v{j})" for j in range(each))
        functions += (
            f'<domain: "local", opset_import: ["" : 21, "local" : 1]> f{i} (v0) => (v{each}) {{ {body} }}'
        )
    model = _model(f"(float[3] x) => (float[3] y) {{ y = local.f{levels}(x) }}", functions)
    if gradient:
        model.graph.node.add(op_type="ReluGrad", domain="com.microsoft", input=["y", "x"], output=["z"])
        model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [3]))
    return model


MAKERS = {
    "ConstantOfShape": "z = ConstantOfShape(s)",
    "ConstantOfShape of integers": "i = ConstantOfShape<value = int64[1] {1}>(s) z = Cast<to = 1>(i)",
    "Expand": "z = Expand(x, s)",
    "Tile": "z = Tile(x, s)",
    "Range": "n = Squeeze(s) i = Constant<value_int = 0>() j = Constant<value_int = 1>()"
    " m = Constant<value_int = 1099511627776>() r = Range(i, m, j) z = Cast<to = 1>(r)",
    "RandomNormal": "z = RandomNormal<shape = [1048576, 1048576]>()",
    "OneHot": "i = Constant<value_ints = [0]>() v = Constant<value_floats = [0.0, 1.0]>()"
    " z = OneHot(i, s, v)",
    "Pad": "p = Constant<value_ints = [0, 1099511627776]>() z = Pad(x, p)",
}


def _made(maker: str) -> onnx.ModelProto:
    return _model(
        f"(float[1] x) => (float y) <int64[1] s = {{1099511627776}}> {{ {MAKERS[maker]}"
        " a = ReduceSum<keepdims = 0>(z) b = ReduceSum<keepdims = 0>(x) y = Mul(a, b) }"
    )


@pytest.mark.parametrize("maker", MAKERS)
def test_tensors_that_nobody_has_the_memory_for(maker: str) -> None:
    for call in (ortgrad.prepare, ortgrad.InferenceSession):
        with pytest.raises(ortgrad.ModelError, match=r"makes a tensor of 1,099,511,627,776 elements"):
            call(_made(maker))
    with pytest.raises(ortgrad.ModelError, match=f"{maker.split()[0]} node "):
        ortgrad.build_gradient_model(_made(maker), wrt="x")


def test_long_vectors_of_integers_cost_nothing() -> None:
    # onnx would write a dimension for every element, in case it is a shape: gigabytes.
    text = """(float[3] x, int64[500000000] i) => (float y) <int64[1] s = {500000000}> {
        z = ConstantOfShape<value = int64[1] {1}>(s)
        a = Add(z, i)
        b = Concat<axis = 0>(a, a)
        f = Cast<to = 1>(b)
        c = ReduceSum<keepdims = 0>(f)
        d = ReduceSum<keepdims = 0>(x)
        y = Mul(c, d)
    }"""
    built = ortgrad.build_gradient_model(_model(text), wrt="x")
    assert built.graph.input[1].type.tensor_type.shape.dim[0].dim_value == 500_000_000
    # And what is known of shorter ones is still used.
    short = ortgrad.build_gradient_model(_model(text.replace("500000000", "5000")), wrt="x")
    session = ortgrad.InferenceSession(short)
    _, grad = session.run(None, {"x": np.ones(3, np.float32), "i": np.zeros(5000, np.int64)})
    np.testing.assert_array_equal(grad, np.full(3, 10000, np.float32))


@pytest.mark.parametrize(
    ("levels", "each", "message"),
    [(30, 2, "more than 10,000 times"), (14, 2, "more than 10,000 times"), (300, 1, "more than 200 deep")],
)
@pytest.mark.parametrize("gradient", [False, True])
def test_functions_that_call_functions(levels: int, each: int, message: str, gradient: bool) -> None:
    model = _calls(levels, each, gradient)
    for call in (ortgrad.build_gradient_model, ortgrad.prepare, ortgrad.InferenceSession):
        with pytest.raises(ortgrad.ModelError, match=message):
            call(model)


def test_calls_of_the_graph_are_not_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model has as many gradient nodes, each a call of a function, as operators."""
    monkeypatch.setattr(validation, "MOST_COPIES", 10)
    built = ortgrad.build_gradient_model(chain(60), wrt="x")
    for call in (ortgrad.prepare, ortgrad.InferenceSession, ortgrad.build_gradient_model):
        call(built)


def test_functions_that_call_themselves() -> None:
    model = _calls(3, 1)
    model.functions[0].node[0].CopyFrom(helper.make_node("f2", ["x"], ["y"], domain="local"))
    with pytest.raises(ortgrad.ModelError, match="calls itself"):
        ortgrad.build_gradient_model(model, wrt="x")


def test_functions_that_call_functions_a_little() -> None:
    built = ortgrad.build_gradient_model(_calls(4, 3), wrt="x")
    session = ortgrad.InferenceSession(built)
    x = np.float32([0.1, 0.2, 0.3])
    y, grad = session.run(None, {"x": x, "y_grad": np.ones(3, np.float32)})
    expected, slope = x.astype(np.float64), np.ones(3)
    for _ in range(81):
        expected = np.tanh(expected)
        slope *= 1 - expected**2
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    np.testing.assert_allclose(grad, slope, rtol=1e-5)


def _nested(levels: int) -> onnx.ModelProto:
    """If in If, filled from the outside: copies of what is nested deeper than that do not work."""
    model = onnx.ModelProto(ir_version=10, opset_import=[helper.make_opsetid("", 21)])
    inputs = [("x", TensorProto.FLOAT, [3]), ("c", TensorProto.BOOL, [])]
    model.graph.input.extend(helper.make_tensor_value_info(*given) for given in inputs)
    graph = model.graph
    for i in range(levels):
        graph.name = f"level{i}"
        graph.output.append(helper.make_tensor_value_info(f"v{i}", TensorProto.FLOAT, [3]))
        node = graph.node.add(op_type="If", input=["c"], output=[f"v{i}"])
        other = node.attribute.add(name="else_branch", type=AttributeProto.GRAPH).g
        other.name = f"else{i}"
        other.node.add(op_type="Neg", input=["x"], output=[f"e{i}"])
        other.output.append(helper.make_tensor_value_info(f"e{i}", TensorProto.FLOAT, [3]))
        graph = node.attribute.add(name="then_branch", type=AttributeProto.GRAPH).g
    graph.name = "innermost"
    graph.node.add(op_type="Tanh", input=["x"], output=["t"])
    graph.output.append(helper.make_tensor_value_info("t", TensorProto.FLOAT, [3]))
    return model


@pytest.mark.parametrize("levels", [33, 60, 1000])
def test_deep_nesting_is_refused(levels: int) -> None:
    model = _nested(levels)
    for call in (ortgrad.build_gradient_model, ortgrad.prepare, ortgrad.InferenceSession, explain):
        with pytest.raises(ortgrad.ModelError, match="nested"):
            call(model)


def test_nesting_works_as_deep_as_files_go() -> None:
    built = ortgrad.build_gradient_model(_nested(15), wrt="x")
    x = np.float32([0.1, 0.2, 0.3])
    _, grad = ortgrad.InferenceSession(built).run(
        None, {"x": x, "c": np.array(True), "v0_grad": np.ones(3, np.float32)}
    )
    np.testing.assert_allclose(grad, 1 - np.tanh(x) ** 2, rtol=1e-5)


def test_long_chains_need_no_recursion() -> None:
    count = sys.getrecursionlimit() + 100
    nodes = [helper.make_node("Tanh", [f"v{i}"], [f"v{i + 1}"]) for i in range(count)]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "chain", [value("v0", 1, [3])], [value(f"v{count}", 1, [3])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = ortgrad.InferenceSession(ortgrad.build_gradient_model(model, wrt="v0"))
    x = np.float32([0.1, -0.2, 0.3])
    _, grad = session.run(None, {"v0": x, f"v{count}_grad": np.ones(3, np.float32)})
    expected, slope = x.astype(np.float64), np.ones(3)
    for _ in range(count):
        expected = np.tanh(expected)
        slope *= 1 - expected**2
    np.testing.assert_allclose(grad, slope, rtol=1e-3)


def test_long_names() -> None:
    model = _regression()
    long = "n" * 1_000_000
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = model.graph.node[0].name = long
    built = ortgrad.build_gradient_model(model)
    assert built.graph.output[-1].name == "w_grad"
    model.graph.node[1].input[0] = "q"
    with pytest.raises(ortgrad.ModelError) as caught:
        ortgrad.build_gradient_model(model)
    assert len(str(caught.value)) < 10_000


def test_kernels_with_more_taps_than_can_be_written_out() -> None:
    text = """(float[1, 1, N] x) => (float[1, 1, M] y) <float[1, 1, 1] w = {1}> {
        y = Conv<kernel_shape = [1073741824]>(x, w)
    }"""
    with pytest.raises(ortgrad.OrtgradError):
        ortgrad.build_gradient_model(_model(text), wrt=["x", "w"])


def test_bounds_of_a_slice_that_are_no_vectors() -> None:
    text = """(float[4] x) => (float[N] y) <int64 s = {0}, int64[1] e = {2}, int64[1] a = {0}> {
        y = Slice(x, s, e, a)
    }"""
    with pytest.raises(ortgrad.OrtgradError, match="vectors of one length"):
        ortgrad.build_gradient_model(_model(text), wrt="x")


def test_external_data_under_a_name_that_no_file_has(tmp_path: Path) -> None:
    model = _regression()
    tensor = model.graph.initializer[0]
    onnx.external_data_helper.set_external_data(tensor, "long" * 500, 0, len(tensor.raw_data))
    tensor.ClearField("raw_data")
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ortgrad.ModelError, match="cannot read the external data"):
        ortgrad.build_gradient_model(path)


def test_shapes_that_contradict_each_other() -> None:
    matrix, vector = (ir.Value(name=n, shape=ir.Shape(s)) for n, s in (("matrix", [2, 3]), ("vector", [3])))
    with pytest.raises(ortgrad.NodeError, match=r"'vector' of shape .* fewer axes than its input 'matrix'"):
        unbroadcast(Recorder(21), vector, matrix, vector)


def test_long_axes_that_become_vectors() -> None:
    text = """(float[1000000000] v, float[3] x) => (float y) {
        s = Shape(v)
        z = ConstantOfShape<value = int64[1] {1}>(s)
        d = Add(z, z)
        c = Cast<to = 1>(d)
        a = ReduceSum<keepdims = 0>(c)
        b = ReduceSum<keepdims = 0>(x)
        y = Mul(a, b)
    }"""
    built = ortgrad.build_gradient_model(_model(text), wrt="x")
    assert built.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1_000_000_000
