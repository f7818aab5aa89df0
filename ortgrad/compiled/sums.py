"""The division of sums over rows into blocks, by shapes only: results do not depend on threads."""

from __future__ import annotations

# The number of rows that are added in the element type.
ROWS = 32


def row_blocks(rows: int) -> int:
    """Return the number of blocks into which rows are divided: enough for threads, each of at most ROWS."""
    return max(-(-rows // ROWS), min(rows, 4))
