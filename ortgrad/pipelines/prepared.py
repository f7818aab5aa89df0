"""The pipeline of prepare: the passes that make a model with gradient nodes ready for a session."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir

from ortgrad.compiled import machine_code
from ortgrad.graph.constants import constant_values
from ortgrad.graph.gradient_nodes import call_of
from ortgrad.graph.inference import infer_types
from ortgrad.graph.serialization import read, write
from ortgrad.operators.call import EMPTY_PREFIX
from ortgrad.operators.compiled import CompiledKernel
from ortgrad.operators.declaration import PYTHON_TYPES, Operator, find_operator
from ortgrad.passes.attach import attach, detach
from ortgrad.passes.biases import join_biases
from ortgrad.passes.columns import expand_with_columns
from ortgrad.passes.complete import complete
from ortgrad.passes.depthwise import use_depthwise
from ortgrad.passes.expand import expand
from ortgrad.passes.fold_dequantized import fold_dequantized
from ortgrad.passes.forward_convolutions import use_forward_convolutions
from ortgrad.passes.fuse import fuse
from ortgrad.passes.inline import inline
from ortgrad.passes.max_pools import use_max_pool
from ortgrad.passes.moments import use_moments
from ortgrad.passes.name_dimensions import forget_dimensions, name_dimensions
from ortgrad.passes.open_losses import open_losses
from ortgrad.passes.pointwise import use_pointwise
from ortgrad.passes.share_branches import share_branches
from ortgrad.passes.single_channels import expand_single_channels
from ortgrad.passes.slices import join_slices
from ortgrad.passes.swap_axes import use_swap_axes
from ortgrad.passes.transposed_products import use_transposed_products
from ortgrad.passes.winograd import use_winograd
from ortgrad.pipelines.opening import OPENING, Pass, run

# Simplify models for sessions.
FOR_SESSIONS: tuple[Pass, ...] = (share_branches, join_slices, join_biases, fold_dequantized)
# Replace nodes in sessions that run compiled kernels, before gradient nodes are replaced by their bodies and
# after it. Models that are saved keep their nodes.
BEFORE_BODIES: tuple[Pass, ...] = (use_pointwise, use_winograd)
FOR_COMPILED: tuple[Pass, ...] = (
    use_depthwise,
    use_forward_convolutions,
    use_max_pool,
    use_moments,
    use_transposed_products,
    use_swap_axes,
    fuse,
)


def prepare_proto(
    source: onnx.ModelProto, kernels: str, *, bodies: bool, internal: bool = True
) -> onnx.ModelProto:
    """Return a copy of the model in which gradient nodes are complete, or replaced by their bodies."""
    model = inline(read(_with_empty_tensors(source)), _holds_gradients)
    dimensions = name_dimensions(model)
    model = _prepare_opened(run(model, *OPENING), kernels, bodies=bodies, internal=internal)
    forget_dimensions(model, dimensions)
    prepared = write(model, source)
    # onnx-ir drops training_info.
    prepared.training_info.extend(source.training_info)
    return prepared


def prepare_built(
    model: ir.Model, source: onnx.ModelProto, kernels: str, *, internal: bool
) -> onnx.ModelProto:
    """Return a model with gradients for a session; it is in memory and has gone through the opening passes.

    Only nodes that were added later may be incomplete. The model itself is changed.
    """
    dimensions = name_dimensions(model)
    model = _prepare_opened(complete(model), kernels, bodies=False, internal=internal)
    forget_dimensions(model, dimensions)
    return write(model, source)


def _prepare_opened(model: ir.Model, kernels: str, *, bodies: bool, internal: bool) -> ir.Model:
    """Implement `prepare_proto` for a model after the opening passes."""
    compiled = internal and not bodies and kernels in ("auto", "compiled") and machine_code.is_installed()
    if not bodies:
        model = run(model, *FOR_SESSIONS)
    if compiled:
        model = run(model, _expand_constant, *BEFORE_BODIES)
        if kernels == "auto":
            model = expand_single_channels(model)
    # Compiled sessions merge nodes around convolutions instead.
    replace = expand if bodies or compiled else expand_with_columns
    model = run(model, lambda model: replace(model, _chooser(kernels)), detach)
    if bodies:
        infer_types(model)
        model = attach(model)
    else:
        model = open_losses(model, compiled=compiled)
        if compiled:
            model = run(model, *FOR_COMPILED)
    return model


def _chooser(kernels: str) -> Callable[[ir.Node, Operator], bool]:
    def choose(node: ir.Node, operator: Operator) -> bool:
        if kernels == "onnx" or (kernels != "python" and _runs_body(node, operator, kernels)):
            return True
        # onnxruntime-extensions refuses these element types, even beside a function body.
        types = [v.dtype for v in (*node.inputs, *node.outputs) if v is not None and v.dtype]
        return any(t.numpy().name not in PYTHON_TYPES for t in types)

    return choose


def _expand_constant(model: ir.Model) -> ir.Model:
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
    return compiled.auto(*map(_known_shape, node.inputs), **call_of(node, operator).attributes)


def _known_shape(value: ir.Value | None) -> tuple[int | None, ...] | None:
    """Return the shape of an input; None stands for a size, or a number of dimensions, that is not known."""
    if value is None or value.shape is None:
        return None
    return tuple(size if isinstance(size, int) else None for size in value.shape)


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
