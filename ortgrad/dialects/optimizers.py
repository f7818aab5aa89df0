"""Translations of optimizers to standard ONNX: of ONNX's own, and of onnxruntime-training's.

ONNX's are Adagrad, Adam and Momentum of ai.onnx.preview.training. onnxruntime-training's take sequences of
tensors and change them in place; the translations return the changed tensors as outputs instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ortgrad.errors import NodeError
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.declaration import DOMAIN

if TYPE_CHECKING:
    from ortgrad.dialects.translate import ForeignNode

PREVIEW_TRAINING = "ai.onnx.preview.training"

Translation: TypeAlias = "Callable[[Recorder, ForeignNode], ir.Value | Sequence[ir.Value | None]]"
_optimizers: dict[tuple[str, str], Translation] = {}
_SCALAR = np.zeros(0, np.int64)


def find_optimizer(op_type: str, domain: str) -> Translation | None:
    """Return the translation of an optimizer, or None."""
    return _optimizers.get((domain, op_type))


def optimizers() -> list[tuple[str, str]]:
    """Return domain and name of all optimizers that are translated."""
    return sorted(_optimizers)


def _optimizer(domain: str, name: str) -> Callable[[Translation], Translation]:
    def declare(function: Translation) -> Translation:
        _optimizers[domain, name] = function
        return function

    return declare


@_optimizer(PREVIEW_TRAINING, "Adagrad")
def _adagrad(op: Recorder, node: ForeignNode) -> Sequence[ir.Value]:
    decay, norm, epsilon = _floats(node, decay_factor=0.0, norm_coefficient=0.0, epsilon=1e-6)
    new = []
    for x, g, h in _groups(node, 3):
        rate, count = _like(op, node.input(0), x), _like(op, node.input(1), x)
        g = g + x * norm
        total = h + g * g
        new.append((x - g * (rate / (count * decay + 1.0)) / (op.Sqrt(total) + epsilon), total))
    return _by_kind(new)


@_optimizer(PREVIEW_TRAINING, "Adam")
def _adam(op: Recorder, node: ForeignNode) -> Sequence[ir.Value]:
    alpha, beta = _floats(node, alpha=0.9, beta=0.999)
    norm, post, epsilon = _floats(node, norm_coefficient=0.0, norm_coefficient_post=0.0, epsilon=1e-6)
    new = []
    for x, g, v, h in _groups(node, 4):
        rate = op.Cast(_scalar(op, node.input(0)), to=_DOUBLE)
        first, second = (_correction(op, node.input(1), factor) for factor in (alpha, beta))
        started = op.Greater(_scalar(op, node.input(1)), 0)
        rate = op.CastLike(op.Where(started, rate * op.Sqrt(second) / first, rate), x)
        g = g + x * norm
        v, h = v * alpha + g * (1 - alpha), h * beta + g * g * (1 - beta)
        new.append(((x - rate * v / (op.Sqrt(h) + epsilon)) * (1 - post), v, h))
    return _by_kind(new)


@_optimizer(PREVIEW_TRAINING, "Momentum")
def _momentum(op: Recorder, node: ForeignNode) -> Sequence[ir.Value]:
    alpha, beta, norm = (float(node.attribute(name)) for name in ("alpha", "beta", "norm_coefficient"))
    mode = node.attribute("mode")
    if mode not in ("standard", "nesterov"):
        raise NodeError(f"attribute 'mode' is {mode!r}; it must be standard or nesterov")
    new = []
    for x, g, v in _groups(node, 3):
        rate = _like(op, node.input(0), x)
        started = op.Greater(_scalar(op, node.input(1)), 0)
        share = op.Where(started, op.number(beta, x), op.number(1.0, x))
        g = g + x * norm
        v = v * alpha + g * share
        new.append((x - rate * (v if mode == "standard" else g + v * alpha), v))
    return _by_kind(new)


@_optimizer(DOMAIN, "AdamWOptimizer")
def _adamw(op: Recorder, node: ForeignNode) -> Sequence[ir.Value | None]:
    alpha, beta, epsilon, decay = _floats(node, alpha=0.9, beta=0.999, epsilon=1e-8, weight_decay=1e-2)
    mode, corrected = node.attribute("adam_mode", 0), node.attribute("correct_bias", 1)
    if mode not in (0, 1):
        raise NodeError(f"attribute 'adam_mode' is {mode!r}; it must be 0 or 1")
    weights, gradients, momentums, squares = (node.input(i) for i in range(2, 6))
    rate = op.Cast(_scalar(op, node.input(0)), to=_DOUBLE)
    one = op.constant(np.array(1.0))
    first, second = (_correction(op, node.input(1), f) if corrected else one for f in (alpha, beta))

    def momentum(op: Recorder, m: ir.Value, g: ir.Value) -> ir.Value:
        return m * alpha + op.CastLike(g, m) * (1 - alpha)

    def square(op: Recorder, v: ir.Value, g: ir.Value) -> ir.Value:
        g = op.CastLike(g, v)
        return v * beta + g * g * (1 - beta)

    momentums = op.map(momentum, momentums, gradients, key="momentum")
    squares = op.map(square, squares, gradients, key="square")
    rate_of_step, rate_of_decay = rate / first, rate * op.constant(np.array(decay))
    # Mode 0 divides the squares by their correction before epsilon is added, mode 1 the result.
    if mode == 1:
        rate_of_step = rate_of_step * op.Sqrt(second)
    root_of_correction = op.Sqrt(second)

    def update(op: Recorder, w: ir.Value, m: ir.Value, v: ir.Value) -> ir.Value:
        root = op.Sqrt(v)
        if mode == 0:
            w = w - w * op.CastLike(rate_of_decay, w)
            root = root / op.CastLike(root_of_correction, v)
        step = op.CastLike(rate_of_step, v) * m / (root + epsilon)
        w = w - op.CastLike(step, w)
        return w - w * op.CastLike(rate_of_decay, w) if mode == 1 else w

    new = [op.map(update, weights, momentums, squares, key="update"), momentums, squares]
    return _unless_skipped(op, node, 6, [2, 4, 5], new)


@_optimizer(DOMAIN, "SGDOptimizerV2")
def _sgd(op: Recorder, node: ForeignNode) -> Sequence[ir.Value | None]:
    rate = _scalar(op, node.input(0))

    def update(op: Recorder, w: ir.Value, g: ir.Value) -> ir.Value:
        return w - op.CastLike(g, w) * op.CastLike(rate, w)

    new = [op.map(update, node.input(1), node.input(2), key="update")]
    return _unless_skipped(op, node, 3, [1], new)


@_optimizer(DOMAIN, "InplaceClipGradNorm")
def _clip(op: Recorder, node: ForeignNode) -> ir.Value:
    gradients, most = node.input(0), float(node.attribute("max_norm", 1.0))

    def squared(op: Recorder, g: ir.Value) -> ir.Value:
        return op.ReduceSumSquare(g, keepdims=0)

    squares = op.ConcatFromSequence(op.map(squared, gradients, key="squares"), axis=0, new_axis=1)
    squares.type = _tensor_of(gradients)
    factor = op.Min(most / (op.Sqrt(op.ReduceSum(squares, keepdims=0)) + 1e-6), 1.0)
    return op.map(lambda op, g: g * op.CastLike(factor, g), gradients, key="clip")


@_optimizer(DOMAIN, "ReduceAllL2")
def _reduce_all_l2(op: Recorder, node: ForeignNode) -> ir.Value:
    squares = [op.ReduceSumSquare(node.input(i), keepdims=0) for i in range(len(node.node.inputs))]
    return op.Sqrt(squares[0] if len(squares) == 1 else op.Sum(*squares))


_DOUBLE = 11  # onnx.TensorProto.DOUBLE


def _floats(node: ForeignNode, **defaults: float) -> list[float]:
    return [float(node.attribute(name, default)) for name, default in defaults.items()]


def _groups(node: ForeignNode, kinds: int) -> list[tuple[ir.Value, ...]]:
    """Return the inputs after R and T, which are X_1, X_2, G_1, G_2, ..., as (X_1, G_1, ...), (X_2, ...)."""
    values = [node.input(i) for i in range(2, len(node.node.inputs))]
    if not values or len(values) % kinds:
        raise NodeError(
            f"it has {len(values)} tensors after R and T; the number must be divisible by {kinds}"
        )
    count = len(values) // kinds
    return [tuple(values[i::count]) for i in range(count)]


def _by_kind(new: Sequence[tuple[ir.Value, ...]]) -> list[ir.Value]:
    return [value for kind in zip(*new, strict=True) for value in kind]


def _scalar(op: Recorder, value: ir.Value) -> ir.Value:
    """Return a tensor of one element as a scalar."""
    result: ir.Value = op.Reshape(value, _SCALAR)
    return result


def _like(op: Recorder, value: ir.Value, like: ir.Value) -> ir.Value:
    result: ir.Value = op.CastLike(_scalar(op, value), like)
    return result


def _correction(op: Recorder, step: ir.Value, factor: float) -> ir.Value:
    """1 - factor^step, in double precision"""
    power = op.Pow(op.constant(np.array(factor)), op.Cast(_scalar(op, step), to=_DOUBLE))
    result: ir.Value = op.Sub(op.constant(np.array(1.0)), power)
    return result


def _tensor_of(sequence: ir.Value) -> ir.TypeProtocol | None:
    return getattr(sequence.type, "elem_type", None)


def _unless_skipped(
    op: Recorder, node: ForeignNode, signal: int, old: Sequence[int], new: Sequence[ir.Value]
) -> list[ir.Value | None]:
    """Return the flag and the new sequences; if the input `update_signal` is false, the old ones."""
    update = node.optional(signal)
    if update is None:
        return [op.constant(np.ones(1, np.bool_)), *new]
    flag = op.Reshape(update, [1])
    chosen = []
    for i, value in zip(old, new, strict=True):
        before = node.input(i)
        (result,) = op.add(
            "If",
            [flag],
            {
                "then_branch": op.subgraph("update", [], lambda op, value=value: [value]),
                "else_branch": op.subgraph("skip", [], lambda op, value=before: [value]),
            },
        )
        result.type = before.type
        chosen.append(result)
    return [flag, *chosen]
