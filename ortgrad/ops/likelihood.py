"""The loss of log-probabilities, for sessions that run compiled kernels: one node where ONNX needs four."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ortgrad.compiled.functions import double
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.compiled import Plan
from ortgrad.operators.declaration import FLOATS, INTEGERS, INTERNAL_DOMAIN, Choice, operator

# The number of labels of a task.
_LABELS = 4096


@operator(
    "NegativeLogLikelihood",
    domain=INTERNAL_DOMAIN,
    inputs=["log_prob", "label: Tind"],
    outputs=["loss"],
    shapes=lambda *_, **__: [()],
    dims={"log_prob": "N C *D", "label": "N *D"},
    attributes={"reduction": Choice("mean", "sum")},
    types={"T": FLOATS, "Tind": INTEGERS},
)
def negative_log_likelihood(log_prob: np.ndarray, label: np.ndarray, *, reduction: str) -> np.ndarray:
    """loss = -sum(log_prob[label]), divided by the number of labels for "mean" """
    classes = log_prob.shape[1]
    wrong = (label < 0) | (label >= classes)
    if wrong.any():
        raise ValueError(f"label {label[wrong][0]} is out of range for {classes} classes")
    picked = np.take_along_axis(log_prob, np.expand_dims(label, 1), axis=1)
    total = -picked.sum(dtype=np.float64)
    if reduction == "mean":
        # As in PyTorch, the mean of nothing is NaN.
        total = total / label.size if label.size else np.nan
    return np.asarray(total, log_prob.dtype)


@negative_log_likelihood.onnx
def negative_log_likelihood_body(
    op: Recorder, log_prob: ir.Value, label: ir.Value, *, reduction: str
) -> ir.Value:
    picked = op.GatherElements(log_prob, op.Unsqueeze(label, [1]), axis=1)
    reduce = op.ReduceMean if reduction == "mean" else op.ReduceSum
    loss: ir.Value = op.Neg(reduce(picked, keepdims=0))
    return loss


def _plan(
    log_prob: tuple[int, ...], label: tuple[int, ...], loss: tuple[int, ...], **attributes: Any
) -> Plan:
    """The tensors with the axes sample, class and position; every task but the last is for some labels."""
    samples, classes, positions = log_prob[0], log_prob[1], math.prod(log_prob[2:])
    count = samples * positions
    blocks = -(-count // _LABELS)
    return Plan(
        (blocks, 1),
        [(samples, classes, positions), (count,), (1,)],
        {"mean": int(attributes["reduction"] == "mean")},
        # Reading scattered elements takes longer.
        work=8 * count,
        scratch=[(blocks,)],
    )


def add_labels(task: int, log_prob: np.ndarray, label: np.ndarray, sums: np.ndarray) -> bool:
    """Add up what a task's labels pick; fails if one is out of range."""
    total, classes, positions = double(0.0), log_prob.shape[1], log_prob.shape[2]
    for k in range(task * _LABELS, min((task + 1) * _LABELS, len(label))):
        if label[k] < 0 or label[k] >= classes:
            return True
        total += double(log_prob[k // positions, label[k], k % positions])
    sums[task] = total
    return False


@negative_log_likelihood.compiled(
    views={"log_prob": 3, "label": 1, "loss": 1}, scratch={"sums": 1}, plan=_plan, first=add_labels
)
def add_sums(task: int, label: np.ndarray, loss: np.ndarray, sums: np.ndarray, mean: int) -> None:
    total = double(0.0)
    for k in range(len(sums)):
        total += double(sums[k])
    loss[0] = -total / double(len(label)) if mean else -total
