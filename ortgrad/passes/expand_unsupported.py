"""Open up nodes that have no gradient rule but a body: gradient operators, and functions of the schema."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ortgrad.backward import active_values, dependencies
from ortgrad.gradient import find_rule
from ortgrad.passes.complete import complete, infer_types
from ortgrad.passes.expand import expand
from ortgrad.passes.nodes import gradient_nodes


def expand_unsupported(model: ir.Model, targets: Sequence[ir.Value]) -> None:
    """Replace nodes between the targets and the outputs that only a body can differentiate, in place."""
    active = active_values(model.graph, targets)
    chosen = {
        node
        for node, _ in gradient_nodes(model)
        if find_rule(node.op_type, node.domain) is None and any(v in active for v in dependencies(node))
    }
    if chosen:
        complete(model)
        expand(model, lambda node, _: node in chosen)
        infer_types(model)
