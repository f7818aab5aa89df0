"""Gradient rules of element-wise mathematics, against finite differences and PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator
from support.rules import check_against_torch, check_rule, gradients, one_node

import ortgrad


def between(low: float, high: float, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


UNARY: list[tuple[str, Callable[..., torch.Tensor], float, float]] = [
    ("Abs", torch.abs, -2, -0.1),
    ("Acos", torch.acos, -0.9, 0.9),
    ("Acosh", torch.acosh, 1.2, 4),
    ("Asin", torch.asin, -0.9, 0.9),
    ("Asinh", torch.asinh, -3, 3),
    ("Atan", torch.atan, -3, 3),
    ("Atanh", torch.atanh, -0.9, 0.9),
    ("Cos", torch.cos, -3, 3),
    ("Cosh", torch.cosh, -2, 2),
    ("Erf", torch.erf, -2, 2),
    ("Exp", torch.exp, -2, 2),
    ("Identity", torch.clone, -2, 2),
    ("Log", torch.log, 0.2, 3),
    ("Neg", torch.neg, -2, 2),
    ("Reciprocal", torch.reciprocal, 0.3, 3),
    ("Sin", torch.sin, -3, 3),
    ("Sinh", torch.sinh, -2, 2),
    ("Sqrt", torch.sqrt, 0.2, 3),
    ("Tan", torch.tan, -1, 1),
]


@pytest.mark.parametrize("opset", [18, 22])
@pytest.mark.parametrize(("op_type", "function", "low", "high"), UNARY, ids=[row[0] for row in UNARY])
def test_functions(
    op_type: str, function: Callable[..., torch.Tensor], low: float, high: float, opset: int
) -> None:
    x = between(low, high, 2, 5)
    check_against_torch(op_type, function, [x], opset=opset)
    if opset == 18:
        check_rule(op_type, [x], second=op_type not in ("Neg", "Identity", "Abs"))


BINARY: list[tuple[str, Callable[..., torch.Tensor], dict[str, Any], tuple[float, float]]] = [
    ("Add", torch.add, {}, (-2, 2)),
    ("Sub", torch.sub, {}, (-2, 2)),
    ("Mul", torch.mul, {}, (-2, 2)),
    ("Div", torch.div, {}, (0.5, 2)),
    ("Pow", torch.pow, {}, (0.3, 3)),
    ("Max", torch.maximum, {}, (-2, 2)),
    ("Min", torch.minimum, {}, (-2, 2)),
    ("Mod", torch.fmod, {"fmod": 1}, (0.3, 3)),
]
SHAPES = [((2, 3), (2, 3)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((), (2, 3)), ((4, 1, 3), (2, 1))]


@pytest.mark.parametrize(
    ("op_type", "function", "attributes", "limits"), BINARY, ids=[row[0] for row in BINARY]
)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_broadcasting(
    op_type: str,
    function: Callable[..., torch.Tensor],
    attributes: dict[str, Any],
    limits: tuple[float, float],
    symbolic: bool,
) -> None:
    for left, right in SHAPES:
        for shapes in ((left, right), (right, left)):
            inputs = [between(*limits, *shape, seed=i) for i, shape in enumerate(shapes)]
            check_against_torch(op_type, function, inputs, attributes, symbolic=symbolic)


@pytest.mark.parametrize("op_type", ["Mul", "Div", "Pow"])
def test_second_derivatives(op_type: str) -> None:
    check_rule(op_type, [between(0.5, 2, 2, 3), between(0.5, 2, 3, seed=1)], second=True)


@pytest.mark.parametrize("op_type", ["Sum", "Mean", "Max", "Min"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_variadic(op_type: str, count: int) -> None:
    inputs = [
        between(-2, 2, *shape, seed=i) for i, shape in enumerate([(2, 3), (3,), (2, 1), (1,), ()][:count])
    ]
    check_rule(op_type, inputs)


@pytest.mark.parametrize("op_type", ["Max", "Min"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_ties_share_equally(op_type: str, count: int) -> None:
    model, feeds = one_node(op_type, [array(1, 1, 1)] * (count - 1) + [array(0, 1, 2)])
    grads = gradients(model, feeds, {"y": array(12, 12, 12)}, list(feeds))
    first = [12 / (count - 1), 12 / count, 0]
    last = [0, 12 / count, 12]
    if op_type == "Min":
        first, last = first[::-1], last[::-1]
    for name in list(feeds)[:-1]:
        np.testing.assert_allclose(grads[name], first, rtol=1e-6)
    np.testing.assert_allclose(grads[list(feeds)[-1]], last, rtol=1e-6)


@pytest.mark.parametrize(
    ("x", "e"),
    [
        (array(0, 0, 0, 2, 3, 0.5), array(0, 1, 2, 0, -1, 2.5)),
        (array(0, -2, -2, -2, 4), np.array([3, 3, 2, 0, -1], np.int64)),
        (array(0, 1, 2), np.array([2, 0, 3], np.int32)),
        (array(0.5, 1, 2), np.array([2.5, 0, 3], np.float64)),
        (np.array([0.5, 1, 2]), array(2.5, 0, 3)),
        (array(-1.5, 0, 2), np.array(2, np.int64)),
    ],
)
def test_pow(x: np.ndarray, e: np.ndarray) -> None:
    def function(x: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        return torch.pow(x, e.to(x.dtype))

    check_against_torch("Pow", function, [x, e])


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, -1, 0.5, 1.5])
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_pow_with_a_constant_exponent(exponent: float, dtype: type) -> None:
    e = np.array(exponent, dtype)
    x = array(0.5, 1, 2)
    check_against_torch("Pow", lambda x, e: torch.pow(x, e.to(x.dtype)), [x, e], constants=[1])
    check_rule("Pow", [x, e], constants=[1], wrt=["a"], second=float(e) not in (0, 1))


def test_square_of_zero_has_a_finite_second_derivative() -> None:
    model, feeds = one_node("Pow", [array(0, 1), array(2)], constants=[1])
    first = ortgrad.build_gradient_model(model, wrt="a")
    ones = array(1, 1)
    second = gradients(first, {**feeds, "y_grad": ones}, {"a_grad": ones}, ["a"])
    np.testing.assert_array_equal(second["a"], [2, 2])


EDGES: list[tuple[str, Callable[..., torch.Tensor], list[np.ndarray | None], dict[str, Any]]] = [
    ("Abs", torch.abs, [array(-1, 0, 2)], {}),
    ("Sqrt", torch.sqrt, [array(0, 4)], {}),
    ("Log", torch.log, [array(0, 4)], {}),
    ("Reciprocal", torch.reciprocal, [array(0, 4)], {}),
    ("Max", torch.maximum, [array(1, 2, -np.inf), array(1, 1, -np.inf)], {}),
    ("Min", torch.minimum, [array(1, 2, np.inf), array(1, 1, np.inf)], {}),
    ("Mod", torch.fmod, [array(5.5, -5.5, 5.5, -5.5), array(2, 2, -2, -2)], {"fmod": 1}),
    ("Clip", torch.clamp, [array(-2, -1, 0, 1, 2), np.float32(-1), np.float32(1)], {}),
    ("Clip", torch.clamp, [array(-2, 0, 2), np.float32(1), np.float32(-1)], {}),
    ("Clip", lambda x, low: torch.clamp(x, low), [array(-2, -1, 0, 1), np.float32(-1)], {}),
    ("Clip", lambda x, low, high: torch.clamp(x, max=high), [array(0, 1, 2), None, np.float32(1)], {}),
    ("Clip", lambda x: torch.clamp(x, min=-9), [array(0, 1, 2)], {}),
]


@pytest.mark.parametrize(("op_type", "function", "inputs", "attributes"), EDGES)
def test_edges(
    op_type: str,
    function: Callable[..., torch.Tensor],
    inputs: list[np.ndarray | None],
    attributes: dict[str, Any],
) -> None:
    check_against_torch(op_type, function, [None if a is None else np.asarray(a) for a in inputs], attributes)


@pytest.mark.parametrize(("low", "high"), list(product([None, -0.5], [None, 0.75])))
@pytest.mark.parametrize("constants", [(), (1, 2)])
def test_clip(low: float | None, high: float | None, constants: tuple[int, ...]) -> None:
    bounds = [None if b is None else np.array(b, np.float32) for b in (low, high)]
    there = [i for i in constants if bounds[i - 1] is not None]
    check_rule("Clip", [between(-2, 2, 3, 4), *bounds], constants=there)


@pytest.mark.parametrize("shapes", [((2, 3), (2, 3), (2, 3)), ((3,), (2, 1), ()), ((2, 1, 1), (3,), (4, 1))])
def test_where(shapes: tuple[tuple[int, ...], ...]) -> None:
    condition = between(0, 1, *shapes[0]) > 0.5
    values = [between(-1, 1, *shape, seed=i) for i, shape in enumerate(shapes[1:])]
    for symbolic in (False, True):
        check_against_torch("Where", torch.where, [condition, *values], symbolic=symbolic)


def test_guarded_logarithm_has_no_nan() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        graph (float[n] x) => (float[n] y) {
            zero = Constant <value = float {0}> ()
            one = Constant <value = float {1}> ()
            bad = LessOrEqual (x, zero)
            safe = Where (bad, one, x)
            log = Log (safe)
            y = Where (bad, zero, log)
        }"""
    )
    grads = gradients(model, {"x": array(0, -1, 2)}, {"y": array(1, 1, 1)}, ["x"])
    np.testing.assert_array_equal(grads["x"], [0, 0, 0.5])


@pytest.mark.parametrize("floor", [False, True])
def test_mod_towards_the_divisor(floor: bool) -> None:
    a, b = array(5.5, -5.5, 5.5, -5.5, 0.25), array(2, 2, -2, -2, 3)
    if not floor:
        check_rule("Mod", [a, b], {"fmod": 1}, wrt=["a", "b"])
        return
    # onnxruntime has no such kernel for floating-point numbers, onnx's reference implementation does.
    model, feeds = one_node("Mod", [a, b], {"fmod": 0}, opset=28)
    built = ortgrad.build_gradient_model(model, wrt=["a", "b"])
    ones = np.ones(5, np.float32)
    _, da, db = ReferenceEvaluator(built).run(None, {**feeds, "y_grad": ones})
    expected = [torch.tensor(x, requires_grad=True) for x in (a, b)]
    torch.remainder(*expected).sum().backward()
    np.testing.assert_allclose(da, expected[0].grad.numpy())
    np.testing.assert_allclose(db, expected[1].grad.numpy())


@pytest.mark.parametrize(("exclusive", "reverse"), list(product([0, 1], [0, 1])))
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_running_sum(exclusive: int, reverse: int, axis: int) -> None:
    attributes = {"exclusive": exclusive, "reverse": reverse}
    for constants in ((), (1,)):
        check_rule(
            "CumSum", [between(-1, 1, 2, 3, 2), np.array(axis, np.int32)], attributes, constants=constants
        )


@pytest.mark.parametrize(("exclusive", "reverse"), list(product([0, 1], [0, 1])))
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_running_product(exclusive: int, reverse: int, axis: int) -> None:
    attributes = {"exclusive": exclusive, "reverse": reverse}
    x = between(-2, 2, 3, 4, 3)
    check_rule("CumProd", [x, np.array(axis, np.int64)], attributes, opset=26, second=axis == 1)
    for i, j in ((0, 0), (0, 2), (2, 1), (1, 1), (1, 3)):
        x[i, j] = 0
    check_rule("CumProd", [x, np.array(axis, np.int64)], attributes, opset=26)


def test_running_product_with_zeros_is_that_of_torch() -> None:
    x = np.array([[1, 2, 3, 4], [0, 2, 3, 4], [1, 0, 0, 4], [1, 0, 3, 0]], np.float32)
    inputs = [x, np.array(1, np.int64)]
    check_against_torch("CumProd", lambda x, axis: torch.cumprod(x, int(axis)), inputs, opset=26)


@pytest.mark.parametrize("source", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("target", [np.float32, np.float64, np.float16])
def test_casts(source: type, target: type) -> None:
    x = array(-1, 0.5, 2).astype(source)
    to = helper.np_dtype_to_tensor_dtype(np.dtype(target))
    seed = array(1, 2, 3).astype(target)
    for op_type, inputs, attributes in (
        ("Cast", [x], {"to": to}),
        ("CastLike", [x, np.zeros(1, target)], {}),
    ):
        model, feeds = one_node(op_type, inputs, attributes, outputs=[target])
        grads = gradients(model, feeds, {"y": seed}, ["a"])
        assert grads["a"].dtype == source
        np.testing.assert_array_equal(grads["a"], seed.astype(source))


def test_range() -> None:
    check_rule("Range", [np.array(v, np.float32) for v in (0.5, 3.1, 0.4)], wrt=["a", "c"])


@pytest.mark.parametrize(("scales", "axis"), [((), 1), ((1,), 1), ((3,), 1), ((2,), 0), ((4,), -1)])
@pytest.mark.parametrize("with_zero_point", [False, True])
def test_dequantize_towards_its_scale(scales: tuple[int, ...], axis: int, with_zero_point: bool) -> None:
    x = np.random.default_rng(0).integers(-9, 9, (2, 3, 4)).astype(np.int8)
    zero_point = np.random.default_rng(1).integers(-3, 3, scales).astype(np.int8) if with_zero_point else None
    check_rule(
        "DequantizeLinear",
        [x, between(0.5, 1, *scales), zero_point],
        {"axis": axis},
        symbolic=False,
        wrt=["b"],
    )


@pytest.mark.parametrize(
    "op_type", ["Floor", "Ceil", "Round", "Sign", "Hardmax", "Bernoulli", "RandomNormalLike", "EyeLike"]
)
def test_piecewise_constant(op_type: str) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]>
        graph (float[n, m] x) => (float[n, m] y) {{
            c = {op_type} (x)
            y = Mul (c, x)
        }}"""
    )
    built = ortgrad.build_gradient_model(model, wrt="x")
    x = between(0.1, 0.9, 3, 3)
    y, dx = ortgrad.InferenceSession(built).run(None, {"x": x, "y_grad": np.ones_like(x)})
    np.testing.assert_allclose(dx * x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op_type", [row[0] for row in BINARY])
@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_other_float_types(op_type: str, dtype: type) -> None:
    attributes = {"fmod": 1} if op_type == "Mod" else {}
    inputs = [between(0.5, 2, 2, 3).astype(dtype), between(0.5, 2, 3, seed=1).astype(dtype)]
    seed = between(-1, 1, 2, 3).astype(dtype)
    model, feeds = one_node(op_type, inputs, attributes)
    double, feeds_double = one_node(op_type, [a.astype(np.float64) for a in inputs], attributes)
    actual = gradients(model, feeds, {"y": seed}, list(feeds))
    expected = gradients(double, feeds_double, {"y": seed.astype(np.float64)}, list(feeds))
    for name in feeds:
        assert actual[name].dtype == dtype
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-2, atol=1e-2)


def test_graphs_are_small() -> None:
    def nodes(op_type: str, inputs: list[np.ndarray | None], wrt: list[str], **options: Any) -> list[str]:
        model, _ = one_node(op_type, inputs, symbolic=False, **options)
        built = ortgrad.build_gradient_model(model, wrt=wrt)
        return [n.op_type for n in built.graph.node if n.op_type not in ("Constant", "Identity")][1:]

    x, scalar = between(0, 1, 3), np.array(2, np.float32)
    assert nodes("Clip", [x, scalar, scalar], ["a"]) == ["Equal", "Where"]
    assert nodes("Pow", [x, scalar], ["a"], constants=[1]) == ["Mul", "Mul"]
    assert nodes("Div", [x, x], ["a"]) == ["Div"]
    assert nodes("Mul", [x, scalar], ["a"]) == ["Mul"]
    assert nodes("Where", [x > 0, x, x], ["b"]) == ["Where"]
