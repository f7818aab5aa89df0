"""The values of a forward model: names, lookup, nodes that are added, checks and shape inference."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from ortgrad.errors import ModelError, NameNotFoundError, TrainingModelError
from ortgrad.graph.protos import all_graphs, copy_of, opset_of
from ortgrad.operators.schema import with_schemas

# Initializers with more elements hold weights, not sizes or axes that shape inference needs.
_LARGEST_CONSTANT = 1024
# Older opsets have no SoftmaxCrossEntropyLoss, and ReduceSum has its axes as an attribute.
_OLDEST_OPSET = 13


def generate_graph_name(model: onnx.ModelProto, token: str) -> str:
    """Return a name that the model does not use, whatever program wrote it: `onnx::token::number`."""
    taken = set(_names(model))
    candidates = (f"onnx::{token}::{number}" for number in itertools.count(1))
    return next(name for name in candidates if name not in taken)


def _names(model: onnx.ModelProto) -> Iterator[str]:
    """Yield the names of nodes and values, those in subgraphs too."""
    for graph in all_graphs(model.graph):
        yield from (value.name for value in (*graph.input, *graph.output, *graph.initializer))
        for node in graph.node:
            yield node.name
            yield from node.output


def add_node(
    model: onnx.ModelProto,
    op_type: str,
    inputs: list[str],
    outputs: list[str],
    *,
    domain: str = "",
    **attributes: Any,
) -> str:
    """Append a node with a generated name to the model and return the name of its first output."""
    node = onnx.helper.make_node(
        op_type, inputs, outputs, name=generate_graph_name(model, op_type), domain=domain, **attributes
    )
    model.graph.node.append(node)
    if domain and all(opset.domain != domain for opset in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    return outputs[0]


class Nodes:
    """Adds nodes to a model: `op.Mul(x, y)` adds one and returns the name of its result.

    Operands are names of values; keywords are attributes.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model

    def __getattr__(self, op_type: str) -> Callable[..., str]:
        if not op_type[0].isupper():
            raise AttributeError(op_type)
        return functools.partial(self._add, op_type)

    def _add(self, op_type: str, *operands: str, **attributes: Any) -> str:
        output = generate_graph_name(self.model, f"{op_type.lower()}_output")
        return add_node(self.model, op_type, list(operands), [output], **attributes)

    def number(
        self, token: str, value: float, kind: int = TensorProto.FLOAT, shape: Sequence[int] = (1,)
    ) -> str:
        """Add an initializer of one element with a name that contains the token."""
        name = generate_graph_name(self.model, token)
        self.model.graph.initializer.append(onnx.helper.make_tensor(name, kind, shape, [value]))
        return name

    def constant(self, token: str, value: Any, kind: int = TensorProto.FLOAT) -> str:
        """Add an initializer with a name that contains the token."""
        name = generate_graph_name(self.model, token)
        array = np.asarray(value).astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
        self.model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        return name


def exists(model: onnx.ModelProto, name: str) -> bool:
    """Return whether the main graph has a value of this name."""
    graph = model.graph
    return any(value.name == name for value in (*graph.input, *graph.initializer)) or any(
        name in node.input or name in node.output for node in graph.node
    )


def find_value(model: onnx.ModelProto, name: str) -> onnx.ValueInfoProto:
    """Return name, type and shape of a value: declared ones, else inferred ones."""
    graph = model.graph
    declared = next((value for value in (*graph.input, *graph.output) if value.name == name), None)
    if declared is not None and _has_shape(declared):
        return declared
    for tensor in graph.initializer:
        if tensor.name == name:
            return onnx.helper.make_tensor_value_info(name, tensor.data_type, tensor.dims)
    if not exists(model, name):
        raise NameNotFoundError(f"there is no value {name!r} in the graph")
    found = inferred(model).graph
    for value in (*found.value_info, *found.output):
        if value.name == name and _has_shape(value):
            return value
    if declared is not None:
        return declared
    raise NameNotFoundError(f"the type and shape of the value {name!r} are not known")


def input_like(model: onnx.ModelProto, like: str, name: str) -> None:
    """Add an input with the type and shape of a value."""
    try:
        found = find_value(model, like)
    except NameNotFoundError as error:
        raise NameNotFoundError(f"no input can be like {like!r}: {error}") from error
    model.graph.input.add(name=name, type=found.type)


def _has_shape(value: onnx.ValueInfoProto) -> bool:
    kind = value.type
    return not kind.HasField("tensor_type") or kind.tensor_type.HasField("shape")


def element_type(model: onnx.ModelProto, name: str) -> int:
    """Return the element type of a tensor; float if it is not known."""
    try:
        return find_value(model, name).type.tensor_type.elem_type or TensorProto.FLOAT
    except NameNotFoundError:
        return TensorProto.FLOAT


def open_to_losses(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model, converted if its opset is too old for the nodes of losses."""
    return converted(model) if opset_of(model) < _OLDEST_OPSET else model


def converted(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model in an opset in which gradients can be built."""
    from ortgrad.graph.serialization import read, write  # onnx-ir is slow to import
    from ortgrad.passes.opset import at_minimum_opset

    try:
        return write(at_minimum_opset(read(model)), model)
    except ModelError as error:
        raise TrainingModelError(str(error)) from error


def check(model: onnx.ModelProto) -> None:
    """Raise the error of onnx's checker if the model is invalid."""
    light = without_weights(model)
    # What files declare of intermediate values and outputs may be missing or wrong; onnxruntime only warns.
    del light.graph.value_info[:], light.graph.output[:]
    with_schemas(onnx.checker.check_model, light, True)


def inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of the model, without its weights, in which onnx has inferred types and shapes."""
    light = without_weights(model)
    if any(node.domain == "ai.onnx.ml" for node in model.graph.node):
        # For most of these operators, onnx infers nothing.
        from ortgrad.graph.serialization import read, write
        from ortgrad.shapes.inference import infer_types  # onnx-ir is slow to import

        found = read(light)
        infer_types(found)
        return write(found, light)
    result: onnx.ModelProto = with_schemas(onnx.shape_inference.infer_shapes, light)
    return result


def has_valid_types(model: onnx.ModelProto) -> bool:
    """Return whether the operators take the element types of their inputs, as far as onnx knows them."""
    light = without_weights(model)
    del light.graph.value_info[:]
    try:
        with_schemas(onnx.shape_inference.infer_shapes, light, check_type=True, strict_mode=True)
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError):
        return False
    return True


def with_inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of the model in which onnx has inferred types and shapes."""
    copy = copy_of(model)
    found = inferred(model).graph
    types = {value.name: value for value in found.output}
    for value in copy.graph.output:
        if value.name in types:
            value.CopyFrom(types[value.name])
    del copy.graph.value_info[:]
    copy.graph.value_info.extend(found.value_info)
    return copy


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of the model in which large initializers are inputs: it is below protobuf's 2 GB."""
    large = {tensor.name: tensor for tensor in model.graph.initializer if _is_large(tensor)}
    if not large or model.ir_version < 4:
        return copy_of(model)
    light = copy_without_initializers(model)
    light.graph.initializer.extend(t for t in model.graph.initializer if t.name not in large)
    given = {value.name for value in light.graph.input}
    light.graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in large.values()
        if tensor.name not in given
    )
    return light


def copy_without_initializers(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of the model without the initializers of its main graph, which are never copied."""
    light = _copy_without(model, "graph")
    light.graph.CopyFrom(_copy_without(model.graph, "initializer"))
    return light


def _copy_without(message: Any, left_out: str) -> Any:
    """Return a copy of a protobuf message without one of its fields."""
    copy = type(message)()
    for descriptor, value in message.ListFields():
        if descriptor.name == left_out:
            continue
        if isinstance(value, (str, bytes, int, float)):
            setattr(copy, descriptor.name, value)
        elif hasattr(value, "extend"):
            getattr(copy, descriptor.name).extend(value)
        else:
            getattr(copy, descriptor.name).CopyFrom(value)
    return copy


def _is_large(tensor: onnx.TensorProto) -> bool:
    count = 1
    for size in tensor.dims:
        count *= size
    return count > _LARGEST_CONSTANT or tensor.data_location == TensorProto.EXTERNAL
