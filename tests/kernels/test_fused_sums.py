"""Sums in fused nodes: of all kinds of axes and shapes, and which nodes become part of a fused node."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from support import COMPILES, FASTEST, needs_numba, session_of_passes

import ortgrad
from ortgrad.errors import NodeError
from ortgrad.graph.serialization import read, write
from ortgrad.lowering.fusion import fuse as fuse_pass
from ortgrad.lowering.fusion import kernel as fusion
from ortgrad.lowering.fusion.program import Operand, Program, Step, Total
from ortgrad.operators.call import make_call
from ortgrad.pipelines.prepare import prepare_loaded

ROW, ONE = Operand("float", True), Operand("float", False)
TOLERANCE = {"float32": 2e-6, "float64": 4e-15}


@pytest.fixture(autouse=True)
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuse what is too small to be worth it."""
    monkeypatch.setattr(fuse_pass, "_LEAST_SAVED", 0)


@pytest.fixture
def no_numpy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fused nodes run on compiled kernels only, where there are any."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the NumPy kernel ran")

    fusion.fused_operator.cache_clear()
    if COMPILES:
        monkeypatch.setattr(fusion, "_compute", fail)
    yield
    fusion.fused_operator.cache_clear()


def session_of(program: Program, ranks: Sequence[int], element: str, threads: int = 1) -> Any:
    """A session of one fused node, whose inputs may have any sizes."""
    nodes = [f"node{i}" for i in range(len(program.steps))]
    outputs = [f"y{i}" for i in range(len(program.results) + len(program.sums))]
    call = make_call(
        fusion.fused_operator(program, tuple(nodes), element),
        "fused",
        {**program.to_attributes(), "nodes": nodes},
        [True] * len(ranks),
        [True] * len(outputs),
    )
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(element))
    names = [f"x{i}" for i in range(len(ranks))]
    node = helper.make_node(fusion.NAMES[element], names, outputs, domain="ortgrad", ortgrad=call.to_json())
    inputs = [
        helper.make_tensor_value_info(name, kind, [None] * rank)
        for name, rank in zip(names, ranks, strict=True)
    ]
    results = [helper.make_tensor_value_info(name, kind, None) for name in outputs]
    graph = helper.make_graph([node], "g", inputs, results)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ortgrad", 1)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return session_of_passes(helper.make_model(graph, opset_imports=opsets, ir_version=10), options)


def run(session: Any, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return session.run(None, {f"x{i}": array for i, array in enumerate(arrays)})


def product(sums: Sequence[Total]) -> Program:
    """A product that is stored, and sums of the product and of a factor."""
    return Program((ROW, ROW), (Step("Mul", (0, 1)),), (2,), tuple(sums))


def added(value: np.ndarray, total: Total) -> np.ndarray:
    """The sum of a value in double precision, with NumPy."""
    return np.squeeze(value.astype(float).sum(total.axes, keepdims=True), total.without)


def assert_near(actual: np.ndarray, exact: np.ndarray, terms: np.ndarray) -> None:
    """Errors are compared with the sum of the absolute values of the terms."""
    assert actual.shape == exact.shape
    np.testing.assert_array_less(np.abs(actual - exact), TOLERANCE[actual.dtype.name] * terms + 1e-300)


ROWS = [
    ((4, 6, 8, 9), (0, 1, 2, 3), (0, 1, 2)),
    ((4, 6, 8, 9), (0, 2, 3), ()),
    ((4, 6, 8, 9), (0, 2, 3), (0, 2, 3)),
    ((4, 6, 8, 9), (2, 3), ()),
    ((4, 6, 8, 9), (1, 2, 3), (1, 2, 3)),
    ((4, 6, 1, 1), (0, 2, 3), (2,)),
    ((5, 7), (1,), (1,)),
    ((3, 1, 40, 5, 1), (0, 3), (3,)),
    ((1, 1, 1), (0, 1, 2), ()),
    ((17,), (0,), (0,)),
    ((3, 9000), (1,), (1,)),
    ((40000,), (0,), ()),
    ((900, 3), (0, 1), (1,)),
    ((0, 3, 5), (2,), (2,)),
    ((2, 0, 5), (1, 2), ()),
    ((2, 3, 0), (2,), (2,)),
    ((3, 0, 4), (0, 2), (0,)),
]
COLUMNS = [
    ((6, 70), (0,), (0,)),
    ((6, 7, 600), (0, 1), (1,)),
    ((200, 3), (0,), ()),
    ((1, 30), (0,), (0,)),
    ((9, 4, 1, 1), (0, 2, 3), (0, 2, 3)),
    ((5, 3, 2, 2), (0,), (0,)),
    ((3, 1), (0,), (0,)),
    ((0, 5), (0,), (0,)),
    ((4, 0), (0,), (0,)),
    ((100, 257), (0,), ()),
]


@pytest.mark.parametrize("element", ["float32", "float64"])
@pytest.mark.parametrize("by_rows", [True, False])
def test_sums_over_axes(by_rows: bool, element: str, no_numpy: None) -> None:
    """Every combination runs compiled, as one kernel, and threads do not change a bit."""
    generator = np.random.default_rng(0)
    for shape, axes, without in ROWS if by_rows else COLUMNS:
        totals = [Total(2, axes, without, by_rows), Total(0, axes, without, by_rows)]
        arrays = [generator.standard_normal(shape).astype(element) for _ in range(2)]
        results = [run(session_of(product(totals), [len(shape)] * 2, element, n), arrays) for n in (1, 2)]
        for one, two in zip(*results, strict=True):
            np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(results[0][0], arrays[0] * arrays[1])
        x, y = arrays[0].astype(float), arrays[1].astype(float)
        for actual, value, total in zip(results[0][1:], (x * y, x), totals, strict=True):
            assert_near(actual, added(value, total), added(np.abs(value), total))


def test_sums_of_several_kinds_and_broadcast_operands(no_numpy: None) -> None:
    """One kernel gives a scalar, a number for each channel and one for each sample and channel."""
    sums = [Total(4, (0, 1, 2, 3), (0, 1, 2, 3), True), Total(3, (0, 2, 3), (), True)]
    sums.append(Total(4, (2, 3), (), True))
    one = Operand("float", False, 2)
    program = Program((ROW, ONE, one), (Step("Mul", (0, 1)), Step("Add", (3, 2))), (), tuple(sums))
    session = session_of(program, [4, 1, 1], "float32")
    generator = np.random.default_rng(1)
    for batch, size in ((2, 5), (1, 40), (1, 1), (0, 3), (3, 70)):
        arrays = [generator.standard_normal(s).astype("f") for s in ((batch, 6, size, size), (1,), (6,))]
        scaled = arrays[0].astype(float) * arrays[1]
        shifted = scaled + arrays[2][:, None, None]
        for actual, total in zip(run(session, arrays), sums, strict=True):
            value = shifted if total.value == 4 else scaled
            assert_near(actual, added(value, total), added(np.abs(value), total) + 1e-6)


def test_other_shapes_run_in_the_numpy_kernel() -> None:
    """The compiled kernel was made for sums of another kind; the NumPy kernel evaluates the same program."""
    arrays = [np.random.default_rng(2).standard_normal((3, 4, 5)).astype("f") for _ in range(2)]
    for axes, by_rows in (((1,), True), ((1,), False), ((0, 2), False), ((2,), False), ((0,), True)):
        total = Total(2, axes, axes, by_rows)
        _, actual = run(session_of(product([total]), [3, 3], "float32"), arrays)
        np.testing.assert_allclose(actual, np.sum(arrays[0] * arrays[1], axes), rtol=1e-5, atol=1e-6)
    broadcast = [arrays[0], arrays[1][:1]]
    stored, actual = run(session_of(product([Total(1, (0, 1), (), True)]), [3, 3], "float32"), broadcast)
    np.testing.assert_array_equal(stored, arrays[0] * arrays[1][:1])
    np.testing.assert_allclose(actual, arrays[1][:1].sum((0, 1), keepdims=True), rtol=1e-5)
    # NumPy's sum over all axes is not an array.
    everything = Total(2, (0, 1, 2), (0, 1, 2), True)
    column = [arrays[0], arrays[1][:1, :, :1]]
    _, actual = run(session_of(product([everything]), [3, 3], "float32"), column)
    np.testing.assert_allclose(actual, np.sum(column[0] * column[1]), rtol=1e-5)


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_special_numbers(special: float, by_rows: bool) -> None:
    x = np.ones((1000, 20), "f")
    x[700, 3] = special
    axis = 1 if by_rows else 0
    _, total = run(
        session_of(product([Total(2, (axis,), (axis,), by_rows)]), [2, 2], "float32"), [x, np.ones_like(x)]
    )
    expected = x.sum(axis)
    np.testing.assert_array_equal(total, expected)
    x[0 if by_rows else 1, 3] = -special
    _, total = run(
        session_of(product([Total(2, (0, 1), (0, 1), True)]), [2, 2], "float32"), [x, np.ones_like(x)]
    )
    assert np.isnan(total)


@pytest.mark.parametrize("shape", [(1 << 20,), (4096, 256)])
def test_sums_are_as_accurate_as_those_of_numpy(shape: tuple[int, ...]) -> None:
    """Terms of one sign, of which sums in the order of the elements would lose many digits."""
    x = np.random.default_rng(3).random(shape).astype("f") + np.float32(0.5)
    total = Total(2, (0,), (0,), len(shape) == 1)
    _, actual = run(session_of(product([total]), [len(shape)] * 2, "float32"), [x, np.ones_like(x)])
    exact = x.astype(float).sum(0)
    assert np.abs(actual / exact - 1).max() <= max(np.abs(x.sum(0) / exact - 1).max(), 1.2e-7)


# Gradients


def graph_of(prepared: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in prepared.graph.node)


def fused(model: onnx.ModelProto) -> onnx.ModelProto:
    return write(fuse_pass.fuse(read(model)), model)


def attributes(prepared: onnx.ModelProto) -> list[dict[str, Any]]:
    nodes = [node for node in prepared.graph.node if node.op_type in fusion.NAMES.values()]
    return [json.loads(node.attribute[0].s)["attributes"] for node in nodes]


def parse(inputs: str, body: str, element: str = "float32", results: str = "y") -> onnx.ModelProto:
    kind = {"float32": "float", "float64": "double"}[element]
    outputs = ", ".join(f"{kind} {name}" for name in results.split())
    typed = re.sub(r"\bT\b", kind, inputs)
    text = f'<ir_version: 10, opset_import: ["" : 18]> g ({typed}) => ({outputs})'
    model = onnx.parser.parse_model(f"{text} {body}")
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    return model


Case = tuple[str, str, Callable[..., torch.Tensor], list[tuple[tuple[int, ...], ...]]]
CASES: dict[str, Case] = {
    "scalars": (
        "T[N,C,H,W] x, T[1] s, T[1] b",
        "{ m = Mul(x, s) a = Add(m, b) h = Tanh(a) y = Mul(a, h) }",
        lambda x, s, b: (x * s + b) * torch.tanh(x * s + b),
        [((2, 3, 4, 5), (1,), (1,)), ((1, 1, 1, 1), (1,), (1,)), ((0, 3, 4, 5), (1,), (1,))],
    ),
    "number": (
        "T[N,8] x, T s",
        "{ m = Mul(x, s) h = Tanh(m) y = Mul(h, x) }",
        lambda x, s: torch.tanh(x * s) * x,
        [((3, 8), ()), ((1, 8), ())],
    ),
    "squeeze and excite": (
        "T[N,6,H,W] x, T[N,6,1,1] s",
        "{ m = Mul(x, s) h = Tanh(m) y = Mul(h, x) }",
        lambda x, s: torch.tanh(x * s) * x,
        [((2, 6, 4, 5), (2, 6, 1, 1)), ((1, 6, 1, 1), (1, 6, 1, 1)), ((2, 6, 30, 20), (2, 6, 1, 1))],
    ),
    "channels": (
        "T[N,6,H,W] x, T[6,1,1] s, T[1,6,1,1] b",
        "{ m = Mul(x, s) a = Add(m, b) h = Tanh(a) y = Mul(h, x) }",
        lambda x, s, b: torch.tanh(x * s + b) * x,
        [((2, 6, 4, 5), (6, 1, 1), (1, 6, 1, 1)), ((1, 6, 1, 1), (6, 1, 1), (1, 6, 1, 1))],
    ),
    "slopes": (
        "T[N,6,H,W] x, T[6,1,1] s",
        "{ h = PRelu(x, s) y = Mul(h, x) }",
        lambda x, s: torch.where(x < 0, s * x, x) * x,
        [((2, 6, 4, 5), (6, 1, 1)), ((1, 6, 7, 7), (6, 1, 1))],
    ),
    "layer scale": (
        "T[N,S,12] x, T[12] s, T[12] b",
        "{ m = Mul(x, s) a = Add(m, b) h = Tanh(a) y = Mul(h, x) }",
        lambda x, s, b: torch.tanh(x * s + b) * x,
        [((3, 50, 12), (12,), (12,)), ((1, 1, 12), (12,), (12,)), ((3, 0, 12), (12,), (12,))],
    ),
    "middle axis": (
        "T[N,S,12] x, T[N,1,12] s",
        "{ m = Mul(x, s) h = Tanh(m) y = Mul(h, x) }",
        lambda x, s: torch.tanh(x * s) * x,
        [((3, 5, 12), (3, 1, 12)), ((1, 5, 12), (1, 1, 12))],
    ),
    "axes behind": (
        "T[6] s, T[6,3,3] x",
        "<int64[2] axes = {1, 2}> { u = Unsqueeze(s, axes) m = Mul(x, u) h = Tanh(m) y = Mul(h, x) }",
        lambda s, x: torch.tanh(x * s[:, None, None]) * x,
        [((6,), (6, 3, 3))],
    ),
}


@pytest.mark.parametrize("element", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_broadcast_operands(name: str, element: str) -> None:
    """Against PyTorch in double precision, for several shapes in one session."""
    inputs, body, function, cases = CASES[name]
    model = parse(inputs, body, element)
    names = [value.name for value in model.graph.input]
    built = ortgrad.build_gradient_model(model, wrt=names)
    session = ortgrad.InferenceSession(built, kernels=FASTEST)
    generator = np.random.default_rng(4)
    for shapes in cases:
        arrays = [generator.standard_normal(shape).astype(element) for shape in shapes]
        tensors = [torch.from_numpy(array.astype(float)).requires_grad_() for array in arrays]
        y = function(*tensors)
        seed = generator.standard_normal(y.shape).astype(element)
        y.backward(torch.from_numpy(seed.astype(float)))
        feeds = {**dict(zip(names, arrays, strict=True)), "y_grad": seed}
        results = session.run([f"{each}_grad" for each in names], feeds)
        for actual, tensor in zip(results, tensors, strict=True):
            expected = tensor.grad.numpy()
            assert actual.shape == expected.shape
            scale = max(np.abs(expected).max(initial=0), 1.0)
            np.testing.assert_allclose(actual, expected, rtol=0, atol=2 * TOLERANCE[element] * scale)


@needs_numba
@pytest.mark.parametrize("name", [name for name in CASES if name != "middle axis"])
def test_sums_of_gradients_are_fused(name: str) -> None:
    """No product is stored to be added up, and no node only changes the shape of a sum."""
    inputs, body, _, _ = CASES[name]
    model = parse(inputs, body)
    built = ortgrad.build_gradient_model(model, wrt=[value.name for value in model.graph.input])
    found = graph_of(prepare_loaded(built, "compiled", bodies=False))
    assert not {"ReduceSum", "Squeeze", "Unsqueeze", "Mul"} & set(found)


def test_a_sum_that_the_group_reads_is_computed_before() -> None:
    """The gradient of Softmax reads a sum, and what the sum is of."""
    model = parse(
        "T[N,40] x, T[N,40] d",
        """<int64[1] axes = {1}>
        { p = Mul(x, d) s = ReduceSum(p, axes) c = Sub(d, s) y = Mul(c, x) z = Add(y, p) }""",
        results="z s",
    )
    prepared = fused(model)
    assert sum(len(each["sums"]) for each in attributes(prepared)) == 1
    x, d = (np.random.default_rng(i).standard_normal((5, 40)).astype("f") for i in range(2))
    z, s = session_of_passes(fused(model)).run(None, {"x": x, "d": d})
    total = (x * d).sum(1, keepdims=True)
    np.testing.assert_allclose(s, total, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(z, (d - total) * x + x * d, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "after, left",
    [
        ("y = Squeeze(s, axes)", []),
        ("y = Squeeze(s, first)", []),
        ("y = Reshape(s, flat)", []),
        ("y = Reshape(s, six)", []),
        ("y = Reshape(s, pair)", ["Reshape"]),
        ("y = Squeeze(s)", ["Squeeze"]),
        ("t = Squeeze(s, axes) u = Relu(s) y = Add(t, u)", ["Squeeze"]),
    ],
)
def test_what_drops_axes_of_a_sum(after: str, left: list[str]) -> None:
    model = parse(
        "T[N,6,H,W] x, T[N,6,H,W] w",
        f"""<int64[3] axes = {{0, 2, -1}}, int64[1] first = {{0}}, int64[1] flat = {{-1}},
        int64[1] six = {{6}}, int64[2] pair = {{2, 3}}>
        {{ m = Mul(x, w) s = ReduceSum(m, axes) {after} }}""",
    )
    prepared = fused(model)
    found = graph_of(prepared)
    assert found["ReduceSum"] == 0
    assert [name for name in ("Squeeze", "Reshape") if found[name]] == left
    arrays = {name: np.random.default_rng(5).standard_normal((2, 6, 3, 4)).astype("f") for name in "xw"}
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, arrays)[0]
    actual = session_of_passes(fused(model)).run(None, arrays)[0]
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_axes_that_are_not_known_are_left_alone() -> None:
    model = parse("T[N,6] x, int64[1] axes", "{ m = Mul(x, x) y = ReduceSum(m, axes) }")
    assert graph_of(fused(model))["ReduceSum"] == 1
    model = parse("T[N,6] x", "{ m = Mul(x, x) y = ReduceSum <noop_with_empty_axes = 1> (m) }")
    assert graph_of(fused(model))["ReduceSum"] == 1
    model = parse("T[N,6] x", "{ m = Mul(x, x) y = ReduceSum <keepdims = 0> (m) }")
    assert graph_of(fused(model)) == {"Fused": 1}
    session = session_of_passes(fused(model))
    assert session.run(None, {"x": np.ones((3, 6), "f")}) == [18]


def test_copies_do_not_divide_groups() -> None:
    model = parse(
        "T[N,6,H,W] x, T[N,6,1,1] s",
        "{ i = Identity(x) n = Shape(x) e = Expand(s, n) m = Mul(i, e) c = Identity(m) y = Add(c, i) }",
    )
    prepared = fused(model)
    assert graph_of(prepared) - Counter(["Shape"]) == {"Fused": 1}
    x, s = (np.random.default_rng(6).standard_normal(n).astype("f") for n in ((2, 6, 4, 5), (2, 6, 1, 1)))
    y = session_of_passes(fused(model)).run(None, {"x": x, "s": s})[0]
    np.testing.assert_allclose(y, x * s + x, rtol=1e-6)


def test_an_expand_that_makes_the_result_larger_is_kept() -> None:
    model = parse("T[1,6] x, T[1,6] s, int64[2] n", "{ e = Expand(s, n) m = Mul(x, e) y = Add(m, x) }")
    y = session_of_passes(fused(model)).run(
        None, {"x": np.ones((1, 6), "f"), "s": np.ones((1, 6), "f"), "n": np.array([4, 6])}
    )[0]
    assert y.shape == (4, 6)


def test_saved_models_keep_their_sums() -> None:
    inputs, body, _, _ = CASES["scalars"]
    built = ortgrad.build_gradient_model(parse(inputs, body), wrt=["s"])
    assert graph_of(built)["ReduceSum"] == 1
    assert graph_of(ortgrad.prepare(built, kernels="auto"))["ReduceSum"] == 1


# Programs


def test_sums_survive_the_attribute() -> None:
    sums = (Total(2, (0, 2), (), True), Total(0, (0, 1, 2), (1,), True))
    program = Program((Operand("float", False, 3), ROW), (Step("Mul", (0, 1)),), (2,), sums)
    assert program.to_attributes()["sums"] == ["v2 over 0 2 by rows", "v0 over 0 1 2 without 1 by rows"]
    assert program.to_attributes()["operands"][0] == "float one 3"
    assert Program.from_attributes(program.to_attributes()) == program


@pytest.mark.parametrize(
    "sums",
    [
        ["v9 over 0 by rows"],
        ["v2 over by rows"],
        ["v2 over 0 without 1 by rows"],
        ["v2 over 0 by both"],
        ["v2 over 0 by rows", "v2 over 0 by columns"],
        ["v2"],
        [1],
        None,
    ],
)
def test_malformed_sums_are_refused(sums: Any) -> None:
    attributes = {**product([]).to_attributes(), "sums": sums}
    with pytest.raises(NodeError):
        Program.from_attributes(attributes)


def test_axes_that_a_value_does_not_have_are_refused() -> None:
    session = session_of(product([Total(2, (3,), (), True)]), [2, 2], "float32")
    with pytest.raises(Exception, match=r"a value of shape \[2, 3\] has no axis 3"):
        run(session, [np.ones((2, 3), "f")] * 2)


def test_equal_sums_have_one_kernel() -> None:
    """The text of a kernel does not depend on the axes, only on how they lie."""
    texts = set()
    for axes in itertools.combinations(range(4), 2):
        kernel = fusion.compiled_kernel(product([Total(2, axes, (), True)]))
        texts.add(tuple(function.__code__.co_filename for function in kernel.phases))
    assert len(texts) == 1
