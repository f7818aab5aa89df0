"""The LSTM that saves its cells and gates, its gradient, and the gradient rule of LSTM.

LSTMGrad is onnxruntime-training's with two inputs more at the end: the peephole weights P, through which
gradients flow, and the biases B, which say what `clip` cut off. Without peepholes and without clip they are
left out.

With i, o, f and c for the gates, C' and C for a step's old and new cell, f, g and h for the activations of
i, o and f, of c, and of C, s = h(C), a for what goes into an activation, and dH and dC for the gradients of
the new state and cell,

    dao = dH s f'    dC += dH o h' + dao Po
    dai = dC c f'    daf = dC C' f'    dac = dC i g'
    dH of the step before = da R    dC of the step before = dC f + dai Pi + daf Pf

and, if input_forget, f = 1 - i: dai = dC (c - C') f', daf = 0. All but dH, dC and da R is known before the
recurrence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.compiled import Plan, vectors
from ortgrad.operators.declaration import DOMAIN, Empty, operator
from ortgrad.ops._flow import Results, Step
from ortgrad.ops.recurrent import _lstm_compiled as _compiled
from ortgrad.ops.recurrent import _numpy_driver as in_numpy
from ortgrad.ops.recurrent import _onnx_driver as in_onnx
from ortgrad.ops.recurrent._cell import ATTRIBUTES, SHARED_KINDS, Cell, Operands, Saved, attributes_of
from ortgrad.ops.recurrent._compiled import is_supported, pays
from ortgrad.ops.recurrent._numpy_driver import each_gate, rows
from ortgrad.ops.recurrent._onnx_driver import total, transposed, unless_ended

# The gates i, o and f share an activation.
_IOF_C = (3, 1)

_ATTRIBUTES = {**ATTRIBUTES, "input_forget": 0}
_READ = SHARED_KINDS | {"P": "P", "Ht0": "state", "Ct0": "state"}
_SAVED = {"HAll": "states", "CAll": "states", "iofc": "gates"}
_READ_BACK = _READ | _SAVED | {"dHAll": "states", "dHFinal": "state", "dCFinal": "state"}


@dataclass(frozen=True)
class LSTMCell(Cell):
    """The input, output and forget gates i, o and f and the candidate c, in this order."""

    gate_count = 4
    default_activations = ("Sigmoid", "Tanh", "Tanh")
    training_outputs = ("states", "state", "state", "states", "gates")

    input_forget: int


@operator(
    "LSTMTraining",
    inputs=["X", "W", "R", "B?", "SL?: int32", "Ht0?", "Ct0?", "P?"],
    outputs=["HAll?", "HFinal?", "CFinal?", "CAll?", "iofc?"],
    shapes=LSTMCell.shapes(LSTMCell.training_outputs),
    dims=LSTMCell.patterns(_READ),
    attributes=_ATTRIBUTES,
    auto="onnx",
)
def lstm_training(
    *operands: Any, wanted: Sequence[bool], empty: Empty, **attributes: Any
) -> tuple[np.ndarray | None, ...]:
    """HAll, HFinal, CFinal = Y, Y_h, Y_c of ONNX's LSTM, CAll = its cells, iofc = its gates when activated"""
    kernel = in_numpy.Kernel(LSTMCell.read(**attributes, gradient=False), wanted, empty)
    return kernel.forward(_operands(operands), _forward_step)


@lstm_training.onnx
def lstm_training_body(
    op: Recorder, *operands: Any, wanted: Sequence[bool], **attributes: Any
) -> Sequence[ir.Value | None]:
    body = in_onnx.Body(op, LSTMCell.read(**attributes, gradient=False), wanted)
    return body.forward(_operands(operands), _onnx_forward_step)


@operator(
    "LSTMGrad",
    inputs=[
        *("X", "W", "R", "SL?: int32", "Ht0?", "Ct0?", "HAll", "CAll", "iofc"),
        *("dHAll?", "dHFinal?", "dCFinal?", "B?", "P?"),
    ],
    outputs=["dX?", "dW?", "dR?", "dB?", "dH0?", "dC0?", "dP?"],
    shapes=LSTMCell.shapes(["X", "W", "R", "B", "state", "state", "P"]),
    dims=LSTMCell.patterns(_READ_BACK),
    attributes=_ATTRIBUTES,
    auto="onnx",
)
def lstm_grad(
    *operands: Any, wanted: Sequence[bool], empty: Empty, **attributes: Any
) -> tuple[np.ndarray | None, ...]:
    """dX, dW, dR, dB, dH0, dC0, dP = dHAll . d(HAll) + dHFinal . d(HFinal) + dCFinal . d(CFinal)"""
    read, saved = _gradient_operands(operands, wanted)
    kernel = in_numpy.Kernel(LSTMCell.read(**attributes, gradient=True), wanted, empty)
    gradients, passes = kernel.backward(read, saved, _Backward)
    dp = None
    if wanted[6]:
        dp = empty(6, (len(passes), 3 * read.r.shape[2]))
        for d, backward in enumerate(passes):
            backward.put_peephole_gradient(dp[d])
    return *gradients, dp


@lstm_grad.onnx
def lstm_grad_body(
    op: Recorder, *operands: Any, wanted: Sequence[bool], **attributes: Any
) -> Sequence[ir.Value | None]:
    read, saved = _gradient_operands(operands, wanted)
    body = in_onnx.Body(op, LSTMCell.read(**attributes, gradient=True), wanted)
    return body.backward(read, saved, _onnx_backward)


def _is_compiled(*shapes: Any, lengths: int, peepholes: int, **attributes: Any) -> bool:
    """Return whether the compiled kernel is the fastest way, if it supports a node."""
    cell = LSTMCell.read(**attributes, gradient=False)
    present = [shapes[lengths] != (0,), shapes[peepholes] != (0,)]
    supported = is_supported(cell) and not any(present) and not cell.input_forget
    return supported and pays(shapes[0], shapes[2])


def _forward_plan(*shapes: Any, **attributes: Any) -> Plan | None:
    cell = LSTMCell.read(**attributes, gradient=False)
    return None if cell.input_forget else _compiled.forward_plan(cell, *shapes)


def _backward_plan(*shapes: Any, **attributes: Any) -> Plan | None:
    cell = LSTMCell.read(**attributes, gradient=True)
    return None if cell.input_forget else _compiled.backward_plan(cell, *shapes)


lstm_training.compiled(
    views=vectors("x w r b lengths h0 c0 p hall hfinal cfinal call iofc"),
    scratch=vectors("weighted packed"),
    plan=_forward_plan,
    first=_compiled.lstm_panels,
    products=True,
    auto=functools.partial(_is_compiled, lengths=4, peepholes=7),
)(_compiled.lstm_steps)

lstm_grad.compiled(
    views=vectors("x w r lengths h0 c0 hall call iofc dhall dhfinal dcfinal b p dx dw dr db dh0 dc0 dp"),
    scratch=vectors("packed inputs da table previous"),
    plan=_backward_plan,
    first=_compiled.lstm_grad_panels,
    last=_compiled.lstm_grad_weights,
    products=True,
    auto=functools.partial(_is_compiled, lengths=3, peepholes=13),
)(_compiled.lstm_grad_steps)


def _operands(operands: Sequence[Any]) -> Operands[Any]:
    x, w, r, b, lengths, h0, c0, p = operands
    return Operands(x, w, r, b, lengths, [h0, c0], p)


def _gradient_operands(operands: Sequence[Any], wanted: Sequence[bool]) -> tuple[Operands[Any], Saved[Any]]:
    x, w, r, lengths, h0, c0, h_all, c_all, iofc, dh_all, dh_final, dc_final, b, p = operands
    if wanted[6] and p is None:
        raise ValueError(
            "dP is asked for, but there is no P: the cells' gradient flows through the peepholes, "
            "so the other gradients would be wrong too; give P as the last input, or leave dP out"
        )
    read = _operands((x, w, r, b, lengths, h0, c0, p))
    return read, Saved([h_all, c_all], iofc, dh_all, [dh_final, dc_final])


@gradient("LSTM")
def lstm_gradient(node: ForwardNode) -> Gradients:
    attributes = attributes_of(node, "input_forget")
    LSTMCell.read(**attributes, gradient=True)
    x, w, r = (node.input(i) for i in range(3))
    b, lengths, h0, c0, p = (node.optional(i) for i in range(3, 8))
    saved = node.add_output(0), node.add_output(3), node.add_output(4)
    node.become("LSTMTraining", DOMAIN)
    upstream = (node.optional_grad(i) for i in range(3))
    dx, dw, dr, db, dh0, dc0, dp = node.op.LSTMGrad(
        *(x, w, r, lengths, h0, c0, *saved, *upstream),
        b if attributes["clip"] is not None else None,
        p,
        **attributes,
        _outputs=7,
    )
    return dx, dw, dr, db, None, dh0, dc0, dp


def _forward_step(cell: LSTMCell, v: in_numpy.Direction) -> tuple[np.ndarray, in_numpy.Step]:
    gate_function, cell_function, state_function = v.activations
    clip, p = cell.clip, v.peepholes
    _, batch, hidden = v.sizes
    r = np.ascontiguousarray(v.r.T)
    recurrent, product = (np.empty((batch, n), v.x.dtype) for n in (4 * hidden, hidden))

    def step(
        a: np.ndarray, gates: np.ndarray, states: Sequence[np.ndarray], new: Sequence[np.ndarray]
    ) -> None:
        (state, memory), (new_state, new_memory) = states, new
        np.matmul(state, r, out=recurrent)
        np.add(a, recurrent, out=gates)
        i, o, f, c = each_gate(gates, 4)
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
        np.multiply(f, memory, out=new_memory)
        new_memory += np.multiply(i, c, out=product)
        if p is not None:
            np.add(waiting, np.multiply(new_memory, p[1], out=product), out=o)
            if clip is not None:
                np.clip(o, -clip, clip, out=o)
            gate_function.apply(o)
        np.copyto(new_state, new_memory)
        state_function.apply(new_state)
        new_state *= o

    return v.weighted_inputs(), step


class _Backward(in_numpy.Backward):
    """The backward pass through one direction, in NumPy."""

    cell: LSTMCell

    def __init__(self, cell: Any, direction: in_numpy.Direction, saved: Saved[np.ndarray]) -> None:
        super().__init__(cell, direction, saved)
        cells = direction.without_padding(saved.states[1])
        # What the peepholes of i, o and f weigh.
        self.seen = self.previous[1], cells, self.previous[1]

    def prepare(self, block: slice) -> Callable[[int], None]:
        v, da, start, (dh, dc) = self.direction, self.da, block.start, self.gradients
        r, padding, (_, batch, hidden) = v.r, v.padding, v.sizes
        factors, through_state, through_cell = self._factors(block)
        into_cell, before = np.empty((2, batch, hidden), da.dtype)
        dc_for_gates, da_by_gate = dc[:, None], da.reshape(*da.shape[:2], 4, hidden)
        factors_o, dao = factors[:, :, 1], da_by_gate[:, :, 1]

        def step(t: int) -> None:
            np.add(dc, np.multiply(dh, through_state[t - start], out=into_cell), out=dc)
            np.multiply(dc_for_gates, factors[t - start], out=da_by_gate[t])
            np.multiply(dh, factors_o[t - start], out=dao[t])
            if padding is None:
                np.matmul(da[t], r, out=dh)
            else:
                np.matmul(da[t], r, out=before)
                np.copyto(dh, before, where=~padding[t, :, None])
            np.multiply(dc, through_cell[t - start], out=dc)

        return step

    def _factors(self, block: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the gradients are multiples of.

        The factors [steps, batch, 4, hidden] of da (that of dao for dH, the others for dC), that of dH in dC,
        and that of dC in the dC of the step before.
        """
        v, p = self.direction, self.direction.peepholes
        gate_function, cell_function, state_function = v.activations
        gates, seen = self.saved.gates[block], [cells[block] for cells in self.seen]
        old_cell, state = seen[0], seen[1].copy()
        hidden = state.shape[2]
        i, o, f, c = each_gate(gates, 4)
        state_function.apply(state)
        factors = np.empty((*state.shape[:2], 4, hidden), gates.dtype)
        flat = factors.reshape(gates.shape)
        gate_function.slope(gates[:, :, : 3 * hidden], out=flat[:, :, : 3 * hidden])
        cell_function.slope(c, out=flat[:, :, 3 * hidden :])
        if self.cell.clip is not None:
            # The gates do not tell what went into them, so it is computed once more.
            a = v.weighted_inputs(block)
            rows(a)[...] += rows(self.previous[0][block]) @ v.r.T
            if p is not None:
                for a_gate, cells, weights in zip(each_gate(a, 4), seen, p, strict=False):
                    a_gate += cells * weights
            flat[np.abs(a, out=a) > self.cell.clip] = 0
        through_cell = f.copy()
        if self.cell.input_forget:
            factors[:, :, 0] *= c - old_cell
            factors[:, :, 2] = 0
        else:
            factors[:, :, 0] *= c
            factors[:, :, 2] *= old_cell
        factors[:, :, 1] *= state
        factors[:, :, 3] *= i
        through_state = state_function.slope(state)
        through_state *= o
        if v.padding is not None:
            over = v.padding[block]
            factors[over] = 0
            through_state[over] = 0
            through_cell[over] = 1
        if p is not None:
            through_state += factors[:, :, 1] * p[1]
            through_cell += factors[:, :, 0] * p[0]
            through_cell += factors[:, :, 2] * p[2]
        return factors, through_state, through_cell

    def put_peephole_gradient(self, dp: np.ndarray) -> None:
        """Fill the gradient of the peepholes, [3 * hidden]."""
        for da, cells, part in zip(each_gate(self.da, 4), self.seen, each_gate(dp, 3), strict=False):
            np.einsum("tbh,tbh->h", da, cells, out=part)


def _onnx_forward_step(v: in_onnx.Direction) -> tuple[Sequence[ir.Value], Step]:
    gate_function, cell_function, state_function = v.activations
    r, p = transposed(v.op, v.r), v.peepholes
    limited = v.limited()

    def step(op: Recorder, states: Sequence[ir.Value], x: ir.Value) -> Results:
        state, memory = states
        a = op.Gemm(state, r, x)
        if p is None:
            a_iof, a_c = v.split(op, limited(op, a), _IOF_C, 1)
            i, o, f = v.split(op, gate_function.onnx(op, a_iof), (1, 1, 1), 1)
        else:
            a_i, a_o, a_f, a_c = v.split(op, a, (1, 1, 1, 1), 1)
            a_c = limited(op, a_c)
            i = gate_function.onnx(op, limited(op, a_i + p[0] * memory))
            f = gate_function.onnx(op, limited(op, a_f + p[2] * memory))
        if v.cell.input_forget:
            f = 1.0 - i
        c = cell_function.onnx(op, a_c)
        new = f * memory + i * c
        if p is not None:
            o = gate_function.onnx(op, limited(op, a_o + p[1] * new))
        return [o * state_function.onnx(op, new), new], [op.Concat(i, o, f, c, axis=1)]

    return [v.weighted_inputs(v.bias())], step


def _onnx_backward(v: in_onnx.Direction, saved: Saved[ir.Value]) -> in_onnx.GateGradients:
    op, p = v.op, v.peepholes
    gate_function, cell_function, state_function = v.activations
    cells = v.keep_valid(saved.states[1])
    previous, old_cells = v.states_before(saved.states[0], v.initial[0]), v.states_before(cells, v.initial[1])
    iof, c = v.split(op, v.keep_valid(saved.gates), _IOF_C, 2)
    i, o, f = v.split(op, iof, (1, 1, 1), 2)
    state = state_function.onnx(op, cells)
    a_iof = a_c = None
    if v.cell.clip is not None:
        a_iof, a_c = v.split(op, v.into_activations(previous), _IOF_C, 2)
        if p is not None:
            a_iof = a_iof + op.Concat(old_cells, cells, old_cells, axis=2) * op.Concat(*p, axis=0)
    slope_i, slope_o, slope_f = v.split(op, v.slope(gate_function, iof, a_iof), (1, 1, 1), 2)
    if v.cell.input_forget:
        factor_i, factor_f = slope_i * (c - old_cells), op.full_like(slope_f, 0.0)
    else:
        factor_i, factor_f = slope_i * c, slope_f * old_cells
    factor_o, factor_c = slope_o * state, v.slope(cell_function, c, a_c) * i
    through_state = v.keep_valid(o * state_function.onnx_slope(op, state))
    through_cell = v.where_valid(f, 1.0)
    if p is not None:
        through_state = through_state + factor_o * p[1]
        through_cell = op.Sum(through_cell, factor_i * p[0], factor_f * p[2])
    factors = op.Concat(factor_i, factor_o, factor_f, factor_c, axis=2)

    def step(op: Recorder, gradients: Sequence[ir.Value], *elements: ir.Value) -> Results:
        (dh, dc), (factors, through_state, through_cell, *valid) = gradients, elements
        dc = dc + dh * through_state
        da = op.Concat(dc, dh, dc, dc, axis=1) * factors
        return [unless_ended(op, op.MatMul(da, v.r), dh, valid), dc * through_cell], [da]

    sequences = [factors, through_state, through_cell, *v.valid]
    d_initial, (da,) = in_onnx.scan_backward(v, saved, sequences, step)

    def d_peepholes() -> ir.Value:
        da_iof, _ = v.split(op, da, _IOF_C, 2)
        return total(op, da_iof * op.Concat(old_cells, cells, old_cells, axis=2))

    return in_onnx.GateGradients(d_initial, da, da, [(da, previous)], {"P": d_peepholes})
