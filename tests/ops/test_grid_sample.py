"""GridSampleGrad against PyTorch in float64; test_rules_resize compares the rule with finite differences."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnxruntime
import pytest
import support
import torch
from support import KERNELS, needs_numba
from support.calls import Case
from support.compiled import checked_tasks

import ortgrad
from ortgrad import nodes
from ortgrad.operators.declaration import find_operator

MODES = {"nearest": "nearest", "linear": "bilinear", "cubic": "bicubic"}
ATTRIBUTES = [
    {"mode": mode, "padding_mode": padding, "align_corners": align}
    for mode, padding, align in itertools.product(MODES, ("zeros", "border", "reflection"), (0, 1))
]
# X, and the size of the grid: points of several groups, channels of several tasks, single rows and columns.
SHAPES = [
    ((2, 3, 4, 5), (3, 4)),
    ((1, 19, 6, 1), (23, 29)),
    ((3, 1, 1, 7), (1, 1)),
    ((1, 2, 30, 40), (40, 30)),
]


def make_case(
    x_shape: tuple[int, ...], sizes: tuple[int, int], attributes: dict[str, Any], dtype: str = "float32"
) -> Case:
    random = np.random.default_rng(7)
    x, dy = (random.standard_normal(shape).astype(dtype) for shape in (x_shape, (*x_shape[:2], *sizes)))
    grid = random.uniform(-1.7, 1.7, (x_shape[0], *sizes, 2)).astype(dtype)
    return Case("GridSampleGrad", {"dY": dy, "X": x, "Grid": grid}, attributes)


def make_session(
    way: str, attributes: dict[str, Any], *, dtype: str = "float32", **options: int
) -> ortgrad.InferenceSession:
    session_options = onnxruntime.SessionOptions()
    for name, value in options.items():
        setattr(session_options, name, value)
    node = nodes.grid_sample_grad("dY", "X", "Grid", ["dX", "dGrid"], dtype=dtype, **attributes)
    model = nodes.make_model(node, dtype=dtype)
    return ortgrad.InferenceSession(model, session_options, kernels=way)


def by_torch(case: Case) -> list[np.ndarray]:
    dy, x, grid = (torch.tensor(array.astype(np.float64)) for array in case.arrays.values())
    x.requires_grad, grid.requires_grad = True, True
    attributes = case.attributes
    y = torch.nn.functional.grid_sample(
        *(x, grid, MODES[attributes["mode"]]), attributes["padding_mode"], bool(attributes["align_corners"])
    )
    return [grad.numpy() for grad in torch.autograd.grad(y, (x, grid), dy)]


@pytest.mark.parametrize("attributes", ATTRIBUTES, ids=lambda a: " ".join(map(str, a.values())))
def test_gradients(attributes: dict[str, Any]) -> None:
    for dtype, tolerance in (("float32", 2e-4), ("float64", 1e-11)):
        sessions = [make_session(way, attributes, dtype=dtype) for way in KERNELS]
        for shapes in SHAPES:
            case = make_case(*shapes, attributes, dtype)
            expected = by_torch(case)
            for session in sessions:
                for actual, wanted in zip(session.run(None, case.arrays), expected, strict=True):
                    assert actual.dtype == dtype
                    support.assert_close(actual, wanted.astype(dtype), tolerance)


@needs_numba
@pytest.mark.parametrize("mode", MODES)
def test_no_memory_outside_of_the_tensors_is_used(mode: str) -> None:
    operator = find_operator("GridSampleGrad")
    assert operator is not None
    for padding, align in itertools.product(("zeros", "reflection"), (0, 1)):
        attributes = {"mode": mode, "padding_mode": padding, "align_corners": align}
        for shapes in SHAPES[:3]:
            case = make_case(*shapes, attributes)
            case.arrays["Grid"].ravel()[:4] = [np.nan, 1e30, -np.inf, -1e6]
            assert checked_tasks(operator, case) is not None


def test_points_that_are_not_finite_and_infinite_elements() -> None:
    for attributes in ATTRIBUTES:
        case = make_case((2, 3, 4, 5), (3, 4), attributes)
        case.arrays["Grid"].ravel()[:6] = [np.nan, 0.1, np.inf, -0.2, 1e30, -1e30]
        case.arrays["X"][0, 1, 2, 3], case.arrays["dY"][0, 0, 2, 1] = np.inf, np.nan
        results = [make_session(way, attributes).run(None, case.arrays) for way in KERNELS]
        for other in results[1:]:
            for one, value in zip(results[0], other, strict=True):
                np.testing.assert_allclose(one, value, rtol=1e-3, atol=1e-4)
        for _, dgrid in results:
            assert (dgrid.ravel()[[0, 2, 4, 5]] == 0).all()


def test_coordinates_of_elements_are_rounded_as_forward() -> None:
    """Points at the centres of elements: in single precision, an operation more or less moves them."""
    for align, size in itertools.product((0, 1), (5, 7, 11, 96)):
        attributes = {"mode": "linear", "padding_mode": "border", "align_corners": align}
        places = np.linspace(-1, 1, size) if align else (2 * np.arange(size) + 1) / size - 1
        case = make_case((1, 2, size, size), (size, size), attributes)
        case.arrays["Grid"][...] = np.stack(np.meshgrid(places, places), axis=-1)
        results = [make_session(way, attributes).run(None, case.arrays) for way in KERNELS]
        for other in results[1:]:
            support.assert_close(results[0][1], other[1], 1e-4)


@pytest.mark.parametrize("shapes", [((0, 3, 4, 5), (2, 3)), ((2, 0, 4, 5), (2, 3)), ((2, 3, 4, 5), (0, 3))])
def test_empty_tensors(shapes: tuple[tuple[int, ...], tuple[int, int]]) -> None:
    for way in KERNELS:
        case = make_case(*shapes, ATTRIBUTES[6])
        dx, dgrid = make_session(way, case.attributes).run(None, case.arrays)
        assert dx.shape == case.arrays["X"].shape and not dx.any()
        assert dgrid.shape == case.arrays["Grid"].shape and not dgrid.any()


@needs_numba
def test_results_do_not_depend_on_threads() -> None:
    case = make_case((2, 40, 30, 40), (50, 40), ATTRIBUTES[6])
    one, other = (
        make_session("compiled", case.attributes, intra_op_num_threads=threads).run(None, case.arrays)
        for threads in (1, 3)
    )
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(left, right)
