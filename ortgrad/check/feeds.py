"""Random values for inputs that the caller does not feed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx
from onnx import TensorProto

from ortgrad.check.sessions import CannotRunError, on_onnxruntime
from ortgrad.errors import ModelError
from ortgrad.graph.feeds import Arrays, numpy_type, refuse_foreign, typed
from ortgrad.graph.protos import FLOATS

LARGEST_INPUT = 1 << 30  # the limit of elements drawn for one input

Distribution: TypeAlias = "Callable[[np.random.Generator, Sequence[int]], np.ndarray]"
# Tried in order until the model runs and its outputs are finite.
DISTRIBUTIONS: Sequence[Distribution] = (
    lambda generator, shape: generator.standard_normal(shape),
    lambda generator, shape: generator.uniform(0.2, 0.8, shape),
    lambda generator, shape: generator.uniform(1.2, 2.0, shape),
)


def complete_feeds(
    proto: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    outputs: Sequence[str],
    switches: set[str],
    generator: np.random.Generator,
) -> Arrays:
    """Return the feeds, with random values for missing inputs such that `outputs` are finite.

    `switches` are inputs that turn on training mode of Dropout; missing ones are set to true.
    """
    refuse_foreign(proto, feeds)
    given = typed(proto, feeds)
    defaults = {tensor.name for tensor in proto.graph.initializer}
    missing = [v for v in proto.graph.input if v.name not in given and v.name not in defaults]
    if not missing:
        return given
    run = on_onnxruntime(proto)
    reason = "its outputs are not finite"
    # Distinct sizes first; equal ones for models in which dimensions of different names must agree.
    for distribution, distinct in itertools.product(DISTRIBUTIONS, (True, False)):
        drawn = _draw(missing, _sizes(proto, given), distribution, distinct, generator)
        drawn.update((k, np.ones_like(drawn[k])) for k in switches & drawn.keys())
        complete = {**given, **typed(proto, drawn)}
        try:
            results = run(complete)
        except CannotRunError as error:
            reason = str(error)
            continue
        if all(np.isfinite(np.asarray(results[name])).all() for name in outputs):
            return complete
    raise ModelError(f"the model does not run on random inputs ({reason}); give feeds")


def describe_type(type_: onnx.TypeProto) -> str:
    """Return a description of a type for error messages."""
    which = type_.WhichOneof("value")
    if which == "tensor_type":
        return f"{TensorProto.DataType.Name(type_.tensor_type.elem_type).lower()} tensors"
    return f"a {str(which or 'value').removesuffix('_type')}"


def _sizes(proto: onnx.ModelProto, given: Arrays) -> dict[str, int]:
    """Return the sizes of symbolic dimensions that the given feeds determine."""
    return {
        dim.dim_param: size
        for value in proto.graph.input
        if value.name in given
        for dim, size in zip(value.type.tensor_type.shape.dim, given[value.name].shape, strict=False)
        if dim.dim_param
    }


def _draw(
    missing: Iterable[onnx.ValueInfoProto],
    sizes: dict[str, int],
    distribution: Distribution,
    distinct: bool,
    generator: np.random.Generator,
) -> Arrays:
    drawn = {}
    for value in missing:
        tensor = value.type.tensor_type
        if value.type.WhichOneof("value") != "tensor_type":
            raise ModelError(f"input {value.name!r} is {describe_type(value.type)}, not a tensor: feed it")
        if not tensor.HasField("shape"):
            raise ModelError(f"input {value.name!r} has no shape: feed it")
        shape = []
        for dim in tensor.shape.dim:
            size = sizes.setdefault(dim.dim_param, 2 + len(sizes) if distinct else 2)
            # Exporters write -1 for an unknown size.
            shape.append(dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else size)
        if math.prod(shape) > LARGEST_INPUT:
            raise ModelError(f"input {value.name!r} has shape {shape}, too large to be drawn: feed it")
        if tensor.elem_type in FLOATS:
            drawn[value.name] = distribution(generator, shape)
        elif tensor.elem_type == TensorProto.STRING:
            raise ModelError(f"input {value.name!r} holds strings: feed it")
        else:
            drawn[value.name] = generator.integers(0, 2, shape).astype(numpy_type(tensor.elem_type))
    return drawn
