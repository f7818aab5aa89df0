"""Ranks that follow from the nodes that read or compute a value: a node that runs proves them.

Inference goes from inputs to outputs. Behind an operator that onnx does not know, the rank of a value follows
from its uses: a GRU reads three dimensions, a MaxPool two more than its kernel has, and an activation returns
as many as it is given. The tables here list what onnxruntime itself requires, which is less than ONNX
requires: its Gemm also takes a vector on the left, and its RoiAlign images of five dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import onnx_ir as ir

from ortgrad.autodiff.unbroadcast import KEEPING
from ortgrad.graph.attributes import attributes_of
from ortgrad.graph.traversal import all_nodes, is_standard, nodes_before, subgraphs
from ortgrad.operators.declaration import DOMAIN
from ortgrad.shapes.computed_sizes import BROADCASTS, words

# rank(value) = rank(other) + offset, or rank(value) = offset if there is no other.
Relation = tuple["ir.Value | None", "ir.Value | None", int]


def apply_required_ranks(model: ir.Model, outputs: Iterable[ir.Value]) -> bool:
    """Give values the ranks that follow from nodes on which the outputs depend; returns whether any is new.

    Types and shapes must be inferred already. A node in a subgraph may never run, so it proves the ranks of
    values of that subgraph only.
    """
    values = (value for node in all_nodes(model.graph) for value in (*node.inputs, *node.outputs))
    if not any(value is not None and _lacks_rank(value) for value in values):
        return False
    relations = list(_relations(model.graph, outputs, model.opset_imports[""]))
    found = False
    while sum(_apply(*relation) for relation in relations):
        found = True
    return found


def _apply(graph: ir.Graph, value: ir.Value, other: ir.Value | None, offset: int) -> bool:
    if value.graph is not graph or not _lacks_rank(value):
        return False
    rank = offset if other is None else None if other.shape is None else len(other.shape) + offset
    if rank is None or rank < 0:
        return False
    value.shape = ir.Shape([None] * rank)
    return True


def _lacks_rank(value: ir.Value) -> bool:
    return value.shape is None and isinstance(value.type, ir.TensorType)


def transposed_ranks(model: ir.Model, outputs: Iterable[ir.Value]) -> dict[ir.Value, int]:
    """Return the ranks of values that are transposed by a permutation.

    They are not proven: onnxruntime removes Transposes that cancel, and with them their requirements.
    """
    found = {}
    for graph, node in _needed(model.graph, outputs):
        value, perm = node.inputs[0] if node.inputs else None, node.attributes.get("perm")
        if node.op_type == "Transpose" and value is not None and value.graph is graph and perm is not None:
            found[value] = len(perm.as_ints())
    return found


def _relations(
    graph: ir.Graph, outputs: Iterable[ir.Value], opset: int
) -> Iterator[tuple[ir.Graph, ir.Value, ir.Value | None, int]]:
    """Yield relations between the ranks of values, each with the graph in which it is proven."""
    for place, node in _needed(graph, outputs):
        for value, other, offset in _of_node(node, opset):
            if value is not None:
                yield place, value, other, offset
            if value is not None and other is not None:
                yield place, other, value, -offset
        for inner in subgraphs(node) if node.op_type == "If" else ():
            # The result is that of the branch that ran.
            for result, output in zip(inner.outputs, node.outputs, strict=True):
                yield inner, result, output, 0


def _needed(graph: ir.Graph, outputs: Iterable[ir.Value]) -> Iterator[tuple[ir.Graph, ir.Node]]:
    """Yield the nodes on which the outputs depend, and those in their subgraphs, each with its graph."""
    for node in nodes_before(graph, outputs):
        yield graph, node
        for inner in subgraphs(node):
            yield from _needed(inner, inner.outputs)


def _of_node(node: ir.Node, opset: int) -> Iterator[Relation]:
    key = node.op_type if is_standard(node) else f"{node.domain}::{node.op_type}"
    value = _values(node)
    for name, rank in _FIXED.get(key, {}).items():
        yield value(name), None, rank
    attributes = attributes_of(node, opset)
    if key in _SAME or (key in _REDUCTIONS and attributes.get("keepdims")):
        yield value(~0), value(0), 0
    if key in BROADCASTS:
        yield from _broadcast(node)
    if key in _FUNCTIONS:
        for i, j, offset in _FUNCTIONS[key](node, attributes):
            if j is None or value(j) is not None:
                yield value(i), None if j is None else value(j), offset


def _values(node: ir.Node) -> Callable[[int], ir.Value | None]:
    """Return a function that finds the inputs of a node by index, and the outputs by its complement."""

    def value(i: int) -> ir.Value | None:
        values, place = (node.inputs, i) if i >= 0 else (node.outputs, ~i)
        return values[place] if place < len(values) else None

    return value


def _broadcast(node: ir.Node) -> Iterator[Relation]:
    """The result has the rank of the operand with most dimensions, found if the others have fewer."""
    output, operands = node.outputs[0], [value for value in node.inputs if value is not None]
    unknown = [value for value in operands if value.shape is None]
    if output.shape is not None and len(set(unknown)) == 1:
        others = [len(value.shape) for value in operands if value.shape is not None]
        if max(others, default=-1) < len(output.shape):
            yield unknown[0], output, 0


Found = Iterable[tuple[int, "int | None", int]]
Attributes = dict[str, Any]


def _pool(node: ir.Node, attributes: Attributes) -> Found:
    yield 0, None, len(attributes["kernel_shape"]) + 2


def _conv(node: ir.Node, attributes: Attributes) -> Found:
    yield 1, 0, 0
    if attributes.get("kernel_shape"):
        yield 0, None, len(attributes["kernel_shape"]) + 2


def _einsum(node: ir.Node, attributes: Attributes) -> Found:
    terms = attributes["equation"].replace(" ", "").split("->")[0].split(",")
    for i, term in enumerate(terms):
        if "." not in term:
            yield i, None, len(term)


def _concat(node: ir.Node, attributes: Attributes) -> Found:
    for i in range(len(node.inputs)):
        yield i, ~0, 0


def _split(node: ir.Node, attributes: Attributes) -> Found:
    for i in range(len(node.outputs)):
        yield ~i, 0, 0


def _squeeze(node: ir.Node, attributes: Attributes) -> Found:
    count = _length(node, 1)
    if count is not None:
        yield ~0, 0, -count


def _unsqueeze(node: ir.Node, attributes: Attributes) -> Found:
    count = _length(node, 1)
    if count is not None:
        yield ~0, 0, count


def _gather(node: ir.Node, attributes: Attributes) -> Found:
    indices, data = node.inputs[1], node.inputs[0]
    if indices is not None and indices.shape is not None:
        yield ~0, 0, len(indices.shape) - 1
    if data is not None and data.shape is not None:
        yield ~0, 1, len(data.shape) - 1


def _tile(node: ir.Node, attributes: Attributes) -> Found:
    yield ~0, 0, 0
    count = _length(node, 1)
    if count is not None:
        yield 0, None, count


def _pad(node: ir.Node, attributes: Attributes) -> Found:
    yield ~0, 0, 0
    count = _length(node, 1)
    if count is not None and (len(node.inputs) < 4 or node.inputs[3] is None):
        yield 0, None, count // 2


def _resize(node: ir.Node, attributes: Attributes) -> Found:
    yield ~0, 0, 0
    # An empty vector of scales stands for an absent one.
    count = _length(node, 2) or _length(node, 3)
    if count and not attributes.get("axes"):
        yield 0, None, count


def _affine_grid(node: ir.Node, attributes: Attributes) -> Found:
    count = _length(node, 1)
    if count is not None:
        yield ~0, None, count


def _length(node: ir.Node, i: int) -> int | None:
    """The number of elements of an input that is a vector, if it is known."""
    value = node.inputs[i] if i < len(node.inputs) else None
    if value is None or value.shape is None or len(value.shape) != 1:
        return None
    return value.shape[0] if isinstance(value.shape[0], int) else None


_RECURRENT = {0: 3, 1: 3, 2: 3, 3: 2, 4: 1, 5: 3, ~1: 3}
# The ranks of inputs, by index, and of outputs, by its complement.
_FIXED: dict[str, dict[int, int]] = {
    "RNN": _RECURRENT,
    "GRU": _RECURRENT,
    "LSTM": _RECURRENT | {6: 3, 7: 2, ~2: 3},
    "Gemm": {1: 2, ~0: 2},
    "AffineGrid": {0: 3},
    "DeformConv": {0: 4, 1: 4, 2: 4},
    "DepthToSpace": {0: 4, ~0: 4},
    "SpaceToDepth": {0: 4, ~0: 4},
    "LRN": {0: 4, ~0: 4},
    "Flatten": {~0: 2},
    "NonZero": {~0: 2},
    "Shape": {~0: 1},
    "BatchNormalization": {1: 1, 2: 1, 3: 1, 4: 1},
    "InstanceNormalization": {1: 1, 2: 1},
}
# Operators whose first output has as many dimensions as their first input.
_SAME = KEEPING | words(
    """BatchNormalization CumProd CumSum GlobalAveragePool GlobalLpPool GlobalMaxPool GroupNormalization
    InstanceNormalization LRN LayerNormalization LpNormalization MeanVarianceNormalization QuantizeLinear
    DequantizeLinear RMSNormalization ReverseSequence RotaryEmbedding ScatterElements ScatterND
    SimplifiedLayerNormalization Slice TensorScatter TopK Transpose Trilu"""
)
_REDUCTIONS = words(
    """ArgMax ArgMin ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd
    ReduceSum ReduceSumSquare"""
)
_FUNCTIONS: dict[str, Callable[[ir.Node, Attributes], Found]] = {
    "MaxPool": lambda node, attributes: [*_pool(node, attributes), (~0, 0, 0)],
    "AveragePool": lambda node, attributes: [*_pool(node, attributes), (~0, 0, 0)],
    "LpPool": lambda node, attributes: [*_pool(node, attributes), (~0, 0, 0)],
    "MaxUnpool": _pool,
    "Conv": lambda node, attributes: [*_conv(node, attributes), (~0, 0, 0)],
    "ConvTranspose": lambda node, attributes: [*_conv(node, attributes), (~0, 0, 0)],
    f"{DOMAIN}::FusedConv": lambda node, attributes: [*_conv(node, attributes), (~0, 0, 0)],
    "Einsum": _einsum,
    "Concat": _concat,
    "Split": _split,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Gather": _gather,
    "GatherElements": lambda node, attributes: [(1, 0, 0), (~0, 0, 0)],
    "Tile": _tile,
    "Pad": _pad,
    "Resize": _resize,
    "AffineGrid": _affine_grid,
    "GridSample": lambda node, attributes: [(1, 0, 0), (~0, 0, 0)],
}
