"""Train with a training_model.onnx of onnxruntime-training, on the stock onnxruntime wheel.

    python examples/run_training_model.py [FOLDER]

FOLDER holds what onnxruntime-training's `generate_artifacts` wrote for a small CNN
(training_model.onnx, optimizer_model.onnx), the model it was made of (forward.onnx: the initial
parameters), and the data, losses and final parameters of five steps of training there
(expected.npz). The same five steps are done here, with AdamW in NumPy, and compared. The default
is the folder that the tests use.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

import ortgrad

ARTIFACTS = Path(__file__).parents[1] / "tests" / "golden" / "cnn"


# onnxruntime-training adds the gradients to these buffers in place, and its graph only returns a flag.
# A stock session cannot do that, so ortgrad returns the updated buffer as one more output.
BUFFER = "_grad.accumulation.buffer"


class AdamW:
    """As onnxruntime-training's AdamWOptimizer with adam_mode 1, the one `generate_artifacts` writes."""

    def __init__(
        self, optimizer_model: onnx.ModelProto, parameters: dict[str, np.ndarray], learning_rate: float
    ) -> None:
        (node,) = optimizer_model.graph.node
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type != "AdamWOptimizer" or attributes["adam_mode"] != 1:
            raise ValueError(f"this example knows AdamW with adam_mode 1, not {node.op_type} {attributes}")
        self.alpha, self.beta = attributes["alpha"], attributes["beta"]
        self.epsilon, self.weight_decay = attributes["epsilon"], attributes["weight_decay"]
        self.learning_rate = learning_rate
        self.parameters = parameters
        self.first = {name: np.zeros_like(p) for name, p in parameters.items()}
        self.second = {name: np.zeros_like(p) for name, p in parameters.items()}
        self.steps = 0

    def step(self, gradients: dict[str, np.ndarray]) -> None:
        """Update the parameters in place."""
        self.steps += 1
        rate = self.learning_rate * np.sqrt(1 - self.beta**self.steps) / (1 - self.alpha**self.steps)
        for name, gradient in gradients.items():
            parameter, first, second = self.parameters[name], self.first[name], self.second[name]
            first[:] = self.alpha * first + (1 - self.alpha) * gradient
            second[:] = self.beta * second + (1 - self.beta) * gradient**2
            parameter -= rate * first / (np.sqrt(second) + self.epsilon)
            parameter -= self.learning_rate * self.weight_decay * parameter


def main(folder: Path = ARTIFACTS) -> tuple[float, float]:
    """Returns the largest differences in the losses and in the parameters."""
    session = ortgrad.InferenceSession(folder / "training_model.onnx")
    names = [i.name.removesuffix(BUFFER) for i in session.get_inputs() if i.name.endswith(BUFFER)]

    initial = {t.name: numpy_helper.to_array(t) for t in onnx.load(folder / "forward.onnx").graph.initializer}
    parameters = {name: initial[name].copy() for name in names}
    optimizer = AdamW(onnx.load(folder / "optimizer_model.onnx"), parameters, learning_rate=0.01)
    buffers = {name + BUFFER: np.zeros_like(parameters[name]) for name in names}
    loss_name = session.get_outputs()[0].name

    worst_loss = worst_parameter = 0.0
    with np.load(folder / "expected.npz") as expected:
        for step, expected_loss in enumerate(expected["losses"]):
            feeds = {
                "x": expected[f"step{step}_x"],
                "labels": expected[f"step{step}_labels"],
                **parameters,
                **buffers,
                # True: the buffers' contents are replaced; False: the gradients are added to them.
                "lazy_reset_grad": np.array([True]),
            }
            loss, *gradients = session.run([loss_name, *(f"{buffer}.out" for buffer in buffers)], feeds)
            optimizer.step(dict(zip(names, gradients, strict=True)))
            worst_loss = max(worst_loss, abs(float(loss) - expected_loss))
            print(f"step {step + 1}: loss {loss:.6f}, onnxruntime-training had {expected_loss:.6f}")
        for name, parameter in parameters.items():
            difference = float(np.abs(parameter - expected[f"param_{name}"]).max())
            worst_parameter = max(worst_parameter, difference)
    print(f"largest difference: {worst_loss:.1e} in the losses, {worst_parameter:.1e} in the parameters")
    return worst_loss, worst_parameter


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:2]))
