"""Gradient rules of operators that resample images: Resize, AffineGrid."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import TensorProto

from ortgrad.autodiff.rules import ForwardNode, gradient
from ortgrad.errors import unknown_rank
from ortgrad.graph.lazy import ir

# Attributes that do not apply to the matrix of one axis.
_OF_X = ("axes", "extrapolation_value", "keep_aspect_ratio_policy")
# With integer factors, these pairs (coordinates, rounding) of nearest neighbours repeat every element.
_REPEATING = {
    ("asymmetric", "floor"),
    ("tf_half_pixel_for_nn", "floor"),
    *(
        (coordinates, rounding)
        for coordinates in ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric")
        for rounding in ("round_prefer_floor", "round_prefer_ceil")
    ),
}


@gradient("Resize")
def resize_gradient(node: ForwardNode) -> ir.Value:
    """dX = dY times the transposed matrix of the interpolation, axis by axis"""
    op, dx = node.op, node.grad(0)
    axes = [axis % node.rank() for axis in node.attribute("axes") or range(node.rank())]
    factors = _factors(node, axes)
    repeated = _whole_factors(node, factors)
    if repeated is not None:
        if not repeated:
            return dx
        kernel = [repeated.get(axis, 1) for axis in range(2, node.rank())]
        mean = op.AveragePool(dx, kernel_shape=kernel, strides=kernel)
        return mean * float(math.prod(kernel))
    for axis in sorted(axes, reverse=True):
        if factors[axis] == 1.0:
            continue
        # The matrix of the interpolation: (positions in X, positions in Y).
        matrix = _unit_response(node, axes, axis)
        if matrix.dtype != dx.dtype:
            matrix = op.CastLike(matrix, dx)
        if axis == node.rank() - 1:
            dx = op.MatMul(dx, op.Transpose(matrix, perm=[1, 0]))
        elif axis == node.rank() - 2:
            dx = op.MatMul(matrix, dx)
        else:
            # The axes after this one become one dimension; 0 keeps a dimension.
            kept = [0] * (axis + 1)
            dx = op.MatMul(matrix, op.Reshape(dx, [*kept, -1]))
            dx = op.Reshape(dx, _behind(node, kept))
    return dx


def _behind(node: ForwardNode, kept: list[int]) -> ir.Value:
    """The shape of X, with zeros for the leading axes that are kept."""
    dims = list(node.input(0).shape or [])[len(kept) :]
    if all(isinstance(n, int) for n in dims):
        return node.op.constant(np.array([*kept, *dims], np.int64))
    return node.op.Concat(kept, node.op.Shape(node.input(0), start=len(kept)), axis=0)


def _factors(node: ForwardNode, axes: list[int]) -> dict[int, float | None]:
    """The factors by axis, None if not known; 1 for an axis that is not resized."""
    factors: dict[int, float | None] = dict.fromkeys(axes)
    if node.attribute("mode") != "nearest" and node.rank() > 3:
        # onnxruntime does not interpolate along these.
        factors.update({axis: 1.0 for axis in axes if axis < (2 if node.rank() > 4 else 1)})
    if node.attribute("coordinate_transformation_mode") == "tf_crop_and_resize":
        return factors
    x_shape, y_shape = node.input(0).shape, node.output(0).shape
    scales = node.constant(2)
    if scales is not None and scales.size:
        factors.update(zip(axes, map(float, scales), strict=True))
    elif (
        node.optional(3) is not None and not _has_policy(node) and x_shape is not None and y_shape is not None
    ):
        for axis in axes:
            n, m = x_shape[axis], y_shape[axis]
            if n == m and (isinstance(n, int) or n.value is not None):
                factors[axis] = 1.0
            elif isinstance(n, int) and isinstance(m, int):
                factors[axis] = float(np.float32(m) / np.float32(n))
    return factors


def _has_policy(node: ForwardNode) -> bool:
    return node.optional(3) is not None and node.attribute("keep_aspect_ratio_policy") != "stretch"


def _whole_factors(node: ForwardNode, factors: dict[int, float | None]) -> dict[int, int] | None:
    """The factors other than 1 by axis if Resize only repeats elements, else None."""
    if node.attribute("coordinate_transformation_mode") == "tf_crop_and_resize":
        return None
    known = {axis: factor for axis, factor in factors.items() if factor != 1.0}
    if not known:
        return {}
    how = node.attribute("coordinate_transformation_mode"), node.attribute("nearest_mode")
    if node.attribute("mode") != "nearest" or how not in _REPEATING:
        return None
    # onnxruntime pools over one to three dimensions, which follow two others.
    if min(known) < 2 or not 3 <= node.rank() <= 5:
        return None
    if not all(factor is not None and factor.is_integer() for factor in known.values()):
        return None
    return {axis: int(factor) for axis, factor in known.items() if factor is not None}


def _unit_response(node: ForwardNode, axes: list[int], axis: int) -> ir.Value:
    """The unit matrix, its second axis resized as this axis of X is."""
    op, x, number = node.op, node.input(0), axes.index(axis)
    same = {name: value for name, value in node.attributes.items() if name not in _OF_X}
    known = x.shape[axis] if x.shape is not None else None
    places = op.Range(0, known if isinstance(known, int) else op.Gather(op.Shape(x), axis), 1)
    unit = op.Cast(op.Equal(op.Unsqueeze(places, [1]), places), to=TensorProto.FLOAT)
    roi = None
    if same["coordinate_transformation_mode"] == "tf_crop_and_resize" and node.optional(1) is not None:
        window = op.Cast(node.input(1), to=TensorProto.FLOAT)
        start, end = (op.Gather(window, [k]) for k in (number, len(axes) + number))
        roi = op.Concat(start, np.zeros(1, np.float32), end, np.ones(1, np.float32), axis=0)
        # Positions outside of X give extrapolation_value, which does not depend on X.
        same["extrapolation_value"] = 0.0
    scales = sizes = None
    copies = _copies(node)
    if _has_policy(node):
        unit = op.Pad(unit, [0, 0, 0, 1], mode="edge")
        scales = op.Concat(_common_factor(node, axes, same), op.Cast(copies, to=TensorProto.FLOAT), axis=0)
    elif node.optional(3) is not None:
        sizes = op.Concat(op.Gather(node.input(3), [number]), copies, axis=0)
    else:
        scales = op.Concat(op.Gather(node.input(2), [number]), op.Cast(copies, to=TensorProto.FLOAT), axis=0)
    resized = op.Resize(op.Unsqueeze(unit, [0, 3]), roi, scales, sizes, axes=[2, 3], **same)
    if _has_policy(node):
        length = op.Shape(node.output(0), start=axis, end=axis + 1)
        resized = op.Slice(resized, [0, 0], op.Concat(length, [1], axis=0), [2, 3])
    else:
        resized = op.Slice(resized, [0], [1], [3])
    return op.Squeeze(resized, [0, 3])


def _copies(node: ForwardNode) -> ir.Value:
    """How often to repeat an extra axis of length 1 of the unit matrix: 2, or 1 if X keeps its shape.

    If no length changes, onnxruntime copies X without regard to the scales. This must not happen to the
    matrix of an axis that keeps its length while another axis of X changes.
    """
    op, x, y = node.op, node.input(0), node.output(0)
    dims = zip(x.shape or [], y.shape or [], strict=False)
    scales = node.constant(2)
    changed = any(isinstance(n, int) and isinstance(m, int) and n != m for n, m in dims)
    if changed or (scales is not None and ((scales < 1) | (scales >= 2)).any()):
        return op.constant(np.array([2], np.int64))
    equal = op.Cast(op.Equal(op.shape_of(x), op.shape_of(y)), to=TensorProto.INT64)
    return op.Sub([2], op.ReduceProd(equal, keepdims=1))


def _common_factor(node: ForwardNode, axes: list[int], same: dict[str, Any]) -> ir.Value:
    """The factor of all axes under a keep_aspect_ratio_policy.

    The policy rounds lengths, while scales truncate them. The unit matrix therefore has its last column
    twice, which makes the result long enough and changes nothing else.
    """
    op, policy = node.op, node.attribute("keep_aspect_ratio_policy")
    independent = same["coordinate_transformation_mode"] in ("half_pixel", "asymmetric")
    if not independent or same["antialias"] or same["exclude_outside"]:
        raise node.unsupported(
            f"keep_aspect_ratio_policy {policy} is differentiated only with the coordinates half_pixel and "
            "asymmetric, without antialias and exclude_outside"
        )
    lengths = op.Cast(op.Gather(op.shape_of(node.input(0)), axes), to=TensorProto.FLOAT)
    factors = op.Cast(node.input(3), to=TensorProto.FLOAT) / lengths
    return (op.ReduceMin if policy == "not_larger" else op.ReduceMax)(factors, keepdims=1)


@gradient("AffineGrid")
def affine_grid_gradient(node: ForwardNode) -> ir.Value:
    """dtheta = dY^T times the homogeneous coordinates of the identity's grid"""
    op, theta = node.op, node.input(0)
    shape = node.output(0).shape
    if shape is None or theta.dtype is None:
        raise node.unsupported(unknown_rank("its output"))
    rank = len(shape) - 2
    identity = np.eye(rank, rank + 1, dtype=theta.dtype.numpy())[None]
    size = op.Concat([1], op.Slice(node.input(1), [1], [rank + 2]), axis=0)
    base = op.AffineGrid(op.constant(identity), size, align_corners=node.attribute("align_corners"))
    places = op.Pad(op.Reshape(base, [-1, rank]), [0, 0, 0, 1], op.number(1.0, theta))
    dy = op.Reshape(node.grad(0), [0, -1, rank])
    return op.MatMul(op.Transpose(dy, perm=[0, 2, 1]), places)
