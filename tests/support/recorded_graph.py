"""ONNX models made by hand, one call per node."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Arrays = dict[str, np.ndarray]
Shape = Sequence[int | str]
OPSET = 20


@dataclass
class Graph:
    """Records nodes: `g.Relu(x)` adds one and returns the name of its output. Arrays become constants."""

    generator: np.random.Generator
    prefix: str = ""
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: Arrays = field(default_factory=dict)
    constants: Arrays = field(default_factory=dict)

    def weight(self, name: str, *shape: int, scale: float | None = None, shift: float = 0.0) -> str:
        """A new weight; its values have the size that keeps that of the layers."""
        size = scale if scale is not None else 1 / math.sqrt(max(1, math.prod(shape) // shape[0]))
        values = shift + size * self.generator.standard_normal(shape)
        self.weights[name] = values.astype(np.float32)
        return name

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[0].isupper():
            raise AttributeError(op_type)

        def add(*inputs: str | np.ndarray, out: str | Sequence[str] | None = None, **attributes: Any) -> Any:
            outputs = (
                [out] if isinstance(out, str) else list(out or [f"{self.prefix}{op_type}_{len(self.nodes)}"])
            )
            names = [i if isinstance(i, str) else self._constant(i) for i in inputs]
            self.nodes.append(helper.make_node(op_type, names, outputs, name=outputs[0], **attributes))
            return outputs[0]

        return add

    def _constant(self, array: np.ndarray) -> str:
        name = f"{self.prefix}constant_{len(self.constants)}"
        self.constants[name] = array
        return name

    def graph(
        self, inputs: Mapping[str, tuple[int, Shape]], outputs: Mapping[str, tuple[int, Shape]]
    ) -> onnx.GraphProto:
        return helper.make_graph(
            self.nodes,
            "graph",
            [helper.make_tensor_value_info(name, *of) for name, of in inputs.items()],
            [helper.make_tensor_value_info(name, *of) for name, of in outputs.items()],
            [numpy_helper.from_array(a, name) for name, a in (self.weights | self.constants).items()],
        )

    def model(self, inputs: Mapping[str, tuple[int, Shape]], **outputs: Shape) -> onnx.ModelProto:
        """The model with the outputs `loss` and those given, all of them float."""
        shapes: dict[str, Shape] = {"loss": (), **outputs}
        graph = self.graph(inputs, {name: (TensorProto.FLOAT, shape) for name, shape in shapes.items()})
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
        onnx.checker.check_model(model, full_check=True)
        return model


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def number(value: float) -> np.ndarray:
    return np.array(value, np.float32)
