"""Checkpoints from and to ONNX tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import numpy_helper

from ortgrad.errors import TrainingError, TrainingModelError
from ortgrad.keywords import checked
from ortgrad.training import checkpoint

__all__ = ["load_checkpoint_to_model", "save_checkpoint"]


@checked
def save_checkpoint(
    parameters: tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]],
    path_to_checkpoint: str | os.PathLike[str],
    nominal_checkpoint: bool = False,
) -> None:
    """Write trainable and frozen parameters, as `TrainingBlock.parameters` returns them, to a checkpoint.

    A nominal checkpoint has their names and types, but no values.

    >>> import numpy as np, onnx, os, tempfile
    >>> from ortgrad.training import onnxblock
    >>> path = os.path.join(tempfile.mkdtemp(), "checkpoint")
    >>> onnxblock.save_checkpoint(([onnx.numpy_helper.from_array(np.float32([1, 2]), "w")], []), path)
    """
    if parameters is None:
        raise TrainingError("there are no parameters to save")
    trainable, frozen = (
        {tensor.name: numpy_helper.to_array(tensor) for tensor in tensors} for tensors in parameters
    )
    checkpoint.save(
        checkpoint.Checkpoint(trainable=trainable, frozen=frozen, nominal=nominal_checkpoint),
        path_to_checkpoint,
    )


@checked
def load_checkpoint_to_model(path_to_checkpoint: str | os.PathLike[str], model: onnx.ModelProto) -> None:
    """Set the initializers of the model to the parameters of the same names in the checkpoint.

    Initializers that are not in the checkpoint, and parameters that are not in the model, are left alone.

    >>> import numpy as np, onnx, os, tempfile
    >>> from ortgrad.training import onnxblock
    >>> path = os.path.join(tempfile.mkdtemp(), "checkpoint")
    >>> onnxblock.save_checkpoint(([onnx.numpy_helper.from_array(np.float32([1, 2]), "w")], []), path)
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[2] x) => (float[2] y) <float[2] w = {0, 0}> { y = Mul(x, w) }''')
    >>> onnxblock.load_checkpoint_to_model(path, model)
    >>> onnx.numpy_helper.to_array(model.graph.initializer[0])
    array([1., 2.], dtype=float32)
    """
    state = checkpoint.load(path_to_checkpoint)
    if state.nominal:
        raise TrainingError(f"the checkpoint {os.fspath(path_to_checkpoint)!r} is nominal: it has no values")
    values = {**state.trainable, **state.frozen}
    found = [tensor for tensor in model.graph.initializer if tensor.name in values]
    for tensor in found:
        _check(tensor, values[tensor.name])
    for tensor in found:
        tensor.CopyFrom(numpy_helper.from_array(values[tensor.name], tensor.name))


def _check(tensor: onnx.TensorProto, value: np.ndarray) -> None:
    kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    if value.shape != tuple(tensor.dims) or value.dtype != kind:
        raise TrainingModelError(
            f"the parameter {tensor.name!r} of the checkpoint is {value.dtype} {list(value.shape)}; "
            f"in the model it is {kind} {list(tensor.dims)}"
        )
