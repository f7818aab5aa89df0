"""What is handed out for inference is in inference mode, whatever the exporter wrote, in every way."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from ortgrad import training
from ortgrad.cli import main
from ortgrad.graph.protos import all_nodes
from ortgrad.training import SGD, Trainer, artifacts
from ortgrad.training.api import CheckpointState, Module, Optimizer
from ortgrad.training.lora import add_lora, load_lora, lora_parameters, merge_lora, save_lora

X = np.random.default_rng(0).standard_normal((32, 1, 6, 6)).astype(np.float32) * 2 + 1
LABELS = np.random.default_rng(1).integers(0, 3, 32)
NAMES = ["0.weight", "1.weight", "1.bias", "5.weight", "5.bias"]
STATISTICS = ["1.running_mean", "1.running_var"]


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = torch.nn
    return layers.Sequential(
        layers.Conv2d(1, 4, 3, bias=False),
        layers.BatchNorm2d(4),
        layers.ReLU(),
        layers.Dropout(0.5),
        layers.Flatten(),
        layers.Linear(64, 3),
    )


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    """Return the network as PyTorch exports it for training."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network().train(),
            (torch.from_numpy(X[:2]),),
            file,
            dynamo=False,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "N"}, "y": {0: "N"}},
        )
    exported = onnx.load_from_string(file.getvalue())
    modes = [a.i for n in exported.graph.node for a in n.attribute if a.name == "training_mode"]
    assert modes == [1]
    return exported


def check(trained: onnx.ModelProto, state: dict[str, np.ndarray]) -> None:
    """Compare a model in plain onnxruntime with PyTorch's `.eval()`, at two batch sizes."""
    rival = network()
    missing = rival.load_state_dict({k: torch.tensor(v) for k, v in state.items()}, strict=False)
    assert not missing.unexpected_keys
    assert [key for key in missing.missing_keys if not key.endswith("tracked")] == []
    with torch.no_grad():
        expected = rival.eval()(torch.from_numpy(X)).numpy()
    session = onnxruntime.InferenceSession(trained.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(["y"], {"x": X})[0], expected, rtol=1e-4, atol=1e-4)
    ones = [session.run(["y"], {"x": X[i : i + 1]})[0] for i in range(3)]
    np.testing.assert_allclose(np.concatenate(ones), expected[:3], rtol=1e-4, atol=1e-4)
    for node in all_nodes(trained.graph.node):
        assert node.op_type != "BatchNormalization" or len(node.output) == 1
        assert node.op_type != "Dropout" or not any(node.input[2:])


def trained(model: onnx.ModelProto) -> Trainer:
    found = Trainer(model, loss="cross-entropy", optimizer=SGD(0.05), threads=1)
    found.fit((X, LABELS), epochs=3, batch_size=8)
    return found


def state_of(found: Trainer) -> dict[str, np.ndarray]:
    return {name: found.state.parameter(name).copy() for name in found.state.names}


def _result(model: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    result = training.fit(model, (X, LABELS), loss="cross-entropy", batch_size=8)
    result.export(folder / "trained.onnx")
    return onnx.load(folder / "trained.onnx"), state_of(result.trainer)


def _result_in_memory(model: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    result = training.fit(model, (X, LABELS), loss="cross-entropy", batch_size=8)
    return result.model, state_of(result.trainer)


def _trainer(model: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    found = trained(model)
    made = found.export()
    assert made is not None
    return made, state_of(found)


def _checkpoint(model: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    found = trained(model)
    found.save(folder / "state")
    made = training.export(model, folder / "state")
    assert made is not None
    return made, state_of(found)


def _command_line(model: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    onnx.save(model, folder / "model.onnx")
    np.savez(folder / "data.npz", x=X, labels=LABELS)
    files = [str(folder / name) for name in ("model.onnx", "trained.onnx", "data.npz")]
    assert main(["train", files[0], "-o", files[1], "--data", files[2], "--loss", "cross-entropy"]) == 0
    made = onnx.load(files[1])
    return made, {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}


def _artifacts(model: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    artifacts.generate_artifacts(
        model,
        requires_grad=NAMES,
        frozen_params=STATISTICS,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    module(X, LABELS)
    optimizer.step()
    module.export_model_for_inferencing(folder / "trained.onnx", ["y"])
    arrays = {name: state.parameters[name].data.copy() for name in (*NAMES, *STATISTICS)}
    return onnx.load(folder / "trained.onnx"), arrays


def _a_training_model_for_evaluation(
    model: onnx.ModelProto, folder: Path
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    _, arrays = _artifacts(model, folder)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    # An evaluation model that somebody else wrote, in training mode.
    evaluation = onnx.load(folder / "eval_model.onnx")
    for node in evaluation.graph.node:
        if node.op_type == "BatchNormalization":
            next(a for a in node.attribute if a.name == "training_mode").i = 1
            node.output.extend(["mean_after", "var_after"])
    onnx.save(evaluation, folder / "eval_model.onnx")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    module.export_model_for_inferencing(folder / "trained.onnx", ["y"])
    return onnx.load(folder / "trained.onnx"), {n: state.parameters[n].data.copy() for n in arrays}


def _merged_adapters(model: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    adapted = add_lora(model, ["0.weight", "5.weight"], rank=2)
    found = Trainer(adapted, loss="cross-entropy", wrt=lora_parameters(adapted), threads=1)
    found.fit((X, LABELS), batch_size=8)
    save_lora(found, folder / "adapters.safetensors", model=adapted)
    made = merge_lora(load_lora(model, folder / "adapters.safetensors"))
    return made, {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}


WAYS: list[Callable[[onnx.ModelProto, Path], tuple[onnx.ModelProto, dict[str, np.ndarray]]]] = [
    _result,
    _result_in_memory,
    _trainer,
    _checkpoint,
    _command_line,
    _artifacts,
    _a_training_model_for_evaluation,
    _merged_adapters,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.strip("_"))
def test_every_way_writes_inference_mode(way: object, model: onnx.ModelProto, tmp_path: Path) -> None:
    assert callable(way)
    check(*way(model, tmp_path))


def test_an_exported_model_can_be_trained_further(model: onnx.ModelProto) -> None:
    """Training switches the modes on again, so that nothing is lost by the export."""
    first = training.export(model, {})
    assert first is not None
    losses = [
        training.fit(each, (X, LABELS), loss="cross-entropy", batch_size=8, seed=3).losses
        for each in (model, first)
    ]
    assert losses[0] == losses[1]


# Places and opsets

VECTORS = "<float[3] s = {1, 2, 3}, float[3] b = {4, 5, 6}, float[3] m = {1, 0, -1}, float[3] v = {4, 1, 2}>"
NORM = "BatchNormalization<training_mode = 1>"
GRAPHS = {
    "main": (18, f"{{ y, m2, v2 = {NORM}(x, s, b, m, v) }}"),
    "statistics_are_read": (18, f"{{ t, m2, v2 = {NORM}(x, s, b, m, v) u = Sub(m2, m) y = Add(t, u) }}"),
    "if": (
        18,
        f"""{{ c = Constant<value = bool {{1}}>()
        y = If(c) <then_branch = p () => (float[N, 3] r) {{ r, m2, v2 = {NORM}(x, s, b, m, v) }},
                   else_branch = q () => (float[N, 3] r2) {{ r2 = Neg(x) }}> }}""",
    ),
    "nested": (
        18,
        f"""{{ c = Constant<value = bool {{1}}>()
        t, m2, v2 = {NORM}(x, s, b, m, v)
        y = If(c) <then_branch = p () => (float[N, 3] r) {{
            d = Not(c)
            r = If(c) <then_branch = pp () => (float[N, 3] rr) {{ rr, m3, v3 = {NORM}(x, s, b, m, v) }},
                       else_branch = qq () => (float[N, 3] ss) {{ ss = Identity(t) }}> }},
                   else_branch = q () => (float[N, 3] r2) {{ k = Add(m2, v2) r2 = Add(x, k) }}> }}""",
    ),
    "loop": (
        18,
        f"""{{ n = Constant<value = int64 {{1}}>() c = Constant<value = bool {{1}}>()
        y = Loop(n, c, x) <body = p (int64 i, bool ci, float[N, 3] state) => (bool co, float[N, 3] next) {{
            co = Identity(ci) next, m2, v2 = {NORM}(state, s, b, m, v) }}> }}""",
    ),
    "dropout": (18, f"{{ on = Constant<value = bool {{1}}>() h = Constant<value = float {{0.9}}>()"
        f" t, m2, v2 = {NORM}(x, s, b, m, v) y, mask = Dropout(t, h, on) }}"),
    "opset_9": (9, "{ y, m2, v2, m3, v3 = BatchNormalization(x, s, b, m, v) }"),
}  # fmt: skip


def expected_of(x: np.ndarray) -> np.ndarray:
    s, b, m, v = (np.float32(a) for a in ([1, 2, 3], [4, 5, 6], [1, 0, -1], [4, 1, 2]))
    return (x - m) / np.sqrt(v + 1e-5) * s + b


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(["y"], {"x": x})[0]
    return result


@pytest.mark.parametrize("name", GRAPHS)
def test_places_and_opsets(name: str) -> None:
    opset, text = GRAPHS[name]
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> g (float[N, 3] x) => (float[N, 3] y) {VECTORS} {text}'
    )
    made = training.export(model, {})
    assert made is not None
    x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    np.testing.assert_allclose(run(made, x), expected_of(x), rtol=1e-5)


def test_functions() -> None:
    text = f"""<ir_version: 10, opset_import: ["": 18, "own": 1]>
    g (float[N, 3] x) => (float[N, 3] y) {VECTORS} {{ y = own.Layer<mode = 1>(x, s, b, m, v) }}
    <opset_import: ["": 18], domain: "own"> Layer <mode: int = 1> (x, s, b, m, v) => (y) {{
        t, m2, v2 = BatchNormalization<training_mode: int = @mode>(x, s, b, m, v)
        h = Constant<value = float {{0.9}}>() on = Constant<value = bool {{1}}>() y = Dropout(t, h, on)
    }}"""
    made = training.export(onnx.parser.parse_model(text), {})
    assert made is not None
    x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    np.testing.assert_allclose(run(made, x), expected_of(x), rtol=1e-5)


def test_old_attributes() -> None:
    """Before opset 7 there is an attribute for the mode; onnxruntime does not run these any more."""
    text = f"""<ir_version: 3, opset_import: ["": 6]> g (float[N, 3] x, float[3] s, float[3] b, float[3] m,
    float[3] v) => (float[N, 3] y) {VECTORS} {{ t = BatchNormalization(x, s, b, m, v) y = Dropout(t) }}"""
    made = training.export(onnx.parser.parse_model(text), {})
    assert made is not None
    assert [[a.i for a in n.attribute if a.name == "is_test"] for n in made.graph.node] == [[1], [1]]


def test_a_mode_that_is_an_input_stays_one() -> None:
    text = """<ir_version: 8, opset_import: ["": 18]> g (float[N] x, bool on) => (float[N] y)
    <float h = {0.9}> { y = Dropout(x, h, on) }"""
    made = training.export(onnx.parser.parse_model(text), {})
    assert made is not None
    assert list(made.graph.node[0].input) == ["x", "h", "on"]
