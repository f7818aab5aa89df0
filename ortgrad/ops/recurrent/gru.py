"""The GRU that saves its gates, its gradient, and the gradient rule of GRU.

With z, r and h for the gates, f for the activation of z and r, g for that of h, a for what goes into an
activation, H for a step's old state and dH for the gradient of its new one, (1 - z) h + z H,

    dah = dH (1 - z) g'    daz = dH (H - h) f'    dar = (dah Rh) H f'
    dH of the step before = dH z + daz Rz + dar Rr + (dah Rh) r

or, if linear_before_reset, with q = H Rh^T + Rbh,

    dar = dah q f'
    dH of the step before = dH z + daz Rz + dar Rr + (dah r) Rh
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.compiled import Plan, vectors
from ortgrad.operators.declaration import DOMAIN, Empty, operator
from ortgrad.ops._flow import Results, Step
from ortgrad.ops.recurrent import _gru_compiled as _compiled
from ortgrad.ops.recurrent import _numpy_driver as in_numpy
from ortgrad.ops.recurrent import _onnx_driver as in_onnx
from ortgrad.ops.recurrent._cell import ATTRIBUTES, SHARED_KINDS, Cell, Operands, Saved, attributes_of
from ortgrad.ops.recurrent._compiled import is_supported, pays
from ortgrad.ops.recurrent._numpy_driver import each_gate, rows
from ortgrad.ops.recurrent._onnx_driver import transposed

# The gates z and r share an activation.
_ZR_H = (2, 1)

_ATTRIBUTES = {**ATTRIBUTES, "linear_before_reset": 0}
_READ = SHARED_KINDS | {"H0": "state"}
_READ_BACK = _READ | {"HAll": "states", "ZRH": "gates", "dHAll": "states", "dHFinal": "state"}


@dataclass(frozen=True)
class GRUCell(Cell):
    """The update gate z, the reset gate r and the candidate h, in this order."""

    gate_count = 3
    default_activations = ("Sigmoid", "Tanh")
    training_outputs = ("states", "state", "gates")

    linear_before_reset: int

    def early_biases(self, hidden: int) -> slice:
        """The recurrent biases that are added to X W^T; Rbh may have to wait for the reset gate."""
        return slice(2 * hidden if self.linear_before_reset else None)


@operator(
    "GRUTraining",
    inputs=["X", "W", "R", "B?", "SL?: int32", "H0?"],
    outputs=["HAll?", "HFinal?", "ZRH?"],
    shapes=GRUCell.shapes(GRUCell.training_outputs),
    dims=GRUCell.patterns(_READ),
    attributes=_ATTRIBUTES,
    auto="onnx",
)
def gru_training(
    *operands: Any, wanted: Sequence[bool], empty: Empty, **attributes: Any
) -> tuple[np.ndarray | None, ...]:
    """HAll = Y, HFinal = Y_h of ONNX's GRU, ZRH = its gates after the activations"""
    cell = GRUCell.read(**attributes, gradient=False)
    return in_numpy.Kernel(cell, wanted, empty).forward(_operands(*operands), _forward_step)


@gru_training.onnx
def gru_training_body(
    op: Recorder, *operands: Any, wanted: Sequence[bool], **attributes: Any
) -> Sequence[ir.Value | None]:
    cell = GRUCell.read(**attributes, gradient=False)
    return in_onnx.Body(op, cell, wanted).forward(_operands(*operands), _onnx_forward_step)


@operator(
    "GRUGrad",
    inputs=["X", "W", "R", "B?", "SL?: int32", "H0?", "HAll", "ZRH", "dHAll?", "dHFinal?"],
    outputs=["dX?", "dW?", "dR?", "dB?", "dH0?"],
    shapes=GRUCell.shapes(["X", "W", "R", "B", "state"]),
    dims=GRUCell.patterns(_READ_BACK),
    attributes=_ATTRIBUTES,
    auto="onnx",
)
def gru_grad(
    *operands: Any, wanted: Sequence[bool], empty: Empty, **attributes: Any
) -> tuple[np.ndarray | None, ...]:
    """dX, dW, dR, dB, dH0 = dHAll . d(HAll) + dHFinal . d(HFinal)"""
    kernel = in_numpy.Kernel(GRUCell.read(**attributes, gradient=True), wanted, empty)
    gradients, _ = kernel.backward(_operands(*operands[:6]), _saved(*operands[6:]), _Backward)
    return tuple(gradients)


@gru_grad.onnx
def gru_grad_body(
    op: Recorder, *operands: Any, wanted: Sequence[bool], **attributes: Any
) -> Sequence[ir.Value | None]:
    body = in_onnx.Body(op, GRUCell.read(**attributes, gradient=True), wanted)
    return body.backward(_operands(*operands[:6]), _saved(*operands[6:]), _onnx_backward)


def _is_compiled(*shapes: Any, **attributes: Any) -> bool:
    """Return whether the compiled kernel is the fastest way, if it supports a node."""
    # Inputs that are absent have no elements.
    supported = is_supported(GRUCell.read(**attributes, gradient=False)) and shapes[4] == (0,)
    return supported and pays(shapes[0], shapes[2])


def _forward_plan(*shapes: Any, **attributes: Any) -> Plan | None:
    return _compiled.forward_plan(GRUCell.read(**attributes, gradient=False), *shapes)


def _backward_plan(*shapes: Any, **attributes: Any) -> Plan | None:
    return _compiled.backward_plan(GRUCell.read(**attributes, gradient=True), *shapes)


gru_training.compiled(
    views=vectors("x w r b lengths h0 hall hfinal zrh"),
    scratch=vectors("weighted packed"),
    plan=_forward_plan,
    first=_compiled.gru_panels,
    products=True,
    auto=_is_compiled,
)(_compiled.gru_steps)

gru_grad.compiled(
    views=vectors("x w r b lengths h0 hall zrh dhall dhfinal dx dw dr db dh0"),
    scratch=vectors("packed inputs da table previous reset"),
    plan=_backward_plan,
    first=_compiled.gru_grad_panels,
    last=_compiled.gru_grad_weights,
    products=True,
    auto=_is_compiled,
)(_compiled.gru_grad_steps)


def _operands(x: Any, w: Any, r: Any, b: Any, lengths: Any, h0: Any) -> Operands[Any]:
    return Operands(x, w, r, b, lengths, [h0])


def _saved(h_all: Any, zrh: Any, dh_all: Any, dh_final: Any) -> Saved[Any]:
    return Saved([h_all], zrh, dh_all, [dh_final])


@gradient("GRU")
def gru_gradient(node: ForwardNode) -> Gradients:
    attributes = attributes_of(node, "linear_before_reset")
    GRUCell.read(**attributes, gradient=True)
    operands = [*(node.input(i) for i in range(3)), *(node.optional(i) for i in range(3, 6))]
    saved = node.add_output(0), node.add_output(2)
    node.become("GRUTraining", DOMAIN)
    upstream = node.optional_grad(0), node.optional_grad(1)
    dx, dw, dr, db, dh0 = node.op.GRUGrad(*operands, *saved, *upstream, **attributes, _outputs=5)
    return dx, dw, dr, db, None, dh0


def _forward_step(cell: GRUCell, v: in_numpy.Direction) -> tuple[np.ndarray, in_numpy.Step]:
    gate_function, state_function = v.activations
    clip, linear_before_reset = cell.clip, cell.linear_before_reset
    _, batch, hidden = v.sizes
    zr_columns, h_columns = slice(2 * hidden), slice(2 * hidden, None)
    late_bias = v.b[5 * hidden :] if v.b is not None and linear_before_reset else None
    r_zr, r_h = (np.ascontiguousarray(v.r[part].T) for part in (zr_columns, h_columns))
    from_zr, from_h, reset = (np.empty((batch, n), v.x.dtype) for n in (2 * hidden, hidden, hidden))

    def step(
        a: np.ndarray, gates: np.ndarray, states: Sequence[np.ndarray], new: Sequence[np.ndarray]
    ) -> None:
        (state,), (new_state,) = states, new
        zr = gates[:, zr_columns]
        z, r = zr[:, :hidden], zr[:, hidden:]
        np.matmul(state, r_zr, out=from_zr)
        np.add(a[:, zr_columns], from_zr, out=zr)
        if clip is not None:
            np.clip(zr, -clip, clip, out=zr)
        gate_function.apply(zr)
        if linear_before_reset:
            np.matmul(state, r_h, out=from_h)
            if late_bias is not None:
                np.add(from_h, late_bias, out=from_h)
            np.multiply(from_h, r, out=from_h)
        else:
            np.multiply(r, state, out=reset)
            np.matmul(reset, r_h, out=from_h)
        h = np.add(a[:, h_columns], from_h, out=gates[:, h_columns])
        if clip is not None:
            np.clip(h, -clip, clip, out=h)
        state_function.apply(h)
        # (1 - z) h + z H
        np.subtract(state, h, out=new_state)
        new_state *= z
        new_state += h

    return v.weighted_inputs(recurrent_biases=cell.early_biases(hidden)), step


class _Backward(in_numpy.Backward):
    """The backward pass through one direction, in NumPy.

    If linear_before_reset, `da` has dah r in the place of dah until `turn_to_inputs`.
    """

    cell: GRUCell

    def __init__(self, cell: Any, direction: in_numpy.Direction, saved: Saved[np.ndarray]) -> None:
        super().__init__(cell, direction, saved)
        hidden = direction.sizes[2]
        self.zr, self.h = slice(2 * hidden), slice(2 * hidden, 3 * hidden)
        # r H; or, if linear_before_reset, q until dah takes its place.
        self.kept = np.empty_like(self.previous[0])
        if cell.linear_before_reset:
            np.matmul(rows(self.previous[0]), direction.r[self.h].T, out=rows(self.kept))
            if direction.b is not None:
                self.kept += direction.b[5 * hidden :]

    def prepare(self, block: slice) -> Callable[[int], None]:
        v, da, kept, start = self.direction, self.da, self.kept, block.start
        _, batch, hidden = v.sizes
        (dh,), gates = self.gradients, self.saved.gates
        factors, factors_h = self._factors(block)
        if v.padding is not None:
            gates[block, :, :hidden][v.padding[block]] = 1
        z, r, _ = each_gate(gates, 3)
        rest, through, product = np.empty((3, batch, hidden), da.dtype)

        if self.cell.linear_before_reset:
            dh_for_gates, da_by_gate = dh[:, None], da.reshape(*da.shape[:2], 3, hidden)

            def linear_step(t: int) -> None:
                np.multiply(dh, z[t], out=rest)
                np.multiply(dh, factors_h[t - start], out=kept[t])
                np.multiply(dh_for_gates, factors[t - start], out=da_by_gate[t])
                np.matmul(da[t], v.r, out=dh)
                np.add(dh, rest, out=dh)

            return linear_step

        r_zr, r_h = v.r[self.zr], v.r[self.h]
        da_zr, (daz, dar, dah) = da[:, :, self.zr], each_gate(da, 3)
        factors_z, factors_r = factors[:, :, 0], factors[:, :, 1]

        def reset_step(t: int) -> None:
            np.multiply(dh, z[t], out=rest)
            np.multiply(dh, factors_z[t - start], out=daz[t])
            np.matmul(np.multiply(dh, factors_h[t - start], out=dah[t]), r_h, out=through)
            np.add(rest, np.multiply(through, r[t], out=product), out=rest)
            np.multiply(through, factors_r[t - start], out=dar[t])
            np.matmul(da_zr[t], r_zr, out=dh)
            np.add(dh, rest, out=dh)

        return reset_step

    def _factors(self, block: slice) -> tuple[np.ndarray, np.ndarray]:
        """What the gradients are multiples of, [steps, batch, 3, hidden].

        The factors of daz, dar and dah, the second one for dah Rh; or, if linear_before_reset, those of daz,
        dar and dah r, and apart that of dah, all for dH.
        """
        cell, v, zr, h = self.cell, self.direction, self.zr, self.h
        gates, state, kept = self.saved.gates[block], self.previous[0][block], self.kept[block]
        hidden = state.shape[2]
        gate_function, state_function = v.activations
        z_gate, r_gate, h_gate = each_gate(gates, 3)
        if not cell.linear_before_reset:
            np.multiply(r_gate, state, out=kept)
        factors = np.empty((*state.shape[:2], 3, hidden), gates.dtype)
        flat = factors.reshape(gates.shape)
        gate_function.slope(gates[:, :, zr], out=flat[:, :, zr])
        state_function.slope(h_gate, out=flat[:, :, h])
        if cell.clip is not None:
            # The gates do not tell what went into them, so it is computed once more.
            a = v.weighted_inputs(block, cell.early_biases(hidden))
            rows(a)[:, zr] += rows(state) @ v.r[zr].T
            rows(a)[:, h] += rows(r_gate * kept) if cell.linear_before_reset else rows(kept) @ v.r[h].T
            flat[np.abs(a, out=a) > cell.clip] = 0
        if v.padding is not None:
            factors[v.padding[block]] = 0
        factors[:, :, 0] *= state - h_gate
        factors[:, :, 2] *= 1 - z_gate
        if not cell.linear_before_reset:
            factors[:, :, 1] *= state
            return factors, factors[:, :, 2]
        factors_h = factors[:, :, 2].copy()
        factors[:, :, 1] *= kept
        factors[:, :, 1] *= factors_h
        factors[:, :, 2] *= r_gate
        return factors, factors_h

    def recurrent_products(self) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        if self.cell.linear_before_reset:
            yield from super().recurrent_products()
            return
        da = rows(self.da)
        yield self.zr, da[:, self.zr], rows(self.previous[0])
        yield self.h, da[:, self.h], rows(self.kept)

    def turn_to_inputs(self) -> slice:
        if not self.cell.linear_before_reset:
            return slice(0)
        self.da[:, :, self.h] = self.kept
        return self.h


def _biases(v: in_onnx.Direction) -> tuple[ir.Value | None, ir.Value | None]:
    """What is added to X W^T, and Rbh if that is not in it."""
    if v.biases is None or not v.cell.linear_before_reset:
        return v.bias(), None
    zr, rbh = v.split(v.op, v.biases[1], _ZR_H, 0)
    return v.biases[0] + v.op.Concat(zr, v.op.full_like(rbh, 0.0), axis=0), rbh


def _onnx_forward_step(v: in_onnx.Direction) -> tuple[Sequence[ir.Value], Step]:
    gate_function, state_function = v.activations
    bias, late_bias = _biases(v)
    r_zr, r_h = (transposed(v.op, part) for part in v.split(v.op, v.r, _ZR_H, 0))
    limited = v.limited()

    def step(op: Recorder, states: Sequence[ir.Value], x_zr: ir.Value, x_h: ir.Value) -> Results:
        (state,) = states
        zr = gate_function.onnx(op, limited(op, op.Gemm(state, r_zr, x_zr)))
        z, r = op.Split(zr, axis=1, num_outputs=2, _outputs=2)
        if v.cell.linear_before_reset:
            a = x_h + r * op.Gemm(state, r_h, late_bias)
        else:
            a = op.Gemm(r * state, r_h, x_h)
        h = state_function.onnx(op, limited(op, a))
        return [h + z * (state - h)], [zr, h]

    return v.split(v.op, v.weighted_inputs(bias), _ZR_H, 2), step


def _onnx_backward(v: in_onnx.Direction, saved: Saved[ir.Value]) -> in_onnx.GateGradients:
    op, linear_before_reset = v.op, v.cell.linear_before_reset
    gate_function, state_function = v.activations
    bias, late_bias = _biases(v)
    previous = v.states_before(saved.states[0], v.initial[0])
    zr, h = v.split(op, v.keep_valid(saved.gates), _ZR_H, 2)
    z, r = op.Split(zr, axis=2, num_outputs=2, _outputs=2)
    r_zr, r_h = v.split(op, v.r, _ZR_H, 0)
    if linear_before_reset:
        linear = op.MatMul(previous, transposed(op, r_h))
        linear = linear if late_bias is None else linear + late_bias
    else:
        inner = r * previous
    a_zr = a_h = None
    if v.cell.clip is not None:
        x_zr, x_h = v.split(op, v.weighted_inputs(bias), _ZR_H, 2)
        a_zr = x_zr + op.MatMul(previous, transposed(op, r_zr))
        a_h = x_h + (r * linear if linear_before_reset else op.MatMul(inner, transposed(op, r_h)))
    slope_z, slope_r = op.Split(v.slope(gate_function, zr, a_zr), axis=2, num_outputs=2, _outputs=2)
    factor_z = slope_z * (previous - h)
    factor_h = v.slope(state_function, h, a_h) * (1.0 - z)
    z = v.where_valid(z, 1.0)
    if linear_before_reset:
        factors = op.Concat(factor_z, slope_r * linear * factor_h, factor_h * r, axis=2)

        def linear_step(
            op: Recorder, gradients: Sequence[ir.Value], factors: ir.Value, z: ir.Value
        ) -> Results:
            (dh,) = gradients
            da = op.Concat(dh, dh, dh, axis=1) * factors
            return [op.Gemm(da, v.r, dh * z)], [da, dh]

        d_initial, (da_r, dhs) = in_onnx.scan_backward(v, saved, [factors, z], linear_step)
        da_zr, _ = v.split(op, da_r, _ZR_H, 2)
        da = op.Concat(da_zr, dhs * factor_h, axis=2)
        return in_onnx.GateGradients(d_initial, da, da_r, [(da_r, previous)])

    def reset_step(op: Recorder, gradients: Sequence[ir.Value], *elements: ir.Value) -> Results:
        (dh,), (factor_z, factor_r, factor_h, z, r) = gradients, elements
        dah = dh * factor_h
        through = op.MatMul(dah, r_h)
        da_zr = op.Concat(dh * factor_z, through * factor_r, axis=1)
        return [op.Gemm(da_zr, r_zr, dh * z + through * r)], [da_zr, dah]

    sequences = [factor_z, slope_r * previous, factor_h, z, r]
    d_initial, (da_zr, dah) = in_onnx.scan_backward(v, saved, sequences, reset_step)
    da = op.Concat(da_zr, dah, axis=2)
    return in_onnx.GateGradients(d_initial, da, da, [(da_zr, previous), (dah, inner)])
