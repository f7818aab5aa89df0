"""Which nodes can be part of a fused node, and what they compute there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ortgrad.graph.gradient_nodes import call_of
from ortgrad.graph.traversal import constant_number, constant_tensor, dimensions, is_operator, is_standard
from ortgrad.lowering.fusion.expressions import TABLE, Expression, find_expression, own_kernel
from ortgrad.lowering.fusion.program import Constant
from ortgrad.operators.declaration import CALL_ATTRIBUTE, DOMAIN, find_operator

ELEMENTS = {ir.DataType.FLOAT: "float32", ir.DataType.DOUBLE: "float64"}
_DEFAULTS: dict[str, dict[str, float]] = {
    "LeakyRelu": {"alpha": 0.01},
    "ThresholdedRelu": {"alpha": 1.0},
    "Elu": {"alpha": 1.0},
    "Celu": {"alpha": 1.0},
    "Selu": {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875},
    "HardSigmoid": {"alpha": 0.2, "beta": 0.5},
    "Swish": {"alpha": 1.0},
}
# Operators of onnxruntime that are in the table under another name.
_CONTRIBUTED = {"Gelu": "Gelu", "QuickGelu": "Swish"}
# Names in the table that no operator of ONNX has, or that stand for only some of its nodes.
_INTERNAL = frozenset({"Square", "Cube", "TanhGelu", "ToFloat", "ToBool", "DropoutGrad"})

Reading = tuple[str, "list[ir.Value | Constant]", dict[str, float]]


@dataclass(frozen=True, eq=False)
class Fusable:
    """A node as a step of a fused node."""

    node: ir.Node
    operator: str
    operands: tuple[ir.Value | Constant, ...]
    attributes: tuple[tuple[str, float], ...]
    # The element type of the floating-point numbers; "" if there are none.
    element: str
    shape: tuple[int | str, ...]

    @property
    def output(self) -> ir.Value:
        return self.node.outputs[0]

    @property
    def expression(self) -> Expression:
        found = find_expression(self.operator)
        assert found is not None
        return found

    @property
    def gives_bool(self) -> bool:
        return self.expression.gives == "bool"

    @property
    def saves_alone(self) -> bool:
        """Whether a fused node of this node alone is better than onnxruntime's own kernel."""
        return self.expression.alone > 1 or any(unsqueezed(value) for value in self.values)

    @property
    def values(self) -> list[ir.Value]:
        """The operands that are not constants."""
        return [operand for operand in self.operands if isinstance(operand, ir.Value)]


def read_fusable(node: ir.Node) -> Fusable | None:
    """Return the node as a step; None if it cannot be one."""
    if len(node.outputs) != 1 or not node.outputs[0].name or node.overload:
        return None
    reading = _read(node)
    shape = known_shape(node.outputs[0])
    if reading is None or shape is None:
        return None
    operator, operands, attributes = reading
    expression = find_expression(operator)
    if expression is None:
        return None
    count = len(operands)
    if count != expression.operands and not (expression.variadic and count > 0):
        return None
    takes = [expression.takes] * count if isinstance(expression.takes, str) else list(expression.takes)
    elements = set()
    for operand, type_ in zip(operands, takes, strict=True):
        if isinstance(operand, Constant):
            if type_ == "bool" or operand.rank > len(shape):
                return None
        elif type_ == "bool":
            if operand.dtype != ir.DataType.BOOL:
                return None
        else:
            elements.add(ELEMENTS.get(operand.dtype) if operand.dtype else None)
    gives = node.outputs[0].dtype
    if expression.gives == "bool":
        if gives != ir.DataType.BOOL:
            return None
    else:
        elements.add(ELEMENTS.get(gives) if gives else None)
    if None in elements or len(elements) > 1 or not any(isinstance(o, ir.Value) for o in operands):
        return None
    element = next(iter(elements), "") or ""
    return Fusable(node, operator, tuple(operands), tuple(attributes.items()), element, shape)


def unsqueezed(value: ir.Value) -> tuple[ir.Value, int] | None:
    """Return the value to which an Unsqueeze adds only axes behind its own, and their number.

    A fused node reads that value instead.
    """
    node = value.producer()
    if node is None or not is_operator(node, "Unsqueeze") or value.is_graph_output():
        return None
    source, axes = node.inputs[0], node.inputs[1]
    shape = None if source is None else known_shape(source)
    tensor = constant_tensor(axes)
    if source is None or shape is None or tensor is None:
        return None
    count, rank = tensor.size, len(shape)
    added = sorted(int(axis) % (rank + count) for axis in tensor.numpy().reshape(-1))
    return (source, count) if added == list(range(rank, rank + count)) else None


def known_shape(value: ir.Value) -> tuple[int | str, ...] | None:
    """Return the sizes and names of sizes of a value; None if one of them is unknown."""
    found = dimensions(value) or ()
    known = tuple(size for size in found if size is not None)
    return None if value.shape is None or len(known) < len(found) else known


def infer_broadcast(node: ir.Node) -> None:
    """Infer the type and shape of an element-wise node if they follow from the shapes of its inputs alone."""
    expression = TABLE.get(node.op_type)
    if expression is None or not is_standard(node) or known_shape(node.outputs[0]) is not None:
        return
    inputs = [value for value in node.inputs if value is not None]
    shapes = [known_shape(value) for value in inputs]
    full: list[int | str] = []
    for i in range(max((len(shape) for shape in shapes if shape is not None), default=0)):
        sizes = {shape[-1 - i] for shape in shapes if shape is not None and i < len(shape)} - {1}
        if len(sizes) > 1:
            return
        full.append(next(iter(sizes), 1))
    if None in shapes or not inputs or inputs[-1].dtype is None:
        return
    node.outputs[0].shape = ir.Shape(full[::-1])
    node.outputs[0].dtype = ir.DataType.BOOL if expression.gives == "bool" else inputs[-1].dtype


def _read(node: ir.Node) -> Reading | None:
    if node.domain == DOMAIN and CALL_ATTRIBUTE in node.attributes:
        return _read_own(node)
    if node.domain == DOMAIN and node.op_type in _CONTRIBUTED:
        name = _CONTRIBUTED[node.op_type]
        attributes = {"alpha": node.attributes.get_float("alpha", 1.702)} if name == "Swish" else {}
        return name, _operands(node), attributes
    if not is_standard(node) or any(value is None for value in node.inputs[:1]):
        return None
    special = _SPECIAL.get(node.op_type)
    if special is not None:
        return special(node)
    if node.op_type not in TABLE or node.op_type in _INTERNAL or None in node.inputs:
        return None
    defaults = _DEFAULTS.get(node.op_type, {})
    attributes = {name: node.attributes.get_float(name, value) for name, value in defaults.items()}
    return node.op_type, _operands(node), attributes


def _read_own(node: ir.Node) -> Reading | None:
    """Read a node of ortgrad that is computed element by element."""
    operator = find_operator(node.op_type, node.domain)
    if operator is None:
        return None
    call = call_of(node, operator)
    if node.op_type in ("DropoutGrad", "TrainableDropoutGrad"):
        scale = _scale(node, call.present)
        return None if scale is None else ("DropoutGrad", _operands(node)[:2], {"scale": scale})
    own = own_kernel(node.op_type)
    if own is None or not all(call.present):
        return None
    return node.op_type, list(node.inputs), {name: call.attributes[name] for name in own[1].numbers}  # type: ignore[arg-type]


def _scale(node: ir.Node, present: tuple[bool, ...]) -> float | None:
    """Return the factor of a dropout's gradient if it is a known constant and there is a mask."""
    has_mask, has_ratio, has_mode = present[1:]
    if not has_mask or has_mode:
        return None
    ratio = 0.5
    if has_ratio:
        constant = read_constant(node.inputs[2])
        if constant is None or not 0 <= constant.number < 1:
            return None
        ratio = constant.number
    return 1 / (1 - ratio)


def _operands(node: ir.Node) -> list[ir.Value | Constant]:
    return [read_constant(value) or value for value in node.inputs if value is not None]


def read_constant(value: ir.Value | None) -> Constant | None:
    """Return a constant of one element; None for other values, and for NaN, which has no literal."""
    tensor = constant_tensor(value)
    if tensor is None or tensor.size != 1 or tensor.dtype not in ELEMENTS:
        return None
    number = float(tensor.numpy().reshape(()))
    return None if math.isnan(number) else Constant(number, len(tensor.shape))


def _read_pow(node: ir.Node) -> Reading | None:
    exponent = node.inputs[1]
    operator = {2.0: "Square", 3.0: "Cube"}.get(constant_number(exponent) or 0.0)
    if operator is None or exponent is None or len(exponent.shape or ()) > len(node.outputs[0].shape or ()):
        return None
    if exponent.shape is not None and len(exponent.shape) > len(node.inputs[0].shape or ()):  # type: ignore[union-attr]
        return None
    return operator, _operands(node)[:1], {}


def _read_clip(node: ir.Node) -> Reading | None:
    value = node.inputs[0]
    if value is None or value.dtype not in ELEMENTS:
        return None
    # onnxruntime clips to these if a bound is absent.
    largest = float(np.finfo(value.dtype.numpy()).max)
    operands: list[ir.Value | Constant] = [read_constant(value) or value]
    for i, absent in ((1, -largest), (2, largest)):
        bound = node.inputs[i] if len(node.inputs) > i else None
        operands.append(Constant(absent) if bound is None else read_constant(bound) or bound)
    return "Clip", operands, {}


def _read_cast(node: ir.Node) -> Reading | None:
    value = node.inputs[0]
    types = (None if value is None else value.dtype, node.outputs[0].dtype)
    if types[0] == ir.DataType.BOOL and types[1] in ELEMENTS:
        return "ToFloat", [value], {}  # type: ignore[list-item]
    if types[0] in ELEMENTS and types[1] == ir.DataType.BOOL:
        return "ToBool", [value], {}  # type: ignore[list-item]
    return None


def _read_gelu(node: ir.Node) -> Reading | None:
    tanh = node.attributes.get_string("approximate", "none") == "tanh"
    if tanh and node.outputs[0].dtype == ir.DataType.DOUBLE:
        # ONNX defines it with constants in single precision.
        return None
    return "TanhGelu" if tanh else "Gelu", _operands(node), {}


_SPECIAL: dict[str, Callable[[ir.Node], Any]] = {
    "Pow": _read_pow,
    "Clip": _read_clip,
    "Cast": _read_cast,
    "CastLike": _read_cast,
    "Gelu": _read_gelu,
}
