"""The LSTM that keeps its cells and gates for the gradient, its gradient, and the rule that uses them.

LSTMGrad is onnxruntime-training's with two inputs more at the end: the peephole weights P, through which
gradients flow, and the biases B, which say what `clip` cut off. Without peepholes and without clip they are
left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient
from ortgrad.operators.declaration import DOMAIN, Empty, Operand, Shape, operator
from ortgrad.ops.recurrent._cells import (
    ATTRIBUTES,
    Cell,
    Inputs,
    Values,
    attributes_of,
    blocks,
    clipper,
    initial_states,
    input_dims,
    join,
    outer,
    output_shapes,
    pick,
    require_shape,
    scan,
    sizes,
    times,
    within_clip,
)

if TYPE_CHECKING:
    import onnx_ir as ir

    from ortgrad.graph.recorder import Recorder


@dataclass(frozen=True)
class _Cell(Cell):
    input_forget: int

    @classmethod
    def read(cls, *, gradient: bool, **attributes: Any) -> _Cell:
        return cls.parse(["Sigmoid", "Tanh", "Tanh"], gradient=gradient, **attributes)


_ATTRIBUTES = {**ATTRIBUTES, "input_forget": 0}
# The gates i, o and f share an activation.
_IOF_C = (3, 1)
_I_O_F_C = (1, 1, 1, 1)
# For each output of LSTMTraining, the axis of its directions, and that of its batch.
_PLACES = ((1, 2), (0, 1), (0, 1), (1, 2), (1, 2))


# What the patterns of the inputs are.
_READ = {**{name: name for name in ("X", "R", "W", "B", "SL", "P")}, "Ht0": "state", "Ct0": "state"}
_KEPT = _READ | {
    "HAll": "states",
    "CAll": "states",
    "iofc": "gates",
    "dHAll": "states",
    "dHFinal": "state",
    "dCFinal": "state",
}


def _dims(kinds: dict[str, str], **attributes: Any) -> dict[str, str]:
    patterns = input_dims(4, **attributes)
    return {name: patterns[kind] for name, kind in kinds.items()}


def _training_shapes(*operands: Operand | None, **attributes: Any) -> Sequence[Shape | None]:
    x, r = operands[0], operands[2]
    all_, final = output_shapes(x, r, **attributes)
    hidden = sizes(x, r, **attributes)[-1]
    final = (*final, hidden)
    return [(*all_, hidden), final, final, (*all_, hidden), (*all_, times(4, hidden))]


def _gradient_shapes(*operands: Operand | None, **attributes: Any) -> Sequence[Shape | None]:
    x, w, r = operands[:3]
    _, directions, _, hidden = sizes(x, r, **attributes)
    _, final = output_shapes(x, r, **attributes)
    final = (*final, hidden)
    same = [None if o is None else o.shape for o in (x, w, r)]
    return [*same, (directions, times(8, hidden)), final, final, (directions, times(3, hidden))]


@dataclass(frozen=True)
class _Cells:
    """What an LSTM reads besides: the initial cells and the peephole weights."""

    c0: np.ndarray  # [directions, batch, hidden]
    p: np.ndarray | None  # [directions, 3, hidden]: of i, o and f

    @classmethod
    def check(cls, cell: _Cell, inputs: Inputs, c0: np.ndarray | None, p: np.ndarray | None) -> _Cells:
        directions, batch, hidden = inputs.h0.shape
        if c0 is None:
            c0 = np.zeros_like(inputs.h0)
        else:
            c0 = cell.time_first("Ct0", c0, directions=directions, batch=batch, hidden=hidden)
        require_shape("P", p, directions=directions, peepholes=3 * hidden)
        return cls(c0, None if p is None else p.reshape(directions, 3, hidden))


@operator(
    "LSTMTraining",
    inputs=["X", "W", "R", "B?", "SL?: int32", "Ht0?", "Ct0?", "P?"],
    outputs=["HAll?", "HFinal?", "CFinal?", "CAll?", "iofc?"],
    shapes=_training_shapes,
    dims=lambda **attributes: _dims(_READ, **attributes),
    attributes=_ATTRIBUTES,
    auto="onnx",
)
def lstm_training(
    x: np.ndarray,
    w: np.ndarray,
    r: np.ndarray,
    b: np.ndarray | None,
    sl: np.ndarray | None,
    h0: np.ndarray | None,
    c0: np.ndarray | None,
    p: np.ndarray | None,
    *,
    wanted: Sequence[bool],
    empty: Empty,
    **attributes: Any,
) -> tuple[np.ndarray | None, ...]:
    """HAll, HFinal, CFinal = Y, Y_h, Y_c of ONNX's LSTM, CAll = its cells, iofc = its gates when activated"""
    cell = _Cell.read(**attributes, gradient=False)
    inputs = Inputs.check(cell, 4, x, w, r, b, sl, h0, "Ht0")
    cells = _Cells.check(cell, inputs, c0, p)
    # All sizes are known here.
    shapes = cast(
        "list[tuple[int, ...]]", _training_shapes(Operand(x.shape), None, Operand(r.shape), **attributes)
    )
    outputs = [
        empty(i, shape) if want else np.empty(shape, x.dtype)
        for i, (shape, want) in enumerate(zip(shapes, wanted, strict=True))
    ]
    by_direction = [
        np.moveaxis(np.moveaxis(array, 0, batch) if cell.batch_first else array, direction, 0)
        for array, (direction, batch) in zip(outputs, _PLACES, strict=True)
    ]
    for d in range(len(cell.reverse)):
        _forward(cell, inputs, cells, d, *(array[d] for array in by_direction))
    return tuple(array if want else None for array, want in zip(outputs, wanted, strict=True))


def _forward(
    cell: _Cell,
    inputs: Inputs,
    cells: _Cells,
    direction: int,
    states: np.ndarray,
    final: np.ndarray,
    final_cell: np.ndarray,
    all_cells: np.ndarray,
    iofc: np.ndarray,
) -> None:
    """Fill the outputs of one direction: [steps, batch, hidden] (4 hidden), [batch, hidden] at the end."""
    gate_function, cell_function, state_function = cell.activations[direction]
    clip, padding = cell.clip, inputs.padding
    p = None if cells.p is None else cells.p[direction]
    weighted = inputs.weighted(direction)
    steps, batch, hidden = states.shape
    r = np.ascontiguousarray(inputs.r[direction].T)
    recurrent, product = np.empty((batch, 4 * hidden), iofc.dtype), np.empty((batch, hidden), iofc.dtype)
    state, memory = inputs.h0[direction], cells.c0[direction]
    for t in reversed(range(steps)) if cell.reverse[direction] else range(steps):
        np.matmul(state, r, out=recurrent)
        gates = np.add(weighted[t], recurrent, out=iofc[t])
        i, o, f, c = (gates[:, k * hidden : (k + 1) * hidden] for k in range(4))
        if p is not None:
            i += np.multiply(memory, p[0], out=product)
            f += np.multiply(memory, p[2], out=product)
            # The output gate waits for the new cell.
            waiting = o.copy()
        if clip is not None:
            np.clip(gates, -clip, clip, out=gates)
        gate_function.apply(gates[:, : 3 * hidden])
        cell_function.apply(c)
        if cell.input_forget:
            np.subtract(1, i, out=f)
        new = np.multiply(f, memory, out=all_cells[t])
        new += np.multiply(i, c, out=product)
        if p is not None:
            np.add(waiting, np.multiply(new, p[1], out=product), out=o)
            if clip is not None:
                np.clip(o, -clip, clip, out=o)
            gate_function.apply(o)
        hidden_state = states[t]
        np.copyto(hidden_state, new)
        state_function.apply(hidden_state)
        hidden_state *= o
        if padding is not None:
            over = padding[t, :, None]
            np.copyto(new, memory, where=over)
            np.copyto(hidden_state, state, where=over)
        state, memory = hidden_state, new
    for end, last in ((final, state), (final_cell, memory)):
        np.copyto(end, last)
        # As onnxruntime: an empty row ends in zeros, whatever it began with.
        end[inputs.lengths == 0] = 0
    if padding is not None:
        for array in (states, all_cells, iofc):
            array[padding] = 0


@lstm_training.onnx
def lstm_training_body(
    op: Recorder,
    x: ir.Value,
    w: ir.Value,
    r: ir.Value,
    b: ir.Value | None,
    sl: ir.Value | None,
    h0: ir.Value | None,
    c0: ir.Value | None,
    p: ir.Value | None,
    *,
    wanted: Sequence[bool],
    **attributes: Any,
) -> Sequence[ir.Value | None]:
    cell = _Cell.read(**attributes, gradient=False)
    parts = zip(
        *(
            _scan_forward(op, cell, v, memory, peepholes)
            for v, memory, peepholes in _read(op, cell, x, w, r, b, sl, h0, c0, p)
        ),
        strict=True,
    )
    return [
        cell.onnx_as_asked(op, join(op, part, direction), batch) if want else None
        for part, (direction, batch), want in zip(parts, _PLACES, wanted, strict=True)
    ]


def _read(
    op: Recorder,
    cell: _Cell,
    x: ir.Value,
    w: ir.Value,
    r: ir.Value,
    b: ir.Value | None,
    sl: ir.Value | None,
    h0: ir.Value | None,
    c0: ir.Value | None,
    p: ir.Value | None,
) -> list[tuple[Values, ir.Value, Sequence[ir.Value] | None]]:
    """For each direction what it reads, its initial cell, and the peephole weights of i, o and f."""
    values = Values.read(op, cell, 4, x, w, r, b, sl, h0)
    memories = initial_states(op, cell, c0, values[0].x, values[0].state)
    result = []
    for d, (v, memory) in enumerate(zip(values, memories, strict=True)):
        peepholes = None if p is None else v.split(op, pick(op, p, d, len(values)), (1, 1, 1), 0)
        result.append((v, memory, peepholes))
    return result


def _scan_forward(
    op: Recorder, cell: _Cell, v: Values, memory: ir.Value, p: Sequence[ir.Value] | None
) -> Sequence[ir.Value]:
    gate_function, cell_function, state_function = v.activations
    r = op.Transpose(v.r, perm=[1, 0])
    clip = clipper(op, cell, v.x)

    def step(
        op: Recorder, state: ir.Value, memory: ir.Value, x: ir.Value, valid: ir.Value | None = None
    ) -> Sequence[ir.Value]:
        a = op.Gemm(state, r, x)
        if p is None:
            a_iof, a_c = v.split(op, clip(op, a), _IOF_C, 1)
            i, o, f = v.split(op, gate_function.onnx(op, a_iof), (1, 1, 1), 1)
        else:
            a_i, a_o, a_f, a_c = v.split(op, a, _I_O_F_C, 1)
            a_c = clip(op, a_c)
            i = gate_function.onnx(op, clip(op, op.Add(a_i, op.Mul(p[0], memory))))
            f = gate_function.onnx(op, clip(op, op.Add(a_f, op.Mul(p[2], memory))))
        if cell.input_forget:
            f = op.Sub(1.0, i)
        c = cell_function.onnx(op, a_c)
        new = op.Add(op.Mul(f, memory), op.Mul(i, c))
        if p is not None:
            o = gate_function.onnx(op, clip(op, op.Add(a_o, op.Mul(p[1], new))))
        hidden = op.Mul(o, state_function.onnx(op, new))
        if valid is not None:
            new, hidden = op.Where(valid, new, memory), op.Where(valid, hidden, state)
        return hidden, new, hidden, new, op.Concat(i, o, f, c, axis=1)

    weighted = v.weighted(op, v.bias(op))
    sequences = [weighted] if v.valid is None else [weighted, v.valid]
    final, final_cell, states, cells, iofc = scan(op, v.reverse, [v.h0, memory], sequences, step)
    return (
        v.keep_valid(op, states),
        v.keep_begun(op, final),
        v.keep_begun(op, final_cell),
        v.keep_valid(op, cells),
        v.keep_valid(op, iofc),
    )


@operator(
    "LSTMGrad",
    inputs=[
        *("X", "W", "R", "SL?: int32", "Ht0?", "Ct0?", "HAll", "CAll", "iofc"),
        *("dHAll?", "dHFinal?", "dCFinal?", "B?", "P?"),
    ],
    outputs=["dX?", "dW?", "dR?", "dB?", "dH0?", "dC0?", "dP?"],
    shapes=_gradient_shapes,
    dims=lambda **attributes: _dims(_KEPT, **attributes),
    attributes=_ATTRIBUTES,
    auto="onnx",
)
def lstm_grad(
    x: np.ndarray,
    w: np.ndarray,
    r: np.ndarray,
    sl: np.ndarray | None,
    h0: np.ndarray | None,
    c0: np.ndarray | None,
    h_all: np.ndarray,
    c_all: np.ndarray,
    iofc: np.ndarray,
    dh_all: np.ndarray | None,
    dh_final: np.ndarray | None,
    dc_final: np.ndarray | None,
    b: np.ndarray | None,
    p: np.ndarray | None,
    *,
    wanted: Sequence[bool],
    empty: Empty,
    **attributes: Any,
) -> tuple[np.ndarray | None, ...]:
    """dX, dW, dR, dB, dH0, dC0, dP = dHAll . d(HAll) + dHFinal . d(HFinal) + dCFinal . d(CFinal)"""
    _require_peepholes(wanted, p)
    cell = _Cell.read(**attributes, gradient=True)
    inputs = Inputs.check(cell, 4, x, w, r, b, sl, h0, "Ht0")
    cells = _Cells.check(cell, inputs, c0, p)
    directions, batch, hidden = inputs.h0.shape
    sequence = {"steps": len(inputs.x), "directions": directions, "batch": batch}
    h_all = cell.time_first("HAll", h_all, **sequence, hidden=hidden)
    c_all = cell.time_first("CAll", c_all, **sequence, hidden=hidden)
    iofc = cell.time_first("iofc", iofc, **sequence, gates=4 * hidden)
    if dh_all is not None:
        dh_all = cell.time_first("dHAll", dh_all, **sequence, hidden=hidden)
    dh = inputs.initial_gradient(cell, "dHFinal", dh_final)
    dc = inputs.initial_gradient(cell, "dCFinal", dc_final)
    inputs = replace(inputs, x=inputs.cleared(inputs.x))
    dx = empty(0, x.shape) if wanted[0] else None
    dw = empty(1, w.shape) if wanted[1] else None
    dr = empty(2, r.shape) if wanted[2] else None
    db = empty(3, (directions, 8 * hidden)) if wanted[3] else None
    dp = empty(6, (directions, 3 * hidden)) if wanted[6] else None
    for d in range(directions):
        da, previous, previous_cells = _backward(
            cell,
            inputs,
            cells,
            d,
            h_all[:, d],
            c_all[:, d],
            iofc[:, d],
            None if dh_all is None else inputs.cleared(dh_all[:, d]),
            dh[d],
            dc[d],
        )
        flat = da.reshape(len(inputs.x) * batch, 4 * hidden)
        if dx is not None:
            cell.input_gradient(flat, w[d], dx, add=d > 0)
        if dw is not None:
            np.matmul(flat.T, inputs.x.reshape(len(flat), x.shape[2]), out=dw[d])
        if dr is not None:
            np.matmul(flat.T, previous.reshape(len(flat), hidden), out=dr[d])
        if db is not None:
            db[d].reshape(2, 4 * hidden)[...] = np.ones(len(flat), flat.dtype) @ flat
        if dp is not None:
            for k, seen in enumerate((previous_cells, inputs.cleared(c_all[:, d]), previous_cells)):
                gate = slice(k * hidden, (k + 1) * hidden)
                np.einsum("tbh,tbh->h", da[:, :, gate], seen, out=dp[d, gate])
    return (
        *(dx, dw, dr, db),
        cell.as_asked(dh, 1) if wanted[4] else None,
        cell.as_asked(dc, 1) if wanted[5] else None,
        dp,
    )


def _require_peepholes(wanted: Sequence[bool], p: object) -> None:
    if wanted[6] and p is None:
        raise ValueError(
            "dP is asked for, but there is no P: the cells' gradient flows through the peepholes, "
            "so the other gradients would be wrong too; give P as the last input, or leave dP out"
        )


def _backward(
    cell: _Cell,
    inputs: Inputs,
    cells: _Cells,
    direction: int,
    h_all: np.ndarray,
    c_all: np.ndarray,
    iofc: np.ndarray,
    dh_all: np.ndarray | None,
    dh: np.ndarray,
    dc: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Back through one direction; leaves the gradients of the first state and cell in dh and dc.

    With dH and dC for the gradients of a step's new state and cell, s = h(C), a for what goes into
    an activation, and C' for the cell of the step before,

        dao = dH s f'    dC += dH o h' + dao Po
        dai = dC c f'    daf = dC C' f'    dac = dC i g'
        dH of the step before = da R    dC of the step before = dC f + dai Pi + daf Pf

    and, if input_forget, f = 1 - i: dai = dC (c - C') f', daf = 0. All but dH, dC and da R is known before
    the recurrence, and computed for a block of steps at once. Returns da [steps, batch, 4 hidden], and the
    states and cells that the steps start from.
    """
    steps, batch, hidden = h_all.shape
    reverse, padding, r = cell.reverse[direction], inputs.padding, inputs.r[direction]
    previous = inputs.previous(h_all, inputs.h0[direction], reverse)
    previous_cells = inputs.previous(c_all, cells.c0[direction], reverse)
    da = np.empty((steps, batch, 4 * hidden), iofc.dtype)
    into_cell, before = np.empty((2, batch, hidden), iofc.dtype)
    for block in blocks(reverse, steps, batch * hidden):
        factors, through_state, through_cell = _factors(
            cell, inputs, cells, direction, block, iofc, c_all, previous, previous_cells
        )
        for k in range(len(factors)) if reverse else reversed(range(len(factors))):
            t = block.start + k
            if dh_all is not None:
                dh += dh_all[t]
            dc += np.multiply(dh, through_state[k], out=into_cell)
            gates = da[t].reshape(batch, 4, hidden)
            np.multiply(dc[:, None], factors[k], out=gates)
            np.multiply(dh, factors[k, :, 1], out=gates[:, 1])
            if padding is None:
                np.matmul(da[t], r, out=dh)
            else:
                np.matmul(da[t], r, out=before)
                np.copyto(dh, before, where=~padding[t, :, None])
            dc *= through_cell[k]
    return da, previous, previous_cells


def _factors(
    cell: _Cell,
    inputs: Inputs,
    cells: _Cells,
    direction: int,
    block: slice,
    iofc: np.ndarray,
    c_all: np.ndarray,
    previous: np.ndarray,
    previous_cells: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the gradients are multiples of: see `_backward`.

    The factors [steps, batch, 4, hidden] of da (that of dao for dH, the others for dC), that of dH in dC,
    and that of dC in the dC of the step before.
    """
    gate_function, cell_function, state_function = cell.activations[direction]
    gates, c0 = iofc[block], previous_cells[block]
    steps, batch, hidden = c0.shape
    p = None if cells.p is None else cells.p[direction]
    i, o, f, c = (gates[:, :, k * hidden : (k + 1) * hidden] for k in range(4))
    state = c_all[block].copy()
    state_function.apply(state)
    factors = np.empty((steps, batch, 4, hidden), gates.dtype)
    flat = factors.reshape(gates.shape)
    gate_function.slope(gates[:, :, : 3 * hidden], out=flat[:, :, : 3 * hidden])
    cell_function.slope(c, out=flat[:, :, 3 * hidden :])
    if cell.clip is not None:
        # The gates do not tell what went into them, so it is computed once more.
        a = inputs.weighted(direction, block)
        a += (previous[block].reshape(steps * batch, hidden) @ inputs.r[direction].T).reshape(a.shape)
        if p is not None:
            for k, seen in enumerate((c0, c_all[block], c0)):
                a[:, :, k * hidden : (k + 1) * hidden] += seen * p[k]
        flat[np.abs(a, out=a) > cell.clip] = 0
    through_cell = f.copy()
    if cell.input_forget:
        factors[:, :, 0] *= c - c0
        factors[:, :, 2] = 0
    else:
        factors[:, :, 0] *= c
        factors[:, :, 2] *= c0
    factors[:, :, 1] *= state
    factors[:, :, 3] *= i
    through_state = state_function.slope(state)
    through_state *= o
    if inputs.padding is not None:
        over = inputs.padding[block]
        factors[over] = 0
        through_state[over] = 0
        through_cell[over] = 1
    if p is not None:
        through_state += factors[:, :, 1] * p[1]
        through_cell += factors[:, :, 0] * p[0]
        through_cell += factors[:, :, 2] * p[2]
    return factors, through_state, through_cell


@lstm_grad.onnx
def lstm_grad_body(
    op: Recorder,
    x: ir.Value,
    w: ir.Value,
    r: ir.Value,
    sl: ir.Value | None,
    h0: ir.Value | None,
    c0: ir.Value | None,
    h_all: ir.Value,
    c_all: ir.Value,
    iofc: ir.Value,
    dh_all: ir.Value | None,
    dh_final: ir.Value | None,
    dc_final: ir.Value | None,
    b: ir.Value | None,
    p: ir.Value | None,
    *,
    wanted: Sequence[bool],
    **attributes: Any,
) -> Sequence[ir.Value | None]:
    _require_peepholes(wanted, p)
    cell = _Cell.read(**attributes, gradient=True)
    parts = []
    for d, (v, memory, peepholes) in enumerate(_read(op, cell, x, w, r, b, sl, h0, c0, p)):
        states, cells = v.sequence(op, cell, h_all, d), v.sequence(op, cell, c_all, d)
        gates, dhs = v.sequence(op, cell, iofc, d, 4), v.sequence(op, cell, dh_all, d)
        dh, dc = (v.initial_gradient(op, cell, given, d) for given in (dh_final, dc_final))
        saved = states, v.keep_valid(op, cells), v.keep_valid(op, gates)
        parts.append(_scan_backward(op, cell, v, memory, peepholes, *saved, dhs, dh, dc, wanted))
    dx, *rest = zip(*parts, strict=True)
    total = None
    if wanted[0]:
        total = dx[0] if len(dx) == 1 else op.Add(*dx)
        total = cell.onnx_as_asked(op, total, 1)
    dw, dr, db, dh0, dc0, dp = (
        join(op, part) if want else None for part, want in zip(rest, wanted[1:], strict=True)
    )
    return (
        total,
        dw,
        dr,
        db,
        None if dh0 is None else cell.onnx_as_asked(op, dh0, 1),
        None if dc0 is None else cell.onnx_as_asked(op, dc0, 1),
        dp,
    )


def _scan_backward(
    op: Recorder,
    cell: _Cell,
    v: Values,
    memory: ir.Value,
    p: Sequence[ir.Value] | None,
    states: ir.Value,
    cells: ir.Value,
    iofc: ir.Value,
    dh_all: ir.Value | None,
    dh: ir.Value,
    dc: ir.Value,
    wanted: Sequence[bool],
) -> Sequence[ir.Value | None]:
    """As `_backward`: only what the recurrence needs is inside of the Scan."""
    gate_function, cell_function, state_function = v.activations
    previous, previous_cells = v.previous(op, states, v.h0), v.previous(op, cells, memory)
    iof, c = v.split(op, iofc, _IOF_C, 2)
    i, o, f = v.split(op, iof, (1, 1, 1), 2)
    state = state_function.onnx(op, cells)
    slope_iof, slope_c = gate_function.onnx_slope(op, iof), cell_function.onnx_slope(op, c)
    if cell.clip is not None:
        a = op.Add(v.weighted(op, v.bias(op)), op.MatMul(previous, op.Transpose(v.r, perm=[1, 0])))
        a_iof, a_c = v.split(op, a, _IOF_C, 2)
        if p is not None:
            seen = op.Concat(previous_cells, cells, previous_cells, axis=2)
            a_iof = op.Add(a_iof, op.Mul(seen, op.Concat(*p, axis=0)))
        slope_iof, slope_c = within_clip(op, cell, a_iof, slope_iof), within_clip(op, cell, a_c, slope_c)
    slope_iof, slope_c = v.keep_valid(op, slope_iof), v.keep_valid(op, slope_c)
    slope_i, slope_o, slope_f = v.split(op, slope_iof, (1, 1, 1), 2)
    if cell.input_forget:
        factor_i, factor_f = op.Mul(slope_i, op.Sub(c, previous_cells)), op.full_like(slope_f, 0.0)
    else:
        factor_i, factor_f = op.Mul(slope_i, c), op.Mul(slope_f, previous_cells)
    factor_o, factor_c = op.Mul(slope_o, state), op.Mul(slope_c, i)
    through_state = v.keep_valid(op, op.Mul(o, state_function.onnx_slope(op, state)))
    through_cell = f if v.valid is None else op.Where(v.valid, f, 1.0)
    if p is not None:
        through_state = op.Add(through_state, op.Mul(factor_o, p[1]))
        through_cell = op.Sum(through_cell, op.Mul(factor_i, p[0]), op.Mul(factor_f, p[2]))
    factors = op.Concat(factor_i, factor_o, factor_f, factor_c, axis=2)
    optional = [value for value in (dh_all, v.valid) if value is not None]

    def step(
        op: Recorder,
        dh: ir.Value,
        dc: ir.Value,
        factors: ir.Value,
        through_state: ir.Value,
        through_cell: ir.Value,
        *optional: ir.Value,
    ) -> Sequence[ir.Value]:
        dh = dh if dh_all is None else op.Add(dh, optional[0])
        dc = op.Add(dc, op.Mul(dh, through_state))
        da = op.Mul(op.Concat(dc, dh, dc, dc, axis=1), factors)
        before = op.MatMul(da, v.r)
        before = before if v.valid is None else op.Where(optional[-1], before, dh)
        return before, op.Mul(dc, through_cell), da

    if dh_all is not None:
        optional[0] = v.keep_valid(op, dh_all)
    sequences = [factors, through_state, through_cell, *optional]
    dh0, dc0, da = scan(op, not v.reverse, [dh, dc], sequences, step)
    dx = dw = dr = db = dp = None
    if wanted[0]:
        dx = op.MatMul(da, v.w)
    if wanted[1]:
        dw = outer(op, da, v.keep_valid(op, v.x))
    if wanted[2]:
        dr = outer(op, da, previous)
    if wanted[3]:
        sums = op.ReduceSum(da, [0, 1], keepdims=0)
        db = op.Concat(sums, sums, axis=0)
    if wanted[6]:
        da_iof, _ = v.split(op, da, _IOF_C, 2)
        seen = op.Concat(previous_cells, cells, previous_cells, axis=2)
        dp = op.ReduceSum(op.Mul(da_iof, seen), [0, 1], keepdims=0)
    return dx, dw, dr, db, dh0, dc0, dp


@gradient("LSTM")
def lstm_gradient(node: ForwardNode) -> Gradients:
    attributes = attributes_of(node, "input_forget")
    _Cell.read(**attributes, gradient=True)
    x, w, r = (node.input(i) for i in range(3))
    b, sl, h0, c0, p = (node.optional(i) for i in range(3, 8))
    saved = node.add_output(0), node.add_output(3), node.add_output(4)
    node.become("LSTMTraining", DOMAIN)
    upstream = (node.optional_grad(i) for i in range(3))
    dx, dw, dr, db, dh0, dc0, dp = node.op.LSTMGrad(
        *(x, w, r, sl, h0, c0, *saved, *upstream),
        b if attributes["clip"] is not None else None,
        p,
        **attributes,
        _outputs=7,
    )
    return dx, dw, dr, db, None, dh0, dc0, dp
