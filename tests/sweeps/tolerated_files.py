"""Files that break ONNX's rules in ways that onnxruntime tolerates, and what ortgrad does with them.

    python tests/sweeps/tolerated_files.py    # a table of all of them

Each change is made to a small network. What onnxruntime loads, ortgrad loads too, with the same results, or
says why it does not (`AMBIGUOUS`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import ortgrad
from ortgrad.errors import OrtgradError
from ortgrad.graph.trials import onnxruntime_errors

X = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
# What onnxruntime loads, but what has more than one meaning: ortgrad refuses it.
AMBIGUOUS = {
    "Constants of other content",
    "initializers of other content",
    "an initializer and a Constant of other content",
}
Change = Callable[[onnx.ModelProto], None]
CHANGES: dict[str, Change] = {}


def change(name: str) -> Callable[[Change], Change]:
    def add(function: Change) -> Change:
        CHANGES[name] = function
        return function

    return add


def network() -> onnx.ModelProto:
    """y = relu(x @ w) * c + b, and a branch."""
    return onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 3] x) => (float[N, 2] y)
        <float[3, 2] w = {1, -2, 3, 0.5, -1, 2}, float[2] b = {0.5, -0.5}> {
            c = Constant<value = float[2] {2, 3}>()
            m = MatMul(x, w)
            r = Relu(m)
            s = Mul(r, c)
            always = Constant<value = bool {1}>()
            t = If(always) <then_branch = one () => (float[N, 2] p) { p = Add(s, b) },
                            else_branch = two () => (float[N, 2] q) { q = Sub(s, b) }>
            y = Mul(t, c)
        }""")


def constant(name: str, *values: float) -> onnx.NodeProto:
    return helper.make_node(
        "Constant", [], [name], value=numpy_helper.from_array(np.float32(values), "value")
    )


def tensor(name: str, *values: float) -> TensorProto:
    return numpy_helper.from_array(np.float32(values), name)


def insert(model: onnx.ModelProto, place: int, node: onnx.NodeProto) -> None:
    nodes = [copy.deepcopy(each) for each in model.graph.node]
    nodes.insert(place, node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def branch(model: onnx.ModelProto) -> onnx.GraphProto:
    return next(node for node in model.graph.node if node.op_type == "If").attribute[0].g


@change("Constants of one name and content")
def _(model: onnx.ModelProto) -> None:
    insert(model, 4, constant("c", 2, 3))


@change("three Constants of one name and content")
def _(model: onnx.ModelProto) -> None:
    insert(model, 4, constant("c", 2, 3))
    insert(model, 0, constant("c", 2, 3))


@change("Constants of one name and content, named differently")
def _(model: onnx.ModelProto) -> None:
    node = constant("c", 2, 3)
    node.name = "again"
    insert(model, 4, node)


@change("Constants of one content in two forms")
def _(model: onnx.ModelProto) -> None:
    node = helper.make_node("Constant", [], ["c"], value_floats=[2.0, 3.0])
    insert(model, 4, node)


@change("Constants of other content")
def _(model: onnx.ModelProto) -> None:
    insert(model, 4, constant("c", 5, 3))


@change("Constants of one name in a subgraph")
def _(model: onnx.ModelProto) -> None:
    graph = branch(model)
    graph.node.extend([constant("k", 1), constant("k", 1)])


@change("a Constant that hides an outer one")
def _(model: onnx.ModelProto) -> None:
    branch(model).node.append(constant("c", 2, 3))


@change("equal initializers")
def _(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(copy.deepcopy(model.graph.initializer[0]))


@change("initializers of other content")
def _(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(tensor("b", 7, 8))


@change("an initializer and a Constant of one content")
def _(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(tensor("c", 2, 3))


@change("an initializer and a Constant of other content")
def _(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(tensor("c", 9, 9))


@change("the same node twice")
def _(model: onnx.ModelProto) -> None:
    insert(model, 3, copy.deepcopy(model.graph.node[2]))


@change("nodes in reverse order")
def _(model: onnx.ModelProto) -> None:
    nodes = [copy.deepcopy(node) for node in reversed(model.graph.node)]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


@change("nodes of one name")
def _(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.name = "node"


@change("value_info twice")
def _(model: onnx.ModelProto) -> None:
    value = helper.make_tensor_value_info("r", TensorProto.FLOAT, ["N", 2])
    model.graph.value_info.extend([value, value])


@change("value_info of nothing")
def _(model: onnx.ModelProto) -> None:
    model.graph.value_info.append(helper.make_tensor_value_info("nothing", TensorProto.FLOAT, [4]))


@change("value_info of an input and an output")
def _(model: onnx.ModelProto) -> None:
    model.graph.value_info.extend([model.graph.input[0], model.graph.output[0]])


@change("value_info without a type")
def _(model: onnx.ModelProto) -> None:
    model.graph.value_info.add(name="r")


@change("value_info without a name")
def _(model: onnx.ModelProto) -> None:
    model.graph.value_info.append(helper.make_tensor_value_info("", TensorProto.FLOAT, [4]))


@change("value_info with other names of sizes")
def _(model: onnx.ModelProto) -> None:
    model.graph.value_info.append(helper.make_tensor_value_info("r", TensorProto.FLOAT, ["M", "K"]))


@change("value_info of another rank")
def _(model: onnx.ModelProto) -> None:
    model.graph.value_info.append(helper.make_tensor_value_info("r", TensorProto.FLOAT, [2, 2, 2]))


@change("value_info of another type")
def _(model: onnx.ModelProto) -> None:
    model.graph.value_info.append(helper.make_tensor_value_info("r", TensorProto.INT64, ["N", 2]))


@change("an output of another shape")
def _(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 7


@change("an output without a type")
def _(model: onnx.ModelProto) -> None:
    model.graph.output[0].ClearField("type")


@change("an output twice")
def _(model: onnx.ModelProto) -> None:
    model.graph.output.append(copy.deepcopy(model.graph.output[0]))


@change("an input as output")
def _(model: onnx.ModelProto) -> None:
    model.graph.output.append(copy.deepcopy(model.graph.input[0]))


@change("an initializer as output")
def _(model: onnx.ModelProto) -> None:
    model.graph.output.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, [2]))


@change("an input twice")
def _(model: onnx.ModelProto) -> None:
    model.graph.input.append(copy.deepcopy(model.graph.input[0]))


@change("an unused input")
def _(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("unused", TensorProto.FLOAT, [4]))


@change("an unused initializer without a name")
def _(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(tensor("", 1))


@change("an unused node")
def _(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Relu", ["m"], ["unused"]))


@change("an unused node of an unknown operator")
def _(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Unknown", ["m"], ["unused"]))


@change("an unused node that reads nothing known")
def _(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Relu", ["nowhere"], ["unused"]))


@change("a node without outputs")
def _(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Relu", ["m"], [""]))


@change("empty inputs at the end")
def _(model: onnx.ModelProto) -> None:
    node = helper.make_node("Clip", ["r", "", ""], ["clipped"])
    insert(model, 3, node)
    next(n for n in model.graph.node if n.op_type == "Mul").input[0] = "clipped"


@change("too many empty inputs")
def _(model: onnx.ModelProto) -> None:
    model.graph.node[2].input.extend(["", ""])


@change("too many empty outputs")
def _(model: onnx.ModelProto) -> None:
    model.graph.node[2].output.extend(["", ""])


@change("an attribute that the operator does not have")
def _(model: onnx.ModelProto) -> None:
    model.graph.node[2].attribute.append(helper.make_attribute("alpha", 2.0))


@change("an attribute twice")
def _(model: onnx.ModelProto) -> None:
    insert(model, 3, helper.make_node("LeakyRelu", ["r"], ["leaky"], alpha=0.5))
    model.graph.node[3].attribute.append(helper.make_attribute("alpha", 0.5))
    model.graph.node[4].input[0] = "leaky"


@change("an attribute without a type")
def _(model: onnx.ModelProto) -> None:
    insert(model, 3, helper.make_node("LeakyRelu", ["r"], ["leaky"], alpha=0.5))
    model.graph.node[3].attribute[0].ClearField("type")
    model.graph.node[4].input[0] = "leaky"


@change("the domain ai.onnx")
def _(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.domain = "ai.onnx"
    model.opset_import[0].domain = "ai.onnx"


@change("an import twice")
def _(model: onnx.ModelProto) -> None:
    model.opset_import.append(helper.make_opsetid("", 17))


@change("imports of two versions")
def _(model: onnx.ModelProto) -> None:
    model.opset_import.append(helper.make_opsetid("", 13))


@change("an import of an unknown domain")
def _(model: onnx.ModelProto) -> None:
    model.opset_import.append(helper.make_opsetid("unknown", 3))


@change("no names of graphs")
def _(model: onnx.ModelProto) -> None:
    model.graph.ClearField("name")
    branch(model).ClearField("name")


@change("initializers that are no inputs, before IR version 4")
def _(model: onnx.ModelProto) -> None:
    model.ir_version = 3


@change("no IR version")
def _(model: onnx.ModelProto) -> None:
    model.ClearField("ir_version")


@change("an unused function that calls nothing known")
def _(model: onnx.ModelProto) -> None:
    imports = [helper.make_opsetid("", 17)]
    node = helper.make_node("Unknown", ["a"], ["c"])
    model.functions.append(helper.make_function("local", "F", ["a"], ["c"], [node], imports))
    model.opset_import.append(helper.make_opsetid("local", 1))


@change("dimensions of both kinds")
def _(model: onnx.ModelProto) -> None:
    dim = model.graph.input[0].type.tensor_type.shape.dim[0]
    dim.dim_param = ""


@change("negative sizes")
def _(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1


@change("a tensor with two kinds of data")
def _(model: onnx.ModelProto) -> None:
    model.graph.initializer[1].raw_data = np.float32([0.5, -0.5]).tobytes()
    model.graph.initializer[1].float_data.extend(
        [0.5, -0.5][: 2 - len(model.graph.initializer[1].float_data)]
    )


@change("training information")
def _(model: onnx.ModelProto) -> None:
    model.training_info.add()


@change("metadata twice")
def _(model: onnx.ModelProto) -> None:
    model.metadata_props.add(key="a", value="1")
    model.metadata_props.add(key="a", value="2")


@change("surplus outputs of a normalization")
def _(model: onnx.ModelProto) -> None:
    """As onnxruntime-training 1.19.2 writes it; onnxruntime itself refuses it."""
    for name, values in {"one": (1, 1), "mean": (0, 1), "var": (1, 2)}.items():
        model.graph.initializer.append(tensor(name, *values))
    node = helper.make_node(
        "BatchNormalization", ["r", "one", "b", "mean", "var"], ["n", "mean2", "var2"], training_mode=0
    )
    insert(model, 3, node)
    model.graph.node[4].input[0] = "n"


def changed(name: str) -> onnx.ModelProto:
    model = network()
    CHANGES[name](model)
    return model


def plain(model: onnx.ModelProto, x: np.ndarray = X) -> list[np.ndarray] | None:
    """The results of onnxruntime; None if it refuses the model."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        given = {"x": x, "unused": np.zeros(4, np.float32)}
        feeds = {value.name: given[value.name] for value in session.get_inputs()}
        results: list[np.ndarray] = session.run(None, feeds)
    except onnxruntime_errors():
        return None
    return results


def ours(model: onnx.ModelProto) -> tuple[list[np.ndarray], np.ndarray] | OrtgradError:
    """Results in a session, and the gradient of the sum of y towards x in a plain session."""
    given = {"x": X, "unused": np.zeros(4, np.float32)}
    try:
        session = ortgrad.InferenceSession(model)
        results = session.run(None, {value.name: given[value.name] for value in session.get_inputs()})
        backward = ortgrad.build_gradient_model(model, wrt="x", of="y")
        session = ortgrad.InferenceSession(backward)
        given["y_grad"] = np.ones((2, 2), np.float32)
        feeds = {v.name: given[v.name] for v in session.get_inputs() if v.name in given}
        return results, session.run(["x_grad"], feeds)[0]
    except OrtgradError as error:
        return error


def main() -> None:
    for name in CHANGES:
        model = changed(name)
        there, here = plain(model), ours(model)
        text = "ok" if isinstance(here, tuple) else f"{type(here).__name__}: {here}"
        if isinstance(here, tuple) and there is not None:
            same = all(np.allclose(a, b) for a, b in zip(there, here[0], strict=True))
            text = "same" if same else "OTHER RESULTS"
        print(f"{name:55} onnxruntime {'ok     ' if there is not None else 'refuses'} ortgrad {text}"[:230])


if __name__ == "__main__":
    main()
