"""The numbers of a plan of a compiled convolution."""

from __future__ import annotations

import math
from typing import NamedTuple

from ortgrad.ops.conv._geometry import Spatial


class Geometry(NamedTuple):
    """The numbers that all tasks read."""

    output: Spatial
    size: Spatial
    stride: Spatial
    head: Spatial
    box: Spatial  # sizes of the box of a channel of X
    samples: int
    groups: int
    filters: int  # of a group
    channels: int  # of a group
    taps: int
    plane: int  # elements of a box
    boxes: int  # channels that are copied; 0 if X itself serves as the boxes
    width: int  # of a task: filters, at most
    room: int  # of a task: positions, at most
    together: int  # channels whose products are added up at once


# Activations.
CLIP, LEAKY = 1, 2


def activation_numbers(activation: str, alpha: float, beta: float) -> dict[str, int | float]:
    """The numbers of a plan that tell the kernel which activation to apply."""
    low, high = {"LeakyRelu": (alpha, 0.0), "Clip": (alpha, beta)}.get(activation, (0.0, math.inf))
    return {"activation": {"": 0, "LeakyRelu": LEAKY}.get(activation, CLIP), "low": low, "high": high}
