"""The transpose of a box filter along one axis, in NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ortgrad.ops._windows import Windows


class Spread(NamedTuple):
    """How dY is spread along one axis: the places to set to zero, to copy to and to add to, in this order."""

    zero: np.ndarray
    copy: list[tuple[slice, slice]]
    add: list[tuple[slice, slice]]


def plan_spread(w: Windows, i: int) -> Spread:
    """How windows along axis i are spread."""
    size, count, kernel, head = w.sizes[i], w.outputs[i], w.kernel[i], w.heads[i]
    moves = []
    if count < kernel:
        for o in range(count):
            _, target = _within(size, o * w.strides[i] - head, w.dilations[i], kernel)
            moves.append((slice(o, o + 1), target))
    else:
        for k in range(kernel):
            moves.append(_within(size, k * w.dilations[i] - head, w.strides[i], count))
    # The first move to a place is a copy; taking the longest moves first leaves the fewest places to clear.
    moves.sort(key=lambda move: -len(range(size)[move[1]]))
    written = np.zeros(size, bool)
    plan = Spread(written, [], [])
    for source, target in moves:
        if written[target].any():
            plan.add.append((source, target))
        else:
            written[target] = True
            plan.copy.append((source, target))
    return plan._replace(zero=np.flatnonzero(~written))


def _within(size: int, start: int, step: int, count: int) -> tuple[slice, slice]:
    """The steps, of `count` from `start` on, that are in range(size), and their positions."""
    first = max(0, -(start // step))
    last = max(first, min(count, -((start - size) // step)))
    begin = start + first * step
    return slice(first, last), slice(begin, begin + (last - first) * step, step)


def spread(plan: Spread, source: np.ndarray, target: np.ndarray, axis: int) -> None:
    """Spread the source along an axis of the target."""
    before: tuple[Any, ...] = (slice(None),) * axis
    if plan.zero.size:
        target[(*before, plan.zero)] = 0
    for read, write in plan.copy:
        target[(*before, write)] = source[(*before, read)]
    for read, write in plan.add:
        target[(*before, write)] += source[(*before, read)]
