"""Replaces convolutions whose weights are not constant by an operator with a compiled kernel.

onnxruntime's fastest kernels for convolutions need constant weights. An Add and an activation that
onnxruntime would have merged with the convolution become part of the operator as well.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from ortgrad.graph.names import Names
from ortgrad.graph.outputs import replace_node
from ortgrad.graph.patterns import Match, Operators, Pattern, Term
from ortgrad.graph.traversal import all_nodes, sizes_of
from ortgrad.lowering.constants import constant_values, is_dequantized
from ortgrad.lowering.fusion.fusable import known_shape, read_constant
from ortgrad.lowering.internal_operators import KERNEL_TYPES, become
from ortgrad.operators.declaration import INTERNAL_DOMAIN, Operator
from ortgrad.ops.conv import winograd
from ortgrad.ops.conv.forward import ACTIVATIONS, dense_conv, is_fastest
from ortgrad.ops.conv.winograd import winograd_conv


def _convolution(op: Operators, x: Term, w: Term, b: Term, z: Term, low: Term, high: Term) -> Term:
    y = op.Conv(x, w, op.either(b, None))
    total = op.either(op.Add(y, z), y)
    return op.either(op.one_of(*ACTIVATIONS)(total, op.either(low, None), op.either(high, None)), total)


_CONVOLUTION = Pattern(_convolution)


def use_forward_convolutions(model: ir.Model) -> ir.Model:
    """Replace the nodes of Conv for which the compiled kernel was measured to be faster."""
    names = Names.later(model)
    constant = constant_values(model)
    # Backwards, so that as much as possible is merged with a convolution.
    for match in _CONVOLUTION.find(reversed(list(all_nodes(model.graph)))):
        if match.values["w"] not in constant and _is_merged(match) and _is_faster(match.node("Conv")):
            _replace(model, match, names)
    return model


def _is_merged(match: Match) -> bool:
    """Return whether the kernel also computes what follows the convolution."""
    z, y = match.values.get("z"), match.node("Conv").outputs[0]
    shape = known_shape(y)
    fits = z is None or (shape is not None and known_shape(z) == shape)
    return fits and match.is_private and _activation(match.root) is not None


def _is_faster(node: ir.Node) -> bool:
    x, w = node.inputs[0], node.inputs[1]
    if x is None or w is None or w.shape is None or w.dtype not in KERNEL_TYPES or is_dequantized(w):
        return False
    strides = node.attributes.get_ints("strides")
    # onnxruntime has no kernel for numbers in double precision.
    return w.dtype == ir.DataType.DOUBLE or is_fastest(
        sizes_of(x), sizes_of(w), node.attributes.get_int("group", 1), strides
    )


def _replace(model: ir.Model, match: Match, names: Names) -> None:
    """Replace a convolution, and what is merged with it."""
    node, last = match.node("Conv"), match.root
    operator, result = _operator(node), last.outputs[0]
    attributes = [*node.attributes.values(), *(_activation(last) or ())]
    inputs = [match.values.get(name) for name in ("x", "w", "b", "z")]
    new = ir.Node(INTERNAL_DOMAIN, operator.name, inputs, attributes, name=node.name)
    replace_node(last, [new], [(result, new.outputs[0])])
    match.remove_unread()
    become(model, new, operator, names)


def _operator(node: ir.Node) -> Operator:
    """Return the operator that replaces a convolution."""
    x, w = node.inputs[0], node.inputs[1]
    assert x is not None and w is not None
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    return winograd_conv if winograd.is_fastest(sizes_of(x), sizes_of(w), attributes) else dense_conv


def _activation(node: ir.Node) -> list[ir.Attr] | None:
    """Return the attributes for an activation, none for other nodes; None if it is not supported."""
    if node.op_type not in ACTIVATIONS:
        return []
    numbers = {"alpha": node.attributes.get_float("alpha", 0.01) if node.op_type == "LeakyRelu" else 0.0}
    if node.op_type == "Clip":
        found = [read_constant(value) for value in node.inputs[1:]]
        bounds = [bound.number for bound in found if bound is not None and math.isfinite(bound.number)]
        if len(bounds) != 2:
            return None
        numbers = {"alpha": bounds[0], "beta": bounds[1]}
    kind = ir.AttrString("activation", node.op_type)
    return [kind, *(ir.AttrFloat32(name, value) for name, value in numbers.items())]
