"""Compiled kernels on disk, so that each is compiled once per machine.

A file is named after a digest of all that determines its contents (the key of the kernel), and begins with a
signature of key and contents. It is written beside its place and renamed: several processes may write it at
once, and none reads half of it.

What is in a file is executed, so it must come from this user. As ssh does with keys, folders and files are
refused that belong to others than this user and root, or that others can write; this is looked up on the open
file, which nobody can exchange. The signature is made with a secret number in the user's own folder, or in a
file beside the kernels if they are for several users (`ortgrad compile --shared`). A file that was copied
from elsewhere, or renamed, is not loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import stat
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_SIGNATURE = _SECRET = 32  # bytes
_SECRET_NAME = "key"
_LARGEST = 1 << 28  # bytes of all files; a network has less than a million
_FORGOTTEN = 120 * 86400.0  # seconds after which a file that was not used is removed
_RECENT = 86400.0  # seconds for which no use of a file is noted again
_WRITES = 100  # from one look at the size of the folder to the next, in a process
_OWN_FILES = re.compile(r"[0-9a-f]{64}\.o|tmp[0-9a-f]{16}")
# The system has owners and permissions of files, and functions that take open folders.
_POSIX = os.name == "posix"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ERRORS = (OSError, RuntimeError)  # there may be no home folder

_warned = False
_writes = 0


class _UnsafeError(OSError):
    """A file or folder that others can change."""


def folder() -> Path:
    """Return the folder of compiled kernels: $ORTGRAD_CACHE_DIR, or a folder among the user's caches."""
    given = os.environ.get("ORTGRAD_CACHE_DIR")
    return Path(given) if given else _user_folder()


def _user_folder() -> Path:
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ortgrad"


def has(key: str) -> bool:
    """Return whether something was written under a key."""
    return read(key) is not None


def is_writable() -> bool:
    """Return whether what is written can be read by other processes."""
    try:
        with _Folder(folder(), create=True) as place:
            place.secret(create=True)
            place.remove(place.write_aside(b""))
            return True
    except _UnsafeError as error:
        _warn(error)
    except _ERRORS:
        pass
    return False


def read(key: str) -> bytes | None:
    """Return what was written under a key; None if there is nothing, or nothing that can be trusted."""
    try:
        with _Folder(folder()) as place:
            data = place.read(_name(key), used=True)
            secret = place.secret()
    except FileNotFoundError:
        return None
    except _UnsafeError as error:
        _warn(error)
        return None
    except _ERRORS:
        return None
    signature, code = data[:_SIGNATURE], data[_SIGNATURE:]
    return code if hmac.compare_digest(signature, _sign(secret, key, code)) else None


def write(key: str, code: bytes) -> None:
    """Keep the object code for other processes, unless the folder cannot be written or is not safe."""
    global _writes
    try:
        with _Folder(folder(), create=True) as place:
            signature = _sign(place.secret(create=True), key, code)
            place.rename(place.write_aside(signature + code), _name(key))
            if _writes % _WRITES == 0:
                place.prune()
            _writes += 1
    except _UnsafeError as error:
        _warn(error)
    except _ERRORS:
        return


def read_plain(name: str, most: int) -> bytes | None:
    """Return a file of at most `most` bytes that is never executed; None if there is none, or it is not safe.

    It is not signed, so it must be checked by the reader.
    """
    try:
        with _Folder(folder()) as place:
            data = place.read(name, most + 1)
    except _UnsafeError as error:
        _warn(error)
        return None
    except _ERRORS:
        return None
    return data if len(data) <= most else None


def write_plain(name: str, data: bytes) -> None:
    """Write a file that is never executed; raises OSError if the folder cannot be written or is not safe."""
    with _Folder(folder(), create=True) as place:
        place.rename(place.write_aside(data), name)


def share(path: Path) -> None:
    """Make a folder of kernels that all users of this machine, or of a container image, can read.

    Raises OSError if that is not possible.
    """
    with _Folder(path, create=True) as place:
        place.make_secret()
        place.allow_reading()


def _name(key: str) -> str:
    return f"{hashlib.sha256(key.encode()).hexdigest()}.o"


def _sign(secret: bytes, key: str, code: bytes) -> bytes:
    return hmac.digest(secret, hashlib.sha256(key.encode()).digest() + code, "sha256")


def _warn(error: _UnsafeError) -> None:
    """Say once in a process why kernels do not come from the cache."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(f"the cache of compiled kernels is not used: {error}", RuntimeWarning, stacklevel=4)


class _Folder:
    """An open folder that only this user and root can write; raises _UnsafeError for others."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self._path = path
        self._handle: int | None = None
        # Whether all users can read the folder's own secret.
        self._shared = False
        if create:
            for each in (*reversed(path.parents), path):
                with contextlib.suppress(FileExistsError):
                    if not each.is_dir():
                        each.mkdir(mode=0o700)
        if not _POSIX:
            if not path.is_dir():
                raise FileNotFoundError(path)
            return
        self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _require_safe(path, os.fstat(self._handle))
        except OSError:
            os.close(self._handle)
            raise

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            os.close(self._handle)

    def _at(self, name: str) -> Any:
        return name if _POSIX else self._path / name

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[BinaryIO]:
        """Open a file to read it, if only this user and root can write it."""
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        handle = os.open(self._at(name), flags, dir_fd=self._handle)
        with os.fdopen(handle, "rb") as file:
            if _POSIX:
                status = os.fstat(handle)
                if not stat.S_ISREG(status.st_mode):
                    raise _UnsafeError(f"{self._path / name} is not an ordinary file")
                _require_safe(self._path / name, status)
            yield file

    def read(self, name: str, most: int = -1, *, used: bool = False) -> bytes:
        with self._open(name) as file:
            if used and time.time() - os.fstat(file.fileno()).st_mtime > _RECENT:
                # Those that were not used for the longest time are forgotten first.
                with contextlib.suppress(OSError):
                    os.utime(file.fileno() if _POSIX else self._at(name))
            return file.read(most)

    def write_aside(self, data: bytes) -> str:
        """Write a new file and return its name, which nobody else uses."""
        name = f"tmp{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        handle = os.open(self._at(name), flags, 0o600, dir_fd=self._handle)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                if self._shared and _POSIX:
                    os.fchmod(handle, 0o644)
        except BaseException:
            self.remove(name)
            raise
        return name

    def rename(self, old: str, new: str) -> None:
        try:
            os.replace(self._at(old), self._at(new), src_dir_fd=self._handle, dst_dir_fd=self._handle)
        except OSError:
            self.remove(old)
            raise

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._at(name), dir_fd=self._handle)

    def secret(self, *, create: bool = False) -> bytes:
        """Return the number with which the kernels are signed: that in the folder, or else the user's."""
        try:
            return self._secret_here()
        except FileNotFoundError:
            with contextlib.suppress(*_ERRORS), _Folder(_user_folder(), create=create) as own:
                return own.make_secret() if create else own._secret_here()
            if not create:
                raise
            # There is no home folder, or it is read-only.
            return self.make_secret()

    def _secret_here(self) -> bytes:
        with self._open(_SECRET_NAME) as file:
            found, self._shared = file.read(), bool(os.fstat(file.fileno()).st_mode & stat.S_IROTH)
        if len(found) != _SECRET:
            raise FileNotFoundError(self._path / _SECRET_NAME)
        return found

    def make_secret(self) -> bytes:
        """Return the secret of this folder, which is made if there is none. All processes get the same."""
        with contextlib.suppress(FileNotFoundError):
            return self._secret_here()
        aside = self.write_aside(secrets.token_bytes(_SECRET))
        try:
            with contextlib.suppress(FileExistsError):
                os.link(
                    self._at(aside), self._at(_SECRET_NAME), src_dir_fd=self._handle, dst_dir_fd=self._handle
                )
            return self._secret_here()
        except OSError:
            # A damaged file is replaced, and so is any where there are no links.
            self.rename(aside, _SECRET_NAME)
            return self._secret_here()
        finally:
            self.remove(aside)

    def allow_reading(self) -> None:
        """Let all users read what is in the folder, and what will be."""
        self._shared = True
        if self._handle is not None:
            os.fchmod(self._handle, 0o755)
            for name in (_SECRET_NAME, *filter(_OWN_FILES.fullmatch, os.listdir(self._handle))):
                with self._open(name) as file:
                    os.fchmod(file.fileno(), 0o644)

    def prune(self) -> None:
        """Remove what was not used for months, and more if all takes too much room, oldest first."""
        found = []
        for name in filter(
            _OWN_FILES.fullmatch, os.listdir(self._path if self._handle is None else self._handle)
        ):
            with contextlib.suppress(OSError):  # another process may remove it
                status = os.stat(self._at(name), dir_fd=self._handle, follow_symlinks=False)
                found.append((status.st_mtime, status.st_size, name))
        total, now = 0, time.time()
        for used, size, name in sorted(found, reverse=True):
            total += size
            age = now - used
            if age > (_RECENT if name.startswith("tmp") else _FORGOTTEN) or total > _LARGEST:
                self.remove(name)


def _require_safe(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise _UnsafeError(
            f"{path} belongs to another user (number {status.st_uid}), who could put other code there; "
            "set ORTGRAD_CACHE_DIR to a folder of your own"
        )
    if status.st_mode & _OTHERS_WRITE:
        raise _UnsafeError(
            f"others can write {path}, and what is in it is executed; chmod go-w {path}, or set "
            "ORTGRAD_CACHE_DIR to a folder of your own"
        )
