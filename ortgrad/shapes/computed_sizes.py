"""The sizes of the outputs of operators for which onnx's shape inference makes up names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from ortgrad.autodiff.unbroadcast import BROADCASTING
from ortgrad.graph.traversal import constant_tensor, is_standard
from ortgrad.shapes.known_elements import Elements, Sizes
from ortgrad.shapes.pool_sizes import POOLS
from ortgrad.shapes.size_expressions import Size, broadcast, product

# The sizes of an output; None stands for one that is not known, or for all of them.
Found = Sequence["Size | None"] | None
_Function = Callable[[ir.Node, Sizes, Elements], "list[Found]"]


def words(text: str) -> frozenset[str]:
    """Return the words of a text, for long lists of operators."""
    return frozenset(text.split())


# Operators with broadcasting whose inputs all take part in it.
BROADCASTS = BROADCASTING | words(
    """And BitShift BitwiseAnd BitwiseOr BitwiseXor Equal Greater GreaterOrEqual Less LessOrEqual Or Xor"""
)
# An end of a slice from this number on stands for the end of the axis: no axis is that long.
_END = 10**9


def output_sizes(node: ir.Node, sizes: Sizes, elements: Elements) -> list[Found]:
    """Return the sizes of a node's outputs as far as they are known."""
    function = _FUNCTIONS.get(node.op_type) if is_standard(node) else None
    return [] if function is None else function(node, sizes, elements)


def _of_operands(node: ir.Node, sizes: Sizes, elements: Elements) -> list[Found]:
    """The sizes of operands that are broadcast."""
    found = [sizes(value) for value in node.inputs if value is not None]
    known = [each for each in found if each is not None]
    return [_broadcast(known)] if len(known) == len(found) else []


def _broadcast(operands: Sequence[Sequence[Size]]) -> list[Size | None]:
    rank = max(map(len, operands), default=0)
    return [broadcast(each[i] for each in operands if -i <= len(each)) for i in range(-rank, 0)]


def _of_windows(node: ir.Node, sizes: Sizes, elements: Elements) -> list[Found]:
    """The sizes of the output of a convolution or pool."""
    x, kernel = sizes(_input(node, 0)), _kernel(node, sizes)
    if x is None or not kernel or len(x) != len(kernel) + 2:
        return []
    rank = len(kernel)
    auto_pad = _attribute(node, "auto_pad", ir.AttributeType.STRING) or "NOTSET"
    strides, dilations = (_ints(node, name) or [1] * rank for name in ("strides", "dilations"))
    pads = (_ints(node, "pads") if auto_pad == "NOTSET" else None) or [0] * (2 * rank)
    if (len(strides), len(dilations), len(pads)) != (rank, rank, 2 * rank) or min(strides) < 1:
        return []
    if _attribute(node, "ceil_mode", ir.AttributeType.INT) and max(strides) > 1:
        return []
    found: list[Size | None] = [x[0], None]
    for i in range(rank):
        extent = (kernel[i] - 1) * dilations[i] + 1
        if auto_pad.startswith("SAME"):
            padded = x[2 + i] + Size.of(strides[i] - 1)
        else:
            padded = x[2 + i] + Size.of(pads[i] + pads[rank + i] - extent + strides[i])
        found.append(padded // strides[i])
    # All outputs of these operators have one shape.
    return [found] * len(node.outputs)


def _of_transposed_windows(node: ir.Node, sizes: Sizes, elements: Elements) -> list[Found]:
    x, kernel = sizes(_input(node, 0)), _kernel(node, sizes)
    auto_pad = _attribute(node, "auto_pad", ir.AttributeType.STRING) or "NOTSET"
    if x is None or not kernel or len(x) != len(kernel) + 2 or auto_pad != "NOTSET":
        return []
    rank = len(kernel)
    if _ints(node, "output_shape"):
        return []
    strides, dilations = (_ints(node, name) or [1] * rank for name in ("strides", "dilations"))
    pads, more = _ints(node, "pads") or [0] * (2 * rank), _ints(node, "output_padding") or [0] * rank
    if (len(strides), len(dilations), len(pads), len(more)) != (rank, rank, 2 * rank, rank):
        return []
    found: list[Size | None] = [x[0], None]
    for i in range(rank):
        extent = (kernel[i] - 1) * dilations[i] + 1
        number = extent + more[i] - pads[i] - pads[rank + i] - strides[i]
        found.append(x[2 + i] * Size.of(strides[i]) + Size.of(number))
    return [found]


def _kernel(node: ir.Node, sizes: Sizes) -> list[int] | None:
    given = _ints(node, "kernel_shape")
    if given or node.op_type in POOLS:
        return given
    numbers = [size.number for size in (sizes(_input(node, 1)) or [])[2:]]
    known = [number for number in numbers if number is not None]
    return known if len(known) == len(numbers) else None


def _ints(node: ir.Node, name: str) -> list[int]:
    return list(_attribute(node, name, ir.AttributeType.INTS) or ())


def _attribute(node: ir.Node, name: str, kind: ir.AttributeType) -> Any:
    """The value of an attribute; None if it is absent or not of this kind, which is for others to report."""
    attribute = node.attributes.get(name)
    return attribute.value if attribute is not None and attribute.type == kind else None


def _input(node: ir.Node, i: int) -> ir.Value | None:
    return node.inputs[i] if i < len(node.inputs) else None


def _of_resize(node: ir.Node, sizes: Sizes, elements: Elements) -> list[Found]:
    x, scales = sizes(_input(node, 0)), _input(node, 2)
    mode = _attribute(node, "coordinate_transformation_mode", ir.AttributeType.STRING)
    policy = _attribute(node, "keep_aspect_ratio_policy", ir.AttributeType.STRING) or "stretch"
    if x is None or "axes" in node.attributes or mode == "tf_crop_and_resize" or policy != "stretch":
        return []
    given = elements.of(_input(node, 3))
    if given is not None and given.shape == (len(x),):
        return [_sizes_only(given)]
    tensor = constant_tensor(scales)
    if tensor is None or tensor.size != len(x):
        return []
    return [[_scaled(size, float(scale)) for size, scale in zip(x, tensor.numpy(), strict=True)]]


def _scaled(size: Size, scale: float) -> Size | None:
    """Return the size times the scale, rounded down, if that is exact in floating-point numbers."""
    if scale >= 1:
        return size * Size.of(int(scale)) if scale == int(scale) else None
    divisor = 1 / scale if scale > 0 else 0.5
    exact = divisor in (2.0, 4.0, 8.0, 16.0, 32.0)
    return size // int(divisor) if exact else None


def _sizes_only(given: Any) -> list[Size | None]:
    """Return elements that are known to be sizes, and not numbers with a special meaning."""
    return [size if size.is_size else None for size in given]


def _of_reshape(node: ir.Node, sizes: Sizes, elements: Elements) -> list[Found]:
    x, given = sizes(_input(node, 0)), elements.of(_input(node, 1))
    if x is None or given is None or given.ndim != 1:
        return []
    keeps = not _attribute(node, "allowzero", ir.AttributeType.INT)
    found: list[Size | None] = []
    for i, size in enumerate(given):
        if keeps and size.number == 0 and i < len(x):
            found.append(x[i])
        else:
            found.append(size if size.is_size else None)
    missing = [i for i, size in enumerate(found) if size is None]
    if len(missing) == 1 and given[missing[0]].number == -1:
        # A size of 0 beside the unknown one is an error.
        found[missing[0]] = product(x).shared(product([size for size in found if size is not None]))
    return [found]


def _of_flatten(node: ir.Node, sizes: Sizes, elements: Elements) -> list[Found]:
    x, axis = sizes(_input(node, 0)), _attribute(node, "axis", ir.AttributeType.INT)
    if x is None:
        return []
    axis = 1 if axis is None else axis
    return [[product(x[:axis]), product(x[axis:])]]


def _of_expand(node: ir.Node, sizes: Sizes, elements: Elements) -> list[Found]:
    x, given = sizes(_input(node, 0)), elements.of(_input(node, 1))
    if x is None or given is None or given.ndim != 1 or not all(size.is_size for size in given):
        return []
    return [_broadcast([x, list(given)])]


def _of_shape(node: ir.Node, sizes: Sizes, elements: Elements) -> list[Found]:
    given = elements.of(_input(node, 0))
    return [] if given is None or given.ndim != 1 else [_sizes_only(given)]


def _of_tile(node: ir.Node, sizes: Sizes, elements: Elements) -> list[Found]:
    x, given = sizes(_input(node, 0)), elements.of(_input(node, 1))
    if x is None or given is None or given.shape != (len(x),):
        return []
    return [[size * count if count.is_size else None for size, count in zip(x, given, strict=True)]]


def _of_concat(node: ir.Node, sizes: Sizes, elements: Elements) -> list[Found]:
    found = [sizes(value) for value in node.inputs]
    known = [each for each in found if each is not None]
    axis = _attribute(node, "axis", ir.AttributeType.INT)
    if not known or len(known) != len(found) or axis is None or len({len(each) for each in known}) > 1:
        return []
    if not -len(known[0]) <= axis < len(known[0]):
        return []
    # Along other axes operands have the same size, but onnxruntime accepts empty ones that do not.
    result = [column[0] if len(set(column)) == 1 else None for column in zip(*known, strict=True)]
    total = Size.of(0)
    for each in known:
        total = total + each[axis]
    result[axis] = total
    return [result]


def _of_split(node: ir.Node, sizes: Sizes, elements: Elements) -> list[Found]:
    x, given = sizes(_input(node, 0)), elements.of(_input(node, 1))
    axis = _attribute(node, "axis", ir.AttributeType.INT) or 0
    if x is None or given is None or given.shape != (len(node.outputs),) or not -len(x) <= axis < len(x):
        return []
    found: list[Found] = []
    for size in given:
        part: list[Size | None] = list(x)
        part[axis] = size if size.is_size else None
        found.append(part)
    return found


def _of_slice(node: ir.Node, sizes: Sizes, elements: Elements) -> list[Found]:
    x = sizes(_input(node, 0))
    starts, ends = (elements.of(_input(node, i)) for i in (1, 2))
    if x is None or starts is None or ends is None or starts.ndim != 1 or starts.shape != ends.shape:
        return []
    axes: list[int] | None = list(range(len(starts)))
    steps: list[int] | None = [1] * len(starts)
    if _input(node, 3) is not None:
        axes = elements.numbers(_input(node, 3))
    if _input(node, 4) is not None:
        steps = elements.numbers(_input(node, 4))
    if axes is None or steps is None or {len(axes), len(steps)} != {len(starts)}:
        return []
    found: list[Size | None] = list(x)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if not -len(x) <= axis < len(x):
            return []
        size = x[axis]
        number = end.number
        whole = step == 1 and start.number == 0 and (end == size or (number is not None and number >= _END))
        found[axis] = size if whole else Size.atom(("slice", size, start, end, step))
    return [found]


def _of_pad(node: ir.Node, sizes: Sizes, elements: Elements) -> list[Found]:
    x, pads = sizes(_input(node, 0)), elements.of(_input(node, 1))
    if x is None or pads is None or pads.shape != (2 * len(x),) or _input(node, 3) is not None:
        return []
    return [[size + pads[i] + pads[len(x) + i] for i, size in enumerate(x)]]


def _of_matmul(node: ir.Node, sizes: Sizes, elements: Elements) -> list[Found]:
    a, b = (sizes(_input(node, i)) for i in (0, 1))
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return []
    return [[*_broadcast([a[:-2], b[:-2]]), a[-2], b[-1]]]


def _of_range(node: ir.Node, sizes: Sizes, elements: Elements) -> list[Found]:
    start, limit, delta = (elements.of(_input(node, i)) for i in range(3))
    if start is None or limit is None or delta is None or {start.size, limit.size, delta.size} != {1}:
        return []
    if start.item().number != 0 or delta.item().number != 1 or not limit.item().is_size:
        return []
    return [[limit.item()]]


def _of_branches(node: ir.Node, sizes: Sizes, elements: Elements) -> list[Found]:
    """The sizes that are the same in both branches of an If."""
    graphs = [_attribute(node, name, ir.AttributeType.GRAPH) for name in ("then_branch", "else_branch")]
    if None in graphs:
        return []
    found: list[Found] = []
    for values in zip(*(graph.outputs for graph in graphs), strict=False):
        one, other = map(sizes, values)
        if one is None or other is None or len(one) != len(other):
            found.append(None)
        else:
            found.append([a if a == b else None for a, b in zip(one, other, strict=True)])
    return found


def _of_loop(node: ir.Node, sizes: Sizes, elements: Elements) -> list[Found]:
    """The number of iterations, which is the first size of all scan outputs."""
    states = len(node.inputs) - 2
    trips = Size.atom(("trips", id(node)))
    found: list[Found] = [None] * states
    for value in node.outputs[states:]:
        rank = 0 if value.shape is None else len(value.shape)
        found.append([trips, *[None] * (rank - 1)] if rank else None)
    return found


_FUNCTIONS: dict[str, _Function] = {
    **dict.fromkeys(BROADCASTS, _of_operands),
    **dict.fromkeys(["Conv", *POOLS], _of_windows),
    "Concat": _of_concat,
    "ConstantOfShape": _of_shape,
    "ConvTranspose": _of_transposed_windows,
    "Expand": _of_expand,
    "Flatten": _of_flatten,
    "If": _of_branches,
    "Loop": _of_loop,
    "MatMul": _of_matmul,
    "Pad": _of_pad,
    "Range": _of_range,
    "Reshape": _of_reshape,
    "Resize": _of_resize,
    "Slice": _of_slice,
    "Split": _of_split,
    "Tile": _of_tile,
}
