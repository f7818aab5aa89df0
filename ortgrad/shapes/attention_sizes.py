"""Corrects the inferred sizes of Attention's outputs.

onnx's shape inference counts an unknown number of keys, present or past, and an unknown number of elements of
a value as 0.
"""

from __future__ import annotations

import onnx

from ortgrad.graph.protos import all_graphs, declared_values, is_operator

# Places among the inputs and outputs.
_KEYS, _PAST_KEYS, _RESULT, _PRODUCTS = 1, 4, 0, 3


def hide_unknown_lengths(graph: onnx.GraphProto, inferred: onnx.GraphProto) -> bool:
    """Let outputs whose last size is wrong have none, in place, for shape inference only.

    `inferred` is the same graph with inferred types. Returns whether there are such outputs.
    """
    hidden: list[onnx.ValueInfoProto] = []
    types: dict[str, onnx.TypeProto] = {}
    for inner, other in zip(all_graphs(graph), all_graphs(inferred), strict=True):
        types.update((value.name, value.type) for value in declared_values(other))
        for node in inner.node:
            if not is_operator(node, "Attention"):
                continue
            for place in _wrong_outputs(node, types):
                value = onnx.ValueInfoProto(name=node.output[place], type=types[node.output[place]])
                value.type.tensor_type.shape.dim[-1].Clear()
                node.output[place] += "/hidden"
                hidden.append(value)
    graph.input.extend(hidden)
    return bool(hidden)


def _wrong_outputs(node: onnx.NodeProto, types: dict[str, onnx.TypeProto]) -> list[int]:
    """Return the places of outputs whose last size is inferred from sizes that are not known."""
    found = []
    for place in (_RESULT, _PRODUCTS):
        name = node.output[place] if place < len(node.output) else ""
        dims = types[name].tensor_type.shape.dim if name in types else []
        if not len(dims) or not dims[-1].HasField("dim_value"):
            continue
        if dims[-1].dim_value == 0 or (place == _PRODUCTS and not _counts_keys(node, types)):
            found.append(place)
    return found


def _counts_keys(node: onnx.NodeProto, types: dict[str, onnx.TypeProto]) -> bool:
    """Return whether the numbers of all keys are known."""
    for place in (_KEYS, _PAST_KEYS):
        name = node.input[place] if place < len(node.input) else ""
        dims = types[name].tensor_type.shape.dim if name in types else []
        # [samples, keys, elements of all heads] or [samples, heads, keys, elements]
        if name and not (len(dims) in (3, 4) and dims[-2].HasField("dim_value")):
            return False
    return True
