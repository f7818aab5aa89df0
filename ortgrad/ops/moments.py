"""The mean and the inverse deviation along axes, in one node, for sessions that run compiled kernels.

There it replaces the nodes that gradient rules of normalizations record for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ortgrad.compiled.functions import SUMS, double, doubles, sqrt
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.compiled import Plan
from ortgrad.operators.declaration import INTERNAL_DOMAIN, Operand, Shape, operator
from ortgrad.ops._batch_kernels import Division, add_moments, channel_plan, moments
from ortgrad.ops._normalization import inverse_root, statistics
from ortgrad.ops._sums import groups_of


def kept_axes(rank: int, axes: Sequence[int]) -> range | None:
    """Return the axes that are not reduced, or None if there are others between them."""
    reduced = {axis % rank for axis in axes}
    kept = [axis for axis in range(rank) if axis not in reduced]
    first = kept[0] if kept else 0
    return range(first, first + len(kept)) if kept == list(range(first, first + len(kept))) else None


def _shapes(
    x: Operand, *, axes: Sequence[int], keepdims: int, epsilon: float, centred: int
) -> Sequence[Shape | None]:
    if x.shape is None:
        return [None, None]
    reduced = {axis % len(x.shape) for axis in axes}
    shape = tuple(
        1 if axis in reduced else size for axis, size in enumerate(x.shape) if keepdims or axis not in reduced
    )
    return [shape, shape]


@operator(
    "Moments",
    domain=INTERNAL_DOMAIN,
    inputs=["X"],
    outputs=["mean?", "inverse"],
    shapes=_shapes,
    dims={"X": "*S"},
    attributes={"axes": list[int], "keepdims": 1, "epsilon": 1e-5, "centred": 1},
)
def moments_of(
    x: np.ndarray,
    *,
    axes: Sequence[int],
    keepdims: int,
    epsilon: float,
    centred: int,
    wanted: tuple[bool, ...],
) -> tuple[np.ndarray | None, np.ndarray]:
    """inverse = 1 / sqrt(mean((X - mean)^2) + epsilon), the means along `axes`; mean is 0 unless `centred`"""
    along, kept = tuple(axes), bool(keepdims)
    # As in onnxruntime, the mean of nothing is 0.
    count = x.dtype.type(max(1, math.prod(x.shape[axis] for axis in along)))
    with np.errstate(invalid="ignore", over="ignore"):
        mean = x.sum(along, keepdims=True) / count if centred else x.dtype.type(0)
        squares = np.square(x - mean).sum(along, keepdims=kept) / count
        inverse = np.asarray(1 / np.sqrt(squares + x.dtype.type(epsilon)))
    return np.reshape(mean, inverse.shape) if wanted[0] and centred else None, inverse


@moments_of.onnx
def moments_body(
    op: Recorder,
    x: ir.Value,
    *,
    axes: Sequence[int],
    keepdims: int,
    epsilon: float,
    centred: int,
    wanted: tuple[bool, ...],
) -> list[ir.Value | None]:
    along = list(axes)
    mean: ir.Value | None = None
    if centred:
        mean, inverse = statistics(op, x, along, epsilon)
    else:
        inverse = inverse_root(op, op.ReduceMean(x * x, along) + epsilon)
    return [v if keepdims or v is None else op.Squeeze(v, along) for v in (mean, inverse)]


def _plan(
    x: tuple[int, ...],
    mean: tuple[int, ...] | None,
    inverse: tuple[int, ...],
    *,
    axes: Sequence[int],
    keepdims: int,
    epsilon: float,
    centred: int,
) -> Plan | None:
    """X with the axes before those that are kept, the kept ones, and those after them."""
    kept = kept_axes(len(x), axes)
    if kept is None or (mean is not None and not centred):
        return None
    channels = math.prod(inverse)
    made = channel_plan((math.prod(x[: kept.start]), channels, math.prod(x[kept.stop :])), (), sums=3)
    assert made is not None
    plan, shape = made
    assert isinstance(plan.tasks, tuple)
    return plan._replace(
        tasks=(plan.tasks[0], groups_of(channels)),
        views=[shape, (0 if mean is None else channels,), (channels,)],
        scratch=plan.scratch[:1],
        work=2 * math.prod(x),
    )


def moment_sums(
    task: int,
    x: np.ndarray,
    inverse: np.ndarray,
    sums: np.ndarray,
    division: Division,
    centred: int,
) -> None:
    add_moments(task, x, sums, len(inverse), division, centred)


@moments_of.compiled(
    views={"x": 3, "mean": 1, "inverse": 1}, scratch={"sums": 3}, plan=_plan, first=moment_sums
)
def moments_of_channels(
    task: int,
    x: np.ndarray,
    mean: np.ndarray,
    inverse: np.ndarray,
    sums: np.ndarray,
    division: Division,
    epsilon: float,
    centred: int,
) -> None:
    first = task * SUMS
    last = min(first + SUMS, len(inverse))
    step, flat = division.step, division.flat
    samples, rest = x.shape[0], 1 if flat else x.shape[2]
    means, variances = doubles(), doubles()
    if centred:
        moments(sums, first, last, step, samples, rest, means, variances)
    else:
        for k in range(last - first):
            variances[k] = 0.0
        for i in range(sums.shape[1]):
            for k in range(last - first):
                variances[k] += double(sums[2, i, first + k])
        for k in range(last - first):
            variances[k] /= max(1, samples * rest)
    if len(mean) > 0:
        for k in range(last - first):
            mean[first + k] = means[k]
    for k in range(last - first):
        inverse[first + k] = double(1.0) / sqrt(variances[k] + double(epsilon))
