"""Records: lists of integers of a plan whose elements have names.

A record is declared as a NamedTuple whose fields are integers, booleans (0 or 1 in kernels) or other records:

    class Sizes(NamedTuple):
        height: int
        width: int

    class Geometry(NamedTuple):
        channels: int
        output: Sizes

A plan contains its numbers, `numbers_of(Geometry(channels, Sizes(height, width)))`. A kernel, or a function
that it calls, has a parameter `geometry: Geometry`, and its fields become elements of an array
(ortgrad.compiled.fields): `geometry.channels` becomes `geometry[0]`, `geometry.output.height` becomes
`geometry[1]`, and `geometry.output` the slice `geometry[1:3]`.
A part of a table is a record, too, if it is assigned to a variable with an annotation:

    own: Sizes = table[task * 2 : (task + 1) * 2]
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple, get_type_hints


class Field(NamedTuple):
    """A field of a record: where it begins, how many integers it has, and its type if that is a record."""

    start: int
    size: int
    record: type | None


def is_record(kind: Any) -> bool:
    """Return whether a type is one of records."""
    return hasattr(kind, "_fields") and isinstance(kind, type) and issubclass(kind, tuple)


@functools.cache
def fields_of(record: type) -> dict[str, Field]:
    """Return the fields of a type of records by their names."""
    fields: dict[str, Field] = {}
    start = 0
    for name, kind in get_type_hints(record).items():
        size = size_of(kind) if is_record(kind) else 1
        fields[name] = Field(start, size, kind if is_record(kind) else None)
        start += size
    return fields


def size_of(record: type) -> int:
    """Return the number of integers of a record."""
    return sum(field.size for field in fields_of(record).values())


def numbers_of(record: Iterable[Any]) -> list[int]:
    """Return the integers of a record, or of a list of records."""
    found: list[int] = []
    for value in record:
        found += numbers_of(value) if isinstance(value, tuple) else [int(value)]
    return found
