"""Loops over the elements of rows, for compiled kernels."""

from __future__ import annotations

import numpy as np


def add_to(row: np.ndarray, values: np.ndarray) -> None:
    """Add values to the first elements of a row."""
    for k in range(len(values)):
        row[k] += values[k]


def fill_row(row: np.ndarray, value: float) -> None:
    for k in range(len(row)):
        row[k] = value


def clear_row(row: np.ndarray) -> None:
    for k in range(len(row)):
        row[k] = 0.0
