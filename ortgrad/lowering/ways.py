"""Which gradient nodes run on kernels of ortgrad, and which are replaced by their bodies."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from ortgrad.compiled import machine_code
from ortgrad.graph.gradient_nodes import call_of
from ortgrad.graph.traversal import sizes_of
from ortgrad.lowering.constants import constant_values
from ortgrad.operators.compiled import CompiledKernel
from ortgrad.operators.declaration import PYTHON_TYPES, Operator
from ortgrad.passes.expand import expand


def runs_as_body(kernels: str) -> Callable[[ir.Node, Operator], bool]:
    """Return a function that says which gradient nodes to replace by their bodies."""

    def choose(node: ir.Node, operator: Operator) -> bool:
        if kernels == "onnx" or (kernels != "python" and _runs_body(node, operator, kernels)):
            return True
        # onnxruntime-extensions refuses these element types, even beside a function body.
        types = [v.dtype for v in (*node.inputs, *node.outputs) if v is not None and v.dtype]
        return any(t.numpy().name not in PYTHON_TYPES for t in types)

    return choose


def expand_constant(model: ir.Model) -> ir.Model:
    """Replace gradient nodes that depend on no input by their bodies, which onnxruntime folds."""
    constant = constant_values(model, bodies=True)
    return expand(model, lambda node, operator: node.outputs[0] in constant)


def _runs_body(node: ir.Node, operator: Operator, kernels: str) -> bool:
    """Return whether a node's body is the best way to run it that `kernels` allows."""
    compiled = operator.compiled_kernel if machine_code.is_installed() else None
    if compiled is not None and (kernels == "compiled" or _is_fastest(compiled, node, operator)):
        return False
    return operator.body is not None and operator.auto == "onnx"


def _is_fastest(compiled: CompiledKernel, node: ir.Node, operator: Operator) -> bool:
    if not callable(compiled.auto):
        return compiled.auto
    return compiled.auto(*map(sizes_of, node.inputs), **call_of(node, operator).attributes)
