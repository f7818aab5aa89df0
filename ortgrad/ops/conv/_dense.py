"""What plans of convolutions and of their gradients have in common."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ortgrad.ops._windows import Windows, windows
from ortgrad.ops.conv._geometry import Convolution, Frame, Spatial
from ortgrad.threads import lazy

Sizes = tuple[int, ...]
Known = tuple[int | None, ...] | None


@dataclass(frozen=True)
class Dense:
    """A convolution in three dimensions, with the filters and channels of a group."""

    win: Windows
    samples: int
    group: int
    filters: int
    channels: int

    @lazy
    def in_place(self) -> bool:
        """Whether windows see no padding, so that X and dX need no boxes around their channels."""
        win = self.win
        return not any(win.heads) and all(r <= n for r, n in zip(win.reach, win.sizes, strict=True))

    @lazy
    def box(self) -> Sizes:
        """The sizes of what windows see of a channel of X."""
        return self.win.sizes if self.in_place else self.win.reach

    @lazy
    def taps(self) -> int:
        return math.prod(self.win.kernel)

    @lazy
    def rows(self) -> int:
        """The number of positions of all samples."""
        return self.samples * math.prod(self.win.outputs)

    @property
    def convolution(self) -> Convolution:
        """The numbers that kernels read."""
        win = self.win
        return Convolution(
            output=Spatial(*win.outputs),
            stride=Spatial(*win.strides),
            x=Frame(Spatial(*win.sizes), Spatial(*self.box), Spatial(*win.heads)),
            x_in_place=self.in_place,
            samples=self.samples,
            groups=self.group,
            filters=self.filters,
            channels=self.channels,
            taps=self.taps,
        )


def windows_of(x: Sizes, w: Sizes, attributes: dict[str, Any]) -> tuple[Windows, int]:
    """Return the windows and the number of groups of a node with these attributes."""
    own = {name: value for name, value in attributes.items() if name not in ("group", "kernel_shape")}
    return windows(x[2:], w[2:], **own), attributes["group"]


def views_of(*shapes: Sizes | None) -> list[Sizes]:
    """Return the views of a plan in which all tensors are vectors; those that are absent are empty."""
    return [(0,) if shape is None else (math.prod(shape),) for shape in shapes]


def in_three_dimensions(win: Windows) -> Windows:
    """Return the same windows in three dimensions; all positions of a pointwise convolution are one row."""
    if max(win.kernel) == 1 and win.outputs == win.sizes and not any(win.heads):
        size, one, zero = (1, 1, math.prod(win.sizes)), (1, 1, 1), (0, 0, 0)
        return Windows(size, size, one, one, one, zero, zero)
    ones, zeros = (1,) * (3 - win.rank), (0,) * (3 - win.rank)
    return Windows(
        *(ones + sizes for sizes in (win.sizes, win.outputs, win.kernel, win.strides, win.dilations)),
        *(zeros + pads for pads in (win.heads, win.tails)),
    )


def reaches(win: Windows) -> list[Sizes]:
    """Return where each tap is in a window."""
    taps = itertools.product(*map(range, win.kernel))
    return [tuple(k * d for k, d in zip(tap, win.dilations, strict=True)) for tap in taps]


def place_in(position: Sequence[int], box: Sequence[int]) -> int:
    """Return the place of a position in a box."""
    return (position[0] * box[1] + position[1]) * box[2] + position[2]
