"""The compiled ConvGrad over many geometries: all forms of its tiles, against PyTorch in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from compiled_support import checked_tasks
from support import assert_close, run_node
from test_conv import expected, make_feeds, node_for
from test_malformed_calls import Case

import ortgrad
from ortgrad.ops.conv import _compiled
from ortgrad.ops.conv.conv import conv_grad

pytest.importorskip("numba", reason="kernels are compiled by Numba, which is optional")

Geometry = tuple[list[int], list[int], dict[str, Any]]

# Shapes of X and W, and attributes: what decides about tiles, blocks, panels and tasks.
CHOSEN: dict[str, Geometry] = {
    "one position": ([1, 5, 1, 1], [7, 5, 3, 3], {"pads": [1, 1, 1, 1]}),
    "one position of many samples": ([70, 5, 1], [7, 5, 1], {}),
    "wide rows": ([1, 7, 3, 130], [20, 7, 3, 3], {"pads": [1, 1, 1, 1]}),
    "panels over several samples": ([9, 30, 4, 4], [40, 30, 3, 3], {"pads": [1, 1, 1, 1]}),
    "panels, channels divided": ([1, 200, 8, 8], [130, 200, 3, 3], {"pads": [1, 1, 1, 1]}),
    "rows longer than a sum": ([1, 3, 1100], [17, 3, 4], {"pads": [2, 1], "strides": [2]}),
    "more taps than a sum": ([2, 2, 20, 20], [3, 2, 17, 17], {"pads": [3, 2, 1, 0]}),
    "more filters than a block": ([2, 3, 6, 5], [150, 3, 2, 2], {}),
    "pointwise, in place": ([2, 9, 8, 6], [20, 9, 1, 1], {}),
    "pointwise, not in place": ([2, 9, 7, 7], [20, 9, 1, 1], {}),
    "pointwise strided": ([2, 9, 9, 8], [20, 9, 1, 1], {"strides": [2, 3]}),
    "patches": ([2, 3, 12, 8], [40, 3, 4, 4], {"strides": [4, 4]}),
    "gaps between windows": ([1, 4, 11, 13], [5, 4, 2, 2], {"strides": [3, 4], "pads": [1, 0, 2, 1]}),
    "dilated over the padding": ([1, 4, 5, 6], [5, 4, 3, 3], {"dilations": [4, 3], "pads": [4, 3, 4, 3]}),
    "padding on one side": ([2, 4, 6, 7], [18, 4, 3, 5], {"pads": [0, 4, 2, 0], "strides": [1, 2]}),
    "windows that see padding only": ([1, 3, 6, 1], [5, 3, 2, 2], {"strides": [3, 3], "pads": [1, 3, 0, 0]}),
    "rows that see padding only": ([2, 3, 2, 9], [5, 3, 2, 2], {"strides": [4, 1], "pads": [5, 0, 3, 9]}),
    "rest behind the windows": ([1, 6, 10, 11], [8, 6, 3, 3], {"strides": [4, 3]}),
    "much padding": ([3, 14, 4, 4], [20, 14, 3, 3], {"pads": [1, 1, 1, 1]}),
    "much padding, strided": ([2, 13, 7, 8], [70, 13, 5, 3], {"pads": [2, 1, 2, 1], "strides": [2, 2]}),
    "taps that see padding only": ([2, 7, 2, 1], [18, 7, 5, 5], {"pads": [2, 4, 4, 5], "dilations": [1, 2]}),
    "much padding of a row": ([2, 40, 9], [17, 40, 7], {"pads": [3, 3]}),
    "groups": ([2, 12, 9, 9], [60, 4, 3, 3], {"group": 3, "pads": [1, 1, 1, 1]}),
    "3d": ([1, 5, 6, 7, 8], [18, 5, 3, 2, 3], {"pads": [1, 0, 1, 1, 1, 1], "strides": [2, 1, 1]}),
}


def random_geometry(random: np.random.Generator) -> Geometry:
    rank, group = int(random.integers(1, 4)), int(random.choice([1, 1, 1, 2, 3]))
    channels = int(random.integers(1, 41 if group == 1 else 9))
    filters = int(random.choice([1, 3, 5, 16, 17, 20, 64, 70])) if group == 1 else int(random.integers(1, 20))
    pointwise = random.random() < 0.2
    kernel = random.integers(1, 2 if pointwise else 5, rank).tolist()
    strides = random.integers(1, 2 if pointwise else 4, rank).tolist()
    dilations = random.integers(1, 3, rank).tolist()
    pads = (random.integers(0, 4, 2 * rank) * (random.random(2 * rank) < 0.7)).tolist()
    sizes = random.integers(1, {1: 600, 2: 24, 3: 9}[rank], rank).tolist()
    for i in range(rank):
        sizes[i] = max(sizes[i], (kernel[i] - 1) * dilations[i] + 1 - pads[i] - pads[rank + i])
    attributes = {"strides": strides, "dilations": dilations, "pads": pads, "group": group}
    return (
        [int(random.integers(1, 5)), group * channels, *sizes],
        [group * filters, channels, *kernel],
        attributes,
    )


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
@pytest.mark.parametrize("seed", range(4))
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
        *(random_geometry(random) for _ in range(10)),
    ]:
        feeds = make_feeds(x, w, attributes, np.float32)
        outputs = checked_tasks(conv_grad, Case("ConvGrad", feeds, attributes))
        for actual, right in zip(outputs, expected(feeds, attributes).values(), strict=True):
            assert_close(actual, right, 2e-5)


@pytest.mark.parametrize("case", ["wide rows", "panels, channels divided", "more filters than a block"])
def test_results_do_not_depend_on_threads(case: str) -> None:
    x, w, attributes = CHOSEN[case]
    feeds = make_feeds(x, w, attributes, np.float32)
    model = ortgrad.nodes.make_model(node_for(feeds, attributes))
    results = []
    for threads in (1, 2, 5):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        results.append(ortgrad.InferenceSession(model, options, kernels="compiled").run(None, feeds))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


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
