"""Infers types and shapes, also behind nodes that have a definition and that onnx does not know."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from ortgrad.autodiff.defined_nodes import put_definition
from ortgrad.autodiff.definitions import find_definition
from ortgrad.errors import NodeError
from ortgrad.graph.names import Names
from ortgrad.graph.traversal import all_nodes, subgraphs
from ortgrad.shapes.inference import infer_types


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
    return [n for n in all_nodes(model.graph) if find_definition(n.op_type, n.domain) is not None]


def _values(model: ir.Model) -> Iterator[ir.Value]:
    """Yield the values of a model that inference applies to."""
    for node in all_nodes(model.graph):
        yield from node.outputs
        for graph in subgraphs(node):
            yield from graph.inputs
