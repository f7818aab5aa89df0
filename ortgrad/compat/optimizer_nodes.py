"""The nodes of optimizer models, which are executed on the memory of the parameters by compiled kernels."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from ortgrad.errors import TrainingModelError
from ortgrad.operators.declaration import DOMAIN
from ortgrad.training.buffers import Arena
from ortgrad.training.optimizers import kernels
from ortgrad.training.optimizers.passes import Pass, warm_up
from ortgrad.training.optimizers.rules import Step, update_adamw
from ortgrad.training.sessions import read_model
from ortgrad.training.state import Group

_COMMON = ("learning_rate", "step", "params", "gradients", "first_order_moments")


@dataclass(frozen=True)
class Rule(ABC):
    """What an optimizer model does in a step."""

    # The norms to which the gradients are clipped, one after the other.
    clips: tuple[float, ...]
    # False if the model says that nothing is updated.
    updates: bool

    @property
    @abstractmethod
    def momentums(self) -> Sequence[str]:
        """The names of the momentums of a parameter in a checkpoint."""

    @abstractmethod
    def passes(self) -> Sequence[Pass]:
        """Return the kernels."""

    @abstractmethod
    def _update(self, arrays: Sequence[np.ndarray], group: Group, threads: int) -> None:
        """Update one block of parameters; `arrays` are these, their gradients and their momentums."""

    def warm_up(self, parameters: Arena) -> None:
        """Compile the kernels for these parameters; raises TrainingModelError if there are none for them."""
        for dtype in parameters.flats:
            if dtype not in (np.float32, np.float64):
                raise TrainingModelError(f"the optimizer has no kernel for parameters of the type {dtype}")
            for each in (*self.passes(), *((kernels.squares, kernels.scale) if self.clips else ())):
                warm_up(each, dtype)

    def apply(self, parameters: Arena, gradients: Arena, group: Group, threads: int) -> bool:
        """Make a step, and return whether the parameters were updated."""
        for largest in self.clips:
            kernels.clip(list(gradients.flats.values()), largest, threads)
        if not self.updates:
            return False
        momentums = [group.momentums[name] for name in self.momentums]
        for dtype, flat in parameters.flats.items():
            arrays = [flat, gradients.flats[dtype], *(m.flats[dtype] for m in momentums)]
            self._update(arrays, group, threads)
        return True


@dataclass(frozen=True)
class AdamW(Rule):
    """AdamWOptimizer, in the order of PyTorch (adam_mode 0) or of Hugging Face (1)."""

    alpha: float
    beta: float
    epsilon: float
    weight_decay: float
    correct_bias: bool
    adam_mode: int

    @property
    def momentums(self) -> Sequence[str]:
        return ("momentum0", "momentum1")

    def passes(self) -> Sequence[Pass]:
        return (kernels.adamw,)

    def _update(self, arrays: Sequence[np.ndarray], group: Group, threads: int) -> None:
        update_adamw(
            arrays,
            Step(group.step + 1, group.rate, self.weight_decay, threads),
            beta1=self.alpha,
            beta2=self.beta,
            epsilon=self.epsilon,
            corrects_bias=self.correct_bias,
            as_hugging_face=self.adam_mode == 1,
        )


@dataclass(frozen=True)
class SGD(Rule):
    """SGDOptimizerV2, which has no momentum; checkpoints hold one nevertheless."""

    @property
    def momentums(self) -> Sequence[str]:
        return ("momentum0",)

    def passes(self) -> Sequence[Pass]:
        return (kernels.sgd,)

    def _update(self, arrays: Sequence[np.ndarray], group: Group, threads: int) -> None:
        kernels.sgd(arrays[0], arrays[1], threads=threads, rate=group.rate)


def read_optimizer(path: str | os.PathLike[str]) -> Rule:
    """Return what the optimizer model in a file does."""
    return rule_of(read_model(path, "optimizer"))


def rule_of(model: onnx.ModelProto) -> Rule:
    """Return what an optimizer model does."""
    graph = model.graph
    optimizers = [n for n in graph.node if n.op_type in ("AdamWOptimizer", "SGDOptimizerV2")]
    if len(optimizers) != 1 or optimizers[0].domain != DOMAIN:
        raise TrainingModelError(
            "an optimizer model has one node AdamWOptimizer or SGDOptimizerV2 of com.microsoft, this one has "
            f"{', '.join(node.op_type for node in graph.node) or 'no nodes'}"
        )
    (optimizer,) = optimizers
    adam = optimizer.op_type == "AdamWOptimizer"
    expected = [*_COMMON, *(["second_order_moments"] if adam else [])]
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    inputs = [value.name for value in graph.input if value.name not in initializers]
    if inputs != expected:
        raise TrainingModelError(f"Invalid graph inputs. Expected: {expected}, actual: {inputs}")
    clips, gradients = _clips(graph, optimizer)
    taken = [*expected[:3], gradients, *expected[4:]] if adam else ["learning_rate", "params", gradients]
    if list(optimizer.input[: len(taken)]) != taken:
        raise TrainingModelError(
            f"{optimizer.op_type} reads {list(optimizer.input)}; only {taken} is possible"
        )
    signal = optimizer.input[len(taken)] if len(optimizer.input) > len(taken) else ""
    updates = not signal or _constant(graph, initializers, signal)
    if not adam:
        return SGD(clips, updates)
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in optimizer.attribute}
    mode = attributes.get("adam_mode", 0)
    if mode not in (0, 1):
        raise TrainingModelError(f"adam_mode is {mode}; it must be 0 or 1")
    return AdamW(
        clips,
        updates,
        alpha=_single(attributes.get("alpha", 0.9)),
        beta=_single(attributes.get("beta", 0.999)),
        epsilon=_single(attributes.get("epsilon", 1e-8)),
        weight_decay=_single(attributes.get("weight_decay", 1e-2)),
        correct_bias=attributes.get("correct_bias", 1) == 1,
        adam_mode=mode,
    )


def _single(value: float) -> float:
    return float(np.float32(value))


def _clips(graph: onnx.GraphProto, optimizer: onnx.NodeProto) -> tuple[tuple[float, ...], str]:
    """Return the norms to which gradients are clipped, and the name of the clipped gradients."""
    gradients, clips = "gradients", []
    for node in graph.node:
        if node is optimizer or node == optimizer or node.op_type == "Constant":
            continue
        if node.op_type not in ("InplaceClipGradNorm", "ClipGradNorm") or node.domain != DOMAIN:
            raise TrainingModelError(
                f"the optimizer model has a node {node.op_type}, which ortgrad does not know"
            )
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        kind = attributes.get("norm_type", b"fro")
        if kind != b"fro" or list(node.input) != [gradients]:
            raise TrainingModelError(
                f"{node.op_type} node {node.name!r} does not clip the norm of all gradients"
            )
        clips.append(_single(attributes.get("max_norm", 1.0)))
        gradients = node.output[0]
    return tuple(clips), gradients


def _constant(graph: onnx.GraphProto, initializers: dict[str, onnx.TensorProto], name: str) -> bool:
    """Return the value of a constant update signal."""
    tensor = initializers.get(name)
    for node in graph.node:
        if node.op_type == "Constant" and name in node.output:
            tensor = next((a.t for a in node.attribute if a.name == "value"), tensor)
    if tensor is None:
        raise TrainingModelError(f"the update signal {name!r} is not a constant")
    return bool(onnx.numpy_helper.to_array(tensor).reshape(-1)[0])
