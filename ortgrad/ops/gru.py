"""The GRU that keeps its gates for the gradient, and its gradient.

Both run through the steps in place: a row of the batch that is over at a step hands its state (or its
gradient) on, so the reverse direction starts at each row's own end without moving any data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ortgrad.errors import NodeError
from ortgrad.recurrent import Activation, parse_activations
from ortgrad.registry import Choice, Operand, Shape, operator

if TYPE_CHECKING:
    import onnx_ir as ir

    from ortgrad.bodies import Ops


@dataclass(frozen=True)
class _Cell:
    """What the attributes say."""

    reverse: tuple[bool, ...]  # one per direction
    activations: list[tuple[Activation, ...]]
    clip: float | None
    hidden_size: int | None
    batch_first: bool
    linear_before_reset: bool

    @classmethod
    def parse(
        cls,
        *,
        activations: Sequence[str] | None,
        activation_alpha: Sequence[float] | None,
        activation_beta: Sequence[float] | None,
        clip: float | None,
        direction: str,
        hidden_size: int | None,
        layout: int,
        linear_before_reset: int,
        gradient: bool,
    ) -> _Cell:
        if clip is not None and not clip > 0:
            raise NodeError(f"clip is {clip}; it must be positive")
        if layout not in (0, 1):
            raise NodeError(f"layout is {layout}; it must be 0 or 1")
        reverse = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction]
        functions = parse_activations(
            activations,
            activation_alpha,
            activation_beta,
            ["Sigmoid", "Tanh"],
            len(reverse),
            gradient=gradient,
        )
        return cls(reverse, functions, clip, hidden_size, layout == 1, linear_before_reset != 0)

    def time_first(self, name: str, array: np.ndarray, **sizes: int) -> np.ndarray:
        """Check the shape and bring the array into the order of `sizes`, which is that of layout 0."""
        if not self.batch_first:
            _require_shape(name, array, **sizes)
            return array
        place = list(sizes).index("batch")
        _require_shape(name, array, **{"batch": sizes["batch"], **sizes})
        return np.ascontiguousarray(np.moveaxis(array, 0, place))

    def as_asked(self, array: np.ndarray, batch: int) -> np.ndarray:
        """From the order of layout 0, where the batch is that axis, into the order of the node's layout."""
        return np.moveaxis(array, batch, 0) if self.batch_first else array

    def onnx_as_asked(self, op: Ops, value: ir.Value, batch: int) -> ir.Value:
        """The same in standard ONNX operators, for a tensor that has one axis after the batch."""
        order = [batch, *range(batch), batch + 1]
        return op.Transpose(value, perm=order) if self.batch_first else value


# How many states the gradient prepares at once.
_BLOCK = 1 << 15
# To the end, for Slice.
_END = np.iinfo(np.int64).max

_ATTRIBUTES = {
    "activations": list[str],
    "activation_alpha": list[float],
    "activation_beta": list[float],
    "clip": float,
    "direction": Choice("forward", "reverse", "bidirectional"),
    "hidden_size": int,
    "layout": 0,
    "linear_before_reset": 0,
}


def _sizes(
    x: Operand | None, r: Operand | None, direction: str, hidden_size: int | None, layout: int
) -> tuple[Any, ...]:
    """Steps, directions, batch and hidden size, None where unknown."""
    steps, batch = x.shape[:2] if x and x.shape and len(x.shape) == 3 else (None, None)
    if layout:
        steps, batch = batch, steps
    hidden = hidden_size or (r.shape[-1] if r and r.shape else None)
    return steps, 2 if direction == "bidirectional" else 1, batch, hidden


def _times(factor: int, size: Any) -> int | None:
    return factor * size if isinstance(size, int) else None


def _training_shapes(*operands: Operand | None, **attributes: Any) -> Sequence[Shape | None]:
    layout = attributes["layout"]
    steps, directions, batch, hidden = _sizes(
        operands[0], operands[2], attributes["direction"], attributes["hidden_size"], layout
    )
    sequence = (batch, steps, directions) if layout else (steps, directions, batch)
    final = (batch, directions, hidden) if layout else (directions, batch, hidden)
    return [(*sequence, hidden), final, (*sequence, _times(3, hidden))]


def _gradient_shapes(*operands: Operand | None, **attributes: Any) -> Sequence[Shape | None]:
    layout = attributes["layout"]
    _, directions, batch, hidden = _sizes(
        operands[0], operands[2], attributes["direction"], attributes["hidden_size"], layout
    )
    state = (batch, directions, hidden) if layout else (directions, batch, hidden)
    x, w, r = (None if o is None else o.shape for o in operands[:3])
    return [x, w, r, (directions, _times(6, hidden)), state]


def _require_shape(name: str, array: np.ndarray | None, **sizes: int) -> None:
    if array is not None and array.shape != tuple(sizes.values()):
        raise ValueError(
            f"{name} has shape {list(array.shape)}; "
            f"[{', '.join(sizes)}] is {list(sizes.values())} for the shapes of X and R and these attributes"
        )


@dataclass(frozen=True)
class _Inputs:
    """What both operators read, checked, in the order of layout 0."""

    x: np.ndarray  # [steps, batch, inputs]
    w: np.ndarray  # [directions, 3 hidden, inputs]
    r: np.ndarray  # [directions, 3 hidden, hidden]
    b: np.ndarray | None  # [directions, 6 hidden]
    h0: np.ndarray  # [directions, batch, hidden]
    lengths: np.ndarray  # [batch]
    padding: np.ndarray | None  # [steps, batch], true where a row is over; None if that is nowhere

    @classmethod
    def check(
        cls,
        cell: _Cell,
        x: np.ndarray,
        w: np.ndarray,
        r: np.ndarray,
        b: np.ndarray | None,
        sl: np.ndarray | None,
        h0: np.ndarray | None,
    ) -> _Inputs:
        for name, array in (("X", x), ("W", w), ("R", r)):
            if array.ndim != 3:
                raise ValueError(f"{name} must have 3 dimensions; it has shape {list(array.shape)}")
        steps, batch, inputs = (x.swapaxes(0, 1) if cell.batch_first else x).shape
        directions, hidden = len(cell.reverse), r.shape[2]
        if cell.hidden_size not in (None, hidden):
            raise ValueError(f"hidden_size is {cell.hidden_size}, but R has shape {list(r.shape)}")
        x = cell.time_first("X", x, steps=steps, batch=batch, inputs=inputs)
        _require_shape("R", r, directions=directions, gates=3 * hidden, hidden=hidden)
        _require_shape("W", w, directions=directions, gates=3 * hidden, inputs=inputs)
        if b is not None:
            _require_shape("B", b, directions=directions, biases=6 * hidden)
        if h0 is None:
            h0 = np.zeros((directions, batch, hidden), x.dtype)
        else:
            h0 = cell.time_first("H0", h0, directions=directions, batch=batch, hidden=hidden)
        if sl is None:
            return cls(x, w, r, b, h0, np.full(batch, steps), None)
        _require_shape("SL", sl, batch=batch)
        if ((sl < 0) | (sl > steps)).any():
            raise ValueError(f"the lengths SL must be from 0 to {steps}; they are {sl.tolist()}")
        padding = np.arange(steps)[:, None] >= sl
        return cls(x, w, r, b, h0, sl, padding if padding.any() else None)

    def weighted(self, direction: int, linear_before_reset: bool, block: slice = slice(None)) -> np.ndarray:
        """X W^T and the biases that are added to it, for some steps: [steps, batch, 3 hidden]."""
        x = self.x[block]
        steps, batch, inputs = x.shape
        result = x.reshape(steps * batch, inputs) @ self.w[direction].T
        if self.b is not None:
            bias, recurrent = np.split(self.b[direction], 2)
            result += bias
            count = 2 * self.r.shape[2] if linear_before_reset else None
            result[:, :count] += recurrent[:count]
        return result.reshape(steps, batch, result.shape[1])


@operator(
    "GRUTraining",
    inputs=["X", "W", "R", "B?", "SL?: int32", "H0?"],
    outputs=["HAll?", "HFinal?", "ZRH?"],
    shapes=_training_shapes,
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
    cell = _Cell.parse(**attributes, gradient=False)
    inputs = _Inputs.check(cell, x, w, r, b, sl, h0)
    states, finals, gates = zip(*(_forward(cell, inputs, d) for d in range(len(cell.reverse))), strict=True)
    return (
        cell.as_asked(_stack(states, 1), 2) if wanted[0] else None,
        cell.as_asked(_stack(finals, 0), 1) if wanted[1] else None,
        cell.as_asked(_stack(gates, 1), 2) if wanted[2] else None,
    )


def _stack(arrays: Sequence[np.ndarray], axis: int) -> np.ndarray:
    return np.expand_dims(arrays[0], axis) if len(arrays) == 1 else np.stack(arrays, axis)


def _forward(cell: _Cell, inputs: _Inputs, direction: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States [steps, batch, hidden], final state [batch, hidden] and gates [steps, batch, 3 hidden]."""
    gate_function, state_function = cell.activations[direction]
    clip, padding = cell.clip, inputs.padding
    gates = inputs.weighted(direction, cell.linear_before_reset)
    steps, batch, hidden = *gates.shape[:2], inputs.r.shape[2]
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
def _(
    op: Ops,
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
    cell = _Cell.parse(**attributes, gradient=False)
    values = _Values.read(op, cell, x, w, r, b, sl, h0)
    states, finals, gates = zip(*(_scan_forward(op, cell, v) for v in values), strict=True)
    return (
        cell.onnx_as_asked(op, _join(op, states, 1), 2) if wanted[0] else None,
        cell.onnx_as_asked(op, _join(op, finals), 1) if wanted[1] else None,
        cell.onnx_as_asked(op, _join(op, gates, 1), 2) if wanted[2] else None,
    )


@dataclass(frozen=True)
class _Values:
    """What one direction reads, in the order of layout 0."""

    reverse: bool
    activations: tuple[Activation, ...]
    x: ir.Value  # [steps, batch, inputs]
    w: ir.Value  # [3 hidden, inputs]
    r: ir.Value  # [3 hidden, hidden]
    bias: ir.Value | None  # [3 hidden], what is added to X W^T
    recurrent_bias: ir.Value | None  # [hidden], Rbh if it is not in `bias`
    h0: ir.Value  # [batch, hidden]
    steps: ir.Value  # (steps)
    state: ir.Value  # (batch, hidden)
    zr_h: ir.Value  # the sizes (2 hidden, hidden) for Split
    lengths: ir.Value | None  # [batch]
    valid: ir.Value | None  # [steps, batch, 1]

    @classmethod
    def read(
        cls,
        op: Ops,
        cell: _Cell,
        x: ir.Value,
        w: ir.Value,
        r: ir.Value,
        b: ir.Value | None,
        sl: ir.Value | None,
        h0: ir.Value | None,
    ) -> list[_Values]:
        # The Reshapes move nothing; they refuse what would be broadcast by mistake.
        import onnx_ir as ir

        if cell.batch_first:
            x = op.Transpose(x, perm=[1, 0, 2])
            h0 = None if h0 is None else op.Transpose(h0, perm=[1, 0, 2])
        count = len(cell.reverse)
        steps, batch = (op.Slice(op.shape(x), [i], [i + 1]) for i in (0, 1))
        hidden = op.Slice(op.shape(r), [2], [3])
        if cell.hidden_size is not None:
            hidden = op.constant(np.array([cell.hidden_size]))
        zr_h = op.Concat(op.Mul(hidden, [2]), hidden, axis=0)
        state = op.Concat(batch, hidden, axis=0)
        lengths = valid = None
        if sl is not None:
            end = op.Add(op.Squeeze(steps, [0]), 1)
            lengths = op.Reshape(op.Cast(sl, to=ir.DataType.INT64), batch)
            # Gather refuses an index that is too large, and a length with it.
            index = op.Where(op.Less(lengths, 0), end, lengths)
            lengths = op.Gather(op.Range(0, end, 1), index)
            valid = op.Unsqueeze(op.Less(op.Unsqueeze(op.Range(0, op.Sub(end, 1), 1), [1]), lengths), [2])
        result = []
        for d in range(count):
            bias = recurrent_bias = None
            if b is not None:
                sizes = op.Concat(op.Mul(hidden, [3]), op.Mul(hidden, [3]), axis=0)
                bias, recurrent = op.Split(_pick(op, b, d, count), sizes, axis=0, _outputs=2)
                if cell.linear_before_reset:
                    gates, recurrent_bias = op.Split(recurrent, zr_h, axis=0, _outputs=2)
                    recurrent = op.Concat(gates, op.full_like(recurrent_bias, 0.0), axis=0)
                bias = op.Add(bias, recurrent)
            result.append(
                cls(
                    cell.reverse[d],
                    cell.activations[d],
                    x,
                    _pick(op, w, d, count),
                    _pick(op, r, d, count),
                    bias,
                    recurrent_bias,
                    op.Expand(op.number(0.0, x), state)
                    if h0 is None
                    else op.Reshape(_pick(op, h0, d, count), state),
                    steps,
                    state,
                    zr_h,
                    lengths,
                    valid,
                )
            )
        return result

    def weighted(self, op: Ops) -> ir.Value:
        """X W^T and the biases that are added to it, for all steps: [steps, batch, 3 hidden]."""
        result = op.MatMul(self.x, op.Transpose(self.w, perm=[1, 0]))
        return result if self.bias is None else op.Add(result, self.bias)

    def split(self, op: Ops, value: ir.Value, axis: int) -> tuple[ir.Value, ir.Value]:
        """The part of the gates z and r, and that of h."""
        zr, h = op.Split(value, self.zr_h, axis=axis, _outputs=2)
        return zr, h

    def keep_valid(self, op: Ops, value: ir.Value) -> ir.Value:
        """Zero where a row is over."""
        return value if self.valid is None else op.Where(self.valid, value, 0.0)

    def keep_begun(self, op: Ops, value: ir.Value) -> ir.Value:
        """Zero [batch, hidden] where a row is empty; onnxruntime's final state is so."""
        if self.lengths is None:
            return value
        return op.Where(op.Unsqueeze(op.Greater(self.lengths, 0), [1]), value, 0.0)


def _pick(op: Ops, value: ir.Value, index: int, count: int, axis: int = 0) -> ir.Value:
    """One direction of a tensor that has the directions along an axis."""
    if count == 1:
        return op.Squeeze(value, [axis])
    return op.Squeeze(op.Split(value, axis=axis, num_outputs=count, _outputs=count)[index], [axis])


def _join(op: Ops, values: Sequence[ir.Value], axis: int = 0) -> ir.Value:
    """Put the directions together along a new axis."""
    parts = [op.Unsqueeze(value, [axis]) for value in values]
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis)


def _scan(
    op: Ops,
    reverse: bool,
    state: ir.Value,
    sequences: Sequence[ir.Value],
    step: Callable[..., Sequence[ir.Value]],
) -> Sequence[ir.Value]:
    """Run `step(op, state, *elements)` over the first axis; the last state and what else it makes."""
    import onnx_ir as ir

    name = "reverse" if reverse else "forward"
    inputs = [
        ir.Value(name=f"{op.prefix}{name}/input_{i}", type=value.type)
        for i, value in enumerate([state, *sequences])
    ]
    body = op.subgraph(name, inputs, step)
    made = len(body.outputs) - 1
    return op.Scan(
        state,
        *sequences,
        body=body,
        num_scan_inputs=len(sequences),
        scan_input_directions=[int(reverse)] * len(sequences),
        scan_output_directions=[int(reverse)] * made,
        _outputs=1 + made,
    )


def _scan_forward(op: Ops, cell: _Cell, v: _Values) -> tuple[ir.Value, ir.Value, ir.Value]:
    gate_function, state_function = v.activations
    x_zr, x_h = v.split(op, v.weighted(op), 2)
    r_zr, r_h = (op.Transpose(part, perm=[1, 0]) for part in v.split(op, v.r, 0))
    clip = _clip(op, cell, v.x)

    def step(
        op: Ops, state: ir.Value, x_zr: ir.Value, x_h: ir.Value, valid: ir.Value | None = None
    ) -> Sequence[ir.Value]:
        zr = gate_function.onnx(op, clip(op, op.Gemm(state, r_zr, x_zr)))
        z, r = op.Split(zr, axis=1, num_outputs=2, _outputs=2)
        if cell.linear_before_reset:
            a = op.Add(x_h, op.Mul(r, op.Gemm(state, r_h, v.recurrent_bias)))
        else:
            a = op.Gemm(op.Mul(r, state), r_h, x_h)
        h = state_function.onnx(op, clip(op, a))
        new = op.Add(h, op.Mul(z, op.Sub(state, h)))
        if valid is not None:
            new = op.Where(valid, new, state)
        return new, new, zr, h

    sequences = [x_zr, x_h] if v.valid is None else [x_zr, x_h, v.valid]
    final, states, zr, h = _scan(op, v.reverse, v.h0, sequences, step)
    gates = op.Concat(zr, h, axis=2)
    return v.keep_valid(op, states), v.keep_begun(op, final), v.keep_valid(op, gates)


def _clip(op: Ops, cell: _Cell, like: ir.Value) -> Callable[[Ops, ir.Value], ir.Value]:
    if cell.clip is None:
        return lambda op, value: value
    low, high = op.number(-cell.clip, like), op.number(cell.clip, like)
    return lambda op, value: op.Clip(value, low, high)


@operator(
    "GRUGrad",
    inputs=["X", "W", "R", "B?", "SL?: int32", "H0?", "HAll", "ZRH", "dHAll?", "dHFinal?"],
    outputs=["dX?", "dW?", "dR?", "dB?", "dH0?"],
    shapes=_gradient_shapes,
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
    **attributes: Any,
) -> tuple[np.ndarray | None, ...]:
    """dX, dW, dR, dB, dH0 = dHAll . d(HAll) + dHFinal . d(HFinal)"""
    cell = _Cell.parse(**attributes, gradient=True)
    inputs = _Inputs.check(cell, x, w, r, b, sl, h0)
    directions, batch, hidden = inputs.h0.shape
    sizes = {"steps": len(inputs.x), "directions": directions, "batch": batch}
    h_all = cell.time_first("HAll", h_all, **sizes, hidden=hidden)
    zrh = cell.time_first("ZRH", zrh, **sizes, gates=3 * hidden)
    if dh_all is not None:
        dh_all = cell.time_first("dHAll", dh_all, **sizes, hidden=hidden)
    if dh_final is None:
        dh_final = np.zeros_like(inputs.h0)
    else:
        dh_final = cell.time_first("dHFinal", dh_final, directions=directions, batch=batch, hidden=hidden)
    # An empty row's final state is zero whatever comes in.
    dh_final[:, inputs.lengths == 0] = 0
    if inputs.padding is not None:
        # What stands there must not matter, not even if it is NaN.
        inputs.x[inputs.padding] = 0
    parts = [
        _backward(
            cell,
            inputs,
            d,
            h_all[:, d],
            np.ascontiguousarray(zrh[:, d]),
            None if dh_all is None else dh_all[:, d],
            dh_final[d],
            wanted,
        )
        for d in range(directions)
    ]
    dx, dw, dr, db, dh0 = zip(*parts, strict=True)
    if wanted[0] and directions == 2:
        np.add(dx[0], dx[1], out=dx[0])
    return (
        cell.as_asked(dx[0].reshape(inputs.x.shape), 1) if wanted[0] else None,
        _stack(dw, 0) if wanted[1] else None,
        _stack(dr, 0) if wanted[2] else None,
        _stack(db, 0) if wanted[3] else None,
        cell.as_asked(_stack(dh0, 0), 1) if wanted[4] else None,
    )


def _previous_states(cell: _Cell, inputs: _Inputs, direction: int, h_all: np.ndarray) -> np.ndarray:
    """The state that each step starts from: [steps, batch, hidden]."""
    h0, padding = inputs.h0[direction], inputs.padding
    previous = np.empty_like(h_all)
    if not len(previous):
        return previous
    if cell.reverse[direction]:
        previous[:-1] = h_all[1:]
        previous[-1] = h0
        if padding is not None:
            rows = np.flatnonzero(inputs.lengths)
            previous[inputs.lengths[rows] - 1, rows] = h0[rows]
    else:
        previous[1:] = h_all[:-1]
        previous[0] = h0
    if padding is not None:
        previous[padding] = 0
    return previous


def _backward(
    cell: _Cell,
    inputs: _Inputs,
    direction: int,
    h_all: np.ndarray,
    zrh: np.ndarray,
    dh_all: np.ndarray | None,
    dh: np.ndarray,
    wanted: Sequence[bool],
) -> tuple[np.ndarray | None, ...]:
    """The gradients of one direction; overwrites h_all, zrh, dh_all and dh.

    With dH for the gradient of a step's new state and a for what goes into an activation,

        dah = dH (1 - z) g'    daz = dH (H - h) f'    dar = (dah Rh) H f'
        dH of the step before = dH z + daz Rz + dar Rr + (dah Rh) r

    or, if linear_before_reset, with q = H Rh^T + Rbh,

        dar = dah q f'
        dH of the step before = dH z + daz Rz + dar Rr + (dah r) Rh

    What does not depend on dH is computed for a block of steps at once, what the recurrence does not
    need for all steps after it. A step's gradients take the place of its gates: fresh memory is slow.
    """
    steps, batch, hidden = h_all.shape
    x, w, r = inputs.x.reshape(steps * batch, inputs.x.shape[2]), inputs.w[direction], inputs.r[direction]
    r_zr, r_h = r[: 2 * hidden], r[2 * hidden :]
    linear_before_reset, padding = cell.linear_before_reset, inputs.padding
    previous = _previous_states(cell, inputs, direction, h_all)
    if padding is not None:
        zrh[padding] = 0
        if dh_all is not None:
            dh_all[padding] = 0
    # dah if linear_before_reset, else r H; nobody needs the states any more.
    kept = h_all
    rest, through, product = np.empty((3, batch, hidden), h_all.dtype)
    for block in _blocks(cell.reverse[direction], steps, batch * hidden):
        factors, factor_h = _factors(cell, inputs, direction, block, zrh, previous, kept)
        if padding is not None:
            zrh[block, :, :hidden][padding[block]] = 1
        order = range(len(factors)) if cell.reverse[direction] else reversed(range(len(factors)))
        for i in order:
            t = block.start + i
            gates = zrh[t].reshape(batch, 3, hidden)
            if dh_all is not None:
                dh += dh_all[t]
            np.multiply(dh, gates[:, 0], out=rest)
            if linear_before_reset:
                np.multiply(dh, factor_h[i], out=kept[t])
                np.multiply(dh[:, None], factors[i], out=gates)
                np.matmul(zrh[t], r, out=dh)
            else:
                np.multiply(dh, factors[i, :, 0], out=gates[:, 0])
                np.multiply(dh, factors[i, :, 2], out=gates[:, 2])
                np.matmul(gates[:, 2], r_h, out=through)
                np.multiply(through, gates[:, 1], out=product)
                rest += product
                np.multiply(through, factors[i, :, 1], out=gates[:, 1])
                np.matmul(zrh[t, :, : 2 * hidden], r_zr, out=dh)
            dh += rest
    da = zrh.reshape(steps * batch, 3 * hidden)
    flat_previous, flat_kept = (a.reshape(steps * batch, hidden) for a in (previous, kept))
    ones = np.ones(steps * batch, da.dtype)
    dx = dw = dr = db = None
    if wanted[3]:
        db = np.tile(ones @ da, 2)
    if wanted[2]:
        dr = np.empty_like(r)
        if linear_before_reset:
            np.matmul(da.T, flat_previous, out=dr)
        else:
            np.matmul(da[:, : 2 * hidden].T, flat_previous, out=dr[: 2 * hidden])
            np.matmul(da[:, 2 * hidden :].T, flat_kept, out=dr[2 * hidden :])
    if linear_before_reset:
        da[:, 2 * hidden :] = flat_kept
        if db is not None:
            db[2 * hidden : 3 * hidden] = ones @ flat_kept
    if wanted[0]:
        dx = da @ w
    if wanted[1]:
        dw = da.T @ x
    return dx, dw, dr, db, dh


def _blocks(reverse: bool, steps: int, size: int) -> list[slice]:
    """The steps in pieces that fit the cache, in the order in which the gradient goes through them."""
    count = max(1, _BLOCK // max(1, size))
    blocks = [slice(start, min(start + count, steps)) for start in range(0, steps, count)]
    return blocks if reverse else blocks[::-1]


def _factors(
    cell: _Cell,
    inputs: _Inputs,
    direction: int,
    block: slice,
    zrh: np.ndarray,
    previous: np.ndarray,
    kept: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """What the gradients are multiples of, [steps, batch, 3, hidden]: see `_backward`.

    The factors of daz, dar and dah, the second one for dah Rh; or, if linear_before_reset, those of daz,
    dar and dah r, and apart that of dah, all for dH. Leaves r H in `kept` if not linear_before_reset.
    """
    gates, h0 = zrh[block], previous[block]
    steps, batch, hidden = h0.shape
    rows, r = steps * batch, inputs.r[direction]
    gate_function, state_function = cell.activations[direction]
    z, reset, h = (gates[:, :, i * hidden : (i + 1) * hidden] for i in range(3))
    if cell.linear_before_reset:
        linear = (h0.reshape(rows, hidden) @ r[2 * hidden :].T).reshape(h0.shape)
        if inputs.b is not None:
            linear += inputs.b[direction, 5 * hidden :]
    else:
        np.multiply(reset, h0, out=kept[block])
    factors = np.empty((steps, batch, 3, hidden), gates.dtype)
    flat = factors.reshape(gates.shape)
    flat[:, :, : 2 * hidden] = gate_function.slope(gates[:, :, : 2 * hidden])
    flat[:, :, 2 * hidden :] = state_function.slope(h)
    if cell.clip is not None:
        # The gates do not tell what went into them, so it is computed once more.
        a = inputs.weighted(direction, cell.linear_before_reset, block)
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
def _(
    op: Ops,
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
    cell = _Cell.parse(**attributes, gradient=True)
    values = _Values.read(op, cell, x, w, r, b, sl, h0)
    if cell.batch_first:
        h_all, zrh = (op.Transpose(value, perm=[1, 2, 0, 3]) for value in (h_all, zrh))
        dh_all = None if dh_all is None else op.Transpose(dh_all, perm=[1, 2, 0, 3])
        dh_final = None if dh_final is None else op.Transpose(dh_final, perm=[1, 0, 2])
    count = len(values)
    parts = []
    for d, v in enumerate(values):
        sequence = op.Concat(v.steps, v.state, axis=0)
        states = op.Reshape(_pick(op, h_all, d, count, 1), sequence)
        gates = op.Reshape(_pick(op, zrh, d, count, 1), op.Mul(sequence, [1, 1, 3]))
        dhs = None if dh_all is None else op.Reshape(_pick(op, dh_all, d, count, 1), sequence)
        dh = op.full_like(v.h0, 0.0)
        if dh_final is not None:
            dh = op.Reshape(_pick(op, dh_final, d, count), v.state)
        parts.append(_scan_backward(op, cell, v, states, gates, dhs, v.keep_begun(op, dh), wanted))
    dx, dw, dr, db, dh0 = zip(*parts, strict=True)
    total = None
    if wanted[0]:
        total = dx[0] if count == 1 else op.Add(*dx)
        total = cell.onnx_as_asked(op, total, 1)
    return (
        total,
        _join(op, dw) if wanted[1] else None,
        _join(op, dr) if wanted[2] else None,
        _join(op, db) if wanted[3] else None,
        cell.onnx_as_asked(op, _join(op, dh0), 1) if wanted[4] else None,
    )


def _onnx_previous_states(op: Ops, v: _Values, states: ir.Value) -> ir.Value:
    """The state that each step starts from: [steps, batch, hidden]."""
    first = op.Unsqueeze(v.h0, [0])
    if not v.reverse:
        return v.keep_valid(op, op.Concat(first, op.Slice(states, [0], [-1], [0]), axis=0))
    previous = op.Concat(op.Slice(states, [1], [_END], [0]), first, axis=0)
    if v.lengths is None or v.valid is None:
        return previous
    steps = op.Range(1, op.Add(op.Squeeze(v.steps, [0]), 1), 1)
    begins = op.Equal(op.Unsqueeze(steps, [1, 2]), op.Unsqueeze(v.lengths, [1]))
    return v.keep_valid(op, op.Where(begins, first, previous))


def _scan_backward(
    op: Ops,
    cell: _Cell,
    v: _Values,
    states: ir.Value,
    zrh: ir.Value,
    dh_all: ir.Value | None,
    dh: ir.Value,
    wanted: Sequence[bool],
) -> Sequence[ir.Value | None]:
    """As `_backward`: only what the recurrence needs is inside of the Scan."""
    gate_function, state_function = v.activations
    x, zrh = v.keep_valid(op, v.x), v.keep_valid(op, zrh)
    previous = _onnx_previous_states(op, v, states)
    zr, h = v.split(op, zrh, 2)
    z, r = op.Split(zr, axis=2, num_outputs=2, _outputs=2)
    r_zr, r_h = v.split(op, v.r, 0)
    if cell.linear_before_reset:
        linear = op.MatMul(previous, op.Transpose(r_h, perm=[1, 0]))
        linear = linear if v.recurrent_bias is None else op.Add(linear, v.recurrent_bias)
    else:
        inner = op.Mul(r, previous)
    slope_zr, slope_h = gate_function.onnx_slope(op, zr), state_function.onnx_slope(op, h)
    if cell.clip is not None:
        a_zr, a_h = v.split(op, v.weighted(op), 2)
        a_zr = op.Add(a_zr, op.MatMul(previous, op.Transpose(r_zr, perm=[1, 0])))
        if cell.linear_before_reset:
            a_h = op.Add(a_h, op.Mul(r, linear))
        else:
            a_h = op.Add(a_h, op.MatMul(inner, op.Transpose(r_h, perm=[1, 0])))
        slope_zr, slope_h = (
            op.Where(op.LessOrEqual(op.Abs(a), cell.clip), slope, 0.0)
            for a, slope in ((a_zr, slope_zr), (a_h, slope_h))
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
            op: Ops, dh: ir.Value, factors: ir.Value, z: ir.Value, up: ir.Value | None = None
        ) -> Sequence[ir.Value]:
            dh = dh if up is None else op.Add(dh, up)
            da = op.Mul(op.Concat(dh, dh, dh, axis=1), factors)
            return op.Gemm(da, v.r, op.Mul(dh, z)), da, dh

        dh0, da_r, dhs = _scan(op, not v.reverse, dh, [factors, z, *upstream], linear_step)
        da_zr, _ = v.split(op, da_r, 2)
        da = op.Concat(da_zr, op.Mul(dhs, factor_h), axis=2)
    else:
        factor_r = op.Mul(slope_r, previous)

        def reset_step(
            op: Ops,
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
        dh0, da_zr, dah = _scan(op, not v.reverse, dh, sequences, reset_step)
        da = da_r = op.Concat(da_zr, dah, axis=2)
    dx = dw = dr = db = None
    if wanted[0]:
        dx = op.MatMul(da, v.w)
    if wanted[1]:
        dw = _outer(op, da, x)
    if wanted[2] and cell.linear_before_reset:
        dr = _outer(op, da_r, previous)
    elif wanted[2]:
        dr = op.Concat(_outer(op, da_zr, previous), _outer(op, dah, inner), axis=0)
    if wanted[3]:
        sums = (op.ReduceSum(value, [0, 1], keepdims=0) for value in (da, da_r))
        db = op.Concat(*sums, axis=0)
    return dx, dw, dr, db, dh0


def _outer(op: Ops, left: ir.Value, right: ir.Value) -> ir.Value:
    """left^T right, summed over steps and batch."""
    return op.Gemm(op.Flatten(left, axis=2), op.Flatten(right, axis=2), transA=1)
