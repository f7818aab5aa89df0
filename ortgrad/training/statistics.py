"""Running statistics of batch normalizations, and tensors that exporters have merged with them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection

import numpy as np
import onnx
from onnx import numpy_helper

from ortgrad.errors import ParameterWarning
from ortgrad.graph.exporters import read_origins
from ortgrad.graph.matching import cure, describe_changes
from ortgrad.graph.protos import all_nodes, copy_of

# The inputs of BatchNormalization that are statistics.
_PLACES = {3: "running_mean", 4: "running_var"}


def running_statistics(model: onnx.ModelProto) -> list[str]:
    """Return the initializers that are running statistics of batch normalizations."""
    known = {tensor.name for tensor in model.graph.initializer}
    found = [name for node in _normalizations(model) for name in node.input[3:5] if name in known]
    return list(dict.fromkeys(found))


def separate_statistics(
    model: onnx.ModelProto, names: Collection[str]
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Return a model in which no initializer of these names is a running statistic and something else.

    Exporters merge equal tensors, and before a training all means and biases are 0, and all variances and
    scales 1. They would be trained and overwritten with statistics at the same time. The second result
    has the initializers that were added, and of which each is a copy; without any, the model is the one that
    was given.
    """
    merged = _merged(model) & set(names)
    if not merged:
        return model, {}
    model = copy_of(model)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name in merged}
    uses = _uses(model)
    taken = {*uses, *(name for node in all_nodes(model.graph.node) for name in node.output)}
    taken |= {value.name for value in (*model.graph.input, *model.graph.initializer)}
    added: dict[str, str] = {}
    for node in _normalizations(model):
        for place, role in _PLACES.items():
            name = node.input[place] if place < len(node.input) else ""
            if name not in tensors or uses[name] < 2:
                continue
            own, number = f"{name}.{role}", 1
            while own in taken:
                number += 1
                own = f"{name}.{role}_{number}"
            taken.add(own)
            uses[name] -= 1
            node.input[place] = own
            model.graph.initializer.add().CopyFrom(tensors[name])
            model.graph.initializer[-1].name = own
            added[own] = name
    return model, added


def _merged(model: onnx.ModelProto) -> set[str]:
    """Return the running statistics that are also something else, or those of different layers."""
    known = {tensor.name for tensor in model.graph.initializer}
    layers: dict[str, set[tuple[object, ...]]] = {}
    uses = _uses(model)
    for node in _normalizations(model):
        for place in _PLACES:
            if place < len(node.input) and node.input[place] in known:
                # A layer that is applied twice has the same tensors in the same places.
                layers.setdefault(node.input[place], set()).add((place, *node.input[1:]))
                uses[node.input[place]] -= 1
    return {name for name, found in layers.items() if uses[name] > 0 or len(found) > 1}


def warn_of_merged(model: onnx.ModelProto, trained: Collection[str], stacklevel: int = 3) -> None:
    """Warn if trained parameters are not those of the module from which the model was exported.

    Where the exporter does not tell what it has merged, vectors that are read by several nodes and whose
    elements are all equal, as before a training, are probably separate parameters.
    """
    origins = read_origins(model)
    text = describe_changes(
        [tensor.name for tensor in model.graph.initializer if tensor.name in trained], origins
    )
    merged = [] if origins.exporter else _equal_vectors(model, trained)
    if merged:
        text = (
            f"{', '.join(merged)}, whose elements are all equal: the exporter has probably merged separate parameters, which are now trained as one. With PyTorch, "
            f"{cure(origins)}"
        )
    if text:
        warnings.warn(text, ParameterWarning, stacklevel=stacklevel)


def _equal_vectors(model: onnx.ModelProto, trained: Collection[str]) -> list[str]:
    """Describe the trained vectors that several nodes read and whose elements are all equal."""
    uses = _uses(model)
    # Statistics get initializers of their own.
    uses.subtract(name for node in _normalizations(model) for name in node.input[3:5])
    return [
        f"{uses[tensor.name]} nodes share the parameter {tensor.name!r}"
        for tensor in model.graph.initializer
        if tensor.name in trained and len(tensor.dims) == 1 and tensor.dims[0] > 1 and uses[tensor.name] > 1
        if tensor.data_location != onnx.TensorProto.EXTERNAL and np.ptp(numpy_helper.to_array(tensor)) == 0
    ]


def _normalizations(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "BatchNormalization"]


def _uses(model: onnx.ModelProto) -> Counter[str]:
    uses = Counter(name for node in all_nodes(model.graph.node) for name in node.input)
    uses.update(value.name for value in model.graph.output)
    return uses
