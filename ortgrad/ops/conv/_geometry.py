"""The numbers of plans of dense convolutions and their gradients."""

from __future__ import annotations

from typing import NamedTuple

from ortgrad.operators.records import size_of

# Columns of a tile, at most. Tiles narrower than this have a multiple of 16 columns.
COLUMNS = 64
# How many products are added up before they are added to the sums, which keeps rounding errors small.
TERMS = 256


class Spatial(NamedTuple):
    """A number for each spatial dimension."""

    depth: int
    height: int
    width: int


def volume(sizes: Spatial) -> int:
    """Return the number of elements."""
    return sizes.depth * sizes.height * sizes.width


class Frame(NamedTuple):
    """A channel and its box with zeros around it. The box ends where windows do, so it may be smaller."""

    size: Spatial  # of the channel
    box: Spatial
    head: Spatial  # the zeros before the channel


class Convolution(NamedTuple):
    """The numbers that all ways to compute a convolution or its gradient read."""

    output: Spatial
    stride: Spatial
    x: Frame
    x_in_place: bool  # whether X itself serves as the boxes
    samples: int
    groups: int
    filters: int  # of a group
    channels: int  # of a group
    taps: int


class Geometry(NamedTuple):
    """The numbers that all tasks of ConvGrad read."""

    conv: Convolution
    dy: Frame
    dy_in_place: bool
    panels: bool  # whether dX copies the columns of dY together
    dy_boxes: int  # tasks of the first phase
    x_boxes: int
    transpositions: int
    dx_tasks: int
    dw_tasks: int
    dx_channels: int  # of a task
    dx_blocks: int  # blocks of positions of a task
    dx_members: int  # parts of dX that a task computes because they share rows
    dw_rows: int  # of a task
    dw_skips: bool  # whether the products of dW with padding are left out
    kernel_columns: int  # taps in a row of the kernel
    db_filters: int  # of a task


class Part(NamedTuple):
    """A part of dX."""

    task: int  # its first task
    first: Spatial  # position
    counts: Spatial  # of positions
    place: Spatial  # the remainder of its places when divided by the strides
    tap: int  # its first tap, and their number
    taps: int
    units: int  # tasks in a line of positions


PART = size_of(Part)


class Range(NamedTuple):
    """The rows and columns of the output whose windows see no padding at a tap."""

    top: int
    bottom: int
    left: int
    right: int


RANGE = size_of(Range)
