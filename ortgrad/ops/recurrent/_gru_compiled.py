"""GRUTraining and GRUGrad for Numba (see ortgrad.ops.recurrent._compiled and gru for the formulas)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ortgrad.compiled.functions import PANEL, SUMS, allocate, copy_row, release
from ortgrad.compiled.mathematics import tanh
from ortgrad.operators.compiled import Plan
from ortgrad.operators.records import numbers_of
from ortgrad.ops._rows import add_to, fill_row
from ortgrad.ops.recurrent import _compiled as shared
from ortgrad.ops.recurrent._compiled import COLUMNS, Geometry, Share, distance

if TYPE_CHECKING:
    from ortgrad.ops.recurrent._compiled import Sizes


def forward_plan(cell: Any, x: Sizes, w: Sizes, r: Sizes, b: Any, lengths: Any, *others: Any) -> Plan | None:
    """Return the plan of GRUTraining; None if the kernel does not support the case."""
    if not shared.is_supported(cell, lengths):
        return None
    linear = cell.linear_before_reset != 0
    return shared.forward_plan(cell, _panels(r[2], linear), x, w, r, b, lengths, *others, linear=linear)


def _panels(hidden: int, linear: bool) -> int:
    """Return the number of panels of R^T: of all gates together, or of z and r and then of h."""
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
    shared.pack_transposed(panel, r, (d * 3 * hidden + first) * hidden, hidden, min(PANEL, end - first))


class Initial(NamedTuple):
    """What the first step reads."""

    b: np.ndarray
    h0: np.ndarray


class Results(NamedTuple):
    hall: np.ndarray
    hfinal: np.ndarray
    zrh: np.ndarray


def gru_steps(
    task: int,
    initial: Initial,
    results: Results,
    weighted: np.ndarray,
    packed: np.ndarray,
    geometry: Geometry,
) -> bool:
    """Take some rows of the batch through all steps."""
    hidden, columns, linear = geometry.hidden, 3 * geometry.hidden, geometry.linear
    share = shared.share_of(task, geometry)
    d, count, b = share.direction, share.rows, initial.b
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
        add_to(bias, shared.slice_of(b, d * 2, columns))
        recurrent = shared.slice_of(b, d * 2 + 1, columns)
        add_to(bias, recurrent[: 2 * hidden])
        add_to(late if linear else bias[2 * hidden :], recurrent[2 * hidden :])
    shared.load_states(states, hidden, initial.h0, share, geometry)
    panels = shared.slice_of(packed, d, stride * hidden)
    hall, zrh = results.hall, results.zrh
    for step in range(geometry.steps):
        t = shared.step_of(step, share, geometry)
        of_step = panels if linear else panels[: of_h * hidden]
        shared.multiply(sums, stride, states, hidden, of_step, hidden, count)
        for i in range(count):
            a = shared.slice_of(weighted, shared.place_in(geometry.table, t, i, share), columns)
            recurrent = shared.slice_of(sums, i, stride)
            gates = _gates(zrh, unsaved, t, i, share, geometry)
            shared.sigmoid_of_sum(gates[: 2 * hidden], a, recurrent, bias)
            if linear:
                h, inputs, q = gates[2 * hidden :], a[2 * hidden :], recurrent[of_h : of_h + hidden]
                _candidate(h, inputs, bias[2 * hidden : columns], gates[hidden : 2 * hidden], q, late)
            else:
                state, product = shared.slice_of(states, i, hidden), shared.slice_of(products, i, hidden)
                _multiply_rows(product, gates[hidden : 2 * hidden], state)
        if not linear:
            shared.multiply(sums[of_h:], stride, products, hidden, panels[of_h * hidden :], hidden, count)
        for i in range(count):
            gates = _gates(zrh, unsaved, t, i, share, geometry)
            if not linear:
                a = shared.slice_of(weighted, shared.place_in(geometry.table, t, i, share), columns)
                recurrent = sums[i * stride + of_h : (i + 1) * stride]
                h, inputs = gates[2 * hidden :], a[2 * hidden :]
                shared.tanh_of_sum(h, inputs, recurrent, bias[2 * hidden : columns])
            state = shared.slice_of(states, i, hidden)
            _new_state(state, gates[:hidden], gates[2 * hidden :])
            if len(hall) > 0:
                copy_row(shared.slice_of(hall, shared.place_in(geometry.states, t, i, share), hidden), state)
    shared.store_states(results.hfinal, states, hidden, share, geometry)
    release(memory)
    return False


def _gates(
    saved: np.ndarray, unsaved: np.ndarray, t: int, i: int, share: Share, geometry: Geometry
) -> np.ndarray:
    """Return where the gates of a row are: in the output, or in the memory of the task if it is absent."""
    if len(saved) > 0:
        return shared.slice_of(saved, shared.place_in(geometry.states, t, i, share), 3 * geometry.hidden)
    return shared.slice_of(unsaved, i, 3 * geometry.hidden)


def _multiply_rows(to: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    for k in range(len(to)):
        to[k] = a[k] * b[k]


def _candidate(
    h: np.ndarray, a: np.ndarray, bias: np.ndarray, r: np.ndarray, q: np.ndarray, late: np.ndarray
) -> None:
    for k in range(len(h)):
        h[k] = tanh(a[k] + bias[k] + r[k] * (q[k] + late[k]))


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
        shared.pack_inputs(task - geometry.directions * count * 2, x, inputs, geometry)
        return
    second, d, column = task % 2, task // 2 // count, task // 2 % count * PANEL
    size, width = hidden * PANEL, min(PANEL, hidden - column)
    all_panels = count * size * (4 if linear else 3)
    own = packed[d * all_panels : (d + 1) * all_panels]
    matrix, number = r[d * 3 * hidden * hidden : (d + 1) * 3 * hidden * hidden], column // PANEL
    if linear and second:
        panel = own[(3 * count + number) * size : (3 * count + number + 1) * size]
        shared.pack_transposed(panel, matrix, (2 * hidden + column) * hidden, hidden, width)
    elif linear:
        shared.pack(
            own[number * 3 * size : (number + 1) * 3 * size], matrix, column, hidden, 3 * hidden, width
        )
    elif second:
        panel = own[(2 * count + number) * size : (2 * count + number + 1) * size]
        shared.pack(panel, matrix, 2 * hidden * hidden + column, hidden, hidden, width)
    else:
        shared.pack(
            own[number * 2 * size : (number + 1) * 2 * size], matrix, column, hidden, 2 * hidden, width
        )


class Saved(NamedTuple):
    """What the forward operator has read and returned."""

    b: np.ndarray
    h0: np.ndarray
    hall: np.ndarray
    zrh: np.ndarray


class Gradients(NamedTuple):
    dhall: np.ndarray
    dhfinal: np.ndarray
    dh0: np.ndarray


class Factors(NamedTuple):
    """Matrices of which dX, dW and dR are products. `reset` is r * H, unless the cell is linear."""

    da: np.ndarray
    table: np.ndarray
    previous: np.ndarray
    reset: np.ndarray


class Work(NamedTuple):
    """What a task computes with: rows for its part of the batch, and the factors of its direction."""

    d_states: np.ndarray
    olds: np.ndarray
    products: np.ndarray
    late: np.ndarray  # the bias of q
    inner: np.ndarray  # products with Rh, in rows of whole panels
    own: np.ndarray  # the gradients of z and r, and of q if the cell is linear
    own_h: np.ndarray
    previous: np.ndarray
    reset: np.ndarray


def gru_grad_steps(
    task: int,
    given: Saved,
    gradients: Gradients,
    packed: np.ndarray,
    factors: Factors,
    geometry: Geometry,
) -> bool:
    """Take the gradients of some rows of the batch back through all steps."""
    hidden, linear, rows = geometry.hidden, geometry.linear, geometry.steps * geometry.batch
    share = shared.share_of(task, geometry)
    d, count, columns = share.direction, share.rows, 3 * hidden
    stride, between = (hidden + PANEL - 1) // PANEL * PANEL, geometry.separate.row
    memory = allocate(count * (2 * stride + 3 * hidden) + 2 * hidden)
    if len(memory) == 0:
        return True
    fill_row(memory, 0.0)
    sums, rest = memory[: count * stride], memory[2 * count * stride :]
    late, zeros = rest[3 * count * hidden : (3 * count + 1) * hidden], rest[(3 * count + 1) * hidden :]
    own = shared.slice_of(factors.da, d, rows * columns)
    if linear and len(given.b) > 0:
        copy_row(late, shared.slice_of(given.b, d * 2 + 1, columns)[2 * hidden :])
    work = Work(
        d_states=rest[: count * hidden],
        olds=rest[count * hidden : 2 * count * hidden],
        products=rest[2 * count * hidden : 3 * count * hidden],
        late=late,
        inner=memory[count * stride : 2 * count * stride],
        own=own,
        own_h=own[2 * rows * hidden :],
        previous=shared.slice_of(factors.previous, d, stride * rows),
        reset=shared.slice_of(factors.reset, d, stride * rows),
    )
    shared.load_states(work.d_states, hidden, gradients.dhfinal, share, geometry)
    panels = shared.slice_of(packed, d, stride * hidden * (4 if linear else 3))
    split = stride * hidden * (3 if linear else 2)
    # The number of gates in a row of `own`.
    width = columns if linear else 2 * hidden
    for step in range(geometry.steps):
        t = shared.step_of(geometry.steps - 1 - step, share, geometry)
        place = distance(geometry.separate, t, 0, share.first)
        for i in range(count):
            old = shared.slice_of(work.olds, i, hidden)
            copy_row(old, shared.state_before(given.hall, given.h0, zeros, t, i, share, geometry))
        if linear:
            # q, without its bias
            shared.multiply(work.inner, stride, work.olds, hidden, panels[split:], hidden, count)
        _through_gates(t, given.zrh, gradients.dhall, factors.table, work, share, geometry)
        if not linear:
            # dah Rh
            of_h = work.own_h[place * hidden :]
            shared.multiply(work.inner, stride, of_h, between * hidden, panels[split:], hidden, count)
            _through_reset(t, given.zrh, factors.table, work, share, geometry)
        shared.multiply(sums, stride, own[place * width :], between * width, panels[:split], width, count)
        for i in range(count):
            add_to(shared.slice_of(work.d_states, i, hidden), sums[i * stride : i * stride + hidden])
    shared.store_states(gradients.dh0, work.d_states, hidden, share, geometry)
    release(memory)
    return False


def _through_gates(
    t: int,
    zrh: np.ndarray,
    dhall: np.ndarray,
    table: np.ndarray,
    work: Work,
    share: Share,
    geometry: Geometry,
) -> None:
    """Compute the gradients of the gates of a step; of r only if the cell is linear."""
    hidden, linear, rows = geometry.hidden, geometry.linear, geometry.steps * geometry.batch
    columns, stride = 3 * hidden, (hidden + PANEL - 1) // PANEL * PANEL
    width = columns if linear else 2 * hidden
    for i in range(share.rows):
        saved = shared.place_in(geometry.states, t, i, share)
        gates = shared.slice_of(zrh, saved, columns)
        to = shared.slice_of(table, shared.place_in(geometry.table, t, i, share), columns)
        z, r_gate, h = gates[:hidden], gates[hidden : 2 * hidden], gates[2 * hidden :]
        dh, old = shared.slice_of(work.d_states, i, hidden), shared.slice_of(work.olds, i, hidden)
        if len(dhall) > 0:
            add_to(dh, shared.slice_of(dhall, saved, hidden))
        _d_candidate(to[2 * hidden :], dh, z, h)
        _d_update(to[:hidden], dh, z, h, old)
        for k in range(hidden):
            dh[k] *= z[k]
        row = distance(geometry.separate, t, 0, share.first + i)
        shared.put_into_panels(work.previous, row, rows, old)
        own = shared.slice_of(work.own, row, width)
        copy_row(own[:hidden], to[:hidden])
        if linear:
            dar, q = to[hidden : 2 * hidden], work.inner[i * stride : i * stride + hidden]
            _d_reset(dar, to[2 * hidden :], q, work.late, r_gate)
            copy_row(own[hidden : 2 * hidden], dar)
            _multiply_rows(own[2 * hidden :], to[2 * hidden :], r_gate)
        else:
            copy_row(shared.slice_of(work.own_h, row, hidden), to[2 * hidden :])
            product = shared.slice_of(work.products, i, hidden)
            _multiply_rows(product, r_gate, old)
            shared.put_into_panels(work.reset, row, rows, product)


def _through_reset(
    t: int, zrh: np.ndarray, table: np.ndarray, work: Work, share: Share, geometry: Geometry
) -> None:
    """Compute the gradient of r for a step, if the cell is not linear."""
    hidden, columns = geometry.hidden, 3 * geometry.hidden
    stride = (hidden + PANEL - 1) // PANEL * PANEL
    for i in range(share.rows):
        gates = shared.slice_of(zrh, shared.place_in(geometry.states, t, i, share), columns)
        r_gate, old = gates[hidden : 2 * hidden], shared.slice_of(work.olds, i, hidden)
        through = work.inner[i * stride : i * stride + hidden]
        of_gates = shared.slice_of(table, shared.place_in(geometry.table, t, i, share), columns)
        dar = of_gates[hidden : 2 * hidden]
        # The late bias is zero.
        _d_reset(dar, through, old, work.late, r_gate)
        row = distance(geometry.separate, t, 0, share.first + i)
        copy_row(shared.slice_of(work.own, row, 2 * hidden)[hidden:], dar)
        dh = shared.slice_of(work.d_states, i, hidden)
        for k in range(hidden):
            dh[k] += through[k] * r_gate[k]


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
    factors: Factors,
    geometry: Geometry,
) -> bool:
    """Compute dR and dW of some columns of the gates, or add those up: the gradients of the biases."""
    da, table = factors.da, factors.table
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
        states, own = shared.slice_of(factors.previous, d, width * rows), da[d * rows * columns :]
        stride = columns if linear else 2 * hidden
        if not is_h:
            own = own[first:]
            return shared.multiply_transposed(of_x, inputs, of_states, states, own, stride, count, geometry)
        if linear:
            own = own[first:]
        else:
            states, stride = shared.slice_of(factors.reset, d, width * rows), hidden
            own = own[2 * rows * hidden + first - 2 * hidden :]
        left, none = table[d * columns + first :], dw[:0]
        failed = shared.multiply_transposed(
            of_x, inputs, none, states, left, directions * columns, count, geometry
        )
        return (
            shared.multiply_transposed(none, inputs, of_states, states, own, stride, count, geometry)
            or failed
        )
    task -= geometry.pieces
    pieces = (columns + SUMS - 1) // SUMS
    d, column = task // pieces, task % pieces * SUMS
    end = min(column + SUMS, columns)
    biases = db[d * 2 * columns : (d * 2 + 1) * columns]
    recurrent = db[(d * 2 + 1) * columns : (d * 2 + 2) * columns]
    shared.sum_columns(biases, column, end, table[d * columns :], directions * columns, rows)
    if linear:
        shared.sum_columns(recurrent, column, end, da[d * rows * columns :], columns, rows)
    else:
        copy_row(recurrent[column:end], biases[column:end])
    return False
