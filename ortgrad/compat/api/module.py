"""Module: training and evaluation steps of a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from ortgrad.compat.api.checkpoint_state import CheckpointState
from ortgrad.compat.graphs import GRADIENT_SUFFIXES, training_graph
from ortgrad.compat.inference import save_inference_model
from ortgrad.compat.layout import RESET
from ortgrad.dialects.training import ACCUMULATOR
from ortgrad.errors import ArgumentTypeError, TrainingError, TrainingModelError
from ortgrad.graph.tolerated import evaluated
from ortgrad.keywords import checked
from ortgrad.threads import call_elsewhere
from ortgrad.training.sessions import BoundSession, read_model

__all__ = ["Module"]

_NO_EVALUATION = "the module has no evaluation model: give eval_model_uri when you create it"
_NOMINAL = "the checkpoint is nominal. Please load the model parameters first."


@checked
class Module:
    """A model to train: in training mode a call computes the loss and the gradients, else only the outputs.

    The gradients of several calls add up until `lazy_reset_grad` is called. They belong to the state, as do
    the parameters: both stay at one address, to which the sessions are bound.

    After a call in training mode that fails or is interrupted, the gradients may be incomplete. The next call
    then starts over, as after `lazy_reset_grad`; until then, an Optimizer refuses to use them.

    >>> import numpy as np, onnx, tempfile
    >>> from ortgrad.training import artifacts
    >>> from ortgrad.training.api import CheckpointState, Module
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 2}> { y = MatMul(x, w) }''')
    >>> folder = tempfile.mkdtemp()
    >>> artifacts.generate_artifacts(
    ...     model, ["w"], loss=artifacts.LossType.MSELoss, artifact_directory=folder
    ... )
    >>> state = CheckpointState.load_checkpoint(f"{folder}/checkpoint")
    >>> module = Module(f"{folder}/training_model.onnx", state, f"{folder}/eval_model.onnx")
    >>> module(np.float32([[1, 0]]), np.float32([[0]]))
    array(1., dtype=float32)
    >>> state.parameters["w"].grad.tolist()
    [[2.0], [0.0]]
    """

    training: bool

    def __init__(
        self,
        train_model_uri: str | os.PathLike[str],
        state: CheckpointState,
        eval_model_uri: str | os.PathLike[str] | None = None,
        device: str = "cpu",
        session_options: onnxruntime.SessionOptions | None = None,
    ) -> None:
        if not isinstance(state, CheckpointState):
            raise ArgumentTypeError(f"a Module takes a CheckpointState, not {type(state)}")
        if device.split(":")[0] != "cpu":
            raise TrainingError(f"device={device!r}: ortgrad trains on the CPU")
        self.training = True
        self._state = state.state
        self._session_options = onnxruntime.SessionOptions() if session_options is None else session_options
        self._folder = Path(train_model_uri).parent
        self._model = read_model(train_model_uri, "training")
        self._inputs = {value.name: value for value in self._model.graph.input}
        self._reset = np.ones(1, np.bool_)
        self._accumulate = False
        self._eval_path = None if eval_model_uri is None else Path(eval_model_uri)
        self._train_session: BoundSession | None = None
        self._eval_session: BoundSession | None = None
        self._check_parameters()
        if self._state.nominal:
            self._state.allocate({name: self._shape(name) for name in self._parameter_names()})
        self._accumulates = False
        self._train_session = self._make_train_session()
        if self._eval_path is not None:
            self._eval_session = self._make_eval_session(self._eval_path)

    # Sessions

    def _parameter_names(self, trainable_only: bool = False) -> list[str]:
        """Return the names of the parameters in the order of the training model's inputs."""
        known = self._state.trainable if trainable_only else self._state
        return [name for name in self._inputs if name in known]

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that the training model declares for a parameter."""
        tensor = self._inputs[name].type.tensor_type
        if not tensor.HasField("shape") or any(not dim.HasField("dim_value") for dim in tensor.shape.dim):
            raise TrainingModelError(f"the training model does not declare the shape of parameter {name!r}")
        return tuple(dim.dim_value for dim in tensor.shape.dim)

    def _check_parameters(self) -> None:
        """Raise TrainingModelError if training model and checkpoint do not belong together."""
        accumulated = {node.input[0] for node in self._model.graph.node if node.op_type == ACCUMULATOR}
        for name in self._state.trainable.arrays:
            if name not in self._inputs:
                raise TrainingModelError(
                    f"parameter {name!r} of the checkpoint is not an input of the training model"
                )
            if not any(f"{name}{suffix}" in accumulated for suffix in GRADIENT_SUFFIXES):
                raise TrainingModelError(
                    f"Gradient buffer input not provided for param: {name}. The training model has no "
                    f"{ACCUMULATOR} for it"
                )

    def _make_train_session(self) -> BoundSession:
        """Return a session that writes gradients, or adds to them if calls have added up before."""
        state = self._state
        graph = training_graph(self._model, set(self._parameter_names()), accumulates=self._accumulates)
        gradients = state.allocate_gradients()
        session = BoundSession(
            graph.model, self._folder, self._session_options, graph.user_inputs, graph.user_outputs
        )
        inputs = {name: state.parameter(name) for name in self._parameter_names()}
        inputs |= {buffer: gradients[name] for buffer, name in graph.buffers.items() if name in gradients}
        if self._accumulates and any(value.name == RESET for value in graph.model.graph.input):
            inputs[RESET] = self._reset
        outputs = {name: state.parameter(parameter) for name, parameter in graph.statistics.items()}
        outputs |= {graph.gradients[name]: array for name, array in gradients.arrays.items()}
        session.bind(inputs, outputs)
        return session

    def _make_eval_session(self, path: Path) -> BoundSession:
        state = self._state
        model = evaluated(read_model(path, "evaluation"))
        parameters = [value.name for value in model.graph.input if value.name in state]
        constants = {tensor.name for tensor in model.graph.initializer}
        inputs = [v.name for v in model.graph.input if v.name not in {*parameters, *constants}]
        outputs = [value.name for value in model.graph.output]
        session = BoundSession(model, path.parent, self._session_options, inputs, outputs)
        session.bind({name: state.parameter(name) for name in parameters}, {})
        return session

    # Steps

    def __call__(self, *user_inputs: Any) -> Any:
        """Run a step on NumPy arrays or OrtValues and return its output, or a tuple if there are several.

        The outputs are arrays if one of the inputs is an array, and OrtValues otherwise.
        """
        if self._state.nominal:
            raise TrainingError(_NOMINAL)
        outputs = self._train(user_inputs) if self.training else self._evaluate(user_inputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _session(self) -> BoundSession:
        """Return the session of the current mode."""
        if self.training:
            if self._train_session is None:
                self._train_session = self._make_train_session()
            return self._train_session
        if self._eval_session is None:
            raise TrainingError(_NO_EVALUATION)
        return self._eval_session

    def _evaluate(self, values: Sequence[Any]) -> Sequence[Any]:
        session = self._session()
        session.check(values)
        return session.run(values)

    def _train(self, values: Sequence[Any]) -> Sequence[Any]:
        state = self._state
        if self._accumulate and not self._accumulates and not state.gradients_are_torn:
            # From now on, the gradients of several calls may be added up. A second session beside the first
            # would need memory of its own for activations.
            self._train_session = None
            self._accumulates = True
        session = self._session()
        self._reset[0] = not self._accumulate or state.gradients_are_torn
        session.check(values)
        state.gradients_are_torn = True
        outputs = session.run(values)
        state.gradients_are_torn = False
        self._accumulate = True
        return outputs

    def train(self, mode: bool = True) -> Module:
        """Switch to training mode, or with mode=False to evaluation mode; returns the module."""
        self.training = mode
        return self

    def eval(self) -> Module:
        """Switch to evaluation mode; returns the module."""
        return self.train(False)

    def lazy_reset_grad(self) -> None:
        """Let the next training step replace the gradients instead of adding to them."""
        self._accumulate = False

    # Parameters

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """Return the number of elements of the parameters."""
        return sum(int(np.prod(self._shape(name))) for name in self._parameter_names(trainable_only))

    def get_contiguous_parameters(self, trainable_only: bool = False) -> Any:
        """Return a copy of all parameters in one vector, in the order of the training model's inputs.

        It is the OrtValue of onnxruntime's C binding, as in onnxruntime.training; `numpy()` converts it to an
        array.
        """
        state = self._state
        if state.nominal:
            raise TrainingError(f"there are no parameters to copy: {_NOMINAL}")
        names = self._parameter_names(trainable_only)
        self._require_single(names)
        parts = [state.parameter(name).reshape(-1) for name in names]
        vector = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        value = onnxruntime.OrtValue.ortvalue_from_shape_and_type([vector.size], np.float32, "cpu", 0)
        if vector.size:
            value.update_inplace(vector)
        return value._ortvalue

    def copy_buffer_to_parameters(self, buffer: Any, trainable_only: bool = True) -> None:
        """Copy a vector to the parameters: a NumPy array, or what `get_contiguous_parameters` returns.

        This completes a nominal checkpoint, for which trainable_only must be False.
        """
        state = self._state
        if trainable_only and state.nominal:
            raise TrainingError(
                "For nominal checkpoint state, all parameters need to be loaded into the model "
                "(trainable_only = false)."
            )
        vector = buffer if isinstance(buffer, np.ndarray) else _numpy(buffer)
        names = self._parameter_names(trainable_only)
        self._require_single(names)
        size = self.get_parameters_size(trainable_only)
        if vector.dtype != np.float32 or vector.size != size:
            raise TrainingError(
                f"Parameters buffer size incorrect. Expected: float32[{size}], "
                f"Actual: {vector.dtype}{list(vector.shape)}"
            )
        values = vector.reshape(-1)

        def copy() -> None:
            start = 0
            for name in names:
                array = state.parameter(name)
                array[...] = values[start : start + array.size].reshape(array.shape)
                start += array.size
            state.nominal = False

        # On a thread that handles no signals, so that either all parameters are copied or none.
        call_elsewhere(copy)

    def _require_single(self, names: Sequence[str]) -> None:
        for name in names:
            kind = self._inputs[name].type.tensor_type.elem_type
            if kind != onnx.TensorProto.FLOAT:
                text = onnx.TensorProto.DataType.Name(kind)
                raise TrainingError(f"parameter {name!r} has the type {text}. Only float is supported.")

    # The model

    def export_model_for_inferencing(
        self, inference_model_uri: str | os.PathLike[str], graph_output_names: list[str]
    ) -> None:
        """Write the evaluation model with the current parameters, reduced to these outputs.

        `graph_output_names` may name any value of the model. Inputs that they do not need are dropped.
        """
        state = self._state
        if state.nominal:
            raise TrainingError(f"the model cannot be exported: {_NOMINAL}")
        if self._eval_path is None:
            raise TrainingError(_NO_EVALUATION)
        if isinstance(graph_output_names, (str, bytes)):
            raise ArgumentTypeError("graph_output_names is a list of names, not a single one")
        parameters = {name: state.parameter(name) for name in state.names}
        save_inference_model(self._eval_path, parameters, list(graph_output_names), inference_model_uri)

    def input_names(self) -> list[str]:
        """Return the names of the inputs of a step in the current mode."""
        return list(self._session().user_inputs)

    def output_names(self) -> list[str]:
        """Return the names of the outputs of a step in the current mode."""
        return list(self._session().user_outputs)


def _numpy(buffer: Any) -> np.ndarray:
    try:
        array: np.ndarray = buffer.numpy()
    except AttributeError as error:
        raise ArgumentTypeError(f"the buffer is a {type(buffer).__name__}, not an OrtValue") from error
    return array
