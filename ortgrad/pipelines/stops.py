"""The warning about gradients that are zero because an operator has none."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ortgrad.errors import StoppedGradientWarning
from ortgrad.keywords import outside

# Python's own filters of warnings belong to the process: to change them would change them for other threads.
_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


def warn_about_stops(text: str | None) -> None:
    """Issue a StoppedGradientWarning if there is a text, unless that is suppressed in this context."""
    if text is not None and not _quiet.get():
        warnings.warn(text, StoppedGradientWarning, stacklevel=outside())


@contextmanager
def quiet_stops() -> Iterator[None]:
    """Within this context, no StoppedGradientWarning is issued."""
    before = _quiet.get()
    _quiet.set(True)
    try:
        yield
    finally:
        _quiet.set(before)
