"""The pipeline of prepare: the passes that make a model with gradient nodes ready for a session."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from ortgrad.compiled import machine_code
from ortgrad.graph.serialization import read, write
from ortgrad.graph.traversal import all_nodes
from ortgrad.lowering.biases import join_biases
from ortgrad.lowering.columns import expand_with_columns
from ortgrad.lowering.depthwise import use_depthwise
from ortgrad.lowering.fold_dequantized import fold_dequantized
from ortgrad.lowering.forward_convolutions import use_forward_convolutions
from ortgrad.lowering.fusion.fuse import fuse
from ortgrad.lowering.max_pools import use_max_pool
from ortgrad.lowering.moments import use_moments
from ortgrad.lowering.open_losses import open_losses
from ortgrad.lowering.pointwise import use_pointwise
from ortgrad.lowering.share_branches import share_branches
from ortgrad.lowering.single_channels import expand_single_channels
from ortgrad.lowering.slices import join_slices
from ortgrad.lowering.transposed_products import use_transposed_products
from ortgrad.lowering.ways import expand_constant, runs_as_body
from ortgrad.lowering.winograd import use_winograd
from ortgrad.operators.call import EMPTY_PREFIX
from ortgrad.operators.declaration import find_operator
from ortgrad.passes import Pass, run
from ortgrad.passes.attach import attach, detach
from ortgrad.passes.complete import complete
from ortgrad.passes.expand import expand
from ortgrad.passes.inline import inline
from ortgrad.pipelines.opening import OPENING
from ortgrad.shapes.dimension_names import forget_dimensions, name_dimensions
from ortgrad.shapes.inference import infer_types

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
        model = run(model, expand_constant, *BEFORE_BODIES)
        if kernels == "auto":
            model = expand_single_channels(model)
    # Compiled sessions merge nodes around convolutions instead.
    replace = expand if bodies or compiled else expand_with_columns
    model = run(model, lambda model: replace(model, runs_as_body(kernels)), detach)
    if bodies:
        infer_types(model)
        model = attach(model)
    else:
        model = open_losses(model, compiled=compiled)
        if compiled:
            model = run(model, *FOR_COMPILED)
    return model


def _holds_gradients(function: ir.Function) -> bool:
    """Return whether to inline a function: inside functions, the types of gradient nodes are unknown."""
    if find_operator(function.name, function.domain):
        return False
    return any(find_operator(node.op_type, node.domain) for node in all_nodes(function.graph))


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
