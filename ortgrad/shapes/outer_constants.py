"""Copies constants into the subgraphs that read them, for onnx's shape inference.

In a subgraph onnx does not know the elements of constants outside of it, such as axes or a shape, and so not
the number of dimensions of what is computed with them.
"""

from __future__ import annotations

import math

import onnx
from onnx import TensorProto

from ortgrad.graph.protos import constant_tensor, subgraphs

_TYPES = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL, TensorProto.FLOAT)
# In elements: more than any shape has.
_LARGEST = 64
_OUTSIDE = "ortgrad.outside/"


class _Scope:
    """The names that a graph defines, and the small constants among them; `outer` is the graph around it."""

    def __init__(self, graph: onnx.GraphProto, outer: _Scope | None) -> None:
        self.outer = outer
        self.constants = {tensor.name: tensor for tensor in graph.initializer if _is_small(tensor)}
        self.defined = {value.name for value in (*graph.input, *graph.initializer)}
        self.defined.update(name for node in graph.node for name in node.output)

    def outside(self, name: str) -> TensorProto | None:
        """Return the constant that a name stands for if it is defined further outside; else None."""
        scope: _Scope | None = self
        while scope is not None and name not in scope.defined:
            scope = scope.outer
            if scope is not None and name in scope.constants:
                return scope.constants[name]
        return None


def copy_constants_inside(graph: onnx.GraphProto, outer: _Scope | None = None) -> None:
    """Make small constants that a graph reads from outside initializers of it, at any depth, in place."""
    scope = _Scope(graph, outer)
    copied: dict[str, TensorProto] = {}
    for node in graph.node:
        tensor = constant_tensor(node)
        if tensor is not None and _is_small(tensor):
            scope.constants[node.output[0]] = tensor
        for subgraph in subgraphs(node):
            copy_constants_inside(subgraph, scope)
        for i, name in enumerate(node.input):
            found = scope.outside(name)
            if found is not None:
                node.input[i] = _OUTSIDE + name
                copied[name] = found
    for name in sorted(copied):
        graph.initializer.add().CopyFrom(copied[name])
        graph.initializer[-1].name = _OUTSIDE + name


def _is_small(tensor: TensorProto) -> bool:
    within = tensor.data_location != TensorProto.EXTERNAL
    return within and tensor.data_type in _TYPES and math.prod(tensor.dims) <= _LARGEST
