"""Conversion of a model to double precision, for finite differences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ortgrad.autodiff.defined_nodes import put_definition
from ortgrad.autodiff.definitions import find_definition
from ortgrad.errors import NodeError
from ortgrad.graph.names import Names
from ortgrad.graph.protos import DOUBLE, FLOAT, FLOATS, all_graphs, copy_of, declared_values, subgraphs
from ortgrad.graph.serialization import from_proto, read, to_proto, write
from ortgrad.operators.schema import with_schemas
from ortgrad.passes.inline import inline
from ortgrad.passes.opset import at_minimum_opset
from ortgrad.shapes.defined_types import infer_defined_types

LOW = tuple(element for element in FLOATS if element != DOUBLE)
# Attributes that give the element type of an output, and the operators whose default for it is float.
TYPE_ATTRIBUTES = {"to", "dtype", "output_datatype", "output_dtype"}
FLOAT_BY_DEFAULT = {
    "RandomNormal": "dtype",
    "RandomUniform": "dtype",
    "HannWindow": "output_datatype",
    "HammingWindow": "output_datatype",
    "BlackmanWindow": "output_datatype",
    "MelWeightMatrix": "output_datatype",
}


def in_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with double tensors.

    Operators that have no double version are replaced by their definitions, if there are any; casts to float
    are put around the others.
    """
    # Functions are inlined: they have no types, and attributes that refer to the caller's.
    double = _with_definitions(_without_functions(model))
    opsets = {o.domain: o.version for o in double.opset_import}
    with_schemas(_convert_graph, double.graph, low_values(double), opsets)
    return double


def low_values(model: onnx.ModelProto) -> set[str]:
    """Return the names of values in float32 or less, including those in subgraphs."""
    found = set()
    for graph in all_graphs(with_schemas(onnx.shape_inference.infer_shapes, model).graph):
        found |= {v.name for v in declared_values(graph) if v.type.tensor_type.elem_type in LOW}
        found |= {tensor.name for tensor in graph.initializer if tensor.data_type in LOW}
    return found


def _without_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    if not model.functions:
        return copy_of(model)
    return to_proto(inline(from_proto(model), lambda _: True))


def _with_definitions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with nodes that do not accept double replaced by their definitions."""
    opsets = {o.domain: o.version for o in model.opset_import}
    narrow = with_schemas(_narrow_values, model.graph.node, low_values(model), opsets)
    if not narrow:
        return model
    defined = at_minimum_opset(read(model))
    infer_defined_types(defined)
    names = Names.of(defined)
    for node in list(defined.graph):
        if any(value.name in narrow for value in node.outputs):
            # Nodes that remain as they are get casts.
            with suppress(NodeError):
                put_definition(node, defined.opset_imports[""], names)
    infer_defined_types(defined)
    return write(defined, model)


def _narrow_values(nodes: Iterable[onnx.NodeProto], low: set[str], opsets: dict[str, int]) -> set[str]:
    """Return what nodes compute that do not take double."""
    return {name for node in nodes if _is_narrow(node, low, opsets) for name in node.output if name}


def _is_narrow(node: onnx.NodeProto, low: set[str], opsets: dict[str, int]) -> bool:
    if find_definition(node.op_type, node.domain) is None:
        return False
    version = opsets.get(node.domain, 1)
    if not onnx.defs.has(node.op_type, version, node.domain):
        return node.domain == "com.microsoft"
    schema = onnx.defs.get_schema(node.op_type, version, node.domain)
    return bool(_needing_casts(node.input, schema.inputs, low))


def _convert_graph(graph: onnx.GraphProto, low: set[str], opsets: dict[str, int]) -> None:
    for value in declared_values(graph):
        _widen(value.type)
    for tensor in graph.initializer:
        if tensor.data_type in LOW:
            tensor.CopyFrom(_doubled(tensor))
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        _convert_attributes(node, low, opsets)
        graph.node.extend(_with_casts(node, low, opsets))


def _widen(type_: onnx.TypeProto) -> None:
    which = type_.WhichOneof("value")
    if which == "sequence_type":
        _widen(type_.sequence_type.elem_type)
    elif which == "optional_type":
        _widen(type_.optional_type.elem_type)
    elif type_.tensor_type.elem_type in LOW:
        type_.tensor_type.elem_type = DOUBLE


def _doubled(tensor: onnx.TensorProto) -> onnx.TensorProto:
    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name)


def _convert_attributes(node: onnx.NodeProto, low: set[str], opsets: dict[str, int]) -> None:
    for inner in subgraphs(node):
        _convert_graph(inner, low, opsets)
    for attribute in node.attribute:
        if attribute.name in TYPE_ATTRIBUTES and attribute.i in LOW:
            attribute.i = DOUBLE
        elif attribute.HasField("t") and attribute.t.data_type in LOW:
            attribute.t.CopyFrom(_doubled(attribute.t))
        elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
            value = attribute.f if attribute.name == "value_float" else list(attribute.floats)
            tensor = numpy_helper.from_array(np.array(value, np.float64))
            attribute.CopyFrom(helper.make_attribute("value", tensor))
    given = {attribute.name for attribute in node.attribute}
    if node.op_type == "ConstantOfShape" and not given:
        node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(np.zeros(1))))
    name = FLOAT_BY_DEFAULT.get(node.op_type)
    if name is not None and name not in given:
        node.attribute.append(helper.make_attribute(name, DOUBLE))


def _with_casts(node: onnx.NodeProto, low: set[str], opsets: dict[str, int]) -> list[onnx.NodeProto]:
    """Return the node, with casts for inputs and outputs that its schema does not allow in double."""
    version = opsets.get(node.domain, 1)
    if not onnx.defs.has(node.op_type, version, node.domain):
        return [node]
    schema = onnx.defs.get_schema(node.op_type, version, node.domain)
    before, after = [], []
    for i in _needing_casts(node.input, schema.inputs, low):
        name = f"{node.input[i]}.{node.output[0]}.float"
        before.append(helper.make_node("Cast", [node.input[i]], [name], to=FLOAT))
        node.input[i] = name
    for i in _needing_casts(node.output, schema.outputs, low):
        name = f"{node.output[i]}.float"
        after.append(helper.make_node("Cast", [name], [node.output[i]], to=DOUBLE))
        node.output[i] = name
    return [*before, node, *after]


def _needing_casts(
    names: Iterable[str], parameters: Sequence[onnx.defs.OpSchema.FormalParameter], low: set[str]
) -> list[int]:
    found = []
    for i, name in enumerate(names):
        types = parameters[min(i, len(parameters) - 1)].types if parameters else ()
        if name in low and types and "tensor(double)" not in types and "tensor(float)" in types:
            found.append(i)
    return found
