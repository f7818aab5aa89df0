"""The numbers of a plan of ConvGrad."""

from __future__ import annotations

from typing import NamedTuple

from ortgrad.operators.records import size_of

# Columns of a tile, at most. Tiles narrower than this have a multiple of 16 columns.
COLUMNS = 64
# Products that are added up before they are added to the sums: as many as keep the rounding errors small.
TERMS = 256


class Spatial(NamedTuple):
    """A number for each spatial dimension."""

    depth: int
    height: int
    width: int


def volume(sizes: Spatial) -> int:
    """Return the number of elements."""
    return sizes.depth * sizes.height * sizes.width


class Geometry(NamedTuple):
    """The numbers that all tasks read."""

    output: Spatial
    size: Spatial
    stride: Spatial
    head: Spatial
    x_box: Spatial  # sizes of the box of a channel of X
    samples: int
    groups: int
    filters: int  # of a group
    channels: int  # of a group
    taps: int
    x_in_place: bool  # whether X itself serves as the boxes
    # The way for few positions reads only those before.
    dy_in_place: bool = False
    dy_box: Spatial = Spatial(0, 0, 0)  # sizes of the box of a channel of dY
    dy_head: Spatial = Spatial(0, 0, 0)  # the zeros before dY in it
    panels: bool = False  # whether dX copies the columns of dY together
    dy_boxes: int = 0  # tasks of the first phase
    x_boxes: int = 0
    transpositions: int = 0
    dx_tasks: int = 0
    dw_tasks: int = 0
    dx_channels: int = 0  # of a task
    dx_blocks: int = 0  # blocks of positions of a task
    dx_members: int = 0  # parts of dX that a task computes, as they share rows
    dw_rows: int = 0  # of a task
    dw_skips: bool = False  # whether the products of dW with padding are left out
    kernel_columns: int = 0  # taps in a row of the kernel
    db_filters: int = 0  # of a task


class Part(NamedTuple):
    """A part of dX."""

    task: int  # its first task
    first: Spatial  # position
    counts: Spatial  # of positions
    place: Spatial  # the remainder of its place divided by the stride
    tap: int  # its first tap, and how many it has
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
