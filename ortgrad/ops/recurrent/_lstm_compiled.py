"""LSTMTraining and LSTMGrad for Numba (see ortgrad.ops.recurrent._compiled and lstm for the formulas)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ortgrad.compiled.functions import PANEL, SUMS, allocate, copy_row, release
from ortgrad.compiled.mathematics import sigmoid, tanh
from ortgrad.operators.compiled import Plan
from ortgrad.operators.records import numbers_of
from ortgrad.ops._rows import add_to, fill_row
from ortgrad.ops.recurrent import _compiled as shared
from ortgrad.ops.recurrent._cell import Cell
from ortgrad.ops.recurrent._compiled import (
    COLUMNS,
    Geometry,
    distance,
    multiply,
    multiply_transposed,
    pack,
    pack_inputs,
    pack_transposed,
    put_into_panels,
    sum_columns,
)

if TYPE_CHECKING:
    from ortgrad.ops.recurrent._compiled import Sizes


def forward_plan(cell: Cell, x: Sizes, w: Sizes, r: Sizes, b: Any, lengths: Any, *others: Any) -> Plan | None:
    """Return the plan of LSTMTraining; None if the kernel does not support the case."""
    p = others[2]
    directions, columns, hidden = r
    if not shared.is_supported(cell, lengths, p) or not columns * x[0] * x[1] * x[2]:
        return None
    count = shared.panels(columns)
    return Plan(
        tasks=(directions * count, shared.task_count(x, cell)),
        views=shared.flat(x, w, r, b, lengths, *others),
        numbers={"geometry": numbers_of(shared.geometry(cell, x, hidden))},
        work=x[0] * x[1] * directions * columns * hidden // 8,
        scratch=[(x[0] * x[1] * directions * columns,), (directions * count * PANEL * hidden,)],
        before=shared.projection(x, w),
    )


def lstm_panels(task: int, r: np.ndarray, packed: np.ndarray, geometry: Geometry) -> None:
    """Copy some rows of R into a panel of R^T."""
    hidden = geometry.hidden
    count = (4 * hidden + PANEL - 1) // PANEL
    d, column = task // count, task % count * PANEL
    panel = packed[task * hidden * PANEL : (task + 1) * hidden * PANEL]
    pack_transposed(panel, r, (d * 4 * hidden + column) * hidden, hidden, min(PANEL, 4 * hidden - column))


def lstm_steps(
    task: int,
    b: np.ndarray,
    h0: np.ndarray,
    c0: np.ndarray,
    hall: np.ndarray,
    hfinal: np.ndarray,
    cfinal: np.ndarray,
    call: np.ndarray,
    iofc: np.ndarray,
    weighted: np.ndarray,
    packed: np.ndarray,
    geometry: Geometry,
) -> bool:
    """Take some rows of the batch through all steps."""
    steps, batch, hidden, rows = geometry.steps, geometry.batch, geometry.hidden, geometry.rows
    blocks, columns = (batch + rows - 1) // rows, 4 * hidden
    d, first = task // blocks, task % blocks * rows
    reverse, count = d == 1 or geometry.reverse == 1, min(rows, batch - first)
    stride = (columns + PANEL - 1) // PANEL * PANEL
    memory = allocate(count * (2 * hidden + stride) + 2 * columns)
    if len(memory) == 0:
        return True
    states, cells = memory[: count * hidden], memory[count * hidden : 2 * count * hidden]
    sums = memory[2 * count * hidden : count * (2 * hidden + stride)]
    bias = memory[count * (2 * hidden + stride) : count * (2 * hidden + stride) + columns]
    unsaved = memory[count * (2 * hidden + stride) + columns :]
    fill_row(bias, 0.0)
    if len(b) > 0:
        add_to(bias, b[d * 2 * columns : (d * 2 + 1) * columns])
        add_to(bias, b[(d * 2 + 1) * columns : (d * 2 + 2) * columns])
    fill_row(memory[: 2 * count * hidden], 0.0)
    for i in range(count):
        place = distance(geometry.single, 0, d, first + i) * hidden
        if len(h0) > 0:
            copy_row(states[i * hidden : (i + 1) * hidden], h0[place : place + hidden])
        if len(c0) > 0:
            copy_row(cells[i * hidden : (i + 1) * hidden], c0[place : place + hidden])
    panels = packed[d * stride * hidden : (d + 1) * stride * hidden]
    for step in range(steps):
        t = steps - 1 - step if reverse else step
        multiply(sums, stride, states, hidden, panels, hidden, count)
        for i in range(count):
            place = distance(geometry.table, t, d, first + i) * columns
            a, recurrent = weighted[place : place + columns], sums[i * stride : i * stride + columns]
            saved = distance(geometry.states, t, d, first + i)
            gates = iofc[saved * columns : (saved + 1) * columns] if len(iofc) > 0 else unsaved
            state, cell = states[i * hidden : (i + 1) * hidden], cells[i * hidden : (i + 1) * hidden]
            for k in range(3 * hidden):
                gates[k] = sigmoid(a[k] + recurrent[k] + bias[k])
            _tanh_of_sum(gates[3 * hidden :], a[3 * hidden :], recurrent[3 * hidden :], bias[3 * hidden :])
            _new_cell(cell, gates[:hidden], gates[2 * hidden : 3 * hidden], gates[3 * hidden :])
            _new_state(state, cell, gates[hidden : 2 * hidden])
            if len(hall) > 0:
                copy_row(hall[saved * hidden : (saved + 1) * hidden], state)
            if len(call) > 0:
                copy_row(call[saved * hidden : (saved + 1) * hidden], cell)
    for i in range(count):
        place = distance(geometry.single, 0, d, first + i) * hidden
        if len(hfinal) > 0:
            copy_row(hfinal[place : place + hidden], states[i * hidden : (i + 1) * hidden])
        if len(cfinal) > 0:
            copy_row(cfinal[place : place + hidden], cells[i * hidden : (i + 1) * hidden])
    release(memory)
    return False


def _tanh_of_sum(to: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    for k in range(len(to)):
        to[k] = tanh(a[k] + b[k] + c[k])


def _new_cell(cell: np.ndarray, i: np.ndarray, f: np.ndarray, c: np.ndarray) -> None:
    for k in range(len(cell)):
        cell[k] = f[k] * cell[k] + i[k] * c[k]


def _new_state(state: np.ndarray, cell: np.ndarray, o: np.ndarray) -> None:
    for k in range(len(state)):
        state[k] = o[k] * tanh(cell[k])


def backward_plan(cell: Cell, x: Sizes, w: Sizes, r: Sizes, lengths: Any, *others: Any) -> Plan | None:
    """Return the plan of LSTMGrad; None if the kernel does not support the case."""
    p, dx, dw, dr, db, dp = (*others[-8:-3], others[-1])
    directions, columns, hidden = r
    rows = x[0] * x[1]
    if not shared.is_supported(cell, lengths, p, dp) or not columns * rows * x[2]:
        return None
    panels, of_inputs, single = shared.panels(hidden), shared.panels(x[2]), directions == 1
    pieces = 0 if dw is None and dr is None else directions * -(-columns // COLUMNS)
    return Plan(
        tasks=(
            directions * panels + of_inputs,
            shared.task_count(x, cell),
            pieces + (0 if db is None else directions * -(-columns // SUMS)),
        ),
        views=shared.flat(x, w, r, lengths, *others),
        numbers={"geometry": numbers_of(shared.geometry(cell, x, hidden, pieces))},
        work=x[0] * x[1] * directions * columns * hidden // 8,
        scratch=[
            (directions * panels * PANEL * columns,),
            (of_inputs * PANEL * rows,),
            (directions * columns * rows,),
            # With one direction, its matrix is the table of both.
            (0 if single else directions * columns * rows,),
            (directions * panels * PANEL * rows,),
        ],
        after=shared.input_gradient("da" if single else "table", x, w, dx),
    )


def lstm_grad_panels(
    task: int, x: np.ndarray, r: np.ndarray, packed: np.ndarray, inputs: np.ndarray, geometry: Geometry
) -> None:
    """Copy some columns of R, or of X, into a panel."""
    hidden = geometry.hidden
    count = (hidden + PANEL - 1) // PANEL
    if task >= geometry.directions * count:
        pack_inputs(task - geometry.directions * count, x, inputs, geometry)
        return
    d, column, terms = task // count, task % count * PANEL, 4 * hidden
    panel = packed[task * terms * PANEL : (task + 1) * terms * PANEL]
    pack(panel, r, d * terms * hidden + column, hidden, terms, min(PANEL, hidden - column))


def lstm_grad_steps(
    task: int,
    h0: np.ndarray,
    c0: np.ndarray,
    hall: np.ndarray,
    call: np.ndarray,
    iofc: np.ndarray,
    dhall: np.ndarray,
    dhfinal: np.ndarray,
    dcfinal: np.ndarray,
    dh0: np.ndarray,
    dc0: np.ndarray,
    packed: np.ndarray,
    da: np.ndarray,
    table: np.ndarray,
    previous: np.ndarray,
    geometry: Geometry,
) -> bool:
    """Take the gradients of some rows of the batch back through all steps."""
    steps, batch, hidden, rows = geometry.steps, geometry.batch, geometry.hidden, geometry.rows
    blocks, columns = (batch + rows - 1) // rows, 4 * hidden
    d, first = task // blocks, task % blocks * rows
    reverse, count = d == 1 or geometry.reverse == 1, min(rows, batch - first)
    stride = (hidden + PANEL - 1) // PANEL * PANEL
    memory = allocate(count * (stride + hidden) + 2 * hidden)
    if len(memory) == 0:
        return True
    fill_row(memory, 0.0)
    # The gradients of the states, which are also the sums of a product, and of the cells.
    d_states, d_cells = memory[: count * stride], memory[count * stride : count * (stride + hidden)]
    zeros = memory[count * (stride + hidden) : count * (stride + hidden) + hidden]
    activated = memory[count * (stride + hidden) + hidden :]
    for i in range(count):
        place = distance(geometry.single, 0, d, first + i) * hidden
        if len(dhfinal) > 0:
            copy_row(d_states[i * stride : i * stride + hidden], dhfinal[place : place + hidden])
        if len(dcfinal) > 0:
            copy_row(d_cells[i * hidden : (i + 1) * hidden], dcfinal[place : place + hidden])
    panels = packed[d * stride * columns : (d + 1) * stride * columns]
    matrix_rows = steps * batch
    own_previous = previous[d * stride * matrix_rows : (d + 1) * stride * matrix_rows]
    for step in range(steps):
        t = step if reverse else steps - 1 - step
        start = t == (steps - 1 if reverse else 0)
        for i in range(count):
            saved, place = (
                distance(geometry.states, t, d, first + i),
                distance(geometry.separate, t, d, first + i),
            )
            initial = distance(geometry.single, 0, d, first + i) * hidden
            before = saved + (geometry.states.step if reverse else -geometry.states.step)
            dh, dc = d_states[i * stride : i * stride + hidden], d_cells[i * hidden : (i + 1) * hidden]
            if len(dhall) > 0:
                add_to(dh, dhall[saved * hidden : (saved + 1) * hidden])
            state_before, cell_before = zeros, zeros
            if not start:
                state_before = hall[before * hidden : (before + 1) * hidden]
                cell_before = call[before * hidden : (before + 1) * hidden]
            else:
                if len(h0) > 0:
                    state_before = h0[initial : initial + hidden]
                if len(c0) > 0:
                    cell_before = c0[initial : initial + hidden]
            put_into_panels(own_previous, place - d * matrix_rows, matrix_rows, state_before)
            gates, cell = (
                iofc[saved * columns : (saved + 1) * columns],
                call[saved * hidden : (saved + 1) * hidden],
            )
            of_gates = da[place * columns : (place + 1) * columns]
            _through_state(activated, cell)
            o = gates[hidden : 2 * hidden]
            _d_output(of_gates[hidden : 2 * hidden], dh, activated, o)
            _into_cell(dc, dh, activated, o)
            i_gate, f_gate, c_gate = gates[:hidden], gates[2 * hidden : 3 * hidden], gates[3 * hidden :]
            _d_gate(of_gates[:hidden], dc, c_gate, i_gate)
            _d_gate(of_gates[2 * hidden : 3 * hidden], dc, cell_before, f_gate)
            _d_candidate(of_gates[3 * hidden :], dc, i_gate, c_gate)
            for k in range(hidden):
                dc[k] *= f_gate[k]
            if len(table) > 0:
                row = distance(geometry.table, t, d, first + i)
                copy_row(table[row * columns : (row + 1) * columns], of_gates)
        place, between = distance(geometry.separate, t, d, first), geometry.separate.row * columns
        multiply(d_states, stride, da[place * columns :], between, panels, columns, count)
    for i in range(count):
        place = distance(geometry.single, 0, d, first + i) * hidden
        if len(dh0) > 0:
            copy_row(dh0[place : place + hidden], d_states[i * stride : i * stride + hidden])
        if len(dc0) > 0:
            copy_row(dc0[place : place + hidden], d_cells[i * hidden : (i + 1) * hidden])
    release(memory)
    return False


def _through_state(activated: np.ndarray, cell: np.ndarray) -> None:
    for k in range(len(cell)):
        activated[k] = tanh(cell[k])


def _d_output(to: np.ndarray, dh: np.ndarray, activated: np.ndarray, o: np.ndarray) -> None:
    for k in range(len(to)):
        to[k] = dh[k] * activated[k] * o[k] * (1.0 - o[k])


def _into_cell(dc: np.ndarray, dh: np.ndarray, activated: np.ndarray, o: np.ndarray) -> None:
    for k in range(len(dc)):
        dc[k] += dh[k] * o[k] * (1.0 - activated[k] * activated[k])


def _d_gate(to: np.ndarray, dc: np.ndarray, factor: np.ndarray, gate: np.ndarray) -> None:
    for k in range(len(to)):
        to[k] = dc[k] * factor[k] * gate[k] * (1.0 - gate[k])


def _d_candidate(to: np.ndarray, dc: np.ndarray, i: np.ndarray, c: np.ndarray) -> None:
    for k in range(len(to)):
        to[k] = dc[k] * i[k] * (1.0 - c[k] * c[k])


def lstm_grad_weights(
    task: int,
    dw: np.ndarray,
    dr: np.ndarray,
    db: np.ndarray,
    inputs: np.ndarray,
    da: np.ndarray,
    previous: np.ndarray,
    geometry: Geometry,
) -> bool:
    """Compute dR and dW of some columns of da, or add them up: both biases have this gradient."""
    hidden, rows, size = geometry.hidden, geometry.steps * geometry.batch, geometry.inputs
    columns = 4 * hidden
    if task < geometry.pieces:
        pieces, width = (columns + COLUMNS - 1) // COLUMNS, (hidden + PANEL - 1) // PANEL * PANEL
        d, first = task // pieces, task % pieces * COLUMNS
        of_x, of_states = dw[(d * columns + first) * size :], dr[(d * columns + first) * hidden :]
        states, own = previous[d * width * rows : (d + 1) * width * rows], da[d * rows * columns + first :]
        count = min(COLUMNS, columns - first)
        return multiply_transposed(of_x, inputs, of_states, states, own, columns, count, geometry)
    task -= geometry.pieces
    pieces = (columns + SUMS - 1) // SUMS
    d, column = task // pieces, task % pieces * SUMS
    own, end = db[d * 2 * columns : (d * 2 + 1) * columns], min(column + SUMS, columns)
    sum_columns(own, column, end, da[d * rows * columns :], columns, rows)
    copy_row(db[(d * 2 + 1) * columns + column : (d * 2 + 1) * columns + end], own[column:end])
    return False
