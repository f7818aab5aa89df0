"""Makes a bias that is added to the result of a convolution its third input.

onnxruntime does so itself if the weights are constant. Those of a model with gradients are inputs.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortgrad.graph.names import Names
from ortgrad.graph.outputs import replace_values
from ortgrad.graph.traversal import only_reader


def join_biases(model: ir.Model) -> ir.Model:
    """Join every Conv without a bias and an Add of one number per filter that alone reads its result."""
    names: Names | None = None
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        total = _sum_of(node) if _has_no_bias(node) else None
        bias = None if total is None else _bias(node, total)
        if total is not None and bias is not None:
            names = names or Names.of(model)
            _join(node, total, bias, names)
    return model


def _has_no_bias(node: ir.Node) -> bool:
    return (node.domain, node.op_type) == ("", "Conv") and not any(node.inputs[2:])


def _sum_of(node: ir.Node) -> ir.Node | None:
    user = only_reader(node.outputs[0])
    is_sum = user is not None and (user.domain, user.op_type) == ("", "Add") and user.graph is node.graph
    return user if is_sum else None


def _bias(node: ir.Node, total: ir.Node) -> ir.Value | None:
    """Return the other operand of the Add if it is known to have a number for each filter, and no more."""
    w, other = node.inputs[1], next((v for v in total.inputs if v is not node.outputs[0]), None)
    if w is None or w.shape is None or other is None or other.shape is None or w.dtype != other.dtype:
        return None
    spatial, filters = len(w.shape) - 2, w.shape[0]
    found = list(other.shape)[1:] if len(other.shape) == spatial + 2 else list(other.shape)
    leading = len(other.shape) < spatial + 2 or other.shape[0] == 1
    matches = isinstance(filters, int) and leading and found == [filters, *[1] * spatial]
    return other if matches else None


def _join(node: ir.Node, total: ir.Node, bias: ir.Value, names: Names) -> None:
    graph, w = total.graph, node.inputs[1]
    assert graph is not None and w is not None and w.shape is not None
    name = node.name or f"{total.outputs[0].name}"
    source = bias.producer()
    vector = source.inputs[0] if source is not None and source.op_type == "Reshape" else None
    made: list[ir.Node] = []
    if vector is None or vector.shape != ir.Shape(w.shape[:1]):
        shape = ir.node(
            "Constant", [], {"value": ir.tensor(np.array([-1]))}, name=names.fresh(f"{name}/shape")
        )
        made = [shape, ir.node("Reshape", [bias, shape.outputs[0]], name=names.fresh(f"{name}/bias"))]
        for each in made:
            each.outputs[0].name = each.name
        vector = made[1].outputs[0]
        vector.type, vector.shape = bias.type, ir.Shape(w.shape[:1])
    joined = ir.node("Conv", [*node.inputs[:2], vector], node.attributes.copy(), name=node.name)
    old, new = total.outputs[0], joined.outputs[0]
    new.name, new.type, new.shape = old.name, old.type, old.shape
    graph.insert_after(total, [*made, joined])
    replace_values([old], [new])
    graph.remove([total, node], safe=True)
