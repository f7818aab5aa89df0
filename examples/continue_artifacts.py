"""Continue with somebody's artifacts of onnxruntime-training 1.19.2, with only the import changed.

    python examples/continue_artifacts.py [FOLDER]

FOLDER holds training_model.onnx, eval_model.onnx, optimizer_model.onnx and checkpoint as
`generate_artifacts` of 1.19.2 wrote them, and the data and losses of five steps of training there
(expected.npz). The same steps are done here and compared; then the training goes on, is saved and
exported. The default is the folder that the tests use.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

# Before: from onnxruntime.training.api import ...
from ortgrad.training.api import CheckpointState, Module, Optimizer

ARTIFACTS = Path(__file__).parents[1] / "tests" / "golden" / "cnn"


def main(folder: Path = ARTIFACTS, steps: int = 300) -> tuple[float, float, float]:
    """Return the largest relative error of the first losses, and the mean loss at first and in the end."""
    expected = np.load(folder / "expected.npz")
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.01)

    def step(number: int) -> float:
        loss = module(expected[f"step{number}_x"], expected[f"step{number}_labels"])
        optimizer.step()
        module.lazy_reset_grad()
        return float(loss)

    count = len(expected["losses"])
    losses = np.array([step(number) for number in range(count)])
    error = float(np.abs(losses / expected["losses"] - 1).max())
    print(f"{count} losses, largest relative difference from onnxruntime-training's: {error:.1e}")
    optimizer.set_learning_rate(0.003)
    further = [step(number % count) for number in range(steps)]
    first, last = float(losses.mean()), float(np.mean(further[-count:]))
    print(f"mean loss of the {count} batches: {first:.3f}, after {steps} further steps: {last:.3f}")
    with tempfile.TemporaryDirectory() as target:
        CheckpointState.save_checkpoint(state, Path(target) / "checkpoint", include_optimizer_state=True)
        module.eval().export_model_for_inferencing(Path(target) / "trained.onnx", ["logits"])
        print("saved:", ", ".join(sorted(path.name for path in Path(target).iterdir())))
    return error, first, last


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:2]))
