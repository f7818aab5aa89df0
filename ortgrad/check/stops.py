"""Suppression of StoppedGradientWarning."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from ortgrad.errors import StoppedGradientWarning


@contextmanager
def quiet_stops() -> Iterator[None]:
    """Within this context, StoppedGradientWarning is ignored."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoppedGradientWarning)
        yield
