"""Places of the numbers in the `geometry` of a compiled ConvGrad."""

from __future__ import annotations

# Three numbers each, one per spatial dimension.
OUTPUT, SIZE, STRIDE, HEAD = 0, 3, 6, 9
X_BOX = 12  # sizes of the box of a channel of X
DY_BOX, DY_HEAD = 15, 18  # sizes of the box of a channel of dY, and the zeros before dY in it
SAMPLES, GROUPS, FILTERS, CHANNELS, TAPS = range(21, 26)  # filters and channels are those of a group
X_IN_PLACE, DY_IN_PLACE = 26, 27  # whether the tensor itself serves as the boxes
PANELS = 28  # whether dX copies the columns of dY together
DY_BOXES, X_BOXES, TRANSPOSITIONS = 29, 30, 31  # numbers of tasks of the first phase
DX_TASKS, DW_TASKS = 32, 33
DX_CHANNELS, DX_BLOCKS = 34, 35  # of a task: channels, and blocks of positions
DW_ROWS = 36  # of a task
DW_SKIPS = 37  # whether the products of dW with padding are left out
KERNEL_COLUMNS = 38  # taps in a row of the kernel
DB_FILTERS = 39  # of a task
DX_MEMBERS = 40  # parts of dX that a task computes, as they share rows

# Numbers of a part of dX in `parts`: its first task; for each dimension the first position, the number of
# positions and the remainder of its place divided by the stride; its taps; the tasks in a line of positions.
PART_TASK, PART_FIRST, PART_COUNT, PART_PLACE, PART_TAP, PART_TAPS, PART_UNITS, PART_FIELDS = (
    0,
    1,
    4,
    7,
    10,
    11,
    12,
    13,
)

# Numbers of a tap in `ranges`: the rows and the columns of the output whose windows see no padding there.
RANGE_TOP, RANGE_BOTTOM, RANGE_LEFT, RANGE_RIGHT, RANGE_FIELDS = range(5)

# Columns of a tile, at most. Tiles narrower than this have a multiple of 16 columns.
COLUMNS = 64
# Products that are added up before they are added to the sums: as many as keep the rounding errors small.
TERMS = 256
