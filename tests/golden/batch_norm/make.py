"""Artifacts of a batch normalization whose statistics are frozen parameters, and what comes of four steps.

Run with onnxruntime-training 1.19.2 in this folder: python make.py
"""

import numpy as np
import onnx
from onnxruntime.training import artifacts
from onnxruntime.training.api import CheckpointState, Module, Optimizer

model = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["" : 15]>
    g (float[N, 3, 4, 4] x) => (float[N, 3, 4, 4] y) {
        h = Conv <kernel_shape = [1, 1]> (x, w)
        y = BatchNormalization <momentum = 0.75> (h, scale, bias, mean, var)
    }"""
)
numbers = np.random.default_rng(3)


def normal(*shape: int) -> np.ndarray:
    return numbers.standard_normal(shape).astype(np.float32)


weights = {
    "w": normal(3, 3, 1, 1),
    "scale": np.float32([1, 2, 3]),
    "bias": np.float32([0, 1, 2]),
    "mean": np.float32([0.5, 0, 1]),
    "var": np.float32([1, 2, 0.5]),
}
for name, value in weights.items():
    model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
artifacts.generate_artifacts(
    model,
    requires_grad=["w", "scale", "bias"],
    frozen_params=["mean", "var"],
    loss=artifacts.LossType.MSELoss,
    optimizer=artifacts.OptimType.AdamW,
    artifact_directory=".",
)
state = CheckpointState.load_checkpoint("checkpoint")
module = Module("training_model.onnx", state)
optimizer = Optimizer("optimizer_model.onnx", module)
saved, losses = {}, []
for step in range(4):
    saved[f"x{step}"], saved[f"t{step}"] = normal(5, 3, 4, 4), normal(5, 3, 4, 4)
    losses.append(module(saved[f"x{step}"], saved[f"t{step}"]))
    if step % 2:
        # The gradients of two batches add up.
        optimizer.step()
        module.lazy_reset_grad()
for name, parameter in state.parameters:
    saved[f"p_{name}"] = parameter.data.copy()
np.savez("expected.npz", L=np.array(losses), **saved)
