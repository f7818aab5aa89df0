"""Train a GRU on sequences: which of four digits is it, read line by line?

    python examples/train_gru.py

A step of a sequence is a line of eight pixels of a handwritten digit (they come with scikit-learn).
The model takes sequences with the time first, so the batches are made here. Some lack the last lines:
the length of sequences may differ from batch to batch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ortgrad import training
from ortgrad.cli.demo import Digits, digits

MODEL = Path(__file__).parents[1] / "models" / "gru.onnx"
BATCH = 32


def batches(data: Digits, shortest: int, seed: int) -> list[dict[str, np.ndarray]]:
    """Return batches of digits from 0 to 3, each with `shortest` to 8 lines."""
    numbers = np.random.default_rng(seed)
    chosen = numbers.permutation(np.flatnonzero(data.labels < 4))
    found = []
    for start in range(0, len(chosen), BATCH):
        part = chosen[start : start + BATCH]
        lines = data.images[part, 0, : numbers.integers(shortest, 8, endpoint=True)]
        sequence = np.ascontiguousarray(lines.transpose(1, 0, 2))
        found.append({"sequence": sequence, "labels": data.labels[part]})
    return found


def main(epochs: int = 30) -> training.Result:
    """Return what came of the training."""
    train, test = digits()
    result = training.fit(
        MODEL,
        batches(train, 6, seed=0),
        loss="cross-entropy",
        learning_rate=0.02,
        schedule="cosine",
        clip_norm=1.0,
        epochs=epochs,
        evaluate=batches(test, 8, seed=1),
        metric="accuracy",
        progress=None,
    )
    print(result)
    return result


if __name__ == "__main__":
    main()
