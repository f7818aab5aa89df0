"""Checksums of checkpoints, which show whether a file was damaged after it was written.

A checkpoint in onnxruntime-training's format ends in a trailer with the SHA-256 of everything before it.
Other readers ignore what follows a flatbuffer, and files of other writers have no trailer. The flatbuffer
itself says whether there must be one, so that damage to the trailer is noticed too.
"""

from __future__ import annotations

import hashlib
from typing import BinaryIO

import numpy as np

from ortgrad.training.checkpoint.flatbuffer_reader import damaged

_MARK = b"ortgrad1"
_SIZE = len(_MARK) + hashlib.sha256().digest_size
_AT_ONCE = 1 << 20


class Hashed:
    """A file that is written, with the SHA-256 of what has been written so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def write(self, content: bytes | bytearray | memoryview) -> None:
        self._hash.update(content)
        self._file.write(content)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def write_trailer(self) -> None:
        self._file.write(_MARK + self._hash.digest())


def has_trailer(contents: np.ndarray) -> bool:
    """Return whether a checkpoint ends in a trailer; raises CheckpointError if its contents do not match."""
    if len(contents) < _SIZE or contents[-_SIZE:][: len(_MARK)].tobytes() != _MARK:
        return False
    if hashlib.sha256(contents[:-_SIZE].data).digest() != contents[len(_MARK) - _SIZE :].tobytes():
        raise damaged("its contents do not match the checksum that was written with them")
    return True


def digest_of(file: BinaryIO) -> str:
    """Return the SHA-256 of an open file, and rewind it."""
    digest = hashlib.sha256()
    buffer = bytearray(_AT_ONCE)
    while count := file.readinto(buffer):  # type: ignore[attr-defined]
        digest.update(memoryview(buffer)[:count])
    file.seek(0)
    return digest.hexdigest()
