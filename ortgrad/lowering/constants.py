"""Values that depend on no input, and that onnxruntime therefore computes once, when a session is made.

It folds nodes of its own operators, in subgraphs too, but neither random ones, nor those that have subgraphs,
nor DequantizeLinear, which it may merge with others. It never folds kernels of ortgrad, including fused
nodes: a node that replaced a constant one would be computed in every run.
"""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.graph.recorder import RANDOM
from ortgrad.graph.traversal import all_graphs, all_nodes, subgraphs
from ortgrad.operators.declaration import DOMAIN, find_operator

_DOMAINS = frozenset({"", "ai.onnx", DOMAIN})
_NOT_FOLDED = RANDOM | {"DequantizeLinear"}


def constant_values(model: ir.Model, *, bodies: bool = False) -> set[ir.Value]:
    """Return the initializers that cannot be fed, and what is computed from them alone.

    With `bodies`, also what gradient nodes compute that could be replaced by their bodies. The nodes must be
    in topological order.
    """
    found: set[ir.Value] = set()
    for graph in all_graphs(model.graph):
        found.update(value for value in graph.initializers.values() if not value.is_graph_input())
    for node in all_nodes(model.graph):
        if all(value is None or value in found for value in node.inputs) and _is_folded(node, bodies):
            found.update(node.outputs)
    return found


def computed_nodes(model: ir.Model) -> list[ir.Node]:
    """Return the nodes of the model and its subgraphs that onnxruntime does not fold."""
    constant = constant_values(model)
    nodes = all_nodes(model.graph)
    return [node for node in nodes if not node.outputs or node.outputs[0] not in constant]


def is_dequantized(value: ir.Value | None) -> bool:
    """Return whether onnxruntime may merge what computes a value with what reads it."""
    producer = None if value is None else value.producer()
    return producer is not None and producer.op_type == "DequantizeLinear"


def _is_folded(node: ir.Node, bodies: bool) -> bool:
    if node.domain not in _DOMAINS or node.op_type in _NOT_FOLDED or subgraphs(node):
        return False
    operator = find_operator(node.op_type, node.domain)
    return operator is None or (bodies and operator.body is not None)
