"""Blocks that make whole models: a forward model, or the models for training and evaluation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import onnx

from ortgrad.compat.layout import build_models
from ortgrad.compat.onnxblock.blocks import Block, first_of
from ortgrad.compat.onnxblock.model_accessor import building
from ortgrad.compat.versions import limit_versions
from ortgrad.errors import NameNotFoundError, TrainingError
from ortgrad.graph.matching import nearest
from ortgrad.graph.protos import replace
from ortgrad.training.parameters import take_parameters


class ForwardBlock(Block):
    """Builds a forward model; `build` returns the names of its outputs.

    >>> import onnx
    >>> from ortgrad.training import onnxblock
    >>> class WithLoss(onnxblock.ForwardBlock):
    ...     def build(self, name):
    ...         return onnxblock.loss.MSELoss()(name)
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N, 3] x) => (float[N, 3] y) { y = Relu(x) }''')
    >>> block = WithLoss()
    >>> with onnxblock.base(model):
    ...     name = block("y")
    >>> [value.name for value in block.to_model_proto().graph.input]
    ['x', 'target']
    """

    _model: onnx.ModelProto | None = None

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Add the nodes and return the names of the model's outputs."""

    def to_model_proto(self) -> onnx.ModelProto:
        """Return the model that was built."""
        if self._model is None:
            raise TrainingError("the forward model is not built yet; call the block first")
        return self._model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `build` and make the values that it returns the outputs of the model."""
        with building(checks=False) as accessor:
            self.base = accessor.model
            output = self.build(*args, **kwargs)
        self._model = self.infer_shapes_on_base()
        _register_outputs(self._model, output)
        limit_versions(self._model)
        accessor.model.CopyFrom(self._model)
        return output


class TrainingBlock(Block):
    """Builds the models for training and evaluation.

    `build` returns the name of the loss, or a tuple of names that begins with it.

    >>> import onnx, numpy as np
    >>> from ortgrad.training import onnxblock
    >>> class WithLoss(onnxblock.TrainingBlock):
    ...     def build(self, name):
    ...         return onnxblock.loss.MSELoss()(name)
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N, 3] x) => (float[N, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, w) }''')
    >>> block = WithLoss()
    >>> block.requires_grad("w")
    >>> with onnxblock.base(model):
    ...     name = block("y")
    >>> training_model, eval_model = block.to_model_proto()
    >>> [value.name for value in training_model.graph.input]
    ['x', 'target', 'w', 'w_grad.accumulation.buffer', 'lazy_reset_grad']
    """

    def __init__(self) -> None:
        super().__init__()
        self._requires_grad: set[str] = set()
        self._frozen_params: set[str] = set()
        self._parameters: tuple[list[onnx.TensorProto], list[onnx.TensorProto]] | None = None
        self._models: tuple[onnx.ModelProto, onnx.ModelProto] | None = None

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Add the nodes and return the name of the loss, or a tuple of names that begins with it."""

    def requires_grad(self, argument_name: str, value: bool = True) -> None:
        """Say that a parameter or input is to be trained or, with value=False, that it is frozen."""
        chosen, other = self._requires_grad, self._frozen_params
        if not value:
            chosen, other = other, chosen
        chosen.add(argument_name)
        other.discard(argument_name)

    def parameters(self) -> tuple[list[onnx.TensorProto], list[onnx.TensorProto]]:
        """Return the trainable and the frozen parameters."""
        if self._parameters is None:
            # The text of 1.19.2, which its own tests compare.
            raise TrainingError(
                "Please build the training model first before trying to retrieve the parameters."
            )
        return self._parameters

    def to_model_proto(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """Return the models for training and for evaluation."""
        if self._models is None:
            raise TrainingError("the training and eval models are not built yet; call the block first")
        return self._models

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `build` and make the models for training and evaluation from the result."""
        with building(checks=False) as accessor:
            self.base = accessor.model
            output = self.build(*args, **kwargs)
        model = self.infer_shapes_on_base()
        _register_outputs(model, output)
        parameters = take_parameters(model, self._requires_grad, self._frozen_params)
        self._parameters = parameters.trainable, parameters.frozen
        self._models = build_models(model, parameters, self._requires_grad, first_of(output))
        accessor.model.CopyFrom(self._models[0])
        return output


def _register_outputs(model: onnx.ModelProto, names: str | Sequence[str]) -> None:
    """Make the named values the outputs of the graph, in this order; `model` has inferred types."""
    names = [names] if isinstance(names, str) else names
    known = {value.name: value for value in (*model.graph.value_info, *model.graph.output)}
    for name in names:
        if name not in known:
            raise NameNotFoundError(
                f"{name!r} cannot be an output: there is no such value, or its type is not known"
                f"{nearest(name, known)}"
            )
    replace(model.graph.output, [known[name] for name in names])
