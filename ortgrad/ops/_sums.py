"""Sums in compiled kernels. Their order depends on shapes only, so results do not depend on threads.

A long row is added up in chunks, each in several accumulators of the element type, and the chunks in double
precision. Sums over many rows are made in two phases: the sums of blocks of rows go to a scratch tensor of
the element type, and are then added up in double precision. Both are more accurate than NumPy's sums.
"""

from __future__ import annotations

import numpy as np

from ortgrad.compiled.functions import SUMS, double, doubles

# The number of elements that are added in the element type. The compiler divides them among the elements of
# several vectors, so that each is a sum of a few terms.
CHUNK = 512


def groups_of(columns: int) -> int:
    """Return the number of groups of SUMS columns."""
    return -(-columns // SUMS)


def add_blocks(blocks: np.ndarray, first: int, total: np.ndarray) -> None:
    """total[k] = the sum of blocks[:, k], for the SUMS columns from `first` on"""
    width = min(SUMS, len(total) - first)
    sums = doubles()
    for k in range(width):
        sums[k] = 0.0
    for i in range(blocks.shape[0]):
        row = blocks[i, first : first + width]
        for k in range(width):
            sums[k] += double(row[k])
    into = total[first : first + width]
    for k in range(width):
        into[k] = total.dtype.type(sums[k])
