"""Models of optimizers, and AdamW in NumPy."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import TensorProto, helper

SEQUENCE = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))


NAMES = ["params", "gradients", "first_order_moments", "second_order_moments"]


def optimizer_model(
    nodes: list[onnx.NodeProto],
    names: list[str] = NAMES,
    initializers: tuple[onnx.TensorProto, ...] = (),
) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info("learning_rate", TensorProto.FLOAT, [1]),
        helper.make_tensor_value_info("step", TensorProto.INT64, [1]),
        *(helper.make_value_info(name, SEQUENCE) for name in names),
    ]
    output = helper.make_tensor_value_info("updated", TensorProto.BOOL, [1])
    graph = helper.make_graph(nodes, "g", inputs, [output], list(initializers))
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def adamw(gradients: str = "gradients", *more: str, **attributes: Any) -> onnx.NodeProto:
    inputs = ["learning_rate", "step", "params", gradients, *NAMES[2:], *more]
    return helper.make_node("AdamWOptimizer", inputs, ["updated"], domain="com.microsoft", **attributes)
