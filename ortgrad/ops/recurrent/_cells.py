"""What GRU, LSTM and RNN share: attributes, reading and checking inputs, the loop over the steps.

Rows of the batch run through the steps in place: one that is over at a step hands its state (or its
gradient) on, so the reverse direction starts at each row's own end without moving any data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ortgrad.errors import NodeError
from ortgrad.operators.declaration import Choice, Operand, Shape
from ortgrad.ops.recurrent._activations import Activation, parse_activations

if TYPE_CHECKING:
    import onnx_ir as ir

    from ortgrad.autodiff.rules import ForwardNode
    from ortgrad.graph.recorder import Recorder

C = TypeVar("C", bound="Cell")
V = TypeVar("V", "ir.Value", "ir.Value | None")


@dataclass(frozen=True)
class Cell:
    """What the attributes of a recurrent operator say; an operator adds its own to it."""

    reverse: tuple[bool, ...]  # one per direction
    activations: list[tuple[Activation, ...]]
    clip: float | None
    hidden_size: int | None
    batch_first: bool

    @classmethod
    def parse(
        cls: type[C],
        default: Sequence[str],
        *,
        activations: Sequence[str] | None,
        activation_alpha: Sequence[float] | None,
        activation_beta: Sequence[float] | None,
        clip: float | None,
        direction: str,
        hidden_size: int | None,
        layout: int,
        gradient: bool,
        **own: int,
    ) -> C:
        """`default` are the activations of one direction."""
        if clip is not None and not clip > 0:
            raise NodeError(f"clip is {clip}; it must be positive")
        if layout not in (0, 1):
            raise NodeError(f"layout is {layout}; it must be 0 or 1")
        reverse = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction]
        functions = parse_activations(
            activations, activation_alpha, activation_beta, default, len(reverse), gradient=gradient
        )
        return cls(reverse, functions, clip, hidden_size, layout == 1, **own)

    def time_first(self, name: str, array: np.ndarray, **sizes: int) -> np.ndarray:
        """Check the shape and bring the array into the order of `sizes`, which is that of layout 0."""
        if not self.batch_first:
            require_shape(name, array, **sizes)
            return array
        place = list(sizes).index("batch")
        require_shape(name, array, **{"batch": sizes["batch"], **sizes})
        return np.ascontiguousarray(np.moveaxis(array, 0, place))

    def as_asked(self, array: np.ndarray, batch: int) -> np.ndarray:
        """From the order of layout 0, where the batch is that axis, into the order of the node's layout."""
        return np.moveaxis(array, batch, 0) if self.batch_first else array

    def input_gradient(self, da: np.ndarray, w: np.ndarray, dx: np.ndarray, *, add: bool) -> None:
        """Put da W, of a row for each step and batch, into dX of the node's layout, or add it."""
        if not (add or self.batch_first):
            np.matmul(da, w, out=dx.reshape(len(da), dx.shape[2]))
            return
        time_first = dx.swapaxes(0, 1) if self.batch_first else dx
        product = (da @ w).reshape(time_first.shape)
        if add:
            time_first += product
        else:
            time_first[...] = product

    def onnx_time_first(self, op: Recorder, value: V, batch: int) -> V:
        """A tensor, if there is one, in the order of layout 0; it has one axis after the batch there."""
        if value is None or not self.batch_first:
            return value
        return op.Transpose(value, perm=[*range(1, batch + 1), 0, batch + 1])

    def onnx_as_asked(self, op: Recorder, value: ir.Value, batch: int) -> ir.Value:
        """The way back."""
        order = [batch, *range(batch), batch + 1]
        return op.Transpose(value, perm=order) if self.batch_first else value


ATTRIBUTES = {
    "activations": list[str],
    "activation_alpha": list[float],
    "activation_beta": list[float],
    "clip": float,
    "direction": Choice("forward", "reverse", "bidirectional"),
    "hidden_size": int,
    "layout": 0,
}


def attributes_of(node: ForwardNode, *own: str) -> dict[str, Any]:
    """The attributes of a forward node, those of its own kind named."""
    found = {name: node.attribute(name) for name in (*ATTRIBUTES, *own)}
    if "activations" not in node.forward.attributes:
        # RNN's schema has a default that is too long for one direction.
        found["activations"] = None
    return found


def input_dims(
    gates: int, *, direction: str, hidden_size: int | None, layout: int, **_: Any
) -> dict[str, str]:
    """The patterns of what GRU and LSTM read and keep, by what it is."""
    d = 2 if direction == "bidirectional" else 1
    if hidden_size is not None and hidden_size < 0:
        raise ValueError(f"hidden_size is {hidden_size}; it must not be negative")
    # A number in place of the name, if the attribute says it.
    h = "H" if hidden_size is None else str(hidden_size)

    def times(factor: int) -> str:
        return f"{factor}*H" if hidden_size is None else str(factor * hidden_size)

    return {
        "X": "N T I" if layout else "T N I",
        "R": f"{d} {times(gates)} {h}",
        "W": f"{d} {times(gates)} I",
        "B": f"{d} {times(2 * gates)}",
        "P": f"{d} {times(3)}",
        "SL": "N",
        "state": f"N {d} {h}" if layout else f"{d} N {h}",
        "states": f"N T {d} {h}" if layout else f"T {d} N {h}",
        "gates": f"N T {d} {times(gates)}" if layout else f"T {d} N {times(gates)}",
    }


def sizes(x: Operand | None, r: Operand | None, **attributes: Any) -> tuple[Any, ...]:
    """Steps, directions, batch and hidden size, None where unknown."""
    steps, batch = x.shape[:2] if x and x.shape and len(x.shape) == 3 else (None, None)
    if attributes["layout"]:
        steps, batch = batch, steps
    hidden = attributes["hidden_size"] or (r.shape[-1] if r and r.shape else None)
    return steps, 2 if attributes["direction"] == "bidirectional" else 1, batch, hidden


def times(factor: int, size: Any) -> int | None:
    return factor * size if isinstance(size, int) else None


def output_shapes(x: Operand | None, r: Operand | None, **attributes: Any) -> tuple[Shape, Shape]:
    """The shapes of all states and of a final state, up to the hidden size that ends both."""
    steps, directions, batch, _ = sizes(x, r, **attributes)
    if attributes["layout"]:
        return (batch, steps, directions), (batch, directions)
    return (steps, directions, batch), (directions, batch)


def require_shape(name: str, array: np.ndarray | None, **sizes: int) -> None:
    """Raise unless the array, if there is one, has these sizes."""
    if array is not None and array.shape != tuple(sizes.values()):
        raise ValueError(
            f"{name} has shape {list(array.shape)}; "
            f"[{', '.join(sizes)}] is {list(sizes.values())} for the shapes of X and R and these attributes"
        )


@dataclass(frozen=True)
class Inputs:
    """What recurrent operators read, checked, in the order of layout 0."""

    x: np.ndarray  # [steps, batch, inputs]
    w: np.ndarray  # [directions, gates * hidden, inputs]
    r: np.ndarray  # [directions, gates * hidden, hidden]
    b: np.ndarray | None  # [directions, 2 * gates * hidden]
    h0: np.ndarray  # [directions, batch, hidden]
    lengths: np.ndarray  # [batch]
    padding: np.ndarray | None  # [steps, batch], true where a row is over; None if that is nowhere

    @classmethod
    def check(
        cls,
        cell: Cell,
        gates: int,
        x: np.ndarray,
        w: np.ndarray,
        r: np.ndarray,
        b: np.ndarray | None,
        sl: np.ndarray | None,
        h0: np.ndarray | None,
        h0_name: str = "H0",
    ) -> Inputs:
        for name, array in (("X", x), ("W", w), ("R", r)):
            if array.ndim != 3:
                raise ValueError(f"{name} must have 3 dimensions; it has shape {list(array.shape)}")
        steps, batch, inputs = (x.swapaxes(0, 1) if cell.batch_first else x).shape
        directions, hidden = len(cell.reverse), r.shape[2]
        if cell.hidden_size not in (None, hidden):
            raise ValueError(f"hidden_size is {cell.hidden_size}, but R has shape {list(r.shape)}")
        x = cell.time_first("X", x, steps=steps, batch=batch, inputs=inputs)
        require_shape("R", r, directions=directions, gates=gates * hidden, hidden=hidden)
        require_shape("W", w, directions=directions, gates=gates * hidden, inputs=inputs)
        require_shape("B", b, directions=directions, biases=2 * gates * hidden)
        if h0 is None:
            h0 = np.zeros((directions, batch, hidden), x.dtype)
        else:
            h0 = cell.time_first(h0_name, h0, directions=directions, batch=batch, hidden=hidden)
        if sl is None:
            return cls(x, w, r, b, h0, np.full(batch, steps), None)
        require_shape("SL", sl, batch=batch)
        if ((sl < 0) | (sl > steps)).any():
            raise ValueError(f"the lengths SL must be from 0 to {steps}; they are {sl.tolist()}")
        padding = np.arange(steps)[:, None] >= sl
        return cls(x, w, r, b, h0, sl, padding if padding.any() else None)

    def weighted(
        self, direction: int, block: slice = slice(None), recurrent_biases: int | None = None
    ) -> np.ndarray:
        """X W^T and the biases, of the recurrent ones so many: [steps, batch, gates * hidden]."""
        x = self.x[block]
        steps, batch, inputs = x.shape
        result = x.reshape(steps * batch, inputs) @ self.w[direction].T
        if self.b is not None:
            bias, recurrent = np.split(self.b[direction], 2)
            result += bias
            result[:, :recurrent_biases] += recurrent[:recurrent_biases]
        return result.reshape(steps, batch, result.shape[1])

    def previous(self, states: np.ndarray, first: np.ndarray, reverse: bool) -> np.ndarray:
        """The state that each step starts from, zero where a row is over: [steps, batch, hidden]."""
        result = np.empty_like(states)
        if not len(result):
            return result
        if reverse:
            result[:-1] = states[1:]
            result[-1] = first
            if self.padding is not None:
                rows = np.flatnonzero(self.lengths)
                result[self.lengths[rows] - 1, rows] = first[rows]
        else:
            result[1:] = states[:-1]
            result[0] = first
        if self.padding is not None:
            result[self.padding] = 0
        return result

    def cleared(self, array: np.ndarray) -> np.ndarray:
        """[steps, batch, ...] with zeros where a row is over: what stands there, NaN too, must not count."""
        if self.padding is None:
            return array
        array = array.copy()
        array[self.padding] = 0
        return array

    def initial_gradient(self, cell: Cell, name: str, given: np.ndarray | None) -> np.ndarray:
        """The gradient of a final state, to go back from and to write to: [directions, batch, hidden]."""
        if given is None:
            return np.zeros_like(self.h0)
        directions, batch, hidden = self.h0.shape
        given = cell.time_first(name, given, directions=directions, batch=batch, hidden=hidden).copy()
        # An empty row's final state is zero whatever comes in.
        given[:, self.lengths == 0] = 0
        return given


# How many states a gradient prepares at once.
_BLOCK = 1 << 15


def blocks(reverse: bool, steps: int, size: int) -> list[slice]:
    """The steps in pieces that fit the cache, in the order in which the gradient goes through them."""
    count = max(1, _BLOCK // max(1, size))
    result = [slice(start, min(start + count, steps)) for start in range(0, steps, count)]
    return result if reverse else result[::-1]


def stack(arrays: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Put the directions together along a new axis."""
    return np.expand_dims(arrays[0], axis) if len(arrays) == 1 else np.stack(arrays, axis)


# To the end, for Slice.
_END = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Values:
    """What one direction of a recurrent operator reads, in the order of layout 0."""

    reverse: bool
    activations: tuple[Activation, ...]
    x: ir.Value  # [steps, batch, inputs]
    w: ir.Value  # [gates * hidden, inputs]
    r: ir.Value  # [gates * hidden, hidden]
    biases: tuple[ir.Value, ir.Value] | None  # [gates * hidden] both
    h0: ir.Value  # [batch, hidden]
    steps: ir.Value  # (steps)
    state: ir.Value  # (batch, hidden)
    hidden: ir.Value | int  # (hidden), or the number if it is known
    lengths: ir.Value | None  # [batch]
    valid: ir.Value | None  # [steps, batch, 1]

    @classmethod
    def read(
        cls,
        op: Recorder,
        cell: Cell,
        gates: int,
        x: ir.Value,
        w: ir.Value,
        r: ir.Value,
        b: ir.Value | None,
        sl: ir.Value | None,
        h0: ir.Value | None,
    ) -> list[Values]:
        # The Reshapes move nothing; they refuse what would be broadcast by mistake.
        import onnx_ir as ir

        x = cell.onnx_time_first(op, x, 1)
        count = len(cell.reverse)
        steps, batch = (op.Slice(op.shape_of(x), [i], [i + 1]) for i in (0, 1))
        hidden = cell.hidden_size
        if hidden is None and r.shape is not None and isinstance(r.shape[2], int):
            hidden = r.shape[2]
        size = op.Slice(op.Shape(r), [2], [3]) if hidden is None else op.constant(np.array([hidden]))
        state = op.Concat(batch, size, axis=0)
        lengths = valid = None
        if sl is not None:
            end = op.Add(op.Squeeze(steps, [0]), 1)
            lengths = op.Reshape(op.Cast(sl, to=ir.DataType.INT64), batch)
            # Gather refuses an index that is too large, and a length with it.
            index = op.Where(op.Less(lengths, 0), end, lengths)
            lengths = op.Gather(op.Range(0, end, 1), index)
            valid = op.Unsqueeze(op.Less(op.Unsqueeze(op.Range(0, op.Sub(end, 1), 1), [1]), lengths), [2])
        result = []
        for d, first in enumerate(initial_states(op, cell, h0, x, state)):
            biases = None
            if b is not None:
                biases = _split(op, pick(op, b, d, count), hidden or size, (gates, gates), 0)
            result.append(
                cls(
                    cell.reverse[d],
                    cell.activations[d],
                    x,
                    pick(op, w, d, count),
                    pick(op, r, d, count),
                    biases,
                    first,
                    steps,
                    state,
                    hidden or size,
                    lengths,
                    valid,
                )
            )
        return result

    def weighted(self, op: Recorder, bias: ir.Value | None) -> ir.Value:
        """X W^T and a bias, for all steps: [steps, batch, gates * hidden]."""
        result = op.MatMul(self.x, op.Transpose(self.w, perm=[1, 0]))
        return result if bias is None else op.Add(result, bias)

    def bias(self, op: Recorder) -> ir.Value | None:
        """The sum of both biases."""
        return None if self.biases is None else op.Add(*self.biases)

    def split(self, op: Recorder, value: ir.Value, parts: Sequence[int], axis: int) -> Sequence[ir.Value]:
        """Pieces of so many gates along an axis."""
        return _split(op, value, self.hidden, parts, axis)

    def keep_valid(self, op: Recorder, value: ir.Value) -> ir.Value:
        """Zero where a row is over."""
        return value if self.valid is None else op.Where(self.valid, value, 0.0)

    def keep_begun(self, op: Recorder, value: ir.Value) -> ir.Value:
        """Zero [batch, hidden] where a row is empty; onnxruntime's final state is so."""
        if self.lengths is None:
            return value
        return op.Where(op.Unsqueeze(op.Greater(self.lengths, 0), [1]), value, 0.0)

    def previous(self, op: Recorder, states: ir.Value, initial: ir.Value) -> ir.Value:
        """The state that each step starts from, zero where a row is over: [steps, batch, hidden]."""
        first = op.Unsqueeze(initial, [0])
        if not self.reverse:
            return self.keep_valid(op, op.Concat(first, op.Slice(states, [0], [-1], [0]), axis=0))
        previous = op.Concat(op.Slice(states, [1], [_END], [0]), first, axis=0)
        if self.lengths is None:
            return previous
        steps = op.Range(1, op.Add(op.Squeeze(self.steps, [0]), 1), 1)
        begins = op.Equal(op.Unsqueeze(steps, [1, 2]), op.Unsqueeze(self.lengths, [1]))
        return self.keep_valid(op, op.Where(begins, first, previous))

    def sequence(self, op: Recorder, cell: Cell, value: V, d: int, gates: int = 1) -> V:
        """One direction of a tensor [steps, directions, batch, gates * hidden], if there is one."""
        if value is None:
            return value
        shape = op.Concat(self.steps, op.Mul(self.state, [1, gates]), axis=0)
        return op.Reshape(pick(op, cell.onnx_time_first(op, value, 2), d, len(cell.reverse), 1), shape)

    def initial_gradient(self, op: Recorder, cell: Cell, given: ir.Value | None, d: int) -> ir.Value:
        """The gradient of a final state, to go back from."""
        if given is None:
            return op.full_like(self.h0, 0.0)
        picked = pick(op, cell.onnx_time_first(op, given, 1), d, len(cell.reverse))
        return self.keep_begun(op, op.Reshape(picked, self.state))


def _split(op: Recorder, value: ir.Value, hidden: ir.Value | int, parts: Sequence[int], axis: int) -> Any:
    if isinstance(hidden, int):
        # Shape inference understands constants only.
        return op.Split(value, [count * hidden for count in parts], axis=axis, _outputs=len(parts))
    sizes = op.Concat(*(op.Mul(hidden, [count]) for count in parts), axis=0)
    return op.Split(value, sizes, axis=axis, _outputs=len(parts))


def initial_states(
    op: Recorder, cell: Cell, given: ir.Value | None, x: ir.Value, state: ir.Value
) -> list[ir.Value]:
    """The initial state [batch, hidden] of each direction, whose shape is `state`."""
    count = len(cell.reverse)
    if given is None:
        return [op.Expand(op.number(0.0, x), state)] * count
    given = cell.onnx_time_first(op, given, 1)
    return [op.Reshape(pick(op, given, d, count), state) for d in range(count)]


def pick(op: Recorder, value: ir.Value, index: int, count: int, axis: int = 0) -> ir.Value:
    """One direction of a tensor that has the directions along an axis."""
    if count == 1:
        return op.Squeeze(value, [axis])
    return op.Squeeze(op.Split(value, axis=axis, num_outputs=count, _outputs=count)[index], [axis])


def join(op: Recorder, values: Sequence[ir.Value], axis: int = 0) -> ir.Value:
    """Put the directions together along a new axis."""
    parts = [op.Unsqueeze(value, [axis]) for value in values]
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis)


def scan(
    op: Recorder,
    reverse: bool,
    states: Sequence[ir.Value],
    sequences: Sequence[ir.Value],
    step: Callable[..., Sequence[ir.Value]],
) -> Sequence[ir.Value]:
    """Run `step(op, *states, *elements)` over the first axis; the last states and what else it makes."""
    import onnx_ir as ir

    name = "reverse" if reverse else "forward"
    inputs = [
        ir.Value(name=op.name(f"{name}/input_{i}"), type=value.type)
        for i, value in enumerate([*states, *sequences])
    ]
    body = op.subgraph(name, inputs, step)
    for value in body.outputs:
        # onnxruntime 1.23 asks for the rank.
        value.shape = ir.Shape([None, None])
    made = len(body.outputs) - len(states)
    return op.Scan(
        *states,
        *sequences,
        body=body,
        num_scan_inputs=len(sequences),
        scan_input_directions=[int(reverse)] * len(sequences),
        scan_output_directions=[int(reverse)] * made,
        _outputs=len(body.outputs),
    )


def clipper(op: Recorder, cell: Cell, like: ir.Value) -> Callable[[Recorder, ir.Value], ir.Value]:
    """A function that limits what goes into an activation."""
    if cell.clip is None:
        return lambda op, value: value
    low, high = op.number(-cell.clip, like), op.number(cell.clip, like)
    return lambda op, value: op.Clip(value, low, high)


def within_clip(op: Recorder, cell: Cell, a: ir.Value, slope: ir.Value) -> ir.Value:
    """The slope, zero where `a` is cut off on the way into the activation."""
    return op.Where(op.LessOrEqual(op.Abs(a), float(cell.clip or 0)), slope, 0.0)


def outer(op: Recorder, left: ir.Value, right: ir.Value) -> ir.Value:
    """left^T right, summed over steps and batch."""
    return op.Gemm(op.Flatten(left, axis=2), op.Flatten(right, axis=2), transA=1)
