"""The sessions of a Trainer, on parameters and gradients that stay at one address."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from ortgrad.errors import TrainingError, TrainingModelError
from ortgrad.graph.protos import copy_of, replace
from ortgrad.training.checkpoint import Checkpoint
from ortgrad.training.data import Batch, Inputs
from ortgrad.training.evaluation import in_evaluation
from ortgrad.training.parameters import take_parameters
from ortgrad.training.protos import find_value, generate_graph_name, with_inferred
from ortgrad.training.sessions import BoundSession
from ortgrad.training.state import TrainingState
from ortgrad.training.statistics import normalization_of_vectors, running_statistics
from ortgrad.training.weights import split_weights


class Engine:
    """A model that is trained in memory: loss and gradients of a batch, and outputs in evaluation.

    `trained` are the trained parameters in their order in memory. `loss` is the loss, and `outputs` are
    what evaluation returns in addition. `untrained` are the outputs of batch normalizations that
    are in evaluation mode also in training. `compared` are a value and inputs that must have its shape: where
    the loss subtracts them, others would be broadcast.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        trained: Sequence[str],
        loss: str,
        outputs: Sequence[str],
        *,
        accumulates: bool,
        threads: int,
        untrained: Collection[str] = (),
        compared: tuple[str, Sequence[str]] = ("", ()),
    ) -> None:
        self._threads = threads
        frozen = running_statistics(model, untrained)
        both = [name for name in trained if name in frozen]
        if both:
            raise TrainingModelError(
                f"{both[0]!r} is a running statistic, which its batch normalization updates: leave it out of "
                "wrt, or say statistics='none'"
            )
        weights = split_weights(model, {*trained, *frozen})
        forward = with_inferred(weights.model)
        self._compared = _compared(forward, *compared)
        # The loss itself may be the only output of the model.
        self._evaluated, self._returned = list(dict.fromkeys([loss, *outputs])), [loss, *outputs]
        _set_outputs(forward, self._evaluated)
        # A batch normalization that needs more than one sample.
        self.needs_samples = normalization_of_vectors(forward, untrained)
        shape = _add_shape(forward, compared[0]) if self._compared else ""
        values = take_parameters(forward, trained, frozen)
        tensors = {tensor.name: tensor for tensor in (*values.trainable, *values.frozen)}
        self.state = TrainingState(
            Checkpoint(
                {name: weights.array(tensors[name]) for name in trained},
                {name: weights.array(tensors[name]) for name in frozen},
            )
        )
        from ortgrad.training.steps import step_model  # onnx-ir is slow to import

        self._own_outputs = [loss, shape] if shape else [loss]
        self._step = step_model(
            forward,
            values,
            trained,
            self._own_outputs,
            untrained=untrained,
            accumulates=accumulates,
        )
        self._evaluation = in_evaluation(forward)
        self._evaluation.graph.input.extend(values.inputs)
        self._reset = np.ones(1, np.bool_)
        self._session: BoundSession | None = None
        self._evaluating: BoundSession | None = None
        given = {tensor.name for tensor in forward.graph.initializer}
        fed = {v.name: v.type.tensor_type for v in forward.graph.input if v.name not in given}
        columns = [name for name in fed if len(dims := fed[name].shape.dim) == 2 and dims[1].dim_value == 1]
        types = {name: _numpy_type(tensor.elem_type) for name, tensor in fed.items()}
        self.inputs = Inputs(list(fed), types, columns)

    @property
    def is_random(self) -> bool:
        """Whether the model has Dropout or other random numbers."""
        return bool(self._step.random)

    def seed(self, *numbers: int) -> None:
        """Restart the random numbers of Dropout and other nodes, with these numbers as the seed."""
        if not self.is_random and self._session is not None:
            return
        # Two sessions at a time would need twice the memory.
        self._session = None
        self._session = self._make_session(*numbers)

    def _begun(self) -> BoundSession:
        if self._session is None:
            self.seed(0)
        assert self._session is not None
        return self._session

    def _options(self) -> onnxruntime.SessionOptions:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        return options

    def _make_session(self, *seeds: int) -> BoundSession:
        state, step = self.state, self._step
        gradients = state.allocate_gradients()
        session = BoundSession(
            step.seeded(*seeds), Path(), self._options(), self.inputs.names, self._own_outputs
        )
        inputs = {name: state.parameter(name) for name in state.names if session.takes(name)}
        inputs.update({buffer: gradients[name] for buffer, name in step.buffers.items()})
        if step.reset:
            inputs[step.reset] = self._reset
        outputs = {name: state.parameter(parameter) for name, parameter in step.statistics.items()}
        outputs.update({step.gradients[name]: gradients[name] for name in gradients.arrays})
        session.bind(inputs, outputs)
        return session

    def gradients(self, batch: Batch, *, add: bool) -> float:
        """Compute the gradients of a batch, or add them to the present ones, and return the loss.

        A batch that fails, or whose loss is not finite, leaves the running statistics unchanged.
        """
        session = self._begun()
        session.check(batch)
        self._reset[0] = not add
        statistics = [self.state.parameter(name) for name in self._step.statistics.values()]
        before, loss = [array.copy() for array in statistics], math.nan
        try:
            found, *shape = session.run(batch)
            self._compare(batch, *shape)
            loss = float(np.asarray(found).reshape(()))
        finally:
            if not math.isfinite(loss):
                for array, old in zip(statistics, before, strict=True):
                    array[...] = old
        return loss

    def check(self, batch: Batch, where: str) -> None:
        """Raise TrainingError if a batch does not fit the model."""
        try:
            self._begun().check(batch)
        except TrainingError as error:
            raise type(error)(f"{where}: {error}") from error

    def _compare(self, batch: Batch, shape: np.ndarray | onnxruntime.OrtValue | None = None) -> None:
        """Raise TrainingError if the loss has broadcast a target."""
        for name in self._compared if shape is not None else ():
            given, wanted = batch[self.inputs.names.index(name)].shape, tuple(np.asarray(shape).tolist())
            if given != wanted:
                raise TrainingError(
                    f"{name!r} has the shape {list(given)}, and what it is compared with {list(wanted)}: the "
                    "loss would broadcast them. Give the target the shape of the output"
                )

    def evaluate(self, batch: Batch) -> list[np.ndarray]:
        """Return the loss and the outputs of a batch in evaluation mode."""
        if self._evaluating is None:
            session = BoundSession(
                self._evaluation, Path(), self._options(), self.inputs.names, self._evaluated
            )
            session.bind({name: self.state.parameter(name) for name in self.state.names}, {})
            self._evaluating = session
        self._evaluating.check(batch)
        found = dict(zip(self._evaluated, self._evaluating.run(batch), strict=True))
        return [np.asarray(found[name]) for name in self._returned]


def _compared(model: onnx.ModelProto, value: str, targets: Sequence[str]) -> list[str]:
    """Return the inputs among `targets` whose shapes may turn out to differ from that of `value`."""
    if not targets:
        return []
    kind = find_value(model, value).type.tensor_type
    types = {each.name: each.type.tensor_type for each in model.graph.input}
    fixed = kind.HasField("shape") and all(dim.HasField("dim_value") for dim in kind.shape.dim)
    # Shapes that are known are compared before a run.
    return [name for name in targets if not fixed or types[name].shape != kind.shape]


def _add_shape(model: onnx.ModelProto, value: str) -> str:
    """Add the shape of a value to the outputs and return its name."""
    name = generate_graph_name(model, f"{value}/shape")
    model.graph.node.append(helper.make_node("Shape", [value], [name], name=name))
    model.graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.INT64, None))
    return name


def _set_outputs(model: onnx.ModelProto, names: Sequence[str]) -> None:
    replace(model.graph.output, [copy_of(find_value(model, name)) for name in names])


def _numpy_type(kind: int) -> np.dtype | None:
    return helper.tensor_dtype_to_np_dtype(kind) if kind else None
