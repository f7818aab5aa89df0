"""Sums in the kernels of fused nodes. Their order depends on shapes only, not on the number of threads.

Sums by rows are added up in pieces, each in several accumulators of the element type, and the pieces in
double precision. Sums by columns are computed for blocks of rows, in the element type, and then added up in
double precision. Both are more accurate than NumPy's sums.
"""

from __future__ import annotations

import numpy as np

from ortgrad.compiled.functions import SUMS, double, doubles

# The number of elements of a row that are added in the element type. The compiler divides them among the
# elements of several vectors, so that each is a sum of a few terms.
PIECE = 512


def add_parts(
    parts: np.ndarray,
    sums: np.ndarray,
    columns: int,
    pieces: int,
    kept_rows: int,
    added_rows: int,
    kept_columns: int,
    added_columns: int,
) -> None:
    """Add up parts[row, column, piece] along the pieces and the rows or columns that are not kept.

    The number of kept rows, or that of added ones, is 1, and so it is for columns.
    """
    for i in range(kept_rows):
        for j in range(kept_columns):
            total = double(0.0)
            for row in range(i, i + added_rows):
                for column in range(j, j + added_columns):
                    first = (row * columns + column) * pieces
                    for k in range(first, first + pieces):
                        total += double(parts[k])
            sums[i * kept_columns + j] = sums.dtype.type(total)


def add_columns(parts: np.ndarray, sums: np.ndarray, first: int, blocks: int) -> None:
    """sums[k] = the sum of parts[:, k], for the SUMS columns from `first` on"""
    columns = len(sums)
    width = min(SUMS, columns - first)
    totals = doubles()
    for k in range(width):
        totals[k] = 0.0
    for i in range(blocks):
        row = parts[i * columns + first : i * columns + first + width]
        for k in range(width):
            totals[k] += double(row[k])
    into = sums[first : first + width]
    for k in range(width):
        into[k] = sums.dtype.type(totals[k])
