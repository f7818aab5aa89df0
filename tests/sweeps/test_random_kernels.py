"""Compiled kernels are right, and do not depend on the threads; see `tests/sweeps/random_kernels.py`."""

from __future__ import annotations

import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from support import amount, needs_numba
from support.kernel_cases import KINDS, generate
from sweeps.random_kernels import check

from ortgrad.operators.compiled import Matrix, Product
from ortgrad.operators.declaration import all_operators
from ortgrad.operators.gemm import Operation, operations

THREADS = (1, 2, 3, 4, 8)
# Of kinds with products, a case whose result would depend on threads.
SEEDS = {"pointwise_convolution": 5, "gru": 4, "lstm": 4}
# Further cases, which need other kernels.
FURTHER = [("winograd_convolution", 1), ("loss", 5)]


@needs_numba
def test_results_are_right_on_any_number_of_threads() -> None:
    kernels: set[str] = set()
    cases = [*((kind, SEEDS.get(kind, 0)) for kind in KINDS), *FURTHER]
    cases += [(kind, seed) for kind in KINDS for seed in range(10, amount(10, 60))]
    for kind, seed in cases:
        outcome = check(generate(kind, seed), THREADS)
        assert (outcome.wrong, outcome.depends) == ("", ""), f"{kind} {seed}"
        kernels.update(outcome.kernels)
    compiled = [o.compiled_kernel for o in all_operators(internal=True) if o.compiled_kernel is not None]
    assert {kernel.function.__name__ for kernel in compiled} <= kernels


def gemm(kind: str, threads: int) -> onnxruntime.InferenceSession:
    node = helper.make_node(
        "Gemm", ["A", "B"], ["Y"], transA=kind in ("left", "both"), transB=kind in ("right", "both")
    )
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "ABY"]
    graph = helper.make_graph([node], "g", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def test_products_are_computed_by_operations_that_do_not_depend_on_threads() -> None:
    """In onnxruntime's own sessions: with many columns, few rows, one row for each thread, one column."""
    sessions = {(kind, n): gemm(kind, n) for kind in ("", "left", "right", "both") for n in (1, 3, 8, 16, 40)}
    random = np.random.default_rng(0)
    kinds: set[tuple[str, ...]] = set()
    for rows, columns, terms in [(8, 8, 9000), (9, 400, 700), (300, 2, 2000), (60, 60, 3000), (200, 9, 100)]:
        a, b = random.standard_normal((rows, terms)), random.standard_normal((terms, columns))
        for transposed in ("", "left", "right"):
            left = Matrix("a", *(a.T if transposed == "left" else a).shape)
            right = Matrix("b", *(b.T if transposed == "right" else b).shape)
            made = operations(Product(Matrix("y", rows, columns), left, right, transposed))  # type: ignore[arg-type]
            kinds.add(tuple(operation.kind for operation in made))
            results = [_perform(made, a, b, transposed, sessions, n) for n in (1, 3, 8, 16, 40)]
            np.testing.assert_allclose(results[0], a @ b, rtol=1e-3, atol=1e-2)
            for other in results[1:]:
                np.testing.assert_array_equal(results[0], other, f"{rows} {columns} {terms} {transposed}")
    assert kinds == {("",), ("left",), ("right",), ("turn", "left"), ("turn", "both"), ("right", "turn")}


def _perform(
    made: list[Operation],
    a: np.ndarray,
    b: np.ndarray,
    transposed: str,
    sessions: dict[tuple[str, int], onnxruntime.InferenceSession],
    threads: int,
) -> np.ndarray:
    stored = {"a": a.T if transposed == "left" else a, "b": b.T if transposed == "right" else b}
    tensors = {name: np.ascontiguousarray(array, np.float32) for name, array in stored.items()}
    for kind, left, right, into in made:
        if kind == "turn":
            result = np.ascontiguousarray(tensors[left.tensor].T)
        else:
            feeds = {"A": tensors[left.tensor], "B": tensors[right.tensor]}
            result = sessions[kind, threads].run(None, feeds)[0]
        assert result.shape == (into.rows, into.columns)
        tensors[into.tensor] = result
    return tensors["y"]
