"""Replaces integers and conditions that follow from known sizes and ranks by constants.

Exporters compute shapes, axes and the conditions of If nodes from the shapes of tensors. onnx follows a part
of this arithmetic, and only where the result is a shape. Here it is evaluated where it decides about an If,
or is read by a node whose output has no known rank. Sizes may be known in part: one element of a shape is
enough if no other is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import numpy as np
import onnx_ir as ir

from ortgrad.graph.names import Names
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import FLOAT_TYPES, all_nodes, constant_tensor, is_standard
from ortgrad.shapes.computed_sizes import words
from ortgrad.shapes.known_elements import selected

# Larger tensors are not shapes.
_LARGEST = 1000
# The elements of a tensor, and which of them are known.
Known = tuple[np.ndarray, np.ndarray]


def fold_known_values(model: ir.Model, wrt: Sequence[str] | None) -> bool:
    """Replace what decides about Ifs and ranks by constants where it is known, in place; returns whether any.

    Types and shapes must be proven. Floating-point values are not replaced, and those that `wrt` may name do
    not count as known.
    """
    found = [(node, i) for node in all_nodes(model.graph) for i in _deciding(node)]
    if not found:
        return False
    known = _Evaluation(model.opset_imports[""], wrt or ())
    constants = [(node, i, known.constant(node.inputs[i])) for node, i in found]
    if all(array is None for _, _, array in constants):
        return False
    names = Names.of(model)
    for node, i, array in constants:
        if array is not None:
            _replace(node, i, array, model.opset_imports[""], names)
    return True


def _deciding(node: ir.Node) -> Iterator[int]:
    """Yield the computed inputs of a node that may decide about the rank of an output, or about a branch."""
    if not any(output.shape is None for output in node.outputs) and node.op_type != "If":
        return
    for i, value in enumerate(node.inputs):
        if value is None or not isinstance(value.type, ir.TensorType) or value.dtype in FLOAT_TYPES:
            continue
        producer = value.producer()
        if producer is not None and is_standard(producer) and producer.op_type in _EVALUATED - {"Constant"}:
            yield i


def _replace(node: ir.Node, i: int, array: np.ndarray, opset: int, names: Names) -> None:
    value, graph = node.inputs[i], node.graph
    assert value is not None and graph is not None
    op = Recorder(opset, names, f"{value.name}/known")
    node.replace_input_with(i, op.constant(array))
    graph.insert_before(node, op.nodes)


class _Evaluation:
    """Evaluates integers and conditions, each once."""

    def __init__(self, opset: int, wrt: Sequence[str]) -> None:
        self._opset = opset
        self._wrt = wrt
        self._found: dict[ir.Value, Known | None] = {}

    def constant(self, value: ir.Value | None) -> np.ndarray | None:
        """Return the value if all of its elements are known."""
        assert value is not None
        self._evaluate(value)
        known = self._found[value]
        return None if known is None or not known[1].all() else known[0]

    def _evaluate(self, value: ir.Value) -> None:
        # Without recursion, because chains of such nodes may be long.
        waiting = [value]
        while waiting:
            value = waiting[-1]
            node = value.producer()
            missing = [
                operand
                for operand in (node.inputs if node is not None and self._follows(node) else ())
                if operand is not None and operand not in self._found
            ]
            waiting += missing
            if not missing:
                waiting.pop()
                if value not in self._found:
                    self._found[value] = self._of(value, node)

    def _follows(self, node: ir.Node) -> bool:
        """Return whether a node is evaluated from the elements of its inputs."""
        return is_standard(node) and node.op_type in _EVALUATED and node.op_type not in ("Shape", "Size")

    def _of(self, value: ir.Value, node: ir.Node | None) -> Known | None:
        name = value.name or ""
        if any(name == each or fnmatchcase(name, each) for each in self._wrt):
            return None
        if node is None or not is_standard(node) or node.op_type == "Constant":
            return self._given(value)
        if node.op_type in ("Shape", "Size"):
            return _sizes(node)
        return self._result(node, value) if node.op_type in _EVALUATED else None

    def _given(self, value: ir.Value) -> Known | None:
        tensor = constant_tensor(value)
        if tensor is None or tensor.size > _LARGEST or tensor.dtype == ir.DataType.STRING:
            return None
        if tensor.dtype in FLOAT_TYPES and tensor.shape.rank():
            # It may be a parameter.
            return None
        array = tensor.numpy()
        return array, np.ones(array.shape, bool)

    def _result(self, node: ir.Node, value: ir.Value) -> Known | None:
        operands = [None if v is None else self._found[v] for v in node.inputs]
        if any(v is not None and known is None for v, known in zip(node.inputs, operands, strict=True)):
            return None
        arrays = [None if known is None else np.where(known[1], *_filled(known[0])) for known in operands]
        masks = [None if known is None else known[1] for known in operands]
        whole = [mask is None or bool(mask.all()) for mask in masks]
        place = list(node.outputs).index(value)
        if node.op_type in _MOVING:
            # What says where elements go must be known.
            moved = range(len(arrays)) if node.op_type == "Concat" else range(1)
            if not all(known or i in moved for i, known in enumerate(whole)) or _is_large(node, arrays):
                return None
            flags = [
                mask.astype(np.int64) if i in moved and mask is not None else array
                for i, (mask, array) in enumerate(zip(masks, arrays, strict=True))
            ]
            results = [self._run(node, each, place) for each in (arrays, flags)]
            return None if results[0] is None or results[1] is None else (results[0], results[1] != 0)
        if node.op_type not in _ELEMENTWISE and not all(whole):
            return None
        if node.op_type in ("Div", "Mod") and any(a is not None and (a < 0).any() for a in arrays):
            # onnxruntime and onnx's reference round negative quotients differently.
            return None
        result = self._run(node, arrays, place)
        if result is None or result.size > _LARGEST:
            return None
        if all(whole):
            return result, np.ones(result.shape, bool)
        present = [(a, m) for a, m in zip(arrays, masks, strict=True) if a is not None and m is not None]
        mask = _LOGIC.get(node.op_type, _all_known)(present)
        return result, np.broadcast_to(mask, result.shape)

    def _run(self, node: ir.Node, arrays: Sequence[np.ndarray | None], place: int) -> np.ndarray | None:
        feeds = {
            value.name or "": array
            for value, array in zip(node.inputs, arrays, strict=True)
            if value is not None and array is not None
        }
        from onnx.reference import ReferenceEvaluator  # slow to import, and seldom needed

        evaluator = ReferenceEvaluator(ir.to_proto(node), opsets={"": self._opset})
        try:
            with np.errstate(all="ignore"):
                return np.asarray(list(evaluator.run(None, feeds))[place])
        except (ValueError, IndexError, TypeError):
            # The node fails at run time as well.
            return None


def _filled(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the elements, and the number for unknown ones: 1, by which everything can be divided."""
    return array, np.ones((), array.dtype)


def _sizes(node: ir.Node) -> Known | None:
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    if shape is None:
        return None
    known = np.array([isinstance(size, int) for size in shape], bool)
    sizes = np.array([size if isinstance(size, int) else 1 for size in shape], np.int64)
    if node.op_type == "Size":
        return (np.array(sizes.prod()), np.array(True)) if known.all() else None
    return sizes[selected(node)], known[selected(node)]


def _is_large(node: ir.Node, arrays: Sequence[np.ndarray | None]) -> bool:
    """Return whether an Expand makes a large tensor."""
    sizes = arrays[1] if node.op_type == "Expand" else None
    return sizes is not None and float(np.prod(sizes.astype(float))) > _LARGEST


Operands = Sequence[Known]


def _all_known(operands: Operands) -> np.ndarray:
    return np.logical_and.reduce(np.broadcast_arrays(*(mask for _, mask in operands)))


def _known_and(operands: Operands) -> np.ndarray:
    return _all_known(operands) | _any(mask & ~array for array, mask in operands)


def _known_or(operands: Operands) -> np.ndarray:
    return _all_known(operands) | _any(mask & array for array, mask in operands)


def _known_where(operands: Operands) -> np.ndarray:
    (condition, mask), (_, one), (_, other) = operands
    chosen: np.ndarray = mask & np.where(condition, one, other)
    return chosen


def _any(masks: Iterable[np.ndarray]) -> np.ndarray:
    return np.logical_or.reduce(np.broadcast_arrays(*masks))


# Elementwise operators whose results may be known where an operand is not.
_LOGIC: dict[str, Callable[[Operands], np.ndarray]] = {
    "And": _known_and,
    "Or": _known_or,
    "Where": _known_where,
}
_ELEMENTWISE = words(
    """Abs Add And Cast Ceil Div Equal Floor Greater GreaterOrEqual Less LessOrEqual Max Min Mod Mul Neg Not
    Or Round Sign Sub Sum Where Xor"""
)
# Operators that return elements of their first input (Concat: of all), in other places.
_MOVING = words(
    """Concat Expand Flatten Gather GatherElements GatherND Identity Reshape Slice Split Squeeze Transpose
    Unsqueeze"""
)
_EVALUATED = words(
    "ArgMax ArgMin Constant CumSum NonZero ReduceMax ReduceMin ReduceProd ReduceSum Shape Size"
).union(_ELEMENTWISE, _MOVING)
