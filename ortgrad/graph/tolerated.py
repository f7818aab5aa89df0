"""Repairs of files that ONNX forbids, although programs write them or onnxruntime accepts them.

- Some converters write a constant once for every use, under one name. Where the values are equal, the first
  one remains. Where they differ, the model is refused: onnxruntime would silently take one of them.
- onnxruntime-training 1.19.2 leaves the outputs for running statistics at a BatchNormalization that it has
  switched to evaluation. They have no values then. If nothing reads them, they are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortgrad.errors import ModelError
from ortgrad.graph.protos import all_graphs, all_nodes, constant_tensor, copy_of, dependencies, is_operator

# From this opset on, an attribute says whether a BatchNormalization trains; before, the number of outputs.
_FIRST_WITH_MODE = 14


def repaired(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model, or a repaired copy; raises ModelError for constants of one name that differ."""
    if any(_has_duplicates(graph) for graph in all_graphs(model.graph)):
        model = copy_of(model)
        for graph in all_graphs(model.graph):
            _drop_duplicates(graph)
    if _opset(model) >= _FIRST_WITH_MODE:
        model = _without_statistics(model)
    return model


def evaluated(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return an evaluation model in which no BatchNormalization trains because of its number of outputs.

    onnxruntime-training leaves all of them in models of opset 13 and older. Such a node would normalize with
    the statistics of the batch, and overwrite the running ones.
    """
    return _without_statistics(model) if _opset(model) < _FIRST_WITH_MODE else model


def _opset(model: onnx.ModelProto) -> int:
    return max(
        (o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=_FIRST_WITH_MODE
    )


# Constants


def _has_duplicates(graph: onnx.GraphProto) -> bool:
    names = [tensor.name for tensor in graph.initializer]
    names += [node.output[0] for node in graph.node if _is_constant(node)]
    return len(set(names)) < len(names)


def _is_constant(node: onnx.NodeProto) -> bool:
    return is_operator(node, "Constant") and len(node.output) == 1


def _drop_duplicates(graph: onnx.GraphProto) -> None:
    values: dict[str, Any] = {}

    def is_new(name: str, value: Any) -> bool:
        if name not in values:
            values[name] = value
            return True
        if not _are_equal(values[name], value):
            raise ModelError(
                f"{name!r} occurs twice among the constants of graph {graph.name!r}, with different values. "
                "onnxruntime takes one of them; remove the other"
            )
        return False

    tensors = [tensor for tensor in graph.initializer if is_new(tensor.name, tensor)]
    nodes = [node for node in graph.node if not _is_constant(node) or is_new(node.output[0], _value(node))]
    for field, kept in ((graph.initializer, tensors), (graph.node, nodes)):
        if len(kept) < len(field):
            copies = [type(each).FromString(each.SerializeToString()) for each in kept]
            del field[:]
            field.extend(copies)


def _value(node: onnx.NodeProto) -> Any:
    """Return the value of a Constant: a TensorProto, or its attributes."""
    tensor = constant_tensor(node)
    return {a.name: helper.get_attribute_value(a) for a in node.attribute} if tensor is None else tensor


def _are_equal(a: Any, b: Any) -> bool:
    a, b = _array(a), _array(b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(type(a) is type(b) and a == b)


def _array(value: Any) -> Any:
    """Return the array of a tensor, unless it holds strings or is in another file."""
    if not isinstance(value, TensorProto):
        return value
    if value.data_location == TensorProto.EXTERNAL or value.data_type == TensorProto.STRING:
        described = TensorProto()
        described.CopyFrom(value)
        described.ClearField("name")
        return described.SerializeToString(deterministic=True)
    return numpy_helper.to_array(value)


# Batch normalizations


def _without_statistics(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model without outputs of statistics that nothing reads; an attribute may ask for them."""
    if not any(True for _ in _surplus(model)):
        return model
    model = copy_of(model)
    for node in list(_surplus(model)):
        del node.output[1:]
    return model


def _surplus(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    found = [node for node in all_nodes(model.graph.node) if len(node.output) > 1 and _evaluates(node)]
    if not found:
        return
    read = {name for node in model.graph.node for name in dependencies(node)}
    for graph in all_graphs(model.graph):
        read.update(value.name for value in graph.output)
        read.update(name for node in graph.node for name in node.input)
    for node in found:
        if not read & set(node.output[1:]):
            yield node


def _evaluates(node: onnx.NodeProto) -> bool:
    mode = next((a.i for a in node.attribute if a.name == "training_mode"), 0)
    return is_operator(node, "BatchNormalization") and not mode
