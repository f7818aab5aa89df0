"""Compiled kernels of GridSampleGrad.

Points are taken in groups: first the places and weights of their taps are computed, then all channels use
them.
A task of dGrid owns a group of points, and one of dX owns some channels, to which no other task adds.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np

from ortgrad.compiled.functions import SUMS, allocate, allocate_integers, double, doubles, release, rint
from ortgrad.operators.compiled import Plan
from ortgrad.operators.records import numbers_of
from ortgrad.ops._rows import clear_row

_Shape: TypeAlias = "tuple[int, ...]"
TAPS = {"nearest": 1, "linear": 2, "cubic": 4}
PADDINGS = ("zeros", "border", "reflection")
# Coordinates beyond are read at the border, as onnxruntime does.
LIMIT = 2.0**62
# The points of a group for dX, and the channels of a task.
_GROUP, _CHANNELS = 256, 8
_REFLECTION = PADDINGS.index("reflection")


class Sampling(NamedTuple):
    height: int
    width: int
    taps: int  # along an axis
    padding: int  # the place of its name in PADDINGS
    align: int


def plan(
    dy: _Shape,
    x: _Shape,
    grid: _Shape,
    dx: _Shape | None,
    dgrid: _Shape | None,
    *,
    mode: str,
    padding_mode: str,
    align_corners: int,
) -> Plan | None:
    taps, points, pixels = TAPS[mode], math.prod(grid[1:3]), math.prod(x[2:])
    if not math.prod(dy) or not math.prod(x):
        return None
    sampling = Sampling(
        height=x[2],
        width=x[3],
        taps=taps,
        padding=PADDINGS.index(padding_mode),
        align=int(bool(align_corners)),
    )
    group = SUMS // taps**2
    groups, blocks = -(-points // group), -(-x[1] // _CHANNELS)
    return Plan(
        tasks=(x[0] * groups if dgrid else 0, x[0] * blocks if dx else 0),
        views=[
            (*x[:2], points),
            (*x[:2], pixels),
            (x[0], points, 2),
            (*x[:2], pixels) if dx else (0, 0, 0),
            (x[0], points, 2) if dgrid else (0, 0, 0),
        ],
        numbers={"sampling": numbers_of(sampling)},
        work=(1 + bool(dgrid)) * math.prod(dy) * (4 * taps**2 + 4),
    )


def grid_points(
    task: int,
    dy: np.ndarray,
    x: np.ndarray,
    grid: np.ndarray,
    dgrid: np.ndarray,
    sampling: Sampling,
) -> bool:
    """Compute dGrid for a group of points."""
    height, width, taps = sampling.height, sampling.width, sampling.taps
    padding, align = sampling.padding, sampling.align
    square = taps * taps
    group, points = SUMS // square, grid.shape[1]
    groups = (points + group - 1) // group
    sample, first = task // groups, task % groups * group
    count, side = min(group, points - first), taps * group
    indices, memory = allocate_integers(square * group + 2 * side), allocate(2 * group + 4 * side)
    if len(indices) == 0 or len(memory) == 0:
        return True
    places, totals = indices[square * group :], doubles()
    weights, slopes = memory[2 * group :], memory[2 * group + 2 * side :]
    for axis in range(2):
        length, coordinates = width if axis == 0 else height, memory[axis * group : axis * group + count]
        _move(coordinates, grid[sample], first, axis)
        _scale(coordinates, length - align)
        at = axis * side
        located = Points(places[at:], weights[at:], slopes[at:])
        _locate(located, coordinates, group, length, taps, padding, align)
    _join(indices, places, count, group, taps, width)
    for k in range(square * group):
        totals[k] = 0
    for channel in range(x.shape[1]):
        values, image = dy[sample, channel, first : first + count], x[sample, channel]
        for t in range(square):
            _add_products(totals[t * group :], values, image, indices[t * group :])
    for axis in range(2):
        # Along one axis the slopes count, along the other one the weights.
        own, other = slopes[axis * side :], weights[(1 - axis) * side :]
        factor = ((width if axis == 0 else height) - align) / 2.0
        for k in range(count):
            total = double(0.0)
            for i in range(taps):
                for j in range(taps):
                    t = j * taps + i if axis == 0 else i * taps + j
                    total += totals[t * group + k] * double(own[i * group + k] * other[j * group + k])
            valid = taps > 1 and abs(memory[axis * group + k]) < LIMIT
            dgrid[sample, first + k, axis] = total * double(factor) if valid else double(0.0)
    release(indices)
    release(memory)
    return False


def grid_channels(
    task: int,
    dy: np.ndarray,
    x: np.ndarray,
    grid: np.ndarray,
    dx: np.ndarray,
    sampling: Sampling,
) -> bool:
    """Compute dX of some channels of a sample."""
    height, width, taps = sampling.height, sampling.width, sampling.taps
    padding, align = sampling.padding, sampling.align
    blocks = (x.shape[1] + _CHANNELS - 1) // _CHANNELS
    sample, begin = task // blocks, task % blocks * _CHANNELS
    end = min(begin + _CHANNELS, x.shape[1])
    group, square = _GROUP, taps * taps
    side, points = taps * group, grid.shape[1]
    indices = allocate_integers(square * group + 2 * side)
    memory = allocate(group + 4 * side)
    if len(indices) == 0 or len(memory) == 0:
        return True
    places, weights, slopes = indices[square * group :], memory[group:], memory[group + 2 * side :]
    for channel in range(begin, end):
        clear_row(dx[sample, channel])
    for first in range(0, points, group):
        count = min(group, points - first)
        for axis in range(2):
            length, coordinates = width if axis == 0 else height, memory[:count]
            _move(coordinates, grid[sample], first, axis)
            _scale(coordinates, length - align)
            at = axis * side
            located = Points(places[at:], weights[at:], slopes)
            _locate(located, coordinates, group, length, taps, padding, align)
        _join(indices, places, count, group, taps, width)
        for channel in range(begin, end):
            values, image = dy[sample, channel, first : first + count], dx[sample, channel]
            for i in range(taps):
                for j in range(taps):
                    own, other = weights[side + i * group :], weights[j * group :]
                    _scatter(image, values, own, other, indices[(i * taps + j) * group :])
    release(indices)
    release(memory)
    return False


# Coordinates are computed by several functions: each rounds its results, as the forward operator does. In one
# function the compiler would join the operations, and a point between two elements might change sides.


def _move(coordinates: np.ndarray, grid: np.ndarray, first: int, axis: int) -> None:
    for k in range(len(coordinates)):
        coordinates[k] = grid[first + k, axis] + 1.0


def _scale(coordinates: np.ndarray, factor: int) -> None:
    for k in range(len(coordinates)):
        coordinates[k] *= factor


class Points(NamedTuple):
    """The taps of points along an axis: first the first tap of all points, then the second one."""

    places: np.ndarray
    weights: np.ndarray
    slopes: np.ndarray


def _locate(
    points: Points,
    coordinates: np.ndarray,
    group: int,
    length: int,
    taps: int,
    padding: int,
    align: int,
) -> None:
    """Write the coordinates of points along an axis, and the places, weights and slopes of their taps."""
    places, weights, slopes = points
    count, first = len(coordinates), weights[(taps - 1) * group :]
    for k in range(count):
        coordinate = coordinates[k] / 2.0 if align != 0 else (coordinates[k] - 1.0) / 2.0
        coordinates[k] = coordinate
        valid = coordinate if abs(coordinate) < LIMIT else (0.0 if align != 0 else -0.5)
        corner = rint(valid)
        if taps > 1 and corner > valid:
            corner -= 1.0
        # The fractions are where the last weights will be.
        first[k] = valid - corner
        places[k] = int(corner)
    if taps == 1:
        for k in range(count):
            weights[k], slopes[k] = 1.0, 0.0
    elif taps == 2:
        for k in range(count):
            weights[k] = 1.0 - first[k]
            slopes[k], slopes[group + k] = -1.0, 1.0
    else:
        # Keys' cubic with a = -0.75.
        for k in range(count):
            f = first[k]
            weights[k] = ((-0.75 * f + 1.5) * f - 0.75) * f
            weights[group + k] = (1.25 * f - 2.25) * f * f + 1.0
            weights[2 * group + k] = ((-1.25 * f + 1.5) * f + 0.75) * f
            weights[3 * group + k] = (0.75 * f - 0.75) * f * f
            slopes[k] = (-2.25 * f + 3.0) * f - 0.75
            slopes[group + k] = (3.75 * f - 4.5) * f
            slopes[2 * group + k] = (-3.75 * f + 3.0) * f + 0.75
            slopes[3 * group + k] = (2.25 * f - 1.5) * f
    for t in range(taps - 1, -1, -1):
        own, shift = t * group, t - (1 if taps == 4 else 0)
        located = Points(places[own:], weights[own:], slopes[own:])
        _place(places, located, count, shift, length, padding, align)


def _place(
    corners: np.ndarray,
    points: Points,
    count: int,
    shift: int,
    length: int,
    padding: int,
    align: int,
) -> None:
    """Write the places of one tap of each point; without padding, weights outside become 0."""
    places, weights, slopes = points
    last = length - 1
    if padding == _REFLECTION and align != 0:
        # Around the centres of the outermost elements.
        for k in range(count):
            place = abs(corners[k] + shift) % max(2 * last, 1)
            places[k] = min(place, 2 * last - place)
    elif padding == _REFLECTION:
        # Around their outer edges.
        for k in range(count):
            place = (corners[k] + shift) % (2 * length)
            places[k] = min(place, 2 * length - 1 - place)
    else:
        for k in range(count):
            tap = corners[k] + shift
            place = min(max(tap, 0), last)
            inside = padding != 0 or place == tap
            weights[k] = weights[k] if inside else 0.0
            slopes[k] = slopes[k] if inside else 0.0
            places[k] = place


def _join(indices: np.ndarray, places: np.ndarray, count: int, group: int, taps: int, width: int) -> None:
    """Write the indices of the taps of points, out of their places along the axes."""
    for i in range(taps):
        for j in range(taps):
            into = indices[(i * taps + j) * group : (i * taps + j) * group + count]
            rows, columns = places[(taps + i) * group :], places[j * group :]
            for k in range(count):
                into[k] = rows[k] * width + columns[k]


def _add_products(totals: np.ndarray, values: np.ndarray, image: np.ndarray, indices: np.ndarray) -> None:
    for k in range(len(values)):
        totals[k] += double(values[k]) * double(image[indices[k]])


def _scatter(
    image: np.ndarray, values: np.ndarray, own: np.ndarray, other: np.ndarray, indices: np.ndarray
) -> None:
    for k in range(len(values)):
        image[indices[k]] += values[k] * (own[k] * other[k])
