"""Sessions whose parameters are bound to memory once; a run feeds and returns the user's tensors only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from ortgrad.errors import (
    ArgumentTypeError,
    KernelError,
    ModelError,
    OrtgradError,
    TrainingError,
    TrainingModelError,
)
from ortgrad.graph.feeds import native_order
from ortgrad.graph.loading import load_model, one_line
from ortgrad.graph.trials import onnxruntime_errors
from ortgrad.pipelines.prepare import GradientModel
from ortgrad.runtime.session import InferenceSession
from ortgrad.training.buffers import as_ort_value

_EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"


def read_model(path: str | os.PathLike[str], kind: str) -> onnx.ModelProto:
    """Return the model in a file, without its external data."""
    try:
        return load_model(os.fspath(path), external_data=False)
    except ModelError as error:
        raise TrainingModelError(f"the {kind} model cannot be used: {error}") from error


class BoundSession:
    """A session with inputs and outputs of two kinds: bound ones, and the user's."""

    def __init__(
        self,
        model: onnx.ModelProto | GradientModel,
        folder: Path,
        options: onnxruntime.SessionOptions,
        user_inputs: Sequence[str],
        user_outputs: Sequence[str],
    ) -> None:
        self.user_inputs, self.user_outputs = list(user_inputs), list(user_outputs)
        graph = (model.source if isinstance(model, GradientModel) else model).graph
        if any(t.data_location == onnx.TensorProto.EXTERNAL for t in graph.initializer):
            options.add_session_config_entry(_EXTERNAL_FOLDER, str(folder.resolve()))
        try:
            with _without_memory_pattern(options):
                self._session = InferenceSession(model, options)
        except ModelError as error:
            raise TrainingModelError(str(error)) from error
        self._labels = _labels(graph)
        self._declared = {value.name: value for value in self._session.get_inputs()}
        # onnxruntime may say of these that they have no dimensions.
        self._any_shape = {v.name for v in graph.input if not v.type.tensor_type.HasField("shape")}
        self._binding = self._session.io_binding()
        # The binding does not keep the memory of its values alive.
        self._inputs: dict[str, onnxruntime.OrtValue] = {}
        self._outputs: dict[str, onnxruntime.OrtValue] = {}
        self._feeds: dict[str, np.ndarray] = {}
        self._arrays: dict[str, np.ndarray] = {}
        self._places: dict[str, int] = {}

    def takes(self, name: str) -> bool:
        """Return whether there is an input of this name."""
        return name in self._declared

    def bind(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
        """Bind inputs and outputs to arrays for all runs."""
        for name, array in inputs.items():
            self._check(name, array.shape, _type_of(array), f"parameter {name!r}", TrainingModelError)
            self._feeds[name], self._inputs[name] = array, as_ort_value(array)
            self._binding.bind_ortvalue_input(name, self._inputs[name])
        for name, array in outputs.items():
            self._arrays[name] = array
            if array.size:
                self._outputs[name] = as_ort_value(array)
                self._binding.bind_ortvalue_output(name, self._outputs[name])
            else:
                self._binding.bind_output(name)
            self._places[name] = len(self._places)
        for name in self.user_outputs:
            self._places[name] = len(self._places)

    def check(self, values: Sequence[Any]) -> None:
        """Raise TrainingError if the user's inputs do not fit the model."""
        if len(values) != len(self.user_inputs):
            raise TrainingError(
                f"the model takes {len(self.user_inputs)} inputs ({', '.join(self.user_inputs)}), "
                f"not {len(values)}"
            )
        for name, value in zip(self.user_inputs, values, strict=True):
            self._check_input(name, value)
            if name in self._labels:
                _check_labels(name, value, self._labels[name])

    def run(self, values: Sequence[Any]) -> list[onnxruntime.OrtValue] | list[np.ndarray]:
        """Run on the user's inputs, which `check` has accepted.

        Returns the user's outputs, as arrays if an input is an array.
        """
        as_arrays = any(isinstance(value, np.ndarray) for value in values)
        if any(isinstance(value, np.ndarray) and value.dtype.kind in "USOT" for value in values):
            return self._run_on_strings(values)
        tensors = [_tensor(value) for value in values]
        for name, tensor in zip(self.user_inputs, tensors, strict=True):
            self._binding.bind_ortvalue_input(name, tensor)
        for name in self.user_outputs:
            # Otherwise onnxruntime would write to the outputs of the previous run, which the user may hold.
            self._binding.bind_output(name)
        with _as_training_error():
            self._session.run_with_iobinding(self._binding)
        outputs = self._binding.get_outputs()
        found = [outputs[self._places[name]] for name in self.user_outputs]
        return [value.numpy() for value in found] if as_arrays else found

    def _check_input(self, name: str, value: Any) -> None:
        if isinstance(value, np.ndarray):
            self._check(name, value.shape, _type_of(value), f"input {name!r}", TrainingError)
        elif not isinstance(value, onnxruntime.OrtValue):
            raise ArgumentTypeError(
                f"input {name!r} is a {type(value).__name__}; it must be a NumPy array or an OrtValue"
            )
        elif not value.is_tensor():
            raise TrainingError(f"input {name!r} is not a tensor")
        else:
            self._check(name, value.shape(), value.data_type(), f"input {name!r}", TrainingError)

    def _check(
        self, name: str, shape: Sequence[int], kind: str, what: str, error: type[TrainingError]
    ) -> None:
        """Raise an error if a tensor does not fit the declaration of an input."""
        declared = self._declared[name]
        if declared.type != kind:
            raise error(f"{what} has the type {kind}, but the model takes {declared.type}")
        # onnxruntime tells a scalar from an unknown rank by None.
        wanted = declared.shape
        if wanted is None or name in self._any_shape:
            return
        same = len(wanted) == len(shape) and all(
            not isinstance(w, int) or w == s for w, s in zip(wanted, shape, strict=True)
        )
        if not same:
            raise error(f"{what} has the shape {list(shape)}, but the model takes {list(wanted)}")

    def _run_on_strings(self, values: Sequence[Any]) -> list[np.ndarray]:
        """Run without a binding, which cannot hold strings; the outputs are copied to their places."""
        feeds: dict[str, Any] = dict(self._feeds)
        for name, value in zip(self.user_inputs, values, strict=True):
            feeds[name] = value.numpy() if isinstance(value, onnxruntime.OrtValue) else value
        names = [*self._arrays, *self.user_outputs]
        with _as_training_error():
            results = self._session.run(names, feeds)
        for name, result in zip(names, results, strict=False):
            if name in self._arrays:
                self._arrays[name][...] = result
        return list(results[len(self._arrays) :])


@contextmanager
def _without_memory_pattern(options: onnxruntime.SessionOptions) -> Iterator[None]:
    """Turn off the planning of one block for all activations while a session is made.

    onnxruntime allocates the block in the second run and keeps the memory of the first, so that the
    activations take twice their size.
    """
    chosen = options.enable_mem_pattern
    options.enable_mem_pattern = False
    try:
        yield
    finally:
        options.enable_mem_pattern = chosen


_LOSSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLossInternal")
_SAME_VALUES = ("Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze")


def _labels(graph: onnx.GraphProto) -> dict[str, int | None]:
    """Return the inputs that are the labels of a loss, with the label that is to be ignored."""
    inputs = {value.name for value in graph.input}
    producers = {name: node for node in graph.node for name in node.output}
    found: dict[str, int | None] = {}
    for node in graph.node:
        # A fourth input is the label to ignore, known only in a run.
        if node.op_type in _LOSSES and len(node.input) in (2, 3):
            name = node.input[1]
            while name in producers and producers[name].op_type in _SAME_VALUES:
                name = producers[name].input[0]
            if name in inputs:
                found[name] = next((a.i for a in node.attribute if a.name == "ignore_index"), None)
    return found


def _check_labels(name: str, value: Any, ignored: int | None) -> None:
    """Raise TrainingError for a negative label: onnxruntime would count classes from the end."""
    labels = value if isinstance(value, np.ndarray) else value.numpy()
    if labels.dtype.kind == "i" and labels.size:
        wrong = (labels < 0) & (labels != ignored) if ignored is not None else labels < 0
        if wrong.any():
            raise TrainingError(f"{_INDEX_HINT}input {name!r} has the label {labels[wrong].reshape(-1)[0]}")


# What onnxruntime says about labels without a class, and ids that an embedding does not have.
_INDEX_ERRORS = ("Out of range value in index tensor", "indices element out of data bounds")
_INDEX_HINT = "a label or an index is out of range: "


@contextmanager
def _as_training_error() -> Iterator[None]:
    """Make a TrainingError of onnxruntime's own exceptions, and of failing kernels."""
    # Some of them are plain RuntimeErrors.
    kinds: tuple[type[Exception], ...] = (*onnxruntime_errors(), RuntimeError)
    try:
        yield
    except KernelError as error:
        # Such as a label out of range, which the kernel of the loss reports.
        raise TrainingError(str(error)) from error
    except OrtgradError:
        raise
    except kinds as error:
        text = one_line(error)
        hint = _INDEX_HINT if any(part in text for part in _INDEX_ERRORS) else ""
        raise TrainingError(f"{hint}{text}") from error


def _tensor(value: np.ndarray | onnxruntime.OrtValue) -> onnxruntime.OrtValue:
    if isinstance(value, np.ndarray):
        return as_ort_value(np.ascontiguousarray(native_order(value)).reshape(value.shape))
    return value


_NAMES = {
    "float32": "float",
    "float64": "double",
    "bool": "bool",
}


def _type_of(array: np.ndarray) -> str:
    """Return onnxruntime's name of an array's type."""
    if array.dtype.kind in "USOT":
        return "tensor(string)"
    name = array.dtype.name
    return f"tensor({_NAMES.get(name, name)})"
