"""Foreign models are brought into the complete form, once; bodies serve every element type."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from support import GOLDEN

import ortgrad


def foreign(nodes: list, inputs: dict, outputs: dict, opset: int = 15, **fields: object) -> onnx.ModelProto:
    def infos(values: dict) -> list:
        return [helper.make_tensor_value_info(n, t, s) for n, (t, s) in values.items()]

    graph = helper.make_graph(nodes, "foreign", infos(inputs), infos(outputs))
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, **fields)


def dropout_model(element: int = TensorProto.FLOAT) -> onnx.ModelProto:
    node = helper.make_node("DropoutGrad", ["dY", "mask"], ["dX"], domain="com.microsoft")
    return foreign(
        [node],
        {"dY": (element, ["N", 2]), "mask": (TensorProto.BOOL, ["N", 2])},
        {"dX": (element, ["N", 2])},
    )


@pytest.mark.parametrize("kernels", ["python", "onnx", "auto"])
def test_twice_is_once(kernels: str) -> None:
    model = onnx.load(GOLDEN / "cnn" / "training_model.onnx")
    before = model.SerializeToString()
    once = ortgrad.prepare(model, kernels=kernels)
    assert model.SerializeToString() == before
    twice = ortgrad.prepare(once, kernels=kernels)
    assert twice.SerializeToString(deterministic=True) == once.SerializeToString(deterministic=True)
    onnx.checker.check_model(once, full_check=True)


def test_preparing_is_deterministic() -> None:
    path = GOLDEN / "cnn" / "training_model.onnx"
    assert ortgrad.prepare(path) == ortgrad.prepare(path)


def test_onnx_leaves_standard_operators_only() -> None:
    ready = ortgrad.prepare(GOLDEN / "cnn" / "training_model.onnx", kernels="onnx")
    assert {node.domain for node in ready.graph.node} == {""}
    assert not ready.functions
    python = ortgrad.prepare(GOLDEN / "cnn" / "training_model.onnx", kernels="python")
    assert not ortgrad.prepare(python, kernels="onnx").functions


@pytest.mark.parametrize("kernels", ["python", "onnx", "auto"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_element_types(dtype: type, kernels: str) -> None:
    model = dropout_model(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
    feeds = {"dY": np.array([[1, 2]], dtype), "mask": np.array([[True, False]])}
    (result,) = ortgrad.InferenceSession(model, kernels=kernels).run(None, feeds)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, [[2, 0]])


def test_a_model_without_gradient_nodes_only_gets_the_import() -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=6)
    expected = onnx.ModelProto.FromString(model.SerializeToString())
    expected.opset_import.add(domain="com.microsoft", version=1)
    ready = ortgrad.prepare(model)
    assert ready == expected != model
    assert ortgrad.prepare(ready) == ready
    assert ortgrad.InferenceSession(model).run(None, {"x": np.float32([-1])})[0] == 0


@pytest.mark.parametrize("opset", [15, 21])
def test_the_models_own_function_of_that_name_is_left_alone(opset: int) -> None:
    function = helper.make_function(
        "com.microsoft",
        "ReluGrad",
        ["a", "b"],
        ["c"],
        [helper.make_node("Add", ["a", "b"], ["c"])],
        [helper.make_opsetid("", opset)],
    )
    model = foreign(
        [helper.make_node("ReluGrad", ["x", "y"], ["z"], domain="com.microsoft")],
        {"x": (TensorProto.FLOAT, [1]), "y": (TensorProto.FLOAT, [1])},
        {"z": (TensorProto.FLOAT, [1])},
        opset,
        functions=[function],
    )
    for kernels in ("python", "onnx"):
        session = ortgrad.InferenceSession(model, kernels=kernels)
        assert session.run(None, {"x": np.float32([2]), "y": np.float32([3])})[0] == 5


@pytest.mark.parametrize("opset", [15, 21])
def test_gradient_nodes_in_functions_and_subgraphs(opset: int) -> None:
    relu_grad = helper.make_node("ReluGrad", ["a", "b"], ["c"], domain="com.microsoft")
    function = helper.make_function(
        "my.functions",
        "Backward",
        ["a", "b"],
        ["c"],
        [relu_grad],
        [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)],
    )
    then_graph = helper.make_graph(
        [helper.make_node("DropoutGrad", ["h", "m"], ["t"], domain="com.microsoft")],
        "then",
        [],
        [helper.make_tensor_value_info("t", TensorProto.FLOAT, None)],
    )
    else_graph = helper.make_graph(
        [helper.make_node("Identity", ["h"], ["e"])],
        "else",
        [],
        [helper.make_tensor_value_info("e", TensorProto.FLOAT, None)],
    )
    model = foreign(
        [
            helper.make_node("Backward", ["x", "y"], ["h"], domain="my.functions"),
            helper.make_node("If", ["cond"], ["z"], then_branch=then_graph, else_branch=else_graph),
        ],
        {
            "x": (TensorProto.FLOAT, ["N"]),
            "y": (TensorProto.FLOAT, ["N"]),
            "m": (TensorProto.BOOL, ["N"]),
            "cond": (TensorProto.BOOL, []),
        },
        {"z": (TensorProto.FLOAT, ["N"])},
        opset,
        functions=[function],
    )
    model.opset_import.add(domain="my.functions", version=1)
    feeds = {"x": np.float32([1, 2, 3]), "y": np.float32([1, -1, 1]), "m": np.array([True, True, False])}
    for kernels in ("python", "onnx"):
        session = ortgrad.InferenceSession(model, kernels=kernels)
        np.testing.assert_array_equal(session.run(None, {**feeds, "cond": np.array(True)})[0], [2, 0, 0])
        np.testing.assert_array_equal(session.run(None, {**feeds, "cond": np.array(False)})[0], [1, 0, 3])


def test_training_info_survives() -> None:
    model = dropout_model()
    model.training_info.add().algorithm.name = "sgd"
    assert ortgrad.prepare(model).training_info[0].algorithm.name == "sgd"


def pool_model(batch: int | str, length: int | str = 4) -> onnx.ModelProto:
    node = helper.make_node("AveragePoolGrad", ["dY"], ["dX"], kernel_shape=[2], strides=[2], name="pool")
    return foreign(
        [node], {"dY": (TensorProto.FLOAT, [batch, 1, 2])}, {"dX": (TensorProto.FLOAT, [batch, 1, length])}
    )


def test_pool_gradients_in_the_default_domain() -> None:
    for kernels in ("python", "onnx"):
        session = ortgrad.InferenceSession(pool_model(1), kernels=kernels)
        (result,) = session.run(None, {"dY": np.float32([[[2, 4]]])})
        np.testing.assert_array_equal(result, [[[1, 1, 2, 2]]])


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (helper.make_node("ReluGrad", ["x"], ["z"], domain="com.microsoft", name="n"), "input X is missing"),
        (helper.make_node("ReluGrad", ["x", "y", "x"], ["z"], domain="com.microsoft", name="n"), "3 inputs"),
        (helper.make_node("ReluGrad", ["x", "y"], ["z"], domain="com.microsoft", name="n", a=1), "'a'"),
        (
            helper.make_node("ConvGrad", ["x", "y", "y"], ["z"], domain="com.microsoft", name="n", pads="1"),
            "'pads' takes a list of int",
        ),
    ],
)
def test_wrong_nodes_are_named(node: onnx.NodeProto, text: str) -> None:
    model = foreign(
        [node],
        {"x": (TensorProto.FLOAT, ["N"]), "y": (TensorProto.FLOAT, ["N"])},
        {"z": (TensorProto.FLOAT, ["N"])},
    )
    with pytest.raises(ortgrad.NodeError, match=f"{node.op_type} node 'n'.*{text}"):
        ortgrad.prepare(model)


@pytest.mark.parametrize("kernels", ["python", "onnx"])
def test_a_pool_gradient_of_any_batch(kernels: str) -> None:
    session = ortgrad.InferenceSession(pool_model("N"), kernels=kernels)
    for batch in (1, 3):
        (result,) = session.run(None, {"dY": np.full((batch, 1, 2), 2, np.float32)})
        np.testing.assert_array_equal(result, np.ones((batch, 1, 4)))


def test_a_pool_gradient_without_sizes_says_what_to_do() -> None:
    with pytest.raises(ortgrad.NodeError, match=r"node 'pool'.*X_shape"):
        ortgrad.prepare(pool_model("N", "L"))


def two_bodies() -> onnx.ModelProto:
    nodes = [
        ortgrad.nodes.leaky_relu_grad("dY", "Y", f"dX_{i}", alpha=alpha)
        for i, alpha in enumerate((0.5, 0.25))
    ]
    return ortgrad.nodes.make_model(nodes, shapes={"dY": ["N"], "Y": ["N"]})


def test_each_node_has_its_own_body() -> None:
    model = two_bodies()
    onnx.checker.check_model(model, full_check=True)
    plain = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"dY": np.float32([4]), "Y": np.float32([-1])}
    assert [r.tolist() for r in plain.run(None, feeds)] == [[2], [1]]
    again = ortgrad.prepare(model, kernels="python")
    assert again.SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)
    for kernels in ("python", "onnx"):
        session = ortgrad.InferenceSession(model, kernels=kernels)
        assert [r.tolist() for r in session.run(None, feeds)] == [[2], [1]]


def test_who_ignores_overloads_cannot_load_the_model() -> None:
    """As onnxruntime before 1.27, which would take the first body for both nodes."""
    model = two_bodies()
    first, second = model.functions
    del second.node[:]
    second.node.extend(first.node)
    with pytest.raises(Exception, match=r"take 1\.27 or newer"):
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def test_saved_models_run_on_plain_onnxruntime(tmp_path) -> None:
    model = ortgrad.prepare(dropout_model(), kernels="python")
    path = tmp_path / "ready.onnx"
    onnx.save(model, path)
    feeds = {"dY": np.float32([[1, 2]]), "mask": np.array([[True, False]])}
    plain = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(plain.run(None, feeds)[0], [[2, 0]])


@pytest.mark.parametrize("kernels", ["python", "onnx"])
def test_accumulators_return_what_they_would_write_in_place(kernels: str) -> None:
    session = ortgrad.InferenceSession(GOLDEN / "cnn" / "training_model.onnx", kernels=kernels)
    outputs = [output.name for output in session.get_outputs()]
    assert outputs[:3] == ["onnx::loss::2", "w1_grad.accumulation.out", "b1_grad.accumulation.out"]
    generator = np.random.default_rng(0)
    feeds = {
        i.name: generator.standard_normal(i.shape).astype(np.float32)
        for i in session.get_inputs()
        if i.type == "tensor(float)"
    }
    feeds["labels"] = np.arange(6)
    names = ["b4_grad.accumulation.buffer", "b4_grad.accumulation.buffer.out"]
    (added,) = session.run(names[1:], {**feeds, "lazy_reset_grad": np.array([False])})
    (replaced,) = session.run(names[1:], {**feeds, "lazy_reset_grad": np.array([True])})
    np.testing.assert_allclose(added, replaced + feeds[names[0]], rtol=1e-5, atol=1e-6)


def test_absent_inputs_in_a_graph_of_ones_own(caplog: pytest.LogCaptureFixture) -> None:
    node = ortgrad.nodes.dropout_grad("dY", outputs="dX")
    model = foreign([node], {"dY": (TensorProto.FLOAT, ["N"])}, {"dX": (TensorProto.FLOAT, ["N"])}, 21)
    session = ortgrad.InferenceSession(model, kernels="python")
    np.testing.assert_array_equal(session.run(None, {"dY": np.float32([1, 2])})[0], [1, 2])
    assert not caplog.records
