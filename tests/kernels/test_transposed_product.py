"""Products with a transposed matrix in sessions with compiled kernels, against float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import support
import torch
from onnx import helper
from support import COMPILES, needs_numba
from support.calls import Case
from support.compiled import checked_tasks

import ortgrad
from ortgrad.operators.declaration import INTERNAL_DOMAIN
from ortgrad.ops.transposed_product import FEWEST_TERMS, transposed_product
from ortgrad.pipelines.prepare import prepare_loaded

# Terms, rows, columns
SIZES = [
    (1, 128, 128),
    (FEWEST_TERMS - 1, 130, 128),
    (FEWEST_TERMS, 131, 129),
    (80, 128, 144),
    (200, 256, 128),
]
TOLERANCES = {"float32": 2e-5, "float64": 1e-12}


def model_of(
    terms: Any, rows: Any, columns: Any, dtype: str = "float32", c: bool = False, **attributes: Any
) -> onnx.ModelProto:
    """A product, beside a gradient node: only models with one are prepared."""
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    inputs = {"A": [terms, rows], "B": [terms, columns], "C": [columns], "dY": [1], "X": [1]}
    product = helper.make_node("Gemm", ["A", "B", *["C"] * c], ["Y"], **{"transA": 1, **attributes})
    gradient = helper.make_node("ReluGrad", ["dY", "X"], ["dX"], domain="com.microsoft")
    graph = helper.make_graph(
        [product, gradient],
        "products",
        [helper.make_tensor_value_info(n, element, s) for n, s in inputs.items() if n != "C" or c],
        [helper.make_tensor_value_info(n, element, None) for n in ("Y", "dX")],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def arrays_of(terms: int, rows: int, columns: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"A": (terms, rows), "B": (terms, columns), "dY": (1,), "X": (1,)}
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def product_of(arrays: dict[str, np.ndarray]) -> np.ndarray:
    a, b = (arrays[name].astype(np.float64) for name in "AB")
    return np.einsum("km,kn->mn", a, b).astype(arrays["A"].dtype)


def prepared_nodes(model: onnx.ModelProto) -> set[tuple[str, str]]:
    nodes = prepare_loaded(model, "auto", bodies=False).graph.node
    return {(node.domain, node.op_type) for node in nodes}


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_products(dtype: str) -> None:
    session = ortgrad.InferenceSession(model_of("K", 131, 193, dtype))
    for terms in (1, FEWEST_TERMS - 1, FEWEST_TERMS, 65, 0, 200):
        arrays = arrays_of(terms, 131, 193, dtype)
        for _ in range(2):
            actual = session.run(["Y"], arrays)[0]
            support.assert_close(actual, product_of(arrays), TOLERANCES[dtype])


def test_the_numpy_kernel() -> None:
    for sizes, (dtype, tolerance) in itertools.product(SIZES, TOLERANCES.items()):
        arrays = arrays_of(*sizes, dtype)
        support.assert_close(transposed_product(arrays["A"], arrays["B"]), product_of(arrays), tolerance)


def test_the_gradient_of_weights_is_such_a_product() -> None:
    """MatMul over several leading dimensions, against PyTorch."""
    module = torch.nn.Linear(144, 200, bias=False).double()
    x = torch.randn(3, 20, 144, dtype=torch.float64, requires_grad=True)
    module(x).relu().square().sum().backward()
    element = onnx.TensorProto.DOUBLE
    w = module.weight.detach().numpy().T
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["y"]),
            helper.make_node("Relu", ["y"], ["z"]),
            helper.make_node("ReduceSumSquare", ["z"], ["loss"], keepdims=0),
        ],
        "linear",
        [helper.make_tensor_value_info("x", element, ["N", 20, 144])],
        [helper.make_tensor_value_info("loss", element, [])],
        [onnx.numpy_helper.from_array(np.ascontiguousarray(w), "w")],
    )
    forward = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    model = ortgrad.build_gradient_model(forward, wrt=["x", "w"])
    assert ((INTERNAL_DOMAIN, "TransposedProduct") in prepared_nodes(model)) == COMPILES
    session = ortgrad.InferenceSession(model)
    dx, dw = session.run(["x_grad", "w_grad"], {"x": x.detach().numpy()})
    assert x.grad is not None and module.weight.grad is not None
    np.testing.assert_allclose(dx, x.grad.numpy(), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(dw, module.weight.grad.numpy().T, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ((64, 32, 256), {}),
        ((64, 256, 32), {}),
        ((64, 128, 128), {}),
        ((8, 256, 256), {}),
        ((64, "M", 256), {}),
        ((64, 256, 256), {"alpha": 0.5}),
        ((64, 256, 256), {"c": True}),
        ((64, 256, 256), {"transA": 0}),
    ],
    ids=str,
)
def test_other_products_stay(sizes: tuple[Any, ...], changes: dict[str, Any]) -> None:
    assert ("", "Gemm") in prepared_nodes(model_of(*sizes, **changes))


@needs_numba
def test_no_task_reads_or_writes_outside_its_tensors() -> None:
    """Numba's checks raise an IndexError; a result that was not written is NaN."""
    for sizes in SIZES:
        arrays = arrays_of(*sizes)
        case = Case("TransposedProduct", {name: arrays[name] for name in "AB"}, {})
        results = checked_tasks(transposed_product, case)
        assert results is not None
        support.assert_close(results[0], product_of(arrays), TOLERANCES["float32"])


@needs_numba
def test_results_do_not_depend_on_threads() -> None:
    arrays, results = arrays_of(200, 256, 128), []
    for count in (1, 2):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = count
        session = ortgrad.InferenceSession(model_of(200, 256, 128), options)
        results.append(session.run(["Y"], arrays)[0])
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["A", "B"])
def test_numbers_that_are_not_finite(value: float, where: str) -> None:
    arrays = arrays_of(80, 128, 200)
    arrays[where][3, 5] = value
    with np.errstate(invalid="ignore"):
        expected = product_of(arrays)
    actual = ortgrad.InferenceSession(model_of(80, 128, 200)).run(["Y"], arrays)[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)


@needs_numba
def test_wrong_shapes_are_refused_and_the_next_run_works() -> None:
    arrays = arrays_of(80, 128, 200)
    session = ortgrad.InferenceSession(model_of("K", 128, 200))
    with pytest.raises(ortgrad.KernelError, match="TransposedProduct"):
        session.run(["Y"], {**arrays, "B": np.zeros((79, 200), np.float32)})
    support.assert_close(session.run(["Y"], arrays)[0], product_of(arrays), TOLERANCES["float32"])
