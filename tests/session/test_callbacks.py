"""What onnxruntime calls while it makes, runs and destroys a session: two functions, which return a status.

tests/process/fault_script.py raises exceptions at their bytecodes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxruntime.capi._pybind_state as native_sessions
import pytest
from onnx import helper
from support import COMPILES

import ortgrad
from ortgrad.operators.declaration import all_operators, find_operator
from ortgrad.runtime import entrance, extensions, native
from ortgrad.runtime.c_api import CustomOp, list_operators

ENTRANCES = {entrance.serve.__code__}
# The other functions are those of onnxruntime-extensions, which call no Python: they read what was declared.
CALLED = {"CreateKernelV2", "KernelComputeV2", "KernelDestroy", "GetInputMemoryType"}
OF_FUSED = {
    *("GetInputCharacteristic", "GetInputType", "GetVariadicInputMinArity", "GetVariadicInputHomogeneity"),
    *("GetOutputCharacteristic", "GetVariadicOutputMinArity", "GetVariadicOutputHomogeneity"),
}


def entered(model: onnx.ModelProto, feeds: list[dict[str, np.ndarray]]) -> set[CodeType]:
    """The Python functions that native code enters during the life of a plain session."""
    options = onnxruntime.SessionOptions()
    ortgrad.register(options)
    data = model.SerializeToString()
    names = [value.name for value in model.graph.output]
    found: set[CodeType] = set()

    def live() -> None:
        session = native_sessions.InferenceSession(options, data, False, False)
        session.initialize_session([], [], set())
        for each in feeds:
            session.run(names, each, None)
        del session

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_back is not None and frame.f_back.f_code is live.__code__:
            found.add(frame.f_code)

    sys.setprofile(note)
    try:
        live()
    finally:
        sys.setprofile(None)
    # NumPy has functions that run once in a process.
    return {code for code in found if "numpy" not in code.co_filename}


@pytest.mark.parametrize("way", ["python", "compiled"] if COMPILES else ["python"])
def test_native_code_enters_no_other_function(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = find_operator("ReluGrad")
    assert operator is not None
    if way == "python":
        monkeypatch.setattr(operator, "compiled_kernel", None)
    model = ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX"))
    feeds = [{name: np.ones(size, np.float32) for name in ("dY", "X")} for size in (3, 4, 3)]
    assert entered(model, feeds) == ENTRANCES


def test_every_function_of_every_operator_is_known() -> None:
    """A struct has ortgrad's functions where it should, and nobody else's where Python would be called."""
    extensions.library_path()
    ours = native._callbacks()
    assert ours.keys() == CALLED
    fused = native._variadic_callbacks()
    assert fused.keys() == OF_FUSED
    structs = [
        CustomOp.from_address(a) for _, a in list_operators(extensions._library()) if a in native._operators
    ]
    declared = sum(len([*operator.variants()]) for operator in all_operators(internal=True))
    assert len(structs) >= min(declared, len(native._operators)) > 40
    for struct in structs:
        assert struct.version == 16
        assert {name: getattr(struct, name) for name in ours} == ours


# The nodes of a session may be anywhere.


def relu_in(place: str) -> onnx.ModelProto:
    """A node whose call says that it is another operator's, in a graph, a branch, a loop or a function."""
    node = helper.make_node(
        *("LeakyReluGrad", ["x", "x"], ["r"], "hostile"),
        domain="com.microsoft",
        ortgrad='{"node":"n","attributes":{},"inputs":[1,1],"outputs":[1]}',
    )
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [3]) for name in "xy")
    opsets = [helper.make_opsetid(d, v) for d, v in (("", 18), ("com.microsoft", 1), ("f", 1))]
    functions: list[onnx.FunctionProto] = []
    r = onnx.ValueInfoProto(name="r")
    if place == "branch":
        true = helper.make_node("Constant", [], ["c"], value=helper.make_tensor("", 9, [], [1]))
        branch = helper.make_graph([node], "b", [], [r])
        choice = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
        nodes = [true, choice]
    elif place == "loop":
        i, c = (helper.make_tensor_value_info(n, t, []) for n, t in (("i", 7), ("c", 9)))
        keep = helper.make_node("Identity", ["c"], ["d"])
        carried = helper.make_tensor_value_info("s", 1, [3])
        d = helper.make_tensor_value_info("d", 9, [])
        node.input[:] = ["s", "s"]
        body = helper.make_graph([keep, node], "b", [i, c, carried], [d, r])
        three = helper.make_node("Constant", [], ["n"], value=helper.make_tensor("", 7, [], [3]))
        nodes = [three, helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)]
    elif place == "function":
        functions = [helper.make_function("f", "F", ["x"], ["r"], [node], opsets[:2])]
        nodes = [helper.make_node("F", ["x"], ["y"], domain="f")]
    else:
        node.output[0] = "y"
        nodes = [node]
    graph = helper.make_graph(nodes, "g", [x], [y])
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions)


def loaded(model: onnx.ModelProto, way: str, folder: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    path = str(folder / "model.onnx")
    if way == "own":
        return ortgrad.InferenceSession(model, options, kernels="python")
    if way == "external":
        onnx.save(model, path, save_as_external_data=True, size_threshold=0, location="data")
    ortgrad.register(options)
    if way == "ort":
        # With the kernels at hand, a model of onnxruntime's own format is written, and read again.
        path = str(folder / "model.ort")
        options.optimized_model_filepath = path
        options.add_session_config_entry("session.save_model_format", "ORT")
        onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        return loaded_from(path)
    return onnxruntime.InferenceSession(
        path if way == "external" else model.SerializeToString(), options, ["CPUExecutionProvider"]
    )


def loaded_from(path: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    ortgrad.register(options)
    return onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])


PLACES = ("graph", "branch", "loop", "function")


@pytest.mark.parametrize("way", ["own", "registered", "external", "ort"])
@pytest.mark.parametrize("place", PLACES)
def test_nodes_run_wherever_they_are(place: str, way: str, tmp_path: Path) -> None:
    x = np.float32([1, -1, 2])
    expected = {"loop": [1, -1e-6, 2]}.get(place, [1, -0.01, 2])
    (y,) = loaded(relu_in(place), way, tmp_path).run(None, {"x": x})
    np.testing.assert_allclose(y, expected, rtol=1e-5)


@pytest.mark.parametrize("way", ["own", "registered", "external", "ort"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "change",
    [
        lambda node: node.input.append("x"),
        lambda node: node.input.pop(),
        lambda node: node.output.append("more"),
        lambda node: node.input.__setitem__(1, ""),
        lambda node: node.attribute[0].__setattr__("s", b'{"node":"n"}'),
        lambda node: node.attribute[0].__setattr__("s", node.attribute[0].s.replace(b"[1,1]", b"[1]")),
    ],
)
def test_nodes_that_do_not_fit_are_refused_wherever_they_are(
    change: Any, place: str, way: str, tmp_path: Path
) -> None:
    model = relu_in(place)
    for graph in (model.graph, *(a.g for n in model.graph.node for a in n.attribute), *model.functions):
        for node in graph.node:
            if node.op_type == "LeakyReluGrad":
                change(node)
    with pytest.raises(Exception, match=r"hostile|LeakyReluGrad|'n'|Node"):
        loaded(model, way, tmp_path).run(None, {"x": np.float32([1, -1, 2])})


@pytest.mark.parametrize("value", ["string", "sequence"])
def test_what_is_no_tensor_of_numbers_is_refused(value: str) -> None:
    model = relu_in("graph")
    if value == "string":
        model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.STRING
        fed: Any = np.array(["a", "b", "c"], object)
    else:
        model.graph.input[0].CopyFrom(
            helper.make_tensor_sequence_value_info("x", onnx.TensorProto.FLOAT, [3])
        )
        fed = [np.ones(3, np.float32)]
    for way in ("own", "registered"):
        with pytest.raises(Exception, match=r"LeakyReluGrad|hostile"):
            loaded(model, way, Path()).run(None, {"x": fed})
