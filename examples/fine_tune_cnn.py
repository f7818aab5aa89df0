"""Fine-tune the last layers of a CNN on other images than those that it was trained on.

    python examples/fine_tune_cnn.py [TRAINED.onnx]

A small CNN learns handwritten digits (they come with scikit-learn). Then the images are shown as
negatives. Only the layer `fc` is trained further; the convolutions stay as they are.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx

from ortgrad import training
from ortgrad.cli.demo import digits

MODEL = Path(__file__).parents[1] / "models" / "cnn.onnx"


def main(path: Path | None = None) -> tuple[float, float, list[str]]:
    """Return the accuracy on negatives before and after, and the names of the weights that changed."""
    train, test = digits()
    first = training.fit(
        MODEL,
        (train.images, train.labels),
        loss="cross-entropy",
        learning_rate=0.02,
        schedule="cosine",
        epochs=15,
    )
    trained = first.model

    trainer = training.Trainer(
        trained, loss="cross-entropy", wrt="fc.*", learning_rate=0.02, schedule="cosine", warmup=0.1
    )
    held_out = (1 - test.images, test.labels)
    _, before = trainer.evaluate(held_out, "accuracy")
    result = trainer.fit(
        (1 - train.images, train.labels), epochs=20, evaluate=held_out, metric="accuracy", progress=None
    )
    assert before is not None and result.metric is not None
    old, new = (
        {t.name: onnx.numpy_helper.to_array(t) for t in m.graph.initializer} for m in (trained, result.model)
    )
    changed = [name for name in old if not np.array_equal(old[name], new[name])]
    print(f"negatives, before: {before:.1%} right")
    print(f"negatives, after:  {result.metric:.1%} right ({result})")
    print(f"changed: {', '.join(changed)}")
    if path is not None:
        result.export(path)
        print(f"written to {path}")
    return before, result.metric, changed


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:2]))
