"""The gradients of ONNX's own node tests against central differences of their forward pass on onnxruntime."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnxruntime
import pytest
from support.node_tests import ORT_ERRORS, cases_by_operator, measure, problems

import ortgrad

# How many cases of each operator these versions have right, 611 in all: the measure must not shrink unseen.
COUNTED = onnx.__version__.startswith("1.23.") and onnxruntime.__version__.startswith("1.31.")
CASES = {
    71: "Attention",
    39: "Resize",
    20: "AveragePool",
    19: "LayerNormalization RMSNormalization",
    18: "GridSample MaxPool",
    14: "Split",
    12: "Concat",
    11: "ConvTranspose Gemm",
    10: "ReduceSum",
    9: "Flatten Reshape",
    8: (
        "LpPool ReduceL1 ReduceL2 ReduceMax ReduceMean ReduceMin ReduceProd ReduceSumSquare "
        "RotaryEmbedding SoftmaxCrossEntropyLoss"
    ),
    7: "LogSoftmax ScatterElements ScatterND Slice Softmax Transpose Unsqueeze",
    6: "CenterCropPad Conv LpNormalization MatMul Pow",
    5: "Col2Im GRU LSTM NegativeLogLikelihoodLoss RNN",
    4: "BatchNormalization DeformConv Dropout Gather Gelu Max Min",
    3: (
        "Div Elu GatherElements HardSigmoid LeakyRelu Mean Mul Scan Selu Sub Sum TensorScatter "
        "ThresholdedRelu TopK"
    ),
    2: (
        "Acosh Add Asinh Atan Cos Cosh Exp Expand GlobalAveragePool GlobalMaxPool GroupNormalization "
        "InstanceNormalization LRN Log MaxUnpool Neg PRelu Reciprocal Scatter Shrink Sigmoid Sin Sinh "
        "Softplus Softsign Sqrt Squeeze Tan Tanh Tile"
    ),
    1: (
        "Abs Acos Asin Atanh Clip Det Erf GatherND HardSwish Identity Loop MeanVarianceNormalization "
        "Mish Relu Swish Upsample Where"
    ),
}
COUNTS = {operator: count for count, operators in CASES.items() for operator in operators.split()}
# Piecewise constant, but the points of the tests are so close to a jump that differences see it.
CONSTANT = {"Hardmax"}


def check(operators: Iterable[str]) -> int:
    """Assert that all cases are right; how many they are."""
    wrong, right = [], 0
    for case in (case for operator in operators for case in cases_by_operator()[operator]):
        measured = measure(case)
        if measured is None:
            continue
        try:
            found = list(problems(measured))
        except (ortgrad.OrtgradError, *ORT_ERRORS) as error:
            found = [f"{case.name}: {type(error).__name__}: {error}"]
        wrong += found
        right += not found
    assert not wrong, "\n".join(wrong)
    return right


@pytest.mark.parametrize("operator", COUNTS)
def test_operator(operator: str) -> None:
    right = check([operator])
    if COUNTED:
        assert right == COUNTS[operator]


def test_new_operators() -> None:
    """Operators that the installed onnx has beyond the list."""
    right = check(set(cases_by_operator()) - set(COUNTS) - CONSTANT)
    if COUNTED:
        assert right == 0
