"""onnxblock: building blocks and losses against NumPy and PyTorch, and the models that blocks make."""

from __future__ import annotations

import doctest
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from support import PATIENCE, assert_close

import ortgrad
from ortgrad.compat.onnxblock import blocks, checkpoint_utils, model_accessor, models
from ortgrad.training import checkpoint, onnxblock

Arrays = dict[str, np.ndarray]


def parse(text: str, **initializers: np.ndarray) -> onnx.ModelProto:
    model: onnx.ModelProto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18, "com.microsoft": 1, "ai.onnx.ml": 3]> {text}'
    )
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in initializers.items())
    return model


PAIR = "g (float[N, M] x, float[N, M] y) => (float[N, M] z) { z = Identity(x) }"
X = np.float32([[0.5, -1.5, 2.0], [1.0, 3.0, -0.25]])
Y = np.float32([[2.0, 0.5, 4.0], [-1.0, 1.5, 0.125]])


class Stack(onnxblock.ForwardBlock):
    """A model whose outputs are what a function returns."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def build(self, *names: str) -> Any:
        return self.function(*names)


def run(function: Callable[[], Any], feeds: Arrays, model: onnx.ModelProto | None = None) -> list[Any]:
    """The values that the blocks called by a function compute."""
    block = Stack(function)
    with onnxblock.base(parse(PAIR) if model is None else model):
        block()
    session = ortgrad.InferenceSession(block.to_model_proto())
    if model is None:
        feeds = {"y": Y, **feeds}
    return list(session.run(None, feeds))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: blocks.Add()("x", "y"), X + Y),
        (lambda: blocks.Sub()("x", "y"), X - Y),
        (lambda: blocks.Mul()("x", "y"), X * Y),
        (lambda: blocks.Div()("x", "y"), X / Y),
        (lambda: blocks.Pow(3.0)("x"), X**3),
        (lambda: blocks.ReduceMean()("x"), X.mean(keepdims=True)),
        (lambda: blocks.ReduceMean(keepdims=False)("x"), X.mean()),
        (lambda: blocks.ReduceSum()("x"), X.sum(keepdims=True)),
        (lambda: blocks.ReduceSum(keepdims=False)("x"), X.sum()),
        (lambda: blocks.Sigmoid()("x"), 1 / (1 + np.exp(-X))),
        (lambda: blocks.Log()(blocks.Abs()("x")), np.log(np.abs(X))),
        (lambda: blocks.Neg()("x"), -X),
        (lambda: blocks.Abs()("x"), np.abs(X)),
        (lambda: blocks.Mul()(blocks.Constant(2.5)(), "x"), X * np.float32(2.5)),
        (lambda: blocks.Clip(-1.0, 1.0)("x"), X.clip(-1, 1)),
        (lambda: blocks.Clip(clip_max=1.0)("x"), X.clip(None, 1)),
        (lambda: blocks.Clip(clip_min=0.0)("x"), X.clip(0, None)),
        (lambda: blocks.Cast(onnx.TensorProto.DOUBLE)("x"), X.astype(np.float64)),
        (lambda: blocks.PassThrough()("z"), X),
        (lambda: blocks.ReduceAllL2()("x", "y"), np.sqrt((X**2).sum() + (Y**2).sum())),
    ],
)
def test_building_blocks(function: Callable[[], Any], expected: np.ndarray) -> None:
    (result,) = run(function, {"x": X, "y": Y})
    # Constants have one dimension, as in 1.19.2.
    assert_close(result.reshape(np.shape(expected)), np.asarray(expected), 1e-6)


def test_sequences_label_encoders_and_inputs() -> None:
    (sequence,) = run(lambda: blocks.SequenceConstruct()("x", "y"), {"x": X, "y": Y})
    np.testing.assert_array_equal(sequence, [X, Y])
    labels = parse("g (int64[N] x) => (int64[N] z) { z = Identity(x) }")
    encoder = blocks.LabelEncoder(default_int64=7, keys_int64s=[1, 2], values_int64s=[10, 20])
    (encoded,) = run(lambda: encoder("x"), {"x": np.array([2, 1, 5])}, labels)
    assert encoded.tolist() == [20, 10, 7]
    (total,) = run(lambda: blocks.Add()("z", blocks.InputLike("z")("more")), {"x": X, "more": Y})
    np.testing.assert_array_equal(total, X + Y)

    def like_intermediate() -> Any:
        return blocks.Mul()("x", blocks.InputLike(blocks.Neg()("x"))())

    block = Stack(like_intermediate)
    with onnxblock.base(parse(PAIR)):
        block()
    added = block.to_model_proto().graph.input[-1]
    assert [dim.dim_param for dim in added.type.tensor_type.shape.dim] == ["N", "M"]


def test_linear_layer() -> None:
    np.random.seed(4)
    first = run(lambda: blocks.Linear(3, 2, alpha=0.5)("x"), {"x": X})[0]
    np.random.seed(4)
    weight, bias = (np.random.randn(*shape).astype(np.float32) for shape in ((3, 2), (2,)))
    assert_close(first, np.float32(0.5) * (X @ weight) + bias, 1e-6)
    assert run(lambda: blocks.Linear(3, 4, bias=False)("x"), {"x": X})[0].shape == (2, 4)


def test_names_are_unique_and_of_the_form_of_1_19_2() -> None:
    with onnxblock.base(parse(PAIR)) as accessor:
        names = [blocks.Add()("x", "y") for _ in range(3)]
    assert len(set(names)) == 3
    assert all(name.startswith("onnx::add_output::") for name in names)
    assert len({node.name for node in accessor.model.graph.node}) == 4


def test_models_of_other_processes_keep_their_names() -> None:
    """The names in a file are those that a new process would begin with."""
    program = """
import sys, onnx
from ortgrad.training import onnxblock
model = onnx.load_from_string(sys.stdin.buffer.read())
with onnxblock.base(model) as accessor:
    output = onnxblock.blocks.Pow(2.0)(onnxblock.blocks.Add()(model.graph.node[-1].output[0], "x"))
onnx.checker.check_model(accessor.model)
sys.stdout.buffer.write(accessor.model.SerializeToString())
"""
    model = parse(PAIR)
    for _ in range(3):
        given = model.SerializeToString()
        done = subprocess.run(
            [sys.executable, "-c", program], input=given, capture_output=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr.decode()
        model = onnx.load_from_string(done.stdout)
    names = [name for node in model.graph.node for name in node.output]
    assert len(names) == 7 and len(set(names)) == 7
    assert len({tensor.name for tensor in model.graph.initializer}) == 3


def test_names_inside_of_branches_are_taken() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]>
        g (float[N] x, bool c) => (float[N] y) {
            y = If (c) <
                then_branch = t () => (float[N] a) { a = Neg(x) },
                else_branch = e () => (float[N] b) { b = Abs(x) }
            >
        }"""
    )
    branch = model.graph.node[0].attribute[0].g
    branch.output[0].name = branch.node[0].output[0] = "onnx::add_output::1"
    with onnxblock.base(model) as accessor:
        assert blocks.Add()("x", "x") == "onnx::add_output::2"
    onnx.checker.check_model(accessor.model)


def test_the_same_calls_make_the_same_model() -> None:
    def made() -> bytes:
        with onnxblock.base(parse(PAIR)) as accessor:
            blocks.ReduceMean()(blocks.Clip(-1.0, 1.0)(blocks.Sub()("x", "y")))
        return accessor.model.SerializeToString(deterministic=True)

    assert made() == made()


TARGETS = np.float32([[1, 0, 1], [0.25, 1, 0]])
REDUCTIONS = ["mean", "sum", "none"]
F = torch.nn.functional


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("loss", "reference"),
    [
        (onnxblock.loss.MSELoss, F.mse_loss),
        (onnxblock.loss.L1Loss, F.l1_loss),
        (onnxblock.loss.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits),
    ],
)
def test_losses_per_element(loss: Any, reference: Any, reduction: str, dtype: Any) -> None:
    x, t = X.astype(dtype), TARGETS.astype(dtype)
    model = parse("g (float[N, M] x) => (float[N, M] z) { z = Identity(x) }")
    if dtype == np.float64:
        model = parse("g (double[N, M] x) => (double[N, M] z) { z = Identity(x) }")
    (result,) = run(lambda: loss(reduction=reduction)("z"), {"x": x, "target": t}, model)
    expected = reference(torch.tensor(x), torch.tensor(t), reduction=reduction).numpy()
    assert_close(result, expected, 1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_of_binary_cross_entropy(reduction: str) -> None:
    weight, positive = np.array([0.5, 2.0, 1.5]), np.float32([3.0, 0.5, 1.0])
    loss = onnxblock.loss.BCEWithLogitsLoss(weight, reduction, positive)
    (result,) = run(lambda: loss("z"), {"x": X, "target": TARGETS})
    expected = F.binary_cross_entropy_with_logits(
        torch.tensor(X),
        torch.tensor(TARGETS),
        torch.tensor(weight, dtype=torch.float32),
        reduction=reduction,
        pos_weight=torch.tensor(positive),
    )
    assert_close(result, expected.numpy(), 1e-6)


def test_binary_cross_entropy_of_large_logits_is_finite() -> None:
    logits = np.float32([[1000, -1000, 90], [-90, 1000, -1000]])
    loss = onnxblock.loss.BCEWithLogitsLoss(reduction="none")
    (result,) = run(lambda: loss("z"), {"x": logits, "target": TARGETS})
    expected = F.binary_cross_entropy_with_logits(
        torch.tensor(logits), torch.tensor(TARGETS), reduction="none"
    )
    assert_close(result, expected.numpy(), 1e-6)


def scores(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [None, 2, -100])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(6, 4), (3, 5, 4), (2, 3, 5, 4)])
def test_cross_entropy_with_new_labels(
    shape: tuple[int, ...], reduction: str, ignored: int | None, weighted: bool
) -> None:
    """The classes are the last dimension, as 1.19.2 documents."""
    x = scores(*shape)
    labels = np.arange(x[..., 0].size).reshape(shape[:-1]) % 4
    if ignored == -100:
        labels.reshape(-1)[1] = -100
    weight = np.array([1.0, 0.5, 2.0, 0.25]) if weighted else None
    dims = ", ".join(f"D{i}" for i in range(len(shape) - 1))
    model = parse(f"g (float[{dims}, 4] x) => (float[{dims}, 4] z) {{ z = Identity(x) }}")
    loss = onnxblock.loss.CrossEntropyLoss(weight, reduction, ignored)
    (result,) = run(lambda: loss("z"), {"x": x, "labels": labels}, model)
    expected = F.cross_entropy(
        torch.tensor(np.moveaxis(x, -1, 1)),
        torch.tensor(labels),
        None if weight is None else torch.tensor(weight, dtype=torch.float32),
        ignore_index=-100 if ignored is None else ignored,
        reduction=reduction,
    )
    assert_close(result, expected.numpy(), 1e-5)


@pytest.mark.parametrize(
    ("shape", "labels", "axis", "classes"),
    [
        ("N, 4, H, W", "N, H, W", None, 1),
        ("2, 4, 5", "2, 5", None, 1),
        ("2, 5, 4", "2, 5", None, 2),
        ("2, 4, 4", "2, 4", None, 1),
        ("2, 4, 4", "2, 4", -1, 2),
        ("2, 4, 4", "2, 4", 1, 1),
    ],
)
def test_cross_entropy_with_labels_of_the_model(
    shape: str, labels: str, axis: int | None, classes: int
) -> None:
    sizes = {"N": 2, "H": 3, "W": 5}
    x = scores(*(sizes.get(d) or int(d) for d in shape.split(", ")))
    t = np.arange(np.prod(np.delete(x.shape, classes))).reshape(np.delete(x.shape, classes)) % 4
    model = parse(f"g (float[{shape}] x, int64[{labels}] t) => (float[{shape}] z) {{ z = Identity(x) }}")
    (result,) = run(lambda: onnxblock.loss.CrossEntropyLoss(axis=axis)("z", "t"), {"x": x, "t": t}, model)
    expected = F.cross_entropy(torch.tensor(np.moveaxis(x, classes, 1)), torch.tensor(t))
    assert_close(result, expected.numpy(), 1e-6)


def test_segmentation_with_new_labels() -> None:
    model = parse("g (float[N, 4, H, W] x) => (float[N, 4, H, W] z) { z = Identity(x) }")
    x, t = scores(2, 4, 3, 5), np.arange(30).reshape(2, 3, 5) % 4
    (result,) = run(lambda: onnxblock.loss.CrossEntropyLoss(axis=1)("z"), {"x": x, "labels": t}, model)
    assert_close(result, F.cross_entropy(torch.tensor(x), torch.tensor(t)).numpy(), 1e-6)


def test_two_losses_share_a_model() -> None:
    def both() -> Any:
        first = onnxblock.loss.MSELoss()("z", "target1")
        second = onnxblock.loss.L1Loss()("x", "target2")
        return blocks.Add()(blocks.Mul()(blocks.Constant(0.25)(), first), second)

    (result,) = run(both, {"x": X, "target1": Y, "target2": TARGETS})
    assert result.shape == (1,)
    assert result[0] == pytest.approx(0.25 * ((X - Y) ** 2).mean() + np.abs(X - TARGETS).mean(), rel=1e-6)


@pytest.mark.parametrize("loss", ["MSELoss", "L1Loss", "BCEWithLogitsLoss", "CrossEntropyLoss"])
def test_unknown_reductions_are_refused(loss: str) -> None:
    with pytest.raises(RuntimeError, match="'median'"):
        getattr(onnxblock.loss, loss)(reduction="median")


def test_scores_without_a_dimension_for_classes_are_refused() -> None:
    model = parse("g (float[N] x) => (float[N] z) { z = Identity(x) }")
    with onnxblock.base(model), pytest.raises(RuntimeError, match="dimension for the classes"):
        onnxblock.loss.CrossEntropyLoss()("z")


LINEAR = "g (float[N, 3] x) => (float[N, 2] y) { y = MatMul(x, w) }"
W = np.float32([[1, 2], [3, 4], [5, 6]])


class Training(onnxblock.TrainingBlock):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def build(self, *names: str) -> Any:
        return self.function(*names)


def gradients(block: onnxblock.TrainingBlock, model: onnx.ModelProto, feeds: Arrays) -> tuple[Any, Arrays]:
    """The loss, and the gradients that the training model adds to zeros."""
    with onnxblock.base(model):
        block("y")
    training, _ = block.to_model_proto()
    session = ortgrad.InferenceSession(training)
    values = dict(feeds)
    for value in training.graph.input:
        if value.name.endswith(".buffer"):
            values[value.name] = np.zeros_like(values[value.name.removesuffix("_grad.accumulation.buffer")])
    values["lazy_reset_grad"] = np.array([False])
    names = [value.name for value in session.get_outputs()]
    results = dict(zip(names, session.run(None, values), strict=True))
    made = {n.split("_grad.")[0]: v for n, v in results.items() if n.endswith(".buffer.out")}
    return results[names[0]], made


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("loss", "reference", "target"),
    [
        ("MSELoss", F.mse_loss, np.float32([[1, 2], [0, -1]])),
        ("L1Loss", F.l1_loss, np.float32([[1, 2], [0, -1]])),
        ("BCEWithLogitsLoss", F.binary_cross_entropy_with_logits, np.float32([[1, 0], [0.5, 1]])),
        ("CrossEntropyLoss", F.cross_entropy, np.array([1, 0])),
    ],
)
def test_gradients_of_losses(loss: str, reference: Any, target: np.ndarray, reduction: str) -> None:
    block = Training(lambda name: getattr(onnxblock.loss, loss)(reduction=reduction)(name))
    block.requires_grad("w")
    block.requires_grad("x")
    target_name = "labels" if loss == "CrossEntropyLoss" else "target"
    feeds = {"x": X * np.float32(0.1), "w": W, target_name: target}
    value, grads = gradients(block, parse(LINEAR, w=W), feeds)
    x, w = (torch.tensor(feeds[name], requires_grad=True) for name in ("x", "w"))
    expected = reference(x @ w, torch.tensor(target), reduction=reduction)
    expected.backward()
    assert_close(value, expected.detach().numpy(), 1e-6)
    for name, tensor in (("x", x), ("w", w)):
        assert tensor.grad is not None
        assert_close(grads[name], tensor.grad.numpy(), 1e-5)


def test_a_loss_with_one_element_and_dimensions() -> None:
    """Constants of blocks have a dimension, and so has a weighted loss."""
    block = Training(lambda name: blocks.Mul()(blocks.Constant(3.0)(), onnxblock.loss.MSELoss()(name)))
    block.requires_grad("w")
    value, grads = gradients(block, parse(LINEAR, w=W), {"x": X, "w": W, "target": np.zeros((2, 2), "f")})
    assert value.shape == (1,)
    assert_close(grads["w"], 3 * 2 / 4 * X.T @ (X @ W), 1e-6)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (LINEAR, r"\['N', 2\]"),
        (
            "g (float[N, 3] x) => (float[N] y) { a = MatMul(x, w) y = ReduceSum<keepdims = 0>(a, one) }",
            r"\['N'\]",
        ),
    ],
)
def test_a_loss_that_is_not_a_scalar_is_refused(text: str, shape: str) -> None:
    block = Training(lambda name: onnxblock.loss.MSELoss(reduction="none")(name))
    block.requires_grad("w")
    model = parse(text, w=W, one=np.array([1]))
    with onnxblock.base(model), pytest.raises(RuntimeError, match=f"not a scalar.*{shape}"):
        block("y")


def test_the_size_of_a_loss_of_unknown_shape_is_checked_in_a_run() -> None:
    text = "g (float[N, 3] x, int64[r] shape) => (float[N, 2] y) { y = MatMul(x, w) z = Reshape(y, shape) }"

    def build(name: str) -> Any:
        return blocks.Mul()("z", "z")

    for rows, fits in ((1, True), (2, False)):
        block = Training(build)
        block.requires_grad("w")
        feeds = {"x": X[:rows], "w": W[:, :1], "shape": np.array([rows, 1, 1])}
        model = parse(text.replace("2] y", "1] y"), w=W[:, :1])
        if fits:
            _, grads = gradients(block, model, feeds)
            assert_close(grads["w"], 2 * X[:1].T @ (X[:1] @ W[:, :1]), 1e-6)
        else:
            with pytest.raises(Exception, match=r"(?i)reshape"):
                gradients(block, model, feeds)


def test_inputs_and_outputs_of_the_models() -> None:
    block = Training(lambda name: (onnxblock.loss.MSELoss()(name), name))
    block.requires_grad("w")
    block.requires_grad("v", False)
    block.requires_grad("unused")
    text = "g (float[N, 3] x) => (float[N, 2] y) { a = MatMul(x, w) b = Add(a, c) y = Add(b, v) }"
    ones = np.ones(2, np.float32)
    with onnxblock.base(parse(text, v=ones, w=W, unused=ones, c=ones)) as accessor:
        loss, _ = block("y")
    training, evaluation = block.to_model_proto()
    assert [value.name for value in training.graph.input] == [
        *("x", "target", "v", "w", "unused"),
        *("w_grad.accumulation.buffer", "unused_grad.accumulation.buffer", "lazy_reset_grad"),
    ]
    assert [value.name for value in training.graph.output] == [
        *(loss, "y", "w_grad.accumulation.out", "unused_grad.accumulation.out")
    ]
    accumulators = [node for node in training.graph.node if node.op_type == "InPlaceAccumulatorV2"]
    assert [node.name for node in accumulators] == ["GradientAccumulator2", "GradientAccumulator3"]
    assert [value.name for value in evaluation.graph.input] == ["x", "target", "v", "w", "unused"]
    assert [value.name for value in evaluation.graph.output] == [loss, "y"]
    assert "c" in {tensor.name for tensor in evaluation.graph.initializer}
    trainable, frozen = block.parameters()
    assert [tensor.name for tensor in trainable] == ["w", "unused"]
    assert [tensor.name for tensor in frozen] == ["v"]
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(trainable[0]), W)
    assert accessor.model == training


def test_without_names_all_initializers_become_inputs() -> None:
    block = Training(lambda name: onnxblock.loss.MSELoss()(name))
    with onnxblock.base(parse(LINEAR, w=W)):
        block("y")
    training, evaluation = block.to_model_proto()
    names = [value.name for value in training.graph.input]
    assert names[:3] == ["x", "target", "w"]
    assert names[-1] == "lazy_reset_grad"
    assert not training.graph.initializer and not evaluation.graph.initializer
    assert block.parameters() == ([], [])


def test_requires_grad_can_be_taken_back() -> None:
    block = Training(lambda name: onnxblock.loss.MSELoss()(name))
    block.requires_grad("w", False)
    block.requires_grad("w")
    block.requires_grad("w", False)
    with onnxblock.base(parse(LINEAR, w=W)):
        block("y")
    assert [[tensor.name for tensor in tensors] for tensors in block.parameters()] == [[], ["w"]]


def test_errors_are_those_of_1_19_2() -> None:
    block = Training(lambda name: onnxblock.loss.MSELoss()(name))
    for method in (block.parameters, block.to_model_proto, Stack(lambda: "x").to_model_proto):
        with pytest.raises(RuntimeError):
            method()
    with pytest.raises(RuntimeError, match="within"):
        blocks.Add()("x", "y")
    model = parse(PAIR)
    with onnxblock.base(model), pytest.raises(RuntimeError), onnxblock.base(model):
        pass
    with onnxblock.base(model), pytest.raises(RuntimeError), onnxblock.empty_base():
        pass
    with pytest.raises(RuntimeError), onnxblock.base(None):  # type: ignore[arg-type]
        pass
    with pytest.raises(RuntimeError), onnxblock.custom_op_library("no such file"):
        pass
    with pytest.raises(RuntimeError):
        onnxblock.save_checkpoint(None, "checkpoint")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        Stack(lambda: "x").__class__.__mro__[2].__init__(Stack(lambda: "x"), "/absolute.onnx")
    with onnxblock.base(model), pytest.raises(onnx.checker.ValidationError):
        blocks.Add()("x", "missing")
    with onnxblock.base(model), pytest.raises(LookupError, match="'missing'"):
        blocks.InputLike("missing")()
    with onnxblock.base(model), pytest.raises(LookupError, match="'missing'"):
        Stack(lambda: ("z", "missing"))()
    block.requires_grad("missing")
    with onnxblock.base(parse(LINEAR, w=W)), pytest.raises(RuntimeError, match="'missing'"):
        block("y")


def test_a_failed_block_leaves_no_base_behind() -> None:
    with pytest.raises(ZeroDivisionError), onnxblock.base(parse(PAIR)):
        Stack(lambda: 1 / 0)()
    with onnxblock.empty_base():
        pass


def test_the_given_model_is_not_changed() -> None:
    model = parse(LINEAR, w=W)
    before = model.SerializeToString(deterministic=True)
    block = Training(lambda name: onnxblock.loss.MSELoss()(name))
    block.requires_grad("w")
    with onnxblock.base(model):
        block("y")
    assert model.SerializeToString(deterministic=True) == before


def test_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block = Training(lambda name: onnxblock.loss.MSELoss()(name))
    block.requires_grad("w")
    with onnxblock.base(parse(LINEAR, w=W), "model.onnx") as accessor:
        assert accessor.has_path
        assert accessor.path == "model.onnx"
        block("y")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("clip", [None, 2.5])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_models_of_optimizers(name: str, clip: float | None) -> None:
    optimizer = getattr(onnxblock.optim, name)(
        clip_grad=None if clip is None else onnxblock.optim.ClipGradNorm(clip)
    )
    with onnxblock.empty_base():
        flag = optimizer(([onnx.numpy_helper.from_array(W, "w")], []))
    model = optimizer.to_model_proto()
    onnx.checker.check_model(model)
    moments = ["first_order_moments", "second_order_moments"][: 2 if name == "AdamW" else 1]
    assert [value.name for value in model.graph.input] == [
        *("learning_rate", "step", "params", "gradients"),
        *moments,
    ]
    assert [value.name for value in model.graph.output] == [flag]
    assert model.graph.node[-1].op_type == {"AdamW": "AdamWOptimizer", "SGD": "SGDOptimizerV2"}[name]
    assert len(model.graph.node) == (1 if clip is None else 2)


def test_attributes_of_adamw() -> None:
    optimizer = onnxblock.optim.AdamW(bias_correction=False, betas=(0.5, 0.75), eps=0.25, weight_decay=0.125)
    with onnxblock.empty_base():
        optimizer(([onnx.numpy_helper.from_array(W, "w")], []))
    (node,) = optimizer.to_model_proto().graph.node
    given = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert given == {
        "alpha": 0.5,
        "beta": 0.75,
        "epsilon": 0.25,
        "weight_decay": 0.125,
        "correct_bias": 0,
        "adam_mode": 1,
    }


def test_optimizers_need_parameters_of_one_type() -> None:
    with onnxblock.empty_base(), pytest.raises(IndexError):
        onnxblock.optim.SGD()(([], []))
    mixed = [onnx.numpy_helper.from_array(W.astype(kind), kind) for kind in ("float32", "float64")]
    with onnxblock.empty_base(), pytest.raises(RuntimeError, match="DOUBLE, FLOAT"):
        onnxblock.optim.SGD()((mixed, []))


def test_checkpoints_of_tensors(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    tensors = [onnx.numpy_helper.from_array(np.full(2, i, np.float32), f"t{i}") for i in range(3)]
    onnxblock.save_checkpoint((tensors[:2], tensors[2:]), path)
    state = checkpoint.load(path)
    assert (list(state.trainable), list(state.frozen)) == (["t0", "t1"], ["t2"])
    zeros = {f"t{i}": np.full(2, 9, np.float32) for i in range(1, 4)}
    model = parse("g (float[N] x) => (float[N] y) { y = Relu(x) }", **zeros)
    onnxblock.load_checkpoint_to_model(path, model)
    values = {t.name: onnx.numpy_helper.to_array(t).tolist() for t in model.graph.initializer}
    assert values == {"t1": [1, 1], "t2": [2, 2], "t3": [9, 9]}
    onnxblock.save_checkpoint((tensors[:2], tensors[2:]), tmp_path / "nominal", nominal_checkpoint=True)
    with pytest.raises(RuntimeError, match="nominal"):
        onnxblock.load_checkpoint_to_model(tmp_path / "nominal", model)


@pytest.mark.parametrize("other", [np.zeros(3, np.float32), np.zeros(2, np.float64)])
def test_parameters_of_another_shape_or_type_are_refused(tmp_path: Path, other: np.ndarray) -> None:
    path = tmp_path / "checkpoint"
    onnxblock.save_checkpoint(([onnx.numpy_helper.from_array(other, "t")], []), path)
    model = parse("g (float[N] x) => (float[N] y) { y = Relu(x) }", t=np.ones(2, np.float32))
    with pytest.raises(RuntimeError, match="'t'"):
        onnxblock.load_checkpoint_to_model(path, model)
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(model.graph.initializer[0]), [1, 1])


@pytest.mark.parametrize(
    "module", [blocks, checkpoint_utils, model_accessor, models, onnxblock.loss, onnxblock.optim]
)
def test_examples(module: Any) -> None:
    results = doctest.testmod(module)
    assert results.attempted and not results.failed


def test_a_model_is_checked_once_after_the_outermost_block(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    monkeypatch.setattr(model_accessor, "check", lambda model: checked.append(len(model.graph.node)))
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[N, 2] x) => (float[N, 2] y) { y = Relu(x) }'
    )

    class Both(onnxblock.Block):
        def build(self, name: str) -> str:
            first, second = onnxblock.loss.MSELoss()(name), onnxblock.loss.L1Loss()(name)
            result: str = blocks.Add()(first, second)
            return result

    with onnxblock.base(model):
        Both()("y")
        assert checked == [8]
        blocks.Neg()("y")
        assert checked == [8, 9]
