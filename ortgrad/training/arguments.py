"""Checks of numbers that users give."""

from __future__ import annotations

import operator
from typing import Any

from ortgrad.errors import ArgumentTypeError, TrainingError


def check_count(name: str, value: Any, least: int) -> int:
    """Return a whole number that is at least `least`; raises an error for anything else."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError as error:
        raise ArgumentTypeError(f"{name} is {value!r}; it must be a whole number") from error
    if number < least:
        raise TrainingError(f"{name} is {number}; it must be at least {least}")
    return number
