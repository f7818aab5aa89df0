"""The gradients of a loss, in a forward model in training mode."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx
import onnx_ir as ir

from ortgrad.errors import ModelError, TrainingModelError
from ortgrad.graph.bodies import is_body
from ortgrad.graph.loading import diagnosing
from ortgrad.graph.protos import FLOATS
from ortgrad.graph.serialization import read
from ortgrad.passes import Pass, run
from ortgrad.passes.inline import inline
from ortgrad.pipelines.backward_graph import build_opened
from ortgrad.pipelines.opening import OPENING
from ortgrad.pipelines.stops import warn_about_stops
from ortgrad.training.evaluation import in_evaluation
from ortgrad.training.forms import in_training
from ortgrad.training.protos import Nodes


def differentiate(
    forward: onnx.ModelProto,
    wrt: Sequence[str],
    loss: str,
    *,
    untrained: Collection[str] = (),
    finish: Sequence[Pass] = (),
) -> ir.Model:
    """Return a forward model in training mode, with the gradients of the loss as its last outputs.

    `loss` is an output of the model, which may get a node that reshapes it. `untrained` are the outputs of
    batch normalizations that are in evaluation mode. `finish` are the last passes.
    """
    if untrained:
        forward = in_evaluation(forward, only=untrained)

    def begin(model: ir.Model) -> ir.Model:
        return in_training(model, untrained)

    if not wrt:
        model = inline(read(forward), lambda function: not is_body(function))
        return run(model, *OPENING, begin, *finish)
    scalar = _scalar(forward, loss)
    try:
        with diagnosing(forward):
            model, ran = build_opened(forward, wrt, [scalar], begin=(begin,), finish=finish)
    except TrainingModelError:
        raise
    except ModelError as error:
        raise TrainingModelError(f"the training model cannot be built: {error}") from error
    warn_about_stops(ran.stopped)
    return model


def _scalar(model: onnx.ModelProto, loss: str) -> str:
    """Return the name of the loss as a scalar; a loss with one element and dimensions is reshaped."""
    tensor = next(value for value in model.graph.output if value.name == loss).type.tensor_type
    if tensor.elem_type not in FLOATS:
        raise TrainingModelError(f"the loss {loss!r} is not a floating-point tensor")
    sizes = [dim.dim_value or dim.dim_param or "?" for dim in tensor.shape.dim]
    if tensor.HasField("shape") and not sizes:
        return loss
    if any(size not in (1, "?") for size in sizes):
        raise TrainingModelError(f"the loss {loss!r} is not a scalar: its shape is {sizes}; reduce it")
    op = Nodes(model)
    # Fails in a run in which the loss has more than one element.
    return op.Reshape(loss, op.constant("shape", [], onnx.TensorProto.INT64))
