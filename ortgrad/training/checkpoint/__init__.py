"""Checkpoints: parameters, optimizer state and properties in files.

Files with the suffix `.safetensors` have that format. All others have the format of onnxruntime-training
1.19.2, which reads what is written here, and vice versa.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ortgrad.errors import CheckpointError, CheckpointFileError
from ortgrad.keywords import checked
from ortgrad.threads import call_elsewhere
from ortgrad.training.checkpoint import ortcheckpoint, safetensors
from ortgrad.training.checkpoint.state import Checkpoint, OptimizerGroup, check
from ortgrad.training.files import replacing

__all__ = ["Checkpoint", "OptimizerGroup", "load", "save"]

# Beginnings of other files that people may mistake for a checkpoint.
_KINDS = {
    b"PK\x03\x04": "a ZIP archive, as PyTorch and NumPy write them",
    b"\x80": "a pickle",
    b"\x93NUMPY": "a NumPy array",
    b"\x89HDF": "an HDF5 file",
    b"\x1f\x8b": "a gzip archive",
    b"\x08": "an ONNX model, or another protobuf file",
}


@checked
def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Return the checkpoint in a file; raises CheckpointError if it contains none.

    >>> import numpy as np, os, tempfile
    >>> from ortgrad.training import checkpoint
    >>> path = os.path.join(tempfile.mkdtemp(), "checkpoint")
    >>> state = checkpoint.Checkpoint(trainable={"w": np.ones(3, np.float32)}, properties={"epoch": 5})
    >>> checkpoint.save(state, path)
    >>> checkpoint.load(path).properties
    {'epoch': 5}
    """
    place = Path(path)
    with _naming(place, "read"):
        if place.is_dir():
            raise CheckpointError("it is a folder, as onnxruntime-training before 1.15 wrote them")
        if place.exists() and not place.is_file():
            raise CheckpointError("it is not a regular file")
        if place.suffix == ".safetensors":
            return call_elsewhere(lambda: safetensors.read(place))
        _require_checkpoint(place)
        return call_elsewhere(lambda: ortcheckpoint.read(place))


@checked
def save(checkpoint: Checkpoint, path: str | os.PathLike[str], *, sort: bool = False) -> None:
    """Write a checkpoint to a file, which keeps its old contents until the new ones are complete.

    With `sort` parameters, groups and properties are in the order of their names; `load` keeps the order. In
    the format of onnxruntime-training, properties that are floats have single precision.

    >>> import numpy as np, os, tempfile
    >>> from ortgrad.training import checkpoint
    >>> path = os.path.join(tempfile.mkdtemp(), "weights.safetensors")
    >>> checkpoint.save(checkpoint.Checkpoint(trainable={"w": np.ones(3, np.float32)}), path)
    >>> list(checkpoint.load(path).trainable)
    ['w']
    """
    place = Path(path)
    with _naming(place, "written"):
        check(checkpoint)
        chosen = checkpoint.sorted() if sort else checkpoint
        write = safetensors.write if place.suffix == ".safetensors" else ortcheckpoint.write
        call_elsewhere(lambda: write(chosen, place))


def load_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the arrays and the metadata in a safetensors file of any name."""
    place = Path(path)
    with _naming(place, "read"):
        if place.exists() and not place.is_file():
            raise CheckpointError("it is not a regular file")
        return call_elsewhere(lambda: safetensors.read_tensors(place))


def save_tensors(
    arrays: dict[str, np.ndarray], metadata: dict[str, str], path: str | os.PathLike[str]
) -> None:
    """Write arrays and metadata to a safetensors file, which keeps its old contents until it is complete."""
    place = Path(path)

    def write() -> None:
        with replacing(place) as file:
            safetensors.write_tensors(file, arrays, metadata)

    with _naming(place, "written"):
        check(Checkpoint(trainable=arrays))
        call_elsewhere(write)


def _require_checkpoint(path: Path) -> None:
    """Raise CheckpointError for a file that does not begin like a checkpoint."""
    with open(path, "rb") as file:
        beginning = file.read(16)
    if beginning[4:8] != ortcheckpoint.IDENTIFIER:
        raise CheckpointError(f"it is {_kind(beginning)}, not a checkpoint of onnxruntime-training")


def _kind(beginning: bytes) -> str:
    if not beginning:
        return "empty"
    if beginning[4:8] == b"ORTM":
        return "a model in ORT format"
    if beginning[8:9] == b"{":
        return "a safetensors file (whose name must end in .safetensors)"
    for start, kind in _KINDS.items():
        if beginning.startswith(start):
            return kind
    return f"a file that begins with {beginning!r}"


@contextmanager
def _naming(path: Path, verb: str) -> Iterator[None]:
    """Add the path to errors, and turn errors of the system into CheckpointErrors as well."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be {verb}: {error}") from error
    except OSError as error:
        number = error.errno or 0
        raise CheckpointFileError(number, f"{path} cannot be {verb}: {error.strerror or error}") from error
