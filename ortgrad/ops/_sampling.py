"""Interpolation in images, for GridSample and DeformConv."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from ortgrad.graph.lazy import Recorder, ir
from ortgrad.ops.index import gather_nd_grad_body

# Keys' cubic with a = -0.75: row i has the coefficients of f**i for the four taps.
_CUBIC = np.array([[0, 1, 0, 0], [-0.75, 0, 0.75, 0], [1.5, -2.25, 1.5, -0.75], [-0.75, 1.25, -1.25, 0.75]])
_LINEAR = np.array([[1.0, 0.0], [-1.0, 1.0]])
_NEAREST = np.ones((1, 1))
TABLES = {"nearest": _NEAREST, "linear": _LINEAR, "cubic": _CUBIC}


@dataclass(frozen=True)
class Samples:
    """Points of images, each a weighted sum of the image elements (taps) around it.

    The images are (B, elements, C) rows, from each of which some points are read.
    """

    op: Recorder
    rows: ir.Value  # (B, elements, C)
    indices: ir.Value  # (B, points * taps, 1) into the elements
    weights: Sequence[ir.Value]  # by component: (B, points) and one axis of taps per component
    slopes: Sequence[ir.Value]  # the weights' derivatives by the coordinate
    taps: int

    def values(self) -> ir.Value:
        """The taps of all points: (B, points, taps, C)."""
        op = self.op
        read = op.GatherND(self.rows, self.indices, batch_dims=1)
        return op.Reshape(read, self._shape([self.taps], op.Shape(self.rows, start=2)), allowzero=1)

    def weight(self) -> ir.Value:
        """The weights of all taps: (B, points, taps, 1)."""
        return self._flat(functools.reduce(self.op.Mul, self.weights))

    def sums(self) -> ir.Value:
        """The points: (B, points, C)."""
        weight = self.op.Transpose(self.weight(), perm=[0, 1, 3, 2])
        return self.op.Squeeze(self.op.MatMul(weight, self.values()), [2])

    def grad_of_rows(self, grad: ir.Value, *, standard: bool = False) -> ir.Value:
        """The gradient of the rows, from that of the points (B, points, C); with standard operators only."""
        op = self.op
        parts = op.Unsqueeze(grad, [2]) * self.weight()
        shape = op.Concat(op.Shape(self.indices, end=2), op.Shape(self.rows, start=2), axis=0)
        flat = op.Reshape(parts, shape, allowzero=1)
        if standard:
            return gather_nd_grad_body(op, op.Shape(self.rows), self.indices, flat, batch_dims=1)
        return op.GatherNDGrad(op.Shape(self.rows), self.indices, flat, batch_dims=1)

    def grad_of_coordinates(self, grad: ir.Value) -> ir.Value:
        """The gradient of the coordinates (B, points, components), from that of the points (B, points, C)."""
        op = self.op
        by_tap = op.MatMul(self.values(), op.Unsqueeze(grad, [3]))
        components = []
        for i, slope in enumerate(self.slopes):
            others = [weight for j, weight in enumerate(self.weights) if j != i]
            product = self._flat(functools.reduce(op.Mul, [slope, *others]))
            components.append(op.ReduceSum(by_tap * product, [2], keepdims=0))
        return op.Concat(*components, axis=2)

    def _shape(self, *parts: list[int] | ir.Value) -> ir.Value:
        lead = self.op.Shape(self.weights[0], end=2)
        return self.op.Concat(lead, *parts, axis=0)

    def _flat(self, product: ir.Value) -> ir.Value:
        """(B, points, taps of each component ...) as (B, points, taps, 1)."""
        return self.op.Reshape(product, self._shape([self.taps, 1]), allowzero=1)


def sample(
    op: Recorder,
    x: ir.Value,
    coordinates: ir.Value,
    order: Sequence[int],
    mode: str,
    padding: str,
    align: bool,
) -> Samples:
    """Points of the images x (B, C, ...) at coordinates (B, points, components), counted in elements.

    `order` has the spatial axis of each component.
    """
    table = TABLES[mode]
    first = -1 if mode == "cubic" else 0
    components, count = len(order), table.shape[1]
    sizes = op.Shape(x, start=2)
    # (components, 1), beside the taps in the last axis.
    lengths = op.Unsqueeze(op.Gather(sizes, list(order)), [1])
    corner = op.Round(coordinates) if mode == "nearest" else op.Floor(coordinates)
    start = op.Unsqueeze(op.Cast(corner, to=TensorProto.INT64), [3])
    taps = op.Add(start, list(range(first, first + count))) if table.size > 1 else start
    fraction = op.Unsqueeze(coordinates - corner, [3])
    weights, slopes = _polynomials(op, fraction, table)
    places = _inside(op, taps, lengths, padding, align)
    if padding == "zeros":
        inside = op.CastLike(op.Equal(places, taps), coordinates)
        weights, slopes = weights * inside, slopes * inside
    if x.dtype != coordinates.dtype:
        weights, slopes = op.CastLike(weights, x), op.CastLike(slopes, x)

    def of_component(values: ir.Value, i: int) -> ir.Value:
        """The taps of one component of (B, points, components, taps), in an axis of their own."""
        own = op.Gather(values, i, axis=2)
        others = [2 + j for j in range(components) if j != i]
        return op.Unsqueeze(own, others) if others else own

    index: ir.Value | None = None
    for axis in range(components):
        place = of_component(places, list(order).index(axis))
        index = place if index is None else index * op.Gather(sizes, axis) + place
    taps_in_all = count**components
    points = op.Mul(op.Shape(coordinates, start=1, end=2), [taps_in_all])
    batch = op.Shape(coordinates, end=1)
    flat = op.Reshape(x, op.Concat(op.Shape(x, end=2), op.ReduceProd(sizes, keepdims=1), axis=0), allowzero=1)
    return Samples(
        op,
        op.Transpose(flat, perm=[0, 2, 1]),
        op.Reshape(index, op.Concat(batch, points, [1], axis=0), allowzero=1),
        [of_component(weights, i) for i in range(components)],
        [of_component(slopes, i) for i in range(components)],
        taps_in_all,
    )


def _polynomials(op: Recorder, fraction: ir.Value, table: np.ndarray) -> tuple[ir.Value, ir.Value]:
    """The weights of the taps, polynomials of the fraction (..., 1), and their derivatives."""
    kind = fraction.dtype.numpy() if fraction.dtype is not None else np.float32
    one = fraction * 0.0 + 1.0
    powers = [one]
    for _ in table[1:]:
        powers.append(powers[-1] * fraction if len(powers) > 1 else fraction)
    if len(table) == 1:
        return one, fraction * 0.0
    steps = np.arange(1, len(table))[:, None] * table[1:]
    weights = op.MatMul(op.Concat(*powers, axis=3), op.constant(table.astype(kind)))
    return weights, op.MatMul(op.Concat(*powers[:-1], axis=3), op.constant(steps.astype(kind)))


def _inside(op: Recorder, taps: ir.Value, lengths: ir.Value, padding: str, align: bool) -> ir.Value:
    """The positions of the taps, moved into the image."""
    last = lengths - 1
    if padding != "reflection":
        return op.Min(op.Max(taps, 0), last)
    if align:
        # Reflect around the centres of the outermost elements.
        period = last * 2
        there = op.Mod(op.Abs(taps), op.Max(period, 1))
        return op.Min(there, period - there)
    # Reflect around the outer edges of the outermost elements.
    there = op.Mod(taps, lengths * 2)
    return op.Min(there, lengths * 2 - 1 - there)
