"""Running models on arrays by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnxruntime

from ortgrad.errors import ModelError
from ortgrad.graph.feeds import Arrays, typed
from ortgrad.graph.loading import one_line
from ortgrad.graph.protos import copy_of
from ortgrad.graph.trials import onnxruntime_errors
from ortgrad.pipelines.prepare import Kernels
from ortgrad.runtime.session import InferenceSession

Run = Callable[[Arrays], Arrays]


class CannotRunError(Exception):
    """The model does not run on these inputs."""


def on_onnxruntime(model: onnx.ModelProto, kernels: Kernels = "onnx") -> Run:
    """Return a function that runs the model in a session and returns its outputs by name, in order.

    Raises ModelError if onnxruntime does not load the model. The function raises CannotRunError.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are handled here and need not be logged to stderr
    session = InferenceSession(model, options, kernels=kernels)
    names = [output.name for output in session.get_outputs()]

    def run(feeds: Arrays) -> Arrays:
        try:
            return dict(zip(names, session.run(None, typed(model, feeds)), strict=True))
        except onnxruntime_errors() as error:
            raise CannotRunError(one_line(error)) from error

    return run


class Backward:
    """A gradient model in a session; `targets` are the names whose gradients it computes."""

    def __init__(self, built: onnx.ModelProto, targets: Sequence[str], kernels: Kernels) -> None:
        self._run = on_onnxruntime(built, kernels)
        self._targets = targets

    def run(self, feeds: Arrays) -> Arrays:
        """Return the gradients by target."""
        try:
            results = list(self._run(feeds).values())
        except CannotRunError as error:
            raise ModelError(f"the gradient model does not run: {error}") from error
        # The gradients follow the outputs of the forward model.
        arrays = map(np.asarray, results[-len(self._targets) :])
        return dict(zip(self._targets, arrays, strict=True))


def with_outputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Return a copy of the model whose outputs are the values of these names."""
    exposed = copy_of(model)
    del exposed.graph.output[:]
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return exposed


def values_of(model: onnx.ModelProto, feeds: Arrays, names: Sequence[str]) -> Arrays:
    """Return intermediate values of the model by name."""
    try:
        return on_onnxruntime(with_outputs(model, names))(feeds)
    except CannotRunError as error:
        raise ModelError(f"the model does not run: {error}") from error
