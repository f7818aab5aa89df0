"""Optimizers: blocks that build the model of an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import TensorProto

from ortgrad.compat.onnxblock import blocks
from ortgrad.compat.onnxblock.models import ForwardBlock
from ortgrad.errors import NoParametersError, TrainingModelError
from ortgrad.operators.declaration import DOMAIN
from ortgrad.training.protos import add_node, generate_graph_name

__all__ = ["SGD", "AdamW", "ClipGradNorm"]

Parameters = tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]]


class ClipGradNorm(blocks.Block):
    """Multiplies all gradients by max_norm / (norm + 1e-6) if that is less than 1.

    `norm` is that of all gradients together.
    """

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        self._max_norm = max_norm

    def build(self, gradients_name: str) -> str:
        output = generate_graph_name(self.base, "clip_grad_norm_output")
        kind = _sequence_type(self.base, gradients_name)
        add_node(
            self.base,
            "InplaceClipGradNorm",
            [gradients_name],
            [output],
            domain=DOMAIN,
            max_norm=float(self._max_norm),
        )
        self.base.graph.value_info.append(onnx.helper.make_tensor_sequence_value_info(output, kind, None))
        return output


class _Optimizer(ForwardBlock):
    """The model of an optimizer step: inputs, clipping of the gradients, and one optimizer node."""

    _op_type: str
    _flag: str
    _moments: tuple[str, ...]

    def __init__(self, clip_grad: blocks.Block | None = None) -> None:
        super().__init__()
        self._clip_grad = clip_grad

    def build(self, parameters: Parameters) -> str:
        """Add the optimizer of the trainable parameters, the first of the two lists."""
        kind = _common_type(parameters[0])
        inputs = self.base.graph.input
        inputs.append(onnx.helper.make_tensor_value_info("learning_rate", TensorProto.FLOAT, [1]))
        inputs.append(onnx.helper.make_tensor_value_info("step", TensorProto.INT64, [1]))
        for name in ("params", "gradients", *self._moments):
            inputs.append(onnx.helper.make_tensor_sequence_value_info(name, kind, None))
        gradients = "gradients" if self._clip_grad is None else self._clip_grad("gradients")
        flag = generate_graph_name(self.base, self._flag)
        add_node(
            self.base, self._op_type, self._inputs(gradients), [flag], domain=DOMAIN, **self._attributes()
        )
        self.base.graph.output.append(onnx.helper.make_tensor_value_info(flag, TensorProto.BOOL, [1]))
        return flag

    def _inputs(self, gradients: str) -> list[str]:
        raise NotImplementedError

    def _attributes(self) -> dict[str, Any]:
        return {}


class AdamW(_Optimizer):
    """Adam with weight decay: the operator AdamWOptimizer with adam_mode 1, as in Hugging Face's AdamW.

    The weight decay is applied after the update, and epsilon is added before the bias is corrected.

    >>> import numpy as np, onnx
    >>> from ortgrad.training import onnxblock
    >>> optimizer = onnxblock.optim.AdamW(weight_decay=0.01, clip_grad=onnxblock.optim.ClipGradNorm(1.0))
    >>> with onnxblock.empty_base():
    ...     flag = optimizer(([onnx.numpy_helper.from_array(np.float32([1, 2]), "w")], []))
    >>> [node.op_type for node in optimizer.to_model_proto().graph.node]
    ['InplaceClipGradNorm', 'AdamWOptimizer']
    """

    _op_type = "AdamWOptimizer"
    _flag = "adamw.updated_flag"
    _moments = ("first_order_moments", "second_order_moments")

    def __init__(
        self,
        bias_correction: bool | None = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float | None = 1e-6,
        weight_decay: float | None = 0.0,
        clip_grad: blocks.Block | None = None,
    ) -> None:
        super().__init__(clip_grad)
        self._bias_correction = bias_correction
        self._betas = betas
        self._eps = eps
        self._weight_decay = weight_decay

    def _inputs(self, gradients: str) -> list[str]:
        return ["learning_rate", "step", "params", gradients, *self._moments]

    def _attributes(self) -> dict[str, Any]:
        # None stands for the default of the operator.
        floats = {"epsilon": self._eps, "weight_decay": self._weight_decay}
        return {
            "alpha": float(self._betas[0]),
            "beta": float(self._betas[1]),
            **{name: float(value) for name, value in floats.items() if value is not None},
            "correct_bias": int(bool(self._bias_correction)),
            "adam_mode": 1,
        }


class SGD(_Optimizer):
    """weights -= learning_rate * gradients: the operator SGDOptimizerV2, without momentum."""

    _op_type = "SGDOptimizerV2"
    _flag = "update_completed"
    _moments = ("first_order_moments",)

    def _inputs(self, gradients: str) -> list[str]:
        return ["learning_rate", "params", gradients]


def _common_type(parameters: Sequence[onnx.TensorProto]) -> int:
    if not parameters:
        raise NoParametersError("there is no parameter to optimize; name some in requires_grad")
    kinds = {parameter.data_type for parameter in parameters}
    if len(kinds) > 1:
        names = ", ".join(sorted(onnx.TensorProto.DataType.Name(kind) for kind in kinds))
        raise TrainingModelError(f"an optimizer takes parameters of one type; there are {names}")
    return kinds.pop()


def _sequence_type(model: onnx.ModelProto, name: str) -> int:
    for value in (*model.graph.input, *model.graph.value_info):
        if value.name == name and value.type.HasField("sequence_type"):
            return int(value.type.sequence_type.elem_type.tensor_type.elem_type)
    return TensorProto.FLOAT
