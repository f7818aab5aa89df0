"""Plans for convolutions with few positions: what they cost, and their division into tasks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ortgrad.compiled.functions import TILE, TILE_ROWS
from ortgrad.ops.conv._dense import Dense
from ortgrad.ops.conv._few_positions import TOGETHER, Few
from ortgrad.ops.conv._geometry import COLUMNS
from ortgrad.ops.conv.costs import FewDw, FewDx
from ortgrad.threads import lazy

# Columns of a block. For dX, its weights stay in the cache for all positions; for dW, the matrix of what
# windows see does.
_MOST_DX_COLUMNS, _MOST_DW_COLUMNS, _CACHED = 144, 256, 4096
_MOST_ROWS = 512
_MOST_BIASES, _SUMMANDS = 64, 1 << 14


class FewPositions(Dense):
    """A convolution that may have few positions."""

    @lazy
    def biases_of_task(self) -> int:
        """The number of filters for which a task computes dB."""
        return max(1, min(_MOST_BIASES, _SUMMANDS // self.rows))

    @property
    def dx_is_possible(self) -> bool:
        """Whether a row of weights fills a vector."""
        return self.rows <= _MOST_ROWS and self.channels * self.taps >= TILE

    @property
    def dw_is_possible(self) -> bool:
        return self.rows <= _MOST_ROWS

    @property
    def dx_counts(self) -> FewDx:
        """How often each cost of dX occurs."""
        tiles = -(-self.rows // TILE_ROWS) * -(-self.channels * self.taps // COLUMNS)
        tiles *= -(-self.filters // TOGETHER) * self.group
        return FewDx(1, tiles, *self._further_counts)

    @property
    def dw_counts(self) -> FewDw:
        """How often each cost of dW occurs."""
        tiles = -(-self.filters // TILE_ROWS) * -(-self.channels * self.taps // COLUMNS) * self.group
        return FewDw(1, self.group, tiles, *self._further_counts)

    @property
    def _further_counts(self) -> tuple[int, int, int, int]:
        """Return the counts of what windows see, of rows of boxes, of products and of weights."""
        channels = self.channels * self.group
        rows = 0 if self.in_place else self.samples * channels * self.win.sizes[0] * self.win.sizes[1]
        weights = self.filters * channels * self.taps
        return self.rows * channels * self.taps, rows, weights * self.rows, weights


@dataclass(frozen=True)
class Division:
    """How dX and dW, or one of them, are divided into tasks."""

    dx_tasks: int
    dw_tasks: int
    memory: int  # elements of the scratch memory
    numbers: Few

    @classmethod
    def of(cls, few: FewPositions, tasks: int, *, dx: bool, dw: bool) -> Division:
        """Divide dX and dW, if this way computes them, into about `tasks` tasks each."""
        channels, taps, rows = few.channels, few.taps, few.rows
        plane = 0 if few.in_place else few.samples * math.prod(few.box)
        most = max(TILE, -(-channels * few.group // tasks))
        step = min(most, channels, _block_of_channels(taps, rows))
        dx_memory = rows * (step * taps // TILE * TILE + TILE) + plane * step + 2 * TILE
        columns = max(TILE, -(-channels * taps * few.group // tasks) // TILE * TILE)
        block = max(COLUMNS, min(_MOST_DW_COLUMNS, _CACHED // rows) // COLUMNS * COLUMNS)
        block = min(columns, block)
        dw_memory = rows * (block + TILE) + TILE_ROWS * TILE + 2 * TILE
        dw_memory += plane * ((block + TILE - 1) // taps + 2)
        dx_tasks = few.group * -(-channels // most) if dx else 0
        dw_tasks = few.group * max(1, channels * taps // columns) if dw else 0
        of_dx = dx_tasks * dx_memory
        numbers = Few(dx, dw, of_dx, most, step, dx_memory, columns, block, dw_memory)
        return cls(dx_tasks, dw_tasks, of_dx + dw_tasks * dw_memory, numbers)


def _block_of_channels(taps: int, rows: int) -> int:
    """Return how many channels have pairs that fill tiles best."""
    most = max(COLUMNS, min(_MOST_DX_COLUMNS, 2 * _CACHED // rows))

    def cost(size: int) -> float:
        columns = -(-size * taps // TILE) * TILE
        return (columns + 4 * -(-columns // COLUMNS) + 2) / (size * taps)

    return min(range(max(1, COLUMNS // 2 // taps), max(1, most // taps) + 1), key=cost)
