"""Trains, evaluates, saves, resumes and exports artifacts that onnxruntime-training 1.19.2 has written.

    python tests/sweeps/artifact_networks.py folder    # a table; the exit code is 1 if a network fails

`tests/golden/networks/make.py` makes the folder, with what 1.19.2 computed.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from ortgrad.training.api import CheckpointState, Module, Optimizer

STEPS = 4
# Rounding errors, after some steps of AdamW, which divides by their size.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


class Artifacts:
    """The artifacts of a network, and what is expected of them."""

    def __init__(self, folder: Path) -> None:
        self.name, self.folder = folder.name, folder
        with np.load(folder / "expected.npz") as saved:
            self.expected = dict(saved)
        (found,) = folder.glob("*training_model.onnx")
        self.prefix = found.name.removesuffix("training_model.onnx")

    def path(self, name: str) -> Path:
        return self.folder / f"{self.prefix}{name}"

    def batch(self, step: int) -> list[np.ndarray]:
        count = sum(name.startswith("x0_") for name in self.expected)
        return [self.expected[f"x{step}_{i}"] for i in range(count)]

    def open(self, checkpoint: Path) -> tuple[CheckpointState, Module, Optimizer]:
        state = CheckpointState.load_checkpoint(checkpoint)
        module = Module(self.path("training_model.onnx"), state, self.path("eval_model.onnx"))
        optimizer = Optimizer(self.path("optimizer_model.onnx"), module)
        optimizer.set_learning_rate(0.01)
        return state, module, optimizer


def try_network(folder: Path, scratch: Path) -> list[str]:
    """Return what was done; raises AssertionError where a result is not that of 1.19.2."""
    network = Artifacts(folder)
    done = []
    random = bool(network.expected["random"])
    state, module, optimizer = network.open(network.path("checkpoint"))
    losses = train(network, module, optimizer, range(STEPS))
    assert np.isfinite(losses).all()
    if not random:
        np.testing.assert_allclose(losses, network.expected["losses"], **TOLERANCE)
        for name, parameter in state.parameters:
            np.testing.assert_allclose(
                parameter.data, network.expected[f"p_{name}"], err_msg=name, **TOLERANCE
            )
    done.append("train")
    module.eval()
    evaluated = first(module(*network.batch(0)))
    assert np.isfinite(evaluated)
    if "evaluated" in network.expected and not random:
        np.testing.assert_allclose(evaluated, network.expected["evaluated"], **TOLERANCE)
    done.append("evaluate")
    CheckpointState.save_checkpoint(state, scratch / "end", include_optimizer_state=True)
    done.append("save")
    # Two steps, saved, and two more from there.
    halfway, module, optimizer = network.open(network.path("checkpoint"))
    train(network, module, optimizer, range(2))
    CheckpointState.save_checkpoint(halfway, scratch / "halfway", include_optimizer_state=True)
    resumed, module, optimizer = network.open(scratch / "halfway")
    rest = train(network, module, optimizer, range(2, STEPS))
    if not random:
        np.testing.assert_array_equal(rest, losses[2:])
        for (name, a), (_, b) in zip(state.parameters, resumed.parameters, strict=True):
            np.testing.assert_array_equal(a.data, b.data, err_msg=name)
    done.append("resume")
    module.eval()
    evaluated = module(*network.batch(0))
    module.export_model_for_inferencing(scratch / "inference.onnx", outputs(network))
    exported = onnx.load(scratch / "inference.onnx")
    session = onnxruntime.InferenceSession(scratch / "inference.onnx", providers=["CPUExecutionProvider"])
    feeds = dict(zip(module.input_names(), network.batch(0), strict=True))
    found = session.run(None, {value.name: feeds[value.name] for value in exported.graph.input})
    assert all(np.isfinite(array).all() for array in found)
    names = module.output_names()
    for name, array in zip([value.name for value in exported.graph.output], found, strict=True):
        if name in names:
            np.testing.assert_allclose(array, evaluated[names.index(name)], **TOLERANCE)
    # Samples do not depend on each other in inference.
    repeated = session.run(None, {v.name: feeds[v.name][[0, 0, 0, 0]] for v in exported.graph.input})
    for array, same in zip(found, repeated, strict=True):
        if array.ndim:
            np.testing.assert_allclose(same, array[[0, 0, 0, 0]], rtol=1e-3, atol=1e-5)
    done.append("export")
    return done


def outputs(network: Artifacts) -> list[str]:
    """The outputs of the network itself."""
    known = {name for node in onnx.load(network.path("eval_model.onnx")).graph.node for name in node.output}
    return [name for name in ("y", "z") if name in known]


def train(network: Artifacts, module: Module, optimizer: Optimizer, steps: Sequence[int]) -> list[float]:
    losses = []
    module.train()
    for step in steps:
        losses.append(first(module(*network.batch(step))))
        optimizer.step()
        module.lazy_reset_grad()
    return losses


def first(result: np.ndarray | tuple[np.ndarray, ...]) -> float:
    return float(np.asarray(result[0] if isinstance(result, tuple) else result).reshape(()))


def main() -> int:
    failed = 0
    folders = sorted(path.parent for path in Path(sys.argv[1]).glob("*/expected.npz"))
    for folder in folders:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                print(f"{folder.name:25}", *try_network(folder, Path(scratch)), flush=True)
            except Exception as error:
                failed += 1
                where = traceback.extract_tb(error.__traceback__)
                line = next(frame.lineno for frame in reversed(where) if frame.filename == __file__)
                print(f"{folder.name:25} line {line}: {type(error).__name__}: {str(error)[:300]!r}")
    print(f"{len(folders) - failed} of {len(folders)}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
