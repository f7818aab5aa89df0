"""Operators as they were in opsets 7 to 17: what they compute stays the same, and the gradients are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import ortgrad
from ortgrad.graph.serialization import read, write
from ortgrad.passes.opset import at_minimum_opset

OPSETS = range(7, 18)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@dataclass(frozen=True)
class Case:
    op_type: str
    inputs: Sequence[np.ndarray]
    attributes: dict[str, Any] = field(default_factory=dict)
    opsets: Sequence[int] = OPSETS
    constants: Sequence[int] = ()
    outputs: int = 1

    def __str__(self) -> str:
        return f"{self.op_type}-{self.opsets[0]}-{'-'.join(map(str, self.attributes.values()))}"

    def versions(self) -> list[int]:
        """The last opset of each version of the operator."""
        since = {onnx.defs.get_schema(self.op_type, v).since_version: v for v in self.opsets}
        return list(since.values())


X = normal(2, 3, 4, 4)
P = np.abs(X) + np.float32(0.5)
LAYERS = [X, normal(3, seed=1), normal(3, seed=2), normal(3, seed=3), np.abs(normal(3, seed=4)) + 1]
BEFORE_9, BEFORE_10, BEFORE_11, BEFORE_13, FROM_11 = (
    range(7, 9),
    range(7, 10),
    range(7, 11),
    range(7, 13),
    range(11, 18),
)
CASES = [
    *(
        Case(op, [P])
        for op in ("Abs", "Exp", "Log", "Relu", "Sigmoid", "Elu", "LeakyRelu", "Selu", "Softplus")
    ),
    *(Case(op, [P, np.abs(normal(4, seed=1)) + 1]) for op in ("Add", "Sub", "Mul", "Div", "Pow")),
    *(Case(op, [X, normal(2, 3, 4, 4, seed=1)]) for op in ("Max", "Min", "Sum", "Mean")),
    *(
        Case(op, [X], attributes, BEFORE_13)
        for op in ("Softmax", "LogSoftmax", "Hardmax")
        for attributes in ({}, {"axis": 0}, {"axis": 1}, {"axis": 2}, {"axis": 3})
    ),
    *(Case(op, [X], {"axis": -2}, FROM_11) for op in ("Softmax", "LogSoftmax", "Hardmax")),
    *(
        Case(op, [P], attributes, BEFORE_13 if op == "ReduceSum" else OPSETS)
        for op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceProd", "ReduceL2", "ReduceLogSumExp")
        for attributes in ({}, {"axes": [1, 3], "keepdims": 0})
    ),
    Case("BatchNormalization", LAYERS),
    Case("BatchNormalization", LAYERS, {"spatial": 1}, BEFORE_9),
    Case("InstanceNormalization", LAYERS[:3]),
    Case("LRN", [X], {"size": 3}),
    Case("Upsample", [X], {"scales": [1.0, 1.0, 2.0, 3.0], "mode": "nearest"}, BEFORE_9),
    Case("Upsample", [X], {"scales": [1.0, 1.0, 2.0, 2.0], "mode": "linear"}, BEFORE_9),
    Case("Upsample", [X, floats(1, 1, 2, 3)], {"mode": "nearest"}, [9], [1]),
    Case("Upsample", [X, floats(1, 1, 2, 3)], {"mode": "linear"}, [9]),
    Case("Resize", [X, floats(1, 1, 2, 3)], {"mode": "nearest"}, [10], [1]),
    Case("Resize", [X, floats(1, 1, 0.5, 0.5)], {"mode": "nearest"}, [10], [1]),
    Case("Resize", [X, floats(1, 1, 0.6, 1.5)], {"mode": "linear"}, [10], [1]),
    Case("Dropout", [X], {"ratio": 0.3}, range(7, 12)),
    *(
        Case(op, [X], {"kernel_shape": [3, 3], **attributes})
        for op in ("MaxPool", "AveragePool", "LpPool")
        for attributes in ({"strides": [2, 2], "pads": [1, 1, 1, 1]}, {"auto_pad": "SAME_UPPER"})
    ),
    Case("Conv", [X, normal(2, 3, 3, 3, seed=1), normal(2, seed=2)], {"pads": [1, 1, 1, 1]}),
    Case("ConvTranspose", [X, normal(3, 2, 3, 3, seed=1)], {"strides": [2, 2]}),
    Case("Pad", [X], {"pads": [0, 0, 1, 1, 0, 0, 2, 0], "value": 1.5}, BEFORE_11),
    Case("Pad", [X], {"pads": [0, 0, 1, 1, 0, 0, 2, 0], "mode": "reflect"}, BEFORE_11),
    Case("Slice", [X], {"starts": [0, 1], "ends": [2, 3], "axes": [1, 2]}, BEFORE_10),
    Case("Slice", [X], {"starts": [0, -3], "ends": [2, 1000]}, BEFORE_10),
    Case("Split", [X], {"axis": 2, "split": [1, 3]}, BEFORE_13, outputs=2),
    Case("Split", [X], {"axis": 2}, outputs=2),
    Case("Squeeze", [normal(2, 1, 3, 1)], {"axes": [1]}, BEFORE_13),
    Case("Squeeze", [normal(2, 1, 3, 1)]),
    Case("Unsqueeze", [normal(2, 3)], {"axes": [0, 2]}, BEFORE_13),
    Case("Reshape", [X, ints(0, 12, -1)]),
    Case("Flatten", [X], {"axis": 2}),
    Case("Gather", [X, ints(0, 2)], {"axis": 1}),
    Case("Clip", [X], {"min": -0.5, "max": 0.5}, BEFORE_11),
    Case("Clip", [X], {"max": 0.5}, BEFORE_11),
    Case("Gemm", [normal(3, 2), normal(4, 3), normal(1, 4)], {"transA": 1, "transB": 1, "alpha": 0.5}),
    Case("TopK", [normal(3, 6)], {"k": 2}, BEFORE_10, outputs=2),
    Case("TopK", [normal(3, 6), ints(2)], {}, range(10, 18), [1], 2),
    Case("PRelu", [X, normal(3, 1, 1)]),
    Case("DepthToSpace", [normal(1, 8, 2, 2)], {"blocksize": 2}),
    Case("Scatter", [normal(3, 3), ints(1, 0, 2).reshape(1, 3), normal(1, 3)], {}, [9, 10]),
    *(
        Case(op, [normal(4, 2, 3), normal(1, g * 3, 3), normal(1, g * 3, 3)], {"hidden_size": 3}, outputs=2)
        for op, g in (("LSTM", 4), ("GRU", 3), ("RNN", 1))
    ),
]


def model_of(case: Case, opset: int, declared: bool) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """In IR version 3, where initializers are inputs too."""
    infos, tensors, feeds = [], [], {}
    for i, (name, array) in enumerate(zip("abcde", case.inputs, strict=False)):
        fixed = i in case.constants
        shape = array.shape if fixed or declared else None
        infos.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shape))
        if fixed:
            tensors.append(numpy_helper.from_array(array, name))
        else:
            feeds[name] = array
    names = ["y", "z"][: case.outputs]
    kinds = {"z": onnx.TensorProto.INT64} if case.op_type == "TopK" else {}
    graph = helper.make_graph(
        [helper.make_node(case.op_type, [info.name for info in infos], names, **case.attributes)],
        "graph",
        infos,
        [helper.make_tensor_value_info(name, kinds.get(name, 1), None) for name in names],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=3), feeds


def session_of(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    data = model.SerializeToString()
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_converted_operators_compute_the_same(case: Case) -> None:
    for opset in case.versions():
        for declared in (True, False):
            model, feeds = model_of(case, opset, declared)
            expected = session_of(model).run(None, feeds)
            converted = write(at_minimum_opset(read(model)), model)
            found = session_of(converted).run(None, feeds)
            for one, other in zip(found, expected, strict=True):
                assert one.dtype == other.dtype
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=f"opset {opset}")


@pytest.mark.parametrize("case", [case for case in CASES if case.op_type != "Hardmax"], ids=str)
def test_gradients_of_old_operators(case: Case) -> None:
    model, feeds = model_of(case, case.opsets[0], True)
    forward = session_of(model)
    wrt = [name for name, array in feeds.items() if array.dtype == np.float32]
    if case.op_type in ("Upsample", "Resize"):
        wrt = ["a"]
    y = forward.run(["y"], feeds)[0]
    seed = normal(*y.shape, seed=8)
    session = ortgrad.InferenceSession(ortgrad.build_gradient_model(model, wrt=wrt, of="y"))
    grads = session.run([f"{name}_grad" for name in wrt], {**feeds, "y_grad": seed})
    for name, grad in zip(wrt, grads, strict=True):
        direction = normal(*feeds[name].shape, seed=9)
        step = np.float32(2.0**-9)
        ends = [
            forward.run(["y"], {**feeds, name: feeds[name] + s * step * direction})[0].astype(np.float64)
            for s in (1, -1)
        ]
        expected = np.sum((ends[0] - ends[1]) * seed) / (2 * step)
        scale = np.sum(np.abs(grad * direction)) + 1
        assert abs(np.sum(grad * direction) - expected) < 0.01 * scale, name


# Operators of onnxruntime's own that stand among ONNX's, where onnx has no schema for them


@pytest.mark.parametrize("opset", [9, 12, 16])
@pytest.mark.parametrize(
    "op", ["LayerNormalization<axis=-1>(x, s, s)", "SimplifiedLayerNormalization<axis=-1>(x, s)"]
)
def test_operators_that_onnx_does_not_know(op: str, opset: int) -> None:
    model = onnx.parser.parse_model(
        f'<ir_version: 6, opset_import: ["" : {opset}]> g (float[3,4] x, float[4] s) => (float[3,4] y)'
        f"{{ t = {op} y = Clip(t) }}"
    )
    x, s = normal(3, 4), normal(4, seed=1)
    ortgrad.check_gradients(model, {"x": x, "s": s}, wrt=["x", "s"], tolerance=1e-2).raise_if_wrong()
    built = ortgrad.build_gradient_model(model, wrt="x")
    (found,) = ortgrad.InferenceSession(built).run(["y"], {"x": x, "s": s, "y_grad": x})
    (expected,) = session_of(model).run(None, {"x": x, "s": s})
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
