"""Models of newer versions than onnxruntime takes, as onnx's helper writes them by default."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.reference
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortgrad
from ortgrad import training
from ortgrad.errors import ModelError
from ortgrad.graph import versions
from ortgrad.training import artifacts, lora, onnxblock
from ortgrad.training.api import CheckpointState, Module, Optimizer

X = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
Y = np.arange(6) % 3


def fresh() -> onnx.ModelProto:
    """As onnx's helper makes it today: the newest IR version and the newest opset of onnx."""
    numbers = np.random.default_rng(1)
    weights = {"w": (4, 5), "b": (5,), "head": (5, 3)}
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["h0"]),
            helper.make_node("Add", ["h0", "b"], ["h1"]),
            helper.make_node("Relu", ["h1"], ["h2"]),
            helper.make_node("MatMul", ["h2", "head"], ["y"]),
        ],
        "fresh",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])],
        [
            numpy_helper.from_array(numbers.standard_normal(s).astype(np.float32), n)
            for n, s in weights.items()
        ],
    )
    return helper.make_model(graph)


def built(model: onnx.ModelProto, folder: Path) -> None:
    onnx.save(ortgrad.build_gradient_model(model, wrt=["w", "x"]), folder / "m.onnx")


def prepared(model: onnx.ModelProto, folder: Path) -> None:
    onnx.save(ortgrad.prepare(model), folder / "plain.onnx")
    backward = ortgrad.build_gradient_model(model, wrt=["w", "x"])
    backward.ir_version = model.ir_version
    for kernels in ("python", "onnx"):
        onnx.save(ortgrad.prepare(backward, kernels=kernels), folder / f"{kernels}.onnx")


def with_loss(model: onnx.ModelProto, folder: Path) -> None:
    onnx.save(training.add_loss(model, "cross-entropy"), folder / "m.onnx")


def fitted(model: onnx.ModelProto, folder: Path) -> None:
    result = training.fit(model, (X, Y), loss="cross-entropy", epochs=1)
    result.export(folder / "m.onnx")
    onnx.save(result.model, folder / "result.onnx")


def exported(model: onnx.ModelProto, folder: Path) -> None:
    training.export(model, {"b": np.ones(5, np.float32)}, folder / "m.onnx")


def adapted(model: onnx.ModelProto, folder: Path) -> None:
    with_adapters = lora.add_lora(model, "*", rank=2)
    with_adapters.ir_version = model.ir_version
    onnx.save(lora.add_lora(model, "*", rank=2), folder / "m.onnx")
    onnx.save(lora.merge_lora(with_adapters), folder / "merged.onnx")


def trained_artifacts(model: onnx.ModelProto, folder: Path) -> None:
    artifacts.generate_artifacts(
        model,
        requires_grad=["w", "head"],
        frozen_params=["b"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    module(X, Y)
    optimizer.step()
    module.export_model_for_inferencing(folder / "m.onnx", ["y"])
    # Those with gradient nodes and optimizers need ortgrad.
    for name in ("training_model.onnx", "optimizer_model.onnx"):
        assert onnx.load(folder / name).ir_version <= versions.newest_ir_version()
        (folder / name).unlink()


def blocks(model: onnx.ModelProto, folder: Path) -> None:
    class Squares(onnxblock.TrainingBlock):
        def build(self, name: str) -> str:
            return onnxblock.loss.MSELoss()(name, target_name="target")

    block = Squares()
    block.requires_grad("w")
    with onnxblock.base(model):
        block("y")
    onnx.save(block.to_model_proto()[1], folder / "m.onnx")


WAYS: list[Callable[[onnx.ModelProto, Path], None]] = [
    *(built, prepared, with_loss, fitted, exported, adapted, trained_artifacts, blocks),
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_whatever_is_written_loads(way: Callable[[onnx.ModelProto, Path], None], tmp_path: Path) -> None:
    """In a plain session, which takes no newer versions than it knows."""
    model = fresh()
    before = model.SerializeToString()
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.Fail):
        # Otherwise this test shows nothing: onnxruntime has caught up with onnx.
        plain(model.SerializeToString())
    way(model, tmp_path)
    assert model.SerializeToString() == before
    files = sorted(tmp_path.glob("*.onnx"))
    assert files
    for file in files:
        plain(file)


def plain(model: Path | bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("kind", ["proto", "bytes", "path"])
def test_sessions(kind: str, tmp_path: Path) -> None:
    model = fresh()
    onnx.save(model, tmp_path / "m.onnx")
    given = {"proto": model, "bytes": model.SerializeToString(), "path": tmp_path / "m.onnx"}[kind]
    (y,) = ortgrad.InferenceSession(given).run(None, {"x": X})
    expected = onnx.reference.ReferenceEvaluator(model).run(None, {"x": X})[0]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-6)
    ortgrad.check_gradients(given, wrt=["w"], feeds={"x": X[:2]})  # raises WrongGradientError


def test_command_line(tmp_path: Path) -> None:
    onnx.save(fresh(), tmp_path / "m.onnx")
    for arguments in (["grad", "m.onnx", "-o", "g.onnx"], ["prepare", "g.onnx", "-o", "p.onnx"]):
        run = [sys.executable, "-m", "ortgrad", *arguments]
        subprocess.run(run, cwd=tmp_path, check=True, capture_output=True, env={**os.environ})
    plain(tmp_path / "g.onnx")
    plain(tmp_path / "p.onnx")


def test_functions_and_other_domains() -> None:
    """Each import is lowered on its own."""
    model = fresh()
    newest = onnx.defs.onnx_opset_version()
    imports = [helper.make_opsetid("", newest), helper.make_opsetid("local", 1)]
    double = helper.make_function(
        "local", "Double", ["a"], ["c"], [helper.make_node("Add", ["a", "a"], ["c"])], imports
    )
    model.functions.append(double)
    model.graph.node.append(helper.make_node("Double", ["y"], ["z"], domain="local"))
    model.graph.output[0].name = "z"
    model.opset_import.append(helper.make_opsetid("local", 1))
    (z,) = ortgrad.InferenceSession(model).run(None, {"x": X})
    (y,) = ortgrad.InferenceSession(fresh()).run(None, {"x": X})
    np.testing.assert_allclose(z, 2 * y, rtol=1e-6)


def test_what_only_the_newer_version_has_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model keeps its version, and the error is that of onnxruntime."""
    model = fresh()
    model.ir_version = 14
    cast = helper.make_node("Cast", ["y"], ["z"], to=TensorProto.FLOAT)
    cast.attribute[0].i = 27  # FLOAT6E2M3
    model.graph.node.append(cast)
    assert versions.with_known_versions(model).ir_version == 14
    with pytest.raises(ModelError, match="IR version"):
        ortgrad.InferenceSession(model)
    # An operator that is not the same in the older opset.
    changed = fresh()
    monkeypatch.setattr(versions, "_since", lambda name, opset, domain: opset)
    assert not versions.lower_opsets(changed, "", 20)
    assert changed.opset_import[0].version == fresh().opset_import[0].version


def test_versions_of_the_future_are_kept() -> None:
    """They may have fields that onnxruntime would ignore."""
    model = fresh()
    model.ir_version = 99
    assert versions.with_known_versions(model).ir_version == 99
    with pytest.raises(ModelError, match="IR version"):
        ortgrad.InferenceSession(model)


def test_probed_versions_are_those_of_the_error_messages() -> None:
    """onnxruntime names its newest IR version when it refuses a model."""
    model = fresh()
    model.ir_version = 99
    with pytest.raises(
        onnxruntime.capi.onnxruntime_pybind11_state.Fail,
        match=rf"max supported IR version: {versions.newest_ir_version()}\b",
    ):
        plain(model.SerializeToString())
