"""Batch normalizations none of whose parameters is trained stay as they are; against PyTorch's `.eval()`."""

from __future__ import annotations

import io
import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from ortgrad.errors import TrainingError
from ortgrad.training import SGD, Trainer

X = np.random.default_rng(0).standard_normal((24, 4)).astype(np.float32) * 3 + 1
LABELS = np.random.default_rng(1).integers(0, 3, 24)


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = torch.nn
    made = layers.Sequential(
        layers.Linear(4, 6),
        layers.BatchNorm1d(6),
        layers.ReLU(),
        layers.Linear(6, 5),
        layers.BatchNorm1d(5),
        layers.ReLU(),
        layers.Linear(5, 3),
    )
    # Exporters merge the equal vectors of fresh layers.
    with torch.no_grad():
        for place in (1, 4):
            for tensor in made[place].state_dict().values():
                if tensor.is_floating_point():
                    tensor.uniform_(0.5, 1.5)
    return made


def exported(mode: str) -> onnx.ModelProto:
    file = io.BytesIO()
    net = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net.train() if mode == "training" else net.eval(),
            (torch.from_numpy(X),),
            file,
            dynamo=False,
            training=torch.onnx.TrainingMode.TRAINING if mode == "training" else torch.onnx.TrainingMode.EVAL,
            do_constant_folding=False,
            keep_initializers_as_inputs=False,
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "N"}, "y": {0: "N"}},
        )
    return onnx.load_from_string(file.getvalue())


# What is trained, and the normalizations that PyTorch has in training mode, by `statistics`.
CASES = {
    "head": (["6.*"], {"trained": [], "all": [1, 4], "none": []}),
    "end": (["3.*", "4.*", "6.*"], {"trained": [4], "all": [1, 4], "none": []}),
    "bias_only": (["1.bias", "6.*"], {"trained": [1], "all": [1, 4], "none": []}),
    "all": (None, {"trained": [1, 4], "all": [1, 4], "none": []}),
}


@pytest.mark.parametrize(
    ("name", "statistics", "mode"),
    [
        *((name, "trained", mode) for name in CASES for mode in ("training", "inference")),
        ("head", "all", "training"),
        ("head", "none", "training"),
        ("all", "none", "inference"),
    ],
)
def test_layers_are_in_the_modes_of_pytorch(name: str, statistics: str, mode: str) -> None:
    wrt, active = CASES[name]
    rival = network().train()
    for place in (1, 4):
        rival[place].train(place in active[statistics])
    model = exported(mode)
    before = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    # The exporter has run the network, which has changed its statistics.
    rival.load_state_dict({**rival.state_dict(), **{k: torch.tensor(v) for k, v in before.items()}})
    found = Trainer(
        model, loss="cross-entropy", optimizer=SGD(0.1), wrt=wrt, statistics=statistics, threads=1
    )
    chosen = [p for n, p in rival.named_parameters() if n in found.state.trainable.arrays]
    optimizer = torch.optim.SGD(chosen, 0.1)
    for step in range(4):
        x, labels = X[step * 6 : step * 6 + 6], LABELS[step * 6 : step * 6 + 6]
        loss = torch.nn.functional.cross_entropy(rival(torch.tensor(x)), torch.tensor(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert found.step((x, labels)) == pytest.approx(loss.item(), rel=1e-4)
    trained = found.export()
    assert trained is not None
    values = {t.name: numpy_helper.to_array(t) for t in trained.graph.initializer}
    for key, tensor in rival.state_dict().items():
        if not key.endswith("num_batches_tracked"):
            np.testing.assert_allclose(values[key], tensor.numpy(), rtol=1e-3, atol=1e-5, err_msg=key)
    # Layers that were not trained have the very same numbers.
    for place in {1, 4} - set(active[statistics]):
        for key in ("running_mean", "running_var"):
            np.testing.assert_array_equal(values[f"{place}.{key}"], before[f"{place}.{key}"])
    # What training has seen is what inference will see.
    expected = torch.nn.functional.cross_entropy(rival.eval()(torch.tensor(X)), torch.tensor(LABELS))
    assert found.evaluate((X, LABELS))[0] == pytest.approx(expected.item(), rel=1e-4)


def statistics_of(found: Trainer) -> set[str]:
    return {name for name in found.state.names if name not in found.state.trainable.arrays}


def test_normalizations_without_parameters() -> None:
    """They are trained if a layer before them is, or if everything is."""
    text = """<ir_version: 8, opset_import: ["": 18]> g (float[N, 3] x) => (float[N, 2] y)
    <float[3] m = {0, 0, 0}, float[3] v = {1, 1, 1}, float[2] m2 = {0, 0}, float[2] v2 = {1, 1},
     float[3, 2] w = {1, 2, 3, 4, 5, 6}, float[2, 2] head = {1, 2, 3, 4}> {
        one = ConstantOfShape<value = float[1] {1}>(three) zero = ConstantOfShape(three)
        one2 = ConstantOfShape<value = float[1] {1}>(two) zero2 = ConstantOfShape(two)
        a = BatchNormalization(x, one, zero, m, v) b = MatMul(a, w)
        c = BatchNormalization(b, one2, zero2, m2, v2) y = MatMul(c, head) }"""
    model = onnx.parser.parse_model(text)
    tensors = (numpy_helper.from_array(np.array([n]), k) for k, n in (("three", 3), ("two", 2)))
    model.graph.initializer.extend(tensors)
    for wrt, expected in ((None, {"m", "v", "m2", "v2"}), (["head"], set()), (["w"], {"m2", "v2"})):
        assert statistics_of(Trainer(model, loss="mse", wrt=wrt)) == expected
    assert statistics_of(Trainer(model, loss="mse", wrt="head", statistics="all")) == {"m", "v", "m2", "v2"}


def test_an_unknown_choice() -> None:
    with pytest.raises(TrainingError, match="trained, all, none"):
        Trainer(exported("inference"), loss="cross-entropy", statistics="frozen")
