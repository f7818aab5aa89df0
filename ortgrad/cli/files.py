"""Reading and writing of files for the commands."""

from __future__ import annotations

import os
import zipfile
import zlib
from pathlib import Path

import numpy as np
import onnx

from ortgrad.errors import ModelError
from ortgrad.graph.loading import load_model
from ortgrad.graph.protos import all_graphs
from ortgrad.training.files import replacing

# protobuf cannot write more than 2 GB; this limit of the weights leaves room for the graph itself.
LARGEST_FILE = (1 << 31) - (1 << 26)
SMALLEST_EXTERNAL_TENSOR = 1024


def given_feeds(path: str | None) -> dict[str, np.ndarray] | None:
    """Return the arrays of an npz file by name; None if there is no file."""
    if path is None:
        return None
    # Opened here, because NumPy does not close files that it cannot read.
    with open(path, "rb") as file:
        try:
            loaded = np.load(file)
            arrays = None if isinstance(loaded, np.ndarray) else dict(loaded)
        except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ModelError(
                f"there are no arrays to be read in {path!r} ({error}): write it with numpy.savez"
            ) from error
    if arrays is None:
        raise ModelError(f"{path!r} holds a single array: write inputs by name with numpy.savez")
    return arrays


def output_path(name: str, *inputs: str | None) -> Path:
    """Return the path of the file to write; raises ModelError early if it cannot be written.

    Files that the command reads, external data of a model among them, are not overwritten.
    """
    path = Path(name)
    if path.is_dir():
        raise ModelError(f"cannot write {name!r}: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ModelError(f"cannot write {name!r}: there is no folder {str(path.parent)!r}; make it first")
    read = [file for given in inputs if given is not None for file in (Path(given), *_external(given))]
    # Weights that are too large for one file go to a second one.
    for written in (path, _data_path(path)):
        if any(written.exists() and file.exists() and written.samefile(file) for file in read):
            raise ModelError(f"cannot write {str(written)!r}: the command reads it; name another file")
    return path


def is_same_file(first: str, second: str) -> bool:
    """Return whether two paths are, or would be, those of one file."""
    if os.path.exists(first) and os.path.exists(second):
        return os.path.samefile(first, second)
    return os.path.realpath(first) == os.path.realpath(second)


def _external(name: str) -> list[Path]:
    """Return the files with the external data of a model."""
    if name.endswith(".npz"):
        return []
    try:
        model = load_model(name, external_data=False)
    except ModelError:
        return []  # which is reported when the model is read
    graphs = (graph for graph in all_graphs(model.graph))
    entries = (e for graph in graphs for tensor in graph.initializer for e in tensor.external_data)
    return [Path(name).parent / e.value for e in entries if e.key == "location"]


def _data_path(path: Path) -> Path:
    return path.with_name(path.name + ".data")


def save_and_describe(model: onnx.ModelProto, path: Path) -> None:
    """Write a model and print its inputs and outputs."""
    _save(model, path)
    count = len(model.graph.node)
    print(f"{path}: {count} node{'s' if count != 1 else ''}")
    print(f"  inputs:  {', '.join(value.name for value in model.graph.input)}")
    print(f"  outputs: {', '.join(value.name for value in model.graph.output)}")


def _save(model: onnx.ModelProto, path: Path) -> None:
    """Write a model; if it is too large for one file, the weights are written to a second one beside it."""
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) <= LARGEST_FILE:
        with replacing(path) as file:
            file.write(model.SerializeToString())
        return
    data = _data_path(path)
    # onnx appends to an existing file.
    data.unlink(missing_ok=True)
    onnx.save_model(
        model,
        str(path),
        save_as_external_data=True,
        location=data.name,
        size_threshold=SMALLEST_EXTERNAL_TENSOR,
    )
