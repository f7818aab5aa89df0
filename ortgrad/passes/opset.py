"""Converts older models to the minimum opset that bodies and rules are written for."""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx import version_converter

from ortgrad.autodiff.defined_nodes import put_definition
from ortgrad.autodiff.definitions import RETIRED, find_definition
from ortgrad.errors import ModelError, NodeError
from ortgrad.graph.gradient_nodes import put_in_place
from ortgrad.graph.names import Names
from ortgrad.graph.old_scans import hide_old_scans, restore_scans
from ortgrad.graph.recorder import MINIMUM_OPSET, Recorder
from ortgrad.graph.schema_functions import unchanged
from ortgrad.graph.serialization import refill, to_proto
from ortgrad.graph.traversal import all_nodes, is_operator
from ortgrad.operators.schema import with_schemas
from ortgrad.passes.inline import inline
from ortgrad.shapes.inference import infer_types, without_weights

_HIDDEN = "ortgrad.unknown"
# The last opset in which onnxruntime knows the operators of `ops/retired`.
_LAST_RETIRED = 9


def at_minimum_opset(model: ir.Model) -> ir.Model:
    """Convert the model with onnx's version converter if its opset is too old."""
    version = model.opset_imports.setdefault("", MINIMUM_OPSET)
    if version >= MINIMUM_OPSET:
        return model
    # The converter drops functions, so they are inlined before.
    inline(model, lambda _: True)
    unknown = _unknown(model, version)
    if not unknown and unchanged(model.graph, version, MINIMUM_OPSET):
        model.opset_imports[""] = MINIMUM_OPSET
        return model
    roundings = _roundings(model) if version <= 10 else {}
    if version < 13:
        _flatten_hardmax(model)
    for node in unknown:
        node.domain = _HIDDEN
        model.opset_imports[_HIDDEN] = 1
    _convert(model, version)
    if unknown:
        _restore_unknown(model, version)
    for node in all_nodes(model.graph):
        rounding = roundings.get(node.outputs[0].name or "")
        if node.op_type == "Resize" and rounding is not None:
            # The converter leaves these at the defaults, which differ from the old operators.
            node.attributes.add(ir.AttrString("coordinate_transformation_mode", "asymmetric"))
            node.attributes.add(ir.AttrString("nearest_mode", rounding))
    infer_types(model)
    return model


def _convert(model: ir.Model, version: int) -> None:
    """Convert the model with onnx, without its large weights, which onnx would copy several times."""
    try:
        scans = hide_old_scans(model, MINIMUM_OPSET) if version == 8 else {}
        order = list(model.graph.initializers)
        with without_weights(model) as weights:
            light = to_proto(model)
        converted = with_schemas(version_converter.convert_version, light, MINIMUM_OPSET)
    except (RuntimeError, version_converter.ConvertError) as error:
        raise ModelError(
            f"the model has opset {version}, ortgrad needs {MINIMUM_OPSET}, and onnx's converter "
            f"cannot convert it: {error}"
        ) from error
    refill(model, converted)
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    for weight in weights:
        value = inputs[weight.name]
        value.const_value = weight.const_value
        if not weight.is_graph_input():
            graph.inputs.remove(value)
        graph.register_initializer(value)
    # The default of `wrt` is the parameters in the order of the file.
    found = dict(graph.initializers)
    graph.initializers.clear()
    for name in (*(name for name in order if name in found), *(name for name in found if name not in order)):
        graph.initializers[name] = found[name]
    restore_scans(model, scans)


def _unknown(model: ir.Model, version: int) -> list[ir.Node]:
    """Return the nodes of operators that onnxruntime adds to ONNX's domain; the converter refuses them.

    These are SimplifiedLayerNormalization, LayerNormalization before opset 17, and ThresholdedRelu before
    opset 10, which have one version; and those that have definitions (`ops/retired`). They are in another
    domain meanwhile.
    """
    return [
        node
        for node in all_nodes(model.graph)
        if node.domain == "" and not onnx.defs.has(node.op_type, version)
    ]


def _restore_unknown(model: ir.Model, version: int) -> None:
    """Move the hidden operators back; put the definitions of those that onnxruntime knew before in place."""
    del model.opset_imports[_HIDDEN]
    names = Names.of(model)
    for node in [node for node in all_nodes(model.graph) if node.domain == _HIDDEN]:
        node.domain = ""
        if version > _LAST_RETIRED or find_definition(node.op_type, RETIRED) is None:
            continue
        node.domain = RETIRED
        try:
            put_definition(node, MINIMUM_OPSET, names)
        except NodeError as error:
            raise ModelError(f"{node.op_type} node {node.name or node.outputs[0].name!r}: {error}") from error


def _flatten_hardmax(model: ir.Model) -> None:
    """Rewrite Hardmax, which flattened X to a matrix before opset 13, so that it means the same today.

    The converter does this for Softmax and LogSoftmax, but not for Hardmax.
    """
    opset, names = model.opset_imports[""], Names.later(model)
    for node in list(all_nodes(model.graph)):
        if is_operator(node, "Hardmax"):
            op, x = Recorder(opset, names, node.name or f"{node.outputs[0].name}"), node.inputs[0]
            flat = op.Flatten(x, axis=node.attributes.get_int("axis", 1))
            put_in_place(node, [], op, [op.Reshape(op.Hardmax(flat, axis=1), op.Shape(x))])


def _roundings(model: ir.Model) -> dict[str, str]:
    """Return by output the nearest_mode of Upsample and of Resize-10, which rounds up when it shrinks X."""
    roundings = {}
    for node in all_nodes(model.graph):
        rounding = "floor"
        if node.op_type not in ("Upsample", "Resize"):
            continue
        if node.op_type == "Resize" and node.attributes.get_string("mode", "nearest") == "nearest":
            value = node.inputs[1]
            tensor = None if value is None else ir.convenience.get_const_tensor(value)
            scales = None if tensor is None else tensor.numpy()
            if scales is None or ((scales < 1).any() and (scales > 1).any()):
                raise ModelError(
                    f"Resize node {node.name!r} of opset 10 rounds up along axes that it shrinks and down "
                    "along others, and its scales are not constant or do both; convert the model to opset 11"
                )
            rounding = "ceil" if (scales < 1).any() else "floor"
        roundings[node.outputs[0].name or ""] = rounding
    return roundings
