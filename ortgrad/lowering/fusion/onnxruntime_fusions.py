"""Element-wise nodes that onnxruntime itself computes together with their neighbours."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from ortgrad.graph.traversal import only_reader
from ortgrad.lowering.fusion.fusable import read_constant

# Activations that onnxruntime computes as part of a convolution or a product of matrices. So it does Sigmoid,
# but the gradient needs it more precisely (see ortgrad.lowering.fusion.expressions).
_ACTIVATIONS = frozenset({"Relu", "Tanh", "LeakyRelu", "Clip", "HardSigmoid"})
_SCALES = frozenset({"Mul", "Div"})


def left_to_onnxruntime(nodes: Iterable[ir.Node]) -> set[ir.Node]:
    """Return the nodes that onnxruntime merges into others."""
    kept: set[ir.Node] = set()
    for node in nodes:
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type == "Conv":
            _keep_convolution(node, kept)
        elif node.op_type == "Gemm":
            _keep_activation(_next(node), kept)
        elif node.op_type == "MatMul":
            _keep_product(node, kept)
        elif node.op_type == "Sub":
            _keep_normalization(node, kept)
    return kept


def _keep_convolution(node: ir.Node, kept: set[ir.Node]) -> None:
    """Conv, the sum with another tensor, and an activation"""
    user = _next(node)
    if user is not None and user.op_type == "Add":
        kept.add(user)
        user = _next(user)
    _keep_activation(user, kept)


def _keep_activation(user: ir.Node | None, kept: set[ir.Node]) -> None:
    if user is not None and user.op_type in _ACTIVATIONS and user.domain in ("", "ai.onnx"):
        kept.add(user)


def _keep_product(node: ir.Node, kept: set[ir.Node]) -> None:
    """MatMul with a vector that is added to its rows, or with a constant factor before or after it"""
    user = _next(node)
    if user is not None and user.op_type == "Add":
        ranks = [len(v.shape) for v in user.inputs if v is not None and v.shape is not None]
        if 1 in ranks:
            kept.add(user)
    neighbours = [user, *(value.producer() for value in node.inputs if value is not None)]
    for scale in neighbours:
        if scale is None or scale.op_type not in _SCALES or not scale.outputs:
            continue
        factors = [constant for v in scale.inputs if (constant := read_constant(v)) is not None]
        if factors and (scale is user or _next(scale) is node):
            kept.add(scale)


def _keep_normalization(node: ir.Node, kept: set[ir.Node]) -> None:
    """(X - mean) / sqrt(variance + epsilon) * scale + bias, if no gradient needs its parts"""
    x, mean = node.inputs
    source = None if mean is None else mean.producer()
    if source is None or source.op_type != "ReduceMean" or source.inputs[0] is not x:
        return
    users = [use.node for use in node.outputs[0].uses()]
    quotients = [user for user in users if user.op_type == "Div"]
    if len(quotients) != 1 or any(user.op_type not in ("Pow", "Mul", "Div", "Cast") for user in users):
        return
    kept.update(users, [node])
    inner = [value.producer() for value in quotients[0].inputs if value is not None]
    for each in inner:
        if each is not None and each.op_type == "Sqrt":
            kept.add(each)
            added = each.inputs[0].producer() if each.inputs[0] is not None else None
            kept.update(n for n in [added] if n is not None)
    after = _next(quotients[0])
    while after is not None and after.op_type in ("Mul", "Add", "Cast"):
        kept.add(after)
        after = _next(after) if after.op_type != "Add" else None


def _next(node: ir.Node) -> ir.Node | None:
    """Return the node that alone reads the only used output of a node."""
    used = [value for value in node.outputs if value.uses() or value.is_graph_output()]
    return only_reader(used[0]) if len(used) == 1 else None
