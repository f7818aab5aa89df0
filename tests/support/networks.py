"""Small networks twice: as ONNX models made by hand, and as functions of PyTorch tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor
from torch.nn import functional

from support.recorded_graph import Arrays, Graph, Shape, ints, number

Tensors = dict[str, Tensor]
CLASSES = 5


@dataclass(frozen=True)
class Network:
    """A model whose first output is the loss, with a symbolic batch.

    `inputs` makes feeds for a batch, `torch` computes the same outputs from weights and inputs.
    """

    model: onnx.ModelProto
    weights: Arrays
    inputs: Callable[[int], Arrays]
    torch: Callable[[Tensors], Tensors]


def images(batch: int, *, channels: int = 3, size: int = 16, scale: float = 1.0) -> Arrays:
    generator = np.random.default_rng(batch)
    return {
        "x": (scale * generator.standard_normal((batch, channels, size, size))).astype(np.float32),
        "label": generator.integers(0, CLASSES, batch),
    }


IMAGES: dict[str, tuple[int, Shape]] = {
    "x": (TensorProto.FLOAT, ("N", 3, 16, 16)),
    "label": (TensorProto.INT64, ("N",)),
}


def classify(g: Graph, x: str, channels: int) -> None:
    """Mean over the picture, a layer, and the loss."""
    pooled = g.Flatten(g.GlobalAveragePool(x))
    scores = g.Gemm(pooled, g.weight("head.w", CLASSES, channels), g.weight("head.b", CLASSES), transB=1)
    g.SoftmaxCrossEntropyLoss(scores, "label", out="loss")


def torch_classify(v: Tensors, x: Tensor) -> Tensor:
    return functional.cross_entropy(x.mean((2, 3)) @ v["head.w"].T + v["head.b"], v["label"])


# ResNet


def resnet() -> Network:
    """Three residual blocks, batch normalization in training mode; the running statistics are outputs."""
    g = Graph(np.random.default_rng(0))
    statistics: dict[str, Shape] = {}

    def normalized(name: str, x: str, channels: int) -> str:
        scale = g.weight(f"{name}.scale", channels, scale=0.2, shift=1.0)
        bias = g.weight(f"{name}.bias", channels, scale=0.2)
        mean, var = np.full(channels, 0.5, np.float32), np.full(channels, 2.0, np.float32)
        names = [f"{name}.y", f"{name}.mean", f"{name}.var"]
        statistics.update(dict.fromkeys(names[1:], (channels,)))
        return g.BatchNormalization(x, scale, bias, mean, var, out=names, training_mode=1, momentum=0.9)

    def conv(name: str, x: str, inputs: int, outputs: int, size: int, stride: int) -> str:
        w = g.weight(f"{name}.w", outputs, inputs, size, size)
        return normalized(name, g.Conv(x, w, pads=[size // 2] * 4, strides=[stride] * 2), outputs)

    def block(name: str, x: str, inputs: int, outputs: int, stride: int) -> str:
        inner = g.Relu(conv(f"{name}.1", x, inputs, outputs, 3, stride))
        inner = conv(f"{name}.2", inner, outputs, outputs, 3, 1)
        short = x if inputs == outputs else conv(f"{name}.short", x, inputs, outputs, 1, stride)
        return g.Relu(g.Add(inner, short))

    x = g.Relu(conv("stem", "x", 3, 8, 3, 1))
    x = g.MaxPool(x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    x = block("one", x, 8, 8, 1)
    x = block("two", x, 8, 16, 2)
    x = block("three", x, 16, 16, 1)
    classify(g, x, 16)

    def forward(v: Tensors) -> Tensors:
        found: Tensors = {}

        def conv(name: str, x: Tensor, stride: int = 1) -> Tensor:
            w = v[f"{name}.w"]
            x = functional.conv2d(x, w, stride=stride, padding=w.shape[-1] // 2)
            var, mean = torch.var_mean(x.detach(), (0, 2, 3), correction=0)
            found[f"{name}.mean"], found[f"{name}.var"] = 0.45 + 0.1 * mean, 1.8 + 0.1 * var
            scale, bias = v[f"{name}.scale"], v[f"{name}.bias"]
            return functional.batch_norm(x, None, None, scale, bias, training=True)

        def block(name: str, x: Tensor, stride: int = 1) -> Tensor:
            inner = conv(f"{name}.2", conv(f"{name}.1", x, stride).relu())
            short = conv(f"{name}.short", x, stride) if f"{name}.short.w" in v else x
            return (inner + short).relu()

        x = functional.max_pool2d(conv("stem", v["x"]).relu(), 3, 2, 1)
        x = block("three", block("two", block("one", x), 2))
        return {"loss": torch_classify(v, x), **found}

    return Network(g.model(IMAGES, **statistics), g.weights, images, forward)


# MobileNet


def mobilenet() -> Network:
    """Inverted residual blocks: depthwise convolutions between pointwise ones, activations cut off at 6."""
    g = Graph(np.random.default_rng(1))

    def conv(name: str, x: str, inputs: int, outputs: int, size: int, stride: int, group: int) -> str:
        w, b = g.weight(f"{name}.w", outputs, inputs // group, size, size), g.weight(f"{name}.b", outputs)
        attributes = {"pads": [size // 2] * 4, "strides": [stride] * 2, "group": group}
        return g.Conv(x, w, b, **attributes)

    def relu6(x: str) -> str:
        return g.Clip(x, number(0), number(6))

    def block(name: str, x: str, inputs: int, outputs: int, stride: int) -> str:
        wide = 3 * inputs
        inner = relu6(conv(f"{name}.expand", x, inputs, wide, 1, 1, 1))
        inner = relu6(conv(f"{name}.depth", inner, wide, wide, 3, stride, wide))
        inner = conv(f"{name}.project", inner, wide, outputs, 1, 1, 1)
        return g.Add(x, inner) if inputs == outputs and stride == 1 else inner

    x = relu6(conv("stem", "x", 3, 8, 3, 2, 1))
    x = block("two", block("one", x, 8, 8, 1), 8, 12, 2)
    classify(g, x, 12)

    def forward(v: Tensors) -> Tensors:
        def conv(name: str, x: Tensor, stride: int = 1) -> Tensor:
            w = v[f"{name}.w"]
            group = x.shape[1] // w.shape[1]
            return functional.conv2d(x, w, v[f"{name}.b"], stride, w.shape[-1] // 2, groups=group)

        def block(name: str, x: Tensor, stride: int) -> Tensor:
            inner = functional.relu6(conv(f"{name}.expand", x))
            inner = functional.relu6(conv(f"{name}.depth", inner, stride))
            inner = conv(f"{name}.project", inner)
            return x + inner if inner.shape == x.shape else inner

        x = functional.relu6(conv("stem", v["x"], 2))
        return {"loss": torch_classify(v, block("two", block("one", x, 1), 2))}

    # Large pictures, so that some activations are cut off.
    return Network(g.model(IMAGES), g.weights, lambda batch: images(batch, scale=6.0), forward)


# Transformers


@dataclass(frozen=True)
class Sizes:
    layers: int = 2
    hidden: int = 16
    heads: int = 4
    tokens: int = 6
    vocabulary: int = 11


def linear(g: Graph, name: str, x: str, inputs: int, outputs: int, *, bias: bool = True) -> str:
    y = g.MatMul(x, g.weight(f"{name}.w", inputs, outputs))
    return g.Add(y, g.weight(f"{name}.b", outputs, scale=0.2)) if bias else y


def layer_norm(g: Graph, name: str, x: str, size: int) -> str:
    scale = g.weight(f"{name}.scale", size, scale=0.2, shift=1.0)
    return g.LayerNormalization(x, scale, g.weight(f"{name}.bias", size, scale=0.2), axis=-1)


def transformer_layer(g: Graph, name: str, x: str, sizes: Sizes, causal: bool, approximate: str) -> str:
    """Attention and a feed-forward net, each behind a layer normalization and beside a shortcut."""
    hidden = sizes.hidden

    def by_head(part: str, perm: Sequence[int]) -> str:
        # Softmax cancels what a bias adds to all keys.
        projected = linear(g, f"{name}.{part}", normed, hidden, hidden, bias=part != "k")
        return g.Transpose(g.Reshape(projected, ints(0, 0, sizes.heads, -1)), perm=perm)

    normed = layer_norm(g, f"{name}.norm1", x, hidden)
    q, k, v = by_head("q", (0, 2, 1, 3)), by_head("k", (0, 2, 3, 1)), by_head("v", (0, 2, 1, 3))
    scores = g.Div(g.MatMul(q, k), number(math.sqrt(hidden // sizes.heads)))
    if causal:
        ones = g.ConstantOfShape(g.Shape(scores), value=numpy_helper.from_array(np.ones(1, np.float32)))
        mask = g.Cast(g.Trilu(ones, upper=0), to=TensorProto.BOOL)
        scores = g.Where(mask, scores, number(-np.inf))
    mixed = g.Transpose(g.MatMul(g.Softmax(scores, axis=-1), v), perm=(0, 2, 1, 3))
    mixed = linear(g, f"{name}.out", g.Reshape(mixed, ints(0, 0, hidden)), hidden, hidden)
    x = g.Add(x, mixed)
    inner = linear(g, f"{name}.up", layer_norm(g, f"{name}.norm2", x, hidden), hidden, 4 * hidden)
    inner = g.Gelu(inner, approximate=approximate)
    return g.Add(x, linear(g, f"{name}.down", inner, 4 * hidden, hidden))


def torch_linear(v: Tensors, name: str, x: Tensor) -> Tensor:
    y = x @ v[f"{name}.w"]
    return y + v[f"{name}.b"] if f"{name}.b" in v else y


def torch_layer_norm(v: Tensors, name: str, x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], v[f"{name}.scale"], v[f"{name}.bias"])


def torch_layer(v: Tensors, name: str, x: Tensor, sizes: Sizes, causal: bool, approximate: str) -> Tensor:
    normed = torch_layer_norm(v, f"{name}.norm1", x)
    q, k, w = (
        torch_linear(v, f"{name}.{part}", normed).unflatten(2, (sizes.heads, -1)).transpose(1, 2)
        for part in "qkv"
    )
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).tril() == 0, -torch.inf)
    mixed = scores.softmax(-1) @ w
    x = x + torch_linear(v, f"{name}.out", mixed.transpose(1, 2).flatten(2))
    inner = torch_linear(v, f"{name}.up", torch_layer_norm(v, f"{name}.norm2", x))
    return x + torch_linear(v, f"{name}.down", functional.gelu(inner, approximate=approximate))


def vit(sizes: Sizes | None = None) -> Network:
    """A vision transformer: patches by convolution, learned positions, a stack of encoder layers."""
    sizes = sizes or Sizes(tokens=16)
    g = Graph(np.random.default_rng(2))
    patches = g.Conv(
        "x", g.weight("patch.w", sizes.hidden, 3, 4, 4), g.weight("patch.b", sizes.hidden), strides=[4, 4]
    )
    x = g.Transpose(g.Reshape(patches, ints(0, 0, -1)), perm=(0, 2, 1))
    x = g.Add(x, g.weight("positions", sizes.tokens, sizes.hidden))
    for i in range(sizes.layers):
        x = transformer_layer(g, f"layer{i}", x, sizes, False, "none")
    x = g.ReduceMean(layer_norm(g, "norm", x, sizes.hidden), ints(1), keepdims=0)
    g.SoftmaxCrossEntropyLoss(linear(g, "head", x, sizes.hidden, CLASSES), "label", out="loss")

    def forward(v: Tensors) -> Tensors:
        x = functional.conv2d(v["x"], v["patch.w"], v["patch.b"], stride=4).flatten(2).transpose(1, 2)
        x = x + v["positions"]
        for i in range(sizes.layers):
            x = torch_layer(v, f"layer{i}", x, sizes, False, "none")
        x = torch_layer_norm(v, "norm", x).mean(1)
        return {"loss": functional.cross_entropy(torch_linear(v, "head", x), v["label"])}

    return Network(g.model(IMAGES), g.weights, images, forward)


def gpt(sizes: Sizes | None = None) -> Network:
    """A language model: causal mask, and an embedding that is the output layer as well.

    Labels of -100 do not count.
    """
    sizes = sizes or Sizes()
    g = Graph(np.random.default_rng(3))
    embedding = g.weight("embedding", sizes.vocabulary, sizes.hidden)
    positions = g.weight("positions", sizes.tokens, sizes.hidden)
    x = g.Add(g.Gather(embedding, "ids"), positions)
    for i in range(sizes.layers):
        x = transformer_layer(g, f"layer{i}", x, sizes, True, "tanh")
    scores = g.MatMul(layer_norm(g, "norm", x, sizes.hidden), g.Transpose(embedding, perm=(1, 0)))
    scores = g.Reshape(scores, ints(-1, sizes.vocabulary))
    g.SoftmaxCrossEntropyLoss(scores, g.Reshape("label", ints(-1)), out="loss", ignore_index=-100)

    def forward(v: Tensors) -> Tensors:
        x = functional.embedding(v["ids"], v["embedding"]) + v["positions"]
        for i in range(sizes.layers):
            x = torch_layer(v, f"layer{i}", x, sizes, True, "tanh")
        scores = torch_layer_norm(v, "norm", x) @ v["embedding"].T
        return {"loss": functional.cross_entropy(scores.flatten(0, 1), v["label"].flatten())}

    def inputs(batch: int) -> Arrays:
        ids = np.random.default_rng(batch).integers(0, sizes.vocabulary, (batch, sizes.tokens + 1))
        label = ids[:, 1:].copy()
        label[:, -1] = -100
        return {"ids": ids[:, :-1].copy(), "label": label}

    shape = (TensorProto.INT64, ("N", sizes.tokens))
    return Network(g.model({"ids": shape, "label": shape}), g.weights, inputs, forward)


# U-Net


def unet() -> Network:
    """Down twice and up again, once with linear interpolation and once with nearest neighbours."""
    g = Graph(np.random.default_rng(4))

    def conv(name: str, x: str, inputs: int, outputs: int) -> str:
        w, b = g.weight(f"{name}.w", outputs, inputs, 3, 3), g.weight(f"{name}.b", outputs, scale=0.2)
        return g.Conv(x, w, b, pads=[1, 1, 1, 1])

    def down(x: str) -> str:
        return g.MaxPool(x, kernel_shape=[2, 2], strides=[2, 2])

    scales = np.array([1, 1, 2, 2], np.float32)
    one = g.Relu(conv("one", "x", 3, 6))
    two = g.Relu(conv("two", down(one), 6, 8))
    bottom = g.Relu(conv("bottom", down(two), 8, 10))
    up = g.Resize(bottom, "", scales, mode="linear", coordinate_transformation_mode="half_pixel")
    up = g.Relu(conv("up_two", g.Concat(two, up, axis=1), 18, 8))
    up = g.Resize(
        up, "", scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
    )
    up = g.Relu(conv("up_one", g.Concat(one, up, axis=1), 14, 6))
    error = g.Sub(conv("out", up, 6, 1), "target")
    g.ReduceMean(g.Mul(error, error), keepdims=0, out="loss")

    def forward(v: Tensors) -> Tensors:
        def conv(name: str, x: Tensor) -> Tensor:
            return functional.conv2d(x, v[f"{name}.w"], v[f"{name}.b"], padding=1)

        one = conv("one", v["x"]).relu()
        two = conv("two", functional.max_pool2d(one, 2)).relu()
        bottom = conv("bottom", functional.max_pool2d(two, 2)).relu()
        up = functional.interpolate(bottom, scale_factor=2, mode="bilinear", align_corners=False)
        up = conv("up_two", torch.cat([two, up], 1)).relu()
        up = functional.interpolate(up, scale_factor=2, mode="nearest")
        up = conv("up_one", torch.cat([one, up], 1)).relu()
        return {"loss": functional.mse_loss(conv("out", up), v["target"])}

    def inputs(batch: int) -> Arrays:
        x = images(batch)["x"]
        return {"x": x, "target": np.square(x[:, :1])}

    shapes = {"x": (TensorProto.FLOAT, ("N", 3, 16, 16)), "target": (TensorProto.FLOAT, ("N", 1, 16, 16))}
    return Network(g.model(shapes), g.weights, inputs, forward)


# Recurrent networks

STEPS, FEATURES, HIDDEN = 5, 4, 6


def gru() -> Network:
    """A GRU in both directions over rows of different lengths."""
    g = Graph(np.random.default_rng(5))
    w = g.weight("w", 2, 3 * HIDDEN, FEATURES, scale=0.4)
    r, b = g.weight("r", 2, 3 * HIDDEN, HIDDEN, scale=0.4), g.weight("b", 2, 6 * HIDDEN, scale=0.2)
    outputs = ["sequence", "last"]
    attributes = {"direction": "bidirectional", "hidden_size": HIDDEN, "linear_before_reset": 1}
    g.GRU("x", w, r, b, "lengths", out=outputs, **attributes)
    g.weight("mix_sequence", HIDDEN, scale=1.0)
    g.weight("mix_last", HIDDEN, scale=1.0)
    total = [g.ReduceSum(g.Mul(name, f"mix_{name}"), keepdims=0) for name in outputs]
    g.Tanh(g.Mul(g.Add(*total), number(0.05)), out="loss")

    def forward(v: Tensors) -> Tensors:
        def gates(rows: Tensor) -> Tensor:
            """From ONNX's order (update, reset, hidden) to PyTorch's (reset, update, hidden)."""
            z, r, h = rows.chunk(3)
            return torch.cat([r, z, h])

        weights = {}
        for i, suffix in enumerate(("", "_reverse")):
            bias = v["b"][i].chunk(2)
            weights[f"weight_ih_l0{suffix}"] = gates(v["w"][i])
            weights[f"weight_hh_l0{suffix}"] = gates(v["r"][i])
            weights[f"bias_ih_l0{suffix}"] = gates(bias[0])
            weights[f"bias_hh_l0{suffix}"] = gates(bias[1])
        module = torch.nn.GRU(FEATURES, HIDDEN, bidirectional=True)
        packed = torch.nn.utils.rnn.pack_padded_sequence(v["x"], v["lengths"], enforce_sorted=False)
        sequence, last = torch.func.functional_call(module, weights, (packed,))
        sequence, _ = torch.nn.utils.rnn.pad_packed_sequence(sequence, total_length=STEPS)
        by_direction = sequence.unflatten(2, (2, HIDDEN)).transpose(1, 2)
        total = (by_direction * v["mix_sequence"]).sum() + (last * v["mix_last"]).sum()
        return {"loss": torch.tanh(0.05 * total), "sequence": by_direction, "last": last}

    def inputs(batch: int) -> Arrays:
        generator = np.random.default_rng(batch)
        return {
            "x": generator.standard_normal((STEPS, batch, FEATURES)).astype(np.float32),
            "lengths": generator.integers(1, STEPS + 1, batch).astype(np.int32),
        }

    shapes: dict[str, tuple[int, Shape]] = {
        "x": (TensorProto.FLOAT, (STEPS, "N", FEATURES)),
        "lengths": (TensorProto.INT32, ("N",)),
    }
    model = g.model(shapes, sequence=(STEPS, 2, "N", HIDDEN), last=(2, "N", HIDDEN))
    return Network(model, g.weights, inputs, forward)


def lstm_with_peepholes() -> tuple[onnx.ModelProto, Arrays]:
    """An LSTM in both directions with peepholes and initial states; PyTorch has no such thing."""
    g = Graph(np.random.default_rng(6))
    w = g.weight("w", 2, 4 * HIDDEN, FEATURES, scale=0.4)
    r, b = g.weight("r", 2, 4 * HIDDEN, HIDDEN, scale=0.4), g.weight("b", 2, 8 * HIDDEN, scale=0.2)
    p = g.weight("p", 2, 3 * HIDDEN, scale=0.4)
    outputs = ["sequence", "last", "cell"]
    g.LSTM("x", w, r, b, "lengths", "h", "c", p, out=outputs, direction="bidirectional", hidden_size=HIDDEN)
    mix = g.generator.standard_normal((3, HIDDEN)).astype(np.float32)
    total = [
        g.ReduceSum(g.Mul(g.Tanh(name), row), keepdims=0) for name, row in zip(outputs, mix, strict=True)
    ]
    g.Sum(*total, out="loss")
    floats: dict[str, Shape] = {"x": (STEPS, "N", FEATURES), "h": (2, "N", HIDDEN), "c": (2, "N", HIDDEN)}
    shapes = {name: (int(TensorProto.FLOAT), shape) for name, shape in floats.items()}
    generator = np.random.default_rng(7)
    feeds = {
        name: generator.standard_normal([3 if d == "N" else d for d in shape]).astype(np.float32)
        for name, shape in floats.items()
    }
    model = g.model({**shapes, "lengths": (TensorProto.INT32, ("N",))})
    return model, {**feeds, "lengths": np.array([5, 2, 4], np.int32)}


# Control flow


def recurrence() -> Network:
    """A Loop whose number of steps is an input, with an If in its body."""
    g = Graph(np.random.default_rng(8))
    body, up, down = (Graph(g.generator, f"{name}/") for name in ("body", "then", "else"))
    g.weight("w", HIDDEN, HIDDEN)
    g.weight("b", HIDDEN, scale=0.2)
    up.Tanh("sum", out="up")
    down.Mul(down.Sigmoid("sum"), "b", out="down")
    branch: tuple[int, Shape] = (TensorProto.FLOAT, ("N", HIDDEN))
    body.Add(body.MatMul("state", "w"), "b", out="sum")
    mean = body.ReduceMean("sum", keepdims=0)
    body.If(
        body.Greater(mean, number(0.0)),
        out="next",
        then_branch=up.graph({}, {"up": branch}),
        else_branch=down.graph({}, {"down": branch}),
    )
    body.Identity("go_on", out="still")
    body.Mul("next", "next", out="square")
    flag: tuple[int, Shape] = (TensorProto.BOOL, ())
    graph = body.graph(
        {"step": (TensorProto.INT64, ()), "go_on": flag, "state": branch},
        {"still": flag, "next": branch, "square": branch},
    )
    g.Loop("steps", np.array(True), "x", out=["end", "squares"], body=graph)
    g.Add(g.ReduceMean("squares", keepdims=0), g.ReduceSum("end", keepdims=0), out="loss")

    def forward(v: Tensors) -> Tensors:
        state, squares = v["x"], []
        for _ in range(int(v["steps"])):
            total = state @ v["w"] + v["b"]
            state = torch.tanh(total) if total.mean() > 0 else torch.sigmoid(total) * v["b"]
            squares.append(state * state)
        return {"loss": torch.stack(squares).mean() + state.sum()}

    def inputs(batch: int) -> Arrays:
        x = np.random.default_rng(batch).standard_normal((batch, HIDDEN)).astype(np.float32)
        return {"x": x, "steps": np.array(batch + 3, np.int64)}

    shapes: dict[str, tuple[int, Shape]] = {"x": branch, "steps": (TensorProto.INT64, ())}
    return Network(g.model(shapes), g.weights, inputs, forward)


# Smooth ones, for second derivatives


def mlp() -> Network:
    g = Graph(np.random.default_rng(9))
    hidden = g.Tanh(linear(g, "one", "x", FEATURES, HIDDEN))
    g.SoftmaxCrossEntropyLoss(linear(g, "two", hidden, HIDDEN, CLASSES), "label", out="loss")

    def forward(v: Tensors) -> Tensors:
        hidden = torch.tanh(torch_linear(v, "one", v["x"]))
        return {"loss": functional.cross_entropy(torch_linear(v, "two", hidden), v["label"])}

    def inputs(batch: int) -> Arrays:
        generator = np.random.default_rng(batch)
        x = generator.standard_normal((batch, FEATURES)).astype(np.float32)
        return {"x": x, "label": generator.integers(0, CLASSES, batch)}

    shapes: dict[str, tuple[int, Shape]] = {
        "x": (TensorProto.FLOAT, ("N", FEATURES)),
        "label": (TensorProto.INT64, ("N",)),
    }
    return Network(g.model(shapes), g.weights, inputs, forward)


def convolutions() -> Network:
    """Convolutions, an average and a maximum over windows."""
    g = Graph(np.random.default_rng(10))
    x = g.Conv("x", g.weight("one.w", 4, 3, 3, 3), g.weight("one.b", 4), strides=[2, 2], pads=[1, 1, 1, 1])
    x = g.AveragePool(g.Gelu(x), kernel_shape=[3, 3], strides=[1, 1])
    x = g.Conv(x, g.weight("two.w", 6, 2, 3, 3), g.weight("two.b", 6), group=2)
    x = g.MaxPool(g.Softplus(x), kernel_shape=[2, 2], strides=[2, 2])
    classify(g, x, 6)

    def forward(v: Tensors) -> Tensors:
        x = functional.conv2d(v["x"], v["one.w"], v["one.b"], 2, 1)
        x = functional.avg_pool2d(functional.gelu(x), 3, 1)
        x = functional.conv2d(x, v["two.w"], v["two.b"], groups=2)
        return {"loss": torch_classify(v, functional.max_pool2d(functional.softplus(x), 2, 2))}

    return Network(g.model(IMAGES), g.weights, images, forward)
