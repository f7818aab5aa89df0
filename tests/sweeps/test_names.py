"""Names of nodes and values: each is there once, whatever the model and its names, and they read well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import onnx
import onnxruntime
import pytest

import ortgrad

# Operators on x and y of one shape that give a tensor of that shape; v is a vector, k a small kernel.
OPERATORS = {
    "Add": "Add({}, y)",
    "Mul": "Mul({0}, {0})",
    "Div": "Div({}, y)",
    "Pow": "Pow({}, y)",
    "Max": "Max({}, y, v)",
    "Mod": "Mod <fmod = 1> ({}, y)",
    "Where": "Where(c, {}, v)",
    "PRelu": "PRelu({}, v)",
    "MatMul": "MatMul({}, y)",
    "Relu": "Relu({})",
    "Tanh": "Tanh({})",
    "Sigmoid": "Sigmoid({})",
    "Gelu": "Gelu({})",
    "Celu": "Celu({})",
    "Softmax": "Softmax({})",
    "LayerNormalization": "LayerNormalization({}, v, v)",
    "BatchNormalization": "BatchNormalization({}, v, v, v, v)",
    "Conv": "Conv <pads = [1, 1, 1, 1]> ({}, k)",
    "MaxPool": "MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> ({})",
    "AveragePool": "AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> ({})",
    "If": """If (d) <
        then_branch = t () => (float[1, 3, 3, 3] r) {{ q = Div({0}, y) r = Tanh(q) }},
        else_branch = e () => (float[1, 3, 3, 3] r) {{ q = Softmax({0}) r = Mul(q, v) }}>""",
    "Loop": """Loop (two, d, {}) <body = b (int64 i, bool g, float[1, 3, 3, 3] s)
        => (bool g2, float[1, 3, 3, 3] s2) {{ g2 = Identity(g) u = Div(s, y) s2 = Tanh(u) }}>""",
    "Scan": """Scan <num_scan_inputs = 1, body = b (float[3, 3, 3] s) => (float[3, 3, 3] s2)
        {{ u = Mul(s, v) s2 = Softmax(u) }}> ({})""",
}
INPUTS = {
    "x": (1, 3, 3, 3),
    "y": (1, 3, 3, 3),
    "v": (3,),
    "k": (3, 3, 3, 3),
    "d": np.array(True),
}


def parse(graph: str, opset: int = 21) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {graph}')


def pair(first: str, second: str) -> onnx.ModelProto:
    """z = second(first(x)), with nodes of no name, as the parser and many exporters write them."""
    return parse(
        f"""pair (float[1, 3, 3, 3] x, float[1, 3, 3, 3] y, float[3] v, float[3, 3, 3, 3] k, bool d)
        => (float[1, 3, 3, 3] z)
        <int64 two = {{2}}, bool[3] c = {{1, 0, 1}}> {{
            t = {OPERATORS[first].format("x")}
            z = {OPERATORS[second].format("t")}
        }}"""
    )


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and the graphs inside it."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from graphs(inner)


def check_names(model: onnx.ModelProto) -> None:
    """Every node and every value of a model has a name of its own, in subgraphs and function bodies too."""
    bodies = [onnx.GraphProto(node=function.node) for function in model.functions]
    for body, function in zip(bodies, model.functions, strict=True):
        body.input.extend(onnx.ValueInfoProto(name=name) for name in function.input)
    for graph in (model.graph, *bodies):
        nodes, values = Counter[str](), Counter[str]()
        for inner in graphs(graph):
            nodes.update(node.name for node in inner.node)
            values.update({value.name for value in (*inner.input, *inner.initializer)})
            values.update(name for node in inner.node for name in node.output)
        for kind, found in (("node", nodes), ("value", values)):
            twice = [name for name, count in found.items() if name and count > 1]
            assert not twice, f"{kind} names that are there twice: {twice}"


def plain(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def registered(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    ortgrad.register(options)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


WAYS = {
    "plain": plain,
    "registered": registered,
    "python": lambda model: ortgrad.InferenceSession(model, kernels="python"),
    "onnx": lambda model: ortgrad.InferenceSession(model, kernels="onnx"),
    "auto": lambda model: ortgrad.InferenceSession(model, kernels="auto"),
}


def feeds(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    drawn = {k: v if isinstance(v, np.ndarray) else generator.uniform(0.5, 1.5, v) for k, v in INPUTS.items()}
    drawn["z_grad"] = generator.standard_normal(INPUTS["x"])
    wanted = {value.name for value in model.graph.input}
    return {k: v if v.dtype == bool else v.astype(np.float32) for k, v in drawn.items() if k in wanted}


@pytest.mark.parametrize("first", OPERATORS)
def test_all_models_of_two_nodes_have_names_that_are_there_once(first: str) -> None:
    for number, second in enumerate(OPERATORS):
        built = ortgrad.build_gradient_model(pair(first, second), wrt=["x", "y", "v", "k"], of="z")
        ready = ortgrad.prepare(built, kernels="onnx")
        for model in (built, ready):
            check_names(model)
        # Each way once in a while, so that all of them meet every operator.
        way = list(WAYS)[(number + list(OPERATORS).index(first)) % len(WAYS)]
        WAYS[way](built)


def gradients(model: onnx.ModelProto, session: onnxruntime.InferenceSession) -> list[np.ndarray]:
    return session.run(None, feeds(model))


@pytest.mark.parametrize("names", [("Div", "Tanh"), ("If", "Loop"), ("Scan", "Conv")])
def test_names_that_the_user_has_already(names: tuple[str, str]) -> None:
    """Every name that ortgrad would give, given by the user to a value, to a node, or to two nodes."""
    model = pair(*names)
    built = ortgrad.build_gradient_model(model, wrt=["x", "y"])
    expected = gradients(built, ortgrad.InferenceSession(built, kernels="onnx"))
    forward = {name for graph in graphs(model.graph) for node in graph.node for name in node.output}
    taken = {"x", "y", *forward}
    for ready in (built, ortgrad.prepare(built, kernels="onnx")):
        for graph in graphs(ready.graph):
            taken.update(name for node in graph.node for name in (node.name, *node.output))
    given = sorted(taken - {"x", "y", "", *forward})[:: 1 if len(taken) < 100 else 3]
    assert len(given) > 10
    for number, name in enumerate(given):
        hostile = onnx.ModelProto()
        hostile.CopyFrom(model)
        first, last = hostile.graph.node
        if number % 3:
            first.output[0] = name
            rename_inputs(hostile.graph, "t", name)
        if number % 3 != 1:
            # onnxruntime refuses the model as it is.
            first.name = last.name = name
        again = ortgrad.build_gradient_model(hostile, wrt=["x", "y"])
        assert again.graph.output[0].name == "z"
        check_names(again)
        check_names(ortgrad.prepare(again, kernels="onnx"))
        if number % 7:
            continue
        session = WAYS[list(WAYS)[number % len(WAYS)]](again)
        inputs = [value.name for value in again.graph.input]
        fed = dict(zip(inputs, feeds(built).values(), strict=True))
        for actual, wanted in zip(session.run(None, fed), expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=1e-6)


def rename_inputs(graph: onnx.GraphProto, old: str, new: str) -> None:
    for inner in graphs(graph):
        for node in inner.node:
            for i, name in enumerate(node.input):
                if name == old:
                    node.input[i] = new


@pytest.mark.parametrize("names", [("Div", "Tanh"), ("If", "Loop"), ("MatMul", "Scan"), ("Conv", "Softmax")])
def test_models_that_are_built_again(names: tuple[str, str]) -> None:
    model, of = pair(*names), "z"
    for _ in range(2):
        model = ortgrad.build_gradient_model(model, wrt=["x"], of=of)
        of = model.graph.output[-1].name
        check_names(model)
        check_names(ortgrad.prepare(model, kernels="onnx"))
        for load in WAYS.values():
            load(model)


def test_a_subgraph_in_a_subgraph() -> None:
    model = parse(
        """nested (float[3] x, float[3] w, bool d, int64 n) => (float[3] z) {
            z = Loop (n, d, x) <body = outer (int64 i, bool c, float[3] s) => (bool c2, float[3] s2) {
                c2 = Identity(c)
                h = Div(s, w)
                s2 = If (c) <
                    then_branch = a () => (float[3] r) {
                        q = Loop (n, c, h) <
                            body = inner (int64 j, bool e, float[3] u) => (bool f, float[3] u2) {
                            f = Identity(e)
                            p = Mul(u, w)
                            u2 = Tanh(p)
                        }>
                        r = Tanh(q)
                    },
                    else_branch = b () => (float[3] r) { q = Mul(h, h) r = Tanh(q) }
                >
            }>
        }"""
    )
    ortgrad.check_gradients(model, {"d": np.array(True), "n": np.array(2)}).raise_if_wrong()
    built = ortgrad.build_gradient_model(model, wrt=["x", "w"])
    check_names(built)
    for load in WAYS.values():
        load(built)


def test_functions_of_the_model_may_use_any_names() -> None:
    """Values in functions have the names of values outside, of subgraphs, and of each other."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21, "own" : 1]>
        calls (float[3] x, float[3] y, bool d) => (float[3] z) {
            [call] t = own.f(x, y)
            [call] s = own.f(t, y)
            z = If (d) <
                then_branch = a () => (float[3] r) { u = Div(s, y) r = own.f(u, y) },
                else_branch = b () => (float[3] r) { u = Mul(s, y) r = Tanh(u) }
            >
        }
        <domain: "own", opset_import: ["" : 21]>
        f (x, y) => (z) { [call] u = Div(x, y) t = Tanh(u) z = Add(t, x) }"""
    )
    built = ortgrad.build_gradient_model(model, wrt=["x", "y"])
    check_names(built)
    check_names(ortgrad.prepare(built, kernels="onnx"))
    for load in WAYS.values():
        load(built)


def test_names_tell_what_they_belong_to() -> None:
    model = parse(
        """net (float[N, 3, 8, 8] image, float[4, 3, 3, 3] w, float[4] bias) => (float[N, 4, 6, 6] out) {
            [conv1] h = Conv(image, w, bias)
            [relu1] relu = Relu(h)
            [tanh] out = Tanh(relu)
        }"""
    )
    model.graph.input[1].name = model.graph.node[0].input[1] = "conv1.weight"
    built = ortgrad.build_gradient_model(model, wrt=["conv1.weight", "bias"])
    nodes = {node.op_type: node for node in built.graph.node}
    assert [value.name for value in built.graph.output] == ["out", "conv1.weight_grad", "bias_grad"]
    assert nodes["ReluGrad"].name == "relu1_grad/ReluGrad"
    assert list(nodes["ReluGrad"].input) == ["relu_grad", "relu"]
    assert list(nodes["ReluGrad"].output) == ["h_grad"]
    assert nodes["ConvGrad"].name == "conv1_grad/ConvGrad"
    assert list(nodes["ConvGrad"].output)[1:] == ["conv1.weight_grad", "bias_grad"]
