"""Operators that behave differently in training and evaluation, and the form of gradient nodes in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support import assert_close
from support.training import normal, parse, torch_losses, trained

from ortgrad.operators.declaration import find_operator
from ortgrad.passes import portable
from ortgrad.training.api import CheckpointState, Module
from ortgrad.training.artifacts import LossType, generate_artifacts

BATCH_NORM = {
    "c": 0.4 * normal(6, 3, 3, 3),
    "scale": 1 + 0.1 * normal(6, seed=1),
    "bias": normal(6, seed=2),
    "mean": 0.1 * normal(6, seed=3),
    "var": 1 + 0.1 * np.abs(normal(6, seed=4)),
    "w": normal(6, 4, seed=5),
}
INFERENCE = "h = BatchNormalization<momentum = 0.8, epsilon = 0.01>(a, scale, bias, mean, var)"
MODE = "momentum = 0.8, epsilon = 0.01, training_mode = 1"
TRAINING = f"h, m2, v2 = BatchNormalization<{MODE}>(a, scale, bias, mean, var)"
FORMS = {
    "inference": (INFERENCE, 18),
    "training": (TRAINING, 18),
    "opset_9": (INFERENCE, 9),
    "opset_14": (TRAINING, 14),
}


def images(count: int) -> list[tuple[np.ndarray, ...]]:
    return [(normal(4, 3, 5, 5, seed=i), np.array([0, 1, 2, 3])) for i in range(count)]


@pytest.mark.parametrize("form", FORMS)
def test_batch_normalization_trains_as_in_pytorch(tmp_path: Path, form: str) -> None:
    node, opset = FORMS[form]
    reduce = "p = GlobalAveragePool(r) f = Flatten(p) y = MatMul(f, w)"
    text = f"g (float[N, 3, 5, 5] x) => (float[N, 4] y) {{ a = Conv(x, c) {node} r = Relu(h) {reduce} }}"
    steps = images(6)
    losses, state, module = trained(
        tmp_path,
        parse(text, BATCH_NORM, opset),
        ["c", "scale", "bias", "w"],
        steps,
        frozen_params=["mean", "var"],
    )
    p = {k: torch.tensor(v.copy(), requires_grad=k not in ("mean", "var")) for k, v in BATCH_NORM.items()}

    def forward(x: torch.Tensor, training: bool = True) -> torch.Tensor:
        a = torch.nn.functional.conv2d(x, p["c"])
        h = torch.nn.functional.batch_norm(a, p["mean"], p["var"], p["scale"], p["bias"], training, 0.2, 0.01)
        return torch.relu(h).mean((2, 3)) @ p["w"]

    expected = torch_losses({k: v for k, v in p.items() if v.requires_grad}, forward, steps)
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, value in p.items():
        assert_close(state.parameters[name].data, value.detach().numpy(), 1e-5)
    module.eval()
    x, t = steps[0]
    wanted = torch.nn.functional.cross_entropy(forward(torch.tensor(x), training=False), torch.tensor(t))
    assert float(module(x, t)) == pytest.approx(wanted.item(), rel=1e-5)


def test_statistics_that_are_not_parameters_stay(tmp_path: Path) -> None:
    node, _ = FORMS["inference"]
    text = f"g (float[N, 6] a) => (float[N, 4] y) {{ {node} y = MatMul(h, w) }}"
    values = {k: v for k, v in BATCH_NORM.items() if k != "c"}
    steps = [(normal(4, 6, seed=i), np.array([0, 1, 2, 3])) for i in range(2)]
    _, state, _ = trained(tmp_path, parse(text, values), ["scale", "bias", "w"], steps)
    assert sorted(name for name, _ in state.parameters) == ["bias", "scale", "w"]
    for model in (tmp_path / "training_model.onnx", tmp_path / "eval_model.onnx"):
        constants = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(model).graph.initializer}
        np.testing.assert_array_equal(constants["mean"], BATCH_NORM["mean"])


def test_a_layer_that_is_applied_twice_updates_its_statistics_twice(tmp_path: Path) -> None:
    node, rest = "BatchNormalization<momentum = 0.8, epsilon = 0.01>", "scale, bias, mean, var"
    rest = f"h = {node}(x, {rest}) r = Relu(h) k = {node}(r, {rest}) y = MatMul(k, w)"
    values = {k: v for k, v in BATCH_NORM.items() if k != "c"}
    steps = [(normal(4, 6, seed=i), np.array([0, 1, 2, 3])) for i in range(4)]
    model = parse(f"g (float[N, 6] x) => (float[N, 4] y) {{ {rest} }}", values)
    losses, state, _ = trained(tmp_path, model, ["scale", "bias", "w"], steps, frozen_params=["mean", "var"])
    p = {k: torch.tensor(v.copy(), requires_grad=k not in ("mean", "var")) for k, v in values.items()}

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.batch_norm(x, p["mean"], p["var"], p["scale"], p["bias"], True, 0.2, 0.01)

    weighted = {k: v for k, v in p.items() if v.requires_grad}
    expected = torch_losses(weighted, lambda x: layer(torch.relu(layer(x))) @ p["w"], steps)
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, value in p.items():
        assert_close(state.parameters[name].data, value.detach().numpy(), 1e-5)


@pytest.mark.parametrize("outputs", ["float[N, 4] y", "float[N, 4] y, float[6] m2"])
def test_eval_model_of_batch_normalization_with_three_outputs(tmp_path: Path, outputs: str) -> None:
    text = f"g (float[N, 6] a) => ({outputs}) {{ {TRAINING} y = MatMul(h, w) }}"
    values = {k: v for k, v in BATCH_NORM.items() if k != "c"}
    extra = ["m2"] if "m2" in outputs else None
    options: dict[str, Any] = {"loss": LossType.CrossEntropyLoss, "additional_output_names": extra}
    generate_artifacts(parse(text, values), ["w"], ["mean", "var"], artifact_directory=tmp_path, **options)
    model = onnx.load(tmp_path / "eval_model.onnx")
    onnx.checker.check_model(model, full_check=True)
    (node,) = (node for node in model.graph.node if node.op_type == "BatchNormalization")
    assert len(node.output) == 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {
        "a": normal(4, 6),
        "labels": np.array([0, 1, 2, 3]),
        **{k: values[k] for k in ("w", "mean", "var")},
    }
    results = session.run(None, feeds)
    if extra:
        np.testing.assert_array_equal(results[1], values["mean"])


def test_layers_in_functions(tmp_path: Path) -> None:
    function = """
        <opset_import: ["": 18], domain: "local"> layer (a, scale, bias, mean, var) => (h) {
            b, m2, v2 = BatchNormalization<momentum = 0.8, training_mode = 1>(a, scale, bias, mean, var)
            t = Constant<value = bool {1}>() r = Constant<value = float {0.0}>() h = Dropout(b, r, t) }"""
    graph = (
        "g (float[N, 6] x) => (float[N, 4] y) { h = local.layer(x, scale, bias, mean, var) y = MatMul(h, w) }"
    )
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18, "local": 1]> {graph} {function}')
    values = {k: v for k, v in BATCH_NORM.items() if k != "c"}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in values.items())
    steps = [(normal(4, 6, seed=i), np.array([0, 1, 2, 3])) for i in range(3)]
    losses, state, module = trained(
        tmp_path, model, ["w", "scale"], steps, frozen_params=["bias", "mean", "var"]
    )
    p = {k: torch.tensor(v.copy(), requires_grad=k in ("w", "scale")) for k, v in values.items()}

    def forward(x: torch.Tensor, training: bool = True) -> torch.Tensor:
        h = torch.nn.functional.batch_norm(x, p["mean"], p["var"], p["scale"], p["bias"], training, 0.2)
        return h @ p["w"]

    assert losses == pytest.approx(torch_losses({k: p[k] for k in ("w", "scale")}, forward, steps), rel=1e-5)
    for name, value in p.items():
        assert_close(state.parameters[name].data, value.detach().numpy(), 1e-5)
    module.eval()
    x, t = steps[0]
    expected = torch.nn.functional.cross_entropy(forward(torch.tensor(x), training=False), torch.tensor(t))
    assert float(module(x, t)) == pytest.approx(expected.item(), rel=1e-5)


DROPOUTS = {
    "trained": ("a = MatMul(x, w) d = Dropout(a) y = Identity(d)", 18, 0.5),
    "not_on_the_way_of_gradients": ("a = Relu(x) d = Dropout(a) y = MatMul(d, w)", 18, 0.5),
    "inference_mode": (
        "t = Constant<value = bool {0}>() r = Constant<value = float {0.25}>()"
        "a = MatMul(x, w) d, m = Dropout(a, r, t) y = Identity(d)",
        18,
        0.25,
    ),
    "training_mode": (
        "t = Constant<value = bool {1}>() r = Constant<value = float {0.25}>()"
        "a = MatMul(x, w) d = Dropout(a, r, t) y = Identity(d)",
        13,
        0.25,
    ),
    "opset_10": ("a = MatMul(x, w) d = Dropout<ratio = 0.25>(a) y = Identity(d)", 10, 0.25),
}


@pytest.mark.parametrize("case", DROPOUTS)
def test_dropout_is_on_in_training_only(tmp_path: Path, case: str) -> None:
    body, opset, ratio = DROPOUTS[case]
    model = parse(f"g (float[N, 20] x) => (float[N, 20] y) {{ {body} }}", {"w": np.eye(20, dtype="f")}, opset)
    generate_artifacts(
        model, ["w"], loss=LossType.MSELoss, additional_output_names=["y"], artifact_directory=tmp_path
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    x = np.ones((200, 20), np.float32)
    module.train()
    _, y = module(x, np.zeros_like(x))
    assert np.unique(y) == pytest.approx([0, 1 / (1 - ratio)])
    assert (y == 0).mean() == pytest.approx(ratio, abs=0.05)
    # The gradient of the mean of y^2 has the mask of y.
    grad = state.parameters["w"].grad
    assert grad is not None
    assert_close(
        np.asarray(grad), 2 / y.size * np.asarray(y.T @ y if "not" in case else x.T @ (y * y.max())), 1e-4
    )
    module.eval()
    np.testing.assert_array_equal(module(x, np.zeros_like(x))[1], x)


def test_a_dropout_mode_that_is_an_input_stays_one(tmp_path: Path) -> None:
    text = "g (float[N, 3] x, bool t) => (float[N, 2] y) { a = MatMul(x, w) y = Dropout(a, , t) }"
    generate_artifacts(
        parse(text, {"w": normal(3, 2)}), ["w"], loss=LossType.MSELoss, artifact_directory=tmp_path
    )
    training = onnx.load(tmp_path / "training_model.onnx")
    (node,) = (node for node in training.graph.node if node.op_type == "Dropout")
    assert node.input[2] == "t"


# The attributes in the schemas of onnxruntime-training 1.19.2, which refuses others.
KNOWN_ATTRIBUTES = {
    "BatchNormalizationGrad": ["epsilon"],
    "BiasGeluGrad_dX": [],
    "ConvGrad": ["auto_pad", "dilations", "group", "kernel_shape", "pads", "strides"],
    "DropoutGrad": [],
    "FastGeluGrad": [],
    "GatherElementsGrad": ["axis"],
    "GatherGrad": ["axis"],
    "GatherNDGrad": ["batch_dims"],
    "GeluGrad": [],
    "LayerNormalizationGrad": ["axis"],
    "LeakyReluGrad": ["alpha"],
    "LogSoftmaxGrad_13": ["axis"],
    "QuickGeluGrad": ["alpha"],
    "ReluGrad": [],
    "SigmoidGrad": [],
    "SimplifiedLayerNormalizationGrad": ["axis"],
    "SoftmaxCrossEntropyLossGrad": ["ignore_index", "reduction"],
    "SoftmaxGrad_13": ["axis"],
    "TanhGrad": [],
}


def test_nodes_that_1_19_2_knows_have_its_attributes() -> None:
    assert KNOWN_ATTRIBUTES.keys() == portable._KNOWN
    for name, attributes in KNOWN_ATTRIBUTES.items():
        operator = find_operator(name)
        assert operator is not None
        assert sorted(operator.attributes) == attributes


@pytest.mark.parametrize(
    ("body", "known"),
    [
        ('y = Conv<auto_pad = "SAME_LOWER", strides = [2, 2]>(x, w)', False),
        ("y = Conv<pads = [1, 1, 1, 1]>(x, w)", True),
    ],
)
@pytest.mark.parametrize("kind", ["float", "double"])
def test_which_nodes_call_functions(tmp_path: Path, body: str, known: bool, kind: str) -> None:
    """1.19.2 has no kernels for double precision, and computes the gradients with auto_pad wrongly."""
    text = f"g ({kind}[N, 3, 8, 8] x) => ({kind}[N, 4, H, W] y) {{ {body} }}"
    w = normal(4, 3, 3, 3).astype(np.float32 if kind == "float" else np.float64)
    generate_artifacts(parse(text, {"w": w}), ["w"], loss=LossType.MSELoss, artifact_directory=tmp_path)
    (node,) = (n for n in onnx.load(tmp_path / "training_model.onnx").graph.node if "ConvGrad" in n.op_type)
    expected = "com.microsoft" if known and kind == "float" else "ortgrad.com.microsoft"
    assert node.domain == expected


def test_a_kernel_of_unknown_size(tmp_path: Path) -> None:
    text = """g (float[N, 3, 8, 8] x, float[5, 3, K, L] k) => (float[N, 4] y) {
        a = Mul(x, s) c = Conv(a, k) p = GlobalAveragePool(c) f = Flatten(p) y = MatMul(f, w) }"""
    values = {"s": normal(3, 1, 1), "w": normal(5, 4)}
    x, k, t = normal(2, 3, 8, 8), normal(5, 3, 3, 2), np.array([1, 3])
    losses, state, _ = trained(tmp_path, parse(text, values), ["s", "w"], [(x, k, t)])
    p = {name: torch.tensor(value, requires_grad=True) for name, value in values.items()}

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(x * p["s"], torch.tensor(k)).mean((2, 3)) @ p["w"]

    assert losses == pytest.approx(torch_losses(p, forward, [(x, t)]), rel=1e-5)
    for name, value in p.items():
        assert_close(state.parameters[name].data, value.detach().numpy(), 1e-5)
