"""The gradient of MaxPool from its input, for sessions that run compiled kernels.

There it replaces MaxPoolGrad, which reads the indices of the maxima: onnxruntime's MaxPool takes many times
as long if it has to write them.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ortgrad.compiled.functions import allocate, release
from ortgrad.operators.compiled import Plan
from ortgrad.operators.declaration import INTERNAL_DOMAIN, Choice, Empty, operator
from ortgrad.ops._windows import Windows, spatial, windows
from ortgrad.ops.index import scatter_flat

if TYPE_CHECKING:
    import onnx_ir as ir

    from ortgrad.graph.recorder import Recorder

# With SAME, onnxruntime may place the windows differently from ONNX.
CLEAR_PADS = ("NOTSET", "VALID")
_MOST_DIMENSIONS = 3
_INFINITE = math.inf


def _dims(*, kernel_shape: list[int], **_: Any) -> dict[str, str]:
    y, x = spatial(kernel_shape)[:2]
    return {"dY": f"N C {y}", "X": f"N C {x}"}


@operator(
    "MaxPoolInputGrad",
    domain=INTERNAL_DOMAIN,
    inputs=["dY", "X"],
    outputs=["dX"],
    shapes="X",
    dims=_dims,
    attributes={
        "auto_pad": Choice(*CLEAR_PADS),
        "ceil_mode": 0,
        "dilations": list[int],
        "kernel_shape": list[int],
        "pads": list[int],
        "storage_order": 0,
        "strides": list[int],
    },
)
def max_pool_input_grad(
    dy: np.ndarray, x: np.ndarray, *, storage_order: int, empty: Empty, **attributes: Any
) -> np.ndarray:
    """dX at the first maximum of each window += dY"""
    w = _windows(dy.shape, x.shape, **attributes)
    dx = empty(0, x.shape)
    dx.fill(0)
    # The maximum of each window so far and its place in the channel. Where everything is -inf or NaN, that is
    # the first place inside of X.
    best, places = np.full(dy.shape, -np.inf, x.dtype), np.full(dy.shape, -1)
    for tap in np.ndindex(w.kernel) if x.size else ():
        axes = [
            np.arange(n) * s - h + k * d
            for n, s, h, k, d in zip(w.outputs, w.strides, w.heads, tap, w.dilations, strict=True)
        ]
        inside = [(axis >= 0) & (axis < n) for axis, n in zip(axes, w.sizes, strict=True)]
        axes = [np.clip(axis, 0, n - 1) for axis, n in zip(axes, w.sizes, strict=True)]
        values = x[(slice(None), slice(None), *np.ix_(*axes))]
        within = functools.reduce(np.logical_and, np.meshgrid(*inside, indexing="ij", sparse=True))
        larger = within & (values > best)
        best = np.where(larger, values, best)
        taken = larger | (within & (places < 0))
        places = np.where(taken, np.ravel_multi_index(np.ix_(*axes), w.sizes), places)
    found = (places >= 0).reshape(-1)
    channels = np.repeat(np.arange(math.prod(dy.shape[:2])), math.prod(w.outputs))
    at = channels * math.prod(w.sizes) + places.reshape(-1)
    np.add.at(dx.reshape(-1), at[found], dy.reshape(-1)[found])
    return dx


@max_pool_input_grad.onnx
def max_pool_input_grad_body(
    op: Recorder, dy: ir.Value, x: ir.Value, *, storage_order: int, **attributes: Any
) -> ir.Value:
    _, indices = op.MaxPool(x, **attributes, _outputs=2)
    return scatter_flat(op, dy, op.Shape(x), indices)


def _plan(
    dy: tuple[int, ...],
    x: tuple[int, ...],
    dx: tuple[int, ...],
    *,
    storage_order: int,
    **attributes: Any,
) -> Plan | None:
    """A task is a channel; `geometry` has three numbers, one for each dimension, of every kind."""
    w = _windows(dy, x, **attributes)
    if w.rank > _MOST_DIMENSIONS:
        return None
    ones, zeros = [1] * (_MOST_DIMENSIONS - w.rank), [0] * (_MOST_DIMENSIONS - w.rank)
    sizes, kernel, dilations = [*ones, *w.sizes], [*ones, *w.kernel], [*ones, *w.dilations]
    taps = itertools.product(*(range(0, k * d, d) for k, d in zip(kernel, dilations, strict=True)))
    # The windows of a row whose tap is inside of it, for each of the taps side by side.
    step, shifts = w.strides[-1], [k * w.dilations[-1] - w.heads[-1] for k in range(w.kernel[-1])]
    firsts = [max(0, -(shift // step)) for shift in shifts]
    lasts = [min(w.outputs[-1], (w.sizes[-1] - 1 - shift) // step + 1) for shift in shifts]
    planes = math.prod(x[:2])
    return Plan(
        tasks=planes,
        views=[(planes, math.prod(dy[2:])), (planes, math.prod(x[2:])), (planes, math.prod(x[2:]))],
        numbers={
            "geometry": [*sizes, *ones, *w.outputs, *kernel, *ones, *w.strides, *dilations, *zeros, *w.heads],
            "offsets": [(z * sizes[1] + y) * sizes[2] + x for z, y, x in taps],
            "firsts": firsts,
            "lasts": lasts,
        },
        work=math.prod(dy) * (math.prod(w.kernel) + 4) + math.prod(x),
    )


@max_pool_input_grad.compiled(views=[2, 2, 2], plan=_plan)
def max_pool_input_grad_channel(
    task: int,
    dy: np.ndarray,
    x: np.ndarray,
    dx: np.ndarray,
    geometry: np.ndarray,
    offsets: np.ndarray,
    firsts: np.ndarray,
    lasts: np.ndarray,
) -> bool:
    source, into = x[task], dx[task]
    for k in range(len(into)):
        into[k] = 0.0
    height, length, width = geometry[1], geometry[2], geometry[5]
    step, head = geometry[11], geometry[17]
    memory = allocate(2 * width)
    if len(memory) < 2 * width:
        return True
    # The maximum of each window of a row, and the number of its tap.
    best, chosen = memory[:width], memory[width:]
    for row in range(geometry[3] * geometry[4]):
        top = row // geometry[4] * geometry[9] - geometry[15]
        left = row % geometry[4] * geometry[10] - geometry[16]
        for j in range(width):
            best[j] = -_INFINITE
            chosen[j] = -1.0
        base, tap = (top * height + left) * length - head, 0
        for k in range(geometry[6]):
            z = top + k * geometry[12]
            for m in range(geometry[7]):
                y = left + m * geometry[13]
                if z < 0 or z >= geometry[0] or y < 0 or y >= height:
                    tap += len(firsts)
                    continue
                for n in range(len(firsts)):
                    first, last = firsts[n], lasts[n]
                    if first < last:
                        values = source[base + offsets[tap] + first * step :]
                        number = best.dtype.type(tap)
                        keep_larger(best[first:last], chosen[first:last], values, step, number)
                    tap += 1
        for j in range(width):
            tap = int(chosen[j])
            if tap < 0:
                tap = first_inside(geometry, top, left, j * step - head)
            if tap >= 0:
                into[base + offsets[tap] + j * step] += dy[task, row * width + j]
    release(memory)
    return False


def keep_larger(best: np.ndarray, chosen: np.ndarray, values: np.ndarray, step: int, number: float) -> None:
    """Replace what is less than every `step`-th value, together with its number."""
    # The compiler uses vectors only for steps that it knows.
    if step == 1:
        for j in range(len(best)):
            v, b = values[j], best[j]
            chosen[j] = number if v > b else chosen[j]
            best[j] = v if v > b else b
    elif step == 2:
        for j in range(len(best)):
            v, b = values[2 * j], best[j]
            chosen[j] = number if v > b else chosen[j]
            best[j] = v if v > b else b
    else:
        for j in range(len(best)):
            v, b = values[j * step], best[j]
            chosen[j] = number if v > b else chosen[j]
            best[j] = v if v > b else b


def first_inside(geometry: np.ndarray, top: int, left: int, start: int) -> int:
    """Return the first tap of a window that is inside of X; -1 if there is none.

    A window without a maximum has only -inf and NaN in it, or nothing.
    """
    for tap in range(geometry[6] * geometry[7] * geometry[8]):
        over = tap // geometry[8]
        z = top + over // geometry[7] * geometry[12]
        y = left + over % geometry[7] * geometry[13]
        x = start + tap % geometry[8] * geometry[14]
        if z >= 0 and z < geometry[0] and y >= 0 and y < geometry[1] and x >= 0 and x < geometry[2]:
            return tap
    return -1


def _windows(dy: tuple[int, ...], x: tuple[int, ...], **attributes: Any) -> Windows:
    """The windows over X; raises unless they give an output of dY's shape."""
    kernel, ceil_mode = attributes.pop("kernel_shape"), bool(attributes.pop("ceil_mode"))
    w = windows(x[2:], kernel, ceil_mode=ceil_mode, pool=True, **attributes)
    if w.outputs != dy[2:]:
        raise ValueError(
            f"pooling an X of shape {list(x)} with kernel_shape {list(kernel)} gives "
            f"{[*x[:2], *w.outputs]}, but dY has {list(dy)}"
        )
    return w
