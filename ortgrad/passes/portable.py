"""Writes gradient nodes in a form that onnxruntime-training 1.19.2 runs as well."""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.graph.bodies import make_function
from ortgrad.graph.gradient_nodes import call_of, gradient_nodes
from ortgrad.graph.portable_calls import portable_identifier
from ortgrad.graph.traversal import sizes_of
from ortgrad.operators.call import Call
from ortgrad.operators.declaration import CALL_ATTRIBUTE
from ortgrad.passes.complete import remove_empty_tensors

# Operators for which 1.19.2 has kernels for float32 that compute the right gradients.
_KNOWN = frozenset(
    [
        "BatchNormalizationGrad",
        "BiasGeluGrad_dX",
        "ConvGrad",
        "DropoutGrad",
        "FastGeluGrad",
        "GatherElementsGrad",
        "GatherGrad",
        "GatherNDGrad",
        "GeluGrad",
        "LayerNormalizationGrad",
        "LeakyReluGrad",
        "LogSoftmaxGrad_13",
        "QuickGeluGrad",
        "ReluGrad",
        "SigmoidGrad",
        "SimplifiedLayerNormalizationGrad",
        "SoftmaxCrossEntropyLossGrad",
        "SoftmaxGrad_13",
        "TanhGrad",
    ]
)
# Of these, nodes may leave out outputs.
_OPTIONAL_OUTPUTS = frozenset(["ConvGrad"])
_TYPES = (ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)


def make_portable(model: ir.Model) -> ir.Model:
    """Reduce complete nodes that 1.19.2 knows to its form; make the others calls of functions."""
    for node, operator in gradient_nodes(model):
        if CALL_ATTRIBUTE not in node.attributes:
            continue
        call = call_of(node, operator)
        if _is_known(node, call):
            _reduce(node, call)
        elif operator.body is not None:
            function = make_function(call, node.inputs, model.opset_imports[""])
            domain, name = portable_identifier(operator, function.overload)
            function.domain, function.name, function.overload = domain, name, ""
            model.functions.setdefault(function.identifier(), function)
            model.opset_imports.setdefault(domain, 1)
            node.domain, node.op_type, node.version, node.overload = domain, name, None, ""
    remove_empty_tensors(model)
    return model


def _is_known(node: ir.Node, call: Call) -> bool:
    if call.operator.name not in _KNOWN or call.attributes.get("auto_pad") not in (None, "NOTSET"):
        return False
    if call.operator.name == "ConvGrad" and not _has_kernel_size(node):
        # The call knows more about the kernel than a node without it.
        return False
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    return all(value.dtype in _TYPES for value in values if value.dtype is not None)


def _has_kernel_size(node: ir.Node) -> bool:
    sizes = sizes_of(node.inputs[2])
    return "kernel_shape" in node.attributes or (sizes is not None and None not in sizes[2:])


def _reduce(node: ir.Node, call: Call) -> None:
    """Remove what onnxruntime-training does not write: the call, and names of what is absent."""
    del node.attributes[CALL_ATTRIBUTE]
    for i, real in enumerate(call.present):
        if not real:
            node.replace_input_with(i, None)
    for value, wanted in zip(node.outputs, call.wanted, strict=True):
        if not wanted:
            value.type = value.shape = None
            if call.operator.name in _OPTIONAL_OUTPUTS:
                value.name = ""
    while node.inputs and node.inputs[-1] is None:
        node.resize_inputs(len(node.inputs) - 1)
    while len(node.outputs) > 1 and not node.outputs[-1].name:
        node.resize_outputs(len(node.outputs) - 1)
