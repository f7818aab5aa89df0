"""Replaces nodes by the function bodies that ONNX's schemas define for their operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
import onnx_ir as ir
from onnx import helper, version_converter
from onnx_ir.passes.common import InlinePass

from ortgrad.errors import NodeError
from ortgrad.graph.names import Names
from ortgrad.graph.outputs import replace_node
from ortgrad.graph.traversal import subgraphs


def open_schema_function(node: ir.Node, opsets: Mapping[str, int], names: Names) -> bool:
    """Replace a node by the function body of its schema; returns False if there is none.

    Raises NodeError if onnx cannot convert the body to the model's opset.
    """
    body = _body(node, opsets)
    graph = node.graph
    if body is None or graph is None:
        return False
    given = [value for value in node.inputs if value is not None]
    for value, tensor in [(v, v.const_value) for v in body.initializers.values()]:
        constant = ir.node("Constant", [], {"value": tensor})
        constant.outputs[0].name = constant.name = value.name
        body.insert_before(body[0], constant)
        ir.convenience.replace_all_uses_with(value, constant.outputs[0])
    results = [_from_node(body, value) for value in body.outputs]
    names.rename(body, node.name or f"{node.outputs[0].name}")
    ir.convenience.replace_all_uses_with(body.inputs, given)
    made_nodes = list(body)
    body.outputs.clear()
    body.remove(made_nodes)
    wanted = [value for value in node.outputs if value.name]
    replace_node(node, made_nodes, list(zip(wanted, results, strict=False)))
    return True


def _from_node(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Return the value, or a copy if it is an input of the graph."""
    if value.producer() is not None:
        return value
    copy = ir.node("Identity", [value])
    graph.append(copy)
    copy.outputs[0].name = copy.name = f"{value.name}/copy"
    return copy.outputs[0]


def _body(node: ir.Node, opsets: Mapping[str, int]) -> ir.Graph | None:
    """Return the function body as a graph of the node's present inputs and outputs, in the model's opset."""
    version = opsets.get(node.domain)
    if version is None or not onnx.defs.has(node.op_type, version, node.domain):
        return None
    schema: Any = onnx.defs.get_schema(node.op_type, version, node.domain)  # the stubs lack functions
    call = _call(node, schema)
    function = _function_proto(schema, call, node, opsets[""])
    if function is None:
        return None
    alone = _alone(call, node, function)
    written_for = next(o.version for o in alone.opset_import if o.domain == "")
    if written_for != opsets[""] and not unchanged(ir.from_proto(alone).graph, written_for, opsets[""]):
        try:
            alone = version_converter.convert_version(alone, opsets[""])
        except RuntimeError as error:
            raise NodeError(
                f"its function body is written for opset {written_for}, and onnx cannot convert it: {error}"
            ) from error
    return ir.from_proto(alone).graph


def _call(node: ir.Node, schema: Any) -> onnx.NodeProto:
    """Return the node with generic names for its inputs and outputs, and with default attributes added."""
    call = ir.to_proto(node)
    for i, value in enumerate(node.inputs):
        call.input[i] = f"input_{i}" if value is not None else ""
    for i, value in enumerate(node.outputs):
        call.output[i] = f"output_{i}" if value.name else ""
    call.overload = ""
    given = {attribute.name for attribute in call.attribute}
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.type:
            call.attribute.append(attribute.default_value)
    return call


def _function_proto(
    schema: Any, call: onnx.NodeProto, node: ir.Node, opset: int
) -> onnx.FunctionProto | None:
    if schema.has_function:
        versions = [v for v in schema.function_opset_versions if v <= opset]
        if not versions:
            return None
        return onnx.FunctionProto.FromString(schema.get_function_with_opset_version(max(versions)))
    if schema.has_context_dependent_function:
        versions = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
        types = [_type_of(value).SerializeToString() for value in node.inputs]
        if not versions:
            return None
        data = schema.get_context_dependent_function_with_opset_version(
            max(versions), call.SerializeToString(), types
        )
        return onnx.FunctionProto.FromString(data) if data else None
    return None


def _type_of(value: ir.Value | None) -> onnx.TypeProto:
    if value is None or value.type is None:
        return onnx.TypeProto()
    return ir.to_proto(value).type


def _alone(call: onnx.NodeProto, node: ir.Node, function: onnx.FunctionProto) -> onnx.ModelProto:
    """Return a model of the node alone, with the function inlined."""
    del function.output[len(call.output) :]
    inputs = [
        onnx.ValueInfoProto(name=name, type=_type_of(value))
        for name, value in zip(call.input, node.inputs, strict=True)
        if name
    ]
    outputs = [
        onnx.ValueInfoProto(name=name, type=_type_of(value))
        for name, value in zip(call.output, node.outputs, strict=True)
        if name
    ]
    version = next(o.version for o in function.opset_import if o.domain == "")
    model = helper.make_model(
        helper.make_graph([call], "body", inputs, outputs),
        opset_imports=[helper.make_opsetid("", version)],
        functions=[function],
        ir_version=10,
    )
    inlined = ir.from_proto(model)
    InlinePass()(inlined)
    return ir.to_proto(inlined)


def unchanged(graph: ir.Graph, old: int, new: int) -> bool:
    """Return whether all operators of a graph have the same version in two opsets."""
    return all(
        _since(node.op_type, old) == _since(node.op_type, new)
        and all(unchanged(inner, old, new) for inner in subgraphs(node))
        for node in graph
    )


def _since(op_type: str, opset: int) -> int | None:
    if not onnx.defs.has(op_type, opset):
        return None
    return onnx.defs.get_schema(op_type, opset).since_version
