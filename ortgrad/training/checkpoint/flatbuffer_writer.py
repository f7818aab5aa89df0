"""Writes a flatbuffer without holding the tensors a second time: tables first, then the tensors' bytes.

References point forward only, so a parent is placed before its children. The builder of the package
`flatbuffers` would need memory for five times the size of the tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ortgrad.errors import CheckpointError
from ortgrad.training.checkpoint.checksum import Hashed
from ortgrad.training.checkpoint.state import as_bytes

# Offsets are signed in places, and readers refuse larger files.
_LARGEST = (1 << 31) - 1


@dataclass(frozen=True)
class Scalar:
    """A number in a table, with its format for struct."""

    format: str
    value: float


@dataclass(frozen=True)
class Blob:
    """A vector of bytes: the elements of an array."""

    array: np.ndarray


class Table(dict[int, "Scalar | Item"]):
    """Fields by number."""


class Tables(list[Table]):
    """A vector of tables."""


class Integers(tuple[int, ...]):
    """A vector of 64-bit integers."""

    __slots__ = ()


Item: TypeAlias = "Table | Tables | Integers | Blob | str"


def write(file: Hashed, root: Table, identifier: bytes) -> None:
    """Write a flatbuffer with this root table."""
    layout = _Layout(root, identifier)
    file.write(layout.structure)
    place = len(layout.structure)
    for start, blob in layout.blobs:
        content = as_bytes(blob.array)
        file.write(bytes(start - place) + struct.pack("<I", len(content)))
        file.write(content)
        place = start + 4 + len(content)


class _Layout:
    """The bytes of everything but the blobs, and the places of the blobs after them."""

    def __init__(self, root: Table, identifier: bytes) -> None:
        self.structure = bytearray(4) + identifier
        # Places of references, with what they refer to.
        self._open: list[tuple[int, Item]] = []
        references: list[tuple[int, Blob]] = []
        pending: list[tuple[int, Item]] = [(0, root)]
        while pending:
            reference, item = pending.pop()
            if isinstance(item, Blob):
                references.append((reference, item))
                continue
            self._open = []
            struct.pack_into("<I", self.structure, reference, self._add(item) - reference)
            pending.extend(reversed(self._open))
        self.blobs: list[tuple[int, Blob]] = []
        end = len(self.structure)
        for reference, blob in references:
            start = end + (-4 - end) % 8  # the elements themselves begin at a multiple of 8
            end = start + 4 + blob.array.nbytes
            if end > _LARGEST:
                raise CheckpointError(f"a checkpoint without external data cannot hold {end} bytes")
            struct.pack_into("<I", self.structure, reference, start - reference)
            self.blobs.append((start, blob))

    def _align(self, multiple: int, ahead: int = 0) -> int:
        """Pad so that what follows in `ahead` bytes begins at a multiple, and return the place."""
        self.structure.extend(bytes((-len(self.structure) - ahead) % multiple))
        return len(self.structure)

    def _refer(self, items: Iterable[Item]) -> None:
        for item in items:
            self._open.append((len(self.structure), item))
            self.structure.extend(bytes(4))

    def _add(self, item: Item) -> int:
        """Append an item, and return its place."""
        if isinstance(item, Table):
            return self._add_table(item)
        if isinstance(item, str):
            text = item.encode()
            place = self._align(4)
            self.structure += struct.pack("<I", len(text)) + text + b"\0"
        elif isinstance(item, Integers):
            place = self._align(8, 4)
            self.structure += struct.pack(f"<I{len(item)}q", len(item), *item)
        else:
            assert isinstance(item, Tables)
            place = self._align(4)
            self.structure += struct.pack("<I", len(item))
            self._refer(item)
        return place

    def _add_table(self, table: Mapping[int, Scalar | Item]) -> int:
        # Wide fields first: then no gaps are needed between them.
        order = sorted(table, key=lambda number: -_width(table[number]))
        fields: dict[int, int] = {}
        wide = bool(order) and _width(table[order[0]]) == 8
        size = 8 if wide else 4
        for number in order:
            fields[number] = size
            size += _width(table[number])
        offsets: Sequence[int] = [fields.get(i, 0) for i in range(max(table, default=-1) + 1)]
        length = 4 + 2 * len(offsets)
        place = self._align(8, length) + length
        self.structure += struct.pack(f"<2H{len(offsets)}H", length, size, *offsets)
        self.structure += struct.pack("<i", length) + bytes(4 * wide)
        for number in order:
            value = table[number]
            if isinstance(value, Scalar):
                self.structure += struct.pack(f"<{value.format}", value.value)
            else:
                self._refer([value])
        return place


def _width(value: Scalar | Item) -> int:
    return struct.calcsize(value.format) if isinstance(value, Scalar) else 4
