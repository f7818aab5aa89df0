"""The driver of recurrent operators in NumPy.

`Kernel` does everything but a cell's step and its backward pass: reading the operands in either layout, the
loop over the steps of each direction, the gradients of X, W, R, B and the initial states. Rows of the batch
run through the steps in place: one that has ended keeps its state (or its gradient), so the reverse direction
starts at each row's own end without moving any data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

from ortgrad.operators.declaration import Empty
from ortgrad.ops.recurrent._activations import Activation
from ortgrad.ops.recurrent._cell import AXES, Cell, Operands, Saved

# step(a, gates, states, new) reads `a`, its X W^T with biases [batch, gates * hidden], and the states
# [batch, hidden]; it fills the gates after their activations, and the new states.
Step: TypeAlias = Callable[[np.ndarray, np.ndarray, Sequence[np.ndarray], Sequence[np.ndarray]], None]

# How many states a gradient prepares at once.
_BLOCK = 1 << 15

B = TypeVar("B", bound="Backward")


@dataclass(frozen=True)
class Direction:
    """What one direction of a recurrent operator reads, in layout 0."""

    reverse: bool
    activations: Sequence[Activation]
    x: np.ndarray  # [steps, batch, inputs], zero where a row has ended
    w: np.ndarray  # [gates * hidden, inputs]
    r: np.ndarray  # [gates * hidden, hidden]
    b: np.ndarray | None  # [2 * gates * hidden]
    initial: Sequence[np.ndarray]  # [batch, hidden] for each state
    peepholes: np.ndarray | None  # [3, hidden]
    lengths: np.ndarray  # [batch]
    padding: np.ndarray | None  # [steps, batch], true where a row has ended; None if that is nowhere

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Steps, batch and hidden size."""
        return (*self.x.shape[:2], self.r.shape[1])

    def weighted_inputs(
        self, block: slice = slice(None), recurrent_biases: slice = slice(None)
    ) -> np.ndarray:
        """X W^T and biases for a block of steps: [steps, batch, gates * hidden].

        All of the input biases are added, and of the recurrent ones those in the slice.
        """
        x = self.x[block]
        result = rows(x) @ self.w.T
        if self.b is not None:
            bias, recurrent = np.split(self.b, 2)
            result += bias
            result[:, recurrent_biases] += recurrent[recurrent_biases]
        return result.reshape(*x.shape[:2], len(self.w))

    def states_before(self, states: np.ndarray, initial: np.ndarray) -> np.ndarray:
        """The state that each step starts from, zero where a row has ended: [steps, batch, hidden]."""
        result = np.empty_like(states)
        if not len(result):
            return result
        if self.reverse:
            result[:-1] = states[1:]
            result[-1] = initial
            if self.padding is not None:
                begun = np.flatnonzero(self.lengths)
                result[self.lengths[begun] - 1, begun] = initial[begun]
        else:
            result[1:] = states[:-1]
            result[0] = initial
        if self.padding is not None:
            result[self.padding] = 0
        return result

    def without_padding(self, array: np.ndarray) -> np.ndarray:
        """[steps, batch, ...] with zeros where a row has ended, whatever stands there, even NaN."""
        return _without(self.padding, array)

    def blocks(self) -> list[slice]:
        """The steps in pieces that fit the cache, in the order in which the gradient goes through them."""
        steps, batch, hidden = self.sizes
        count = max(1, _BLOCK // max(1, batch * hidden))
        result = [slice(start, min(start + count, steps)) for start in range(0, steps, count)]
        return result if self.reverse else result[::-1]


def rows(array: np.ndarray) -> np.ndarray:
    """[steps, batch, n] as a matrix with a row for each step and row of the batch."""
    steps, batch, n = array.shape
    return array.reshape(steps * batch, n)


def each_gate(array: np.ndarray, count: int) -> list[np.ndarray]:
    """Views of [..., gates * hidden], one for each gate."""
    hidden = array.shape[-1] // count
    return [array[..., i * hidden : (i + 1) * hidden] for i in range(count)]


def _without(padding: np.ndarray | None, array: np.ndarray) -> np.ndarray:
    if padding is None:
        return array
    array = array.copy()
    array[padding] = 0
    return array


def _run_steps(
    direction: Direction, steps: tuple[np.ndarray, Step], states: Sequence[np.ndarray], gates: np.ndarray
) -> Sequence[np.ndarray]:
    """Fill the states after each step, where a row that has ended keeps its own, and the gates.

    Returns the final states.
    """
    weighted, step = steps
    order = slice(None, None, -1) if direction.reverse else slice(None)
    padding = None if direction.padding is None else iter(direction.padding[order, :, None])
    old: Sequence[np.ndarray] = direction.initial
    for a, activated, *new in zip(weighted[order], gates[order], *(s[order] for s in states), strict=True):
        step(a, activated, old, new)
        if padding is not None:
            ended = next(padding)
            for i, state in enumerate(new):
                np.copyto(state, old[i], where=ended)
        old = new
    return old


class Backward(ABC):
    """The backward pass through one direction; each cell has its own.

    What does not depend on the gradients of the states is computed for a block of steps at once, what the
    recurrence does not need for all steps after it.
    """

    def __init__(self, cell: Any, direction: Direction, saved: Saved[np.ndarray]) -> None:
        """`saved` belongs to the direction; its `d_finals` become the gradients of the initial states."""
        self.cell = cell
        self.direction = direction
        self.saved = saved
        # The gradients of the states after the step that is gone through next, [batch, hidden].
        self.gradients: Sequence[Any] = saved.d_finals
        # The states that the steps start from.
        self.previous = [
            direction.states_before(states, initial)
            for states, initial in zip(saved.states, direction.initial, strict=True)
        ]
        # The gradients of what goes into the activations, [steps, batch, gates * hidden], to be filled.
        self.da = np.empty(saved.gates.shape, saved.gates.dtype)

    @abstractmethod
    def prepare(self, block: slice) -> Callable[[int], None]:
        """A function of t that goes back through that step of the block.

        It fills `da[t]` and turns `gradients` into the gradients of the states before the step, in place.
        """

    def recurrent_products(self) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """Slices of the rows of dR, with matrices left and right: these rows are left^T right."""
        yield slice(None), rows(self.da), rows(self.previous[0])

    def turn_to_inputs(self) -> slice:
        """Turn `da`, the gradients of H R^T, into the gradients of X W^T; returns the columns that differ."""
        return slice(0)

    def run(self) -> None:
        """Go back through all steps."""
        dh, d_states = self.gradients[0], self.saved.d_states
        for block in self.direction.blocks():
            step = self.prepare(block)
            order = range(block.start, block.stop)
            for t in order if self.direction.reverse else reversed(order):
                if d_states is not None:
                    dh += d_states[t]
                step(t)


@dataclass(frozen=True)
class Kernel:
    """Runs a recurrent operator, or its gradient, in NumPy, on operands that satisfy the contract."""

    cell: Cell
    wanted: Sequence[bool]
    empty: Empty

    def forward(
        self,
        operands: Operands[np.ndarray],
        step_of: Callable[[Any, Direction], tuple[np.ndarray, Step]],
    ) -> tuple[np.ndarray | None, ...]:
        """The states, final states and gates, in the order of `cell.training_outputs`.

        `step_of(cell, direction)` returns X W^T with biases for all steps, and the step that reads it.
        """
        cell, directions = self.cell, self._read(operands)
        steps, batch, hidden = directions[0].sizes
        sizes = {"T": steps, "N": batch, "D": len(directions), "H": hidden, "G": cell.gate_count * hidden}
        outputs = []
        made: dict[str, list[np.ndarray]] = {"states": [], "state": [], "gates": []}
        for i, kind in enumerate(cell.training_outputs):
            shape = [sizes[axis] for axis in cell.axes(kind)]
            output = self.empty(i, shape) if self.wanted[i] else np.empty(shape, operands.x.dtype)
            outputs.append(output)
            # A view in layout 0, the directions first.
            view = np.moveaxis(output, 0, AXES[kind].index("N")) if cell.batch_first else output
            made[kind].append(np.moveaxis(view, AXES[kind].index("D"), 0))
        for d, direction in enumerate(directions):
            states, finals, (gates,) = ([array[d] for array in made[kind]] for kind in made)
            last = _run_steps(direction, step_of(cell, direction), states, gates)
            for final, state in zip(finals, last, strict=True):
                np.copyto(final, state)
                # As onnxruntime: an empty row ends in zeros, whatever it began with.
                final[direction.lengths == 0] = 0
            if direction.padding is not None:
                for array in (*states, gates):
                    array[direction.padding] = 0
        return tuple(output if want else None for output, want in zip(outputs, self.wanted, strict=True))

    def backward(
        self, operands: Operands[np.ndarray], saved: Saved[np.ndarray], backward: type[B]
    ) -> tuple[list[np.ndarray | None], list[B]]:
        """dX, dW, dR, dB and the gradient of each initial state; and the pass through each direction."""
        cell, directions = self.cell, self._read(operands)
        states = [self._time_first(array, "states") for array in saved.states]
        gates, d_states = self._time_first(saved.gates, "gates"), saved.d_states
        d_states = None if d_states is None else self._time_first(d_states, "states")
        d_initial = [self._final_gradient(directions, given) for given in saved.d_finals]
        columns = gates.shape[-1]
        dx, dw, dr = (self._output(i, a.shape) for i, a in enumerate((operands.x, operands.w, operands.r)))
        db = self._output(3, (len(directions), 2 * columns))
        passes = []
        for d, direction in enumerate(directions):
            own = Saved(
                [array[:, d] for array in states],
                direction.without_padding(gates[:, d]),
                None if d_states is None else direction.without_padding(d_states[:, d]),
                [gradient[d] for gradient in d_initial],
            )
            through = backward(cell, direction, own)
            through.run()
            passes.append(through)
            da = rows(through.da)
            if dr is not None:
                for part, left, right in through.recurrent_products():
                    np.matmul(left.T, right, out=dr[d, part])
            ones = np.ones(len(da), da.dtype)
            if db is not None:
                db[d].reshape(2, columns)[...] = ones @ da
            changed = through.turn_to_inputs()
            if db is not None:
                db[d, changed] = ones @ da[:, changed]
            if dw is not None:
                np.matmul(da.T, rows(direction.x), out=dw[d])
            if dx is not None:
                self._put_input_gradient(dx, da, direction.w, add=d > 0)
        finals = [
            (array.swapaxes(0, 1) if cell.batch_first else array) if self.wanted[i] else None
            for i, array in enumerate(d_initial, 4)
        ]
        return [dx, dw, dr, db, *finals], passes

    def _read(self, operands: Operands[np.ndarray]) -> list[Direction]:
        x, lengths, padding = self._time_first(operands.x, "X"), operands.lengths, None
        steps, batch = x.shape[:2]
        if lengths is None:
            lengths = np.full(batch, steps)
        elif ((lengths < 0) | (lengths > steps)).any():
            raise ValueError(f"the lengths SL must be from 0 to {steps}; they are {lengths.tolist()}")
        elif (lengths < steps).any():
            padding = np.arange(steps)[:, None] >= lengths
            x = _without(padding, x)
        hidden, b, p = operands.r.shape[2], operands.b, operands.peepholes
        zeros = np.zeros((len(self.cell.reverse), batch, hidden), x.dtype)
        initial = [zeros if h is None else self._time_first(h, "state") for h in operands.initial]
        return [
            Direction(
                reverse=reverse,
                activations=self.cell.activations[d],
                x=x,
                w=operands.w[d],
                r=operands.r[d],
                b=None if b is None else b[d],
                initial=[state[d] for state in initial],
                peepholes=None if p is None else p[d].reshape(3, hidden),
                lengths=lengths,
                padding=padding,
            )
            for d, reverse in enumerate(self.cell.reverse)
        ]

    def _output(self, i: int, shape: Sequence[int]) -> np.ndarray | None:
        return self.empty(i, shape) if self.wanted[i] else None

    def _time_first(self, array: np.ndarray, kind: str) -> np.ndarray:
        """From the node's layout into layout 0."""
        if not self.cell.batch_first:
            return array
        return np.ascontiguousarray(np.moveaxis(array, 0, AXES[kind].index("N")))

    def _final_gradient(self, directions: Sequence[Direction], given: np.ndarray | None) -> np.ndarray:
        """The gradient of a final state, to go back from and to write to: [directions, batch, hidden]."""
        first = directions[0]
        if given is None:
            return np.zeros((len(directions), *first.initial[0].shape), first.x.dtype)
        result = np.array(self._time_first(given, "state"))
        # An empty row's final state is zero whatever comes in.
        result[:, first.lengths == 0] = 0
        return result

    def _put_input_gradient(self, dx: np.ndarray, da: np.ndarray, w: np.ndarray, *, add: bool) -> None:
        """Put da W into dX, which is in the node's layout, or add it."""
        batch_first = self.cell.batch_first
        if not (add or batch_first):
            np.matmul(da, w, out=rows(dx))
            return
        time_first = dx.swapaxes(0, 1) if batch_first else dx
        product = (da @ w).reshape(time_first.shape)
        if add:
            time_first += product
        else:
            time_first[...] = product
