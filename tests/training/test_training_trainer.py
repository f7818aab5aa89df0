"""The short way, second part: Trainer and fit against PyTorch, checkpoints, resuming, and bad input."""

from __future__ import annotations

import errno
import io
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from process import training_process
from support import ROOT

from ortgrad import training
from ortgrad.errors import (
    ArgumentTypeError,
    CheckpointError,
    NameNotFoundError,
    OrtgradError,
    TrainingError,
    TrainingModelError,
)
from ortgrad.graph.loading import load_model
from ortgrad.graph.serialization import read
from ortgrad.pipelines.opening import OPENING
from ortgrad.training import SGD, Adagrad, Adam, AdamW, RMSprop, Trainer, checkpoint, fit
from ortgrad.training.optimizers import kernels
from ortgrad.training.optimizers.passes import CHUNK, Pass

MODELS = ROOT / "models"
Arrays = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For small tensors, PyTorch's threads spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def model_of(text: str, weights: Arrays | None = None) -> onnx.ModelProto:
    model: onnx.ModelProto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> g {text}')
    tensors = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    model.graph.initializer.extend(tensors)
    return model


WEIGHTS = {"w1": normal(4, 8), "b1": normal(8), "w2": normal(8, 3), "b2": normal(3)}
MLP = "(float[N, 4] x) => (float[N, 3] y) { a = Gemm(x, w1, b1) h = Tanh(a) y = Gemm(h, w2, b2) }"
X, LABELS = normal(30, 4), np.random.default_rng(0).integers(0, 3, 30)


def mlp() -> onnx.ModelProto:
    return model_of(MLP, WEIGHTS)


def trainer(**options: Any) -> Trainer:
    return Trainer(mlp(), **{"loss": "cross-entropy", "threads": 1, **options})


def arrays_of(found: Trainer) -> Arrays:
    return {name: found.state.parameter(name).copy() for name in found.state.names}


def torch_mlp() -> tuple[dict[str, torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    p = {name: torch.tensor(array, requires_grad=True) for name, array in WEIGHTS.items()}
    return p, lambda x: torch.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


def assert_same(found: Trainer, tensors: dict[str, torch.Tensor], tolerance: float = 1e-4) -> None:
    for name, tensor in tensors.items():
        np.testing.assert_allclose(
            found.state.parameter(name), tensor.detach().numpy(), rtol=tolerance, atol=tolerance, err_msg=name
        )


# Optimizers against PyTorch

OPTIMIZERS: dict[str, tuple[Any, Callable[..., torch.optim.Optimizer]]] = {
    "adamw": (AdamW(0.02, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.1)),
    "adam": (Adam(0.02, weight_decay=0.1), lambda p: torch.optim.Adam(p, 0.02, weight_decay=0.1)),
    "adam_plain": (
        Adam(0.02, beta1=0.8, epsilon=1e-4),
        lambda p: torch.optim.Adam(p, 0.02, (0.8, 0.999), 1e-4),
    ),
    "sgd": (SGD(0.1, weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1)),
    "momentum": (
        SGD(0.05, momentum=0.9, dampening=0.3, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, dampening=0.3, weight_decay=0.01),
    ),
    "nesterov": (
        SGD(0.05, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    ),
    "rmsprop": (
        RMSprop(0.01, alpha=0.9, weight_decay=0.1),
        lambda p: torch.optim.RMSprop(p, 0.01, alpha=0.9, weight_decay=0.1),
    ),
    "rmsprop_momentum": (
        RMSprop(0.01, momentum=0.8),
        lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.8),
    ),
    "rmsprop_centered": (
        RMSprop(0.005, momentum=0.5, centered=True, epsilon=1e-4),
        lambda p: torch.optim.RMSprop(p, 0.005, momentum=0.5, centered=True, eps=1e-4),
    ),
    "adagrad": (
        Adagrad(0.1, learning_rate_decay=0.05, initial_accumulator_value=0.2, weight_decay=0.01),
        lambda p: torch.optim.Adagrad(
            p, 0.1, lr_decay=0.05, initial_accumulator_value=0.2, weight_decay=0.01
        ),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    ours, make = OPTIMIZERS[name]
    found = trainer(optimizer=ours)
    tensors, forward = torch_mlp()
    rival = make(list(tensors.values()))
    for _ in range(20):
        rival.zero_grad()
        loss = torch.nn.functional.cross_entropy(forward(torch.tensor(X)), torch.tensor(LABELS))
        loss.backward()
        rival.step()
        assert found.step((X, LABELS)) == pytest.approx(loss.item(), rel=1e-3)
    assert_same(found, tensors, 1e-3)


PASSES = {
    "clamp": (kernels.clamp, {"bound": 0.5}),
    "add_decay": (kernels.add_decay, {"decay": 0.2}),
    "decayed_sgd": (kernels.decayed_sgd, {"rate": 0.1, "decay": 0.2}),
    "momentum": (
        kernels.momentum_sgd,
        {"rate": 0.1, "decay": 0.2, "momentum": 0.9, "rest": 0.7, "direct": 1.0, "through": 0.9},
    ),
    "rmsprop": (
        kernels.rmsprop,
        {"rate": 0.1, "decay": 0.2, "alpha": 0.9, "rest": 0.1, "epsilon": 1e-3},
    ),
    "centered": (
        kernels.centered_rmsprop,
        {"rate": 0.1, "decay": 0.2, "alpha": 0.9, "rest": 0.1, "epsilon": 1e-3, "momentum": 0.5}
        | {"centered": 1.0},
    ),
    "adagrad": (kernels.adagrad, {"rate": 0.1, "decay": 0.2, "epsilon": 1e-3}),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", PASSES)
def test_compiled_passes_are_those_in_numpy(name: str, dtype: Any) -> None:
    each: Pass
    each, numbers = PASSES[name]
    size = 2 * CHUNK + 17
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal(size).astype(dtype) for _ in range(each.arrays)]
    if each.arrays > 2:
        arrays[2] = np.abs(arrays[2]) + 40
    arrays[min(1, each.arrays - 1)][:2] = np.nan, np.inf
    one, other = ([array.copy() for array in arrays] for _ in range(2))
    each(*one, threads=2, compiled=True, **numbers)  # type: ignore[arg-type]
    each(*other, threads=1, compiled=False, **numbers)  # type: ignore[arg-type]
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5 if dtype == np.float32 else 1e-12, atol=1e-6)


def test_groups() -> None:
    groups = {"b*": {"weight_decay": 0.0}, "*2": {"learning_rate": 0.1}}
    found = trainer(optimizer=SGD(0.01, weight_decay=0.5), groups=groups)
    tensors, forward = torch_mlp()
    rival = torch.optim.SGD(
        [
            {"params": [tensors["w1"]]},
            {"params": [tensors["b1"]], "weight_decay": 0.0},
            {"params": [tensors["w2"]], "lr": 0.1},
            {"params": [tensors["b2"]], "weight_decay": 0.0, "lr": 0.1},
        ],
        0.01,
        weight_decay=0.5,
    )
    for _ in range(5):
        rival.zero_grad()
        torch.nn.functional.cross_entropy(forward(torch.tensor(X)), torch.tensor(LABELS)).backward()
        rival.step()
        found.step((X, LABELS))
    assert_same(found, tensors)


@pytest.mark.parametrize("options", [{"clip_norm": 0.1}, {"clip_value": 0.02}])
def test_clipping(options: dict[str, float]) -> None:
    found = trainer(optimizer=SGD(1.0), **options)
    tensors, forward = torch_mlp()
    torch.nn.functional.cross_entropy(forward(torch.tensor(X)), torch.tensor(LABELS)).backward()
    if "clip_norm" in options:
        torch.nn.utils.clip_grad_norm_(tensors.values(), 0.1)
    else:
        torch.nn.utils.clip_grad_value_(tensors.values(), 0.02)
    torch.optim.SGD(tensors.values(), 1.0).step()
    found.step((X, LABELS))
    assert_same(found, tensors)


def test_accumulation_is_one_large_batch() -> None:
    found, whole = trainer(accumulate=3, optimizer=SGD(0.5)), trainer(optimizer=SGD(0.5))
    for data, batch_size, each in ((X, 10, found), (X, 30, whole)):
        each.fit((data, LABELS), epochs=4, batch_size=batch_size, shuffle=False)
    assert found.steps == whole.steps == 4
    for name, array in arrays_of(whole).items():
        np.testing.assert_allclose(arrays_of(found)[name], array, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25]),
        ("cosine", 0, [1, (1 + np.sqrt(0.5)) / 2, 0.5, (1 - np.sqrt(0.5)) / 2]),
        ("linear", 2, [1 / 3, 2 / 3, 1, 0.5]),
        ("constant", 0.25, [0.5, 1, 1, 1]),
        (lambda step, total: step / total, 0, [0, 0.25, 0.5, 0.75]),
    ],
)
def test_schedules(schedule: Any, warmup: float, expected: list[float]) -> None:
    found = trainer(optimizer=SGD(1.0), schedule=schedule, warmup=warmup, wrt="b2")
    changes = []
    for _ in range(4):
        before = found.state.parameter("b2").copy()
        found.step((X, LABELS), total=4)
        gradients = found.state.gradients
        assert gradients is not None
        changes.append(float(((before - found.state.parameter("b2")) / gradients["b2"]).mean()))
    np.testing.assert_allclose(changes, expected, rtol=1e-3, atol=1e-3)


# Whole networks

NETWORKS = ["resnet", "gpt", "gru", "lstm", "transformer"]


def case_of(name: str) -> Any:
    from support import networks

    if name in ("resnet", "gpt"):
        network = getattr(networks, name)()
        return (
            network.model,
            network.weights,
            lambda step: network.inputs(4 + step % 3),
            lambda values: network.torch(values)["loss"],
        )
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import workloads
        import workloads_torch
    finally:
        sys.path.pop(0)
    sizes = {"batch": 4, "steps": 6, "features": 8, "width": 12, "tokens": 5, "depth": 2, "heads": 2}
    workload = workloads.Workload(name, name, sizes)
    given = workload.feeds()

    def inputs(step: int) -> Arrays:
        numbers = np.random.default_rng(step)
        x = numbers.standard_normal(given["x"].shape).astype(np.float32)
        return {"x": x, "label": numbers.integers(0, 10, given["label"].shape)}

    def loss(values: Any) -> torch.Tensor:
        return workloads_torch.KINDS[name](workloads_torch.from_onnx(name, values), sizes)

    return workload.model(), {key: given[key] for key in workload.weights()}, inputs, loss


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_train_to_the_losses_of_pytorch(name: str, optimizer: str) -> None:
    model, weights, inputs, loss_of = case_of(name)
    loss = next(v.name for v in model.graph.output if "loss" in v.name)
    ours = SGD(0.02) if optimizer == "sgd" else AdamW(0.002, weight_decay=0.05)
    found = Trainer(model, loss=loss, wrt=list(weights), optimizer=ours, threads=1)
    tensors = {key: torch.from_numpy(value.copy()).requires_grad_() for key, value in weights.items()}
    values = list(tensors.values())
    rival = (
        torch.optim.SGD(values, 0.02)
        if optimizer == "sgd"
        else torch.optim.AdamW(values, 0.002, weight_decay=0.05)
    )
    for step in range(20):
        feeds = inputs(step)
        rival.zero_grad()
        expected = loss_of({**tensors, **{key: torch.from_numpy(value) for key, value in feeds.items()}})
        expected.backward()
        assert found.step(feeds) == pytest.approx(expected.item(), rel=1e-3), step
        rival.step()


def test_running_statistics_are_those_of_pytorch() -> None:
    weights = {"w": normal(3, 2, 3), "scale": np.ones(3, np.float32), "bias": np.zeros(3, np.float32)}
    statistics = {"mean": np.zeros(3, np.float32), "var": np.ones(3, np.float32)}
    model = model_of(
        """(float[N, 2, L] x) => (float[N, 3] y) {
        c = Conv(x, w) n = BatchNormalization(c, scale, bias, mean, var) r = Relu(n)
        y = ReduceMean<keepdims = 0>(r, axes) }""",
        {**weights, **statistics, "axes": np.array([2])},
    )
    found = Trainer(model, loss="mse", optimizer=SGD(0.1))
    conv, norm = torch.nn.Conv1d(2, 3, 3, bias=False), torch.nn.BatchNorm1d(3)
    conv.weight.data.copy_(torch.tensor(weights["w"]))
    rival = torch.optim.SGD([*conv.parameters(), *norm.parameters()], 0.1)
    for step in range(20):
        x, target = normal(5, 2, 8 + step), normal(5, 3)
        loss = torch.nn.functional.mse_loss(norm(conv(torch.tensor(x))).relu().mean(2), torch.tensor(target))
        rival.zero_grad()
        loss.backward()
        rival.step()
        assert found.step({"x": x, "target": target}) == pytest.approx(loss.item(), rel=1e-3)
    trained = training.export(model, found)
    assert trained is not None
    values = {t.name: numpy_helper.to_array(t) for t in trained.graph.initializer}
    assert norm.running_mean is not None and norm.running_var is not None
    np.testing.assert_allclose(values["mean"], norm.running_mean.numpy(), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(values["var"], norm.running_var.numpy(), rtol=1e-3)
    # Evaluation uses them.
    norm.eval()
    x, target = normal(5, 2, 8), normal(5, 3)
    expected = torch.nn.functional.mse_loss(norm(conv(torch.tensor(x))).relu().mean(2), torch.tensor(target))
    assert found.evaluate((x, target))[0] == pytest.approx(expected.item(), rel=1e-3)
    assert [node.op_type for node in trained.graph.node] == [node.op_type for node in model.graph.node]


def test_weights_in_constants_and_subgraphs_are_trained() -> None:
    model = model_of("""(float[N, 2] x, bool c) => (float[N, 2] y) {
        k = Constant<value = float[2] {1, 2}>()
        a = Mul(x, k)
        y = If(c) <
            then_branch = one () => (float[N, 2] p) { u = Constant<value = float[2] {3, 4}>() p = Mul(a, u) },
            else_branch = two () => (float[N, 2] q) { q = Neg(a) }
        >
    }""")
    found = Trainer(model, loss="mse", optimizer=SGD(0.01))
    x, target = normal(4, 2), normal(4, 2)
    k, u = (torch.tensor(v, requires_grad=True) for v in ([1.0, 2.0], [3.0, 4.0]))
    torch.nn.functional.mse_loss(torch.tensor(x) * k * u, torch.tensor(target)).backward()
    assert k.grad is not None and u.grad is not None
    found.step({"x": x, "c": np.array(True), "target": target})
    trained = training.export(model, found)
    assert trained is not None
    assert [value.name for value in trained.graph.input] == ["x", "c"]
    np.testing.assert_allclose(found.state.parameter("k"), (k - 0.01 * k.grad).detach(), rtol=1e-5)
    np.testing.assert_allclose(found.state.parameter("u"), (u - 0.01 * u.grad).detach(), rtol=1e-5)


# fit


def test_fit_in_all_forms_of_data() -> None:
    batches = [(X[i : i + 8], LABELS[i : i + 8]) for i in range(0, 30, 8)]
    results = [
        trainer().fit(data, epochs=2, batch_size=8, shuffle=False)
        for data in (
            (X, LABELS),
            (X, LABELS.astype(np.uint8)),
            {"labels": LABELS, "x": X},
            batches,
            [{"x": x, "labels": labels} for x, labels in batches],
        )
    ]
    assert [result.steps for result in results] == [8] * 5
    for result in results[1:]:
        assert result.losses == results[0].losses
    # The last batch, which is smaller, is weighted by its size.
    sizes = np.array([8, 8, 8, 6])
    expected = (np.array(results[0].losses[:4]) * sizes).sum() / 30
    assert results[0].history[0].loss == pytest.approx(expected)


def test_the_order_depends_on_the_seed() -> None:
    losses = [trainer(seed=seed).fit((X, LABELS), batch_size=4).losses for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


def test_evaluation_and_metrics() -> None:
    found = trainer()
    _, forward = torch_mlp()
    scores = forward(torch.tensor(X)).detach().numpy()
    loss, accuracy = found.evaluate((X, LABELS), "accuracy", batch_size=7)
    expected = torch.nn.functional.cross_entropy(torch.tensor(scores), torch.tensor(LABELS))
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert accuracy == pytest.approx((scores.argmax(1) == LABELS).mean())
    _, own = found.evaluate((X, LABELS), lambda outputs, labels: len(outputs) + labels.max(), batch_size=7)
    assert own == 32
    target = normal(30, 3)
    _, error = trainer(loss="mse").evaluate((X, target), "mse", batch_size=7)
    assert error == pytest.approx(np.square(scores - target).mean(), rel=1e-5)


def test_early_stop_and_the_text_of_a_result() -> None:
    found = trainer(optimizer=SGD(0.0))
    result = found.fit((X, LABELS), epochs=50, evaluate=(X, LABELS), metric="accuracy", patience=2)
    assert len(result.history) == 3
    assert result.stopped_early
    assert str(result).startswith("3 epochs, 3 steps in ")
    assert str(result).endswith("(stopped early)")
    assert "\n" not in str(result)


def test_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    trainer().fit((X, LABELS), progress=True)
    assert "loss" in stream.getvalue()
    assert "samples/s" in stream.getvalue()
    for quiet in (False, None):
        stream.truncate(0)
        trainer().fit((X, LABELS), progress=quiet)
        assert "loss" not in stream.getvalue()


def test_a_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        trainer().fit((X, LABELS), curve=tmp_path / "curve.png")
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    trainer().fit((X, LABELS), curve=tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_parameters_stay_at_their_address() -> None:
    found = trainer()
    before = {name: found.state.parameter(name).ctypes.data for name in found.state.names}
    found.fit((X, LABELS), epochs=3)
    assert before == {name: found.state.parameter(name).ctypes.data for name in found.state.names}


# Checkpoints


@pytest.mark.parametrize("suffix", [".safetensors", ""])
@pytest.mark.parametrize("every", [1, 3, None])
def test_a_resumed_training_is_the_same_to_the_bit(every: int | None, suffix: str, tmp_path: Path) -> None:
    x, labels = training_process.data()

    def train(path: Path, stop: int | None = None, resume: bool = False) -> training.Result:
        found = Trainer(
            training_process.network(),  # type: ignore[arg-type]
            loss="cross-entropy",
            learning_rate=1e-2,
            schedule="linear",
            warmup=3,
            threads=1,
        )
        if stop is not None:
            updates = found._stepper.updates
            apply = updates.apply

            def interrupted(*arguments: Any) -> None:
                if found.steps == stop:
                    raise KeyboardInterrupt
                apply(*arguments)

            updates.apply = interrupted  # type: ignore[method-assign]
        return found.fit(
            (x, labels), epochs=3, batch_size=40, checkpoint=path, checkpoint_every=every, resume=resume
        )

    whole, path = train(tmp_path / f"whole{suffix}"), tmp_path / f"stopped{suffix}"
    for stop in (2, 9, 16):
        with pytest.raises(KeyboardInterrupt):
            train(path, stop, resume=True)
    resumed = train(path, resume=True)
    assert resumed.steps == whole.steps == 21
    assert resumed.losses == whole.losses
    assert resumed.history == whole.history
    for name, array in arrays_of(whole.trainer).items():
        assert resumed.state.parameter(name).tobytes() == array.tobytes(), name


def test_dropout_is_on() -> None:
    x, labels = training_process.data()
    found = Trainer(
        training_process.network(),  # type: ignore[arg-type]
        loss="cross-entropy",
        optimizer=SGD(0.0),
    )
    assert len({found.step((x, labels)) for _ in range(5)}) == 5
    assert len({found.evaluate((x, labels))[0] for _ in range(3)}) == 1


def saved(tmp_path: Path) -> Path:
    path = tmp_path / "training.safetensors"
    trainer().fit((X, LABELS), checkpoint=path)
    return path


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        trainer().fit((X, LABELS), epochs=2, checkpoint=path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_damaged_and_foreign_checkpoints(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    for data in (whole[:-3], whole[:100], b"", b"PK\x03\x04" * 9):
        path.write_bytes(data)
        with pytest.raises(CheckpointError):
            trainer().fit((X, LABELS), checkpoint=path, resume=True)
        assert path.read_bytes() == data
    checkpoint.save(checkpoint.Checkpoint(trainable=dict(WEIGHTS)), path)
    with pytest.raises(CheckpointError, match="not the checkpoint of a Trainer"):
        trainer().load(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "sgd"}, "optimizer AdamW"),
        ({"seed": 3}, "seed"),
        ({"wrt": "w*"}, "other parameters"),
    ],
)
def test_checkpoints_of_another_training(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    found = trainer(**options)
    before = arrays_of(found)
    with pytest.raises(OrtgradError, match=words):
        found.load(path)
    for name, array in before.items():
        np.testing.assert_array_equal(found.state.parameter(name), array)


def test_a_parameter_of_another_shape(tmp_path: Path) -> None:
    path = saved(tmp_path)
    other = model_of(MLP, {**WEIGHTS, "w2": normal(8, 5), "b2": normal(5)})
    del other.graph.output[0].type.tensor_type.shape.dim[:]
    other.graph.output[0].type.tensor_type.shape.dim.add(dim_param="N")
    other.graph.output[0].type.tensor_type.shape.dim.add(dim_value=5)
    with pytest.raises(TrainingModelError, match=r"float32\[3\].*float32\[5\]"):
        Trainer(other, loss="cross-entropy").load(path)


# Bad input


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((X, LABELS[:-1]), "different lengths"),
        ((X,), "takes 2: x, labels"),
        ({"x": X}, "has no 'labels'"),
        ({"x": X, "labels": LABELS, "z": X}, "has 'z'"),
        ((X.astype(np.float64), LABELS), r"epoch 1, batch 1: input 'x' has the type tensor\(double\)"),
        ((X[:, :2], LABELS), r"the shape \[8, 2\]"),
        ((X, LABELS.astype(np.float32)), "labels"),
        ((X, LABELS + 1), "out of range"),
        ((X, LABELS - 1), "out of range"),
        ((X[:0], LABELS[:0]), "no samples"),
        ([], "no batches"),
        (iter([(X[:8], LABELS[:8])]), "used once"),
        ([(X, LABELS), (X[:, :2], LABELS)], "batch 2"),
    ],
)
def test_data_that_does_not_fit(data: Any, words: str) -> None:
    found = trainer()
    with pytest.raises(TrainingError, match=words):
        found.fit(data, epochs=2, batch_size=8)
    # The next run works.
    found.fit((X, LABELS))


@pytest.mark.parametrize("data", [X, 3, [X]])
def test_data_of_another_kind(data: Any) -> None:
    with pytest.raises(ArgumentTypeError):
        trainer().fit(data)


def test_a_loss_that_is_nan(tmp_path: Path) -> None:
    path = tmp_path / "training.safetensors"
    x = X.copy()
    x[17] = np.nan
    found = trainer()
    with pytest.raises(TrainingError, match=r"the loss is nan in step 5 \(epoch 1, batch 5\)"):
        found.fit((x, LABELS), batch_size=4, shuffle=False, checkpoint=path, checkpoint_every=2)
    assert all(np.isfinite(array).all() for array in arrays_of(found).values())
    good = trainer()
    good.load(path)
    assert good.steps == 4


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"optimizer": "lion"}, TrainingError, "adamw, adam"),
        ({"optimizer": 3}, ArgumentTypeError, "int"),
        ({"learning_rate": -1.0}, TrainingError, "learning_rate"),
        ({"schedule": "step"}, TrainingError, "constant, linear"),
        ({"warmup": -1}, TrainingError, "warmup"),
        ({"clip_norm": 0.0}, TrainingError, "clip_norm"),
        ({"accumulate": 0}, TrainingError, "accumulate"),
        ({"wrt": "layer9.*"}, NameNotFoundError, "layer9"),
        ({"groups": {"layer9.*": {}}}, NameNotFoundError, "layer9"),
        ({"groups": {"w*": {"momentum": 1.0}}}, TrainingError, "momentum"),
        ({"loss": "hinge"}, TrainingError, "hinge"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        trainer(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metric": "accuracy"}, "evaluate="),
        ({"metric": "f1", "evaluate": (X, LABELS)}, "accuracy, mse"),
        ({"resume": True}, "checkpoint"),
        ({"epochs": -1}, "epochs"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_options_of_fit_that_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        trainer().fit((X, LABELS), **options)


@pytest.mark.parametrize("make", [lambda: SGD(nesterov=True), lambda: AdamW(beta1=1.0), lambda: SGD(np.nan)])
def test_settings_of_optimizers_that_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(TrainingError):
        make()


def test_a_model_is_loaded_once_and_opened_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once to find the parameters, and once to build the gradients that the session runs."""
    Trainer(MODELS / "cnn.onnx", loss="cross-entropy")  # imports all modules
    calls: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **keywords)

        return call

    counters = {id(f): counted(f.__name__, f) for f in (load_model, read, OPENING[0])}
    for module in [m for name, m in sys.modules.items() if name.startswith("ortgrad.")]:
        for name, value in list(vars(module).items()):
            if name == "OPENING":
                monkeypatch.setattr(module, name, tuple(counters.get(id(each), each) for each in value))
            elif id(value) in counters:
                monkeypatch.setattr(module, name, counters[id(value)])
    trainer = Trainer(MODELS / "cnn.onnx", loss="cross-entropy", accumulate=2)
    opening = OPENING[0].__name__
    assert calls == {"load_model": 1, "read": 2, opening: 2}
    batch = np.zeros((2, 1, 8, 8), np.float32), np.array([0, 1])
    trainer.step(batch, batch)
    assert calls == {"load_model": 1, "read": 2, opening: 2}
    trainer.evaluate([batch])
    assert calls == {"load_model": 2, "read": 2, opening: 2}
    calls.clear()
    fit(MODELS / "cnn.onnx", batch, loss="cross-entropy")
    assert calls == {"load_model": 1, "read": 2, opening: 2}


def test_a_model_whose_only_output_is_its_loss() -> None:
    model = model_of(
        "(float[N, 3] x) => (float y) { z = Mul(x, w) y = ReduceMean<keepdims=0>(z) }",
        {"w": np.float32([1, 2, 3])},
    )
    found = Trainer(model, loss="y", optimizer="sgd", learning_rate=0.5)
    x = np.ones((4, 3), np.float32)
    assert found.evaluate([(x,)]) == (2.0, None)
    assert found.step((x,)) == 2.0
    assert found.evaluate((x,))[0] == pytest.approx(2 - 0.5 / 3)
