"""Makes a bias that is added to the result of a convolution its third input.

onnxruntime does the same, but only with constant weights; the weights of a model with gradients are inputs.
"""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.graph.names import Names
from ortgrad.graph.outputs import replace_node
from ortgrad.graph.patterns import Match, Pattern
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import all_nodes

_BIASED = Pattern(lambda op, x, w, bias: op.Add(op.Conv(x, w), bias))


def join_biases(model: ir.Model) -> ir.Model:
    """Join every Conv without a bias and an Add of one number per filter that alone reads its result."""
    names = Names.later(model)
    for match in _BIASED.find(all_nodes(model.graph)):
        if match.is_private and _is_bias(match.values["bias"], match.values["w"]):
            _join(match, model.opset_imports[""], names)
    return model


def _is_bias(value: ir.Value, w: ir.Value) -> bool:
    """Return whether a value is known to have a number for each filter, and no more."""
    if w.shape is None or value.shape is None or w.dtype != value.dtype:
        return False
    spatial, filters = len(w.shape) - 2, w.shape[0]
    found = list(value.shape)[1:] if len(value.shape) == spatial + 2 else list(value.shape)
    leading = len(value.shape) < spatial + 2 or value.shape[0] == 1
    return isinstance(filters, int) and leading and found == [filters, *[1] * spatial]


def _join(match: Match, opset: int, names: Names) -> None:
    x, w, bias = (match.values[name] for name in ("x", "w", "bias"))
    node, total = match.node("Conv"), match.root
    assert w.shape is not None
    op = Recorder(opset, names, node.name or f"{total.outputs[0].name}")
    source = bias.producer()
    vector = source.inputs[0] if source is not None and source.op_type == "Reshape" else None
    if vector is None or vector.shape != ir.Shape(w.shape[:1]):
        vector = op.Reshape(bias, [-1])
        vector.shape = ir.Shape(w.shape[:1])
    y = op.in_place_of(node, [x, w, vector])
    replace_node(total, list(op.nodes), [(total.outputs[0], y)])
    match.remove_unread()
