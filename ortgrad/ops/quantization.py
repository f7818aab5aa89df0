"""Straight-through gradients of quantized operators.

The gradient of a quantized tensor is a float tensor in units of its integers q, which stand for (q - z) * s:

    DequantizeLinear  y = (q - z) * s             dq = dy * s,  ds = sum(dy * (q - z))
    QuantizeLinear    q = clip(round(x / s) + z)  dx = dq / s,  ds = -sum(dq * x / s**2), if not clipped

Together they give the gradients of PyTorch's fake quantization: dx = dy inside the range and 0 outside, and
the gradient of the scale as in torch._fake_quantize_learnable_per_tensor_affine. Zero points are integers and
have no gradient. Scales and zero points of dynamic quantization count as constants.

All other operators are differentiated through their definition: dequantize, apply the operator of ONNX that
they are named after, quantize. The forward node stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from ortgrad.autodiff.rules import ForwardNode, Gradients, RuleFunction, gradient
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.declaration import DOMAIN
from ortgrad.operators.schema import add_forward_inference
from ortgrad.ops._quantized import dequantized
from ortgrad.ops._types import cast_like

_RANGES = {
    f"{sign}INT{bits}": (0, 2**bits - 1) if sign else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for bits in (2, 4, 8, 16)
    for sign in ("", "U")
}


class _Grid:
    """The scale of a tensor: one for all elements, for each index along an axis, or for each block."""

    def __init__(self, node: ForwardNode) -> None:
        self.node, self.op, self.scale = node, node.op, node.input(1)
        rank = node.rank(1)
        assert self.scale.shape is not None
        self.block = bool(node.attribute("block_size"))
        self.one = not self.block and _is_one(self.scale)
        axis = node.attribute("axis")
        self.axis = 1 if axis is None else axis
        if self.axis >= 0 and not self.one:
            self.axis -= node.rank(0)
        if not (self.one or self.block or (rank == 1 and self.scale.shape.is_static())):
            raise node.unsupported(
                f"its scale {self.scale.name!r} of shape {self.scale.shape} is neither one number nor a "
                "known number of them; declare its shape"
            )

    def spread(self, value: ir.Value) -> ir.Value:
        """Return a scale or zero point in a shape that broadcasts to that of the tensor."""
        op = self.op
        if self.block:
            return op.Gather(value, self._blocks(), axis=self.axis)
        if self.one:
            return op.Reshape(value, []) if self.node.rank(1) else value
        behind = -1 - self.axis
        return op.Unsqueeze(value, list(range(1, 1 + behind))) if behind else value

    def collect(self, grad: ir.Value) -> ir.Value:
        """Return the gradient of the scale, given the gradient of the scale spread over the tensor."""
        op = self.op
        if self.block:
            return op.GatherGrad(
                op.shape_of(self.scale), self._blocks(), grad, axis=self.axis + self.node.rank()
            )
        if self.one:
            return op.Reshape(op.ReduceSum(grad, keepdims=0), op.shape_of(self.scale))
        rank = self.node.rank()
        others = [i for i in range(rank) if i != self.axis + rank]
        return op.ReduceSum(grad, others, keepdims=0) if others else grad

    def _blocks(self) -> ir.Value:
        """Return the number of the block for each index along the axis."""
        op, size = self.op, self.node.attribute("block_size")
        axis = self.axis + self.node.rank()
        length = op.Reshape(op.Shape(self.node.input(0), start=axis, end=axis + 1), [])
        return op.Range(0, length, 1) / size


@gradient("DequantizeLinear", scales={0: 1})
@gradient("DequantizeLinear", domain=DOMAIN, scales={0: 1})
def dequantize_linear_gradient(node: ForwardNode) -> Gradients:
    op, q, scale, grid = node.op, node.input(0), node.input(1), _Grid(node)
    dy = cast_like(op, node.grad(0), scale)
    if node.wants(0):
        _range_of(node, q)
    dq = dy * grid.spread(scale)
    if not node.wants(1):
        return [dq]
    settings = {k: node.attribute(k) for k in ("axis", "block_size") if k in node.attributes}
    ones, domain = op.full_like(scale, 1.0), node.forward.domain
    centred = op.DequantizeLinear(q, ones, node.optional(2), _domain=domain, **settings)
    centred.type, centred.shape = scale.type, q.shape
    return dq, grid.collect(dy * centred)


@gradient("QuantizeLinear", scales={-1: 1}, straight_through=True)
@gradient("QuantizeLinear", domain=DOMAIN, scales={-1: 1}, straight_through=True)
def quantize_linear_gradient(node: ForwardNode) -> Gradients:
    op, scale, grid = node.op, node.input(1), _Grid(node)
    step, (low, high) = grid.spread(scale), _range_of(node, node.output(0))
    zero = node.optional(2)
    shift = None if zero is None else grid.spread(cast_like(op, zero, scale))
    ratio = cast_like(op, node.input(0), scale) / step
    dx = _inside(op, ratio, shift, low, high, cast_like(op, node.grad(0), scale) / step)
    return dx, grid.collect(-(dx * ratio)) if node.wants(1) else None


@gradient("DynamicQuantizeLinear", scales={}, straight_through=True)
def dynamic_quantize_linear_gradient(node: ForwardNode) -> ir.Value:
    op, x = node.op, node.input(0)
    scale, zero = node.add_output(1), node.add_output(2)
    shift = op.Cast(zero, to=onnx.TensorProto.FLOAT)
    return _inside(op, x / scale, shift, 0, 255, node.grad(0) / scale)


def _inside(
    op: Recorder, ratio: ir.Value, shift: ir.Value | None, low: int, high: int, grad: ir.Value
) -> ir.Value:
    """Return the gradient where the rounded ratio is in the range, and 0 elsewhere."""
    integer = op.Round(ratio) if shift is None else op.Round(ratio) + shift
    kept = op.And(op.GreaterOrEqual(integer, float(low)), op.LessOrEqual(integer, float(high)))
    return op.Where(kept, grad, 0.0)


def _range_of(node: ForwardNode, q: ir.Value) -> tuple[int, int]:
    """Return the range of a quantized tensor's elements; it is an error if they are not integers."""
    zero = node.optional(2)
    dtype = q.dtype or (None if zero is None else zero.dtype)
    name = "UINT8" if dtype is None else dtype.name
    if name not in _RANGES and name != "INT32":
        raise node.unsupported(
            f"there is no straight-through gradient for the element type {name.lower()} of {q.name!r}; "
            "quantize to integers"
        )
    return _RANGES.get(name, (-(2**31), 2**31 - 1))


@dataclass(frozen=True)
class _Definition:
    """An operator of ONNX on quantized tensors.

    `operands` has the indices of the inputs with each operand, its scale and its zero point, `result` those
    with the output's scale and zero point, if it is quantized. `bias` is an integer in units of the product
    of the operands' scales, or a float. If `repeated`, there is any number of operands, all like the one that
    is given. The operator reads the inputs in `others` as they are, before the operands.
    """

    operator: str
    operands: tuple[tuple[int, int | None, int | None], ...]
    result: tuple[int, int] | None = None
    bias: int | None = None
    dynamic: bool = False
    repeated: bool = False
    others: tuple[int, ...] = ()

    def operands_of(self, count: int) -> tuple[tuple[int, int | None, int | None], ...]:
        """Return the operands of a node with `count` inputs."""
        if self.repeated:
            return tuple((i, i + 1, i + 2) for i in range(self.operands[0][0], count, 3))
        return tuple(indices for indices in self.operands if indices[0] < count)

    def scales(self, count: int) -> dict[int, int]:
        """Return the index of the scale of each quantized input, and of the output as -1."""
        found = {value: scale for value, scale, _ in self.operands_of(count) if scale is not None}
        return found if self.result is None else {**found, -1: self.result[0]}


_TWO = ((0, 1, 2), (3, 4, 5))
_ONE = ((0, 1, 2),)
_CONV = _Definition("Conv", _TWO, (6, 7), bias=8)
_STANDARD = {
    "QLinearConv": _CONV,
    "QLinearMatMul": _Definition("MatMul", _TWO, (6, 7)),
    "ConvInteger": _Definition("Conv", ((0, None, 2), (1, None, 3))),
    "MatMulInteger": _Definition("MatMul", ((0, None, 2), (1, None, 3))),
}
_MICROSOFT = {
    "QLinearConv": _CONV,
    "QLinearAdd": _Definition("Add", _TWO, (6, 7)),
    "QLinearMul": _Definition("Mul", _TWO, (6, 7)),
    "QLinearLeakyRelu": _Definition("LeakyRelu", _ONE, (3, 4)),
    "QLinearSigmoid": _Definition("Sigmoid", _ONE, (3, 4)),
    "QLinearSoftmax": _Definition("Softmax", _ONE, (3, 4)),
    "QLinearAveragePool": _Definition("AveragePool", _ONE, (3, 4)),
    "QLinearGlobalAveragePool": _Definition("GlobalAveragePool", _ONE, (3, 4)),
    "QLinearConcat": _Definition("Concat", ((2, 3, 4),), (0, 1), repeated=True),
    "QLinearWhere": _Definition("Where", ((1, 2, 3), (4, 5, 6)), (7, 8), others=(0,)),
    "QGemm": _Definition("Gemm", _TWO, (7, 8), bias=6),
    "MatMulIntegerToFloat": _Definition("MatMul", ((0, 2, 4), (1, 3, 5)), bias=6),
    "DynamicQuantizeMatMul": _Definition("MatMul", ((0, None, None), (1, 2, 3)), bias=4, dynamic=True),
}


# More than an operator has inputs, unless they are repeated.
_ALL = 100


def _rule(definition: _Definition) -> RuleFunction:
    def gradient_through_definition(node: ForwardNode) -> Gradients:
        from ortgrad.autodiff.backward import differentiate  # imports onnx-ir, which takes a while

        return differentiate(node, [_Floats(node, definition).result()])

    return gradient_through_definition


class _Floats:
    """Records the definition of a quantized node."""

    def __init__(self, node: ForwardNode, definition: _Definition) -> None:
        self.node, self.op, self.definition = node, node.op, definition
        self.channels_last = bool(node.attribute("channels_last"))

    def result(self) -> ir.Value:
        """Return the output, or a tensor of the same values."""
        node, op, definition = self.node, self.op, self.definition
        present = definition.operands_of(len(node.inputs))
        operands = [self._operand(position, *indices) for position, indices in enumerate(present)]
        y = self._apply(operands)
        if definition.result is None:
            return y
        scale, zero = (node.optional(i) for i in definition.result)
        if scale is None:
            # QGemm without a scale of the output returns floats.
            return y
        if node.rank(definition.result[0]) and not _is_one(scale):
            raise node.unsupported(f"the scale {scale.name!r} of its output is not a scalar")
        q: ir.Value = op.QuantizeLinear(y, scale, zero)
        q.type, q.shape = node.output(0).type, node.output(0).shape
        return q

    def _apply(self, operands: list[ir.Value]) -> ir.Value:
        """Return the float operator applied to the operands."""
        node, op, operator = self.node, self.op, self.definition.operator
        known = onnx.defs.get_schema(operator).attributes
        settings: dict[str, Any] = {k: v for k, v in node.attributes.items() if k in known}
        record, like, shape = getattr(op, operator), operands[-1], node.output(0).shape
        bias = self._bias()
        if operator == "Softmax" and node.attribute("opset") < 13:
            # All axes from `axis` on are one.
            x = operands[0]
            flat = op.Softmax(op.Flatten(x, axis=settings.get("axis", -1)), axis=1)
            y = op.Reshape(flat, op.shape_of(x), allowzero=1)
        elif self.channels_last:
            y = self._channels_last(operands, bias, settings)
        elif bias is not None and operator != "MatMul":
            y = record(*operands, bias, **settings)
        else:
            y = record(*(node.input(i) for i in self.definition.others), *operands, **settings)
        y.type, y.shape = like.type, shape
        if bias is not None and operator == "MatMul":
            y = op.Add(y, bias)
            y.type, y.shape = like.type, shape
        return y

    def _channels_last(
        self, operands: list[ir.Value], bias: ir.Value | None, settings: dict[str, Any]
    ) -> ir.Value:
        op, x, rank = self.op, operands[0], self.node.rank()
        first, last = [0, rank - 1, *range(1, rank - 1)], [0, *range(2, rank), 1]
        turned = op.Transpose(x, perm=first)
        shape = self.node.input(0).shape
        assert shape is not None  # it has a rank
        turned.type, turned.shape = x.type, ir.Shape([shape[i] for i in first])
        rest = [*operands[1:], *([] if bias is None else [bias])]
        y = getattr(op, self.definition.operator)(turned, *rest, **settings)
        y.type, y.shape = x.type, ir.Shape([None] * rank)
        return op.Transpose(y, perm=last)

    def _operand(self, position: int, value: int, scale: int | None, zero: int | None) -> ir.Value:
        """Return an operand as floats."""
        node, op, q = self.node, self.op, self.node.input(value)
        if self.definition.dynamic and position == 0:
            return self._dynamically(q)
        z = None if zero is None else node.optional(zero)
        s = node.input(scale) if scale is not None else op.constant(np.array(1.0, np.float32))
        return self._dequantized(q, s, z, self._axis(position))

    def _dequantized(self, q: ir.Value, scale: ir.Value, zero: ir.Value | None, axis: int | None) -> ir.Value:
        """Return (q - zero) * scale, with scales and zero points along an axis."""
        shift = None if zero is None else self._along(zero, q, axis)
        return dequantized(self.op, q, self._along(scale, q, axis), shift, like=scale)

    def _along(self, value: ir.Value, q: ir.Value, axis: int | None) -> ir.Value:
        """Return a scale or zero point in a shape that broadcasts to that of the tensor."""
        if _is_one(value):
            return value
        if value.shape is None or axis is None or len(value.shape) != 1 or (axis >= 0 and q.shape is None):
            raise self.node.unsupported(
                f"the shape {value.shape} of {value.name!r}, a scale or zero point of {q.name!r}, is neither "
                "known to be that of one number nor one number for each channel"
            )
        behind = -1 - axis if axis < 0 else len(q.shape or ()) - 1 - axis
        if not behind:
            return value
        spread: ir.Value = self.op.Unsqueeze(value, list(range(1, 1 + behind)))
        spread.shape = ir.Shape([*value.shape, *[1] * behind])
        return spread

    def _dynamically(self, x: ir.Value) -> ir.Value:
        """Return floats as dynamic quantization rounds them."""
        op = self.op
        q, scale, zero = op.DynamicQuantizeLinear(x, _outputs=3)
        number = op.constant(np.array(0, np.uint8))
        q.type = zero.type = number.type
        q.shape, scale.type, scale.shape, zero.shape = x.shape, x.type, number.shape, number.shape
        return self._dequantized(q, scale, zero, None)

    def _axis(self, position: int) -> int | None:
        """Return the axis along which an operand may have several scales."""
        if self.definition.operator == "Conv":
            return 0 if position == 1 else None
        if self.definition.operator == "MatMul":
            return -1 if position == 1 else -2
        if self.definition.operator == "Gemm":
            turned = bool(self.node.attribute("transB" if position == 1 else "transA"))
            return int(turned != (position == 1))
        return None

    def _bias(self) -> ir.Value | None:
        node, op, definition = self.node, self.op, self.definition
        bias = None if definition.bias is None else node.optional(definition.bias)
        if bias is None or definition.result is None:
            return bias
        scales = definition.scales(len(node.inputs))
        a, b = (node.input(scales[value]) for value, _, _ in definition.operands)
        unit = op.Mul(a, b)
        # Where one of them is a number, the product has the shape of the other.
        unit.type, unit.shape = b.type, b.shape if _is_one(a) and b.shape else a.shape
        alpha = node.attribute("alpha")
        if alpha not in (None, 1.0):
            shape, unit = unit.shape, unit * float(alpha)
            unit.type, unit.shape = b.type, shape
        return self._dequantized(bias, unit, None, -1)


def _is_one(scale: ir.Value) -> bool:
    """Return whether there is one scale for all elements."""
    return scale.shape is not None and (not len(scale.shape) or scale.shape == [1])


def _infer(definition: _Definition, context: onnx.shape_inference.InferenceContext) -> None:
    """Infer the output of a node of com.microsoft, which onnx does not know, from the operator of ONNX."""
    count = context.get_num_inputs()
    given = [context.get_input_type(i) if context.has_input(i) else None for i in range(count)]
    element: int = onnx.TensorProto.FLOAT
    if definition.result is not None:
        scale, zero = (given[i] if i < count else None for i in definition.result)
        if scale is not None:
            element = onnx.TensorProto.UINT8 if zero is None else zero.tensor_type.elem_type
    read = [*definition.others, *(value for value, _, _ in definition.operands_of(count))]
    operands = [given[i] for i in read]
    context.set_output_type(0, _output_type(definition.operator, operands, context, element))


def _output_type(
    operator: str,
    operands: Sequence[onnx.TypeProto | None],
    context: onnx.shape_inference.InferenceContext,
    element: int,
) -> onnx.TypeProto:
    """Return the type of an operator's output for operands of these shapes, with other elements."""
    found = onnx.helper.make_tensor_type_proto(element, None)
    if any(o is None or not o.tensor_type.HasField("shape") for o in operands):
        return found
    last = context.get_attribute("channels_last")
    if last is not None and last.i and operands[0] is not None:
        # The lengths are not needed, but the rank is.
        found.tensor_type.shape.CopyFrom(onnx.TensorShapeProto())
        for _ in operands[0].tensor_type.shape.dim:
            found.tensor_type.shape.dim.add()
        return found
    types = {}
    for i, operand in enumerate(operands):
        types[f"x{i}"] = copied = onnx.TypeProto()
        copied.CopyFrom(operand)
        if copied.tensor_type.elem_type != onnx.TensorProto.BOOL:
            copied.tensor_type.elem_type = onnx.TensorProto.FLOAT
    schema = onnx.defs.get_schema(operator)
    node = onnx.helper.make_node(operator, list(types), ["y"])
    node.attribute.extend(a for name in schema.attributes if (a := context.get_attribute(name)) is not None)
    inferred = onnx.shape_inference.infer_node_outputs(schema, node, types).get("y")
    if inferred is not None and inferred.tensor_type.HasField("shape"):
        found.tensor_type.shape.CopyFrom(inferred.tensor_type.shape)
    return found


def _infer_quantized(context: onnx.shape_inference.InferenceContext) -> None:
    _infer(_Definition("Identity", ((0, 1, 2),), (1, 2)), context)


def _infer_dequantized(context: onnx.shape_inference.InferenceContext) -> None:
    given, scale = context.get_input_type(0), context.get_input_type(1)
    element = onnx.TensorProto.FLOAT if scale is None else scale.tensor_type.elem_type
    context.set_output_type(0, _output_type("Identity", [given], context, element))


for _domain, _table in (("", _STANDARD), (DOMAIN, _MICROSOFT)):
    for _name, _definition in _table.items():
        gradient(
            _name,
            domain=_domain,
            scales=_definition.scales if _definition.repeated else _definition.scales(_ALL),
            straight_through=_definition.result is not None or _definition.dynamic,
        )(_rule(_definition))
        if _domain:
            add_forward_inference(_name, functools.partial(_infer, _definition))
add_forward_inference("QuantizeLinear", _infer_quantized)
add_forward_inference("DequantizeLinear", _infer_dequantized)
