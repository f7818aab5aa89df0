"""Convolutions with kernels of 3x3, by Winograd's method (see _winograd)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ortgrad.operators.compiled import Plan
from ortgrad.operators.records import numbers_of
from ortgrad.ops._windows import Plane
from ortgrad.ops.conv._dense import Sizes, views_of, windows_of
from ortgrad.ops.conv._forward_geometry import Result, activation_numbers
from ortgrad.ops.conv._winograd import (
    Box,
    Convolution,
    box_tasks,
    convolve_tiles,
    fill_box,
    fits,
    transform_weights,
)


class Geometry(NamedTuple):
    """The numbers that all tasks read."""

    box: Box
    convolution: Convolution


def plan(x: Sizes, w: Sizes, b: Sizes | None, z: Sizes | None, y: Sizes, **attributes: Any) -> Plan | None:
    """Return the plan; None for tensors without elements, and for what the kernel does not support."""
    activation = activation_numbers(attributes)
    win, group = windows_of(x, w, attributes)
    if y[2:] != win.outputs or z not in (None, y) or group > 1 or not math.prod(x):
        return None
    if not fits(win, w[1], w[0]):
        return None
    down, across = (2 * -(-n // 2) + 2 for n in win.outputs)
    box = Box(x[0], x[1], Plane(*x[2:]), Plane(down, across), Plane(*win.heads))
    convolution = Convolution.of(box, Plane(*y[2:]), w[0])
    return Plan(
        tasks=(box_tasks(box) + convolution.weight_tasks, convolution.tasks),
        views=views_of(x, w, b, z, y),
        numbers={
            "geometry": numbers_of(Geometry(box, convolution)),
            **activation,
        },
        work=math.prod(y) * w[1],
        scratch=[(box.elements,), (convolution.weights,)],
    )


def prepare(
    task: int, x: np.ndarray, w: np.ndarray, boxes: np.ndarray, weights: np.ndarray, geometry: Geometry
) -> bool:
    """Copy rows of X into a box, or transform the weights of some filters."""
    tasks = box_tasks(geometry.box)
    if task < tasks:
        return fill_box(task, x, boxes, geometry.box)
    return transform_weights(task - tasks, w, weights, geometry.convolution)


def convolve(
    task: int, w: np.ndarray, boxes: np.ndarray, weights: np.ndarray, result: Result, geometry: Geometry
) -> bool:
    """Compute some filters for some tiles."""
    return convolve_tiles(task, boxes, w, weights, result, geometry.box, geometry.convolution)
