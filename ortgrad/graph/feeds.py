"""Arrays for the inputs of a model: their checks, and their conversion to the declared element types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from ortgrad.errors import ModelError
from ortgrad.graph.matching import nearest
from ortgrad.graph.protos import FLOATS

Arrays = dict[str, np.ndarray]


def numpy_type(element: int) -> np.dtype:
    """Return the NumPy type of an onnx element type."""
    return np.dtype(helper.tensor_dtype_to_np_dtype(element))


def has_native_order(value: Any) -> bool:
    """Return whether a value is not an array with bytes in another order, which onnxruntime would misread."""
    return not isinstance(value, np.ndarray) or value.dtype.isnative


def native_order(value: Any) -> Any:
    """Return an array with the bytes of its elements in the processor's order; other values as they are."""
    return value if has_native_order(value) else value.astype(value.dtype.newbyteorder("="))


def typed(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> Arrays:
    """Return the feeds for inputs of the model, floating-point ones in the declared element types."""
    found = {}
    for value in model.graph.input:
        element = value.type.tensor_type.elem_type
        if value.name in feeds:
            array = native_order(feeds[value.name])
            found[value.name] = np.asarray(array).astype(numpy_type(element)) if element in FLOATS else array
    return found


def refuse_foreign(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> None:
    """Raise ModelError if a feed is not an input, or has no numbers for a floating-point one."""
    unknown = sorted(set(feeds) - {value.name for value in model.graph.input})
    if unknown:
        near = nearest(unknown[0], (value.name for value in model.graph.input))
        raise ModelError(f"the model has no input {unknown[0]!r} to feed{near}")
    for value in model.graph.input:
        if value.name in feeds and value.type.tensor_type.elem_type in FLOATS:
            dtype = np.asarray(feeds[value.name]).dtype
            if not (np.issubdtype(dtype, np.number) or dtype.name in ("bool", "bfloat16")):
                raise ModelError(f"input {value.name!r} takes numbers, not {dtype}")


def checked_feeds(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> Arrays:
    """Return the feeds in the declared element types; raises ModelError unless they fit all inputs."""
    refuse_foreign(model, feeds)
    defaults = {tensor.name for tensor in model.graph.initializer}
    missing = [v.name for v in model.graph.input if v.name not in feeds and v.name not in defaults]
    if missing:
        raise ModelError(f"feeds has no array for the input {missing[0]!r}; it needs one for every input")
    found = typed(model, feeds)
    for value in model.graph.input:
        if value.name in found and value.type.WhichOneof("value") == "tensor_type":
            found[value.name] = np.asarray(found[value.name])
            _check(value, found[value.name])
    return found


def _check(value: onnx.ValueInfoProto, array: np.ndarray) -> None:
    declared = value.type.tensor_type
    is_text = declared.elem_type == TensorProto.STRING
    if array.dtype != numpy_type(declared.elem_type) and not (is_text and array.dtype.kind in "OUS"):
        name = TensorProto.DataType.Name(declared.elem_type).lower()
        raise ModelError(f"the feed of {value.name!r} has type {array.dtype}, but the input has {name}")
    if not declared.HasField("shape"):
        return
    # Exporters write -1 for an unknown size.
    dims = [
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dim.dim_param
        for dim in declared.shape.dim
    ]
    if len(dims) != array.ndim or any(
        isinstance(dim, int) and dim != size for dim, size in zip(dims, array.shape, strict=True)
    ):
        shape = ", ".join(str(dim) or "?" for dim in dims)
        raise ModelError(
            f"the feed of {value.name!r} has shape {list(array.shape)}, but the input has [{shape}]"
        )
