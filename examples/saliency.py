"""Which pixels does a digit classifier look at? The gradient of a score with respect to the image.

    python examples/saliency.py [PICTURE.png]

Trains the CNN of `ortgrad demo` for some seconds (its digits come with scikit-learn), differentiates
the trained model, and writes a picture: ten digits, each with its saliency to the right.
"""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import onnx

import ortgrad
from ortgrad.cli.demo import digits, trained_classifier

STEPS = 32
SCALE = 12  # picture elements per pixel of a digit


def contributions(model: onnx.ModelProto, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """What each pixel contributes to the score of its image's class (integrated gradients).

    That is the pixel times the mean gradient on the way from a black image to this one; the
    contributions of all pixels add up to what the image changes in the score.
    """
    # `logits` is not a scalar, so the backward graph has an input `logits_grad` that says what is
    # differentiated: with 1 for the class of the image and 0 for the others, the score of that class.
    backward = ortgrad.build_gradient_model(model, wrt="image", of="logits")
    session = ortgrad.InferenceSession(backward)
    seed = np.eye(10, dtype=np.float32)[labels]
    total = np.zeros_like(images)
    for part in (np.arange(STEPS, dtype=np.float32) + 0.5) / STEPS:
        (gradient,) = session.run(["image_grad"], {"image": part * images, "logits_grad": seed})
        total += gradient
    return images * total / STEPS


def picture(images: np.ndarray, saliency: np.ndarray) -> np.ndarray:
    """Pairs of a digit and its saliency, in two columns of five."""

    def enlarged(image: np.ndarray) -> np.ndarray:
        gray = np.sqrt(image / image.max())  # the root shows the faint ones too
        return np.pad(np.kron(gray, np.ones((SCALE, SCALE))), SCALE // 4, constant_values=0.5)

    pairs = [np.hstack([enlarged(i), enlarged(s)]) for i, s in zip(images[:, 0], saliency[:, 0], strict=True)]
    gap = np.ones((5 * len(pairs[0]), SCALE))
    return np.hstack([np.vstack(pairs[:5]), gap, np.vstack(pairs[5:])])


def write_png(path: Path, gray: np.ndarray) -> None:
    """A grayscale PNG of values from 0 to 1."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = gray.shape
    # Every line begins with the number of its filter, 0 for none.
    lines = np.pad(np.round(gray * 255).astype(np.uint8), ((0, 0), (1, 0)))
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9))
        + chunk(b"IEND", b"")
    )


def main(path: Path = Path("saliency.png"), epochs: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Returns, for ten digits, the sums of the contributions and the changes of the score they explain."""
    model = trained_classifier(epochs)
    _, testing = digits()
    first = [int(np.flatnonzero(testing.labels == digit)[0]) for digit in range(10)]
    images, labels = testing.images[first], testing.labels[first]
    found = contributions(model, images, labels)

    session = ortgrad.InferenceSession(model)
    (scores,) = session.run(None, {"image": images})
    (black,) = session.run(None, {"image": np.zeros_like(images)})
    sums, changes = found.sum(axis=(1, 2, 3)), (scores - black)[np.arange(10), labels]
    print("digit  score against a black image  sum of the contributions")
    for digit, change, total in zip(labels, changes, sums, strict=True):
        print(f"{digit:5}  {change:27.3f}  {total:24.3f}")
    write_png(path, picture(images, np.abs(found)))
    print(f"written to {path}")
    return sums, changes


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:2]))
