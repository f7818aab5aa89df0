"""Checkpoints as safetensors: a JSON header with names, types, shapes and offsets, then the bytes.

The parameters have their own names, so that any reader of safetensors finds them. Optimizer state is stored
as tensors named `optimizer.<group>.<parameter>.<momentum>`. The metadata, all of them strings, are:

    ortgrad             the version of this layout, "1"
    ortgrad.frozen      the names of the frozen parameters, as a JSON list
    ortgrad.properties  the properties, as a JSON object
    ortgrad.optimizer   a JSON object: by group `step`, `initial_learning_rate` and `momentums`; these are, by
                        parameter, the names of the tensors by the name of the momentum
    ortgrad.nominal     "true" if the tensors have no values
    ortgrad.checksum    "sha256"
    ortgrad.sha256      the SHA-256 of the whole file, computed with 64 zeros in this place

A file without them is a set of trainable parameters. The last two are written and checked together, so that
damage to the name of one is noticed by the other.

The package `safetensors` (0.8) is not used. It writes wrong values for arrays that are not contiguous, does
not keep the order of the tensors, accepts a name that occurs twice, does not say which system error occurred,
and maps files by default, so that the process ends if another one truncates the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from ortgrad.errors import CheckpointError
from ortgrad.training.checkpoint.checksum import Hashed
from ortgrad.training.checkpoint.ortcheckpoint import IDENTIFIER
from ortgrad.training.checkpoint.state import Checkpoint, OptimizerGroup, as_bytes, size_in_bytes
from ortgrad.training.files import replacing

_TYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_METADATA = "__metadata__"
_VERSION = "1"
# The limit of other readers.
_LONGEST_HEADER = 100_000_000
_LENGTH = struct.Struct("<Q")
_CHECKSUM, _DIGEST = "ortgrad.checksum", "ortgrad.sha256"
_ZEROS = "0" * 64


def read(path: Path) -> Checkpoint:
    """Return the checkpoint in a file."""
    return _assemble(*read_tensors(path))


def read_tensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the arrays in a file by name, and its metadata."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        header, text = _read_header(file, size)
        start = len(text)
        metadata = header.pop(_METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise _damaged("its metadata are not strings")
        method, digest = metadata.pop(_CHECKSUM, None), metadata.pop(_DIGEST, None)
        if digest is not None:
            text = text.replace(_digest_entry(digest), _digest_entry(_ZEROS), 1)
        checksum = hashlib.sha256(text)
        places = sorted(
            (_place(name, entry) for name, entry in header.items()), key=lambda place: (place[1], place[2])
        )
        end, arrays = 0, {}
        for name, begin, stop, dtype, shape in places:
            if begin != end or stop > size - start:
                raise _damaged(f"tensor {name!r} is at {begin} to {stop} of {size - start} bytes")
            array = np.empty(shape, dtype.newbyteorder("<"))
            if file.readinto(as_bytes(array)) != array.nbytes:
                raise _damaged("its end is missing")
            if digest is not None:
                checksum.update(as_bytes(array))
            arrays[name] = array.astype(dtype, copy=False)
            end = stop
        if end != size - start:
            raise _damaged(f"{size - start - end} bytes belong to no tensor")
    if (method, digest) not in ((None, None), ("sha256", checksum.hexdigest())):
        raise _damaged(
            "its contents do not match the checksum that was written with them. If another program has "
            f"changed them on purpose, it must remove {_CHECKSUM!r} and {_DIGEST!r} from the metadata"
        )
    # In the order of the header, which is that of the writer.
    return {name: arrays[name] for name in header}, metadata


def _read_header(file: BinaryIO, size: int) -> tuple[dict[str, Any], bytes]:
    """Return the header, and all bytes before the tensors."""
    first = file.read(_LENGTH.size)
    if len(first) < _LENGTH.size:
        raise _damaged(f"it has {len(first)} bytes")
    if first[4:] == IDENTIFIER:
        raise CheckpointError(
            "it is a checkpoint of onnxruntime-training, whose name must not end in .safetensors"
        )
    (length,) = _LENGTH.unpack(first)
    if length > min(size - _LENGTH.size, _LONGEST_HEADER):
        raise _damaged(f"its header has {length} bytes, the file {size}")
    text = file.read(length)
    try:
        header = json.loads(text.decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _damaged(f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise _damaged("its header is not a JSON object")
    return header, first + text


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name occurs twice")
    return values


def _place(name: str, entry: Any) -> tuple[str, int, int, np.dtype, tuple[int, ...]]:
    """Return name, begin, end, element type and shape of a tensor."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _damaged(f"the entry of tensor {name!r} is incomplete")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _TYPES:
        raise CheckpointError(f"tensor {name!r} has the type {entry['dtype']!r}, which ortgrad does not read")
    dtype = _TYPES[entry["dtype"]]
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _damaged(f"the entry of tensor {name!r} is invalid")
    begin, end = offsets
    if end - begin != size_in_bytes(shape, dtype):
        raise _damaged(f"tensor {name!r} has the shape {shape}, but {end - begin} bytes")
    return name, begin, end, dtype, tuple(shape)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values
    )


def _assemble(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> Checkpoint:
    if "ortgrad" not in metadata:
        return Checkpoint(trainable=arrays)
    if metadata["ortgrad"] != _VERSION:
        raise CheckpointError(
            f"it is a checkpoint of version {metadata['ortgrad']!r} in safetensors; "
            f"this release reads version {_VERSION}"
        )
    try:
        checkpoint = Checkpoint(nominal=metadata.get("ortgrad.nominal") == "true")
        for name, value in json.loads(metadata["ortgrad.properties"]).items():
            if isinstance(value, bool) or not isinstance(value, (int, float, str)):
                raise TypeError(f"property {name!r}")
            checkpoint.properties[name] = value
        for name, group in json.loads(metadata["ortgrad.optimizer"]).items():
            momentums = {
                parameter: {momentum: arrays.pop(tensor) for momentum, tensor in tensors.items()}
                for parameter, tensors in group["momentums"].items()
            }
            rate = group["initial_learning_rate"]
            checkpoint.optimizer[name] = OptimizerGroup(int(group["step"]), float(rate), momentums)
        checkpoint.frozen = {name: arrays.pop(name) for name in json.loads(metadata["ortgrad.frozen"])}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise _damaged(f"its metadata do not match the tensors: {error}") from error
    checkpoint.trainable = arrays
    return checkpoint


def write(checkpoint: Checkpoint, path: Path) -> None:
    """Write a checkpoint, which `state.check` has accepted."""
    arrays: dict[str, np.ndarray] = {**checkpoint.trainable, **checkpoint.frozen}
    if checkpoint.nominal:
        arrays = {name: np.empty(0, array.dtype) for name, array in arrays.items()}
    if _METADATA in arrays:
        raise CheckpointError(f"safetensors cannot hold a parameter of the name {_METADATA!r}")
    groups: dict[str, Any] = {}
    for group_name, group in checkpoint.optimizer.items():
        names: dict[str, dict[str, str]] = {}
        for parameter, momentums in group.momentums.items():
            names[parameter] = {}
            for momentum, array in momentums.items():
                tensor = _unused(f"optimizer.{group_name}.{parameter}.{momentum}", arrays)
                names[parameter][momentum], arrays[tensor] = tensor, array
        rate = float(group.initial_learning_rate)
        groups[group_name] = {"step": int(group.step), "initial_learning_rate": rate, "momentums": names}
    properties = {k: int(v) if isinstance(v, bool) else v for k, v in checkpoint.properties.items()}
    metadata = {
        "ortgrad": _VERSION,
        "ortgrad.frozen": json.dumps(list(checkpoint.frozen)),
        "ortgrad.properties": json.dumps(properties),
        "ortgrad.optimizer": json.dumps(groups),
    }
    if checkpoint.nominal:
        metadata["ortgrad.nominal"] = "true"
    with replacing(path) as file:
        write_tensors(file, arrays, metadata)


def write_tensors(file: BinaryIO, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Write arrays and metadata as safetensors, with a checksum, to a file that is empty."""
    header: dict[str, Any] = {_METADATA: {**metadata, _CHECKSUM: "sha256", _DIGEST: _ZEROS}}
    end = 0
    for name, array in arrays.items():
        dtype = array.dtype.newbyteorder("=")
        kind = next(kind for kind, known in _TYPES.items() if known == dtype)
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST_HEADER:
        raise CheckpointError(f"there are too many tensors for safetensors: {len(arrays)}")
    text = _LENGTH.pack(len(text)) + text
    hashed = Hashed(file)
    hashed.write(text)
    for array in arrays.values():
        hashed.write(as_bytes(array))
    # Only now is the checksum known.
    file.seek(text.index(_digest_entry(_ZEROS)))
    file.write(_digest_entry(hashed.hexdigest()))


def _digest_entry(digest: str) -> bytes:
    return f'"{_DIGEST}": "{digest}"'.encode()


def _unused(name: str, names: Iterable[str]) -> str:
    while name in names:
        name += "_"
    return name


def _damaged(reason: str) -> CheckpointError:
    return CheckpointError(f"the safetensors file is damaged: {reason}")
