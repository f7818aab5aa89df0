"""The elements of small integer tensors, such as shapes, as expressions of sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from ortgrad.graph.traversal import constant_tensor, is_standard
from ortgrad.shapes.size_expressions import Size, product

# Larger tensors are not shapes.
_LARGEST = 64
_INTEGERS = frozenset([ir.DataType.INT64, ir.DataType.INT32])
_TYPES = frozenset([*_INTEGERS, ir.DataType.BOOL])

Sizes = Callable[["ir.Value | None"], "list[Size] | None"]


class Elements:
    """Finds the elements of integer tensors, node by node in topological order.

    `sizes` returns the sizes of a value. The elements are an array of sizes; one that is not known is an atom
    of its own, which may be negative.
    """

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._found: dict[ir.Value, np.ndarray | None] = {}

    def of(self, value: ir.Value | None) -> np.ndarray | None:
        """Return the elements of a tensor; None if their number is not known, or they are not integers."""
        if value is None:
            return None
        if value not in self._found:
            self._found[value] = self._given(value)
        return self._found[value]

    def numbers(self, value: ir.Value | None) -> list[int] | None:
        """Return the elements of a vector if all are known numbers."""
        array = self.of(value)
        if array is None or array.ndim > 1:
            return None
        numbers = [size.number for size in array.reshape(-1)]
        known = [number for number in numbers if number is not None]
        return known if len(known) == len(numbers) else None

    def visit(self, node: ir.Node) -> None:
        """Find the elements of the outputs of a node."""
        function = _FUNCTIONS.get(node.op_type) if is_standard(node) else None
        if function is None or len(node.outputs) != 1 or node.outputs[0].dtype not in _TYPES:
            return
        try:
            found = function(self, node)
        except (ValueError, IndexError):
            # The node fails at run time as well.
            return
        if isinstance(found, Size):
            # NumPy returns an element in place of an array without axes.
            found = _scalar(found)
        if found is not None and found.size <= _LARGEST:
            self._found[node.outputs[0]] = found

    def _given(self, value: ir.Value) -> np.ndarray | None:
        if value.dtype not in _INTEGERS:
            return None
        tensor = constant_tensor(value)
        if tensor is not None:
            return None if tensor.size > _LARGEST else _array(tensor.numpy())
        sizes = [size.number for size in self._sizes(value) or [Size.atom("")]]
        shape = [size for size in sizes if size is not None]
        if len(shape) != len(sizes) or np.prod(shape, dtype=float) > _LARGEST:
            return None
        array = np.empty(shape, object)
        for place in np.ndindex(*shape):
            array[place] = Size.atom(("element", id(value), place))
        return array

    def sizes(self, value: ir.Value | None) -> np.ndarray | None:
        """Return the sizes of a value as a vector."""
        sizes = self._sizes(value)
        if sizes is None:
            return None
        array = np.empty(len(sizes), object)
        array[:] = sizes
        return array


_Function = Callable[[Elements, ir.Node], "np.ndarray | Size | None"]


def _array(numbers: np.ndarray) -> np.ndarray:
    array = np.empty(numbers.shape, object)
    for place in np.ndindex(*numbers.shape):
        array[place] = Size.of(int(numbers[place]))
    return array


def _operand(elements: Elements, node: ir.Node, i: int = 0) -> np.ndarray | None:
    return elements.of(node.inputs[i]) if i < len(node.inputs) else None


def selected(node: ir.Node) -> slice:
    """Return which sizes a Shape node returns."""
    return slice(node.attributes.get_int("start"), node.attributes.get_int("end"))


def _shape(elements: Elements, node: ir.Node) -> np.ndarray | None:
    sizes = elements.sizes(node.inputs[0])
    return None if sizes is None else sizes[selected(node)]


def _size(elements: Elements, node: ir.Node) -> np.ndarray | None:
    sizes = elements.sizes(node.inputs[0])
    return None if sizes is None else _scalar(product(sizes))


def _scalar(size: Size) -> np.ndarray:
    array = np.empty((), object)
    array[()] = size
    return array


def _same(elements: Elements, node: ir.Node) -> np.ndarray | None:
    return _operand(elements, node)


def _cast(elements: Elements, node: ir.Node) -> np.ndarray | None:
    return _operand(elements, node) if node.outputs[0].dtype in _INTEGERS else None


def _gather(elements: Elements, node: ir.Node) -> np.ndarray | Size | None:
    array, where = _operand(elements, node), _operand(elements, node, 1)
    numbers = None if where is None else [size.number for size in where.reshape(-1)]
    if array is None or where is None or numbers is None or None in numbers:
        return None
    places = np.array(numbers, np.int64).reshape(where.shape)
    return np.take(array, places, axis=node.attributes.get_int("axis", 0))


def _concat(elements: Elements, node: ir.Node) -> np.ndarray | None:
    found = [array for value in node.inputs if (array := elements.of(value)) is not None]
    if len(found) < len(node.inputs):
        return None
    return np.concatenate(found, axis=node.attributes.get_int("axis", 0))


def _slice(elements: Elements, node: ir.Node) -> np.ndarray | None:
    array = _operand(elements, node)
    given = [elements.numbers(value) for value in node.inputs[1:]]
    if array is None or array.ndim != 1 or any(numbers is None or len(numbers) != 1 for numbers in given):
        return None
    numbers = [each[0] for each in given if each]
    start, end, _, step = [*numbers, *[0, 1][len(numbers) - 2 :]]
    return array[start:end:step]


def _reshape(elements: Elements, node: ir.Node) -> np.ndarray | None:
    array, shape = _operand(elements, node), elements.numbers(node.inputs[1])
    if array is None or shape is None or 0 in shape:
        return None
    return array.reshape(shape)


def _squeeze(elements: Elements, node: ir.Node) -> np.ndarray | None:
    array = _operand(elements, node)
    if array is None:
        return None
    if len(node.inputs) < 2 or node.inputs[1] is None:
        return None if node.attributes.get("axes") else np.squeeze(array)
    axes = elements.numbers(node.inputs[1])
    return None if axes is None else np.squeeze(array, tuple(axes))


def _unsqueeze(elements: Elements, node: ir.Node) -> np.ndarray | None:
    array = _operand(elements, node)
    axes = elements.numbers(node.inputs[1]) if len(node.inputs) > 1 else None
    return None if array is None or axes is None else np.expand_dims(array, tuple(axes))


def _filled(elements: Elements, node: ir.Node) -> np.ndarray | None:
    shape = elements.numbers(node.inputs[0])
    value = node.attributes.get("value")
    if shape is None or value is None or np.prod(shape, dtype=float) > _LARGEST:
        return None
    array = np.empty(shape, object)
    array.fill(_array(value.as_tensor().numpy().reshape(-1)[:1])[0])
    return array


def _product_of_all(elements: Elements, node: ir.Node) -> np.ndarray | None:
    array = _operand(elements, node)
    if array is None or array.ndim != 1 or node.outputs[0].shape is None:
        return None
    if node.attributes.get_int("noop_with_empty_axes", 0):
        return None
    return _scalar(product(array)).reshape([1] * len(node.outputs[0].shape))


def _arithmetic(function: Callable[[Any, Any], Any]) -> _Function:
    def compute(elements: Elements, node: ir.Node) -> np.ndarray | Size | None:
        arrays = [elements.of(value) for value in node.inputs]
        if len(arrays) != 2 or arrays[0] is None or arrays[1] is None:
            return None
        return function(arrays[0], arrays[1])

    return compute


def _divide(one: np.ndarray, other: np.ndarray) -> np.ndarray | None:
    divisors = {size.number for size in other.reshape(-1)}
    divisor = divisors.pop() if len(divisors) == 1 else None
    # Negative quotients are rounded up.
    if divisor is None or divisor < 1 or not all(size.is_size for size in one.reshape(-1)):
        return None
    result = np.empty(np.broadcast_shapes(one.shape, other.shape), object)
    result[...] = one
    for place in np.ndindex(*result.shape):
        result[place] = result[place] // divisor
    return result


def _equal(one: np.ndarray, other: np.ndarray) -> np.ndarray | None:
    """Return 1 and 0 for true and false, if all of them are known."""
    result = np.empty(np.broadcast_shapes(one.shape, other.shape), object)
    result[...] = one - other
    for place in np.ndindex(*result.shape):
        difference: Any = result[place]
        number = difference.number
        if number is None and not any(
            (each - Size.of(1)).is_size for each in (difference, Size.of(0) - difference)
        ):
            return None
        result[place] = Size.of(int(number == 0))
    return result


def _either(word: str) -> Callable[[Any, Any], np.ndarray]:
    """Return the function that finds the larger or smaller of two elements."""

    def choose(one: Size, other: Size) -> Size:
        if one == other or (one - other).is_size:
            return one if word == "max" else other
        if (other - one).is_size:
            return other if word == "max" else one
        kind = word if one.is_size and other.is_size else "element"
        return Size.atom((kind, word, frozenset([one, other])))

    return np.frompyfunc(choose, 2, 1)


def _where(elements: Elements, node: ir.Node) -> np.ndarray | None:
    condition, *arrays = (elements.of(value) for value in node.inputs)
    one, other = arrays
    if condition is None or one is None or other is None:
        return None
    known = [size.number for size in condition.reshape(-1)]
    if None in known:
        return None
    return np.where(np.array(known, bool).reshape(condition.shape), one, other)


_FUNCTIONS: dict[str, _Function] = {
    "Add": _arithmetic(lambda one, other: one + other),
    "Cast": _cast,
    "Concat": _concat,
    "ConstantOfShape": _filled,
    "Div": _arithmetic(_divide),
    "Equal": _arithmetic(_equal),
    "Gather": _gather,
    "Identity": _same,
    "Max": _arithmetic(_either("max")),
    "Min": _arithmetic(_either("min")),
    "Mul": _arithmetic(lambda one, other: one * other),
    "ReduceProd": _product_of_all,
    "Reshape": _reshape,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Sub": _arithmetic(lambda one, other: one - other),
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}
