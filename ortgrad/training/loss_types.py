"""The element types of what a loss function takes, from the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import onnx

from ortgrad.errors import NameNotFoundError, TrainingError
from ortgrad.graph.protos import FLOATS
from ortgrad.training import protos
from ortgrad.training.data import as_array, is_array
from ortgrad.training.linear_models import open_linear_models
from ortgrad.training.losses import Declaration, Suggested, new_inputs
from ortgrad.training.scores import output_of


def suggest_types(
    model: onnx.ModelProto,
    loss: Callable[..., Any],
    output: str | None,
    target: str | None,
    data: Any,
    types: Mapping[str, Declaration],
) -> tuple[Any, Mapping[str, Declaration]]:
    """Return the data, and declarations of the inputs that a loss function adds, as the data has them.

    Of an iterator the first batch is read; it is the first one of the data that is returned.
    """
    model = open_linear_models(model)
    new = new_inputs(model, loss, target)
    if all(name in types for name in new):
        return data, types
    data, first = _first(data)
    given = {tensor.name for tensor in model.graph.initializer}
    names = [value.name for value in model.graph.input if value.name not in given] + new
    arrays = first if isinstance(first, Mapping) else dict(zip(names, first, strict=False))
    try:
        wanted = protos.find_value(model, output_of(model, output)).type.tensor_type
    except NameNotFoundError:
        return data, types
    found: dict[str, Declaration] = {}
    for name in new:
        if name not in arrays or name in types:
            continue
        array = as_array(arrays[name], f"the array of {name!r}")
        dims: list[int | str | None] = [None] * array.ndim
        if array.dtype.kind in "iu":
            found[name] = (np.int64, dims)
        elif array.dtype.kind == "b":
            found[name] = (np.bool_, dims)
        elif array.dtype.kind == "f" and array.ndim != len(wanted.shape.dim) and wanted.elem_type in FLOATS:
            if name == new[0] and _is_the_same(name, array, wanted):
                continue
            found[name] = (np.float64 if wanted.elem_type == onnx.TensorProto.DOUBLE else np.float32, dims)
    return data, Suggested(found, types) if found else types


def _is_the_same(name: str, array: np.ndarray, wanted: onnx.TypeProto.Tensor) -> bool:
    """Return whether an array is a vector for an output of one column.

    Raises TrainingError for other shapes that differ from the output's by axes of one element only: a loss
    would broadcast them.
    """
    if not wanted.HasField("shape"):
        return False
    dims = [dim.dim_value or dim.dim_param for dim in wanted.shape.dim]
    own = [size for size in array.shape if size != 1]
    if own and len(own) != len([size for size in dims if size != 1]):
        return False
    if array.ndim == 1 and len(dims) == 2 and dims[1] == 1:
        return True
    raise TrainingError(
        f"{name!r} has the shape {list(array.shape)} in the first batch or the data, and the output {dims}: "
        f"the loss would broadcast them. Give {name!r} the shape of the output, or say what it is in types="
    )


def _first(data: Any) -> tuple[Any, Any]:
    """Return the data, and the arrays of all or of the first batch."""
    if isinstance(data, Mapping) or (isinstance(data, (tuple, list)) and any(map(is_array, data))):
        return data, data
    if is_array(data) or not isinstance(data, Iterable):
        return data, ()
    batches = iter(data)
    first = next(batches, ())
    if isinstance(data, Iterator):
        data = chain([first], batches) if first != () else data
    return data, first if isinstance(first, (Mapping, tuple, list)) else ()
