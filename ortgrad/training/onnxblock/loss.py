"""Losses: blocks that compare a value of the model with a target and reduce the result."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from ortgrad.errors import TrainingError, TrainingModelError
from ortgrad.training.onnxblock import blocks, graph
from ortgrad.training.onnxblock.graph import add_node, generate_graph_name

__all__ = ["BCEWithLogitsLoss", "CrossEntropyLoss", "L1Loss", "MSELoss"]

_REDUCTIONS = ("mean", "sum", "none")


class _Elementwise(blocks.Block):
    """A loss per element, reduced."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        _check(reduction)
        self._reduction = reduction

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Add the loss of a value; if there is no value `target_name`, it becomes an input like the first."""
        if not graph.exists(self.base, target_name):
            blocks.InputLike(loss_input_name)(target_name)
        return self._reduced(self._losses(loss_input_name, target_name))

    def _losses(self, value: str, target: str) -> str:
        raise NotImplementedError

    def _reduced(self, losses: str) -> str:
        if self._reduction == "none":
            return losses
        reduce = blocks.ReduceMean if self._reduction == "mean" else blocks.ReduceSum
        name: str = reduce(keepdims=False)(losses)
        return name


class MSELoss(_Elementwise):
    """(value - target)^2, reduced by `reduction`: "mean", "sum" or "none"."""

    def _losses(self, value: str, target: str) -> str:
        name: str = blocks.Pow(2.0)(blocks.Sub()(value, target))
        return name


class L1Loss(_Elementwise):
    """|value - target|, reduced by `reduction`: "mean", "sum" or "none"."""

    def _losses(self, value: str, target: str) -> str:
        name: str = blocks.Abs()(blocks.Sub()(value, target))
        return name


class BCEWithLogitsLoss(_Elementwise):
    """-(p * target * log(sigmoid(x)) + (1 - target) * log(1 - sigmoid(x))) * weight, reduced.

    `weight` and `pos_weight` (p), arrays that broadcast with the value, are 1 if they are not given. The loss
    is computed as (1 - target) * x + (1 + (p - 1) * target) * log(1 + exp(-x)), which is finite for every x.
    """

    def __init__(self, weight: Any = None, reduction: str = "mean", pos_weight: Any = None) -> None:
        super().__init__(reduction)
        self._weight = weight
        self._pos_weight = pos_weight

    def _losses(self, value: str, target: str) -> str:
        kind = graph.element_type(self.base, value)
        one = _add_array(self.base, "bceloss.one", 1.0, kind)
        add, sub, mul = blocks.Add(), blocks.Sub(), blocks.Mul()
        softplus = _node(self.base, "Softplus", blocks.Neg()(value))
        if self._pos_weight is not None:
            more = _add_array(self.base, "bceloss.pos_weight", np.asarray(self._pos_weight) - 1.0, kind)
            softplus = mul(add(one, mul(more, target)), softplus)
        losses: str = add(mul(sub(one, target), value), softplus)
        if self._weight is not None:
            losses = mul(_add_array(self.base, "bceloss.weight", self._weight, kind), losses)
        return losses


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
        _check(reduction)
        self._weight = weight
        self._reduction = reduction
        self._ignore_index = ignore_index
        self._axis = axis

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        """Add the loss of scores; if there is no value `labels_name`, it becomes an input of int64 labels."""
        model = self.base
        found = graph.find_value(model, scores_input_name).type.tensor_type
        dims = list(found.shape.dim) if found.HasField("shape") else None
        if dims is not None and len(dims) < 2:
            raise TrainingModelError(
                f"the scores {scores_input_name!r} need a dimension for the classes and one for the samples"
            )
        new = not graph.exists(model, labels_name)
        if new and dims is None:
            raise TrainingModelError(f"the number of dimensions of {scores_input_name!r} is not known")
        axis = self._class_axis(dims, None if new else labels_name)
        if new:
            assert dims is not None
            labels = onnx.helper.make_tensor_value_info(labels_name, TensorProto.INT64, [])
            labels.type.tensor_type.shape.dim.extend(dim for i, dim in enumerate(dims) if i != axis)
            model.graph.input.append(labels)
        scores = scores_input_name
        if axis != 1:
            assert dims is not None
            others = [i for i in range(1, len(dims)) if i != axis]
            scores = _node(model, "Transpose", scores, perm=[0, axis, *others])
        inputs = [scores, labels_name]
        if self._weight is not None:
            inputs.append(_add_array(model, "celoss.weight", self._weight, found.elem_type))
        outputs = [generate_graph_name(model, token) for token in ("loss", "log_prob")]
        attributes: dict[str, Any] = (
            {} if self._ignore_index is None else {"ignore_index": self._ignore_index}
        )
        return add_node(
            model, "SoftmaxCrossEntropyLoss", inputs, outputs, reduction=self._reduction, **attributes
        )

    def _class_axis(self, dims: list[Any] | None, labels: str | None) -> int:
        if dims is None:
            return 1
        rank = len(dims)
        if self._axis is not None:
            if not -rank <= self._axis < rank or self._axis % rank == 0:
                raise TrainingModelError(f"axis is {self._axis}; the scores have {rank} dimensions")
            return self._axis % rank
        if labels is None:
            return rank - 1
        found = graph.find_value(self.base, labels).type.tensor_type
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


def _check(reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        raise TrainingError(f"reduction is {reduction!r}; it must be one of {', '.join(_REDUCTIONS)}")


def _node(model: onnx.ModelProto, op_type: str, *inputs: str, **attributes: Any) -> str:
    output = generate_graph_name(model, f"{op_type.lower()}_output")
    return add_node(model, op_type, list(inputs), [output], **attributes)


def _add_array(model: onnx.ModelProto, token: str, array: Any, kind: int) -> str:
    """Add an initializer and return its name."""
    name = generate_graph_name(model, token)
    values = np.asarray(array).astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
    model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return name
