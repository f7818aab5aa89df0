"""Selection of the inputs, of a model and of its nodes, that a gradient can reach."""

from __future__ import annotations

import onnx

from ortgrad.graph.protos import FLOATS, captured_names, subgraphs
from ortgrad.operators.declaration import find_operator

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
