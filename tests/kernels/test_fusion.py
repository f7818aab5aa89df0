"""Fused nodes: which nodes are fused, and that their results are those of onnxruntime's own nodes."""

from __future__ import annotations

import inspect
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from support import COMPILES, FASTEST, KERNELS, amount, needs_numba, session_of_passes

import ortgrad
from ortgrad.compiled import functions, mathematics
from ortgrad.compiled.source import source_of
from ortgrad.errors import NodeError
from ortgrad.graph.serialization import read, write
from ortgrad.lowering.fusion import fuse as fuse_pass
from ortgrad.lowering.fusion import kernel as fusion
from ortgrad.lowering.fusion.expressions import COMPILED, TABLE
from ortgrad.lowering.fusion.fuse import fuse
from ortgrad.lowering.fusion.program import Constant, Operand, Program, Step
from ortgrad.operators.compiled import CompiledKernel
from ortgrad.pipelines.prepare import prepare_loaded

Arrays = dict[str, np.ndarray]
OPSETS = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
TOLERANCE = {"float32": 4e-6, "float64": 1e-13}


def onnx_type(dtype: Any) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[Any, Sequence[int | str]]],
    outputs: Sequence[str],
    constants: Mapping[str, np.ndarray] | None = None,
    dtype: Any = "float32",
) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(name, onnx_type(t), shape) for name, (t, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, onnx_type(dtype), None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=OPSETS, ir_version=10)


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {text}')


def fused(model: onnx.ModelProto) -> onnx.ModelProto:
    return write(fuse(read(model)), model)


def programs(model: onnx.ModelProto) -> list[dict[str, Any]]:
    nodes = [node for node in model.graph.node if fusion.is_fused(node.op_type, node.domain)]
    return [json.loads(node.attribute[0].s)["attributes"] for node in nodes]


def steps(model: onnx.ModelProto) -> list[list[str]]:
    """The operators of every fused node."""
    return [[text.split(" = ")[1].split("(")[0] for text in p["steps"]] for p in programs(model)]


def operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def run_stock(model: onnx.ModelProto, feeds: Arrays) -> list[np.ndarray]:
    """The results of onnxruntime without any optimization."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return session.run(None, feeds)


def run_fused(model: onnx.ModelProto, feeds: Arrays) -> list[np.ndarray]:
    return session_of_passes(fused(model)).run(None, feeds)


def assert_same(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray], factor: float = 1.0) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        assert a.dtype == e.dtype
        tolerance = factor * TOLERANCE[e.dtype.name]
        scale = float(np.abs(e[np.isfinite(e)]).max(initial=0.0))
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance * min(scale, 1.0))


@pytest.fixture(autouse=True)
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuse what is too small to be worth it."""
    monkeypatch.setattr(fuse_pass, "_LEAST_SAVED", 0)


@pytest.fixture
def no_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused nodes run on compiled kernels only, where there are any."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the NumPy kernel ran")

    fusion.fused_operator.cache_clear()
    if COMPILES:
        monkeypatch.setattr(fusion, "_compute", fail)
    yield
    fusion.fused_operator.cache_clear()


# Functions


def points(element: str) -> np.ndarray:
    """Numbers of all sizes, denormals among them, and many where functions change quickly."""
    info = np.finfo(element)
    small, large = float(np.log10(info.smallest_subnormal)), float(np.log10(info.max))
    sizes = [10.0 ** np.linspace(small, large - 1e-9, 5001), np.linspace(0, 20, 20001), np.arange(20, 800)]
    with np.errstate(over="ignore", under="ignore"):
        x = np.concatenate([*sizes, *(-each for each in sizes)]).astype(element)
    return x[np.isfinite(x)]


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


EXACT = {
    "exp": np.exp,
    "sqrt": np.sqrt,
    "log": np.log,
    "tanh": np.tanh,
    "erf": lambda x: np.array([math.erf(value) for value in x.astype(float)], np.longdouble),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softplus": _softplus,
}
AT_SPECIAL = {
    "exp": [np.nan, np.inf, 0, 1, 1],
    "sqrt": [np.nan, np.inf, np.nan, 0, 0],
    "log": [np.nan, np.inf, np.nan, -np.inf, -np.inf],
    "tanh": [np.nan, 1, -1, 0, 0],
    "erf": [np.nan, 1, -1, 0, 0],
    "sigmoid": [np.nan, 1, 0, 0.5, 0.5],
    "softplus": [np.nan, np.inf, 0, math.log(2), math.log(2)],
}


@needs_numba
@pytest.mark.parametrize("element", ["float32", "float64"])
@pytest.mark.parametrize("name", EXACT)
def test_functions(name: str, element: str) -> None:
    evaluate = compiled_function(name, element)
    x = points(element)
    if name in ("log", "sqrt"):
        x = x[x >= 0]
    actual = evaluate(x)
    with np.errstate(all="ignore"):
        exact = EXACT[name](x.astype(np.longdouble))
        rounded = exact.astype(element)
    tiny, eps = np.finfo(element).tiny, np.finfo(element).eps
    normal = np.isfinite(rounded) & (np.abs(rounded) > tiny)
    error = np.abs(actual[normal].astype(np.longdouble) - exact[normal]) / np.abs(exact[normal])
    assert error.max() < 2 * eps
    np.testing.assert_array_equal(actual[np.isinf(rounded)], rounded[np.isinf(rounded)])
    small = np.isfinite(rounded) & ~normal
    assert np.abs(actual[small] - rounded[small]).max(initial=0) <= tiny
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], element)
    np.testing.assert_allclose(evaluate(special), np.array(AT_SPECIAL[name], element), rtol=4 * eps)


def compiled_function(name: str, element: str) -> Any:
    import numba

    from ortgrad.compiled import compiler

    chosen = getattr(functions, name, None) or getattr(mathematics, name)

    def of_element(x: float) -> float:
        return chosen(x)

    if name == "sqrt":

        def of_element(x: float) -> float:
            return sqrt(x)

    source = source_of(CompiledKernel(of_element, 2), [element] * 2)
    one = compiler.compile_function(source.phases[0], element, {"contract"})

    @numba.njit(error_model="numpy")
    def many(x: np.ndarray, y: np.ndarray) -> None:
        for i in range(len(x)):
            y[i] = one(x[i])

    def evaluate(x: np.ndarray) -> np.ndarray:
        y = np.empty_like(x)
        many(x, y)
        return y

    return evaluate


sqrt = functions.sqrt


# Operators of the table

SPECIAL = [
    np.nan,
    np.inf,
    -np.inf,
    0.0,
    -0.0,
    1e-42,
    -1e-42,
    0.5,
    -0.5,
    1.0,
    -1.0,
    2.5,
    -2.5,
    7.25,
    -7.25,
    88.0,
]
# The name in the table, the operator of ONNX, its inputs (numbers, booleans or a constant) and attributes.
CASES: list[tuple[str, str, list[Any], dict[str, Any]]] = [
    *((name, name, ["f", "f"], {}) for name in ("Add", "Sub", "Mul", "Div", "Min", "Max")),
    *((name, name, ["f", "f", "f"], {}) for name in ("Sum", "Min", "Max")),
    *((name, name, ["f"], {}) for name in ("Neg", "Abs", "Reciprocal", "Sqrt", "Exp", "Log", "Erf", "Tanh")),
    *(
        (name, name, ["f"], {})
        for name in ("Sigmoid", "Softplus", "Mish", "Relu", "Softsign", "Sign", "HardSwish")
    ),
    ("LeakyRelu", "LeakyRelu", ["f"], {"alpha": 0.2}),
    ("LeakyRelu", "LeakyRelu", ["f"], {}),
    ("PRelu", "PRelu", ["f", "f"], {}),
    ("ThresholdedRelu", "ThresholdedRelu", ["f"], {"alpha": 0.75}),
    ("Elu", "Elu", ["f"], {"alpha": 1.5}),
    ("Celu", "Celu", ["f"], {"alpha": 1.5}),
    ("Selu", "Selu", ["f"], {}),
    ("HardSigmoid", "HardSigmoid", ["f"], {"alpha": 0.3, "beta": 0.4}),
    ("Gelu", "Gelu", ["f"], {}),
    ("TanhGelu", "Gelu", ["f"], {"approximate": "tanh"}),
    ("Swish", "Swish", ["f"], {"alpha": 1.5}),
    ("Square", "Pow", ["f", 2.0], {}),
    ("Cube", "Pow", ["f", 3.0], {}),
    ("Clip", "Clip", ["f", -0.75, 2.0], {}),
    ("Clip", "Clip", ["f", None, 2.0], {}),
    ("Clip", "Clip", ["f", 0.25], {}),
    ("Clip", "Clip", ["f", 2.0, 1.0], {}),
    ("Where", "Where", ["b", "f", "f"], {}),
    *((n, n, ["f", "f"], {}) for n in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")),
    ("IsNaN", "IsNaN", ["f"], {}),
    *((name, name, ["b", "b"], {}) for name in ("And", "Or", "Xor")),
    ("Not", "Not", ["b"], {}),
    ("ToFloat", "Cast", ["b"], {}),
    ("ToBool", "Cast", ["f"], {"to": TensorProto.BOOL}),
    ("Gelu", "com.microsoft.Gelu", ["f"], {}),
    ("Swish", "com.microsoft.QuickGelu", ["f"], {"alpha": 1.25}),
]
NOT_IN_ONNX = {"DropoutGrad"}


def test_every_operator_of_the_table_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(TABLE) - NOT_IN_ONNX
    assert set(COMPILED) | {"abs"} == set(fusion.NUMPY)


def operator_model(case: tuple[str, str, list[Any], dict[str, Any]], element: str) -> tuple[Any, Arrays]:
    """A model in which the operator is part of a chain, and what is fed."""
    name, operator, inputs, attributes = case
    values = np.array(SPECIAL, element)
    with np.errstate(over="ignore"):
        pairs = [values[i % len(values)] for i in range(3 * len(values))]
    generator = np.random.default_rng(0)
    feeds: Arrays = {}
    constants: Arrays = {"zero": np.array(0, element)}
    names = []
    for i, kind in enumerate(inputs):
        if kind == "f":
            mixed = np.array(pairs, element) if i == 0 else generator.choice(values, len(pairs))
            feeds[f"x{i}"] = np.ascontiguousarray(mixed)
        elif kind == "b":
            feeds[f"x{i}"] = generator.integers(0, 2, len(pairs)).astype(bool)
        elif kind is not None:
            constants[f"x{i}"] = np.array(kind, element)
        names.append("" if kind is None else f"x{i}")
    if name == "ToFloat":
        attributes = {"to": onnx_type(element)}
    domain, _, op_type = operator.rpartition(".")
    nodes = [helper.make_node(op_type, names, ["y"], domain=domain, **attributes)]
    if TABLE[name].gives == "bool":
        constants["one"] = np.array(1, element)
        nodes.append(helper.make_node("Where", ["y", "one", "zero"], ["z"]))
    else:
        nodes.append(helper.make_node("Add", ["y", "zero"], ["z"]))
    types = {name: (array.dtype, ["N"]) for name, array in feeds.items()}
    model = model_of(nodes, types, ["z"], constants, element)
    if domain:
        # onnx does not know the operators of onnxruntime.
        model.graph.value_info.append(helper.make_tensor_value_info("y", onnx_type(element), ["N"]))
    return model, feeds


@pytest.mark.parametrize("element", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]}{len(case[2])}{case[0]}")
def test_operators(case: tuple[str, str, list[Any], dict[str, Any]], element: str, no_numpy: None) -> None:
    model, feeds = operator_model(case, element)
    if (case[0], element) == ("TanhGelu", "float64"):
        assert not steps(fused(model))
        return
    assert [found[0] for found in steps(fused(model))] == [case[0]]
    try:
        expected = run_stock(model, feeds)
    except Exception as error:
        if "NOT_IMPLEMENTED" in str(error) or "INVALID_GRAPH" in str(error) or "Type Error" in str(error):
            pytest.skip("onnxruntime has no such operator")
        raise
    assert_same(run_fused(model, feeds), expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]}{len(case[2])}{case[0]}")
def test_operators_in_the_numpy_kernel(case: tuple[str, str, list[Any], dict[str, Any]]) -> None:
    model, feeds = operator_model(case, "float32")
    attributes = programs(fused(model))[0]
    program = Program.from_attributes(attributes)
    assert program.to_attributes() == {k: v for k, v in attributes.items() if k != "nodes"}
    operator = fusion.fused_operator(program, tuple(attributes["nodes"]), "float32")
    order = list(fused(model).graph.node[0].input)
    with np.errstate(all="ignore"):
        results = operator(*(feeds[name] for name in order), **attributes)
    assert_same(results, run_stock(model, feeds), 4)


@pytest.mark.parametrize("name", sorted(set(TABLE) - NOT_IN_ONNX - {"ToFloat", "ToBool"}))
def test_single_nodes(name: str) -> None:
    """A node is a fused node by itself where onnxruntime's own kernel, or function, is slow."""
    case = next(case for case in CASES if case[0] == name)
    model, feeds = operator_model(case, "float32")
    del model.graph.node[1:]
    model.graph.output[0].name = "y"
    if TABLE[name].gives == "bool":
        model.graph.output[0].type.tensor_type.elem_type = TensorProto.BOOL
    assert len(steps(fused(model))) == (TABLE[name].alone > 1)
    if TABLE[name].alone > 1:
        assert_same(run_fused(model, feeds), run_stock(model, feeds))


@needs_numba
@pytest.mark.parametrize("before", ["t = Neg(x)", "t = Conv(x, k)"])
def test_sigmoid_is_precise_where_it_is_small(before: str) -> None:
    """onnxruntime's own is 0 or 6e-8 there, and so would be its gradient."""
    model = parse(f"""g (float[2,1,N] x, float[1,1,1] k) => (float[2,1,N] y) {{ {before} y = Sigmoid(t) }}""")
    built = ortgrad.build_gradient_model(model, wrt="x")
    t = np.linspace(-40, -5, 2000, dtype=np.float32).reshape(2, 1, -1)
    feeds = {"x": -t, "k": np.full((1, 1, 1), -1, np.float32), "y_grad": np.ones_like(t)}
    session = ortgrad.InferenceSession(built, kernels=FASTEST)
    y, grad = session.run(["y", "x_grad"], feeds)
    exact = 1 / (1 + np.exp(-t.astype(np.float64)))
    np.testing.assert_allclose(y, exact, rtol=1e-6)
    np.testing.assert_allclose(grad, -exact * (1 - exact), rtol=1e-5)


@needs_numba
def test_masks_of_gradients_are_fused_with_what_they_select() -> None:
    """The mask of Clip's gradient reads forward values, from which a path leads to the gradient."""
    model = parse("""g (float[N,64] x, float[64,64] w) => (float[N,64] y) <float a = {0}, float b = {6}>
        { p = MatMul(x, w) c = Clip(p, a, b) q = MatMul(c, w) d = Clip(q, a, b) y = MatMul(d, w) }""")
    prepared = prepare_loaded(ortgrad.build_gradient_model(model, wrt="w"), "compiled", bodies=False)
    assert operators(prepared)["Where"] == 0
    assert [found[-2:] for found in steps(prepared)].count(["Equal", "Where"]) == 2


@needs_numba
def test_dropout_and_own_gradients(no_numpy: None) -> None:
    model = parse("""g (float[N,8] x, float[N,8] s) => (float y) <float r = {0.25}, bool t = {1}> {
        a = Mul(x, s)  b, mask = Dropout(a, r, t)  c = Tanh(b)  d = LeakyRelu<alpha = 0.1>(c)
        e = Sigmoid(d)  f = Relu(e)  y = ReduceSum<keepdims = 0>(f) }""")
    built = ortgrad.build_gradient_model(model, wrt=["x"])
    found = steps(prepare_loaded(built, "compiled", bodies=False))
    own = {"SigmoidGrad", "LeakyReluGrad", "TanhGrad", "ReluGrad", "DropoutGrad"}
    assert own <= {name for each in found for name in each}
    feeds = {n: np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32) for n in ("x", "s")}
    # Gradients for the mask that was drawn: the part of them that does not depend on it.
    _, dx = ortgrad.InferenceSession(built, kernels=FASTEST).run(None, feeds)
    assert np.isfinite(dx).all()
    zero = dx == 0
    assert 0 < zero.sum() < zero.size


# Random graphs

SHAPES: dict[str, tuple[int | str, ...]] = {
    "full": ("A", "B", "C", 16),
    "more": ("A", "B", "C", 16),
    "row": (16,),
    "rows": ("C", 16),
    "channel": ("B", 1, 1),
    "batch": ("A", 1, 1, 1),
    "column": ("A", "B", "C", 1),
    "one": (1,),
    "scalar": (),
}
UNARY = ["Neg", "Abs", "Relu", "Tanh", "Sigmoid", "Exp"]
UNARY_SINGLE = [*UNARY, "Erf", "Softplus", "LeakyRelu", "HardSwish", "HardSigmoid", "Gelu", "Elu"]
BINARY = ["Add", "Sub", "Mul", "Max", "Min"]


def random_graph(seed: int, element: str) -> onnx.ModelProto:
    """Element-wise nodes on values of several shapes. Rounding must not decide on comparisons."""
    generator = np.random.default_rng(seed)
    kinds = ["full", *generator.choice(list(SHAPES), 3)]
    inputs: dict[str, tuple[Any, Sequence[int | str]]] = {
        f"x{i}": (element, SHAPES[kind]) for i, kind in enumerate(kinds)
    }
    inputs["mask"] = (bool, SHAPES["full"])
    constants = {"half": np.array(0.5, element), "two": np.array([2], element)}
    values, nodes, given = [*inputs][:-1], [], [*inputs][:-1]
    bools = ["mask"]
    for i in range(int(generator.integers(4, 14))):
        name, pick = f"t{i}", lambda: str(generator.choice(values))
        match generator.integers(0, 8):
            case 0 | 1:
                unary = UNARY_SINGLE if element == "float32" else UNARY
                nodes.append(helper.make_node(str(generator.choice(unary)), [pick()], [name]))
            case 2:
                nodes.append(
                    helper.make_node("Where", [str(generator.choice(bools)), pick(), pick()], [name])
                )
            case 3:
                compared = [str(generator.choice(given)), "half"]
                nodes.append(helper.make_node("Greater", compared, [f"b{i}"]))
                bools.append(f"b{i}")
                nodes.append(helper.make_node("And", [f"b{i}", "mask"], [f"c{i}"]))
                nodes.append(helper.make_node("Cast", [f"c{i}"], [name], to=onnx_type(element)))
            case 4:
                nodes.append(helper.make_node("Mul", [pick(), str(generator.choice([*constants]))], [name]))
            case _:
                nodes.append(helper.make_node(str(generator.choice(BINARY)), [pick(), pick()], [name]))
        values.append(name)
    made = [value for value in values if value.startswith("t")]
    outputs = list(dict.fromkeys([made[-1], *map(str, generator.choice(made, 2))]))
    return model_of(nodes, inputs, outputs, constants, element)


def feeds_of(model: onnx.ModelProto, sizes: Mapping[str, int], seed: int = 0) -> Arrays:
    """Inputs whose elements are far from each other, in comparison to rounding."""
    generator = np.random.default_rng(seed)
    feeds = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        shape = [sizes[d.dim_param] if d.dim_param else d.dim_value for d in dims]
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        numbers = generator.integers(-16, 17, shape)
        feeds[value.name] = np.asarray(numbers > 0 if dtype.kind == "b" else numbers / 8, dtype)
    return feeds


@pytest.mark.parametrize("element", ["float32", "float64"])
@pytest.mark.parametrize("seed", range(amount(25, 500)))
def test_random_graphs(seed: int, element: str) -> None:
    model = random_graph(seed, element)
    sessions = session_of_passes(fused(model))
    for sizes in ({"A": 2, "B": 3, "C": 5}, {"A": 1, "B": 4, "C": 1}, {"A": 3, "B": 0, "C": 2}):
        feeds = feeds_of(model, sizes, seed)
        assert_same(sessions.run(None, feeds), run_stock(model, feeds), 8)


def test_random_graphs_are_fused() -> None:
    found = [steps(fused(random_graph(seed, "float32"))) for seed in range(25)]
    assert sum(map(bool, found)) > 20
    assert max(len(each) for program in found for each in program) > 6


@pytest.mark.parametrize("kind", [kind for kind in SHAPES if kind != "full"])
@pytest.mark.parametrize(
    "sizes", [(2, 3, 5), (1, 3, 5), (2, 1, 1), (1, 1, 1), (0, 3, 2), (70, 3, 33)], ids=str
)
def test_broadcasting_is_compiled(kind: str, sizes: tuple[int, ...], no_numpy: None) -> None:
    nodes = [helper.make_node("Mul", ["x", "b"], ["y"]), helper.make_node("Sub", ["b", "y"], ["z"])]
    inputs = {"x": ("float32", SHAPES["full"]), "b": ("float32", SHAPES[kind])}
    model = model_of(nodes, inputs, ["z", "y"])
    assert steps(fused(model)) == [["Mul", "Sub"]]
    feeds = feeds_of(model, dict(zip("ABC", sizes, strict=True)))
    assert_same(run_fused(model, feeds), run_stock(model, feeds))


@pytest.mark.parametrize(
    "shape", [(), (1,), (5,), (0,), (4097,), (3, 20000), (2,) * 8, (1,) * 9 + (3,)], ids=str
)
def test_shapes(shape: tuple[int, ...]) -> None:
    nodes = [helper.make_node("Mul", ["x", "x"], ["y"]), helper.make_node("Sub", ["x", "y"], ["z"])]
    model = model_of(nodes, {"x": ("float32", shape)}, ["z"])
    assert steps(fused(model)) == [["Mul", "Sub"]]
    feeds = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
    assert_same(run_fused(model, feeds), run_stock(model, feeds))


def test_sizes_that_are_not_as_declared() -> None:
    """onnxruntime lets names of sizes differ. The kernel was made for equal ones."""
    nodes = [
        helper.make_node("Mul", ["x", "y"], ["a"]),
        helper.make_node("Add", ["a", "y"], ["b"]),
        helper.make_node("Exp", ["y"], ["c"]),
        helper.make_node("Sub", ["c", "y"], ["d"]),
    ]
    shapes = {"x": ("float32", ["N", "C"]), "y": ("float32", ["N", "C"])}
    model = model_of(nodes, shapes, ["b", "d"])
    session = session_of_passes(fused(model))
    generator = np.random.default_rng(0)
    for other in ((3, 4), (3, 1), (1, 4), (1, 1), (3, 4)):
        feeds = {
            "x": generator.standard_normal((3, 4)).astype(np.float32),
            "y": generator.standard_normal(other).astype(np.float32),
        }
        x, y = feeds["x"], feeds["y"]
        assert_same(session.run(None, feeds), [x * y + y, np.exp(y) - y])
    feeds["y"] = np.zeros((3, 5), np.float32)
    with pytest.raises(ortgrad.KernelError, match=r"the shapes \[3, 4\], \[3, 5\] do not fit"):
        session.run(None, feeds)
    feeds["y"] = np.ones((3, 4), np.float32)
    assert_same(session.run(None, feeds), run_stock(model, feeds))


def test_errors_name_the_original_node() -> None:
    nodes = [
        helper.make_node("Exp", ["x"], ["a"], name="layer/exp"),
        helper.make_node("Add", ["a", "y"], ["b"], name="layer/add"),
    ]
    model = model_of(nodes, {"x": ("float32", ["N"]), "y": ("float32", ["N"])}, ["b"])
    session = session_of_passes(fused(model))
    with pytest.raises(ortgrad.KernelError, match="layer/add"):
        session.run(None, {"x": np.zeros(2, np.float32), "y": np.zeros(3, np.float32)})


# Which nodes are fused


@needs_numba
def test_gelu_is_one_kernel_forwards_and_one_backwards() -> None:
    model = parse("""g (float[N,16] x, float[16,32] w, float[32] b) => (float y)
        <float root = {1.4142135}, float one = {1}, float half = {0.5}> {
        m = MatMul(x, w)  a = Add(m, b)  h = Div(a, root)  e = Erf(h)  f = Add(e, one)  g = Mul(a, f)
        z = Mul(g, half)  q = MatMul(z, z2)  y = ReduceSum<keepdims = 0>(q) }""")
    model.graph.node[7].input[1] = "w2"
    model.graph.input.append(helper.make_tensor_value_info("w2", TensorProto.FLOAT, [32, 4]))
    built = ortgrad.build_gradient_model(model, wrt=["w", "b", "w2"])
    prepared = prepare_loaded(built, "auto", bodies=False)
    forward = [each for each in steps(prepared) if each == ["Div", "Erf", "Add", "Mul", "Mul"]]
    assert len(forward) == 1
    # Nothing but the input of Gelu is kept for the backward pass.
    for program in programs(prepared):
        assert len(program["results"]) == 1
    assert "Erf" not in operators(prepared)
    generator = np.random.default_rng(0)
    shapes = {"x": (5, 16), "w": (16, 32), "b": (32,), "w2": (32, 4)}
    feeds = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for actual, right in zip(
        *(ortgrad.InferenceSession(built, kernels=k).run(None, feeds) for k in ("auto", "onnx")), strict=True
    ):
        np.testing.assert_allclose(actual, right, rtol=1e-4, atol=1e-4)


def test_saved_models_and_other_kernels_are_not_fused() -> None:
    model = parse("g (float[N] x) => (float[N] y) { a = Exp(x)  b = Mul(a, x)  y = Sigmoid(b) }")
    built = ortgrad.build_gradient_model(model, wrt=["x"])
    for kernels in ("auto", *KERNELS):
        assert not steps(ortgrad.prepare(built, kernels=kernels))
    for kernels in ("python", "onnx"):
        assert not steps(prepare_loaded(built, kernels, bodies=False))
    assert bool(steps(prepare_loaded(built, "auto", bodies=False))) == COMPILES
    assert prepare_loaded(model, "auto", bodies=False) is model


@pytest.mark.parametrize(
    "shape, count, worthwhile",
    [
        ("4, 5", 1, False),
        ("4, 5", 20, True),
        ("1000, 1000", 2, True),
        ("N, 5", 1, False),
        ("N, C, H, W", 2, True),
    ],
)
def test_small_programs_are_not_compiled(
    shape: str, count: int, worthwhile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    # Chains with something between them that is not element-wise.
    nodes = [f"t{i} = CumSum(x{i}, axis) a{i} = Exp(t{i}) x{i + 1} = Neg(a{i})" for i in range(count)]
    text = f"g (float[{shape}] x0) => (float[{shape}] x{count}) <int64 axis = {{0}}> {{ {' '.join(nodes)} }}"
    model = parse(text)
    assert len(programs(fused(model))) == (count if worthwhile else 0)


def test_equal_programs_have_one_kernel() -> None:
    layers = " ".join(
        f"a{i} = Exp(x{i})  b{i} = Mul(a{i}, x{i})  x{i + 1} = MatMul(b{i}, w)" for i in range(5)
    )
    model = fused(parse(f"g (float[N,8] x0, float[8,8] w) => (float[N,8] x5) {{ {layers} }}"))
    kernels = [fusion.compiled_kernel(Program.from_attributes(program)) for program in programs(model)]
    assert len(kernels) == 5
    assert len(set(kernels)) == 1


def test_kernels_do_not_depend_on_trained_constants() -> None:
    texts, results = set(), []
    x = np.linspace(-2, 2, 24, dtype=np.float32).reshape(3, 8)
    for number in (0.123, 1e-30, -3.5e8):
        text = f"g (float[N,8] x) => (float[N,8] y) <float c = {{{number}}}> {{ a = Mul(x, c)  y = Abs(a) }}"
        (program,) = programs(fused(parse(text)))
        function = fusion.compiled_kernel(Program.from_attributes(program)).function
        texts.add(inspect.getsource(function))
        results.append((run_fused(parse(text), {"x": x}), run_stock(parse(text), {"x": x})))
    assert len(texts) == 1
    for actual, expected in results:
        assert_same(actual, expected)


def test_a_group_does_not_depend_on_itself() -> None:
    model = parse("""g (float[N,8] x, float[8,8] w) => (float[N,8] y) {
        a = Exp(x)  b = Tanh(a)  c = MatMul(b, w)  d = Mul(c, a)  y = Add(d, b) }""")
    found = steps(fused(model))
    assert sorted(found) == [["Exp", "Tanh"], ["Mul", "Add"]]
    feeds = feeds_of(model, {"N": 3})
    feeds["w"] = feeds["w"][:8]
    assert_same(run_fused(model, feeds), run_stock(model, feeds), 8)


def test_groups_do_not_depend_on_each_other() -> None:
    """Two groups that could each be made must not both be made if each needs the other."""
    model = parse("""g (float[N,8] x, float[N,8] z, float[8,8] w) => (float[N,8] y, float[N,8] v) {
        a = Exp(x)  p = Tanh(z)  c = MatMul(a, w)  q = MatMul(p, w)
        y = Mul(a, q)  v = Mul(p, c) }""")
    feeds = feeds_of(model, {"N": 3})
    assert_same(run_fused(model, feeds), run_stock(model, feeds), 8)
    assert len(steps(fused(model))) <= 1


def test_outputs_and_masks_that_others_need() -> None:
    model = parse("""g (float[N,8] x, float[N,8] d) => (float[N,8] y, float[N,8] a, float[N] r)
        <float half = {0.5}, int64[1] axis = {1}> {
        a = Mul(x, half)  m = Greater(a, half)  y = Where(m, a, d)  n = Not(m)
        c = Cast<to = 6>(n)  s = ReduceSum<keepdims = 0>(c, axis)  r = Cast<to = 1>(s) }""")
    prepared = fused(model)
    assert steps(prepared) == [["Mul", "Greater", "Where"]]
    assert operators(prepared)["Greater"] == 1
    feeds = feeds_of(model, {"N": 3})
    assert_same(run_fused(model, feeds), run_stock(model, feeds))


def test_cheap_values_are_computed_again() -> None:
    model = parse("""g (float[N,8] x, float[8,8] w) => (float[N,8] y) <float half = {0.5}> {
        h = Add(x, half)  m = MatMul(h, w)  a = Mul(m, h)  y = Add(a, x) }""")
    prepared = fused(model)
    assert steps(prepared) == [["Add", "Mul", "Add"]]
    assert operators(prepared) == {"Add": 1, "MatMul": 1, "Fused": 1}
    feeds = feeds_of(model, {"N": 3})
    assert_same(run_fused(model, feeds), run_stock(model, feeds), 8)


def test_masks_are_not_results_of_a_fused_node() -> None:
    model = parse("""g (float[N,8] x, float[8,8] w) => (float[N,8] y) <float zero = {0}, float six = {6}> {
        a = Clip(x, zero, six)  m = Equal(a, x)  c = MatMul(a, w)  d = Exp(c)  e = Mul(d, c)
        y = Where(m, e, zero) }""")
    feeds = feeds_of(model, {"N": 3})
    feeds["w"] /= 8
    assert_same(run_fused(model, feeds), run_stock(model, feeds), 8)


def test_values_that_are_stored_anyway_are_not_stored_together() -> None:
    products = " ".join(f"p{i} = Mul(d, x{i})  s{i} = ReduceMax(p{i})" for i in range(3))
    inputs = ", ".join(f"float[N,8] x{i}" for i in range(3))
    sums = ", ".join(f"float[1,1] s{i}" for i in range(3))
    model = parse(f"g (float[N,8] a, {inputs}) => (float[N,8] d, {sums}) {{ d = Exp(a) {products} }}")
    assert not steps(fused(model))


def test_subgraphs() -> None:
    model = parse("""g (bool c, float[N,8] x) => (float[N,8] y) {
        a = Exp(x)
        y = If (c) <then_branch = g1 () => (float[N,8] t) { u = Mul(a, x)  v = Tanh(u)  t = Add(v, a) },
                    else_branch = g2 () => (float[N,8] e) { e = Identity(x) }> }""")
    prepared = fused(model)
    branch = next(a.g for a in prepared.graph.node[-1].attribute if a.name == "then_branch")
    assert [node.op_type for node in branch.node] == ["Fused"]
    for condition in (True, False):
        feeds = {"c": np.array(condition), "x": np.linspace(-2, 2, 24, dtype=np.float32).reshape(3, 8)}
        assert_same(run_fused(model, feeds), run_stock(model, feeds))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("float[1,3,8,8] x, float[4,3,3,3] w|c = Conv(x, w)  r = Relu(c)  y = Mul(r, r)", "Relu"),
        ("float[1,3,8,8] x, float[4,3,3,3] w|c = Conv(x, w)  s = Add(c, c2)  y = Relu(s)", "Add"),
        ("float[5,8] x, float[8,8] w, float[8] b|m = MatMul(x, w)  a = Add(m, b)  y = Exp(a)", "Add"),
        ("float[5,8] x, float[8,8] w|m = MatMul(x, w)  a = Mul(m, half)  y = Exp(a)", "Mul"),
        ("float[5,8] x, float[8,8] w|m = Gemm(x, w)  a = Relu(m)  y = Mul(a, a)", "Relu"),
        ("float[5,8] x|m = ReduceMean<axes = [-1]>(x)  d = Sub(x, m)  p = Pow(d, two)"
         "  v = ReduceMean<axes = [-1]>(p)  e = Add(v, half)  s = Sqrt(e)  q = Div(d, s)"
         "  r = Mul(q, half)  y = Add(r, half)", "Sub"),
    ],
    ids=["conv", "conv-sum", "bias", "scale", "gemm", "norm"],
)  # fmt: skip
def test_what_onnxruntime_fuses_itself(text: str, kept: str) -> None:
    inputs, nodes = text.split("|")
    extra = ", float[1,4,6,6] c2" if "c2" in nodes else ""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}{extra}) => (float[A,B] y) '
        f"<float half = {{0.5}}, float two = {{2}}> {{ {nodes} }}"
    )
    assert kept in operators(fused(model))
    assert not steps(fused(model))


# The program of a fused node

PROGRAM = Program(
    (Operand("float", True), Operand("bool", True), Operand("float", False)),
    (
        Step("Add", (0, Constant(-1.5, 2))),
        Step("LeakyRelu", (3,), (("alpha", 0.1),)),
        Step("Where", (1, 4, Constant(math.inf))),
        Step("Mul", (5, 2)),
    ),
    (6, 4),
)


def test_a_program_survives_the_attribute() -> None:
    attributes = PROGRAM.to_attributes()
    assert attributes["steps"][0] == "v3 = Add(v0, [[-1.5]])"
    assert Program.from_attributes(json.loads(json.dumps(attributes))) == PROGRAM


@pytest.mark.parametrize(
    "change",
    [
        {"steps": []},
        {"results": []},
        {"operands": []},
        {"results": [0]},
        {"results": [9]},
        {"results": [-1]},
        {"operands": ["float row", "float row", "float one"]},
        {"operands": ["float line", "bool row", "float one"]},
        {"steps": ["v3 = Add(v0)", "v4 = Neg(v3)", "v5 = Neg(v4)", "v6 = Neg(v5)"]},
        {"steps": ["v3 = Neg(v4)", "v4 = Neg(v3)", "v5 = Neg(v4)", "v6 = Neg(v5)"]},
        {"steps": ["v3 = Eval(v0)", "v4 = Neg(v3)", "v5 = Neg(v4)", "v6 = Neg(v5)"]},
        {"steps": ["v3 = Neg(v0, a=1)", "v4 = Neg(v3)", "v5 = Neg(v4)", "v6 = Neg(v5)"]},
        {"steps": ["v3 = __import__('os')", "v4 = Neg(v3)", "v5 = Neg(v4)", "v6 = Neg(v5)"]},
        {"steps": ["import os", "v4 = Neg(v3)", "v5 = Neg(v4)", "v6 = Neg(v5)"]},
        {"steps": ["v3 = Neg(v0); x = 1", "v4 = Neg(v3)", "v5 = Neg(v4)", "v6 = Neg(v5)"]},
        {"steps": 5},
        {"steps": ["v3 = ("]},
    ],
    ids=str,
)
def test_malformed_programs_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(NodeError, match=r"cannot be read|cannot compute"):
        Program.from_attributes({**PROGRAM.to_attributes(), **change})


def test_a_malformed_node_fails_when_it_runs() -> None:
    model = fused(parse("g (float[N] x) => (float[N] y) { a = Exp(x)  y = Mul(a, x) }"))
    (node,) = model.graph.node
    for text in (b"{}", b"nonsense", node.attribute[0].s.replace(b"Exp", b"Oops")):
        node.attribute[0].s = text
        session = session_of_passes(model)
        with pytest.raises(ortgrad.KernelError):
            session.run(None, {"x": np.zeros(2, np.float32)})


# Sessions

SCRIPT = """
import os, sys
import numpy as np, onnx, ortgrad
model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 18]>
    g (float[N] x) => (float[N] y) { a = Exp(x)  b = Mul(a, x)  y = Sigmoid(b) }''')
built = ortgrad.build_gradient_model(model, wrt=["x"])
sessions = [ortgrad.InferenceSession(built) for _ in range(3)]
x = np.linspace(-1, 1, 5, dtype=np.float32)
feeds = {"x": x, "y_grad": x}
first = sessions[0].run(None, feeds)
child = os.fork()
results = [session.run(None, feeds) for session in (*sessions, ortgrad.InferenceSession(built))]
same = all(np.array_equal(a, b) for result in results for a, b in zip(first, result))
if child == 0:
    os._exit(0 if same else 1)
print(same, os.waitpid(child, 0)[1], "numba" in sys.modules)
"""


@needs_numba
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_several_sessions_and_fork(tmp_path: Path) -> None:
    environment = {**os.environ, "ORTGRAD_CACHE_DIR": str(tmp_path)}
    for imported in (True, False):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", SCRIPT],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == f"True 0 {imported}\n", done.stderr


def test_a_plain_session_with_the_library_runs_the_model_as_it_is() -> None:
    model = parse("g (float[N] x) => (float[N] y) { a = Exp(x)  b = Mul(a, x)  y = Sigmoid(b) }")
    built = ortgrad.build_gradient_model(model, wrt=["x"])
    options = onnxruntime.SessionOptions()
    ortgrad.register(options)
    plain = onnxruntime.InferenceSession(built.SerializeToString(), options)
    x = np.linspace(-1, 1, 5, dtype=np.float32)
    feeds = {"x": x, "y_grad": x}
    assert_same(ortgrad.InferenceSession(built).run(None, feeds), plain.run(None, feeds))
