"""Gives unknown sizes one name where they are always equal.

onnx's shape inference makes up a new name for every size that it cannot compute: for those of a convolution's
output, even if padding keeps the size, and for what is computed from them. The gradient of an Add would then
have to find out at run time whether an operand was broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from ortgrad.graph.pool_sizes import POOLS

_WINDOWS = frozenset(["Conv", *POOLS])
# Operators with broadcasting whose inputs all take part in it.
_BROADCASTS = frozenset(
    [
        *("Add", "And", "BitShift", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
        *("Max", "Mean", "Min", "Mod", "Mul", "Or", "Pow", "Sub", "Sum", "Where", "Xor"),
    ]
)
# How the names begin that onnx makes up; others may stand for different sizes in different places.
_MADE_UP = "unk__"


def name_equal_sizes(graph: ir.Graph) -> None:
    """Rename sizes of the graph's values, in place; the nodes must be in topological order."""
    names = _Names()
    names.seen.update(_symbols(*graph.inputs, *graph.initializers.values()))
    for node in graph:
        sizes = _FUNCTIONS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        for output in node.outputs:
            # All outputs of these operators have one shape.
            if sizes is not None and output.shape is not None:
                for dim, size in zip(output.shape, sizes(node, names), strict=False):
                    if size is not None:
                        names.equate(dim, size)
            names.seen.update(_symbols(output))
    if not names.renamed:
        return
    values = (v for n in graph.all_nodes() for v in (*n.outputs, *(i for g in _inner(n) for i in g.inputs)))
    for value in values:
        if value.shape is not None and any(d in names.renamed for d in _symbols(value)):
            value.shape = ir.Shape([names.current(dim) for dim in value.shape])


def _inner(node: ir.Node) -> Iterator[ir.Graph]:
    return (a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH)


def _symbols(*values: ir.Value) -> Iterator[str]:
    for value in values:
        for dim in value.shape or ():
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                yield dim.value


# The size (base + offset) // divisor.
_Size = tuple[str, int, int]


@dataclass
class _Names:
    """What is known about the names of sizes so far."""

    seen: set[str] = field(default_factory=set)
    renamed: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, _Size] = field(default_factory=dict)
    names: dict[_Size, str] = field(default_factory=dict)

    def current(self, dim: int | ir.SymbolicDim) -> int | str | None:
        """The dimension under its new name."""
        if isinstance(dim, int) or dim.value is None:
            return dim if isinstance(dim, int) else None
        return self.renamed.get(dim.value, dim.value)

    def equate(self, dim: int | ir.SymbolicDim, size: _Size) -> None:
        """Let a dimension be of this size. Only a name that occurs for the first time is replaced."""
        name = None if isinstance(dim, int) else dim.value
        if name is None or not name.startswith(_MADE_UP) or name in self.seen or name in self.renamed:
            return
        base, offset, divisor = size
        if base in self.sizes:
            # A quotient of a quotient is one: ((n + a) // s + b) // t = (n + a + b s) // (s t).
            base, first, inner = self.sizes[base]
            offset, divisor = first + offset * inner, inner * divisor
        size = base, offset, divisor
        known = base if (offset, divisor) == (0, 1) else self.names.get(size)
        if known is not None:
            self.renamed[name] = known
        else:
            self.sizes[name], self.names[size] = size, name


def _of_windows(node: ir.Node, names: _Names) -> Sequence[_Size | None]:
    """The sizes of the output of a convolution or pool."""
    x, kernel = _input(node, 0), _kernel(node)
    if x is None or x.shape is None or not kernel or len(x.shape) != len(kernel) + 2:
        return []
    rank = len(kernel)
    auto_pad = _attribute(node, "auto_pad", ir.AttributeType.STRING) or "NOTSET"
    strides, dilations = (_ints(node, name) or [1] * rank for name in ("strides", "dilations"))
    pads = (_ints(node, "pads") if auto_pad == "NOTSET" else None) or [0] * (2 * rank)
    if (len(strides), len(dilations), len(pads)) != (rank, rank, 2 * rank):
        return []
    rounds_up = _attribute(node, "ceil_mode", ir.AttributeType.INT) and max(strides) > 1
    if rounds_up or auto_pad.startswith("SAME"):
        return []
    sizes: list[_Size | None] = [None, None]
    for i in range(rank):
        dim = names.current(x.shape[2 + i])
        extent = (kernel[i] - 1) * dilations[i] + 1
        offset = pads[i] + pads[rank + i] - extent + strides[i]
        sizes.append((dim, offset, strides[i]) if isinstance(dim, str) else None)
    return sizes


def _kernel(node: ir.Node) -> list[int] | None:
    given = _ints(node, "kernel_shape")
    if given or node.op_type != "Conv":
        return given
    w = _input(node, 1)
    sizes = [] if w is None or w.shape is None else list(w.shape)[2:]
    known = [size for size in sizes if isinstance(size, int)]
    return known if len(known) == len(sizes) else None


def _ints(node: ir.Node, name: str) -> list[int]:
    return list(_attribute(node, name, ir.AttributeType.INTS) or ())


def _attribute(node: ir.Node, name: str, kind: ir.AttributeType) -> Any:
    """The value of an attribute; None if it is absent or not of this kind, which is for others to report."""
    attribute = node.attributes.get(name)
    return attribute.value if attribute is not None and attribute.type == kind else None


def _input(node: ir.Node, i: int) -> ir.Value | None:
    return node.inputs[i] if i < len(node.inputs) else None


def _of_operands(node: ir.Node, names: _Names) -> Sequence[_Size | None]:
    """The sizes of operands that are broadcast, where all have the same or 1."""
    shapes = [value.shape for value in node.inputs if value is not None]
    if any(shape is None for shape in shapes):
        return []
    lists = [[names.current(dim) for dim in shape] for shape in shapes if shape is not None]
    rank = max(map(len, lists), default=0)
    sizes: list[_Size | None] = []
    for axis in range(-rank, 0):
        dims = {dims[axis] for dims in lists if -axis <= len(dims)} - {1}
        dim = dims.pop() if len(dims) == 1 else None
        sizes.append((dim, 0, 1) if isinstance(dim, str) else None)
    return sizes


def _of_scales(node: ir.Node, names: _Names) -> Sequence[_Size | None]:
    """The sizes that a Resize keeps."""
    x, scales = _input(node, 0), _input(node, 2)
    tensor = None if scales is None or scales.is_graph_input() else ir.convenience.get_const_tensor(scales)
    if x is None or x.shape is None or tensor is None or tensor.size != len(x.shape):
        return []
    mode = _attribute(node, "coordinate_transformation_mode", ir.AttributeType.STRING)
    if "axes" in node.attributes or mode == "tf_crop_and_resize":
        return []
    kept = tensor.numpy() == 1
    dims = [names.current(dim) for dim in x.shape]
    return [
        (dim, 0, 1) if keeps and isinstance(dim, str) else None for dim, keeps in zip(dims, kept, strict=True)
    ]


_FUNCTIONS: dict[str, Callable[[ir.Node, _Names], Sequence[_Size | None]]] = {
    **dict.fromkeys(_WINDOWS, _of_windows),
    **dict.fromkeys(_BROADCASTS, _of_operands),
    "Resize": _of_scales,
}
