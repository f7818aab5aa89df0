"""Compiled kernels on disk, so that each is compiled once per machine.

A file is named after a digest of all that determines its contents, and begins with a digest of the rest. It
is written beside its place and renamed: several processes may write it at once, and none reads half of it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path

_DIGEST = 32


def folder() -> Path:
    """Return the folder of compiled kernels: $ORTGRAD_CACHE_DIR, or a folder among the user's caches."""
    given = os.environ.get("ORTGRAD_CACHE_DIR")
    if given:
        return Path(given)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ortgrad"


def has(key: str) -> bool:
    """Return whether something was written under a key."""
    try:
        return _path(key).exists()
    except (OSError, RuntimeError):
        return False


def is_writable() -> bool:
    """Return whether what is written can be read by other processes."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder()):
            return True
    except (OSError, RuntimeError):
        return False


def read(key: str) -> bytes | None:
    """Return what was written under a key; None if there is nothing, or if the file is damaged."""
    try:
        data = _path(key).read_bytes()
    except (OSError, RuntimeError):  # there may be no home folder
        return None
    digest, code = data[:_DIGEST], data[_DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def write(key: str, code: bytes) -> None:
    """Keep the object code for other processes, unless the folder cannot be written."""
    try:
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
    except (OSError, RuntimeError):
        return


def _path(key: str) -> Path:
    return folder() / f"{hashlib.sha256(key.encode()).hexdigest()}.o"
