"""What the compiled kernels of GRU and LSTM have in common.

onnxruntime computes X W^T for all steps before the recurrence, and dX after it. A task takes some rows of the
batch through all steps in one direction: the rows are independent of each other. R is copied into panels
first, so that the products of a step run in registers; so do those for dW and dR, which onnxruntime's Gemm
computes more slowly because a factor is transposed.

The kernels support the default activations, without clip, peepholes and lengths of sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ortgrad.compiled.functions import (
    PANEL,
    Factor,
    allocate,
    copy_row,
    double,
    doubles,
    multiply_panel,
    release,
)
from ortgrad.compiled.mathematics import sigmoid, tanh
from ortgrad.operators.compiled import Matrix, Plan, Product
from ortgrad.operators.records import numbers_of
from ortgrad.ops.recurrent._cell import Cell

if TYPE_CHECKING:
    Sizes = Sequence[int]

# Rows of the batch that a task takes through the steps.
_ROWS = 16
# With fewer rows than this in all steps, and at least this hidden size, standard operators are faster.
_FEW, _LARGE = 4, 128
# Columns whose weights have their gradients computed by a task, and rows that it adds up at once.
COLUMNS = 64
_TERMS = 128


class Strides(NamedTuple):
    """The distances of steps, directions and rows of the batch in a tensor, in rows."""

    step: int
    direction: int
    row: int


class Geometry(NamedTuple):
    """The numbers that all tasks of a kernel read."""

    steps: int
    batch: int
    hidden: int
    directions: int
    reverse: bool
    rows: int  # of the batch, of a task
    table: Strides  # X W^T and the gradient of it, which have all gates of both directions in a row
    states: Strides  # the states of all steps, and their gates
    single: Strides  # single states, without steps
    separate: Strides  # matrices that have one direction after the other
    inputs: int
    pieces: int  # tasks for dW and dR
    linear: bool  # linear_before_reset


def is_supported(cell: Cell, *absent: Sequence[int | None] | None) -> bool:
    """Return whether there are kernels for a cell; `absent` are the shapes of inputs that must be absent."""
    names = [[activation.name for activation in direction] for direction in cell.activations]
    default = all(tuple(direction) == cell.default_activations for direction in names)
    return default and cell.clip is None and all(shape is None or tuple(shape) == (0,) for shape in absent)


def pays(x: Sequence[int | None] | None, r: Sequence[int | None] | None) -> bool:
    """Return whether R is multiplied often enough, as far as the shapes are known, to copy it into panels."""
    if not x or not r or None in (x[0], x[1], r[-1]):
        return True
    return math.prod(n or 0 for n in x[:2]) >= _FEW or (r[-1] or 0) < _LARGE


def geometry(cell: Cell, x: Sizes, hidden: int, pieces: int = 0, linear: bool = False) -> Geometry:
    directions = len(cell.reverse)
    batch, steps = (x[0], x[1]) if cell.batch_first else (x[1], x[0])
    if cell.batch_first:
        table = states = Strides(directions, 1, steps * directions)
        single, separate = Strides(0, 1, directions), Strides(1, steps * batch, steps)
    else:
        table, states = Strides(batch * directions, 1, directions), Strides(directions * batch, batch, 1)
        single, separate = Strides(0, batch, 1), Strides(batch, steps * batch, 1)
    return Geometry(
        steps=steps,
        batch=batch,
        hidden=hidden,
        directions=directions,
        reverse=cell.reverse[0],
        rows=min(_ROWS, batch),
        table=table,
        states=states,
        single=single,
        separate=separate,
        inputs=x[2],
        pieces=pieces,
        linear=linear,
    )


def task_count(x: Sizes, cell: Cell) -> int:
    """Return the number of tasks that go through the steps."""
    batch = x[0] if cell.batch_first else x[1]
    return len(cell.reverse) * -(-batch // _ROWS)


def panels(columns: int) -> int:
    """Return the number of panels for a matrix with `columns` columns."""
    return -(-columns // PANEL)


def flat(*shapes: Sizes | None) -> list[tuple[int]]:
    """Return views of all tensors as vectors."""
    return [(0,) if shape is None else (math.prod(shape),) for shape in shapes]


def forward_plan(
    cell: Cell, count: int, x: Sizes, w: Sizes, r: Sizes, *others: Any, linear: bool = False
) -> Plan | None:
    """Return the plan of GRUTraining or LSTMTraining, with `count` panels of R^T for each direction."""
    directions, columns, hidden = r
    rows, of_both = x[0] * x[1], directions * columns
    if not columns * rows * x[2]:
        return None
    # X W^T for both directions
    factors = Matrix("x", rows, x[2]), Matrix("w", of_both, x[2])
    return Plan(
        tasks=(directions * count, task_count(x, cell)),
        views=flat(x, w, r, *others),
        numbers={"geometry": numbers_of(geometry(cell, x, hidden, linear=linear))},
        work=rows * of_both * hidden // 8,
        scratch=[(rows * of_both,), (directions * count * PANEL * hidden,)],
        before=[Product(Matrix("weighted", rows, of_both), *factors, "right")],
    )


def input_gradient(table: str, x: Sizes, w: Sizes, dx: Any) -> list[Product]:
    """dX, from the gradient of X W^T for both directions."""
    rows, columns = x[0] * x[1], w[0] * w[1]
    product = Product(Matrix("dx", rows, x[2]), Matrix(table, rows, columns), Matrix("w", columns, x[2]))
    return [] if dx is None else [product]


def distance(strides: Strides, t: int, d: int, n: int) -> int:
    """Return the number of a row in a tensor, for a step, a direction and a row of the batch."""
    return t * strides.step + d * strides.direction + n * strides.row


class Share(NamedTuple):
    """The rows of the batch that a task takes through the steps of a direction."""

    direction: int
    first: int
    rows: int
    reverse: bool


def share_of(task: int, geometry: Geometry) -> Share:
    rows = geometry.rows
    blocks = (geometry.batch + rows - 1) // rows
    d, first = task // blocks, task % blocks * rows
    return Share(d, first, min(rows, geometry.batch - first), d == 1 or geometry.reverse == 1)


def step_of(step: int, share: Share, geometry: Geometry) -> int:
    """Return the place of a step in the sequence."""
    return geometry.steps - 1 - step if share.reverse else step


def slice_of(rows: np.ndarray, i: int, width: int) -> np.ndarray:
    """Return a row of a matrix whose rows have `width` elements."""
    return rows[i * width : (i + 1) * width]


def place_in(strides: Strides, t: int, i: int, share: Share) -> int:
    """Return the number of row i of a share in a tensor, for a step."""
    return distance(strides, t, share.direction, share.first + i)


def load_states(
    states: np.ndarray, width: int, initial: np.ndarray, share: Share, geometry: Geometry
) -> None:
    """Copy the states before the first step, or the gradients after the last one, unless they are absent."""
    for i in range(share.rows if len(initial) > 0 else 0):
        copy_row(
            slice_of(states, i, width),
            slice_of(initial, place_in(geometry.single, 0, i, share), geometry.hidden),
        )


def store_states(final: np.ndarray, states: np.ndarray, width: int, share: Share, geometry: Geometry) -> None:
    """Copy the states after the last step, or the gradients before the first one, if they are wanted."""
    for i in range(share.rows if len(final) > 0 else 0):
        place = place_in(geometry.single, 0, i, share)
        copy_row(slice_of(final, place, geometry.hidden), slice_of(states, i, width))


def state_before(
    saved: np.ndarray,
    initial: np.ndarray,
    zeros: np.ndarray,
    t: int,
    i: int,
    share: Share,
    geometry: Geometry,
) -> np.ndarray:
    """Return the state of a row before a step: a saved one, the initial one, or zeros."""
    if t != (geometry.steps - 1 if share.reverse else 0):
        step = geometry.states.step
        return slice_of(
            saved,
            place_in(geometry.states, t, i, share) + (step if share.reverse else -step),
            geometry.hidden,
        )
    if len(initial) > 0:
        return slice_of(initial, place_in(geometry.single, 0, i, share), geometry.hidden)
    return zeros


def tanh_of_sum(to: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    for k in range(len(to)):
        to[k] = tanh(a[k] + b[k] + c[k])


def sigmoid_of_sum(to: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    for k in range(len(to)):
        to[k] = sigmoid(a[k] + b[k] + c[k])


def pack_transposed(panel: np.ndarray, matrix: np.ndarray, first: int, terms: int, count: int) -> None:
    """Copy `count` rows of a matrix, each with `terms` elements, into the columns of a panel."""
    for j in range(PANEL):
        if j < count:
            row = matrix[first + j * terms : first + (j + 1) * terms]
            for k in range(terms):
                panel[k * PANEL + j] = row[k]
        else:
            for k in range(terms):
                panel[k * PANEL + j] = 0.0


def pack(panel: np.ndarray, matrix: np.ndarray, first: int, stride: int, terms: int, count: int) -> None:
    """Copy `count` columns of `terms` rows of a matrix into a panel."""
    for k in range(terms):
        to, row = panel[k * PANEL : (k + 1) * PANEL], matrix[first + k * stride : first + k * stride + count]
        for j in range(count):
            to[j] = row[j]
        for j in range(count, PANEL):
            to[j] = 0.0


def multiply(
    sums: np.ndarray,
    stride: int,
    left: np.ndarray,
    left_stride: int,
    packed: np.ndarray,
    terms: int,
    rows: int,
) -> None:
    """Multiply rows with a matrix in panels: its columns, padded to whole panels, become rows of the sums."""
    for p in range(len(packed) // (terms * PANEL)):
        panel = packed[p * terms * PANEL : (p + 1) * terms * PANEL]
        multiply_panel(sums[p * PANEL :], stride, Factor(left, left_stride, 1), panel, terms, rows, 0)


def multiply_transposed(
    dw: np.ndarray,
    inputs: np.ndarray,
    dr: np.ndarray,
    states: np.ndarray,
    da: np.ndarray,
    stride: int,
    count: int,
    geometry: Geometry,
) -> bool:
    """Multiply some columns of da, transposed, with X and with states, which are in panels.

    dw[i * inputs + k] = sum over t of da[t * stride + i] * (row t, column k of X)

    and in the same way dr, unless they are empty. Returns whether there is not enough memory.
    """
    rows, size, hidden = geometry.steps * geometry.batch, geometry.inputs, geometry.hidden
    width = (size + PANEL - 1) // PANEL * PANEL if len(dw) > 0 else 0
    state_width = (hidden + PANEL - 1) // PANEL * PANEL if len(dr) > 0 else 0
    memory = allocate(count * (_TERMS + width + state_width))
    if len(memory) == 0:
        return True
    block, sums = memory[: count * _TERMS], memory[count * _TERMS : count * (_TERMS + width)]
    state_sums = memory[count * (_TERMS + width) :]
    for start in range(0, rows, _TERMS):
        terms = min(_TERMS, rows - start)
        for t in range(terms):
            copy_row(
                block[t * count : (t + 1) * count], da[(start + t) * stride : (start + t) * stride + count]
            )
        for p in range((width + state_width) // PANEL):
            # First the panels of X, then the panels of the states.
            own, to, step = p - width // PANEL, sums, width
            factor = inputs
            if own < 0:
                own = p
            else:
                to, step, factor = state_sums, state_width, states
            panel = factor[(own * rows + start) * PANEL : (own * rows + start + terms) * PANEL]
            multiply_panel(to[own * PANEL :], step, Factor(block, 1, count), panel, terms, count, start)
    for i in range(count if width > 0 else 0):
        copy_row(dw[i * size : (i + 1) * size], sums[i * width : i * width + size])
    for i in range(count if state_width > 0 else 0):
        copy_row(dr[i * hidden : (i + 1) * hidden], state_sums[i * state_width : i * state_width + hidden])
    release(memory)
    return False


def pack_inputs(number: int, x: np.ndarray, inputs: np.ndarray, geometry: Geometry) -> None:
    """Copy some columns of X into a panel."""
    size, rows = geometry.inputs, geometry.steps * geometry.batch
    panel = inputs[number * rows * PANEL : (number + 1) * rows * PANEL]
    pack(panel, x, number * PANEL, size, rows, min(PANEL, size - number * PANEL))


def put_into_panels(panels: np.ndarray, row: int, rows: int, values: np.ndarray) -> None:
    """Copy a row into its place in a matrix in panels with `rows` rows."""
    for p in range((len(values) + PANEL - 1) // PANEL):
        part = values[p * PANEL : (p + 1) * PANEL]
        to = panels[(p * rows + row) * PANEL : (p * rows + row + 1) * PANEL]
        for k in range(len(part)):
            to[k] = part[k]
        for k in range(len(part), PANEL):
            to[k] = 0.0


def sum_columns(to: np.ndarray, first: int, end: int, table: np.ndarray, stride: int, rows: int) -> None:
    """Add up the rows of a table in up to SUMS columns."""
    sums, count = doubles(), end - first
    for k in range(count):
        sums[k] = double(0.0)
    for i in range(rows):
        row = table[i * stride + first : i * stride + end]
        for k in range(count):
            sums[k] += double(row[k])
    for k in range(count):
        to[first + k] = sums[k]
