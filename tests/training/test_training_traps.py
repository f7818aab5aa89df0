"""What would train something else than was asked for: shapes, numbers, probabilities, files that change."""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from support.training import normal, parse

import ortgrad
from ortgrad import cli, training
from ortgrad.errors import ArgumentTypeError, CheckpointError, OrtgradError, TrainingError
from ortgrad.training import SGD, Trainer, artifacts
from ortgrad.training.lora import add_lora, lora_parameters

X = normal(8, 3)
W = normal(3, 1)
WIDE = normal(3, 4)
STOCHASTIC = SGD(0.1)

# Models by the shape of their output, with what computes it in PyTorch.
OUTPUTS: dict[str, tuple[str, np.ndarray, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "column": ("g (float[N, 3] x) => (float[N, 1] y) { y = MatMul(x, w) }", W, torch.matmul),
    "vector": (
        "g (float[N, 3] x) => (float[N] y) "
        "{ z = MatMul(x, w) i = Constant<value_ints = [1]>() y = Squeeze(z, i) }",
        W,
        lambda x, w: (x @ w)[:, 0],
    ),
    "rows": ("g (float[N, 3] x) => (float[N, 4] y) { y = MatMul(x, w) }", WIDE, torch.matmul),
    "unknown": ("g (float[N, 3] x) => (float[A, B] y) { s = Shape(w) y = MatMul(x, w) }", WIDE, torch.matmul),
    # The size of the last axis is not known before a run.
    "dynamic": (
        "g (float[N, 3] x, int64[2] s) => (float[A, B] y) { z = MatMul(x, w) y = Reshape(z, s) }",
        WIDE,
        torch.matmul,
    ),
}
TARGETS = [(8, 1), (8,), (8, 4), (1,), (1, 1), (1, 4), (4, 8), (32, 1)]
LOSSES: dict[str, Any] = {
    "mse": torch.nn.functional.mse_loss,
    "l1": torch.nn.functional.l1_loss,
    "bce": torch.nn.functional.binary_cross_entropy_with_logits,
    "huber": torch.nn.functional.huber_loss,
}


def squared(op: Any, output: Any, target: Any) -> Any:
    return op.ReduceMean((output - target) * (output - target), keepdims=0)


def model(text: str, w: np.ndarray = W) -> onnx.ModelProto:
    return parse(text, {"w": w})


def w_of(result: Any) -> np.ndarray:
    return np.array(result.state.parameter("w"))


# A function may take a target of another rank than the output; it is not told what the target means.
BROADCASTS = [
    (kind, loss, shape)
    for kind in OUTPUTS
    for loss in (*LOSSES, squared)
    for shape in TARGETS
    if loss is not squared
    or kind == "column"
    or max(shape) == 1
    or len(shape) == (1 if kind == "vector" else 2)
]


@pytest.mark.parametrize(
    ("kind", "loss", "shape"), BROADCASTS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_targets_are_not_broadcast(kind: str, loss: Any, shape: tuple[int, ...]) -> None:
    """A target has the shape of the output, or is a vector for a column; anything else is refused."""
    text, w, forward = OUTPUTS[kind]
    target = np.abs(normal(*shape, seed=1)) % 1
    data = {"x": X, "target": target}
    if kind == "dynamic":
        data["s"] = np.array([8, 4])
    parameter = torch.tensor(w, requires_grad=True)
    y = forward(torch.tensor(X), parameter)
    expected = target[:, np.newaxis] if kind == "column" and target.ndim == 1 else target
    try:
        # One batch: arrays of another length would be refused as such.
        result = training.fit(model(text, w), [data], loss=loss, optimizer=STOCHASTIC)
    except (TrainingError, ArgumentTypeError):
        assert expected.shape != y.shape
        return
    assert expected.shape == y.shape
    compute = torch.nn.functional.mse_loss if loss is squared else LOSSES[loss]
    compute(y, torch.tensor(expected)).backward()
    np.testing.assert_allclose(w_of(result), w - 0.1 * parameter.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_a_target_that_is_declared_may_be_broadcast() -> None:
    result = training.fit(
        model(OUTPUTS["rows"][0], WIDE),
        (X, normal(8, 1)),
        loss=squared,
        types={"target": (np.float32, ["N", 1])},
        optimizer=STOCHASTIC,
    )
    assert result.steps == 1


WRONG_COUNTS = [2.5, "3", True, None, -1, np.float64(2)]


COUNTS = ("accumulate", "seed", "threads", "epochs", "batch_size")
# These may be None.
OPTIONAL_COUNTS = ("steps_per_epoch", "patience", "checkpoint_every")


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in COUNTS for value in WRONG_COUNTS]
    + [(name, value) for name in OPTIONAL_COUNTS for value in WRONG_COUNTS if value is not None],
    ids=repr,
)
def test_counts_are_whole_numbers(tmp_path: Path, name: str, value: Any) -> None:
    more: dict[str, Any] = {"evaluate": (X, normal(8, 1)), "checkpoint": tmp_path / "checkpoint"}
    with pytest.raises((TrainingError, ArgumentTypeError), match=name):
        training.fit(model(OUTPUTS["column"][0]), (X, normal(8, 1)), loss="mse", **{**more, name: value})


@pytest.mark.parametrize("name", ["accumulate", "batch_size", "steps_per_epoch", "patience"])
def test_counts_are_at_least_1(name: str) -> None:
    more: dict[str, Any] = {"evaluate": (X, normal(8, 1)), name: 0}
    with pytest.raises(TrainingError, match=name):
        training.fit(model(OUTPUTS["column"][0]), (X, normal(8, 1)), loss="mse", **more)


@pytest.mark.parametrize("factor", [np.nan, np.inf, -1.0])
def test_schedules_return_a_factor(factor: float) -> None:
    trainer = Trainer(model(OUTPUTS["column"][0]), loss="mse", schedule=lambda step, total: factor)
    with pytest.raises(TrainingError, match="schedule returned"):
        trainer.fit((X, normal(8, 1)))
    np.testing.assert_array_equal(w_of(trainer), W)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_a_sum_of_held_out_data_does_not_depend_on_the_batches(batch_size: int) -> None:
    target = normal(8, 1, seed=3)
    trainer = Trainer(model(OUTPUTS["column"][0]), loss="mse", reduction="sum", optimizer=STOCHASTIC)
    loss, _ = trainer.evaluate((X, target), batch_size=batch_size)
    np.testing.assert_allclose(loss, np.square(X @ W - target).sum(), rtol=1e-5)


# Behind a Sigmoid or a Softmax: the nodes, the shape of the result, and the same in PyTorch.
BEHIND: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Identity": ("y = Identity(p)", lambda p: p),
    "Flatten": ("y = Flatten(p)", lambda p: p),
    "Reshape": ("s = Constant<value_ints = [0, -1]>() y = Reshape(p, s)", lambda p: p),
    "Squeeze": (
        "i = Constant<value_ints = [1]>() u = Unsqueeze(p, i) y = Squeeze(u, i)",
        lambda p: p,
    ),
    "Transpose": ("t = Transpose<perm = [1, 0]>(p) y = Transpose<perm = [1, 0]>(t)", lambda p: p),
    "Clip": (
        "a = Constant<value_float = 0.01>() b = Constant<value_float = 0.99>() y = Clip(p, a, b)",
        lambda p: p,
    ),
    "Gather": ("i = Constant<value_ints = [0, 1, 2, 3]>() y = Gather<axis = 1>(p, i)", lambda p: p),
    "Slice": (
        "a = Constant<value_ints = [0]>() b = Constant<value_ints = [4]>() i = Constant<value_ints = [1]>()"
        " y = Slice(p, a, b, i)",
        lambda p: p,
    ),
    "Dropout": ("y = Dropout(p)", lambda p: p),
}


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("loss", ["bce", "cross-entropy"])
def test_losses_of_probabilities(loss: str, behind: str) -> None:
    """The loss is that of the scores, or the model is refused; never that of probabilities as scores."""
    kind = "Sigmoid" if loss == "bce" else "Softmax"
    text = f"g (float[N, 3] x) => (float[N, 4] y) {{ z = MatMul(x, w) p = {kind}(z) {BEHIND[behind][0]} }}"
    target = (normal(8, 4) > 0).astype(np.float32) if loss == "bce" else np.arange(8) % 4
    try:
        result = training.fit(model(text, WIDE), (X, target), loss=loss, optimizer=STOCHASTIC, batch_size=8)
    except TrainingError as error:
        assert behind not in ("Identity", "Flatten", "Reshape", "Squeeze")
        assert "output=" in str(error)
        return
    parameter = torch.tensor(WIDE, requires_grad=True)
    scores = torch.tensor(X) @ parameter
    if loss == "bce":
        torch.nn.functional.binary_cross_entropy_with_logits(scores, torch.tensor(target)).backward()
    else:
        torch.nn.functional.cross_entropy(scores, torch.tensor(target)).backward()
    assert parameter.grad is not None
    np.testing.assert_allclose(w_of(result), WIDE - 0.1 * parameter.grad.numpy(), rtol=1e-5, atol=1e-6)


# With bce, probabilities behind Clip are refused.
@pytest.mark.parametrize(
    ("loss", "behind"),
    [(loss, behind) for loss in ("mse", squared) for behind in ("Identity", "Clip", "Flatten")]
    + [("bce", "Identity"), ("bce", "Flatten")],
)
def test_accuracy_of_probabilities(loss: Any, behind: str) -> None:
    text = f"g (float[N, 3] x) => (float[N, 4] y) {{ z = MatMul(x, w) p = Sigmoid(z) {BEHIND[behind][0]} }}"
    target = (normal(8, 4, seed=5) > 0).astype(np.float32)
    trainer = Trainer(model(text, WIDE), loss=loss, optimizer=STOCHASTIC)
    _, accuracy = trainer.evaluate((X, target), "accuracy")
    assert accuracy == pytest.approx(np.mean((X @ WIDE > 0) == (target > 0)))


def test_accuracy_needs_zeros_and_ones() -> None:
    with pytest.raises(TrainingError, match="zeros and ones"):
        Trainer(model(OUTPUTS["column"][0]), loss="mse").evaluate((X, normal(8, 1)), "accuracy")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_that_are_not_finite(accumulate: int) -> None:
    """The loss is finite where the derivative of a root is not."""
    text = "g (float[N, 3] x) => (float[N, 1] y) { z = MatMul(x, w) a = Mul(z, z) y = Sqrt(a) }"
    x = X.copy()
    x[5] = 0
    trainer = Trainer(model(text), loss="mse", accumulate=accumulate, optimizer=STOCHASTIC)
    with pytest.raises(TrainingError, match="gradient of 'w' is not finite in step"):
        trainer.fit((x, normal(8, 1)), batch_size=8 // accumulate, shuffle=False)
    assert np.isfinite(w_of(trainer)).all()
    trainer.fit((X, normal(8, 1)))


NORMALIZED = """g (float[N, 3] x) => (float[N, 2] y) {{
    h = MatMul(x, w) y = BatchNormalization<training_mode = {mode}>(h, scale, bias, mean, var) }}"""


def normalized(spatial: bool = False) -> onnx.ModelProto:
    text = NORMALIZED.format(mode=0)
    if spatial:
        text = """g (float[N, 3] x) => (float[A, B] y) {
            h = MatMul(x, w) s = Constant<value_ints = [0, 2, 1]>() r = Reshape(h, s)
            n = BatchNormalization(r, scale, bias, mean, var) y = Flatten(n) }""".replace(
            "float y", "float[A, B] y"
        )
    two = {"scale": np.ones(2), "bias": np.zeros(2), "mean": np.zeros(2), "var": np.ones(2)}
    return parse(text, {"w": normal(3, 2), **{k: v.astype(np.float32) for k, v in two.items()}})


def test_a_batch_that_fails_leaves_the_statistics() -> None:
    trainer = Trainer(normalized(), loss="mse")
    x = X.copy()
    x[2] = np.inf
    before = {name: np.array(trainer.state.parameter(name)) for name in ("mean", "var")}
    with pytest.raises(TrainingError, match="loss is nan"):
        trainer.fit((x, normal(8, 2)))
    for name, array in before.items():
        np.testing.assert_array_equal(trainer.state.parameter(name), array)


@pytest.mark.parametrize("spatial", [False, True])
def test_single_samples_and_batch_normalization(spatial: bool) -> None:
    """PyTorch refuses one value per channel, in vectors as well as in pictures of one pixel."""
    trainer = Trainer(normalized(spatial), loss="mse")
    with pytest.raises(TrainingError, match="one sample"):
        trainer.fit((X[:7], normal(7, 2)), batch_size=3)
    with pytest.raises(TrainingError, match="one sample"):
        trainer.step((X[:1], normal(1, 2)))
    trainer.fit((X, normal(8, 2)), batch_size=3)
    Trainer(normalized(spatial), loss="mse", statistics="none").fit((X[:7], normal(7, 2)), batch_size=3)


def test_resuming_what_had_stopped(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "loss": "mse",
        "evaluate": (X, X @ W),
        "patience": 2,
        "epochs": 20,
        "optimizer": SGD(50.0),
        "checkpoint": tmp_path / "checkpoint",
    }
    data = (X, (X @ W).astype(np.float32))
    options["optimizer"] = SGD(0.0)
    first = training.fit(model(OUTPUTS["column"][0]), data, **options)
    assert first.stopped_early
    again = training.fit(model(OUTPUTS["column"][0]), data, resume=True, **options)
    assert again.stopped_early
    assert (again.steps, len(again.history)) == (first.steps, len(first.history))


@pytest.mark.parametrize("changed", [{"batch_size": 3}, {"shuffle": False}, {"size": 7}, {"accumulate": 2}])
def test_resuming_in_an_epoch_of_other_batches(tmp_path: Path, changed: dict[str, Any]) -> None:
    path, target = tmp_path / "checkpoint", normal(8, 1)

    class InterruptedError(Exception):
        pass

    def schedule(step: int, total: int) -> float:
        if step == 3:
            raise InterruptedError
        return 1.0

    text = OUTPUTS["column"][0]
    with pytest.raises(InterruptedError):
        training.fit(
            model(text),
            (X, target),
            loss="mse",
            schedule=schedule,
            batch_size=2,
            checkpoint=path,
            checkpoint_every=1,
        )
    settings: dict[str, Any] = {"batch_size": 2, "epochs": 1, "shuffle": True, **changed}
    size = settings.pop("size", 8)
    with pytest.raises(CheckpointError, match="in the middle of epoch 1"):
        training.fit(
            model(text), (X[:size], target[:size]), loss="mse", checkpoint=path, resume=True, **settings
        )
    result = training.fit(model(text), (X, target), loss="mse", checkpoint=path, resume=True, batch_size=2)
    assert result.steps == 4


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i8", ">f2"])
def test_the_order_of_bytes(dtype: str) -> None:
    """Arrays of the other order of bytes mean the same, wherever they are given."""
    kind = np.dtype(dtype)
    if kind.kind == "i":
        text = "g (int64[N] x) => (float[N, 1] y) { y = Gather(w, x) }"
        x, target = np.arange(8) % 3, normal(8, 1)
    else:
        name = {2: "float16", 4: "float", 8: "double"}[kind.itemsize]
        text = f"g ({name}[N, 3] x) => (float[N, 1] y) {{ c = Cast<to = 1>(x) y = MatMul(c, w) }}"
        x, target = X.astype(kind.newbyteorder("=")), normal(8, 1)
    results = [
        w_of(training.fit(model(text), (each, target), loss="mse", optimizer=STOCHASTIC))
        for each in (x, x.astype(kind))
    ]
    np.testing.assert_array_equal(*results)
    with_loss = training.add_loss(model(text), "mse")
    built = ortgrad.build_gradient_model(
        with_loss, wrt="w", of="loss", feeds={"x": x.astype(kind), "target": target}
    )
    session = ortgrad.InferenceSession(built)
    gradients = []
    for each in (x, x.astype(kind)):
        try:
            gradients.append(session.run(["w_grad"], {"x": each, "target": target})[0])
        except Exception as error:
            # Refused is right, too.
            assert "type" in str(error) or "byte" in str(error)
    assert all(np.array_equal(gradients[0], each) for each in gradients)


def test_masked_arrays_are_refused() -> None:
    masked = np.ma.masked_array(X, X > 0)
    with pytest.raises(ArgumentTypeError, match="masked"):
        training.fit(model(OUTPUTS["column"][0]), (masked, normal(8, 1)), loss="mse")


def test_adapters_are_what_is_trained() -> None:
    base = model(OUTPUTS["column"][0])
    adapted = add_lora(base, "w", rank=1)
    assert training.parameters(adapted) == lora_parameters(adapted)
    assert set(training.parameters(adapted, "*")) == {"w", *lora_parameters(adapted)}
    result = training.fit(adapted, (X, normal(8, 1)), loss="mse")
    assert result.parameters == 2
    (w,) = (t for t in result.model.graph.initializer if t.name == "w")
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(w), W)


@pytest.mark.parametrize("names", [[], (), iter(())])
@pytest.mark.parametrize("argument", ["of", "wrt"])
def test_nothing_is_named(argument: str, names: Any) -> None:
    with pytest.raises(OrtgradError, match=f"{argument} names nothing"):
        ortgrad.build_gradient_model(model(OUTPUTS["column"][0]), **{argument: names})


def test_a_metric_needs_a_target() -> None:
    text = """g (float[N, 3] x, float[N, 1] t, float[2] other) => (float[N, 1] y, float l) {
        y = MatMul(x, w) d = Sub(y, t) s = ReduceSum<keepdims = 0>(other) q = Mul(d, d)
        m = ReduceMean<keepdims = 0>(q) z = Mul(m, s) l = Add(m, z) }"""
    data = {"x": X, "t": normal(8, 1), "other": np.zeros(2, np.float32)}
    trainer = Trainer(model(text), loss="l")
    with pytest.raises(TrainingError, match="target="):
        trainer.evaluate([data], "mse")
    trainer = Trainer(model(text), loss="l", target="t")
    loss, metric = trainer.evaluate([data], "mse")
    assert loss == pytest.approx(metric, rel=1e-5)


def test_held_out_data_with_nan() -> None:
    x = X.copy()
    x[0] = np.nan
    trainer = Trainer(model(OUTPUTS["column"][0]), loss="mse")
    with pytest.raises(TrainingError, match="patience"):
        trainer.fit((X, normal(8, 1)), epochs=3, evaluate=(x, normal(8, 1)), patience=2)


# Files


def test_files_that_change(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model(OUTPUTS["column"][0]), path)
    result = training.fit(path, (X, normal(8, 1)), loss="mse")
    result.export(tmp_path / "trained.onnx")
    onnx.save(parse(OUTPUTS["rows"][0], {"w": WIDE}), path)
    for change in (lambda: None, path.unlink):
        change()
        with pytest.raises(TrainingError, match="changed or removed"):
            result.export(tmp_path / "again.onnx")
    made = training.export(model(OUTPUTS["column"][0]), result)
    assert made is not None


def test_a_checkpoint_does_not_overwrite_the_model(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model(OUTPUTS["column"][0]), path)
    before = path.read_bytes()
    (tmp_path / "link").symlink_to(path)
    for name in ("model.onnx", "link"):
        with pytest.raises(TrainingError, match="overwrite the model"):
            training.fit(path, (X, normal(8, 1)), loss="mse", checkpoint=tmp_path / name)
    assert path.read_bytes() == before


@pytest.mark.skipif(sys.platform == "win32", reason="permissions and pipes are those of POSIX")
def test_permissions_stay(tmp_path: Path) -> None:
    path = tmp_path / "trained.onnx"
    path.touch(0o600)
    training.fit(model(OUTPUTS["column"][0]), (X, normal(8, 1)), loss="mse").export(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert onnx.load(path).graph.output[0].name == "y"


@pytest.mark.skipif(sys.platform == "win32", reason="permissions and pipes are those of POSIX")
def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    path, found = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: found.append(path.read_bytes()))
    reader.start()
    training.fit(model(OUTPUTS["column"][0]), (X, normal(8, 1)), loss="mse").export(path)
    reader.join()
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert onnx.load_from_string(found[0]).graph.output[0].name == "y"


# Losses and metrics of held-out data

WEIGHTS = [1.0, 2.0, 3.0, 40.0]
ONE_HOT = np.eye(4, dtype=np.float32)[np.arange(8) % 4]


@pytest.mark.parametrize("batch_size", [3, 4, 5, 8])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ignore_index": 1},
        {"weight": [1.0, 2.0, 3.0, 40.0]},
        {"weight": [1.0, 2.0, 3.0, 40.0], "ignore_index": 0},
    ],
    ids=str,
)
def test_held_out_losses_do_not_depend_on_the_batches(options: dict[str, Any], batch_size: int) -> None:
    labels = np.sort(np.arange(8) % 4)
    trainer = Trainer(model(OUTPUTS["rows"][0], WIDE), loss="cross-entropy", optimizer=STOCHASTIC, **options)
    loss, _ = trainer.evaluate((X, labels), batch_size=batch_size)
    expected = torch.nn.functional.cross_entropy(
        torch.tensor(X @ WIDE),
        torch.tensor(labels),
        weight=torch.tensor(options["weight"]) if "weight" in options else None,
        ignore_index=options.get("ignore_index", -100),
    )
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_labels_that_are_all_ignored() -> None:
    trainer = Trainer(model(OUTPUTS["rows"][0], WIDE), loss="cross-entropy", ignore_index=3)
    with pytest.raises(TrainingError, match="no label of the batch counts"):
        trainer.fit((X, np.full(8, 3)))
    # Such batches do not count in evaluation.
    labels = np.array([0, 1, 2, 0, 3, 3, 3, 3])
    assert trainer.evaluate((X, labels), batch_size=4)[0] == pytest.approx(trainer.evaluate((X, labels))[0])


@pytest.mark.parametrize(
    ("loss", "metric", "target"),
    [
        ("cross-entropy", "mse", np.arange(8) % 4),
        ("mse", "accuracy", np.eye(4, dtype=np.float32)[np.arange(8) % 4]),
    ],
)
def test_metrics_that_do_not_fit(loss: str, metric: str, target: np.ndarray) -> None:
    with pytest.raises(TrainingError, match=metric):
        Trainer(model(OUTPUTS["rows"][0], WIDE), loss=loss).evaluate((X, target), metric)


@pytest.mark.parametrize("maximize", [True, False])
def test_the_direction_of_a_metric(maximize: bool) -> None:
    values = iter(range(100))
    options: dict[str, Any] = {"loss": "mse", "evaluate": (X, X @ W), "epochs": 6, "patience": 2}
    result = training.fit(
        model(OUTPUTS["column"][0]),
        (X, normal(8, 1)),
        metric=lambda outputs, targets: float(next(values)),
        maximize=maximize,
        **options,
    )
    assert len(result.history) == (6 if maximize else 3)
    with pytest.raises(TrainingError, match="maximize="):
        training.fit(model(OUTPUTS["column"][0]), (X, normal(8, 1)), metric=lambda o, t: 0.0, **options)
    with pytest.raises(TrainingError, match="maximize"):
        training.fit(model(OUTPUTS["column"][0]), (X, normal(8, 1)), loss="mse", maximize=True)


# Probabilities that no single node computes
COMPUTED = {
    "exp of LogSoftmax": "l = LogSoftmax(z) y = Exp(l)",
    "quotient": "e = Exp(z) i = Constant<value_ints = [1]>() r = ReduceSum(e, i) y = Div(e, r)",
    "smoothed": "p = Softmax(z) c = Constant<value_float = 0.0001>() y = Add(p, c)",
}


@pytest.mark.parametrize("nodes", COMPUTED.values(), ids=list(COMPUTED))
def test_computed_probabilities_are_refused(nodes: str) -> None:
    text = f"g (float[N, 3] x) => (float[N, 4] y) {{ z = MatMul(x, w) {nodes} }}"
    with pytest.raises(TrainingError, match="seems to have probabilities"):
        Trainer(model(text, WIDE), loss="cross-entropy")
    # Their scores are accepted.
    Trainer(model(text, WIDE), loss="cross-entropy", output="z")


@pytest.mark.parametrize("nodes", ["s = Sigmoid(z) y = Mul(z, s)", "y = Add(z, b)", "y = LogSoftmax(z)"])
def test_scores_that_look_like_probabilities_are_not_refused(nodes: str) -> None:
    text = f"g (float[N, 3] x) => (float[N, 4] y) {{ z = MatMul(x, w) {nodes} }}"
    Trainer(parse(text, {"w": WIDE, "b": np.ones(4, np.float32)}), loss="cross-entropy")


# Statistics


def test_statistics_are_not_trained_twice() -> None:
    with pytest.raises(TrainingError, match="'var' is a running statistic"):
        Trainer(normalized(), loss="mse", wrt=["scale", "var"])
    result = training.fit(normalized(), (X, normal(8, 2)), loss="mse", wrt=["var"], statistics="none")
    assert result.parameters == 1


def test_normalizations_in_branches_keep_their_statistics() -> None:
    """They compute what they do in inference, and a warning says so."""
    norm = "BatchNormalization(x, scale, bias, mean, var)"
    text = f"""g (float[N, 2] x, bool c) => (float[N, 2] y) {{
        y = If(c) <then_branch = p () => (float[N, 2] r) {{ r = {norm} }},
                   else_branch = q () => (float[N, 2] r2) {{ r2 = Identity(x) }}> }}"""
    two = {"scale": np.ones(2), "bias": np.zeros(2), "mean": np.ones(2), "var": np.full(2, 4.0)}
    made = parse(text, {name: value.astype(np.float32) for name, value in two.items()})
    with pytest.warns(ortgrad.ParameterWarning, match="branches or loops"):
        trainer = Trainer(made, loss="mse", optimizer=SGD(0.0))
    x = X[:, :2]
    target = np.zeros((8, 2), np.float32)
    loss = trainer.step({"x": x, "c": np.array(True), "target": target})
    assert loss == pytest.approx(np.mean(np.square((x - 1) / np.sqrt(4 + 1e-5))), rel=1e-5)


# Arguments


@pytest.mark.parametrize("momentum", [1.0, 5.0])
@pytest.mark.parametrize("kind", [SGD, training.RMSprop])
def test_momentum_is_below_1(kind: Any, momentum: float) -> None:
    with pytest.raises(TrainingError, match="momentum"):
        kind(momentum=momentum)


def test_rates_are_numbers() -> None:
    with pytest.raises(ArgumentTypeError, match="learning_rate"):
        Trainer(model(OUTPUTS["column"][0]), loss="mse", learning_rate="0.1")  # type: ignore[arg-type]


def test_types_name_new_inputs() -> None:
    with pytest.raises(TrainingError, match=r"'taget', which is not a new input.*did you mean 'target'"):
        training.add_loss(model(OUTPUTS["column"][0]), squared, types={"taget": (np.float32, ["N", 1])})


def test_a_step_takes_as_many_batches_as_it_accumulates() -> None:
    batch = (X, normal(8, 1))
    with pytest.raises(TrainingError, match="accumulate=2"):
        Trainer(model(OUTPUTS["column"][0]), loss="mse", accumulate=2).step(batch, batch, batch)


def test_lists_are_not_batches() -> None:
    with pytest.raises(ArgumentTypeError, match="tuple of lists"):
        training.fit(model(OUTPUTS["column"][0]), (X.tolist(), normal(8, 1).tolist()), loss="mse")


@pytest.mark.parametrize("held_out", [iter([(X, normal(8, 1))]), (X.astype(np.float64), normal(8, 1))])
def test_held_out_data_is_checked_before_the_first_step(held_out: Any) -> None:
    trainer = Trainer(model(OUTPUTS["column"][0]), loss="mse")
    with pytest.raises(TrainingError, match="held-out data"):
        trainer.fit((X, normal(8, 1)), epochs=2, evaluate=held_out)
    assert trainer.steps == 0


@pytest.mark.parametrize("length", [0, 1, 2, 5, 2**40])
def test_lengths_that_are_wrong(length: int) -> None:
    class Data:
        def __len__(self) -> int:
            return length

        def __iter__(self) -> Any:
            return iter([(X, normal(8, 1))] * 4)

    with pytest.raises(TrainingError, match="said that there are"):
        training.fit(model(OUTPUTS["column"][0]), Data(), loss="mse", schedule="cosine")


def test_artifacts_do_not_overwrite_their_model(tmp_path: Path) -> None:
    path = tmp_path / "eval_model.onnx"
    onnx.save(model(OUTPUTS["column"][0]), path)
    before = path.read_bytes()
    with pytest.raises(TrainingError, match="overwrite the model"):
        artifacts.generate_artifacts(
            path, ["w"], loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path
        )
    assert path.read_bytes() == before


@pytest.mark.parametrize("option", ["--checkpoint", "--curve"])
def test_commands_do_not_write_one_file_twice(tmp_path: Path, option: str, capsys: Any) -> None:
    onnx.save(model(OUTPUTS["column"][0]), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=X, target=normal(8, 1))
    names = [str(tmp_path / name) for name in ("model.onnx", "data.npz", "out.onnx")]
    code = cli.main(
        ["train", names[0], "--data", names[1], "--loss", "mse", "-o", names[2], option, names[2]]
    )
    assert code != 0
    assert "written twice" in capsys.readouterr().err
