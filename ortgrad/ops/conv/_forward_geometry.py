"""Places of the numbers in the `geometry` of a compiled convolution."""

from __future__ import annotations

import math

# Three numbers each, one per spatial dimension.
OUTPUT, SIZE, STRIDE, HEAD = 0, 3, 6, 9
BOX = 12  # sizes of the box of a channel of X
SAMPLES, GROUPS, FILTERS, CHANNELS, TAPS = range(15, 20)  # filters and channels are those of a group
PLANE = 20  # elements of a box
BOXES = 21  # number of channels that are copied; 0 if X itself serves as the boxes
WIDTH, ROOM = 22, 23  # of a task: filters and positions, at most
TOGETHER = 24  # channels whose products are added up at once

# Activations.
CLIP, LEAKY = 1, 2


def activation_numbers(activation: str, alpha: float, beta: float) -> dict[str, int | float]:
    """The numbers of a plan that tell the kernel which activation to apply."""
    low, high = {"LeakyRelu": (alpha, 0.0), "Clip": (alpha, beta)}.get(activation, (0.0, math.inf))
    return {"activation": {"": 0, "LeakyRelu": LEAKY}.get(activation, CLIP), "low": low, "high": high}
