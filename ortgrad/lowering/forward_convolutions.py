"""Replaces convolutions whose weights are not constant by an operator with a compiled kernel.

onnxruntime's fastest kernels for convolutions need constant weights. An Add and an activation that
onnxruntime would have merged with the convolution become part of the operator as well.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from ortgrad.graph.names import Names
from ortgrad.graph.outputs import replace_values
from ortgrad.graph.traversal import only_reader
from ortgrad.lowering.constants import constant_values, is_dequantized
from ortgrad.lowering.fusion.fusable import known_shape, read_constant
from ortgrad.lowering.internal_operators import KERNEL_TYPES, become, sizes_of
from ortgrad.operators.declaration import INTERNAL_DOMAIN, Operator
from ortgrad.ops.conv import winograd
from ortgrad.ops.conv.forward import ACTIVATIONS, dense_conv, is_fastest
from ortgrad.ops.conv.winograd import winograd_conv


def use_forward_convolutions(model: ir.Model) -> ir.Model:
    """Replace the nodes of Conv for which the compiled kernel was measured to be faster."""
    names: Names | None = None
    constant = constant_values(model)
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        is_conv = (node.domain, node.op_type) == ("", "Conv")
        if is_conv and node.inputs[1] not in constant and _is_faster(node):
            names = names or Names.of(model)
            _replace(model, node, names)
    return model


def _is_faster(node: ir.Node) -> bool:
    x, w = node.inputs[0], node.inputs[1]
    if x is None or w is None or w.shape is None or w.dtype not in KERNEL_TYPES or is_dequantized(w):
        return False
    strides = node.attributes.get_ints("strides")
    # onnxruntime has no kernel for numbers in double precision.
    return w.dtype == ir.DataType.DOUBLE or is_fastest(
        sizes_of(x), sizes_of(w), node.attributes.get_int("group", 1), strides
    )


def _replace(model: ir.Model, node: ir.Node, names: Names) -> None:
    """Replace a convolution, and what is merged with it."""
    old, last, z = node.outputs[0], node, None
    total = _next(node)
    if total is not None and total.op_type == "Add":
        z = next((value for value in total.inputs if value is not old), None)
        shape = known_shape(old)
        if z is not None and shape is not None and known_shape(z) == shape:
            last = total
        else:
            z = None
    attributes = dict(node.attributes)
    user = _next(last)
    activation = {} if user is None else _activation(user)
    if user is not None and activation:
        last = user
        attributes |= {
            "activation": ir.AttrString("activation", user.op_type),
            **{name: ir.AttrFloat32(name, value) for name, value in activation.items()},
        }
    inputs = [*node.inputs, None][:3]
    graph, result = last.graph, last.outputs[0]
    assert graph is not None
    operator = _operator(node)
    new = ir.Node(INTERNAL_DOMAIN, operator.name, [*inputs, z], attributes.values(), name=node.name)
    output = new.outputs[0]
    output.name, output.type, output.shape = result.name, result.type, result.shape
    graph.insert_after(last, new)
    replace_values([result], [output])
    merged = [user if activation else None, total if z is not None else None, node]
    graph.remove([each for each in merged if each is not None], safe=True)
    become(model, new, operator, names)


def _operator(node: ir.Node) -> Operator:
    """Return the operator that replaces a convolution."""
    x, w = node.inputs[0], node.inputs[1]
    assert x is not None and w is not None
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    return winograd_conv if winograd.is_fastest(sizes_of(x), sizes_of(w), attributes) else dense_conv


def _activation(node: ir.Node) -> dict[str, float]:
    """Return the numbers of an activation; an empty dict if the node is none that can be merged."""
    if node.op_type not in ACTIVATIONS or node.domain not in ("", "ai.onnx"):
        return {}
    if node.op_type == "Clip":
        found = [read_constant(value) for value in node.inputs[1:]]
        bounds = [bound.number for bound in found if bound is not None and math.isfinite(bound.number)]
        return {"alpha": bounds[0], "beta": bounds[1]} if len(bounds) == 2 else {}
    return {"alpha": node.attributes.get_float("alpha", 0.01) if node.op_type == "LeakyRelu" else 0.0}


def _next(node: ir.Node) -> ir.Node | None:
    """Return the node of the same graph that alone reads the result."""
    user = only_reader(node.outputs[0])
    return user if user is not None and user.graph is node.graph else None
