"""The gradient of pointwise convolutions, for sessions that run compiled kernels.

A convolution whose kernel has one tap, without strides and pads, is a product of matrices for each sample.
Where sessions run compiled kernels, onnxruntime's Gemm computes the products of its gradient on the tensors
as they are. In standard operators W would be transposed, and with more than one sample X and dY as well.
Products of few positions are computed by the kernel itself (see ortgrad.ops.conv._few_positions).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ortgrad.compiled.functions import SUMS, TILE, copy_elements, double
from ortgrad.operators.compiled import Matrix, Plan, Product, vectors
from ortgrad.operators.declaration import operator
from ortgrad.operators.gemm import is_steady
from ortgrad.operators.records import numbers_of
from ortgrad.ops._sums import CHUNK, add_blocks, groups_of
from ortgrad.ops._transposition import turn
from ortgrad.ops._windows import Windows, windows
from ortgrad.ops.conv import _body, _numpy
from ortgrad.ops.conv._few_positions import FewTask, few_channels_task, few_weights_task
from ortgrad.ops.conv._few_positions_plan import Division, FewPositions
from ortgrad.ops.conv._geometry import Convolution, volume
from ortgrad.ops.conv._memory import Given, Gradients
from ortgrad.ops.conv.conv import DECLARATION
from ortgrad.ops.conv.costs import AGAINST_GEMM


@operator("PointwiseConvGrad", **DECLARATION)
def pointwise_conv_grad(*arrays: np.ndarray, **attributes: Any) -> tuple[np.ndarray | None, ...]:
    """ConvGrad for a kernel with one tap, without strides, pads and groups"""
    return _numpy.conv_grad(*arrays, **attributes)


pointwise_conv_grad.onnx(_body.conv_grad_body)

# As many tasks as keep several threads busy, if each has enough products.
_TASKS, _PRODUCTS = 16, 1 << 20


def is_pointwise(w: Sequence[int | None], attributes: dict[str, Any]) -> bool:
    """Return whether a convolution with these weights and attributes is known to be pointwise."""
    ones = all(size == 1 for size in w[2:]) and all(step == 1 for step in attributes.get("strides") or ())
    return len(w) > 2 and ones and attributes.get("group", 1) == 1 and not any(attributes.get("pads") or ())


def _dx_pays(few: FewPositions) -> bool:
    """Return whether dX was measured to be faster without Gemm, which copies W for every product."""
    limits, elements = AGAINST_GEMM, few.rows * few.channels
    few_products = elements <= limits.dx_elements and elements * few.filters <= limits.dx_products
    least, most = limits.dx_rows
    return least <= few.rows <= most and few.filters >= limits.dx_filters and few_products


def _dw_pays(few: FewPositions) -> bool:
    """Return the same for dW. The products of one sample are as fast with Gemm."""
    limits, few_weights = AGAINST_GEMM, few.filters * few.channels <= AGAINST_GEMM.dw_weights
    small = few.rows <= (limits.dw_rows_of_few if few_weights else limits.dw_rows)
    return few.samples > 1 and small


class Tasks(NamedTuple):
    """How many tasks of each kind there are, and the filters of a task for dB."""

    few_dx: int
    few_dw: int
    turns: int
    copies: int
    sums: int
    biases: int


class ByGemm(NamedTuple):
    """Products that onnxruntime's Gemm computes, and what they need beside the tensors."""

    before: list[Product]
    after: list[Product]
    turned: bool  # the transposed W
    joined: bool  # X and dY with their samples beside the positions
    summed: bool  # dW of every sample


def plan(
    dy: Sequence[int],
    x: Sequence[int],
    w: Sequence[int],
    dx: Sequence[int] | None,
    dw: Sequence[int] | None,
    db: Sequence[int] | None,
    *,
    kernel_shape: list[int] | None,
    group: int,
    **attributes: Any,
) -> Plan | None:
    """Return the plan; None for tensors without elements, and for other convolutions."""
    samples, filters, channels, positions = dy[0], w[0], w[1], math.prod(x[2:])
    pointwise = is_pointwise(w, {"group": group, **attributes})
    if not pointwise or windows(x[2:], w[2:], **attributes).outputs != tuple(dy[2:]):
        return None
    if not samples * filters * channels * positions:
        return None
    size, one, zero = (1, 1, positions), (1, 1, 1), (0, 0, 0)
    few = FewPositions(Windows(size, size, one, one, one, zero, zero), samples, 1, filters, channels)
    few_dx = dx is not None and few.dx_is_possible and _dx_pays(few)
    few_dw = dw is not None and few.dw_is_possible and _dw_pays(few)
    products = few.rows * filters * channels
    few_tasks = Division.of(few, min(_TASKS, max(1, products // _PRODUCTS)), dx=few_dx, dw=few_dw)
    by_gemm = _products_of_gemm(
        few, positions, dx=dx is not None and not few_dx, dw=dw is not None and not few_dw
    )
    turned, joined, summed = by_gemm.turned, by_gemm.joined, by_gemm.summed
    turns = -(-channels // TILE) if turned else 0
    copies = filters + channels if joined else 0
    sums = groups_of(filters * channels) if summed else 0
    sizes = [math.prod(shape) if shape is not None else 0 for shape in (dy, x, w, dx, dw, db)]
    work = sizes[2] * turned, (sizes[0] + sizes[1]) * joined, samples * sizes[4] * summed
    few_work = products // 16 * (few_dx + few_dw)
    others = turns + copies + sums + (-(-filters // few.biases_of_task) if db is not None else 0)
    tasks = Tasks(
        few_dx=few_tasks.dx_tasks,
        few_dw=few_tasks.dw_tasks,
        turns=turns,
        copies=copies,
        sums=sums,
        biases=few.biases_of_task,
    )
    return Plan(
        tasks=few_tasks.dx_tasks + few_tasks.dw_tasks + others,
        views=[(size,) for size in sizes],
        numbers={
            "conv": numbers_of(few.convolution),
            "few": numbers_of(few_tasks.numbers),
            "tasks": numbers_of(tasks),
            "offsets": [0],
        },
        work=max(1, sum(work) + few_work + sizes[0] * (db is not None)),
        scratch=[
            (sizes[2] * turned,),
            (sizes[0] * joined,),
            (sizes[1] * joined,),
            (samples, filters * channels) if summed else (0, 0),
            (few_tasks.memory,),
        ],
        before=by_gemm.before,
        after=by_gemm.after,
    )


def _products_of_gemm(few: FewPositions, positions: int, *, dx: bool, dw: bool) -> ByGemm:
    """Return the products for dX and dW, where these are wanted."""
    samples, filters, channels = few.samples, few.filters, few.channels
    before, after = [], []
    # Gemm would transpose W again for every sample. But where that would round differently on other numbers
    # of threads, the transposed matrix would have to be turned back.
    turned = dx and samples > 1 and is_steady(channels, positions, filters)
    for n in range(samples if dx else 0):
        into = Matrix("dx", channels, positions, n * channels * positions)
        grads = Matrix("dy", filters, positions, n * filters * positions)
        if turned:
            after.append(Product(into, Matrix("turned", channels, filters), grads))
        else:
            before.append(Product(into, Matrix("w", filters, channels), grads, "left"))
    # With several samples, either their products are added up or X and dY have their samples beside the
    # positions first, whichever writes fewer elements.
    joined = dw and samples > 1 and positions * (filters + channels) <= filters * channels
    summed = dw and samples > 1 and not joined
    if summed:
        for n in range(samples):
            into = Matrix("products", filters, channels, n * filters * channels)
            grads = Matrix("dy", filters, positions, n * filters * positions)
            values = Matrix("x", channels, positions, n * channels * positions)
            before.append(Product(into, grads, values, "right"))
    elif dw:
        names = ("joined_dy", "joined_x") if joined else ("dy", "x")
        into, columns = Matrix("dw", filters, channels), samples * positions
        factors = (Matrix(names[0], filters, columns), Matrix(names[1], channels, columns))
        after.append(Product(into, *factors, "right"))
    return ByGemm(before, after, turned, joined, summed)


class Factors(NamedTuple):
    """What Gemm multiplies, and products that are to be added up."""

    turned: np.ndarray
    joined_dy: np.ndarray
    joined_x: np.ndarray
    products: np.ndarray


def pointwise_task(
    task: int, given: Given, gradients: Gradients, factors: Factors, of_few: FewTask, tasks: Tasks
) -> bool:
    """Compute dX or dW of few positions; transpose W of some channels, join the samples of a channel, add up
    dW of them, or dB of some filters."""
    conv: Convolution = of_few.conv
    samples, filters, positions = conv.samples, conv.filters, volume(conv.output)
    if task < tasks.few_dx:
        return few_channels_task(task, given.dy, given.w, gradients.dx, of_few)
    task -= tasks.few_dx
    if task < tasks.few_dw:
        return few_weights_task(task, given.dy, given.x, gradients.dw, of_few)
    task -= tasks.few_dw
    if task < tasks.turns:
        turn(factors.turned, given.w, task * TILE, filters)
        return False
    task -= tasks.turns
    copies, sums, biases = tasks.copies, tasks.sums, tasks.biases
    if task < copies:
        if task < filters:
            _join(factors.joined_dy, given.dy, task, filters, samples, positions)
        else:
            _join(factors.joined_x, given.x, task - filters, copies - filters, samples, positions)
    elif task < copies + sums:
        add_blocks(factors.products, (task - copies) * SUMS, gradients.dw)
    else:
        first = (task - copies - sums) * biases
        for channel in range(first, min(first + biases, filters)):
            _add_up(gradients.db, channel, given.dy, samples, filters, positions)
    return False


def _add_up(db: np.ndarray, channel: int, dy: np.ndarray, samples: int, filters: int, positions: int) -> None:
    """Compute dB of a filter."""
    total = double(0.0)
    for n in range(samples):
        place = (n * filters + channel) * positions
        for first in range(0, positions, CHUNK):
            values = dy[place + first : place + min(first + CHUNK, positions)]
            part = 0.0
            for k in range(len(values)):
                part += values[k]
            total += part
    db[channel] = total


def _join(
    into: np.ndarray, source: np.ndarray, channel: int, channels: int, samples: int, positions: int
) -> None:
    """Copy a channel of all samples into a row."""
    for n in range(samples):
        start = (n * channels + channel) * positions
        copy_elements(into, (channel * samples + n) * positions, source, start, positions)


pointwise_conv_grad.compiled(
    views=vectors("dy x w dx dw db"),
    scratch={**vectors("turned joined_dy joined_x"), "products": 2, "scratch": 1},
    plan=plan,
    products=True,
)(pointwise_task)
