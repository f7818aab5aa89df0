"""Random cases of operators with compiled kernels, and what PyTorch computes of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F  # noqa: N812
from onnx import helper

import ortgrad
from ortgrad import nodes
from support import recurrent as recurrent_support

Arrays = dict[str, np.ndarray]
Tensors = dict[str, torch.Tensor]
Random = np.random.Generator
# Products of a case: more take long and show nothing else.
MOST_PRODUCTS = 30_000_000
# A number that is the same in float32 and float64, for attributes are float32.
EPSILON = 2.0**-8


@dataclass
class Case:
    """A model that gives gradients, its inputs, and PyTorch's results in float32 and in float64."""

    text: str
    model: onnx.ModelProto
    feeds: Arrays
    single: Arrays
    double: Arrays


KINDS: dict[str, Callable[[Random, Any], Case]] = {}


def kind(function: Callable[[Random, Any], Case]) -> Callable[[Random, Any], Case]:
    KINDS[function.__name__] = function
    return function


def generate(name: str, seed: int) -> Case:
    """Return a case of a kind; every fourth has float64, where onnxruntime has a kernel for that."""
    double = seed % 4 == 3 and name not in ("average_pool", "instance_normalization")
    random = np.random.default_rng([seed, *name.encode()])
    return KINDS[name](random, np.float64 if double else np.float32)


def size(random: Random, most: int, least: int = 1) -> int:
    """A number up to `most`; small ones are as likely as large ones."""
    return int(math.exp(random.uniform(math.log(least), math.log(most + 1))))


def pick(random: Random, *choices: Any) -> Any:
    return choices[random.integers(len(choices))]


def numbers(random: Random, dtype: Any, *shape: int) -> np.ndarray:
    return random.standard_normal(shape).astype(dtype)


def shape_of(random: Random, least: int = 1, most: int = 4, elements: int = 200_000) -> list[int]:
    """A shape of so many dimensions, in any order of their sizes."""
    rank, left, sizes = int(random.integers(least, most + 1)), elements, []
    for _ in range(rank):
        sizes.append(size(random, min(left, 3000)))
        left = max(1, left // sizes[-1])
    return [int(n) for n in random.permutation(sizes)]


def forward(
    random: Random,
    op_type: str,
    feeds: Arrays,
    compute: Callable[[Tensors], Sequence[torch.Tensor]],
    wrt: Sequence[str],
    *,
    names: Sequence[str] | None = None,
    further: int = 0,
    known: bool | None = None,
    **attributes: Any,
) -> Case:
    """The gradients of a node. `compute` returns its outputs; it has `further` that nobody asks for."""
    single, double, seeds = _results(random, feeds, compute, wrt)
    outputs = [name.removesuffix("_grad") for name in seeds]
    node = helper.make_node(
        op_type,
        list(feeds) if names is None else names,
        [*outputs, *(f"further{i}" for i in range(further))],
        **attributes,
    )
    text = f"{op_type} {attributes}"
    return built(random, [node], feeds, seeds, wrt, single, double, text, known=known)


def built(
    random: Random,
    graph: Sequence[onnx.NodeProto],
    feeds: Arrays,
    seeds: Arrays,
    wrt: Sequence[str],
    single: Arrays,
    double: Arrays,
    text: str,
    *,
    known: bool | None = None,
) -> Case:
    """The gradients of a graph, whose inputs have sizes that are known or are not."""
    known = bool(random.integers(2)) if known is None else known

    def info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
        sizes = array.shape if known or array.ndim == 0 else [f"{name}_{i}" for i in range(array.ndim)]
        # Weights have sizes in models.
        sizes = array.shape if name in ("W", "R", "B") else sizes
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), sizes)

    inputs = [info(name, array) for name, array in feeds.items()]
    element = helper.np_dtype_to_tensor_dtype(next(iter(seeds.values())).dtype)
    of = [name.removesuffix("_grad") for name in seeds]
    outputs = [helper.make_tensor_value_info(name, element, None) for name in of]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_graph(list(graph), "g", inputs, outputs)
    model = helper.make_model(made, opset_imports=opsets, ir_version=10)
    gradients = ortgrad.build_gradient_model(model, wrt=list(wrt), of=of)
    wanted = {value.name for value in gradients.graph.input}
    seeds = {name: seed for name, seed in seeds.items() if name in wanted}
    shapes = {name: list(array.shape) for name, array in feeds.items()}
    return Case(f"{text} {shapes} known {known}", gradients, {**feeds, **seeds}, single, double)


def gradient_node(random: Random, node: Any, feeds: Arrays, single: Arrays, double: Arrays) -> Case:
    """A gradient node alone."""
    dtype = next(array.dtype for array in feeds.values() if array.dtype.kind == "f")
    shapes = {name: list(array.shape) for name, array in feeds.items()}
    model = nodes.make_model(node, shapes=shapes, dtype=dtype)
    return Case(f"{node.op_type} {shapes}", model, feeds, single, double)


def _results(
    random: Random,
    feeds: Arrays,
    compute: Callable[[Tensors], Sequence[torch.Tensor]],
    wrt: Sequence[str],
) -> tuple[Arrays, Arrays, Arrays]:
    """PyTorch's gradients and outputs in float32 and float64, and the gradients of the outputs."""
    dtype = feeds[wrt[0]].dtype
    with torch.no_grad():
        outputs = compute(_tensors(feeds, torch.float64))
    seeds = {f"out{i}_grad": numbers(random, dtype, *y.shape) for i, y in enumerate(outputs)}
    if len(outputs) == 1 and not outputs[0].shape:
        # One output of one element has the gradient 1.
        seeds["out0_grad"] = np.ones((), dtype)
    results = []
    for precision in (torch.float32, torch.float64):
        tensors = _tensors(feeds, precision)
        for name in wrt:
            tensors[name].requires_grad_()
        given = [torch.tensor(seed, dtype=precision) for seed in seeds.values()]
        outputs = compute(tensors)
        grads = torch.autograd.grad(outputs, [tensors[name] for name in wrt], given)
        found = {f"{name}_grad": g.numpy() for name, g in zip(wrt, grads, strict=True)}
        results.append(found | {f"out{i}": y.detach().numpy() for i, y in enumerate(outputs)})
    return results[0], results[1], seeds


def _tensors(feeds: Mapping[str, np.ndarray], precision: torch.dtype) -> Tensors:
    return {
        name: torch.tensor(array, dtype=precision if array.dtype.kind == "f" else None)
        for name, array in feeds.items()
    }


# Convolutions and pools.


def _convolution(
    random: Random, dtype: Any, channels: int, filters: int, group: int, kernel: list[int]
) -> Case:
    rank = len(kernel)
    strides, dilations = ([int(pick(random, 1, 1, 1, 2, 3)) for _ in kernel] for _ in range(2))
    pads = [int(random.integers(0, k)) for k in kernel * 2]
    if bool(random.integers(2)):
        strides, dilations, pads = [1] * rank, [1] * rank, [k // 2 for k in kernel] * 2
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    samples = size(random, 6)
    most = MOST_PRODUCTS // (samples * channels * filters // group * math.prod(kernel))
    most = min(most, 2_000_000 // (samples * max(channels, filters)))
    per_axis = max(2, int(most ** (1 / rank)))
    sizes = [r + size(random, min(per_axis, 4000)) for r in reach]
    feeds = {
        "X": numbers(random, dtype, samples, channels, *sizes),
        "W": numbers(random, dtype, filters, channels // group, *kernel),
    }
    if random.integers(2):
        feeds["B"] = numbers(random, dtype, filters)

    def compute(t: Tensors) -> list[torch.Tensor]:
        both = [pads[i + rank * end] for i in reversed(range(rank)) for end in (0, 1)]
        function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[rank]
        options: Any = {"stride": strides, "dilation": dilations, "groups": group}
        return [function(F.pad(t["X"], both), t["W"], t.get("B"), **options)]

    options = {"strides": strides, "dilations": dilations, "pads": pads, "group": group}
    return forward(random, "Conv", feeds, compute, list(feeds), **options)


@kind
def dense_convolution(random: Random, dtype: Any) -> Case:
    rank = int(pick(random, 1, 2, 2, 3))
    group = int(pick(random, 1, 1, 1, 2, 3))
    channels, filters = (group * size(random, 40) for _ in range(2))
    return _convolution(random, dtype, channels, filters, group, [size(random, 5) for _ in range(rank)])


@kind
def pointwise_convolution(random: Random, dtype: Any) -> Case:
    """Its products are onnxruntime's."""
    samples, channels, filters = size(random, 6), size(random, 300), size(random, 300)
    most = MOST_PRODUCTS // (samples * channels * filters)
    most = max(1, min(most, 20_000, 2_000_000 // (samples * max(channels, filters))))
    # Large ones are divided among threads.
    positions = size(random, most, max(1, most // int(pick(random, 4, 4, 1000))))
    feeds = {
        "X": numbers(random, dtype, samples, channels, positions),
        "W": numbers(random, dtype, filters, channels, 1),
    }
    if random.integers(2):
        feeds["B"] = numbers(random, dtype, filters)
    return forward(random, "Conv", feeds, lambda t: [F.conv1d(t["X"], t["W"], t.get("B"))], list(feeds))


@kind
def depthwise_convolution(random: Random, dtype: Any) -> Case:
    channels = size(random, 80)
    kernel = [size(random, 5) for _ in range(int(pick(random, 1, 2, 2)))]
    return _convolution(random, dtype, channels, channels, channels, kernel)


@kind
def winograd_convolution(random: Random, dtype: Any) -> Case:
    channels, filters = (size(random, 96, 16) for _ in range(2))
    samples, height, width = size(random, 3), size(random, 24, 8), size(random, 24, 8)
    feeds = {
        "X": numbers(random, dtype, samples, channels, height, width),
        "W": numbers(random, dtype, filters, channels, 3, 3),
        "B": numbers(random, dtype, filters),
    }
    return forward(
        *(random, "Conv", feeds, lambda t: [F.conv2d(t["X"], t["W"], t["B"], padding=1)], list(feeds)),
        pads=[1] * 4,
    )


def _pool(random: Random, dtype: Any) -> tuple[Arrays, dict[str, Any]]:
    rank = int(pick(random, 1, 2, 2, 3))
    kernel = [size(random, 5) for _ in range(rank)]
    options = {
        "kernel_shape": kernel,
        "strides": [size(random, k + 1) for k in kernel],
        "pads": [int(random.integers(0, k // 2 + 1)) for k in kernel] * 2,
    }
    samples, channels = size(random, 4), size(random, 40)
    per_axis = max(2, int((200_000 / (samples * channels)) ** (1 / rank)))
    sizes = [k + size(random, min(per_axis, 500)) for k in kernel]
    return {"X": numbers(random, dtype, samples, channels, *sizes)}, options


@kind
def max_pool(random: Random, dtype: Any) -> Case:
    feeds, options = _pool(random, dtype)
    rank = len(options["kernel_shape"])
    function = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[rank]
    given = options["kernel_shape"], options["strides"], options["pads"][:rank]
    return forward(random, "MaxPool", feeds, lambda t: [function(t["X"], *given)], ["X"], **options)


@kind
def average_pool(random: Random, dtype: Any) -> Case:
    feeds, options = _pool(random, dtype)
    options["count_include_pad"] = int(random.integers(2))
    rank, include = len(options["kernel_shape"]), bool(options["count_include_pad"])
    function = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[rank]
    given = options["kernel_shape"], options["strides"], options["pads"][:rank]

    def compute(t: Tensors) -> list[torch.Tensor]:
        return [function(t["X"], *given, count_include_pad=include)]

    return forward(random, "AveragePool", feeds, compute, ["X"], **options)


# Recurrences.


def _recurrence(random: Random, dtype: Any, op_type: str) -> Case:
    own = {"linear_before_reset": 1} if op_type == "GRU" else None
    direction = pick(random, "forward", "bidirectional")
    steps, batch = size(random, 12), size(random, 40)
    inputs, hidden = size(random, 500, int(pick(random, 1, 100, 100))), size(random, 100)
    shape = {"steps": steps, "batch": batch, "inputs": inputs, "hidden": hidden}
    case = recurrent_support.Case("random", op_type, **shape, direction=direction, own=own, absent=("P",))
    feeds = {name: numbers(random, dtype, *a.shape) * dtype(0.4) for name, a in case.feeds(dtype).items()}
    seeds = {f"{name}_grad": numbers(random, dtype, *a.shape) for name, a in case.upstream(dtype).items()}
    results = []
    for precision in (np.float32, np.float64):
        module, tensors = recurrent_support.torch_module(
            case, {name: array.astype(precision) for name, array in feeds.items()}
        )
        outputs = recurrent_support.run_module(case, module, tensors)
        given = [torch.tensor(seeds[f"{name}_grad"].astype(precision)) for name in outputs]
        torch.autograd.backward(list(outputs.values()), given)
        found = {f"{name}_grad": t.grad.numpy() for name, t in tensors.items()}  # type: ignore[union-attr]
        found |= {name: y.detach().numpy() for name, y in outputs.items()}
        results.append(found | _in_onnx_order(case, module))
    names = [name if name in feeds else "" for name in recurrent_support.OPERANDS]
    while not names[-1]:
        names.pop()
    node = helper.make_node(op_type, names, case.outputs, **case.attributes)
    return built(random, [node], feeds, seeds, list(feeds), *results, f"{op_type} {case.attributes}")


def _in_onnx_order(case: recurrent_support.Case, module: torch.nn.RNNBase) -> Arrays:
    """The gradients of PyTorch's parameters, in ONNX's order of the gates."""
    order = {"LSTM": [0, 3, 1, 2], "GRU": [1, 0, 2]}[case.op_type]
    parts: dict[str, list[np.ndarray]] = {}
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        for suffix in ("", "_reverse")[: case.directions]:
            gradient = getattr(module, f"{name}_l0{suffix}").grad.numpy()
            pieces = np.split(gradient, len(order))
            parts.setdefault(name, []).append(np.concatenate([pieces[k] for k in order]))
    biases = [np.concatenate(pair) for pair in zip(parts["bias_ih"], parts["bias_hh"], strict=True)]
    return {
        "W_grad": np.stack(parts["weight_ih"]),
        "R_grad": np.stack(parts["weight_hh"]),
        "B_grad": np.stack(biases),
    }


@kind
def gru(random: Random, dtype: Any) -> Case:
    return _recurrence(random, dtype, "GRU")


@kind
def lstm(random: Random, dtype: Any) -> Case:
    return _recurrence(random, dtype, "LSTM")


# Element-wise operators, rows and sums.

ACTIVATIONS: dict[str, tuple[Any, str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "relu": (nodes.relu_grad, "X", torch.relu),
    "sigmoid": (nodes.sigmoid_grad, "Y", torch.sigmoid),
    "tanh": (nodes.tanh_grad, "Y", torch.tanh),
    "leaky_relu": (nodes.leaky_relu_grad, "Y", lambda x: F.leaky_relu(x, 0.01)),
    "quick_gelu": (nodes.quick_gelu_grad, "X", lambda x: x * torch.sigmoid(1.702 * x)),
    "fast_gelu": (nodes.fast_gelu_grad, "X", lambda x: F.gelu(x, approximate="tanh")),
    "gelu": (nodes.gelu_grad, "X", F.gelu),
}


def _activation(random: Random, dtype: Any, name: str) -> Case:
    make, second, function = ACTIVATIONS[name]
    x = numbers(random, dtype, *shape_of(random))
    dy = numbers(random, dtype, *x.shape)
    results, y = [], x
    for precision in (torch.float32, torch.float64):
        t = torch.tensor(x, dtype=precision).requires_grad_()
        value = function(t)
        (grad,) = torch.autograd.grad(value, t, torch.tensor(dy, dtype=precision))
        results.append({"dX": grad.numpy()})
        y = value.detach().numpy().astype(dtype)
    feeds = {"dY": dy, second: x if second == "X" else y}
    return gradient_node(random, make("dY", second, "dX", dtype=np.dtype(dtype)), feeds, *results)


KINDS |= {name: functools.partial(_activation, name=name) for name in ACTIVATIONS}


@kind
def bias_gelu(random: Random, dtype: Any) -> Case:
    x = numbers(random, dtype, *shape_of(random))
    feeds = {"dY": numbers(random, dtype, *x.shape), "X": x, "B": numbers(random, dtype, x.shape[-1])}
    single, double = (
        {"dX": _gradient(F.gelu, feeds["X"], feeds["dY"], precision, feeds["B"])}
        for precision in (torch.float32, torch.float64)
    )
    node = nodes.bias_gelu_grad_dx("dY", "X", "B", "dX", dtype=np.dtype(dtype))
    return gradient_node(random, node, feeds, single, double)


def _gradient(
    function: Any, x: np.ndarray, dy: np.ndarray, precision: torch.dtype, shift: np.ndarray
) -> np.ndarray:
    t = torch.tensor(x, dtype=precision).requires_grad_()
    value = function(t + torch.tensor(shift, dtype=precision))
    (grad,) = torch.autograd.grad(value, t, torch.tensor(dy, dtype=precision))
    return np.asarray(grad.numpy())


def _softmax(random: Random, dtype: Any, log: bool) -> Case:
    feeds = {"X": numbers(random, dtype, *shape_of(random))}
    axis = int(random.integers(-feeds["X"].ndim, feeds["X"].ndim))
    function = torch.log_softmax if log else torch.softmax
    op_type = "LogSoftmax" if log else "Softmax"
    return forward(random, op_type, feeds, lambda t: [function(t["X"], axis)], ["X"], axis=axis)


def _old_softmax(random: Random, dtype: Any, log: bool) -> Case:
    """As it was before opset 13: over all axes from one on."""
    x = numbers(random, dtype, *shape_of(random, 2))
    axis = int(random.integers(0, x.ndim))
    rows = math.prod(x.shape[:axis])
    function = torch.log_softmax if log else torch.softmax
    dy, results, y = numbers(random, dtype, *x.shape), [], x
    for precision in (torch.float32, torch.float64):
        t = torch.tensor(x, dtype=precision).requires_grad_()
        value = function(t.reshape(rows, -1), 1).reshape(x.shape)
        (grad,) = torch.autograd.grad(value, t, torch.tensor(dy, dtype=precision))
        results.append({"dX": grad.numpy()})
        y = value.detach().numpy().astype(dtype)
    make = nodes.log_softmax_grad if log else nodes.softmax_grad
    return gradient_node(
        random, make("dY", "Y", "dX", axis=axis, dtype=np.dtype(dtype)), {"dY": dy, "Y": y}, *results
    )


for _log, _name in ((False, "softmax"), (True, "log_softmax")):
    KINDS[_name] = functools.partial(_softmax, log=_log)
    KINDS[f"old_{_name}"] = functools.partial(_old_softmax, log=_log)


@kind
def layer_normalization(random: Random, dtype: Any) -> Case:
    x = numbers(random, dtype, *shape_of(random, 2))
    axis = int(random.integers(1, x.ndim))
    feeds = {
        "X": x,
        "S": numbers(random, dtype, *x.shape[axis:]),
        "B": numbers(random, dtype, *x.shape[axis:]),
    }
    inner = x.shape[axis:]

    def compute(t: Tensors) -> list[torch.Tensor]:
        return [F.layer_norm(t["X"], inner, t["S"], t["B"], EPSILON)]

    return forward(random, "LayerNormalization", feeds, compute, list(feeds), axis=axis, epsilon=EPSILON)


@kind
def simplified_layer_normalization(random: Random, dtype: Any) -> Case:
    x = numbers(random, dtype, *shape_of(random, 2))
    feeds = {"X": x, "S": numbers(random, dtype, x.shape[-1])}

    def compute(t: Tensors) -> list[torch.Tensor]:
        return [t["X"] * torch.rsqrt((t["X"] ** 2).mean(-1, keepdim=True) + EPSILON) * t["S"]]

    op_type = "SimplifiedLayerNormalization"
    return forward(random, op_type, feeds, compute, list(feeds), axis=-1, epsilon=EPSILON)


@kind
def invertible_layer_normalization(random: Random, dtype: Any) -> Case:
    x = numbers(random, dtype, *shape_of(random, 2))
    axis = int(random.integers(1, x.ndim))
    inner, outer = x.shape[axis:], tuple(range(axis, x.ndim))
    scale = (random.uniform(0.5, 2, inner) * random.choice([-1, 1], inner)).astype(dtype)
    bias, dy = numbers(random, dtype, *inner), numbers(random, dtype, *x.shape)
    results, feeds = [], {}
    for precision in (torch.float32, torch.float64):
        t, s, b = (torch.tensor(a, dtype=precision).requires_grad_() for a in (x, scale, bias))
        y = F.layer_norm(t, inner, s, b, EPSILON)
        grads = torch.autograd.grad(y, (t, s, b), torch.tensor(dy, dtype=precision))
        names = ("X_grad", "scale_grad", "bias_grad")
        results.append({name: grad.numpy() for name, grad in zip(names, grads, strict=True)})
        inverse = torch.rsqrt(t.detach().var(outer, unbiased=False, keepdim=True) + EPSILON)
        arrays = {"Y_grad": dy, "Y": y.detach().numpy(), "scale": scale, "bias": bias}
        feeds = {n: a.astype(dtype) for n, a in {**arrays, "inv_std_var": inverse.numpy()}.items()}
    node = nodes.invertible_layer_normalization_grad(
        *feeds, ["X_grad", "scale_grad", "bias_grad"], axis=axis, dtype=np.dtype(dtype)
    )
    return gradient_node(random, node, feeds, *results)


@kind
def batch_normalization(random: Random, dtype: Any) -> Case:
    x = numbers(random, dtype, *shape_of(random, 2))
    if x.shape[0] * math.prod(x.shape[2:]) < 2:
        x = np.concatenate([x, x + numbers(random, dtype, *x.shape)])
    channel = (x.shape[1],)
    feeds = {"X": x, "S": numbers(random, dtype, *channel), "B": numbers(random, dtype, *channel)}
    feeds |= {"M": numbers(random, dtype, *channel), "V": random.uniform(0.5, 2, channel).astype(dtype)}
    training = int(random.integers(2))

    def compute(t: Tensors) -> list[torch.Tensor]:
        mean, variance = (None, None) if training else (t["M"], t["V"])
        return [F.batch_norm(t["X"], mean, variance, t["S"], t["B"], bool(training), 0.1, EPSILON)]

    options = {"training_mode": training, "epsilon": EPSILON}
    return forward(
        random, "BatchNormalization", feeds, compute, ["X", "S", "B"], further=2 * training, **options
    )


@kind
def internal_batch_normalization(random: Random, dtype: Any) -> Case:
    """The forward operator of training graphs."""
    x = numbers(random, dtype, *shape_of(random, 2))
    x = np.concatenate([x, x + numbers(random, dtype, *x.shape)])
    names, axes = ("scale", "B", "input_mean"), (0, *range(2, x.ndim))
    feeds = {"X": x} | {name: numbers(random, dtype, x.shape[1]) for name in names}
    feeds["input_var"] = random.uniform(0.5, 2, x.shape[1]).astype(dtype)
    results = []
    for precision in (torch.float32, torch.float64):
        t = _tensors(feeds, precision)
        variance = t["X"].var(axes, unbiased=False)
        y = F.batch_norm(t["X"], None, None, t["scale"], t["B"], True, 0.1, EPSILON)
        outputs = {"Y": y, "saved_mean": t["X"].mean(axes), "saved_inv_std": torch.rsqrt(variance + EPSILON)}
        results.append({name: value.numpy() for name, value in outputs.items()})
    wanted = ["Y", "running_mean", "running_var", "saved_mean", "saved_inv_std"]
    node = nodes.batch_norm_internal(*feeds, wanted, epsilon=EPSILON, dtype=np.dtype(dtype))
    return gradient_node(random, node, feeds, *results)


@kind
def instance_normalization(random: Random, dtype: Any) -> Case:
    x = numbers(random, dtype, *shape_of(random, 3))
    if math.prod(x.shape[2:]) < 2:
        x = np.concatenate([x, x + 1, x * x], axis=2)
    feeds = {"X": x, "S": numbers(random, dtype, x.shape[1]), "B": numbers(random, dtype, x.shape[1])}

    def compute(t: Tensors) -> list[torch.Tensor]:
        return [F.instance_norm(t["X"], None, None, t["S"], t["B"], True, 0.1, EPSILON)]

    return forward(random, "InstanceNormalization", feeds, compute, list(feeds), epsilon=EPSILON)


@kind
def loss(random: Random, dtype: Any) -> Case:
    x = numbers(random, dtype, *shape_of(random, 2))
    classes, reduction = x.shape[1], pick(random, "none", "mean", "sum")
    labels = random.integers(0, classes, x.shape[:1] + x.shape[2:])
    feeds = {"X": x, "L": labels}
    if random.integers(2):
        feeds["S"] = random.uniform(0.5, 2, classes).astype(dtype)
    options: dict[str, Any] = {"reduction": reduction}
    if random.integers(2) and labels.size > 1:
        feeds["L"].reshape(-1)[:: 1 + size(random, 5)] = -1
        feeds["L"].reshape(-1)[-1] = 0
        options["ignore_index"] = -1

    def compute(t: Tensors) -> list[torch.Tensor]:
        return [F.cross_entropy(t["X"], t["L"], t.get("S"), **options)]

    return forward(random, "SoftmaxCrossEntropyLoss", feeds, compute, ["X"], **options)


@kind
def dropout(random: Random, dtype: Any) -> Case:
    shape, ratio = shape_of(random), float(random.uniform(0, 0.9))
    dy, mask = numbers(random, dtype, *shape), random.random(shape) >= ratio
    feeds = {"dY": dy, "mask": mask, "ratio": np.array(ratio, dtype), "training_mode": np.array(True)}
    expected = {"dX": np.where(mask, dy.astype(np.float64) / (1 - float(feeds["ratio"])), 0)}
    make = pick(random, nodes.dropout_grad, nodes.trainable_dropout_grad)
    return gradient_node(random, make(*feeds, "dX", dtype=np.dtype(dtype)), feeds, expected, expected)


# Indices.


@kind
def gather(random: Random, dtype: Any) -> Case:
    x = numbers(random, dtype, *shape_of(random, elements=50_000))
    axis = int(random.integers(0, x.ndim))
    n = x.shape[axis]
    indices = random.integers(-n, n, shape_of(random, 0, 2, max(1, 300_000 // (x.size // n))))

    def compute(t: Tensors) -> list[torch.Tensor]:
        chosen = t["X"].index_select(axis, t["I"].reshape(-1) % n)
        return [chosen.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))]

    return forward(random, "Gather", {"X": x, "I": indices}, compute, ["X"], axis=axis)


@kind
def gather_elements(random: Random, dtype: Any) -> Case:
    x = numbers(random, dtype, *shape_of(random))
    axis = int(random.integers(0, x.ndim))
    n, shape = x.shape[axis], list(x.shape)
    shape[axis] = size(random, max(1, 300_000 // (x.size // n)))
    feeds = {"X": x, "I": random.integers(-n, n, shape)}
    return forward(
        random, "GatherElements", feeds, lambda t: [t["X"].gather(axis, t["I"] % n)], ["X"], axis=axis
    )


@kind
def gather_nd(random: Random, dtype: Any) -> Case:
    x = numbers(random, dtype, *shape_of(random, elements=50_000))
    depth = int(random.integers(1, x.ndim + 1))
    count = size(random, max(1, 300_000 // math.prod(x.shape[depth:])))
    indices = np.stack([random.integers(-n, n, count) for n in x.shape[:depth]], -1)

    def compute(t: Tensors) -> list[torch.Tensor]:
        return [t["X"][tuple(t["I"].unbind(-1))]]

    return forward(random, "GatherND", {"X": x, "I": indices}, compute, ["X"])


@kind
def grid_sample(random: Random, dtype: Any) -> Case:
    samples, channels = size(random, 3), size(random, 20)
    sizes, outputs = ([size(random, 40, 2) for _ in range(2)] for _ in range(2))
    feeds = {
        "X": numbers(random, dtype, samples, channels, *sizes),
        "G": random.uniform(-1.2, 1.2, (samples, *outputs, 2)).astype(dtype),
    }
    options = {"padding_mode": pick(random, "zeros", "border"), "align_corners": int(random.integers(2))}

    def compute(t: Tensors) -> list[torch.Tensor]:
        given: Any = {**options, "align_corners": bool(options["align_corners"])}
        return [F.grid_sample(t["X"], t["G"], mode="bilinear", **given)]

    return forward(random, "GridSample", feeds, compute, ["X", "G"], mode="linear", **options)


# Products, fused nodes and transpositions.


@kind
def weights_of_products(random: Random, dtype: Any) -> Case:
    """The output and the gradient of X are products of onnxruntime's own, which may depend on threads."""
    rows, columns = size(random, 700, 48), size(random, 700, 192)
    if random.integers(2):
        rows, columns = columns, rows
    terms = size(random, max(60, min(1500, MOST_PRODUCTS // (rows * columns))), 40)
    feeds = {"X": numbers(random, dtype, terms, rows), "W": numbers(random, dtype, rows, columns)}
    case = forward(random, "MatMul", feeds, lambda t: [t["X"] @ t["W"]], ["W"], known=True)
    del case.single["out0"], case.double["out0"]
    return case


@kind
def fused(random: Random, dtype: Any) -> Case:
    """Element-wise operators with an operand that is broadcast, whose gradient is a sum."""
    shape = shape_of(random, 2)
    other = [1 if random.integers(2) else n for n in shape]
    feeds = {
        "X": numbers(random, dtype, *shape),
        "S": numbers(random, dtype, *other),
        "Z": numbers(random, dtype, *shape),
    }

    def compute(t: Tensors) -> list[torch.Tensor]:
        product = t["X"] * t["S"]
        return [torch.tanh(product) * torch.sigmoid(t["Z"]) + product]

    single, double, seeds = _results(random, feeds, compute, list(feeds))
    graph = [
        helper.make_node("Mul", ["X", "S"], ["p"]),
        helper.make_node("Tanh", ["p"], ["t"]),
        helper.make_node("Sigmoid", ["Z"], ["s"]),
        helper.make_node("Mul", ["t", "s"], ["m"]),
        helper.make_node("Add", ["m", "p"], ["out0"]),
    ]
    return built(random, graph, feeds, seeds, list(feeds), single, double, "fused", known=True)


@kind
def heads(random: Random, dtype: Any) -> Case:
    """Transpositions of the heads of an attention, and a normalization that is written in operators."""
    batch, steps, count, width = size(random, 4), size(random, 60), size(random, 8), 16 * size(random, 4)
    feeds = {"X": numbers(random, dtype, batch, steps, count, width), "S": numbers(random, dtype, width)}

    def compute(t: Tensors) -> list[torch.Tensor]:
        turned = t["X"].transpose(1, 2)
        centred = turned - turned.mean(-1, keepdim=True)
        return [centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + EPSILON) * t["S"]]

    single, double, seeds = _results(random, feeds, compute, list(feeds))
    epsilon, axes = np.array(EPSILON, dtype), np.array([-1])
    graph = [
        helper.make_node("Constant", [], ["e"], value=onnx.numpy_helper.from_array(epsilon)),
        helper.make_node("Constant", [], ["a"], value=onnx.numpy_helper.from_array(axes)),
        helper.make_node("Transpose", ["X"], ["t"], perm=[0, 2, 1, 3]),
        helper.make_node("ReduceMean", ["t", "a"], ["mean"]),
        helper.make_node("Sub", ["t", "mean"], ["c"]),
        helper.make_node("Mul", ["c", "c"], ["q"]),
        helper.make_node("ReduceMean", ["q", "a"], ["v"]),
        helper.make_node("Add", ["v", "e"], ["ve"]),
        helper.make_node("Sqrt", ["ve"], ["d"]),
        helper.make_node("Reciprocal", ["d"], ["i"]),
        helper.make_node("Mul", ["c", "i"], ["n"]),
        helper.make_node("Mul", ["n", "S"], ["out0"]),
    ]
    return built(random, graph, feeds, seeds, list(feeds), single, double, "heads", known=True)
