"""Export with both of PyTorch's exporters, and find the parameters again in what they write."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn

from ..exporters import keep_tables
from .architecture import EXPORTED, TEXT, TORCHSCRIPT, Architecture
from .texts import parse


@contextmanager
def quiet() -> Iterator[None]:
    """Without what PyTorch says about its own exporters, and without its trace, which pytest would record."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.__trace")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def export(architecture: Architecture, module: nn.Module, exporter: str) -> onnx.ModelProto:
    """The module as a model whose named dimensions are symbolic."""
    if exporter == TEXT:
        assert architecture.text is not None
        return parse(architecture.text, module)
    feeds = architecture.feeds(EXPORTED)
    names = {"input_names": list(feeds), "output_names": list(architecture.outputs)}
    axes = {name: of.axes for name, of in architecture.inputs.items()}
    # A batch normalization would be folded into the convolution before it.
    normalized = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
    fold = architecture.fold and not normalized
    with quiet():
        if exporter == TORCHSCRIPT:
            file = io.BytesIO()
            torch.onnx.export(
                torch.jit.script(module) if architecture.script else module,
                tuple(feeds.values()),
                file,
                dynamo=False,
                dynamic_axes=axes,
                training=torch.onnx.TrainingMode.PRESERVE,
                do_constant_folding=fold,
                **names,
            )
            return onnx.load_from_string(file.getvalue())
        keep_tables()
        dims = {name: torch.export.Dim(name) for name in EXPORTED}
        program = torch.onnx.export(
            module,
            tuple(feeds.values()),
            dynamo=True,
            dynamic_shapes=[{i: dims[d] for i, d in of.items()} for of in axes.values()],
            optimize=fold,
            verbose=False,
            **names,
        )
        return program.model_proto


class Elements:
    """The elements of a module's parameters, found by value in the weights of a model.

    An exporter renames, transposes, slices, repeats and concatenates parameters. All elements are different
    numbers, so the gradient of one is the sum of those of all elements that have its value.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters = dict(module.named_parameters())
        flat = torch.cat([p.detach().flatten() for p in self.parameters.values()]).numpy()
        self._order = np.argsort(flat)
        self._sorted = flat[self._order]

    def find(self, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The elements of the array that are elements of parameters, and which."""
        at = np.searchsorted(self._sorted, array.reshape(-1)).clip(max=self._sorted.size - 1)
        found = self._sorted[at] == array.reshape(-1)
        return found, self._order[at[found]]

    def gather(self, weights: dict[str, np.ndarray], grads: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The gradients of the parameters from those of the weights; NaN where no weight has the value."""
        total, seen = np.zeros(self._sorted.size), np.zeros(self._sorted.size, bool)
        for name, array in weights.items():
            found, which = self.find(array)
            np.add.at(total, which, grads[name].reshape(-1)[found])
            seen[which] = True
        total[~seen] = np.nan
        sizes = [p.numel() for p in self.parameters.values()]
        parts = np.split(total, np.cumsum(sizes)[:-1])
        shaped = zip(self.parameters.items(), parts, strict=True)
        return {name: part.reshape(p.shape) for (name, p), part in shaped}


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The floating-point initializers and constants of the main graph."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            tensors[node.output[0]] = node.attribute[0].t
    arrays = {name: numpy_helper.to_array(tensor) for name, tensor in tensors.items()}
    return {name: array for name, array in arrays.items() if array.dtype == np.float32}
