"""Replaces elements of sequences by the tensors that they are, where positions are known.

Exporters write lists as sequences, also where the positions are constants. As tensors, they have gradients
without a sequence of zeros for every element that is read. SequenceMap becomes the Loop that it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from ortgrad.graph.attributes import attributes_of
from ortgrad.graph.names import Names
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import all_nodes, constant_array, is_standard
from ortgrad.shapes.inference import infer_types

_READERS = frozenset(
    [
        "ConcatFromSequence",
        "OptionalGetElement",
        "OptionalHasElement",
        "SequenceAt",
        "SequenceLength",
        "SequenceMap",
    ]
)


def resolve_sequences(model: ir.Model) -> ir.Model:
    """Replace nodes that read sequences of known elements or optional values of known content, in place."""
    if not any(is_standard(node) and node.op_type in _READERS for node in all_nodes(model.graph)):
        return model
    infer_types(model)
    known = _Known(Recorder(model.opset_imports[""], Names.of(model)))
    for node in list(all_nodes(model.graph)):
        if is_standard(node):
            known.visit(node)
    return model


@dataclass
class _Known:
    """What is known of the sequences and optional values of a model."""

    op: Recorder
    # The elements of sequences.
    elements: dict[ir.Value, Sequence[ir.Value]] = field(default_factory=dict)
    # Sequences of all slices of a tensor along an axis: the tensor, the axis, whether slices lack the axis.
    slices: dict[ir.Value, tuple[ir.Value, int, bool]] = field(default_factory=dict)
    # What is in optional values; None if there is nothing.
    contents: dict[ir.Value, ir.Value | None] = field(default_factory=dict)

    def visit(self, node: ir.Node) -> None:
        visit = getattr(self, f"_{node.op_type}", None)
        if visit is not None:
            visit(node)

    def _Identity(self, node: ir.Node) -> None:  # noqa: N802
        source, output = node.inputs[0], node.outputs[0]
        knowledge: tuple[dict[ir.Value, Any], ...] = (self.elements, self.slices, self.contents)
        for known in knowledge:
            if source in known:
                known[output] = known[source]

    def _SequenceEmpty(self, node: ir.Node) -> None:  # noqa: N802
        self.elements[node.outputs[0]] = []

    def _SequenceConstruct(self, node: ir.Node) -> None:  # noqa: N802
        self.elements[node.outputs[0]] = _present(node)

    def _SequenceInsert(self, node: ir.Node) -> None:  # noqa: N802
        sequence, element, *place = _present(node)
        before = self.elements.get(sequence)
        at = len(before or ()) if not place else _number(place[0])
        if before is not None and at is not None and -len(before) <= at <= len(before):
            at %= len(before) or 1 if at < 0 else len(before) + 1
            self._construct(node, [*before[:at], element, *before[at:]])

    def _SequenceErase(self, node: ir.Node) -> None:  # noqa: N802
        sequence, *place = _present(node)
        before = self.elements.get(sequence)
        at = -1 if not place else _number(place[0])
        if before is not None and at is not None and -len(before) <= at < len(before):
            at %= len(before)
            self._construct(node, [*before[:at], *before[at + 1 :]])

    def _construct(self, node: ir.Node, elements: Sequence[ir.Value]) -> None:
        self.elements[node.outputs[0]] = elements
        if elements:
            # Of what begins with SequenceEmpty, onnx infers no shapes.
            _become(node, "SequenceConstruct", elements)

    def _SplitToSequence(self, node: ir.Node) -> None:  # noqa: N802
        (x, *split), output = _present(node), node.outputs[0]
        attributes = attributes_of(node, self.op.opset)
        axis, squeezed = attributes["axis"], not attributes["keepdims"]
        sizes = constant_array(split[0]) if split else np.array(1)
        if sizes is None:
            return
        if sizes.ndim == 0 and sizes == 1:
            # With a split of 1, onnxruntime honours keepdims. onnx does not, also in shape inference.
            node.resize_inputs(1)
            self.slices[output] = x, axis, squeezed
        elif sizes.ndim == 1 and sizes.size:
            pieces = self.op.add("Split", [x, split[0]], {"axis": axis}, outputs=sizes.size)
            self._insert_before(node)
            self.elements[output] = pieces

    def _SequenceAt(self, node: ir.Node) -> None:  # noqa: N802
        sequence, place = _present(node)
        at = _number(place)
        if sequence in self.slices:
            x, axis, squeezed = self.slices[sequence]
            shape = [] if squeezed else [1]
            index = (
                self.op.Reshape(place, np.array(shape, np.int64))
                if at is None
                else self.op.constant(np.full(shape, at, np.int64))
            )
            self._insert_before(node)
            _become(node, "Gather", [x, index], {"axis": axis})
        elif sequence in self.elements and at is not None:
            elements = self.elements[sequence]
            if -len(elements) <= at < len(elements):
                _become(node, "Identity", [elements[at]])
                self._Identity(node)

    def _SequenceLength(self, node: ir.Node) -> None:  # noqa: N802
        (sequence,) = _present(node)
        if sequence in self.slices:
            x, axis, _ = self.slices[sequence]
            length = self.op.Shape(x, start=axis, end=None if axis == -1 else axis + 1)
            axes = self.op.constant(np.array([0]))
            self._insert_before(node)
            _become(node, "Squeeze", [length, axes])
        elif sequence in self.elements:
            _become_constant(node, np.array(len(self.elements[sequence])))

    def _ConcatFromSequence(self, node: ir.Node) -> None:  # noqa: N802
        (sequence,) = _present(node)
        attributes = attributes_of(node, self.op.opset)
        axis, stacked = attributes["axis"], bool(attributes["new_axis"])
        if self.slices.get(sequence, ())[1:] == (axis, stacked):
            _become(node, "Identity", [self.slices[sequence][0]])
        elements = list(self.elements.get(sequence, ()))
        if not elements:
            return
        if stacked:
            elements = [self.op.Unsqueeze(element, [axis]) for element in elements]
            self._insert_before(node)
        _become(node, "Concat", elements, {"axis": axis})

    def _SequenceMap(self, node: ir.Node) -> None:  # noqa: N802
        sources, graph = _present(node), node.attributes["body"].as_graph()
        length, names = self.op.SequenceLength(sources[0]), self.op.names
        starts = [self.op.SequenceEmpty(dtype=int(v.dtype or ir.DataType.FLOAT)) for v in graph.outputs]
        self._insert_before(node)
        number, condition = (
            ir.Value(name=names.fresh(f"{node.name}/{name}"), type=ir.TensorType(dtype), shape=ir.Shape([]))
            for name, dtype in (("i", ir.DataType.INT64), ("condition", ir.DataType.BOOL))
        )
        states = [ir.Value(name=names.fresh(f"{node.name}/made"), type=start.type) for start in starts]
        before, after = self.op.inside(graph.name or "body"), self.op.inside(graph.name or "body")
        elements: dict[ir.Value, ir.Value] = {}
        for value, source in zip(graph.inputs, sources, strict=True):
            is_sequence = isinstance(source.type, ir.SequenceType)
            elements[value] = before.SequenceAt(source, number) if is_sequence else source
        results = [elements.get(value, value) for value in graph.outputs]
        graph.outputs.clear()
        for value, element in elements.items():
            ir.convenience.replace_all_uses_with(value, element)
        graph.inputs[:] = [number, condition, *states]
        made = [after.SequenceInsert(*pair) for pair in zip(states, results, strict=True)]
        graph.outputs.extend([after.copy(condition), *made])
        first = next(iter(graph), None)
        if first is None:
            graph.extend(before.nodes)
        else:
            graph.insert_before(first, before.nodes)
        graph.extend(after.nodes)
        _become(node, "Loop", [length, None, *starts])
        node.attributes.add(ir.AttrGraph("body", graph))

    def _Optional(self, node: ir.Node) -> None:  # noqa: N802
        self.contents[node.outputs[0]] = next(iter(_present(node)), None)

    def _OptionalGetElement(self, node: ir.Node) -> None:  # noqa: N802
        content = self._content(_present(node)[0])
        if content is not None:
            _become(node, "Identity", [content])
            self._Identity(node)

    def _OptionalHasElement(self, node: ir.Node) -> None:  # noqa: N802
        present = _present(node)
        if not present or self.contents.get(present[0], present[0]) is None:
            _become_constant(node, np.array(False))
        elif self._content(present[0]) is not None:
            _become_constant(node, np.array(True))

    def _content(self, value: ir.Value) -> ir.Value | None:
        """Return what is in an optional value, or the value if it is not optional; None if not known."""
        if value in self.contents:
            return self.contents[value]
        return value if isinstance(value.type, ir.TensorType | ir.SequenceType) else None

    def _insert_before(self, node: ir.Node) -> None:
        """Insert what was recorded before a node."""
        assert node.graph is not None
        node.graph.insert_before(node, self.op.nodes)
        self.op = Recorder(self.op.opset, self.op.names)


def _present(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None]


def _number(value: ir.Value) -> int | None:
    array = constant_array(value)
    return int(array.item()) if array is not None and array.size == 1 else None


def _become(
    node: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], attributes: dict[str, int] | None = None
) -> None:
    """Make a node another one with the same outputs."""
    node.op_type, node.version = op_type, None
    node.resize_inputs(len(inputs))
    for i, value in enumerate(inputs):
        node.replace_input_with(i, value)
    node.attributes.clear()
    node.attributes.update({name: ir.AttrInt64(name, number) for name, number in (attributes or {}).items()})


def _become_constant(node: ir.Node, array: np.ndarray) -> None:
    _become(node, "Constant", [])
    node.attributes.add(ir.AttrTensor("value", ir.tensor(array)))
