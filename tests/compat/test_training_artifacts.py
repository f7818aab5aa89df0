"""generate_artifacts: files in the layout of onnxruntime-training 1.19.2 that train as PyTorch does."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from support import GOLDEN, assert_close
from support.training import Arrays, normal, parse, torch_losses, trained

import ortgrad
from ortgrad.compat import artifacts as artifacts_module
from ortgrad.compat import versions
from ortgrad.training import checkpoint, onnxblock, weights
from ortgrad.training.api import CheckpointState, Module, Optimizer
from ortgrad.training.artifacts import LossType, OptimType, generate_artifacts

CNN = GOLDEN / "cnn"
CNN_WEIGHTS = ["w1", "b1", "w2", "b2", "w3", "b3", "w4", "b4"]
MODELS = ["training_model", "eval_model", "optimizer_model"]


def load_cnn(folder: Path) -> dict[str, onnx.ModelProto]:
    return {name: onnx.load(folder / f"{name}.onnx") for name in MODELS}


def described(values: Any) -> list[tuple[str, Any]]:
    return [(value.name.split("::")[-2:][0], value.type) for value in values]


def make_cnn(folder: Path, model: Any = CNN / "forward.onnx") -> None:
    generate_artifacts(
        model,
        requires_grad=CNN_WEIGHTS,
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW,
        artifact_directory=folder,
    )


def test_layout_is_that_of_1_19_2(tmp_path: Path) -> None:
    make_cnn(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint",
        *sorted(f"{m}.onnx" for m in MODELS),
    ]
    expected, made = load_cnn(CNN), load_cnn(tmp_path)
    for name in MODELS:
        for kind in ("input", "output"):
            theirs, ours = (described(getattr(models[name].graph, kind)) for models in (expected, made))
            assert theirs == ours
    assert [node.op_type for node in made["eval_model"].graph.node] == [
        node.op_type for node in expected["eval_model"].graph.node
    ]
    assert (
        made["optimizer_model"].graph.node[0].attribute == expected["optimizer_model"].graph.node[0].attribute
    )
    theirs, ours = (checkpoint.load(folder / "checkpoint") for folder in (CNN, tmp_path))
    assert list(ours.trainable) == list(theirs.trainable)
    for key, value in theirs.trainable.items():
        np.testing.assert_array_equal(ours.trainable[key], value)
    assert not ours.frozen and not ours.optimizer and not ours.properties


def test_cnn_trains_as_in_1_19_2(tmp_path: Path) -> None:
    make_cnn(tmp_path)
    expected = np.load(CNN / "expected.npz")
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.01)
    for i, loss in enumerate(expected["losses"]):
        module.train()
        assert float(module(expected[f"step{i}_x"], expected[f"step{i}_labels"])) == pytest.approx(
            loss, rel=1e-5
        )
        optimizer.step()
        module.lazy_reset_grad()
    for name in CNN_WEIGHTS:
        assert_close(state.parameters[name].data, expected[f"param_{name}"], 1e-4)


def test_models_are_portable(tmp_path: Path) -> None:
    """1.19.2 reads opset 21 and IR version 10 at most, and refuses attributes that it does not know."""
    make_cnn(tmp_path)
    for model in load_cnn(tmp_path).values():
        assert model.ir_version <= 10
        assert all(opset.version <= 21 for opset in model.opset_import if not opset.domain)
        for node in model.graph.node:
            assert node.domain in ("", "com.microsoft") or node.domain == "ortgrad.com.microsoft"
            if node.domain == "com.microsoft":
                assert not {a.name for a in node.attribute} & {"ortgrad", "ortgrad_body"}
                assert not any(name.startswith("ortgrad.empty") for name in node.input)
    training = onnx.load(tmp_path / "training_model.onnx")
    functions = {(f.domain, f.name): f for f in training.functions}
    called = [node for node in training.graph.node if node.domain.startswith("ortgrad.")]
    assert {node.op_type.split("_")[0] for node in called} == {"MaxPoolGrad", "AveragePoolGrad"}
    for node in called:
        assert {inner.domain for inner in functions[node.domain, node.op_type].node} == {""}


def test_calls_of_functions_become_gradient_nodes_again(tmp_path: Path) -> None:
    make_cnn(tmp_path)
    ready = ortgrad.prepare(tmp_path / "training_model.onnx", kernels="python")
    nodes = [node for node in ready.graph.node if node.op_type.endswith("PoolGrad")]
    assert [(node.domain, node.op_type) for node in nodes] == [
        ("com.microsoft", "AveragePoolGrad"),
        ("com.microsoft", "MaxPoolGrad"),
    ]
    assert not any(function.domain.startswith("ortgrad.") for function in ready.functions)
    assert all(not opset.domain.startswith("ortgrad.") for opset in ready.opset_import)


def test_training_models_can_be_differentiated_again(tmp_path: Path) -> None:
    make_cnn(tmp_path)
    model = onnx.load(tmp_path / "training_model.onnx")
    expected = np.load(CNN / "expected.npz")
    built = ortgrad.build_gradient_model(model, wrt=["b4"], of=model.graph.output[0].name)
    names = [value.name for value in built.graph.output]
    state = checkpoint.load(tmp_path / "checkpoint").trainable
    feeds = {"x": expected["step0_x"], "labels": expected["step0_labels"], **state}
    feeds |= {f"{k}_grad.accumulation.buffer": np.zeros_like(v) for k, v in state.items()}
    session = ortgrad.InferenceSession(built)
    results = dict(
        zip(names, session.run(names, {**feeds, "lazy_reset_grad": np.array([True])}), strict=True)
    )
    assert_close(results[names[-1]], results["b4_grad.accumulation.buffer.out"], 1e-6)


@pytest.mark.parametrize("kind", ["proto", "bytes", "str", "path"])
def test_kinds_of_models(tmp_path: Path, kind: str) -> None:
    path = CNN / "forward.onnx"
    given: Any = {"proto": onnx.load(path), "bytes": path.read_bytes(), "str": str(path), "path": path}[kind]
    make_cnn(tmp_path, given)
    assert (tmp_path / "checkpoint").stat().st_size > 30000


def test_prefix_folder_and_nominal_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = parse("g (float[N, 3] x) => (float[N, 2] y) { y = MatMul(x, w) }", {"w": normal(3, 2)})
    given: dict[str, Any] = {"requires_grad": ["w"], "loss": LossType.MSELoss, "nominal_checkpoint": True}
    generate_artifacts(model, prefix="my_", **given)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("my_checkpoint", "my_eval_model.onnx", "my_nominal_checkpoint", "my_training_model.onnx")
    ]
    assert checkpoint.load("my_nominal_checkpoint").nominal
    np.testing.assert_array_equal(checkpoint.load("my_checkpoint").trainable["w"], normal(3, 2))
    (tmp_path / "sub").mkdir()
    generate_artifacts(model, artifact_directory=b"sub", **given)
    assert len(list((tmp_path / "sub").iterdir())) == 4


TWO_OUTPUTS = (
    "g (float[N, 3] x, int64[N] t) => (float[N, 4] y, float[N, 4] z) { y = MatMul(x, w) z = Relu(y) }"
)


def names(folder: Path, model: str = "training_model") -> tuple[list[str], list[str]]:
    graph = onnx.load(folder / f"{model}.onnx").graph
    return [value.name for value in graph.input], [value.name for value in graph.output]


def test_inputs_of_losses(tmp_path: Path) -> None:
    model = parse(TWO_OUTPUTS, {"w": normal(3, 4)})
    given: dict[str, Any] = {"requires_grad": ["w"], "artifact_directory": tmp_path}
    # A loss by name takes the first output, and the target is a new input.
    generate_artifacts(model, loss=LossType.CrossEntropyLoss, **given)
    assert names(tmp_path)[0][:4] == ["x", "t", "labels", "w"]
    generate_artifacts(model, loss=LossType.MSELoss, loss_input_names=["z"], **given)
    assert names(tmp_path, "eval_model")[0] == ["x", "t", "target", "w"]
    generate_artifacts(model, loss=LossType.CrossEntropyLoss, loss_input_names=["y", "t"], **given)
    assert names(tmp_path, "eval_model")[0] == ["x", "t", "w"]

    class Both(onnxblock.Block):
        def build(self, *outputs: str) -> Any:
            assert outputs == ("y", "z")
            return onnxblock.loss.MSELoss()(*outputs)

    generate_artifacts(model, loss=Both(), **given)
    assert names(tmp_path, "eval_model")[0] == ["x", "t", "w"]


def test_outputs_of_the_models(tmp_path: Path) -> None:
    model = parse(TWO_OUTPUTS, {"w": normal(3, 4)})
    given: dict[str, Any] = {"requires_grad": ["w"], "artifact_directory": tmp_path, "loss": LossType.MSELoss}
    generate_artifacts(model, additional_output_names=["z", "y"], **given)
    assert names(tmp_path)[1][1:] == ["z", "y", "w_grad.accumulation.out"]
    with pytest.raises(LookupError, match="'missing'"):
        generate_artifacts(model, additional_output_names=["missing"], **given)
    body = "y = MatMul(x, w) loss = ReduceMean<keepdims = 0>(y)"
    text = f"g (float[N, 3] x) => (float loss, float[N, 4] y) {{ {body} }}"
    generate_artifacts(parse(text, {"w": normal(3, 4)}), ["w"], artifact_directory=tmp_path)
    assert names(tmp_path)[1] == ["loss", "y", "w_grad.accumulation.out"]


def test_dropout_of_the_eval_model(tmp_path: Path) -> None:
    """Its training mode is left out, and still has its place: code for 1.19.2 looks at `node.input[2]`."""
    text = """g (float[N, 3] x) => (float[N, 3] y) <float ratio = {0.5}, bool on = {1}> {
        t = MatMul(x, w) y = Dropout(t, ratio, on) }"""
    model = parse(text, {"w": normal(3, 3)})
    generate_artifacts(model, requires_grad=["w"], loss=LossType.MSELoss, artifact_directory=tmp_path)
    found = {}
    for kind in ("training_model", "eval_model"):
        nodes = onnx.load(tmp_path / f"{kind}.onnx").graph.node
        (dropout,) = (node for node in nodes if node.op_type == "Dropout")
        found[kind] = list(dropout.input)[1:]
    assert found == {"training_model": ["ratio", "y/training_mode"], "eval_model": ["ratio", ""]}


def test_names_that_are_taken(tmp_path: Path) -> None:
    text = "g (float[N, 3] x) => (float[N, 4] y) { a = MatMul(x, w) w_grad = Relu(a) y = Add(a, w_grad) }"
    steps = [(normal(4, 3), np.array([0, 1, 2, 3]))]
    losses, state, _ = trained(tmp_path, parse(text, {"w": normal(3, 4)}), ["w"], steps)
    w = {"w": torch.tensor(normal(3, 4), requires_grad=True)}
    assert losses == pytest.approx(torch_losses(w, lambda x: x @ w["w"] + torch.relu(x @ w["w"]), steps))
    assert_close(state.parameters["w"].data, w["w"].detach().numpy(), 1e-6)


def test_all_other_initializers_may_be_frozen(tmp_path: Path) -> None:
    """Sizes, axes and scales among them: the gradients are built with their values."""
    text = """g (float[N, 12] x) => (float[N, 4] y) {
        i = Reshape(x, shape) c = Conv(i, k) u = Resize<mode = "nearest">(c, , scales)
        s = Slice(u, starts, ends, axes) m = Clip(s, low, high)
        r = ReduceMean<keepdims = 0>(m, rest) y = MatMul(r, w) }"""
    constants: Arrays = {
        "shape": np.array([-1, 3, 2, 2]),
        "scales": np.float32([1, 1, 2, 2]),
        "starts": np.array([1]),
        "ends": np.array([4]),
        "axes": np.array([3]),
        "low": np.float32(-0.5),
        "high": np.float32(0.5),
        "rest": np.array([2, 3]),
    }
    values = {**constants, "k": normal(5, 3, 1, 1), "w": normal(5, 4)}
    steps = [(normal(4, 12, seed=i), np.array([0, 1, 2, 3])) for i in range(3)]
    losses, state, _ = trained(
        tmp_path, parse(text, values), ["k", "w"], steps, frozen_params=list(constants)
    )
    p = {name: torch.tensor(values[name], requires_grad=True) for name in ("k", "w")}

    def forward(x: torch.Tensor) -> torch.Tensor:
        c = torch.nn.functional.conv2d(x.reshape(-1, 3, 2, 2), p["k"])
        u = torch.nn.functional.interpolate(c, scale_factor=2)[..., 1:4].clamp(-0.5, 0.5)
        return u.mean((2, 3)) @ p["w"]

    assert losses == pytest.approx(torch_losses(p, forward, steps), rel=1e-5)
    for name, value in p.items():
        assert_close(state.parameters[name].data, value.detach().numpy(), 1e-5)
    assert sorted(checkpoint.load(tmp_path / "checkpoint").frozen) == sorted(constants)


def test_weights_that_are_constants(tmp_path: Path) -> None:
    body = "w = Constant<value = float[2, 2] {1, 2, 3, 4}>() y = MatMul(x, w)"
    text = f"g (float[N, 2] x) => (float[N, 2] y) {{ {body} }}"
    steps = [(normal(4, 2), np.array([0, 1, 1, 0]))]
    losses, state, _ = trained(tmp_path, parse(text), ["w"], steps)
    w = {"w": torch.tensor([[1.0, 2], [3, 4]], requires_grad=True)}
    assert losses == pytest.approx(torch_losses(w, lambda x: x @ w["w"], steps))
    assert_close(state.parameters["w"].data, w["w"].detach().numpy(), 1e-6)


def test_shapes_that_the_file_declares_wrongly(tmp_path: Path) -> None:
    model = parse(
        "g (float[N, 3] x) => (float[N, 4] y) { a = MatMul(x, w) y = Relu(a) }", {"w": normal(3, 4)}
    )
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("a", onnx.TensorProto.FLOAT, [2, 5, 7]))
    steps = [(normal(4, 3), np.array([0, 1, 2, 3]))]
    losses, _, _ = trained(tmp_path, model, ["w"], steps)
    w = {"w": torch.tensor(normal(3, 4), requires_grad=True)}
    assert losses == pytest.approx(torch_losses(w, lambda x: torch.relu(x @ w["w"]), steps))


def test_weights_that_are_inputs_too(tmp_path: Path) -> None:
    text = "g (float[N, 3] x, float[3, 4] w) => (float[N, 4] y) { y = MatMul(x, w) }"
    generate_artifacts(
        parse(text, {"w": normal(3, 4)}), ["w"], loss=LossType.MSELoss, artifact_directory=tmp_path
    )
    assert names(tmp_path, "eval_model")[0] == ["x", "target", "w"]


def test_an_opset_that_is_too_new_for_1_19_2(tmp_path: Path) -> None:
    """It is kept if the operators differ; then only ortgrad trains the model."""
    text = "g (float[N, 3] x) => (float[N, 4] y) { a = MatMul(x, w) y = Swish(a) }"
    steps = [(normal(4, 3), np.array([0, 1, 2, 3]))]
    losses, _, _ = trained(tmp_path, parse(text, {"w": normal(3, 4)}, 24), ["w"], steps)
    w = {"w": torch.tensor(normal(3, 4), requires_grad=True)}
    assert losses == pytest.approx(torch_losses(w, lambda x: torch.nn.functional.silu(x @ w["w"]), steps))
    assert {o.domain: o.version for o in onnx.load(tmp_path / "training_model.onnx").opset_import}[""] == 24
    unchanged = parse("g (float[N, 3] x) => (float[N, 4] y) { a = MatMul(x, w) y = Relu(a) }", opset=24)
    unchanged.ir_version = 11
    versions.limit_versions(unchanged)
    assert (unchanged.ir_version, unchanged.opset_import[0].version) == (10, 21)


@pytest.mark.parametrize("one_file", [True, False])
@pytest.mark.parametrize("limit", [weights.LARGE, 50])
def test_external_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_file: bool, limit: int) -> None:
    """With a low limit, as a model whose weights do not fit into one message."""
    monkeypatch.setattr(weights, "LARGE", limit)
    source = tmp_path / "source"
    source.mkdir()
    values = {"w": normal(3, 4), "v": normal(4, seed=1), "c": normal(4, seed=2)}
    text = "g (float[N, 3] x) => (float[N, 4] y) { a = MatMul(x, w) b = Add(a, v) y = Mul(b, c) }"
    onnx.save(
        parse(text, values),
        source / "model.onnx",
        save_as_external_data=True,
        all_tensors_to_one_file=one_file,
        size_threshold=0,
    )
    before = sorted(source.iterdir())
    given: dict[str, Any] = {
        "loss": LossType.MSELoss,
        "optimizer": OptimType.SGD,
        "artifact_directory": tmp_path,
    }
    generate_artifacts(source / "model.onnx", ["w"], ["v"], **given)
    assert sorted(source.iterdir()) == before
    state = checkpoint.load(tmp_path / "checkpoint")
    np.testing.assert_array_equal(state.trainable["w"], values["w"])
    np.testing.assert_array_equal(state.frozen["v"], values["v"])
    loaded = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", loaded, tmp_path / "eval_model.onnx")
    x, t = normal(5, 3), normal(5, 4)
    expected = (((x @ values["w"] + values["v"]) * values["c"] - t) ** 2).mean()
    for mode in (module.train, module.eval):
        mode()
        assert float(module(x, t)) == pytest.approx(expected, rel=1e-5)


def test_a_model_without_external_data_is_large_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "LARGE", 50)
    make_cnn(tmp_path, onnx.load(CNN / "forward.onnx"))
    theirs, ours = (checkpoint.load(folder / "checkpoint") for folder in (CNN, tmp_path))
    for key, value in theirs.trainable.items():
        np.testing.assert_array_equal(ours.trainable[key], value)


def test_large_weights_have_to_be_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "LARGE", 50)
    with pytest.raises(RuntimeError, match="frozen_params"):
        generate_artifacts(CNN / "forward.onnx", ["w4"], loss=LossType.MSELoss, artifact_directory=tmp_path)


def test_missing_external_data(tmp_path: Path) -> None:
    model = parse("g (float[N, 3] x) => (float[N, 2] y) { y = MatMul(x, w) }", {"w": normal(3, 2)})
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="data", size_threshold=0)
    (tmp_path / "data").unlink()
    with pytest.raises(RuntimeError, match="external data"):
        generate_artifacts(tmp_path / "m.onnx", ["w"], loss=LossType.MSELoss, artifact_directory=tmp_path)


LINEAR = "g (float[N, 3] x) => (float[N, 2] y) { y = MatMul(x, w) }"


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"model": 3}, RuntimeError, "a path"),
        ({"model": "missing.onnx"}, RuntimeError, "missing.onnx"),
        ({"requires_grad": ["missing"]}, RuntimeError, "'missing'"),
        ({"requires_grad": ["y"]}, RuntimeError, "'y'"),
        ({"requires_grad": ["w"], "frozen_params": ["w"]}, RuntimeError, "not both"),
        ({"loss": "mse"}, RuntimeError, "LossType"),
        ({"loss": None}, RuntimeError, "not a scalar"),
        ({"optimizer": "adam"}, TypeError, "OptimType"),
        ({"requires_grad": None, "optimizer": OptimType.SGD}, IndexError, "requires_grad"),
        ({"additional_output_names": "y"}, RuntimeError, "list"),
        ({"additional_output_names": ["missing"]}, LookupError, "'missing'"),
        ({"loss_input_names": ["missing"]}, LookupError, "'missing'"),
        ({"ort_format": True}, RuntimeError, "ORT format"),
        ({"custom_op_library": "missing.so"}, RuntimeError, "missing.so"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_errors(tmp_path: Path, options: dict[str, Any], error: type[Exception], text: str) -> None:
    given: dict[str, Any] = {
        "model": parse(LINEAR, {"w": normal(3, 2)}),
        "requires_grad": ["w"],
        "loss": LossType.MSELoss,
        "artifact_directory": tmp_path,
    }
    with pytest.raises(error, match=text) as caught:
        generate_artifacts(**given | options)
    assert isinstance(caught.value, ortgrad.OrtgradError | FileNotFoundError)
    assert not list(tmp_path.iterdir())
    with onnxblock.empty_base():
        pass


def test_operators_without_gradient_are_all_listed(tmp_path: Path) -> None:
    text = "g (float[N, 3] x) => (float[N, 2] y) { a = MatMul(x, w) b = custom.One(a) y = custom.Two(b) }"
    model = parse(text, {"w": normal(3, 2)})
    model.opset_import.append(onnx.helper.make_opsetid("custom", 1))
    with pytest.raises(RuntimeError, match=r"(?s)One.*Two|Two.*One"):
        generate_artifacts(model, ["w"], loss=LossType.MSELoss, artifact_directory=tmp_path)


def test_a_custom_optimizer(tmp_path: Path) -> None:
    optimizer = onnxblock.optim.AdamW(weight_decay=0.5, clip_grad=onnxblock.optim.ClipGradNorm(2.0))
    model = parse(LINEAR, {"w": normal(3, 2)})
    generate_artifacts(model, ["w"], loss=LossType.MSELoss, optimizer=optimizer, artifact_directory=tmp_path)
    nodes = onnx.load(tmp_path / "optimizer_model.onnx").graph.node
    assert [node.op_type for node in nodes] == ["InplaceClipGradNorm", "AdamWOptimizer"]


def test_the_numbers_of_the_enumerations() -> None:
    assert {loss.name: loss.value for loss in LossType} == {
        "MSELoss": 1,
        "CrossEntropyLoss": 2,
        "BCEWithLogitsLoss": 3,
        "L1Loss": 4,
    }
    assert {optimizer.name: optimizer.value for optimizer in OptimType} == {"AdamW": 1, "SGD": 2}


def test_import_is_quick() -> None:
    """onnx-ir and sympy take most of a second."""
    script = (
        "import json, sys, ortgrad\nfirst = 'ortgrad.training' in sys.modules\n"
        "import ortgrad.training.artifacts, ortgrad.training.onnxblock\n"
        "print(json.dumps([first, 'onnx_ir' in sys.modules, 'sympy' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [False, False, False]


def test_examples() -> None:
    results = doctest.testmod(artifacts_module)
    assert results.attempted and not results.failed
