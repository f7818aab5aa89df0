"""A model of two gradient nodes, and sessions of it that run Python kernels."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import ortgrad


def chain_model() -> onnx.ModelProto:
    """Two gradient nodes and a weight."""
    nodes = [
        ortgrad.nodes.relu_grad("dY", "X", "dX", name="first"),
        helper.make_node("Mul", ["dX", "W"], ["scaled"]),
        ortgrad.nodes.relu_grad("scaled", "X", "Z", name="second"),
    ]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N"]) for n in ("dY", "X")],
        [helper.make_tensor_value_info("Z", TensorProto.FLOAT, ["N"])],
        [numpy_helper.from_array(np.float32([2]), "W")],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def session(**options: object) -> ortgrad.InferenceSession:
    return ortgrad.InferenceSession(chain_model(), kernels="python", **options)
