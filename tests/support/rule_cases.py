"""A few nodes for every gradient rule: what sweeps over all operators run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from support.rules import NAMES, Arrays, one_node


@dataclass(frozen=True)
class Case:
    """One node: its inputs, of which some become initializers, and which of its outputs are asked for."""

    op_type: str
    inputs: Sequence[np.ndarray | None]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    constants: Sequence[int] = ()
    fixed: Sequence[int] = ()  # floating-point inputs without a gradient
    outputs: Sequence[Any] = (None,)  # element types
    opset: int = 18
    domain: str = ""

    @property
    def name(self) -> str:
        shapes = "".join("-" + "x".join(map(str, a.shape)) for a in self.inputs[:1] if a is not None)
        settings = "".join(f"-{k}={v}" for k, v in self.attributes.items())
        return f"{self.op_type}{shapes}{settings}".replace(" ", "")

    @property
    def wrt(self) -> list[str]:
        return [
            NAMES[i]
            for i, a in enumerate(self.inputs)
            if a is not None and a.dtype.kind == "f" and i not in (*self.constants, *self.fixed)
        ]

    def make(self, *, symbolic: bool = False) -> tuple[onnx.ModelProto, Arrays]:
        """The model and its feeds."""
        return one_node(
            self.op_type,
            self.inputs,
            self.attributes,
            opset=self.opset,
            domain=self.domain,
            outputs=self.outputs,
            constants=self.constants,
            symbolic=symbolic,
        )


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def positive(*shape: int, low: float = 0.2, high: float = 0.9) -> np.ndarray:
    return np.random.default_rng(shape).uniform(low, high, shape).astype(np.float32)


def apart(*shape: int) -> np.ndarray:
    """Values of which no two are close, none of them near 0."""
    count = int(np.prod(shape))
    values = np.random.default_rng(count).permutation(count) - count / 2 + 0.3
    return (values.reshape(shape) / 3).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


SAME_SHAPE = [
    "Abs",
    "Asinh",
    "Atan",
    "Cos",
    "Cosh",
    "Elu",
    "Erf",
    "Exp",
    "Gelu",
    "HardSigmoid",
    "HardSwish",
    "Identity",
    "LeakyRelu",
    "Mish",
    "Neg",
    "Relu",
    "Selu",
    "Shrink",
    "Sigmoid",
    "Sin",
    "Sinh",
    "Softplus",
    "Softsign",
    "Swish",
    "Tan",
    "Tanh",
    "ThresholdedRelu",
    "Celu",
]
BROADCAST = ["Add", "Div", "Max", "Mean", "Min", "Mul", "Sub", "Sum"]
REDUCTIONS = [
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSum",
    "ReduceSumSquare",
]
OPSETS = {"Gelu": 20, "Swish": 24}
MICROSOFT = "com.microsoft"

CASES: list[Case] = [
    *(Case(op, [apart(2, 3, 4) / 3], opset=OPSETS.get(op, 18)) for op in SAME_SHAPE),
    *(Case(op, [positive(2, 3, 4)]) for op in ("Acos", "Asin", "Atanh", "Log", "Reciprocal", "Sqrt")),
    Case("Acosh", [positive(2, 3, 4, low=1.5, high=3.0)]),
    *(Case(op, [apart(2, 3, 4), apart(3, 1) + 0.1], opset=18) for op in BROADCAST),
    Case("Pow", [positive(2, 3, 4), normal(3, 1)]),
    Case("Mod", [positive(2, 3, 4), positive(3, 1, low=2.0, high=3.0)], {"fmod": 1}),
    Case("PRelu", [apart(2, 3, 4), normal(3, 1)]),
    Case("Where", [normal(3, 1) > 0, normal(2, 3, 4), normal(4)]),
    Case("Clip", [apart(2, 3, 4), np.array(-1.1, np.float32), np.array(1.2, np.float32)]),
    Case("Cast", [normal(2, 3, 4)], {"to": onnx.TensorProto.FLOAT}),
    Case("CastLike", [normal(2, 3, 4), normal(1)], fixed=[1]),
    Case("CumSum", [normal(2, 3, 4), np.array(1)], {"reverse": 1}),
    Case("CumSum", [normal(2, 3, 4), np.array(-1)], {"exclusive": 1}),
    Case("CumProd", [positive(2, 3, 4), np.array(1)], opset=26),
    Case("Dropout", [normal(2, 3, 4)]),
    *(Case(op, [positive(2, 3, 4), ints(1)], constants=[1]) for op in REDUCTIONS),
    *(Case(op, [positive(2, 3, 4), ints(-1, 0)], {"keepdims": 0}, constants=[1]) for op in REDUCTIONS),
    Case("ReduceSum", [normal(2, 3, 4), ints(1)], {"keepdims": 0}),
    Case("ReduceMean", [normal(2, 3, 4)], {"keepdims": 0}),
    Case("Reshape", [normal(2, 3, 4), ints(4, -1)], constants=[1]),
    Case("Reshape", [normal(2, 3, 4), ints(1, 2, 3, 4)], constants=[1]),
    Case("Flatten", [normal(2, 3, 4)]),
    Case("Squeeze", [normal(2, 1, 4), ints(1)], constants=[1]),
    Case("Squeeze", [normal(2, 1, 4)]),
    Case("Unsqueeze", [normal(2, 3), ints(0, -1)], constants=[1]),
    Case("Transpose", [normal(2, 3, 4)], {"perm": [1, 2, 0]}),
    Case("Expand", [normal(3, 1), ints(2, 1, 4)], constants=[1]),
    Case("Tile", [normal(2, 3, 4), ints(2, 1, 3)], constants=[1]),
    Case("Tile", [normal(2, 3, 4), ints(2, 1, 3)]),
    Case("Concat", [normal(2, 3, 4), normal(2, 1, 4, seed=1)], {"axis": 1}),
    Case("Split", [normal(2, 3, 4), ints(1, 2)], {"axis": 1}, constants=[1], outputs=(None, None)),
    Case("DepthToSpace", [normal(2, 8, 2, 3)], {"blocksize": 2}),
    Case("DepthToSpace", [normal(2, 8, 2, 3)], {"blocksize": 2, "mode": "CRD"}),
    Case("SpaceToDepth", [normal(2, 3, 4, 6)], {"blocksize": 2}),
    Case("Trilu", [normal(2, 3, 4)]),
    Case("ReverseSequence", [normal(4, 3, 2), ints(4, 1, 2)]),
    Case("CenterCropPad", [normal(4, 5, 6), ints(9, 1)], {"axes": [-1, 0]}, constants=[1]),
    Case("Pad", [normal(2, 3, 4), ints(1, 0, 2, 0, -1, 1), np.array(0.5, np.float32)], constants=[1]),
    Case("Pad", [normal(2, 3, 4), ints(1, 2, 0, 1), None, ints(2, 0)], constants=[1, 3]),
    Case("Pad", [normal(2, 3, 4), ints(1, 2, 0, 1), None, ints(2, 0)]),
    Case("Pad", [normal(2, 3, 4), ints(0, 1, 2, 0, 0, 1)], {"mode": "reflect"}, constants=[1]),
    Case("Slice", [normal(4, 5, 6), ints(1), ints(3), ints(0)], constants=[1, 2, 3]),
    Case("Slice", [normal(4, 5, 6), ints(1), ints(3), ints(-1)]),
    Case("Slice", [normal(4, 5, 6), ints(1, 2, 0), ints(3, 4, 2), ints(2, 0, 1)], constants=[1, 2, 3]),
    Case("Slice", [normal(4, 5, 6), ints(5, 0), ints(0, 5), ints(2, 1), ints(-2, 3)], constants=[1, 2, 3, 4]),
    Case("Gather", [normal(4, 5, 6), np.array(2)], {"axis": 1}, constants=[1]),
    Case("Gather", [normal(4, 5, 6), ints(-1)], {"axis": 2}, constants=[1]),
    Case("Gather", [normal(4, 5, 6), ints(3, 0, 3)], {"axis": 1}),
    Case("GatherElements", [normal(2, 3, 4), np.array([[[2, 0, 0, 1]], [[1, 1, 2, 2]]])], {"axis": 1}),
    Case("GatherND", [normal(2, 3, 4), np.array([[[1], [0]], [[2], [2]]])], {"batch_dims": 1}),
    Case("TopK", [apart(2, 5, 4), ints(2)], {"axis": 1}, constants=[1], outputs=(None, np.int64)),
    Case("Unique", [apart(3, 4)], {"axis": 1}),
    Case("Compress", [normal(3, 4), np.array([True, False, True])], {"axis": 0}),
    Case("OneHot", [np.array([[1, 0], [2, 1]]), np.array(3), normal(2)], {"axis": 1}, constants=[1]),
    Case("ScatterElements", [normal(3, 4), np.array([[2, 0, 1, 1]]), normal(1, 4, seed=1)], {"axis": 0}),
    Case(
        "ScatterElements",
        [positive(3, 4), np.array([[2, 0, 1, 1], [2, 2, 0, 2]]), positive(2, 4)],
        {"axis": 0, "reduction": "mul"},
    ),
    Case("ScatterND", [normal(3, 4), np.array([[2], [0]]), normal(2, 4, seed=1)]),
    Case("ScatterND", [apart(3, 4), np.array([[2], [0]]), apart(2, 4) + 0.1], {"reduction": "max"}),
    Case("TensorScatter", [normal(2, 5, 4), normal(2, 2, 4, seed=1), ints(1, 2)], {"axis": 1}, opset=24),
    Case("Range", [np.array(n, np.float32) for n in (1, 5.5, 1)], fixed=[1]),
    Case("MatMul", [normal(2, 3, 4), normal(4, 5)]),
    Case("MatMul", [normal(2, 3, 4), normal(2, 4, 5)]),
    Case("MatMul", [normal(3, 4), normal(2, 2, 4, 5)]),
    Case("MatMul", [normal(2, 3, 4), normal(4)]),
    Case("Gemm", [normal(3, 4), normal(5, 4), normal(5)], {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    Case("Gemm", [normal(4, 3), normal(4, 5)], {"transA": 1}),
    Case("Einsum", [normal(2, 3, 4), normal(4, 3)], {"equation": "bij,ji->bi"}),
    Case("Einsum", [normal(2, 3, 3)], {"equation": "bii->b"}),
    Case("Det", [normal(2, 3, 3)]),
    Case("DFT", [normal(2, 5, 3, 2), None], {"axis": 1}, opset=18),
    Case("DFT", [normal(2, 5, 3, 1), np.array(4)], {"axis": 1, "onesided": 1}, constants=[1]),
    Case("Softmax", [normal(2, 3, 4)], {"axis": 1}),
    Case("LogSoftmax", [normal(2, 3, 4)], {"axis": 1}),
    Case("LpNormalization", [normal(2, 3, 4)], {"axis": 1}),
    Case("LayerNormalization", [normal(2, 3, 4), normal(4), normal(4, seed=1)]),
    Case("LayerNormalization", [normal(2, 3, 4), normal(3, 4), normal(3, 4, seed=1)], {"axis": 1}),
    Case("RMSNormalization", [normal(2, 3, 4), normal(4)], opset=23),
    Case("SimplifiedLayerNormalization", [normal(2, 3, 4), normal(4)]),
    Case(
        "BatchNormalization",
        [normal(3, 2, 4, 3), normal(2), normal(2, seed=1), normal(2, seed=2), positive(2)],
    ),
    Case(
        "BatchNormalization",
        [normal(3, 2, 4, 3), normal(2), normal(2, seed=1), normal(2, seed=2), positive(2)],
        {"training_mode": 1},
        fixed=[3, 4],
        outputs=(None,) * 3,
    ),
    Case("InstanceNormalization", [normal(3, 2, 4, 3), normal(2), normal(2, seed=1)]),
    Case(
        "GroupNormalization", [normal(3, 4, 2, 3), normal(4), normal(4, seed=1)], {"num_groups": 2}, opset=21
    ),
    Case("MeanVarianceNormalization", [normal(3, 2, 4, 3)]),
    Case("LRN", [normal(2, 4, 3, 3)], {"size": 3}),
    Case("Conv", [normal(2, 4, 5, 6), normal(6, 2, 3, 2), normal(6)], {"group": 2, "pads": [1, 0, 1, 1]}),
    Case("Conv", [normal(2, 3, 5, 6), normal(4, 3, 3, 3)], {"strides": [2, 1], "auto_pad": "SAME_UPPER"}),
    Case("Conv", [normal(2, 3, 7), normal(4, 3, 3)], {"strides": [2], "dilations": [2], "pads": [2, 1]}),
    Case("Conv", [normal(2, 3, 4, 5), normal(4, 3, 1, 1)]),
    Case("ConvTranspose", [normal(2, 3, 4, 5), normal(3, 2, 3, 2), normal(2)], {"strides": [2, 1]}),
    Case("ConvTranspose", [normal(2, 3, 4), normal(3, 2, 3)], {"output_shape": [7], "strides": [2]}),
    Case(
        "DeformConv",
        [normal(1, 2, 4, 4), normal(3, 2, 2, 2), 0.3 * normal(1, 8, 3, 3), normal(3), normal(1, 4, 3, 3)],
        opset=19,
    ),
    Case("MaxPool", [apart(2, 3, 5, 6)], {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "strides": [2, 1]}),
    Case("MaxPool", [apart(2, 3, 5, 6)], {"kernel_shape": [2, 2], "storage_order": 1, "ceil_mode": 1}),
    Case("MaxPool", [apart(2, 3, 7)], {"kernel_shape": [2], "dilations": [2]}),
    Case("AveragePool", [normal(2, 3, 5, 6)], {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1]}),
    Case("AveragePool", [normal(2, 3, 5)], {"kernel_shape": [3], "strides": [2], "ceil_mode": 1}),
    Case("LpPool", [normal(2, 3, 5, 6)], {"kernel_shape": [3, 2], "strides": [2, 1]}),
    Case("GlobalAveragePool", [normal(2, 3, 4, 5)]),
    Case("GlobalMaxPool", [apart(2, 3, 4, 5)]),
    Case("GlobalLpPool", [normal(2, 3, 4, 5)], {"p": 3}),
    Case(
        "MaxUnpool",
        [normal(1, 1, 2, 2), np.array([[[[0, 3], [9, 10]]]])],
        {"kernel_shape": [2, 2], "strides": [2, 2]},
    ),
    Case("Resize", [normal(1, 2, 4, 3), None, np.float32([1, 1, 1.5, 2])], {"mode": "linear"}, constants=[2]),
    Case("Resize", [normal(1, 2, 4, 3), None, None, ints(1, 2, 3, 5)], {"mode": "cubic"}, constants=[3]),
    Case("GridSample", [normal(1, 2, 4, 3), 0.9 * positive(1, 2, 3, 2) - 0.5]),
    Case("AffineGrid", [normal(2, 2, 3), ints(2, 3, 4, 3)], constants=[1], opset=20),
    Case("Col2Im", [normal(1, 8, 6), ints(3, 4), ints(2, 2)], constants=[1, 2]),
    Case(
        "RoiAlign",
        [normal(2, 3, 5, 6), np.float32([[0, 0, 3, 4], [1, 1, 4, 3]]), ints(1, 0)],
        {"output_height": 2, "output_width": 2, "sampling_ratio": 2},
        fixed=[1],
    ),
    Case(
        "MaxRoiPool",
        [apart(2, 3, 5, 6), np.float32([[1, 0, 0, 3, 4], [0, 1, 1, 4, 3]])],
        {"pooled_shape": [2, 2]},
        fixed=[1],
    ),
    Case("STFT", [normal(2, 9), np.array(2), normal(4), np.array(4)], {"onesided": 1}),
    Case("SoftmaxCrossEntropyLoss", [normal(4, 3), ints(0, 2, 1, 1), positive(3)], {"ignore_index": 2}),
    Case(
        "SoftmaxCrossEntropyLoss",
        [normal(2, 3, 4), np.array([[0, 2, 1, 1], [2, 2, 0, 1]])],
        {"reduction": "none"},
    ),
    Case(
        "NegativeLogLikelihoodLoss",
        [normal(2, 3, 4), np.array([[0, 2, 1, 1], [2, 2, 0, 1]])],
        {"reduction": "sum"},
    ),
    Case("RNN", [normal(3, 2, 4), normal(1, 5, 4), normal(1, 5, 5)], {"hidden_size": 5}),
    Case("GRU", [normal(3, 2, 4), normal(1, 15, 4), normal(1, 15, 5)], {"hidden_size": 5}),
    Case("LSTM", [normal(3, 2, 4), normal(1, 20, 4), normal(1, 20, 5)], {"hidden_size": 5}),
    Case("Attention", [normal(2, 2, 3, 4), normal(2, 2, 5, 4), normal(2, 2, 5, 4, seed=1)], opset=23),
    Case(
        "RotaryEmbedding",
        [normal(2, 2, 3, 4), normal(3, 2), normal(3, 2, seed=1), np.array([[0, 1, 2], [2, 0, 1]])],
        opset=23,
    ),
    Case("DequantizeLinear", [np.array([[1, -2, 3], [4, 5, -6]], np.int8), positive(3)], {"axis": 1}),
    Case("BiasGelu", [normal(2, 3, 4), normal(4)], domain=MICROSOFT),
    Case("FastGelu", [normal(2, 3, 4), normal(4)], domain=MICROSOFT),
    Case("Gelu", [normal(2, 3, 4)], domain=MICROSOFT),
    Case("QuickGelu", [normal(2, 3, 4)], {"alpha": 1.5}, domain=MICROSOFT),
    Case(
        "FusedMatMul",
        [normal(2, 4, 3), normal(2, 5, 4)],
        {"transA": 1, "transB": 1, "alpha": 0.5},
        domain=MICROSOFT,
    ),
    Case("Inverse", [normal(2, 3, 3) + 2 * np.eye(3, dtype=np.float32)], domain=MICROSOFT),
    Case("SkipLayerNormalization", [normal(2, 3, 4), normal(2, 3, 4, seed=1), normal(4)], domain=MICROSOFT),
    Case(
        "SkipSimplifiedLayerNormalization",
        [normal(2, 3, 4), normal(2, 3, 4, seed=1), normal(4)],
        domain=MICROSOFT,
    ),
]
