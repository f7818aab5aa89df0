"""The building blocks: each adds one or more nodes to the model and returns the name of the result."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from ortgrad.compat.onnxblock.model_accessor import base, building, current
from ortgrad.errors import TrainingError
from ortgrad.keywords import checked
from ortgrad.operators.declaration import DOMAIN
from ortgrad.training import protos
from ortgrad.training.loss_nodes import CustomLoss
from ortgrad.training.protos import Nodes, add_node, generate_graph_name

__all__ = [
    "Abs",
    "Add",
    "Block",
    "Cast",
    "Clip",
    "Constant",
    "Div",
    "InputLike",
    "LabelEncoder",
    "Linear",
    "Log",
    "Mul",
    "Neg",
    "PassThrough",
    "Pow",
    "ReduceAllL2",
    "ReduceMean",
    "ReduceSum",
    "SequenceConstruct",
    "Sigmoid",
    "Sub",
]


@checked
class Block(CustomLoss):
    """Adds nodes to the model of the surrounding `onnxblock.base`.

    A subclass defines `build`, which changes `self.base`, the model, and returns the names of its results.
    Blocks may call other blocks. `temp_file_name` is not used: nothing is written to a file.

    >>> from ortgrad.training import onnxblock
    >>> class Doubled(onnxblock.Block):
    ...     def build(self, name):
    ...         return onnxblock.blocks.Add()(name, name)
    """

    base: onnx.ModelProto

    def __init__(self, temp_file_name: str = "temp.onnx") -> None:
        if os.path.isabs(temp_file_name):
            raise TrainingError(f"temp_file_name is {temp_file_name!r}; it must be a relative path")

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        checked(cls)

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Add the nodes and return the names of the results."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `build`; the outermost of the calls checks the model."""
        with building() as accessor:
            self.base = accessor.model
            return self.build(*args, **kwargs)

    def add_to_model(self, model: onnx.ModelProto, *names: str) -> str:
        with base(model) as accessor:
            found = self(*names)
        model.CopyFrom(accessor.model)
        return first_of(found)

    def infer_shapes_on_base(self) -> onnx.ModelProto:
        """Return a copy of the model with inferred types and shapes."""
        return protos.with_inferred(current().model)


def first_of(names: str | Sequence[str]) -> str:
    """Return the first of the names that a block's build method has returned."""
    return names if isinstance(names, str) else names[0]


class _Operator(Block):
    """One node of a standard operator."""

    _op_type: str

    def __init__(self) -> None:
        super().__init__()

    def _add(self, *input_names: str, **attributes: Any) -> str:
        name: str = getattr(Nodes(self.base), self._op_type)(*input_names, **attributes)
        return name


class _BinaryOp(_Operator):
    def build(self, input_name1: str, input_name2: str) -> str:
        return self._add(input_name1, input_name2)


class _UnaryOp(_Operator):
    def build(self, input_name: str) -> str:
        return self._add(input_name)


class _Reduction(_Operator):
    def __init__(self, keepdims: bool = True) -> None:
        super().__init__()
        self._keepdims = keepdims

    def build(self, input_name: str) -> str:
        return self._add(input_name, keepdims=int(self._keepdims))


class Add(_BinaryOp):
    """The sum of two values."""

    _op_type = "Add"


class Sub(_BinaryOp):
    """The difference of two values."""

    _op_type = "Sub"


class Mul(_BinaryOp):
    """The product of two values."""

    _op_type = "Mul"


class Div(_BinaryOp):
    """The quotient of two values."""

    _op_type = "Div"


class Pow(Block):
    """A value to the power of a constant."""

    def __init__(self, exponent: float) -> None:
        super().__init__()
        self._exponent = exponent

    def build(self, pow_input_name: str) -> str:
        op = Nodes(self.base)
        return op.Pow(pow_input_name, op.number("pow_exponent", self._exponent))


class ReduceMean(_Reduction):
    """The mean of all elements."""

    _op_type = "ReduceMean"


class ReduceSum(_Reduction):
    """The sum of all elements."""

    _op_type = "ReduceSum"


class Sigmoid(_UnaryOp):
    """1 / (1 + exp(-x))"""

    _op_type = "Sigmoid"


class Log(_UnaryOp):
    """The natural logarithm."""

    _op_type = "Log"


class Neg(_UnaryOp):
    """The value with the opposite sign."""

    _op_type = "Neg"


class Abs(_UnaryOp):
    """The absolute value."""

    _op_type = "Abs"


class Constant(Block):
    """A constant of one element."""

    def __init__(self, value_float: float) -> None:
        super().__init__()
        self._value = value_float

    def build(self) -> str:
        return Nodes(self.base).number("initializer", self._value)


class SequenceConstruct(Block):
    """A sequence of values."""

    def build(self, *sequence_input_names: str) -> str:
        return Nodes(self.base).SequenceConstruct(*sequence_input_names)


class ReduceAllL2(Block):
    """The square root of the sum of the squares of all elements of several values (com.microsoft)."""

    def build(self, *reduce_node_input_names: str) -> str:
        inputs = reduce_node_input_names
        kind = protos.element_type(self.base, inputs[0]) if inputs else TensorProto.FLOAT
        output = Nodes(self.base).ReduceAllL2(*inputs, domain=DOMAIN)
        self.base.graph.value_info.append(onnx.helper.make_tensor_value_info(output, kind, [1]))
        return output


class Clip(Block):
    """A value limited to a range; a bound that is None does not limit it."""

    def __init__(self, clip_min: float | None = None, clip_max: float | None = None) -> None:
        super().__init__()
        self._min = clip_min
        self._max = clip_max

    def build(self, clip_input_name: str) -> str:
        op, kind = Nodes(self.base), protos.element_type(self.base, clip_input_name)
        bounds = [
            # ONNX defines bounds as scalars.
            "" if bound is None else op.number(name, bound, kind, [])
            for name, bound in (("clip_min", self._min), ("clip_max", self._max))
        ]
        return op.Clip(clip_input_name, *bounds)


class PassThrough(Block):
    """The values themselves."""

    def build(self, *input_names: str) -> tuple[str, ...]:
        return input_names


class InputLike(Block):
    """A new input of the model with the type and shape of a value."""

    def __init__(self, like: str) -> None:
        super().__init__()
        self._like = like

    def build(self, input_name: str | None = None) -> str:
        name = input_name or generate_graph_name(self.base, "input")
        protos.input_like(self.base, self._like, name)
        return name


@checked
@dataclass(eq=False)
class LabelEncoder(Block):
    """A mapping of keys to values (ai.onnx.ml)."""

    default_float: float = 0.0
    default_int64: int = -1
    default_string: str = "_Unused"
    keys_floats: Sequence[float] | None = None
    keys_int64s: Sequence[int] | None = None
    keys_strings: Sequence[str] | None = None
    values_floats: Sequence[float] | None = None
    values_int64s: Sequence[int] | None = None
    values_strings: Sequence[str] | None = None

    def build(self, label_encoder_input_name: str) -> str:
        output = generate_graph_name(self.base, "label_encoder.output")
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        attributes = {name: value for name, value in given.items() if value is not None}
        inputs = [label_encoder_input_name]
        return add_node(self.base, "LabelEncoder", inputs, [output], domain="ai.onnx.ml", **attributes)


class Cast(Block):
    """A value converted to another element type (onnx.TensorProto.FLOAT, ...)."""

    def __init__(self, to: int) -> None:
        super().__init__()
        self._to = to

    def build(self, cast_input_name: str) -> str:
        return add_node(
            self.base, "Cast", [cast_input_name], [generate_graph_name(self.base, "cast.output")], to=self._to
        )


class Linear(Block):
    """A layer with a weight [in_features, out_features] and a bias, with random initial values."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, alpha: float = 1.0, beta: float = 1.0
    ) -> None:
        super().__init__()
        self._shape = (in_features, out_features)
        self._bias = bias
        self._alpha = alpha
        self._beta = beta

    def build(self, linear_input_name: str) -> str:
        inputs = [linear_input_name, self._add_random("linear.weight", self._shape)]
        if self._bias:
            inputs.append(self._add_random("linear.bias", self._shape[1:]))
        output = generate_graph_name(self.base, "linear.output")
        return add_node(self.base, "Gemm", inputs, [output], alpha=self._alpha, beta=self._beta)

    def _add_random(self, token: str, shape: tuple[int, ...]) -> str:
        name = generate_graph_name(self.base, token)
        # NumPy's global generator, so that np.random.seed makes the values reproducible.
        values = np.random.randn(*shape).astype(np.float32)
        self.base.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
        return name
