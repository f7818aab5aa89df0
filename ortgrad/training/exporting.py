"""export: the trained forward model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from ortgrad.errors import ArgumentTypeError, TrainingModelError
from ortgrad.graph.loading import ModelLike, load_model
from ortgrad.graph.matching import nearest
from ortgrad.graph.protos import all_graphs, copy_of
from ortgrad.keywords import checked
from ortgrad.training import checkpoint
from ortgrad.training.checkpoint.state import Checkpoint, element_type
from ortgrad.training.data import as_array
from ortgrad.training.evaluation import for_inference
from ortgrad.training.half_precision import HALVES, in_half_precision
from ortgrad.training.linear_models import set_linear_models
from ortgrad.training.state import TrainingState
from ortgrad.training.weights import save_model, set_value


@checked
def export(
    model: ModelLike, state: Any, path: str | os.PathLike[str] | None = None
) -> onnx.ModelProto | None:
    """Return the model with the trained values of its parameters, or write it to a file.

    `model` is the forward model that was trained: its inputs, outputs and nodes stay as they are, but
    BatchNormalization and Dropout are in inference mode, also if the model was written in training mode. (A
    mode of Dropout that is an input of the model remains one.) `state` is a Trainer, a Result, a
    CheckpointState, a Checkpoint, the path of a checkpoint, or arrays by name. All of its parameters must be
    in the model, with the same shapes and types; those of a float16 model, trained in float32, are rounded.

    With a path, weights that are too large for one file go to a second one, `<path>.data`, and nothing is
    returned. A file keeps its old contents until the new ones are complete.

    >>> import numpy as np, onnx
    >>> from ortgrad.training import export
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[2] x) => (float[2] y) <float[2] w = {0, 0}> { y = Mul(x, w) }''')
    >>> trained = export(model, {"w": np.float32([1, 2])})
    >>> onnx.numpy_helper.to_array(trained.graph.initializer[0])
    array([1., 2.], dtype=float32)
    """
    arrays = arrays_of(state)
    made = copy_of(load_model(model))
    places, written = _places(made), set_linear_models(made, arrays)
    for name, array in arrays.items():
        if name in written:
            continue
        if name not in places:
            near = nearest(name, places) or "; is it the one that was trained?"
            raise TrainingModelError(f"the model has no parameter {name!r}{near}")
        tensor = places[name]
        if tensor.data_type in HALVES and array.dtype == np.float32:
            array = in_half_precision(name, array, tensor.data_type)
        if list(tensor.dims) != list(array.shape) or tensor.data_type != element_type(array):
            kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
            raise TrainingModelError(
                f"parameter {name!r} is {array.dtype}{list(array.shape)}, in the model it is "
                f"{kind}{list(tensor.dims)}"
            )
        set_value(tensor, array)
    for_inference(made)
    if path is None:
        return made
    save_model(made, Path(path))
    return None


def arrays_of(state: Any) -> dict[str, np.ndarray]:
    """Return the parameters of a state by name: of anything that `export` takes."""
    state = getattr(state, "state", state)
    if isinstance(state, (str, os.PathLike)):
        state = checkpoint.load(state)
    if isinstance(state, TrainingState):
        state = state.checkpoint(optimizer=False)
    if isinstance(state, Checkpoint):
        if state.nominal:
            raise TrainingModelError("the checkpoint is nominal: it has no values of the parameters")
        return {**state.trainable, **state.frozen}
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(f"a {type(state).__name__} is neither a model nor the state of a training")
    return {
        name: value.numpy()
        if isinstance(value, onnxruntime.OrtValue)
        else as_array(value, f"parameter {name!r}")
        for name, value in state.items()
    }


def _places(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """Return the tensors of all weights by name: initializers and Constant nodes, also in subgraphs."""
    found: dict[str, onnx.TensorProto] = {}
    # Those of the main graph come last: they count if a name occurs twice.
    for graph in reversed(list(all_graphs(model.graph))):
        for node in graph.node:
            for attribute in node.attribute if node.op_type == "Constant" else ():
                if attribute.name == "value":
                    found[node.output[0]] = attribute.t
        found.update({tensor.name: tensor for tensor in graph.initializer})
    return found
