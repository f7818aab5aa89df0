"""Whole models, made by hand in ONNX: what models.py times. workloads_torch.py has them in PyTorch.

A kind of model is a function that records the nodes and returns the shape of the input `x`, with "N" for the
batch. Each ends in a loss over classes, a scalar. Batch normalization is folded into the convolutions, as
exporters write it for inference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.recorded_graph import Arrays, Graph, Shape, ints, number

Sizes = Mapping[str, int]
CLASSES = 10


def dense(g: Graph, name: str, x: str, inputs: int, outputs: int) -> str:
    return g.Gemm(x, g.weight(f"{name}.w", outputs, inputs), g.weight(f"{name}.b", outputs), transB=1)


def conv(g: Graph, name: str, x: str, w: tuple[int, int, int], stride: int = 1, group: int = 1) -> str:
    """A convolution with weights (outputs, inputs, size) and a bias, padded to keep the picture's size."""
    outputs, inputs, size = w
    weight, bias = g.weight(f"{name}.w", outputs, inputs // group, size, size), g.weight(f"{name}.b", outputs)
    return g.Conv(x, weight, bias, pads=[size // 2] * 4, strides=[stride] * 2, group=group)


def classify(g: Graph, scores: str) -> None:
    # onnxruntime-training wants all outputs to have names.
    g.SoftmaxCrossEntropyLoss(scores, "label", out=["loss", "log_prob"])


def average(g: Graph, x: str, channels: int) -> None:
    classify(g, dense(g, "head", g.Flatten(g.GlobalAveragePool(x)), channels, CLASSES))


def mlp(g: Graph, s: Sizes) -> Shape:
    x, inputs = "x", s["features"]
    for i in range(s["depth"]):
        x, inputs = g.Relu(dense(g, f"layer{i}", x, inputs, s["width"])), s["width"]
    classify(g, dense(g, "head", x, inputs, CLASSES))
    return "N", s["features"]


def cnn(g: Graph, s: Sizes) -> Shape:
    width, size = s["width"], s["size"]
    x = g.Relu(conv(g, "one", "x", (width, 1, 3)))
    x = g.MaxPool(x, kernel_shape=[2, 2], strides=[2, 2])
    x = g.Relu(conv(g, "two", x, (2 * width, width, 3)))
    x = g.MaxPool(x, kernel_shape=[2, 2], strides=[2, 2])
    x = g.Relu(dense(g, "hidden", g.Flatten(x), 2 * width * (size // 4) ** 2, 4 * width))
    classify(g, dense(g, "head", x, 4 * width, CLASSES))
    return "N", 1, size, size


def resnet(g: Graph, s: Sizes) -> Shape:
    """Three stages of `depth` blocks; each stage has twice the channels of the one before."""
    inputs = s["width"]
    x = g.Relu(conv(g, "stem", "x", (inputs, 3, 7), 2))
    x = g.MaxPool(x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    for stage in range(3):
        for block in range(s["depth"]):
            name, outputs = f"stage{stage}.{block}", s["width"] << stage
            stride = outputs // inputs
            inner = g.Relu(conv(g, f"{name}.one", x, (outputs, inputs, 3), stride))
            inner = conv(g, f"{name}.two", inner, (outputs, outputs, 3))
            short = x if stride == 1 else conv(g, f"{name}.short", x, (outputs, inputs, 1), stride)
            x, inputs = g.Relu(g.Add(inner, short)), outputs
    average(g, x, inputs)
    return "N", 3, s["size"], s["size"]


def mobilenet(g: Graph, s: Sizes) -> Shape:
    """Three stages of `depth` inverted residual blocks: depthwise convolutions between pointwise ones."""

    def relu6(x: str) -> str:
        return g.Clip(x, number(0), number(6))

    inputs = s["width"]
    x = relu6(conv(g, "stem", "x", (inputs, 3, 3), 2))
    for stage in range(3):
        for block in range(s["depth"]):
            name, outputs, wide = f"stage{stage}.{block}", s["width"] << stage, 4 * inputs
            inner = relu6(conv(g, f"{name}.expand", x, (wide, inputs, 1)))
            inner = relu6(conv(g, f"{name}.depth", inner, (wide, wide, 3), outputs // inputs, wide))
            inner = conv(g, f"{name}.project", inner, (outputs, wide, 1))
            x, inputs = g.Add(x, inner) if inputs == outputs else inner, outputs
    average(g, x, inputs)
    return "N", 3, s["size"], s["size"]


def recurrent(g: Graph, s: Sizes, op_type: str, gates: int, **attributes: int) -> Shape:
    features, width = s["features"], s["width"]
    w, r = (
        g.weight("w", 1, gates * width, features, scale=0.05),
        g.weight("r", 1, gates * width, width, scale=0.05),
    )
    b = g.weight("b", 1, 2 * gates * width, scale=0.05)
    getattr(g, op_type)("x", w, r, b, out=["", "last"], hidden_size=width, **attributes)
    classify(g, dense(g, "head", g.Squeeze("last", ints(0)), width, CLASSES))
    return s["steps"], "N", features


def gru(g: Graph, s: Sizes) -> Shape:
    return recurrent(g, s, "GRU", 3, linear_before_reset=1)


def lstm(g: Graph, s: Sizes) -> Shape:
    return recurrent(g, s, "LSTM", 4)


def transformer(g: Graph, s: Sizes) -> Shape:
    """An encoder over embedded tokens, normalized before each part; their mean is classified."""
    width, heads = s["width"], s["heads"]

    def linear(name: str, x: str, inputs: int, outputs: int, *, bias: bool = True) -> str:
        y = g.MatMul(x, g.weight(f"{name}.w", inputs, outputs))
        return g.Add(y, g.weight(f"{name}.b", outputs, scale=0.1)) if bias else y

    def norm(name: str, x: str) -> str:
        scale = g.weight(f"{name}.scale", width, scale=0.1, shift=1.0)
        outputs = [f"{name}.y", f"{name}.mean", f"{name}.deviation"]
        return g.LayerNormalization(
            x, scale, g.weight(f"{name}.bias", width, scale=0.1), axis=-1, out=outputs
        )

    def by_head(name: str, x: str, perm: tuple[int, ...]) -> str:
        # Softmax cancels a bias of the keys: its gradient is nothing but rounding.
        projected = linear(name, x, width, width, bias=not name.endswith("k"))
        return g.Transpose(g.Reshape(projected, ints(0, 0, heads, width // heads)), perm=perm)

    x = "x"
    for i in range(s["depth"]):
        normed = norm(f"layer{i}.norm1", x)
        q, v = (by_head(f"layer{i}.{part}", normed, (0, 2, 1, 3)) for part in "qv")
        k = by_head(f"layer{i}.k", normed, (0, 2, 3, 1))
        scores = g.Mul(g.MatMul(q, k), number((width / heads) ** -0.5))
        mixed = g.Transpose(g.MatMul(g.Softmax(scores, axis=-1), v), perm=(0, 2, 1, 3))
        x = g.Add(x, linear(f"layer{i}.out", g.Reshape(mixed, ints(0, 0, width)), width, width))
        inner = g.Gelu(linear(f"layer{i}.up", norm(f"layer{i}.norm2", x), width, 4 * width))
        x = g.Add(x, linear(f"layer{i}.down", inner, 4 * width, width))
    pooled = g.ReduceMean(norm("norm", x), ints(1), keepdims=0)
    classify(g, dense(g, "head", pooled, width, CLASSES))
    return "N", s["tokens"], width


KINDS: Mapping[str, Callable[[Graph, Sizes], Shape]] = {
    kind.__name__: kind for kind in (mlp, cnn, resnet, mobilenet, gru, lstm, transformer)
}


@dataclass(frozen=True)
class Workload:
    """A kind of model in certain sizes. The batch is fixed in the model, or symbolic.

    `tolerance` is how far peers may differ, relative to the largest value of each gradient.
    """

    name: str
    kind: str
    sizes: Sizes
    tolerance: float = 1e-3

    def model(self, *, dynamic: bool = False) -> onnx.ModelProto:
        g, shape = self._record()
        batch: int | str = "N" if dynamic else self.sizes["batch"]
        inputs: dict[str, tuple[int, Shape]] = {
            "x": (TensorProto.FLOAT, [batch if size == "N" else size for size in shape]),
            "label": (TensorProto.INT64, [batch]),
        }
        return g.model(inputs)

    def feeds(self) -> Arrays:
        """The inputs and the weights."""
        g, shape = self._record()
        generator = np.random.default_rng(1)
        batch = self.sizes["batch"]
        x = generator.standard_normal([batch if size == "N" else int(size) for size in shape])
        return {"x": x.astype(np.float32), "label": generator.integers(0, CLASSES, batch), **g.weights}

    def weights(self) -> list[str]:
        return list(self._record()[0].weights)

    def write(self, folder: Path, *, dynamic: bool = False) -> dict[str, Any]:
        """Write the model and what is fed; returns the requests for model_worker.py."""
        model, feeds = folder / "model.onnx", folder / "feeds.npz"
        model.write_bytes(self.model(dynamic=dynamic).SerializeToString())
        np.savez(feeds, **self.feeds())
        return {
            "model": str(model),
            "feeds": str(feeds),
            "weights": self.weights(),
            "of": "loss",
            "kind": self.kind,
            "sizes": dict(self.sizes),
        }

    def _record(self) -> tuple[Graph, Shape]:
        g = Graph(np.random.default_rng(0))
        return g, KINDS[self.kind](g, self.sizes)


# Among their millions of activations one or the other is so near to a kink that rounding decides on its side.
PICTURES = 1e-2
_SEQUENCE = {"batch": 32, "steps": 50, "features": 128, "width": 256}

WORKLOADS = [
    Workload("mlp", "mlp", {"batch": 64, "features": 784, "width": 512, "depth": 2}),
    Workload("cnn", "cnn", {"batch": 32, "size": 28, "width": 32}, PICTURES),
    Workload("resnet", "resnet", {"batch": 8, "size": 64, "width": 64, "depth": 2}, PICTURES),
    Workload("mobilenet", "mobilenet", {"batch": 8, "size": 64, "width": 24, "depth": 2}, PICTURES),
    Workload("gru", "gru", _SEQUENCE),
    Workload("lstm", "lstm", _SEQUENCE),
    Workload("transformer", "transformer", {"batch": 8, "tokens": 64, "width": 256, "depth": 4, "heads": 4}),
    # Only the cost per node counts.
    Workload("tiny", "mlp", {"batch": 4, "features": 8, "width": 16, "depth": 4}),
]
