"""Corrects the inferred sizes of the elements of sequences.

onnx's shape inference names every size that it does not know. On a sequence, one name stands for the sizes of
all its elements, which may differ, and every tensor that is read from the sequence has it. For a sequence
that is a state of a Loop, it takes the sizes at the start of the Loop for the sizes after it.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from ortgrad.graph.protos import all_graphs, declared_values, is_operator, subgraphs


def forget_element_sizes(graph: onnx.GraphProto) -> None:
    """Remove names of sizes that come from a sequence from an inferred graph and its subgraphs, in place."""
    sequences: set[str] = set()
    _collect(graph, set(), sequences)
    if not sequences:
        return
    inputs = {id(value) for value in graph.input}
    for inner in all_graphs(graph):
        for value in declared_values(inner):
            for dim in _dims(value.type) if id(value) not in inputs else ():
                if dim.dim_param in sequences:
                    dim.ClearField("dim_param")


def hide_initial_sizes(graph: onnx.GraphProto, inferred: onnx.GraphProto) -> bool:
    """Let Loops start with sequences of unknown sizes, in place, for shape inference only.

    `inferred` is the same graph with inferred types. Returns whether there are such Loops.
    """
    hidden: list[onnx.ValueInfoProto] = []
    for inner, other in zip(all_graphs(graph), all_graphs(inferred), strict=True):
        types = {value.name: value.type for value in declared_values(other)}
        for node in inner.node:
            if not is_operator(node, "Loop"):
                continue
            for i, name in zip(range(2, len(node.input)), node.output, strict=False):
                type_ = types.get(name, onnx.TypeProto()).sequence_type.elem_type.tensor_type
                if type_.HasField("shape"):
                    value = onnx.ValueInfoProto(name=f"{name}/initial_{len(hidden)}")
                    value.type.sequence_type.elem_type.tensor_type.elem_type = type_.elem_type
                    node.input[i] = value.name
                    hidden.append(value)
    graph.input.extend(hidden)
    return bool(hidden)


def _collect(graph: onnx.GraphProto, tensors: set[str], sequences: set[str]) -> None:
    """Find the names that are on tensors first, and those that are on sequences first."""
    found = {value.name: value for value in declared_values(graph)}
    for value in sorted(graph.input, key=lambda value: value.type.HasField("sequence_type")):
        _add(value.type, tensors, sequences)
    for node in graph.node:
        for inner in subgraphs(node):
            _collect(inner, tensors, sequences)
        for name in node.output:
            if name in found:
                _add(found[name].type, tensors, sequences)


def _add(type_: onnx.TypeProto, tensors: set[str], sequences: set[str]) -> None:
    names = {dim.dim_param for dim in _dims(type_) if dim.dim_param} - tensors - sequences
    (tensors if type_.HasField("tensor_type") else sequences).update(names)


def _dims(type_: onnx.TypeProto) -> Iterator[onnx.TensorShapeProto.Dimension]:
    kind = type_.WhichOneof("value")
    if kind in ("sequence_type", "optional_type"):
        yield from _dims(getattr(type_, kind).elem_type)
    elif kind == "tensor_type":
        yield from type_.tensor_type.shape.dim
