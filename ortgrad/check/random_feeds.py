"""Random values for inputs that the caller does not feed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx
from onnx import TensorProto

from ortgrad.check.running import CannotRunError, on_onnxruntime
from ortgrad.errors import ModelError
from ortgrad.graph.feeds import Arrays, numpy_type, refuse_foreign, typed
from ortgrad.graph.protos import FLOATS

LARGEST_INPUT = 1 << 30  # elements drawn for one input, at most

Distribution: TypeAlias = "Callable[[np.random.Generator, Sequence[int]], np.ndarray]"
# Tried in order until the model runs and its outputs are finite.
DISTRIBUTIONS: Sequence[Distribution] = (
    lambda generator, shape: generator.standard_normal(shape),
    lambda generator, shape: generator.uniform(0.2, 0.8, shape),
    lambda generator, shape: generator.uniform(1.2, 2.0, shape),
)
# Unknown sizes, tried in order: distinct sizes (0), equal sizes for models in which dimensions of different
# names must agree, larger sizes for images and signals. The first dimension stays small.
SIZES = (0, 2, 32, 64, 320, 4096)
SMALL = 2
LARGEST_DRAWN = 1 << 22  # elements of all drawn inputs together, except for the first sizes


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
    for size, distribution in itertools.product(SIZES, DISTRIBUTIONS):
        shapes = _shapes(missing, _sizes(proto, given), size)
        if size > SMALL and sum(map(math.prod, shapes.values())) > LARGEST_DRAWN:
            break
        drawn = _draw(missing, shapes, distribution, generator)
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


def _shapes(missing: Iterable[onnx.ValueInfoProto], sizes: dict[str, int], size: int) -> dict[str, list[int]]:
    """Return the shapes of inputs; unknown sizes are all different if `size` is 0."""
    shapes: dict[str, list[int]] = {}
    for value in missing:
        tensor = value.type.tensor_type
        if value.type.WhichOneof("value") != "tensor_type":
            raise ModelError(f"input {value.name!r} is {describe_type(value.type)}, not a tensor: feed it")
        if not tensor.HasField("shape"):
            raise ModelError(f"input {value.name!r} has no shape: feed it")
        shape = shapes.setdefault(value.name, [])
        for axis, dim in enumerate(tensor.shape.dim):
            batch = axis == 0 and len(tensor.shape.dim) > 1
            drawn = (min(size, SMALL) if batch else size) or 2 + len(sizes)
            drawn = sizes.setdefault(dim.dim_param, drawn)
            # Exporters write -1 for an unknown size.
            shape.append(dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else drawn)
        if math.prod(shape) > LARGEST_INPUT:
            raise ModelError(f"input {value.name!r} has shape {shape}, too large to be drawn: feed it")
    return shapes


def _draw(
    missing: Iterable[onnx.ValueInfoProto],
    shapes: Mapping[str, Sequence[int]],
    distribution: Distribution,
    generator: np.random.Generator,
) -> Arrays:
    drawn = {}
    for value in missing:
        element, shape = value.type.tensor_type.elem_type, shapes[value.name]
        if element in FLOATS:
            drawn[value.name] = distribution(generator, shape)
        elif element == TensorProto.STRING:
            raise ModelError(f"input {value.name!r} holds strings: feed it")
        else:
            drawn[value.name] = generator.integers(0, 2, shape).astype(numpy_type(element))
    return drawn
