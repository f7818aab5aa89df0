"""Copies constants into the subgraphs that read them, for onnx's shape inference.

In a subgraph onnx does not know the elements of constants outside of it, such as axes or a shape, and so not
the number of dimensions of what is computed with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortgrad.graph.protos import subgraphs

_TYPES = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL, TensorProto.FLOAT)
# In elements: more than any shape has.
_LARGEST = 64
_OUTSIDE = "ortgrad.outside/"


def copy_constants_inside(graph: onnx.GraphProto, outside: Mapping[str, TensorProto] | None = None) -> None:
    """Make small constants that a graph reads from outside initializers of it, at any depth, in place."""
    inside = {value.name for value in (*graph.input, *graph.initializer)}
    inside.update(name for node in graph.node for name in node.output)
    visible = {name: tensor for name, tensor in (outside or {}).items() if name not in inside}
    known = visible | {tensor.name: tensor for tensor in graph.initializer if _is_small(tensor)}
    copied: set[str] = set()
    for node in graph.node:
        tensor = _constant(node)
        if tensor is not None and _is_small(tensor):
            known[node.output[0]] = tensor
        for subgraph in subgraphs(node):
            copy_constants_inside(subgraph, known)
        for i, name in enumerate(node.input):
            if name in visible:
                node.input[i] = _OUTSIDE + name
                copied.add(name)
    for name in sorted(copied):
        graph.initializer.add().CopyFrom(visible[name])
        graph.initializer[-1].name = _OUTSIDE + name


def _is_small(tensor: TensorProto) -> bool:
    within = tensor.data_location != TensorProto.EXTERNAL
    return within and tensor.data_type in _TYPES and math.prod(tensor.dims) <= _LARGEST


def _constant(node: onnx.NodeProto) -> TensorProto | None:
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
        return None
    for attribute in node.attribute:
        if attribute.name == "value":
            return attribute.t
        if attribute.name in ("value_int", "value_ints"):
            return numpy_helper.from_array(np.array(helper.get_attribute_value(attribute), np.int64))
    return None
