"""Folds batch normalizations with fixed statistics into the convolutions before them.

    BatchNormalization(Conv(X, W, b)) = Conv(X, W * f, (b - mean) * f + B), f = scale / sqrt(var + epsilon)

The backward pass then goes through tensors of the size of the weights instead of the result's. onnxruntime
does the same, but only with constant weights; the weights of a model with gradients are inputs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import onnx_ir as ir

from ortgrad.graph.gradient_nodes import put_in_place
from ortgrad.graph.names import Names
from ortgrad.graph.patterns import Match, Pattern
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import all_nodes, values_by_name
from ortgrad.shapes.inference import infer_types

_NORMALIZED = Pattern(
    lambda op, x, w, b, scale, bias, mean, var: op.BatchNormalization(
        op.Conv(x, w, op.either(b, None)), scale, bias, mean, var
    )
)
# Operations on the weights take the place of operations on the result. It pays up to this number of weights
# per element of the result.
_MOST_WEIGHTS_PER_ELEMENT = 2
# The batch size assumed when it is unknown.
_UNKNOWN_BATCH = 4


def fold_normalizations(model: ir.Model, targets: Iterable[str], outputs: Iterable[str]) -> ir.Model:
    """Fold the normalizations behind convolutions whose weights are among the targets, which are named.

    With other weights, the gradients of scale and bias alone are cheaper without it.
    """
    named = values_by_name(model.graph)
    kept = {named[name] for name in (*targets, *outputs)}
    names, changed = Names.later(model), False
    for match in _NORMALIZED.find(all_nodes(model.graph)):
        if not _is_foldable(match, kept):
            continue
        node, changed = match.root, True
        op = Recorder(model.opset_imports[""], names, node.name or f"{node.outputs[0].name}")
        with op.arithmetic():
            y = _folded(op, match)
        y.type, y.shape = node.outputs[0].type, node.outputs[0].shape
        put_in_place(node, [], op, [y])
        match.remove_unread()
    if changed:
        infer_types(model)
    return model


def _is_foldable(match: Match, kept: Collection[ir.Value]) -> bool:
    """Return whether to fold a normalization into the convolution before it."""
    node, y, w = match.root, match.root.inputs[0], match.values["w"]
    others = [value for name, value in match.values.items() if name != "x"]
    return (
        not node.attributes.get_int("training_mode", 0)
        and match.is_private
        and y not in kept
        and _source(w) in kept
        and w.shape is not None
        and all(value.dtype == w.dtype for value in others)
        and _is_cheaper(w.shape, node.outputs[0].shape)
    )


def _source(value: ir.Value | None) -> ir.Value | None:
    """Return the value that a value is a copy of."""
    while value is not None and (node := value.producer()) is not None and node.op_type == "Identity":
        value = node.inputs[0]
    return value


def _is_cheaper(w: ir.Shape, y: ir.Shape | None) -> bool:
    """Return whether a filter has few weights, compared with the elements that it computes."""
    weights = [size for size in w[1:] if isinstance(size, int)]
    elements = [] if y is None else [size for size in y[2:] if isinstance(size, int)]
    if y is None or len(weights) < len(w) - 1 or len(elements) < len(y) - 2:
        return True
    batch = y[0] if isinstance(y[0], int) else _UNKNOWN_BATCH
    return math.prod(weights) <= _MOST_WEIGHTS_PER_ELEMENT * batch * math.prod(elements)


def _folded(op: Recorder, match: Match) -> ir.Value:
    x, w, scale, bias, mean, var = (match.values[name] for name in ("x", "w", "scale", "bias", "mean", "var"))
    b = match.values.get("b")
    assert w.shape is not None
    factor = scale / op.Sqrt(var + match.root.attributes.get_float("epsilon", 1e-5))
    shift = bias - mean * factor if b is None else bias + (b - mean) * factor
    per_filter = op.Unsqueeze(factor, list(range(1, len(w.shape))))
    return op.in_place_of(match.node("Conv"), [x, w * per_filter, shift])
