"""The model for inference: the evaluation model with trained parameters, reduced to chosen outputs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from ortgrad.errors import ModelError, TrainingError, TrainingModelError
from ortgrad.graph.loading import LARGEST_MESSAGE, load_model
from ortgrad.graph.protos import all_nodes, copy_of, dependencies, keep, replace
from ortgrad.graph.tolerated import evaluated
from ortgrad.training.evaluation import for_inference
from ortgrad.training.weights import save_with_initializers


def save_inference_model(
    source: Path,
    parameters: Mapping[str, np.ndarray],
    outputs: Sequence[str],
    path: str | os.PathLike[str],
) -> None:
    """Write the model in `source` with these values of its inputs, reduced to these outputs."""
    try:
        model = copy_of(evaluated(load_model(source)))
    except ModelError as error:
        raise TrainingModelError(f"the evaluation model cannot be used: {error}") from error
    for_inference(model)
    _reduce_to(model, outputs)
    used = _used(model.graph)
    fed = [value for value in model.graph.input if value.name in used and value.name not in parameters]
    arrays = {
        v.name: parameters[v.name] for v in model.graph.input if v.name in parameters and v.name in used
    }
    replace(model.graph.input, fed)
    save_with_initializers(model, arrays, Path(path))


def _reduce_to(model: onnx.ModelProto, outputs: Sequence[str]) -> None:
    """Make these values the outputs of a model, and remove what they do not depend on."""
    graph = model.graph
    if not outputs:
        raise TrainingError("Expected a non empty vector of graph output names. Got an empty vector.")
    known = _value_infos(model)
    produced = {name for node in graph.node for name in node.output} | {v.name for v in graph.input}
    for name in outputs:
        if name not in produced or not name:
            raise TrainingError(
                f"Expected graph output for inference graph {name} could not be found in the model."
            )
    needed, kept = set(outputs), []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(dependencies(node))
    replace(graph.node, reversed(kept))
    infos = [known.get(name) or onnx.ValueInfoProto(name=name) for name in dict.fromkeys(outputs)]
    replace(graph.output, infos)
    keep(graph.initializer, lambda tensor: tensor.name in needed)
    keep(graph.value_info, lambda value: value.name in needed and value.name not in outputs)
    _drop_unused_parts(model)


def _drop_unused_parts(model: onnx.ModelProto) -> None:
    """Remove functions and imports that no node uses any more."""
    called = {(node.domain, node.op_type) for node in all_nodes(model.graph.node)}
    while True:
        inner = {
            (node.domain, node.op_type)
            for function in model.functions
            if (function.domain, function.name) in called
            for node in all_nodes(function.node)
        }
        if inner <= called:
            break
        called |= inner
    keep(model.functions, lambda function: (function.domain, function.name) in called)
    domains = {domain for domain, _ in called} | {""}
    if "ai.onnx" in domains:
        domains.add("")
    keep(model.opset_import, lambda opset: opset.domain in domains)


def _used(graph: onnx.GraphProto) -> set[str]:
    read = {name for node in graph.node for name in dependencies(node)}
    return read | {value.name for value in graph.output}


def _value_infos(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """Return what is known about the types of all values."""
    graph = model.graph
    values = [*graph.value_info, *graph.input, *graph.output]
    if model.ByteSize() < LARGEST_MESSAGE:
        try:
            inferred = onnx.shape_inference.infer_shapes(model).graph
        except (RuntimeError, ValueError, onnx.shape_inference.InferenceError):
            pass  # then the types are those that the model declares
        else:
            values = [*inferred.value_info, *values]
    return {value.name: copy_of(value) for value in values}
