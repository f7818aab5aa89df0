"""The GRU that keeps its gates for the gradient, its gradient, and the rule that uses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
    input_dims,
    join,
    outer,
    output_shapes,
    scan,
    sizes,
    stack,
    times,
    within_clip,
)

if TYPE_CHECKING:
    import onnx_ir as ir

    from ortgrad.graph.recorder import Recorder


@dataclass(frozen=True)
class _Cell(Cell):
    linear_before_reset: int

    @classmethod
    def read(cls, *, gradient: bool, **attributes: Any) -> _Cell:
        return cls.parse(["Sigmoid", "Tanh"], gradient=gradient, **attributes)

    def recurrent_biases(self, hidden: int) -> int | None:
        """How many of the recurrent biases are added to X W^T; Rbh may have to wait for the reset gate."""
        return 2 * hidden if self.linear_before_reset else None


# The gates z and r have an activation of their own.
_ZR_H = (2, 1)

_ATTRIBUTES = {**ATTRIBUTES, "linear_before_reset": 0}


# What the patterns of the inputs are.
_READ = {**{name: name for name in ("X", "R", "W", "B", "SL")}, "H0": "state"}
_KEPT = _READ | {"HAll": "states", "ZRH": "gates", "dHAll": "states", "dHFinal": "state"}


def _dims(kinds: dict[str, str], **attributes: Any) -> dict[str, str]:
    patterns = input_dims(3, **attributes)
    return {name: patterns[kind] for name, kind in kinds.items()}


def _training_shapes(*operands: Operand | None, **attributes: Any) -> Sequence[Shape | None]:
    x, r = operands[0], operands[2]
    all_, final = output_shapes(x, r, **attributes)
    hidden = sizes(x, r, **attributes)[-1]
    return [(*all_, hidden), (*final, hidden), (*all_, times(3, hidden))]


def _gradient_shapes(*operands: Operand | None, **attributes: Any) -> Sequence[Shape | None]:
    x, w, r = operands[:3]
    _, directions, _, hidden = sizes(x, r, **attributes)
    _, final = output_shapes(x, r, **attributes)
    same = [None if o is None else o.shape for o in (x, w, r)]
    return [*same, (directions, times(6, hidden)), (*final, hidden)]


@operator(
    "GRUTraining",
    inputs=["X", "W", "R", "B?", "SL?: int32", "H0?"],
    outputs=["HAll?", "HFinal?", "ZRH?"],
    shapes=_training_shapes,
    dims=lambda **attributes: _dims(_READ, **attributes),
    attributes=_ATTRIBUTES,
    auto="onnx",
)
def gru_training(
    x: np.ndarray,
    w: np.ndarray,
    r: np.ndarray,
    b: np.ndarray | None,
    sl: np.ndarray | None,
    h0: np.ndarray | None,
    *,
    wanted: Sequence[bool],
    **attributes: Any,
) -> tuple[np.ndarray | None, ...]:
    """HAll = Y, HFinal = Y_h of ONNX's GRU, ZRH = its gates after the activations"""
    cell = _Cell.read(**attributes, gradient=False)
    inputs = Inputs.check(cell, 3, x, w, r, b, sl, h0)
    states, finals, gates = zip(*(_forward(cell, inputs, d) for d in range(len(cell.reverse))), strict=True)
    return (
        cell.as_asked(stack(states, 1), 2) if wanted[0] else None,
        cell.as_asked(stack(finals, 0), 1) if wanted[1] else None,
        cell.as_asked(stack(gates, 1), 2) if wanted[2] else None,
    )


def _forward(cell: _Cell, inputs: Inputs, direction: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States [steps, batch, hidden], final state [batch, hidden] and gates [steps, batch, 3 hidden]."""
    gate_function, state_function = cell.activations[direction]
    clip, padding = cell.clip, inputs.padding
    hidden = inputs.r.shape[2]
    gates = inputs.weighted(direction, recurrent_biases=cell.recurrent_biases(hidden))
    steps, batch = gates.shape[:2]
    r_zr, r_h = (np.ascontiguousarray(m.T) for m in np.split(inputs.r[direction], [2 * hidden]))
    states = np.empty((steps, batch, hidden), gates.dtype)
    from_zr, from_h, reset = (np.empty((batch, n), gates.dtype) for n in (2 * hidden, hidden, hidden))
    state = inputs.h0[direction]
    for t in reversed(range(steps)) if cell.reverse[direction] else range(steps):
        zr, h = gates[t, :, : 2 * hidden], gates[t, :, 2 * hidden :]
        z, r = zr[:, :hidden], zr[:, hidden:]
        np.matmul(state, r_zr, out=from_zr)
        zr += from_zr
        if clip is not None:
            np.clip(zr, -clip, clip, out=zr)
        gate_function.apply(zr)
        if cell.linear_before_reset:
            np.matmul(state, r_h, out=from_h)
            if inputs.b is not None:
                from_h += inputs.b[direction, 5 * hidden :]
            from_h *= r
        else:
            np.multiply(r, state, out=reset)
            np.matmul(reset, r_h, out=from_h)
        h += from_h
        if clip is not None:
            np.clip(h, -clip, clip, out=h)
        state_function.apply(h)
        # (1 - z) h + z H
        new = np.subtract(state, h, out=states[t])
        new *= z
        new += h
        if padding is not None:
            np.copyto(new, state, where=padding[t, :, None])
        state = new
    final = state.copy()
    # As onnxruntime: an empty row ends in zeros, whatever it began with.
    final[inputs.lengths == 0] = 0
    if padding is not None:
        states[padding] = 0
        gates[padding] = 0
    return states, final, gates


@gru_training.onnx
def gru_training_body(
    op: Recorder,
    x: ir.Value,
    w: ir.Value,
    r: ir.Value,
    b: ir.Value | None,
    sl: ir.Value | None,
    h0: ir.Value | None,
    *,
    wanted: Sequence[bool],
    **attributes: Any,
) -> Sequence[ir.Value | None]:
    cell = _Cell.read(**attributes, gradient=False)
    values = Values.read(op, cell, 3, x, w, r, b, sl, h0)
    states, finals, gates = zip(*(_scan_forward(op, cell, v) for v in values), strict=True)
    return (
        cell.onnx_as_asked(op, join(op, states, 1), 2) if wanted[0] else None,
        cell.onnx_as_asked(op, join(op, finals), 1) if wanted[1] else None,
        cell.onnx_as_asked(op, join(op, gates, 1), 2) if wanted[2] else None,
    )


def _biases(op: Recorder, cell: _Cell, v: Values) -> tuple[ir.Value | None, ir.Value | None]:
    """What is added to X W^T, and Rbh if that is not in it."""
    if v.biases is None or not cell.linear_before_reset:
        return v.bias(op), None
    gates, rbh = v.split(op, v.biases[1], _ZR_H, 0)
    return op.Add(v.biases[0], op.Concat(gates, op.full_like(rbh, 0.0), axis=0)), rbh


def _scan_forward(op: Recorder, cell: _Cell, v: Values) -> tuple[ir.Value, ir.Value, ir.Value]:
    gate_function, state_function = v.activations
    bias, recurrent_bias = _biases(op, cell, v)
    x_zr, x_h = v.split(op, v.weighted(op, bias), _ZR_H, 2)
    r_zr, r_h = (op.Transpose(part, perm=[1, 0]) for part in v.split(op, v.r, _ZR_H, 0))
    clip = clipper(op, cell, v.x)

    def step(
        op: Recorder, state: ir.Value, x_zr: ir.Value, x_h: ir.Value, valid: ir.Value | None = None
    ) -> Sequence[ir.Value]:
        zr = gate_function.onnx(op, clip(op, op.Gemm(state, r_zr, x_zr)))
        z, r = op.Split(zr, axis=1, num_outputs=2, _outputs=2)
        if cell.linear_before_reset:
            a = op.Add(x_h, op.Mul(r, op.Gemm(state, r_h, recurrent_bias)))
        else:
            a = op.Gemm(op.Mul(r, state), r_h, x_h)
        h = state_function.onnx(op, clip(op, a))
        new = op.Add(h, op.Mul(z, op.Sub(state, h)))
        if valid is not None:
            new = op.Where(valid, new, state)
        return new, new, zr, h

    sequences = [x_zr, x_h] if v.valid is None else [x_zr, x_h, v.valid]
    final, states, zr, h = scan(op, v.reverse, [v.h0], sequences, step)
    gates = op.Concat(zr, h, axis=2)
    return v.keep_valid(op, states), v.keep_begun(op, final), v.keep_valid(op, gates)


@operator(
    "GRUGrad",
    inputs=["X", "W", "R", "B?", "SL?: int32", "H0?", "HAll", "ZRH", "dHAll?", "dHFinal?"],
    outputs=["dX?", "dW?", "dR?", "dB?", "dH0?"],
    shapes=_gradient_shapes,
    dims=lambda **attributes: _dims(_KEPT, **attributes),
    attributes=_ATTRIBUTES,
    auto="onnx",
)
def gru_grad(
    x: np.ndarray,
    w: np.ndarray,
    r: np.ndarray,
    b: np.ndarray | None,
    sl: np.ndarray | None,
    h0: np.ndarray | None,
    h_all: np.ndarray,
    zrh: np.ndarray,
    dh_all: np.ndarray | None,
    dh_final: np.ndarray | None,
    *,
    wanted: Sequence[bool],
    empty: Empty,
    **attributes: Any,
) -> tuple[np.ndarray | None, ...]:
    """dX, dW, dR, dB, dH0 = dHAll . d(HAll) + dHFinal . d(HFinal)"""
    cell = _Cell.read(**attributes, gradient=True)
    inputs = Inputs.check(cell, 3, x, w, r, b, sl, h0)
    directions, batch, hidden = inputs.h0.shape
    sequence = {"steps": len(inputs.x), "directions": directions, "batch": batch}
    h_all = cell.time_first("HAll", h_all, **sequence, hidden=hidden)
    zrh = cell.time_first("ZRH", zrh, **sequence, gates=3 * hidden)
    if dh_all is not None:
        dh_all = cell.time_first("dHAll", dh_all, **sequence, hidden=hidden)
    dh = inputs.initial_gradient(cell, "dHFinal", dh_final)
    inputs = replace(inputs, x=inputs.cleared(inputs.x))
    dx = empty(0, x.shape) if wanted[0] else None
    dw = empty(1, w.shape) if wanted[1] else None
    dr = empty(2, r.shape) if wanted[2] else None
    db = empty(3, (directions, 6 * hidden)) if wanted[3] else None
    for d in range(directions):
        da, kept, previous = _backward(
            cell,
            inputs,
            d,
            h_all[:, d],
            inputs.cleared(zrh[:, d]),
            None if dh_all is None else inputs.cleared(dh_all[:, d]),
            dh[d],
        )
        _recurrent_gradients(
            cell, da, kept, previous, None if dr is None else dr[d], None if db is None else db[d]
        )
        if dw is not None:
            np.matmul(da.T, inputs.x.reshape(len(da), inputs.x.shape[2]), out=dw[d])
        if dx is not None:
            cell.input_gradient(da, inputs.w[d], dx, add=d > 0)
    return dx, dw, dr, db, cell.as_asked(dh, 1) if wanted[4] else None


def _backward(
    cell: _Cell,
    inputs: Inputs,
    direction: int,
    h_all: np.ndarray,
    zrh: np.ndarray,
    dh_all: np.ndarray | None,
    dh: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Back through one direction; leaves the gradient of the first state in dh.

    With dH for the gradient of a step's new state and a for what goes into an activation,

        dah = dH (1 - z) g'    daz = dH (H - h) f'    dar = (dah Rh) H f'
        dH of the step before = dH z + daz Rz + dar Rr + (dah Rh) r

    or, if linear_before_reset, with q = H Rh^T + Rbh,

        dar = dah q f'
        dH of the step before = dH z + daz Rz + dar Rr + (dah r) Rh

    What does not depend on dH is computed for a block of steps at once, what the recurrence does not
    need for all steps after it. Returns, with a row for each step and batch: daz, dar and dah (dah r if
    linear_before_reset) side by side; r H (dah if linear_before_reset); and H.
    """
    steps, batch, hidden = h_all.shape
    r = inputs.r[direction]
    r_zr, r_h = r[: 2 * hidden], r[2 * hidden :]
    linear_before_reset, padding = cell.linear_before_reset, inputs.padding
    previous = inputs.previous(h_all, inputs.h0[direction], cell.reverse[direction])
    da = np.empty((steps, batch, 3 * hidden), h_all.dtype)
    kept = np.empty_like(previous)
    rows = steps * batch
    if linear_before_reset:
        # q, until dah takes its place.
        np.matmul(previous.reshape(rows, hidden), r_h.T, out=kept.reshape(rows, hidden))
        if inputs.b is not None:
            kept += inputs.b[direction, 5 * hidden :]
    rest, through, product = np.empty((3, batch, hidden), h_all.dtype)
    for block in blocks(cell.reverse[direction], steps, batch * hidden):
        factors, factor_h = _factors(cell, inputs, direction, block, zrh, previous, kept)
        if padding is not None:
            zrh[block, :, :hidden][padding[block]] = 1
        order = range(len(factors)) if cell.reverse[direction] else reversed(range(len(factors)))
        for i in order:
            t = block.start + i
            gates, grads = (a[t].reshape(batch, 3, hidden) for a in (zrh, da))
            if dh_all is not None:
                dh += dh_all[t]
            np.multiply(dh, gates[:, 0], out=rest)
            if linear_before_reset:
                np.multiply(dh, factor_h[i], out=kept[t])
                np.multiply(dh[:, None], factors[i], out=grads)
                np.matmul(da[t], r, out=dh)
            else:
                np.multiply(dh, factors[i, :, 0], out=grads[:, 0])
                np.multiply(dh, factors[i, :, 2], out=grads[:, 2])
                np.matmul(grads[:, 2], r_h, out=through)
                np.multiply(through, gates[:, 1], out=product)
                rest += product
                np.multiply(through, factors[i, :, 1], out=grads[:, 1])
                np.matmul(da[t, :, : 2 * hidden], r_zr, out=dh)
            dh += rest
    return da.reshape(rows, 3 * hidden), kept.reshape(rows, hidden), previous.reshape(rows, hidden)


def _recurrent_gradients(
    cell: _Cell,
    da: np.ndarray,
    kept: np.ndarray,
    previous: np.ndarray,
    dr: np.ndarray | None,
    db: np.ndarray | None,
) -> None:
    """Fill dR and dB from what `_backward` returns, and leave daz, dar and dah in da in any case."""
    rows, hidden = kept.shape
    zr, h = slice(2 * hidden), slice(2 * hidden, 3 * hidden)
    ones = np.ones(rows, da.dtype)
    if dr is not None and cell.linear_before_reset:
        np.matmul(da.T, previous, out=dr)
    elif dr is not None:
        np.matmul(da[:, zr].T, previous, out=dr[zr])
        np.matmul(da[:, h].T, kept, out=dr[h])
    if db is not None:
        db.reshape(2, 3 * hidden)[...] = ones @ da
    if cell.linear_before_reset:
        da[:, h] = kept
        if db is not None:
            db[h] = ones @ kept


def _factors(
    cell: _Cell,
    inputs: Inputs,
    direction: int,
    block: slice,
    zrh: np.ndarray,
    previous: np.ndarray,
    kept: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """What the gradients are multiples of, [steps, batch, 3, hidden]: see `_backward`.

    The factors of daz, dar and dah, the second one for dah Rh; or, if linear_before_reset, those of daz,
    dar and dah r, and apart that of dah, all for dH. `kept` holds q if linear_before_reset, else it gets r H.
    """
    gates, h0 = zrh[block], previous[block]
    steps, batch, hidden = h0.shape
    rows, r = steps * batch, inputs.r[direction]
    gate_function, state_function = cell.activations[direction]
    z, reset, h = (gates[:, :, i * hidden : (i + 1) * hidden] for i in range(3))
    linear = kept[block]
    if not cell.linear_before_reset:
        np.multiply(reset, h0, out=kept[block])
    factors = np.empty((steps, batch, 3, hidden), gates.dtype)
    flat = factors.reshape(gates.shape)
    gate_function.slope(gates[:, :, : 2 * hidden], out=flat[:, :, : 2 * hidden])
    state_function.slope(h, out=flat[:, :, 2 * hidden :])
    if cell.clip is not None:
        # The gates do not tell what went into them, so it is computed once more.
        a = inputs.weighted(direction, block, cell.recurrent_biases(hidden))
        a[:, :, : 2 * hidden] += (h0.reshape(rows, hidden) @ r[: 2 * hidden].T).reshape(steps, batch, -1)
        if cell.linear_before_reset:
            a[:, :, 2 * hidden :] += reset * linear
        else:
            inner = np.ascontiguousarray(kept[block]).reshape(rows, hidden)
            a[:, :, 2 * hidden :] += (inner @ r[2 * hidden :].T).reshape(h0.shape)
        flat[np.abs(a, out=a) > cell.clip] = 0
    if inputs.padding is not None:
        factors[inputs.padding[block]] = 0
    factors[:, :, 0] *= h0 - h
    factors[:, :, 2] *= 1 - z
    if not cell.linear_before_reset:
        factors[:, :, 1] *= h0
        return factors, factors[:, :, 2]
    factor_h = factors[:, :, 2].copy()
    factors[:, :, 1] *= linear
    factors[:, :, 1] *= factor_h
    factors[:, :, 2] *= reset
    return factors, factor_h


@gru_grad.onnx
def gru_grad_body(
    op: Recorder,
    x: ir.Value,
    w: ir.Value,
    r: ir.Value,
    b: ir.Value | None,
    sl: ir.Value | None,
    h0: ir.Value | None,
    h_all: ir.Value,
    zrh: ir.Value,
    dh_all: ir.Value | None,
    dh_final: ir.Value | None,
    *,
    wanted: Sequence[bool],
    **attributes: Any,
) -> Sequence[ir.Value | None]:
    cell = _Cell.read(**attributes, gradient=True)
    values = Values.read(op, cell, 3, x, w, r, b, sl, h0)
    parts = []
    for d, v in enumerate(values):
        states, gates = v.sequence(op, cell, h_all, d), v.sequence(op, cell, zrh, d, 3)
        dhs, dh = v.sequence(op, cell, dh_all, d), v.initial_gradient(op, cell, dh_final, d)
        parts.append(_scan_backward(op, cell, v, states, gates, dhs, dh, wanted))
    dx, dw, dr, db, dh0 = zip(*parts, strict=True)
    total = None
    if wanted[0]:
        total = dx[0] if len(dx) == 1 else op.Add(*dx)
        total = cell.onnx_as_asked(op, total, 1)
    return (
        total,
        join(op, dw) if wanted[1] else None,
        join(op, dr) if wanted[2] else None,
        join(op, db) if wanted[3] else None,
        cell.onnx_as_asked(op, join(op, dh0), 1) if wanted[4] else None,
    )


def _scan_backward(
    op: Recorder,
    cell: _Cell,
    v: Values,
    states: ir.Value,
    zrh: ir.Value,
    dh_all: ir.Value | None,
    dh: ir.Value,
    wanted: Sequence[bool],
) -> Sequence[ir.Value | None]:
    """As `_backward`: only what the recurrence needs is inside of the Scan."""
    gate_function, state_function = v.activations
    bias, recurrent_bias = _biases(op, cell, v)
    x, zrh = v.keep_valid(op, v.x), v.keep_valid(op, zrh)
    previous = v.previous(op, states, v.h0)
    zr, h = v.split(op, zrh, _ZR_H, 2)
    z, r = op.Split(zr, axis=2, num_outputs=2, _outputs=2)
    r_zr, r_h = v.split(op, v.r, _ZR_H, 0)
    if cell.linear_before_reset:
        linear = op.MatMul(previous, op.Transpose(r_h, perm=[1, 0]))
        linear = linear if recurrent_bias is None else op.Add(linear, recurrent_bias)
    else:
        inner = op.Mul(r, previous)
    slope_zr, slope_h = gate_function.onnx_slope(op, zr), state_function.onnx_slope(op, h)
    if cell.clip is not None:
        a_zr, a_h = v.split(op, v.weighted(op, bias), _ZR_H, 2)
        a_zr = op.Add(a_zr, op.MatMul(previous, op.Transpose(r_zr, perm=[1, 0])))
        if cell.linear_before_reset:
            a_h = op.Add(a_h, op.Mul(r, linear))
        else:
            a_h = op.Add(a_h, op.MatMul(inner, op.Transpose(r_h, perm=[1, 0])))
        slope_zr, slope_h = (
            within_clip(op, cell, a, slope) for a, slope in ((a_zr, slope_zr), (a_h, slope_h))
        )
    slope_zr, slope_h = v.keep_valid(op, slope_zr), v.keep_valid(op, slope_h)
    slope_z, slope_r = op.Split(slope_zr, axis=2, num_outputs=2, _outputs=2)
    factor_z = op.Mul(slope_z, op.Sub(previous, h))
    factor_h = op.Mul(slope_h, op.Sub(1.0, z))
    if v.valid is not None:
        z = op.Where(v.valid, z, 1.0)
    upstream = [] if dh_all is None else [v.keep_valid(op, dh_all)]
    if cell.linear_before_reset:
        factor_r = op.Mul(op.Mul(slope_r, linear), factor_h)
        factors = op.Concat(factor_z, factor_r, op.Mul(factor_h, r), axis=2)

        def linear_step(
            op: Recorder, dh: ir.Value, factors: ir.Value, z: ir.Value, up: ir.Value | None = None
        ) -> Sequence[ir.Value]:
            dh = dh if up is None else op.Add(dh, up)
            da = op.Mul(op.Concat(dh, dh, dh, axis=1), factors)
            return op.Gemm(da, v.r, op.Mul(dh, z)), da, dh

        dh0, da_r, dhs = scan(op, not v.reverse, [dh], [factors, z, *upstream], linear_step)
        da_zr, _ = v.split(op, da_r, _ZR_H, 2)
        da = op.Concat(da_zr, op.Mul(dhs, factor_h), axis=2)
    else:
        factor_r = op.Mul(slope_r, previous)

        def reset_step(
            op: Recorder,
            dh: ir.Value,
            factor_z: ir.Value,
            factor_r: ir.Value,
            factor_h: ir.Value,
            z: ir.Value,
            r: ir.Value,
            up: ir.Value | None = None,
        ) -> Sequence[ir.Value]:
            dh = dh if up is None else op.Add(dh, up)
            dah = op.Mul(dh, factor_h)
            through = op.MatMul(dah, r_h)
            da_zr = op.Concat(op.Mul(dh, factor_z), op.Mul(through, factor_r), axis=1)
            rest = op.Add(op.Mul(dh, z), op.Mul(through, r))
            return op.Gemm(da_zr, r_zr, rest), da_zr, dah

        sequences = [factor_z, factor_r, factor_h, z, r, *upstream]
        dh0, da_zr, dah = scan(op, not v.reverse, [dh], sequences, reset_step)
        da = da_r = op.Concat(da_zr, dah, axis=2)
    dx = dw = dr = db = None
    if wanted[0]:
        dx = op.MatMul(da, v.w)
    if wanted[1]:
        dw = outer(op, da, x)
    if wanted[2] and cell.linear_before_reset:
        dr = outer(op, da_r, previous)
    elif wanted[2]:
        dr = op.Concat(outer(op, da_zr, previous), outer(op, dah, inner), axis=0)
    if wanted[3]:
        sums = (op.ReduceSum(value, [0, 1], keepdims=0) for value in (da, da_r))
        db = op.Concat(*sums, axis=0)
    return dx, dw, dr, db, dh0


@gradient("GRU")
def gru_gradient(node: ForwardNode) -> Gradients:
    attributes = attributes_of(node, "linear_before_reset")
    _Cell.read(**attributes, gradient=True)
    x, w, r = (node.input(i) for i in range(3))
    b, sl, h0 = (node.optional(i) for i in (3, 4, 5))
    saved = node.add_output(0), node.add_output(2)
    node.become("GRUTraining", DOMAIN)
    upstream = node.optional_grad(0), node.optional_grad(1)
    dx, dw, dr, db, dh0 = node.op.GRUGrad(x, w, r, b, sl, h0, *saved, *upstream, **attributes, _outputs=5)
    return dx, dw, dr, db, None, dh0
