"""A backward graph assembled by hand, in a plain onnxruntime session.

    python examples/backward_graph.py

models/mlp.onnx is Gemm, Tanh, Dropout, Gemm, Softmax. Here its backward pass is written behind it,
node by node: standard operators from `onnx.helper`, gradient operators from `ortgrad.nodes`.
The session is onnxruntime's own; ortgrad takes the import and one line.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import ortgrad  # the first line

MODEL = Path(__file__).parents[1] / "models" / "mlp.onnx"


def backward_model() -> onnx.ModelProto:
    """The forward model plus, for every value `v` on the way back, its gradient `v_grad`."""
    model = onnx.load(MODEL)
    node, nodes = helper.make_node, ortgrad.nodes
    model.graph.node.extend(
        [
            # probabilities = Softmax(logits)
            nodes.softmax_grad_13("probabilities_grad", "probabilities", "logits_grad", axis=-1),
            # logits = dropped @ fc2.weight.T + fc2.bias
            node("Gemm", ["logits_grad", "dropped"], ["fc2.weight_grad"], transA=1),
            node("ReduceSum", ["logits_grad", "batch_axis"], ["fc2.bias_grad"], keepdims=0),
            node("MatMul", ["logits_grad", "fc2.weight"], ["dropped_grad"]),
            # dropped = Dropout(hidden): the mask of the forward pass says what was kept
            nodes.dropout_grad(
                "dropped_grad", "dropout.mask", "dropout.ratio", "training_mode", "hidden_grad"
            ),
            # hidden = Tanh(fc1)
            nodes.tanh_grad("hidden_grad", "hidden", "fc1_grad"),
            # fc1 = features @ fc1.weight.T + fc1.bias
            node("Gemm", ["fc1_grad", "features"], ["fc1.weight_grad"], transA=1),
            node("ReduceSum", ["fc1_grad", "batch_axis"], ["fc1.bias_grad"], keepdims=0),
            node("MatMul", ["fc1_grad", "fc1.weight"], ["features_grad"]),
        ]
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), "batch_axis"))
    model.graph.input.append(helper.make_tensor_value_info("probabilities_grad", TensorProto.FLOAT, ["N", 3]))
    model.graph.output.extend(
        [
            helper.make_tensor_value_info("dropout.mask", TensorProto.BOOL, ["N", 32]),
            *(
                helper.make_tensor_value_info(f"{name}_grad", TensorProto.FLOAT, shape)
                for name, shape in gradients().items()
            ),
        ]
    )
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def gradients() -> dict[str, list[int | str]]:
    return {
        "fc1.weight": [32, 16],
        "fc1.bias": [32],
        "fc2.weight": [3, 32],
        "fc2.bias": [3],
        "features": ["N", 16],
    }


def forward(values: dict[str, np.ndarray], mask: np.ndarray, ratio: float) -> np.ndarray:
    """The same network in NumPy, with the dropout mask given."""
    hidden = np.tanh(values["features"] @ values["fc1.weight"].T + values["fc1.bias"])
    logits = hidden * mask / (1 - ratio) @ values["fc2.weight"].T + values["fc2.bias"]
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def main() -> dict[str, tuple[float, float]]:
    model = backward_model()
    options = onnxruntime.SessionOptions()
    ortgrad.register(options)  # the second line
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )

    generator = np.random.default_rng(0)
    features = generator.standard_normal((4, 16), dtype=np.float32)
    # What is differentiated is sum(seed * probabilities).
    seed = generator.standard_normal((4, 3), dtype=np.float32)
    feeds = {"features": features, "training_mode": np.array(True), "probabilities_grad": seed}
    names = [output.name for output in session.get_outputs()]
    results = dict(zip(names, session.run(None, feeds), strict=True))

    # The check: move each tensor a little along a random direction, in float64.
    values = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
    values["features"] = features.astype(np.float64)
    ratio = float(values["dropout.ratio"])
    checks = {}
    print(f"{'gradient of':12} {'from the graph':>15} {'finite difference':>18}")
    for name in gradients():
        direction = generator.standard_normal(values[name].shape)
        step = 1e-5
        ahead, behind = (
            float((seed * forward({**values, name: moved}, results["dropout.mask"], ratio)).sum())
            for moved in (values[name] + step * direction, values[name] - step * direction)
        )
        slope = float((results[f"{name}_grad"] * direction).sum())
        checks[name] = (slope, (ahead - behind) / (2 * step))
        print(f"{name:12} {slope:15.6f} {checks[name][1]:18.6f}")
    return checks


if __name__ == "__main__":
    main()
