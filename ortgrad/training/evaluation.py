"""The evaluation mode of operators that behave differently in training: what is handed out for inference."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import onnx
from onnx import helper

from ortgrad.graph.protos import all_graphs, all_nodes, copy_of, keep, opset_of, replace, subgraphs
from ortgrad.operators.declaration import DOMAIN

# Before this opset, Dropout and BatchNormalization have an attribute `is_test`.
_FIRST_WITHOUT_IS_TEST = 7


def in_evaluation(source: onnx.ModelProto, *, only: Collection[str] | None = None) -> onnx.ModelProto:
    """Return a copy of the model in which BatchNormalization and Dropout are in evaluation mode.

    That includes subgraphs and functions. `only` are the outputs of the nodes that are switched (default:
    all).
    """
    model = copy_of(source)
    _switch(model, (), only)
    return model


def for_inference(model: onnx.ModelProto) -> None:
    """Switch a model to evaluation mode, in place.

    A mode of Dropout that is an input of the model stays: the user of the model chooses it in every run.
    """
    given = {tensor.name for tensor in model.graph.initializer}
    _switch(model, {value.name for value in model.graph.input} - given, None)


def _switch(model: onnx.ModelProto, modes: Collection[str], only: Collection[str] | None) -> None:
    """Switch nodes to evaluation mode; a Dropout whose mode is one of the values `modes` keeps it."""
    old = opset_of(model) < _FIRST_WITHOUT_IS_TEST
    # Inner graphs first: nodes of outer ones are copied together with the graphs in them.
    for graph in reversed(list(all_graphs(model.graph))):
        _evaluate(graph.node, {value.name for value in graph.output}, modes, only, old)
    for function in model.functions:
        old = opset_of(function) < _FIRST_WITHOUT_IS_TEST
        inner = [graph for node in all_nodes(function.node) for graph in subgraphs(node)]
        for graph in reversed(inner):
            _evaluate(graph.node, {value.name for value in graph.output}, (), only, old)
        _evaluate(function.node, set(function.output), (), only, old)


def _evaluate(
    nodes: Any, outputs: set[str], modes: Collection[str], only: Collection[str] | None, old: bool
) -> None:
    """Switch the nodes of one graph to evaluation mode; `outputs` are the outputs of the graph."""
    read = outputs | {name for node in all_nodes(nodes) for name in node.input}
    read |= {v.name for node in all_nodes(nodes) for graph in subgraphs(node) for v in graph.output}
    after: dict[int, list[onnx.NodeProto]] = {}
    for place, node in enumerate(nodes):
        if (node.domain, node.op_type) == (DOMAIN, "BitmaskDropout"):
            if len(node.input) > 2 and node.input[2] not in modes and only is None:
                del node.input[2:]
            continue
        if node.domain not in ("", "ai.onnx") or node.op_type not in ("Dropout", "BatchNormalization"):
            continue
        if only is not None and node.output[0] not in only:
            continue
        if old:
            _set(node, "is_test", 1)
        if node.op_type == "Dropout":
            if len(node.input) > 2 and node.input[2] not in modes:
                node.input[2] = ""  # as 1.19.2 leaves it out
            continue
        if any(attribute.name == "training_mode" for attribute in node.attribute):
            _set(node, "training_mode", 0)
        # Further outputs exist only in training: the running statistics and, before opset 14, the batch's.
        statistics = zip(node.output[1:], (node.input[3], node.input[4]) * 2, strict=False)
        copies = [helper.make_node("Identity", [source], [new]) for new, source in statistics if new in read]
        if copies:
            after[place] = copies
        del node.output[1:]
    if after:
        replace(nodes, [made for i, node in enumerate(nodes) for made in (node, *after.get(i, ()))])


def _set(node: onnx.NodeProto, name: str, value: int) -> None:
    """Set an attribute, also one that is a reference to an attribute of a function."""
    keep(node.attribute, lambda attribute: attribute.name != name)
    node.attribute.append(helper.make_attribute(name, value))
