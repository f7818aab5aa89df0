"""The loss of log-probabilities in sessions with compiled kernels, against PyTorch."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support import COMPILES, FASTEST, needs_numba
from support.calls import Case
from support.compiled import checked_tasks

import ortgrad
from ortgrad.operators.declaration import INTERNAL_DOMAIN
from ortgrad.ops.likelihood import negative_log_likelihood
from ortgrad.pipelines.prepare import Kernels, prepare_loaded

SHAPES = [(4, 3), (1, 1), (3, 5, 2), (2, 3, 2, 4), (9000, 3), (3, 2, 5000), (0, 3), (2, 3, 0)]
TOLERANCE = {"float32": 2e-6, "float64": 2e-14}


def built_model(reduction: str, rank: int, dtype: str = "float", labels: str = "int64") -> onnx.ModelProto:
    """The loss of inputs of any size, and its gradient."""
    sizes = ", ".join(f"D{i}" for i in range(rank))
    places = ", ".join(f"D{i}" for i in range(rank) if i != 1)
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        g ({dtype}[{sizes}] x, {labels}[{places}] label) => ({dtype} loss) {{
            loss = SoftmaxCrossEntropyLoss <reduction = "{reduction}"> (x, label)
        }}""")
    return ortgrad.build_gradient_model(model, wrt="x", of="loss")


def arrays(shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(dtype)
    return x, rng.integers(0, shape[1], shape[:1] + shape[2:])


@needs_numba
@pytest.mark.parametrize("labels", ["int64", "int32"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_pytorch(shape: tuple[int, ...], reduction: str, dtype: str, labels: str) -> None:
    x, label = arrays(shape, dtype)
    expected = torch.nn.functional.cross_entropy(
        torch.from_numpy(x), torch.from_numpy(label), reduction=reduction
    ).numpy()
    label = label.astype(labels)
    model = built_model(reduction, len(shape), {"float32": "float", "float64": "double"}[dtype], labels)
    loss = ortgrad.InferenceSession(model, kernels="compiled").run(["loss"], {"x": x, "label": label})[0]
    assert loss.dtype == expected.dtype
    np.testing.assert_allclose(loss, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("labels", ["int64", "int32"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_numpy_kernel(shape: tuple[int, ...], reduction: str, dtype: str, labels: str) -> None:
    x, label = arrays(shape, dtype)
    expected = torch.nn.functional.cross_entropy(
        torch.from_numpy(x), torch.from_numpy(label), reduction=reduction
    ).numpy()
    log_prob = torch.log_softmax(torch.from_numpy(x), 1).numpy()
    loss = negative_log_likelihood(log_prob, label.astype(labels), reduction=reduction)
    assert isinstance(loss, np.ndarray) and loss.dtype == dtype
    np.testing.assert_allclose(loss, expected, TOLERANCE[dtype])
    if label.size:
        label.flat[-1] = shape[1]
        with pytest.raises(ValueError, match=f"out of range for {shape[1]} classes"):
            negative_log_likelihood(log_prob, label.astype(labels), reduction=reduction)


@needs_numba
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(4, 3), (3, 5, 2), (5000, 2), (0, 3)], ids=str)
def test_no_kernel_reads_or_writes_outside_its_tensors(shape: tuple[int, ...], reduction: str) -> None:
    log_prob, label = arrays(shape, "float32")
    case = Case("NegativeLogLikelihood", {"log_prob": log_prob, "label": label}, {"reduction": reduction})
    (actual,) = checked_tasks(negative_log_likelihood, case)
    expected = torch.nn.functional.nll_loss(
        torch.from_numpy(log_prob), torch.from_numpy(label), reduction=reduction
    )
    np.testing.assert_allclose(actual, expected.numpy(), 2e-6)


@needs_numba
@pytest.mark.parametrize("wrong", [3, -1, 2**40])
def test_labels_that_are_out_of_range(wrong: int) -> None:
    x, label = arrays((4, 3), "float32")
    session = ortgrad.InferenceSession(built_model("mean", 2), kernels="compiled")
    right = session.run(["loss"], {"x": x, "label": label})[0]
    for _ in range(2):
        with pytest.raises(ortgrad.KernelError, match="out of range for 3 classes"):
            session.run(["loss"], {"x": x, "label": np.array([0, wrong, 1, 2])})
    np.testing.assert_array_equal(session.run(["loss"], {"x": x, "label": label})[0], right)


@needs_numba
def test_results_do_not_depend_on_threads() -> None:
    x, label = arrays((50_000, 3), "float32")
    results = []
    for threads in (1, 3):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = ortgrad.InferenceSession(built_model("mean", 2), options, kernels="compiled")
        results.append(session.run(["loss"], {"x": x, "label": label})[0])
    np.testing.assert_array_equal(*results)


def test_it_is_in_sessions_only() -> None:
    built = built_model("mean", 2)

    def operators(kernels: Kernels) -> set[tuple[str, str]]:
        return {(n.domain, n.op_type) for n in prepare_loaded(built, kernels, bodies=False).graph.node}

    own = INTERNAL_DOMAIN, "NegativeLogLikelihood"
    assert (own in operators("auto") & operators(FASTEST)) == COMPILES
    assert own not in operators("python") | operators("onnx")
    assert {node.op_type for node in ortgrad.prepare(built).graph.node} >= {"SoftmaxCrossEntropyLoss"}
