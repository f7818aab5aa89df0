"""Replaces the nodes that compute the mean and the inverse deviation of a value by one of Moments.

    mean = ReduceMean(x), c = x - mean, inverse = Reciprocal(Sqrt(ReduceMean(c * c) + epsilon))

If c is not such a difference, Moments computes the inverse root of the mean of its squares.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from ortgrad.graph.names import Names
from ortgrad.graph.traversal import constant_array, constant_number
from ortgrad.lowering.constants import computed_nodes
from ortgrad.lowering.internal_operators import KERNEL_TYPES, become
from ortgrad.operators.declaration import INTERNAL_DOMAIN
from ortgrad.ops.moments import kept_axes, moments_of


class _Mean(NamedTuple):
    node: ir.Node
    x: ir.Value
    axes: tuple[int, ...]
    keepdims: bool


def use_moments(model: ir.Model) -> ir.Model:
    """Replace them in the graph and in subgraphs."""
    names: Names | None = None
    for node in computed_nodes(model):
        if node.op_type == "Reciprocal" and node.domain == "" and node.graph is not None:
            names = names or Names.of(model)
            _replace(model, node, names)
    return model


def _replace(model: ir.Model, last: ir.Node, names: Names) -> None:
    root = _made_by(last.inputs[0], "Sqrt")
    total = _made_by(root.inputs[0], "Add") if root else None
    parts = [(total.inputs[i], total.inputs[1 - i]) for i in range(2)] if total else []
    squares, epsilon = next(
        ((_mean(a), constant_number(b)) for a, b in parts if constant_number(b) is not None), (None, None)
    )
    product = _made_by(squares.x, "Mul") if squares else None
    if squares is None or epsilon is None or product is None or product.inputs[0] is not product.inputs[1]:
        return
    x, mean = product.inputs[0], None
    centred = _made_by(x, "Sub")
    if centred is not None:
        mean = _broadcast_mean(centred.inputs[1])
        if mean is not None and mean.x is centred.inputs[0] and mean[2:] == squares[2:]:
            x = mean.x
        else:
            mean = None
    inverse = last.outputs[0]
    if x is None or x.dtype not in KERNEL_TYPES or x.shape is None or inverse.is_graph_output():
        return
    if kept_axes(len(x.shape), squares.axes) is None or (mean and mean.node.graph is not last.graph):
        return
    if mean is not None and mean.node.outputs[0].is_graph_output():
        return
    made = ir.node(
        moments_of.name,
        [x],
        {
            "axes": list(squares.axes),
            "keepdims": int(squares.keepdims),
            "epsilon": epsilon,
            "centred": int(mean is not None),
        },
        domain=INTERNAL_DOMAIN,
        num_outputs=2,
        name=names.fresh(f"{inverse.name}_moments"),
    )
    place = last if mean is None else mean.node
    old = [None if mean is None else mean.node.outputs[0], inverse]
    for value, before in zip(made.outputs, old, strict=True):
        if before is not None:
            value.name, value.type, value.shape = names.fresh(f"{before.name}"), before.type, before.shape
    graph = last.graph
    assert graph is not None
    graph.insert_before(place, made)
    for value, before in zip(made.outputs, old, strict=True):
        if before is not None:
            before.replace_all_uses_with(value)
    become(model, made, moments_of, names)
    _remove_unread(last)


def _made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and (node.domain, node.op_type) == ("", op_type) else None


def _mean(value: ir.Value | None) -> _Mean | None:
    """The mean that a value is, if its axes are known."""
    node = _made_by(value, "ReduceMean")
    if node is None or len(node.inputs) < 2:
        return None
    x, axes = node.inputs[0], constant_array(node.inputs[1])
    if x is None or x.shape is None or axes is None or axes.size == 0:
        return None
    rank = len(x.shape)
    reduced = tuple(sorted(int(axis) % rank for axis in np.atleast_1d(axes)))
    return _Mean(node, x, reduced, bool(node.attributes.get_int("keepdims", 1)))


def _broadcast_mean(value: ir.Value | None) -> _Mean | None:
    """The mean that a value is, if it broadcasts with what the mean is of."""
    unsqueeze = _made_by(value, "Unsqueeze")
    mean = _mean(unsqueeze.inputs[0] if unsqueeze else value)
    if mean is None:
        return None
    if mean.keepdims:
        return None if unsqueeze else mean
    assert mean.x.shape is not None
    kept = kept_axes(len(mean.x.shape), mean.axes)
    if kept is None:
        return None
    # The axes that are missing behind the kept ones.
    missing = list(range(len(kept), len(kept) + len(mean.x.shape) - kept.stop))
    given = constant_array(unsqueeze.inputs[1]) if unsqueeze else None
    axes = [] if given is None else [int(axis) for axis in given]
    return mean if axes == missing and (given is not None or not missing) else None


def _remove_unread(node: ir.Node) -> None:
    """Remove a node whose outputs nobody reads, and those before it of which that is then true."""
    graph = node.graph
    if graph is None or any(value.uses() or value.is_graph_output() for value in node.outputs):
        return
    before = [value.producer() for value in node.inputs if value is not None]
    graph.remove(node, safe=True)
    for each in dict.fromkeys(before):
        if each is not None and each.domain == "" and each.op_type in _CHAIN:
            _remove_unread(each)


_CHAIN = ("Sqrt", "Add", "ReduceMean", "Mul", "Sub", "Unsqueeze", "Constant")
