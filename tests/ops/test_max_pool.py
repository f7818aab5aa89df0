"""MaxPool with indices in sessions with compiled kernels, against onnxruntime's own."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from support import amount, needs_numba
from support.calls import Case
from support.compiled import checked_tasks

import ortgrad
from ortgrad.graph.trials import onnxruntime_errors
from ortgrad.operators.declaration import INTERNAL_DOMAIN
from ortgrad.ops.max_pool import max_pool_with_indices
from ortgrad.pipelines.prepare import prepare_loaded

Geometry = tuple[list[int], dict[str, Any]]

# X, attributes
CASES: dict[str, Geometry] = {
    "2x2": ([2, 3, 8, 6], {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "2x2 in long rows": ([2, 3, 9, 67], {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "2x2 in long rows, ceil_mode": (
        [1, 2, 9, 67],
        {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1},
    ),
    "2x2 in long rows of a 3d pool": ([1, 2, 3, 6, 70], {"kernel_shape": [1, 2, 2], "strides": [1, 2, 2]}),
    "3x3 strided": ([2, 3, 9, 12], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}),
    "3x3": ([2, 3, 7, 6], {"kernel_shape": [3, 3], "pads": [1] * 4}),
    "5x5": ([1, 2, 13, 13], {"kernel_shape": [5, 5], "pads": [2] * 4}),
    "strides beyond the kernel": ([1, 2, 13, 11], {"kernel_shape": [2, 1], "strides": [3, 4]}),
    "asymmetric pads": ([1, 2, 7, 6], {"kernel_shape": [3, 4], "pads": [0, 3, 2, 1], "strides": [1, 3]}),
    "ceil_mode": ([1, 2, 8, 7], {"kernel_shape": [3, 3], "strides": [2, 3], "pads": [1] * 4, "ceil_mode": 1}),
    "smaller than the kernel": (
        [1, 2, 2, 3],
        {"kernel_shape": [3, 3], "pads": [2, 2, 2, 2], "strides": [2, 2]},
    ),
    "SAME_UPPER": ([2, 2, 7, 8], {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    "SAME_LOWER": ([2, 2, 7, 8], {"kernel_shape": [3, 2], "auto_pad": "SAME_LOWER"}),
    "VALID": ([2, 2, 7, 8], {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "VALID"}),
    "1d": ([2, 3, 11], {"kernel_shape": [3], "strides": [2], "pads": [1, 2]}),
    "1d of several strips": ([1, 2, 9001], {"kernel_shape": [5], "pads": [4, 3]}),
    "1d of several strips, strided": ([1, 2, 19001], {"kernel_shape": [4], "strides": [3], "pads": [2, 1]}),
    "2d of several strips": ([1, 2, 90, 100], {"kernel_shape": [3, 3], "pads": [1] * 4}),
    "2d of several strips, strided": ([1, 2, 200, 180], {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "3d": ([2, 2, 5, 6, 7], {"kernel_shape": [3, 2, 3], "strides": [2, 1, 2], "pads": [1, 0, 2, 2, 1, 1]}),
    "3d ceil_mode": ([1, 2, 6, 6, 5], {"kernel_shape": [2, 2, 2], "strides": [3, 2, 2], "ceil_mode": 1}),
    "many channels": ([1, 130, 5, 5], {"kernel_shape": [2, 2]}),
    "empty batch": ([0, 3, 6, 6], {"kernel_shape": [2, 2]}),
    "ones for dilations": ([1, 2, 6, 6], {"kernel_shape": [2, 2], "dilations": [1, 1], "storage_order": 0}),
}


def random_geometry(seed: int) -> Geometry:
    random = np.random.default_rng(seed)
    rank = int(random.integers(1, 4))
    kernel = random.integers(1, 6, rank)
    pads = np.concatenate([random.integers(0, kernel), random.integers(0, kernel)])
    sizes = np.maximum(1, kernel - pads[:rank] - pads[rank:]) + random.integers(0, 20, rank)
    attributes = {"kernel_shape": kernel, "strides": random.integers(1, 5, rank), "pads": pads}
    return (
        [*random.integers(1, 4, 2).tolist(), *sizes.tolist()],
        {**{name: value.tolist() for name, value in attributes.items()}, "ceil_mode": int(seed % 2)},
    )


# Squares are compared several at once: in rows of one more than that, of one less, and of so many.
ROWS = [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33]
SQUARES: dict[str, Geometry] = {
    f"2x2 in rows of {count}": ([2, 3, 5, 2 * count + count % 2], {"kernel_shape": [2, 2], "strides": [2, 2]})
    for count in ROWS
}
RANDOM = {f"random {seed}": random_geometry(seed) for seed in range(amount(40, 400))}
GEOMETRIES = {**CASES, **SQUARES, **RANDOM}


def make_model(geometry: Geometry, dtype: str, *, outputs: int = 2, gradient: bool = True) -> onnx.ModelProto:
    shape, attributes = geometry
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    names = ["Y", "Indices"][:outputs]
    nodes = [helper.make_node("MaxPool", ["X"], names, **attributes)]
    if gradient:
        # Models without gradients are not changed.
        nodes.append(helper.make_node("ReluGrad", ["X", "X"], ["Z"], domain="com.microsoft"))
    dims = [f"x{i}" for i in range(len(shape))]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("X", element, dims)],
        [helper.make_tensor_value_info(n, t, None) for n, t in zip(names, (element, 7), strict=False)],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def onnxruntime_pool(geometry: Geometry, x: np.ndarray) -> list[np.ndarray]:
    model = make_model(geometry, x.dtype.name, gradient=False)
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"X": x})


def values(kind: str, shape: list[int], dtype: str) -> np.ndarray:
    """Numbers; few different ones, so that some are equal; some that are not finite."""
    random = np.random.default_rng(3)
    if kind == "ties":
        return random.integers(-2, 2, shape).astype(dtype)
    x = random.standard_normal(shape).astype(dtype)
    if kind == "special":
        special = np.array([np.nan, np.inf, -np.inf, 0, -0.0], dtype)
        x = np.where(random.random(shape) < 0.6, random.choice(special, shape), x)
    return x


def operator_of(model: onnx.ModelProto, kernels: str = "auto") -> tuple[str, str]:
    node = prepare_loaded(model, kernels, bodies=False).graph.node[0]
    return node.domain, node.op_type


@needs_numba
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_maxima_and_indices(name: str, dtype: str) -> None:
    geometry = GEOMETRIES[name]
    model = make_model(geometry, dtype)
    assert operator_of(model) == (INTERNAL_DOMAIN, "MaxPoolWithIndices")
    session = ortgrad.InferenceSession(model)
    for kind in ("numbers", "ties", "special"):
        x = values(kind, geometry[0], dtype)
        expected = onnxruntime_pool(geometry, x)
        for _ in range(2):
            for actual, right in zip(session.run(None, {"X": x}), expected, strict=True):
                np.testing.assert_array_equal(actual, right)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_numpy_kernel(name: str) -> None:
    shape, attributes = GEOMETRIES[name]
    own = {name: value for name, value in attributes.items() if name not in ("dilations", "storage_order")}
    for kind in ("numbers", "ties", "special"):
        x = values(kind, shape, "float32")
        expected = onnxruntime_pool(GEOMETRIES[name], x)
        for actual, right in zip(max_pool_with_indices(x, **own), expected, strict=True):
            np.testing.assert_array_equal(actual, right)


@needs_numba
@pytest.mark.parametrize(
    "name", [name for name in GEOMETRIES if name not in ("empty batch", "ones for dilations")]
)
def test_no_kernel_reads_or_writes_outside_its_tensors(name: str) -> None:
    """Numba's checks raise an IndexError; a result that was not written is not the right one."""
    shape, attributes = GEOMETRIES[name]
    x = values("numbers", shape, "float32")
    case = Case("MaxPoolWithIndices", {"X": x}, attributes)
    expected = onnxruntime_pool(GEOMETRIES[name], x)
    for actual, right in zip(checked_tasks(max_pool_with_indices, case), expected, strict=True):
        np.testing.assert_array_equal(actual, right)


def test_what_is_left_to_onnxruntime() -> None:
    shape, attributes = CASES["3x3"]
    assert operator_of(make_model((shape, attributes), "float32", outputs=1)) == ("", "MaxPool")
    assert operator_of(make_model((shape, attributes), "float16")) == ("", "MaxPool")
    for way in ("onnx", "python"):
        assert operator_of(make_model((shape, attributes), "float32"), way) == ("", "MaxPool")
    for more in ({"dilations": [2, 1]}, {"storage_order": 1}, {"auto_pad": "SAME_UPPER", "strides": [5, 1]}):
        assert operator_of(make_model((shape, {**attributes, **more}), "float32")) == ("", "MaxPool")


@pytest.mark.parametrize("auto_pad", ["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize("ceil_mode", [0, 1])
def test_windows_are_those_of_onnxruntime(auto_pad: str, ceil_mode: int) -> None:
    """Along one dimension, with all small sizes: the same result as onnxruntime's, or refused as there."""
    fixed = {"auto_pad": auto_pad, "ceil_mode": ceil_mode}
    padding = itertools.product(range(3), repeat=2) if auto_pad == "NOTSET" else [(0, 0)]
    counts = {"equal": 0, "refused": 0}
    for pads, size, kernel, stride in itertools.product(padding, range(1, 6), range(1, 4), range(1, 4)):
        if auto_pad.startswith("SAME") and stride > kernel:
            continue  # onnxruntime crops X, and this operator is not used
        attributes = {**fixed, "kernel_shape": [kernel], "strides": [stride]}
        attributes |= {"pads": list(pads)} if auto_pad == "NOTSET" else {}
        x = np.random.default_rng(size).standard_normal((1, 2, size), dtype=np.float32)
        try:
            expected = onnxruntime_pool(([*x.shape], attributes), x)
        except onnxruntime_errors():
            with pytest.raises(ValueError):
                max_pool_with_indices(x, **attributes)
            counts["refused"] += 1
            continue
        for actual, right in zip(max_pool_with_indices(x, **attributes), expected, strict=True):
            np.testing.assert_array_equal(actual, right, err_msg=str(attributes))
        counts["equal"] += 1
    assert counts["equal"] >= 30
    assert counts["refused"] > 0 or auto_pad.startswith("SAME")


@pytest.mark.parametrize("kernels", ["auto", "onnx"])
def test_gradients_through_it(kernels: str) -> None:
    """Of equal maxima the first one gets the gradient, as without compiled kernels."""
    x = values("ties", [2, 3, 9, 12], "float32")
    model = make_model(CASES["3x3 strided"], "float32", outputs=1, gradient=False)
    built = ortgrad.build_gradient_model(model, wrt=["X"])
    session = ortgrad.InferenceSession(built, kernels=kernels)
    y, places = onnxruntime_pool(CASES["3x3 strided"], x)
    dy = np.random.default_rng(0).standard_normal(y.shape).astype(np.float32)
    expected = np.zeros(x.size, np.float32)
    np.add.at(expected, places.reshape(-1), dy.reshape(-1))
    feeds = {value.name: x if value.name == "X" else dy for value in session.get_inputs()}
    actual = session.run(["X_grad"], feeds)[0]
    np.testing.assert_allclose(actual.reshape(-1), expected, rtol=1e-6, atol=1e-6)
