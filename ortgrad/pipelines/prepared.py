"""The pipeline of prepare: the passes that make a model with gradient nodes ready for a session."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir

from ortgrad.compiled import machine_code
from ortgrad.graph.inference import infer_types
from ortgrad.graph.serialization import read, write
from ortgrad.operators.call import EMPTY_PREFIX
from ortgrad.operators.declaration import PYTHON_TYPES, Operator, find_operator
from ortgrad.passes.attach import attach, detach
from ortgrad.passes.expand import expand
from ortgrad.passes.inline import inline
from ortgrad.pipelines.opening import OPENING, run


def prepare_proto(source: onnx.ModelProto, kernels: str, *, bodies: bool) -> onnx.ModelProto:
    """Return a copy of the model in which gradient nodes are complete, or replaced by their bodies."""
    model = inline(read(_with_empty_tensors(source)), _holds_gradients)
    model = run(model, *OPENING, lambda model: expand(model, _chooser(kernels)), detach)
    if bodies:
        infer_types(model)
        model = attach(model)
    prepared = write(model, source)
    # onnx-ir drops training_info.
    prepared.training_info.extend(source.training_info)
    return prepared


def _chooser(kernels: str) -> Callable[[ir.Node, Operator], bool]:
    def choose(node: ir.Node, operator: Operator) -> bool:
        compiled = operator.compiled_kernel if machine_code.is_installed() else None
        runs_compiled = compiled is not None and (compiled.auto or kernels == "compiled")
        by_body = operator.body and operator.auto == "onnx" and not runs_compiled
        if kernels == "onnx" or (kernels != "python" and by_body):
            return True
        # onnxruntime-extensions refuses these element types, even beside a function body.
        types = [v.dtype for v in (*node.inputs, *node.outputs) if v is not None and v.dtype]
        return any(t.numpy().name not in PYTHON_TYPES for t in types)

    return choose


def _holds_gradients(function: ir.Function) -> bool:
    """Return whether to inline a function: inside functions, the types of gradient nodes are unknown."""
    if find_operator(function.name, function.domain):
        return False
    return any(
        find_operator(node.op_type, node.domain)
        for node in ir.traversal.RecursiveGraphIterator(function.graph)
    )


def _with_empty_tensors(source: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the empty tensors that nodes of `ortgrad.nodes` read for absent inputs."""
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
