"""Losses: blocks that compare a value of the model with a target and reduce the result."""

from __future__ import annotations

from typing import Any

from ortgrad.compat.onnxblock import blocks
from ortgrad.training import loss_nodes

__all__ = ["BCEWithLogitsLoss", "CrossEntropyLoss", "L1Loss", "MSELoss"]


class _Elementwise(blocks.Block):
    """A loss of elements that are compared one by one."""

    def __init__(self, loss: loss_nodes.Elementwise) -> None:
        super().__init__()
        self._loss = loss

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Add the loss of a value; if there is no value `target_name`, it becomes an input like the first."""
        return self._loss.add(self.base, loss_input_name, target_name)


class MSELoss(_Elementwise):
    """(value - target)^2, reduced by `reduction`: "mean", "sum" or "none"."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(loss_nodes.SquaredError(reduction))


class L1Loss(_Elementwise):
    """|value - target|, reduced by `reduction`: "mean", "sum" or "none"."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(loss_nodes.AbsoluteError(reduction))


class BCEWithLogitsLoss(_Elementwise):
    """-(p * target * log(sigmoid(x)) + (1 - target) * log(1 - sigmoid(x))) * weight, reduced.

    `weight` and `pos_weight` (p), arrays that broadcast with the value, are 1 if they are not given. The loss
    is finite for every x.
    """

    def __init__(self, weight: Any = None, reduction: str = "mean", pos_weight: Any = None) -> None:
        super().__init__(loss_nodes.BinaryCrossEntropy(weight, reduction, pos_weight))


class CrossEntropyLoss(blocks.Block):
    """-log(softmax(scores))[label], reduced by `reduction`: "mean", "sum" or "none".

    `weight` is an array with a factor per class; "mean" divides by the sum of the factors. Labels equal to
    `ignore_index` do not count. `axis` is the dimension of the classes. The default is the last one for
    labels that the block adds as an input; for labels that exist it is 1, as in PyTorch, unless their shape
    says that it is the last one.

    >>> import numpy as np, onnx, ortgrad
    >>> from ortgrad.training import onnxblock
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N, 2] x) => (float[N, 2] y) { y = Identity(x) }''')
    >>> with onnxblock.base(model) as accessor:
    ...     name = onnxblock.loss.CrossEntropyLoss(reduction="sum")("y")
    >>> [value.name for value in accessor.model.graph.input]
    ['x', 'labels']
    """

    def __init__(
        self,
        weight: Any = None,
        reduction: str = "mean",
        ignore_index: int | None = None,
        *,
        axis: int | None = None,
    ) -> None:
        super().__init__()
        self._loss = loss_nodes.CrossEntropy(weight, reduction, ignore_index, axis)

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        """Add the loss of scores; if there is no value `labels_name`, it becomes an input of int64 labels."""
        return self._loss.add(self.base, scores_input_name, labels_name)
