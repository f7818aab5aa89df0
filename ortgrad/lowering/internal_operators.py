"""What passes share that put operators of the internal domain into a model."""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.graph.names import Names
from ortgrad.operators.declaration import INTERNAL_DOMAIN, Operator
from ortgrad.passes.complete import complete_node

# The element types for which kernels are compiled.
KERNEL_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def take_over(model: ir.Model, node: ir.Node, operator: Operator) -> None:
    """Let an internal operator compute a complete node; its call is the same."""
    node.op_type, node.domain = operator.name, INTERNAL_DOMAIN
    model.opset_imports.setdefault(INTERNAL_DOMAIN, 1)


def become(model: ir.Model, node: ir.Node, operator: Operator, names: Names) -> None:
    """Make a node one of an internal operator, and complete it; it has the operator's attributes already."""
    take_over(model, node, operator)
    complete_node(model, node, operator, names)
