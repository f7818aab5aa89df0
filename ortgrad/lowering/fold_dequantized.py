"""Replaces DequantizeLinear of constant integers by operators that onnxruntime folds.

onnxruntime leaves DequantizeLinear in place, to merge it with what reads it into operators on integers, and
otherwise computes it in every run. In a model with gradients it can seldom be merged: the gradient reads the
results of those operators, too.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from ortgrad.graph.names import Names
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import all_nodes
from ortgrad.lowering.constants import constant_values
from ortgrad.operators.declaration import DOMAIN

# Their differences are computed exactly as int32. Smaller ones would grow to eight times their size and more.
_INTEGERS = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16, ir.DataType.INT32)
# The most bytes that all folded tensors of a model may take together.
_LARGEST = 1 << 30


def fold_dequantized(model: ir.Model) -> ir.Model:
    """Replace such nodes, also in subgraphs, where their results are read as floating-point numbers."""
    constant: set[ir.Value] | None = None
    names = Names.later(model)
    left = _LARGEST
    for node in list(all_nodes(model.graph)):
        if not _is_dequantization(node) or node.outputs[0].is_graph_output():
            continue
        constant = constant_values(model) if constant is None else constant
        size = _size(node, constant)
        uses = list(node.outputs[0].uses())
        if size is None or size > left or all(_reads_integers(use.node, constant) for use in uses):
            continue
        left -= size
        _replace(node, constant, model.opset_imports[""], names)
    return model


def _is_dequantization(node: ir.Node) -> bool:
    return node.op_type == "DequantizeLinear" and node.domain in ("", "ai.onnx", DOMAIN)


def _size(node: ir.Node, constant: set[ir.Value]) -> int | None:
    """Return the size of the result in bytes; None if the node is not supported."""
    q, scale = node.inputs[:2]
    if q is None or scale is None or not all(v is None or v in constant for v in node.inputs):
        return None
    if q.dtype not in _INTEGERS or scale.dtype != ir.DataType.FLOAT or scale.shape is None or q.shape is None:
        return None
    if node.attributes.get_int("block_size", 0) or node.attributes.get_int("output_dtype", 0):
        return None
    sizes = [size for size in q.shape if isinstance(size, int)]
    if len(sizes) < len(q.shape) or len(scale.shape) > 1 or not sizes:
        return None
    return 4 * math.prod(sizes)


def _reads_integers(node: ir.Node, constant: set[ir.Value]) -> bool:
    """Return whether onnxruntime may merge a node with its DequantizeLinear nodes."""
    others = [v for v in node.inputs if v is not None and v not in constant]
    producers = [producer for value in others if (producer := value.producer()) is not None]
    if not any(_is_dequantization(producer) and producer.inputs[0] not in constant for producer in producers):
        return False
    users = {use.node.op_type for output in node.outputs for use in output.uses()}
    return users == {"QuantizeLinear"} or (node.op_type == "MatMul" and "QuantizeLinear" not in users)


def _replace(node: ir.Node, constant: set[ir.Value], opset: int, names: Names) -> None:
    q, scale, zero = [*node.inputs, None][:3]
    y, graph = node.outputs[0], node.graph
    assert q is not None and q.shape is not None and scale is not None and graph is not None
    one = scale.shape in ((), (1,))
    rank = len(q.shape)
    behind = [] if one else list(range(1, rank - node.attributes.get_int("axis", 1) % rank))
    op = Recorder(opset, names, f"{node.name or y.name}")

    def spread(value: ir.Value) -> ir.Value:
        return op.Unsqueeze(value, behind) if behind else value

    with op.arithmetic():
        integers = op.Cast(q, to=int(ir.DataType.INT32))
        if zero is not None:
            integers = integers - op.Cast(spread(zero), to=int(ir.DataType.INT32))
        result = op.Cast(integers, to=int(ir.DataType.FLOAT)) * spread(scale)
    result.shape = q.shape
    graph.insert_before(node, op.nodes)
    for use in list(y.uses()):
        if not _reads_integers(use.node, constant):
            use.node.replace_input_with(use.idx, result)
    if not y.uses():
        graph.remove(node, safe=True)
