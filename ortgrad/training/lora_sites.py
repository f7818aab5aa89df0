"""Where adapters can go: nodes that multiply by a constant weight, and the way from the weight to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx
from onnx import helper

from ortgrad.graph.protos import FLOATS, all_graphs, subgraphs
from ortgrad.operators.declaration import DOMAIN

# The names of an adapter's tensors are that of the weight with these suffixes.
ADAPTER_SUFFIXES = (".lora_A", ".lora_B")


@dataclass(frozen=True)
class Operand:
    """A constant value: a tensor of the model, or one that is computed from it alone."""

    weight: str
    tensor: onnx.TensorProto
    # The element type.
    type: int
    # The values from the weight to this one.
    names: tuple[str, ...]
    # Whether the last two axes are exchanged.
    swapped: bool = False
    # The node that dequantizes the weight, and its scale and zero point; None if they are not constants.
    dequantizer: onnx.NodeProto | None = None
    quantization: tuple[onnx.TensorProto, ...] | None = None


@dataclass(frozen=True)
class Site:
    """A node that multiplies by a weight."""

    graph: onnx.GraphProto
    node: onnx.NodeProto
    # The input that is the weight.
    place: int
    operand: Operand
    # The shape of the weight, as the node would have it.
    dims: tuple[int, ...]

    @property
    def weight(self) -> str:
        return self.operand.weight

    @property
    def names(self) -> tuple[str, ...]:
        return self.operand.names

    @property
    def is_conv(self) -> bool:
        return self.node.op_type == "Conv"

    @property
    def quantized(self) -> bool:
        return self.operand.dequantizer is not None or self.node.op_type == "MatMulNBits"

    @property
    def flipped(self) -> bool:
        """Whether the product is with the transposed weight."""
        flag = ("transA", "transB")[self.place] if self.node.op_type == "Gemm" else ""
        return self.operand.swapped != bool(attribute(self.node, flag, 0))

    @property
    def input_first(self) -> bool:
        """Whether the second to last axis of the weight is that of the node's input, not of its output."""
        return (self.place == 1) != self.flipped

    @property
    def described(self) -> str:
        return f"the {self.node.op_type} node {self.node.name or self.node.output[0]!r}"


def attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """Return the value of an attribute."""
    found = next((a for a in node.attribute if a.name == name), None)
    return default if found is None else helper.get_attribute_value(found)


def find_sites(model: onnx.ModelProto) -> list[Site]:
    """Return all nodes with a constant weight that can have an adapter, also those in subgraphs."""
    return list(_sites(model.graph, {}))


def _sites(graph: onnx.GraphProto, scope: dict[str, Operand]) -> Iterator[Site]:
    known = dict(scope)
    for value in graph.input:
        known.pop(value.name, None)
    for tensor in graph.initializer:
        known[tensor.name] = Operand(tensor.name, tensor, tensor.data_type, (tensor.name,))
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _sites(inner, known)
        yield from _sites_of(graph, node, known)
        made = _constant(node, known)
        for name in node.output:
            known.pop(name, None)
        if made is not None:
            known[node.output[0]] = made


def _sites_of(graph: onnx.GraphProto, node: onnx.NodeProto, known: dict[str, Operand]) -> Iterator[Site]:
    if not node.output or not node.output[0]:
        return
    if node.domain == DOMAIN and node.op_type == "MatMulNBits" and len(node.input) > 2:
        weight, scales = known.get(node.input[1]), known.get(node.input[2])
        dims = (attribute(node, "K", 0), attribute(node, "N", 0))
        if weight is not None and scales is not None and scales.type in FLOATS:
            yield Site(graph, node, 1, replace(weight, type=scales.type), dims)
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("MatMul", "Gemm", "Conv"):
        return
    for place in (1,) if node.op_type == "Conv" else (0, 1):
        operand = known.get(node.input[place]) if len(node.input) > place else None
        if operand is None or operand.type not in FLOATS:
            continue
        rank = len(operand.tensor.dims)
        fits = {
            "MatMul": rank >= 2,
            "Gemm": rank == 2,
            "Conv": rank >= 3 and not operand.swapped,
        }[node.op_type]
        if fits:
            yield Site(graph, node, place, operand, tuple(operand.tensor.dims))


def _constant(node: onnx.NodeProto, known: dict[str, Operand]) -> Operand | None:
    """Return the output of a node if it is a weight, or one in another form."""
    if node.domain not in ("", "ai.onnx") or len(node.output) != 1:
        return None
    name = node.output[0]
    if node.op_type == "Constant":
        tensor = next((a.t for a in node.attribute if a.name == "value" and a.HasField("t")), None)
        return None if tensor is None else Operand(name, tensor, tensor.data_type, (name,))
    source = known.get(node.input[0]) if node.input else None
    if source is None:
        return None
    made = replace(source, names=(*source.names, name))
    if node.op_type == "Identity":
        return made
    if node.op_type == "Cast" and source.type in FLOATS:
        return replace(made, type=attribute(node, "to", 0))
    if node.op_type == "Transpose" and _swaps_last(node, len(source.tensor.dims)):
        return replace(made, swapped=not source.swapped)
    if node.op_type == "DequantizeLinear" and len(source.names) == 1:
        scale = known.get(node.input[1]) if len(node.input) > 1 else None
        if scale is not None:
            settings = [known.get(other) for other in node.input[1:] if other]
            stored = [s.tensor for s in settings if s is not None and len(s.names) == 1]
            return replace(
                made,
                type=attribute(node, "output_dtype", 0) or scale.type,
                dequantizer=node,
                quantization=tuple(stored) if len(stored) == len(settings) else None,
            )
    return None


def _swaps_last(node: onnx.NodeProto, rank: int) -> bool:
    perm = list(attribute(node, "perm", range(rank)[::-1]))
    return rank >= 2 and perm == swap_last(rank)


def swap_last(rank: int) -> list[int]:
    """Return the permutation that exchanges the last two axes."""
    return [*range(rank - 2), rank - 1, rank - 2]


def constants(model: onnx.ModelProto) -> list[str]:
    """Return the names of all constants."""
    found: list[str] = []
    for graph in all_graphs(model.graph):
        found += [tensor.name for tensor in graph.initializer]
        found += [tensor.values.name for tensor in graph.sparse_initializer]
        found += [name for node in graph.node if node.op_type == "Constant" for name in node.output]
    return found


def defined(model: onnx.ModelProto) -> Counter[str]:
    """Count how many values of the model and its subgraphs have each name."""
    found: Counter[str] = Counter()
    for graph in all_graphs(model.graph):
        found.update({value.name for value in (*graph.input, *graph.initializer)})
        found.update({tensor.values.name for tensor in graph.sparse_initializer})
        found.update(name for node in graph.node for name in node.output if name)
    return found


def uses(model: onnx.ModelProto) -> dict[str, list[tuple[onnx.NodeProto | None, int]]]:
    """Return for every name the nodes that read it, with the place among their inputs.

    An output of a graph has None in the place of the node.
    """
    found: dict[str, list[tuple[onnx.NodeProto | None, int]]] = {}
    for graph in all_graphs(model.graph):
        for node in graph.node:
            for place, name in enumerate(node.input):
                found.setdefault(name, []).append((node, place))
        for place, value in enumerate(graph.output):
            found.setdefault(value.name, []).append((None, place))
    return found


def readers(names: Sequence[str], model: onnx.ModelProto) -> list[str]:
    """Return the kinds of nodes that read one of the values."""
    wanted = set(names)
    return sorted(
        {
            node.op_type
            for graph in all_graphs(model.graph)
            for node in graph.node
            if wanted.intersection(node.input)
        }
    )


def adapter_names(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the names of A and B by weight."""
    known = dict.fromkeys(names)
    weights = [name[: -len(ADAPTER_SUFFIXES[0])] for name in known if name.endswith(ADAPTER_SUFFIXES[0])]
    return {
        w: (w + ADAPTER_SUFFIXES[0], w + ADAPTER_SUFFIXES[1])
        for w in weights
        if w + ADAPTER_SUFFIXES[1] in known
    }
