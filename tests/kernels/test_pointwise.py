"""Gradients of pointwise convolutions in sessions with compiled kernels, against PyTorch in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from support import COMPILES, needs_numba
from support.pointwise import CASES, OUTPUTS, arrays_of, assert_close, check_memory, check_special, model_of

import ortgrad
from ortgrad import nodes
from ortgrad.operators.declaration import INTERNAL_DOMAIN
from ortgrad.ops.pointwise import pointwise_conv_grad
from ortgrad.pipelines.prepare import prepare_loaded


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_gradient(name: str, dtype: str) -> None:
    arrays, expected = arrays_of(name, dtype)
    for dynamic in (False, True):
        model = model_of(name, dtype, dynamic=dynamic)
        prepared = prepare_loaded(model, "auto", bodies=False).graph.node
        used = [(node.domain, node.op_type) for node in prepared]
        assert (used == [(INTERNAL_DOMAIN, "PointwiseConvGrad")]) == COMPILES
        for kernels in ("auto", "python", "onnx"):
            session = ortgrad.InferenceSession(model, kernels=kernels)
            for _ in range(2):
                for output, value in zip(OUTPUTS, session.run(None, arrays), strict=True):
                    assert_close(value, expected[output])


@pytest.mark.parametrize("name", CASES)
def test_the_numpy_kernel(name: str) -> None:
    arrays, expected = arrays_of(name, "float64")
    for output, value in zip(OUTPUTS, pointwise_conv_grad(*arrays.values()), strict=True):
        assert_close(value, expected[output])


@pytest.mark.parametrize("name", ["one sample", "products are added up", "samples are joined"])
@pytest.mark.parametrize("wanted", OUTPUTS)
def test_one_gradient(name: str, wanted: str) -> None:
    arrays, expected = arrays_of(name, "float32")
    outputs = [output if output == wanted else None for output in OUTPUTS]
    session = ortgrad.InferenceSession(model_of(name, "float32", outputs))
    feeds = {value.name: arrays[value.name] for value in session.get_inputs()}
    assert_close(session.run(None, feeds)[0], expected[wanted])


@needs_numba
def test_no_kernel_reads_or_writes_outside_its_tensors() -> None:
    check_memory()


@needs_numba
@pytest.mark.parametrize("name", ["products are added up", "samples are joined"])
def test_results_do_not_depend_on_threads(name: str) -> None:
    arrays, _ = arrays_of(name, "float32")
    results = []
    for count in (1, 3):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = count
        session = ortgrad.InferenceSession(model_of(name, "float32"), options)
        results.append(session.run(None, arrays))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["dY", "X", "W"])
def test_numbers_that_are_not_finite(value: float, where: str) -> None:
    check_special(value, where)


@pytest.mark.parametrize(
    ("w", "attributes"),
    [
        ([4, 3, 1, 1], {"strides": [2, 1]}),
        ([4, 3, 1, 1], {"pads": [0, 1, 0, 0]}),
        ([4, 3, 1, 2], {}),
        ([4, 3, 1, 1], {"group": 2}),
    ],
    ids=str,
)
def test_other_convolutions_keep_their_kernels(w: list[Any], attributes: dict[str, Any]) -> None:
    node = nodes.conv_grad("dY", "X", "W", list(OUTPUTS), **attributes)
    prepared = prepare_loaded(nodes.make_model(node, shapes={"W": w}), "auto", bodies=False)
    assert "PointwiseConvGrad" not in {node.op_type for node in prepared.graph.node}


def test_wrong_shapes_are_refused_and_the_next_run_works() -> None:
    arrays, expected = arrays_of("products are added up", "float32")
    session = ortgrad.InferenceSession(model_of("products are added up", "float32", dynamic=True))
    for wrong in ((3, 7, 20, 30), (2, 7, 20, 31), (3, 6, 20, 31)):
        with pytest.raises(ortgrad.KernelError):
            session.run(None, {**arrays, "dY": np.zeros(wrong, np.float32)})
    assert_close(session.run(None, arrays)[0], expected["dX"])
