"""Digits that a classifier gets wrong after a change that people hardly see (fast gradient sign method).

    python examples/fgsm.py

Every pixel moves by at most EPSILON (the range is 0 to 1) in the direction that raises the loss:
the sign of the loss's gradient with respect to the image. Moving as far in random directions does
next to nothing. The digits come with scikit-learn.
"""

from __future__ import annotations

import numpy as np

import ortgrad
from ortgrad.cli.demo import Digits, accuracy, digits, trained_classifier, with_loss

EPSILON = 0.1


def main(epochs: int = 10) -> tuple[float, float, float]:
    """Returns the accuracies on digits as they are, with random changes, and with adversarial ones."""
    model = trained_classifier(epochs)
    _, testing = digits()

    # The gradient towards an input: no training set-up is needed, only a loss.
    backward = ortgrad.build_gradient_model(with_loss(model), wrt="image", of="loss")
    session = ortgrad.InferenceSession(backward)
    (gradient,) = session.run(["image_grad"], {"image": testing.images, "labels": testing.labels})

    noise = np.random.default_rng(0).standard_normal(gradient.shape, dtype=np.float32)

    def moved(direction: np.ndarray) -> Digits:
        images = np.clip(testing.images + EPSILON * np.sign(direction), 0, 1)
        return Digits(images, testing.labels)

    clean, at_random, adversarial = (
        accuracy(model, data) for data in (testing, moved(noise), moved(gradient))
    )
    print(f"accuracy on {len(testing)} digits:   {clean:.1%}")
    print(f"pixels moved at random:      {at_random:.1%}")
    print(f"pixels moved by the gradient: {adversarial:.1%}")
    return clean, at_random, adversarial


if __name__ == "__main__":
    main()
