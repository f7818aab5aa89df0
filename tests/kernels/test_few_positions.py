"""Gradients of convolutions with few positions, in compiled kernels, against PyTorch and differences."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from support import amount, assert_close, run_node
from support import pointwise as pointwise_cases
from support.calls import Case
from support.compiled import checked_tasks
from support.convolutions import check_threads, expected, make_feeds, node_for
from support.geometries import CHOSEN, Geometry, random_geometry

import ortgrad
from ortgrad.operators.compiled import Plan
from ortgrad.ops import pointwise
from ortgrad.ops._windows import windows
from ortgrad.ops.conv import _compiled, _few_positions_plan, costs
from ortgrad.ops.conv.conv import conv_grad
from ortgrad.ops.conv.costs import FewDw, FewDx

pytest.importorskip("numba", reason="kernels are compiled by Numba, which is optional")

TOLERANCES = {"float32": 2e-5, "float64": 1e-12}
# Shapes of X and W, and attributes: what decides about blocks, tiles and boxes.
FEW: dict[str, Geometry] = {
    "one position": ([1, 64, 1], [20, 64, 3], {"pads": [1, 1]}),
    "two positions": ([1, 33, 3], [9, 33, 3], {"pads": [1, 1], "strides": [2]}),
    "pairs that fill no tile": ([2, 43, 3], [70, 43, 3], {"pads": [1, 1]}),
    "pairs fewer than a vector": ([2, 5, 4], [7, 5, 3], {"pads": [1, 1]}),
    "no padding": ([1, 48, 4, 4], [64, 48, 2, 2], {}),
    "many filters": ([1, 20, 2, 3], [150, 20, 2, 2], {"pads": [0, 1, 1, 0]}),
    "more rows than a sum": ([3, 6, 10, 11], [5, 6, 3, 3], {"pads": [1, 1, 1, 1]}),
    "divided": ([1, 190, 8, 8], [130, 190, 3, 3], {"pads": [1, 1, 1, 1]}),
    "rest behind the windows": ([1, 6, 10, 11], [8, 6, 3, 3], {"strides": [4, 3]}),
    "gaps and dilations": ([2, 9, 7, 8], [5, 9, 2, 3], {"strides": [3, 1], "dilations": [1, 2]}),
    "groups": ([2, 60, 5, 3], [21, 20, 3, 3], {"group": 3, "pads": [1, 1, 1, 1]}),
    "one tap": ([2, 35, 5, 5], [20, 35, 1, 1], {}),
    "one tap of groups": ([1, 48, 4, 5], [34, 24, 1, 1], {"group": 2}),
    "one tap, strided": ([1, 18, 5, 6], [20, 18, 1, 1], {"strides": [2, 3]}),
    "large kernel": ([1, 3, 9, 9], [4, 3, 9, 9], {"pads": [2, 2, 2, 2]}),
    "3d": ([1, 5, 3, 4, 3], [18, 5, 3, 2, 3], {"pads": [1, 0, 1, 1, 1, 1], "strides": [2, 1, 1]}),
}
ALL = {**{f"{name}, of others": geometry for name, geometry in CHOSEN.items()}, **FEW}
WAYS = [(True, True), (True, False), (False, True)]


def choose(monkeypatch: pytest.MonkeyPatch, dx: bool, dw: bool) -> None:
    """Let dX and dW be computed in this way where it is possible, or never."""
    few_dx = FewDx(*[0.0] * 6) if dx else FewDx(call=math.inf)
    few_dw = FewDw(*[0.0] * 7) if dw else FewDw(call=math.inf)
    chosen = costs.BUILT_IN._replace(few_dx=few_dx, few_dw=few_dw)
    monkeypatch.setattr(costs, "current", lambda: chosen)
    monkeypatch.setattr(pointwise, "_dx_pays", lambda few: dx)
    monkeypatch.setattr(pointwise, "_dw_pays", lambda few: dw)
    monkeypatch.setattr(_few_positions_plan, "_MOST_ROWS", 1 << 20)


@pytest.fixture
def few_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("the NumPy kernel ran")

    monkeypatch.setattr(conv_grad, "kernel", fail)
    choose(monkeypatch, dx=True, dw=True)


def check(geometry: Geometry, dtype: str) -> None:
    x, w, attributes = geometry
    feeds = make_feeds(x, w, attributes, dtype)
    result = run_node(node_for(feeds, attributes), feeds, "compiled")
    for name, gradient in expected(feeds, attributes).items():
        assert_close(result[name], gradient, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", ALL)
def test_chosen_geometries(case: str, dtype: str, few_only: None) -> None:
    check(ALL[case], dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_random_geometries(dtype: str, few_only: None) -> None:
    random = np.random.default_rng(3)
    for _ in range(25):
        check(random_geometry(random), dtype)


@pytest.mark.parametrize(("dx", "dw"), WAYS[1:])
@pytest.mark.parametrize("case", ["two positions", "groups", "no padding", "3d"])
def test_one_gradient_in_another_way(case: str, dx: bool, dw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, dx=dx, dw=dw)
    check(FEW[case], "float32")


@pytest.mark.parametrize("case", ["two positions", "gaps and dilations", "groups", "many filters"])
def test_differences(case: str, few_only: None) -> None:
    """The sum of dY * Y is linear in X and in W, so that differences are exact but for rounding."""
    x, w, attributes = FEW[case]
    feeds = make_feeds(x, w, attributes, "float64")
    result = run_node(node_for(feeds, attributes), feeds, "compiled")
    random = np.random.default_rng(5)
    for name, gradient in (("X", "dX"), ("W", "dW")):
        for _ in range(3):
            step = random.standard_normal(feeds[name].shape)
            ends = [{**feeds, name: feeds[name] + sign * step} for sign in (1, -1)]
            up, down = (np.sum(feeds["dY"] * convolution(end["X"], end["W"], attributes)) for end in ends)
            np.testing.assert_allclose(np.sum(result[gradient] * step), (up - down) / 2, rtol=1e-9)


def convolution(x: np.ndarray, w: np.ndarray, attributes: dict[str, Any]) -> np.ndarray:
    """The forward operator, as a sum over the taps."""
    group = attributes.get("group", 1)
    win = windows(x.shape[2:], w.shape[2:], **{k: v for k, v in attributes.items() if k != "group"})
    tails = [max(r - h - n, 0) for r, h, n in zip(win.reach, win.heads, win.sizes, strict=True)]
    padded = np.pad(x, [(0, 0), (0, 0), *zip(win.heads, tails, strict=True)])
    padded = padded.reshape(len(x), group, -1, *padded.shape[2:])
    filters = w.reshape(group, -1, *w.shape[1:])
    y = np.zeros((len(x), group, filters.shape[1], *win.outputs))
    for tap in itertools.product(*map(range, win.kernel)):
        axes = zip(tap, win.dilations, win.strides, win.outputs, strict=True)
        read = tuple(slice(k * d, k * d + (o - 1) * s + 1, s) for k, d, s, o in axes)
        y += np.einsum("gmc,ngc...->ngm...", filters[(..., *tap)], padded[(..., *read)])
    return y.reshape(len(x), -1, *win.outputs)


def test_no_index_is_outside_of_its_tensor(few_only: None) -> None:
    random = np.random.default_rng(2)
    small = [FEW[name] for name in FEW if name != "divided"]
    for x, w, attributes in [*small, *(random_geometry(random) for _ in range(amount(5, 100)))]:
        feeds = make_feeds(x, w, attributes, np.float32)
        outputs = checked_tasks(conv_grad, Case("ConvGrad", feeds, attributes))
        for actual, right in zip(outputs or [], expected(feeds, attributes).values(), strict=True):
            assert_close(actual, right, 2e-5)


@pytest.mark.parametrize("case", ["divided", "pairs that fill no tile"])
def test_results_do_not_depend_on_threads(case: str, few_only: None) -> None:
    check_threads(*FEW[case])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["dY", "X", "W"])
@pytest.mark.parametrize("case", ["groups", "pairs that fill no tile", "no padding", "one tap"])
def test_what_is_not_finite_goes_where_it_goes_in_numpy(
    case: str, name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, attributes = FEW[case]
    feeds = make_feeds(x, w, attributes, np.float32)
    feeds[name].reshape(-1)[feeds[name].size // 3] = value
    numpy = run_node(node_for(feeds, attributes), feeds, "python")
    choose(monkeypatch, dx=True, dw=True)
    monkeypatch.setattr(conv_grad, "kernel", None)
    compiled = run_node(node_for(feeds, attributes), feeds, "compiled")
    for output in ("dX", "dW", "dB"):
        np.testing.assert_allclose(compiled[output], numpy[output], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dx", "dw"), WAYS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_pointwise_gradients(dx: bool, dw: bool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, dx=dx, dw=dw)
    for name in pointwise_cases.CASES:
        arrays, right = pointwise_cases.arrays_of(name, dtype)
        session = ortgrad.InferenceSession(pointwise_cases.model_of(name, dtype))
        for output, value in zip(pointwise_cases.OUTPUTS, session.run(None, arrays), strict=True):
            assert_close(value, right[output], TOLERANCES[dtype])


def test_no_pointwise_kernel_reads_or_writes_outside_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, dx=True, dw=True)
    pointwise_cases.check_memory()


@pytest.mark.parametrize("where", ["dY", "X", "W"])
def test_pointwise_numbers_that_are_not_finite(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, dx=True, dw=True)
    pointwise_cases.check_special(np.inf, where)


def plan_of(x: list[int], w: list[int], attributes: dict[str, Any]) -> Plan | None:
    attributes = {"group": 1, "kernel_shape": None, **attributes}
    named = {k: v for k, v in attributes.items() if k not in ("group", "kernel_shape")}
    dy = (x[0], w[0], *windows(x[2:], w[2:], **named).outputs)
    make = pointwise.plan if math.prod(w[2:]) == 1 else _compiled.plan
    return make(dy, tuple(x), tuple(w), tuple(x), tuple(w), (w[0],), **attributes)


@pytest.mark.parametrize(
    ("x", "w", "attributes", "dx", "dw"),
    [
        ([1, 64, 1], [128, 64, 3], {"pads": [1, 1]}, True, True),
        ([1, 48, 4, 4], [64, 48, 2, 2], {}, True, True),
        ([1, 64, 56, 56], [64, 64, 3, 3], {"pads": [1, 1, 1, 1]}, False, False),
        ([8, 16, 20, 20], [16, 16, 3, 3], {"pads": [1, 1, 1, 1]}, False, False),
        ([1, 384, 5, 5], [384, 384, 1, 1], {}, True, False),
        ([4, 32, 3, 3], [64, 32, 1, 1], {}, True, True),
        ([1, 32, 40, 40], [64, 32, 1, 1], {}, False, False),
    ],
)
def test_what_is_chosen(x: list[int], w: list[int], attributes: dict[str, Any], dx: bool, dw: bool) -> None:
    plan = plan_of(x, w, attributes)
    assert plan is not None
    numbers = plan.numbers["few"]
    assert isinstance(numbers, list) and numbers[:2] == [dx, dw]
