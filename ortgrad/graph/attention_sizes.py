"""Corrects the inferred size of Attention's products of queries and keys.

onnx's shape inference counts an unknown number of keys, present or past, as 0.
"""

from __future__ import annotations

import onnx

from ortgrad.graph.protos import all_graphs, declared_values

# Places among the inputs and outputs.
_KEYS, _PAST_KEYS, _PRODUCTS = 1, 4, 3


def hide_unknown_lengths(graph: onnx.GraphProto, inferred: onnx.GraphProto) -> bool:
    """Let these outputs have no inferred number of keys, in place, for shape inference only.

    `inferred` is the same graph with inferred types. Returns whether there are such outputs.
    """
    hidden: list[onnx.ValueInfoProto] = []
    types: dict[str, onnx.TypeProto] = {}
    for inner, other in zip(all_graphs(graph), all_graphs(inferred), strict=True):
        types.update((value.name, value.type) for value in declared_values(other))
        for node in inner.node:
            if node.op_type != "Attention" or node.domain not in ("", "ai.onnx"):
                continue
            name = node.output[_PRODUCTS] if len(node.output) > _PRODUCTS else ""
            if not name or name not in types or _counts_keys(node, types):
                continue
            value = onnx.ValueInfoProto(name=name, type=types[name])
            for dim in value.type.tensor_type.shape.dim[3:]:
                dim.Clear()
            node.output[_PRODUCTS] = f"{name}/products"
            hidden.append(value)
    graph.input.extend(hidden)
    return bool(hidden)


def _counts_keys(node: onnx.NodeProto, types: dict[str, onnx.TypeProto]) -> bool:
    """Return whether the numbers of all keys are known."""
    for place in (_KEYS, _PAST_KEYS):
        name = node.input[place] if place < len(node.input) else ""
        dims = types[name].tensor_type.shape.dim if name in types else []
        # [samples, keys, elements of all heads] or [samples, heads, keys, elements]
        if name and not (len(dims) in (3, 4) and dims[-2].HasField("dim_value")):
            return False
    return True
