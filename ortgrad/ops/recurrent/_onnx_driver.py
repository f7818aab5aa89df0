"""The driver of recurrent operators in standard ONNX.

`Body` records everything but a cell's step and its backward pass: reading the operands in either layout, a
Scan over the steps of each direction, the gradients of X, W, R, B and the initial states. As in NumPy, a row
of the batch that has ended keeps its state (or its gradient). Only what the recurrence needs is inside of
the Scan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ortgrad.graph.lazy import Recorder, ir
from ortgrad.ops._flow import Results, Step, scan
from ortgrad.ops.recurrent._activations import Activation
from ortgrad.ops.recurrent._cell import AXES, Cell, Operands, Saved

# To the end, for Slice.
_END = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Batch:
    """What all directions of a recurrent operator share, in layout 0."""

    x: ir.Value  # [steps, batch, inputs]
    steps: ir.Value  # (steps)
    state_shape: ir.Value  # (batch, hidden)
    hidden: ir.Value | int  # (hidden), or the number if it is known
    lengths: ir.Value | None  # [batch]
    valid: ir.Value | None  # [steps, batch, 1], false where a row has ended

    def split(self, op: Recorder, value: ir.Value, parts: Sequence[int], axis: int) -> Any:
        """Pieces along an axis; `parts` has their lengths in units of the hidden size."""
        sizes: Any
        if isinstance(self.hidden, int):
            # Shape inference understands constants only.
            sizes = [count * self.hidden for count in parts]
        else:
            sizes = op.Concat(*(op.Mul(self.hidden, [count]) for count in parts), axis=0)
        return op.Split(value, sizes, axis=axis, _outputs=len(parts))


@dataclass(frozen=True)
class Direction:
    """What one direction of a recurrent operator reads, in layout 0."""

    op: Recorder
    cell: Any
    index: int
    w: ir.Value  # [gates * hidden, inputs]
    r: ir.Value  # [gates * hidden, hidden]
    biases: tuple[ir.Value, ir.Value] | None  # [gates * hidden] both
    initial: Sequence[ir.Value]  # [batch, hidden] for each state
    peepholes: Sequence[ir.Value] | None  # three of [hidden]
    batch: Batch

    @property
    def reverse(self) -> bool:
        return bool(self.cell.reverse[self.index])

    @property
    def activations(self) -> Sequence[Activation]:
        found: Sequence[Activation] = self.cell.activations[self.index]
        return found

    @property
    def valid(self) -> Sequence[ir.Value]:
        """The sequence that says which rows have not ended, for a Scan; none if there are no lengths."""
        return [] if self.batch.valid is None else [self.batch.valid]

    def weighted_inputs(self, bias: ir.Value | None) -> ir.Value:
        """X W^T and a bias, for all steps: [steps, batch, gates * hidden]."""
        result = self.op.MatMul(self.batch.x, transposed(self.op, self.w))
        return result if bias is None else result + bias

    def into_activations(self, previous: ir.Value) -> ir.Value:
        """X W^T + H R^T and the biases, for all steps, where H is the state that a step starts from."""
        weighted = self.weighted_inputs(self.bias())
        return weighted + self.op.MatMul(previous, transposed(self.op, self.r))

    def bias(self) -> ir.Value | None:
        """The sum of both biases."""
        return None if self.biases is None else self.biases[0] + self.biases[1]

    def split(self, op: Recorder, value: ir.Value, parts: Sequence[int], axis: int) -> Sequence[ir.Value]:
        """Pieces along an axis; `parts` has their numbers of gates."""
        return self.batch.split(op, value, parts, axis)

    def keep_valid(self, value: ir.Value) -> ir.Value:
        """[steps, batch, ...] with zeros where a row has ended."""
        return self.where_valid(value, 0.0)

    def where_valid(self, value: ir.Value, otherwise: float) -> ir.Value:
        """[steps, batch, ...] with another number where a row has ended."""
        valid = self.batch.valid
        return value if valid is None else self.op.Where(valid, value, otherwise)

    def keep_begun(self, value: ir.Value) -> ir.Value:
        """[batch, hidden] with zeros where a row is empty; onnxruntime's final state is so."""
        op, lengths = self.op, self.batch.lengths
        return value if lengths is None else op.Where(op.Unsqueeze(op.Greater(lengths, 0), [1]), value, 0.0)

    def states_before(self, states: ir.Value, initial: ir.Value) -> ir.Value:
        """The state that each step starts from, zero where a row has ended: [steps, batch, hidden]."""
        op, lengths = self.op, self.batch.lengths
        first = op.Unsqueeze(initial, [0])
        if not self.reverse:
            return self.keep_valid(op.Concat(first, op.Slice(states, [0], [-1], [0]), axis=0))
        previous = op.Concat(op.Slice(states, [1], [_END], [0]), first, axis=0)
        if lengths is None:
            return previous
        steps = op.Range(1, op.Squeeze(self.batch.steps, [0]) + 1, 1)
        begins = op.Equal(op.Unsqueeze(steps, [1, 2]), op.Unsqueeze(lengths, [1]))
        return self.keep_valid(op.Where(begins, first, previous))

    def limited(self) -> Callable[[Recorder, ir.Value], ir.Value]:
        """A function that limits what goes into an activation to `clip`."""
        clip = self.cell.clip
        if clip is None:
            return lambda op, a: a
        low, high = self.op.number(-clip, self.batch.x), self.op.number(clip, self.batch.x)
        return lambda op, a: op.Clip(a, low, high)

    def slope(self, activation: Activation, gate: ir.Value, a: ir.Value | None) -> ir.Value:
        """The derivative of an activation, zero where a row has ended and where `a` is beyond `clip`.

        `gate` is what the activation made of `a`, which is None if there is no `clip`.
        """
        op, slope = self.op, activation.onnx_slope(self.op, gate)
        if a is not None:
            slope = op.Where(op.LessOrEqual(op.Abs(a), float(self.cell.clip)), slope, 0.0)
        return self.keep_valid(slope)


def _concat(op: Recorder, values: Sequence[ir.Value], axis: int) -> ir.Value:
    return values[0] if len(values) == 1 else op.Concat(*values, axis=axis)


def transposed(op: Recorder, matrix: ir.Value) -> ir.Value:
    """The transpose of a matrix."""
    return op.Transpose(matrix, perm=[1, 0])


def unless_ended(op: Recorder, new: ir.Value, old: ir.Value, valid: Sequence[ir.Value]) -> ir.Value:
    """The new state, but the old one in the rows that have ended; `valid` is as in `Direction`."""
    return op.Where(valid[0], new, old) if valid else new


def _scan_forward(
    direction: Direction, sequences: Sequence[ir.Value], step: Step
) -> dict[str, list[ir.Value]]:
    """The states after all steps, the final states and the gates of one direction."""
    op, count = direction.op, len(direction.initial)

    def forward(op: Recorder, states: Sequence[ir.Value], *elements: ir.Value) -> Results:
        new, gates = step(op, states, *elements[: len(sequences)])
        valid = elements[len(sequences) :]
        new = [unless_ended(op, after, before, valid) for after, before in zip(new, states, strict=True)]
        return new, [*new, *gates]

    finals, made = scan(
        op, direction.initial, [*sequences, *direction.valid], forward, reverse=direction.reverse
    )
    gates = _concat(op, made[count:], 2)
    return {
        "states": [direction.keep_valid(states) for states in made[:count]],
        "state": [direction.keep_begun(final) for final in finals],
        "gates": [direction.keep_valid(gates)],
    }


@dataclass(frozen=True)
class GateGradients:
    """What the backward pass through one direction finds."""

    d_initial: Sequence[ir.Value]  # of each state
    inputs: ir.Value  # the gradient of X W^T, [steps, batch, gates * hidden]
    recurrent: ir.Value  # the gradient of H R^T, likewise
    # dR is left^T right of each pair, one below the other.
    products: Sequence[tuple[ir.Value, ir.Value]]
    # The kinds of what only this cell reads, with functions that record its gradient.
    own: Mapping[str, Callable[[], ir.Value]] = field(default_factory=dict)


def scan_backward(
    direction: Direction, saved: Saved[ir.Value], sequences: Sequence[ir.Value], step: Step
) -> Results:
    """Run `step` backward in time: the gradients of the initial states, and the sequences that it makes.

    The states of the step are the gradients of the cell's states, dHAll included.
    """

    def backward(op: Recorder, gradients: Sequence[ir.Value], *elements: ir.Value) -> Results:
        if saved.d_states is not None:
            gradients, elements = [gradients[0] + elements[-1], *gradients[1:]], elements[:-1]
        return step(op, gradients, *elements)

    more = [] if saved.d_states is None else [direction.keep_valid(saved.d_states)]
    finals = [final for final in saved.d_finals if final is not None]
    return scan(direction.op, finals, [*sequences, *more], backward, reverse=not direction.reverse)


@dataclass(frozen=True)
class Body:
    """Records a recurrent operator, or its gradient, in standard ONNX operators."""

    op: Recorder
    cell: Cell
    wanted: Sequence[bool]

    def forward(
        self,
        operands: Operands[ir.Value],
        step_of: Callable[[Direction], tuple[Sequence[ir.Value], Step]],
    ) -> list[ir.Value | None]:
        """The states, final states and gates, in the order of `cell.training_outputs`.

        `step_of(direction)` returns the sequences that the cell's step reads, and the step, which makes the
        new states, and the gates after their activations in one or more pieces.
        """
        results = [_scan_forward(direction, *step_of(direction)) for direction in self._read(operands)]
        by_kind = {kind: zip(*(made[kind] for made in results), strict=True) for kind in results[0]}
        parts = [(kind, next(by_kind[kind])) for kind in self.cell.training_outputs]
        return [
            self._output(kind, part) if want else None
            for (kind, part), want in zip(parts, self.wanted, strict=True)
        ]

    def backward(
        self,
        operands: Operands[ir.Value],
        saved: Saved[ir.Value],
        backward: Callable[[Direction, Saved[ir.Value]], GateGradients],
    ) -> list[ir.Value | None]:
        """dX, dW, dR, dB, the gradients of the initial states, and of the inputs that only this cell has."""
        op, directions = self.op, self._read(operands)
        found = [backward(direction, self._saved(direction, saved)) for direction in directions]
        # What an output is in one direction, by the kind of the output.
        parts: list[tuple[str, Callable[[Direction, GateGradients], ir.Value]]] = [
            ("X", lambda v, g: op.MatMul(g.inputs, v.w)),
            ("W", lambda v, g: _outer(op, g.inputs, v.keep_valid(v.batch.x))),
            ("R", lambda v, g: _concat(op, [_outer(op, left, right) for left, right in g.products], 0)),
            ("B", lambda v, g: op.Concat(total(op, g.inputs), total(op, g.recurrent), axis=0)),
            *(("state", lambda v, g, i=i: g.d_initial[i]) for i in range(len(operands.initial))),
            *((kind, lambda v, g, kind=kind: g.own[kind]()) for kind in found[0].own),
        ]
        return [
            self._output(kind, [part(v, g) for v, g in zip(directions, found, strict=True)]) if want else None
            for (kind, part), want in zip(parts, self.wanted, strict=True)
        ]

    def _read(self, operands: Operands[ir.Value]) -> list[Direction]:
        op, cell, batch = self.op, self.cell, self._read_batch(operands)
        directions = []
        for d in range(len(cell.reverse)):
            b, p = (None if v is None else self._pick(v, d) for v in (operands.b, operands.peepholes))
            direction = Direction(
                op=op,
                cell=cell,
                index=d,
                w=self._pick(operands.w, d),
                r=self._pick(operands.r, d),
                biases=None if b is None else batch.split(op, b, [cell.gate_count] * 2, 0),
                initial=[self._pick_state(state, d, batch) for state in operands.initial],
                peepholes=None if p is None else batch.split(op, p, [1, 1, 1], 0),
                batch=batch,
            )
            directions.append(direction)
        return directions

    def _read_batch(self, operands: Operands[ir.Value]) -> Batch:
        op, r, lengths, known = self.op, operands.r, operands.lengths, self.cell.hidden_size
        x = self._time_first(operands.x, "X")
        steps, rows = (op.Slice(op.shape_of(x), [i], [i + 1]) for i in (0, 1))
        if known is None and r.shape is not None and isinstance(r.shape[2], int):
            known = r.shape[2]
        hidden = op.Slice(op.Shape(r), [2], [3]) if known is None else op.constant(np.array([known]))
        valid = None
        if lengths is not None:
            end = op.Squeeze(steps, [0]) + 1
            lengths = op.Reshape(op.Cast(lengths, to=ir.DataType.INT64), rows)
            # Gather refuses an index that is too large, and a length with it.
            index = op.Where(op.Less(lengths, 0), end, lengths)
            lengths = op.Gather(op.Range(0, end, 1), index)
            valid = op.Unsqueeze(op.Less(op.Unsqueeze(op.Range(0, end - 1, 1), [1]), lengths), [2])
        return Batch(x, steps, op.Concat(rows, hidden, axis=0), known or hidden, lengths, valid)

    def _saved(self, direction: Direction, saved: Saved[ir.Value]) -> Saved[ir.Value]:
        """What the gradient of one direction reads."""
        d, batch = direction.index, direction.batch
        finals = [self._pick_state(given, d, batch) for given in saved.d_finals]
        return Saved(
            [self._pick_steps(states, d, batch) for states in saved.states],
            self._pick_steps(saved.gates, d, batch, self.cell.gate_count),
            None if saved.d_states is None else self._pick_steps(saved.d_states, d, batch),
            [
                final if given is None else direction.keep_begun(final)
                for given, final in zip(saved.d_finals, finals, strict=True)
            ],
        )

    # The Reshapes move nothing; they refuse what would be broadcast by mistake.

    def _pick_steps(self, value: ir.Value, d: int, batch: Batch, gates: int = 1) -> ir.Value:
        """One direction of the states, or the gates, of all steps."""
        op, value = self.op, self._time_first(value, "states")
        shape = op.Concat(batch.steps, op.Mul(batch.state_shape, [1, gates]), axis=0)
        return op.Reshape(self._pick(value, d, 1), shape)

    def _pick_state(self, value: ir.Value | None, d: int, batch: Batch) -> ir.Value:
        """One direction of an initial or final state, or of its gradient; zeros if it is absent."""
        if value is None:
            return self.op.Expand(self.op.number(0.0, batch.x), batch.state_shape)
        return self.op.Reshape(self._pick(self._time_first(value, "state"), d), batch.state_shape)

    def _pick(self, value: ir.Value, d: int, axis: int = 0) -> ir.Value:
        """One direction of a tensor that has the directions along an axis."""
        op, count = self.op, len(self.cell.reverse)
        if count > 1:
            value = op.Split(value, axis=axis, num_outputs=count, _outputs=count)[d]
        return op.Squeeze(value, [axis])

    def _output(self, kind: str, directions: Sequence[ir.Value]) -> ir.Value:
        """An output in the node's layout, from its parts in layout 0; one without directions is their sum."""
        op, axes = self.op, AXES[kind]
        if "D" in axes:
            d = axes.index("D")
            value = _concat(op, [op.Unsqueeze(part, [d]) for part in directions], d)
        else:
            value = directions[0] if len(directions) == 1 else op.Add(*directions)
        return self._transposed(value, axes, self.cell.axes(kind))

    def _time_first(self, value: ir.Value, kind: str) -> ir.Value:
        """From the node's layout into layout 0."""
        return self._transposed(value, self.cell.axes(kind), AXES[kind])

    def _transposed(self, value: ir.Value, old: Sequence[str], new: Sequence[str]) -> ir.Value:
        return value if old == new else self.op.Transpose(value, perm=[old.index(axis) for axis in new])


def _outer(op: Recorder, left: ir.Value, right: ir.Value) -> ir.Value:
    """left^T right, summed over steps and batch."""
    return op.Gemm(op.Flatten(left, axis=2), op.Flatten(right, axis=2), transA=1)


def total(op: Recorder, value: ir.Value) -> ir.Value:
    """The sum over steps and batch."""
    return op.ReduceSum(value, [0, 1], keepdims=0)
