"""The models of workloads.py in PyTorch, with the same names for the same weights. Imports PyTorch only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

Tensors = Mapping[str, Tensor]
Sizes = Mapping[str, int]


def dense(v: Tensors, name: str, x: Tensor) -> Tensor:
    return functional.linear(x, v[f"{name}.w"], v[f"{name}.b"])


def conv(v: Tensors, name: str, x: Tensor, stride: int = 1) -> Tensor:
    w = v[f"{name}.w"]
    return functional.conv2d(x, w, v[f"{name}.b"], stride, w.shape[-1] // 2, groups=x.shape[1] // w.shape[1])


def classify(v: Tensors, x: Tensor) -> Tensor:
    return functional.cross_entropy(dense(v, "head", x), v["label"])


def mlp(v: Tensors, s: Sizes) -> Tensor:
    x = v["x"]
    for i in range(s["depth"]):
        x = dense(v, f"layer{i}", x).relu()
    return classify(v, x)


def cnn(v: Tensors, s: Sizes) -> Tensor:
    x = functional.max_pool2d(conv(v, "one", v["x"]).relu(), 2)
    x = functional.max_pool2d(conv(v, "two", x).relu(), 2)
    return classify(v, dense(v, "hidden", x.flatten(1)).relu())


def resnet(v: Tensors, s: Sizes) -> Tensor:
    x = functional.max_pool2d(conv(v, "stem", v["x"], 2).relu(), 3, 2, 1)
    for stage in range(3):
        for block in range(s["depth"]):
            name = f"stage{stage}.{block}"
            stride = v[f"{name}.one.w"].shape[0] // x.shape[1]
            inner = conv(v, f"{name}.two", conv(v, f"{name}.one", x, stride).relu())
            x = (inner + (x if stride == 1 else conv(v, f"{name}.short", x, stride))).relu()
    return classify(v, x.mean((2, 3)))


def mobilenet(v: Tensors, s: Sizes) -> Tensor:
    x = functional.relu6(conv(v, "stem", v["x"], 2))
    for stage in range(3):
        for block in range(s["depth"]):
            name = f"stage{stage}.{block}"
            stride = v[f"{name}.project.w"].shape[0] // x.shape[1]
            inner = functional.relu6(conv(v, f"{name}.expand", x))
            inner = conv(v, f"{name}.project", functional.relu6(conv(v, f"{name}.depth", inner, stride)))
            x = x + inner if stride == 1 else inner
    return classify(v, x.mean((2, 3)))


# torch.compile leaves torch.nn.GRU and LSTM as they are; the functions that they call it would unroll.
@torch.compiler.disable
def last_state(v: Tensors, op: str) -> Tensor:
    zeros = v["x"].new_zeros(1, v["x"].shape[1], v["r"].shape[1])
    weights = [v[name] for name in ("w", "r", "b.w", "b.r")]
    states, function = (zeros, torch.gru) if op == "gru" else ([zeros, zeros], torch.lstm)
    sequence: Tensor = function(v["x"], states, weights, True, 1, 0.0, True, False, False)[0]
    return sequence[-1]


def gru(v: Tensors, s: Sizes) -> Tensor:
    return classify(v, last_state(v, "gru"))


def lstm(v: Tensors, s: Sizes) -> Tensor:
    return classify(v, last_state(v, "lstm"))


def transformer(v: Tensors, s: Sizes) -> Tensor:
    def linear(name: str, x: Tensor) -> Tensor:
        return functional.linear(x, v[f"{name}.w"].T, v.get(f"{name}.b"))

    def norm(name: str, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], v[f"{name}.scale"], v[f"{name}.bias"])

    x = v["x"]
    for i in range(s["depth"]):
        normed = norm(f"layer{i}.norm1", x)
        q, k, w = (
            linear(f"layer{i}.{part}", normed).unflatten(2, (s["heads"], -1)).transpose(1, 2)
            for part in "qkv"
        )
        mixed = functional.scaled_dot_product_attention(q, k, w).transpose(1, 2).flatten(2)
        x = x + linear(f"layer{i}.out", mixed)
        inner = functional.gelu(linear(f"layer{i}.up", norm(f"layer{i}.norm2", x)))
        x = x + linear(f"layer{i}.down", inner)
    return classify(v, norm("norm", x).mean(1))


KINDS: Mapping[str, Callable[[Tensors, Sizes], Tensor]] = {
    kind.__name__: kind for kind in (mlp, cnn, resnet, mobilenet, gru, lstm, transformer)
}

# Where PyTorch's gates are in ONNX's order, which is z r h for GRU and i o f c for LSTM.
_GATES: Mapping[str, Sequence[int]] = {"gru": (1, 0, 2), "lstm": (0, 2, 3, 1)}


def _reorder(rows: Tensor, order: Sequence[int]) -> Tensor:
    parts = rows.chunk(len(order))
    return torch.cat([parts[i] for i in order])


def from_onnx(kind: str, values: Tensors) -> dict[str, Tensor]:
    """Values as PyTorch has them: the gates in its order, the bias in two halves."""
    if kind not in _GATES:
        return dict(values)
    order = _GATES[kind]
    halves = values["b"][0].chunk(2)
    parts = {"w": values["w"][0], "r": values["r"][0], "b.w": halves[0], "b.r": halves[1]}
    others = {name: value for name, value in values.items() if name not in ("w", "r", "b")}
    return {**others, **{name: _reorder(part, order) for name, part in parts.items()}}


def to_onnx(kind: str, values: Tensors) -> dict[str, Tensor]:
    """The inverse of `from_onnx`."""
    if kind not in _GATES:
        return dict(values)
    order = [_GATES[kind].index(i) for i in range(len(_GATES[kind]))]
    w, r, *halves = (_reorder(values[name], order)[None] for name in ("w", "r", "b.w", "b.r"))
    others = {name: value for name, value in values.items() if name not in ("w", "r", "b.w", "b.r")}
    return {**others, "w": w, "r": r, "b": torch.cat(halves, 1)}
