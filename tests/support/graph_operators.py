"""The operators of random graphs: how each is put on values that a graph has."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper

from support.graph_builder import MAX_DEPTH, MAX_SIZE, OPERATORS, Scope, Value, entry, grow

MICROSOFT = "com.microsoft::"

# Element-wise, one input.


@entry(
    "Neg", "Identity", "Tanh", "Sigmoid", "Sin", "Cos", "Atan", "Erf", "Softsign", "Softplus", "Relu", "Selu",
    "HardSwish", "Abs", "Asinh", "Exp", "Sinh", "Cosh", "Mish",
)  # fmt: skip
def unary(b: Scope, op: str) -> Any:
    if op == "Mish" and b.opset < 18:
        return []
    return b.node(op, [b.pick()])


@entry("LeakyRelu", "Elu", "Celu", "ThresholdedRelu")
def unary_alpha(b: Scope, op: str) -> Any:
    return b.node(op, [b.pick()], alpha=b.uniform(0.05, 0.9) if b.coin(0.7) else None)


@entry("HardSigmoid")
def hard_sigmoid(b: Scope, op: str) -> Any:
    return b.node(op, [b.pick()], alpha=b.uniform(0.1, 0.6), beta=b.uniform(0.2, 0.7))


@entry("Shrink")
def shrink(b: Scope, op: str) -> Any:
    return b.node(op, [b.pick()], bias=b.uniform(0, 0.5), lambd=b.uniform(0.1, 0.8))


@entry("Gelu", since=20)
def gelu(b: Scope, op: str) -> Any:
    return b.node(op, [b.pick()], approximate=b.choose([None, "none", "tanh"]))


@entry("Swish", since=24)
def swish(b: Scope, op: str) -> Any:
    return b.node(op, [b.pick()], alpha=b.uniform(0.5, 2) if b.coin() else None)


@entry("Acos", "Asin", "Atanh", "Tan")
def unary_bounded(b: Scope, op: str) -> Any:
    return b.node(op, [b.bounded(b.pick())])


@entry("Sqrt", "Log", "Reciprocal")
def unary_positive(b: Scope, op: str) -> Any:
    return b.node(op, [b.positive(b.pick())])


@entry("Acosh")
def acosh(b: Scope, op: str) -> Any:
    return b.node(op, [b.positive(b.pick(), 1.3)])


@entry("Floor", "Ceil", "Round", "Sign")
def steps(b: Scope, op: str) -> Any:
    x = b.pick()
    return b.node(b.choose(["Add", "Mul", "Sub"]), [x, b.node(op, [x])])


@entry("Mod")
def mod(b: Scope, op: str) -> Any:
    return b.node(op, [b.pick(), np.float64(np.float32(b.uniform(0.7, 2)))], fmod=1)


@entry("Clip")
def clip(b: Scope, op: str) -> Any:
    low = np.float64(b.uniform(-1, -0.1)) if b.coin(0.7) else None
    high = np.float64(b.uniform(0.1, 1)) if b.coin(0.7) else None
    return b.node(op, [b.pick(), low, high])


@entry("CumSum")
def cum_sum(b: Scope, op: str) -> Any:
    x = b.pick(1)
    return b.node(op, [x, np.array(_axis(b, x))], exclusive=b.integer(0, 1), reverse=b.integer(0, 1))


@entry("Trilu")
def trilu(b: Scope, op: str) -> Any:
    k = np.array(b.integer(-2, 2)) if b.coin() else None
    return b.node(op, [b.pick(2), k], upper=b.integer(0, 1))


@entry("Dropout")
def dropout(b: Scope, op: str) -> Any:
    """Not in training: with random masks there is nothing to compare with."""
    ratio = np.float64(0.5) if b.coin() else None
    training = np.array(False) if ratio is not None and b.coin() else None
    return b.node(op, [b.pick(), ratio, training])


@entry("Cast", "CastLike")
def cast(b: Scope, op: str) -> Any:
    x = b.pick()
    if op == "CastLike":
        return b.node(op, [x, b.pick()])
    if b.coin(0.3):
        whole = b.node(op, [x], to=b.choose([TensorProto.INT64, TensorProto.INT32]))
        return b.node("Add", [x, b.node(op, [whole], to=TensorProto.DOUBLE)])
    return b.node(op, [x], to=TensorProto.DOUBLE)


# Element-wise, several inputs.


@entry("Add", "Sub", "Mul")
def binary(b: Scope, op: str) -> Any:
    x = b.pick()
    y = x if b.coin(0.05) else b.partner(x)
    return b.node(op, [x, y] if b.coin() else [y, x])


@entry("Div")
def div(b: Scope, op: str) -> Any:
    x = b.pick()
    return b.node(op, [x, b.positive(b.partner(x), 0.5)])


@entry("Pow")
def power(b: Scope, op: str) -> Any:
    x = b.pick()
    if b.coin():
        exponent = b.choose([2.0, 3.0, 1.0, 0.0])
        return b.node(op, [x, np.array(exponent) if b.coin() else np.array(int(exponent), np.int64)])
    return b.node(op, [b.positive(x, 0.4), b.partner(x) if b.coin() else np.float64(b.uniform(-1, 2))])


@entry("Max", "Min", "Mean", "Sum")
def variadic(b: Scope, op: str) -> Any:
    x = b.pick()
    inputs = [x]
    for _ in range(b.integer(0, 2)):
        y = b.partner(x)
        if math.prod(np.broadcast_shapes(*(v.shape for v in [*inputs, *_fit(inputs, y)]))) <= MAX_SIZE:
            inputs += _fit(inputs, y)
    if op in ("Max", "Min"):
        inputs = list(dict.fromkeys(inputs))  # a tie with itself is a kink
    return b.node(op, inputs)


def _fit(inputs: list[Value], y: Value) -> list[Value]:
    """y, if it broadcasts with all."""
    try:
        np.broadcast_shapes(*(v.shape for v in inputs), y.shape)
    except ValueError:
        return []
    return [y]


@entry("PRelu")
def prelu(b: Scope, op: str) -> Any:
    x = b.pick()
    shape = [1 if b.coin(0.4) else d for d in x.shape][b.integer(0, x.rank) :]
    return b.node(op, [x, b.weight(shape, 0.5)])


COMPARISONS = ["Greater", "Less", "GreaterOrEqual", "LessOrEqual"]


def _condition(b: Scope, x: Value) -> Value:
    """Truth values in the shape of x."""
    y = b.node(b.choose(COMPARISONS), [x, np.float64(b.uniform(-0.5, 0.5))])
    how = b.integer(0, 4)
    if how == 0:
        return b.node("Not", [y])
    if how == 1:
        z = b.data(b.rng.random(x.shape) < 0.5, "mask")
        return b.node(b.choose(["And", "Or", "Xor"]), [y, z])
    if how == 2:
        return b.node("Or", [b.node("IsNaN", [x]), y])
    if how == 3:
        return b.data(b.rng.random(x.shape) < 0.5, "mask")
    return y


@entry("Where", "And", "Or", "Not", "Xor", "IsNaN", "Greater", "Less", "GreaterOrEqual", "LessOrEqual")
def where(b: Scope, op: str) -> Any:
    x = b.pick()
    return b.node("Where", [_condition(b, x), x, b.partner(x)])


@entry("Equal")
def equal(b: Scope, op: str) -> Any:
    x = b.pick(1)
    labels = b.data(b.rng.integers(0, 2, x.shape[-1:]), "labels")
    mask = b.node("Equal", [labels, np.array(1)])
    return b.node("Mul", [x, b.node("Cast", [mask], to=TensorProto.DOUBLE)])


# Reductions.


def _axis(b: Scope, x: Value) -> int:
    return b.integer(-x.rank, x.rank - 1)


def _reduce(b: Scope, op: str, x: Value) -> Value:
    keep = b.choose([None, 0, 1])
    axes: np.ndarray | None = None
    if x.rank and b.coin(0.75):
        chosen = b.rng.choice(x.rank, b.integer(1, x.rank), replace=False)
        axes = np.array([int(a) - (x.rank if b.coin(0.4) else 0) for a in chosen], np.int64)
    if b.opset >= 18 or op == "ReduceSum":
        noop = None
        if axes is None and b.coin(0.3):
            axes, noop = (np.zeros(0, np.int64) if b.coin() else None), b.choose([0, 1])
        if noop == 1 and op not in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"):
            noop = 0  # whether the others then still take absolute values and squares is disputed
        return b.node(op, [x, axes], keepdims=keep, noop_with_empty_axes=noop)
    return b.node(op, [x], keepdims=keep, axes=None if axes is None else axes.tolist())


@entry(
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2",
    "ReduceLogSumExp", "ReduceSumSquare",
)  # fmt: skip
def reduce(b: Scope, op: str) -> Any:
    return _reduce(b, op, b.pick())


@entry("ReduceLogSum")
def reduce_log_sum(b: Scope, op: str) -> Any:
    return _reduce(b, op, b.positive(b.pick()))


@entry("ArgMax", "ArgMin")
def arg(b: Scope, op: str) -> Any:
    x = b.pick(1)
    axis = _axis(b, x)
    at = b.node(op, [x], axis=axis, keepdims=1)
    return b.node("GatherElements", [b.to_shape(b.pick(), x.shape), at], axis=axis)


@entry("Hardmax")
def hardmax(b: Scope, op: str) -> Any:
    x = b.pick(1)
    return b.node("Mul", [x, b.node(op, [x], axis=_axis(b, x))])


@entry("TopK")
def top_k(b: Scope, op: str) -> Any:
    x = b.pick(1)
    axis = _axis(b, x)
    k = np.array([b.integer(1, x.shape[axis])])
    values, indices = b.node(op, [x, k], 2, axis=axis, largest=b.integer(0, 1), sorted=1)
    if b.coin(0.3):
        return [values, b.node("GatherElements", [b.to_shape(b.pick(), x.shape), indices], axis=axis)]
    return values


@entry("Softmax", "LogSoftmax")
def softmax(b: Scope, op: str) -> Any:
    x = b.pick(1)
    return b.node(op, [x], axis=_axis(b, x) if b.coin(0.8) else None)


# Products.


@entry("MatMul")
def matmul(b: Scope, op: str) -> Any:
    x = b.pick(1)
    n = b.integer(1, 4)
    if x.rank > 1 and b.coin(0.25):
        batch = [1 if b.coin(0.3) else d for d in x.shape[:-2]]
        return b.node(op, [x, b.weight([*batch, x.shape[-1], n], 0.6)])
    if b.coin(0.2):
        return b.node(op, [x, b.weight([x.shape[-1]], 0.6)])
    if x.rank > 1 and b.coin(0.3):
        return b.node(op, [b.weight([n, x.shape[-2]], 0.6), x])
    return b.node(op, [x, b.weight([x.shape[-1], n], 0.6)])


@entry("Gemm")
def gemm(b: Scope, op: str) -> Any:
    x = b.pick(2, 2)
    a_turned, b_turned, n = b.integer(0, 1), b.integer(0, 1), b.integer(1, 4)
    m, k = x.shape[::-1] if a_turned else x.shape
    w = b.weight([n, k] if b_turned else [k, n], 0.6)
    c = b.weight(b.choose([[m, n], [n], [1, n], [m, 1], [1], []])) if b.coin(0.7) else None
    alpha, beta = (b.uniform(0.3, 1.5) if b.coin(0.4) else None for _ in range(2))
    return b.node(op, [x, w, c], transA=a_turned, transB=b_turned, alpha=alpha, beta=beta)


@entry("Einsum")
def einsum(b: Scope, op: str) -> Any:
    x = b.pick(1, 4)
    letters = "abcd"[: x.rank]
    other = "".join(c for c in letters if b.coin(0.6)) + ("z" if b.coin() else "")
    sizes = dict(zip(letters, x.shape, strict=True)) | {"z": 2}
    out = "".join(b.rng.permutation([c for c in {*letters, *other} if b.coin(0.6)]).tolist())
    out = "".join(sorted(out)) if b.coin() else out
    if not other:
        return b.node(op, [x], equation=f"{letters}->{out}")
    return b.node(op, [x, b.weight([sizes[c] for c in other], 0.7)], equation=f"{letters},{other}->{out}")


@entry("Det", MICROSOFT + "Inverse")
def square(b: Scope, op: str) -> Any:
    n = b.integer(1, 3)
    lead = [] if b.coin(0.3) else [2]
    x = b.scaled(b.bounded(b.to_shape(b.pick(), [*lead, n, n])), 0.4)
    x = b.node("Add", [x, np.eye(n)])
    return b.node("Det", [x]) if op == "Det" else b.node("Inverse", [x], domain="com.microsoft")


@entry(MICROSOFT + "FusedMatMul")
def fused_matmul(b: Scope, op: str) -> Any:
    x = b.pick(2)
    turned, n = b.integer(0, 1), b.integer(1, 4)
    flip = b.integer(0, 1)
    k = x.shape[-2] if flip else x.shape[-1]
    w = b.weight([n, k] if turned else [k, n], 0.6)
    return b.node(
        "FusedMatMul", [x, w], domain="com.microsoft", alpha=b.uniform(0.3, 1.5), transA=flip, transB=turned
    )


@entry(MICROSOFT + "Gelu", MICROSOFT + "QuickGelu", MICROSOFT + "FastGelu", MICROSOFT + "BiasGelu")
def microsoft_unary(b: Scope, op: str) -> Any:
    name = op.removeprefix(MICROSOFT)
    x = b.pick(1)
    bias = [b.weight(x.shape[-1:])] if name == "BiasGelu" or (name == "FastGelu" and b.coin()) else []
    alpha = b.uniform(0.5, 2) if name == "QuickGelu" else None
    return b.node(name, [x, *bias], domain="com.microsoft", alpha=alpha)


# Convolutions and pools.


def _image(b: Scope, dims: int, channels: int | None = None, low: int = 2, high: int = 5) -> Value:
    """Something of shape (N, C, ...) with `dims` spatial dimensions."""
    if channels is None and b.coin(0.4):
        fitting = [
            v
            for v in b.values
            if v.is_float and v.rank == dims + 2 and v.array.size <= MAX_SIZE and min(v.shape[2:]) >= low
        ]
        if fitting:
            return b.choose(fitting)
    high = min(high, {1: 8, 2: 5, 3: 3}[dims])
    c = channels if channels is not None else b.integer(1, 4)
    spatial = [b.integer(low, max(low, high)) for _ in range(dims)]
    return b.to_shape(b.pick(), [b.integer(1, 2), c, *spatial])


def _windows(b: Scope, op: str, x: Value) -> tuple[list[int], dict[str, Any]]:
    """A kernel that fits, and attributes that place it."""
    dims = x.rank - 2
    kernel = [b.integer(1, min(3, d)) for d in x.shape[2:]]
    attributes: dict[str, Any] = {}
    strides = [b.integer(1, 2) for _ in range(dims)] if b.coin() else [1] * dims
    if strides != [1] * dims or b.coin(0.3):
        attributes["strides"] = strides
    dilated = [1] * dims
    if op not in ("AveragePool", "LpPool") and b.coin(0.3):
        dilated = [2 if (k - 1) * 2 + 1 <= d else 1 for k, d in zip(kernel, x.shape[2:], strict=True)]
        attributes["dilations"] = dilated
    how = b.integer(0, 3)
    # Where SAME puts windows with dilations is one thing in ONNX and another in onnxruntime.
    if how == 0 and dilated == [1] * dims and all(k >= s for k, s in zip(kernel, strides, strict=True)):
        attributes["auto_pad"] = b.choose(["SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET"])
    elif how < 3:
        # A pool's pads must be smaller than its kernel.
        attributes["pads"] = [b.integer(0, k - 1) for k in (*kernel, *kernel)]
    return kernel, attributes


@entry("Conv")
def conv(b: Scope, op: str) -> Any:
    x = _image(b, b.integer(1, 3))
    kernel, attributes = _windows(b, op, x)
    c = x.shape[1]
    group = b.choose([g for g in range(1, c + 1) if c % g == 0])
    m = group * b.integer(1, 2)
    w = b.weight([m, c // group, *kernel], 0.5)
    bias = b.weight([m]) if b.coin() else None
    if group > 1 or b.coin(0.2):
        attributes["group"] = group
    return b.node(op, [x, w, bias], kernel_shape=kernel if b.coin() else None, **attributes)


@entry("ConvTranspose")
def conv_transpose(b: Scope, op: str) -> Any:
    x = _image(b, b.integer(1, 3), high=3)
    dims, c = x.rank - 2, x.shape[1]
    kernel = [b.integer(1, 3) for _ in range(dims)]
    group = b.choose([g for g in range(1, c + 1) if c % g == 0])
    w = b.weight([c, b.integer(1, 2), *kernel], 0.5)
    bias = b.weight([w.shape[1] * group]) if b.coin() else None
    attributes: dict[str, Any] = {}
    strides = [1] * dims
    if b.coin():
        strides = attributes["strides"] = [b.integer(1, 2) for _ in range(dims)]
    if b.coin(0.3):
        attributes["dilations"] = [b.integer(1, 2) for _ in range(dims)]
    if b.coin():
        attributes["pads"] = [b.integer(0, (k - 1) // 2) for k in (*kernel, *kernel)]
    if b.coin(0.3):
        attributes["output_padding"] = [b.integer(0, s - 1) for s in strides]
    return b.node(op, [x, w, bias], group=group, kernel_shape=kernel, **attributes)


@entry("MaxPool", "AveragePool", "LpPool")
def pool(b: Scope, op: str) -> Any:
    x = _image(b, b.integer(1, 3))
    kernel, attributes = _windows(b, op, x)
    if op == "AveragePool":
        attributes["count_include_pad"] = b.choose([None, 0, 1])
    if op == "LpPool":
        attributes["p"] = b.choose([None, 2, 3, 1])
        attributes.pop("auto_pad", None)
        x = b.positive(x)
    elif b.coin(0.3) and "auto_pad" not in attributes:
        attributes["ceil_mode"] = 1
    return b.node(op, [x], kernel_shape=kernel, **attributes)


@entry("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(b: Scope, op: str) -> Any:
    if op == "GlobalLpPool" and b.opset >= 22:
        return []  # onnxruntime has no kernel for the newer one
    return b.node(op, [_image(b, b.integer(1, 3))])


@entry("MaxUnpool")
def max_unpool(b: Scope, op: str) -> Any:
    x = _image(b, 2, low=2, high=4)
    window = {"kernel_shape": [2, 2], "strides": [2, 2]}
    y, indices = b.node("MaxPool", [x], 2, **window)
    return b.node(op, [y, indices, np.array(x.shape)], **window)


@entry("Col2Im", since=18)
def col2im(b: Scope, op: str) -> Any:
    h, w = b.integer(2, 4), b.integer(2, 4)
    kh, kw = b.integer(1, 2), b.integer(1, 2)
    c, count = b.integer(1, 2), (h - kh + 1) * (w - kw + 1)
    x = b.to_shape(b.pick(), [1, c * kh * kw, count])
    return b.node(op, [x, np.array([h, w]), np.array([kh, kw])])


@entry("DeformConv", since=20)
def deform_conv(b: Scope, op: str) -> Any:
    x = _image(b, 2, low=3, high=4)
    n, c, h, w = x.shape
    weight = b.weight([b.integer(1, 2), c, 2, 2], 0.5)
    offset = b.bounded(b.to_shape(b.pick(), [n, 8, h - 1, w - 1]), 0.4)
    bias = b.weight([weight.shape[0]]) if b.coin() else None
    mask = b.node("Sigmoid", [b.to_shape(b.pick(), [n, 4, h - 1, w - 1])]) if b.coin() else None
    return b.node(op, [x, weight, offset, bias, mask], kernel_shape=[2, 2])


# Normalizations.


@entry("BatchNormalization")
def batch_normalization(b: Scope, op: str) -> Any:
    x = b.pick(2, 5)
    c = x.shape[1]
    inputs = [x, b.weight([c]), b.weight([c])]
    if b.coin(0.3) and x.array.size // c > 2:
        # Read by nobody else: onnxruntime writes the new statistics over the old ones.
        inputs += [b.constant(b.normal([c], 0.3)), b.constant(np.abs(b.normal([c])) + 0.25)]
        return b.node(op, inputs, 3, training_mode=1, momentum=b.uniform(0.5, 0.95))
    inputs += [b.weight([c], 0.3), b.weight([c], positive=True)]
    return b.node(op, inputs, epsilon=b.uniform(1e-3, 0.1) if b.coin() else None)


@entry("InstanceNormalization")
def instance_normalization(b: Scope, op: str) -> Any:
    x = _image(b, b.integer(1, 3))
    return b.node(op, [x, b.weight([x.shape[1]]), b.weight([x.shape[1]])], epsilon=b.uniform(0.01, 0.1))


@entry("LayerNormalization")
def layer_normalization(b: Scope, op: str) -> Any:
    x = b.pick(1)
    axis = _axis(b, x)
    shape = x.shape[axis:]
    bias = b.weight(shape) if b.coin() else None
    return b.node(op, [x, b.weight(shape), bias], axis=axis, epsilon=b.uniform(0.01, 0.1))


@entry("RMSNormalization", since=23)
def rms_normalization(b: Scope, op: str) -> Any:
    x = b.pick(1)
    axis = _axis(b, x)
    return b.node(op, [x, b.weight(x.shape[axis:])], axis=axis, epsilon=b.uniform(0.01, 0.1))


@entry("SimplifiedLayerNormalization")
def simplified_layer_normalization(b: Scope, op: str) -> Any:
    x = b.pick(1)
    return b.node(op, [x, b.weight(x.shape[-1:])], axis=-1, epsilon=b.uniform(0.01, 0.1))


@entry(MICROSOFT + "SkipLayerNormalization", MICROSOFT + "SkipSimplifiedLayerNormalization")
def skip_layer_normalization(b: Scope, op: str) -> Any:
    x = b.pick(3, 3)
    name = op.removeprefix(MICROSOFT)
    inputs: list[Value | None] = [x, b.weight(x.shape), b.weight(x.shape[-1:])]
    if name == "SkipLayerNormalization":
        inputs.append(b.weight(x.shape[-1:]) if b.coin() else None)
    inputs.append(b.weight(x.shape[-1:]) if b.coin() else None)
    return b.node(name, inputs, domain="com.microsoft", epsilon=b.uniform(0.01, 0.1))


@entry("GroupNormalization", since=21)
def group_normalization(b: Scope, op: str) -> Any:
    groups = b.integer(1, 2)
    x = _image(b, b.integer(1, 2), channels=groups * b.integer(1, 2))
    c = x.shape[1]
    return b.node(op, [x, b.weight([c]), b.weight([c])], num_groups=groups, epsilon=b.uniform(0.01, 0.1))


@entry("LRN")
def lrn(b: Scope, op: str) -> Any:
    x = _image(b, 2)
    return b.node(
        op,
        [x],
        size=b.choose([1, 3]),
        alpha=b.uniform(0.01, 1),
        beta=b.uniform(0.3, 1),
        bias=b.uniform(0.5, 2),
    )


@entry("LpNormalization")
def lp_normalization(b: Scope, op: str) -> Any:
    x = b.positive(b.pick(1))
    return b.node(op, [x], axis=_axis(b, x), p=b.choose([1, 2]))


@entry("MeanVarianceNormalization")
def mean_variance_normalization(b: Scope, op: str) -> Any:
    x = b.to_shape(b.pick(), [2, 2, 3, 2])
    # No two equal values: the variance of constants has an infinite gradient.
    x = b.node("Add", [x, b.weight([2, 2, 3, 2])])
    return b.node(op, [x], axes=[0, 2, 3] if b.coin() else None)


# Shapes.


@entry("Reshape")
def reshape(b: Scope, op: str) -> Any:
    x = b.pick()
    rank = b.integer(1, 5)
    return b.reshape(x, b.factors(x.array.size, rank))


@entry("Transpose")
def transpose(b: Scope, op: str) -> Any:
    x = b.pick()
    return b.node(op, [x], perm=b.rng.permutation(x.rank).tolist() if x.rank and b.coin(0.8) else None)


@entry("Flatten")
def flatten(b: Scope, op: str) -> Any:
    x = b.pick(1)
    return b.node(op, [x], axis=b.integer(-x.rank, x.rank) if b.coin(0.7) else None)


@entry("Squeeze")
def squeeze(b: Scope, op: str) -> Any:
    x = b.pick(1)
    axes = [i for i, d in enumerate(x.shape) if d == 1]
    if not axes:
        x = b.node("Unsqueeze", [x, np.array([0])])
        axes = [0]
    chosen = [a - (x.rank if b.coin(0.3) else 0) for a in axes if b.coin(0.7)] or axes
    return b.node(op, [x, np.array(chosen, np.int64) if b.coin(0.8) else None])


@entry("Unsqueeze")
def unsqueeze(b: Scope, op: str) -> Any:
    x = b.pick(0, 4)
    rank = x.rank + b.integer(1, 2)
    axes = b.rng.choice(rank, rank - x.rank, replace=False)
    return b.node(op, [x, np.array([a - (rank if b.coin(0.3) else 0) for a in axes], np.int64)])


@entry("Slice")
def slice_(b: Scope, op: str) -> Any:
    x = b.pick(1)
    axes = sorted(b.rng.choice(x.rank, b.integer(1, x.rank), replace=False).tolist())
    starts, ends, steps = [], [], []
    for a in axes:
        size = x.shape[a]
        start = b.integer(0, size - 1)
        if b.coin(0.3):
            starts.append(start if b.coin() else start - size)
            ends.append(
                b.choose([-(2**31), -size - 1]) if b.coin() or start == 0 else b.integer(0, start - 1)
            )
            steps.append(-b.integer(1, 2))
        else:
            starts.append(start if b.coin() else start - size)
            ends.append(b.choose([2**31 - 1, 2**63 - 1, size]) if b.coin() else b.integer(start + 1, size))
            steps.append(b.integer(1, 2))
    kind = b.choose([np.int64, np.int64, np.int32])
    if kind is np.int32:
        ends = [min(e, 2**31 - 1) for e in ends]
    every = len(axes) == x.rank and b.coin()
    given = None if every else np.array([a - (x.rank if b.coin(0.3) else 0) for a in axes], kind)
    step = None if all(s == 1 for s in steps) and b.coin() else np.array(steps, kind)
    return b.node(op, [x, np.array(starts, kind), np.array(ends, kind), given, step])


@entry("Concat")
def concat(b: Scope, op: str) -> Any:
    x = b.pick(1)
    axis = _axis(b, x)
    parts = [x]
    for _ in range(b.integer(0, 2)):
        fitting = [
            v
            for v in b.values
            if v.is_float
            and v.rank == x.rank
            and v.array.size <= 60
            and all(
                p == q for i, (p, q) in enumerate(zip(v.shape, x.shape, strict=True)) if i != axis % x.rank
            )
        ]
        if b.coin(0.7):
            parts.append(b.choose(fitting) if fitting else x)
        else:
            shape = list(x.shape)
            shape[axis] = b.integer(1, 2)
            parts.append(b.weight(shape))
    return b.node(op, parts, axis=axis)


@entry("Split")
def split(b: Scope, op: str) -> Any:
    x = b.pick(1)
    axis = _axis(b, x)
    size = x.shape[axis]
    if b.opset >= 18 and b.coin(0.4):
        count = b.integer(1, min(size, 3))
        while (count - 1) * -(-size // count) >= size:
            count -= 1
        outputs = b.node(op, [x], count, axis=axis, num_outputs=count)
    else:
        cuts = sorted(b.rng.integers(0, size + 1, b.integer(0, 2)).tolist())
        sizes = np.diff([0, *cuts, size])
        outputs = b.node(op, [x, sizes.astype(np.int64)], len(sizes), axis=axis)
    return [v for v in (outputs if isinstance(outputs, list) else [outputs]) if v.array.size]


@entry("Pad")
def pad(b: Scope, op: str) -> Any:
    x = b.pick(1)
    mode = b.choose([None, "constant", "reflect", "edge", *(["wrap"] if b.opset >= 20 else [])])
    axes = list(range(x.rank))
    given = None
    if b.opset >= 18 and b.coin(0.4):
        axes = b.rng.choice(x.rank, b.integer(1, x.rank), replace=False).tolist()
        given = np.array([a - (x.rank if b.coin(0.3) else 0) for a in axes], np.int64)

    def amount(size: int) -> int:
        if mode in (None, "constant"):
            return b.integer(-1 if size > 2 and b.coin(0.2) else 0, 2)
        return b.integer(0, min(2, size - 1))

    pads = np.array([amount(x.shape[a]) for a in (*axes, *axes)], np.int64)
    fill = np.float64(b.uniform(-1, 1)) if mode in (None, "constant") and b.coin() else None
    return b.node(op, [x, pads, fill, given], mode=mode)


def _positions(b: Scope, size: int, shape: list[int]) -> np.ndarray:
    low = -size if b.coin(0.3) else 0
    return b.rng.integers(low, size, shape).astype(b.choose([np.int64, np.int64, np.int32]))


@entry("Gather")
def gather(b: Scope, op: str) -> Any:
    x = b.pick(1)
    axis = _axis(b, x)
    shape = b.choose([[], [1], [2], [3], [2, 2]])
    indices = b.data(_positions(b, x.shape[axis], shape), "indices")
    return b.node(op, [x, indices], axis=axis if b.coin(0.8) or axis % x.rank else None)


@entry("GatherElements")
def gather_elements(b: Scope, op: str) -> Any:
    x = b.pick(1)
    axis = _axis(b, x)
    shape = [b.integer(1, d) for d in x.shape]
    shape[axis] = b.integer(1, 3)
    return b.node(op, [x, b.data(_positions(b, x.shape[axis], shape), "indices")], axis=axis)


@entry("GatherND")
def gather_nd(b: Scope, op: str) -> Any:
    x = b.pick(1, 4)
    batch = b.integer(0, x.rank - 1)
    depth = b.integer(1, x.rank - batch)
    lead = [*x.shape[:batch], b.integer(1, 3)]
    columns = [b.rng.integers(-d if b.coin(0.2) else 0, d, lead) for d in x.shape[batch : batch + depth]]
    indices = b.data(np.stack(columns, -1).astype(np.int64), "indices")
    return b.node(op, [x, indices], batch_dims=batch if batch or b.coin() else None)


@entry("ScatterElements")
def scatter_elements(b: Scope, op: str) -> Any:
    x = b.pick(1)
    axis = _axis(b, x)
    shape = [b.integer(1, d) for d in x.shape]
    # Every position at most once; what repeated ones mean is open.
    order = b.rng.random([x.shape[axis] if i == axis % x.rank else d for i, d in enumerate(shape)])
    indices = np.take(np.argsort(order, axis), np.arange(shape[axis]), axis)
    reduction = b.choose([None, "none", "add", "mul", *(["max", "min"] if b.opset >= 18 else [])])
    return b.node(op, [x, b.data(indices, "indices"), b.weight(shape)], axis=axis, reduction=reduction)


@entry("ScatterND")
def scatter_nd(b: Scope, op: str) -> Any:
    x = b.pick(1, 4)
    depth = b.integer(1, x.rank)
    places = math.prod(x.shape[:depth])
    count = b.integer(1, min(3, places))
    flat = b.rng.choice(places, count, replace=False)
    indices = np.stack(np.unravel_index(flat, x.shape[:depth]), -1).astype(np.int64)
    updates = b.weight([count, *x.shape[depth:]])
    reduction = b.choose([None, "none", "add", "mul", *(["max", "min"] if b.opset >= 18 else [])])
    return b.node(op, [x, b.data(indices, "indices"), updates], reduction=reduction)


@entry("Expand")
def expand(b: Scope, op: str) -> Any:
    x = b.pick()
    shape = [2 if d == 1 and b.coin() else 1 if b.coin(0.2) else d for d in x.shape]
    if b.coin(0.4):
        shape = [b.integer(1, 2), *shape]
    return b.node(op, [x, b.shape_of(shape, x)])


@entry("Tile")
def tile(b: Scope, op: str) -> Any:
    x = b.pick(1)
    return b.node(op, [x, np.array([b.choose([1, 1, 2]) for _ in x.shape])])


@entry("DepthToSpace")
def depth_to_space(b: Scope, op: str) -> Any:
    x = b.to_shape(b.pick(), [b.integer(1, 2), 4 * b.integer(1, 2), b.integer(1, 3), b.integer(1, 2)])
    return b.node(op, [x], blocksize=2, mode=b.choose([None, "DCR", "CRD"]))


@entry("SpaceToDepth")
def space_to_depth(b: Scope, op: str) -> Any:
    x = b.to_shape(b.pick(), [b.integer(1, 2), b.integer(1, 2), 2 * b.integer(1, 2), 2 * b.integer(1, 2)])
    return b.node(op, [x], blocksize=2)


@entry("Compress")
def compress(b: Scope, op: str) -> Any:
    x = b.pick(1)
    axis = _axis(b, x) if b.coin(0.7) else None
    size = x.array.size if axis is None else x.shape[axis]
    mask = b.rng.random(size) < 0.6
    mask[b.integer(0, size - 1)] = True
    return b.node(op, [x, b.data(mask, "mask")], axis=axis)


@entry("ReverseSequence")
def reverse_sequence(b: Scope, op: str) -> Any:
    x = b.pick(2)
    time = b.integer(0, 1)
    lengths = b.data(b.rng.integers(1, x.shape[time] + 1, x.shape[1 - time]), "lengths")
    return b.node(op, [x, lengths], time_axis=time, batch_axis=1 - time)


@entry("OneHot")
def one_hot(b: Scope, op: str) -> Any:
    depth = b.integer(2, 4)
    indices = b.data(b.rng.integers(0, depth, [b.integer(1, 4)]), "indices")
    return b.node(op, [indices, np.array([depth]), b.weight([2])], axis=b.choose([None, -1, 0]))


@entry("CenterCropPad", since=18)
def center_crop_pad(b: Scope, op: str) -> Any:
    x = b.pick(1)
    return b.node(op, [x, np.array([max(1, d + b.integer(-2, 2)) for d in x.shape])])


@entry("Unique")
def unique(b: Scope, op: str) -> Any:
    x = b.pick(1)
    # No two equal values: whether two are equal depends on the element type.
    x = b.node("Add", [x, b.constant(b.normal(x.shape))])
    return b.node(op, [x], sorted=1)


@entry("EyeLike")
def eye_like(b: Scope, op: str) -> Any:
    x = b.pick(2, 2)
    return b.node("Add", [x, b.node(op, [x], k=b.integer(-1, 1))])


@entry("ConstantOfShape", "Size", "Range")
def shape_arithmetic(b: Scope, op: str) -> Any:
    """What exporters write: sizes and positions computed from a shape."""
    x = b.pick(1)
    if op == "ConstantOfShape":
        fill = numpy_helper.from_array(np.array([b.uniform(-1, 1)])) if b.coin() else None
        return b.node(
            "Add",
            [x, b.node(op, [b.node("Shape", [x])], value=fill or numpy_helper.from_array(np.array([1.0])))],
        )
    if op == "Size":
        return b.node("Div", [x, b.node("Cast", [b.node(op, [x])], to=TensorProto.DOUBLE)])
    last = b.node("Gather", [b.node("Shape", [x]), np.array(x.rank - 1)])
    positions = b.node("Cast", [b.node(op, [np.array(0), last, np.array(1)])], to=TensorProto.DOUBLE)
    return b.node("Add", [x, b.node("Sin", [positions])])


@entry("TensorScatter", since=24)
def tensor_scatter(b: Scope, op: str) -> Any:
    x = b.to_shape(b.pick(), [2, 2, 4, 2])
    update = b.weight([2, 2, 2, 2])
    return b.node(op, [x, update, b.data(b.rng.integers(0, 3, [2]), "at")], axis=-2)


# Sampling.


@entry("Resize")
def resize(b: Scope, op: str) -> Any:
    dims = b.integer(1, 2)
    x = _image(b, dims, low=2, high=4)
    mode = b.choose(["nearest", "linear", "cubic"] if dims == 2 else ["nearest", "linear"])
    attributes: dict[str, Any] = {"mode": mode}
    modes = ["half_pixel", "asymmetric", "align_corners"]
    if min(x.shape[2:]) > 2:
        # For one element the reference evaluator looks at -0.5, the specification and onnxruntime at 0.
        modes.append("pytorch_half_pixel")
    attributes["coordinate_transformation_mode"] = b.choose(modes)
    if mode == "nearest":
        attributes["nearest_mode"] = b.choose(["round_prefer_floor", "floor", "ceil", "round_prefer_ceil"])
    if mode == "cubic":
        attributes["cubic_coeff_a"] = b.choose([None, -0.5])
        attributes["exclude_outside"] = b.choose([None, 1])
    spatial = [d + b.integer(-1, 2) for d in x.shape[2:]]
    if b.coin():
        return b.node(op, [x, None, None, np.array([*x.shape[:2], *spatial])], **attributes)
    # Whole sizes: what half an element is to be is read in two ways.
    factors = [b.choose([1.0, 2.0, *([1.5] if d % 2 == 0 else [])]) for d in x.shape[2:]]
    scales = np.array([1, 1, *factors], np.float32)
    return b.node(op, [x, None, scales], **attributes)


@entry("GridSample")
def grid_sample(b: Scope, op: str) -> Any:
    x = _image(b, 2, low=2, high=4)
    grid = b.bounded(b.to_shape(b.pick(), [x.shape[0], b.integer(1, 3), b.integer(1, 3), 2]), 0.95)
    modes = ["linear", "nearest", "cubic"] if b.opset >= 20 else ["bilinear", "nearest", "bicubic"]
    return b.node(
        op,
        [x, grid],
        mode=b.choose(modes),
        padding_mode=b.choose(["zeros", "border", "reflection"]),
        align_corners=b.integer(0, 1),
    )


@entry("AffineGrid", since=20)
def affine_grid(b: Scope, op: str) -> Any:
    theta = b.to_shape(b.pick(), [2, 2, 3])
    return b.node(
        op, [theta, np.array([2, 1, b.integer(2, 3), b.integer(2, 3)])], align_corners=b.integer(0, 1)
    )


@entry("RoiAlign")
def roi_align(b: Scope, op: str) -> Any:
    if b.opset >= 22:
        return []  # onnxruntime has no kernel for the newer one
    x = _image(b, 2, low=3, high=5)
    rois = np.stack(
        [np.array([b.uniform(0, 1), b.uniform(0, 1), b.uniform(1.5, 3), b.uniform(1.5, 3)]) for _ in range(2)]
    )
    return b.node(
        op,
        [x, rois, b.rng.integers(0, x.shape[0], 2)],
        mode="avg",
        output_height=2,
        output_width=2,
        sampling_ratio=2,
        coordinate_transformation_mode=b.choose(["half_pixel", "output_half_pixel"]),
    )


@entry("DFT")
def dft(b: Scope, op: str) -> Any:
    x = b.to_shape(b.pick(), [b.integer(1, 2), b.integer(2, 4), b.integer(1, 2)])
    inverse = b.integer(0, 1)
    if b.opset >= 20:
        return b.node(op, [x, None, np.array(1)], inverse=inverse)
    return b.node(op, [x], axis=1, inverse=inverse)


# Recurrent networks.


@entry("RNN", "GRU", "LSTM")
def recurrent(b: Scope, op: str) -> Any:
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[op]
    steps, batch, size, hidden = b.integer(1, 3), b.integer(1, 2), b.integer(1, 3), b.integer(1, 3)
    direction = b.choose(["forward", "reverse", "bidirectional"])
    d = 2 if direction == "bidirectional" else 1
    x = b.to_shape(b.pick(), [steps, batch, size])
    inputs: list[Value | None] = [
        x,
        b.weight([d, gates * hidden, size], 0.5),
        b.weight([d, gates * hidden, hidden], 0.5),
        b.weight([d, 2 * gates * hidden], 0.5) if b.coin(0.7) else None,
        None,
        b.weight([d, batch, hidden], 0.5) if b.coin() else None,
    ]
    attributes: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
    count = 2
    if op == "LSTM":
        inputs.append(b.weight([d, batch, hidden], 0.5) if b.coin() else None)
        inputs.append(b.weight([d, 3 * hidden], 0.5) if b.coin(0.3) else None)
        count = 3
    if op == "GRU":
        attributes["linear_before_reset"] = b.integer(0, 1)
    return b.node(op, inputs, count, **attributes)


# Losses and attention.


@entry("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def loss(b: Scope, op: str) -> Any:
    n, c = b.integer(1, 4), b.integer(2, 4)
    rest = b.choose([[], [], [2], [2, 2]])
    x = b.to_shape(b.pick(), [n, c, *rest])
    labels = b.rng.integers(0, c, [n, *rest])
    ignored = None
    if labels.size > 1 and b.coin(0.3):
        ignored = b.choose([-1, 0])
        labels.flat[0] = ignored
        labels.flat[1] = 1
    weights = b.constant(b.normal([c]) ** 2 + 0.25, "class_weights") if b.coin(0.4) else None
    attributes = {"reduction": b.choose([None, "mean", "sum", "none"]), "ignore_index": ignored}
    if op == "NegativeLogLikelihoodLoss":
        x = b.node("LogSoftmax", [x], axis=1)
    elif b.coin(0.3):
        return b.node(op, [x, b.data(labels, "labels"), weights], 2, **attributes)
    return b.node(op, [x, b.data(labels, "labels"), weights], **attributes)


@entry("attention pattern")
def attention_pattern(b: Scope, op: str) -> Any:
    """As exporters write it: heads split off, scores scaled and masked, heads joined."""
    n, steps, heads, size = b.integer(1, 2), b.integer(1, 3), b.integer(1, 2), 2
    x = b.to_shape(b.pick(), [n, steps, heads * size])

    def split_heads(turn: list[int]) -> Value:
        y = b.node("MatMul", [x, b.weight([heads * size, heads * size], 0.6)])
        return b.node("Transpose", [b.reshape(y, [n, steps, heads, size])], perm=turn)

    q, k, v = split_heads([0, 2, 1, 3]), split_heads([0, 2, 3, 1]), split_heads([0, 2, 1, 3])
    scores = b.node("Div", [b.node("MatMul", [q, k]), np.float64(np.float32(math.sqrt(size)))])
    if b.coin():
        mask = np.triu(np.full((steps, steps), -1e4), 1)
        scores = b.node("Add", [scores, mask])
    elif b.coin():
        seen = b.data(np.tril(np.ones((steps, steps), bool)), "mask")
        scores = b.node("Where", [seen, scores, np.float64(np.finfo(np.float32).min)])
    y = b.node("MatMul", [b.node("Softmax", [scores], axis=-1), v])
    return b.reshape(b.node("Transpose", [y], perm=[0, 2, 1, 3]), [n, steps, heads * size])


@entry("Attention", since=23)
def attention(b: Scope, op: str) -> Any:
    n, steps, heads, size = b.integer(1, 2), b.integer(1, 3), b.integer(1, 2), b.integer(1, 3)
    q, k, v = (b.to_shape(b.pick(), [n, heads, steps, size]) for _ in range(3))
    return b.node(
        op, [q, k, v], is_causal=b.choose([None, 0, 1]), scale=b.uniform(0.3, 1) if b.coin() else None
    )


@entry("RotaryEmbedding", since=23)
def rotary_embedding(b: Scope, op: str) -> Any:
    n, heads, steps, size = b.integer(1, 2), b.integer(1, 2), b.integer(1, 3), b.choose([2, 4])
    x = b.to_shape(b.pick(), [n, heads, steps, size])
    angles = b.normal([4, size // 2])
    cos, sin = (
        np.cos(angles).astype(np.float32).astype(float),
        np.sin(angles).astype(np.float32).astype(float),
    )
    positions = b.data(b.rng.integers(0, 4, [n, steps]), "positions")
    return b.node(op, [x, cos, sin, positions], interleaved=b.integer(0, 1))


# Control flow.


def _fill(body: Scope, like: Value) -> Value:
    """Some random operators, and all of it brought into the shape of `like`."""
    before = len(body.made)
    for _ in range(body.integer(1, 4)):
        grow(body, body.choose(IN_BODIES))
    new = [v for v in body.made[before:] if v.is_float and v.array.size]
    result = body.pick(fits=lambda v: v.shape == like.shape) if body.coin(0.3) else like
    if result.shape != like.shape:
        result = body.to_shape(result, like.shape)
    for v in new[-2:]:
        if _fit([result], v) and np.broadcast_shapes(v.shape, like.shape) == like.shape:
            result = body.node("Add", [result, v])
        else:
            result = body.node("Add", [result, body.node("ReduceMean", [v], keepdims=0)])
    return body.node(body.choose(["Tanh", "Sin", "Atan"]), [result])


@entry("If")
def if_(b: Scope, op: str) -> Any:
    if b.depth >= MAX_DEPTH:
        return []
    x = b.pick()
    how = b.integer(0, 2)
    if how == 0:
        condition = b.data(np.array(b.coin()), "condition")
    elif how == 1:
        total = b.node("ReduceSum", [b.pick()], keepdims=0)
        condition = b.node("Greater", [total, np.float64(b.uniform(-1, 1))])
    else:
        condition = b.constant(np.array(b.coin()), "condition")
    count = b.integer(1, 2)
    likes = [x, b.pick()][:count]
    bodies = []
    for name in ("then", "else"):
        body = b.inner()
        outputs = [_fill(body, v) if body.coin(0.85) else v for v in likes]
        bodies.append(body.graph(name, [], outputs))
    for body in bodies:
        b.names.taken |= {n for node in body.node for n in node.output}
    return b.node(op, [condition], count, then_branch=bodies[0], else_branch=bodies[1])


@entry("Loop")
def loop(b: Scope, op: str) -> Any:
    if b.depth >= MAX_DEPTH:
        return []
    count = b.integer(1, 2)
    starts = [b.pick() for _ in range(count)]
    trips = b.data(np.array(b.integer(1, 3)), "trips")
    condition = b.constant(np.array(True), "condition") if b.coin() else None
    step = Value(b.names.fresh("iteration"), np.array(0))
    going = Value(b.names.fresh("going"), np.array(True))
    state = [Value(b.names.fresh("state"), v.array) for v in starts]
    body = b.inner([step, going, *state])
    carried = [_fill(body, v) for v in state]
    if b.coin(0.4):
        position = body.node("Cast", [step], to=TensorProto.DOUBLE)
        carried[0] = body.node("Mul", [carried[0], body.node("Cos", [position])])
    stacked = [v for v in body.made if v.is_float and 0 < v.array.size < 40 and v not in carried]
    stacked = [body.choose(stacked)] if stacked and b.coin() else []
    go_on = body.node("Identity", [going]) if b.coin() else body.constant(np.array(True))
    graph = body.graph("body", [step, going, *state], [go_on, *carried, *stacked])
    return _results(b, b.node(op, [trips, condition, *starts], count + len(stacked), body=graph))


@entry("Scan")
def scan(b: Scope, op: str) -> Any:
    if b.depth >= MAX_DEPTH:
        return []
    start, sequence = b.pick(0, 3), b.pick(1, 4)
    axis = b.integer(0, sequence.rank - 1)
    state = Value(b.names.fresh("state"), start.array)
    part = Value(b.names.fresh("part"), np.take(sequence.array, 0, axis))
    body = b.inner([state, part])
    carried = body.node("Add", [_fill(body, state), body.node("ReduceMean", [part], keepdims=0)])
    carried = body.node("Tanh", [carried])
    stacked = _fill(body, part)
    graph = body.graph("body", [state, part], [carried, stacked])
    return b.node(
        op,
        [start, sequence],
        2,
        num_scan_inputs=1,
        body=graph,
        scan_input_axes=[axis] if axis or b.coin() else None,
        scan_input_directions=[b.integer(0, 1)] if b.coin() else None,
        scan_output_directions=[b.integer(0, 1)] if b.coin() else None,
    )


def _results(b: Scope, results: Any) -> list[Value]:
    return results if isinstance(results, list) else [results]


# What a step of a loop makes must have the same shape in every step.
IN_BODIES = [name for name in OPERATORS if name not in ("Unique", "Compress")]
