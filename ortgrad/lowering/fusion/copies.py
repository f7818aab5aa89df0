"""Removes nodes that only copy a value, so that the element-wise nodes around them can be fused.

Those are Identity, and Expand before a node that broadcasts its operands to the same shape anyway.
"""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.graph.traversal import all_graphs, is_standard
from ortgrad.lowering.fusion.expressions import TABLE
from ortgrad.lowering.fusion.fusable import infer_broadcast, known_shape


def drop_copies(model: ir.Model) -> ir.Model:
    """Let the nodes of the model and its subgraphs read the original of a copy."""
    for graph in list(all_graphs(model.graph)):
        gone = []
        for node in graph:
            infer_broadcast(node)
            if node.domain == "" and _is_superfluous(node):
                assert node.inputs[0] is not None
                node.outputs[0].replace_all_uses_with(node.inputs[0])
                gone.append(node)
        graph.remove(gone, safe=True)
    return model


def _is_superfluous(node: ir.Node) -> bool:
    if node.op_type not in ("Identity", "Expand") or node.outputs[0].is_graph_output():
        return False
    source, copy = node.inputs[0], node.outputs[0]
    if source is None or source.dtype is None:
        return False
    if node.op_type == "Identity":
        return isinstance(source.type, ir.TensorType)
    shape, users = known_shape(copy), [use.node for use in copy.uses()]
    return shape is not None and bool(users) and all(_broadcasts(user, copy, shape) for user in users)


def _broadcasts(node: ir.Node, copy: ir.Value, shape: tuple[int | str, ...]) -> bool:
    """Return whether an element-wise node has another operand of that shape, to which it broadcasts."""
    expression = TABLE.get(node.op_type)
    if expression is None or expression.equal_shapes or not is_standard(node):
        return False
    if node.op_type in ("PRelu", "Clip"):
        # Their second operand broadcasts in one direction only, or not at all.
        return False
    others = [known_shape(value) for value in node.inputs if value is not None and value is not copy]
    return shape in others
