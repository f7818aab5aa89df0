"""GridSample: its gradient rule, and GridSampleGrad for images, that is, two spatial dimensions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.declaration import Choice, Operand, Shape, operator
from ortgrad.ops import _grid_kernels
from ortgrad.ops._sampling import TABLES, sample

_MODES = {"bilinear": "linear", "bicubic": "cubic"}


def _shapes(dy: Operand, x: Operand, grid: Operand, **_: Any) -> Sequence[Shape | None]:
    return [x.shape, grid.shape]


@operator(
    "GridSampleGrad",
    inputs=["dY", "X", "Grid"],
    outputs=["dX?", "dGrid?"],
    shapes=_shapes,
    dims={"dY": "N C P Q", "X": "N C H W", "Grid": "N P Q 2"},
    attributes={
        "mode": Choice("linear", "nearest", "cubic"),
        "padding_mode": Choice(*_grid_kernels.PADDINGS),
        "align_corners": 0,
    },
)
def grid_sample_grad(
    dy: np.ndarray,
    x: np.ndarray,
    grid: np.ndarray,
    *,
    mode: str,
    padding_mode: str,
    align_corners: int,
    wanted: tuple[bool, ...],
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """dX = the sum over the points of dY times weights; dGrid = dY times their derivatives by the point"""
    _require_elements(dy.shape, x.shape)
    count = math.prod(grid.shape[1:3])
    points = grid.reshape(len(grid), count, 2)
    axes = [_Axis(points[..., i], x.shape[3 - i], mode, padding_mode, bool(align_corners)) for i in range(2)]
    seeds, images = dy.reshape(*dy.shape[:2], count), x.reshape(*x.shape[:2], math.prod(x.shape[2:]))
    dx = np.zeros(images.shape, x.dtype) if wanted[0] else None
    dgrid = np.zeros(points.shape, grid.dtype) if wanted[1] else None
    channels = np.arange(x.shape[1])[:, None]
    for n, (column, row) in itertools.product(
        range(len(x)), itertools.product(range(axes[0].taps), repeat=2)
    ):
        (px, wx, sx), (py, wy, sy) = axes[0].tap(n, column), axes[1].tap(n, row)
        places = py * x.shape[3] + px
        if dx is not None:
            np.add.at(dx[n], (channels, places), seeds[n] * (wy * wx))
        if dgrid is not None:
            sums = (images[n][:, places] * seeds[n]).sum(axis=0)
            dgrid[n] += np.stack([sums * (sx * wy), sums * (wx * sy)], axis=-1)
    if dgrid is not None:
        for i, axis in enumerate(axes):
            dgrid[..., i] = np.where(axis.finite, dgrid[..., i] * axis.scale, 0)
        if mode == "nearest":
            dgrid[...] = 0
        dgrid = dgrid.reshape(grid.shape)
    return None if dx is None else dx.reshape(x.shape), dgrid


class _Axis:
    """The taps of points along an axis: their places, weights and slopes."""

    def __init__(self, points: np.ndarray, length: int, mode: str, padding: str, align: bool) -> None:
        moved = points + 1
        scale = length - 1 if align else length
        with np.errstate(over="ignore", invalid="ignore"):
            coordinates = moved / 2 * scale if align else (moved * length - 1) / 2
        self.scale = points.dtype.type(scale / 2)
        self.finite = np.abs(coordinates) < _grid_kernels.LIMIT
        coordinates = np.where(self.finite, coordinates, points.dtype.type(0 if align else -0.5))
        corner = np.round(coordinates) if mode == "nearest" else np.floor(coordinates)
        table = TABLES[mode]
        self.taps = table.shape[1]
        first = corner.astype(np.int64) - (1 if mode == "cubic" else 0)
        fraction = coordinates - corner
        powers = [fraction**0, *(fraction**i for i in range(1, len(table)))]
        self._places, self._weights, self._slopes = [], [], []
        for t in range(self.taps):
            tap = first + t
            place = _place(tap, length, padding, align)
            weight, slope = fraction * 0, fraction * 0
            for i, factor in enumerate(table[:, t].tolist()):
                weight = weight + powers[i] * factor
                if i > 0:
                    slope = slope + powers[i - 1] * (factor * i)
            if padding == "zeros":
                weight, slope = weight * (place == tap), slope * (place == tap)
            self._places.append(place)
            self._weights.append(weight)
            self._slopes.append(slope)

    def tap(self, sample: int, t: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._places[t][sample], self._weights[t][sample], self._slopes[t][sample]


def _place(tap: np.ndarray, length: int, padding: str, align: bool) -> np.ndarray:
    if padding != "reflection":
        return np.clip(tap, 0, length - 1)
    if align:
        # Around the centres of the outermost elements.
        there = np.abs(tap) % max(2 * (length - 1), 1)
        return np.minimum(there, 2 * (length - 1) - there)
    # Around their outer edges.
    there = tap % (2 * length)
    return np.minimum(there, 2 * length - 1 - there)


def _require_elements(dy: Sequence[int], x: Sequence[int]) -> None:
    if math.prod(dy) and not math.prod(x):
        raise ValueError(f"dY has the shape {tuple(dy)}, but X has no elements: {tuple(x)}")


def _plan(dy: tuple[int, ...], x: tuple[int, ...], *others: Any, **attributes: Any) -> Any:
    _require_elements(dy, x)
    return _grid_kernels.plan(dy, x, *others, **attributes)


grid_sample_grad.compiled(
    views=dict.fromkeys(("dy", "x", "grid", "dx", "dgrid"), 3), plan=_plan, first=_grid_kernels.grid_points
)(_grid_kernels.grid_channels)


@grid_sample_grad.onnx
def grid_sample_grad_body(
    op: Recorder,
    dy: ir.Value,
    x: ir.Value,
    grid: ir.Value,
    *,
    mode: str,
    padding_mode: str,
    align_corners: int,
    wanted: tuple[bool, ...],
) -> Sequence[ir.Value | None]:
    return _record(op, dy, x, grid, 2, mode, padding_mode, bool(align_corners), wanted, standard=True)


def _record(
    op: Recorder,
    dy: ir.Value,
    x: ir.Value,
    grid: ir.Value,
    rank: int,
    mode: str,
    padding: str,
    align: bool,
    wanted: tuple[bool, ...],
    *,
    standard: bool,
) -> tuple[ir.Value | None, ir.Value | None]:
    """Record both gradients in other operators; with standard ones only, or also with GatherNDGrad."""
    # The last component of a grid point belongs to the first spatial axis.
    order = list(range(rank - 1, -1, -1))
    lengths = op.CastLike(op.Gather(op.Shape(x, start=2), order), grid)
    count = op.ReduceProd(op.Shape(dy, start=2), keepdims=1)
    points = op.Reshape(grid, op.Concat(op.Shape(grid, end=1), count, [rank], axis=0), allowzero=1)
    moved = points + 1.0
    coordinates = moved / 2.0 * (lengths - 1.0) if align else (moved * lengths - 1.0) / 2.0
    # onnxruntime reads at the border for coordinates that are not finite or exceed the integers.
    short = grid.dtype is not None and grid.dtype.itemsize < 4
    finite = op.Less(op.Abs(coordinates), math.inf if short else _grid_kernels.LIMIT)
    coordinates = op.Where(finite, coordinates, 0.0 if align else -0.5)
    samples = sample(op, x, coordinates, order, mode, padding, align)
    flat = op.Reshape(dy, op.Concat(op.Shape(dy, end=2), count, axis=0), allowzero=1)
    seeds = op.Transpose(flat, perm=[0, 2, 1])
    dx = dgrid = None
    if wanted[1] and mode == "nearest":
        dgrid = op.Expand(op.number(0.0, grid), op.shape_of(grid))
    elif wanted[1]:
        scale = (lengths - 1.0 if align else lengths) / 2.0
        by_coordinates = samples.grad_of_coordinates(seeds)
        if x.dtype != grid.dtype:
            by_coordinates = op.CastLike(by_coordinates, grid)
        by_points = op.Where(finite, by_coordinates * scale, 0.0)
        dgrid = op.Reshape(by_points, op.shape_of(grid), allowzero=1)
    if wanted[0]:
        rows = op.Transpose(samples.grad_of_rows(seeds, standard=standard), perm=[0, 2, 1])
        dx = op.Reshape(rows, op.shape_of(x), allowzero=1)
    return dx, dgrid


@gradient("GridSample")
def grid_sample_gradient(node: ForwardNode) -> Gradients:
    op, dy, x, grid = node.op, node.grad(0), node.input(0), node.input(1)
    mode = _MODES.get(node.attribute("mode"), node.attribute("mode"))
    padding, align = node.attribute("padding_mode"), node.attribute("align_corners")
    wanted = node.wants(0), node.wants(1) and mode != "nearest"
    full = x.dtype is not None and x.dtype.itemsize >= 4 and x.dtype == grid.dtype
    if node.rank() != 4 or not full:
        rank = node.rank() - 2
        return _record(op, dy, x, grid, rank, mode, padding, bool(align), wanted, standard=False)
    same = {"mode": mode, "padding_mode": padding, "align_corners": align}
    dx, dgrid = op.GridSampleGrad(dy, x, grid, **same, _outputs=2)
    return dx, dgrid if wanted[1] else None
