"""Hides the lengths of long integer vectors, and the nodes that make them, from onnx's shape inference.

onnx stores one dimension per element of an integer vector of known length, because the vector may be a shape.
That takes minutes for a few million elements, and a dozen bytes in a file are enough to ask for them.
"""

from __future__ import annotations

import math

import onnx
from onnx import TensorProto

from ortgrad.graph.protos import all_graphs, constant_tensor, declared_values
from ortgrad.graph.validation import SIZE_MAKERS, made_elements, small_constants

# Longer than any shape, and short enough for inference to be fast.
LONGEST = 1 << 12
# Longer axes of other tensors are hidden too: Shape and Range may turn them into the length of a vector.
LONGEST_AXIS = 1 << 20
_HIDDEN = "ortgrad.hidden"
_INTEGERS = (TensorProto.INT64, TensorProto.INT32)
# By operator: the number of elements of the size operand if the result is a vector.
_OF_VECTOR = {"ConstantOfShape": 1, "Expand": 1, "Reshape": 1, "Tile": 1, "Range": 1, "Pad": 2}


# The hidden lengths, by value name and axis.
Lengths = dict[str, dict[int, int]]


def hide_lengths(model: onnx.ModelProto) -> Lengths:
    """Make the lengths unknown in the model, in place; returns them."""
    lengths: Lengths = {}
    hidden = [_hide(graph, lengths) for graph in all_graphs(model.graph)]
    if any(hidden):
        model.opset_import.add(domain=_HIDDEN, version=1)
    return lengths


def restore_lengths(graph: onnx.GraphProto, lengths: Lengths) -> None:
    """Write the lengths into the types of a graph and its subgraphs, where inference found none."""
    if not lengths:
        return
    for value in (value for inner in all_graphs(graph) for value in declared_values(inner)):
        dims = value.type.tensor_type.shape.dim
        for axis, length in lengths.get(value.name, {}).items():
            if axis < len(dims) and dims[axis].WhichOneof("value") is None:
                dims[axis].dim_value = length


def _hide(graph: onnx.GraphProto, lengths: Lengths) -> bool:
    """Hide the lengths in one graph; returns whether nodes were moved to the hidden domain."""
    for value in declared_values(graph):
        longest = LONGEST if _is_vector(value) else LONGEST_AXIS
        if value.type.WhichOneof("value") != "tensor_type":
            continue
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_value > longest:
                lengths.setdefault(value.name, {})[axis] = dim.dim_value
                dim.ClearField("dim_value")
    hidden = False
    makers = [n for n in graph.node if n.op_type in _OF_VECTOR and n.domain in ("", "ai.onnx")]
    constants = small_constants(graph) if makers else {}
    elements = _element_types(graph) if makers else {}
    for node in makers:
        operand = node.input[SIZE_MAKERS[node.op_type]]
        count = made_elements(node, constants)
        element = _value_type(node) if node.op_type == "ConstantOfShape" else elements.get(node.input[0])
        vector = len(constants.get(operand, ())) == _OF_VECTOR[node.op_type]
        if count is not None and count > LONGEST and vector and element in _INTEGERS:
            if node.op_type not in ("Tile", "Pad"):
                lengths[node.output[0]] = {0: math.ceil(count)}
            shape = [None] if node.op_type != "Expand" else None
            graph.value_info.append(onnx.helper.make_tensor_value_info(node.output[0], element, shape))
            node.domain, hidden = _HIDDEN, True
    return hidden


def _is_vector(value: onnx.ValueInfoProto) -> bool:
    tensor = value.type.tensor_type
    return tensor.elem_type in _INTEGERS and len(tensor.shape.dim) == 1


def _value_type(node: onnx.NodeProto) -> int:
    return next((a.t.data_type for a in node.attribute if a.name == "value"), TensorProto.FLOAT)


def _element_types(graph: onnx.GraphProto) -> dict[str, int]:
    """Return the element types of initializers and Constant nodes, by name."""
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        if (tensor := constant_tensor(node)) is not None:
            types[node.output[0]] = tensor.data_type
    return types
