"""Make the three small models in this folder: cnn.onnx, gru.onnx and mlp.onnx.

    python models/make_models.py [FOLDER]

Forward models as an exporter would write them, with seeded weights, so the same files come out
every time. The batch size is symbolic ("N").
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 21
IR_VERSION = 10


def weights(seed: int, shapes: dict[str, tuple[int, ...]]) -> list[onnx.TensorProto]:
    """Uniform weights within 1 / sqrt(fan-in); a bias (rank 1) within 0.1."""
    generator = np.random.default_rng(seed)
    tensors = []
    for name, shape in shapes.items():
        bound = 1 / np.sqrt(np.prod(shape[1:])) if len(shape) > 1 else 0.1
        array = (bound * (2 * generator.random(shape) - 1)).astype(np.float32)
        tensors.append(numpy_helper.from_array(array, name))
    return tensors


def tensor(name: str, shape: Sequence[int | str], element: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, element, shape)


def finish(graph: onnx.GraphProto) -> onnx.ModelProto:
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="ortgrad/models",
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def cnn() -> onnx.ModelProto:
    """Digits of 8x8 pixels to logits for 10 classes."""
    node = helper.make_node
    return finish(
        helper.make_graph(
            [
                node("Conv", ["image", "conv1.weight", "conv1.bias"], ["conv1"], "conv1", pads=[1, 1, 1, 1]),
                node("Relu", ["conv1"], ["relu1"], "relu1"),
                node("MaxPool", ["relu1"], ["pool1"], "pool1", kernel_shape=[2, 2], strides=[2, 2]),
                node("Conv", ["pool1", "conv2.weight", "conv2.bias"], ["conv2"], "conv2", pads=[1, 1, 1, 1]),
                node("LeakyRelu", ["conv2"], ["relu2"], "relu2", alpha=0.1),
                node("AveragePool", ["relu2"], ["pool2"], "pool2", kernel_shape=[2, 2], strides=[2, 2]),
                node("Flatten", ["pool2"], ["features"], "flatten"),
                node("Gemm", ["features", "fc.weight", "fc.bias"], ["logits"], "fc", transB=1),
            ],
            "cnn",
            [tensor("image", ["N", 1, 8, 8])],
            [tensor("logits", ["N", 10])],
            weights(
                1,
                {
                    "conv1.weight": (8, 1, 3, 3),
                    "conv1.bias": (8,),
                    "conv2.weight": (16, 8, 3, 3),
                    "conv2.bias": (16,),
                    "fc.weight": (10, 64),
                    "fc.bias": (10,),
                },
            ),
        )
    )


def gru() -> onnx.ModelProto:
    """Sequences of any length, 8 features a step, to log-probabilities of 4 classes."""
    node = helper.make_node
    return finish(
        helper.make_graph(
            [
                node(
                    "GRU",
                    ["sequence", "gru.weight", "gru.recurrence", "gru.bias"],
                    ["", "last_states"],
                    "gru",
                    hidden_size=16,
                    linear_before_reset=1,  # as PyTorch exports it
                ),
                node("Squeeze", ["last_states", "direction_axis"], ["last_state"], "squeeze"),
                node("Gemm", ["last_state", "fc.weight", "fc.bias"], ["logits"], "fc", transB=1),
                node("LogSoftmax", ["logits"], ["log_probabilities"], "log_softmax", axis=-1),
            ],
            "gru",
            [tensor("sequence", ["T", "N", 8])],
            [tensor("log_probabilities", ["N", 4])],
            [
                *weights(
                    2,
                    {
                        "gru.weight": (1, 48, 8),
                        "gru.recurrence": (1, 48, 16),
                        "gru.bias": (1, 96),
                        "fc.weight": (4, 16),
                        "fc.bias": (4,),
                    },
                ),
                numpy_helper.from_array(np.array([0], np.int64), "direction_axis"),
            ],
        )
    )


def mlp() -> onnx.ModelProto:
    """16 features to probabilities of 3 classes; the input training_mode switches dropout on."""
    node = helper.make_node
    return finish(
        helper.make_graph(
            [
                node("Gemm", ["features", "fc1.weight", "fc1.bias"], ["fc1"], "fc1", transB=1),
                node("Tanh", ["fc1"], ["hidden"], "tanh"),
                node(
                    "Dropout",
                    ["hidden", "dropout.ratio", "training_mode"],
                    ["dropped", "dropout.mask"],
                    "dropout",
                    seed=7,
                ),
                node("Gemm", ["dropped", "fc2.weight", "fc2.bias"], ["logits"], "fc2", transB=1),
                node("Softmax", ["logits"], ["probabilities"], "softmax", axis=-1),
            ],
            "mlp",
            [tensor("features", ["N", 16]), tensor("training_mode", [], TensorProto.BOOL)],
            [tensor("probabilities", ["N", 3])],
            [
                *weights(
                    3,
                    {
                        "fc1.weight": (32, 16),
                        "fc1.bias": (32,),
                        "fc2.weight": (3, 32),
                        "fc2.bias": (3,),
                    },
                ),
                numpy_helper.from_array(np.array(0.25, np.float32), "dropout.ratio"),
            ],
        )
    )


MODELS = {"cnn.onnx": cnn, "gru.onnx": gru, "mlp.onnx": mlp}


def main(folder: Path) -> None:
    for name, make in MODELS.items():
        (folder / name).write_bytes(make().SerializeToString(deterministic=True))
        print(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
