"""Convolutions with kernels of 3x3 by Winograd's method and their gradients, against PyTorch in float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnxruntime
import pytest
from support import amount, assert_close, run_node
from support.calls import Case
from support.compiled import checked_tasks
from support.convolutions import expected, make_feeds, node_for
from support.forward_convolutions import ACTIVATIONS, case_of, conv_model, expect, make_arrays, operators_of

import ortgrad
from ortgrad.lowering import forward_convolutions
from ortgrad.lowering import winograd as pass_of_gradients
from ortgrad.operators.declaration import INTERNAL_DOMAIN, find_operator
from ortgrad.ops.conv import costs
from ortgrad.ops.conv.winograd import winograd_conv, winograd_conv_grad
from ortgrad.pipelines.prepare import prepare_loaded

pytest.importorskip("numba", reason="kernels are compiled by Numba, which is optional")

Geometry = tuple[list[int], list[int], dict[str, Any]]
SAME = {"pads": [1, 1, 1, 1]}

# X, W, attributes: what decides about tiles, boxes, blocks of columns, tasks, and where weights are
# transformed.
GEOMETRIES: dict[str, Geometry] = {
    "even": ([1, 16, 8, 10], [16, 16, 3, 3], SAME),
    "odd": ([2, 16, 7, 9], [16, 16, 3, 3], SAME),
    "no padding": ([1, 16, 6, 9], [32, 16, 3, 3], {}),
    "much padding": ([2, 18, 5, 4], [16, 18, 3, 3], {"pads": [2, 2, 2, 2]}),
    "asymmetric pads": ([1, 17, 7, 6], [19, 17, 3, 3], {"pads": [0, 2, 1, 0]}),
    "other asymmetric pads": ([1, 16, 6, 7], [16, 16, 3, 3], {"pads": [2, 0, 0, 1]}),
    "padding at the ends only": ([1, 16, 5, 5], [16, 16, 3, 3], {"pads": [0, 0, 2, 2]}),
    "one result": ([1, 16, 3, 3], [16, 16, 3, 3], {}),
    "one element": ([3, 16, 1, 1], [17, 16, 3, 3], SAME),
    "less elements than a vector": ([2, 20, 3, 5], [16, 20, 3, 3], SAME),
    "one row": ([1, 16, 1, 40], [16, 16, 3, 3], SAME),
    "one column": ([1, 16, 40, 1], [16, 16, 3, 3], SAME),
    "long rows": ([1, 16, 3, 600], [16, 16, 3, 3], SAME),
    "channels beside vectors": ([1, 31, 6, 6], [33, 31, 3, 3], SAME),
    "several blocks of filters": ([1, 16, 6, 6], [150, 16, 3, 3], SAME),
    "several blocks of channels": ([1, 150, 6, 6], [16, 150, 3, 3], SAME),
    "more channels than a sum": ([1, 300, 4, 4], [16, 300, 3, 3], SAME),
    "weights of tasks": ([1, 130, 9, 9], [140, 130, 3, 3], SAME),
    "many tiles": ([3, 16, 34, 35], [16, 16, 3, 3], SAME),
    "many samples": ([40, 16, 4, 4], [20, 16, 3, 3], SAME),
    "SAME_UPPER": ([1, 16, 7, 8], [16, 16, 3, 3], {"auto_pad": "SAME_UPPER"}),
    "SAME_LOWER": ([1, 16, 8, 7], [16, 16, 3, 3], {"auto_pad": "SAME_LOWER"}),
    "VALID": ([1, 16, 5, 6], [16, 16, 3, 3], {"auto_pad": "VALID"}),
}


def random_geometry(seed: int) -> Geometry:
    random = np.random.default_rng(seed)
    channels, filters = (int(random.choice([16, 17, 24, 32, 47, 64, 65, 100])) for _ in range(2))
    pads = random.integers(0, 3, 4)
    sizes = np.maximum(1, 3 - pads[:2] - pads[2:]) + random.integers(0, 30, 2)
    x = [int(random.integers(1, 4)), channels, *sizes.tolist()]
    return x, [filters, channels, 3, 3], {"pads": pads.tolist()}


GEOMETRIES |= {f"random {seed}": random_geometry(seed) for seed in range(amount(12, 120))}
SLOW_WITH_CHECKS = {f"random {seed}" for seed in range(4, 12)}
DTYPES = {name: "float64" if i % 3 == 2 else "float32" for i, name in enumerate(GEOMETRIES)}
TOLERANCES = {"float32": 2e-5, "float64": 1e-12}


@pytest.fixture(autouse=True)
def _replace_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small convolutions would be left to other kernels."""
    monkeypatch.setattr(forward_convolutions, "is_fastest", lambda *_: True)
    chosen = costs.BUILT_IN._replace(winograd=costs.Winograd(transforms=0, tiles=0))
    monkeypatch.setattr(costs, "current", lambda: chosen)


@pytest.fixture
def without_numpy_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("the NumPy kernel ran")

    for operator in (winograd_conv, winograd_conv_grad):
        monkeypatch.setattr(operator, "kernel", fail)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_convolution(name: str, without_numpy_kernels: None) -> None:
    arrays, y = make_arrays(GEOMETRIES[name], DTYPES[name])
    model = conv_model(arrays, GEOMETRIES[name][2])
    assert operators_of(model) == ["WinogradConv"]
    session = ortgrad.InferenceSession(model)
    feeds = {name: arrays[name] for name in "XWB"}
    for _ in range(2):
        result = session.run(["Y"], feeds)[0]
        assert_close(result, expect(arrays, y, "", "XWB"), TOLERANCES[DTYPES[name]])


@pytest.mark.parametrize("inputs", ["XW", "XWZ", "XWBZ"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_merged(inputs: str, activation: str, without_numpy_kernels: None) -> None:
    arrays, y = make_arrays(GEOMETRIES["asymmetric pads"], "float64" if inputs == "XWZ" else "float32")
    model = conv_model(arrays, GEOMETRIES["asymmetric pads"][2], activation, inputs)
    assert operators_of(model) == ["WinogradConv"]
    result = ortgrad.InferenceSession(model).run(["Y"], {name: arrays[name] for name in inputs})[0]
    assert_close(result, expect(arrays, y, activation, inputs), 2e-5)


def gradients(geometry: Geometry, dtype: str, outputs: Any = ("dX", "dW", "dB")) -> dict[str, np.ndarray]:
    x, w, attributes = geometry
    feeds = make_feeds(x, w, attributes, dtype)
    node = node_for(feeds, attributes, outputs)
    return run_node(node, feeds, "auto", shapes={name: list(array.shape) for name, array in feeds.items()})


@pytest.mark.parametrize("name", GEOMETRIES)
def test_gradients(name: str, without_numpy_kernels: None) -> None:
    x, w, attributes = GEOMETRIES[name]
    found = gradients(GEOMETRIES[name], DTYPES[name])
    for output, right in expected(make_feeds(x, w, attributes, DTYPES[name]), attributes).items():
        assert_close(found[output], right, TOLERANCES[DTYPES[name]])


@pytest.mark.parametrize("name", ["odd", "weights of tasks", "many tiles"])
def test_each_gradient_alone(name: str, without_numpy_kernels: None) -> None:
    every = gradients(GEOMETRIES[name], "float32")
    for wanted in itertools.product((True, False), repeat=3):
        outputs = [output if want else None for output, want in zip(every, wanted, strict=True)]
        if any(wanted):
            for output, value in gradients(GEOMETRIES[name], "float32", outputs).items():
                np.testing.assert_array_equal(value, every[output])


def test_sizes_that_are_not_known() -> None:
    for name in ("odd", "one element", "many tiles"):
        x, w, attributes = GEOMETRIES[name]
        feeds = make_feeds(x, w, attributes, "float32")
        shapes = {"dY": ["N", w[0], "a", "b"], "X": ["N", w[1], "c", "d"], "W": w}
        model = ortgrad.nodes.make_model(node_for(feeds, attributes), shapes=shapes)
        nodes = prepare_loaded(model, "auto", bodies=False).graph.node
        assert [node.op_type for node in nodes] == ["WinogradConvGrad"]
        found = ortgrad.InferenceSession(model).run(["dX", "dW", "dB"], feeds)
        for actual, right in zip(found, expected(feeds, attributes).values(), strict=True):
            assert_close(actual, right, 2e-5)


# Numba's checks raise an IndexError; a result that was not written is NaN. One test for all geometries, as
# functions with checks are compiled for every process.
def test_the_convolution_reads_and_writes_inside_its_tensors() -> None:
    for name, geometry in GEOMETRIES.items():
        if name not in SLOW_WITH_CHECKS:
            arrays, y = make_arrays(geometry, "float32")
            case = case_of(arrays, geometry[2], "Relu", "XWBZ")
            results = checked_tasks(winograd_conv, Case("WinogradConv", case.arrays, case.attributes))
            assert results is not None
            assert_close(results[0], expect(arrays, y, "Relu", "XWBZ"), 2e-5)


def test_the_gradient_reads_and_writes_inside_its_tensors() -> None:
    for name, (x, w, attributes) in GEOMETRIES.items():
        if name not in SLOW_WITH_CHECKS:
            feeds = make_feeds(x, w, attributes, "float32")
            outputs = checked_tasks(winograd_conv_grad, Case("WinogradConvGrad", feeds, attributes))
            assert outputs is not None
            for actual, right in zip(outputs, expected(feeds, attributes).values(), strict=True):
                assert_close(actual, right, 2e-5)


@pytest.mark.parametrize("name", ["weights of tasks", "many tiles", "several blocks of channels"])
def test_results_do_not_depend_on_threads(name: str) -> None:
    x, w, attributes = GEOMETRIES[name]
    arrays, _ = make_arrays(GEOMETRIES[name], "float32")
    feeds = make_feeds(x, w, attributes, "float32")
    shapes = {name: list(array.shape) for name, array in feeds.items()}
    models = [
        (conv_model(arrays, attributes, "Relu", "XWBZ"), arrays),
        (ortgrad.nodes.make_model(node_for(feeds, attributes), shapes=shapes), feeds),
    ]
    for model, inputs in models:
        results = []
        for count in (1, 2, 5):
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = count
            results.append(ortgrad.InferenceSession(model, options).run(None, inputs))
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                np.testing.assert_array_equal(a, b)


# The largest number that float32 holds is 3.4e38: the transforms of 3e38 overflow.
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("where", ["dY", "X", "W"])
def test_gradients_of_numbers_that_are_not_finite(where: str, value: float) -> None:
    """They go where they go in the NumPy kernel, and to no other element."""
    x, w, attributes = GEOMETRIES["odd"]
    feeds = make_feeds(x, w, attributes, np.float32)
    shapes = {name: list(array.shape) for name, array in feeds.items()}
    # Two numbers of a window.
    feeds[where][1, 2, 0, :2] = value
    with np.errstate(all="ignore"):
        results = [
            run_node(node_for(feeds, attributes), feeds, way, shapes=shapes) for way in ("auto", "python")
        ]
    for output in ("dX", "dW", "dB"):
        np.testing.assert_allclose(*(result[output] for result in results), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("where", "XWBZ")
def test_results_of_numbers_that_are_not_finite(where: str, value: float) -> None:
    arrays, _ = make_arrays(GEOMETRIES["odd"], "float32")
    arrays[where].reshape(-1)[3:5] = value
    session = ortgrad.InferenceSession(conv_model(arrays, SAME, "Relu", "XWBZ"))
    with np.errstate(all="ignore"):
        right = winograd_conv.kernel(
            *arrays.values(), group=1, kernel_shape=None, activation="Relu", alpha=0.0, beta=0.0, **SAME
        )
        np.testing.assert_allclose(session.run(["Y"], arrays)[0], right, rtol=1e-4, atol=1e-4)


def test_elements_are_computed_from_what_their_windows_see() -> None:
    """A large number disturbs no result, and no gradient, whose window does not see it."""
    x, w, attributes = GEOMETRIES["even"]
    feeds = make_feeds(x, w, attributes, np.float32)
    shapes = {name: list(array.shape) for name, array in feeds.items()}
    node = node_for(feeds, attributes, ["dX", None, None])
    before = run_node(node, feeds, "auto", shapes=shapes)["dX"]
    feeds["dY"][0, 3, 4, 5] = 1e20
    after = run_node(node, feeds, "auto", shapes=shapes)["dX"]
    assert (before != after)[0, :, 3:6, 4:7].all()
    after[0, :, 3:6, 4:7] = before[0, :, 3:6, 4:7]
    np.testing.assert_array_equal(after, before)


def test_sums_are_accurate() -> None:
    """A long sum of numbers of one sign, in float32."""
    random = np.random.default_rng(0)
    x, w = (random.random(shape, dtype=np.float32) + 1 for shape in ([1, 3000, 4, 4], [16, 3000, 3, 3]))
    arrays, y = {"X": x, "W": w, "Z": np.empty((1, 16, 2, 2), np.float32)}, np.empty((1, 16, 2, 2))
    for i, j in np.ndindex(2, 2):
        y[0, :, i, j] = np.tensordot(w.astype(np.float64), x[0, :, i : i + 3, j : j + 3], 3)
    session = ortgrad.InferenceSession(conv_model(arrays, {}, "", "XW"))
    np.testing.assert_allclose(session.run(["Y"], {"X": x, "W": w})[0], y, rtol=3e-6)


def test_errors_are_those_of_sums_of_products() -> None:
    """On random numbers they are as small as those of the kernel that computes all products."""
    x, w, attributes = [2, 64, 24, 24], [64, 64, 3, 3], SAME
    feeds = make_feeds(x, w, attributes, np.float32)
    right = expected({name: array.astype(np.float64) for name, array in feeds.items()}, attributes)
    shapes = {name: list(array.shape) for name, array in feeds.items()}

    def errors(way: str) -> list[float]:
        found = run_node(node_for(feeds, attributes), feeds, way, shapes=shapes)
        return [float(np.sqrt(((found[name] - right[name]) ** 2).mean())) for name in ("dX", "dW")]

    for own, others in zip(errors("auto"), errors("python"), strict=True):
        assert own < 2 * others


def test_empty_tensors() -> None:
    arrays, _ = make_arrays(GEOMETRIES["even"], "float32")
    model = conv_model(arrays, SAME, "Relu", dynamic=True)
    assert operators_of(model) == ["WinogradConv"]
    feeds = {**{name: arrays[name] for name in "XWB"}, "X": arrays["X"][:0]}
    session = ortgrad.InferenceSession(model)
    assert session.run(["Y"], feeds)[0].shape == (0, *arrays["Z"].shape[1:])


@pytest.mark.parametrize(
    ("w", "attributes"),
    [
        ([16, 16, 3, 3], {"strides": [2, 1]}),
        ([16, 16, 3, 3], {"dilations": [1, 2]}),
        ([16, 16, 3, 3], {"pads": [3, 1, 1, 1]}),
        ([32, 16, 3, 3], {"group": 2}),
        ([16, 16, 3, 1], {}),
        ([16, 16, 5, 5], {}),
        ([15, 16, 3, 3], {}),
        ([16, 15, 3, 3], {}),
        ([16, 16, 3], {"pads": [1, 1]}),
        ([16, 16, 3, 3, 3], {}),
    ],
)
def test_what_is_left_to_other_kernels(w: list[int], attributes: dict[str, Any]) -> None:
    geometry = [1, w[1] * attributes.get("group", 1), *[9] * len(w[2:])], w, attributes
    arrays, _ = make_arrays(geometry, "float32")
    assert operators_of(conv_model(arrays, attributes)) == ["DenseConv"]
    feeds = make_feeds(*geometry, "float32")
    shapes = {name: list(array.shape) for name, array in feeds.items()}
    model = ortgrad.nodes.make_model(node_for(feeds, attributes), shapes=shapes)
    assert [n.op_type for n in prepare_loaded(model, "auto", bodies=False).graph.node] == ["ConvGrad"]


def test_when_it_is_the_fastest_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    fastest = pass_of_gradients.is_fastest
    assert fastest((1, 64, 56, 56), (64, 64, 3, 3), {})
    assert fastest((8, 512, 7, 7), (512, 512, 3, 3), {})
    assert fastest((None, 32, None, None), (32, 32, 3, 3), {})
    assert fastest(None, (64, 64, 3, 3), {})
    # The transforms of tiles take longer than the products.
    assert not fastest((1, 16, 160, 160), (16, 16, 3, 3), {})
    assert not fastest((1, 64, 56, 56), (16, 64, 3, 3), {})
    # So do those of weights for few tiles.
    assert not fastest((1, 512, 7, 7), (512, 512, 3, 3), {})
    assert not fastest((1, 64, 56, 56), (64, None, 3, 3), {})
    assert not fastest((1, 64, 56, 56), None, {})


def test_operators_of_sessions_stay_in_sessions() -> None:
    arrays, _ = make_arrays(GEOMETRIES["odd"], "float32")
    built = ortgrad.build_gradient_model(conv_model(arrays, SAME, "Relu"), wrt=["X", "W"])
    for saved in (built, *(ortgrad.prepare(built, kernels=way) for way in ("auto", "compiled"))):
        assert INTERNAL_DOMAIN not in {node.domain for node in saved.graph.node}
        assert {"Conv", "ConvGrad"} <= {node.op_type for node in saved.graph.node}
    assert find_operator("WinogradConv") is None


@pytest.mark.parametrize("kernels", ["auto", "compiled"])
def test_gradients_of_a_model(kernels: str) -> None:
    """Of a residual block, against finite differences."""
    arrays, _ = make_arrays(([2, 16, 6, 7], [16, 16, 3, 3], SAME), "float64")
    model = conv_model(arrays, SAME, "", "XWBZ")
    built = ortgrad.build_gradient_model(model, of="Y", wrt=list("XWBZ"))
    session = ortgrad.InferenceSession(built, kernels=kernels)
    random = np.random.default_rng(2)
    dy = random.standard_normal(arrays["Z"].shape)
    found = session.run([f"{n}_grad" for n in "XWBZ"], {**arrays, "Y_grad": dy})
    directions = {name: random.standard_normal(array.shape) for name, array in arrays.items()}

    def value(step: float) -> float:
        moved = {name: arrays[name] + step * directions[name] for name in arrays}
        return float((session.run(["Y"], {**moved, "Y_grad": dy})[0] * dy).sum())

    # Quadratic along a direction, so that the difference is exact.
    slope = sum(float((g * directions[name]).sum()) for name, g in zip("XWBZ", found, strict=True))
    assert slope == pytest.approx((value(1.0) - value(-1.0)) / 2, rel=1e-9)
