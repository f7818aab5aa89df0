"""Running statistics of batch normalizations, and tensors that exporters have merged with them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection

import numpy as np
import onnx
from onnx import numpy_helper

from ortgrad.errors import ParameterWarning, TrainingError
from ortgrad.graph.exporters import read_origins
from ortgrad.graph.matching import cure, describe_changes
from ortgrad.graph.protos import all_nodes, copy_of, dependencies, subgraphs
from ortgrad.keywords import outside

# The inputs of BatchNormalization that are statistics.
_PLACES = {3: "running_mean", 4: "running_var"}


# Which batch normalizations are in training mode, and update their statistics.
STATISTICS = ("trained", "all", "none")


def running_statistics(model: onnx.ModelProto, untrained: Collection[str] = ()) -> list[str]:
    """Return the initializers that are running statistics of batch normalizations.

    The nodes with an output in `untrained` are left out.
    """
    known = {tensor.name for tensor in model.graph.initializer}
    nodes = [node for node in _normalizations(model) if node.output[0] not in untrained]
    return list(dict.fromkeys(name for node in nodes for name in node.input[3:5] if name in known))


def untrained_normalizations(
    model: onnx.ModelProto, trained: Collection[str], parameters: Collection[str], statistics: str
) -> set[str]:
    """Return the outputs of the batch normalizations that stay as they are, in evaluation mode.

    With `statistics="trained"`, these are the ones that have parameters of which none is trained. One without
    parameters stays as it is if no layer before it is trained, unless all `parameters` of the model are.
    """
    if statistics not in STATISTICS:
        raise TrainingError(f"statistics is {statistics!r}; it must be one of {', '.join(STATISTICS)}")
    nodes = [
        node
        for node in all_nodes(model.graph.node)
        if node.op_type == "BatchNormalization" and node.domain in ("", "ai.onnx")
    ]
    main = {node.output[0] for node in model.graph.node}
    inner = [node.output[0] for node in nodes if node.output[0] not in main]
    if inner and statistics != "none":
        warnings.warn(
            f"the batch normalizations of {', '.join(map(repr, inner[:4]))} are in branches or loops: their "
            "statistics stay as they are, and they compute what they do in inference",
            ParameterWarning,
            stacklevel=outside(),
        )
    if statistics == "all":
        return set()
    if statistics == "none":
        return {node.output[0] for node in nodes}
    from_trained, from_any = (_dependent(model, names) for names in (set(trained), set(parameters)))
    everything = set(parameters) <= set(trained)
    untrained = set()
    for node in nodes:
        own = [name for name in node.input[1:3] if name in from_any or name in from_trained]
        if own:
            is_trained = any(name in from_trained for name in own)
        else:
            is_trained = everything or node.input[0] in from_trained
        if not is_trained:
            untrained.add(node.output[0])
    return untrained


def normalization_of_vectors(model: onnx.ModelProto, untrained: Collection[str]) -> str:
    """Return the output of a batch normalization that has one value per channel and sample; "" if none has.

    With a single sample, its variance is 0, and so are its results. Nodes in `untrained` are left out.
    """
    values = {v.name: v.type.tensor_type for v in (*model.graph.input, *model.graph.value_info)}
    batches = {v.type.tensor_type.shape.dim[0].dim_param for v in model.graph.input if _rank(v)}
    for node in _normalizations(model):
        dims = values[node.input[0]].shape.dim if node.input[0] in values else []
        if node.output[0] in untrained or len(dims) < 2:
            continue
        if dims[0].dim_param in batches - {""} and all(dim.dim_value == 1 for dim in dims[2:]):
            return node.output[0]
    return ""


def _rank(value: onnx.ValueInfoProto) -> int:
    return len(value.type.tensor_type.shape.dim)


def _dependent(model: onnx.ModelProto, names: set[str]) -> set[str]:
    """Return these values, and those that depend on them."""
    found = set(names)

    def visit(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            inner = list(subgraphs(node))
            before = len(found)
            for each in inner:
                visit(each)
            # What a subgraph reads counts for all of its node's results.
            if len(found) > before or any(name in found for name in dependencies(node)):
                found.update(node.output)

    visit(model.graph)
    return found


def separate_statistics(
    model: onnx.ModelProto, names: Collection[str]
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Return a model in which no initializer of these names is both a running statistic and something else.

    Exporters merge equal tensors, and before a training all means and biases are 0, and all variances and
    scales 1. They would be trained and overwritten with statistics at the same time. The second result
    maps the initializers that were added to those that they copy; without any, the model is returned as it
    is.
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


def warn_of_merged(model: onnx.ModelProto, trained: Collection[str]) -> None:
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
            f"{', '.join(merged)}, whose elements are all equal: the exporter has probably merged separate "
            f"parameters, which are now trained as one. With PyTorch, {cure(origins)}"
        )
    if text:
        warnings.warn(text, ParameterWarning, stacklevel=outside())


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
