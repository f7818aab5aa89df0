"""`ortgrad demo`: train the CNN that is part of the package on handwritten digits."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ortgrad.check import check_gradients
from ortgrad.errors import MissingPackageError
from ortgrad.graph.loading import load_model
from ortgrad.graph.protos import FLOAT, INT64, copy_of
from ortgrad.pipelines.build import build_gradient_model
from ortgrad.progress import Progress
from ortgrad.runtime.session import InferenceSession

EPOCHS = 20
BATCH = 32
LEARNING_RATE = 0.05
MOMENTUM = 0.9
SEED = 0
TEST_DIGITS = 360


@dataclass(frozen=True)
class Digits:
    """8x8 images in [0, 1] as float32[n, 1, 8, 8], and their labels as int64[n]."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


def digits() -> tuple[Digits, Digits]:
    """Return scikit-learn's digits for training and for testing; the split is always the same."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingPackageError(
            "the digits come with scikit-learn, which is not installed: python -m pip install scikit-learn"
        ) from error
    data = load_digits()
    images = (data.images[:, None] / 16).astype(np.float32)
    labels = data.target.astype(np.int64)
    order = np.random.default_rng(SEED).permutation(len(labels))
    test, train = order[:TEST_DIGITS], order[TEST_DIGITS:]
    return Digits(images[train], labels[train]), Digits(images[test], labels[test])


def classifier() -> onnx.ModelProto:
    """Return the forward model cnn.onnx, from image to logits, with untrained weights."""
    package = Path(__file__).parents[1]
    installed = package / "data" / "cnn.onnx"
    # In a checkout the model is in the folder `models`.
    return load_model(installed if installed.exists() else package.parent / "models" / "cnn.onnx")


def with_loss(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the input `labels` and the output `loss`, the mean cross-entropy."""
    trainable = copy_of(model)
    graph = trainable.graph
    logits = graph.output[0].name
    graph.node.append(helper.make_node("SoftmaxCrossEntropyLoss", [logits, "labels"], ["loss"], "loss"))
    graph.input.append(helper.make_tensor_value_info("labels", INT64, ["N"]))
    graph.output.append(helper.make_tensor_value_info("loss", FLOAT, []))
    return trainable


def parameters_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Return the weights by name, as writable arrays."""
    return {tensor.name: numpy_helper.to_array(tensor).copy() for tensor in model.graph.initializer}


def with_parameters(model: onnx.ModelProto, parameters: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Return a copy of the model with other weights."""
    changed = copy_of(model)
    for tensor in changed.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(parameters[tensor.name], tensor.name))
    return changed


def train(
    backward: onnx.ModelProto,
    parameters: dict[str, np.ndarray],
    data: Digits,
    epochs: int = EPOCHS,
    progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """Train the parameters, in place, by gradient descent with momentum."""
    session = InferenceSession(backward)
    outputs = ["loss", *(f"{name}_grad" for name in parameters)]
    velocity = {name: np.zeros_like(array) for name, array in parameters.items()}
    generator = np.random.default_rng(SEED)
    for epoch in range(epochs):
        # The learning rate decreases to 0, so that the weights converge.
        rate = LEARNING_RATE * (1 - epoch / epochs)
        order = generator.permutation(len(data))
        losses = []
        for start in range(0, len(data), BATCH):
            chosen = order[start : start + BATCH]
            feeds = {"image": data.images[chosen], "labels": data.labels[chosen], **parameters}
            loss, *gradients = session.run(outputs, feeds)
            losses.append(float(loss))
            for (name, array), gradient in zip(parameters.items(), gradients, strict=True):
                velocity[name] = MOMENTUM * velocity[name] - rate * gradient
                array += velocity[name]
        if progress is not None:
            progress(epoch + 1, epochs, f"loss {np.mean(losses):.4f}")


def accuracy(model: onnx.ModelProto, data: Digits) -> float:
    """Return the fraction of the digits that the forward model classifies correctly."""
    (logits,) = InferenceSession(model).run(None, {"image": data.images})
    return float(np.mean(np.argmax(logits, axis=1) == data.labels))


def trained_classifier(epochs: int = EPOCHS) -> onnx.ModelProto:
    """Return the classifier after training, an ordinary forward model."""
    model = classifier()
    parameters = parameters_of(model)
    train(
        build_gradient_model(with_loss(model), wrt=list(parameters), of="loss"),
        parameters,
        digits()[0],
        epochs,
    )
    return with_parameters(model, parameters)


def command(arguments: argparse.Namespace) -> int:
    """Run the demo."""
    run(arguments.progress)
    return 0


def run(show_progress: bool | None = None) -> float:
    """Build, check, train and test the model, and print the results; returns the accuracy on test digits."""
    training, testing = digits()
    model = classifier()
    trainable = with_loss(model)
    parameters = parameters_of(model)
    count = sum(array.size for array in parameters.values())
    print(f"cnn.onnx: {len(model.graph.node)} nodes, {count} parameters; plus SoftmaxCrossEntropyLoss")

    start = time.perf_counter()
    backward = build_gradient_model(trainable, wrt=list(parameters), of="loss")
    nodes = len(backward.graph.node) - len(trainable.graph.node)
    print(f"Its backward graph: {nodes} more nodes, built in {time.perf_counter() - start:.2f} s.")

    print("Its gradients, compared with finite differences:")
    with Progress(show_progress) as progress:
        check = check_gradients(trainable, wrt=["image", *parameters], of="loss", progress=progress)
    print("  " + str(check).replace("\n", "\n  "))
    check.raise_if_wrong()

    before = accuracy(model, testing)
    print(f"Training on {len(training)} digits, {EPOCHS} times, in batches of {BATCH} ...", flush=True)
    start = time.perf_counter()
    with Progress(show_progress) as progress:
        train(backward, parameters, training, progress=progress)
    seconds = time.perf_counter() - start
    speed = EPOCHS * len(training) / seconds
    print(f"  {seconds:.1f} s, {speed:.0f} samples per second")
    after = accuracy(with_parameters(model, parameters), testing)
    print(f"Accuracy on {len(testing)} other digits: {before:.1%} before, {after:.1%} after training.")
    return after
