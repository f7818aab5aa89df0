"""Models that grow in one respect, by the number of their nodes; see scaling.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
Model = Callable[[int], onnx.ModelProto]
MODELS: dict[str, Model] = {}


class Graph:
    """A model under construction, from an input `x` of shape [N, 4]."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[TensorProto] = []
        self.inputs = [helper.make_tensor_value_info("x", FLOAT, ["N", 4])]
        self.functions: list[onnx.FunctionProto] = []
        self.count = 0
        self.prefix = ""

    def add(self, op: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        names = []
        for _ in range(outputs):
            self.count += 1
            names.append(f"{self.prefix}h{self.count}")
        node = helper.make_node(op, inputs, names, domain=domain, name=f"n_{names[0]}", **attributes)
        self.nodes.append(node)
        return names[0] if outputs == 1 else names

    def weight(self, array: Any, name: str | None = None) -> str:
        name = name or f"{self.prefix}w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def matrix(self) -> str:
        return self.weight(np.eye(4, dtype=np.float32) * 0.9)

    def model(self, *outputs: str, shape: Any = ("N", 4), version: int = 20) -> onnx.ModelProto:
        results = [helper.make_tensor_value_info(name, FLOAT, shape) for name in outputs]
        graph = helper.make_graph(self.nodes, "g", self.inputs, results, self.weights)
        opsets = [helper.make_opsetid("", version)]
        opsets += [helper.make_opsetid(domain, 1) for domain in sorted({f.domain for f in self.functions})]
        return helper.make_model(graph, opset_imports=opsets, functions=self.functions, ir_version=10)


def model(function: Model) -> Model:
    MODELS[function.__name__.replace("_", " ")] = function
    return function


@model
def chain(n: int) -> onnx.ModelProto:
    g, h = Graph(), "x"
    h = g.add("MatMul", h, g.matrix())
    for i in range(n):
        h = g.add(("Tanh", "Sigmoid", "Relu", "Neg")[i % 4], h)
    return g.model(h)


@model
def shared_weights(n: int) -> onnx.ModelProto:
    g, h = Graph(), "x"
    weights = [g.matrix() for _ in range(3)]
    for i in range(n):
        h = g.add("MatMul", h, weights[i % 3])
    return g.model(h)


@model
def fan_out(n: int) -> onnx.ModelProto:
    """One value that n nodes read, whose results are added up in a tree."""
    g = Graph()
    y = g.add("MatMul", "x", g.matrix())
    values = [g.add("Mul", y, g.weight(np.float32([i]))) for i in range(n // 2)]
    while len(values) > 1:
        pairs = [g.add("Add", *values[i : i + 2]) for i in range(0, len(values) - 1, 2)]
        values = pairs + values[2 * len(pairs) :]
    return g.model(values[0])


@model
def fan_in(n: int) -> onnx.ModelProto:
    """A Sum and a Concat with n inputs."""
    g = Graph()
    values = [g.add("Mul", "x", g.weight(np.full(4, i, np.float32))) for i in range(n)]
    g.add("Sum", *values)
    return g.model(g.add("Concat", f"h{g.count}", *values, axis=1), shape=("N", None))


@model
def weights(n: int) -> onnx.ModelProto:
    g, h = Graph(), "x"
    for _ in range(n // 3):
        h = g.add("Add", g.add("MatMul", h, g.matrix()), g.weight(np.zeros(4, np.float32)))
        h = g.add("Tanh", h)
    return g.model(h)


@model
def inputs(n: int) -> onnx.ModelProto:
    g, h = Graph(), "x"
    w = g.matrix()
    for i in range(n // 2):
        g.inputs.append(helper.make_tensor_value_info(f"x{i}", FLOAT, [f"N{i}" if i % 2 else "N", 4]))
        h = g.add("Add", g.add("MatMul", f"x{i}", w), h)
    return g.model(h)


@model
def constants(n: int) -> onnx.ModelProto:
    """Many Constant nodes, initializers that nobody reads, and scalars."""
    g, h = Graph(), "x"
    h = g.add("MatMul", h, g.matrix())
    for i in range(n // 4):
        g.weight(np.int64([i]))
        c = g.add("Constant", value=numpy_helper.from_array(np.float32(i)))
        d = g.add("ConstantOfShape", g.weight(np.int64([1, 4])))
        h = g.add("Add", g.add("Mul", h, c), d)
    return g.model(h)


@model
def residuals(n: int) -> onnx.ModelProto:
    g, h = Graph(), "x"
    for _ in range(n // 4):
        h = g.add("Add", h, g.add("MatMul", g.add("Relu", g.add("MatMul", h, g.matrix())), g.matrix()))
    return g.model(h)


@model
def images(n: int) -> onnx.ModelProto:
    """Convolutions, normalizations and pools, without a batch of a known size."""
    g, h = Graph(), "x"
    h = g.add("Reshape", h, g.weight(np.int64([0, 1, 2, 2])))
    for i in range(n // 6):
        c = g.add("Conv", h, g.weight(np.full((1, 1, 3, 3), 0.1, np.float32)), pads=[1, 1, 1, 1])
        statistics = [g.weight(np.ones(1, np.float32)) for _ in range(4)]
        b = g.add("BatchNormalization", c, *statistics)
        p = g.add("Add", g.add("Relu", b), h)
        if i % 3 == 2:
            p = g.add("MaxPool", p, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
        h = g.add("AveragePool", p, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    return g.model(h, shape=None)


@model
def attention(n: int) -> onnx.ModelProto:
    g = Graph()
    h = g.add("Unsqueeze", "x", g.weight(np.int64([0])))
    heads, joined = g.weight(np.int64([0, 0, 2, 2])), g.weight(np.int64([0, 0, 4]))
    for _ in range(n // 20):
        scale, bias = g.weight(np.ones(4, np.float32)), g.weight(np.zeros(4, np.float32))
        z = g.add("LayerNormalization", h, scale, bias)
        q, k, v = (
            g.add("Transpose", g.add("Reshape", g.add("MatMul", z, g.matrix()), heads), perm=[0, 2, 1, 3])
            for _ in range(3)
        )
        a = g.add("MatMul", q, g.add("Transpose", k, perm=[0, 1, 3, 2]))
        a = g.add("Softmax", g.add("Mul", a, g.weight(np.float32(0.7))), axis=-1)
        a = g.add("Transpose", g.add("MatMul", a, v), perm=[0, 2, 1, 3])
        h = g.add("Add", h, g.add("MatMul", g.add("Reshape", a, joined), g.matrix()))
        h = g.add("Add", h, g.add("Gelu", g.add("MatMul", h, g.matrix())))
    return g.model(h, shape=None)


@model
def splits(n: int) -> onnx.ModelProto:
    g, h = Graph(), "x"
    h = g.add("MatMul", h, g.matrix())
    starts, ends, axes = (g.weight(np.int64([k])) for k in (1, 3, 1))
    for _ in range(n // 5):
        a, b = g.add("Split", h, outputs=2, axis=1, num_outputs=2)
        c = g.add("Slice", h, starts, ends, axes)
        h = g.add("Concat", g.add("Mul", c, b), a, axis=1)
    return g.model(h, shape=("N", None))


@model
def one_split(n: int) -> onnx.ModelProto:
    """A Split with n outputs, each of which is used."""
    g = Graph()
    wide = g.add("MatMul", "x", g.weight(np.ones((4, n // 2), np.float32)))
    parts = g.add("Split", wide, outputs=n // 2, axis=1, num_outputs=n // 2)
    return g.model(g.add("Concat", *[g.add("Tanh", part) for part in reversed(parts)], axis=1), shape=None)


@model
def slices(n: int) -> onnx.ModelProto:
    """n slices of one value."""
    g = Graph()
    y = g.add("MatMul", "x", g.weight(np.ones((4, n // 2), np.float32)))
    axis, parts = g.weight(np.int64([1])), []
    for i in range(n // 2):
        bounds = g.weight(np.int64([i])), g.weight(np.int64([i + 1]))
        parts.append(g.add("Exp", g.add("Slice", y, *bounds, axis)))
    return g.model(g.add("Concat", *parts, axis=1), shape=None)


@model
def shapes(n: int) -> onnx.ModelProto:
    g, h = Graph(), "x"
    h = g.add("MatMul", h, g.matrix())
    zero, one, axes = g.weight(np.int64(0)), g.weight(np.int64(1)), g.weight(np.int64([0]))
    two = g.weight(np.int64(2))
    for i in range(n // 9):
        shape = g.add("Shape", h)
        rows, columns = g.add("Gather", shape, zero), g.add("Gather", shape, one)
        rows = g.add("Div", g.add("Mul", rows, two), two)
        sizes = [g.add("Unsqueeze", value, axes) for value in (rows, columns)]
        h = g.add("Reshape", h, g.add("Concat", *sizes, axis=0))
        h = g.add("Relu" if i % 2 else "Tanh", h)
    return g.model(h, shape=None)


@model
def growing_sizes(n: int) -> onnx.ModelProto:
    """Every size is computed from the one before."""
    g, h = Graph(), "x"
    pads, axes = g.weight(np.int64([1, 1])), g.weight(np.int64([1]))
    none = g.weight(np.float32(0))
    h = g.add("Unsqueeze", h, g.weight(np.int64([0])))
    h = g.add("Mul", h, g.weight(np.ones((1, 3, 1), np.float32)))
    g.inputs[0] = helper.make_tensor_value_info("x", FLOAT, [3, "L"])
    for _ in range(n // 3):
        h = g.add("Pad", h, pads, none, axes)
        h = g.add("MaxPool", h, kernel_shape=[4], strides=[2], pads=[2, 2])
        h = g.add("Concat", h, h, axis=2)
    return g.model(h, shape=None)


@model
def unknown_sizes(n: int) -> onnx.ModelProto:
    """Sizes that depend on elements."""
    g, h = Graph(), "x"
    h = g.add("MatMul", h, g.matrix())
    for _ in range(n // 4):
        where = g.add("NonZero", g.add("Relu", h))
        rows = g.add("Gather", where, g.weight(np.int64(0)), axis=0)
        h = g.add("Gather", h, rows, axis=0)
    return g.model(h, shape=None)


@model
def known_values(n: int) -> onnx.ModelProto:
    """A long computation with integers, whose result is a shape."""
    g = Graph()
    h, one = g.weight(np.int64([2])), g.weight(np.int64([1]))
    for i in range(n):
        h = g.add("Add" if i % 2 else "Sub", h, one)
    y = g.add("MatMul", "x", g.matrix())
    y = g.add("Reshape", y, g.add("Concat", h, g.weight(np.int64([-1])), axis=0))
    return g.model(y, shape=None)


def branch(name: str, op: str, value: str, weight: str) -> onnx.GraphProto:
    node = helper.make_node(op, [value, weight], [name])
    return helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, FLOAT, ["N", 4])])


@model
def branches(n: int) -> onnx.ModelProto:
    g, h = Graph(), "x"
    g.inputs.append(helper.make_tensor_value_info("c", BOOL, []))
    w = g.matrix()
    for i in range(n // 4):
        own = g.matrix() if i % 2 else w
        h = g.add(
            "If",
            "c",
            then_branch=branch(f"a{i}", "MatMul", h, own),
            else_branch=branch(f"b{i}", "Mul", h, h),
        )
    return g.model(h)


def loops_of(n: int, chained: bool) -> onnx.ModelProto:
    g, h = Graph(), "x"
    y = h = g.add("Relu", h)
    g.inputs.append(helper.make_tensor_value_info("trips", INT64, []))
    w = g.matrix()
    for i in range(n // 4):
        body = helper.make_graph(
            [
                helper.make_node("MatMul", [f"s{i}", w], [f"t{i}"]),
                helper.make_node("Identity", [f"c{i}"], [f"d{i}"]),
            ],
            f"body{i}",
            [
                helper.make_tensor_value_info(f"i{i}", INT64, []),
                helper.make_tensor_value_info(f"c{i}", BOOL, []),
                helper.make_tensor_value_info(f"s{i}", FLOAT, None),
            ],
            [
                helper.make_tensor_value_info(f"d{i}", BOOL, []),
                helper.make_tensor_value_info(f"t{i}", FLOAT, None),
            ],
        )
        z = g.add("Loop", "trips", "", h if chained else y, body=body)
        h = z if chained else g.add("Add", h, z)
    return g.model(h, shape=None)


@model
def loops(n: int) -> onnx.ModelProto:
    return loops_of(n, chained=False)


@model
def chained_loops(n: int) -> onnx.ModelProto:
    return loops_of(n, chained=True)


@model
def outputs(n: int) -> onnx.ModelProto:
    g, h = Graph(), "x"
    h = g.add("MatMul", h, g.matrix())
    results = []
    for i in range(n // 2):
        h = g.add("Tanh", g.add("Mul", h, g.weight(np.float32([i + 1]))))
        results.append(h)
    return g.model(*reversed(results))


@model
def long_names(n: int) -> onnx.ModelProto:
    g, h = Graph(), "x"
    h = g.add("MatMul", h, g.matrix())
    g.prefix = "/model/encoder" + "/layers.12/attention/output/dense" * 6 + "/"
    for i in range(n):
        h = g.add("Tanh" if i % 2 else "Sigmoid", h)
    return g.model(h)


@model
def names(n: int) -> onnx.ModelProto:
    """Names that are taken already, or are those that a builder would choose."""
    g, h = Graph(), "x"
    w = g.matrix()
    for i in range(n // 2):
        h = g.add("MatMul", h, w)
        g.nodes[-1].name = ""
        g.nodes.append(helper.make_node("Tanh", [h], [f"x_grad_{i + 2}" if i % 2 else f"{w}_grad_{i}"]))
        h = g.nodes[-1].output[0]
    return g.model(h)


def function(name: str) -> onnx.FunctionProto:
    nodes = [helper.make_node("MatMul", ["a", "b"], ["t"]), helper.make_node("Tanh", ["t"], ["y"])]
    return helper.make_function("own", name, ["a", "b"], ["y"], nodes, [helper.make_opsetid("", 20)])


@model
def functions(n: int) -> onnx.ModelProto:
    """n functions, each with one call."""
    g, h = Graph(), "x"
    w = g.matrix()
    for i in range(n // 3):
        g.functions.append(function(f"F{i}"))
        h = g.add(f"F{i}", h, w, domain="own")
    return g.model(h)


@model
def calls(n: int) -> onnx.ModelProto:
    """One function with n calls."""
    g, h = Graph(), "x"
    w = g.matrix()
    g.functions.append(function("F"))
    for _ in range(n // 3):
        h = g.add("F", h, w, domain="own")
    return g.model(h)


@model
def copies(n: int) -> onnx.ModelProto:
    """Nodes that only copy, reshape or transpose."""
    g, h = Graph(), "x"
    h = g.add("MatMul", h, g.matrix())
    shape = g.weight(np.int64([-1, 4]))
    for _ in range(n // 6):
        h = g.add("Identity", g.add("Dropout", h))
        h = g.add("Transpose", g.add("Transpose", h, perm=[1, 0]), perm=[1, 0])
        h = g.add("Cast", g.add("Reshape", h, shape), to=FLOAT)
    return g.model(h)


@model
def quantized(n: int) -> onnx.ModelProto:
    g, h = Graph(), "x"
    h = g.add("MatMul", h, g.matrix())
    scale, zero = g.weight(np.float32(0.1)), g.weight(np.int8(0))
    for _ in range(n // 4):
        h = g.add("DequantizeLinear", g.add("QuantizeLinear", h, scale, zero), scale, zero)
        w = g.add("DequantizeLinear", g.weight(np.eye(4, dtype=np.int8)), scale, zero)
        h = g.add("MatMul", h, w)
    return g.model(h)


@model
def sequences(n: int) -> onnx.ModelProto:
    """A list of n elements, each of which is taken out."""
    g = Graph()
    y = g.add("MatMul", "x", g.matrix())
    parts = [g.add("Mul", y, g.weight(np.float32([i]))) for i in range(n // 3)]
    items = g.add("SequenceConstruct", *parts)
    taken = [g.add("SequenceAt", items, g.weight(np.int64(i))) for i in range(n // 3)]
    return g.model(g.add("Sum", *taken))


@model
def recurrences(n: int) -> onnx.ModelProto:
    g = Graph()
    h = g.add("Unsqueeze", "x", g.weight(np.int64([0])))
    axes = g.weight(np.int64([1]))
    for _ in range(n // 2):
        w, r = (g.weight(np.full((1, 12, 4), 0.1, np.float32)) for _ in range(2))
        h = g.add("Squeeze", g.add("GRU", h, w, r, outputs=1, hidden_size=4), axes)
    return g.model(h, shape=None)
