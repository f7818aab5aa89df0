"""Folds batch normalizations with fixed statistics into the convolutions before them.

    BatchNormalization(Conv(X, W, b)) = Conv(X, W * f, (b - mean) * f + B), f = scale / sqrt(var + epsilon)

The backward pass then goes through tensors of the size of the weights instead of the result's. onnxruntime
does the same, but only with constant weights; those of a model with gradients are inputs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import onnx_ir as ir

from ortgrad.graph.gradient_nodes import put_in_place
from ortgrad.graph.names import Names
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import values_by_name
from ortgrad.shapes.inference import infer_types

# Folded, operations on the weights take the place of operations on the result. It pays up to so many weights
# per element of the result. A batch of unknown size counts as so many samples.
_MOST_WEIGHTS_PER_ELEMENT = 2
_UNKNOWN_BATCH = 4


def fold_normalizations(model: ir.Model, targets: Iterable[str], outputs: Iterable[str]) -> ir.Model:
    """Fold the normalizations behind convolutions whose weights are among the targets, which are named.

    With other weights, the gradients of scale and bias alone are cheaper without it.
    """
    named = values_by_name(model.graph)
    kept = {named[name] for name in (*targets, *outputs)}
    chosen = [
        (convolution, node)
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
        if (convolution := _folded_convolution(node, kept)) is not None
        and _source(convolution.inputs[1]) in kept
    ]
    if not chosen:
        return model
    names = Names.of(model)
    for convolution, node in chosen:
        op = Recorder(model.opset_imports[""], names, node.name or f"{node.outputs[0].name}")
        with op.arithmetic():
            y = _folded(op, convolution, node)
        y.type, y.shape = node.outputs[0].type, node.outputs[0].shape
        put_in_place(node, [], op, [y])
        assert convolution.graph is not None
        convolution.graph.remove(convolution, safe=True)
    infer_types(model)
    return model


def _folded_convolution(node: ir.Node, kept: Collection[ir.Value]) -> ir.Node | None:
    """Return the convolution that the normalization can be folded into."""
    if (node.domain, node.op_type) != ("", "BatchNormalization") or node.attributes.get_int("training_mode"):
        return None
    x = node.inputs[0]
    convolution = None if x is None else x.producer()
    if x is None or convolution is None or (convolution.domain, convolution.op_type) != ("", "Conv"):
        return None
    if convolution.graph is not node.graph or len(x.uses()) > 1 or x.is_graph_output() or x in kept:
        return None
    w = convolution.inputs[1]
    operands = [w, *convolution.inputs[2:], *node.inputs[1:]]
    if w is None or w.shape is None or any(v is not None and v.dtype != w.dtype for v in operands):
        return None
    return convolution if _is_cheaper(w.shape, node.outputs[0].shape) else None


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


def _folded(op: Recorder, convolution: ir.Node, node: ir.Node) -> ir.Value:
    x, w, b = (*convolution.inputs, None)[:3]
    scale, bias, mean, var = node.inputs[1:]
    assert w is not None and w.shape is not None
    assert scale is not None and bias is not None and mean is not None and var is not None
    factor = scale / op.Sqrt(var + node.attributes.get_float("epsilon", 1e-5))
    shift = bias - mean * factor if b is None else bias + (b - mean) * factor
    per_filter = op.Unsqueeze(factor, list(range(1, len(w.shape))))
    (y,) = op.add("Conv", [x, w * per_filter, shift])
    made = y.producer()
    assert made is not None
    made.attributes.update(convolution.attributes)
    made.name = convolution.name
    return y
