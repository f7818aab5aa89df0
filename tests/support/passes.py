"""What a model must be after every pass."""

from __future__ import annotations

import onnx_ir as ir


def check_uses(model: ir.Model) -> None:
    """No value counts a node as a user that is not in the model."""
    nodes = set(model.graph.all_nodes())
    values = [v for graph in model.graphs() for v in (*graph.inputs, *graph.initializers.values())]
    values += [value for node in nodes for value in node.outputs]
    for value in values:
        for user, _ in value.uses():
            assert user in nodes, f"{user.op_type} {user.name} counts as a user of {value.name}"
