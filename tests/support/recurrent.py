"""ONNX's GRU, LSTM and RNN in PyTorch, one row and one step at a time: the oracle of their tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

FUNCTIONS = {
    "Sigmoid": lambda x, a, b: torch.sigmoid(x),
    "Tanh": lambda x, a, b: torch.tanh(x),
    "Relu": lambda x, a, b: torch.relu(x),
    "Affine": lambda x, a, b: a * x + b,
    "LeakyRelu": lambda x, a, b: torch.nn.functional.leaky_relu(x, a),
    "ThresholdedRelu": lambda x, a, b: torch.where(x > a, x, 0),
    "ScaledTanh": lambda x, a, b: a * torch.tanh(b * x),
    "HardSigmoid": lambda x, a, b: torch.clamp(a * x + b, 0, 1),
    "Elu": lambda x, a, b: torch.nn.functional.elu(x, a),
    "Softsign": lambda x, a, b: torch.nn.functional.softsign(x),
    "Softplus": lambda x, a, b: torch.nn.functional.softplus(x),
}
STANDARD = {"HardSigmoid": (0.2, 0.5), "LeakyRelu": (0.01, 0.0), "Elu": (1.0, 0.0)}
GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}
DEFAULTS = {"GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh"), "RNN": ("Tanh",)}
OPERANDS = ("X", "W", "R", "B", "SL", "H0", "C0", "P")
FLOATS = tuple(name for name in OPERANDS if name != "SL")


@dataclass
class Case:
    """An operator, sizes, attributes, which optional inputs there are; functions are (name, alpha, beta)."""

    name: str
    op_type: str
    steps: int = 4
    batch: int = 3
    inputs: int = 5
    hidden: int = 6
    direction: str = "forward"
    layout: int = 0
    clip: float | None = None
    lengths: Sequence[int] | None = None
    absent: Sequence[str] = ()
    functions: Sequence[tuple[str, float | None, float | None]] = ()
    own: Mapping[str, int] | None = None

    @property
    def directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    @property
    def outputs(self) -> list[str]:
        return ["Y", "Y_h", "Y_c"] if self.op_type == "LSTM" else ["Y", "Y_h"]

    @property
    def attributes(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            "direction": self.direction,
            "layout": self.layout,
            "hidden_size": self.hidden,
            **(self.own or {}),
        }
        if self.clip is not None:
            result["clip"] = self.clip
        if self.functions:
            result["activations"] = [name for name, _, _ in self.functions]
            for key, place in (("activation_alpha", 1), ("activation_beta", 2)):
                values = [function[place] for function in self.functions if function[place] is not None]
                result.update({key: values} if values else {})
        return result

    def feeds(self, dtype: Any) -> dict[str, np.ndarray]:
        """Inputs in the case's layout, without the absent ones."""
        rng = np.random.default_rng(0)
        d, h, gates = self.directions, self.hidden, GATES[self.op_type]
        shapes = {
            "X": (self.steps, self.batch, self.inputs),
            "W": (d, gates * h, self.inputs),
            "R": (d, gates * h, h),
            "B": (d, 2 * gates * h),
            "H0": (d, self.batch, h),
        }
        if self.op_type == "LSTM":
            shapes |= {"C0": (d, self.batch, h), "P": (d, 3 * h)}
        feeds = {name: (0.7 * rng.standard_normal(shape)).astype(dtype) for name, shape in shapes.items()}
        if self.lengths is not None:
            feeds["SL"] = np.array(self.lengths, np.int32)
        if self.layout:
            feeds |= {
                n: np.ascontiguousarray(feeds[n].swapaxes(0, 1)) for n in ("X", "H0", "C0") if n in feeds
            }
        return {name: array for name, array in feeds.items() if name not in self.absent}

    def upstream(self, dtype: Any) -> dict[str, np.ndarray]:
        """Gradients of the outputs, by the outputs' names."""
        rng = np.random.default_rng(1)
        d, h = self.directions, self.hidden
        result = {}
        for name in self.outputs:
            if name == "Y":
                array = rng.standard_normal((self.steps, d, self.batch, h))
                array = array.transpose(2, 0, 1, 3) if self.layout else array
            else:
                array = rng.standard_normal((d, self.batch, h))
                array = array.swapaxes(0, 1) if self.layout else array
            result[name] = np.ascontiguousarray(array.astype(dtype))
        return {name: array for name, array in result.items() if f"d{name}" not in self.absent}

    def functions_of(self, direction: int) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        """The activations of a direction."""
        defaults = [(name, None, None) for name in DEFAULTS[self.op_type]]
        found = []
        for given, alpha, beta in (self.functions or defaults * self.directions)[len(defaults) * direction :]:
            name = next(n for n in FUNCTIONS if n.lower() == given.lower())
            a, b = STANDARD.get(name, (0.0, 0.0))
            parameters = a if alpha is None else alpha, b if beta is None else beta
            found.append(lambda x, f=FUNCTIONS[name], p=parameters: f(x, *p))
        return found[: len(defaults)]


def plain(case: Case, feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outputs by name, in the case's layout."""
    x = feeds["X"].swapaxes(0, 1) if case.layout else feeds["X"]
    zeros = torch.zeros(case.hidden, dtype=x.dtype)
    y = [[[zeros] * case.batch for _ in range(case.directions)] for _ in range(case.steps)]
    finals = {name: [[zeros] * case.batch for _ in range(case.directions)] for name in case.outputs[1:]}
    for d in range(case.directions):
        step = _step(case, feeds, d, x.dtype)
        for row in range(case.batch):
            length = case.steps if case.lengths is None else int(case.lengths[row])
            states = []
            for name in ("H0", "C0") if case.op_type == "LSTM" else ("H0",):
                given = feeds.get(name)
                states.append(zeros if given is None else given[row, d] if case.layout else given[d, row])
            backwards = case.direction == "reverse" or d == 1
            for t in reversed(range(length)) if backwards else range(length):
                states = step(x[t, row], *states)
                y[t][d][row] = states[0]
                for name, state in zip(finals, states, strict=True):
                    finals[name][d][row] = state
    result = {"Y": torch.stack([torch.stack([torch.stack(rows) for rows in at]) for at in y])}
    result |= {name: torch.stack([torch.stack(rows) for rows in final]) for name, final in finals.items()}
    if case.layout:
        result = {n: v.permute(2, 0, 1, 3) if n == "Y" else v.swapaxes(0, 1) for n, v in result.items()}
    return result


def _step(
    case: Case, feeds: Mapping[str, torch.Tensor], d: int, dtype: torch.dtype
) -> Callable[..., list[torch.Tensor]]:
    functions = case.functions_of(d)
    gates, own = GATES[case.op_type], case.own or {}
    w, r = feeds["W"][d].split(case.hidden), feeds["R"][d].split(case.hidden)
    bias = feeds["B"][d] if "B" in feeds else torch.zeros(2 * gates * case.hidden, dtype=dtype)
    wb, rb = bias.split(case.hidden)[:gates], bias.split(case.hidden)[gates:]
    p = feeds["P"][d] if "P" in feeds else torch.zeros(3 * case.hidden, dtype=dtype)
    pi, po, pf = p.split(case.hidden)

    def activate(which: int, a: torch.Tensor) -> torch.Tensor:
        return functions[which](a if case.clip is None else a.clamp(-case.clip, case.clip))

    def rnn(x: torch.Tensor, h: torch.Tensor) -> list[torch.Tensor]:
        return [activate(0, w[0] @ x + r[0] @ h + wb[0] + rb[0])]

    def gru(x: torch.Tensor, h: torch.Tensor) -> list[torch.Tensor]:
        z, reset = (activate(0, w[k] @ x + r[k] @ h + wb[k] + rb[k]) for k in (0, 1))
        if own.get("linear_before_reset"):
            new = activate(1, w[2] @ x + reset * (r[2] @ h + rb[2]) + wb[2])
        else:
            new = activate(1, w[2] @ x + r[2] @ (reset * h) + rb[2] + wb[2])
        return [(1 - z) * new + z * h]

    def lstm(x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
        ai, ao, af, ac = (w[k] @ x + r[k] @ h + wb[k] + rb[k] for k in range(4))
        i = activate(0, ai + pi * c)
        f = 1 - i if own.get("input_forget") else activate(0, af + pf * c)
        new = f * c + i * activate(1, ac)
        return [activate(0, ao + po * new) * functions[2](new), new]

    return {"RNN": rnn, "GRU": gru, "LSTM": lstm}[case.op_type]


def plain_gradients(
    case: Case, feeds: Mapping[str, np.ndarray], upstream: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """PyTorch's gradients of the plain operator, by the inputs' names."""
    tensors = {n: torch.tensor(feeds[n], requires_grad=True) for n in FLOATS if n in feeds}
    outputs = plain(case, tensors)
    loss = torch.zeros((), dtype=tensors["X"].dtype)
    for name, grad in upstream.items():
        loss = loss + (outputs[name] * torch.tensor(grad)).sum()
    if loss.requires_grad:
        loss.backward()
    return {n: (torch.zeros_like(t) if t.grad is None else t.grad).numpy() for n, t in tensors.items()}


def torch_module(
    case: Case, feeds: Mapping[str, np.ndarray]
) -> tuple[torch.nn.RNNBase, dict[str, torch.Tensor]]:
    """PyTorch's own module with the case's weights; and X, H0 (and C0) as tensors."""
    dtype = torch.tensor(feeds["X"]).dtype
    kind = {"RNN": torch.nn.RNN, "GRU": torch.nn.GRU, "LSTM": torch.nn.LSTM}[case.op_type]
    module = kind(case.inputs, case.hidden, bidirectional=case.directions == 2, dtype=dtype)
    with torch.no_grad():
        for name, value in module_parameters(case, feeds).items():
            getattr(module, name).copy_(torch.tensor(value))
    return module, {n: torch.tensor(feeds[n], requires_grad=True) for n in ("X", "H0", "C0") if n in feeds}


def module_parameters(case: Case, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """W, R and B (or their gradients) under PyTorch's names and in its order of the gates."""
    gates = GATES[case.op_type]
    # From iofc to ifgo, from zrh to rzn.
    order = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2], "RNN": [0]}[case.op_type]
    half = gates * case.hidden
    arrays = {
        "weight_ih": values["W"],
        "weight_hh": values["R"],
        "bias_ih": values["B"][:, :half],
        "bias_hh": values["B"][:, half:],
    }
    result = {}
    for name, array in arrays.items():
        for d in range(case.directions):
            pieces = np.split(array[d], gates)
            result[f"{name}_l0{'_reverse' if d else ''}"] = np.concatenate([pieces[k] for k in order])
    return result


def run_module(
    case: Case, module: torch.nn.RNNBase, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What the module computes, packed if there are lengths, as ONNX's outputs in layout 0."""
    sequence: Any = tensors["X"]
    if case.lengths is not None:
        lengths = torch.tensor(case.lengths)
        sequence = torch.nn.utils.rnn.pack_padded_sequence(sequence, lengths, enforce_sorted=False)
    initial: Any = tensors["H0"] if case.op_type != "LSTM" else (tensors["H0"], tensors["C0"])
    y, final = module(sequence, initial)
    if case.lengths is not None:
        y, _ = torch.nn.utils.rnn.pad_packed_sequence(y, total_length=case.steps)
    y = y.reshape(case.steps, case.batch, case.directions, case.hidden).permute(0, 2, 1, 3)
    finals = final if case.op_type == "LSTM" else (final,)
    return dict(zip(case.outputs, (y, *finals), strict=True))
