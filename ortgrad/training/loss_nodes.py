"""The losses: what each computes of a value and a target, as nodes that are added to a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from ortgrad.errors import TrainingError, TrainingModelError
from ortgrad.training import protos
from ortgrad.training.protos import Nodes

_REDUCTIONS = ("mean", "sum", "none")


class CustomLoss(ABC):
    """A loss that adds nodes of its own to a model, such as a block of onnxblock."""

    @abstractmethod
    def add_to_model(self, model: onnx.ModelProto, *names: str) -> str:
        """Add the loss of these values to a model and return its name."""


class LossNodes(ABC):
    """A loss of a value and a target, reduced by `reduction`: "mean", "sum" or "none"."""

    def __init__(self, reduction: str = "mean") -> None:
        if reduction not in _REDUCTIONS:
            raise TrainingError(f"reduction is {reduction!r}; it must be one of {', '.join(_REDUCTIONS)}")
        self.reduction = reduction

    @abstractmethod
    def add(self, model: onnx.ModelProto, value: str, target: str) -> str:
        """Add the loss to a model and return its name; a target that does not exist becomes an input."""


class Elementwise(LossNodes):
    """A loss of elements that are compared one by one."""

    def add(self, model: onnx.ModelProto, value: str, target: str) -> str:
        if not protos.exists(model, target):
            protos.input_like(model, value, target)
        op = Nodes(model)
        losses = self.losses(op, value, target)
        if self.reduction == "none":
            return losses
        return (op.ReduceMean if self.reduction == "mean" else op.ReduceSum)(losses, keepdims=0)

    @abstractmethod
    def losses(self, op: Nodes, value: str, target: str) -> str:
        """Add the loss of every element and return its name."""


class SquaredError(Elementwise):
    """(value - target)^2"""

    def losses(self, op: Nodes, value: str, target: str) -> str:
        return op.Pow(op.Sub(value, target), op.number("pow_exponent", 2.0))


class AbsoluteError(Elementwise):
    """|value - target|"""

    def losses(self, op: Nodes, value: str, target: str) -> str:
        return op.Abs(op.Sub(value, target))


class Huber(Elementwise):
    """d^2 / 2 where |d| <= delta, else delta (|d| - delta / 2), of d = value - target"""

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(reduction)
        if not delta > 0:
            raise TrainingError(f"delta is {delta}; it must be positive")
        self._delta = delta

    def losses(self, op: Nodes, value: str, target: str) -> str:
        kind = protos.element_type(op.model, value)
        size = op.Abs(op.Sub(value, target))
        delta, half = op.constant("huber.delta", self._delta, kind), op.constant("huber.half", 0.5, kind)
        # With s = min(|d|, delta) both cases are s (|d| - s / 2).
        small = op.Min(size, delta)
        return op.Mul(small, op.Sub(size, op.Mul(half, small)))


class BinaryCrossEntropy(Elementwise):
    """-(p target log(sigmoid(x)) + (1 - target) log(1 - sigmoid(x))) weight

    It is computed as (1 - target) x + (1 + (p - 1) target) log(1 + exp(-x)), which is finite for every x.
    `weight` and `pos_weight` (p), arrays that broadcast with the value, are 1 if they are not given.
    """

    def __init__(self, weight: Any = None, reduction: str = "mean", pos_weight: Any = None) -> None:
        super().__init__(reduction)
        self._weight, self._pos_weight = weight, pos_weight

    def losses(self, op: Nodes, value: str, target: str) -> str:
        kind = protos.element_type(op.model, value)
        one = op.constant("bceloss.one", 1.0, kind)
        softplus = op.Softplus(op.Neg(value))
        if self._pos_weight is not None:
            more = op.constant("bceloss.pos_weight", np.asarray(self._pos_weight) - 1.0, kind)
            softplus = op.Mul(op.Add(one, op.Mul(more, target)), softplus)
        losses = op.Add(op.Mul(op.Sub(one, target), value), softplus)
        if self._weight is not None:
            losses = op.Mul(op.constant("bceloss.weight", self._weight, kind), losses)
        return losses


class CrossEntropy(LossNodes):
    """-log(softmax(scores))[label]

    `weight` is an array with a factor per class; "mean" divides by the sum of the factors. Labels equal to
    `ignore_index` do not count. `axis` is the dimension of the classes. The default is the last one for
    labels that are added as an input; for labels that exist it is 1, as in PyTorch, unless their shape says
    that it is the last one.
    """

    def __init__(self, weight: Any, reduction: str, ignore_index: int | None, axis: int | None) -> None:
        super().__init__(reduction)
        self._weight, self._ignore_index, self._axis = weight, ignore_index, axis

    def add(self, model: onnx.ModelProto, value: str, target: str) -> str:
        found = protos.find_value(model, value).type.tensor_type
        dims = list(found.shape.dim) if found.HasField("shape") else None
        if dims is not None and len(dims) < 2:
            raise TrainingModelError(
                f"the scores {value!r} need a dimension for the classes and one for the samples"
            )
        new = not protos.exists(model, target)
        if new and dims is None:
            raise TrainingModelError(f"the number of dimensions of {value!r} is not known")
        axis = self._class_axis(model, dims, None if new else target)
        if new:
            assert dims is not None
            labels = onnx.helper.make_tensor_value_info(target, TensorProto.INT64, [])
            labels.type.tensor_type.shape.dim.extend(dim for i, dim in enumerate(dims) if i != axis)
            model.graph.input.append(labels)
        op = Nodes(model)
        if axis != 1:
            assert dims is not None
            value = op.Transpose(value, perm=[0, axis, *(i for i in range(1, len(dims)) if i != axis)])
        inputs = [value, target]
        if self._weight is not None:
            inputs.append(op.constant("celoss.weight", self._weight, found.elem_type))
        outputs = [protos.generate_graph_name(model, token) for token in ("loss", "log_prob")]
        ignored: dict[str, Any] = {} if self._ignore_index is None else {"ignore_index": self._ignore_index}
        return protos.add_node(
            model, "SoftmaxCrossEntropyLoss", inputs, outputs, reduction=self.reduction, **ignored
        )

    def _class_axis(self, model: onnx.ModelProto, dims: list[Any] | None, labels: str | None) -> int:
        if dims is None:
            return 1
        rank = len(dims)
        if self._axis is not None:
            if not -rank <= self._axis < rank or self._axis % rank == 0:
                raise TrainingModelError(f"axis is {self._axis}; the scores have {rank} dimensions")
            return self._axis % rank
        if labels is None:
            return rank - 1
        found = protos.find_value(model, labels).type.tensor_type
        known = list(found.shape.dim) if found.HasField("shape") else None
        if known is None or len(known) != rank - 1 or _fits(dims, 1, known):
            return 1
        return rank - 1 if _fits(dims, rank - 1, known) else 1


def _fits(dims: list[Any], axis: int, labels: list[Any]) -> bool:
    """Return whether labels may have these sizes if the classes are along `axis` of the scores."""
    others = [dim for i, dim in enumerate(dims) if i != axis]
    return all(
        a == b or not (a.HasField("dim_value") and b.HasField("dim_value"))
        for a, b in zip(others, labels, strict=True)
    )
