"""What the kernels of compiled convolutions have in common: their numbers, and how results are written."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ortgrad.ops._rows import add_to
from ortgrad.ops.conv._geometry import Convolution


class Geometry(NamedTuple):
    """The numbers that all tasks read."""

    conv: Convolution
    boxes: int  # channels that are copied; 0 if X itself serves as the boxes
    width: int  # of a task: filters, at most
    room: int  # of a task: positions, at most
    together: int  # channels whose products are added up at once


class Result(NamedTuple):
    """Y, and what is applied to sums of products before they are written there."""

    b: np.ndarray
    z: np.ndarray
    y: np.ndarray
    activation: int
    low: float
    high: float


# Activations.
CLIP, LEAKY = 1, 2


def activation_numbers(attributes: dict[str, Any]) -> dict[str, int | float]:
    """Remove the activation from attributes; return the numbers that tell the kernel which one to apply."""
    activation, alpha, beta = (attributes.pop(name) for name in ("activation", "alpha", "beta"))
    low, high = {"LeakyRelu": (alpha, 0.0), "Clip": (alpha, beta)}.get(activation, (0.0, math.inf))
    return {"activation": {"": 0, "LeakyRelu": LEAKY}.get(activation, CLIP), "low": low, "high": high}


def write(result: Result, m: int, place: int, sums: np.ndarray) -> None:
    """Write sums of filter m to a place of Y, after what is applied to them."""
    end = place + len(sums)
    if len(result.z) > 0:
        add_to(sums, result.z[place:end])
    bias = result.b[m] if len(result.b) > 0 else 0.0
    finish(result.y[place:end], sums, bias, result.activation, result.low, result.high)


def finish(y: np.ndarray, sums: np.ndarray, bias: float, activation: int, low: float, high: float) -> None:
    """Add a bias and apply an activation, which keeps NaN."""
    if activation == 0:
        for k in range(len(y)):
            y[k] = sums[k] + bias
    elif activation == CLIP:
        for k in range(len(y)):
            value = sums[k] + bias
            value = low if value < low else value
            y[k] = high if value > high else value
    else:
        for k in range(len(y)):
            value = sums[k] + bias
            y[k] = value if value >= 0.0 else value * low
