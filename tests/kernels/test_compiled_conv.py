"""The compiled ConvGrad over many geometries: all forms of its tiles, against PyTorch in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import amount, assert_close, run_node
from support.calls import Case
from support.compiled import checked_tasks
from support.convolutions import check_threads, expected, make_feeds, node_for
from support.geometries import CHOSEN, Geometry, random_geometry

from ortgrad.ops.conv import _compiled
from ortgrad.ops.conv.conv import conv_grad

pytest.importorskip("numba", reason="kernels are compiled by Numba, which is optional")


@pytest.fixture
def without_the_numpy_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("the NumPy kernel ran")

    monkeypatch.setattr(conv_grad, "kernel", fail)


def check(geometry: Geometry, dtype: str) -> None:
    x, w, attributes = geometry
    feeds = make_feeds(x, w, attributes, dtype)
    result = run_node(node_for(feeds, attributes), feeds, "compiled")
    for name, gradient in expected(feeds, attributes).items():
        assert_close(result[name], gradient, {"float32": 2e-5, "float64": 1e-12}[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CHOSEN)
def test_chosen_geometries(case: str, dtype: str, without_the_numpy_kernel: None) -> None:
    check(CHOSEN[case], dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", range(amount(4, 60)))
def test_random_geometries(seed: int, dtype: str, without_the_numpy_kernel: None) -> None:
    random = np.random.default_rng(seed)
    for _ in range(15):
        check(random_geometry(random), dtype)


def test_no_index_is_outside_of_its_tensor() -> None:
    random = np.random.default_rng(1)
    names = [
        "windows that see padding only",
        "panels over several samples",
        "much padding, strided",
        "taps that see padding only",
        "pointwise, in place",
        "gaps between windows",
        "groups",
        "3d",
    ]
    for x, w, attributes in [
        *(CHOSEN[name] for name in names),
        *(random_geometry(random) for _ in range(amount(10, 200))),
    ]:
        feeds = make_feeds(x, w, attributes, np.float32)
        outputs = checked_tasks(conv_grad, Case("ConvGrad", feeds, attributes))
        for actual, right in zip(outputs, expected(feeds, attributes).values(), strict=True):
            assert_close(actual, right, 2e-5)


@pytest.mark.parametrize("case", ["wide rows", "panels, channels divided", "more filters than a block"])
def test_results_do_not_depend_on_threads(case: str) -> None:
    check_threads(*CHOSEN[case])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["dY", "X", "W"])
@pytest.mark.parametrize("case", ["groups", "much padding"])
def test_what_is_not_finite_goes_where_it_goes_in_numpy(case: str, name: str, value: float) -> None:
    x, w, attributes = CHOSEN[case]
    feeds = make_feeds(x, w, attributes, np.float32)
    feeds[name][1, 2, 0, 0] = value
    results = [run_node(node_for(feeds, attributes), feeds, way) for way in ("compiled", "python")]
    for output in ("dX", "dW", "dB"):
        np.testing.assert_allclose(*(result[output] for result in results), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("w", "group", "strides", "fastest"),
    [
        ((8, 3, 3, 3), 1, None, True),
        ((None, None, 3, 3), 1, [2, 2], True),
        ((8, 3, 3, 1), 1, [2, 1], True),
        ((8, 3, 1, 1), 1, None, False),
        ((8, 3, 2, 2), 1, [2, 2], False),
        ((8, 1, 3, 3), 8, None, False),
        ((8, 4, None), 2, None, True),
        (None, 1, None, True),
        ((8, 3, 3, 3, 3, 3), 1, None, False),
    ],
)
def test_when_it_is_the_fastest_way(
    w: tuple[int | None, ...] | None, group: int, strides: list[int] | None, fastest: bool
) -> None:
    assert _compiled.is_fastest(None, None, w, group=group, strides=strides, pads=None) is fastest
