"""The rule of RNN, in standard ONNX operators.

With dH for the gradient of a step's new state H and a for what goes into the activation f,

    da = dH f'    dH of the step before = da R

where f' is told from H, so the forward node need not save anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient
from ortgrad.ops.recurrent._cells import Cell, Values, attributes_of, join, outer, scan, within_clip

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

    from ortgrad.graph.recorder import Recorder


@gradient("RNN")
def rnn_gradient(node: ForwardNode) -> Gradients:
    op = node.op
    attributes = attributes_of(node)
    cell = Cell.parse(["Tanh"], **attributes, gradient=True)
    x, w, r = (node.input(i) for i in range(3))
    b, sl, h0 = (node.optional(i) for i in (3, 4, 5))
    parts = []
    for d, v in enumerate(Values.read(op, cell, 1, x, w, r, b, sl, h0)):
        states = v.sequence(op, cell, node.output(0), d)
        dhs = v.sequence(op, cell, node.optional_grad(0), d)
        dh = v.initial_gradient(op, cell, node.optional_grad(1), d)
        parts.append(_backward(op, cell, v, states, dhs, dh))
    dx, dw, dr, db, dh0 = zip(*parts, strict=True)
    return (
        cell.onnx_as_asked(op, dx[0] if len(dx) == 1 else op.Add(*dx), 1),
        join(op, dw),
        join(op, dr),
        join(op, db),
        None,
        cell.onnx_as_asked(op, join(op, dh0), 1),
    )


def _backward(
    op: Recorder, cell: Cell, v: Values, states: ir.Value, dh_all: ir.Value | None, dh: ir.Value
) -> Sequence[ir.Value]:
    (function,) = v.activations
    previous = v.previous(op, states, v.h0)
    slope = function.onnx_slope(op, states)
    if cell.clip is not None:
        a = op.Add(v.weighted(op, v.bias(op)), op.MatMul(previous, op.Transpose(v.r, perm=[1, 0])))
        slope = within_clip(op, cell, a, slope)
    optional = [value for value in (dh_all, v.valid) if value is not None]

    def step(op: Recorder, dh: ir.Value, slope: ir.Value, *optional: ir.Value) -> Sequence[ir.Value]:
        dh = dh if dh_all is None else op.Add(dh, optional[0])
        da = op.Mul(dh, slope)
        before = op.MatMul(da, v.r)
        return before if v.valid is None else op.Where(optional[-1], before, dh), da

    if dh_all is not None:
        optional[0] = v.keep_valid(op, dh_all)
    dh0, da = scan(op, not v.reverse, [dh], [v.keep_valid(op, slope), *optional], step)
    sums = op.ReduceSum(da, [0, 1], keepdims=0)
    return (
        op.MatMul(da, v.w),
        outer(op, da, v.keep_valid(op, v.x)),
        outer(op, da, previous),
        op.Concat(sums, sums, axis=0),
        dh0,
    )
