"""The nodes that a gradient is written with do not become more as sizes grow.

onnxruntime's loading takes time with the square of their number.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import pytest
from onnx import parser

import ortgrad
from ortgrad.operators.declaration import all_operators

# Beyond sizes of 49, where some bodies have one node for each; the forms for less are checked by the bound.
SIZES = (60, 200, 600)
MOST = 600

# {n} is what grows, {m} two less.
MODELS = {
    "Conv": "(float[1, 2, 1000] x, float[4, 2, {n}] w) => (float[N, M, L] y) {{ y = Conv(x, w) }}",
    "Conv strided": """(float[B, 2, S] x, float[4, 1, {n}] w) => (float[N, M, L] y) {{
        y = Conv<strides = [7], dilations = [2], group = 2, pads = [3, 600]>(x, w) }}""",
    "Conv 2d": """(float[B, 2, H, W] x, float[4, 2, {n}, 3] w) => (float[N, M, h, v] y) {{
        y = Conv<auto_pad = "SAME_UPPER", strides = [2, 1]>(x, w) }}""",
    "Conv 2d square": """(float[1, 2, 700, 700] x, float[2, 1, {n}, {n}] w) => (float[N, M, h, v] y) {{
        y = Conv<group = 2>(x, w) }}""",
    "Conv of doubles": """(double[B, 2, S] x, double[4, 2, {n}] w) => (double[N, M, L] y) {{
        y = Conv<strides = [3], dilations = [2]>(x, w) }}""",
    "ConvTranspose": """(float[B, 4, S] x, float[4, 2, {n}] w) => (float[N, M, L] y) {{
        y = ConvTranspose<strides = [3]>(x, w) }}""",
    "ConvTranspose SAME": """(float[B, 4, H, W] x, float[4, 2, {n}, {n}] w) => (float[N, M, h, v] y) {{
        y = ConvTranspose<strides = [3, 2], auto_pad = "SAME_LOWER">(x, w) }}""",
    "DeformConv": """(float[1, 1, 700, 9] x, float[1, 1, {n}, 1] w, float[1, K, h, v] o)
        => (float[N, M, h, v] y) {{
        y = DeformConv<kernel_shape = [{n}, 1]>(x, w, o) }}""",
    "AveragePool": """(float[B, C, H, W] x) => (float[B, C, h, v] y) {{
        y = AveragePool<kernel_shape = [{n}, {n}], pads = [1, 2, 3, 4]>(x) }}""",
    "LpPool": """(float[B, C, H, W] x) => (float[B, C, h, v] y) {{
        y = LpPool<kernel_shape = [{n}, {n}], p = 3, strides = [2, 2]>(x) }}""",
    "MaxPool": """(float[B, C, H, W] x) => (float[B, C, h, v] y) {{
        y = MaxPool<kernel_shape = [{n}, {n}], dilations = [1, 2]>(x) }}""",
    "MaxUnpool": """(float[B, C, L] x, int64[B, C, L] i) => (float[B, C, l] y) {{
        y = MaxUnpool<kernel_shape = [{n}], strides = [{m}]>(x, i) }}""",
    "GlobalMaxPool": "(float[2, 3, {n}, {n}] x) => (float[N, C, h, v] y) {{ y = GlobalMaxPool(x) }}",
    "LRN": "(float[2, {n}, 9, 9] x) => (float[N, C, h, v] y) {{ y = LRN<size = {m}>(x) }}",
    "Col2Im": """(float[1, P, L] x) => (float[N, C, h, v] y)
        <int64[2] i = {{700, 700}}, int64[2] b = {{{n}, {n}}}> {{ y = Col2Im(x, i, b) }}""",
    "Resize": """(float[1, 1, 9, 9] x) => (float[N, C, h, v] y) <float[4] s = {{1, 1, {n}, {n}}}> {{
        y = Resize<mode = "linear">(x, , s) }}""",
    "CumSum": "(float[{n}, 3] x) => (float[N, M] y) <int64 a = {{0}}> {{ y = CumSum(x, a) }}",
    "GRU": """(float[{n}, 2, 3] x, float[1, 12, 3] w, float[1, 12, 4] r) => (float[T, D, N, H] y) {{
        y = GRU<hidden_size = 4>(x, w, r) }}""",
    "LSTM": """(float[{n}, 2, 3] x, float[1, 16, 3] w, float[1, 16, 4] r) => (float[T, D, N, H] y) {{
        y = LSTM<hidden_size = 4>(x, w, r) }}""",
    "RNN": """(float[{n}, 2, 3] x, float[1, 4, 3] w, float[1, 4, 4] r) => (float[T, D, N, H] y) {{
        y = RNN<hidden_size = 4>(x, w, r) }}""",
    "Gather": "(float[{n}, 3] x, int64[{n}] i) => (float[N, M] y) {{ y = Gather(x, i) }}",
    "GatherND": "(float[{n}, 3] x, int64[{n}, 1] i) => (float[N, M] y) {{ y = GatherND(x, i) }}",
    "Softmax": "(float[{n}, {n}] x) => (float[N, M] y) {{ y = Softmax(x) }}",
    "LayerNormalization": """(float[{n}, {n}] x, float[{n}] s) => (float[N, M] y) {{
        y = LayerNormalization(x, s) }}""",
    "BatchNormalization": """(float[4, {n}, 5] x, float[{n}] s, float[{n}] b, float[{n}] m, float[{n}] v)
        => (float[N, C, L] y) {{ y = BatchNormalization(x, s, b, m, v) }}""",
}


def count_nodes(nodes: Iterable[onnx.NodeProto]) -> int:
    """Those of subgraphs included."""
    return sum(1 + sum(count_nodes(a.g.node) for a in node.attribute if a.HasField("g")) for node in nodes)


def nodes_at(text: str, size: int) -> int:
    header = '<ir_version: 10, opset_import: ["" : 22]> main '
    model = parser.parse_model(header + text.format(n=size, m=size - 2))
    inputs = [v.name for v in model.graph.input if v.type.tensor_type.elem_type != onnx.TensorProto.INT64]
    built = ortgrad.build_gradient_model(model, wrt=inputs)
    return count_nodes(built.graph.node) + sum(count_nodes(function.node) for function in built.functions)


@pytest.mark.parametrize("name", MODELS)
def test_nodes_do_not_grow(name: str) -> None:
    counts = [nodes_at(MODELS[name], size) for size in SIZES]
    # A few more or less where sizes are multiples of others.
    assert max(counts) - min(counts) < 10, f"{counts} nodes for sizes {SIZES}"
    assert max(counts) <= MOST


@pytest.mark.parametrize("size", [3, 5, 7, 8])
def test_kernels_that_are_written_out(size: int) -> None:
    text = "(float[1, 2, 99, 99] x, float[4, 2, {n}, {n}] w) => (float[N, M, h, v] y) {{ y = Conv(x, w) }}"
    assert nodes_at(text, size) <= MOST


def test_all_operators_with_windows_are_here() -> None:
    windowed = {operator.name for operator in all_operators() if "kernel_shape" in operator.attributes}
    assert windowed <= {f"{name.split()[0]}Grad" for name in MODELS}
