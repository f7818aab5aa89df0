"""Convolutions with kernels of 3x3, by Winograd's method (see _winograd)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ortgrad.operators.compiled import Plan
from ortgrad.operators.records import numbers_of
from ortgrad.ops._windows import windows
from ortgrad.ops.conv._forward_geometry import activation_numbers
from ortgrad.ops.conv._winograd import (
    Box,
    BoxGeometry,
    Convolution,
    ConvolutionGeometry,
    convolve_tiles,
    fill_box,
    fits,
    transform_weights,
)

if TYPE_CHECKING:
    Sizes = tuple[int, ...]


class Geometry(NamedTuple):
    """The numbers that all tasks read."""

    box: BoxGeometry
    convolution: ConvolutionGeometry


def plan(
    x: Sizes,
    w: Sizes,
    b: Sizes | None,
    z: Sizes | None,
    y: Sizes,
    *,
    group: int,
    kernel_shape: list[int] | None,
    activation: str,
    alpha: float,
    beta: float,
    **attributes: Any,
) -> Plan | None:
    """Return the plan; None for tensors without elements, and for what the kernel does not support."""
    win = windows(x[2:], w[2:], **attributes)
    if y[2:] != win.outputs or z not in (None, y) or group > 1 or not math.prod(x):
        return None
    if not fits(win, w[1], w[0]):
        return None
    down, across = (2 * -(-n // 2) + 2 for n in win.outputs)
    box = Box(x[0], x[1], (x[2], x[3]), (down, across), (win.heads[0], win.heads[1]))
    convolution = Convolution(box, (y[2], y[3]), w[0])
    return Plan(
        tasks=(box.tasks + convolution.weight_tasks, convolution.tasks),
        views=[(0,) if shape is None else (math.prod(shape),) for shape in (x, w, b, z, y)],
        numbers={
            "geometry": numbers_of(Geometry(box.geometry, convolution.geometry)),
            **activation_numbers(activation, alpha, beta),
        },
        work=math.prod(y) * w[1],
        scratch=[(box.elements,), (convolution.weights,)],
    )


def prepare(
    task: int, x: np.ndarray, w: np.ndarray, boxes: np.ndarray, weights: np.ndarray, geometry: Geometry
) -> bool:
    """Copy rows of X into a box, or transform the weights of some filters."""
    tasks = geometry.box.samples * geometry.box.tasks
    if task < tasks:
        return fill_box(task, x, boxes, geometry.box)
    return transform_weights(task - tasks, w, weights, geometry.box.channels, geometry.convolution)


def convolve(
    task: int,
    w: np.ndarray,
    b: np.ndarray,
    z: np.ndarray,
    y: np.ndarray,
    boxes: np.ndarray,
    weights: np.ndarray,
    geometry: Geometry,
    activation: int,
    low: float,
    high: float,
) -> bool:
    """Compute some filters for some tiles."""
    return convolve_tiles(
        task, boxes, w, weights, b, z, y, geometry.box, geometry.convolution, activation, low, high
    )
