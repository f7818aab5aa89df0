"""Losses of one's own on integers and booleans: their types come from the data, or from the operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch.nn import functional

from ortgrad.errors import OrtgradError
from ortgrad.training import SGD, Trainer, add_loss, fit

W = np.float32([[1, 2, 3], [4, 5, 6]])
MODEL = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    g (float[N, 2] x) => (float[N, 3] y) <float[2, 3] w = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, w) }""")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 2)).astype(np.float32)
LABELS, MASK = RNG.integers(0, 3, 8), RNG.random((8, 3)) > 0.5
TARGET, WEIGHTS = RNG.normal(size=(8, 3)).astype(np.float32), RNG.random(8).astype(np.float32)


def cross_entropy(op: Any, output: Any, labels: Any) -> Any:
    return op.SoftmaxCrossEntropyLoss(output, labels, reduction="mean")


def gathered(op: Any, output: Any, labels: Any) -> Any:
    """The integers reach the operator that wants them through one that takes all types."""
    chosen = op.GatherElements(op.LogSoftmax(output, axis=1), op.Unsqueeze(labels, [1]), axis=1)
    return op.Neg(op.ReduceMean(chosen, keepdims=0))


def one_hot(op: Any, output: Any, labels: Any) -> Any:
    """ONNX also allows floating-point indices here, so that only the data can tell."""
    target = op.OneHot(labels, op.constant(np.array(3)), op.constant(np.float32([0, 1])))
    return op.ReduceMean((output - target) * (output - target), keepdims=0)


def weighted(op: Any, output: Any, labels: Any, weights: Any) -> Any:
    return op.ReduceMean(op.SoftmaxCrossEntropyLoss(output, labels, reduction="none") * weights, keepdims=0)


def masked(op: Any, output: Any, target: Any, mask: Any) -> Any:
    return op.ReduceMean(op.Where(mask, (output - target) * (output - target), 0.0), keepdims=0)


def squares(op: Any, output: Any, target: Any) -> Any:
    return op.ReduceMean((output - target) * (output - target), keepdims=0)


def _of_torch(y: torch.Tensor) -> dict[str, torch.Tensor]:
    labels, target, mask, weights = (torch.tensor(each) for each in (LABELS, TARGET, MASK, WEIGHTS))
    entropies = functional.cross_entropy(y, labels, reduction="none")
    return {
        "cross_entropy": entropies.mean(),
        "gathered": entropies.mean(),
        "one_hot": functional.mse_loss(y, functional.one_hot(labels, 3).float()),
        "weighted": (entropies * weights).mean(),
        "masked": (torch.where(mask, y - target, 0.0) ** 2).mean(),
        "squares": functional.mse_loss(y, torch.arange(24.0).reshape(8, 3)),
    }


# By loss: the arrays by name. Integers are a target of a floating-point loss, too.
CASES: dict[Any, dict[str, np.ndarray]] = {
    cross_entropy: {"labels": LABELS.astype(np.uint8)},
    gathered: {"labels": LABELS},
    one_hot: {"labels": LABELS.astype(np.int32)},
    weighted: {"labels": LABELS, "weights": WEIGHTS},
    masked: {"target": TARGET, "mask": MASK},
    squares: {"target": np.arange(24).reshape(8, 3)},
}
# Only the data tells that these are integers, or a vector.
NEED_DATA = ("one_hot", "weighted")


@pytest.mark.parametrize("loss", CASES, ids=lambda loss: loss.__name__)
def test_types(loss: Any) -> None:
    w = torch.tensor(W, requires_grad=True)
    expected = _of_torch(torch.tensor(X) @ w)[loss.__name__]
    expected.backward()
    arrays = {"x": X, **CASES[loss]}
    batch = tuple(arrays.values())
    options: dict[str, Any] = {"loss": loss, "optimizer": SGD(learning_rate=1.0)}
    results = [fit(MODEL, data, **options) for data in (batch, arrays, [batch], (each for each in [batch]))]
    if loss.__name__ not in NEED_DATA:
        results.append(Trainer(MODEL, **options).fit(batch))
    for result in results:
        assert result.steps == 1
        np.testing.assert_allclose(result.loss, expected.item(), rtol=1e-5)
        np.testing.assert_allclose(W - result.state.parameter("w"), w.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_no_batch_is_lost() -> None:
    """The first batch of an iterator is looked at, and trained on."""
    batches = [(X[i : i + 2], LABELS[i : i + 2]) for i in range(0, 8, 2)]
    options: dict[str, Any] = {"loss": cross_entropy, "shuffle": False}
    found = fit(MODEL, (batch for batch in batches), **options)
    assert found.losses == fit(MODEL, batches, **options).losses


def test_types_that_are_given_count() -> None:
    types = {"labels": (np.int32, ["N"])}
    made = add_loss(MODEL, cross_entropy, types=types)
    assert made.graph.input[1].type.tensor_type.elem_type == onnx.TensorProto.INT32
    fit(MODEL, (X, LABELS), loss=cross_entropy, types=types)
    with pytest.raises(OrtgradError, match="label is float32"):
        fit(MODEL, (X, LABELS), loss=cross_entropy, types={"labels": (np.float32, ["N"])})
