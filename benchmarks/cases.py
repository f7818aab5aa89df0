"""What is timed: one row per case. A case is data; a new operator is a new row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper

Arrays = dict[str, np.ndarray]
Fill = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def normal(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.standard_normal(shape, dtype=np.float32)


def small(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return normal(generator, shape) * np.float32(0.1)


def sigmoid(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return 1 / (1 + np.exp(-normal(generator, shape)))


def tanh(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.tanh(normal(generator, shape))


def log_softmax(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    x = normal(generator, shape)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def softmax(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.exp(log_softmax(generator, shape))


def kept(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.random(shape) >= 0.25


def quarter(_: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.full(shape, 0.25, np.float32)


def one(_: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.ones(shape, np.float32)


def classes(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.integers(0, 100, shape)


@dataclass(frozen=True)
class Case:
    """One node. `inputs` gives each input's values and shape; `derive` adds what follows from them."""

    op_type: str
    label: str
    inputs: Mapping[str, tuple[Fill, tuple[int, ...]]]
    outputs: Sequence[str] = ("dX",)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    node_inputs: Sequence[str] = ()  # if not just the names of `inputs`
    domain: str = "com.microsoft"
    output_shape: tuple[int, ...] | None = None  # onnxruntime-training's pools read it off the graph
    derive: Callable[[Arrays, Mapping[str, Any]], Arrays] | None = None

    @property
    def name(self) -> str:
        return f"{self.op_type} {self.label}"

    def feeds(self) -> Arrays:
        generator = np.random.default_rng(0)
        arrays = {name: fill(generator, shape) for name, (fill, shape) in self.inputs.items()}
        return {**arrays, **self.derive(arrays, self.attributes)} if self.derive else arrays

    def model(self, feeds: Arrays) -> onnx.ModelProto:
        """The node as onnxruntime-training writes it, so that all sessions get the same bytes."""
        names = self.node_inputs or list(feeds)
        node = helper.make_node(
            self.op_type, names, self.outputs, name="timed", domain=self.domain, **self.attributes
        )
        graph = helper.make_graph(
            [node],
            "benchmark",
            [
                helper.make_tensor_value_info(
                    n, helper.np_dtype_to_tensor_dtype(feeds[n].dtype), feeds[n].shape
                )
                for n in names
                if n
            ],
            [
                helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, self.output_shape)
                for n in self.outputs
            ],
        )
        opsets = [helper.make_opsetid("", 15), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def chain(count: int) -> onnx.ModelProto:
    """So many nodes on 64 elements, each of which reads the result of the one before."""
    names = ["dY", *(f"dX{i}" for i in range(1, count)), "dX"]
    nodes = [
        helper.make_node("ReluGrad", [dy, "X"], [dx], name=dx, domain="com.microsoft")
        for dy, dx in itertools.pairwise(names)
    ]
    tensors = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [64]) for name in ("dY", "X", "dX")
    ]
    opsets = [helper.make_opsetid("", 15), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(
        helper.make_graph(nodes, "chain", tensors[:2], tensors[2:]), opset_imports=opsets, ir_version=8
    )


def max_pool_indices(arrays: Arrays, attributes: Mapping[str, Any]) -> Arrays:
    """Where the maxima are, flat over the whole tensor as onnxruntime counts."""
    (kh, kw), (sh, sw) = attributes["kernel_shape"], attributes["strides"]
    top, left, bottom, right = attributes["pads"]
    x = normal(np.random.default_rng(1), _POOLED)
    h, w = x.shape[2:]
    pads = ((0, 0), (0, 0), (top, bottom), (left, right))
    padded = np.pad(x, pads, constant_values=-np.inf)
    where = np.pad(np.arange(x.size).reshape(x.shape), pads)
    best, index = None, None
    out_h, out_w = (h + top + bottom - kh) // sh + 1, (w + left + right - kw) // sw + 1
    for i in range(kh):
        for j in range(kw):
            window = (..., slice(i, i + sh * out_h - sh + 1, sh), slice(j, j + sw * out_w - sw + 1, sw))
            value, place = padded[window], where[window]
            better = value > best if best is not None else np.ones(value.shape, bool)
            best = np.where(better, value, best if best is not None else value)
            index = np.where(better, place, index if index is not None else place)
    assert index is not None
    return {"Indices": index}


def gru_states(arrays: Arrays, _: Mapping[str, Any]) -> Arrays:
    """The forward pass of a GRU with linear_before_reset=1, which is PyTorch's."""
    x, w, r, b, state = arrays["X"], arrays["W"][0], arrays["R"][0], arrays["B"][0], arrays["H0"][0]
    hidden = state.shape[-1]
    states, gates = [], []
    for step in x:
        a = step @ w.T + b[: 3 * hidden]
        c = state @ r.T + b[3 * hidden :]
        z, reset = (
            1 / (1 + np.exp(-(a[:, s] + c[:, s]))) for s in (slice(0, hidden), slice(hidden, 2 * hidden))
        )
        h = np.tanh(a[:, 2 * hidden :] + reset * c[:, 2 * hidden :])
        state = (1 - z) * h + z * state
        states.append(state[None])
        gates.append(np.concatenate([z, reset, h], -1)[None])
    return {"HAll": np.stack(states), "ZRH": np.stack(gates)}


def elementwise(op_type: str, fill: Fill, second: str = "X", **attributes: Any) -> Case:
    inputs = {"dY": (normal, _MILLION), second: (fill, _MILLION)}
    return Case(op_type, "1M", inputs, attributes=attributes)


def rows(op_type: str, fill: Fill, axis: int) -> Case:
    shape = (1024, 1000)
    return Case(op_type, "1024x1000", {"dY": (normal, shape), "Y": (fill, shape)}, attributes={"axis": axis})


def conv(
    label: str, x: tuple[int, ...], w: tuple[int, ...], stride: int = 1, pad: int = 0, group: int = 1
) -> Case:
    out = [(size + 2 * pad - kernel) // stride + 1 for size, kernel in zip(x[2:], w[2:], strict=True)]
    return Case(
        "ConvGrad",
        label,
        {"dY": (normal, (x[0], w[0], *out)), "X": (normal, x), "W": (small, w)},
        outputs=["dX", "dW", "dB"],
        attributes={
            "kernel_shape": list(w[2:]),
            "strides": [stride] * len(out),
            "pads": [pad] * 2 * len(out),
            "group": group,
        },
    )


_MILLION = (1000, 1000)
_POOLED = (8, 64, 112, 112)
_POOL = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
_T, _B, _I, _H = 50, 32, 128, 256

CASES = [
    elementwise("ReluGrad", normal),
    elementwise("SigmoidGrad", sigmoid, "Y"),
    elementwise("TanhGrad", tanh, "Y"),
    elementwise("LeakyReluGrad", normal, "Y", alpha=0.1),
    elementwise("QuickGeluGrad", normal, alpha=1.702),
    elementwise("GeluGrad", normal),
    elementwise("FastGeluGrad", normal),
    Case(
        "BiasGeluGrad_dX", "1M", {"dY": (normal, _MILLION), "X": (normal, _MILLION), "B": (normal, (1000,))}
    ),
    rows("SoftmaxGrad", softmax, 1),
    rows("SoftmaxGrad_13", softmax, -1),
    rows("LogSoftmaxGrad", log_softmax, 1),
    rows("LogSoftmaxGrad_13", log_softmax, -1),
    *(
        Case(op_type, "1M", {"dY": (normal, _MILLION), "mask": (kept, _MILLION), "ratio": (quarter, ())})
        for op_type in ("DropoutGrad", "TrainableDropoutGrad")
    ),
    Case(
        "SoftmaxCrossEntropyLossGrad",
        "10000x100",
        {"dY": (one, ()), "log_prob": (log_softmax, (10000, 100)), "label": (classes, (10000,))},
        outputs=["d_logits"],
        attributes={"reduction": "mean"},
    ),
    conv("3x3", (8, 64, 56, 56), (64, 64, 3, 3), pad=1),
    conv("1x1", (8, 256, 56, 56), (64, 256, 1, 1)),
    conv("3x3 strided", (8, 64, 56, 56), (128, 64, 3, 3), stride=2, pad=1),
    conv("7x7 strided", (8, 3, 112, 112), (64, 3, 7, 7), stride=2, pad=3),
    conv("3x3 depthwise", (8, 96, 56, 56), (96, 1, 3, 3), pad=1, group=96),
    conv("3x3 depthwise strided", (8, 96, 56, 56), (96, 1, 3, 3), stride=2, pad=1, group=96),
    conv("3x3 depthwise 7x7 planes", (8, 960, 7, 7), (960, 1, 3, 3), pad=1, group=960),
    Case(
        "MaxPoolGrad",
        "3x3 strided",
        {"dY": (normal, (8, 64, 56, 56))},
        attributes=_POOL,
        domain="",
        output_shape=_POOLED,
        derive=max_pool_indices,
    ),
    Case(
        "AveragePoolGrad",
        "3x3 strided",
        {"dY": (normal, (8, 64, 56, 56))},
        attributes={**_POOL, "count_include_pad": 1},
        domain="",
        output_shape=_POOLED,
    ),
    Case(
        "GRUGrad",
        f"T{_T} B{_B} I{_I} H{_H}",
        {
            "X": (normal, (_T, _B, _I)),
            "W": (small, (1, 3 * _H, _I)),
            "R": (small, (1, 3 * _H, _H)),
            "B": (small, (1, 6 * _H)),
            "H0": (small, (1, _B, _H)),
            "dHAll": (normal, (_T, 1, _B, _H)),
            "dHFinal": (normal, (1, _B, _H)),
        },
        outputs=["dX", "dW", "dR", "dB", "dH0"],
        attributes={"hidden_size": _H, "linear_before_reset": 1},
        node_inputs=["X", "W", "R", "B", "", "H0", "HAll", "ZRH", "dHAll", "dHFinal"],
        derive=gru_states,
    ),
]
