"""The inputs and nodes that gradients reach, and those that they reach only through rounding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import onnx

from ortgrad.autodiff.rules import find_rule
from ortgrad.graph.protos import (
    FLOATS,
    all_nodes,
    captured_names,
    declared_values,
    dependencies,
    subgraphs,
)
from ortgrad.operators.declaration import find_operator
from ortgrad.operators.schema import with_schemas

# Inputs of gradient operators that have no gradient; for standard operators, the schemas say so.
SETTINGS = {"ratio", "roi", "scales"}

# Inputs that the schemas call not differentiable, although they have a gradient.
_HAS_GRADIENT = {
    "AffineGrid": {0},
    "DFT": {0},
    "GridSample": {1},
    "GRU": {5},
    "LSTM": {5, 6},
    "RNN": {5},
    "STFT": {0, 2},
}


def differentiable(proto: onnx.ModelProto) -> list[str]:
    """Return the floating-point inputs and initializers that are a differentiable input of some node."""
    elements = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    elements |= {value.name: value.type.tensor_type.elem_type for value in proto.graph.input}
    used: set[str] = set()
    for node in proto.graph.node:
        used.update(set(node.input) - not_differentiable(node, proto))
        used.update(name for graph in subgraphs(node) for name in captured_names(graph))
    return [name for name, element in elements.items() if element in FLOATS and name in used]


def not_differentiable(node: onnx.NodeProto, proto: onnx.ModelProto) -> set[str]:
    """Return the inputs of a node that its schema declares not differentiable: scales, axes, ratios."""
    operator = find_operator(node.op_type, node.domain)
    if operator is not None:
        parameters = zip(node.input, operator.inputs, strict=False)
        return {name for name, parameter in parameters if name and parameter.name in SETTINGS}
    if node.op_type == "ResizeGrad":
        return set(node.input[2:4])  # onnxruntime-training's: roi and scales
    version = next((o.version for o in proto.opset_import if o.domain == node.domain), 1)
    if not onnx.defs.has(node.op_type, version, node.domain):
        return set()
    formal = onnx.defs.get_schema(node.op_type, version, node.domain).inputs
    never = onnx.defs.OpSchema.DifferentiationCategory.NonDifferentiable
    last = len(formal) - 1
    kept = _HAS_GRADIENT.get(node.op_type, set()) if not node.domain else set()
    fixed: set[str] = set()
    free: set[str] = set()
    for i, name in enumerate(node.input):
        is_fixed = formal[min(i, last)].differentiation_category == never and i not in kept
        (fixed if is_fixed else free).add(name)
    return fixed - free


class PathNode(NamedTuple):
    """A node with the outputs `of` and the inputs `wrt` between which a gradient flows."""

    node: onnx.NodeProto
    wrt: list[str]
    of: list[str]


def nodes_between(proto: onnx.ModelProto, targets: Sequence[str], outputs: Sequence[str]) -> list[PathNode]:
    """Return the nodes of the main graph through which a gradient flows."""
    inferred = with_schemas(onnx.shape_inference.infer_shapes, proto)
    values = declared_values(inferred.graph)
    other = {v.name for v in values if v.type.tensor_type.elem_type not in FLOATS}
    active, needed = set(targets), set(outputs)
    for node in proto.graph.node:
        reads = active.intersection(dependencies(node))
        rule = find_rule(node.op_type, node.domain)
        if reads:
            # What is computed from quantized tensors may be quantized, too, and then has a gradient.
            quantized = (rule is not None and rule.scales is not None) or reads & other
            active.update(name for name in node.output if name and (quantized or name not in other))
    found = []
    for node in reversed(proto.graph.node):
        of = [name for name in node.output if name in needed and name in active]
        fixed = not_differentiable(node, proto)
        wrt = [name for name in dependencies(node) if name in active and name not in fixed]
        if of and wrt:
            needed.update(wrt)
            if not other.intersection((*of, *wrt)):
                found.append(PathNode(node, wrt, of))
    return found[::-1]


def rounding_behind(proto: onnx.ModelProto, outputs: Iterable[str]) -> Mapping[str, str]:
    """Return the values that reach the outputs through rounding, each with the nearest rounding node."""
    needed = set(outputs)
    found: dict[str, str] = {}
    for node in reversed(proto.graph.node):
        rule = find_rule(node.op_type, node.domain)
        if not needed.intersection(node.output) or (rule is not None and rule.function is None):
            continue
        reads = dependencies(node)
        needed.update(reads)
        behind = next((found[name] for name in node.output if name in found), None)
        if _rounds(node):
            behind = f"{node.op_type} node {(node.name or node.output[0])!r}"
        if behind is not None:
            found.update(dict.fromkeys(reads, behind))
    return found


def _rounds(node: onnx.NodeProto) -> bool:
    rules = [find_rule(each.op_type, each.domain) for each in all_nodes([node])]
    return any(rule is not None and rule.straight_through for rule in rules)
