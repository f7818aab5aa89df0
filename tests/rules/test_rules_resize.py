"""Gradient rules of Resize, GridSample and AffineGrid, against finite differences and PyTorch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from support.rules import check_against_torch, check_rule, gradients, one_node
from torch.nn import functional

import ortgrad


def normal(*shape: int, seed: int = 0, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


COORDINATES = [
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_half_pixel_for_nn",
]
ROUNDINGS = ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]


def check_resize(
    x: np.ndarray,
    attributes: dict[str, Any],
    *,
    roi: np.ndarray | None = None,
    scales: np.ndarray | None = None,
    sizes: np.ndarray | None = None,
    constant: bool = False,
    symbolic: bool = True,
    opset: int = 19,
) -> None:
    """Resize is linear: its gradient is exact if <dY, Resize(X)> = <dX, X> for all X and dY."""
    inputs = [x, roi, scales, *([] if sizes is None else [sizes])]
    later = [i for i, array in enumerate(inputs) if i and array is not None] if constant else []
    model, feeds = one_node("Resize", inputs, attributes, opset=opset, constants=later, symbolic=symbolic)
    for value in model.graph.input[1:]:
        # How many numbers there are must be known.
        value.type.tensor_type.shape.dim[0].dim_value = len(feeds[value.name])
    forward = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    y, nothing = (forward.run(None, {**feeds, "a": a})[0] for a in (x, np.zeros_like(x)))
    seed = normal(*y.shape, seed=3)
    dx = gradients(model, feeds, {"y": seed}, ["a"])["a"]
    assert dx.shape == x.shape
    for number in range(3):
        direction = normal(*x.shape, seed=10 + number)
        moved = forward.run(None, {**feeds, "a": direction})[0] - nothing
        scale = np.linalg.norm(direction) * np.linalg.norm(seed)
        assert abs(np.vdot(moved, seed) - np.vdot(direction, dx)) < 1e-6 * scale


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_nearest(coordinates: str, rounding: str) -> None:
    attributes = {"coordinate_transformation_mode": coordinates, "nearest_mode": rounding}
    x = normal(2, 3, 5, 4)
    for scales in ([1, 1, 2, 3], [1, 1, 0.6, 1.7], [2, 1, 1.3, 0.5]):
        for constant in (True, False):
            check_resize(x, attributes, scales=floats(*scales), constant=constant, symbolic=not constant)
    check_resize(x, attributes, sizes=ints(2, 3, 10, 12), constant=True, symbolic=False)


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize(
    "attributes",
    [
        {"mode": "linear"},
        {"mode": "linear", "antialias": 1},
        {"mode": "cubic"},
        {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 1},
        {"mode": "cubic", "antialias": 1},
    ],
    ids=["linear", "linear-antialias", "cubic", "cubic-outside", "cubic-antialias"],
)
def test_interpolation(attributes: dict[str, Any], coordinates: str) -> None:
    attributes = {**attributes, "coordinate_transformation_mode": coordinates}
    x = normal(2, 3, 5, 4)
    check_resize(x, attributes, scales=floats(1, 1, 0.6, 1.7))
    check_resize(x, attributes, scales=floats(1, 1, 2, 1), constant=True)
    check_resize(x, attributes, sizes=ints(2, 3, 3, 7), constant=True, symbolic=False)
    check_resize(x, attributes, sizes=ints(2, 3, 8, 1))


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_ranks(mode: str, rank: int) -> None:
    if (mode, rank) == ("linear", 1):
        return
    lead = max(0, rank - 3)
    scales = [1.0] * min(lead, 2) + [1.5, 0.7, 2.2, 1.6, 0.8][: rank - min(lead, 2)]
    if rank == 4:
        scales[1] = 1.0
    x = normal(*(3, 2, 4, 5, 3)[:rank])
    check_resize(x, {"mode": mode}, scales=floats(*scales))
    check_resize(x, {"mode": mode}, scales=floats(*scales), constant=True, symbolic=False)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_lengths_that_do_not_change(mode: str) -> None:
    """onnxruntime copies X if no length changes, but not if only some do not."""
    for scales in ([1.1, 1.2], [1.1, 1.3], [1.1, 0.9]):
        check_resize(normal(1, 2, 5, 4), {"mode": mode}, scales=floats(1, 1, *scales))
        check_resize(normal(1, 2, 5, 4), {"mode": mode}, scales=floats(1, 1, *scales), constant=True)


def test_channels_last() -> None:
    check_resize(normal(2, 4, 5, 3), {"mode": "linear"}, scales=floats(1, 1.5, 2, 1))
    check_resize(normal(2, 4, 5, 3), {"mode": "nearest"}, scales=floats(1, 2, 2, 1), constant=True)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("axes", [[2, 3], [3, 2], [-1, -2], [3]])
def test_axes(axes: list[int], mode: str) -> None:
    attributes = {"mode": mode, "axes": axes}
    check_resize(normal(2, 3, 5, 4), attributes, scales=floats(*[1.5, 0.7][: len(axes)]))
    check_resize(normal(2, 3, 5, 4), attributes, sizes=ints(*[7, 3][: len(axes)]), constant=True)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_crop(mode: str) -> None:
    attributes = {
        "mode": mode,
        "coordinate_transformation_mode": "tf_crop_and_resize",
        "extrapolation_value": 10.0,
    }
    x, roi = normal(1, 2, 5, 4), floats(0, 0, 0.3, -0.2, 1, 1, 0.8, 1.3)
    check_resize(x, attributes, roi=roi, sizes=ints(1, 2, 4, 6))
    check_resize(x, attributes, roi=roi, scales=floats(1, 1, 0.8, 1.5), constant=True)
    attributes["axes"] = [3, 2]
    check_resize(x, attributes, roi=floats(0.3, -0.2, 0.8, 1.3), sizes=ints(4, 6))


@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
@pytest.mark.parametrize("coordinates", ["half_pixel", "asymmetric"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_aspect_ratio(mode: str, coordinates: str, policy: str) -> None:
    attributes = {
        "mode": mode,
        "axes": [2, 3],
        "keep_aspect_ratio_policy": policy,
        "coordinate_transformation_mode": coordinates,
    }
    for sizes in ([7, 8], [3, 5], [9, 4], [2, 2], [5, 8]):
        check_resize(normal(1, 2, 5, 7), attributes, sizes=ints(*sizes))


def test_aspect_ratio_refused() -> None:
    attributes = {
        "mode": "linear",
        "axes": [2, 3],
        "keep_aspect_ratio_policy": "not_larger",
        "coordinate_transformation_mode": "align_corners",
    }
    model, _ = one_node("Resize", [normal(1, 2, 5, 7), None, None, ints(7, 8)], attributes, opset=19)
    with pytest.raises(ortgrad.UnsupportedGradientError, match="keep_aspect_ratio_policy not_larger"):
        ortgrad.build_gradient_model(model, wrt=["a"])


@pytest.mark.parametrize(
    ("mode", "coordinates", "options"),
    [
        ("nearest", "asymmetric", {"mode": "nearest"}),
        ("linear", "pytorch_half_pixel", {"mode": "bilinear"}),
        ("linear", "align_corners", {"mode": "bilinear", "align_corners": True}),
        ("cubic", "pytorch_half_pixel", {"mode": "bicubic"}),
    ],
)
@pytest.mark.parametrize("sizes", [(10, 8), (7, 3)])
def test_pytorch_resize(mode: str, coordinates: str, options: dict[str, Any], sizes: tuple[int, int]) -> None:
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates, "nearest_mode": "floor"}
    check_against_torch(
        "Resize",
        lambda x, *_: functional.interpolate(x, sizes, **options),
        [normal(2, 3, 5, 4), None, None, ints(2, 3, *sizes)],
        attributes,
        constants=[3],
        symbolic=False,
    )


def test_second_derivatives_of_resize() -> None:
    """Of the square of what was resized, with respect to X."""
    for mode, scale in itertools.product(("nearest", "linear"), (2.0, 1.4)):
        graph = helper.make_graph(
            [
                helper.make_node("Resize", ["x", "", "scales"], ["r"], mode=mode),
                helper.make_node("Mul", ["r", "r"], ["y"]),
            ],
            "graph",
            [helper.make_tensor_value_info("x", 1, ["n", 2, 4, 3])],
            [helper.make_tensor_value_info("y", 1, None)],
            [onnx.numpy_helper.from_array(floats(1, 1, scale, scale), "scales")],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
        built = ortgrad.build_gradient_model(model, wrt=["x"])
        seed = normal(2, 2, *(int(np.floor(np.float32(n) * np.float32(scale))) for n in (4, 3)))
        feeds = {"x": normal(2, 2, 4, 3), "y_grad": seed}
        ortgrad.check_gradients(built, feeds, wrt=["x"], of=["x_grad"]).raise_if_wrong()


def test_whole_factors_are_a_pool() -> None:
    model, _ = one_node("Resize", [normal(1, 2, 3, 3), None, floats(1, 1, 2, 2)], constants=[2])
    built = ortgrad.build_gradient_model(model, wrt=["a"])
    # Nodes named after the seed compare it with its output.
    nodes = [node for node in built.graph.node if not node.name.startswith("y_grad/")]
    kinds = [node.op_type for node in nodes if node.op_type != "Constant"]
    assert kinds == ["Resize", "AveragePool", "Mul"]


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(("op_type", "opset"), [("Upsample", 9), ("Resize", 10)])
def test_old_operators_keep_their_coordinates(op_type: str, opset: int, mode: str) -> None:
    inputs: list[np.ndarray | None] = [normal(1, 2, 4, 3), floats(1, 1, 1.7, 2)]
    model, feeds = one_node(op_type, inputs, {"mode": mode}, opset=opset, constants=[1], symbolic=False)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    y = session.run(None, feeds)[0]
    built = ortgrad.build_gradient_model(model, wrt=["a"])
    run = ortgrad.InferenceSession(built).run
    again, dx = run(None, {**feeds, "y_grad": y})
    np.testing.assert_allclose(again, y)
    assert np.vdot(dx, feeds["a"]) == pytest.approx(np.vdot(y, y), rel=1e-5)


GRIDS = list(itertools.product(["zeros", "border", "reflection"], [0, 1]))


def grid_of(*shape: int, seed: int = 1) -> np.ndarray:
    """Points in and around the image."""
    return np.random.default_rng(seed).uniform(-1.6, 1.6, shape).astype(np.float32)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize(("padding", "align"), GRIDS)
def test_grid_sample(mode: str, padding: str, align: int) -> None:
    attributes = {"mode": mode, "padding_mode": padding, "align_corners": align}
    inputs: list[np.ndarray | None] = [normal(2, 3, 4, 5), grid_of(2, 3, 4, 2)]
    wrt = ["a"] if mode == "nearest" else ["a", "b"]
    check_rule("GridSample", inputs, attributes, opset=20, symbolic=bool(align), wrt=wrt)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(("padding", "align"), GRIDS)
def test_grid_sample_of_volumes(mode: str, padding: str, align: int) -> None:
    attributes = {"mode": mode, "padding_mode": padding, "align_corners": align}
    inputs: list[np.ndarray | None] = [normal(2, 2, 3, 4, 5), grid_of(2, 2, 3, 2, 3)]
    wrt = ["a"] if mode == "nearest" else ["a", "b"]
    check_rule("GridSample", inputs, attributes, opset=20, wrt=wrt)


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize(("padding", "align"), GRIDS)
def test_pytorch_grid_sample(mode: str, padding: str, align: int) -> None:
    attributes = {"mode": mode, "padding_mode": padding, "align_corners": align}

    def forward(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return functional.grid_sample(x, grid, mode, padding, bool(align))

    inputs: list[np.ndarray | None] = [normal(2, 3, 4, 5), grid_of(2, 3, 4, 2)]
    check_against_torch("GridSample", forward, inputs, attributes, opset=18, tolerance=2e-5)


@pytest.mark.parametrize(("mode", "padding"), [("linear", "zeros"), ("cubic", "border")])
def test_second_derivatives_of_grid_sample(mode: str, padding: str) -> None:
    attributes = {"mode": mode, "padding_mode": padding}
    inputs: list[np.ndarray | None] = [normal(1, 2, 4, 5), grid_of(1, 3, 2, 2)]
    check_rule("GridSample", inputs, attributes, opset=20, second=True)


def test_points_that_are_not_finite() -> None:
    grid = grid_of(1, 2, 2, 2)
    grid[0, 0, 0, 0], grid[0, 0, 1, 1], grid[0, 1, 0, 0] = np.nan, np.inf, 1e30
    model, feeds = one_node("GridSample", [normal(1, 2, 4, 5), grid], opset=20)
    grads = gradients(model, feeds, {"y": np.ones((1, 2, 2, 2), np.float32)}, ["a", "b"])
    assert all(np.isfinite(grad).all() for grad in grads.values())
    assert grads["b"][0, 0, 0, 0] == grads["b"][0, 0, 1, 1] == grads["b"][0, 1, 0, 0] == 0


@pytest.mark.parametrize(
    ("op_type", "inputs"),
    [
        ("GridSample", [normal(1, 2, 4, 5), grid_of(1, 2, 3, 2)]),
        ("Resize", [normal(1, 2, 4, 5), None, floats(1, 1, 1.5, 0.8)]),
        ("Resize", [normal(1, 2, 4, 5), None, floats(1, 1, 2, 2)]),
    ],
)
def test_half_precision(op_type: str, inputs: list[np.ndarray | None]) -> None:
    results = []
    for dtype in (np.float16, np.float32):
        # In float16 first: both read the same numbers.
        half = [a.astype(np.float16).astype(dtype) if a is not None and a.ndim > 1 else a for a in inputs]
        attributes = {"mode": "linear"} if op_type == "Resize" else {}
        model, feeds = one_node(op_type, half, attributes, opset=20, constants=[2] * (len(inputs) > 2))
        shape = (
            (1, 2, 2, 3) if op_type == "GridSample" else tuple(int(n) for n in inputs[0].shape * inputs[2])
        )
        seed = normal(*shape, seed=4).astype(np.float16).astype(dtype)
        results.append(gradients(model, feeds, {"y": seed}, [n for n in feeds if feeds[n].dtype == dtype]))
    for low, high in zip(results[0].values(), results[1].values(), strict=True):
        assert low.dtype == np.float16
        np.testing.assert_allclose(low, high, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("align", [0, 1])
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 3, 2, 4, 5)])
@pytest.mark.parametrize("constant", [True, False], ids=["constant", "run-time"])
def test_affine_grid(size: tuple[int, ...], align: int, constant: bool) -> None:
    rank = len(size) - 2
    theta = normal(2, rank, rank + 1)
    attributes = {"align_corners": align}
    where: dict[str, Any] = {"opset": 20, "constants": [1] if constant else [], "symbolic": False}
    check_rule("AffineGrid", [theta, ints(*size)], attributes, **where)

    def forward(theta: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return functional.affine_grid(theta, size, bool(align))

    check_against_torch("AffineGrid", forward, [theta, ints(*size)], attributes, **where)


# Exporters write empty tensors for what does not count


@pytest.mark.parametrize("opset", [11, 13, 18, 21])
@pytest.mark.parametrize("initializers", [True, False], ids=["initializers", "constants"])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_empty_roi_scales_and_sizes(mode: str, initializers: bool, opset: int) -> None:
    x = normal(1, 2, 4, 5)
    empty = np.zeros(0, np.float32)
    size, scale = ints(1, 2, 8, 7), floats(1, 1, 2, 1.5)
    given = [
        {"roi": roi, **rest}
        for roi in (empty, floats(0, 0, 0, 0, 1, 1, 1, 1))
        for rest in ({"scales": empty, "sizes": size}, {"scales": scale})
    ]
    for arrays in given:
        node = helper.make_node("Resize", ["x", *arrays], ["y"], mode=mode)
        graph = helper.make_graph(
            [node],
            "graph",
            [helper.make_tensor_value_info("x", 1, ["N", 2, "H", "W"])],
            [helper.make_tensor_value_info("y", 1, None)],
        )
        for name, array in arrays.items():
            tensor = onnx.numpy_helper.from_array(array, name)
            if initializers:
                graph.initializer.append(tensor)
            else:
                graph.node.insert(0, helper.make_node("Constant", [], [name], value=tensor))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
        forward = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        (y,) = forward.run(None, {"x": x})
        dy, direction = normal(*y.shape, seed=1), normal(*x.shape, seed=2)
        # An initializer in `wrt` can be fed, so it is no longer a constant.
        wrt = ["x", *(name for name in arrays if initializers and not arrays[name].size)]
        built = ortgrad.build_gradient_model(model, wrt=wrt)
        found, dx, *rest = ortgrad.InferenceSession(built).run(None, {"x": x, "y_grad": dy})
        np.testing.assert_allclose(found, y, rtol=1e-5, atol=1e-6)
        (moved,) = forward.run(None, {"x": direction})
        np.testing.assert_allclose(np.sum(dx * direction), np.sum(moved * dy), rtol=1e-4, atol=1e-4)
        assert all(grad.shape == (0,) for grad in rest)
