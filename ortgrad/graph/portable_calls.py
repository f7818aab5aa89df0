"""Gradient nodes as calls of functions with names of their own.

onnxruntime-training 1.19.2 refuses the attribute that completes a gradient node, and confuses overloads of a
function. In files for it, a node that it does not know, or computes wrongly, calls a function whose name is
unique and whose body consists of standard operators. Here such a call becomes the gradient node again.
"""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.graph.traversal import all_nodes
from ortgrad.operators.declaration import CALL_ATTRIBUTE, PORTABLE_PREFIX, Operator, find_operator


def portable_identifier(operator: Operator, digest: str) -> tuple[str, str]:
    """Return domain and name of the function for nodes of an operator."""
    return PORTABLE_PREFIX + operator.domain, f"{operator.name}_{digest}"


def portable_operator(op_type: str, domain: str) -> Operator | None:
    """Return the operator for whose nodes `portable_identifier` made the names, or None."""
    if not domain.startswith(PORTABLE_PREFIX):
        return None
    return find_operator(op_type.rpartition("_")[0], domain.removeprefix(PORTABLE_PREFIX))


def restore_gradient_nodes(model: ir.Model) -> None:
    """Replace calls of such functions by gradient nodes, and remove the functions."""
    restored = False
    for node in all_nodes(model.graph):
        operator = portable_operator(node.op_type, node.domain)
        if operator is not None and CALL_ATTRIBUTE in node.attributes:
            node.domain, node.op_type, node.version = operator.domain, operator.name, None
            model.opset_imports.setdefault(operator.domain, 1)
            restored = True
    if restored:
        for key in [key for key in model.functions if portable_operator(key[1], key[0])]:
            del model.functions[key]
        used = {function.domain for function in model.functions.values()}
        for domain in list(model.opset_imports):
            if domain.startswith(PORTABLE_PREFIX) and domain not in used:
                del model.opset_imports[domain]
