"""The checkpoint format of onnxruntime-training 1.19.2: a flatbuffer, with external data beside it.

Large checkpoints keep the tensors in a second file, `<checkpoint>.data`. Two files cannot be replaced in one
step. The new data is therefore first written under a name with a token of its own, which the flatbuffer
holds as well. Once the flatbuffer is in place, the data is renamed to its usual name. A process that is
killed in between leaves a checkpoint that `read` still understands.

Both steps are taken under a lock, so that processes that write the same checkpoint do not mix their files.
Where there are no locks, files of two writers are refused, because the checksum of the data, which the
flatbuffer holds, does not match.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ortgrad.errors import CheckpointError
from ortgrad.training.checkpoint import flatbuffer_reader, flatbuffer_writer
from ortgrad.training.checkpoint.checksum import Hashed, digest_of, has_trailer
from ortgrad.training.checkpoint.flatbuffer_reader import damaged
from ortgrad.training.checkpoint.flatbuffer_writer import Blob, Integers, Scalar, Table, Tables
from ortgrad.training.checkpoint.state import (
    ELEMENT_TYPES,
    MOST_DIMENSIONS,
    Checkpoint,
    OptimizerGroup,
    Property,
    as_bytes,
    element_type,
    size_in_bytes,
)
from ortgrad.training.files import Partial, locked, remove_abandoned, sync_folder

IDENTIFIER = b"ODTC"
VERSION = 2
# From this size on the tensors are in the second file, except for small ones.
EXTERNAL_FROM = 1800 << 20
SMALLEST_EXTERNAL = 64

# How often a checkpoint is read if another process replaces it in the meantime.
_ATTEMPTS = 20

# Field numbers of the tables. _TRAILER, _TOKEN and _DIGEST are ortgrad's own; other readers ignore them.
_VERSION, _MODULE, _GROUPS, _PROPERTIES, _TRAILER = range(5)
_TRAINABLE, _FROZEN, _NOMINAL, _EXTERNAL, _TOKEN, _DIGEST = range(6)
_NAME, _TEXT, _DIMS, _TYPE, _RAW, _STRINGS, _OFFSET = range(7)
_GROUP_NAME, _STEP, _LEARNING_RATE, _STATES = range(4)
_PARAMETER, _MOMENTUMS = range(2)
_INTS, _FLOATS, _TEXTS = range(3)
_KEY, _VALUE = range(2)


def data_path(path: Path, token: str | None = None) -> Path:
    """Return the path of a checkpoint's external data."""
    return path.with_name(f"{path.name}.data" + ("" if token is None else f".{token}"))


# Reading


def read(path: Path) -> Checkpoint:
    """Return the checkpoint in a file that begins like one."""
    for _ in range(_ATTEMPTS - 1):
        contents = np.fromfile(path, np.uint8)
        try:
            return _read(path, contents)
        except _OtherDataError:
            if np.array_equal(np.fromfile(path, np.uint8), contents):
                raise
    return _read(path, np.fromfile(path, np.uint8))


def _read(path: Path, contents: np.ndarray) -> Checkpoint:
    trailer = has_trailer(contents)
    root = flatbuffer_reader.Buffer(contents).root()
    version = root.integer(_VERSION, "int32")
    if version != VERSION:
        raise CheckpointError(
            f"it is a checkpoint of version {version}; only version {VERSION}, of onnxruntime-training "
            "1.16 to 1.19, can be read"
        )
    if root.integer(_TRAILER, "int32") and not trailer:
        raise damaged("its checksum is missing")
    checkpoint = Checkpoint()
    module = root.table(_MODULE)
    if module is not None and module.integer(_EXTERNAL, "bool"):
        with _open_data(path, module.text(_TOKEN)) as file:
            digest = module.text(_DIGEST)
            if digest is not None and digest_of(file) != digest:
                raise _OtherDataError(
                    f"its external data, {data_path(path).name}, is damaged or belongs to another checkpoint"
                )
            _read_tensors(root, checkpoint, _External(file))
    else:
        _read_tensors(root, checkpoint, None)
    properties = root.table(_PROPERTIES)
    if properties is not None:
        _read_properties(properties, checkpoint.properties)
    return checkpoint


class _OtherDataError(CheckpointError):
    """The external data does not belong to the flatbuffer: perhaps a process is replacing both."""


def _open_data(path: Path, token: str | None) -> BinaryIO:
    if token is not None and token.isalnum():
        # There if the process that wrote the checkpoint was killed before it could rename the data.
        try:
            return open(data_path(path, token), "rb")
        except FileNotFoundError:
            pass
    try:
        return open(data_path(path), "rb")
    except FileNotFoundError as error:
        raise _OtherDataError(f"its external data, {data_path(path).name}, is not beside it") from error


class _External:
    """The file with the tensors."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = self._remaining = os.fstat(file.fileno()).st_size

    def read(self, offset: int, array: np.ndarray) -> None:
        """Read the elements of an array, whose size `check` has accepted."""
        self._file.seek(offset)
        if self._file.readinto(as_bytes(array)) != array.nbytes:  # type: ignore[attr-defined]
            raise damaged("the end of its external data is missing")

    def check(self, name: str, offset: int, size: int) -> None:
        self._remaining -= size
        if offset < 0 or offset + size > self._size or self._remaining < 0:
            raise damaged(
                f"tensor {name!r} needs {size} bytes at {offset} of the external data, which has {self._size}"
            )


def _read_tensors(root: flatbuffer_reader.Table, into: Checkpoint, external: _External | None) -> None:
    module = root.table(_MODULE)
    if module is not None:
        into.nominal = bool(module.integer(_NOMINAL, "bool"))
        into.trainable = _tensors(module.tables(_TRAINABLE), external, nominal=into.nominal)
        into.frozen = _tensors(module.tables(_FROZEN), external, nominal=into.nominal)
        both = into.trainable.keys() & into.frozen.keys()
        if both:
            raise damaged(f"parameter {min(both)!r} occurs twice")
    for table in root.tables(_GROUPS):
        group = OptimizerGroup(table.integer(_STEP, "int64"), table.real(_LEARNING_RATE))
        _insert(into.optimizer, table.text(_GROUP_NAME), group)
        for state in table.tables(_STATES):
            momentums = _tensors(state.tables(_MOMENTUMS), external)
            _insert(group.momentums, state.text(_PARAMETER), momentums)


def _insert(values: dict, name: str | None, value: object) -> None:
    if name is None or name in values:
        raise damaged("a name is missing" if name is None else f"{name!r} occurs twice")
    values[name] = value


def _tensors(
    tables: Iterable[flatbuffer_reader.Table], external: _External | None, *, nominal: bool = False
) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for table in tables:
        name = table.text(_NAME)
        _insert(arrays, name, _tensor(f"{name}", table, external, nominal=nominal))
    return arrays


def _tensor(
    name: str, table: flatbuffer_reader.Table, external: _External | None, *, nominal: bool
) -> np.ndarray:
    number = table.integer(_TYPE, "int32")
    if number not in ELEMENT_TYPES:
        raise CheckpointError(f"tensor {name!r} has element type {number}, which ortgrad does not read")
    dtype, shape = ELEMENT_TYPES[number], table.integers(_DIMS, MOST_DIMENSIONS)
    if nominal:
        return np.empty(0, dtype)
    size = None if shape is None else size_in_bytes(shape, dtype)
    if shape is None or size is None:
        raise damaged(f"tensor {name!r} has the shape {shape}")
    offset = table.integer(_OFFSET, "int64", -1)
    if offset != -1:
        if external is None:
            raise damaged(f"tensor {name!r} is in external data, but the checkpoint has none")
        external.check(name, offset, size)
        array = np.empty(shape, dtype.newbyteorder("<"))
        external.read(offset, array)
        return array.astype(dtype, copy=False)
    raw = table.data(_RAW)
    if raw is None or len(raw) != size:
        raise damaged(f"tensor {name!r} has {0 if raw is None else len(raw)} bytes instead of {size}")
    # A view of the file's contents, so that a large checkpoint is in memory once.
    values = np.frombuffer(raw, np.uint8).view(dtype.newbyteorder("<"))
    return values.astype(dtype, copy=not values.flags.aligned).reshape(shape)


def _read_properties(table: flatbuffer_reader.Table, into: dict[str, Property]) -> None:
    readers: list[tuple[int, Callable[[flatbuffer_reader.Table], Property | None]]] = [
        (_INTS, lambda item: item.integer(_VALUE, "int64")),
        (_FLOATS, lambda item: item.real(_VALUE)),
        (_TEXTS, lambda item: item.text(_VALUE)),
    ]
    for number, value in readers:
        for item in table.tables(number):
            found = value(item)
            if found is None:
                raise damaged("a property has no value")
            _insert(into, item.text(_KEY), found)


# Writing


def write(checkpoint: Checkpoint, path: Path) -> None:
    """Write a checkpoint, which `state.check` has accepted."""
    total = sum(array.nbytes for _, array in checkpoint.arrays())
    with Partial(path) as partial:
        if total < EXTERNAL_FROM or checkpoint.nominal:
            _write_flatbuffer(partial, _root(checkpoint, {}))
            partial.commit()
            return
        token = secrets.token_hex(8)
        named = data_path(partial.target, token)
        with Partial(data_path(partial.target)) as data:
            file = Hashed(data.file)
            offsets = _write_data(file, checkpoint)
            data.finish()
            _write_flatbuffer(partial, _root(checkpoint, offsets, token, file.hexdigest()))
            data.commit(named)
        try:
            with locked(named.parent):
                partial.commit()
                os.replace(named, data_path(partial.target))
        except BaseException:
            # Without its flatbuffer the data is useless.
            if partial.path.exists():
                named.unlink(missing_ok=True)
            raise
        sync_folder(named.parent)
        # Data of processes that were killed before their flatbuffer was in place.
        remove_abandoned(named.parent, re.compile(re.escape(f"{path.name}.data.") + r"[0-9a-f]{16}"))


def _write_flatbuffer(partial: Partial, root: Table) -> None:
    file = Hashed(partial.file)
    flatbuffer_writer.write(file, root, IDENTIFIER)
    file.write_trailer()
    partial.finish()


def _write_data(file: Hashed, checkpoint: Checkpoint) -> dict[int, int]:
    """Write the large tensors, and return their offsets by the identity of the array."""
    offsets: dict[int, int] = {}
    end = 0
    for _, array in checkpoint.arrays():
        if array.nbytes >= SMALLEST_EXTERNAL:
            padding = -end % 8
            content = as_bytes(array)
            file.write(bytes(padding))
            file.write(content)
            offsets[id(array)] = end + padding
            end += padding + len(content)
    return offsets


def _root(
    checkpoint: Checkpoint, offsets: Mapping[int, int], token: str | None = None, digest: str = ""
) -> Table:
    def tensors(arrays: Mapping[str, np.ndarray], nominal: bool = False) -> Tables:
        return Tables(_tensor_table(name, array, offsets, nominal) for name, array in arrays.items())

    module = Table(
        {
            _TRAINABLE: tensors(checkpoint.trainable, checkpoint.nominal),
            _FROZEN: tensors(checkpoint.frozen, checkpoint.nominal),
            _NOMINAL: Scalar("?", checkpoint.nominal),
            _EXTERNAL: Scalar("?", token is not None),
        }
    )
    if token is not None:
        module[_TOKEN], module[_DIGEST] = token, digest
    root = Table({_VERSION: Scalar("i", VERSION), _MODULE: module, _GROUPS: Tables()})
    root[_TRAILER] = Scalar("i", 1)
    for name, group in checkpoint.optimizer.items():
        states = Tables(
            Table({_PARAMETER: parameter, _MOMENTUMS: tensors(momentums)})
            for parameter, momentums in group.momentums.items()
        )
        rate = _single(group.initial_learning_rate)
        table = Table({_GROUP_NAME: name, _STEP: Scalar("q", group.step), _LEARNING_RATE: rate})
        table[_STATES] = states
        root[_GROUPS].append(table)  # type: ignore[union-attr]
    if checkpoint.properties:
        root[_PROPERTIES] = _property_table(checkpoint.properties)
    return root


def _tensor_table(name: str, array: np.ndarray, offsets: Mapping[int, int], nominal: bool) -> Table:
    table = Table({_NAME: name, _TYPE: Scalar("i", element_type(array))})
    table[_DIMS] = Integers() if nominal else Integers(array.shape)
    if id(array) in offsets and not nominal:
        table[_OFFSET] = Scalar("q", offsets[id(array)])
    else:
        table[_RAW] = Blob(np.empty(0, array.dtype) if nominal else array)
    return table


def _property_table(properties: Mapping[str, Property]) -> Table:
    ints, floats, texts = Tables(), Tables(), Tables()
    for name, value in properties.items():
        if isinstance(value, str):
            texts.append(Table({_KEY: name, _VALUE: value}))
        elif isinstance(value, int):
            ints.append(Table({_KEY: name, _VALUE: Scalar("q", int(value))}))
        else:
            floats.append(Table({_KEY: name, _VALUE: _single(value)}))
    return Table({_INTS: ints, _FLOATS: floats, _TEXTS: texts})


def _single(value: float) -> Scalar:
    with np.errstate(over="ignore"):  # too large a number becomes infinite
        return Scalar("f", float(np.float32(value)))
