"""Replaces nodes by their definitions."""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.autodiff.definitions import Definition, find_definition
from ortgrad.autodiff.node_view import NodeView
from ortgrad.errors import NodeError
from ortgrad.graph.attributes import attributes_of
from ortgrad.graph.gradient_nodes import put_in_place
from ortgrad.graph.names import Names
from ortgrad.graph.recorder import Recorder


def put_definition(node: ir.Node, opset: int, names: Names) -> bool:
    """Replace a node by the definition of its operator; returns False if there is none.

    Raises NodeError if the definition does not cover the node.
    """
    definition = find_definition(node.op_type, node.domain)
    if definition is not None:
        replace_by(node, definition, opset, names)
    return definition is not None


def replace_by(node: ir.Node, definition: Definition, opset: int, names: Names) -> None:
    """Replace a node by a definition; raises NodeError if the definition does not cover the node."""
    op = Recorder(opset, names, node.name or next(v.name for v in node.outputs if v.name) or "")
    with op.arithmetic():
        results = definition(op, NodeView(node, attributes_of(node, opset)))
    values = [results] if isinstance(results, ir.Value) else list(results)
    for i, output in enumerate(node.outputs):
        missing = i >= len(values) or values[i] is None
        if missing and (output.uses() or output.is_graph_output()):
            raise NodeError(f"its output {i} has no definition")
    put_in_place(node, [], op, values)
