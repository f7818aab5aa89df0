"""Makes constants known to onnx's shape inference where it does not see them.

onnx follows integers through Shape, Slice, Gather, Concat, Add, Sub, Mul and a few more operators. Behind any
other, such as the Mod that PyTorch writes for `unflatten`, it does not know how many elements a slice of a
shape has, and so not how many dimensions a Reshape to it has. In a subgraph it does not know the elements of
constants outside of it, such as axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortgrad.graph.protos import subgraphs

_INTEGERS = {TensorProto.INT64: np.int64, TensorProto.INT32: np.int32, TensorProto.BOOL: np.bool_}
# In elements: more than any shape has.
_LARGEST = 64
_OUTSIDE = "ortgrad.outside/"


def spread_constants(graph: onnx.GraphProto, outside: Mapping[str, TensorProto] | None = None) -> None:
    """Replace nodes whose integers follow from constants, and copy constants into subgraphs, in place."""
    inside = {value.name for value in graph.input} | {name for node in graph.node for name in node.output}
    inside |= {tensor.name for tensor in graph.initializer}
    visible = {name: tensor for name, tensor in (outside or {}).items() if name not in inside}
    known = visible | {tensor.name: tensor for tensor in graph.initializer if _is_small(tensor)}
    copied: set[str] = set()
    for node in graph.node:
        result = _constant(node) if node.op_type == "Constant" else _result(node, known)
        if result is not None and _is_small(result):
            known[node.output[0]] = result
            if node.op_type != "Constant":
                node.CopyFrom(helper.make_node("Constant", [], node.output, node.name, value=result))
        for subgraph in subgraphs(node):
            spread_constants(subgraph, known)
        for i, name in enumerate(node.input):
            if name in visible:
                node.input[i] = _OUTSIDE + name
                copied.add(name)
    for name in sorted(copied):
        graph.initializer.add().CopyFrom(visible[name])
        graph.initializer[-1].name = _OUTSIDE + name


def _is_small(tensor: TensorProto) -> bool:
    inside = tensor.data_location != TensorProto.EXTERNAL
    known = tensor.data_type in _INTEGERS or tensor.data_type == TensorProto.FLOAT
    return inside and known and math.prod(tensor.dims) <= _LARGEST


def _constant(node: onnx.NodeProto) -> TensorProto | None:
    for attribute in node.attribute if node.domain in ("", "ai.onnx") else ():
        if attribute.name == "value":
            return attribute.t
        if attribute.name in ("value_int", "value_ints"):
            return numpy_helper.from_array(np.array(helper.get_attribute_value(attribute), np.int64))
    return None


def _result(node: onnx.NodeProto, known: Mapping[str, TensorProto]) -> TensorProto | None:
    """Return the output of a node, or None if it is not known or the node is not valid."""
    function = _FUNCTIONS.get(node.op_type)
    if function is None or node.domain not in ("", "ai.onnx") or len(node.output) != 1:
        return None
    inputs = [known[name] for name in node.input if name in known]
    if not inputs or len(inputs) < len(node.input) or any(x.data_type not in _INTEGERS for x in inputs):
        return None
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    try:
        with np.errstate(all="raise", over="ignore"):
            result = function(attributes, *map(numpy_helper.to_array, inputs))
    except (ValueError, IndexError, TypeError, FloatingPointError):
        # The node is not valid, or of an opset with other inputs: onnx and onnxruntime know better.
        return None
    return None if result is None else numpy_helper.from_array(np.asarray(result))


def _divide(attributes: Mapping[str, Any], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Towards zero, as onnxruntime."""
    return ((a - np.fmod(a, b)) // b).astype(a.dtype)


def _modulo(attributes: Mapping[str, Any], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(np.fmod(a, b) if attributes.get("fmod") else np.mod(a, b))


def _cast(attributes: Mapping[str, Any], x: np.ndarray) -> np.ndarray | None:
    to = _INTEGERS.get(attributes["to"])
    return None if to is None else x.astype(to)


def _reshape(attributes: Mapping[str, Any], x: np.ndarray, shape: np.ndarray) -> np.ndarray | None:
    # 0 has two meanings.
    return x.reshape(shape.tolist()) if 0 not in shape else None


def _gather(attributes: Mapping[str, Any], x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    return np.take(x, indices, axis=attributes.get("axis", 0))


def _concat(attributes: Mapping[str, Any], *inputs: np.ndarray) -> np.ndarray:
    return np.concatenate(inputs, axis=attributes["axis"])


def _unsqueeze(attributes: Mapping[str, Any], x: np.ndarray, axes: np.ndarray) -> np.ndarray:
    return np.expand_dims(x, tuple(axes.reshape(-1).tolist()))


def _squeeze(attributes: Mapping[str, Any], x: np.ndarray, axes: np.ndarray) -> np.ndarray:
    return np.squeeze(x, tuple(axes.reshape(-1).tolist()))


def _plain(function: Callable[..., Any]) -> Callable[..., np.ndarray]:
    """Return an element-wise function of any number of operands, which has no attributes."""

    def apply(attributes: Mapping[str, Any], *inputs: np.ndarray) -> np.ndarray:
        if attributes:
            raise ValueError("an attribute of an old opset, or another function")
        return np.asarray(function(*inputs))

    return apply


_FUNCTIONS: dict[str, Callable[..., np.ndarray | None]] = {
    "Abs": _plain(np.abs),
    "Add": _plain(np.add),
    "And": _plain(np.logical_and),
    "Cast": _cast,
    "Concat": _concat,
    "Div": _divide,
    "Equal": _plain(np.equal),
    "Gather": _gather,
    "Greater": _plain(np.greater),
    "Identity": _plain(np.copy),
    "Less": _plain(np.less),
    "Max": _plain(lambda *x: np.max(np.broadcast_arrays(*x), axis=0)),
    "Min": _plain(lambda *x: np.min(np.broadcast_arrays(*x), axis=0)),
    "Mod": _modulo,
    "Mul": _plain(np.multiply),
    "Neg": _plain(np.negative),
    "Not": _plain(np.logical_not),
    "Or": _plain(np.logical_or),
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Sub": _plain(np.subtract),
    "Unsqueeze": _unsqueeze,
    "Where": _plain(np.where),
}
