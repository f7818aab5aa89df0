"""Puts definitions in the place of nodes, and infers types and shapes behind such nodes."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from ortgrad.autodiff.definitions import find_definition
from ortgrad.autodiff.node_view import NodeView
from ortgrad.errors import NodeError
from ortgrad.graph.attributes import attributes_of
from ortgrad.graph.gradient_nodes import put_in_place
from ortgrad.graph.inference import infer_types
from ortgrad.graph.names import Names
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import subgraphs


def put_definition(node: ir.Node, opset: int, names: Names) -> bool:
    """Replace a node by the definition of its operator; returns False if there is none.

    Raises NodeError if the definition does not cover the node.
    """
    definition = find_definition(node.op_type, node.domain)
    if definition is None:
        return False
    op = Recorder(opset, names, f"{node.name or next(v.name for v in node.outputs if v.name)}")
    with op.arithmetic():
        results = definition(op, NodeView(node, attributes_of(node, opset)))
    values = [results] if isinstance(results, ir.Value) else list(results)
    for i, output in enumerate(node.outputs):
        missing = i >= len(values) or values[i] is None
        if missing and (output.uses() or output.is_graph_output()):
            raise NodeError(f"its output {i} has no definition")
    put_in_place(node, [], op, values)
    return True


def infer_defined_types(model: ir.Model) -> None:
    """Infer types and shapes, also behind nodes that onnx does not know but that have a definition.

    The definitions are put in place in a copy only: onnxruntime's own kernels may be faster.
    """
    infer_types(model)
    if not _defined_nodes(model):
        return
    # From here on every name is unique, so that the values of the copy are found by name.
    Names.of(model)
    copy = model.clone()
    names = Names.of(copy)
    while sum(_try_definition(node, copy.opset_imports[""], names) for node in _defined_nodes(copy)):
        # Other definitions may need the ranks that are inferred now.
        infer_types(copy)
    inferred = {value.name: value for value in _values(copy)}
    for value in _values(model):
        other = inferred.get(value.name) if value.name else None
        if other is not None:
            value.type = value.type if other.type is None else other.type
            value.shape = value.shape if other.shape is None else other.shape


def _try_definition(node: ir.Node, opset: int, names: Names) -> bool:
    try:
        return put_definition(node, opset, names)
    except NodeError:
        return False


def _defined_nodes(model: ir.Model) -> list[ir.Node]:
    return [n for n in model.graph.all_nodes() if find_definition(n.op_type, n.domain) is not None]


def _values(model: ir.Model) -> Iterator[ir.Value]:
    """Yield the values of a model that inference applies to."""
    for node in model.graph.all_nodes():
        yield from node.outputs
        for graph in subgraphs(node):
            yield from graph.inputs
