"""What depends on constants only is computed when a session is made, and not again in every run.

onnxruntime writes the model that it runs after its optimizations: no operator of ortgrad, and no other that
can be computed ahead, may have only constants as inputs there. The results are compared with those of plain
onnxruntime, which runs the bodies in the file.

    python tests/gradients/test_constant_nodes.py --count 500   # random models
    python tests/gradients/test_constant_nodes.py model.onnx    # towards all float inputs and parameters
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortgrad
from ortgrad.pipelines.prepare import prepare_loaded

# Started as a script, Python finds the modules of tests.
sys.path.insert(0, str(Path(__file__).parents[1]))

from support import amount, needs_numba, session_of_passes

Arrays = dict[str, np.ndarray]
WAYS = ("auto", "onnx")
# Sizes of x: samples, channels, rows and columns.
SIZES = (2, 16, 16, 16)


def options() -> onnxruntime.SessionOptions:
    found = onnxruntime.SessionOptions()
    found.log_severity_level = 3
    found.intra_op_num_threads = 1
    return found


def constant_nodes(graph: onnx.GraphProto, outer: frozenset[str] = frozenset()) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph and its subgraphs that read only values that cannot be fed."""
    fed = {value.name for value in graph.input}
    constant = outer | {tensor.name for tensor in graph.initializer if tensor.name not in fed}
    for node in graph.node:
        subgraphs = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
        for subgraph in subgraphs:
            yield from constant_nodes(subgraph, constant)
        if node.input and not subgraphs and all(name in constant for name in node.input if name):
            constant |= {*node.output}
            yield node


def optimized(model: onnx.ModelProto, way: str, folder: Path) -> onnx.ModelProto:
    """The model that onnxruntime runs."""
    path = folder / "optimized.onnx"
    chosen = options()
    chosen.optimized_model_filepath = str(path)
    # A session that is asked to save its model does without internal operators.
    session_of_passes(prepare_loaded(model, way, bodies=False), chosen)
    return onnx.load(path)


def assert_folded(model: onnx.ModelProto, folder: Path) -> None:
    for way in WAYS:
        repeated = [
            f"{node.domain}.{node.op_type} {node.name}"
            for node in constant_nodes(optimized(model, way, folder).graph)
        ]
        assert not repeated, (way, repeated)


def assert_unchanged(model: onnx.ModelProto, feeds: Arrays) -> None:
    plain = onnxruntime.InferenceSession(model.SerializeToString(), options()).run(None, feeds)
    for way in WAYS:
        results = ortgrad.InferenceSession(model, options(), kernels=way).run(None, feeds)
        for actual, expected in zip(results, plain, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


class Draw:
    """Random expressions of constants, and models that use them beside an input x."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.names = (f"v{i}" for i in itertools.count())
        self.constants: list[onnx.TensorProto] = []

    def add(self, operator: str, *inputs: str, **attributes: object) -> str:
        name = next(self.names)
        self.nodes.append(helper.make_node(operator, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, array: np.ndarray) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def number(self, shape: Sequence[int]) -> np.ndarray:
        return self.generator.normal(0.0, 0.5, shape).astype(np.float32)

    def choose(self, count: int) -> int:
        return int(self.generator.integers(count))

    def source(self, shape: Sequence[int]) -> str:
        """A tensor of this shape, stored in one of the ways in which weights are."""
        kind = self.choose(6)
        if kind == 0:
            return self.constant(self.number(shape))
        # onnxruntime moves DequantizeLinear of matrices to where QuantizeLinear would not take int32.
        integer = [np.int8, np.uint8, np.int16, np.int32][self.choose(4 if len(shape) == 1 else 3)]
        integers = self.constant(self.generator.integers(0, 100, shape).astype(integer))
        if kind == 1:
            scaled = self.add("Mul", self.add("Cast", integers, to=TensorProto.FLOAT), self.scale(()))
            return self.add("Sub", scaled, self.scale((1,)))
        axis = self.choose(len(shape))
        sizes = [(), (1,), (shape[axis],)][self.choose(3)]
        inputs = [integers, self.scale(sizes)]
        if self.choose(2):
            inputs.append(self.constant(np.full(sizes, 0 if integer == np.int32 else 50, integer)))
        return self.add("DequantizeLinear", *inputs, axis=axis - len(shape) * self.choose(2))

    def scale(self, sizes: tuple[int, ...]) -> str:
        return self.constant(self.generator.uniform(0.01, 0.02, sizes).astype(np.float32))

    def expression(self, shape: tuple[int, ...]) -> str:
        """An expression of constants, of operators that a session with kernels replaces."""
        value = self.source(shape)
        for _ in range(self.choose(4)):
            kind = self.choose(7)
            if kind == 0:
                order = [*range(len(shape))]
                order[-2:] = order[:-3:-1]
                value = self.add("Transpose", value, perm=order)
                value = self.add("Transpose", self.add("Elu", value), perm=order)
            elif kind == 1:
                value = self.add("Sigmoid", self.add("Mul", value, self.source(shape)))
            elif kind == 2:
                value = self.add("Add", self.add("Tanh", value), self.source(shape[-1:]))
            elif kind == 3:
                mean = self.add("ReduceMean", value, self.constant(np.array([-1])), keepdims=1)
                centred = self.add("Sub", value, mean)
                square = self.add("Mul", centred, centred)
                variance = self.add("ReduceMean", square, self.constant(np.array([-1])), keepdims=1)
                shifted = self.add("Add", variance, self.constant(np.float32(1e-5)))
                value = self.add("Mul", centred, self.add("Reciprocal", self.add("Sqrt", shifted)))
            elif kind == 4:
                flat = self.add("Reshape", value, self.constant(np.array([-1, shape[-1]])))
                value = self.add("Reshape", self.add("Exp", flat), self.constant(np.array(shape)))
                value = self.add("Mul", value, self.constant(np.float32(0.1)))
            elif kind == 5 and len(shape) == 2:
                value = self.add("Gemm", self.source((300, shape[0])), self.source((300, shape[1])), transA=1)
                value = self.add("Mul", value, self.constant(np.float32(1e-3)))
            else:
                value = self.add("Relu", self.add("Neg", self.add("Sub", value, self.source(shape))))
        return value

    def reader(self, x: str) -> str:
        """A node that reads x and constants; the result has the shape of x."""
        channels, rows, columns = SIZES[1:]
        kind = self.choose(6)
        if kind == 0:
            return self.add("MatMul", x, self.expression((columns, columns)))
        if kind == 1:
            weights = self.expression((channels, channels, 3, 3))
            return self.add("Conv", x, weights, self.expression((channels,)), pads=[1, 1, 1, 1])
        if kind == 2:
            weights = self.expression((channels, 1, 3, 3))
            return self.add("Conv", x, weights, pads=[1, 1, 1, 1], group=channels)
        if kind == 3:
            x = self.add("Mul", x, self.expression((columns,)))
            return self.add("Tanh", self.add("Add", x, self.expression((channels, rows, 1))))
        if kind == 4:
            weights = self.expression((channels, channels, 1, 1))
            return self.add("Relu", self.add("Conv", x, weights))
        return self.branch(x)

    def branch(self, x: str) -> str:
        """An If whose branches have constants of their own, and read those outside of them."""
        outside, before, graphs = self.expression((SIZES[-1],)), self.nodes, []
        for _ in range(2):
            self.nodes = []
            factor = self.add("Mul", self.expression((SIZES[-1],)), outside)
            y = self.add("Sigmoid", self.add("Mul", x, factor))
            result = helper.make_tensor_value_info(y, TensorProto.FLOAT, SIZES)
            graphs.append(helper.make_graph(self.nodes, "branch", [], [result]))
        self.nodes = before
        condition = self.add("Greater", self.add("ReduceMax", x, keepdims=0), self.scale(()))
        return self.add("If", condition, then_branch=graphs[0], else_branch=graphs[1])

    def model(self, loss: bool) -> onnx.ModelProto:
        """A model of x whose output has the shape of x, or is one number."""
        y = "x"
        for _ in range(1 + self.choose(3)):
            y = self.reader(y)
        if loss:
            # Its gradient does not depend on x up to here.
            y = self.add("ReduceMean", self.add("AveragePool", y, kernel_shape=[2, 2]), keepdims=0)
        self.nodes.append(helper.make_node("Identity", [y], ["y"]))
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, SIZES)
        output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [] if loss else SIZES)
        graph = helper.make_graph(self.nodes, "g", [x], [output], self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def check(seed: int, folder: Path) -> None:
    draw = Draw(seed)
    loss = bool(draw.choose(2))
    model = draw.model(loss)
    built = ortgrad.build_gradient_model(model, wrt=["x"])
    assert_folded(built, folder)
    feeds = {"x": draw.number(SIZES)} | ({} if loss else {"y_grad": draw.number(SIZES)})
    assert_unchanged(built, feeds)


@needs_numba
@pytest.mark.parametrize("seed", range(amount(6, 500)))
def test_random_models(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


def float_inputs(model: onnx.ModelProto) -> list[str]:
    stored = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in stored]
    return [value.name for value in inputs if value.type.tensor_type.elem_type == TensorProto.FLOAT]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--count", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.count):
            try:
                check(seed, Path(folder))
            except (AssertionError, ortgrad.OrtgradError) as error:
                print(f"seed {seed}: {str(error)[:1000]}")
        for path in arguments.models:
            for wrt in (None, float_inputs(onnx.load(path))):
                try:
                    assert_folded(ortgrad.build_gradient_model(path, wrt=wrt), Path(folder))
                except (AssertionError, ortgrad.OrtgradError) as error:
                    print(f"{path}, wrt={wrt}: {str(error)[:1000]}")


if __name__ == "__main__":
    main()
