"""Files that are replaced as a whole: a kill or a full disk leaves the old contents in place.

A new file is written beside the old one, flushed to the disk and renamed. What a killed process leaves behind
is removed by a later one.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

_SUFFIX = ".partial"
# Seconds after which a partial file that nobody writes to belongs to a process that has ended.
_ABANDONED = 600.0


class Partial:
    """A file that is written beside the place where `commit` puts it.

    If the context ends without a commit, the file is removed. What is not a regular file, such as /dev/stdout
    or a pipe, is written directly.
    """

    def __init__(self, target: str | os.PathLike[str]) -> None:
        # A link stays a link: the file that it names is replaced.
        self.target = Path(os.path.realpath(os.fspath(target)))
        self._is_file = not self.target.exists() or self.target.is_file() or self.target.is_dir()
        if not self._is_file:
            self.path = self.target
            self.file: BinaryIO = open(self.path, "wb")  # noqa: SIM115 (closed in finish)
            return
        mode = self.target.stat().st_mode & 0o777 if self.target.exists() else None
        pattern = rf"\.{re.escape(self.target.name)}\.[0-9a-f]{{16}}{re.escape(_SUFFIX)}"
        remove_abandoned(self.target.parent, re.compile(pattern))
        self.path = self.target.with_name(f".{self.target.name}.{secrets.token_hex(8)}{_SUFFIX}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        self.file = open(os.open(self.path, flags, 0o666), "wb")  # noqa: SIM115 (closed in finish)
        if mode is not None:
            # The new file is no more readable than the old one was.
            os.chmod(self.path, mode)

    def __enter__(self) -> Partial:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self.file.close()
        if self._is_file:
            with suppress(OSError):
                os.unlink(self.path)

    def finish(self) -> None:
        """Write everything to the disk."""
        self.file.flush()
        if self._is_file:
            os.fsync(self.file.fileno())
        self.file.close()

    def commit(self, target: Path | None = None) -> None:
        """Rename the finished file to its place."""
        if not self._is_file:
            return
        place = self.target if target is None else target
        os.replace(self.path, place)
        sync_folder(place.parent)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces the one at `path` when the context ends without an error.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "numbers")
    >>> with replacing(path) as file:
    ...     _ = file.write(b"1 2 3")
    >>> open(path, "rb").read()
    b'1 2 3'
    """
    with Partial(path) as partial:
        yield partial.file
        partial.finish()
        partial.commit()


def remove_abandoned(folder: Path, pattern: re.Pattern[str]) -> None:
    """Remove files with matching names that killed processes have left behind."""
    oldest = time.time() - _ABANDONED
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if pattern.fullmatch(entry.name):
                with suppress(OSError):
                    if entry.stat().st_mtime < oldest:
                        os.unlink(entry.path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes and threads that use this lock out, where the system can lock a folder."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk, where the system can do that."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
