"""What onnxruntime knows of the values of a forward model: their types, and their ranks in one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from ortgrad.errors import ModelError, NodeError
from ortgrad.graph.loading import LARGEST_MESSAGE, one_line
from ortgrad.graph.names import Names
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.serialization import write
from ortgrad.graph.trials import onnxruntime_errors
from ortgrad.pipelines.prepare import prepare_loaded
from ortgrad.shapes.inference import without_weights

_ERRORS: tuple[type[Exception], ...] = (NodeError, RuntimeError, *onnxruntime_errors())
_TENSORS = {f"tensor({t.name.lower()})": t for t in ir.DataType}


def ask_onnxruntime(
    model: ir.Model, source: onnx.ModelProto, values: Sequence[ir.Value]
) -> dict[ir.Value, int]:
    """Return the ranks that onnxruntime infers, and set the types of values that have none.

    It knows operators that onnx does not. Values without an inferred rank are left out, and so are scalars,
    which onnxruntime does not tell from them. Nothing is found if it does not load the model.
    """
    asked = _exposing(model, [value.name or "" for value in values])
    with without_weights(asked):
        proto = write(asked, source)
    try:
        session = _session(prepare_loaded(proto, "onnx", bodies=False))
    except _ERRORS:
        return {}
    found: dict[ir.Value, int] = {}
    known = {output.name: output for output in session.get_outputs()}
    for value in values:
        told = known[value.name]
        if value.type is None and told.type in _TENSORS:
            value.type = ir.TensorType(_TENSORS[told.type])
        if told.shape and isinstance(value.type, ir.TensorType):
            found[value] = len(told.shape)
    return found


def see_ranks(
    model: ir.Model, source: onnx.ModelProto, feeds: Mapping[str, np.ndarray], values: Sequence[ir.Value]
) -> dict[ir.Value, int]:
    """Return the ranks of values in a run of the model."""
    tensors = [value for value in values if isinstance(value.type, ir.TensorType)]
    if not tensors:
        return {}
    run = model.clone()
    op = Recorder(run.opset_imports[""], Names.of(run))
    inner = {value.name: value for node in run.graph for value in node.outputs}
    shapes = [op.Shape(inner[value.name]) for value in tensors]
    run.graph.extend(op.nodes)
    run.graph.outputs[:] = shapes
    proto = write(run, source)
    if proto.ByteSize() >= LARGEST_MESSAGE:
        raise ModelError("the model is larger than 2 GB, so it cannot be run on feeds; declare shapes")
    try:
        results = _session(prepare_loaded(proto, "onnx", bodies=False)).run(None, dict(feeds))
    except _ERRORS as error:
        raise ModelError(f"the model does not run on these feeds: {one_line(error)}") from error
    return {value: len(shape) for value, shape in zip(tensors, results, strict=True)}


def _exposing(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """Return a copy of the model with the named values as its only outputs."""
    copy = model.clone()
    inner = {value.name: value for node in copy.graph for value in node.outputs}
    copy.graph.outputs[:] = [inner[name] for name in names]
    return copy


def _session(model: onnx.ModelProto) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are handled here and need not be logged to stderr
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
