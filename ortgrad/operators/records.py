"""Records, lists of integers of a plan whose elements have names, and bundles of tensors and numbers.

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

A bundle is a NamedTuple of tensors and of what belongs to them: numbers, records, Integers or other bundles.
It travels through the functions of a kernel as one argument:

    class Normalized(NamedTuple):
        x: np.ndarray
        mean: np.ndarray
        geometry: Geometry

    def normalize(task: int, normalized: Normalized, y: np.ndarray) -> None:
        ...

The function of a task gets it filled: its fields are tensors of the kernel, or numbers of the plan, of the
same names. Functions may also make bundles, `Normalized(x, mean, geometry)`, pass them on and return them.
For Numba they are tuples, so that the machine code is the same as with one argument for each field.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeGuard, get_type_hints


class Field(NamedTuple):
    """A field of a record: where it begins, how many integers it has, and its type if that is a record."""

    start: int
    size: int
    record: type | None


def is_named_tuple(kind: Any) -> TypeGuard[type]:
    """Return whether a value is a type of records or bundles."""
    return hasattr(kind, "_fields") and isinstance(kind, type) and issubclass(kind, tuple)


def is_bundle(kind: Any) -> TypeGuard[type]:
    """Return whether a type is one of bundles: it has fields that are neither integers nor records."""
    return is_named_tuple(kind) and _has_others(kind)


@functools.cache
def _has_others(kind: type) -> bool:
    return not all(each in (int, bool) or is_record(each) for each in types_of(kind).values())


def is_record(kind: Any) -> TypeGuard[type]:
    """Return whether a type is one of records."""
    return is_named_tuple(kind) and not _has_others(kind)


@functools.cache
def types_of(kind: type) -> dict[str, Any]:
    """Return the types of the fields of a record or bundle by their names."""
    return get_type_hints(kind)


@functools.cache
def fields_of(record: type) -> dict[str, Field]:
    """Return the fields of a type of records by their names."""
    fields: dict[str, Field] = {}
    start = 0
    for name, kind in types_of(record).items():
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
