"""Transposition of a matrix, for compiled kernels."""

from __future__ import annotations

import numpy as np

from ortgrad.compiled.functions import TILE, transpose


def turn(turned: np.ndarray, matrix: np.ndarray, first: int, rows: int) -> None:
    """Copy up to TILE columns of a matrix with `rows` rows, from `first` on, into rows."""
    columns = len(matrix) // rows
    count, done = min(TILE, columns - first), 0
    while count == TILE and done + TILE <= rows:
        transpose(turned, first * rows + done, rows, matrix, done * columns + first, columns)
        done += TILE
    for i in range(count):
        for k in range(done, rows):
            turned[(first + i) * rows + k] = matrix[k * columns + first + i]
