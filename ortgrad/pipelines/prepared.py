"""The passes that make a model with gradient nodes ready, in order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from ortgrad.dialects.gradient_operator import expand_gradient_operator
from ortgrad.dialects.training import write_in_standard_onnx
from ortgrad.graph.gradient_nodes import call_of, dimensions
from ortgrad.graph.inference import infer_types
from ortgrad.graph.serialization import read, write
from ortgrad.operators.call import EMPTY_PREFIX
from ortgrad.operators.declaration import PYTHON_TYPES, Operand, Operator, Way, find_operator
from ortgrad.passes.attach import attach, detach
from ortgrad.passes.complete import complete
from ortgrad.passes.expand import expand
from ortgrad.passes.opset import at_minimum_opset


def prepare_proto(source: onnx.ModelProto, kernels: str, *, bodies: bool) -> onnx.ModelProto:
    """A copy of the model with complete gradient nodes, or what is in their bodies in their place."""
    model = read(_with_empty_tensors(source))
    _inline_functions_with_gradients(model)
    complete(model)
    model = at_minimum_opset(model)
    if write_in_standard_onnx(model):
        complete(model)
    if expand_gradient_operator(model):
        complete(model, built=True)
    expand(model, _chooser(kernels))
    detach(model)
    if bodies:
        infer_types(model)
        attach(model)
    prepared = write(model, source)
    # onnx-ir has no place for it.
    prepared.training_info.extend(source.training_info)
    return prepared


def _chooser(kernels: str) -> Callable[[ir.Node, Operator], bool]:
    def choose(node: ir.Node, operator: Operator) -> bool:
        if kernels == "onnx" or (kernels == "auto" and operator.body and _faster(node, operator) == "onnx"):
            return True
        # onnxruntime-extensions refuses these element types, even beside a function body.
        types = [v.dtype for v in (*node.inputs, *node.outputs) if v is not None and v.dtype]
        return any(t.numpy().name not in PYTHON_TYPES for t in types)

    return choose


def _faster(node: ir.Node, operator: Operator) -> Way:
    if not callable(operator.auto):
        return operator.auto
    call = call_of(node, operator)
    operands = [
        Operand(dimensions(value)) if value is not None and real else None
        for value, real in zip(node.inputs, call.present, strict=True)
    ]
    return operator.auto(*operands, **call.attributes)


def _inline_functions_with_gradients(model: ir.Model) -> None:
    """Types are not known inside functions, so gradient nodes in them are brought to the surface."""

    def holds_gradients(function: ir.Function) -> bool:
        if find_operator(function.name, function.domain):
            return False
        return any(
            find_operator(node.op_type, node.domain)
            for node in ir.traversal.RecursiveGraphIterator(function.graph)
        )

    if any(holds_gradients(function) for function in model.functions.values()):
        InlinePass(criteria=holds_gradients)(model)


def _with_empty_tensors(source: onnx.ModelProto) -> onnx.ModelProto:
    """The model, with the tensors that nodes of `ortgrad.nodes` name where an input is absent."""
    names = {name for node in source.graph.node for name in node.input if name.startswith(EMPTY_PREFIX)}
    missing = names - {tensor.name for tensor in source.graph.initializer}
    if not missing:
        return source
    model = onnx.ModelProto()
    model.CopyFrom(source)
    for name in sorted(missing):
        dtype = np.dtype(name.removeprefix(EMPTY_PREFIX))
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(0, dtype), name))
    return model
