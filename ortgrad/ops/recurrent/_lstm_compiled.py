"""LSTMTraining and LSTMGrad for Numba (see ortgrad.ops.recurrent._compiled and lstm for the formulas)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ortgrad.compiled.functions import PANEL, SUMS, allocate, copy_row, release
from ortgrad.compiled.mathematics import tanh
from ortgrad.operators.compiled import Plan
from ortgrad.operators.records import numbers_of
from ortgrad.ops._rows import add_to, fill_row
from ortgrad.ops.recurrent import _compiled as shared
from ortgrad.ops.recurrent._cell import Cell
from ortgrad.ops.recurrent._compiled import COLUMNS, Geometry

if TYPE_CHECKING:
    from ortgrad.ops.recurrent._compiled import Sizes


def forward_plan(cell: Cell, x: Sizes, w: Sizes, r: Sizes, b: Any, lengths: Any, *others: Any) -> Plan | None:
    """Return the plan of LSTMTraining; None if the kernel does not support the case."""
    p = others[2]
    if not shared.is_supported(cell, lengths, p):
        return None
    return shared.forward_plan(cell, shared.panels(r[1]), x, w, r, b, lengths, *others)


def lstm_panels(task: int, r: np.ndarray, packed: np.ndarray, geometry: Geometry) -> None:
    """Copy some rows of R into a panel of R^T."""
    hidden = geometry.hidden
    count = (4 * hidden + PANEL - 1) // PANEL
    d, column = task // count, task % count * PANEL
    panel = packed[task * hidden * PANEL : (task + 1) * hidden * PANEL]
    shared.pack_transposed(
        panel, r, (d * 4 * hidden + column) * hidden, hidden, min(PANEL, 4 * hidden - column)
    )


class Initial(NamedTuple):
    """What the first step reads."""

    b: np.ndarray
    h0: np.ndarray
    c0: np.ndarray


class Results(NamedTuple):
    hall: np.ndarray
    hfinal: np.ndarray
    cfinal: np.ndarray
    call: np.ndarray
    iofc: np.ndarray


def lstm_steps(
    task: int,
    initial: Initial,
    results: Results,
    weighted: np.ndarray,
    packed: np.ndarray,
    geometry: Geometry,
) -> bool:
    """Take some rows of the batch through all steps."""
    hidden, columns, b = geometry.hidden, 4 * geometry.hidden, initial.b
    share = shared.share_of(task, geometry)
    d, count = share.direction, share.rows
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
        add_to(bias, shared.slice_of(b, d * 2, columns))
        add_to(bias, shared.slice_of(b, d * 2 + 1, columns))
    fill_row(memory[: 2 * count * hidden], 0.0)
    shared.load_states(states, hidden, initial.h0, share, geometry)
    shared.load_states(cells, hidden, initial.c0, share, geometry)
    panels = shared.slice_of(packed, d, stride * hidden)
    hall, call, iofc = results.hall, results.call, results.iofc
    for step in range(geometry.steps):
        t = shared.step_of(step, share, geometry)
        shared.multiply(sums, stride, states, hidden, panels, hidden, count)
        for i in range(count):
            a = shared.slice_of(weighted, shared.place_in(geometry.table, t, i, share), columns)
            recurrent = sums[i * stride : i * stride + columns]
            saved = shared.place_in(geometry.states, t, i, share)
            gates = shared.slice_of(iofc, saved, columns) if len(iofc) > 0 else unsaved
            state, cell = shared.slice_of(states, i, hidden), shared.slice_of(cells, i, hidden)
            shared.sigmoid_of_sum(gates[: 3 * hidden], a, recurrent, bias)
            shared.tanh_of_sum(
                gates[3 * hidden :], a[3 * hidden :], recurrent[3 * hidden :], bias[3 * hidden :]
            )
            _new_cell(cell, gates[:hidden], gates[2 * hidden : 3 * hidden], gates[3 * hidden :])
            _new_state(state, cell, gates[hidden : 2 * hidden])
            if len(hall) > 0:
                copy_row(shared.slice_of(hall, saved, hidden), state)
            if len(call) > 0:
                copy_row(shared.slice_of(call, saved, hidden), cell)
    shared.store_states(results.hfinal, states, hidden, share, geometry)
    shared.store_states(results.cfinal, cells, hidden, share, geometry)
    release(memory)
    return False


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
        shared.pack_inputs(task - geometry.directions * count, x, inputs, geometry)
        return
    d, column, terms = task // count, task % count * PANEL, 4 * hidden
    panel = packed[task * terms * PANEL : (task + 1) * terms * PANEL]
    shared.pack(panel, r, d * terms * hidden + column, hidden, terms, min(PANEL, hidden - column))


class Saved(NamedTuple):
    """What the forward operator has read and returned."""

    h0: np.ndarray
    c0: np.ndarray
    hall: np.ndarray
    call: np.ndarray
    iofc: np.ndarray


class Gradients(NamedTuple):
    dhall: np.ndarray
    dhfinal: np.ndarray
    dcfinal: np.ndarray
    dh0: np.ndarray
    dc0: np.ndarray


class Factors(NamedTuple):
    """Matrices of which dX, dW and dR are products."""

    da: np.ndarray
    table: np.ndarray
    previous: np.ndarray


def lstm_grad_steps(
    task: int,
    given: Saved,
    gradients: Gradients,
    packed: np.ndarray,
    factors: Factors,
    geometry: Geometry,
) -> bool:
    """Take the gradients of some rows of the batch back through all steps."""
    hidden, columns, rows = geometry.hidden, 4 * geometry.hidden, geometry.steps * geometry.batch
    share = shared.share_of(task, geometry)
    d, count = share.direction, share.rows
    stride = (hidden + PANEL - 1) // PANEL * PANEL
    memory = allocate(count * (stride + hidden) + 2 * hidden)
    if len(memory) == 0:
        return True
    fill_row(memory, 0.0)
    # The gradients of the states, which are also the sums of a product, and of the cells.
    d_states, d_cells = memory[: count * stride], memory[count * stride : count * (stride + hidden)]
    zeros = memory[count * (stride + hidden) : count * (stride + hidden) + hidden]
    activated = memory[count * (stride + hidden) + hidden :]
    shared.load_states(d_states, stride, gradients.dhfinal, share, geometry)
    shared.load_states(d_cells, hidden, gradients.dcfinal, share, geometry)
    panels = shared.slice_of(packed, d, stride * columns)
    own_previous = shared.slice_of(factors.previous, d, stride * rows)
    da, table = factors.da, factors.table
    for step in range(geometry.steps):
        t = shared.step_of(geometry.steps - 1 - step, share, geometry)
        for i in range(count):
            saved = shared.place_in(geometry.states, t, i, share)
            place = shared.place_in(geometry.separate, t, i, share)
            dh, dc = d_states[i * stride : i * stride + hidden], shared.slice_of(d_cells, i, hidden)
            if len(gradients.dhall) > 0:
                add_to(dh, shared.slice_of(gradients.dhall, saved, hidden))
            before = shared.state_before(given.hall, given.h0, zeros, t, i, share, geometry)
            shared.put_into_panels(own_previous, place - d * rows, rows, before)
            cell_before = shared.state_before(given.call, given.c0, zeros, t, i, share, geometry)
            gates, cell = (
                shared.slice_of(given.iofc, saved, columns),
                shared.slice_of(given.call, saved, hidden),
            )
            of_gates = shared.slice_of(da, place, columns)
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
                row = shared.place_in(geometry.table, t, i, share)
                copy_row(shared.slice_of(table, row, columns), of_gates)
        place, between = shared.place_in(geometry.separate, t, 0, share), geometry.separate.row * columns
        shared.multiply(d_states, stride, da[place * columns :], between, panels, columns, count)
    shared.store_states(gradients.dh0, d_states, stride, share, geometry)
    shared.store_states(gradients.dc0, d_cells, hidden, share, geometry)
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
        return shared.multiply_transposed(of_x, inputs, of_states, states, own, columns, count, geometry)
    task -= geometry.pieces
    pieces = (columns + SUMS - 1) // SUMS
    d, column = task // pieces, task % pieces * SUMS
    own, end = db[d * 2 * columns : (d * 2 + 1) * columns], min(column + SUMS, columns)
    shared.sum_columns(own, column, end, da[d * rows * columns :], columns, rows)
    copy_row(db[(d * 2 + 1) * columns + column : (d * 2 + 1) * columns + end], own[column:end])
    return False
