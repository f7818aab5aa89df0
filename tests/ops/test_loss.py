"""Gradients of losses against PyTorch and finite differences."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import KERNELS, amount, assert_close, directional_derivative, symbolic_shapes

import ortgrad
from ortgrad.errors import KernelError, NodeError

TOLERANCE = {"float32": 2e-6, "float64": 2e-14}
REDUCTIONS = ["mean", "sum", "none"]
SHAPES = [(4, 3), (1, 5), (3, 1), (2, 3, 4), (2, 4, 1, 3), (1, 2, 2, 2, 2), (700, 130)]
IGNORED = 1


def loss_of(
    logits: torch.Tensor, label: np.ndarray, weight: np.ndarray | None, reduction: str, ignore: int | None
) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        logits,
        torch.from_numpy(label.astype(np.int64)),
        None if weight is None else torch.from_numpy(weight).to(logits.dtype),
        ignore_index=-100 if ignore is None else ignore,
        reduction=reduction,
    )


def compute(feeds: dict[str, np.ndarray], kernels: str, **attributes: Any) -> np.ndarray:
    node = ortgrad.nodes.softmax_cross_entropy_loss_grad(*feeds, outputs="dX", **attributes)
    model = ortgrad.nodes.make_model(node, shapes=symbolic_shapes(feeds), dtype=feeds["log_prob"].dtype)
    if feeds["label"].dtype == np.int32:
        label = next(i for i in model.graph.input if i.name == "label")
        label.type.tensor_type.elem_type = 6
    return ortgrad.InferenceSession(model, kernels=kernels).run(None, feeds)[0]


def check(
    shape: tuple[int, ...],
    reduction: str,
    weighted: bool,
    ignore: int | None,
    dtype: str,
    kernels: str,
    seed: int = 0,
    label_type: str = "int64",
) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.standard_normal(shape).astype(dtype)).requires_grad_()
    label = rng.integers(0, shape[1], shape[:1] + shape[2:]).astype(label_type)
    if ignore is not None:
        # At least one counts, as PyTorch's mean of nothing is NaN.
        label.reshape(-1)[1::3] = ignore
        label.reshape(-1)[0] = (ignore + 1) % shape[1]
    weight = rng.uniform(0.2, 2, shape[1]).astype(dtype) if weighted else None
    loss = loss_of(logits, label, weight, reduction, ignore)
    dy = np.asarray(rng.standard_normal(loss.shape), dtype)
    (expected,) = torch.autograd.grad(loss, logits, torch.from_numpy(dy))
    feeds = {"dY": dy, "log_prob": torch.log_softmax(logits.detach(), 1).numpy(), "label": label}
    if weight is not None:
        feeds["weight"] = weight
    attributes: dict[str, Any] = {} if ignore is None else {"ignore_index": ignore}
    actual = compute(feeds, kernels, reduction=reduction, **attributes)
    assert_close(actual, expected.numpy(), TOLERANCE[dtype])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("ignore", [None, IGNORED, -100, 255])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_against_pytorch(reduction: str, weighted: bool, ignore: int | None, kernels: str) -> None:
    for i, shape in enumerate(SHAPES):
        if ignore == IGNORED and shape[1] == 1:
            continue
        check(shape, reduction, weighted, ignore, list(TOLERANCE)[i % 2], kernels)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("ignore", [None, 2])
def test_labels_may_be_int32(ignore: int | None, kernels: str) -> None:
    check((5, 4, 2), "mean", True, ignore, "float32", kernels, label_type="int32")


@settings(max_examples=amount(25, 500), deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple),
    reduction=st.sampled_from(REDUCTIONS),
    weighted=st.booleans(),
    ignore=st.sampled_from([None, -1, 99]),
    dtype=st.sampled_from(list(TOLERANCE)),
    kernels=st.sampled_from(KERNELS),
    seed=st.integers(0, 2**20),
)
def test_any_shape(
    shape: tuple[int, ...],
    reduction: str,
    weighted: bool,
    ignore: int | None,
    dtype: str,
    kernels: str,
    seed: int,
) -> None:
    check(shape, reduction, weighted, ignore, dtype, kernels, seed)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_against_finite_differences(reduction: str, kernels: str) -> None:
    rng = np.random.default_rng(0)
    logits, direction = rng.standard_normal((2, 4, 3, 2))
    label, weight = rng.integers(0, 3, (4, 2)), rng.uniform(0.5, 2, 3)

    def loss(logits: np.ndarray) -> float:
        return float(loss_of(torch.from_numpy(logits), label, weight, reduction, 1))

    log_prob = torch.log_softmax(torch.from_numpy(logits), 1).numpy()
    feeds = {"dY": np.array(1.0), "log_prob": log_prob, "label": label, "weight": weight}
    actual = (compute(feeds, kernels, reduction=reduction, ignore_index=1) * direction).sum()
    assert actual == pytest.approx(directional_derivative(loss, [logits], [direction]), rel=1e-9)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_samples_that_do_not_count_get_zeros(reduction: str, kernels: str) -> None:
    """Even if none counts, and even if their log-probabilities are NaN."""
    dy = np.ones((2,) if reduction == "none" else (), np.float32)
    log_prob = np.full((2, 3), np.nan, np.float32)
    feeds = {"dY": dy, "log_prob": log_prob, "label": np.array([1, 1])}
    ignoring = compute(feeds, kernels, reduction=reduction, ignore_index=1)
    weightless = compute(feeds | {"weight": np.zeros(3, np.float32)}, kernels, reduction=reduction)
    for actual in (ignoring, weightless):
        assert_close(actual, np.zeros((2, 3), np.float32), 0)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_samples(reduction: str, kernels: str) -> None:
    dy = np.ones((0, 2) if reduction == "none" else (1,), np.float32)
    feeds = {"dY": dy, "log_prob": np.zeros((0, 3, 2), np.float32), "label": np.zeros((0, 2), np.int64)}
    assert compute(feeds, kernels, reduction=reduction).shape == (0, 3, 2)


@pytest.mark.parametrize("ignore", [None, 1])
def test_float16_body_counts_beyond_its_range(ignore: int | None) -> None:
    n = 70_000
    attributes: dict[str, Any] = {} if ignore is None else {"ignore_index": ignore}
    log_prob = np.full((n, 2), np.log(0.5), np.float16)
    feeds = {"dY": np.array(7_000, np.float16), "log_prob": log_prob, "label": np.zeros(n, np.int64)}
    expected = np.tile(np.array([-0.05, 0.05], np.float32), (n, 1))
    assert_close(compute(feeds, "onnx", **attributes).astype(np.float32), expected, 4e-3)


WRONG: list[tuple[dict[str, np.ndarray], str]] = [
    ({"label": np.array([0, 3])}, "label 3 is out of range for 3 classes"),
    ({"label": np.array([-1, 0])}, "label -1 is out of range for 3 classes"),
    ({"label": np.array([0, 0, 0])}, r"label \[3\] does not fit with log_prob \[2, 3\]"),
    ({"weight": np.ones(2, np.float32)}, r"weight \[2\] does not fit"),
    ({"dY": np.ones(2, np.float32)}, r"dY \[2\] does not fit .*reduction=mean"),
]


@pytest.mark.parametrize(("wrong", "text"), WRONG)
def test_wrong_inputs(wrong: dict[str, np.ndarray], text: str) -> None:
    right = {
        "dY": np.ones(1, np.float32),
        "log_prob": np.full((2, 3), np.log(1 / 3), np.float32),
        "label": np.array([0, 2]),
        "weight": np.ones(3, np.float32),
    }
    node = ortgrad.nodes.softmax_cross_entropy_loss_grad(*right, outputs="dX")
    model = ortgrad.nodes.make_model(node, shapes=symbolic_shapes(right))
    session = ortgrad.InferenceSession(model, kernels="python")
    with pytest.raises(KernelError, match=text):
        session.run(None, right | wrong)
    expected = np.array([[-2, 1, 1], [1, 1, -2]], np.float32) / 6
    assert_close(session.run(None, right)[0], expected, 2e-7)


def test_without_reduction_every_sample_has_its_gradient() -> None:
    feeds = {
        "dY": np.ones(1, np.float32),
        "log_prob": np.zeros((2, 3), np.float32),
        "label": np.zeros(2, np.int64),
    }
    with pytest.raises(KernelError, match=r"dY \[1\] does not fit with .*label \[2\].*reduction=none"):
        compute(feeds, "python", reduction="none")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("label", [3, -1, -4])
def test_the_body_refuses_labels_that_are_out_of_range(label: int, weighted: bool) -> None:
    feeds = {
        "dY": np.ones((), np.float32),
        "log_prob": np.zeros((2, 3), np.float32),
        "label": np.array([0, label]),
    }
    if weighted:
        feeds["weight"] = np.ones(3, np.float32)
    with pytest.raises(Exception, match=r"(?i)out of range|must be within"):
        compute(feeds, "onnx")


def test_the_reduction_is_one_of_three() -> None:
    with pytest.raises(NodeError, match="it must be one of mean, sum, none"):
        ortgrad.nodes.softmax_cross_entropy_loss_grad("dY", "log_prob", "label", reduction="max")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("shape", [(4, 3), (3, 5, 2), (2, 3, 2, 4)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignore", [None, 1])
def test_the_loss_in_a_session(
    reduction: str, shape: tuple[int, ...], ignore: int | None, kernels: str
) -> None:
    """A session writes SoftmaxCrossEntropyLoss in other operators than onnxruntime."""
    sizes = ", ".join(["N", *map(str, shape[1:])])
    places = ", ".join(["N", *map(str, shape[2:])])
    attribute = "" if ignore is None else f", ignore_index = {ignore}"
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[{sizes}] x, int64[{places}] label) => (loss, log_prob) {{
            loss, log_prob = SoftmaxCrossEntropyLoss <reduction = "{reduction}"{attribute}> (x, label)
        }}""")
    built = ortgrad.build_gradient_model(model, wrt="x", of="loss")
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).requires_grad_()
    label = rng.integers(0, shape[1], shape[:1] + shape[2:])
    label.reshape(-1)[:1] = 0
    expected = loss_of(x, label, None, reduction, ignore)
    expected.sum().backward()
    feeds = {"x": x.detach().numpy(), "label": label}
    if reduction == "none":
        feeds["loss_grad"] = np.ones(label.shape, np.float32)
    session = ortgrad.InferenceSession(built, kernels=kernels)
    assert [value.name for value in session.get_outputs()] == ["loss", "log_prob", "x_grad"]
    loss, log_prob, dx = session.run(None, feeds)
    assert_close(log_prob, torch.log_softmax(x.detach(), 1).numpy(), 2e-6)
    assert_close(loss, expected.detach().numpy(), 2e-6)
    assert x.grad is not None
    assert_close(dx, x.grad.numpy(), 2e-6)


def test_a_loss_whose_other_outputs_are_absent() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[2, 3] x, int64[2] label) => (loss) {
            y = Relu(x)
            loss = SoftmaxCrossEntropyLoss(y, label)
        }""")
    built = ortgrad.build_gradient_model(model, wrt="x", of="loss")
    x = np.float32([[1, 2, 3], [3, 1, 1]])
    loss, dx = ortgrad.InferenceSession(built).run(None, {"x": x, "label": np.array([0, 2])})
    given = torch.from_numpy(x).requires_grad_()
    expected = torch.nn.functional.cross_entropy(given, torch.tensor([0, 2]))
    expected.backward()
    assert_close(loss, expected.detach().numpy(), 2e-6)
    assert given.grad is not None
    assert_close(dx, given.grad.numpy(), 2e-6)


def loss_model(op_type: str, reduction: str, weighted: bool, ignore: int | None, positions: bool) -> Any:
    """The gradient model of a loss, and feeds with one label to fill in."""
    places = "N, D" if positions else "N"
    inputs = f"float[N, C{', D' if positions else ''}] x, int64[{places}] label" + (
        ", float[C] w" if weighted else ""
    )
    output = f"float[{places}] loss" if reduction == "none" else "float loss"
    ignored = "" if ignore is None else f", ignore_index = {ignore}"
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        g ({inputs}) => ({output}) {{
            loss = {op_type} <reduction = "{reduction}"{ignored}> (x, label{", w" if weighted else ""})
        }}""")
    built = ortgrad.build_gradient_model(model, wrt=["x", "w"] if weighted else "x", of="loss")
    shape = (2, 3, 2) if positions else (2, 3)
    label = np.array([[0, 1], [2, 0]] if positions else [0, 1])
    feeds = {"x": np.zeros(shape, np.float32), "label": label}
    feeds |= {"w": np.ones(3, np.float32)} if weighted else {}
    feeds |= {"loss_grad": np.ones(label.shape, np.float32)} if reduction == "none" else {}
    return built, feeds


@pytest.mark.parametrize("way", [*KERNELS, "plain", "registered"])
@pytest.mark.parametrize("op_type", ["NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"])
def test_every_way_refuses_a_label_that_is_out_of_range(op_type: str, way: str) -> None:
    """onnxruntime's own forward kernels take -1 for the last class; PyTorch and ONNX do not."""
    for i, (reduction, weighted, ignore) in enumerate(
        itertools.product(REDUCTIONS, [False, True], [None, 1, -100])
    ):
        model, feeds = loss_model(op_type, reduction, weighted, ignore, positions=i % 2 == 0)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        if way == "registered":
            ortgrad.register(options)
        if way in ("plain", "registered"):
            session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        else:
            session = ortgrad.InferenceSession(model, options, kernels=way)
        quiet = onnxruntime.RunOptions()
        quiet.log_severity_level = 4
        session.run(None, feeds, quiet)
        for wrong in (-1, -3, 3, -100, 1000):
            feeds["label"].reshape(-1)[-1] = wrong
            if wrong == ignore:
                session.run(None, feeds, quiet)
                continue
            with pytest.raises(Exception, match=r"range|bounds|label"):
                session.run(None, feeds, quiet)


def test_the_error_of_a_label_names_the_node_and_the_labels() -> None:
    model, feeds = loss_model(
        "NegativeLogLikelihoodLoss", "mean", weighted=False, ignore=None, positions=False
    )
    feeds["label"][1] = -1
    with pytest.raises(KernelError, match=r"NegativeLogLikelihoodLoss.*requires labels from 0"):
        ortgrad.InferenceSession(model, kernels="onnx").run(["x_grad"], feeds)
