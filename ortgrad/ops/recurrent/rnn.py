"""The gradient rule of RNN, in standard ONNX operators.

With dH for the gradient of a step's new state H and a for what goes into the activation f,

    da = dH f'    dH of the step before = da R

where f' is told from H, so the forward node need not save anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.ops._flow import Results
from ortgrad.ops.recurrent._cell import Cell, Operands, Saved, attributes_of
from ortgrad.ops.recurrent._onnx_driver import (
    Body,
    Direction,
    GateGradients,
    scan_backward,
    unless_ended,
)


class RNNCell(Cell):
    """H = f(X W^T + H' R^T + biases)"""

    gate_count = 1
    default_activations = ("Tanh",)


@gradient("RNN")
def rnn_gradient(node: ForwardNode) -> Gradients:
    cell = RNNCell.read(**attributes_of(node), gradient=True)
    x, w, r = (node.input(i) for i in range(3))
    b, lengths, h0 = (node.optional(i) for i in range(3, 6))
    states = node.add_output(0)
    saved = Saved([states], states, node.optional_grad(0), [node.optional_grad(1)])
    body = Body(node.op, cell, wanted=(True,) * 5)
    dx, dw, dr, db, dh0 = body.backward(Operands(x, w, r, b, lengths, [h0]), saved, _backward)
    return dx, dw, dr, db, None, dh0


def _backward(v: Direction, saved: Saved[ir.Value]) -> GateGradients:
    previous = v.states_before(saved.states[0], v.initial[0])
    a = None if v.cell.clip is None else v.into_activations(previous)
    slope = v.slope(v.activations[0], saved.gates, a)

    def step(op: Recorder, gradients: Sequence[ir.Value], slope: ir.Value, *valid: ir.Value) -> Results:
        (dh,) = gradients
        da = dh * slope
        return [unless_ended(op, op.MatMul(da, v.r), dh, valid)], [da]

    d_initial, (da,) = scan_backward(v, saved, [slope, *v.valid], step)
    return GateGradients(d_initial, da, da, [(da, previous)])
