"""GRUTraining and GRUGrad for Numba (see ortgrad.ops.recurrent._compiled and gru for the formulas)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ortgrad.compiled.functions import PANEL, SUMS, allocate, copy_row, release
from ortgrad.compiled.mathematics import sigmoid, tanh
from ortgrad.operators.compiled import Plan
from ortgrad.operators.records import numbers_of
from ortgrad.ops._rows import add_to, fill_row
from ortgrad.ops.recurrent import _compiled as shared
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


def forward_plan(cell: Any, x: Sizes, w: Sizes, r: Sizes, b: Any, lengths: Any, *others: Any) -> Plan | None:
    """Return the plan of GRUTraining; None if the kernel does not support the case."""
    directions, columns, hidden = r
    if not shared.is_supported(cell, lengths) or not columns * x[0] * x[1] * x[2]:
        return None
    count, linear = _panels(hidden, cell.linear_before_reset), cell.linear_before_reset != 0
    return Plan(
        tasks=(directions * count, shared.task_count(x, cell)),
        views=shared.flat(x, w, r, b, lengths, *others),
        numbers={"geometry": numbers_of(shared.geometry(cell, x, hidden, linear=linear))},
        work=x[0] * x[1] * directions * columns * hidden // 8,
        scratch=[(x[0] * x[1] * directions * columns,), (directions * count * PANEL * hidden,)],
        before=shared.projection(x, w),
    )


def _panels(hidden: int, linear: bool) -> int:
    """Return the number of panels of R^T: those of all gates, or of z and r and then of h."""
    if linear:
        return (3 * hidden + PANEL - 1) // PANEL
    return (2 * hidden + PANEL - 1) // PANEL + (hidden + PANEL - 1) // PANEL


def gru_panels(task: int, r: np.ndarray, packed: np.ndarray, geometry: Geometry) -> None:
    """Copy some rows of R into a panel of R^T."""
    hidden, linear = geometry.hidden, geometry.linear
    count, of_zr = _panels(hidden, linear), (2 * hidden + PANEL - 1) // PANEL
    d, number = task // count, task % count
    first, end = number * PANEL, 3 * hidden
    if not linear:
        end = 2 * hidden
        if number >= of_zr:
            first, end = 2 * hidden + (number - of_zr) * PANEL, 3 * hidden
    panel = packed[task * hidden * PANEL : (task + 1) * hidden * PANEL]
    pack_transposed(panel, r, (d * 3 * hidden + first) * hidden, hidden, min(PANEL, end - first))


def gru_steps(
    task: int,
    b: np.ndarray,
    h0: np.ndarray,
    hall: np.ndarray,
    hfinal: np.ndarray,
    zrh: np.ndarray,
    weighted: np.ndarray,
    packed: np.ndarray,
    geometry: Geometry,
) -> bool:
    """Take some rows of the batch through all steps."""
    steps, batch, hidden, rows = geometry.steps, geometry.batch, geometry.hidden, geometry.rows
    blocks, columns, linear = (batch + rows - 1) // rows, 3 * hidden, geometry.linear
    d, first = task // blocks, task % blocks * rows
    reverse, count = d == 1 or geometry.reverse == 1, min(rows, batch - first)
    stride = _panels(hidden, linear) * PANEL
    # Where the product for h is.
    of_h = 2 * hidden if linear else (2 * hidden + PANEL - 1) // PANEL * PANEL
    memory = allocate(count * (2 * hidden + stride + columns) + 4 * hidden)
    if len(memory) == 0:
        return True
    fill_row(memory, 0.0)
    states, products = memory[: count * hidden], memory[count * hidden : 2 * count * hidden]
    sums = memory[2 * count * hidden : count * (2 * hidden + stride)]
    unsaved = memory[count * (2 * hidden + stride) : count * (2 * hidden + stride + columns)]
    # Of X W^T; and of H Rh^T, if linear.
    bias = memory[count * (2 * hidden + stride + columns) :]
    late = bias[columns:]
    if len(b) > 0:
        add_to(bias, b[d * 2 * columns : (d * 2 + 1) * columns])
        recurrent = b[(d * 2 + 1) * columns : (d * 2 + 2) * columns]
        add_to(bias, recurrent[: 2 * hidden])
        add_to(late if linear else bias[2 * hidden :], recurrent[2 * hidden :])
    if len(h0) > 0:
        for i in range(count):
            place = distance(geometry.single, 0, d, first + i) * hidden
            copy_row(states[i * hidden : (i + 1) * hidden], h0[place : place + hidden])
    panels = packed[d * stride * hidden : (d + 1) * stride * hidden]
    for step in range(steps):
        t = steps - 1 - step if reverse else step
        multiply(sums, stride, states, hidden, panels if linear else panels[: of_h * hidden], hidden, count)
        for i in range(count):
            place = distance(geometry.table, t, d, first + i) * columns
            a, recurrent = weighted[place : place + columns], sums[i * stride : (i + 1) * stride]
            saved = distance(geometry.states, t, d, first + i)
            gates = unsaved[i * columns : (i + 1) * columns]
            if len(zrh) > 0:
                gates = zrh[saved * columns : (saved + 1) * columns]
            for k in range(2 * hidden):
                gates[k] = sigmoid(a[k] + recurrent[k] + bias[k])
            if linear:
                h, inputs, q = gates[2 * hidden :], a[2 * hidden :], recurrent[of_h : of_h + hidden]
                _candidate(h, inputs, bias[2 * hidden : columns], gates[hidden : 2 * hidden], q, late)
            else:
                state, product = (
                    states[i * hidden : (i + 1) * hidden],
                    products[i * hidden : (i + 1) * hidden],
                )
                _multiply_rows(product, gates[hidden : 2 * hidden], state)
        if not linear:
            multiply(sums[of_h:], stride, products, hidden, panels[of_h * hidden :], hidden, count)
        for i in range(count):
            saved = distance(geometry.states, t, d, first + i)
            gates = unsaved[i * columns : (i + 1) * columns]
            if len(zrh) > 0:
                gates = zrh[saved * columns : (saved + 1) * columns]
            if not linear:
                place = distance(geometry.table, t, d, first + i) * columns
                a, recurrent = weighted[place : place + columns], sums[i * stride : (i + 1) * stride]
                _tanh_of_sum(
                    gates[2 * hidden :], a[2 * hidden :], recurrent[of_h:], bias[2 * hidden : columns]
                )
            state = states[i * hidden : (i + 1) * hidden]
            _new_state(state, gates[:hidden], gates[2 * hidden :])
            if len(hall) > 0:
                copy_row(hall[saved * hidden : (saved + 1) * hidden], state)
    if len(hfinal) > 0:
        for i in range(count):
            place = distance(geometry.single, 0, d, first + i) * hidden
            copy_row(hfinal[place : place + hidden], states[i * hidden : (i + 1) * hidden])
    release(memory)
    return False


def _multiply_rows(to: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    for k in range(len(to)):
        to[k] = a[k] * b[k]


def _candidate(
    h: np.ndarray, a: np.ndarray, bias: np.ndarray, r: np.ndarray, q: np.ndarray, late: np.ndarray
) -> None:
    for k in range(len(h)):
        h[k] = tanh(a[k] + bias[k] + r[k] * (q[k] + late[k]))


def _tanh_of_sum(to: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    for k in range(len(to)):
        to[k] = tanh(a[k] + b[k] + c[k])


def _new_state(state: np.ndarray, z: np.ndarray, h: np.ndarray) -> None:
    for k in range(len(state)):
        state[k] = h[k] + z[k] * (state[k] - h[k])


def backward_plan(cell: Any, x: Sizes, w: Sizes, r: Sizes, b: Any, lengths: Any, *others: Any) -> Plan | None:
    """Return the plan of GRUGrad; None if the kernel does not support the case."""
    dx, dw, dr, db = others[-5:-1]
    directions, columns, hidden = r
    rows, linear = x[0] * x[1], cell.linear_before_reset != 0
    if not shared.is_supported(cell, lengths) or not columns * rows * x[2]:
        return None
    panels, of_inputs, size = shared.panels(hidden), shared.panels(x[2]), rows * directions * hidden
    pieces = 0 if dw is None and dr is None else directions * _pieces(hidden)
    previous = (directions * panels * PANEL * rows,)
    return Plan(
        tasks=(
            directions * panels * 2 + of_inputs,
            shared.task_count(x, cell),
            pieces + (0 if db is None else directions * -(-columns // SUMS)),
        ),
        views=shared.flat(x, w, r, b, lengths, *others),
        numbers={"geometry": numbers_of(shared.geometry(cell, x, hidden, pieces, linear))},
        work=x[0] * x[1] * directions * columns * hidden // 8,
        scratch=[
            # Of R, which has all gates as terms; and of Rh^T, if linear.
            (directions * panels * PANEL * (4 if linear else 3) * hidden,),
            (of_inputs * PANEL * rows,),
            (3 * size,),
            (3 * size,),
            previous,
            (0,) if linear else previous,
        ],
        after=shared.input_gradient("table", x, w, dx),
    )


def _pieces(hidden: int) -> int:
    """Return the number of tasks for dW and dR of a direction: none has columns of h and of other gates."""
    return (2 * hidden + COLUMNS - 1) // COLUMNS + (hidden + COLUMNS - 1) // COLUMNS


def gru_grad_panels(
    task: int, x: np.ndarray, r: np.ndarray, packed: np.ndarray, inputs: np.ndarray, geometry: Geometry
) -> None:
    """Copy some columns of R or X, or some rows of Rh, into a panel."""
    hidden, linear = geometry.hidden, geometry.linear
    count = (hidden + PANEL - 1) // PANEL
    if task >= geometry.directions * count * 2:
        pack_inputs(task - geometry.directions * count * 2, x, inputs, geometry)
        return
    second, d, column = task % 2, task // 2 // count, task // 2 % count * PANEL
    size, width = hidden * PANEL, min(PANEL, hidden - column)
    all_panels = count * size * (4 if linear else 3)
    own = packed[d * all_panels : (d + 1) * all_panels]
    matrix, number = r[d * 3 * hidden * hidden : (d + 1) * 3 * hidden * hidden], column // PANEL
    if linear and second:
        panel = own[(3 * count + number) * size : (3 * count + number + 1) * size]
        pack_transposed(panel, matrix, (2 * hidden + column) * hidden, hidden, width)
    elif linear:
        pack(own[number * 3 * size : (number + 1) * 3 * size], matrix, column, hidden, 3 * hidden, width)
    elif second:
        panel = own[(2 * count + number) * size : (2 * count + number + 1) * size]
        pack(panel, matrix, 2 * hidden * hidden + column, hidden, hidden, width)
    else:
        pack(own[number * 2 * size : (number + 1) * 2 * size], matrix, column, hidden, 2 * hidden, width)


def gru_grad_steps(
    task: int,
    b: np.ndarray,
    h0: np.ndarray,
    hall: np.ndarray,
    zrh: np.ndarray,
    dhall: np.ndarray,
    dhfinal: np.ndarray,
    dh0: np.ndarray,
    packed: np.ndarray,
    da: np.ndarray,
    table: np.ndarray,
    previous: np.ndarray,
    reset: np.ndarray,
    geometry: Geometry,
) -> bool:
    """Take the gradients of some rows of the batch back through all steps."""
    steps, batch, hidden, rows = geometry.steps, geometry.batch, geometry.hidden, geometry.rows
    blocks, columns, linear = (batch + rows - 1) // rows, 3 * hidden, geometry.linear
    d, first = task // blocks, task % blocks * rows
    reverse, count = d == 1 or geometry.reverse == 1, min(rows, batch - first)
    stride, between = (hidden + PANEL - 1) // PANEL * PANEL, geometry.separate.row
    memory = allocate(count * (2 * stride + 3 * hidden) + hidden)
    if len(memory) == 0:
        return True
    fill_row(memory, 0.0)
    d_states, olds = memory[: count * hidden], memory[count * hidden : 2 * count * hidden]
    products, rest = memory[2 * count * hidden : 3 * count * hidden], memory[3 * count * hidden :]
    late, sums = rest[:hidden], rest[hidden : hidden + count * stride]
    inner = rest[hidden + count * stride :]
    if linear and len(b) > 0:
        copy_row(late, b[(d * 2 + 2) * columns - hidden : (d * 2 + 2) * columns])
    if len(dhfinal) > 0:
        for i in range(count):
            place = distance(geometry.single, 0, d, first + i) * hidden
            copy_row(d_states[i * hidden : (i + 1) * hidden], dhfinal[place : place + hidden])
    size, split = stride * hidden * (4 if linear else 3), stride * hidden * (3 if linear else 2)
    panels = packed[d * size : (d + 1) * size]
    # The matrices of this direction.
    matrix_rows = steps * batch
    own = da[d * matrix_rows * columns : (d + 1) * matrix_rows * columns]
    own_h = own[2 * matrix_rows * hidden :]
    own_previous = previous[d * stride * matrix_rows : (d + 1) * stride * matrix_rows]
    own_reset = reset[d * stride * matrix_rows : (d + 1) * stride * matrix_rows]
    # The number of gates in a row of `own`.
    width = columns if linear else 2 * hidden
    for step in range(steps):
        t = step if reverse else steps - 1 - step
        start = t == (steps - 1 if reverse else 0)
        for i in range(count):
            old = olds[i * hidden : (i + 1) * hidden]
            if not start:
                saved = distance(geometry.states, t, d, first + i)
                before = saved + (geometry.states.step if reverse else -geometry.states.step)
                copy_row(old, hall[before * hidden : (before + 1) * hidden])
            elif len(h0) > 0:
                initial = distance(geometry.single, 0, d, first + i) * hidden
                copy_row(old, h0[initial : initial + hidden])
            else:
                fill_row(old, 0.0)
        in_own = distance(geometry.separate, t, 0, first)
        if linear:
            # q, without its bias
            multiply(inner, stride, olds, hidden, panels[split:], hidden, count)
        for i in range(count):
            saved = distance(geometry.states, t, d, first + i)
            row = distance(geometry.table, t, d, first + i)
            gates = zrh[saved * columns : (saved + 1) * columns]
            to = table[row * columns : (row + 1) * columns]
            z, r_gate, h = gates[:hidden], gates[hidden : 2 * hidden], gates[2 * hidden :]
            dh = d_states[i * hidden : (i + 1) * hidden]
            old = olds[i * hidden : (i + 1) * hidden]
            if len(dhall) > 0:
                add_to(dh, dhall[saved * hidden : (saved + 1) * hidden])
            _d_candidate(to[2 * hidden :], dh, z, h)
            _d_update(to[:hidden], dh, z, h, old)
            for k in range(hidden):
                dh[k] *= z[k]
            row = in_own + i * between
            put_into_panels(own_previous, row, matrix_rows, old)
            copy_row(own[row * width : row * width + hidden], to[:hidden])
            if linear:
                dar = to[hidden : 2 * hidden]
                _d_reset(dar, to[2 * hidden :], inner[i * stride : i * stride + hidden], late, r_gate)
                copy_row(own[row * width + hidden : row * width + 2 * hidden], dar)
                _multiply_rows(own[row * width + 2 * hidden : (row + 1) * width], to[2 * hidden :], r_gate)
            else:
                copy_row(own_h[row * hidden : (row + 1) * hidden], to[2 * hidden :])
                product = products[i * hidden : (i + 1) * hidden]
                _multiply_rows(product, r_gate, old)
                put_into_panels(own_reset, row, matrix_rows, product)
        if not linear:
            # dah Rh
            multiply(inner, stride, own_h[in_own * hidden :], between * hidden, panels[split:], hidden, count)
            for i in range(count):
                saved = distance(geometry.states, t, d, first + i)
                r_gate = zrh[saved * columns + hidden : saved * columns + 2 * hidden]
                through, dh = inner[i * stride : i * stride + hidden], d_states[i * hidden : (i + 1) * hidden]
                old = olds[i * hidden : (i + 1) * hidden]
                row = distance(geometry.table, t, d, first + i)
                dar = table[row * columns + hidden : row * columns + 2 * hidden]
                # The late bias is zero.
                _d_reset(dar, through, old, late, r_gate)
                row = in_own + i * between
                copy_row(own[row * width + hidden : (row + 1) * width], dar)
                for k in range(hidden):
                    dh[k] += through[k] * r_gate[k]
        multiply(sums, stride, own[in_own * width :], between * width, panels[:split], width, count)
        for i in range(count):
            add_to(d_states[i * hidden : (i + 1) * hidden], sums[i * stride : i * stride + hidden])
    if len(dh0) > 0:
        for i in range(count):
            place = distance(geometry.single, 0, d, first + i) * hidden
            copy_row(dh0[place : place + hidden], d_states[i * hidden : (i + 1) * hidden])
    release(memory)
    return False


def _d_candidate(to: np.ndarray, dh: np.ndarray, z: np.ndarray, h: np.ndarray) -> None:
    for k in range(len(to)):
        to[k] = dh[k] * (1.0 - z[k]) * (1.0 - h[k] * h[k])


def _d_update(to: np.ndarray, dh: np.ndarray, z: np.ndarray, h: np.ndarray, old: np.ndarray) -> None:
    for k in range(len(to)):
        to[k] = dh[k] * (old[k] - h[k]) * z[k] * (1.0 - z[k])


def _d_reset(to: np.ndarray, d: np.ndarray, a: np.ndarray, b: np.ndarray, r: np.ndarray) -> None:
    for k in range(len(to)):
        to[k] = d[k] * (a[k] + b[k]) * r[k] * (1.0 - r[k])


def gru_grad_weights(
    task: int,
    dw: np.ndarray,
    dr: np.ndarray,
    db: np.ndarray,
    inputs: np.ndarray,
    da: np.ndarray,
    table: np.ndarray,
    previous: np.ndarray,
    reset: np.ndarray,
    geometry: Geometry,
) -> bool:
    """Compute dR and dW of some columns of the gates, or add those up: the gradients of the biases."""
    hidden, directions, linear = geometry.hidden, geometry.directions, geometry.linear
    columns, rows, size = 3 * hidden, geometry.steps * geometry.batch, geometry.inputs
    if task < geometry.pieces:
        pieces, of_zr = _pieces(hidden), (2 * hidden + COLUMNS - 1) // COLUMNS
        d, first, width = task // pieces, task % pieces * COLUMNS, (hidden + PANEL - 1) // PANEL * PANEL
        is_h = task % pieces >= of_zr
        first = 2 * hidden + (task % pieces - of_zr) * COLUMNS if is_h else first
        count = min(COLUMNS, (3 if is_h else 2) * hidden - first)
        of_x, of_states = dw[(d * columns + first) * size :], dr[(d * columns + first) * hidden :]
        # The matrices of this direction: what dR is made of, and how many columns that has.
        states, own = previous[d * width * rows : (d + 1) * width * rows], da[d * rows * columns :]
        stride = columns if linear else 2 * hidden
        if not is_h:
            own = own[first:]
            return multiply_transposed(of_x, inputs, of_states, states, own, stride, count, geometry)
        if linear:
            own = own[first:]
        else:
            states, stride = reset[d * width * rows : (d + 1) * width * rows], hidden
            own = own[2 * rows * hidden + first - 2 * hidden :]
        left, none = table[d * columns + first :], dw[:0]
        failed = multiply_transposed(of_x, inputs, none, states, left, directions * columns, count, geometry)
        return multiply_transposed(none, inputs, of_states, states, own, stride, count, geometry) or failed
    task -= geometry.pieces
    pieces = (columns + SUMS - 1) // SUMS
    d, column = task // pieces, task % pieces * SUMS
    end = min(column + SUMS, columns)
    biases = db[d * 2 * columns : (d * 2 + 1) * columns]
    recurrent = db[(d * 2 + 1) * columns : (d * 2 + 2) * columns]
    sum_columns(biases, column, end, table[d * columns :], directions * columns, rows)
    if linear:
        sum_columns(recurrent, column, end, da[d * rows * columns :], columns, rows)
    else:
        copy_row(recurrent[column:end], biases[column:end])
    return False
