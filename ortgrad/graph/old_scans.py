"""Rewrites Scan of opset 8, which has a leading batch axis, as two nested Scans of opset 9.

onnx's version converter removes the batch axis instead, even from the inputs and outputs of the model.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx import helper, version_converter

from ortgrad.errors import ModelError
from ortgrad.graph.names import Names
from ortgrad.graph.traversal import all_nodes, captured_values, is_operator

PLACEHOLDER = "ortgrad.scan8"


def hide_old_scans(model: ir.Model, opset: int) -> dict[str, ir.Graph]:
    """Replace Scan nodes by placeholders that the converter ignores; returns the converted bodies by name."""
    bodies: dict[str, ir.Graph] = {}
    for node in all_nodes(model.graph):
        if not is_operator(node, "Scan"):
            continue
        body = node.attributes["body"].as_graph()
        if node.inputs[0] is not None or captured_values(body):
            raise ModelError(
                f"Scan node {node.name!r} of opset 8 has sequence_lens, or its body reads from outside; "
                "export the model with a newer opset"
            )
        node.domain = PLACEHOLDER
        node.name = f"scan8_{len(bodies)}"
        bodies[node.name] = _converted(body, opset)
        del node.attributes["body"]
    if bodies:
        model.opset_imports[PLACEHOLDER] = 1
    return bodies


def restore_scans(model: ir.Model, bodies: dict[str, ir.Graph]) -> None:
    """Replace each placeholder by a Scan over the batch whose body is a Scan over time."""
    hidden = [(n, bodies[n.name or ""]) for n in all_nodes(model.graph) if n.domain == PLACEHOLDER]
    names = Names.of(model)
    for node, body in hidden:
        _restore(node, body, model.opset_imports[""], names)
    model.opset_imports.pop(PLACEHOLDER, None)


def _converted(body: ir.Graph, opset: int) -> ir.Graph:
    graph = ir.to_proto(body)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 8)], ir_version=3)
    return ir.from_proto(version_converter.convert_version(model, opset)).graph


def _restore(node: ir.Node, body: ir.Graph, opset: int, names: Names) -> None:
    names.rename(body)
    scanned = node.attributes["num_scan_inputs"].as_int()
    attributes = [ir.AttrGraph("body", body), ir.AttrInt64("num_scan_inputs", scanned)]
    if "directions" in node.attributes:
        directions = node.attributes["directions"].as_ints()
        attributes.append(ir.AttrInt64s("scan_input_directions", directions))
    given = [value for value in node.inputs if value is not None]
    inputs = [_row(value, names.fresh(f"{node.name}/{i}")) for i, value in enumerate(given)]
    name = names.fresh(f"{node.name}/time")
    inner = ir.Node("", "Scan", inputs, attributes, num_outputs=len(node.outputs), name=name)
    for made, old in zip(inner.outputs, node.outputs, strict=True):
        made.name, made.type = names.fresh(f"{node.name}/{old.name}"), old.type
    row = ir.Graph(inputs, inner.outputs, nodes=[inner], opset_imports={"": opset}, name="row")
    outer = ir.Node(
        "",
        "Scan",
        given,
        [ir.AttrGraph("body", row), ir.AttrInt64("num_scan_inputs", len(given))],
        num_outputs=len(node.outputs),
        name=node.name,
    )
    assert node.graph is not None
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], [outer], node.outputs, outer.outputs)


def _row(value: ir.Value, name: str) -> ir.Value:
    """Return an input of the given name with the type and shape of `value` without the batch axis."""
    shape = None if value.shape is None else ir.Shape(list(value.shape)[1:])
    return ir.Value(name=name, type=value.type, shape=shape)
