"""Gradients that are zero because every path to them is stopped."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from ortgrad.errors import StoppedGradientWarning


@contextmanager
def quiet_stops() -> Iterator[None]:
    """Build gradient models without the warning that gradients are zero."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoppedGradientWarning)
        yield
