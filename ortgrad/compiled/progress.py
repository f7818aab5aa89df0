"""The line on the terminal that says what is being compiled, if that takes long."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE = 1.0  # seconds of compilation before something is shown


class Progress:
    """Shows which kernel is being compiled, once compilation has taken a second, or if it surely will."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextmanager
    def compiling(self, name: str, seconds: float = 0.0) -> Iterator[None]:
        """Within this context, a kernel is compiled, which is known to take some seconds."""
        if self._seconds + seconds > _PATIENCE and sys.stderr is not None:
            print(f"ortgrad: compiling {name}, once for this machine", file=sys.stderr, flush=True)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - start
