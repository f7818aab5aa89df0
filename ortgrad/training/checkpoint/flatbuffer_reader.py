"""Bounds-checked access to the bytes of a flatbuffer.

A flatbuffer consists of tables that refer to other tables, strings and vectors by offsets. Any of them may be
wrong in a damaged or hostile file, so every access is checked against the size of the file, and all accesses
together against a multiple of it: many references to one place must not make a small file expensive.
The package `flatbuffers` has no verifier: on such files its classes raise errors of struct and NumPy, or
return wrong values.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from ortgrad.errors import CheckpointError

_UOFFSET, _SOFFSET, _VOFFSET = struct.Struct("<I"), struct.Struct("<i"), struct.Struct("<H")
_SCALARS = {"int32": struct.Struct("<i"), "int64": struct.Struct("<q"), "float": struct.Struct("<f")}
_SCALARS["bool"] = struct.Struct("<B")


class Buffer:
    """The bytes of a file."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data.data
        # No part of a file that a program writes is read more often than a few times.
        self._remaining = 4 * len(self._data) + 64

    def __len__(self) -> int:
        return len(self._data)

    def number(self, kind: struct.Struct, place: int) -> int | float:
        self.span(place, kind.size)
        return kind.unpack_from(self._data, place)[0]

    def integer(self, kind: struct.Struct, place: int) -> int:
        return int(self.number(kind, place))

    def span(self, place: int, size: int) -> memoryview:
        """Return `size` bytes at a place."""
        if place < 0 or size < 0 or place + size > len(self._data):
            raise damaged(f"it refers to {size} bytes at {place}, but has only {len(self._data)}")
        self._remaining -= size
        if self._remaining < 0:
            raise damaged("its parts overlap")
        return self._data[place : place + size]

    def follow(self, place: int) -> int:
        """Return the place to which the reference at a place points."""
        return place + self.integer(_UOFFSET, place)

    def vector(self, place: int, item: int) -> tuple[int, int]:
        """Return the place and number of the elements of the vector at a place."""
        count = self.integer(_UOFFSET, place)
        self.span(place + 4, count * item)
        return place + 4, count

    def root(self) -> Table:
        return Table(self, self.follow(0))


class Table:
    """A table, whose fields are numbered and may be absent."""

    def __init__(self, buffer: Buffer, place: int) -> None:
        self._buffer, self._place = buffer, place
        self._fields = place - buffer.integer(_SOFFSET, place)
        fields_size = buffer.integer(_VOFFSET, self._fields)
        self._size = buffer.integer(_VOFFSET, self._fields + 2)
        if fields_size < 4 or self._size < 4:
            raise damaged(f"the table at {place} has no size")
        self._count = (fields_size - 4) // 2
        buffer.span(self._fields, fields_size)
        buffer.span(place, self._size)

    def _field(self, number: int, size: int) -> int | None:
        """Return the place of a field; None if it is absent."""
        if number >= self._count:
            return None
        offset = self._buffer.integer(_VOFFSET, self._fields + 4 + 2 * number)
        if offset == 0:
            return None
        if offset < 4 or offset + size > self._size:
            raise damaged(f"field {number} of the table at {self._place} is outside of it")
        return self._place + offset

    def _target(self, number: int) -> int | None:
        place = self._field(number, 4)
        return None if place is None else self._buffer.follow(place)

    def integer(self, number: int, kind: str, default: int = 0) -> int:
        scalar = _SCALARS[kind]
        place = self._field(number, scalar.size)
        return default if place is None else self._buffer.integer(scalar, place)

    def real(self, number: int) -> float:
        place = self._field(number, 4)
        return 0.0 if place is None else float(self._buffer.number(_SCALARS["float"], place))

    def text(self, number: int) -> str | None:
        place = self._target(number)
        if place is None:
            return None
        start, count = self._buffer.vector(place, 1)
        try:
            return bytes(self._buffer.span(start, count)).decode()
        except UnicodeDecodeError as error:
            raise damaged(f"the text at {place} is not UTF-8") from error

    def table(self, number: int) -> Table | None:
        place = self._target(number)
        return None if place is None else Table(self._buffer, place)

    def tables(self, number: int) -> Iterator[Table]:
        """Yield the tables of a vector; none if it is absent."""
        place = self._target(number)
        if place is not None:
            start, count = self._buffer.vector(place, 4)
            for i in range(count):
                yield Table(self._buffer, self._buffer.follow(start + 4 * i))

    def integers(self, number: int, most: int) -> list[int] | None:
        """Return a vector of at most `most` 64-bit integers; None if it is absent."""
        place = self._target(number)
        if place is None:
            return None
        start, count = self._buffer.vector(place, 8)
        if count > most:
            raise damaged(f"the vector at {place} has {count} elements; at most {most} are possible")
        return list(struct.unpack(f"<{count}q", self._buffer.span(start, 8 * count)))

    def data(self, number: int) -> memoryview | None:
        """Return a vector of bytes; None if it is absent."""
        place = self._target(number)
        if place is None:
            return None
        start, count = self._buffer.vector(place, 1)
        return self._buffer.span(start, count)


def damaged(reason: str) -> CheckpointError:
    """Return the error for a file whose contents contradict each other."""
    return CheckpointError(f"the checkpoint is damaged: {reason}")
