"""Models of any size: weights that stay out of the protobuf messages, whose limit is 2 GB."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

from ortgrad.errors import ModelError, TrainingFileError
from ortgrad.graph.loading import LARGEST_MESSAGE, ModelLike, load_model, one_line
from ortgrad.graph.protos import all_graphs, keep
from ortgrad.training.checkpoint.state import as_bytes, element_type
from ortgrad.training.files import replacing
from ortgrad.training.protos import copy_without_initializers

# Larger models get a second file with the initializers, as protobuf is limited to 2 GB.
EXTERNAL_FROM = LARGEST_MESSAGE - (1 << 24)
_SMALLEST_EXTERNAL = 1024
# Models with more bytes of weights are processed without the values of their parameters.
LARGE = 1 << 30


@dataclass
class Weights:
    """A model, and where the values of its parameters are if the model does not hold them."""

    model: onnx.ModelProto
    values: dict[str, onnx.TensorProto] = field(default_factory=dict)
    folder: str = ""

    def array(self, tensor: onnx.TensorProto) -> np.ndarray:
        """Return the value of a parameter of the model."""
        found = self.values.get(tensor.name, tensor)
        try:
            value: np.ndarray = numpy_helper.to_array(found, self.folder)
        except (OSError, ValueError, onnx.checker.ValidationError) as error:
            raise ModelError(f"cannot read the weight {tensor.name!r}: {one_line(error)}") from error
        return value


def load_weights(model: ModelLike, parameters: Collection[str]) -> Weights:
    """Return the model; if it is large, without the values of the parameters, which are read one by one."""
    proto = load_model(model, external_data=False)
    folder = str(Path(model).parent) if isinstance(model, (str, os.PathLike)) else ""
    if folder and not _is_large(proto):
        proto = load_model(model)
    return split_weights(proto, parameters, folder)


def split_weights(proto: onnx.ModelProto, parameters: Collection[str], folder: str = "") -> Weights:
    """Do what `load_weights` does, for a loaded model; `folder` has its external data."""
    if not _is_large(proto):
        return Weights(proto)
    taken = [t for t in proto.graph.initializer if t.name in parameters]
    rest = sum(size_of(tensor) for tensor in proto.graph.initializer if tensor.name not in parameters)
    if rest > LARGE:
        raise ModelError(
            f"initializers with {rest / 2**30:.1f} GiB are neither in requires_grad nor in frozen_params and "
            "would stay in the models; name them in frozen_params, so that the checkpoint holds them"
        )
    light = _without_values(proto, {tensor.name for tensor in taken})
    for graph in all_graphs(light.graph):
        for tensor in _tensors(graph):
            if uses_external_data(tensor) and tensor.name not in parameters:
                load_external_data_for_tensor(tensor, folder)
                tensor.data_location = TensorProto.DEFAULT
                del tensor.external_data[:]
    return Weights(light, {tensor.name: tensor for tensor in taken}, folder)


def _is_large(model: onnx.ModelProto) -> bool:
    return sum(size_of(tensor) for tensor in model.graph.initializer) > LARGE


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t


def set_value(tensor: onnx.TensorProto, array: np.ndarray) -> None:
    """Replace the value of a tensor by one of the same type and shape."""
    name, kind, dims = tensor.name, tensor.data_type, list(tensor.dims)
    tensor.Clear()
    tensor.name, tensor.data_type = name, kind
    tensor.dims.extend(dims)
    tensor.raw_data = bytes(as_bytes(array))


def size_of(tensor: onnx.TensorProto) -> int:
    """Return the number of bytes that the elements of a tensor take."""
    count = int(np.prod(np.array(tensor.dims, dtype=object))) if tensor.dims else 1
    try:
        return count * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except KeyError:
        return 0


def _without_values(model: onnx.ModelProto, names: Collection[str]) -> onnx.ModelProto:
    """Return a copy of the model in which these initializers have a type and a shape, but no value."""
    light = copy_without_initializers(model)
    for tensor in model.graph.initializer:
        if tensor.name not in names:
            light.graph.initializer.append(tensor)
            continue
        stub = light.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        # Says that the value is elsewhere; it is never read from there.
        stub.data_location = TensorProto.EXTERNAL
        stub.external_data.add(key="location", value="weights")
    return light


def save_model(model: onnx.ModelProto, path: Path) -> None:
    """Write a model; if it is too large for one file, its large initializers go to `<path>.data`."""
    arrays: dict[str, np.ndarray] = {}
    if model.ByteSize() >= EXTERNAL_FROM:
        large = [t for t in model.graph.initializer if len(t.raw_data) >= _SMALLEST_EXTERNAL]
        arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in large}
        keep(model.graph.initializer, lambda tensor: tensor.name not in arrays)
    save_with_initializers(model, arrays, path)


def save_with_initializers(model: onnx.ModelProto, arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Write a model with these initializers; if they are large, to a second file `<path>.data`.

    Each file keeps its old contents until the new ones are complete.
    """
    total = model.ByteSize() + sum(array.nbytes for array in arrays.values())
    try:
        if total < EXTERNAL_FROM:
            for name, array in arrays.items():
                _add_initializer(model, name, array).raw_data = bytes(as_bytes(array))
        else:
            _write_external(model, arrays, path.with_name(f"{path.name}.data"))
        with replacing(path) as file:
            file.write(model.SerializeToString())
    except OSError as error:
        reason = f"{path} cannot be written: {error.strerror or error}"
        raise TrainingFileError(error.errno or 0, reason) from error


def _write_external(model: onnx.ModelProto, arrays: Mapping[str, np.ndarray], data: Path) -> None:
    """Add initializers to a model; the contents of large ones are written to a file."""
    with replacing(data) as file:
        end = 0
        for name, array in arrays.items():
            tensor, content = _add_initializer(model, name, array), as_bytes(array)
            if len(content) < _SMALLEST_EXTERNAL:
                tensor.raw_data = bytes(content)
                continue
            padding = -end % 4096
            file.write(bytes(padding))
            file.write(content)
            tensor.data_location = TensorProto.EXTERNAL
            entries = {"location": data.name, "offset": end + padding, "length": len(content)}
            for key, value in entries.items():
                tensor.external_data.add(key=key, value=str(value))
            end += padding + len(content)


def _add_initializer(model: onnx.ModelProto, name: str, array: np.ndarray) -> onnx.TensorProto:
    return model.graph.initializer.add(name=name, dims=array.shape, data_type=element_type(array))
