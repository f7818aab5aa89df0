"""Files with nodes that no pass of ortgrad writes: they are refused, and the process lives on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from support import needs_numba, session_of_passes

import ortgrad
from ortgrad import cli, training
from ortgrad.operators.declaration import INTERNAL_DOMAIN, all_operators
from ortgrad.pipelines.explain import explain

FUSED = (
    '{"node":"","attributes":{"operands":["float row"],"steps":["v1 = Neg(v0)"],"results":[1],"sums":[],'
    '"nodes":["n"]},"inputs":[1],"outputs":[1]}'
)


def fused_node(**more: Any) -> onnx.NodeProto:
    return helper.make_node("Fused", ["x"], ["y"], "hostile", domain="ortgrad", ortgrad=FUSED, **more)


def model_of(
    nodes: list[onnx.NodeProto],
    element: int = TensorProto.FLOAT,
    functions: Sequence[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(name, element, [8]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y])
    opsets = [
        helper.make_opsetid(domain, version) for domain, version in (("", 18), ("ortgrad", 1), ("f", 1))
    ]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions)


def in_graph() -> onnx.ModelProto:
    return model_of([fused_node()])


def in_subgraph() -> onnx.ModelProto:
    branch = helper.make_graph([fused_node()], "b", [], [onnx.ValueInfoProto(name="y")])
    branch.node[0].output[0] = branch.output[0].name = "inner"
    always = helper.make_node("Constant", [], ["c"], value=helper.make_tensor("", TensorProto.BOOL, [], [1]))
    return model_of(
        [always, helper.make_node("If", ["c"], ["y"], "if", then_branch=branch, else_branch=branch)]
    )


def in_function() -> onnx.ModelProto:
    opsets = [helper.make_opsetid("ortgrad", 1)]
    function = helper.make_function("f", "F", ["x"], ["y"], [fused_node()], opsets)
    return model_of([helper.make_node("F", ["x"], ["y"], "call", domain="f")], functions=[function])


def as_function() -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", 18)]
    function = helper.make_function(
        "ortgrad", "Fused", ["x"], ["y"], [helper.make_node("Neg", ["x"], ["y"])], opsets
    )
    return model_of([helper.make_node("Fused", ["x"], ["y"], "call", domain="ortgrad")], functions=[function])


ELEMENTS = {
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}
PLACES = (in_graph, in_subgraph, in_function, as_function)
LOADERS: dict[str, Callable[[Path], Any]] = {
    **{
        f"session-{kernels}": lambda path, kernels=kernels: ortgrad.InferenceSession(path, kernels=kernels)
        for kernels in ("python", "onnx", "auto", "compiled")
    },
    **{
        f"prepare-{kernels}": lambda path, kernels=kernels: ortgrad.prepare(path, kernels=kernels)
        for kernels in ("python", "onnx", "auto")
    },
    "build": lambda path: ortgrad.build_gradient_model(path, wrt=["x"]),
    "check": ortgrad.check_gradients,
    "explain": explain,
    "bytes": lambda path: ortgrad.InferenceSession(path.read_bytes()),
    "proto": lambda path: ortgrad.InferenceSession(onnx.load(path)),
    "parameters": training.parameters,
    "add_loss": lambda path: training.add_loss(path, "mse"),
}


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("way", LOADERS)
def test_internal_operators_are_refused_in_files(way: str, place: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(place(), path)
    with pytest.raises(
        ortgrad.ModelError, match="in the domain 'ortgrad', whose operators exist only inside"
    ):
        LOADERS[way](path)


def test_the_command_line_refuses_internal_operators(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(in_graph(), path)
    for command in ("grad", "prepare"):
        assert cli.main([command, str(path), "-o", str(tmp_path / "out.onnx")])
        assert "exist only inside of sessions" in capsys.readouterr().err


def registered(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    ortgrad.register(options)
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


@pytest.mark.parametrize("place", [in_graph, in_subgraph, in_function], ids=lambda place: place.__name__)
def test_internal_operators_are_not_in_plain_sessions(place: Any) -> None:
    with pytest.raises(Exception, match="exist only in sessions of ortgrad"):
        registered(place())


def test_every_internal_operator_is_refused_in_a_plain_session() -> None:
    for operator in all_operators(internal=True):
        if operator.domain != INTERNAL_DOMAIN:
            continue
        variant = next(operator.variants())
        values = [
            helper.make_tensor_value_info(f"{kind}{i}", ELEMENTS[element], None)
            for kind, elements in (("x", variant.inputs), ("y", variant.outputs))
            for i, element in enumerate(elements)
        ]
        inputs, outputs = values[: len(variant.inputs)], values[len(variant.inputs) :]
        node = helper.make_node(
            operator.name,
            *([value.name for value in side] for side in (inputs, outputs)),
            "hostile",
            domain="ortgrad",
            ortgrad="{}",
        )
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ortgrad", 1)]
        graph = helper.make_graph([node], "g", inputs, outputs)
        with pytest.raises(Exception, match=f"'hostile' of {operator.name}: operators of the domain"):
            registered(helper.make_model(graph, opset_imports=opsets, ir_version=10))


@needs_numba
@pytest.mark.parametrize("element", ["INT8", "STRING", "DOUBLE", "BOOL", "FLOAT16", "INT64"])
def test_the_types_of_a_node_are_those_of_its_kernel(element: str) -> None:
    """Nothing but a pass of ortgrad could make such a node; the kernel is not created all the same."""
    cast = helper.make_node("Cast", ["x"], ["c"], to=TensorProto.DataType.Value(element))
    node = fused_node()
    node.input[0] = "c"
    with pytest.raises(
        ortgrad.ModelError, match=r"'hostile' of Fused: v0, one of its inputs, is a tensor of"
    ):
        session_of_passes(model_of([cast, node]))


@needs_numba
def test_the_number_of_operands_of_a_node_is_that_of_its_kernel() -> None:
    for inputs, outputs in (
        (["x", "x"], ["y"]),
        (["x"] * 60, ["y"]),
        (["x"], ["y", "z"]),
    ):
        node = fused_node()
        del node.input[:], node.output[:]
        node.input.extend(inputs)
        node.output.extend(outputs)
        with pytest.raises(ortgrad.ModelError, match="its kernel has 1"):
            session_of_passes(model_of([node]))
    node = fused_node()
    node.attribute[0].s = (
        node.attribute[0]
        .s.replace(b'["float row"]', b'["float row","float row"]')
        .replace(b'"inputs":[1]', b'"inputs":[1,1]')
        .replace(b"v1 = Neg(v0)", b"v2 = Add(v0, v1)")
        .replace(b'"results":[1]', b'"results":[2]')
    )
    with pytest.raises(ortgrad.ModelError, match="it has 1 inputs; its kernel has 2"):
        session_of_passes(model_of([node]))


@needs_numba
def test_the_node_of_these_tests_is_valid() -> None:
    x = np.arange(8, dtype=np.float32)
    assert session_of_passes(in_graph()).run(None, {"x": x})[0].tolist() == (-x).tolist()
