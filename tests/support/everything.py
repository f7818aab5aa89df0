"""Everything that makes or runs a model, as functions that need a folder and return what came out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

import ortgrad
from ortgrad import cli, training
from ortgrad.training import lora, onnxblock
from ortgrad.training.api import CheckpointState, Module, Optimizer
from ortgrad.training.artifacts import LossType, OptimType, generate_artifacts
from support import FASTEST

WEIGHTS = ["w1", "b1", "w2", "b2"]
MLP = """<ir_version: 8, opset_import: ["": 18]>
mlp (float[N, 16] x) => (float[N, 3] y) { a = Gemm(x, w1, b1) h = Tanh(a) y = Gemm(h, w2, b2) }"""

Outcome = dict[str, object]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def mlp() -> onnx.ModelProto:
    model: onnx.ModelProto = onnx.parser.parse_model(MLP)
    arrays = zip(WEIGHTS, (normal(16, 32), normal(32), normal(32, 3), normal(3)), strict=True)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays)
    return model


def inputs() -> tuple[np.ndarray, np.ndarray]:
    """Samples and labels of the model."""
    return normal(8, 16), np.arange(8) % 3


def contents(model: onnx.ModelProto) -> Outcome:
    return {"model": model.SerializeToString(deterministic=True)}


def built(_: Path) -> Outcome:
    return contents(ortgrad.build_gradient_model(mlp()))


def built_twice(_: Path) -> Outcome:
    return contents(ortgrad.build_gradient_model(ortgrad.build_gradient_model(mlp()), wrt=WEIGHTS[0]))


def prepared(_: Path) -> Outcome:
    model = ortgrad.build_gradient_model(mlp())
    return contents(ortgrad.prepare(model, kernels="onnx"))


def run(kernels: str) -> Callable[[Path], Outcome]:
    def work(_: Path) -> Outcome:
        session = ortgrad.InferenceSession(ortgrad.build_gradient_model(mlp()), kernels=kernels)
        return results(session)

    return work


def results(session: onnxruntime.InferenceSession) -> Outcome:
    names = [output.name for output in session.get_outputs()]
    feeds = {
        value.name: normal(*(8 if isinstance(size, str) else size for size in value.shape))
        for value in session.get_inputs()
    }
    return dict(zip(names, session.run(names, feeds), strict=True))


def registered(_: Path) -> Outcome:
    options = onnxruntime.SessionOptions()
    ortgrad.register(options)
    model = ortgrad.prepare(ortgrad.build_gradient_model(mlp()))
    return results(onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"]))


def checked(_: Path) -> Outcome:
    return {"check": str(ortgrad.check_gradients(mlp()))}


def with_loss(_: Path) -> Outcome:
    return contents(training.add_loss(mlp(), "cross-entropy"))


def trained(_: Path) -> Outcome:
    trainer = training.Trainer(mlp(), loss="cross-entropy", threads=1)
    x, labels = inputs()
    losses = [trainer.step((x, labels)) for _ in range(3)]
    return {"losses": losses, **{name: trainer.state.parameter(name).copy() for name in trainer.state.names}}


def fitted(folder: Path) -> Outcome:
    result = training.fit(mlp(), inputs(), loss="cross-entropy", batch_size=4, threads=1, progress=False)
    result.export(folder / "trained.onnx")
    return files(folder)


def with_adapters(_: Path) -> Outcome:
    return contents(lora.merge_lora(lora.add_lora(mlp(), WEIGHTS[0], rank=2, seed=0)))


def artifacts(folder: Path) -> Outcome:
    generate_artifacts(
        mlp(), WEIGHTS, loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW, artifact_directory=folder
    )
    return files(folder)


def blocks(_: Path) -> Outcome:
    class Penalized(onnxblock.TrainingBlock):
        def build(self, output: str) -> str:
            loss = onnxblock.loss.CrossEntropyLoss()(output)
            penalty = onnxblock.blocks.ReduceMean()(onnxblock.blocks.Abs()(output))
            return onnxblock.blocks.Add()(loss, penalty)

    model = mlp()
    block = Penalized()
    for name in WEIGHTS:
        block.requires_grad(name)
    with onnxblock.base(model):
        block("y")
        training_model, eval_model = block.to_model_proto()
    return {"training": contents(training_model), "eval": contents(eval_model)}


def stepped(folder: Path) -> Outcome:
    artifacts(folder)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    x, labels = inputs()
    losses = []
    for _ in range(3):
        module.train()
        losses.append(float(module(x, labels)))
        optimizer.step()
        module.lazy_reset_grad()
    module.export_model_for_inferencing(folder / "inference.onnx", ["y"])
    return {"losses": losses, "exported": (folder / "inference.onnx").read_bytes()}


def by_command(folder: Path) -> Outcome:
    onnx.save(mlp(), folder / "mlp.onnx")
    assert cli.main(["grad", str(folder / "mlp.onnx"), "-o", str(folder / "gradient.onnx")]) == 0
    return files(folder)


def files(folder: Path) -> Outcome:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


WORK: dict[str, Callable[[Path], Outcome]] = {
    "build": built,
    "build twice": built_twice,
    "prepare": prepared,
    **{kernels: run(kernels) for kernels in dict.fromkeys(("python", "onnx", "auto", FASTEST))},
    "register": registered,
    "check": checked,
    "add_loss": with_loss,
    "Trainer": trained,
    "fit": fitted,
    "lora": with_adapters,
    "artifacts": artifacts,
    "onnxblock": blocks,
    "Module": stepped,
    "command": by_command,
}
