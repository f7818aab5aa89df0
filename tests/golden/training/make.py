"""Training models of onnxruntime-training 1.19.2, and what it computes with them.

    python -m pip install onnxruntime-training-cpu==1.19.2 "onnx<1.17" "numpy<2" torch==2.13.0
    python tests/golden/training/make.py

For each of MODELS it writes <name>.onnx, the training model with its nodes as onnxruntime-training writes
them, and <name>.npz: feeds, the loss and the gradients. Where onnxruntime-training has no kernel of its
own, or ends the process, there are only feeds. It also makes <network>.onnx of tests/support/networks.py.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

HERE = Path(__file__).resolve().parent
NETWORKS = ("mlp", "resnet", "mobilenet", "vit", "gpt", "unet")
SIZES = {"N": 3, "H": 8, "W": 6}
# The gradients need these outputs.
OUTPUTS = {"SoftmaxCrossEntropyLoss": 2, "LayerNormalization": 3, "MaxPool": 2}


@dataclass(frozen=True)
class Forward:
    """A model in ONNX's text form. A body without a loss gets the mean of y^2."""

    inputs: str
    weights: str
    body: str
    opset: int = 17
    feeds: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)

    def model(self, name: str) -> onnx.ModelProto:
        body = (
            self.body
            if "loss" in self.body
            else f"{self.body} s = Mul(y, y) loss = ReduceMean<keepdims = 0>(s)"
        )
        model: onnx.ModelProto = onnx.parser.parse_model(
            f'<ir_version: 8, opset_import: ["": {self.opset}, "com.microsoft": 1]>'
            f"{name} ({self.inputs}, {self.weights}) => (float loss) {{ {body} }}"
        )
        graph, numbers = model.graph, np.random.default_rng(0)
        for info in list(graph.input)[len(self.inputs.split("] ")) - 1 :]:
            shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
            # Away from 0, where divisions and kinks are.
            value = (0.5 * numbers.standard_normal(shape) + 0.2).astype(np.float32)
            graph.initializer.append(numpy_helper.from_array(value, info.name))
            graph.input.remove(info)
        for key, constant in self.constants.items():
            graph.initializer.append(numpy_helper.from_array(np.array(constant), key))
        return model


LINEAR = "h0 = MatMul(x, w) h = Add(h0, b)"
DENSE = {"inputs": "float[N, 6] x", "weights": "float[6, 5] w, float[5] b"}
CONV = "h = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x, w, b)"
IMAGE = {"inputs": "float[N, 3, 8, 8] x", "weights": "float[4, 3, 3, 3] w, float[4] b"}
ANY_IMAGE = {**IMAGE, "inputs": "float[N, 3, H, W] x"}
CLASSES = {**DENSE, "inputs": "float[N, 6] x, int64[N] t", "feeds": {"t": [1, 0, 4]}}
# A tensor of unknown rank and a weight that is stretched to it.
STRETCHED = {
    "inputs": "float[N, 20] x, int64[r] shape",
    "weights": "float[1] v, float[4, 1] w",
    "feeds": {"shape": [3, 4, 5]},
}

MODELS = {
    "add_of_unknown_rank": Forward(**STRETCHED, body="a = Mul(x, v) h = Reshape(a, shape) y = Add(h, w)"),
    "mul_of_unknown_rank": Forward(**STRETCHED, body="a = Mul(x, v) h = Reshape(a, shape) y = Mul(h, w)"),
    "sub_of_unknown_rank_opset_12": Forward(
        **STRETCHED, body="a = Mul(x, v) h = Reshape(a, shape) y = Sub(w, h)", opset=12
    ),
    "div_of_unknown_rank": Forward(
        **STRETCHED, body="a = Mul(x, v) h = Reshape(a, shape) e = Exp(w) y = Div(h, e)"
    ),
    "div": Forward(
        "float[N, 6] x",
        "float[6, 5] w, float[6, 5] v",
        "a = MatMul(x, w) c = MatMul(x, v) e = Exp(c) y = Div(a, e)",
    ),
    "div_by_weight": Forward(
        "float[N, 6] x",
        "float[5] v",
        "a = Exp(v) c = Slice(x, zero, five, one) y = Div(c, a)",
        constants={"zero": [0], "five": [5], "one": [1]},
    ),
    "concat": Forward(
        "float[N, 6] x",
        "float[6, 5] w, float[6, 2] v",
        "a = MatMul(x, w) c = MatMul(x, v) y = Concat<axis = 1>(a, c)",
    ),
    "concat_of_last_axis": Forward(
        "float[N, 6] x",
        "float[6, 5] w, float[6, 2] v",
        "a = MatMul(x, w) c = MatMul(x, v) y = Concat<axis = -1>(a, c)",
    ),
    "concat_of_batches": Forward(
        "float[N, 6] x",
        "float[6, 5] w, float[6, 5] v",
        "a = MatMul(x, w) c = MatMul(x, v) y = Concat<axis = 0>(a, c)",
    ),
    "layer_normalization": Forward(
        "float[N, 6] x",
        "float[6, 5] w, float[5] b, float[5] v",
        "h = MatMul(x, w) y = LayerNormalization<axis = -1, epsilon = 0.0001>(h, b, v)",
    ),
    "fast_gelu_with_bias": Forward(**DENSE, body="h = MatMul(x, w) y = com.microsoft.FastGelu(h, b)"),
    "bias_gelu": Forward(**DENSE, body="h = MatMul(x, w) y = com.microsoft.BiasGelu(h, b)"),
    "dropout": Forward(
        **DENSE,
        body=f"{LINEAR} y, mask = Dropout<seed = 3>(h, ratio, training)",
        constants={"ratio": np.float32(0.4), "training": True},
    ),
    "top_k": Forward(**DENSE, body=f"{LINEAR} y, i = TopK(h, k)", constants={"k": [2]}),
    "split": Forward(
        **DENSE,
        body=f"{LINEAR} p, q = Split<axis = 1>(h, sizes) e = Exp(q) y = Concat<axis = 1>(e, p)",
        constants={"sizes": [2, 3]},
    ),
    "reduce_mean_opset_12": Forward(**DENSE, body=f"{LINEAR} y = ReduceMean<axes = [1]>(h)", opset=12),
    "scaled_sum": Forward(
        **DENSE, body=f"{LINEAR} y = com.microsoft.ScaledSum<scale_0 = 0.5, scale_1 = 2.0>(h, h0)"
    ),
    "weighted_loss": Forward(
        **CLASSES,
        body=f"{LINEAR} loss = SoftmaxCrossEntropyLoss<ignore_index = 0>(h, t, c)",
        constants={"c": np.float32([1, 2, 0.5, 1, 1])},
    ),
    "internal_loss": Forward(
        **CLASSES,
        body=f"{LINEAR} loss, p = com.microsoft.SoftmaxCrossEntropyLossInternal(h, t, , ignored)",
        constants={"ignored": 4},
    ),
    "loss_of_distributions": Forward(
        "float[N, 6] x, float[N, 5] t",
        DENSE["weights"],
        f"{LINEAR} loss, p = com.microsoft.SoftmaxCrossEntropy(h, t)",
        feeds={"t": np.float32([[0, 1, 0, 0, 0], [0.5, 0, 0.5, 0, 0], [0, 0, 0, 0.1, 0.9]])},
    ),
    "global_average_pool": Forward(**ANY_IMAGE, body=f"{CONV} y = GlobalAveragePool(h)"),
    "max_pool": Forward(**IMAGE, body=f"{CONV} y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(h)"),
    "max_pool_of_any_size": Forward(
        **ANY_IMAGE, body=f"{CONV} y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(h)"
    ),
    "average_pool": Forward(
        **IMAGE,
        body=f"{CONV} y = AveragePool<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>(h)",
    ),
    "average_pool_of_any_size": Forward(
        **ANY_IMAGE, body=f"{CONV} y = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(h)"
    ),
    "batch_normalization": Forward(
        IMAGE["inputs"],
        "float[4, 3, 3, 3] w, float[4] g, float[4] b",
        "h = Conv(x, w) z, m, v = BatchNormalization<training_mode = 1>(h, g, b, mean, var) y = Relu(z)",
        constants={"mean": np.zeros(4, np.float32), "var": np.ones(4, np.float32)},
    ),
    "conv_transpose": Forward(
        IMAGE["inputs"],
        "float[3, 4, 3, 3] w, float[4] b",
        "y = ConvTranspose<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 0, 0]>(x, w, b)",
    ),
    "resize": Forward(
        **IMAGE,
        body=f'{CONV} y = Resize<mode = "linear">(h, , scales)',
        constants={"scales": np.float32([1, 1, 2, 1.5])},
    ),
}


def training_model(model: onnx.ModelProto, weights: list[str]) -> onnx.ModelProto:
    """What onnxruntime-training makes of a forward model."""
    from onnxruntime.training import artifacts

    for number, node in enumerate(model.graph.node):
        while len(node.output) < OUTPUTS.get(node.op_type, 0):
            node.output.append(f"needed_{number}_{len(node.output)}")
    with tempfile.TemporaryDirectory() as folder:
        artifacts.generate_artifacts(model, requires_grad=weights, artifact_directory=folder)
        return onnx.load(Path(folder) / "training_model.onnx")


def make(name: str) -> None:
    """One training model with its feeds."""
    forward = MODELS[name]
    model = forward.model(name)
    weights = {
        t.name: numpy_helper.to_array(t) for t in model.graph.initializer if t.name not in forward.constants
    }
    onnx.save(training_model(model, sorted(weights)), HERE / f"{name}.onnx")
    numbers, feeds = np.random.default_rng(1), dict(weights)
    for info in forward.model(name).graph.input:
        given = forward.feeds.get(info.name)
        shape = [SIZES.get(d.dim_param, d.dim_value) for d in info.type.tensor_type.shape.dim]
        random = numbers.standard_normal(shape).astype(np.float32) if given is None else None
        feeds[info.name] = np.array(given) if random is None else random
    np.savez(HERE / f"{name}.npz", **{f"feed:{key}": value for key, value in feeds.items()})


def run(name: str) -> None:
    """What onnxruntime-training computes, in a process of its own: some models end it."""
    import onnxruntime

    path = HERE / f"{name}.npz"
    saved = dict(np.load(path))
    feeds = {key.removeprefix("feed:"): value for key, value in saved.items()}
    session = onnxruntime.InferenceSession(HERE / f"{name}.onnx", providers=["CPUExecutionProvider"])
    buffers = {}
    for weight in [info.name.split("_grad.")[0] for info in session.get_inputs() if "_grad." in info.name]:
        buffers[f"{weight}_grad.accumulation.buffer"] = np.zeros_like(feeds[weight])
    outputs = session.run(None, {**feeds, **buffers, "lazy_reset_grad": np.array([True])})
    # The accumulators write in place, and the session reads the arrays without a copy.
    grads = {f"grad:{key.split('_grad.')[0]}": value for key, value in buffers.items()}
    np.savez(path, **saved, **grads, loss=outputs[0])


def make_networks() -> None:
    sys.path.insert(0, str(HERE.parents[1]))
    import networks

    for name in NETWORKS:
        network = getattr(networks, name)()
        model = onnx.ModelProto()
        model.CopyFrom(network.model)
        model.ir_version = 8
        del model.graph.output[1:]
        weights = sorted({t.name for t in model.graph.initializer} & set(network.weights))
        onnx.save(training_model(model, weights), HERE / f"{name}.onnx")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(sys.argv[1])
    else:
        make_networks()
        for name in MODELS:
            make(name)
            ended = subprocess.run(
                [sys.executable, __file__, name], capture_output=True, check=False
            ).returncode
            print(name, "ok" if ended == 0 else "feeds only")
