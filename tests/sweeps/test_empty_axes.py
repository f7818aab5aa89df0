"""Gradients of nodes with an axis of length 0: wherever onnxruntime runs the node, they exist in all ways."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import onnx
import pytest
from support.rule_cases import CASES, Case, ints, normal
from support.sessions import forward, make_session, run

import ortgrad

# onnxruntime's Einsum ends the process with a division by 0 for some empty operands, also as a forward node;
# so do operators of com.microsoft. In Concat it skips empty inputs whose other axes do not fit, which ONNX
# does not allow. Recurrent operators have tests of their own; LRN's AveragePool takes an empty batch only.
LEFT_OUT = {"Einsum", "Concat", "RNN", "GRU", "LSTM", "LRN", "DFT"}
# Their gradients end in an error of onnxruntime's Reshape, MatMul or GatherElements where nothing is sampled.
LEFT_OUT |= {"DeformConv", "GridSample", "Resize", "RoiAlign", "TensorScatter", "DequantizeLinear"}
MORE = [
    Case("Reshape", [normal(0, 3), ints(3, 0)], {"allowzero": 1}, constants=[1]),
    Case("Reshape", [normal(2, 0), ints(0, 0, 5)], constants=[1]),
    Case("Expand", [normal(1, 3), ints(0, 3)], constants=[1]),
    Case("Tile", [normal(2, 3), ints(0, 2)], constants=[1]),
    Case("Tile", [normal(2, 3), ints(0, 2)]),
    Case("Concat", [normal(2, 0, 4), normal(2, 3, 4)], {"axis": 1}),
    Case("Concat", [normal(0, 2), normal(0, 3)], {"axis": 1}),
    Case("Split", [normal(2, 3, 4), ints(0, 3)], {"axis": 1}, constants=[1], outputs=(None, None)),
    Case("Slice", [normal(4, 5), ints(2), ints(2), ints(0)], constants=[1, 2, 3]),
    Case("Slice", [normal(4, 5), ints(3), ints(1), ints(1)]),
    Case("Gather", [normal(4, 5), ints()], {"axis": 1}),
    Case("Pad", [normal(0, 3), ints(1, 0, 0, 0)], constants=[1]),
    Case("Det", [normal(0, 0)]),
    Case("Det", [normal(2, 0, 0)]),
    Case("Det", [normal(0, 8, 8)]),
    Case("MaxPool", [normal(2, 3, 1, 4)], {"kernel_shape": [2, 2]}),
    Case("MaxPool", [normal(2, 3, 1)], {"kernel_shape": [3], "strides": [2], "ceil_mode": 1}),
    Case("AveragePool", [normal(2, 3, 1, 4)], {"kernel_shape": [2, 2]}),
    Case("LpPool", [normal(2, 3, 4, 1)], {"kernel_shape": [2, 2]}),
    Case("ReduceMax", [normal(0, 3, 4), ints(1, 2)], {"keepdims": 0}, constants=[1]),
    Case("ReduceMean", [normal(0, 3, 4), ints(0)], {"keepdims": 0}, constants=[1]),
    Case("MatMul", [normal(2, 3, 0), normal(0, 5)]),
    Case("MatMul", [normal(2, 3, 4), normal(4, 0)]),
    Case("MatMul", [normal(5, 0, 4), normal(5, 4, 6)]),
    Case("MatMul", [normal(0, 4), normal(2, 3, 4, 5)]),
    Case("MatMul", [normal(3, 2, 4), normal(3, 4, 0)]),
]


def emptied(case: Case) -> Iterator[Case]:
    """The case with one axis of one input cut to length 0, in the other inputs with equal axes too."""
    for i, array in enumerate(case.inputs):
        if array is None or array.dtype.kind != "f" or i in case.constants:
            continue
        for axis, length in enumerate(array.shape):
            if (i, axis) != (0, 0) and "Conv" in case.op_type:
                continue  # onnxruntime's Conv does not come back from an empty image
            alone = [cut(a, [axis]) if j == i else a for j, a in enumerate(case.inputs)]
            yield replace(case, inputs=alone)
            same = [
                [k for k, n in enumerate(a.shape) if n == length] if a is not None else []
                for a in case.inputs
            ]
            if any(same[j] for j in range(len(same)) if j != i and j not in case.constants):
                linked = [
                    cut(a, [axis] if j == i else same[j][:1]) if j not in case.constants else a
                    for j, a in enumerate(case.inputs)
                ]
                yield replace(case, inputs=linked)


def cut(array: np.ndarray | None, axes: list[int]) -> np.ndarray | None:
    if array is None:
        return None
    return array[tuple(slice(0, 0) if i in axes else slice(None) for i in range(array.ndim))].copy()


def inferred(model: onnx.ModelProto) -> dict[str, onnx.TensorShapeProto]:
    graph = onnx.shape_inference.infer_shapes(model).graph
    return {value.name: value.type.tensor_type.shape for value in graph.output}


def check(case: Case, *, symbolic: bool) -> bool:
    """Assert that all ways give the same finite gradients of the right shapes; False if there are none."""
    model, feeds = case.make(symbolic=symbolic)
    results = forward(model, feeds)
    if results is None:
        return False
    if any(len(inferred(model)[name].dim) != value.ndim for name, value in results.items()):
        return False  # onnxruntime does not reduce an empty tensor along negative axes
    generator = np.random.default_rng(0)
    seeds = {
        name: generator.standard_normal(value.shape).astype(value.dtype)
        for name, value in results.items()
        if value.dtype == np.float32
    }
    built = ortgrad.build_gradient_model(model, wrt=case.wrt, of=list(seeds))
    found = {}
    for way, level in (("onnx", "disabled"), ("python", "all"), ("plain", "all")):
        found[way] = run(make_session(built, way, level), feeds, seeds, len(case.wrt))
        for name, grad in zip(case.wrt, found[way], strict=True):
            assert grad.shape == feeds[name].shape, f"{name}, {way}"
            if not any(value.size for value in results.values()):
                # Nothing comes out, so nothing moves.
                assert not grad.any(), f"{name}, {way}"
    for way in ("python", "plain"):
        for grad, other in zip(found[way], found["onnx"], strict=True):
            np.testing.assert_allclose(grad, other, rtol=1e-4, atol=1e-5)
    return True


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", MORE, ids=[case.name for case in MORE])
def test_empty(case: Case, symbolic: bool) -> None:
    assert check(case, symbolic=symbolic)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.op_type not in LEFT_OUT and not c.domain], ids=lambda case: case.name
)
def test_each_axis(case: Case) -> None:
    """With each axis in turn empty, where onnxruntime runs that."""
    for number, variant in enumerate(emptied(case)):
        kernel = variant.op_type.startswith(("Conv", "Deform"))
        check(variant, symbolic=number % 2 == 1 and not kernel)
