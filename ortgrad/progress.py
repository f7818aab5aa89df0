"""A progress bar in plain text: too little code to depend on a package such as tqdm for it."""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType
from typing import TextIO

WIDTH = 24
SHORT = 5  # seconds; less is not worth telling
INTERVAL = 0.1  # seconds between two updates


class Progress:
    """`with Progress() as progress: progress(done, total, text)` draws a bar, and removes it at the end.

    By default it is drawn on stderr if that is a terminal; `show` overrides this.
    """

    def __init__(self, show: bool | None = None, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._show = self._stream.isatty() if show is None else show
        self._drawn = 0
        self._last = -INTERVAL
        self._started = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._draw("")

    def __call__(self, done: int, total: int, text: str = "") -> None:
        now = time.monotonic()
        if now - self._last < INTERVAL and done < total:
            return
        self._last = now
        filled = WIDTH * done // max(total, 1)
        left = (now - self._started) / done * (total - done) if done else 0.0
        hint = f"{left:.0f} s left, " if left >= SHORT else ""
        self._draw(f"[{'#' * filled}{'.' * (WIDTH - filled)}] {done}/{total} {hint}{text}")

    def say(self, line: str) -> None:
        """Write a line that stays, if the bar is shown."""
        if self._show:
            self._draw("")
            self._stream.write(f"{line}\n")

    def _draw(self, line: str) -> None:
        if not self._show:
            return
        line = line[: shutil.get_terminal_size().columns - 1]
        # Padded with blanks, to erase the rest of a longer line.
        self._stream.write(f"\r{line:<{self._drawn}}")
        if not line:
            self._stream.write("\r")
        self._stream.flush()
        self._drawn = len(line)
